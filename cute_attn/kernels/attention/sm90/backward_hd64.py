"""All gradients of q, k and v in one kernel for SM90, at head_dim 64: wgmma, TMA,
warp-specialised, five products.

A CTA computes dK and dV of a tile of 128 keys of a K/V head, 64 for each of two consumer
warpgroups, and adds to dQ. The CTA loops over the query heads of the head's group or split. For
each query head the CTA loops over the tiles of queries that see some of the keys.

    S^T = K Q^T            64 x tile_m a warpgroup     K and Q in shared memory
    P^T = exp(c S^T - lse)                             in registers
    dV += P^T dO           64 x head_dim               P^T and dV in registers
    dP^T = V dO^T          64 x tile_m                 V and dO in shared memory
    dS^T = P'^T * (dP^T - delta)                       in registers, then in shared memory too
    dK += dS^T Q           64 x head_dim               dS^T and dK in registers
    dQ = dS K              64 of 128 queries, or of 64 queries half of head_dim

P' is P; with a softcap, P' is P times the slope of the cap.

    warps    role         work on a tile of keys
    0-7      consumers    compute all of the above; at the end store dK and dV from registers
    8        load         finds the next tile; loads K and V, then Q, lse, dO and delta of each tile
    9        zeros        writes the zeros of the sums of dQ, see `query_zeros`
    10-11    adders       add to the sums of dQ in a fixed order, see `ordered_sums`

Each thread adds its part of a tile's dQ to float32 sums in global memory. `backward_postprocess`
scales and rounds the sums. CTAs add in any order, so the bits of dQ differ from run to run. With
`spec.ordered`, each warp stages its part, and an adding warp adds the part in a fixed order.
`backward_hd128` has another form of the kernel, for head_dim 128. The load warp's warpgroup gives
its registers to the consumers; without `spec.ordered` its two other warps idle.

A warpgroup starts the products of a tile in one burst, and has only elementwise work until the next
tile. The two warpgroups take turns, so that one warpgroup's elementwise work runs during the other
warpgroup's burst. A warpgroup also needs dS of the other warpgroup, which is half a tile behind. So
dQ is two tiles late. Other work during a burst waits for nothing, because a waiting warp would
leave the tensor cores idle.

    tensor cores, in order                beside them
    dQ = dS K of tile n - 2
    dV += P^T dO of tile n - 1            dS of tile n - 1 published
    dK += dS^T Q of tile n - 1            dQ of tile n - 2 to its sums, after its product, part by
    S^T of tile n                         part between the products
    dP^T of tile n
    the other warpgroup's turn            P^T of tile n, after S^T; dS^T, after dP^T, to shared
                                          memory

The loop runs over all tiles of queries of all tiles of keys that the CTA takes. So tile n may
belong to the next tile of keys, the next work. K of up to three works is in use at once. One work
is at dQ, one at dV and dK, and one at S^T. V has one buffer, which is loaded again when dP^T of a
work's last tile of queries is done. dK and dV are stored from registers, beside S^T and dP^T of the
next work.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.pipeline import Barriers
from ...common.ptx import wgmma
from ...common.ptx.compiler import opaque
from ...common.ptx.memory import shared_address
from ...common.smem import Pointers
from ..parts import fragments
from ..spec import Sm90BackwardSpec
from .dq_sums import RegisterSums
from .fused import Consumer, FusedBackward, Operands
from .key_tiles import lane_anew
from .ordered_sums import OrderedSums
from .uses import Use, query_order

# dQ is two tiles late, and reads the K of a work up to two works back.
K_STAGES, DS_STAGES = 3, 2
Q_STAGES, DO_STAGES = 3, 2
ORDERED_Q_STAGES = 2  # beside the staging of dQ


class Sm90Hd64Backward(FusedBackward):
    """The kernel for one Sm90BackwardSpec; see the module's docstring."""

    def __init__(self, spec: Sm90BackwardSpec):
        super().__init__(
            spec, query_order(spec), k=K_STAGES, q=ORDERED_Q_STAGES if spec.ordered else Q_STAGES,
            do=DO_STAGES, ds=DS_STAGES, staged=spec.ordered,
        )  # fmt: skip

    def sums_of(
        self, x: Operands, storage: Pointers, barriers: Barriers
    ) -> RegisterSums | OrderedSums:
        sums: RegisterSums | OrderedSums = RegisterSums(self.sums, x.dq_sums.iterator.toint())
        if self.spec.ordered:
            sums = OrderedSums(self.sums, sums.at, shared_address(storage.dq), barriers)
        return sums

    # -- device: products ---------------------------------------------------------------------

    @cute.jit
    def compute_works(self, x: Operands, own: Consumer) -> Int32:
        """Compute all works of the CTA, and return their number."""
        n = Int32(0)
        use = own.uses.first(own.keys, Int32(0))
        self.next_use(x, own, use, n, 0, use.taken, Int32(-1), Int32(0))
        # The works, and the tiles of the sums, of the last two uses.
        before, sums = use.taken, use.sums
        before2, sums2 = Int32(-1), sums
        goes_on, after = own.uses.after(own.keys, use)
        if goes_on:
            use = after
            n += 1
            self.next_use(x, own, use, n, 1, before, before2, sums2)
            before2, sums2 = before, sums
            before, sums = use.taken, use.sums
            goes_on, after = own.uses.after(own.keys, use)
        while goes_on:
            use = after
            n += 1
            self.next_use(x, own, use, n, 2, before, before2, sums2)
            before2, sums2 = before, sums
            before, sums = use.taken, use.sums
            goes_on, after = own.uses.after(own.keys, use)
        own.turns.end()
        adds = Int32(before == before2)
        dv = own.start_dv(n, adds)
        own.ds.publish(n)
        dk = own.start_dk(n, adds)
        fragments.assign(own.dv, wgmma.wait(dv, pending=1))
        fragments.assign(own.dk, wgmma.wait(dk))
        own.barriers.warp_arrives("do_empty", n)
        own.barriers.warp_arrives("q_empty", n)
        if n > 0:
            own.barriers.wait("ds_full", n - 1)
            dq = wgmma.wait(own.start_dq(n - 1, before2))
            self.add_dq(own, dq, n - 1, sums2)
            if before2 != before:
                own.barriers.warp_arrives("k_empty", before2)
        own.barriers.wait("ds_full", n)
        dq = wgmma.wait(own.start_dq(n, before))
        self.add_dq(own, dq, n, sums)
        own.barriers.warp_arrives("k_empty", before)
        self.rows.store(x, own, before, n + 1)
        return before + 1

    @cute.jit
    def next_use(
        self,
        x: Operands,
        own: Consumer,
        use: Use,
        n: Int32,
        uses: cutlass.Constexpr[int],
        before: Int32,
        before2: Int32,
        sums2: Int32,
    ) -> None:
        """Issue products up to S^T and dP^T of use n, `use`, then compute its P^T and dS^T. At
        least min(`uses`, 2) uses come before. `before` and `before2` are the works of uses n - 1
        and n - 2, and `sums2` is the tile of the sums of use n - 2."""
        barriers = own.barriers
        switches = True if uses == 0 else use.taken != before
        if cutlass.const_expr(uses == 2):
            self.wait_for_staging(own, n - 2)
            barriers.wait("ds_full", n - 2)
        own.turns.wait()
        if cutlass.const_expr(uses == 2):
            dq = own.start_dq(n - 2, before2)
        if cutlass.const_expr(uses >= 1):
            adds = Int32(before == before2)
            dv = own.start_dv(n - 1, adds)
            own.ds.publish(n - 1)
        if cutlass.const_expr(uses == 2):
            dq = wgmma.wait(dq, pending=1)
            barriers.warp_arrives("ds_empty", n - 2)
            if before2 != before:
                barriers.warp_arrives("k_empty", before2)
            self.add_quarter(own, dq, sums2, 0)
        if cutlass.const_expr(uses >= 1):
            dk = own.start_dk(n - 1, adds)
        if cutlass.const_expr(uses == 2):
            self.add_quarter(own, dq, sums2, 1)
        # S^T beside dV and dK would take more registers than there are.
        if cutlass.const_expr(uses >= 1):
            fragments.assign(own.dv, wgmma.wait(dv, pending=1))
            barriers.warp_arrives("do_empty", n - 1)
        if cutlass.const_expr(uses == 2):
            self.add_quarter(own, dq, sums2, 2)
        if switches:
            barriers.wait("k_full", use.taken)
        barriers.wait("q_full", n)
        s = own.start_scores(n, use.taken)
        if cutlass.const_expr(uses == 2):
            self.add_quarter(own, dq, sums2, 3)
        if cutlass.const_expr(uses >= 1):
            fragments.assign(own.dk, wgmma.wait(dk, pending=1))
            barriers.warp_arrives("q_empty", n - 1)
        if switches:
            barriers.wait("v_full", use.taken)
        barriers.wait("do_full", n)
        large = own.has_large_scores(n)
        dp = own.start_dp(n)
        own.turns.give()
        if cutlass.const_expr(uses == 2):
            self.publish(own, n - 2)

        own.compute_score_gradients(use, n, s, dp, large)
        if use.left == 0:
            barriers.warp_arrives("v_empty", use.taken)
        if cutlass.const_expr(uses >= 1):
            if switches:
                self.rows.store(x, own, before, n)
        # The compiler would keep the addresses of use 0 until use 1.
        lane = opaque(lane_anew()) if uses == 1 else lane_anew()
        own.ds.store(own.scores.ds, own.keys.warp, n, lane)

    def add_dq(self, own: Consumer, dq: list[Float32], n: Int32, tile: Int32) -> None:
        """Add the warp's part of dQ, from use n of dS, to a tile of the sums."""
        own.barriers.warp_arrives("ds_empty", n)
        self.wait_for_staging(own, n)
        for quarter in range(4):
            self.add_quarter(own, dq, tile, quarter)
        self.publish(own, n)

    def add_quarter(self, own: Consumer, dq: list[Float32], tile: Int32, quarter: int) -> None:
        """Add, or stage, a quarter of the columns of the warp's part of dQ."""
        if self.spec.ordered:
            count = own.sums.vectors // 4
            own.sums.stage(own.keys.warp, dq, range(quarter * count, (quarter + 1) * count))
        else:
            own.sums.add_quarter(own.keys.warp, dq, tile, quarter)

    def wait_for_staging(self, own: Consumer, n: Int32) -> None:
        """Wait until use n may be staged."""
        if self.spec.ordered:
            own.sums.wait_for_staging(own.keys.warp, n)

    def publish(self, own: Consumer, n: Int32) -> None:
        """Hand use n to the adding warp, if it has been staged."""
        if self.spec.ordered:
            own.sums.publish(own.keys.warp, n)
