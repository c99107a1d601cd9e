"""All gradients of q, k and v in one kernel for SM90, at head_dim 64: five products.

It is the dK/dV kernel (`sm90_bwd_dkdv`), whose warpgroups also write dS to shared memory, for a
third product with the tile's 128 keys:

    dQ = dS K        a warpgroup has 64 of 128 queries, or of 64 queries half of head_dim

Each thread adds its part of a tile's dQ to float32 sums in global memory, which
`backward_postprocess` scales and rounds. CTAs add in any order: the bits of dQ differ from run to
run. The sums get their zeros from a warp of their own, the one behind the load warp
(`query_zeros`). `sm90_bwd_hd128` has another form of the kernel, for head_dim 128.

A warpgroup starts the products of a tile in one burst, and has only elementwise work until the
next. The two take turns, so that one's elementwise work falls into the burst of the other. A
warpgroup needs dS of the other one too, which is half a tile behind: dQ is two tiles late. What
else is done in a burst waits for nothing: a warp that waits there leaves the tensor cores idle.

    tensor cores, in order                beside them
    dQ = dS K of tile n - 2
    dV += P^T dO of tile n - 1            dS of tile n - 1 published
    dK += dS^T Q of tile n - 1            dQ of tile n - 2 to its sums, after its product, part by
    S^T of tile n                         part between the products
    dP^T of tile n
    the other warpgroup's turn            P^T of tile n, after S^T; dS^T, after dP^T, to shared
                                          memory

The loop runs over all tiles of queries of all tiles of keys that the CTA takes: tile n may belong
to the next tile of keys, the next work. K of up to three works is in use at once: that of dQ, that
of dV and dK, and that of S^T. V has one buffer, which is loaded when dP^T of the last tile of
queries is done. dK and dV are stored from registers, beside S^T and dP^T of the next work.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from ..common.carried import Carried
from ..common.pipeline import Barriers, Edge, Kind, Role, report_names
from ..common.ptx import wgmma
from ..common.ptx.compiler import opaque
from ..common.ptx.memory import add_global, load_shared, shared_address, store_global
from ..common.scheduler import TileQueue
from ..common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers
from ..common.spec import WARP_SIZE
from ..common.tma import BOX
from . import fragments
from .query_sums import VECTOR, VECTORS, WARPS, QuerySums
from .query_zeros import QueryZeros
from .sm90_bwd_dkdv import CONSUMERS, LOAD, WARPGROUPS, Consumer, Operands, Rings, Sm90DkDv
from .sm90_gradients import Statistics
from .sm90_mma import LINE_BYTES, ROWS, WARPGROUP_WARPS, start_query_gradients
from .sm90_store import store_parts
from .softmax import Scaling
from .spec import Sm90BackwardSpec
from .statistics import FLAG_ROWS, padded_start
from .turns import Turns
from .visibility import Visibility
from .work import TileMap, Work, following, head_and_split

assert len(CONSUMERS) == WARPS

ZEROS = Role("zeros", range(LOAD.warps[-1] + 1, LOAD.warps[-1] + 2))

UNIT = 16  # bytes that a lane stores at once
UNITS = LINE_BYTES // UNIT


@dataclass(frozen=True)
class Use(Carried):
    """A use of Q and dO: a tile of queries of a tile of keys.

    Attributes:
        taken: the tile of keys, by its number in the queue.
        tile: the tile of queries.
        head_sums: tile 0 of the head, among the tiles of the sums.
        first: the tile that each head begins with; see `start_of`.
        end: behind the last tile of queries that sees some of the keys.
        whole_first, whole_end: the tiles of queries that need no mask.
        left: how many uses of the same work come after it.
        adds: 0 if it is the first of its work, so that nothing is in dK and dV yet; otherwise 1.
    """

    taken: Int32
    tile: Int32
    head_sums: Int32
    first: Int32
    end: Int32
    whole_first: Int32
    whole_end: Int32
    left: Int32
    adds: Int32

    def __post_init__(self) -> None:
        # Constants too become run-time values: a later use may have another value.
        for field in fields(self):
            value = Int32(Int32(getattr(self, field.name)).ir_value())
            object.__setattr__(self, field.name, value)

    @property
    def masked(self) -> Boolean:
        return (self.tile < self.whole_first) | (self.tile >= self.whole_end)

    @property
    def sums(self) -> Int32:
        """The use's tile of the sums."""
        return self.head_sums + self.tile

    def following(self, tiles_of_head: Int32, lowest: int | None) -> Use:
        """The next use of the same work; `lowest` as of `work.following`."""
        tile, head_sums = following(
            self.tile, self.head_sums, self.first, self.end, tiles_of_head, lowest
        )
        return replace(self, tile=tile, head_sums=head_sums, left=self.left - 1, adds=1)


