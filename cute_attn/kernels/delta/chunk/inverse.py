"""(I + L)^-1 of a chunk, L strictly lower triangular, 64 by 64 in blocks of 16 by 16.

`invert_diagonal` inverts a block on the diagonal in halves of 8 by 8, by forward substitution in
float32 with one column in each lane. `invert` computes the other blocks of the inverse X, from 16
to 32 to 64. Both use

    [ A  0 ]^-1   [  A^-1            0    ]
    [ B  C ]    = [ -C^-1 B A^-1    C^-1  ]


    warp   first                  then                           last
    0      X10 = -X11 L10 X00
    1      X32 = -X33 L32 X22
    2      N20 = L20 X00          N20 += L21 X10, X20 = -X22 N20, X32 N20
    3      N30 = L30 X00          N30 += L31 X10,                 X30 = -X33 N30 - X32 N20
    4      N21 = L21 X11          X21 = -X22 N21, X32 N21
    5      N31 = L31 X11                                          X31 = -X33 N31 - X32 N21

All factors are inverses, or L itself, so no large terms cancel. Each product is computed as three
tf32 products, nearly as accurate as float32. Products are transposed, as in N20^T = X00^T L20^T.
Accumulators of 16 by 8 are then the left operand of the next product, with index k in the order 0,
2, 4, 6, 1, 3, 5, 7. A thread's part of a right operand M^T is two neighbours of a row of M.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.ptx.convert import pack
from ...common.ptx.matrices import transpose_matrix
from ...common.ptx.memory import load_shared, store_shared
from ...common.ptx.mma import mma_tf32
from ...common.spec import WARP_SIZE
from .sub_chunks import (
    REGION,
    SUB_CHUNK,
    SUB_CHUNKS,
    block_element,
    block_offset,
    row_and_part,
    tile_unit,
)

HALF = SUB_CHUNK // 2  # rows of half of a block


def split(x: Any) -> tuple[Any, Any]:
    """Split x into two tf32 operands whose sum is x to 21 bits. The first is x's upper 19 bits,
    which are all that a tf32 MMA reads; the second is the remainder.
    """
    x = Float32(x)
    high = Int32(x.bitcast(Int32)) & Int32(-(1 << 13))
    low = x - high.bitcast(Float32)
    return high, low.bitcast(Int32)


def rounded(x: Any) -> Any:
    """Round x to the nearest tf32. A tf32 MMA does not read the lower 13 bits."""
    return Float32(x).bitcast(Int32) + Int32(1 << 12)


class Inverse:
    """Inverts L, block by block. All methods run on the device."""

    def __init__(
        self, memory: Any, *, columns: str | None = None, exact: bool = True,
        rows: tuple[int, int] = (REGION["tile_kk"], REGION.nbytes),
        exchange: tuple[int, int] = (REGION["exchange"], REGION.nbytes),
        diagonal_warps: int = 1,
        meet: Callable[[], None] = cute.arch.sync_threads,
        end: Callable[[], None] = cute.arch.sync_threads,
    ):  # fmt: skip
        """
        Args:
            memory: the CTA's shared memory, a ChunkMemory or one with its buffers and attributes
                that methods here use.
            columns: the buffer of `memory` with a factor for each column of the result, if there
                are factors.
            exact: whether a product of blocks is three tf32 products, or one of rounded operands.
            rows: byte offset of the result's first sub-chunk, and step to the next sub-chunk.
            exchange: byte offset of the memory through which warps exchange a block, and step to
                the next such memory.
            diagonal_warps: 1, or 2 warps that store the blocks on the diagonal.
            meet: a barrier of the warps that call `invert`.
            end: the barrier after the last result.
        """
        self.memory, self.dtype, self.columns = memory, memory.dtype, columns
        self.exact = exact
        self.rows, self.exchange = rows, exchange
        self.diagonal_warps = diagonal_warps
        self.meet, self.end = meet, end

    def invert_diagonal(self, smem: Any, b: Any) -> None:
        """Replace block (b, b), below its diagonal, by its inverse, whose diagonal is 1. A whole
        warp calls this method.

        The block is [A 0; B C], with halves of 8 by 8. Of four groups of 8 lanes, with a column in
        each lane, groups 0 and 2 have A^-1, and groups 1 and 3 have C^-1. Then group g has rows g
        and g + 4 of B A^-1 and of -C^-1 B A^-1."""
        lane = cute.arch.lane_idx()
        block = smem + self.memory["blocks"] + block_offset(b, b)
        n, group = lane & (HALF - 1), lane >> 3
        first = (group & 1) * HALF
        column = self._substituted(block, n, first)
        a = [cute.arch.shuffle_sync(x, n) for x in column]
        own = []
        for half in range(2):
            at = HALF + group + 4 * half
            row = [
                *load_shared(Float32, block + block_element(at, 0), 4),
                *load_shared(Float32, block + block_element(at, 4), 4),
            ]
            x = row[0] * a[0]
            for k in range(1, HALF):
                x = cute.math.fma(row[k], a[k], x)
            own.append(Float32(x))
        cute.arch.sync_warp()
        self._store_columns(block, lane, first, n, column)
        cute.arch.sync_warp()
        y = [cute.arch.shuffle_sync(own[k >> 2], ((k & 3) << 3) + n) for k in range(HALF - 1)]
        for half in range(2):
            row_index = group + 4 * half
            c: list[Any] = []
            for j in range(0, 4 * half + 3, 4):
                c += load_shared(Float32, block + block_element(HALF + row_index, HALF + j), 4)
            x = own[half]
            for k in range(4 * half + 3):
                # The product of a later row may be NaN.
                x = x + cutlass.select_(k < row_index, c[k] * y[k], Float32(0.0))
            store_shared(Float32, block + block_element(HALF + row_index, n), [-x])

    @cute.jit
    def _store_columns(
        self, block: Int32, lane: Int32, first: Int32, n: Int32, column: Any
    ) -> None:
        for i in cutlass.range_constexpr(1, HALF):
            if n < i and lane < 2 * HALF:
                store_shared(Float32, block + block_element(first + i, first + n), [column[i]])

    def _substituted(self, block: Any, n: Any, first: Any) -> list[Any]:
        """Return column n of the inverse of half of a block, on the diagonal from row `first`
        on."""
        column: list[Any] = []
        for i in range(HALF):
            row: list[Any] = []
            for j in range(0, i, 4):
                row += load_shared(Float32, block + block_element(first + i, first + j), 4)
            x = cutlass.select_(n == i, Float32(1.0), Float32(0.0))
            for j in range(i):
                x = cute.math.fma(-row[j], column[j], x)
            column.append(x)
        return column

    @cute.jit
    def invert(self, smem: Int32, part: Int32, tile: Int32) -> None:
        """Store all blocks of the inverse to the tile at `tile` plus the offset in `rows`. Eight
        warps call this method; `part` is the warp. Before the call, L and the inverted diagonal
        blocks must be visible to all warps. After the call, all warps see the results.
        """
        n = cute.make_rmem_tensor((8,), Float32)  # the accumulators of N^T
        n.fill(0.0)
        # The warp's block is (i, j).
        i = 2 + (part & 1)
        i = Int32(1) if part == 0 else i
        j = part >> 2
        j = Int32(2) if part == 1 else j
        if part < 6:
            left = self._split(self._diagonal_transposed(smem, j))
            self._set(n, self._times(left, self._rows(self._block(smem, i, j))))
        if part < 2:
            x = self._times_diagonal(smem, n, i)
            self.store_block(smem, tile, i, j, x)
            if part == 0:
                self._leave(smem, 0, x)
            else:
                cute.arch.sync_warp()  # every lane has read the block
                self._store_rows(self._block(smem, i, j), x)
        if cutlass.const_expr(self.diagonal_warps == 1):
            if part == 6:
                for m in cutlass.range(SUB_CHUNKS, unroll=1):
                    self.store_block(smem, tile, m, m, self._diagonal_transposed(smem, m))
        elif part >= 6:
            for m in cutlass.range(part - 6, SUB_CHUNKS, 2, unroll=1):
                self.store_block(smem, tile, m, m, self._diagonal_transposed(smem, m))
        if part == 7:
            for row in cutlass.range_constexpr(SUB_CHUNKS):
                for column in cutlass.range_constexpr(row + 1, SUB_CHUNKS):
                    self.put_zeros(tile, row, column)
        self.meet()

        inner = part >= 2 and part < 6
        if part == 2 or part == 3:
            left = self._split(self._left_by(smem, 0))
            more = self._times(left, self._rows(self._block(smem, i, Int32(1))))
            self._set(n, [n[m] + more[m] for m in range(8)])
        if inner:
            x = self._times_diagonal(smem, n, i)
            if i == 2:
                self.store_block(smem, tile, i, j, x)
                left = self._split([-n[m] for m in range(8)])
                y = self._times(left, self._rows(self._block(smem, Int32(3), Int32(2))))
                self._leave(smem, 1 + j, y)
            else:
                self._set(n, x)
        self.meet()
        if inner and i == 3:
            y = self._left_by(smem, 1 + j)
            self.store_block(smem, tile, i, j, [n[m] + y[m] for m in range(8)])
        self.end()

    def _set(self, x: cute.Tensor, values: list[Any]) -> None:
        for m, value in enumerate(values):
            x[m] = value

    def _block(self, smem: Int32, i: Any, j: Any) -> Any:
        return smem + self.memory["blocks"] + block_offset(i, j)

    # -- between warps ------------------------------------------------------------------------

    def _exchange(self, smem: Int32, index: Any) -> Any:
        """Address of a lane's accumulators of a 16 by 16 block for another warp."""
        offset, step = self.exchange
        return smem + offset + index * step + cute.arch.lane_idx() * 16

    def _leave(self, smem: Int32, index: Any, x: list[Any]) -> None:
        at = self._exchange(smem, index)
        for half in range(2):
            store_shared(Float32, at + half * (WARP_SIZE * 16), x[4 * half : 4 * half + 4])

    def _left_by(self, smem: Int32, index: Any) -> list[Any]:
        at = self._exchange(smem, index)
        values: list[Any] = []
        for half in range(2):
            values += load_shared(Float32, at + half * (WARP_SIZE * 16), 4)
        return values

    def _store_rows(self, block: Any, x: list[Any]) -> None:
        """Store a block of float32 from the accumulators of its transpose."""
        r, c = row_and_part()
        for t in range(2):
            for half in range(2):
                for e in range(2):
                    at = block + block_element(8 * t + 2 * c + e, r + 8 * half)
                    store_shared(Float32, at, [x[4 * t + 2 * half + e]])

    # -- operands -----------------------------------------------------------------------------

    def _split(self, x: list[Any]) -> list[Any]:
        """Return the high operands of 8 float32, followed by the low operands; without `exact`, the
        rounded operands."""
        if not self.exact:
            return [rounded(y) for y in x]
        high, low = zip(*map(split, x), strict=True)
        return [*high, *low]

    def _rows(self, block: Any) -> list[Any]:
        """Load a thread's part of a block as right operands: [8 rows][8 columns][2 neighbours]."""
        r, c = row_and_part()
        values: list[Any] = []
        for t in range(2):
            for s in range(2):
                at = block + block_element(r + 8 * t, 8 * s + 2 * c)
                values += load_shared(Float32, at, 2)
        return values

    def _lower(self, x: Any, row: Any, column: Any) -> Any:
        """Return an element of a unit lower triangular matrix."""
        x = cutlass.select_(column < row, x, Float32(0.0))
        return cutlass.select_(column == row, Float32(1.0), x)

    def _diagonal_transposed(self, smem: Int32, j: Any) -> list[Any]:
        """Return X_jj^T as accumulators."""
        r, c = row_and_part()
        block = self._block(smem, j, j)
        values: list[Any] = []
        for s in range(2):
            for half in range(2):
                for e in range(2):
                    row, column = 8 * s + 2 * c + e, r + 8 * half
                    if half > s:
                        values.append(Float32(0.0))
                        continue
                    x = load_shared(Float32, block + block_element(row, column))[0]
                    values.append(x if half < s else self._lower(x, row, column))
        return values

    # -- products -----------------------------------------------------------------------------

    def _times_diagonal(self, smem: Int32, n: cute.Tensor, i: Any) -> list[Any]:
        """Return -n X_ii^T."""
        r, c = row_and_part()
        rows = self._rows(self._block(smem, i, i))
        for t in range(2):
            for e in range(2):
                m = (t * 2 + t) * 2 + e
                rows[m] = self._lower(rows[m], r, 2 * c + e)
        return self._times(self._split([-n[m] for m in range(8)]), rows, lower=True)

    def _times(self, a: list[Any], rows: list[Any], *, lower: bool = False) -> list[Any]:
        """Return a m^T, 16 by 16, as accumulators. a comes from `_split`, m from `_rows`; with
        `lower`, m is lower triangular."""
        result: list[Any] = []
        for t in range(2):
            main, small, rest = ([Float32(0.0)] * 4 for _ in range(3))
            for s in range(1 if lower and t == 0 else 2):
                n = (t * 2 + s) * 2
                if not self.exact:
                    left = [a[4 * s + order] for order in (0, 2, 1, 3)]
                    right = [rounded(x) for x in rows[n : n + 2]]
                    main = list(mma_tf32(main, left, right))
                    continue
                high, low = zip(*map(split, rows[n : n + 2]), strict=True)
                left, left_low = (
                    [a[base + 4 * s + order] for order in (0, 2, 1, 3)] for base in (0, 8)
                )
                rest = list(mma_tf32(rest, left_low, high))
                small = list(mma_tf32(small, left, low))
                main = list(mma_tf32(main, left, high))
            if self.exact:
                main = [x + (y + z) for x, y, z in zip(main, small, rest, strict=True)]
            result += main
        return result

    # -- results ------------------------------------------------------------------------------

    def store_block(self, smem: Int32, tile: Int32, i: Any, j: Any, x: list[Any]) -> None:
        """Store block (i, j) of the inverse from the accumulators of its transpose."""
        r, c = row_and_part()
        factors = None
        if self.columns is not None:
            first = j * SUB_CHUNK + r
            factors = [
                self.memory.of_token(smem, self.columns, first + 8 * half) for half in range(2)
            ]
        offset, step = self.rows
        tile = tile + offset
        for t in range(2):
            for half in range(2):
                pair = x[4 * t + 2 * half : 4 * t + 2 * half + 2]
                if factors is not None:
                    pair = [value * factors[half] for value in pair]
                moved = transpose_matrix(pack(self.dtype, *pair))
                at = tile + i * step + tile_unit(8 * t + r, 2 * j + half)
                store_shared(Int32, at + 4 * c, [moved])

    def put_zeros(self, tile: Int32, i: Any, j: Any) -> None:
        lane = cute.arch.lane_idx()
        offset, step = self.rows
        at = tile + offset + i * step + tile_unit(lane >> 1, 2 * j + (lane & 1))
        store_shared(Int32, at, [Int32(0)] * 4)
