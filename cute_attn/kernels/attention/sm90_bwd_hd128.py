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

The loop runs over all tiles of queries of all tiles of keys that the CTA takes: tile n + 1 may
belong to the next tile of keys, which is work `taken` + 1. Its K is loaded beside the products with
the K before, of which the ring has two stages, and its V when dP of the last tile of queries is
done. dK and dV are stored from registers, beside S^T and dP^T of tile n + 1.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..common.carried import Named
from ..common.pipeline import Barriers
from ..common.ptx import wgmma
from ..common.ptx.async_copy import add_bulk
from ..common.ptx.compiler import opaque
from ..common.ptx.memory import shared_address, store_global, store_shared
from ..common.scheduler import TileQueue
from ..common.smem import Buffer, Pointers
from . import fragments
from .query_sums import VECTOR, VECTORS
from .sm90_bwd import Sm90Backward
from .sm90_bwd_dkdv import CONSUMERS, Consumer, Operands, Rings
from .sm90_gradients import Statistics
from .sm90_key_tiles import head_and_split
from .sm90_mma import STEP, start_output
from .sm90_store import row_parts, store_parts
from .softmax import Scaling
from .visibility import Visibility
from .work import Work, following

UNIT = 16  # bytes that a lane stores at once


class Use(Named):
    """A use of Q and dO: a tile of queries of a tile of keys.

    Attributes:
        taken: the tile of keys, by its number in the queue.
        tile: the tile of queries.
        head_sums: tile 0 of the head, among the tiles of the sums.
        first, end: the tiles of queries that see some of the keys.
        whole_first, whole_end: those that need no mask.
        left: how many uses of the same work come after it.
        adds: 0 if it is the first of its work, so that nothing is in dK and dV yet; otherwise 1.
    """

    def __init__(self, **values: Any):
        # Constants too become run-time values: a later use may have another value.
        super().__init__(**{name: Int32(Int32(x).ir_value()) for name, x in values.items()})

    @property
    def masked(self) -> Any:
        return (self.tile < self.whole_first) | (self.tile >= self.whole_end)

    @property
    def sums(self) -> Any:
        """Its tile of the sums."""
        return self.head_sums + self.tile

    def following(self, tiles_of_head: Any) -> Use:
        """The next use of the same work."""
        tile, head_sums = following(self.tile, self.head_sums, self.first, self.end, tiles_of_head)
        changed = {"tile": tile, "head_sums": head_sums, "left": self.left - 1, "adds": 1}
        return Use(**vars(self) | changed)


