"""All gradients of q, k and v in one kernel for SM90, at head_dim 128: that of `sm90_bwd`, in the
form that suits this head_dim.

Each warp stages its part of dQ in shared memory of its own, from where a bulk reduction adds it to
the sums. The loop turns over after dS, and dQ is one tile late:

    tensor cores, in order                beside them
                                          dS^T of tile n to shared memory
    dQ = dS K of tile n - 1
    dV += P^T dO of tile n                dS of tile n published; after dQ, its parts staged
    dK += dS^T Q of tile n                one by one between the steps of dK
    S^T of tile n + 1
    dP^T of tile n + 1
    the other warpgroup's turn            dQ from its staging to L2; P^T and dS^T of tile n + 1

Tile n + 1 may belong to the next tile of keys, which is work `taken` + 1. Its K is loaded beside
the products with the K before, of which the ring has two stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..common.pipeline import Barriers
from ..common.ptx import wgmma
from ..common.ptx.async_copy import add_bulk
from ..common.ptx.compiler import opaque
from ..common.ptx.memory import shared_address, store_shared
from ..common.smem import Buffer, Pointers
from . import fragments
from .query_sums import VECTOR, VECTORS
from .sm90_bwd import FusedConsumer, Sm90Backward, Use
from .sm90_bwd_dkdv import CONSUMERS, Operands
from .sm90_mma import STEP, start_output
from .softmax import Scaling
from .visibility import Visibility
from .work import TileMap, Work

# Tiles of keys begin with one of so many tiles of queries, so far apart.
STARTS, START_STEP = 4, 2


@dataclass(frozen=True)
class Hd128Consumer(FusedConsumer):
    """What a warp of the consumers keeps; see `FusedConsumer` for the others.

    Attributes:
        staging: shared address of the staging of dQ.
    """

    staging: Int32


class Sm90Hd128Backward(Sm90Backward):
    """The kernel for one Sm90BackwardSpec; see the module's docstring."""

    k_stages, q_stages, ds_stages = 2, 2, 2
    columns_ahead = 16  # all of them

    def more_buffers(self) -> tuple[Buffer, ...]:
        staging = Buffer("dq", Float32, self.sums.part, len(CONSUMERS), 128, "dQ of each warp")
        return (*super().more_buffers(), staging)

    def consumer(
        self, x: Operands, storage: Pointers, barriers: Barriers, tiles: TileMap, warp: Int32,
        visible: Visibility, scaling: Scaling,
    ) -> Hd128Consumer:  # fmt: skip
        own = super().consumer(x, storage, barriers, tiles, warp, visible, scaling)
        return Hd128Consumer(**vars(own), staging=shared_address(storage.dq))

    # -- device: load -------------------------------------------------------------------------

    @property
    def lowest(self) -> int | None:
        return None if self.spec.window_left or self.spec.window_right else 0

    def start_of(self, work: Work, first: Int32, end: Int32) -> Int32:
        """Where all tiles of keys see the same queries, neighbours begin some tiles apart, so that
        fewer CTAs add to the same sums at the same time."""
        if self.lowest is None:
            return first
        return cutlass.min((work.block & (STARTS - 1)) * START_STEP, end - 1)

    # -- device: products ---------------------------------------------------------------------

    @cute.jit
    def compute_works(self, x: Operands, own: Hd128Consumer) -> Int32:
        """Compute all works of the CTA, and return their number."""
        n = Int32(0)
        use = self.first_use(own, Int32(0))
        own.barriers.wait("k_full", use.taken)
        own.barriers.wait("q_full", n)
        scores = self.start_scores(own, n, self.k_offset(own, use.taken))
        own.barriers.wait("v_full", use.taken)
        own.barriers.wait("do_full", n)
        large = self.has_large_scores(own, n)
        dp = self.start_dp(own, n)
        self.compute_score_gradients(own, use, n, scores, dp, large)
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
        dq = wgmma.wait(self.start_dq(own, n, self.k_offset(own, use.taken)))
        own.barriers.warp_arrives("ds_empty", n)
        own.barriers.warp_arrives("k_empty", use.taken)
        self.wait_for_staging()
        self.stage_dq(own, dq, range(self.vectors))
        self.reduce_dq(own, use.sums)
        own.turns.end()
        self.wait_for_staging()
        return use.taken + 1

    @cute.jit
    def finish_use(self, own: Hd128Consumer, use: Use, n: Int32) -> tuple[Boolean, Use]:
        """dS^T of use n to shared memory, and the use after it, of the next work after the last of
        a work; False if there is none."""
        if use.left == 0:
            own.barriers.warp_arrives("v_empty", use.taken)
        self.stage_ds(own, n, self.lane())
        self.wait_for_staging()
        return self.use_after(own, use)

    @cute.jit
    def next_use(
        self,
        x: Operands,
        own: Hd128Consumer,
        use: Use,
        after: Use,
        n: Int32,
        before: Int32,
        starts: cutlass.Constexpr[bool],
        follows: cutlass.Constexpr[bool],
    ) -> None:
        """The burst of products of use n, `use`, then P^T and dS^T of the one `after`. `before` is
        the tile of the sums of use n - 1; with `starts` there is none, and without `follows` none
        after."""
        barriers = own.barriers
        switches = use.taken != after.taken
        if cutlass.const_expr(not starts):
            barriers.wait("ds_full", n - 1)
        own.turns.wait()
        if cutlass.const_expr(not starts):
            dq = self.start_dq(own, n - 1, self.k_offset(own, use.taken - 1 + use.adds))
        dv = self.start_dv(own, n, use.adds)
        self.publish_ds(own, n)
        if cutlass.const_expr(starts):
            dk, groups = self.start_dk(own, n, use.adds), 1
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
            scores = self.start_scores(own, n + 1, self.k_offset(own, after.taken))
        fragments.assign(own.dk, wgmma.wait(dk, pending=1 if follows else 0))
        barriers.warp_arrives("q_empty", n)
        if cutlass.const_expr(follows):
            if switches:
                barriers.wait("v_full", after.taken)
            barriers.wait("do_full", n + 1)
            large = self.has_large_scores(own, n + 1)
            dp = self.start_dp(own, n + 1)
        own.turns.give()
        if cutlass.const_expr(not starts):
            self.reduce_dq(own, before)
        if cutlass.const_expr(follows):
            self.compute_score_gradients(own, after, n + 1, scores, dp, large)
            if switches:
                self.store_rows(x, own, use.taken, n + 1)
        else:
            self.store_rows(x, own, use.taken, n + 1)

    @cute.jit
    def share_turn(self, own: Hd128Consumer, use: Use) -> None:
        """Where `use` is the only one of its work, let the other warpgroup start its dQ first: the
        next K takes the stage of the K which that dQ reads."""
        if use.adds == 0:
            own.turns.give()
            own.turns.wait()

    def start_dk_and_stage_dq(
        self, own: Hd128Consumer, n: Int32, adds: Int32, dq: list[Float32]
    ) -> tuple[list[Float32], int]:
        """`start_dk` step by step, with a part of dQ staged before each step, and the number of
        groups. The queue of products is short: staged at once, dQ would let it run dry."""
        spec = self.spec
        queries = own.q + own.barriers.stage("q_full", n) * self.q_bytes
        dk, steps = fragments.values(own.dk), spec.tile_m // STEP
        for s in range(steps):
            self.stage_dq(
                own, dq, range(s * self.vectors // steps, (s + 1) * self.vectors // steps)
            )
            dk = start_output(
                self.dtype, dk, fragments.values(own.ds), queries, tile_n=spec.tile_m,
                head_dim=spec.head_dim, steps=range(s, s + 1), adds=adds if s == 0 else None,
            )  # fmt: skip
        return dk, steps

    @property
    def vectors(self) -> int:
        """Vectors of a lane's part of dQ."""
        return self.sums.columns // 8

    def stage_dq(self, own: Hd128Consumer, values: list[Float32], vectors: range) -> None:
        """Store these vectors of the warp's part of dQ to its staging."""
        at = own.staging + opaque(own.warp) * (4 * self.sums.part) + self.lane() * (4 * VECTOR)
        for i in vectors:
            vector = values[VECTOR * i : VECTOR * (i + 1)]
            store_shared(Float32, at + i * (VECTORS * 4 * VECTOR), vector)

    @cute.jit
    def reduce_dq(self, own: Hd128Consumer, tile: Int32) -> None:
        """Add what is staged to that tile of the sums, so much later that the fence does not
        wait."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if self.lane() == 0:
            part = opaque(own.warp) * (4 * self.sums.part)
            at = own.sums + Int64(tile) * (4 * self.sums.tile) + part
            add_bulk(at, own.staging + part, 4 * self.sums.part)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def wait_for_staging(self) -> None:
        """Until the warp's reduction has read its staging."""
        if self.lane() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
