"""Zeroes the rows of a tensor that belong to no sequence, and the unused rows of sequences.

A backward's kernels write only the used rows of each sequence, so that every row of a gradient is
written once. Here a CTA has a tile of rows. The CTA zeroes the rows before the first sequence and
after the last sequence, and with seqused the rows after each sequence's used rows.

Runs on sm_80 and newer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .arguments import fake_contiguous
from .entry import entry, gathered, placeholders
from .ptx.memory import store_global
from .sequences import Sequences
from .spec import VECTOR_BYTES
from .zero_unused_spec import ZeroUnusedSpec

NUM_THREADS = 256
ROWS = 64  # rows per CTA
WORDS = VECTOR_BYTES // 4  # words per store


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        x: `[n, tokens, words]`, 32-bit words of any type. Every `x[i]` has the same packed
            sequences; without cu_seqlens, `x[i]` has sequence i modulo the batch size.
        cu_seqlens: `[batch + 1]`.
        seqused: `[batch]`.
    """

    x: cute.Tensor
    cu_seqlens: cute.Tensor | None
    seqused: cute.Tensor | None


class ZeroUnused:
    """The kernel for one ZeroUnusedSpec; see the module's docstring."""

    def __init__(self, spec: ZeroUnusedSpec):
        self.spec = spec

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        spec = self.spec
        shape = (cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=WORDS))
        return placeholders(
            Arguments(
                x=fake_contiguous(Int32, shape, VECTOR_BYTES),
                cu_seqlens=fake_contiguous(Int32, (cute.sym_int(),)) if spec.varlen else None,
                seqused=fake_contiguous(Int32, (cute.sym_int(),)) if spec.seqused else None,
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch a CTA for each tile of rows."""
        a, stream = gathered(Arguments, args)
        self.kernel(a).launch(
            grid=[_tiles(a.x) * a.x.shape[0], 1, 1],
            block=[NUM_THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, a: Arguments) -> None:
        x, cu_seqlens, seqused = a
        cta, _, _ = cute.arch.block_idx()
        n = cta // _tiles(x)
        start = (cta - n * _tiles(x)) * ROWS
        end = cutlass.min(start + ROWS, x.shape[1])
        sequences = Sequences(x.shape[1], cu_seqlens, seqused)
        if cutlass.const_expr(cu_seqlens is None):
            used = sequences.length(n % seqused.shape[0])
            self.zero(x, n, cutlass.max(start, used), end)
        else:
            batch = cu_seqlens.shape[0] - 1
            self.zero(x, n, start, cutlass.min(end, cu_seqlens[0]))
            self.zero(x, n, cutlass.max(start, cu_seqlens[batch]), end)
            if cutlass.const_expr(seqused is not None):
                # The first sequence that ends after `start`.
                sequence, high = Int32(0), Int32(batch)
                while sequence < high:
                    middle = (sequence + high) >> 1
                    if cu_seqlens[middle + 1] > start:
                        high = middle
                    else:
                        sequence = middle + 1
                while sequence < batch and cu_seqlens[sequence] < end:
                    used = cutlass.max(0, sequences.length(sequence))
                    self.zero(
                        x, n, cutlass.max(start, cu_seqlens[sequence] + used),
                        cutlass.min(end, cu_seqlens[sequence + 1]),
                    )  # fmt: skip
                    sequence += 1

    @cute.jit
    def zero(self, x: cute.Tensor, n: Int32, start: Int32, end: Int32) -> None:
        """Zero rows start to end - 1, by all threads."""
        thread, _, _ = cute.arch.thread_idx()
        words = Int64(x.shape[2])
        first = x.iterator + (Int64(n) * x.shape[1] + start) * words
        count = (end - start) * Int32(x.shape[2] // WORDS)
        for i in cutlass.range(thread, count, NUM_THREADS, unroll=1):
            store_global(Int32, (first + Int64(i) * WORDS).toint(), [Int32(0)] * WORDS)


def _tiles(x: cute.Tensor) -> Int32:
    return (x.shape[1] + (ROWS - 1)) // ROWS
