"""A cache of compiled CuTe DSL kernels: bytes, keys, locks and loading. It knows no kernel.

A kernel is named by a :class:`KernelDef` and specialised by a frozen dataclass; :func:`get` returns
its compiled function. A hit needs neither the compiler nor a linker, only the DSL's runtime library.
See ``python -m cute_attn.cache --help`` for the command line.
"""

from __future__ import annotations

from .arch import current_arch
from .entry import Built, Entry
from .errors import CacheError, CompileError, FrozenCacheMiss
from .jit import (
    Stats,
    clear_memory,
    compile,
    freeze,
    get,
    is_frozen,
    reset_stats,
    stats,
    unfreeze,
)
from .key import KernelDef, KeyDescription, describe, spec
from .log import configure_from_environment

__all__ = [
    "Built",
    "CacheError",
    "CompileError",
    "Entry",
    "FrozenCacheMiss",
    "KernelDef",
    "KeyDescription",
    "Stats",
    "clear_memory",
    "compile",
    "current_arch",
    "describe",
    "freeze",
    "get",
    "is_frozen",
    "reset_stats",
    "spec",
    "stats",
    "unfreeze",
]

configure_from_environment()
