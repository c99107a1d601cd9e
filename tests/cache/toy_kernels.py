"""Small kernels that the cache's tests compile, load and call."""

from __future__ import annotations

import os
import time
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from toy_specs import SCALE, ScaleSpec, SumSpec

from cute_attn import cache

_THREADS = 128


class Scale:
    """``y = factor * x`` for vectors of any length."""

    def __init__(self, spec: ScaleSpec) -> None:
        self.spec = spec

    def fake_args(self):
        length = cute.sym_int()
        x, y = (
            make_fake_compact_tensor(cutlass.Float32, (length,), assumed_align=4) for _ in range(2)
        )
        return x, y, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        blocks = cute.ceil_div(cute.size(x), _THREADS)
        self.kernel(x, y).launch(grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * _THREADS + thread
        if i < cute.size(x):
            y[i] = x[i] * self.spec.factor


class Sum(Scale):
    """A sum over products of ``terms`` values held at once: with many of them, some spill."""

    def __init__(self, spec: SumSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        # 1024 threads share 65536 registers: 64 for each.
        self.kernel(x, y).launch(grid=[1, 1, 1], block=[1024, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        held = cute.make_rmem_tensor((self.spec.terms,), cutlass.Float32)
        for j in cutlass.range_constexpr(self.spec.terms):
            held[j] = x[thread + j * 1024]
        total = cutlass.Float32(0.0)
        for j in cutlass.range_constexpr(self.spec.terms):
            for i in cutlass.range_constexpr(4):
                total = total * held[j] + held[(7 * j + i) % self.spec.terms]
        y[thread] = total


class Reverse(Scale):
    """Reverses each 128 values through shared memory; two device kernels, run one after another."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        blocks = cute.size(x) // _THREADS
        self.kernel(x, y).launch(grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream)
        self.tail(x, y).launch(grid=[1, 1, 1], block=[_THREADS, 1, 1], smem=4096, stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        memory = cutlass.memory.SmemAllocator()
        held = memory.allocate_tensor(cutlass.Float32, cute.make_layout(_THREADS), 16)
        held[thread] = x[block * _THREADS + thread]
        cute.arch.sync_threads()
        y[block * _THREADS + thread] = held[_THREADS - 1 - thread]

    @cute.kernel
    def tail(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        i = cute.size(x) // _THREADS * _THREADS + thread
        if i < cute.size(x):
            y[i] = x[i]


class Broken(Scale):
    """Does not compile."""

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        y[0] = x[0] * self.spec.no_such_field


class Slow(Scale):
    """Takes minutes to compile, and leaves a file named by its process in the folder TOY_SLOW."""

    def fake_args(self):
        (Path(os.environ["TOY_SLOW"]) / f"pid-{os.getpid()}").touch()
        time.sleep(1000)


class AsksForAnother(Scale):
    """A kernel whose constructor needs another kernel, of another class."""

    def __init__(self, spec: ScaleSpec) -> None:
        super().__init__(spec)
        cache.get(SCALE, ScaleSpec(spec.factor + 1), "sm_90a")


class AsksForItself(Scale):
    """A kernel whose constructor needs the kernel itself."""

    def __init__(self, spec: ScaleSpec) -> None:
        super().__init__(spec)
        cache.get(cache.KernelDef("outer", "toy_kernels:AsksForItself"), spec, "sm_90a")


class AsksTooLate(Scale):
    """Asks for another kernel while the compiler is at work on it."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        cache.get(SCALE, ScaleSpec(11.0), "sm_90a")
        self.kernel(x, y).launch(grid=[1, 1, 1], block=[_THREADS, 1, 1], stream=stream)
