"""Dtypes and head dimensions that have KDA kernels, for callers that choose between backends."""

from __future__ import annotations

from ...kernels.kda.chunk import spec as chunk
from ...kernels.kda.step import spec as step

CHUNK = chunk.CHUNK
DTYPES = chunk.DTYPES
HEAD_DIMS = {"K": chunk.HEAD_DIMS, "V": chunk.HEAD_DIMS_V}
GATE_DTYPES, BETA_DTYPES = chunk.GATE_DTYPES, chunk.BETA_DTYPES

# Limits of the operators that work token by token.
STEP_DTYPES = step.DTYPES
STEP_HEAD_DIMS = {"K": step.HEAD_DIMS, "V": step.HEAD_DIMS}
STEP_STATE_DTYPES = step.STATE_DTYPES
