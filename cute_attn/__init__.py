"""Attention kernels for Hopper and Blackwell, written in the CuTe Python DSL.

Importing the package loads neither the compiler nor a kernel: every public name
is resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .emulation import emulated
    from .launch import warmup
    from .ops import register_operators
    from .ops.attention import flash_attn_combine, flash_attn_func, flash_attn_varlen_func
    from .ops.kda import chunk_kda, fused_recurrent_kda, kda_decode
    from .ops.lightning import lightning_attn_decode
    from .settings import reload_settings

# public name -> module that defines it
_EXPORTS = {
    "chunk_kda": "cute_attn.ops.kda",
    "emulated": "cute_attn.emulation",
    "flash_attn_combine": "cute_attn.ops.attention",
    "flash_attn_func": "cute_attn.ops.attention",
    "flash_attn_varlen_func": "cute_attn.ops.attention",
    "fused_recurrent_kda": "cute_attn.ops.kda",
    "kda_decode": "cute_attn.ops.kda",
    "lightning_attn_decode": "cute_attn.ops.lightning",
    "register_operators": "cute_attn.ops",
    "reload_settings": "cute_attn.settings",
    "warmup": "cute_attn.launch",
}

__all__ = [
    "__version__",
    "chunk_kda",
    "emulated",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "fused_recurrent_kda",
    "kda_decode",
    "lightning_attn_decode",
    "register_operators",
    "reload_settings",
    "warmup",
]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # later accesses bypass __getattr__
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
