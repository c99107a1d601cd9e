"""Building the engine: C sources of this package, compiled on first use and kept in the cache.

    <cache>/emulator/<digest>/integer.o ...    an object file, by digest of source and compiler
    <cache>/emulator/<digest>/engine.so        the library, by digest of its object files

<cache> is the directory of `cute_attn.cache`: `CUTE_ATTN_CACHE_DIR`, else the user's cache
directory. Every file is written under another name and renamed, so that an existing file is
complete.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ENGINE = Path(__file__).parent / "engine"

logger = logging.getLogger("cute_attn.emulator")

directory: Path | None = None
"""The directory to build in instead of the cache; set by tests."""

# No contraction, because the engine calls fma where PTX fuses. Integer overflow wraps, as in PTX.
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv")
_NATIVE = "-march=native"
_KEPT = 4
"""The number of engines that the cache keeps; builds newer than the oldest of these are kept
too."""
_SETTLED_SECONDS = 24 * 60 * 60
"""A build used within this time may still be in use, and is not evicted."""
_TIMEOUT_SECONDS = 900


class EmulatorUnavailable(RuntimeError):
    """The engine cannot be built here."""


class Compiler(NamedTuple):
    """A C compiler that compiles an empty file."""

    command: tuple[str, ...]
    flags: tuple[str, ...]
    identity: str
    """The compiler's version, and the processor if `-march=native` is used."""


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT_SECONDS,
        stdin=subprocess.DEVNULL,
    )


def _processor() -> str:
    """A description of the processor: `-march=native` depends on the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    lines = re.findall(r"^(?:flags|Features|model name|CPU part)\s*:.*$", text, re.MULTILINE)
    return "\n".join(sorted(set(lines)))


@functools.cache
def compiler() -> Compiler:
    """`$CC`, or the first of cc, gcc and clang that compiles an empty file.

    Raises:
        EmulatorUnavailable: no compiler is installed.
    """
    failures = []
    for text in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        command = tuple(shlex.split(text))
        if not command or shutil.which(command[0]) is None:
            continue
        check = [*command, *_FLAGS, "-x", "c", "-fsyntax-only", os.devnull]
        try:
            version = _run([*command, "--version"]).stdout
            native = _run([*check, _NATIVE]).returncode == 0
            done = _run(check)
        except (OSError, subprocess.TimeoutExpired) as error:
            failures.append(f"{text}: {error}")
            continue
        if done.returncode == 0:
            flags = (*_FLAGS, _NATIVE) if native else _FLAGS
            identity = f"{version}\n{platform.machine()}\n{_processor() if native else ''}"
            return Compiler(command, flags, identity)
        failures.append(f"{text}: {done.stderr.strip()}")
    raise EmulatorUnavailable(
        "the emulator is written in C and compiled on first use, and there is no C compiler here "
        f"({'; '.join(failures) or 'none of $CC, cc, gcc, clang found'}). Install gcc (Debian: "
        "apt install gcc; Fedora: dnf install gcc) or clang, or set CC"
    )


def _cache_directory() -> Path | None:
    """The kernel cache's directory; None if the user has no home directory."""
    chosen = os.environ.get("CUTE_ATTN_CACHE_DIR", "")
    if chosen:
        with contextlib.suppress(RuntimeError):  # without a home directory, a tilde is a name
            return Path(chosen).expanduser().absolute()
        return Path(chosen).absolute()
    import platformdirs

    try:
        default = Path(platformdirs.user_cache_dir("cute_attn", appauthor=False))
    except RuntimeError:  # neither HOME nor a passwd entry
        return None
    return default if default.is_absolute() else None


def _check_ownership(path: Path) -> None:
    """Raise unless only the current user can have written `path`, which holds native code."""
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o022:
        raise EmulatorUnavailable(
            f"{path} (owner uid {status.st_uid}, mode {mode:04o}) is a link, or others than uid "
            f"{os.geteuid()} can write it, so that it is not loaded: make it yours with chown and "
            "chmod go-w, or choose another directory with CUTE_ATTN_CACHE_DIR"
        )


