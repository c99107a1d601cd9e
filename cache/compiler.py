"""The only module that uses the compiler; imported on a miss, never on a hit."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
import platform
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import cubin, linker, tracing
from .arch import check_arch
from .entry import FUNCTION, LIBRARY, OBJECT, PTX, Built, KernelUse
from .errors import CompileError
from .key import KernelDef, KeyDescription
from .log import logger, warn_once

# A process has one compiler state (MLIR context, options, dump paths).
_one_at_a_time = threading.Lock()

# `_calls` has an object for each call of `compile_kernel` in progress. A process forked during a
# call is interrupted. Its compiler state and import locks stay as they were at the fork.
_calls: set[object] = set()
_interrupted = False


def _after_fork_in_child() -> None:
    global _one_at_a_time, _interrupted
    _one_at_a_time = threading.Lock()
    _interrupted = _interrupted or bool(_calls)
    _calls.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def is_interrupted() -> bool:
    """Whether this process was forked in the middle of a compilation, and cannot compile."""
    return _interrupted


# By default the compiler compiles host code for the local CPU. Every 64-bit server CPU has these
# baselines, so that an entry also runs on other machines.
_HOST_BASELINE = {
    "x86_64": ("x86-64-v2", ("+sse4.2", "+popcnt", "+cx16")),
    "aarch64": ("generic", ("+neon",)),
}

# More than any compilation so far has written (PTX, cubin, object and shared object).
_SCRATCH_BYTES = 16 * 2**20
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


def compile_kernel(
    kernel: KernelDef, spec: object, key: KeyDescription, directory: Path | None
) -> Built:
    """Compile a kernel.

    Intermediate files go to `directory`, or to a temporary directory if `directory` is None or
    full. If no file can be written anywhere, the result is only an object file in memory.

    Raises CompileError from an exception of the compiler or of the kernel's own code.
    """
    call = object()
    _calls.add(call)
    try:
        with _failures_as_compile_errors(kernel, key):
            # Not under the lock, because a kernel's constructor may ask the cache for another
            # kernel.
            compile_function, target = _import(kernel)
            _check_compiler_knows(key.arch)
            started = time.perf_counter()
            instance = target(spec)
            arguments = instance.fake_args()
            seconds = time.perf_counter() - started

        def compile_in(scratch: Path | None) -> Built:
            started = time.perf_counter()
            uses: tuple[KernelUse, ...] = ()
            with _path_in_options(scratch) as path:
                options = _options(kernel, key.arch, path)
                with _source_locations(wanted=bool(key.options)):
                    # A JIT engine would compile the host code a second time: the cache loads the
                    # exported file.
                    compiled = compile_function(
                        instance, *arguments, options=options, no_jit_engine=True
                    )
                _use_baseline_cpu(compiled.ir_module)
                if scratch is None:
                    files = {OBJECT: _export_to_memory(compiled)}
                else:
                    files = _export(compiled, scratch)
                    code, log = _dumped(scratch, "cubin"), _ptxas_log(scratch)
                    uses = cubin.kernel_uses(code, log, str(compiled.ir_module))
            return Built(key, files, uses, seconds + time.perf_counter() - started)

        with _one_at_a_time, _failures_as_compile_errors(kernel, key):
            tracing.this_thread.kernel = kernel.name
            return _where_there_is_room(directory, compile_in)
    finally:
        tracing.this_thread.kernel = None
        _calls.discard(call)


def _where_there_is_room(
    directory: Path | None, compile_in: Callable[[Path | None], Built]
) -> Built:
    """Call `compile_in` with `directory`, with a temporary directory if `directory` is full, or
    with None."""
    for parent in (directory, *_temporary_directories()):
        if parent is None:
            continue
        with _scratch(parent) as scratch:
            if scratch is None:
                continue
            try:
                return compile_in(scratch)
            except Exception as error:
                if not _is_lack_of_room(error, scratch):
                    raise
                logger.info("no room in %s (%s): compiling elsewhere", parent, error)
    return compile_in(None)


@contextlib.contextmanager
def _failures_as_compile_errors(kernel: KernelDef, key: KeyDescription) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CompileError(
            f"{kernel.name} {key.specialisation} does not compile for {key.arch} "
            f"(key {key.digest[:12]}): {type(error).__name__}: {error}"
        ) from error


def _is_lack_of_room(error: BaseException | None, scratch: Path) -> bool:
    """Whether a compilation failed only because its files do not fit."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return True
        error = error.__cause__ or error.__context__
    return not _has_room(scratch)  # the compiler raises other exceptions for a full disk


class CompilerMissing(ImportError):
    """The compiler, or a package that is needed to compile, cannot be imported."""


def _import(kernel: KernelDef) -> tuple[Callable[..., Any], Any]:
    """`cutlass.cute.compile` and the kernel's class. Raises CompilerMissing."""
    cute = _needed("cutlass.cute", "nvidia-cutlass-dsl")
    _needed(cubin.READER, "pyelftools")
    _, _, attribute = kernel.target.partition(":")
    module: Any = importlib.import_module(kernel.module)
    target = functools.reduce(getattr, attribute.split("."), module)
    if not hasattr(target, "fake_args"):  # a spec file may call nothing but a kernel
        raise TypeError(f"{kernel.target} is no kernel: it has no fake_args")
    return cute.compile, target


def _needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CompilerMissing(
            f"{package} cannot be imported ({error}): install it, or prebuild this kernel into a "
            "directory that CUTE_ATTN_PREBUILT names (python -m cute_attn.cache build)"
        ) from error


