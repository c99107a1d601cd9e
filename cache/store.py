"""A directory of entries that withstands many processes, killed processes and wrong clocks.

Layout, below a root of mode 0700:

    v1/ab/abcd.../      an entry (see entry.py), named by its key's digest
    v1/locks/           a lock file for each key being compiled, and one for eviction
    v1/staging/         entries being written or removed, each with a lock file
    v1/quarantine/      damaged entries
    v1/ledger           the total size at the last measurement, and the sizes added since

An entry appears by one rename of a complete and synced directory, and disappears by one rename. So
no reader ever sees half an entry, not even on NFS. A killed process leaves files only in `staging`,
from which nothing is loaded; these files are removed when their lock is free.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .entry import META, USES, Built, Entry, open_entry
from .errors import CacheError, DamagedEntry, RefusedEntry
from .locks import LockState, try_lock, try_lock_file
from .log import logger, warn_once
from .ownership import Directory, open_directory
from .settings import LAYOUT

_LOCKS, _STAGING, _QUARANTINE, _LEDGER = "locks", "staging", "quarantine", "ledger"
_OWN_NAMES = (_LOCKS, _STAGING, _QUARANTINE)
_SHARD_NAME = re.compile("[0-9a-f]{2}")
_DIGEST = re.compile("[0-9a-f]{64}")
_LONGEST_SIGNATURE = 300  # bytes of a lock file: the holder's process id and host name
_EVICTION_LOCK = "evict.lock"
_SIZE_OF_A_PROBE = 2**20  # bytes of a trial write
_REMOVED = "removed"  # name of an entry in a staging directory that is being deleted

_POLL_SECONDS = 0.02
_SLOWEST_POLL_SECONDS = 0.25
_SILENT_WAIT_SECONDS = 10.0  # after which a warning names the lock's holder
_LONGEST_WAIT_SECONDS = 600.0  # after which a process compiles without the lock
_LONGEST_WAIT_TO_EVICT_SECONDS = 60.0
_TOLERATED_SKEW_SECONDS = 30 * 24 * 3600.0
_UNLOCKABLE_LEFTOVER_SECONDS = 24 * 3600.0  # without locks, leftovers are recognised by age

# The ledger is an estimate, because a process killed after publishing an entry does not record its
# size. So everything is measured again after this many entries.
_ENTRIES_BETWEEN_COUNTS = 64
_LARGEST_LEDGER = 64 * 2**10
# Eviction goes a little below the limit, so that a full cache is not measured for each new entry.
_HEADROOM = 1 / 32


class Evicted(NamedTuple):
    """Result of `Store.evict` or `Store.clear`.

    Attributes:
        entries: number of entries removed.
        bytes: bytes freed, including entries that other processes removed at the same time.
        in_use: number of entries that stay because a process has loaded them.
        remaining: bytes that the store takes afterwards.
        problems: a message for each file or directory that could not be removed.
    """

    entries: int = 0
    bytes: int = 0
    in_use: int = 0
    remaining: int = 0
    problems: tuple[str, ...] = ()


class Contents(NamedTuple):
    """Result of `Store.contents`.

    Attributes:
        digests: digests of all entries, sorted; the entries were not opened.
        problems: a message for each file or directory that cannot be read or is no part of a cache.
    """

    digests: tuple[str, ...]
    problems: tuple[str, ...]


class _Removal(enum.Enum):
    """The result of removing an entry."""

    REMOVED = "removed"
    GONE = "removed by another process"
    IN_USE = "loaded by a process"


class _Candidate(NamedTuple):
    """An entry that may be evicted. Candidates sort in the order of eviction."""

    last_use: float
    digest: str
    bytes: int


class Store:
    """The entries below one root directory.

    Every access, including deletion, goes through descriptors of checked directories: see
    `ownership`. So every method that touches the directory may raise RefusedEntry.

    Args:
        root: the directory, an absolute path; created when the first entry is published.
        read_only: whether the root is a prebuilt directory, which may belong to root and is not
            changed.
        public: whether every user may read the entries, as in a prebuilt directory.
    """

    def __init__(self, root: Path, *, read_only: bool = False, public: bool = False) -> None:
        self.root = root
        self._directory_mode, self._file_mode = (0o755, 0o644) if public else (0o700, 0o600)
        self.read_only = read_only
        self.public = public
        user = os.geteuid()
        self._owners = frozenset({user, 0}) if read_only else frozenset({user})
        self._base = root / LAYOUT
        self._have_locks: bool | None = None

    def entry_path(self, digest: str) -> Path:
        return self._base / digest[:2] / digest

    # -- reading

    def open(self, digest: str) -> Entry | None:
        """The entry of a key, or None if the store has no such entry.

        Raises DamagedEntry, RefusedEntry, or OSError if the directory cannot be read.
        """
        try:
            base = self._open_base()
        except (FileNotFoundError, NotADirectoryError):
            return None
        with base:
            try:
                with base.directory(digest[:2]) as shard:
                    return open_entry(shard, digest, lambda: self._open_entry_directory(digest))
            except FileNotFoundError:
                return None
            except NotADirectoryError as error:
                raise DamagedEntry(f"{self._base / digest[:2]} is not a directory") from error

    def _open_base(self) -> Directory:
        with open_directory(self.root, self._owners) as root:
            return root.directory(LAYOUT)

    def _open_entry_directory(self, digest: str) -> Directory:
        with self._open_base() as base, base.directory(digest[:2]) as shard:
            return shard.directory(digest)

    def contents(self) -> Contents:
        """List all entries, without opening them, and everything that is no part of a cache.

        Raises nothing.
        """
        digests: list[str] = []
        problems: list[str] = []

        with noting(problems), self._open_base() as base:
            for name in base.names():
                if _SHARD_NAME.fullmatch(name):
                    with noting(problems), base.directory(name) as shard:
                        for item in shard.names():
                            if _DIGEST.fullmatch(item):
                                digests.append(item)
                            else:
                                problems.append(f"{shard.path / item} is no part of a cache")
                elif name in _OWN_NAMES:
                    with noting(problems), base.directory(name):
                        pass
                elif name != _LEDGER:
                    problems.append(f"{base.path / name} is no part of a cache")
        return Contents(tuple(digests), tuple(problems))

    def digests(self) -> list[str]:
        """The digests of all entries."""
        return list(self.contents().digests)

    def entries(self) -> Iterator[Entry]:
        """Yield every entry that can be opened. An entry is closed when the next entry is
        requested."""
        for digest in self.digests():
            try:
                entry = self.open(digest)
            except (CacheError, OSError) as error:
                logger.debug("passed over: %s", error)
                continue
            if entry is not None:
                with contextlib.closing(entry):
                    yield entry

    # -- writing

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A temporary directory in `staging`, removed afterwards.

        The path, for this process and its children, leads through a descriptor, and so stays valid
        if a directory above is renamed.

        Raises OSError if the store cannot be written to, RefusedEntry if others can write to it.
        """
        with self._staging() as directory:
            yield directory.at("")

    @contextlib.contextmanager
    def _staging(self, base: Directory | None = None) -> Iterator[Directory]:
        with contextlib.ExitStack() as stack:
            parent = stack.enter_context(
                self._make_in(base, _STAGING) if base else self._make_directory(_STAGING)
            )
            while True:
                name = f"{os.getpid()}-{os.urandom(8).hex()}"
                attempt = contextlib.ExitStack()
                state = attempt.enter_context(self._lock_file(parent, f"{name}.lock"))
                if state is not LockState.HELD_ELSEWHERE:
                    break
                attempt.close()  # a sweep holds the lock file and will delete the file
            stack.push(attempt)
            # Locked before the directory exists, because a directory without a held lock counts as
            # a leftover.
            directory = stack.enter_context(parent.make(name, 0o700))
            try:
                yield directory
            finally:
                with contextlib.suppress(OSError):
                    parent.remove(name)
                with contextlib.suppress(OSError):
                    parent.remove(f"{name}.lock")

    def check_writable(self) -> None:
        """Write a file of an entry's size, and remove it.

        Raises OSError if the store cannot be written to, RefusedEntry if others can write to it.
        """
        with self._staging() as staging, staging.named("probe"):
            _write_synced(staging.at("probe"), bytes(_SIZE_OF_A_PROBE), self._file_mode)

    def publish(self, built: Built) -> Path:
        """Write an entry, unless another process has just published it. Return its path.

        Raises OSError if the store cannot be written to, RefusedEntry if others can write to it.
        """
        digest = built.key.digest
        with self._staging() as staging, staging.make("entry", 0o700) as directory:
            for name, data in {**built.files, META: built.meta_file()}.items():
                with directory.named(name):
                    _write_synced(directory.at(name), data, self._file_mode)
            with directory.readable() as fd:
                os.fchmod(fd, self._directory_mode)
            _sync_directory(directory)
            with self._make_directory(digest[:2]) as shard:
                try:
                    staging.move("entry", shard, digest)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    logger.debug("%s was published by another process", digest)
                _sync_directory(shard)
        return self.entry_path(digest)

    def _make_directory(self, name: str) -> Directory:
        """Open a directory of the cache; create a missing one."""
        with (
            open_directory(self.root, self._owners, self._directory_mode) as root,
            root.make(LAYOUT, self._directory_mode) as base,
        ):
            return self._make_in(base, name)

    def _make_in(self, base: Directory, name: str) -> Directory:
        try:
            return base.make(name, self._directory_mode)
        except (NotADirectoryError, RefusedEntry):
            if name not in _OWN_NAMES or stat.S_ISDIR(base.status(name).st_mode):
                raise
            logger.warning("%s is not a directory: it is replaced by one", base.path / name)
            base.remove(name)
            return base.make(name, self._directory_mode)

    # -- one process at a time

    @contextlib.contextmanager
    def compiling(self, digest: str, published: Callable[[], bool]) -> Iterator[None]:
        """Hold a key's lock, or wait for the process that holds it until `published` returns True.

        If the store cannot be written to, or locks do not work, nothing is held.
        """
        with contextlib.ExitStack() as held:
            started = time.monotonic()
            pause = _POLL_SECONDS
            told = False
            while not self._take_compile_lock(digest, held) and not published():
                waited = time.monotonic() - started
                if pause == _POLL_SECONDS:
                    logger.info("waiting for another process to compile %s", digest[:12])
                elif waited > _SILENT_WAIT_SECONDS and not told:
                    told = True
                    logger.warning(
                        "waited %.0f s so far for %s, which compiles %s",
                        waited,
                        self._holder(f"{digest}.lock"),
                        digest[:12],
                    )
                if waited > _LONGEST_WAIT_SECONDS:
                    logger.warning(
                        "%s is still locked after %.0f s: compiling it here too", digest, waited
                    )
                    break
                time.sleep(pause)
                pause = min(2 * pause, _SLOWEST_POLL_SECONDS)
            yield

    @contextlib.contextmanager
    def locked(self, digest: str) -> Iterator[bool]:
        """Hold a key's lock without waiting for it; False if another process holds it.

        True, as in `compiling`, if the store cannot be written to or locks do not work.
        """
        with contextlib.ExitStack() as held:
            yield self._take_compile_lock(digest, held)

    def _take_compile_lock(self, digest: str, held: contextlib.ExitStack) -> bool:
        """Whether to go on: with the lock in `held`, or without a lock if locks do not work."""
        attempt = contextlib.ExitStack()
        try:
            with self._make_directory(_LOCKS) as directory:
                name = f"{digest}.lock"
                state = attempt.enter_context(self._lock_file(directory, name))
                if state is LockState.TAKEN:
                    _sign(directory, name)
        except (OSError, RefusedEntry) as error:
            logger.debug("no lock in %s: %s", self.root, error)
            return True
        if state is LockState.HELD_ELSEWHERE:
            attempt.close()
            return False
        held.push(attempt)
        return True

    def _holder(self, name: str) -> str:
        """The holder of a lock file in `locks`, in words."""
        with contextlib.suppress(OSError, CacheError, ValueError):
            with self._make_directory(_LOCKS) as directory:
                fd = directory.file(name)
            with os.fdopen(fd) as file:
                pid, host = file.read(_LONGEST_SIGNATURE).split()
            if host != os.uname().nodename:
                return f"process {int(pid)} on {host}"
            return f"process {int(pid)}{_state_of(int(pid))}"
        return "another process"

    # -- cleaning up

    def quarantine(self, digest: str) -> str | None:
        """Move an entry to the quarantine; return what was done, or None if the entry was already
        gone.

        If the entry's shard is not a directory, the shard is moved instead. Anything that cannot be
        moved, such as an entry in a lower layer of an overlay, is deleted.

        Call this while holding the key's lock, after finding the entry damaged under that lock.
        Otherwise the call may remove another process's new entry.
        """
        with self._make_directory(_QUARANTINE) as quarantine, self._open_base() as base:
            try:
                shard = base.directory(digest[:2])
            except FileNotFoundError:
                return None
            except (NotADirectoryError, RefusedEntry):
                return _put_aside(base, digest[:2], quarantine)
            with shard:
                base.make_accessible(digest[:2])
                return _put_aside(shard, digest, quarantine)

    def sweep(self) -> int:
        """Remove leftovers of dead processes in `staging`; return the number of leftovers removed.

        Raises RefusedEntry, and OSError if the directory cannot be read.
        """
        swept = 0
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            self._open_base() as base,
            base.directory(_STAGING) as staging,
        ):
            for name in {item.removesuffix(".lock") for item in staging.names()}:
                swept += self._sweep(staging, name)
        return swept

    def _sweep(self, staging: Directory, name: str) -> bool:
        lock = f"{name}.lock"
        with contextlib.suppress(OSError), self._lock_file(staging, lock) as state:
            if state is LockState.UNSUPPORTED:
                age = time.time() - staging.status(name).st_mtime
                if age < _UNLOCKABLE_LEFTOVER_SECONDS:
                    return False
            elif state is LockState.HELD_ELSEWHERE:
                return False
            with contextlib.suppress(FileNotFoundError):
                staging.remove(name)
            staging.remove(lock)
            return True
        return False

    def make_room(self, max_bytes: int, added: str) -> Evicted:
        """Add the entry `added` to the ledger, and evict other entries if the store is too large.

        While the ledger says that there is room, no entry is listed or measured.
        """
        try:
            base = self._open_base()
        except FileNotFoundError:
            return Evicted()
        with base:
            with contextlib.suppress(OSError), base.directory(added[:2]) as shard:
                _note_in_ledger(base, f"+{_allocated(shard.fd, added)[0]}\n")
            if _fits(base, max_bytes):
                return Evicted()
            with self._evicting():
                if _fits(base, max_bytes):  # another process has just evicted
                    return Evicted()
                self.sweep()
                evicted = self._evict(base, max_bytes, int(max_bytes * (1 - _HEADROOM)), added)
        if evicted.remaining > max_bytes:
            warn_once(
                f"full {self.root}",
                "%s takes %d bytes, more than the %d that CUTE_ATTN_CACHE_MAX_BYTES grants: %d "
                "entries remain because processes have loaded them",
                self.root,
                evicted.remaining,
                max_bytes,
                evicted.in_use,
            )
        return evicted

    def evict(self, max_bytes: int) -> Evicted:
        """Remove quarantined, then least recently used entries, until the store fits in
        `max_bytes`.

        Entries that a process has loaded stay. The size counts everything in the directory, in
        allocated bytes. Only one process evicts at a time.
        """
        try:
            base = self._open_base()
        except FileNotFoundError:
            return Evicted()
        with base, self._evicting():
            return self._evict(base, max_bytes, max_bytes)

    @contextlib.contextmanager
    def _evicting(self) -> Iterator[None]:
        """Hold the eviction lock, or nothing if locks do not work or the wait is too long."""
        with contextlib.ExitStack() as held:
            started = time.monotonic()
            pause = _POLL_SECONDS / 4
            told = False
            while (waited := time.monotonic() - started) < _LONGEST_WAIT_TO_EVICT_SECONDS:
                if waited > _SILENT_WAIT_SECONDS and not told:
                    told = True
                    logger.warning(
                        "waited %.0f s so far for %s, which evicts entries of %s",
                        waited,
                        self._holder(_EVICTION_LOCK),
                        self.root,
                    )
                attempt = contextlib.ExitStack()
                try:
                    with self._make_directory(_LOCKS) as directory:
                        state = attempt.enter_context(self._lock_file(directory, _EVICTION_LOCK))
                        if state is LockState.TAKEN:
                            _sign(directory, _EVICTION_LOCK)
                except OSError as error:
                    logger.debug("no lock in %s: %s", self.root, error)
                    break
                if state is not LockState.HELD_ELSEWHERE:
                    held.push(attempt)
                    break
                attempt.close()
                time.sleep(pause)
                pause = min(2 * pause, _SLOWEST_POLL_SECONDS)
            yield

    @contextlib.contextmanager
    def _lock_file(self, directory: Directory, name: str) -> Iterator[LockState]:
        """`try_lock_file` in a directory of the cache. The state is UNSUPPORTED if the file system
        reports all locks as held."""
        with contextlib.ExitStack() as stack:
            with directory.named(name):
                state = stack.enter_context(try_lock_file(name, directory.fd))
            if state is LockState.HELD_ELSEWHERE and not self._locks_work(directory):
                state = LockState.UNSUPPORTED
            yield state

    def _locks_work(self, directory: Directory) -> bool:
        """Whether a new file, which nobody else can have locked, can be locked; tried once."""
        if self._have_locks is None:
            name = f"probe-{os.urandom(8).hex()}"
            with directory.named(name), try_lock_file(name, directory.fd) as state:
                directory.remove(name)
            self._have_locks = state is LockState.TAKEN
            if not self._have_locks:
                warn_once(f"locks {self.root}", "file locks do not work in %s", self.root)
        return self._have_locks

    def _evict(
        self, base: Directory, max_bytes: int, down_to: int, keep: str | None = None
    ) -> Evicted:
        _start_ledger(base)
        problems: list[str] = []
        candidates = _candidates(base, problems)
        total = sum(candidate.bytes for candidate in candidates)
        damaged = _sizes(base, _QUARANTINE)
        staged = _sizes(base, _STAGING, own=False)  # not counting this eviction's empty directory
        total += sum(damaged.values()) + sum(staged.values())
        excess = total - down_to if total > max_bytes else 0
        freed = removed = in_use = 0
        if damaged and excess > 0:
            with noting(problems), base.directory(_QUARANTINE) as quarantine:
                for name, size in damaged.items():  # kept only for examining the damage
                    if freed < excess:
                        with noting(problems):
                            quarantine.remove(name)
                            freed += size
        for _, digest, size in candidates:
            if freed >= excess:
                break
            if digest == keep:
                continue
            with noting(problems):
                result = self._remove(base, digest)
                in_use += result is _Removal.IN_USE
                removed += result is _Removal.REMOVED
                if result in (_Removal.REMOVED, _Removal.GONE):
                    freed += size
        _note_in_ledger(base, f"={total - freed}\n")
        return Evicted(removed, freed, in_use, total - freed, tuple(problems))

    def remove(self, digest: str) -> bool:
        """Delete an entry unless it is in use. Return whether this call deleted it. Raises
        OSError."""
        try:
            with self._open_base() as base:
                return self._remove(base, digest) is _Removal.REMOVED
        except FileNotFoundError:
            return False

    def _remove(self, base: Directory, digest: str) -> _Removal:
        """Delete an entry, or a file in place of one, unless the entry is in use. Raises
        OSError."""
        with contextlib.ExitStack() as stack:
            try:
                shard = stack.enter_context(base.directory(digest[:2]))
                base.make_accessible(digest[:2])
                shard.make_accessible(digest)
                lock = _open_to_lock(shard, digest)
                if lock is not None:
                    stack.callback(os.close, lock)
                    if try_lock(lock) is LockState.HELD_ELSEWHERE:
                        return _Removal.IN_USE
                try:
                    staging = stack.enter_context(self._staging(base))
                    shard.move(digest, staging, _REMOVED)
                except FileNotFoundError:
                    raise
                except OSError as error:  # a full disk, a lower layer of an overlay
                    logger.debug("%s is deleted in place: %s", shard.path / digest, error)
                    _remove_in_place(shard, digest)
                else:
                    staging.remove(_REMOVED)
            except FileNotFoundError:
                return _Removal.GONE
        return _Removal.REMOVED

    def clear(self) -> Evicted:
        """Delete all entries that are not in use, the quarantine, and leftovers in `staging`."""
        problems = self._remove_strange()
        evicted = self.evict(max_bytes=-1)
        return evicted._replace(problems=(*problems, *evicted.problems, *self.tidy()))

    def _remove_strange(self) -> list[str]:
        """Delete everything inside a shard that has no entry's name. Delete what has a shard's name
        but is no directory, or may have been written by another user."""
        problems: list[str] = []
        with contextlib.suppress(FileNotFoundError), self._open_base() as base:
            for name in filter(_SHARD_NAME.fullmatch, base.names()):
                with noting(problems):
                    try:
                        base.make_accessible(name)
                        with base.directory(name) as shard:
                            for item in shard.names():
                                if not _DIGEST.fullmatch(item):
                                    shard.remove(item)
                    except (NotADirectoryError, RefusedEntry):
                        base.remove(name)
        return problems

    def tidy(self) -> list[str]:
        """Delete the quarantine, leftovers of dead processes, and locks that nobody holds.

        Returns a message for each file or directory that could not be removed.
        """
        problems: list[str] = []
        try:
            base = self._open_base()
        except FileNotFoundError:
            return problems
        with base:
            for name in (_QUARANTINE, _LEDGER):
                with noting(problems):
                    base.remove(name)
            for name in (_STAGING, _LOCKS):
                with noting(problems):
                    if not stat.S_ISDIR(base.status(name).st_mode):
                        base.remove(name)
            with noting(problems):
                self.sweep()
            with noting(problems), base.directory(_LOCKS) as locks:
                for name in locks.names():
                    with noting(problems):
                        _remove_free_lock(locks, name)
            for name in (_STAGING, _LOCKS):
                with contextlib.suppress(OSError):  # a directory that is not empty is in use
                    os.rmdir(name, dir_fd=base.fd)
        return problems


