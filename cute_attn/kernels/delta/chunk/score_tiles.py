"""The rows of L and Aqk, from partial sums of scores."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.ptx.convert import pack_all
from ...common.ptx.memory import load_shared, store_shared
from ...common.spec import WARP_SIZE
from .gate_sums import GateSums
from .sub_chunks import (
    REGION,
    SUB_CHUNK,
    SUB_CHUNKS,
    ChunkMemory,
    block_element,
    block_offset,
    row_and_part,
    tile_unit,
)

SWAP_BARRIER = 1  # the first of the named barriers of `swap_sums`, one for each sub-chunk


class ScoreTiles:
    """Adds partial sums, and stores L and Aqk in shared memory. All methods run on the device."""

    def __init__(self, memory: ChunkMemory, sums: GateSums):
        self.memory, self.sums, self.dtype = memory, sums, memory.dtype

    def swap_sums(self, smem: Int32, b: Int32, half: Any, acc: cute.Tensor) -> None:
        """Exchange partial sums between the two warps of sub-chunk b: warp b (half 0) gives its
        sums of q, warp b + 4 its sums of k. Then warp b may `take` the sums of k, and warp b + 4
        the sums of q.
        """
        first = half == 0
        at = [self._partial_sums(smem, b, which) for which in (0, 1)]
        at = cutlass.select_(first, *at)
        for n in range(0, 8 * SUB_CHUNKS, 4):
            values = [
                cutlass.select_(first, acc[n + i], acc[8 * SUB_CHUNKS + n + i]) for i in range(4)
            ]
            store_shared(Float32, at + n // 4 * (WARP_SIZE * 16), values)
        # Both warps execute the same bar.sync because compute-sanitizer asks for it; PTX does not.
        cute.arch.barrier(barrier_id=SWAP_BARRIER + b, number_of_threads=2 * WARP_SIZE)

    def take(self, smem: Int32, b: Int32, which: int, acc: cute.Tensor) -> list[Any]:
        """Add up the sums of q (0) or k (1). The result is in the order [sub-chunks back][half of
        its tokens][accumulators]."""
        at = self._partial_sums(smem, b, which)
        result: list[Any] = []
        for n in range(2 * SUB_CHUNKS):
            other = load_shared(Float32, at + n * (WARP_SIZE * 16), 4)
            first = (which * 2 * SUB_CHUNKS + n) * 4
            result += [acc[first + i] + other[i] for i in range(4)]
        return result

    def _partial_sums(self, smem: Int32, b: Int32, which: int) -> Any:
        at = (REGION["tile_qk"], REGION["tile_kk"])[which]
        return smem + at + b * REGION.nbytes + cute.arch.lane_idx() * 16

    def scaled(self, sums: Any, n: int, back: int, row: Any, columns: Any) -> list[Any]:
        """Return two sums times the factors of their row and of their columns, without the factor
        2^shift of rows against earlier sub-chunks. The row's factor, which may be small, is
        multiplied last."""
        values = [sums[n + e] for e in range(2)]
        factors = columns
        if back and self.memory.shift:
            unshift = 2.0**-self.memory.shift
            factors = [unshift * x for x in columns] if columns is not None else [unshift] * 2
        if factors is not None:
            values = [x * y for x, y in zip(values, factors, strict=True)]
        return [x * row for x in values]

    @cute.jit
    def finish_scores(self, smem: Int32, b: Int32, scale: Float32, acc: cute.Tensor) -> None:
        """Store the rows of Aqk of sub-chunk b to `tile_qk`, by warp b + 4 after `swap_sums`. The
        warp may then read these rows."""
        sums = self.take(smem, b, 0, acc)
        cute.arch.sync_warp()
        self.stage_scores(smem, b, scale, sums)
        cute.arch.sync_warp()

    @cute.jit
    def finish_lower(self, smem: Int32, b: Int32, acc: cute.Tensor) -> None:
        """Store the rows of L of sub-chunk b, by warp b after `swap_sums`. The warp may then read
        these rows."""
        self.store_lower(smem, b, self.take(smem, b, 1, acc))
        cute.arch.sync_warp()

    @cute.jit
    def store_lower(self, smem: Int32, b: Int32, sums: Any) -> None:
        """Store the rows of L of sub-chunk b from the sums of k."""
        r, c = row_and_part()
        in_range = self.sums.rows_in_range(smem, b)
        factors = [self.memory.row_factor(smem, b * SUB_CHUNK + r + 8 * half) for half in range(2)]
        for back in cutlass.range_constexpr(SUB_CHUNKS):
            if b >= back:
                columns = self.memory.column_factors(smem, b - back)
                block = smem + self.memory["blocks"] + block_offset(b, b - back)
                for half in cutlass.range_constexpr(2):
                    for rows in cutlass.range_constexpr(2):
                        i, j = r + 8 * rows, 8 * half + 2 * c
                        n = back * 8 + half * 4 + rows * 2
                        pair = self.scaled(sums, n, back, factors[rows], columns[half])
                        if cutlass.const_expr(back > 0):
                            store_shared(Float32, block + block_element(i, j), pair)
                        else:
                            for e in cutlass.range_constexpr(2):
                                if j + e < i and i < in_range:
                                    at = block + block_element(i, j + e)
                                    store_shared(Float32, at, [pair[e]])

    @cute.jit
    def stage_scores(self, smem: Int32, b: Int32, scale: Float32, sums: Any) -> None:
        """Store the 16 rows of Aqk of sub-chunk b to `tile_qk`, from the sums of q."""
        r, c = row_and_part()
        tile = smem + REGION["tile_qk"] + b * REGION.nbytes
        in_range = self.sums.rows_in_range(smem, b)
        factors = [scale, scale]
        if cutlass.const_expr(self.memory.l2norm):
            factors = [
                self.memory.of_token(smem, "inverse_norm_q", b * SUB_CHUNK + r + 8 * rows)
                for rows in range(2)
            ]
        own = cute.make_rmem_tensor((8,), Float32)
        columns = self.memory.column_factors(smem, b)
        for n in cutlass.range_constexpr(0, 8, 2):
            pair = self.scaled(sums, n, 0, factors[n // 2 % 2], columns[n // 4])
            own[n], own[n + 1] = pair[0], pair[1]
        if in_range < SUB_CHUNK:
            block = smem + self.memory["blocks"] + block_offset(b, b)
            for n in cutlass.range_constexpr(8):
                i, j = r + 8 * (n // 2 % 2), 8 * (n // 4) + 2 * c + n % 2
                if j < i and i >= in_range:
                    own[n] = load_shared(Float32, block + block_element(j, i))[0]
        for half in cutlass.range_constexpr(2):
            for rows in cutlass.range_constexpr(2):
                i = r + 8 * rows
                same = self.memory.of_token(smem, "own_score", b * SUB_CHUNK + i)
                values = []
                for e in cutlass.range_constexpr(2):
                    j = 8 * half + 2 * c + e
                    x = cutlass.select_(j == i, same, Float32(0.0))
                    values.append(cutlass.select_(j < i, own[half * 4 + rows * 2 + e], x))
                at = tile + tile_unit(i, 2 * b + half) + 4 * c
                store_shared(Int32, at, pack_all(self.dtype, values))
        for back in cutlass.range_constexpr(1, SUB_CHUNKS):
            if b >= back:
                of_columns = self.memory.column_factors(smem, b - back)
                for half in cutlass.range_constexpr(2):
                    for rows in cutlass.range_constexpr(2):
                        n = back * 8 + half * 4 + rows * 2
                        at = tile + tile_unit(r + 8 * rows, 2 * (b - back) + half) + 4 * c
                        values = self.scaled(sums, n, back, factors[rows], of_columns[half])
                        store_shared(Int32, at, pack_all(self.dtype, values))
        lane = cute.arch.lane_idx()
        for j in cutlass.range_constexpr(1, SUB_CHUNKS):
            if j > b:
                at = tile + tile_unit(lane >> 1, 2 * j + (lane & 1))
                store_shared(Int32, at, [Int32(0)] * 4)