@dataclass(frozen=True)
class FusedConsumer(Consumer):
    """What a warp of the consumers keeps; see `Consumer` for the others.

    Attributes:
        k, v, ds_ring: shared addresses of the whole buffers.
        sums: global address of the sums of dQ.
        tiles_of_head: tiles of a head in the sums.
        turns: the warpgroup's turns to start products.
    """

    ds_ring: Int32
    sums: Int64
    tiles_of_head: Int32
    turns: Turns


class Sm90Backward(Sm90DkDv):
    """The kernel for one Sm90BackwardSpec; see the module's docstring."""

    k_stages, ds_stages = 3, 2
    stages_outputs = False
    adds_dq = True
    loads_v_late = True  # V of the work before is in use for longer than its last Q
    keeps_float32 = True
    columns_ahead = 0  # whose statistics are loaded before a product is waited for
    bounded = True  # a key past the end of the sequence would add to dQ

    element_bytes = 2 + 2 + 4  # of Q, dO and the sums of dQ
    l2_parts = 2  # all of L2 is up to 8 % slower

    def __init__(self, spec: Sm90BackwardSpec):
        if spec.tile_m not in (ROWS, WARPGROUPS * ROWS):
            raise ValueError(f"tile_m is {spec.tile_m}, must be {ROWS} or {WARPGROUPS * ROWS}")
        self.sums = QuerySums.of(spec.tile_m, spec.head_dim)
        self.zeros = QueryZeros(spec.head_dim)
        self.ds_bytes = 2 * spec.tile_m * spec.tile_n
        super().__init__(spec)

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.smem, self.pipeline, (CONSUMERS, LOAD, ZEROS), shared_base)

    def more_edges(self) -> tuple[Edge, ...]:
        return (
            Edge("ds_full", CONSUMERS, CONSUMERS, self.ds_stages, Kind.WARPS, payload="dS"),
            Edge("ds_empty", CONSUMERS, CONSUMERS, self.ds_stages, Kind.WARPS, payload="its stage"),
            Edge("zeros_full", ZEROS, LOAD, 1, Kind.WARPS, payload="sums of dQ, which are zeros"),
        )

    def more_buffers(self) -> tuple[Buffer, ...]:
        elements, at = self.ds_bytes // 2, SWIZZLE_ALIGNMENT
        return (Buffer("ds", self.dtype, elements, self.ds_stages, at, "dS^T"),)

    def consumer(
        self, x: Operands, storage: Pointers, barriers: Barriers, tiles: TileMap, warp: Int32,
        visible: Visibility, scaling: Scaling,
    ) -> FusedConsumer:  # fmt: skip
        own = super().consumer(x, storage, barriers, tiles, warp, visible, scaling)
        assert x.dq_sums is not None
        buffers = {"k": shared_address(storage.k), "v": shared_address(storage.v)}
        return FusedConsumer(
            **vars(own) | buffers,
            ds_ring=shared_address(storage.ds),
            sums=x.dq_sums.iterator.toint(),
            tiles_of_head=x.dq_sums.shape[1] // self.spec.tile_m,
            turns=Turns(own.group, WARPGROUPS),
        )

    # -- device: zeros ------------------------------------------------------------------------

    @cute.jit
    def more_warps(
        self, x: Operands, storage: Pointers, barriers: Barriers, tiles: TileMap, warp: Int32
    ) -> None:
        if warp == ZEROS.warps[0]:
            queue = TileQueue(Work, storage.work, barriers)
            self.zeros.run(x.dq_sums, x.zeroed, tiles, queue, barriers)

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

    def own_rows(self, own: Consumer, rows: Int32) -> Int32:
        return rows + self.group(own) * (ROWS * BOX * 2)

    def group(self, own: Consumer) -> Int32:
        """The warpgroup's number, computed anew: addresses that depend on it would be held in
        registers across the loops."""
        return Int32(Uint32(opaque(own.warp)) // WARPGROUP_WARPS)  # signed, it takes 8 instructions

    def lane(self) -> Int32:
        """The lane, computed anew so that no register holds it across the loops."""
        return opaque(cute.arch.lane_idx()) & (WARP_SIZE - 1)

    def whole_query_tiles(self, own: FusedConsumer, work: Work) -> tuple[Int32, Int32]:
        """[first, end) of the tiles of queries that need no mask. Keys past the end of the sequence
        would add to dQ: with one, every tile needs a mask."""
        first_key = self.first_key(own, work)
        first, end = own.visible.whole_query_tiles(first_key, ROWS, work.seqlen_q, work.seqlen_k)
        return first, cutlass.select_(first_key + ROWS <= work.seqlen_k, end, Int32(0))

    def first_sums(self, own: FusedConsumer, work: Work) -> Int32:
        """Tile 0 of the head, among the tiles of the sums."""
        start = padded_start(own.tiles.queries, work.sequence)
        return work.head * own.tiles_of_head + start // self.spec.tile_m

    @cute.jit
    def consumer_warps(self, x: Operands, own: FusedConsumer, storage: Pointers) -> None:
        count = Int32(0)  # of works
        own.queue.wait(count)
        if own.queue.read(count).exists:
            own.turns.begin()
            count = self.compute_works(x, own)
        own.queue.release(count)

    @cute.jit
    def compute_works(self, x: Operands, own: FusedConsumer) -> Int32:
        """Compute all works of the CTA, and return their number."""
        n = Int32(0)
        use = self.first_use(own, Int32(0))
        self.next_use(x, own, use, n, 0, use.taken, Int32(-1), Int32(0))
        # The works and tiles of the sums of the last use, and of the one before.
        before, sums = use.taken, use.sums
        before2, sums2 = Int32(-1), sums
        goes_on, after = self.use_after(own, use)
        if goes_on:
            use = after
            n += 1
            self.next_use(x, own, use, n, 1, before, before2, sums2)
            before2, sums2 = before, sums
            before, sums = use.taken, use.sums
            goes_on, after = self.use_after(own, use)
        while goes_on:
            use = after
            n += 1
            self.next_use(x, own, use, n, 2, before, before2, sums2)
            before2, sums2 = before, sums
            before, sums = use.taken, use.sums
            goes_on, after = self.use_after(own, use)
        own.turns.end()
        adds = Int32(before == before2)
        dv = self.start_dv(own, n, adds)
        self.publish_ds(own, n)
        dk = self.start_dk(own, n, adds)
        fragments.assign(own.dv, wgmma.wait(dv, pending=1))
        fragments.assign(own.dk, wgmma.wait(dk))
        own.barriers.warp_arrives("do_empty", n)
        own.barriers.warp_arrives("q_empty", n)
        if n > 0:
            own.barriers.wait("ds_full", n - 1)
            dq = wgmma.wait(self.start_dq(own, n - 1, self.k_offset(own, before2)))
            self.add_dq(own, dq, n - 1, sums2)
            if before2 != before:
                own.barriers.warp_arrives("k_empty", before2)
        own.barriers.wait("ds_full", n)
        dq = wgmma.wait(self.start_dq(own, n, self.k_offset(own, before)))
        self.add_dq(own, dq, n, sums)
        own.barriers.warp_arrives("k_empty", before)
        self.store_rows(x, own, before, n + 1)
        return before + 1

    @cute.jit
    def first_use(self, own: FusedConsumer, taken: Int32) -> Use:
        """The first use of a work, which has been published."""
        work = own.queue.read(taken)
        first, end = own.visible.query_tiles(work.block, work.seqlen_q, work.seqlen_k)
        whole_first, whole_end = self.whole_query_tiles(own, work)
        start = self.start_of(work, first, end)
        return Use(
            taken=taken, tile=start, head_sums=self.first_sums(own, work), first=start, end=end,
            whole_first=whole_first, whole_end=whole_end,
            left=(end - first) * own.tiles.group - 1, adds=0,
        )  # fmt: skip

    @cute.jit
    def use_after(self, own: FusedConsumer, use: Use) -> tuple[Boolean, Use]:
        """The use after it, of the next work after the last of a work; False if there is none."""
        goes_on = Boolean(True)
        after = use
        if use.left == 0:
            own.queue.wait(use.taken + 1)
            goes_on = own.queue.read(use.taken + 1).exists
            if goes_on:
                after = self.first_use(own, use.taken + 1)
        else:
            after = use.following(own.tiles_of_head, self.lowest)
        return goes_on, after

    @cute.jit
    def next_use(
        self,
        x: Operands,
        own: FusedConsumer,
        use: Use,
        n: Int32,
        uses: cutlass.Constexpr[int],
        before: Int32,
        before2: Int32,
        sums2: Int32,
    ) -> None:
        """Products up to S^T and dP^T of use n, `use`, then its P^T and dS^T. There are `uses` uses
        before, at least, or 2; `before` and `before2` are the works of the last two, and `sums2` is
        the tile of the sums of the earlier one."""
        barriers = own.barriers
        switches = True if uses == 0 else use.taken != before
        if cutlass.const_expr(uses == 2):
            barriers.wait("ds_full", n - 2)
        own.turns.wait()
        if cutlass.const_expr(uses == 2):
            dq = self.start_dq(own, n - 2, self.k_offset(own, before2))
        if cutlass.const_expr(uses >= 1):
            adds = Int32(before == before2)
            dv = self.start_dv(own, n - 1, adds)
            self.publish_ds(own, n - 1)
        if cutlass.const_expr(uses == 2):
            dq = wgmma.wait(dq, pending=1)
            barriers.warp_arrives("ds_empty", n - 2)
            if before2 != before:
                barriers.warp_arrives("k_empty", before2)
            self.add_quarter(own, dq, sums2, 0)
        if cutlass.const_expr(uses >= 1):
            dk = self.start_dk(own, n - 1, adds)
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
        scores = self.start_scores(own, n, self.k_offset(own, use.taken))
        if cutlass.const_expr(uses == 2):
            self.add_quarter(own, dq, sums2, 3)
        if cutlass.const_expr(uses >= 1):
            fragments.assign(own.dk, wgmma.wait(dk, pending=1))
            barriers.warp_arrives("q_empty", n - 1)
        if switches:
            barriers.wait("v_full", use.taken)
        barriers.wait("do_full", n)
        large = self.has_large_scores(own, n)
        dp = self.start_dp(own, n)
        own.turns.give()

        self.compute_score_gradients(own, use, n, scores, dp, large)
        if use.left == 0:
            barriers.warp_arrives("v_empty", use.taken)
        if cutlass.const_expr(uses >= 1):
            if switches:
                self.store_rows(x, own, before, n)
        # The compiler would keep the addresses of use 0 until use 1.
        lane = opaque(self.lane()) if uses == 1 else self.lane()
        self.stage_ds(own, n, lane)

    def has_large_scores(self, own: FusedConsumer, n: Int32) -> Boolean:
        """Whether an lse of the queries of use n is large; see `statistics`."""
        groups = self.spec.tile_m // FLAG_ROWS
        delta = own.delta + own.barriers.stage("do_full", n) * self.stats_bytes
        (word,) = load_shared(Int32, delta + (self.lane() & (groups - 1)) * (4 * FLAG_ROWS), 1)
        return cute.arch.vote_any_sync((word & 1) != 0)

    @cute.jit
    def compute_score_gradients(
        self,
        own: FusedConsumer,
        use: Use,
        n: Int32,
        scores: list[Float32],
        dp: list[Float32],
        large: Boolean,
    ) -> None:
        """P^T and dS^T of use n, once their products are done. What most tiles need is one block of
        code, so that the last exponentials run beside the first dS^T."""
        if use.masked | large:
            self.compute_block(own, use, n, scores, dp, plain=False)
        else:
            self.compute_block(own, use, n, scores, dp, plain=True)

    def compute_block(
        self,
        own: FusedConsumer,
        use: Use,
        n: Int32,
        scores: list[Float32],
        dp: list[Float32],
        *,
        plain: bool,
    ) -> None:
        """P^T and dS^T of use n, where `plain` tells that the tile needs no mask and has no large
        lse."""
        lse = self.first_loaded(self.lse(own, n))
        fragments.assign(own.s, wgmma.wait(scores, pending=1))
        self.probabilities(own, use.taken, use.tile, not plain, lse, plain)
        delta = self.first_loaded(self.delta(own, n))
        fragments.assign(own.dp, wgmma.wait(dp))
        self.score_gradients(own, use.taken, use.tile, not plain, delta)

    def first_loaded(self, statistics: Statistics) -> Statistics:
        """Load the statistics of the first columns, before a wait which the compiler does not move
        loads across."""
        loaded = statistics(range(self.columns_ahead))
        return lambda columns: loaded if columns.stop <= self.columns_ahead else statistics(columns)

    def k_offset(self, own: FusedConsumer, taken: Int32) -> Any:
        """Where K of work `taken` lies in its ring, in bytes."""
        return own.barriers.stage("k_full", taken) * self.k_bytes

    def stage_ds(self, own: FusedConsumer, n: Int32, lane: Int32) -> None:
        """Store the warp's rows of dS^T of use n to its stage."""
        barriers, spec = own.barriers, self.spec
        barriers.wait_previous("ds_empty", n)
        at = own.ds_ring + barriers.stage("ds_full", n) * self.ds_bytes
        words = [own.ds[i] for i in range(cute.size(own.ds))]
        fragments.stage_matrices(words, at, own.warp, spec.tile_n, lane)

    def publish_ds(self, own: FusedConsumer, n: Int32) -> None:
        """Publish what `stage_ds` has stored, so much later that the fence does not wait."""
        cute.arch.fence_view_async_shared()
        own.barriers.warp_arrives("ds_full", n)

    def start_dq(self, own: FusedConsumer, n: Int32, k_offset: Int32 = 0) -> list[Float32]:
        """Start dQ = dS K of the warpgroup's part, with use n of dS, and K so many bytes behind the
        start of its buffer."""
        spec, group = self.spec, self.group(own)
        ds = own.ds_ring + own.barriers.stage("ds_full", n) * self.ds_bytes
        k = own.k + k_offset
        if spec.tile_m == ROWS:
            first = group * self.sums.columns
            k += first // BOX * (spec.tile_n * BOX * 2) + first % BOX * 2
        else:
            ds += group * (spec.tile_n * BOX * 2)
        return start_query_gradients(
            self.dtype, ds, opaque(k), tile_n=spec.tile_n, columns=self.sums.columns
        )

    def add_dq(self, own: FusedConsumer, values: list[Float32], n: Int32, tile: Int32) -> None:
        """Add the warp's part of dQ, of use n of dS, to that tile of the sums."""
        own.barriers.warp_arrives("ds_empty", n)
        for quarter in range(4):
            self.add_quarter(own, values, tile, quarter)

    def add_quarter(
        self, own: FusedConsumer, values: list[Float32], tile: Int32, quarter: int
    ) -> None:
        """Add a quarter of the columns of the warp's part."""
        lane = self.lane() * (4 * VECTOR)
        part = opaque(own.warp) * (4 * self.sums.part)
        at = own.sums + Int64(tile) * (4 * self.sums.tile) + Int64(part + lane)
        count = self.sums.columns // 8 // 4
        for i in range(quarter * count, (quarter + 1) * count):
            vector = values[VECTOR * i : VECTOR * (i + 1)]
            add_global(at + i * (VECTORS * 4 * VECTOR), vector)

    # -- device: epilogue ---------------------------------------------------------------------

    @cute.jit
    def store_rows(self, x: Operands, own: FusedConsumer, taken: Int32, n: Int32) -> None:
        """Store the warp's rows of dK and dV of a work, and release its record. Rounded, they pass
        through the stage of dS of use n, which is not stored yet."""
        work = own.queue.read(taken)
        own.barriers.wait_previous("ds_empty", n)
        for acc, out, factor in (
            (own.dk, x.dk, x.softmax_scale),
            (own.dv, x.dv, Float32(self.unit)),
        ):
            fragments.scale_rows(acc, [factor] * fragments.LANE_ROWS)
            if cutlass.const_expr(self.spec.partial):
                self.store_partial_rows(x, own, work, acc, out)
            else:
                self.store_rounded_rows(x, own, work, acc, out, n)
        own.queue.release(taken)

    @cute.jit
    def store_partial_rows(
        self, x: Operands, own: FusedConsumer, work: Work, acc: cute.Tensor, out: cute.Tensor
    ) -> None:
        for lane_row in cutlass.range_constexpr(fragments.LANE_ROWS):
            key = self.key(own, work, lane_row)
            row = acc[None, lane_row, None]
            pairs = [[row[j], row[j + 1]] for j in range(0, cute.size(row), 2)]
            if key < work.seqlen_k:
                store_parts(self.row_of(x, out, work, key), pairs, Float32)

    @cute.jit
    def store_rounded_rows(
        self,
        x: Operands,
        own: FusedConsumer,
        work: Work,
        acc: cute.Tensor,
        out: cute.Tensor,
        n: Int32,
    ) -> None:
        """A box of columns at a time, so that a lane stores 16 bytes of a row, and eight lanes a
        line."""
        lane, boxes = self.lane(), self.spec.head_dim // BOX
        stage = own.ds_ring + own.barriers.stage("ds_full", n) * self.ds_bytes
        words = fragments.operand(acc, self.dtype)
        count = len(words) // boxes
        unit, first = lane % UNITS, lane // UNITS
        for box in cutlass.range_constexpr(boxes):
            of_box = words[box * count : (box + 1) * count]
            fragments.stage_matrices(of_box, stage, own.warp, self.spec.tile_n, lane)
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(16 * UNITS // WARP_SIZE):
                row = first + i * (WARP_SIZE // UNITS)
                at = stage + (own.warp * 16 + row) * LINE_BYTES
                loaded = load_shared(Int32, at + ((unit ^ (row % UNITS)) * UNIT), UNIT // 4)
                key = work.block * self.spec.tile_n + own.warp * 16 + row
                if key < work.seqlen_k:
                    to = self.row_of(x, out, work, key).iterator.toint()
                    store_global(Int32, to + box * LINE_BYTES + unit * UNIT, loaded)
            cute.arch.sync_warp()

    def row_of(self, x: Operands, out: cute.Tensor, work: Work, key: Int32) -> cute.Tensor:
        """The row of a key in dK or dV, or in a split's partial sums."""
        head, split = head_and_split(work, x.num_splits, self.spec.partial)
        part = (split,) if self.spec.partial else ()
        if self.spec.varlen_k:
            return out[(*part, work.k_start + key, head, None)]
        return out[(*part, work.sequence, key, head, None)]