def _sign(directory: Directory, name: str) -> None:
    """Write this process's id and host name into a lock file, for messages of waiting processes."""
    with contextlib.suppress(OSError, CacheError):  # a full disk
        fd = directory.file(name, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(fd, f"{os.getpid()} {os.uname().nodename}\n".encode())
        finally:
            os.close(fd)


def _state_of(pid: int) -> str:
    """A clause for messages if a process of this machine is stopped or invisible, else ""."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return " (it is not to be seen from here: it may be in another container)"
    return " (it is stopped: kill -CONT lets it go on)" if state in "Tt" else ""


@contextlib.contextmanager
def noting(problems: list[str]) -> Iterator[None]:
    """Append errors to `problems` and go on. A missing file is not an error."""
    try:
        yield
    except FileNotFoundError:
        pass
    except (OSError, CacheError) as error:
        problems.append(str(error))
        logger.debug("%s", error)


def _write_synced(path: Path, data: bytes, mode: int) -> None:
    with path.open("xb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Directory) -> None:
    directory.sync()


def _put_aside(parent: Directory, name: str, quarantine: Directory) -> str | None:
    """Move `name` into the quarantine, or if the move fails delete it; return what was done."""
    moved = f"{name}-{os.urandom(4).hex()}"
    try:
        parent.move(name, quarantine, moved)
    except FileNotFoundError:
        return None
    except OSError as error:
        parent.remove(name)
        return f"deleted, since it cannot be moved ({error.strerror})"
    return f"moved to {quarantine.path / moved}"


def _remove_in_place(shard: Directory, digest: str) -> None:
    """Delete an entry that readers may see: `meta.json` first, since it makes a directory an
    entry."""
    with contextlib.suppress(OSError, CacheError), shard.directory(digest) as entry:
        entry.remove(META)
    shard.remove(digest)


def _open_to_lock(shard: Directory, digest: str) -> int | None:
    """A descriptor for locking an entry; None if no process can have loaded the entry.

    Raises FileNotFoundError if there is no entry.
    """
    try:
        directory = shard.directory(digest)
    except FileNotFoundError:
        raise
    except (OSError, RefusedEntry):
        return None
    with directory, contextlib.suppress(OSError, CacheError):
        try:
            return directory.file(META, os.O_RDWR)  # NFS locks only files open for writing
        except PermissionError:
            return directory.file(META)
    return None


def _remove_free_lock(locks: Directory, name: str) -> None:
    if not stat.S_ISREG(locks.status(name).st_mode):
        locks.remove(name)
        return
    with try_lock_file(name, locks.fd) as state:
        if state is LockState.TAKEN:
            locks.remove(name)


# -- sizes, in allocated bytes, and times


def _allocated(
    parent_fd: int, name: str, depth: int = 8, own: bool = True
) -> tuple[int, os.stat_result | None]:
    """The bytes of `name` and its contents, and the status of its file `uses`.

    Without `own`, only the contents are counted.
    """
    total = 0
    uses = None
    with contextlib.suppress(OSError):
        total = 512 * os.lstat(name, dir_fd=parent_fd).st_blocks if own else 0
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent_fd)
        try:
            with os.scandir(fd) as items:
                for item in items:
                    if item.name == _REMOVED:  # another process is about to delete this directory
                        continue
                    if item.is_dir(follow_symlinks=False) and depth:
                        total += _allocated(fd, item.name, depth - 1)[0]
                        continue
                    status = item.stat(follow_symlinks=False)
                    total += 512 * status.st_blocks
                    if item.name == USES:
                        uses = status
        finally:
            os.close(fd)
    return total, uses


def _sizes(base: Directory, name: str, own: bool = True) -> dict[str, int]:
    """The bytes of each file and directory in a directory; without `own`, only of their
    contents."""
    with contextlib.suppress(OSError, CacheError), base.directory(name) as directory:
        return {item: _allocated(directory.fd, item, own=own)[0] for item in directory.names()}
    return {}


def _candidates(base: Directory, problems: list[str]) -> list[_Candidate]:
    """All entries, least recently used first. Files in place of entries come before all entries."""
    now = time.time()
    found: list[_Candidate] = []
    ahead: list[tuple[_Candidate, str]] = []
    for name in filter(_SHARD_NAME.fullmatch, base.names()):
        with contextlib.suppress(OSError):
            base.make_accessible(name)
        with noting(problems), base.directory(name) as shard:
            for digest in filter(_DIGEST.fullmatch, shard.names()):
                with contextlib.suppress(FileNotFoundError):
                    status = shard.status(digest)
                    size, uses = _allocated(shard.fd, digest)
                    used = uses or status
                    moment = used.st_mtime if stat.S_ISDIR(status.st_mode) else 0.0
                    # A time far in the future is wrong if the inode's change time is not in the
                    # future.
                    made_up = moment > now + _TOLERATED_SKEW_SECONDS and used.st_ctime <= now
                    candidate = _Candidate(0.0 if made_up else moment, digest, size)
                    if candidate.last_use > now:
                        path = f"{name}/{digest}/{USES}" if uses else f"{name}/{digest}"
                        ahead.append((candidate, path))
                    else:
                        found.append(candidate)
    # The clock has been set back since these entries were used. Such entries get the current time,
    # in their order; otherwise they would count as the newest until the clock catches up.
    for i, (candidate, path) in enumerate(sorted(ahead)):
        moment = now + 1e-6 * i
        with contextlib.suppress(OSError):
            os.utime(path, (moment, moment), dir_fd=base.fd, follow_symlinks=False)
        found.append(candidate._replace(last_use=moment))
    return sorted(found)


# -- the ledger


def _start_ledger(base: Directory) -> None:
    """Empty the ledger before measuring, so that entries published during the measurement are added
    to it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with contextlib.suppress(OSError):
        try:
            os.close(base.file(_LEDGER, flags))
        except CacheError:  # another kind of file is in its place
            base.remove(_LEDGER)
            os.close(base.file(_LEDGER, flags))


def _note_in_ledger(base: Directory, line: str) -> None:
    # If this fails, the next process measures the store.
    with contextlib.suppress(OSError, CacheError):
        fd = base.file(_LEDGER, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)


def _fits(base: Directory, max_bytes: int) -> bool:
    """Whether the ledger says that the store is within its limit."""
    with contextlib.suppress(OSError, CacheError):
        with os.fdopen(base.file(_LEDGER), "rb") as file:
            text = file.read(_LARGEST_LEDGER).decode(errors="replace")
        lines = text.splitlines()
        counted = [line for line in lines if line.startswith("=")]
        sound = all(re.fullmatch(r"[+=]\d{1,18}", line) for line in lines)
        if sound and len(counted) == 1 and len(lines) <= _ENTRIES_BETWEEN_COUNTS:
            return sum(int(line[1:]) for line in lines) <= max_bytes
    return False
