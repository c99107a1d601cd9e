"""Runs operators on CPU tensors in an emulator, within `emulated()` or by CUTE_ATTN_EMULATE=1."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from . import cache
from .cache import KernelDef
from .cache.arch import arch_of_environment, check_arch
from .settings import on_reload, settings

if TYPE_CHECKING:
    from .emulator import Emulator

DEFAULT_EMULATED_ARCH = "sm_90a"


class Emulation:
    """An emulator that runs operators on CPU tensors, and the architecture that it emulates."""

    def __init__(self, emulator: Emulator, arch: str) -> None:
        self.emulator = emulator
        self.arch = arch
        self._functions: dict[tuple[KernelDef, Any], Callable[..., Any]] = {}
        self._loading = threading.Lock()

    def function(self, kernel: KernelDef, spec: Any) -> Callable[..., Any]:
        """A kernel's function in the emulator, made from the cache's object file and PTX."""
        key = kernel, spec
        if key not in self._functions:
            with self._loading:
                if key not in self._functions:
                    entry = cache.compile(kernel, spec, arch=self.arch)
                    self._functions[key] = self.emulator.load(entry)
        return self._functions[key]


_emulation: contextvars.ContextVar[Emulation | None] = contextvars.ContextVar(
    "cute_attn_emulation", default=None
)


@functools.cache
def _emulation_of_environment() -> Emulation | None:
    if not settings().emulate:
        return None
    from .emulator import Emulator

    return Emulation(Emulator(), _arch_to_emulate())


on_reload(_emulation_of_environment.cache_clear)


def _arch_to_emulate() -> str:
    return arch_of_environment() or DEFAULT_EMULATED_ARCH


def current_emulation() -> Emulation | None:
    """The emulation for CPU tensors: of `emulated()`, else of CUTE_ATTN_EMULATE=1, else None."""
    return _emulation.get() or _emulation_of_environment()


@contextlib.contextmanager
def emulated(arch: str | None = None, emulator: Emulator | None = None) -> Iterator[Emulator]:
    """Context manager in which operators take CPU tensors and run their kernels in an emulator.

        with cute_attn.emulated("sm_100a") as emulator:
            o = cute_attn.lightning_attn_decode(q, k, v, state, decay)
        print(emulator.report)

    `CUTE_ATTN_EMULATE=1` does the same for a whole process. The context manager is in force only in
    the thread or task that enters it. A thread started inside it is not affected, unless the thread
    runs in a copy of the context, as with `asyncio.to_thread`:

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(function,)).start()

    Args:
        arch: the architecture: "sm_80", "sm_90a", "sm_100a" ...; None is `CUTE_ATTN_ARCH`, else
            "sm_90a".
        emulator: the emulator; None makes one with every check on.

    Raises:
        TypeError: arch is not a string, or emulator not an Emulator.
        ValueError: arch is not of the form "sm_90a".
        NotImplementedError: arch is older than "sm_80".
        cute_attn.emulator.EmulatorUnavailable: no C compiler to build the emulator is installed, or
            no pyelftools.
    """
    from .emulator import Emulator

    chosen = _arch_to_emulate() if arch is None else check_arch(arch)
    if emulator is None:
        emulator = Emulator()
    elif not isinstance(emulator, Emulator):
        raise TypeError(f"emulator must be an Emulator, got {type(emulator).__name__}")
    token = _emulation.set(Emulation(emulator, chosen))
    try:
        yield emulator
    finally:
        _emulation.reset(token)
