"""Loads a function from the checked bytes of an entry, without the compiler.

The bytes with the checked SHA-256 are copied into an anonymous file in memory, which is sealed and
loaded. So later changes of the entry on disk (eviction, damage, truncation by another client of a
network file system) cannot affect a loaded kernel.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import itertools
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import toolchain
from .entry import FUNCTION, LIBRARY, OBJECT, Built, Entry
from .errors import CacheError
from .locks import no_fork
from .log import logger


class IncompatibleEntry(CacheError):
    """An intact entry that does not fit the libraries of this machine."""


def load(entry: Entry | Built) -> Callable[..., Any]:
    """The function of an entry, or of a kernel just compiled.

    Raises DamagedEntry or RefusedEntry if the entry's file has changed since it was stored,
    IncompatibleEntry if the file does not fit this machine's libraries, CacheError if the runtime
    library is missing.
    """
    if entry.has(LIBRARY):
        return _load_library(entry, entry.read(LIBRARY))
    return _load_object(entry, entry.read(OBJECT))


def load_libraries() -> None:
    """Load the libraries that every kernel needs, so that a library's fault is not blamed on an
    entry.

    Raises RefusedLibrary, or CacheError if the runtime library is missing, truncated or cannot be
    loaded.
    """
    _tvm_ffi()
    _open_runtime_library()


def _tvm_ffi() -> Any:
    with no_fork:  # a child forked during the import could never import tvm_ffi
        import tvm_ffi  # loads libtvm_ffi.so

    return tvm_ffi


def _load_library(entry: Entry | Built, image: bytes) -> Callable[..., Any]:
    tvm_ffi = _tvm_ffi()
    runtime = _open_runtime_library()
    fd = _file_in_memory(image, entry.key.kernel)
    try:
        # ctypes resolves all symbols at once, so a missing symbol is an error here, not in a
        # launch.
        library = ctypes.CDLL(_new_path(fd), mode=os.RTLD_LOCAL)
    except OSError as error:
        raise IncompatibleEntry(
            f"{_where(entry)} (built with nvidia-cutlass-dsl {entry.key.dsl}, {entry.key.cuda}) "
            f"cannot be loaded with {runtime}: {error}"
        ) from None
    finally:
        os.close(fd)  # the mapping stays
    symbol = getattr(library, f"__tvm_ffi_{FUNCTION}")
    address = ctypes.cast(symbol, ctypes.c_void_p).value
    assert address is not None
    function: Callable[..., Any] = tvm_ffi.Function.__from_extern_c__(
        address, keep_alive_object=library
    )
    return function


def _load_object(entry: Entry | Built, image: bytes) -> Callable[..., Any]:
    """Load an unlinked object file, with the compiler's own loader."""
    logger.info(
        "%s has no %s (no linker where it was built): loading %s with the compiler's loader",
        _where(entry),
        LIBRARY,
        OBJECT,
    )
    try:
        from cutlass.cute.runtime import load_module
    except ImportError as error:
        raise IncompatibleEntry(
            f"{_where(entry)} holds only {OBJECT}, which takes nvidia-cutlass-dsl to load, and "
            f"that cannot be imported ({error}): build it on a machine with a linker"
        ) from error
    fd = _file_in_memory(image, entry.key.kernel)
    try:
        module = load_module(f"/proc/self/fd/{fd}", enable_tvm_ffi=True)
    finally:
        os.close(fd)
    function: Callable[..., Any] = module[FUNCTION]
    return function


def _where(entry: Entry | Built) -> str:
    return str(entry.directory or f"{entry.key.kernel}, key {entry.digest[:12]},")


@functools.cache
def _open_runtime_library() -> str:
    """Make the DSL's runtime visible to kernels that are loaded later; return its path."""
    path = str(toolchain.runtime_library().path)
    try:
        _check_extent(path)
        ctypes.CDLL(path, mode=os.RTLD_GLOBAL)
    except OSError as error:
        raise CacheError(f"the runtime library {path} cannot be loaded: {error}") from None
    return path


_ELF64 = b"\x7fELF\x02\x01"  # 64 bits, little endian
_ELF_HEADER = struct.Struct("<32xQQ6xHHHH")  # tables: offsets, entry sizes and counts
_ELF_SEGMENT = struct.Struct("<8xQ16xQ")  # offset and size in the file


def _check_extent(path: str) -> None:
    """Raise CacheError if a library is shorter than its ELF headers say.

    The dynamic loader maps a truncated library, and the process dies by SIGBUS. A file that is not
    ELF is left to the loader.
    """
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(64)
        if not head.startswith(_ELF64) or len(head) < 64:
            return
        segments, sections, segment_size, segment_count, section_size, section_count = (
            _ELF_HEADER.unpack_from(head)
        )
        end = max(segments + segment_size * segment_count, sections + section_size * section_count)
        file.seek(segments)
        table = file.read(segment_size * segment_count)
        for at in range(0, len(table) - _ELF_SEGMENT.size + 1, max(segment_size, 1)):
            end = max(end, sum(_ELF_SEGMENT.unpack_from(table, at)))
    if size < end:
        raise CacheError(
            f"the runtime library {path} is truncated: it has {size} bytes of {end}. Copy or "
            "install it again"
        )


def _file_in_memory(content: bytes, name: str) -> int:
    """A descriptor of a new file that holds `content`, sealed if the system supports that."""
    try:
        fd = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
            _write_all(fd, content)
        return fd
    _write_all(fd, content)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


_paths_so_far = itertools.count()


def _new_path(fd: int) -> str:
    """A path to an open file that differs from all earlier paths.

    The dynamic loader identifies libraries by path, and the numbers of closed descriptors are used
    again. So the path encodes a counter, as a series of "/" and "./".
    """
    number = next(_paths_so_far)
    steps = ("./" if number >> bit & 1 else "/" for bit in range(32))
    return f"/proc/self/fd/{''.join(steps)}{fd}"


def _write_all(fd: int, content: bytes) -> None:
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
