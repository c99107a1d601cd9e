"""(I + L)^-1 of a chunk, L strictly lower triangular, 64 by 64 in blocks of 16 by 16.

A block on the diagonal is inverted by forward substitution in float32, a lane a column
(`invert_diagonal`). With X the inverse, a column of blocks then follows from itself and from the
diagonal alone,

    X_ij = -X_ii (L_ij X_jj + ... + L_i,i-1 X_i-1,j)

so that each of 4 warps has one, and all of it in registers (`invert_column`). All factors are true
inverses, or L itself, so nothing grows that would have to cancel. Products are of tf32 in three
parts, nearly as accurate as float32.

They are computed transposed, X_ij^T = -(X_jj^T L_ij^T + ...) X_ii^T: accumulators of 16 by 8 are
where the left operand of the next product wants them, if its index k runs 0, 2, 4, 6, 1, 3, 5, 7;
and then a right operand M^T is two neighbours of a row of M.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common import warp
from .scores import (
    REGION_BYTES,
    SUB_CHUNK,
    SUB_CHUNKS,
    ChunkScores,
    block_element,
    block_offset,
    tile_unit,
)


def split(x: Any) -> tuple[Any, Any]:
    """x as two operands of a tf32 product, which takes the upper 19 bits of each: the second is x
    less what is taken of the first. To 21 bits."""
    x = Float32(x)
    high = Int32(x.bitcast(Int32)) & Int32(-(1 << 13))
    low = x - high.bitcast(Float32)
    return high, low.bitcast(Int32)


class ChunkInverse(ChunkScores):
    """What is done to the blocks of L."""

    @cute.jit
    def invert_diagonal(self, smem: Int32, b: Int32) -> None:
        """Block (b, b) below its diagonal becomes that of the inverse, whose diagonal is 1."""
        lane = cute.arch.lane_idx()
        n = lane & (SUB_CHUNK - 1)
        block = smem + self.blocks + block_offset(b, b)
        column = self._substituted(block, n)
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(1, SUB_CHUNK):
            if lane < i:
                warp.store_shared(Float32, block + block_element(i, n), [column[i]])

    def _substituted(self, block: Any, n: Any) -> list[Any]:
        """Column n of the inverse."""
        column: list[Any] = []
        for i in range(SUB_CHUNK):
            row: list[Any] = []
            for j in range(0, i, 4):
                row += warp.load_shared(Float32, block + block_element(i, j), 4)
            x = cutlass.select_(n == i, Float32(1.0), Float32(0.0))
            for j in range(i):
                x = cute.math.fma(-row[j], column[j], x)
            column.append(x)
        return column

    @cute.jit
    def invert_column(self, smem: Int32, j: Int32) -> None:
        """Column j of blocks of the inverse, to `put_inverse`."""
        r, _ = self.row_and_part()
        at = smem + self.beta + (j * SUB_CHUNK + r) * 4
        beta = [warp.load_shared(Float32, at + 32 * half)[0] for half in range(2)]
        # X_mj^T as left operands, of which each is split in two.
        size = (SUB_CHUNKS - 1) * 16
        known = cute.make_rmem_tensor((size,), Int32)
        known.fill(0)
        for i in cutlass.range_constexpr(SUB_CHUNKS):
            if i < j:
                self.put_inverse(smem, i, j, [Float32(0.0)] * 8, beta)
            elif i == j:
                x = self._diagonal_transposed(smem, j)
                self.put_inverse(smem, i, j, x, beta)
                self._keep(known, i, x)
            else:
                self._block_below(smem, i, j, known, beta)

    @cute.jit
    def _block_below(
        self, smem: Int32, i: cutlass.Constexpr, j: Int32, known: cute.Tensor, beta: Any
    ) -> None:
        total = cute.make_rmem_tensor((8,), Float32)
        total.fill(0.0)
        for m in cutlass.range_constexpr(i):
            if j <= m:
                self._add_product(smem, i, m, known, total)
        block = smem + self.blocks + block_offset(i, i)
        x = self._times_transposed(
            self._split([-total[n] for n in range(8)]), self._inverse_rows(block), lower=True
        )
        self.put_inverse(smem, i, j, x, beta)
        self._keep(known, i, x)

    def _add_product(
        self, smem: Any, i: int, m: int, known: cute.Tensor, total: cute.Tensor
    ) -> None:
        """total += X_mj^T L_im^T"""
        left = [known[m * 16 + n] for n in range(16)]
        right = self._rows(smem + self.blocks + block_offset(i, m))
        product = self._times_transposed(left, right, lower=False)
        for n in range(8):
            total[n] = total[n] + product[n]

    def _keep(self, known: cute.Tensor, i: int, x: list[Any]) -> None:
        if i < SUB_CHUNKS - 1:
            for n, value in enumerate(self._split(x)):
                known[i * 16 + n] = value

    def _split(self, x: list[Any]) -> list[Any]:
        """8 float32 as operands, and 8 more for what is left of them."""
        high, low = zip(*map(split, x), strict=True)
        return [*high, *low]

    def _rows(self, block: Any) -> list[Any]:
        """A block's part that a right operand takes: [8 rows][8 columns][2 neighbours]."""
        r, c = self.row_and_part()
        values: list[Any] = []
        for t in range(2):
            for s in range(2):
                at = block + block_element(r + 8 * t, 8 * s + 2 * c)
                values += warp.load_shared(Float32, at, 2)
        return values

    def _inverse_rows(self, block: Any) -> list[Any]:
        """The same of an inverted block on the diagonal, where only what is below the diagonal is
        stored."""
        r, c = self.row_and_part()
        values = self._rows(block)
        for t in range(2):
            for e in range(2):
                n = (t * 2 + t) * 2 + e
                values[n] = self._lower(values[n], r, 2 * c + e)
        return values

    def _lower(self, x: Any, row: Any, column: Any) -> Any:
        """Element of a unit lower triangular matrix."""
        x = cutlass.select_(column < row, x, Float32(0.0))
        return cutlass.select_(column == row, Float32(1.0), x)

    def _diagonal_transposed(self, smem: Any, j: Any) -> list[Any]:
        """X_jj^T as accumulators."""
        r, c = self.row_and_part()
        block = smem + self.blocks + block_offset(j, j)
        values: list[Any] = []
        for s in range(2):
            for half in range(2):
                for e in range(2):
                    row, column = 8 * s + 2 * c + e, r + 8 * half
                    x = warp.load_shared(Float32, block + block_element(row, column))[0]
                    values.append(self._lower(x, row, column))
        return values

    def _times_transposed(self, a: list[Any], rows: list[Any], *, lower: bool) -> list[Any]:
        """a m^T, 16 by 16, as accumulators: a split, m as `_rows`; with `lower` what is above the
        diagonal of m is 0."""
        result: list[Any] = []
        for t in range(2):
            main, rest = [Float32(0.0)] * 4, [Float32(0.0)] * 4
            for s in range(1 if lower and t == 0 else 2):
                n = (t * 2 + s) * 2
                high, low = zip(*map(split, rows[n : n + 2]), strict=True)
                left, left_low = (
                    [a[base + 4 * s + order] for order in (0, 2, 1, 3)] for base in (0, 8)
                )
                rest = list(warp.mma_tf32(rest, left_low, high))
                rest = list(warp.mma_tf32(rest, left, low))
                main = list(warp.mma_tf32(main, left, high))
            result += [x + y for x, y in zip(main, rest, strict=True)]
        return result

    def store_block(
        self, tile: Any, i: Any, j: Any, x: list[Any], factors: list[Any] | None = None
    ) -> None:
        """Block (i, j) of a 16-bit tile in shared memory, whose rows of a sub-chunk are in a region
        each, from the accumulators of its transposed; `factors` are for the thread's two
        columns."""
        r, c = self.row_and_part()
        for t in range(2):
            for half in range(2):
                pair = x[4 * t + 2 * half : 4 * t + 2 * half + 2]
                if factors is not None:
                    pair = [value * factors[half] for value in pair]
                moved = warp.transpose_matrix(warp.pack(self.dtype, *pair))
                at = tile + i * REGION_BYTES + tile_unit(8 * t + r, 2 * j + half)
                warp.store_shared(Int32, at + 4 * c, [moved])

    def put_inverse(self, smem: Any, i: Any, j: Any, x: list[Any], beta: list[Any]) -> None:
        """Take block (i, j) of the inverse, as accumulators of its transposed, and beta of the
        thread's two columns. Called for blocks above the diagonal, too, which are 0."""
        raise NotImplementedError
