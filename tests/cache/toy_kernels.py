"""Two small kernels that the cache's tests compile, load and call."""

from __future__ import annotations


import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from toy_specs import ScaleSpec

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
