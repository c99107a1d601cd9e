"""Scores within a sub-chunk by halves, for rows that are out of range (see `scores`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.ptx.convert import pack_all
from ...common.ptx.math import exp2
from ...common.ptx.memory import store_shared
from ...common.ptx.mma import mma
from .gate_sums import GateSums
from .sub_chunks import (
    SUB_CHUNK,
    ChunkMemory,
    block_element,
    block_offset,
    load_channels,
    parity,
    row_and_part,
)


class ScoresByHalves:
    """Computes the scores of 8 later tokens against 8 earlier tokens, then of 4 against 4, 2
    against 2, and 1 against 1. All methods run on the device.
    """

    def __init__(self, memory: ChunkMemory, sums: GateSums):
        self.memory, self.sums, self.dtype = memory, sums, memory.dtype

    @cute.jit
    def levels(self, smem: Int32, b: Int32, half: Int32, scale: Float32) -> None:
        """Store the scores of two of the four levels of sub-chunk b: L below the diagonal of its
        block, and scale q k, transposed, above it.

        A level pairs h later tokens with the h tokens before them. A sub-chunk has 8 later tokens
        in all. Rows 0 to 7 of the left operand are q of these tokens, rows 8 to 15 are k. The right
        operand has the 8 earlier tokens. Only elements whose two tokens are in one group of 2 h are
        used.
        """
        for level in cutlass.range(2 * half, 2 * half + 2, unroll=1):
            shift = 3 - level
            h = 1 << shift
            r, c = row_and_part()
            pair = r >> shift
            # Tokens of the sub-chunk.
            reference = (pair << (shift + 1)) + h
            later = reference + (r & (h - 1))
            product = self._level(smem, b, later, later - h, reference)
            of_k = self.memory.row_factor(smem, b * SUB_CHUNK + later)
            of_q = scale
            if cutlass.const_expr(self.memory.l2norm):
                of_q = self.memory.of_token(smem, "inverse_norm_q", b * SUB_CHUNK + later)
            block = smem + self.memory["blocks"] + block_offset(b, b)
            for i in cutlass.range_constexpr(2):
                n = 2 * c + i
                if (n >> shift) == pair:
                    earlier = (pair << (shift + 1)) + (n & (h - 1))
                    column = self.memory.column_factor(smem, b * SUB_CHUNK + earlier)
                    transposed = block + block_element(earlier, later)
                    store_shared(Float32, transposed, [(product[i] * column) * of_q])
                    at = block + block_element(later, earlier)
                    store_shared(Float32, at, [product[2 + i] * (of_k * column)])

    def _level(self, smem: Int32, b: Int32, later: Any, earlier: Any, reference: Any) -> list[Any]:
        """Multiply q and k of the later tokens with k of the earlier tokens, for one level of
        sub-chunk b. Return the thread's accumulators."""
        _, c = row_and_part()
        acc: list[Sequence[Any]] = [
            [Float32(0.0)] * 4 for _ in range(2)
        ]  # two, to shorten the chain of MMAs
        first = b * SUB_CHUNK
        memory = self.memory
        k_later, k_earlier = (
            (
                smem + memory["k"] + (first + row) * memory.qk_row + c * 16,
                parity(row) << 6,
            )
            for row in (later, earlier)
        )
        rows_p = [
            (
                smem + memory["p"] + (first + row) * memory.p_row + c * 32,
                parity(row) << 4,
                row,
            )
            for row in (later, earlier, reference)
        ]
        # Given 255 registers, the compiler would interleave all groups and spill.
        hasty = memory.blocks_per_sm() == 1
        for g in range(memory.groups):
            if hasty:
                cute.arch.sync_warp()
            at = k_later[0] + ((g << 6) ^ k_later[1])
            q = memory.load_elements(at + (memory["q"] - memory["k"]))
            k = memory.load_elements(at)
            column = memory.load_elements(k_earlier[0] + ((g << 6) ^ k_earlier[1]))
            in_range = self.sums.rows_of_half(smem, b, g // (memory.groups // 2))
            p_later, p_earlier, p_reference = (
                self.sums.sums_of(load_channels(at + (g << 7), swap), row, in_range)
                for at, swap, row in rows_p
            )
            decay = [exp2(x - y) for x, y in zip(p_later, p_reference, strict=True)]
            q = pack_all(self.dtype, [x * y for x, y in zip(q, decay, strict=True)])
            k = pack_all(self.dtype, [x * y for x, y in zip(k, decay, strict=True)])
            decay = [exp2(x - y) for x, y in zip(p_reference, p_earlier, strict=True)]
            column = pack_all(self.dtype, [x * y for x, y in zip(column, decay, strict=True)])
            for t in range(2):
                a = (q[2 * t], k[2 * t], q[2 * t + 1], k[2 * t + 1])
                acc[t] = mma(self.dtype, acc[t], a, column[2 * t : 2 * t + 2])
            if hasty:
                cute.arch.sync_warp()
        return [x + y for x, y in zip(*acc, strict=True)]
