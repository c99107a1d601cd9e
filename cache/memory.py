"""The functions that this process has loaded: `jit` adds and finds them, `recording` lists them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from .key import KernelDef, KeyDescription

Function = Callable[..., Any]

# Each function is stored with the specialisation object that it was loaded for. Equal objects may
# mean different kernels: 1, 1.0 and True are equal, and fields may have compare=False.
functions: dict[tuple[KernelDef, Any, str], tuple[Any, Function]] = {}
# A second table finds functions by class and canonical text of the specialisation, which differ in
# all these cases.
functions_by_text: dict[tuple[KernelDef, type, tuple[tuple[str, str], ...], str], Function] = {}
functions_by_digest: dict[str, tuple[KeyDescription, Function]] = {}
_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """Replace the lock that a thread of the parent may have held."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def remember(
    kernel: KernelDef, spec: Any, arch: str, key: KeyDescription, function: Function
) -> None:
    """Add a function; `functions` keeps the function of an earlier, equal specialisation."""
    with _lock:
        functions_by_digest[key.digest] = (key, function)
        functions_by_text[kernel, type(spec), key.spec, arch] = function
        functions.setdefault((kernel, spec, arch), (spec, function))


def used() -> list[tuple[KernelDef, Any, str]]:
    """The kernels in memory: (kernel, specialisation, arch)."""
    with _lock:
        return [(kernel, spec, arch) for (kernel, _, arch), (spec, _) in functions.items()]


def forget() -> None:
    """Drop all functions; the functions that callers hold remain valid."""
    with _lock:
        functions.clear()
        functions_by_text.clear()
        functions_by_digest.clear()
