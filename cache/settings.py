"""The environment variables of the cache, read at each miss and never on the warm path.

`CUTE_ATTN_ARCH` is read by `arch` and `CUTE_ATTN_RUNTIME_LIBRARY` by `toolchain`.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from .errors import CacheError
from .log import warn_once

LAYOUT = "v1"
"""Name of the directory, inside a cache directory, that holds everything: the format's version."""

DEFAULT_MAX_BYTES = 5 * 2**30


def _working_directory() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


_START = _working_directory()  # base of relative paths in the environment, also after a chdir
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def cache_directory() -> Path | None:
    """`CUTE_ATTN_CACHE_DIR`, else the platform's cache directory; None if the user has no home
    directory."""
    chosen = _named("CUTE_ATTN_CACHE_DIR")
    if chosen is not None:
        return chosen
    import platformdirs  # the import takes 6 ms, so only without the variable

    try:
        default = Path(platformdirs.user_cache_dir("cute_attn", appauthor=False))
    except RuntimeError:  # neither HOME nor a passwd entry
        return None
    return default if default.is_absolute() else None  # older platformdirs: "~/.cache/cute_attn"


def prebuilt_directories() -> list[Path]:
    """The directories in `CUTE_ATTN_PREBUILT`, in order of preference.

    A directory without kernels stays in the list, after one warning, because the directory may be
    mounted later.
    """
    paths = _prebuilt()
    for path in paths:
        if not _is_directory(path / LAYOUT):
            problem = f"has no {LAYOUT} in it" if _is_directory(path) else "is no directory"
            warn_once(f"prebuilt {path}", "CUTE_ATTN_PREBUILT: %s %s: no kernels", path, problem)
    return paths


_recording: Path | None = None


def record_to(path: Path | None) -> Path | None:
    """Have the kernels that are loaded from now on recorded in a file, whatever the environment
    says; return the file of the call before."""
    global _recording
    before, _recording = _recording, path
    return before


def record_path() -> Path | None:
    """The spec file in which kernels are recorded as they are used: the file given to `record_to`,
    or the file that `CUTE_ATTN_RECORD` names."""
    return _recording or _named("CUTE_ATTN_RECORD")


def named_runtime_library() -> Path | None:
    """`CUTE_ATTN_RUNTIME_LIBRARY`: the runtime library to load in place of the installed one."""
    return _named("CUTE_ATTN_RUNTIME_LIBRARY")


def for_children() -> dict[str, str]:
    """The environment of a child process, in which the paths above mean the same as in this
    process."""
    names = ("CUTE_ATTN_CACHE_DIR", "CUTE_ATTN_RECORD", "CUTE_ATTN_RUNTIME_LIBRARY")
    paths = {name: str(path) for name in names if (path := _named(name))}
    return {**os.environ, **paths, "CUTE_ATTN_PREBUILT": os.pathsep.join(map(str, _prebuilt()))}


def _named(variable: str) -> Path | None:
    """The path that a variable names; None if it is empty or not set."""
    text = os.environ.get(variable, "")
    return absolute(text, _START) if text else None


def _prebuilt() -> list[Path]:
    listed = os.environ.get("CUTE_ATTN_PREBUILT", "").split(os.pathsep)
    return [absolute(item, _START) for item in listed if item]


def absolute(text: str, start: Path | None = None) -> Path:
    """The absolute form of a path, as a shell in the directory `start` reads it: `~` is the home
    directory, if the user has one. `start` is by default the working directory."""
    path = Path(text)
    with contextlib.suppress(RuntimeError):
        path = path.expanduser()
    return (start / path if start else path).absolute()


def is_file(path: Path) -> bool:
    """Whether path is a file that this user can see."""
    return os.path.isfile(path)  # noqa: PTH113


def _is_directory(path: Path) -> bool:
    """Whether path is a directory; False where `Path.is_dir` would raise PermissionError."""
    return os.path.isdir(path)  # noqa: PTH112


def parse_bytes(text: str) -> int:
    """`"500M"`, `"5 GiB"` or `"1234"` as a number of bytes (units are powers of 1024).

    Raises ValueError for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write for example 500M or 5GiB")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size >= 2**63:
        raise ValueError(f"{text!r} is larger than any disk")
    return int(size)


def max_bytes_or_default() -> int:
    """`max_bytes`, or the default after one warning if the value is bad."""
    try:
        return max_bytes()
    except CacheError as error:
        warn_once("max bytes", "%s. The default of 5 GiB is in force", error)
        return DEFAULT_MAX_BYTES


def max_bytes() -> int:
    """`CUTE_ATTN_CACHE_MAX_BYTES`, by default 5 GiB. Raises CacheError for a bad value."""
    text = os.environ.get("CUTE_ATTN_CACHE_MAX_BYTES", "")
    if not text:
        return DEFAULT_MAX_BYTES
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise CacheError(f"CUTE_ATTN_CACHE_MAX_BYTES: {error}") from None
