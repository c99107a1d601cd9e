"""One entry: a directory with a kernel's files and `meta.json`, checked before anything is used.

`meta.json` holds the key, field by field, the size and SHA-256 of every file, how long the
kernel took to compile, and what each device kernel uses. It also holds a checksum of itself, and
its key must have the digest that the directory is named for: so a flipped bit anywhere, a
truncated file and an entry that belongs to another key are all found out.

An entry is native code. Its directory and files must belong to the current user (in a prebuilt
directory, root will do) and be writable by nobody else.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import stat
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .errors import CacheError
from .key import KeyDescription
from .locks import LockState, is_at, try_lock

META = "meta.json"
OBJECT = "kernel.o"
LIBRARY = "kernel.so"
PTX = "kernel.ptx"
USES = "uses"
"""One byte for each process that loaded the entry; its modification time is the last use."""

FUNCTION = "k"
"""The name under which every kernel is exported: its symbol is `__tvm_ffi_k`."""

_SCHEMA = 1


class DamagedEntry(CacheError):
    """The files of an entry are not what was published."""


class RefusedEntry(CacheError):
    """A directory or file could have been written by somebody else."""


class KernelUse(NamedTuple):
    """What one device kernel uses, per thread or per block.

    Attributes:
        name: its symbol.
        registers: per thread.
        spill_stores: bytes of registers written to memory, per thread; None if ptxas did not say.
        spill_loads: bytes read back.
        stack: bytes of stack frame, per thread.
        static_shared: bytes of shared memory that the code reserves, per block.
        dynamic_shared: bytes that the launch adds to it; None if the host code computes them.
    """

    name: str
    registers: int
    spill_stores: int | None
    spill_loads: int | None
    stack: int
    static_shared: int
    dynamic_shared: int | None

    @property
    def spills(self) -> int | None:
        """Bytes spilled, stores and loads together; None if unknown."""
        if self.spill_stores is None or self.spill_loads is None:
            return None
        return self.spill_stores + self.spill_loads


@dataclass(frozen=True)
class Built:
    """A compiled kernel in memory, as the compiler hands it over.

    Has all that an `Entry` has for those who use it, but no directory.
    """

    key: KeyDescription
    files: Mapping[str, bytes]
    kernels: tuple[KernelUse, ...]
    compile_seconds: float
    directory: None = None

    @property
    def digest(self) -> str:
        return self.key.digest

    def has(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str) -> bytes:
        """The content of a file. Raises CacheError if there is no such file."""
        if name not in self.files:
            raise CacheError(f"{self.key.kernel} was compiled without {name}")
        return self.files[name]

    @functools.cached_property
    def meta(self) -> Mapping[str, Any]:
        """What `meta.json` says, but for its own checksum."""
        return {
            "schema": _SCHEMA,
            "digest": self.key.digest,
            "key": self.key.to_json(),
            "files": {
                name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for name, data in sorted(self.files.items())
            },
            "compile_seconds": round(self.compile_seconds, 3),
            "kernels": [kernel._asdict() for kernel in self.kernels],
        }

    def meta_file(self) -> bytes:
        """The content of `meta.json`."""
        return json.dumps({**self.meta, "checksum": _checksum(self.meta)}, indent=1).encode()


@dataclass(frozen=True)
class Entry:
    """An entry on disk whose `meta.json` has been checked.

    Holds a shared lock on the entry until `close`, or until nothing refers to this object:
    eviction passes it by.
    """

    directory: Path
    key: KeyDescription
    meta: Mapping[str, Any]
    kernels: tuple[KernelUse, ...]
    owners: frozenset[int]
    _lock_fd: int = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_release", weakref.finalize(self, os.close, self._lock_fd))

    @property
    def digest(self) -> str:
        return self.key.digest

    @property
    def size(self) -> int:
        """Bytes in all listed files."""
        return sum(int(item["size"]) for item in self.meta["files"].values())

    def has(self, name: str) -> bool:
        return name in self.meta["files"]

    def read(self, name: str) -> bytes:
        """The content of a file, after comparing it with its SHA-256.

        Raises DamagedEntry or RefusedEntry, and CacheError if the entry has no such file.
        """
        if not self.has(name):
            raise CacheError(f"{self.directory} has no {name}")
        expected = self.meta["files"][name]
        data = _read_checked(self.directory / name, self.owners)
        if len(data) != expected["size"]:
            raise DamagedEntry(
                f"{self.directory / name} has {len(data)} bytes instead of {expected['size']}"
            )
        if hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise DamagedEntry(
                f"{self.directory / name} does not have the SHA-256 of its meta.json"
            )
        return data

    def verify(self) -> None:
        """Read every file. Raises DamagedEntry or RefusedEntry."""
        for name in self.meta["files"]:
            self.read(name)

    def record_use(self) -> None:
        """Count one use. One byte in append mode: it needs no lock, and may fail without harm."""
        try:
            fd = os.open(
                self.directory / USES, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600
            )
        except OSError:
            return  # a read-only directory, or an entry evicted meanwhile
        try:
            os.write(fd, b".")
        except OSError:
            pass  # a full disk
        finally:
            os.close(fd)

    def uses(self) -> tuple[int, float]:
        """How many processes loaded the entry, and when the last one did."""
        try:
            status = (self.directory / USES).lstat()
        except OSError:
            return 0, self.directory.lstat().st_mtime
        return status.st_size, status.st_mtime

    def close(self) -> None:
        """Let go of the lock. The entry must not be used afterwards."""
        self._release()  # type: ignore[attr-defined]


def open_entry(directory: Path, digest: str, owners: frozenset[int]) -> Entry:
    """Open the entry `digest` in `directory`, checking all but the content of its files.

    Raises FileNotFoundError if it is not there, DamagedEntry, RefusedEntry, or OSError if it
    cannot be read.
    """
    check_ownership(directory, owners)
    path = directory / META
    try:
        fd = _open_checked(path, owners)
    except FileNotFoundError:
        directory.lstat()  # FileNotFoundError if the entry has gone meanwhile: that is a miss
        raise DamagedEntry(f"{directory} has no {META}") from None
    try:
        # Under the lock, and if it is the lock of what is there now, the entry stays.
        if try_lock(fd, shared=True) is LockState.HELD_ELSEWHERE or not is_at(fd, path):
            raise FileNotFoundError(f"{directory} is being evicted")
        meta, key, kernels = _parse_meta(path, _read_all(fd))
        if key.digest != digest:
            raise DamagedEntry(f"{directory} holds an entry that belongs at {key.digest}")
    except BaseException:
        os.close(fd)
        raise
    return Entry(directory, key, meta, kernels, owners, fd)


def check_ownership(path: Path, owners: frozenset[int]) -> None:
    """Raise RefusedEntry if somebody outside `owners` owns `path` or may write to it."""
    _refuse_strangers(path, path.lstat(), owners)


def _refuse_strangers(path: Path, status: os.stat_result, owners: frozenset[int]) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        problem = "is a symbolic link"
    elif status.st_uid not in owners:
        problem = f"belongs to uid {status.st_uid}, not to " + " or ".join(map(str, sorted(owners)))
    elif mode & 0o022:
        problem = "can be written by others"
    else:
        return
    raise RefusedEntry(
        f"{path} {problem} (owner uid {status.st_uid}, mode {mode:04o}): compiled kernels are "
        "native code, and are loaded only from where nobody else can have put them. Make it yours "
        "with chown and chmod go-w, or choose another directory with CUTE_ATTN_CACHE_DIR"
    )


def _open_checked(path: Path, owners: frozenset[int]) -> int:
    """A descriptor of a file that nobody outside `owners` can have written."""
    _refuse_strangers(path, path.lstat(), owners)  # for the message: opening a link just fails
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _refuse_strangers(path, os.fstat(fd), owners)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_checked(path: Path, owners: frozenset[int]) -> bytes:
    try:
        fd = _open_checked(path, owners)
        with os.fdopen(fd, "rb") as file:
            return file.read()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # this process's trouble, not the file's
        raise DamagedEntry(f"{path} cannot be read: {error}") from error


def _read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb", closefd=False) as file:
        return file.read()


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _parse_meta(
    path: Path, data: bytes
) -> tuple[dict[str, Any], KeyDescription, tuple[KernelUse, ...]]:
    try:
        meta = json.loads(data)
        checksum = meta.pop("checksum")
        if checksum != _checksum(meta):
            raise DamagedEntry(f"{path} does not have the checksum it was stored with")
        if meta["schema"] != _SCHEMA:
            raise DamagedEntry(f"{path} has schema {meta['schema']}, not {_SCHEMA}")
        key = KeyDescription.from_json(meta["key"])
        kernels = tuple(KernelUse(**kernel) for kernel in meta["kernels"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedEntry(f"{path} cannot be read: {error}") from error
    return meta, key, kernels
