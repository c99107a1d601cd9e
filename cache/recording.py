"""Records the kernels that a process uses in a spec file, which `build` and `warmup` take."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import jit, settings
from .errors import CacheError
from .key import KernelDef
from .log import warn_once
from .specfile import kernel_table, parse
from .wire import NotPortable


def record(path: str | os.PathLike[str] | None) -> None:
    """Record every kernel that this process has used or will use in a spec file.

    The file gets a `[[kernel]]` table for each kernel that is not in it yet, when the kernel is
    first loaded. What is in the file stays, so that several runs, or the ranks of one, may share a
    file: `python -m cute_attn.cache build` and `cute_attn.warmup` take it like one written by hand.
    `CUTE_ATTN_RECORD` in the environment does the same. A process records in one file at a time,
    the one given last. Kernels that run in the emulator are not recorded.

    Args:
        path: of the file, which is created if need be; None stops recording, except to the file
            that `CUTE_ATTN_RECORD` names.

    Raises:
        CacheError: the file cannot be written, or is not a spec file.
        TypeError: `path` is no path.
    """
    if path is None:
        jit.record_to(None)
        return
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is {path!r}, must be a str, a path or None")
    file = settings.absolute(os.fspath(path))
    before = jit.record_to(file)  # first: another thread may be loading a kernel
    try:
        add(file, jit.used())
    except CacheError:
        jit.record_to(before)
        raise


def add(path: Path, used: Iterable[tuple[KernelDef, Any, str]]) -> None:
    """Add the kernels to the file that are not in it yet. Raises CacheError as `record`."""
    try:
        with path.open("ab+", buffering=0) as file:
            _lock(file.fileno())
            file.seek(0)
            text = file.read().decode()
            known = parse(text, path)
            new = ""
            for kernel, spec, arch in used:
                try:
                    table = kernel_table(kernel, spec, arch)
                except NotPortable as error:
                    warn_once(f"record {error}", "not recorded, nobody can import it: %s", error)
                    continue
                (request,) = parse(table, path)
                if request not in known:
                    known.append(request)
                    new += "\n" + table if text or new else table
            if new:
                parse(text + new, path)  # TOML cannot add a table to an inline array
                _append(file.fileno(), new.encode())
    except (OSError, UnicodeDecodeError) as error:
        raise CacheError(f"cannot record kernels in {path}: {error}") from error


def _append(fd: int, data: bytes) -> None:
    """Append all of `data`, or nothing if that fails: half a table would spoil the whole file."""
    size = os.fstat(fd).st_size
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        os.ftruncate(fd, size)
        raise


def _lock(fd: int) -> None:
    """Wait until no other process writes to the file."""
    with contextlib.suppress(OSError):  # without locks, a kernel is listed twice at worst
        fcntl.flock(fd, fcntl.LOCK_EX)
