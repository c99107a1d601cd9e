"""The inverse of I + L in little machine code, for `forward` (see `compact_scores`)."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....common.ptx.memory import load_shared
from ..inverse import Inverse
from ..sub_chunks import SUB_CHUNKS, block_element, row_and_part

# The turns of each warp, of which turns 0 to 4 have a product:
#   0  N = L_ij X_jj
#   1  X_10 and X_32 of warps 0 and 1
#   2  N += L_i1 X_10
#   3  X_2j, or the product of X_33 and N_3j
#   4  the product of X_32 and N_2j, for the warp of X_3j
#   5  X_3j
TURNS = ((0, 1), (0, 1), (0, 2, 3, 4), (0, 2, 3, 5), (0, 3, 4), (0, 3, 5))
MEETINGS = (1, 4)  # turns after which warps meet


class CompactInverse(Inverse):
    """`Inverse` whose products of blocks are one piece of code, which warps run in turns. Blocks on
    the diagonal have ones on their diagonal and zeros above. Results have the same bits."""

    @cute.jit
    def invert(self, smem: Int32, part: Int32, tile: Int32) -> None:
        i = cutlass.select_(part == 0, Int32(1), 2 + (part & 1))
        j = cutlass.select_(part == 1, Int32(2), part >> 2)
        if part >= SUB_CHUNKS + 2:
            for m in cutlass.range(part - 6, SUB_CHUNKS, 2, unroll=1):
                self.store_block(smem, tile, m, m, self._diagonal_transposed(smem, m))
        if part == 7:
            for row in cutlass.range_constexpr(SUB_CHUNKS):
                for column in cutlass.range_constexpr(row + 1, SUB_CHUNKS):
                    self.put_zeros(tile, row, column)

        of_warps = sum(1 << (turn + 8 * warp) for warp, x in enumerate(TURNS) for turn in x)
        turns = Int32((Int64(of_warps) >> Int64(8 * part)) & Int64(255))
        n = cute.make_rmem_tensor((8,), Float32)  # the accumulators of N^T
        n.fill(0.0)
        for turn in cutlass.range(6, unroll=1):
            if (turns >> turn) & 1 == 1:
                self._turn(smem, part, tile, i, j, turn, n)
            if turn == MEETINGS[0] or turn == MEETINGS[1]:
                self.meet()
        self.end()

    @cute.jit
    def _turn(
        self, smem: Int32, part: Int32, tile: Int32, i: Int32, j: Int32, turn: Int32,
        n: cute.Tensor,
    ) -> None:  # fmt: skip
        x = cute.make_rmem_tensor((8,), Float32)  # the left operand, then the result
        of_exchange = turn == 2 or turn == 5
        if turn == 0:
            self._set(x, self._diagonal_transposed(smem, j))
        elif of_exchange:
            self._set(x, self._left_by(smem, cutlass.select_(turn == 2, Int32(0), 1 + j)))
        else:
            self._set(x, [-n[m] for m in range(8)])
        if turn == 5:
            self._set(x, [n[m] + x[m] for m in range(8)])
        else:
            column = cutlass.select_(turn == 2, Int32(1), cutlass.select_((turn & 1) == 1, i, j))
            row = cutlass.select_(turn == 4, Int32(3), i)
            column = cutlass.select_(turn == 4, Int32(2), column)
            rows = self._rows(self._block(smem, row, column))
            self._set(x, self._times(self._split([x[m] for m in range(8)]), rows))
        odd = (part & 1) == 1
        if turn == 1 or turn == 5 or (turn == 3 and not odd):
            self.store_block(smem, tile, i, j, [x[m] for m in range(8)])
        if turn == 4 or (turn == 1 and not odd):
            place = cutlass.select_(turn == 1, Int32(0), 1 + j)
            self._leave(smem, place, [x[m] for m in range(8)])
        if turn == 1 and odd:
            cute.arch.sync_warp()  # every lane has read the block
            self._store_rows(self._block(smem, i, j), [x[m] for m in range(8)])
        if turn == 0 or (turn == 3 and odd):
            self._set(n, [x[m] for m in range(8)])
        elif turn == 2:
            self._set(n, [n[m] + x[m] for m in range(8)])

    def _diagonal_transposed(self, smem: Int32, j: Any) -> list[Any]:
        """Return X_jj^T as accumulators. Its block has zeros above the diagonal."""
        r, c = row_and_part()
        block = self._block(smem, j, j)
        return [
            load_shared(Float32, block + block_element(8 * s + 2 * c + e, r + 8 * half))[0]
            for s in range(2)
            for half in range(2)
            for e in range(2)
        ]
