"""A cache of compiled CuTe DSL kernels. The cache contains no code of a particular kernel.

A `KernelDef` names a kernel, and a frozen dataclass specialises it; `get` returns the compiled
function. A hit needs neither the compiler nor a linker, only the DSL's runtime library.
See `python -m cute_attn.cache --help` for the command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .arch import current_arch
from .entry import Built, Entry
from .errors import CacheError, CompileError, FrozenCacheMiss
from .jit import (
    Stats,
    clear_memory,
    compile,  # noqa: A004 (cache.compile is what it does)
    freeze,
    get,
    is_frozen,
    reset_stats,
    stats,
    unfreeze,
)
from .key import KernelDef, KeyDescription, describe, spec
from .log import configure_from_environment

if TYPE_CHECKING:
    from .plans import planner
    from .recording import record
    from .specfile import plan_file
    from .warm import WarmupReport, warmup

# name -> module, imported on first use because a hit does not need it
_LAZY = {
    "WarmupReport": "warm",
    "plan_file": "specfile",
    "planner": "plans",
    "record": "recording",
    "warmup": "warm",
}

__all__ = [
    "Built",
    "CacheError",
    "CompileError",
    "Entry",
    "FrozenCacheMiss",
    "KernelDef",
    "KeyDescription",
    "Stats",
    "WarmupReport",
    "clear_memory",
    "compile",
    "current_arch",
    "describe",
    "freeze",
    "get",
    "is_frozen",
    "plan_file",
    "planner",
    "record",
    "reset_stats",
    "spec",
    "stats",
    "unfreeze",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


configure_from_environment()
