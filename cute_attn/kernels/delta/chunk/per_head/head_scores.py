"""The scores of a chunk for one decay a head, by eight warps.

Warps b = 0 to 3 have the rows of sub-chunk b of k k^T in registers, and warps b + 4 the rows of
q k^T. Both are multiplied once for all value heads that share a head of q and k. For one value head
after the other, warps b store L and warps b + 4 store Aqk; see `prepare`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....common.decay import decay_exp2
from ....common.dtypes import DTYPE
from ....common.ptx import wgmma
from ....common.ptx.compiler import keep_branch
from ....common.ptx.convert import pack_all, unpack
from ....common.ptx.math import exp2, reciprocal_sqrt
from ....common.ptx.memory import load_shared, store_shared
from ....common.ptx.mma import mma
from ....common.smem import SharedMemory
from ....common.spec import WARP_SIZE
from ...spec import L2NORM_EPSILON
from ..spec import BOUNDS, CHUNK, HeadPrepareSpec
from ..starts import half_bound
from ..sub_chunks import (
    SUB_CHUNK,
    SUB_CHUNKS,
    block_element,
    block_offset,
    row_and_part,
    tile_unit,
)
from ..tiles import SUB_TILE_BYTES, left_fragment, right_fragments_of_rows
from .head_gates import HeadGates, decay_between


class Places(NamedTuple):
    """Byte offsets of what may lie outside of the fixed part of shared memory.

    Attributes:
        q, k: the rows of q and k.
        scores: the tile of Aqk, and the step from a sub-chunk's rows to the next.
    """

    q: int
    k: int
    scores: tuple[int, int]


class HeadScores:
    """The scores for one HeadPrepareSpec; see the module's docstring. All methods run on the
    device.

    Attributes:
        memory: has the buffers of `HeadGates`, the "blocks" of L, "inverse_norm_q" and
            "inverse_norm_k".
        compact: whether one piece of code has the blocks on the diagonal, rather than one for each
            sub-chunk.
    """

    def __init__(
        self, spec: HeadPrepareSpec, memory: SharedMemory, places: Places, compact: bool = False
    ):
        self.spec, self.dtype = spec, DTYPE[spec.dtype]
        self.memory, self.places = memory, places
        self.scores_have_beta = spec.dtype == "bfloat16"
        self.gates = HeadGates(spec, memory)
        self.compact = compact

    # -- products of q and k ------------------------------------------------------------------

    @cute.jit
    def multiply(
        self, smem: Int32, rows: Int32, b: Int32, of_k: Any, products: cute.Tensor
    ) -> None:
        """Multiply the warp's 16 rows of q or k by all earlier rows of k, and store the inverse
        norms of the warp's rows. The products are accumulators of 8 columns in turn."""
        products.fill(0.0)
        squares = cute.make_rmem_tensor((2,), Float32)
        squares.fill(0.0)
        keys = rows + self.places.k
        left = cutlass.select_(of_k, keys, rows + self.places.q)
        for step in cutlass.range_constexpr(self.spec.head_dim_k // SUB_CHUNK):
            at = left + step // 4 * SUB_TILE_BYTES
            a = left_fragment(at, b * SUB_CHUNK, step % 4)
            self.add_squares(a, squares)
            for j in cutlass.range_constexpr(SUB_CHUNKS):
                if j <= b:
                    right = right_fragments_of_rows(keys, SUB_CHUNK * j, step)
                    for half in cutlass.range_constexpr(2):
                        n = 8 * j + 4 * half
                        c = [products[n + i] for i in range(4)]
                        c = list(mma(self.dtype, c, a, right[2 * half : 2 * half + 2]))
                        for i in cutlass.range_constexpr(4):
                            products[n + i] = c[i]
        self.store_norms(smem, b, of_k, squares)

    def add_squares(self, a: list[Any], squares: cute.Tensor) -> None:
        """Add the squares of a left operand's elements to the sums of the thread's two rows."""
        if self.spec.l2norm:
            for i in range(4):
                low, high = unpack(self.dtype, a[i])
                squares[i % 2] = cute.math.fma(low, low, squares[i % 2])
                squares[i % 2] = cute.math.fma(high, high, squares[i % 2])

    @cute.jit
    def store_norms(self, smem: Int32, b: Int32, of_k: Any, squares: cute.Tensor) -> None:
        """Store the inverse norms of the warp's rows, of which each thread has a part of the sum of
        squares."""
        r, c = row_and_part()
        name = cutlass.select_(
            of_k, Int32(self.memory["inverse_norm_k"]), Int32(self.memory["inverse_norm_q"])
        )
        for half in cutlass.range_constexpr(2):
            inverse = Float32(1.0)
            if cutlass.const_expr(self.spec.l2norm):
                square = squares[half]
                for distance in (1, 2):
                    square = square + cute.arch.shuffle_sync_bfly(square, distance)
                inverse = reciprocal_sqrt(Float32(square) + L2NORM_EPSILON)
            if c == 0:
                row = b * SUB_CHUNK + r + 8 * half
                store_shared(Float32, smem + name + row * 4, [inverse])

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
        squares = cute.make_rmem_tensor((2,), Float32)
        squares.fill(0.0)
        for step in steps if self.spec.l2norm else ():
            at = left + step // 4 * SUB_TILE_BYTES
            self.add_squares(left_fragment(at, b * SUB_CHUNK, step % 4), squares)
        for i, x in enumerate(wgmma.wait(c)):
            products[i] = x
        self.store_norms(smem, b, of_k, squares)

    @cute.jit
    def normalise(
        self, smem: Int32, b: Int32, of_k: Any, scale: Float32, products: cute.Tensor
    ) -> None:
        """Multiply products by the inverse norms of their rows and columns, products of q by the
        scale too."""
        r, c = row_and_part()
        name = cutlass.select_(
            of_k, Int32(self.memory["inverse_norm_k"]), Int32(self.memory["inverse_norm_q"])
        )
        rows = [
            load_shared(Float32, smem + name + (b * SUB_CHUNK + r + 8 * half) * 4)[0]
            for half in range(2)
        ]
        rows = [x * cutlass.select_(of_k, Float32(1.0), scale) for x in rows]
        for j in cutlass.range_constexpr(CHUNK // 8):
            at = smem + self.memory["inverse_norm_k"] + (8 * j + 2 * c) * 4
            columns = load_shared(Float32, at, 2)
            for i in cutlass.range_constexpr(4):
                products[4 * j + i] = products[4 * j + i] * columns[i % 2] * rows[i // 2]

    # -- the matrices of a value head ---------------------------------------------------------

    @cute.jit
    def store_lower(self, smem: Int32, n: Int32, b: Int32, products: cute.Tensor) -> None:
        """Store the rows of L of sub-chunk b, by warp b. The warp may then read these rows."""
        r, c = row_and_part()
        rows = [self.gates.sums(smem, n, b * SUB_CHUNK + r + 8 * half)[0] for half in range(2)]
        later = [self.gates.of_later(smem, n, b, x) for x in rows]
        cute.arch.sync_warp()
        for j in cutlass.range_constexpr(SUB_CHUNKS):
            if j < b:
                keep_branch()
                block = smem + self.memory["blocks"] + block_offset(b, j)
                for half in cutlass.range_constexpr(2):
                    column = 8 * half + 2 * c
                    factors = self.of_columns(smem, n, b, j * SUB_CHUNK + column, True)
                    for rows_half in cutlass.range_constexpr(2):
                        at = 8 * j + 4 * half + 2 * rows_half
                        pair = [products[at + e] * factors[e] * later[rows_half] for e in range(2)]
                        row = r + 8 * rows_half
                        store_shared(Float32, block + block_element(row, column), pair)
            if cutlass.const_expr(not self.compact):
                if j == b:
                    keep_branch()
                    own = [products[8 * j + i] for i in range(8)]
                    self.store_lower_block(smem, n, b, j, rows, own)
        if cutlass.const_expr(self.compact):
            self.store_lower_block(smem, n, b, b, rows, self.own_block(products, b))
        cute.arch.sync_warp()

    def own_block(self, products: cute.Tensor, b: Int32) -> list[Any]:
        """The thread's products of sub-chunk b, which is known at run time."""
        own = []
        for i in range(8):
            x = products[i]
            for j in range(1, SUB_CHUNKS):
                x = cutlass.select_(b == j, products[8 * j + i], x)
            own.append(Float32(x))
        return own

    @cute.jit
    def store_lower_block(
        self, smem: Int32, n: Int32, b: Int32, j: Any, rows: Any, products: Any
    ) -> None:
        """Store the block (b, j) of L on the diagonal, from the thread's 8 products."""
        r, c = row_and_part()
        block = smem + self.memory["blocks"] + block_offset(b, j)
        for half in cutlass.range_constexpr(2):
            column = 8 * half + 2 * c
            earlier = self.gates.sums(smem, n, j * SUB_CHUNK + column, 2)
            betas = self.gates.betas(smem, n, j * SUB_CHUNK + column, 2)
            for rows_half in cutlass.range_constexpr(half, 2):
                row = r + 8 * rows_half
                for e in cutlass.range_constexpr(2):
                    decay = decay_between(rows[rows_half], earlier[e])
                    x = products[4 * half + 2 * rows_half + e] * (decay * betas[e])
                    if column + e < row:
                        place = block + block_element(row, column + e)
                        store_shared(Float32, place, [x])

    @cute.jit
    def store_scores(
        self, smem: Int32, tile: Int32, n: Int32, b: Int32, products: cute.Tensor
    ) -> None:
        """Store the rows of Aqk of sub-chunk b, by warp b + 4. The warp may then read these
        rows."""
        r, c = row_and_part()
        rows = [self.gates.sums(smem, n, b * SUB_CHUNK + r + 8 * half)[0] for half in range(2)]
        later = [self.gates.of_later(smem, n, b, x) for x in rows]
        offset, step = self.places.scores
        tile = tile + offset + b * step
        cute.arch.sync_warp()  # the rows of the head before are copied
        for j in cutlass.range_constexpr(SUB_CHUNKS):
            if j < b:
                keep_branch()
                for half in cutlass.range_constexpr(2):
                    column = 8 * half + 2 * c
                    factors = self.of_columns(
                        smem, n, b, j * SUB_CHUNK + column, self.scores_have_beta
                    )
                    for rows_half in cutlass.range_constexpr(2):
                        at = 8 * j + 4 * half + 2 * rows_half
                        pair = [products[at + e] * factors[e] * later[rows_half] for e in range(2)]
                        place = tile + tile_unit(r + 8 * rows_half, 2 * j + half) + 4 * c
                        store_shared(Int32, place, pack_all(self.dtype, pair))
            if cutlass.const_expr(not self.compact):
                if j == b:
                    keep_branch()
                    own = [products[8 * j + i] for i in range(8)]
                    self.store_scores_block(smem, tile, n, j, rows, own)
            if j > b:
                lane = cute.arch.lane_idx()
                place = tile + tile_unit(lane >> 1, 2 * j + (lane & 1))
                store_shared(Int32, place, [Int32(0)] * 4)
        if cutlass.const_expr(self.compact):
            self.store_scores_block(smem, tile, n, b, rows, self.own_block(products, b))
        cute.arch.sync_warp()

    @cute.jit
    def store_scores_block(
        self, smem: Int32, tile: Int32, n: Int32, j: Any, rows: Any, products: Any
    ) -> None:
        """Store the block (j, j) of Aqk, whose rows are at `tile`, from the thread's 8 products."""
        r, c = row_and_part()
        for half in cutlass.range_constexpr(2):
            column = 8 * half + 2 * c
            earlier = self.gates.sums(smem, n, j * SUB_CHUNK + column, 2)
            betas = self.gates.betas(smem, n, j * SUB_CHUNK + column, 2)
            for rows_half in cutlass.range_constexpr(2):
                pair = []
                for e in cutlass.range_constexpr(2):
                    at = 4 * half + 2 * rows_half + e
                    x = products[at] * decay_between(rows[rows_half], earlier[e])
                    if cutlass.const_expr(self.scores_have_beta):
                        x = x * betas[e]
                    seen = column + e <= r + 8 * rows_half
                    pair.append(Float32(cutlass.select_(seen, x, Float32(0.0))))
                place = tile + tile_unit(r + 8 * rows_half, 2 * j + half) + 4 * c
                store_shared(Int32, place, pack_all(self.dtype, pair))

    def of_columns(self, smem: Int32, n: Any, b: Any, token: Any, with_beta: bool) -> Any:
        """Load the factors of two columns of an earlier sub-chunk, in rows of sub-chunk b."""
        factors = self.gates.of_earlier(smem, n, b, token)
        if not with_beta:
            return factors
        betas = self.gates.betas(smem, n, token, 2)
        return [x * y for x, y in zip(factors, betas, strict=True)]

    @cute.jit
    def store_factors(
        self, smem: Int32, n: Int32, token: Int32, scale: Float32, factors: cute.Tensor
    ) -> None:
        """Store the factors of the chunk's tokens, by the thread of each token."""
        if token < CHUNK:
            own = self.gates.sums(smem, n, token)[0]
            last = self.gates.sums(smem, n, CHUNK - 1)[0]
            beta = self.gates.betas(smem, n, token)[0]
            of_q, of_k = (
                load_shared(Float32, smem + self.memory[name] + token * 4)[0]
                for name in ("inverse_norm_q", "inverse_norm_k")
            )
            decay = exp2(own[0] + own[1])
            factors[token] = decay * of_k
            factors[CHUNK + token] = decay * of_q * scale
            factors[2 * CHUNK + token] = decay_between(last, own) * of_k * beta
            factors[3 * CHUNK + token] = beta
            if token == CHUNK - 1:
                factors[4 * CHUNK] = decay_exp2(last[0] + last[1])
            if cutlass.const_expr(self.spec.bounds):
                warp = token // WARP_SIZE
                # The first half has the decay of the whole chunk, which takes fewer registers.
                of_chunk = cutlass.select_(warp == 0, last[0] + last[1], Float32(0.0))
                bound = half_bound(Float32(of_chunk), beta)
                if token % WARP_SIZE == 0:
                    factors[BOUNDS.start + warp] = bound