_chosen_root: dict[None, Path] = {}


def _root() -> Path:
    """The directory of all builds: a temporary directory if the cache cannot be written."""
    root = _chosen_root.get(None)
    # setdefault: concurrent threads all take the first thread's directory.
    return root or _chosen_root.setdefault(None, _choose_root())


def _choose_root() -> Path:
    cache = _cache_directory()
    root = directory or (cache / "emulator" if cache is not None else None)
    if root is not None:
        try:
            root.parent.parent.mkdir(parents=True, exist_ok=True)
            # The kernel cache also refuses a directory that others can write to; with a umask of
            # 002 the group could write.
            root.parent.mkdir(mode=0o700, exist_ok=True)
            root.mkdir(mode=0o700, exist_ok=True)
            if os.access(root, os.W_OK):
                _check_ownership(root)
                return root
        except OSError:
            pass
    scratch = tempfile.mkdtemp(prefix="cute-attn-emulator-")
    atexit.register(_remove_if_of, os.getpid(), scratch)
    return Path(scratch)


def _remove_if_of(process: int, scratch: str) -> None:
    if os.getpid() == process:  # a forked child must not remove the parent's
        shutil.rmtree(scratch, ignore_errors=True)


def _digest(*parts: bytes | str) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:32]


def _make(target: Path, arguments: Sequence[str]) -> Path:
    """Run the compiler to make `target`, unless it exists. Other processes may do this at the same
    time."""
    if target.exists():
        _check_ownership(target)
        return target
    target.parent.mkdir(mode=0o700, exist_ok=True)
    fd, scratch = tempfile.mkstemp(prefix=".", suffix=target.suffix, dir=target.parent)
    os.close(fd)
    try:
        command = [*compiler().command, *arguments, "-o", scratch]
        try:
            done = _run(command)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EmulatorUnavailable(f"{shlex.join(command)}: {error}") from None
        if done.returncode != 0:
            raise EmulatorUnavailable(
                f"the emulator's engine cannot be built here:\n{shlex.join(command)}\n"
                f"{done.stderr.strip()[:4000]}"
            )
        os.replace(scratch, target)  # noqa: PTH105 - names, not paths
    finally:
        Path(scratch).unlink(missing_ok=True)
    return target


def _object_target(source: Path) -> Path:
    """The path of a source's object file."""
    found = compiler()
    headers = sorted(source.parent.glob("*.h"))
    digest = _digest(
        " ".join(found.flags),
        found.identity,
        source.read_bytes(),
        *(header.name.encode() + b"\0" + header.read_bytes() for header in headers),
    )
    return _root() / digest / f"{source.stem}.o"


def object_file(source: Path) -> Path:
    """The object file of a C source; the headers beside a source count as part of it.

    Raises:
        EmulatorUnavailable: no compiler is installed, or the compiler fails.
    """
    made = _compile(source, _object_target(source))
    _used([made])
    return made


def shared_library(name: str, sources: Sequence[Path]) -> Path:
    """A shared library of C sources, called `name`; built if not in the cache.

    Raises:
        EmulatorUnavailable: no compiler is installed, or the compiler fails.
    """
    objects = [object_file(source) for source in sources]
    library = _root() / _digest(*map(str, objects)) / name
    made = link(library, objects, ["-ldl", "-lpthread"])
    _used([made])
    return made


def kept(name: str) -> Path:
    """A directory beside the builds, for files that later processes need.

    Raises:
        EmulatorUnavailable: others than this user can write to the directory.
    """
    path = _root() / name
    path.mkdir(mode=0o700, exist_ok=True)
    _check_ownership(path)
    return path


