"""Dtypes and head dimensions that have KDA kernels, for callers that choose between backends."""

from __future__ import annotations

import torch

from ... import launch
from ...kernels.common.spec import VECTOR_BYTES as VECTOR_BYTES
from ...kernels.delta.chunk import spec as chunk
from ...kernels.delta.chunk.heuristics import gradients_config, head_gradients_config
from ...kernels.delta.step import spec as step
from .arguments import INITIAL_STATE_DTYPES as INITIAL_STATE_DTYPES
from .arguments import STATE_DTYPES as STATE_DTYPES

CHUNK = chunk.CHUNK
DTYPES = chunk.DTYPES
HEAD_DIMS = {"K": chunk.HEAD_DIMS, "V": chunk.HEAD_DIMS_V}
GATE_DTYPES, BETA_DTYPES = chunk.GATE_DTYPES, chunk.BETA_DTYPES

# Limits of the operators that work token by token.
STEP_DTYPES = step.DTYPES
STEP_HEAD_DIMS = {"K": step.HEAD_DIMS, "V": step.HEAD_DIMS_V}
STEP_STATE_DTYPES = step.STATE_DTYPES
STEP_PARAMETER_DTYPES = step.PARAMETER_DTYPES
CONV_TAPS = step.CONV_TAPS


def why_no_gradients(
    device: torch.device, *, head_dim_k: int, head_dim_v: int, decays: str = "channel"
) -> str | None:
    """Why `chunk_kda`, or with decays="head" `chunk_gated_delta_rule`, has no backward on the
    device; None if it has one."""
    sizes = {"head_dim_k": head_dim_k, "head_dim_v": head_dim_v}
    arch = launch.arch_for(device)
    try:
        if decays == "head":
            head_gradients_config(arch=arch, **sizes, grouped=False)
        else:
            gradients_config(arch=arch, **sizes)
    except NotImplementedError as error:
        return str(error)
    return None
