"""The process of an emulated program.

Its stand-ins in C replace the allocator and have to be loaded before all other libraries, so that
the process starts anew. The compiler is told by its environment to keep what the emulator needs.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .. import build
from .options import Options

_RUNTIME = Path(__file__).parents[1] / "runtime"
_SOURCES = ("cuda.c", "process.c", "memory.c", "dlpack.c")
_PRELOAD = "LD_PRELOAD"
_EMULATED = "_CUTE_ATTN_EMULATED_PROCESS"  # number of the process that was started anew


@functools.cache
def library() -> Path:
    """The stand-ins in C, as one shared library; built if not in the cache.

    Raises:
        EmulatorUnavailable: there is no C compiler.
    """
    return build.shared_library("process.so", [_RUNTIME / name for name in _SOURCES])


def is_prepared() -> bool:
    """Whether this process, or a process that has started it, was started by `restart`."""
    return str(library()) in os.environ.get(_PRELOAD, "").split(":")


def is_emulated() -> bool:
    """Whether `restart` has started this process itself, and not a process that has started it."""
    return is_prepared() and os.environ.get(_EMULATED) == str(os.getpid())


def restart(command: Sequence[str] | None = None) -> None:
    """Start this process anew, with the stand-ins loaded first.

    Args:
        command: the command line; None is the command line of this process.

    Raises:
        EmulatorUnavailable: there is no C compiler.
    """
    before = [x for x in os.environ.get(_PRELOAD, "").split(":") if x and x != str(library())]
    preload = ":".join([str(library()), *before])
    # Tensors are small: torch's threads would wait for one another most of the time.
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    environment = {**os.environ, _PRELOAD: preload, "OMP_NUM_THREADS": threads}
    environment[_EMULATED] = str(os.getpid())  # which execve keeps
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, list(command or sys.orig_argv), environment)


def set_compiler_environment(options: Options) -> None:
    """Tell the compiler, before its import, what to compile for, keep and link."""
    scratch = tempfile.mkdtemp(prefix="cute-attn-emulated-")
    atexit.register(_remove_if_of, os.getpid(), scratch)
    values = {
        "LIBS": ":".join([str(library()), *_compiler_libraries()]),
        "ARCH": options.arch,
        "DUMP_DIR": scratch,
        "DISABLE_FILE_CACHING": "1",  # a file of the compiler's own cache has no PTX
        "LINEINFO": os.environ.get("CUTE_DSL_LINEINFO", "1"),
    }
    for prefix in ("CUTE_DSL", "CUTE_EXPERIMENTAL_DSL"):
        os.environ.update({f"{prefix}_{name}": value for name, value in values.items()})


def _remove_if_of(process: int, scratch: str) -> None:
    if os.getpid() == process:  # a forked child must not remove the parent's
        shutil.rmtree(scratch, ignore_errors=True)


def _compiler_libraries() -> list[str]:
    """The compiler's own runtime, for functions that need no device."""
    chosen = os.environ.get("CUTE_DSL_LIBS")
    if chosen:
        return [path for path in chosen.split(":") if path != str(library())]
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [sorted(Path(root).glob("cu*/lib/libcute_dsl_runtime.so")) for root in roots]
    return [str(paths[0]) for paths in found if paths]