def _compile(source: Path, target: Path) -> Path:
    there = target.exists()
    made = _make(target, [*compiler().flags, "-c", str(source)])
    if not there and _object_target(source) != target:  # edited: the digest is wrong
        made.unlink(missing_ok=True)
        raise EmulatorUnavailable(f"{source}, or a header, has changed while it was compiled")
    return made


def link(library: Path, inputs: Iterable[Path], flags: Sequence[str] = ()) -> Path:
    """Link object files into a shared library at `library`.

    Raises:
        EmulatorUnavailable: no compiler is installed, or the compiler fails.
    """
    # Symbols bind within the library, because the real CUDA runtime, with equal names, may be
    # loaded.
    return _make(library, ["-shared", "-Wl,-Bsymbolic", *flags, *map(str, inputs), "-lm"])


def load(library: Path, mode: int = os.RTLD_LOCAL | os.RTLD_NOW) -> ctypes.CDLL:
    """A shared library, also from a file system from which nothing may be executed (noexec)."""
    try:
        return ctypes.CDLL(str(library), mode=mode)
    except OSError:
        if not os.statvfs(library).f_flag & os.ST_NOEXEC:
            raise
    # The dynamic loader tells libraries apart by path, so the descriptor stays open.
    fd = os.memfd_create(library.name, os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as copy:
        copy.write(library.read_bytes())
    return ctypes.CDLL(f"/proc/self/fd/{fd}", mode=mode)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Processes that need the same library wait for the first, where locks work."""
    fd = os.open(_root() / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _locks.add(fd)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process forked in between has the descriptor too
        _locks.discard(fd)
        os.close(fd)


_locks: set[int] = set()  # descriptors of building threads' locks


def _after_fork() -> None:
    """Close the locks of threads that do not exist in the forked process."""
    for fd in _locks:
        os.close(fd)
    _locks.clear()


os.register_at_fork(after_in_child=_after_fork)


def _evict(library: Path) -> None:
    """Drop builds that have not been used for a while, except the newest engines' builds.

    `_used` records the time of use as the directory's time. A process that has loaded a library
    keeps the library, because the file stays until it is unmapped. A process about to load a
    library that is gone links the library again. The caller holds the lock, so no other process is
    building.
    """
    builds = []
    for path in _root().iterdir():
        with contextlib.suppress(OSError):  # removed, or another user's
            if re.fullmatch(r"[0-9a-f]{32}", path.name) and path.is_dir():
                builds.append((path.stat().st_mtime, path))
    engines = sorted(
        (when for when, path in builds if (path / library.name).exists()), reverse=True
    )
    if len(engines) <= _KEPT:
        return
    oldest = min(engines[_KEPT - 1], time.time() - _SETTLED_SECONDS)
    for when, path in builds:
        if when < oldest:
            shutil.rmtree(path, ignore_errors=True)


def _used(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # the cache may be read-only
            os.utime(path.parent)


def _announce(missing: int) -> None:
    """Log why the call takes long, as a warning: warnings show without configuring logging."""
    if missing:
        logger.warning(
            "compiling the emulator's engine (%d C files with %s), once for this machine: up to a "
            "minute",
            missing,
            shlex.join(compiler().command),
        )


def engine_library() -> Path:
    """The engine as a shared library; built if not in the cache.

    Raises:
        EmulatorUnavailable: no compiler is installed, or the compiler fails.
    """
    sources = sorted(ENGINE.glob("*.c"), key=lambda path: -path.stat().st_size)
    targets = [_object_target(source) for source in sources]
    objects = sorted(targets)
    library = _root() / _digest(*map(str, objects)) / "engine.so"
    if not library.exists():
        with _one_at_a_time():
            _announce(sum(not target.exists() for target in targets))
            with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
                list(pool.map(_compile, sources, targets))
            link(library, objects, ["-Wl,--no-undefined"])
            _used([*objects, library])
            _evict(library)
    _used([*objects, library])
    return link(library, objects, ["-Wl,--no-undefined"])
