"""Kimi Delta Attention: the operators, and the stages of `chunk_kda`."""

from .chunk import chunk_kda
from .chunk_plan import plan_chunk_kda, plan_chunk_kda_backward
from .decode import kda_decode, plan_kda_decode
from .recurrent import fused_recurrent_kda, plan_fused_recurrent_kda
from .stages import (
    KdaChunkStates,
    KdaIntra,
    KdaRecomputed,
    kda_chunk_delta_h,
    kda_chunk_intra,
    kda_chunk_output,
    kda_gate_cumsum,
    kda_recompute_w_u,
)
from .stages_backward import (
    KdaGateGradients,
    KdaIntraGradients,
    KdaOutputGradients,
    KdaRecomputedGradients,
    KdaStateGradients,
    kda_chunk_delta_h_backward,
    kda_chunk_intra_backward,
    kda_chunk_output_backward,
    kda_gate_cumsum_backward,
    kda_recompute_w_u_backward,
)

__all__ = [
    "KdaChunkStates",
    "KdaGateGradients",
    "KdaIntra",
    "KdaIntraGradients",
    "KdaOutputGradients",
    "KdaRecomputed",
    "KdaRecomputedGradients",
    "KdaStateGradients",
    "chunk_kda",
    "fused_recurrent_kda",
    "kda_chunk_delta_h",
    "kda_chunk_delta_h_backward",
    "kda_chunk_intra",
    "kda_chunk_intra_backward",
    "kda_chunk_output",
    "kda_chunk_output_backward",
    "kda_decode",
    "kda_gate_cumsum",
    "kda_gate_cumsum_backward",
    "kda_recompute_w_u",
    "kda_recompute_w_u_backward",
    "plan_chunk_kda",
    "plan_chunk_kda_backward",
    "plan_fused_recurrent_kda",
    "plan_kda_decode",
]
