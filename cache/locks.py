"""Advisory locks that end with the process that holds them.

All locks are `flock` locks, because the system (on NFS, the lock server) releases such a lock when
its holder dies. A lock that consists of a file's existence would outlive its holder, so such locks
are no fallback. If flock is not supported, the state is UNSUPPORTED and the cache works without
locks: publication is atomic, so at worst a kernel is compiled twice.

A forked child would share its parent's locks and hold them after the parent's death, so the child
closes the locks' files at once.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import threading
from collections.abc import Iterator

_HELD_ELSEWHERE = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
_NOT_SUPPORTED = {
    errno.ENOLCK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EINVAL,
    errno.EBADF,  # NFS: an exclusive lock on a file that is open for reading only
    errno.EIO,
}


# No other thread can fork while a thread holds this lock.
no_fork = threading.RLock()


class _OwnFile:
    """An open file whose exclusive lock this process may hold."""

    def __init__(self, fd: int) -> None:
        self.fd = fd


_own_files: set[_OwnFile] = set()


def _after_fork_in_child() -> None:
    for file in _own_files:
        os.close(file.fd)
    _own_files.clear()
    no_fork.release()


os.register_at_fork(
    before=no_fork.acquire,
    after_in_parent=no_fork.release,
    after_in_child=_after_fork_in_child,
)


class LockState(enum.Enum):
    """The result of trying to take a lock."""

    TAKEN = "taken"
    HELD_ELSEWHERE = "held elsewhere"
    UNSUPPORTED = "unsupported"


def try_lock(fd: int, *, shared: bool = False) -> LockState:
    """Try to take a lock on an open file without waiting. Closing the file releases the lock."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_ELSEWHERE:
            return LockState.HELD_ELSEWHERE
        if error.errno in _NOT_SUPPORTED:
            return LockState.UNSUPPORTED
        raise
    return LockState.TAKEN


@contextlib.contextmanager
def try_lock_file(path: os.PathLike[str] | str, dir_fd: int | None = None) -> Iterator[LockState]:
    """Try to take the exclusive lock of the file `path`; a missing file is created.

    A relative path is looked up in the directory `dir_fd`, if given.

    Only the holder of the lock may delete the file. So a lock on a file that is no longer at `path`
    is worthless. Then the state is HELD_ELSEWHERE, and the caller should try again.
    """
    with own_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd) as fd:
        state = try_lock(fd)
        if state is LockState.TAKEN and not is_at(fd, path, dir_fd):
            state = LockState.HELD_ELSEWHERE
        yield state


@contextlib.contextmanager
def own_file(
    path: os.PathLike[str] | str, flags: int, mode: int, dir_fd: int | None = None
) -> Iterator[int]:
    """A descriptor of a file to lock. A forked child closes its copy at once."""
    with no_fork:
        fd = os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)
        file = _OwnFile(fd)
        _own_files.add(file)
    try:
        yield fd
    finally:
        with no_fork:
            if file in _own_files:  # a forked child has closed it already
                _own_files.remove(file)
                os.close(fd)


def is_at(fd: int, path: os.PathLike[str] | str, dir_fd: int | None = None) -> bool:
    """Whether `path` still names the open file."""
    opened = os.fstat(fd)
    try:
        named = os.lstat(path, dir_fd=dir_fd)
    except FileNotFoundError:
        return False
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)
