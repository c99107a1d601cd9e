"""All gradients of q, k and v in one kernel for SM90, at head_dim 128: wgmma, TMA,
warp-specialised, five products.

A CTA computes dK and dV of a tile of 128 keys of a K/V head, 64 for each of two consumer
warpgroups, and adds to dQ. The CTA loops over the query heads of the head's group or split. For
each query head the CTA loops over the tiles of 64 queries that see some of the keys.

    S^T = K Q^T            64 x 64 a warpgroup         K and Q in shared memory
    P^T = exp(c S^T - lse)                             in registers
    dV += P^T dO           64 x head_dim               P^T and dV in registers
    dP^T = V dO^T          64 x 64                     V and dO in shared memory
    dS^T = P^T * (dP^T - delta)                        in registers, then in shared memory too
    dK += dS^T Q           64 x head_dim               dS^T and dK in registers
    dQ = dS K              64 x half of head_dim       dS and K in shared memory

    warps    role         work on a tile of keys
    0-7      consumers    compute all of the above; at the end store dK and dV from registers
    8        load         finds the next tile; loads K and V, then Q, lse, dO and delta of each tile
    9        zeros        writes the zeros of the sums of dQ, see `query_zeros`
    10-11    adders       add to the sums of dQ in a fixed order, see `ordered_sums`

Each warp stages its part of dQ in its own shared memory. A bulk reduction adds the part to float32
sums in global memory. `backward_postprocess` scales and rounds the sums. CTAs add in any order, so
the bits of dQ differ from run to run. With `spec.ordered`, an adding warp adds the staged parts in
a fixed order. The load warp's warpgroup gives its registers to the consumers; without
`spec.ordered` its two other warps idle.

As in `backward_hd64`, the warpgroups take turns to start a tile's products in one burst. Here the
loop turns over after dS, and dQ is one tile late:

    tensor cores, in order                beside them
                                          dS^T of tile n to shared memory
    dQ = dS K of tile n - 1
    dV += P^T dO of tile n                dS of tile n published; after dQ, its parts staged
    dK += dS^T Q of tile n                one by one between the steps of dK
    S^T of tile n + 1
    dP^T of tile n + 1
    the other warpgroup's turn            dQ from its staging to L2; P^T and dS^T of tile n + 1

Tile n + 1 may belong to the next tile of keys, which is work `taken` + 1. The next K is loaded
beside the products with the previous K, so the ring of K has two stages.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...common.dtypes import DTYPE
from ...common.pipeline import Barriers
from ...common.ptx import wgmma
from ...common.ptx.memory import shared_address
from ...common.smem import Pointers
from ..parts import fragments
from ..spec import Sm90BackwardSpec
from .dq_sums import StagedSums
from .fused import Consumer, FusedBackward, Operands
from .key_tiles import lane_anew
from .mma import STEP, start_output
from .ordered_sums import OrderedSums
from .uses import Use, query_order

# dQ is one tile late, and reads the K of the work before.
K_STAGES, DS_STAGES = 2, 2
Q_STAGES, DO_STAGES = 2, 2

# If all tiles of keys see the same queries, the tiles of keys begin with different tiles of
# queries: one of STARTS tiles, START_STEP apart. Fewer CTAs then add to the same sums at the same
# time.
STARTS, START_STEP = 4, 2

COLUMNS_AHEAD = 16  # all columns of a tile that a lane has


class Sm90Hd128Backward(FusedBackward):
    """The kernel for one Sm90BackwardSpec; see the module's docstring."""

    columns_ahead = COLUMNS_AHEAD

    def __init__(self, spec: Sm90BackwardSpec):
        super().__init__(
            spec, query_order(spec, STARTS, START_STEP), k=K_STAGES, q=Q_STAGES, do=DO_STAGES,
            ds=DS_STAGES, staged=True,
        )  # fmt: skip

    def sums_of(self, x: Operands, storage: Pointers, barriers: Barriers) -> StagedSums:
        staging = shared_address(storage.dq)
        sums = StagedSums(self.sums, x.dq_sums.iterator.toint(), staging)
        if self.spec.ordered:
            sums = OrderedSums(self.sums, sums.at, staging, barriers)
        return sums

    # -- device: products ---------------------------------------------------------------------

    @cute.jit
    def compute_works(self, x: Operands, own: Consumer) -> Int32:
        """Compute all works of the CTA, and return their number."""
        n = Int32(0)
        use = own.uses.first(own.keys, Int32(0))
        own.barriers.wait("k_full", use.taken)
        own.barriers.wait("q_full", n)
        s = own.start_scores(n, use.taken)
        own.barriers.wait("v_full", use.taken)
        own.barriers.wait("do_full", n)
        large = own.has_large_scores(n)
        dp = own.start_dp(n)
        own.compute_score_gradients(use, n, s, dp, large)
        goes_on, after = self.finish_use(own, use, n)
        if goes_on:
            self.next_use(x, own, use, after, n, Int32(0), True, True)
            before = use.sums
            use = after
            n += 1
            goes_on, after = self.finish_use(own, use, n)
            while goes_on:
                self.next_use(x, own, use, after, n, before, False, True)
                before = use.sums
                use = after
                n += 1
                goes_on, after = self.finish_use(own, use, n)
            self.next_use(x, own, use, after, n, before, False, False)
        else:
            self.next_use(x, own, use, after, n, Int32(0), True, False)
        own.barriers.wait("ds_full", n)
        dq = wgmma.wait(own.start_dq(n, use.taken))
        own.barriers.warp_arrives("ds_empty", n)
        own.barriers.warp_arrives("k_empty", use.taken)
        if cutlass.const_expr(self.spec.ordered):
            own.sums.wait_for_staging(own.keys.warp, n)
        else:
            own.sums.wait()
        own.sums.stage(own.keys.warp, dq, range(own.sums.vectors))
        self.add_staged(own, n, use.sums)
        own.turns.end()
        if cutlass.const_expr(not self.spec.ordered):
            own.sums.wait()
        return use.taken + 1

    @cute.jit
    def finish_use(self, own: Consumer, use: Use, n: Int32) -> tuple[Boolean, Use]:
        """Store dS^T of use n to shared memory, and return the use after use n. A work's last use
        is followed by the next work's first use. Return False if no use follows."""
        if use.left == 0:
            own.barriers.warp_arrives("v_empty", use.taken)
        own.ds.store(own.scores.ds, own.keys.warp, n, lane_anew())
        if cutlass.const_expr(not self.spec.ordered):
            own.sums.wait()
        return own.uses.after(own.keys, use)

    @cute.jit
    def next_use(
        self,
        x: Operands,
        own: Consumer,
        use: Use,
        after: Use,
        n: Int32,
        before: Int32,
        starts: cutlass.Constexpr[bool],
        follows: cutlass.Constexpr[bool],
    ) -> None:
        """Issue the burst of products of use n, `use`, then compute P^T and dS^T of the use
        `after`. `before` is the tile of the sums of use n - 1. With `starts` no use comes before,
        and without `follows` no use comes after."""
        barriers = own.barriers
        switches = use.taken != after.taken
        if cutlass.const_expr(not starts):
            if cutlass.const_expr(self.spec.ordered):
                own.sums.wait_for_staging(own.keys.warp, n - 1)
            barriers.wait("ds_full", n - 1)
        own.turns.wait()
        if cutlass.const_expr(not starts):
            dq = own.start_dq(n - 1, use.taken - 1 + use.adds)
        dv = own.start_dv(n, use.adds)
        own.ds.publish(n)
        if cutlass.const_expr(starts):
            dk, groups = own.start_dk(n, use.adds), 1
        else:
            dq = wgmma.wait(dq, pending=1)
            barriers.warp_arrives("ds_empty", n - 1)
            if use.adds == 0:
                barriers.warp_arrives("k_empty", use.taken - 1)
            dk, groups = self.start_dk_and_stage_dq(own, n, use.adds, dq)
        fragments.assign(own.dv, wgmma.wait(dv, pending=groups))
        barriers.warp_arrives("do_empty", n)
        # S^T beside dV would take more registers than there are.
        if cutlass.const_expr(follows):
            if switches:
                if cutlass.const_expr(not starts):
                    self.share_turn(own, use)
                barriers.wait("k_full", after.taken)
            barriers.wait("q_full", n + 1)
            s = own.start_scores(n + 1, after.taken)
        fragments.assign(own.dk, wgmma.wait(dk, pending=1 if follows else 0))
        barriers.warp_arrives("q_empty", n)
        if cutlass.const_expr(follows):
            if switches:
                barriers.wait("v_full", after.taken)
            barriers.wait("do_full", n + 1)
            large = own.has_large_scores(n + 1)
            dp = own.start_dp(n + 1)
        own.turns.give()
        if cutlass.const_expr(not starts):
            self.add_staged(own, n - 1, before)
        if cutlass.const_expr(follows):
            own.compute_score_gradients(after, n + 1, s, dp, large)
            if switches:
                self.rows.store(x, own, use.taken, n + 1)
        else:
            self.rows.store(x, own, use.taken, n + 1)

    def add_staged(self, own: Consumer, n: Int32, tile: Int32) -> None:
        """Add dQ of use n, which has been staged, to a tile of the sums."""
        if self.spec.ordered:
            own.sums.publish(own.keys.warp, n)
        else:
            own.sums.reduce(own.keys.warp, tile)

    @cute.jit
    def share_turn(self, own: Consumer, use: Use) -> None:
        """If `use` is the only use of its work, let the other warpgroup start its dQ first. The
        next K overwrites the K that the other warpgroup's dQ reads."""
        if use.adds == 0:
            own.turns.give()
            own.turns.wait()

    def start_dk_and_stage_dq(
        self, own: Consumer, n: Int32, adds: Int32, dq: list[Float32]
    ) -> tuple[list[Float32], int]:
        """Run `start_dk` step by step, stage a part of dQ before each step, and return the number
        of groups. The tensor cores' queue of products is short. If all of dQ were staged at once,
        the queue would run dry."""
        spec, queries = self.spec, own.products.q_of(n)
        dk, steps = fragments.values(own.dk), spec.tile_m // STEP
        vectors = own.sums.vectors
        for s in range(steps):
            part = range(s * vectors // steps, (s + 1) * vectors // steps)
            own.sums.stage(own.keys.warp, dq, part)
            dk = start_output(
                DTYPE[spec.dtype], dk, fragments.values(own.scores.ds), queries, tile_n=spec.tile_m,
                head_dim=spec.head_dim, steps=range(s, s + 1), adds=adds if s == 0 else None,
            )  # fmt: skip
        return dk, steps
