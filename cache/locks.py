"""Advisory locks that end with the process that holds them.

`flock` and nothing else: the kernel (on NFS, the lock server) lets go of a lock when its holder
dies, whatever kills it. A lock made of a file's existence would outlive its holder; that is why
a library that falls back to such locks where flock is missing is of no use here. Where flock is not
supported the answer is UNSUPPORTED, and the cache does without: publication is atomic anyway,
so the price is a kernel compiled twice.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

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


class LockState(enum.Enum):
    """What came of trying to take a lock."""

    TAKEN = "taken"
    HELD_ELSEWHERE = "held elsewhere"
    UNSUPPORTED = "unsupported"


def try_lock(fd: int, *, shared: bool = False) -> LockState:
    """Take a lock on an open file without waiting. Closing the file gives it back."""
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
def try_lock_file(path: os.PathLike[str]) -> Iterator[LockState]:
    """Take the exclusive lock of the file `path`, which is created if need be.

    The file may be deleted only by who holds its lock: then whoever takes the lock of a file that
    is no longer at `path` holds nothing, and is told HELD_ELSEWHERE, which means try again.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        state = try_lock(fd)
        if state is LockState.TAKEN and not is_at(fd, path):
            state = LockState.HELD_ELSEWHERE
        yield state
    finally:
        os.close(fd)


def is_at(fd: int, path: os.PathLike[str]) -> bool:
    """Whether `path` still names the open file."""
    opened = os.fstat(fd)
    try:
        named = Path(path).lstat()
    except FileNotFoundError:
        return False
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)
