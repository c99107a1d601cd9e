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

__all__ = [
    "KdaChunkStates",
    "KdaIntra",
    "KdaRecomputed",
    "chunk_kda",
    "fused_recurrent_kda",
    "kda_chunk_delta_h",
    "kda_chunk_intra",
    "kda_chunk_output",
    "kda_decode",
    "kda_gate_cumsum",
    "kda_recompute_w_u",
    "plan_chunk_kda",
    "plan_chunk_kda_backward",
    "plan_fused_recurrent_kda",
    "plan_kda_decode",
]
