"""A kernel that does nothing but `common.exp2`, a warp to 64 numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_attn.kernels.common.exp2 import exp2_on_fma, exp2_pairs
from cute_attn.kernels.common.spec import Spec

PAIRS = 4  # of a thread
THREADS = 128


@dataclass(frozen=True)
class Exp2Spec(Spec):
    bounded: bool
    single: bool = False  # one at a time, for every architecture


class Exp2:
    def __init__(self, spec: Exp2Spec):
        self.bounded = spec.bounded
        self.single = spec.single

    def fake_args(self) -> tuple[Any, ...]:
        n = cute.sym_int(divisibility=2 * PAIRS * THREADS)
        x, y = (make_fake_tensor(cutlass.Float32, (n,), (1,), assumed_align=16) for _ in range(2))
        return x, y, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: Any) -> None:
        self.kernel(x, y).launch(
            grid=[x.shape[0] // (2 * PAIRS * THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor) -> None:
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        first = (block * THREADS + thread) * 2 * PAIRS
        pairs = [(x[first + 2 * j], x[first + 2 * j + 1]) for j in range(PAIRS)]
        if cutlass.const_expr(self.single):
            pairs = [(exp2_on_fma(x), exp2_on_fma(y)) for x, y in pairs]
        else:
            pairs = exp2_pairs(pairs, bounded=self.bounded)
        for j in cutlass.range_constexpr(PAIRS):
            y[first + 2 * j], y[first + 2 * j + 1] = pairs[j]