@contextlib.contextmanager
def _path_in_options(directory: Path | None) -> Iterator[Path | None]:
    """A path to the directory without characters that need quotes, because the compiler's options
    lose quotes."""
    if directory is None or shlex.quote(str(directory)) == str(directory):
        yield directory
        return
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


def _options(kernel: KernelDef, arch: str, scratch: Path | None) -> str:
    options = ["--enable-tvm-ffi", f"--gpu-arch {arch}"]
    if scratch is not None:
        # "remarks{ptx}" makes ptxas report spills, in the file and not on stderr.
        options += ["--keep-ptx", "--keep-cubin", f"--dump-dir {scratch}"]
        options += [f"--remark-output {scratch / 'remarks'}", "remarks{ptx}"]
    return " ".join([*options, kernel.options])


@contextlib.contextmanager
def _source_locations(wanted: bool) -> Iterator[None]:
    """Unless `wanted`, stop the DSL from recording the source line of every operation. Requested
    remarks turn the recording on, at a third of the compile time, but ptxas's remarks have no
    lines. Other options, such as line info, do need source lines."""
    from cutlass.base_dsl import dsl

    switch = getattr(dsl, "_set_enable_frame_filtering", None)  # private: a release may remove it
    if wanted or switch is None:
        yield
        return

    def switch_off(enable: bool) -> None:
        switch(enable and tracing.this_thread.kernel is None)  # off for this thread only

    dsl._set_enable_frame_filtering = switch_off
    try:
        yield
    finally:
        dsl._set_enable_frame_filtering = switch


def _export_to_memory(compiled: Any) -> bytes:
    fd = os.memfd_create(OBJECT)
    with os.fdopen(fd, "rb") as file:
        compiled.export_to_c(f"/proc/self/fd/{fd}", function_name=FUNCTION)
        return file.read()


def _export(compiled: Any, scratch: Path) -> dict[str, bytes]:
    object_file, library = scratch / OBJECT, scratch / LIBRARY
    compiled.export_to_c(str(object_file), function_name=FUNCTION)
    files = {OBJECT: object_file.read_bytes(), PTX: _dumped(scratch, "ptx")}
    problem = linker.link(object_file, library)
    if problem is None:
        files[LIBRARY] = library.read_bytes()
    elif not _has_room(scratch):
        raise OSError(errno.ENOSPC, f"cannot be linked in: {problem}", str(scratch))
    else:
        warn_once(
            "linker",
            "no linker (%s): kernels are kept as object files, and loading one takes the "
            "compiler's own loader, which is slower and needs nvidia-cutlass-dsl",
            problem,
        )
    return files


def _use_baseline_cpu(module: Any) -> None:
    """Make the compiler target the machine's baseline CPU for an MLIR module's host functions."""
    from cutlass._mlir import ir

    baseline = _HOST_BASELINE.get(platform.machine())
    if baseline is None:
        return
    cpu, features = baseline
    listed = ", ".join(f'"{feature}"' for feature in features)
    with module.context:
        target_features = ir.Attribute.parse(f"#llvm.target_features<[{listed}]>")
        for operation in module.body.operations:
            function = operation.operation
            if function.name == "llvm.func" and len(function.regions[0].blocks) > 0:
                function.attributes["target_cpu"] = ir.StringAttr.get(cpu)
                function.attributes["target_features"] = target_features


def _dumped(scratch: Path, suffix: str) -> bytes:
    """The one file with this suffix that the compiler dumped.

    `artifacts` of the compiled function is no help: `artifacts` looks for the file by the
    architecture's name, and Thor has two names (sm_110a and sm_101a). If the file is not found,
    `artifacts` holds the path, not the content.
    """
    found = list(scratch.glob(f"*.{suffix}"))
    if len(found) != 1:
        raise RuntimeError(f"the compiler wrote {len(found)} .{suffix} files instead of one")
    return found[0].read_bytes()


def _check_compiler_knows(arch: str) -> None:
    """Raise ValueError for an architecture that the installed compiler does not know."""
    from cutlass import base_dsl

    known = getattr(getattr(base_dsl, "Arch", None), "__members__", {arch: arch})
    if arch not in known:
        usable = [name for name in known if _is_arch(name)]
        raise ValueError(
            f"this version of nvidia-cutlass-dsl does not know {arch}, only {', '.join(usable)}"
        )


def _is_arch(name: str) -> bool:
    try:
        return check_arch(name) == name
    except (ValueError, NotImplementedError):
        return False


def _ptxas_log(scratch: Path) -> str:
    """The output of ptxas, from the file of remarks."""
    try:
        return (scratch / "remarks").read_text(errors="replace")
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path | None]:
    """A directory under `parent` to compile in, or None if there is no room."""
    try:
        path = Path(tempfile.mkdtemp(prefix="cute_attn-", dir=parent))
    except OSError as error:
        logger.debug("no scratch directory in %s: %s", parent, error)
        yield None
        return
    try:
        yield path if _has_room(path) else None
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _temporary_directories() -> list[Path]:
    try:
        return [Path(tempfile.gettempdir()), Path("/dev/shm")]
    except FileNotFoundError:  # no temporary directory is writable
        return [Path("/dev/shm")]


def _has_room(directory: Path) -> bool:
    """Whether a compilation's files fit. A trial write is needed to see quotas and limits."""
    probe = directory / "probe"
    try:
        with probe.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _SCRATCH_BYTES)
        probe.unlink()
    except OSError as error:
        logger.debug("no room in %s: %s", directory, error)
        return False
    return True
