"""Records the kernels that a process uses in a spec file, which `build` and `warmup` take."""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import memory, settings
from .errors import CacheError
from .key import KernelDef
from .locks import LockState, own_file, try_lock
from .log import logger, warn_once
from .specfile import decoded, kernel_table, parse, request_of
from .wire import NotPortable

_Used = tuple[KernelDef, Any, str]

_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 10.0  # how long `record` and the process's end wait for the lock
_PATIENCE_OF_A_LOOK_UP_SECONDS = 2.0  # after which a later look-up records it

# Kernels not yet recorded, by file; and files for which the last attempt failed.
_pending: dict[Path, list[_Used]] = {}
_failing: set[Path] = set()
_pending_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _pending_lock
    _pending_lock = threading.Lock()
    _pending.clear()  # the parent records these kernels


os.register_at_fork(after_in_child=_after_fork_in_child)


def record(path: str | os.PathLike[str] | None) -> None:
    """Record every kernel that this process has used or will use in a spec file.

    When a kernel is first loaded, the file gets a `[[kernel]]` table, unless the file already has a
    table for the kernel. Existing tables stay, so that several runs, or the ranks of a run, may
    share a file. `python -m cute_attn.cache build` and `cute_attn.warmup` take the file like a
    hand-written spec file. `CUTE_ATTN_RECORD` in the environment does the same. A process records
    in one file at a time, the file given last. Kernels that run in the emulator are not recorded.

    If the file becomes unwritable, there is one warning; the kernels are recorded once the file is
    writable again.

    Args:
        path: path of the file, which is created if missing; None stops recording, except to the
            file that `CUTE_ATTN_RECORD` names.

    Raises:
        CacheError: the file cannot be written, is not a spec file, or another process has held its
            lock for 10 seconds.
        TypeError: `path` is neither a path nor None.
    """
    if path is None:
        settings.record_to(None)
        return
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is {path!r}, must be a str, a path or None")
    file = settings.absolute(os.fspath(path))
    before = settings.record_to(file)  # first: another thread may be loading a kernel
    try:
        add(file, memory.used())
    except CacheError:
        settings.record_to(before)
        raise


def record_use(path: Path, kernel: KernelDef, spec: Any, arch: str) -> None:
    """Record a kernel that a look-up has loaded, and earlier kernels that could not be recorded.

    Raises nothing. A failure gives a warning, and the next kernel or the end of the process tries
    again.
    """
    with _pending_lock:
        _pending.setdefault(path, []).append((kernel, spec, arch))
    _record_pending(path, 0.0 if path in _failing else _PATIENCE_OF_A_LOOK_UP_SECONDS)


def _record_pending(path: Path, patience: float) -> CacheError | None:
    with _pending_lock:
        waiting = list(_pending[path])
    try:
        add(path, waiting, patience)
    except CacheError as error:
        _failing.add(path)
        warn_once(
            f"record {path}",
            "%s. Until that is mended nothing is recorded there; this process keeps its kernels, "
            "and tries again with each new one and at its end",
            error,
        )
        return error
    _failing.discard(path)
    recorded = set(map(id, waiting))
    with _pending_lock:  # other threads may have added kernels, or recorded these
        _pending[path] = [used for used in _pending[path] if id(used) not in recorded]
    return None


def _at_exit() -> None:
    for path, waiting in list(_pending.items()):
        if waiting:
            error = _record_pending(path, _PATIENCE_SECONDS)
            if error is not None:
                logger.warning("%d kernels are not recorded: %s", len(waiting), error)


atexit.register(_at_exit)


def add(path: Path, used: Iterable[_Used], patience: float = _PATIENCE_SECONDS) -> None:
    """Add to the file the kernels that it does not have yet.

    Args:
        path: path of the file.
        used: the kernels: (kernel, specialisation, arch).
        patience: seconds to wait for the file's lock.

    Raises:
        CacheError: as `record`.
    """
    try:
        _check_regular(path)
        # Non-blocking, since a pipe may have replaced the file.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
        with own_file(path, flags, 0o666) as fd:
            _lock(fd, path, patience)
            with open(fd, "rb", closefd=False) as file:
                text = decoded(file, path)
            known = [request_of(table) for table in parse(text, path)]
            new = ""
            for kernel, spec, arch in used:
                try:
                    table = kernel_table(kernel, spec, arch)
                except NotPortable as error:
                    warn_once(f"record {error}", "not recorded, nobody can import it: %s", error)
                    continue
                request = request_of(*parse(table, path))
                if request not in known:
                    known.append(request)
                    new += "\n" + table if text or new else table
            if new:
                parse(text + new, path)  # TOML cannot add a table to an inline array
                _append(fd, new.encode())
    except OSError as error:
        raise CacheError(f"cannot record kernels in {path}: {error}") from error


def _check_regular(path: Path) -> None:
    """Raise CacheError for a device, a pipe or a directory, because some of these can be read
    without end."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise CacheError(
                f"cannot record kernels in {path}: it is no regular file ({stat.filemode(mode)})"
            )


def _append(fd: int, data: bytes) -> None:
    """Append all of `data`, or on failure nothing: half a table would spoil the whole file."""
    size = os.fstat(fd).st_size
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        os.ftruncate(fd, size)
        raise


def _lock(fd: int, path: Path, patience: float) -> None:
    """Lock the file, unless locks do not work. Without the lock, a kernel is listed twice at worst.

    Raises CacheError if another process holds the lock for `patience` seconds.
    """
    end = time.monotonic() + patience
    while try_lock(fd) is LockState.HELD_ELSEWHERE:
        if time.monotonic() >= end:
            raise CacheError(
                f"cannot record kernels in {path}: another process has locked the file, and this "
                f"one has waited {patience:.0f} s"
            )
        time.sleep(_POLL_SECONDS)