class Sm90Hd128Backward(Sm90Backward):
    """The kernel for one Sm90BackwardSpec; see the module's docstring.

    A Consumer also has:
        staging: shared address of the staging of dQ.
        query_heads: of a work.
    """

    k_stages, q_stages, ds_stages = 2, 2, 2
    stages_outputs = False
    loads_v_late = True  # V of the work before is in use for longer than its last Q

    def more_buffers(self) -> tuple[Buffer, ...]:
        staging = Buffer("dq", Float32, self.sums.part, len(CONSUMERS), 128, "dQ of each warp")
        return (*super().more_buffers(), staging)

    def consumer(
        self, x: Operands, storage: Pointers, barriers: Barriers, warp: Any, visible: Visibility,
        scaling: Scaling,
    ) -> Consumer:  # fmt: skip
        own = super().consumer(x, storage, barriers, warp, visible, scaling)
        own.staging = shared_address(storage.dq)
        own.query_heads = x.group
        return own

    # -- device: load -------------------------------------------------------------------------

    @cute.jit
    def load_work(
        self, x: Operands, to: Rings, queue: TileQueue, visible: Visibility, work: Work,
        taken: Int32, n: Int32,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """As of `Sm90DkDv`, in the order in which the consumers need it. A tile that no query sees
        is not published: its zeros are stored here."""
        first, end = visible.query_tiles(work.block, work.seqlen_q, work.seqlen_k)
        if first < end:
            queue.publish_work(taken, work)
            self.load_keys("k", x, to, work, taken)
            n = self.load_uses(x, to, work, taken, first, end, n)
            taken += 1
        else:
            self.store_zeros(x, work)
        return taken, n

    @cute.jit
    def store_zeros(self, x: Operands, work: Work) -> None:
        """Store dK and dV of keys that no query sees, by one warp."""
        spec = self.spec
        at = cute.arch.lane_idx() * UNIT
        first = work.block * spec.tile_n
        count = cutlass.min(work.seqlen_k - first, Int32(spec.tile_n))
        for i in cutlass.range(count, unroll=1):
            if at < self.out_dtype.width // 8 * spec.head_dim:
                for out in (x.dk, x.dv):
                    row = self.row_of(x, out, work, first + i)
                    store_global(Int32, row.iterator.toint() + at, [Int32(0)] * (UNIT // 4))

    # -- device: products ---------------------------------------------------------------------

    @cute.jit
    def consumer_warps(self, x: Operands, own: Consumer, storage: Pointers) -> None:
        count = Int32(0)  # of works
        own.queue.wait(count)
        if own.queue.read(count).exists:
            own.turns.begin()
            count = self.compute_works(x, own)
            own.turns.end()
        own.queue.release(count)
        self.wait_for_staging()

    @cute.jit
    def compute_works(self, x: Operands, own: Consumer) -> Int32:
        """Compute all works of the CTA, and return their number."""
        n = Int32(0)
        use = self.first_use(own, Int32(0))
        own.barriers.wait("k_full", use.taken)
        own.barriers.wait("q_full", n)
        scores = self.start_scores(own, n, self.k_offset(own, use.taken))
        own.barriers.wait("v_full", use.taken)
        own.barriers.wait("do_full", n)
        dp = self.start_dp(own, n)
        self.compute_score_gradients(own, use, n, scores, dp)
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
        return use.taken + 1

    @cute.jit
    def first_use(self, own: Consumer, taken: Int32) -> Use:
        """The first use of a work, which has been published."""
        work = own.queue.read(taken)
        first, end = own.visible.query_tiles(work.block, work.seqlen_q, work.seqlen_k)
        whole_first, whole_end = self.whole_query_tiles(own, work)
        return Use(
            taken=taken, tile=first, head_sums=self.first_sums(own, work), first=first, end=end,
            whole_first=whole_first, whole_end=whole_end,
            left=(end - first) * own.query_heads - 1, adds=0,
        )  # fmt: skip

    @cute.jit
    def finish_use(self, own: Consumer, use: Use, n: Int32) -> tuple[Boolean, Use]:
        """dS^T of use n to shared memory, and the use after it, of the next work after the last of
        a work; False if there is none."""
        last = use.left == 0
        if last:
            own.barriers.warp_arrives("v_empty", use.taken)
        self.stage_ds(own, n)
        self.wait_for_staging()
        goes_on = Boolean(True)
        after = use
        if last:
            own.queue.wait(use.taken + 1)
            goes_on = own.queue.read(use.taken + 1).exists
            if goes_on:
                after = self.first_use(own, use.taken + 1)
        else:
            after = use.following(own.tiles_of_head)
        return goes_on, after

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
            dp = self.start_dp(own, n + 1)
        own.turns.give()
        if cutlass.const_expr(not starts):
            self.reduce_dq(own, before)
        if cutlass.const_expr(follows):
            if switches:
                self.store_rows(x, own, use.taken)
            self.compute_score_gradients(own, after, n + 1, scores, dp)
        else:
            self.store_rows(x, own, use.taken)

    @cute.jit
    def share_turn(self, own: Consumer, use: Use) -> None:
        """Where `use` is the only one of its work, let the other warpgroup start its dQ first: the
        next K takes the stage of the K which that dQ reads."""
        if use.adds == 0:
            own.turns.give()
            own.turns.wait()

    @cute.jit
    def compute_score_gradients(
        self, own: Consumer, use: Use, n: Int32, scores: list[Any], dp: list[Any]
    ) -> None:
        """P^T and dS^T of use n, once their products are done. With and without a mask they are one
        block of code each, so that the last exponentials run beside the first dS^T."""
        if use.masked:
            self.compute_block(own, use, n, scores, dp, True)
        else:
            self.compute_block(own, use, n, scores, dp, False)

    def compute_block(
        self, own: Consumer, use: Use, n: Any, scores: list[Any], dp: list[Any], masked: bool
    ) -> None:
        lse = self.load_all(self.lse(own, n))
        fragments.assign(own.s, wgmma.wait(scores, pending=1))
        self.probabilities(own, use.taken, use.tile, masked, lse)
        delta = self.load_all(self.delta(own, n))
        fragments.assign(own.dp, wgmma.wait(dp))
        self.score_gradients(own, use.taken, use.tile, masked, delta)

    def load_all(self, statistics: Statistics) -> Statistics:
        """Load the statistics of all columns, before a wait which the compiler does not move loads
        across."""
        loaded = statistics(range(self.spec.tile_m // 4))
        return lambda columns: loaded

    def k_offset(self, own: Consumer, taken: Any) -> Any:
        """Where K of work `taken` lies in its ring, in bytes."""
        return own.barriers.stage("k_full", taken) * self.k_bytes

    def start_dk_and_stage_dq(
        self, own: Consumer, n: Any, adds: Any, dq: list[Any]
    ) -> tuple[list[Any], int]:
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

    def stage_dq(self, own: Consumer, values: list[Any], vectors: range) -> None:
        """Store these vectors of the warp's part of dQ to its staging."""
        at = own.staging + opaque(own.warp) * (4 * self.sums.part) + self.lane() * (4 * VECTOR)
        for i in vectors:
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

    # -- device: epilogue ---------------------------------------------------------------------

    @cute.jit
    def store_rows(self, x: Operands, own: Consumer, taken: Int32) -> None:
        """Store the warp's rows of dK and dV of a work from registers, and release its record."""
        work = own.queue.read(taken)
        for acc, out, factor in (
            (own.dk, x.dk, x.softmax_scale),
            (own.dv, x.dv, Float32(self.unit)),
        ):
            self.store_rows_of(x, own, work, acc, out, factor)
        own.queue.release(taken)

    @cute.jit
    def store_rows_of(
        self, x: Operands, own: Consumer, work: Work, acc: cute.Tensor, out: cute.Tensor,
        factor: Float32,
    ) -> None:  # fmt: skip
        for lane_row in cutlass.range_constexpr(fragments.LANE_ROWS):
            key = self.key(own, work, lane_row)
            row = acc[None, lane_row, None]
            pairs = [[factor * row[j], factor * row[j + 1]] for j in range(0, cute.size(row), 2)]
            parts = row_parts(pairs, self.out_dtype)
            if key < work.seqlen_k:
                store_parts(self.row_of(x, out, work, key), parts, self.out_dtype)

    def row_of(self, x: Operands, out: cute.Tensor, work: Work, key: Any) -> cute.Tensor:
        """The row of a key in dK or dV, or in a split's partial sums."""
        head, split = head_and_split(work, x.num_splits, self.spec.partial)
        part = (split,) if self.spec.partial else ()
        if self.spec.varlen_k:
            return out[(*part, work.k_start + key, head, None)]
        return out[(*part, work.sequence, key, head, None)]
