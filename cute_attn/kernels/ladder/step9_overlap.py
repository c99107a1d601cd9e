"""Step 9 of the ladder, overlap: products run while a softmax is computed.

In step 8 a warpgroup's S = Q K^T, softmax and O += P V follow each other. Two changes overlap these
steps. First, a warpgroup starts the scores of the next K/V tile before this tile's P V, and
computes the next tile's softmax while P V runs:

    start  S_j = Q K_j^T
    start  O += P_j+1 V_j+1       of the previous K/V tile
    wait   for S_j; compute P_j and the factor of O
    wait   for O, and rescale it

Second, the warpgroups take turns to start products (named barriers), so that one warpgroup's
softmax runs beside the other warpgroup's products, not beside the other warpgroup's softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..attention.parts import fragments
from ..attention.sm90.turns import Turns
from ..common.pipeline import Barriers
from ..common.ptx import wgmma
from ..common.smem import Pointers
from .step7_wgmma import Consumer, Operands, Tile
from .step8_warpgroups import FmhaStep8


@dataclass(frozen=True)
class ConsumerInTurns(Consumer):
    """The values that a consumer warp keeps; `Consumer` explains the inherited attributes."""

    turns: Turns


class FmhaStep9(FmhaStep8):
    def consumer(
        self, x: Operands, storage: Pointers, barriers: Barriers, warp: Int32
    ) -> ConsumerInTurns:
        own = super().consumer(x, storage, barriers, warp)
        return ConsumerInTurns(**vars(own), turns=Turns(own.group, self.warpgroups))

    @cute.jit
    def consumer_warps(self, x: Operands, own: ConsumerInTurns, storage: Pointers) -> None:
        own.turns.begin()
        tile = self.tile_of_cta(x)
        self.compute_tile(own, tile, Int32(0), Int32(0))
        self.store_tile(x, own, storage, tile)
        self.stores_done(own)
        own.turns.end()

    @cute.jit
    def compute_tile(self, own: ConsumerInTurns, tile: Tile, index: Int32, n: Int32) -> Int32:
        own.softmax.start()
        own.acc.fill(0.0)
        # The last K/V tile comes first: there is no P yet for a second product.
        own.barriers.wait("q_full", index)
        own.barriers.wait("k_full", n)
        scores = self.start_scores(own, n)
        fragments.assign(own.s, wgmma.wait(scores))
        own.barriers.warp_arrives("k_empty", n)
        key_tile = tile.end - 1
        if key_tile >= tile.whole:
            self.mask(own, tile, key_tile)
        own.softmax.update(own.s)
        fragments.assign(own.p, fragments.operand(own.s, self.dtype))
        n += 1
        if cutlass.const_expr(self.spec.causal and self.spec.tile_m != self.spec.tile_n):
            while key_tile > tile.whole:
                key_tile -= 1
                self.next_key_tile(own, tile, key_tile, n, True)
                n += 1
        while key_tile > 0:
            key_tile -= 1
            self.next_key_tile(own, tile, key_tile, n, False)
            n += 1
        own.barriers.warp_arrives("q_empty", index)
        own.barriers.wait("v_full", n - 1)
        out = self.start_output(own, n - 1)
        factors = own.softmax.inverse_totals()
        fragments.assign(own.acc, wgmma.wait(out))
        own.barriers.warp_arrives("v_empty", n - 1)
        fragments.scale_rows(own.acc, factors)
        return n

    @cute.jit
    def next_key_tile(
        self,
        own: ConsumerInTurns,
        tile: Tile,
        key_tile: Int32,
        n: Int32,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """Compute P of the K/V tile of use n while the previous P V runs."""
        own.barriers.wait("k_full", n)
        own.turns.wait()
        scores = self.start_scores(own, n)
        own.barriers.wait("v_full", n - 1)
        out = self.start_output(own, n - 1)
        own.turns.give()
        fragments.assign(own.s, wgmma.wait(scores, pending=1))
        own.barriers.warp_arrives("k_empty", n)
        if cutlass.const_expr(masked):
            self.mask(own, tile, key_tile)
        factors = own.softmax.update(own.s)
        fragments.assign(own.acc, wgmma.wait(out))
        own.barriers.warp_arrives("v_empty", n - 1)
        fragments.assign(own.p, fragments.operand(own.s, self.dtype))
        self.rescale(own, factors)
