"""Kimi Delta Attention: the operators, and the stages of the chunked one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chunk import chunk_kda, plan_chunk_kda
    from .decode import kda_decode
    from .recurrent import fused_recurrent_kda
    from .stages import (
        kda_chunk_delta_h,
        kda_chunk_intra,
        kda_chunk_output,
        kda_gate_cumsum,
        kda_recompute_w_u,
    )

# public name -> the module of this package that defines it
_EXPORTS = {
    "chunk_kda": "chunk",
    "fused_recurrent_kda": "recurrent",
    "kda_chunk_delta_h": "stages",
    "kda_chunk_intra": "stages",
    "kda_chunk_output": "stages",
    "kda_decode": "decode",
    "kda_gate_cumsum": "stages",
    "kda_recompute_w_u": "stages",
    "plan_chunk_kda": "chunk",
}

__all__ = [
    "chunk_kda",
    "fused_recurrent_kda",
    "kda_chunk_delta_h",
    "kda_chunk_intra",
    "kda_chunk_output",
    "kda_decode",
    "kda_gate_cumsum",
    "kda_recompute_w_u",
    "plan_chunk_kda",
]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
