"""A directory of entries that many processes, users and machines' clocks can be careless with.

Layout, below a root of mode 0700:

    v1/ab/abcd.../      an entry (see entry.py), named for its key's digest
    v1/locks/           one lock file per key being compiled
    v1/staging/         what is being written, evicted or put aside, each with a lock file
    v1/quarantine/      damaged entries, moved out of the way

An entry appears by one rename of a complete and synced directory, and disappears by one rename: no
reader ever sees half of it, on NFS neither. Whatever a killed process leaves lies in `staging`,
from which nothing is loaded; it is removed once nobody holds its lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .entry import META, USES, Built, Entry, RefusedEntry, check_ownership, open_entry
from .errors import CacheError
from .locks import LockState, try_lock, try_lock_file
from .log import logger

_LAYOUT = "v1"
_POLL_SECONDS = 0.02
_SLOWEST_POLL_SECONDS = 0.25
_LONGEST_WAIT_SECONDS = 600.0  # then compile all the same: publication is atomic
_TOLERATED_SKEW_SECONDS = 3600.0
_UNLOCKABLE_LEFTOVER_SECONDS = 24 * 3600.0  # where locks do not work, age has to do


class Evicted(NamedTuple):
    """What `Store.evict` removed."""

    entries: int
    bytes: int


class Store:
    """The entries below one root directory.

    Args:
        root: the directory; made when the first entry is published.
        read_only: a prebuilt directory. It may belong to root, and nothing in it is changed.
        public: what is published here can be read by every user, as a prebuilt directory is.
    """

    def __init__(self, root: Path, *, read_only: bool = False, public: bool = False) -> None:
        self.root = root
        self._directory_mode, self._file_mode = (0o755, 0o644) if public else (0o700, 0o600)
        self.read_only = read_only
        self.public = public
        user = os.geteuid()
        self._owners = frozenset({user, 0}) if read_only else frozenset({user})
        self._base = root / _LAYOUT

    def entry_path(self, digest: str) -> Path:
        return self._base / digest[:2] / digest

    # -- reading

    def open(self, digest: str) -> Entry | None:
        """The entry of a key, or None if there is none.

        Raises DamagedEntry, RefusedEntry, or OSError if the directory cannot be read.
        """
        path = self.entry_path(digest)
        if not path.is_dir():  # the common case of a miss: one system call
            return None
        self.check_root()
        try:
            for directory in (self._base, path.parent):
                check_ownership(directory, self._owners)
            return open_entry(path, digest, self._owners)
        except FileNotFoundError:
            return None

    def check_root(self) -> None:
        """Raise RefusedEntry if others could have written to the root; follows a link to it."""
        check_ownership(Path(os.path.realpath(self.root)), self._owners)

    def digests(self) -> list[str]:
        """The digests of all entries, unopened."""
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for shard in os.scandir(self._base):
                if len(shard.name) == 2 and shard.is_dir(follow_symlinks=False):
                    found += [item.name for item in os.scandir(shard.path) if len(item.name) == 64]
        return sorted(found)

    def entries(self) -> Iterator[Entry]:
        """Every entry that can be opened, closed again after its turn."""
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
        """A directory for what is not yet, or no longer, an entry. Removed afterwards.

        Raises OSError if the store cannot be written to, RefusedEntry if others can write to it.
        """
        parent = self._make_directory("staging")
        with contextlib.ExitStack() as stack:
            state = LockState.HELD_ELSEWHERE
            while state is LockState.HELD_ELSEWHERE:  # a sweep was faster: it will delete that lock
                path = parent / f"{os.getpid()}-{os.urandom(8).hex()}"
                lock = path.with_suffix(".lock")
                state = stack.enter_context(try_lock_file(lock))
            # Locked before the directory exists: one without a live lock is a leftover.
            path.mkdir(0o700)
            try:
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):
                    lock.unlink()

    def publish(self, built: Built) -> Path:
        """Write an entry; if another process was faster, leave that one. Return its path.

        Raises OSError if there is no room, no permission and so on, RefusedEntry if others can
        write to the store.
        """
        final = self.entry_path(built.key.digest)
        with self.staging() as staging:
            directory = staging / "entry"
            directory.mkdir(0o700)
            for name, data in {**built.files, META: built.meta_file()}.items():
                _write_synced(directory / name, data, self._file_mode)
            directory.chmod(self._directory_mode)
            _sync_directory(directory)
            self._make_directory(final.parent.name)
            try:
                directory.rename(final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                logger.debug("%s was published by another process", final)
            _sync_directory(final.parent)
        return final

    def _make_directory(self, name: str) -> Path:
        path = self._base / name
        if not self.root.exists():
            # Parents are made with the user's umask, as ~/.cache would be; the root is private.
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self._make_one_directory(self.root)
        self.check_root()
        for directory in (self._base, path):
            self._make_one_directory(directory)
        return path

    def _make_one_directory(self, path: Path) -> None:
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)
            if self._directory_mode != 0o700:
                path.chmod(self._directory_mode)

    # -- one process at a time

    @contextlib.contextmanager
    def compiling(self, digest: str, published: Callable[[], bool]) -> Iterator[None]:
        """Hold a key's lock, or wait until another process has `published` what it is for.

        Where the store cannot be written to, or locks do not work, nothing is held.
        """
        with contextlib.ExitStack() as held:
            started = time.monotonic()
            pause = _POLL_SECONDS
            while not self._take_compile_lock(digest, held) and not published():
                waited = time.monotonic() - started
                if pause == _POLL_SECONDS:
                    logger.info("waiting for another process to compile %s", digest[:12])
                if waited > _LONGEST_WAIT_SECONDS:
                    logger.warning(
                        "%s is still locked after %.0f s: compiling it here too", digest, waited
                    )
                    break
                time.sleep(pause)
                pause = min(2 * pause, _SLOWEST_POLL_SECONDS)
            yield

    def _take_compile_lock(self, digest: str, held: contextlib.ExitStack) -> bool:
        """Whether to go on: with the lock in `held`, or without one where locks are no use."""
        attempt = contextlib.ExitStack()
        try:
            path = self._make_directory("locks") / f"{digest}.lock"
            state = attempt.enter_context(try_lock_file(path))
        except (OSError, RefusedEntry) as error:
            logger.debug("no lock in %s: %s", self.root, error)
            return True
        if state is LockState.HELD_ELSEWHERE:
            attempt.close()
            return False
        held.push(attempt)
        return True

    # -- cleaning up

    def quarantine(self, digest: str) -> Path | None:
        """Move an entry out of the way; return where to, or None if it had gone already.

        Call it while holding the key's lock, and after finding the entry damaged under that lock:
        otherwise it may be another process's new entry.
        """
        path = self._make_directory("quarantine") / f"{digest}-{os.urandom(4).hex()}"
        try:
            self.entry_path(digest).rename(path)
        except FileNotFoundError:
            return None
        return path

    def sweep(self) -> int:
        """Remove what dead processes left in `staging`; return how much."""
        swept = 0
        staging = self._base / "staging"
        with contextlib.suppress(OSError):
            names = {item.name.removesuffix(".lock") for item in os.scandir(staging)}
            for name in names:
                swept += self._sweep(staging / name)
        return swept

    def _sweep(self, path: Path) -> bool:
        lock = path.with_suffix(".lock")
        with contextlib.suppress(OSError), try_lock_file(lock) as state:
            if state is LockState.UNSUPPORTED:
                age = time.time() - path.lstat().st_mtime
                if age < _UNLOCKABLE_LEFTOVER_SECONDS:
                    return False
            elif state is LockState.HELD_ELSEWHERE:
                return False
            shutil.rmtree(path, ignore_errors=True)
            lock.unlink()
            return True
        return False

    def evict(self, max_bytes: int, keep: str = "") -> Evicted:
        """Remove quarantined, then least recently used entries, until all fits in `max_bytes`.

        Entries that a process has loaded are passed by, and so is the entry `keep`.
        """
        found = {digest: self.entry_path(digest) for digest in self.digests()}
        sizes = {digest: _tree_size(path) for digest, path in found.items()}
        quarantine = self._base / "quarantine"
        excess = sum(sizes.values()) - max_bytes
        removed = freed = 0
        with contextlib.suppress(OSError):
            damaged = [(Path(item), _tree_size(Path(item))) for item in os.scandir(quarantine)]
            excess += sum(size for _, size in damaged)
            while damaged and freed < excess:  # of use to nobody but who looks into the damage
                path, size = damaged.pop()
                shutil.rmtree(path, ignore_errors=True)
                freed += size
        for digest in sorted(found, key=lambda digest: _last_use(found[digest])):
            if freed >= excess:
                break
            if digest != keep and self.remove(digest):
                removed += 1
                freed += sizes[digest]
        return Evicted(removed, freed)

    def remove(self, digest: str) -> bool:
        """Delete an entry unless it is in use; whether it was deleted."""
        path = self.entry_path(digest)
        with contextlib.ExitStack() as stack:
            try:
                fd = os.open(path / META, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                stack.callback(os.close, fd)
                if try_lock(fd) is LockState.HELD_ELSEWHERE:
                    return False
            except FileNotFoundError:
                pass  # no meta.json: nobody can have loaded it
            except OSError as error:
                logger.debug("cannot remove %s: %s", path, error)
                return False
            try:
                staging = stack.enter_context(self.staging())
                path.rename(staging / "evicted")
            except FileNotFoundError:
                return False
            except (OSError, RefusedEntry) as error:
                logger.debug("cannot remove %s: %s", path, error)
                return False
        return True

    def clear(self) -> Evicted:
        """Delete every entry that is not in use, the quarantine, and what dead processes left."""
        removed = self.evict(max_bytes=-1)
        self.tidy()
        return removed

    def tidy(self) -> None:
        """Delete the quarantine, what dead processes left, and the locks that nobody holds."""
        shutil.rmtree(self._base / "quarantine", ignore_errors=True)
        self.sweep()
        for lock in (self._base / "locks").glob("*.lock"):
            with contextlib.suppress(OSError), try_lock_file(lock) as state:
                if state is LockState.TAKEN:
                    lock.unlink()
        for name in ("locks", "staging"):
            with contextlib.suppress(OSError):  # not empty: in use
                (self._base / name).rmdir()


def _write_synced(path: Path, data: bytes, mode: int) -> None:
    with path.open("xb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # some file systems cannot sync one
            raise
    finally:
        os.close(fd)


def _tree_size(directory: Path) -> int:
    """The bytes in a directory's files."""
    with contextlib.suppress(OSError):
        return sum(item.stat(follow_symlinks=False).st_size for item in os.scandir(directory))
    return 0


def _last_use(directory: Path) -> float:
    """When an entry was last loaded, or else published; 0 if that is unknown."""
    for path in (directory / USES, directory):
        with contextlib.suppress(OSError):
            moment = path.lstat().st_mtime
            # A clock that runs ahead would keep the entry for as long as it is ahead.
            return moment if moment < time.time() + _TOLERATED_SKEW_SECONDS else 0.0
    return 0.0
