"""A kernel that does nothing but `parts.mask.mask_words`, with bounds of each thread's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_attn.kernels.attention.parts.mask import mask_words
from cute_attn.kernels.common.spec import Spec

WORDS = 32  # of a thread
THREADS = 128


@dataclass(frozen=True)
class MaskSpec(Spec):
    bounded_below: bool


class MaskWords:
    def __init__(self, spec: MaskSpec):
        self.bounded_below = spec.bounded_below

    def fake_args(self) -> tuple[Any, ...]:
        n = cute.sym_int(divisibility=THREADS)
        bounds = [make_fake_tensor(Int32, (n,), (1,), assumed_align=4) for _ in range(2)]
        words = make_fake_tensor(Int32, (n, WORDS), (WORDS, 1), assumed_align=16)
        return *bounds, words, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(
        self, low: cute.Tensor, high: cute.Tensor, words: cute.Tensor, stream: Any
    ) -> None:
        self.kernel(low, high, words).launch(
            grid=[low.shape[0] // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, low: cute.Tensor, high: cute.Tensor, words: cute.Tensor) -> None:
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        row = block * THREADS + thread
        own = cute.make_rmem_tensor((WORDS,), Int32)
        for j in cutlass.range_constexpr(WORDS):
            own[j] = words[row, j]
        mask_words(own, low[row] if self.bounded_below else None, high[row])
        for j in cutlass.range_constexpr(WORDS):
            words[row, j] = own[j]
