"""Attention kernels for Hopper and Blackwell, written in the CuTe Python DSL.

Importing the package loads neither the compiler nor a kernel: every public name
is resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .launch import emulated, warmup
    from .ops.lightning import lightning_attn_decode

# public name -> module that defines it
_EXPORTS = {
    "emulated": "cute_attn.launch",
    "lightning_attn_decode": "cute_attn.ops.lightning",
    "warmup": "cute_attn.launch",
}

__all__ = ["__version__", "emulated", "lightning_attn_decode", "warmup"]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # later accesses do not come through here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
