"""The scores of a chunk in little machine code, for `forward`.

An SM keeps 32 KiB of machine code close to its schedulers. Code beyond takes 18 clocks for each 128
bytes. `forward` has the loops of several roles at once, so this form of `HeadScores` has one piece
of code for the rows of L and of Aqk, and a loop over sub-chunks. Results have the same bits.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....common.ptx import wgmma
from ....common.ptx.convert import pack_all
from ....common.ptx.memory import load_shared, store_shared
from ....common.smem import SharedMemory
from ..spec import CHUNK, HeadPrepareSpec
from ..sub_chunks import (
    SUB_CHUNK,
    SUB_CHUNKS,
    block_element,
    block_offset,
    row_and_part,
    tile_unit,
)
from ..tiles import SUB_TILE_BYTES, left_fragment
from .head_gates import HeadGates, decay_between
from .head_scores import HeadScores, Places

BLOCK = SUB_CHUNK // 2  # a thread's accumulators of 16 by 16 products


class CompactScores(HeadScores):
    """The scores for one HeadPrepareSpec; see the module's docstring."""

    def __init__(self, spec: HeadPrepareSpec, memory: SharedMemory, places: Places):
        super().__init__(spec, memory, places)
        self.gates = HeadGates(spec, memory, compact=True)

    @cute.jit
    def multiply_by_wgmma(
        self, smem: Int32, rows: Int32, b: Int32, of_k: Any, products: cute.Tensor
    ) -> None:
        """`multiply` for warps in two warpgroups, by all rows of k."""
        keys = rows + self.places.k
        left = cutlass.select_(of_k, keys, rows + self.places.q)
        steps = range(self.spec.head_dim_k // SUB_CHUNK)
        offsets = [step // 4 * SUB_TILE_BYTES + step % 4 * 2 * SUB_CHUNK for step in steps]
        a, k = (
            [wgmma.rows_descriptor(at) + (offset >> 4) for offset in offsets] for at in (left, keys)
        )
        c = wgmma.shared_product(self.dtype, None, a, k, CHUNK, columns=False)
        squares = self.no_squares()
        if cutlass.const_expr(self.spec.l2norm):
            if not of_k:
                for step in cutlass.range_constexpr(len(steps)):
                    at = left + step // 4 * SUB_TILE_BYTES
                    self.add_squares(left_fragment(at, b * SUB_CHUNK, step % 4), squares)
        for i, x in enumerate(wgmma.wait(c)):
            products[i] = x
        if cutlass.const_expr(self.spec.l2norm):
            if of_k:
                # The squares of k are the diagonal of k k^T.
                own = self.own_block(products, b)
                for i in cutlass.range_constexpr(2):
                    squares[i], squares[6 + i] = own[i], own[6 + i]
        self.store_norms(smem, b, of_k, self.of_diagonals(squares))

    def own_block(self, products: cute.Tensor, b: Int32) -> list[Any]:
        """The thread's products with its own sub-chunk, which is known at run time."""
        own = []
        for i in range(BLOCK):
            x = products[i]
            for j in range(1, SUB_CHUNKS):
                x = cutlass.select_(b == j, products[BLOCK * j + i], x)
            own.append(Float32(x))
        return own

    @cute.jit
    def store_rows(
        self, smem: Int32, tile: Int32, n: Int32, b: Int32, of_k: Any, scale: Float32,
        products: cute.Tensor,
    ) -> None:  # fmt: skip
        """Store the rows of sub-chunk b: warp b of L, warp b + 4 of Aqk at `tile`. The warp may
        then read these rows. The products move: those of the block that is stored come first."""
        r, c = row_and_part()
        name = cutlass.select_(
            of_k, Int32(self.memory["inverse_norm_k"]), Int32(self.memory["inverse_norm_q"])
        )
        own_rows = [b * SUB_CHUNK + r + 8 * half for half in range(2)]
        norms = [load_shared(Float32, smem + name + row * 4)[0] for row in own_rows]
        norms = [x * cutlass.select_(of_k, Float32(1.0), scale) for x in norms]
        rows = [self.gates.sums(smem, n, row)[0] for row in own_rows]
        later = [self.gates.of_later(smem, n, b, x) for x in rows]
        offset, step = self.places.scores
        tile = tile + offset + b * step
        for j in cutlass.range(b, unroll=1):
            block = smem + self.memory["blocks"] + block_offset(b, j)
            for half in cutlass.range_constexpr(2):
                column = 8 * half + 2 * c
                token = j * SUB_CHUNK + column
                of_columns = load_shared(
                    Float32, smem + self.memory["inverse_norm_k"] + token * 4, 2
                )
                factors = self.gates.of_earlier(smem, n, b, token)
                betas = self.gates.betas(smem, n, token, 2)
                if cutlass.const_expr(not self.scores_have_beta):
                    betas = [cutlass.select_(of_k, x, Float32(1.0)) for x in betas]
                factors = [x * y for x, y in zip(factors, betas, strict=True)]
                for rows_half in cutlass.range_constexpr(2):
                    pair = []
                    for e in cutlass.range_constexpr(2):
                        x = products[4 * half + 2 * rows_half + e] * of_columns[e]
                        x = x * norms[rows_half]
                        pair.append(x * factors[e] * later[rows_half])
                    row = r + 8 * rows_half
                    self.store_pair(block, tile, of_k, row, column, 2 * j + half, pair)
            for i in cutlass.range_constexpr((SUB_CHUNKS - 1) * BLOCK):
                products[i] = products[i + BLOCK]
        self.store_own_rows(smem, tile, n, b, of_k, norms, rows, products)
        if not of_k:
            for j in cutlass.range(b + 1, SUB_CHUNKS, unroll=1):
                lane = cute.arch.lane_idx()
                place = tile + tile_unit(lane >> 1, 2 * j + (lane & 1))
                store_shared(Int32, place, [Int32(0)] * 4)
        cute.arch.sync_warp()

    @cute.jit
    def store_own_rows(
        self, smem: Int32, tile: Int32, n: Int32, b: Int32, of_k: Any, norms: Any, rows: Any,
        products: cute.Tensor,
    ) -> None:  # fmt: skip
        """Store the block (b, b) of I + L or Aqk, with zeros above the diagonal, from the thread's
        first products."""
        r, c = row_and_part()
        block = smem + self.memory["blocks"] + block_offset(b, b)
        one = Float32(1.0)
        for half in cutlass.range_constexpr(2):
            column = 8 * half + 2 * c
            token = b * SUB_CHUNK + column
            of_columns = load_shared(Float32, smem + self.memory["inverse_norm_k"] + token * 4, 2)
            earlier = self.gates.sums(smem, n, token, 2)
            betas = self.gates.betas(smem, n, token, 2)
            # L is multiplied by the decay times beta, Aqk by the decay and then by beta.
            first = [cutlass.select_(of_k, x, one) for x in betas]
            second = [cutlass.select_(of_k, one, x) for x in betas]
            for rows_half in cutlass.range_constexpr(2):
                row = r + 8 * rows_half
                pair = []
                for e in cutlass.range_constexpr(2):
                    decay = decay_between(rows[rows_half], earlier[e])
                    x = products[4 * half + 2 * rows_half + e] * of_columns[e]
                    x = x * norms[rows_half] * (decay * first[e])
                    if cutlass.const_expr(self.scores_have_beta):
                        x = x * second[e]
                    pair.append(x)
                seen = [
                    Float32(cutlass.select_(column + e < row, pair[e], Float32(0.0)))
                    for e in range(2)
                ]
                for e in cutlass.range_constexpr(2):
                    on_diagonal = cutlass.select_(of_k, one, pair[e])
                    seen[e] = Float32(cutlass.select_(column + e == row, on_diagonal, seen[e]))
                self.store_pair(block, tile, of_k, row, column, 2 * b + half, seen)

    @cute.jit
    def store_pair(
        self, block: Int32, tile: Int32, of_k: Any, row: Any, column: Any, unit: Any, pair: Any
    ) -> None:
        """Store two neighbours in a row of L's block, or in the tile of Aqk."""
        if of_k:
            store_shared(Float32, block + block_element(row, column), pair)
        else:
            place = tile + tile_unit(row, unit) + 4 * row_and_part()[1]
            store_shared(Int32, place, pack_all(self.dtype, pair))
