"""Reads a tensor with plain loads to registers and keeps a checksum. `bench async-copy` compares
all copies to this kernel, which measures the highest rate of reads from L2 or memory.

Thread t of all CTAs reads 16-byte vectors t, t + threads, ..., and starts again at the tensor's
end. Runs on sm_80 and newer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..common.arguments import fake_contiguous
from ..common.entry import entry, gathered, placeholders
from ..common.ptx.memory import load_global
from ..common.spec import VECTOR_BYTES
from .arguments import next_place
from .spec import READ_THREADS, VECTOR_WORDS, PlainReadSpec
from .work import FACTOR


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        source: `[vectors, 4]`, int32, at least `unroll` vectors a thread.
        sums: `[CTAs, READ_THREADS, 4]`, int32, the checksums of each thread.
        count: times that each thread reads `unroll` vectors.
    """

    source: cute.Tensor
    sums: cute.Tensor
    count: Int32


class PlainRead:
    """The kernel for one PlainReadSpec; see the module's docstring."""

    def __init__(self, spec: PlainReadSpec):
        self.spec = spec

    def fake_args(self) -> tuple[Any, ...]:
        return placeholders(
            Arguments(
                source=fake_contiguous(Int32, (cute.sym_int(), VECTOR_WORDS), VECTOR_BYTES),
                sums=fake_contiguous(
                    Int32, (cute.sym_int(), READ_THREADS, VECTOR_WORDS), VECTOR_BYTES
                ),
                count=Int32(1),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch a CTA for each row of `sums`."""
        a, stream = gathered(Arguments, args)
        self.kernel(a).launch(
            grid=[a.sums.shape[0], 1, 1], block=[READ_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        vectors, step = Int32(x.source.shape[0]), Int32(x.sums.shape[0]) * READ_THREADS
        place = cta * READ_THREADS + thread
        checksum = cute.make_rmem_tensor((VECTOR_WORDS,), Int32)
        checksum.fill(0)
        start = x.source.iterator.toint()
        for _ in cutlass.range(x.count, unroll=1):
            loaded = []
            for _ in cutlass.range_constexpr(self.spec.unroll):
                at = start + Int64(place) * VECTOR_BYTES
                loaded.append(load_global(Int32, at, VECTOR_WORDS))
                place = next_place(place, step, vectors)
            for words in loaded:
                for i in cutlass.range_constexpr(VECTOR_WORDS):
                    checksum[i] = checksum[i] * FACTOR + words[i]
        for i in cutlass.range_constexpr(VECTOR_WORDS):
            x.sums[cta, thread, i] = checksum[i]
