"""An entry: a directory with a kernel's files and `meta.json`, which are checked before any use.

`meta.json` holds the key field by field, the size and SHA-256 of every file, the compile time, the
registers and memory of each device kernel, and a checksum of itself. The key's digest must be the
directory's name. So a flipped bit, a truncated file and an entry of another key are all detected.

An entry is native code. Its directory and files must belong to the current user (in a prebuilt
directory, to root or the user), and nobody else may write to them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .errors import CacheError, DamagedEntry
from .key import KeyDescription
from .locks import LockState, is_at, try_lock
from .ownership import Directory

META = "meta.json"
OBJECT = "kernel.o"
LIBRARY = "kernel.so"
PTX = "kernel.ptx"
USES = "uses"
"""A file with one byte for each process that loaded the entry; its modification time is the last
use."""

FUNCTION = "k"
"""The name under which every kernel is exported: its symbol is `__tvm_ffi_k`."""

_SCHEMA = 2
_LARGEST_META = 2**20
_LARGEST_FILE = 2**30


class KernelUse(NamedTuple):
    """The registers and memory of one device kernel.

    Attributes:
        name: the kernel's symbol.
        registers: registers per thread.
        spill_stores: bytes of spill stores per thread; None if ptxas did not report them.
        spill_loads: bytes of spill loads per thread; None if ptxas did not report them.
        stack: bytes of stack frame per thread.
        static_shared: bytes of static shared memory per CTA.
        dynamic_shared: bytes of dynamic shared memory per CTA; None if the host code computes them.
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
    """A compiled kernel in memory, with the interface of an `Entry` except for a directory."""

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

    @property
    def meta(self) -> Mapping[str, Any]:
        """The content of `meta.json` except its checksum; computed at each access."""
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
        meta = self.meta
        return json.dumps({**meta, "checksum": _checksum(meta)}, indent=1).encode()


@dataclass(frozen=True)
class Entry:
    """An entry on disk whose `meta.json` has been checked.

    An entry holds a shared lock, which prevents eviction, until `close` or garbage collection.
    """

    directory: Path
    key: KeyDescription
    meta: Mapping[str, Any]
    kernels: tuple[KernelUse, ...]
    _reopen: Callable[[], Directory] = field(repr=False, compare=False)
    _lock_fd: int = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_release", weakref.finalize(self, os.close, self._lock_fd))

    @property
    def digest(self) -> str:
        return self.key.digest

    @property
    def size(self) -> int:
        """Total bytes of the files that `meta.json` lists."""
        return sum(int(item["size"]) for item in self.meta["files"].values())

    def has(self, name: str) -> bool:
        return name in self.meta["files"]

    def read(self, name: str) -> bytes:
        """The content of a file, checked against its SHA-256.

        Raises DamagedEntry, RefusedEntry, or CacheError if the entry has no such file.
        """
        if not self.has(name):
            raise CacheError(f"{self.directory} has no {name}")
        expected = self.meta["files"][name]
        path = self.directory / name
        try:
            with self._reopen() as directory, os.fdopen(directory.file(name), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected["size"]:
                    raise DamagedEntry(f"{path} has {size} bytes instead of {expected['size']}")
                data = file.read(size)
        except OSError as error:
            raise _damage(path, error) from error
        if hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise DamagedEntry(f"{path} does not have the SHA-256 of its meta.json")
        return data

    def verify(self) -> None:
        """Read every file. Raises DamagedEntry or RefusedEntry."""
        for name in self.meta["files"]:
            self.read(name)

    def record_use(self) -> None:
        """Count one use, by appending a byte to `uses`, which needs no lock."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        # A failure is harmless. Causes are a read-only directory, a full disk, or an entry just
        # evicted.
        with contextlib.suppress(OSError, CacheError), self._reopen() as directory:
            fd = directory.file(USES, flags)
            try:
                os.write(fd, b".")
            finally:
                os.close(fd)

    def uses(self) -> tuple[int, float]:
        """Number of processes that loaded the entry, and the time of the last load, in `time.time`
        seconds.

        Raises OSError or RefusedEntry if the entry has gone.
        """
        with self._reopen() as directory:
            try:
                status = directory.status(USES)
            except OSError:
                return 0, os.fstat(directory.fd).st_mtime
        return status.st_size, status.st_mtime

    def close(self) -> None:
        """Release the lock. The entry must not be used afterwards."""
        self._release()  # type: ignore[attr-defined]


def open_entry(shard: Directory, digest: str, reopen: Callable[[], Directory]) -> Entry:
    """Open the entry `digest` in the directory `shard`, and check all but the files' content.

    With `reopen`, each read of a file opens the entry's directory, so the entry keeps only its
    lock's descriptor.

    Raises FileNotFoundError if there is no such entry, DamagedEntry, or RefusedEntry. Raises
    OSError if the cause is the process or the network, not the entry.
    """
    try:
        with shard.directory(digest) as directory:
            return _open_entry(shard, directory, digest, reopen)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _damage(shard.path / digest, error) from error


def _open_entry(
    shard: Directory, directory: Directory, digest: str, reopen: Callable[[], Directory]
) -> Entry:
    path = directory.path / META
    try:
        fd = directory.file(META)
    except FileNotFoundError:
        if not is_at(directory.fd, digest, shard.fd):  # just evicted, which is a miss
            raise
        raise DamagedEntry(f"{directory.path} has no {META}") from None
    try:
        # While the lock on META is held, an entry that is still at its path cannot be evicted.
        stays = try_lock(fd, shared=True) is not LockState.HELD_ELSEWHERE
        if not (stays and is_at(fd, META, directory.fd) and is_at(directory.fd, digest, shard.fd)):
            raise FileNotFoundError(f"{directory.path} is being evicted")
        size = os.fstat(fd).st_size
        if size > _LARGEST_META:
            raise DamagedEntry(f"{path} has {size} bytes, more than any {META}")
        with os.fdopen(fd, "rb", closefd=False) as file:
            meta, key, kernels = _parse_meta(path, file.read())
        if key.digest != digest:
            raise DamagedEntry(f"{directory.path} holds an entry that belongs at {key.digest}")
    except BaseException:
        os.close(fd)
        raise
    return Entry(directory.path, key, meta, kernels, reopen, fd)


def _damage(path: Path, error: OSError) -> Exception:
    """The exception for a part of an entry that cannot be read."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.ESTALE):
        return error  # the cause is this process or the network, not the file
    return DamagedEntry(f"{path} cannot be read: {error.strerror}")


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
        _ = key.digest  # unencodable text raises here, as an error of the file
        kernels = tuple(KernelUse(**kernel) for kernel in meta["kernels"])
        float(meta["compile_seconds"])
        for name, file in meta["files"].items():
            if name not in (OBJECT, LIBRARY, PTX):
                raise DamagedEntry(f"{path} lists a file {name!r}, which no entry has")
            if type(file["size"]) is not int or not 0 <= file["size"] <= _LARGEST_FILE:
                raise DamagedEntry(f"{path} says that {name} has {file['size']!r} bytes")
            _ = file["sha256"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedEntry(f"{path} cannot be read: {error}") from error
    return meta, key, kernels
