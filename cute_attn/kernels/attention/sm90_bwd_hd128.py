"""All gradients of q, k and v in one kernel for SM90, at head_dim 128: that of `sm90_bwd`, in the
form that was the fastest at this head_dim.

Each warp stages its part of dQ in shared memory of its own, from where a bulk reduction adds it to
the sums. The loop turns over between P and dS, and dQ is one tile late:

    tensor cores, in order                beside them
                                          dS^T of tile n, to shared memory
    dQ = dS K of tile n - 1
    dV += P^T dO of tile n                dS of tile n published; dQ of tile n - 1 to its staging
    dK += dS^T Q of tile n
    S^T of tile n + 1
    dP^T of tile n + 1
    the other warpgroup's turn            dQ from its staging to L2; P^T of tile n + 1
"""

from __future__ import annotations

from typing import Any

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
from .sm90_bwd import Sm90Backward
from .sm90_bwd_dkdv import CONSUMERS, Consumer, Operands
from .softmax import Scaling
from .visibility import Visibility
from .work import Work, following


class Sm90Hd128Backward(Sm90Backward):
    """The kernel for one Sm90BackwardSpec; see the module's docstring.

    A Consumer also has:
        staging: shared address of the staging of dQ.
    """

    q_stages = 2
    ds_stages = 3
    keeps_float32 = False

    def more_buffers(self) -> tuple[Buffer, ...]:
        staging = Buffer("dq", Float32, self.sums.part, len(CONSUMERS), 128, "dQ of each warp")
        return (*super().more_buffers(), staging)

    def consumer(
        self, x: Operands, storage: Pointers, barriers: Barriers, warp: Any, visible: Visibility,
        scaling: Scaling,
    ) -> Consumer:  # fmt: skip
        own = super().consumer(x, storage, barriers, warp, visible, scaling)
        own.staging = shared_address(storage.dq)
        return own

    def consumer_warps(self, x: Operands, own: Consumer, storage: Pointers) -> None:
        super().consumer_warps(x, own, storage)
        self.wait_for_staging()

    @cute.jit
    def compute_tile(
        self,
        own: Consumer,
        work: Work,
        first: Int32,
        end: Int32,
        count: Int32,
        taken: Int32,
        n: Int32,
    ) -> Int32:
        own.turns.begin()
        whole_first, whole_end = self.whole_query_tiles(own, work)
        tile, at = first, self.first_sums(own, work)
        masked = tile < whole_first or tile >= whole_end
        own.barriers.wait("q_full", n)
        scores = self.start_scores(own, n)
        own.barriers.wait("do_full", n)
        dp = self.start_dp(own, n)
        fragments.assign(own.s, wgmma.wait(scores, pending=1))
        self.probabilities(own, taken, tile, n, masked)
        fragments.assign(own.dp, wgmma.wait(dp))
        before = at  # the tile of the sums before
        if count > 1:
            this, tile_of_n, masked_n = at + tile, tile, masked
            tile, at = following(tile, at, first, end, own.tiles_of_head)
            masked = tile < whole_first or tile >= whole_end
            self.next_query_tile(
                own, taken, tile_of_n, masked_n, tile, masked, n, before, True, True
            )
            before = this
            n += 1
            for _ in cutlass.range(count - 2, unroll=1):
                this, tile_of_n, masked_n = at + tile, tile, masked
                tile, at = following(tile, at, first, end, own.tiles_of_head)
                masked = tile < whole_first or tile >= whole_end
                self.next_query_tile(
                    own, taken, tile_of_n, masked_n, tile, masked, n, before, False, True
                )
                before = this
                n += 1
            self.next_query_tile(own, taken, tile, masked, tile, masked, n, before, False, False)
        else:
            self.next_query_tile(own, taken, tile, masked, tile, masked, n, before, True, False)
        own.barriers.wait("ds_full", n)
        self.add_dq(own, wgmma.wait(self.start_dq(own, n)), n, at + tile)
        own.turns.end()
        return n + 1

    @cute.jit
    def next_query_tile(
        self,
        own: Consumer,
        taken: Int32,
        tile: Int32,
        masked: Boolean,
        following: Int32,
        following_masked: Boolean,
        n: Int32,
        before: Int32,
        starts: cutlass.Constexpr[bool],
        follows: cutlass.Constexpr[bool],
    ) -> None:
        """dS^T of use n of Q and dO, `tile`, then a burst of products, and P^T of the `following`
        tile. `before` is the tile of the sums of use n - 1; with `starts` there is none, and
        without `follows` no following tile."""
        barriers = own.barriers
        self.score_gradients(own, taken, tile, n, masked)
        self.stage_ds(own, n)

        own.turns.wait()
        if cutlass.const_expr(not starts):
            barriers.wait("ds_full", n - 1)
            dq = self.start_dq(own, n - 1)
        dv = self.start_dv(own, n)
        self.publish_ds(own, n)
        if cutlass.const_expr(not starts):
            self.stage_dq(own, wgmma.wait(dq, pending=1), n - 1)
        dk = self.start_dk(own, n)
        fragments.assign(own.dv, wgmma.wait(dv, pending=1))
        barriers.warp_arrives("do_empty", n)
        # S^T beside dV would take more registers than there are.
        if cutlass.const_expr(follows):
            barriers.wait("q_full", n + 1)
            scores = self.start_scores(own, n + 1)
        fragments.assign(own.dk, wgmma.wait(dk, pending=1 if follows else 0))
        barriers.warp_arrives("q_empty", n)
        if cutlass.const_expr(follows):
            barriers.wait("do_full", n + 1)
            dp = self.start_dp(own, n + 1)
        own.turns.give()
        if cutlass.const_expr(not starts):
            self.reduce_dq(own, before)
        if cutlass.const_expr(follows):
            fragments.assign(own.s, wgmma.wait(scores, pending=1))
            self.probabilities(own, taken, following, n + 1, following_masked)
            fragments.assign(own.dp, wgmma.wait(dp))

    def add_dq(self, own: Consumer, values: list[Any], n: Any, tile: Any) -> None:
        self.stage_dq(own, values, n)
        self.reduce_dq(own, tile)

    def stage_dq(self, own: Consumer, values: list[Any], n: Any) -> None:
        """Store the warp's part of dQ, of use n of dS, to its staging."""
        own.barriers.warp_arrives("ds_empty", n)
        self.wait_for_staging()
        at = own.staging + opaque(own.warp) * (4 * self.sums.part) + self.lane() * (4 * VECTOR)
        for i in range(self.sums.columns // 8):
            vector = values[VECTOR * i : VECTOR * (i + 1)]
            store_shared(Float32, at + i * (VECTORS * 4 * VECTOR), vector)

    @cute.jit
    def reduce_dq(self, own: Consumer, tile: Int32) -> None:
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
