"""The parts of the CuTe DSL that ask for a device, keep compiled code, or time a kernel."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from . import images
from .launches import Launches


def install(launches: Launches) -> None:
    """Change the compiler's Python classes for the emulated device."""
    from cutlass.base_dsl import compiler, jit_executor
    from cutlass.cutlass_dsl import cuda_jit_executor, tvm_ffi_provider

    _keep_code(compiler, jit_executor.JitFunctionArtifacts)
    for owner in (
        cuda_jit_executor.CudaDialectJitCompiledFunction,
        jit_executor.JitExecutor,
        tvm_ffi_provider.TVMFFIJitCompiledFunction,
        tvm_ffi_provider.TVMFFIJitCompiledFunctionWithKwargs,
    ):
        owner.__call__ = _raising(owner.__call__, launches)
    for owner in (jit_executor.JitExecutor, jit_executor.JitCompiledFunction):
        owner.run_compiled_program = _raising(owner.run_compiled_program, launches)
    _hardware(launches)
    _benchmarks()


def _keep_code(compiler: Any, artifacts: Any) -> None:
    """Let every function keep its PTX and machine code.

    The environment variable for this would turn off the compiler's cache in memory, so that each
    call of a `@cute.jit` function would be compiled anew.
    """
    apply = compiler.CompileOptions.apply_envar_settings
    read = artifacts.__post_init__

    def apply_and_keep(self: Any, *args: Any) -> None:
        for option in (compiler.KeepPTX, compiler.KeepCUBIN):
            self.options[option].value = True
        apply(self, *args)

    def read_and_keep(self: Any) -> None:
        read(self)
        images.register(self.PTX, self.CUBIN)

    compiler.CompileOptions.apply_envar_settings = apply_and_keep
    artifacts.__post_init__ = read_and_keep


def _raising(call: Callable[..., Any], launches: Launches) -> Callable[..., Any]:
    """A call of compiled host code that raises a launch's own error in place of a CUDA error."""

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        with launches.raising():
            return call(*args, **kwargs)

    return called


def _hardware(launches: Launches) -> None:
    from cutlass.base_dsl.runtime import cuda
    from cutlass.utils import HardwareInfo

    device = launches.options.device

    def capability(device_id: int = 0) -> tuple[int, int]:
        return device.capability

    def clusters(self: Any, cluster_size: int, stream: Any = None) -> int:
        return device.num_sms // cluster_size

    cuda.get_compute_capability_major_minor = capability
    HardwareInfo.get_max_active_clusters = clusters  # the real one launches on a driver


def _benchmarks() -> None:
    import cutlass.cute.testing
    import cutlass.testing

    def benchmark(
        callable: Callable[..., Any],  # noqa: A002 - the DSL's name
        *,
        workspace_generator: Callable[[], Any] | None = None,
        kernel_arguments: Any = None,
        **_: Any,
    ) -> float:
        """Call once, because the time says nothing about a GPU; return microseconds."""
        arguments = kernel_arguments if workspace_generator is None else workspace_generator()
        started = time.perf_counter()
        if arguments is None:
            callable()
        else:
            callable(*arguments.args, **arguments.kwargs)
        return (time.perf_counter() - started) * 1e6

    def count(*_: Any, **__: Any) -> int:
        return 1

    for module in (cutlass.testing, cutlass.cute.testing):
        module.benchmark = benchmark
        module.get_workspace_count = count
