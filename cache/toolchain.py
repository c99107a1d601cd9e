"""The versions that a compiled kernel depends on, found without importing the compiler.

Without the compiler (a server image with prebuilt kernels), the compiler's version is unknown and
the key is *open*: an entry matches by all other fields. Loading then checks that the installed
runtime library defines every symbol that the entry needs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path
from typing import NamedTuple

from . import driver, settings
from .errors import CacheError, RefusedEntry, RefusedLibrary
from .log import warn_once
from .ownership import open_directory

RUNTIME_LIBRARY_NAME = "libcute_dsl_runtime.so"

# Environment variables of the DSL that change a kernel's code, except the variable for the
# architecture, which is always given as an option.
_CODE_CHANGING_VARIABLES = (
    "AUTO_M2S",
    "COMPILER_BACKEND",
    "COMPILER_OPT",
    "DEBUG",
    "DRYRUN",
    "ENABLE_ASSERTIONS",
    "ENABLE_PYIR",
    "LINEINFO",
    "LOC_TRACEBACKS",
    "TOLERATE_M2M",
)


class RuntimeLibrary(NamedTuple):
    """`libcute_dsl_runtime.so`, which every compiled kernel calls."""

    path: Path
    cuda: str | None
    """`"cu12"` or `"cu13"`, a component of the path; None for a path without such a component."""


def compile_options(kernel_options: str) -> str:
    """A kernel's own options, followed by the DSL's environment variables that change the kernel's
    code."""
    variables = (f"CUTE_DSL_{name}" for name in _CODE_CHANGING_VARIABLES)
    settings = [f"{name}={os.environ[name]}" for name in variables if os.environ.get(name)]
    return " ".join([*kernel_options.split(), *settings])


def _installed_version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def dsl_version() -> str | None:
    """The version of the installed compiler, or None if no compiler is installed."""
    return _installed_version("nvidia-cutlass-dsl")


@functools.cache
def runtime_version() -> str | None:
    """The version of the runtime library, or None if no installed distribution names it."""
    cuda = runtime_library().cuda
    version = _installed_version(f"nvidia-cutlass-dsl-libs-{cuda}") if cuda else None
    return version or dsl_version()


@functools.cache
def cuda_flavour() -> str | None:
    """`"cu12"` or `"cu13"`: the compiler's CUDA toolkit; None if unknown."""
    flavours = _installed_flavours()
    if dsl_version() is not None and flavours:
        return _chosen_flavour(flavours)
    try:
        return runtime_library().cuda
    except CacheError:
        return None


@functools.cache
def tvm_ffi_abi() -> str:
    """The version of the TVM-FFI ABI, which all releases 0.1.x share."""
    version = _installed_version("apache-tvm-ffi")
    if version is None:
        raise CacheError("apache-tvm-ffi is not installed: compiled kernels are called through it")
    return ".".join(version.split(".")[:2])


@functools.cache
def host_platform() -> str:
    """Operating system, machine and C library: `"linux-x86_64-glibc"`.

    The C library's version is left out because objects refer to none of its symbols. The CPU model
    is left out because objects are compiled for the machine's baseline (see `compiler`).
    """
    libc = platform.libc_ver()[0] or "libc"
    return f"{sys.platform}-{platform.machine()}-{libc}"


def _installed_flavours() -> dict[int, Path]:
    """CUDA major version -> runtime library, for each installed wheel.

    Two wheels may have one CUDA version, as in an environment on top of another. Then Python's path
    decides, because the first wheel also has the compiler in use.
    """
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    found: dict[int, Path] = {}
    for root in spec.submodule_search_locations or () if spec else ():
        for path in Path(root).glob(f"cu*/lib/{RUNTIME_LIBRARY_NAME}"):
            match = re.fullmatch(r"cu(\d+)", path.parts[-3])
            if match:
                found.setdefault(int(match[1]), path)
    return found


def _chosen_flavour(flavours: dict[int, Path]) -> str:
    """The flavour that the DSL uses: the newest that the driver supports, or the newest
    installed."""
    driver = _driver_cuda_major() if len(flavours) > 1 else None
    usable = [major for major in flavours if driver is None or major <= driver]
    return f"cu{max(usable or flavours)}"


def _driver_cuda_major() -> int | None:
    try:
        return int(driver.ask("cuDriverGetVersion")) // 1000
    except driver.DriverError:
        return None


@functools.cache
def runtime_library() -> RuntimeLibrary:
    """The runtime library: `CUTE_ATTN_RUNTIME_LIBRARY`, else the installed wheel's.

    Raises CacheError if no library is found, RefusedLibrary if others may write to the named
    library.
    """
    path = settings.named_runtime_library()
    if path is not None:
        if not settings.is_file(path):
            raise CacheError(f"CUTE_ATTN_RUNTIME_LIBRARY={path}: there is no such file")
        try:
            _refuse_strangers(path)
        except RefusedEntry as refusal:
            raise RefusedLibrary(
                f"CUTE_ATTN_RUNTIME_LIBRARY={path} is refused, so that no kernel can be loaded: "
                f"{refusal.fact}. Kernels run its code, so nobody else may be able to write it: "
                "make it yours with chown and chmod go-w, or name another copy"
            ) from None
        named = [part for part in path.parts if re.fullmatch(r"cu\d+", part)]
        return RuntimeLibrary(path, named[-1] if named else None)
    flavours = _installed_flavours()
    if not flavours:
        raise CacheError(
            f"{RUNTIME_LIBRARY_NAME} not found: install nvidia-cutlass-dsl, which also compiles, "
            "or the library alone (pip install --no-deps nvidia-cutlass-dsl-libs-cu12, or -cu13), "
            "or name a copy of the file in CUTE_ATTN_RUNTIME_LIBRARY"
        )
    cuda = _chosen_flavour(flavours)
    path = flavours[int(cuda[2:])]
    try:
        _refuse_strangers(path)
    except RefusedEntry as refusal:
        # Anyone who can change the library can also change the packages beside it, so refusing the
        # library does not help.
        warn_once(f"runtime {path}", "loaded all the same, as the Python around it: %s", refusal)
    return RuntimeLibrary(path, cuda)


def _refuse_strangers(library: Path) -> None:
    """Raise RefusedEntry if anyone but this user, root and the running Python's owner owns or can
    write to a library or its directory.
    """
    owners = frozenset({os.geteuid(), 0, Path(sys.prefix).stat().st_uid})
    library = Path(os.path.realpath(library))
    with contextlib.suppress(OSError), open_directory(library.parent, owners) as directory:
        os.close(directory.file(library.name))  # loading will report an OSError


def forget() -> None:
    """Read the environment again: for tests, and after installing a package."""
    for function in (
        dsl_version,
        runtime_version,
        cuda_flavour,
        tvm_ffi_abi,
        host_platform,
        runtime_library,
    ):
        function.cache_clear()
