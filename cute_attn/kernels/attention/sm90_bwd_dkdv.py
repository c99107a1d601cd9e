"""Gradients of k and v for SM90, at head_dim 64 and 128: wgmma, TMA, warp-specialised.

A CTA computes dK and dV of a tile of keys of a K/V head, 64 for each of two consumer warpgroups.
It loops over the query heads of the head's group, or of a split of it, and over the tiles of
queries that see some of the keys.

    S^T = K Q^T            64 x tile_m a warpgroup     K and Q in shared memory
    P^T = exp(c S^T - lse)                             in registers
    dV += P^T dO           64 x head_dim               P^T and dV in registers
    dP^T = V dO^T          64 x tile_m                 V and dO in shared memory
    dS^T = P'^T * (dP^T - delta)                       in registers
    dK += dS^T Q           64 x head_dim               dS^T and dK in registers

P' is P, with a softcap P times the slope of the cap. A warpgroup starts S^T of the next tile of
queries before this tile's dS^T Q, and computes P^T while that and dP^T run.

    warps    role         work on a tile of keys
    0-7      consumers    all of the above; at the end dK and dV through shared memory, by TMA
    8        load         finds the next tile; K and V, then Q, lse, dO and delta of each tile

dK and dV are staged in the buffers of K and V. Partial sums of splits are stored from registers.
The load warp's warpgroup gives its registers to the consumers; its three other warps idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..common.carried import Carried
from ..common.cluster import prepare
from ..common.dtypes import DTYPE
from ..common.entry import entry, gathered, placeholders
from ..common.pipeline import Barriers, Edge, Kind, Pipeline, Role, report_names
from ..common.ptx import wgmma
from ..common.ptx.compiler import opaque
from ..common.ptx.convert import unpack
from ..common.ptx.memory import shared_address
from ..common.scheduler import CounterScheduler, TileQueue
from ..common.sequences import Sequences
from ..common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ..common.tma import BOX, BoxedRows, boxes, load_use
from . import fragments
from .arguments import FakeArguments
from .gradient import PROBABILITY_UNIT
from .sm90_gradients import (
    Statistics,
    differentiate,
    exponentiate,
    keep_pairs,
    kept_pairs,
    store_words,
    word,
)
from .sm90_key_tiles import (
    load_stats,
    mask_queries,
    of_columns,
    partial_offset,
    store_partial_row,
)
from .sm90_mma import (
    ROWS,
    WARPGROUP,
    WARPGROUP_WARPS,
    start_output,
    start_scores,
)
from .sm90_store import group_barrier, store_staged
from .softmax import Scaling
from .spec import Sm90BackwardSpec
from .statistics import DELTA, LSE, STATS_ROWS, padded_start
from .visibility import Visibility
from .work import TileMap, Work, following, head_and_split, heads_in_l2

WARPGROUPS = 2
CONSUMERS = Role("consumers", range(0, WARPGROUPS * WARPGROUP_WARPS))
LOAD = Role("load", range(len(CONSUMERS), len(CONSUMERS) + 1))

# Registers of a thread: all 384 threads start with 168; the load warp's warpgroup gives some up.
LOAD_REGISTERS, CONSUMER_REGISTERS = 24, 240
assert LOAD_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS <= 3 * 168

# Q of a tile is used until dS^T Q, which runs beside the next tile's products; dO is not.
Q_STAGES, DO_STAGES = 3, 2


def edges(k_stages: int, q_stages: int, staged: bool) -> tuple[Edge, ...]:
    """In the order in which a tile meets them. Uses count tiles of keys for k and v, tiles of
    queries for the rest. `staged`: dK and dV are, in the buffers of K and V."""
    k_empty, v_empty = ("its buffer, with dK stored", "its buffer, with dV stored")
    if not staged:
        k_empty, v_empty = ("its stage", "its buffer")
    return (
        *TileQueue.edges(LOAD, CONSUMERS),
        Edge("k_full", LOAD, CONSUMERS, k_stages, Kind.BYTES, payload="K"),
        Edge("k_empty", CONSUMERS, LOAD, k_stages, Kind.WARPS, payload=k_empty),
        Edge("v_full", LOAD, CONSUMERS, 1, Kind.BYTES, payload="V"),
        Edge("v_empty", CONSUMERS, LOAD, 1, Kind.WARPS, payload=v_empty),
        Edge("q_full", LOAD, CONSUMERS, q_stages, Kind.BYTES, payload="Q and lse"),
        Edge("q_empty", CONSUMERS, LOAD, q_stages, Kind.WARPS, payload="their stage"),
        Edge("do_full", LOAD, CONSUMERS, DO_STAGES, Kind.BYTES, payload="dO and delta"),
        Edge("do_empty", CONSUMERS, LOAD, DO_STAGES, Kind.WARPS, payload="their stage"),
    )


class Arguments(NamedTuple):
    """What the kernel is called with; FakeArguments has the shapes.

    Attributes:
        stats: lse and delta of the query rows; see `statistics`.
        dk, dv: gradients, or float32 sums of the splits.
        num_ctas: how many CTAs are resident at once.
        counter: the next tile of a CounterScheduler, `[1]`.
        dq_sums, zeroed: of a kernel that computes dQ too, see `query_sums` and `query_zeros`;
            otherwise None.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    stats: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    softmax_scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    num_splits: Int32
    num_ctas: Int32
    counter: cute.Tensor
    dq_sums: cute.Tensor | None
    zeroed: cute.Tensor | None


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors that the device code reads and writes.

    Attributes:
        q_tma, k_tma, v_tma, do_tma: TMA's loads.
        q, k, v, do: coordinates for TMA.
        dk_tma, dv_tma: TMA's stores; None where dK and dV are stored from registers.
        dk, dv: coordinates for TMA's stores, or the tensors.
        num_tiles, counter: for the scheduler.
    """

    q_tma: cute.CopyAtom
    q: cute.Tensor
    k_tma: cute.CopyAtom
    k: cute.Tensor
    v_tma: cute.CopyAtom
    v: cute.Tensor
    do_tma: cute.CopyAtom
    do: cute.Tensor
    dk_tma: cute.CopyAtom | None
    dk: cute.Tensor
    dv_tma: cute.CopyAtom | None
    dv: cute.Tensor
    stats: cute.Tensor
    dq_sums: cute.Tensor | None
    zeroed: cute.Tensor | None
    softmax_scale: Float32
    num_splits: Int32
    num_tiles: Int32
    counter: cute.Tensor


@dataclass(frozen=True)
class Rings(Carried):
    """What the load warp fills.

    Attributes:
        tiles: the tiles of keys.
        k, v, q, do: the buffers, in boxes.
        lse, delta: the buffers of the statistics that come with q and do.
    """

    barriers: Barriers
    tiles: TileMap
    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    lse: cute.Pointer
    delta: cute.Pointer


@dataclass(frozen=True)
class Consumer(Carried):
    """What a warp of the consumers keeps.

    Attributes:
        warp: the warp's number in the CTA.
        group: the number of the warp's warpgroup.
        k, v: shared addresses of the warpgroup's rows of K and V.
        q, do, lse, delta: shared addresses of the rings.
        s, dp: registers of S^T, with a softcap later of P'^T, and of dP^T.
        p, ds: registers of P^T and dS^T as operands.
        dk, dv: accumulators.
    """

    warp: Int32
    group: Int32
    barriers: Barriers
    queue: TileQueue
    tiles: TileMap
    k: Int32
    v: Int32
    q: Int32
    do: Int32
    lse: Int32
    delta: Int32
    s: cute.Tensor
    dp: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    scaling: Scaling
    visible: Visibility


class Sm90DkDv:
    """The kernel for one Sm90BackwardSpec; see the module's docstring."""

    k_stages, q_stages = 1, Q_STAGES
    stages_outputs = True  # dK and dV, in the buffers of K and V; partial sums never are
    bounded = False  # see `mask_queries`
    adds_dq = False  # to sums, which a work's "zeros_full" tells of
    loads_v_late = False  # behind the first Q, rather than behind K
    keeps_float32 = False  # P' until dS: it saves instructions, and takes registers
    element_bytes = 2 + 2  # of Q and dO, which tiles of keys reread
    l2_parts = 1  # of which the heads at once fill one

    def __init__(self, spec: Sm90BackwardSpec):
        if spec.tile_n != WARPGROUPS * ROWS:
            raise ValueError(f"tile_n is {spec.tile_n}, must be {WARPGROUPS * ROWS}")
        if STATS_ROWS % spec.tile_m or spec.tile_m % 32:
            raise ValueError(f"tile_m is {spec.tile_m}, must be 32, 64 or {STATS_ROWS}")
        self.spec = spec
        self.keeps_float32 = self.keeps_float32 or spec.softcap
        self.dtype = DTYPE[spec.dtype]
        self.unit = 1.0 if self.keeps_float32 else PROBABILITY_UNIT.get(self.dtype, 1.0)  # of P
        self.out_dtype = Float32 if spec.partial else self.dtype
        self.q_bytes = 2 * spec.tile_m * spec.head_dim
        self.stats_bytes = 4 * spec.tile_m
        self.k_bytes = 2 * spec.tile_n * spec.head_dim
        self.pipeline = Pipeline(
            *edges(self.k_stages, self.q_stages, self.stages_outputs), *self.more_edges()
        )
        q, keys, at = spec.tile_m * spec.head_dim, spec.tile_n * spec.head_dim, SWIZZLE_ALIGNMENT
        then = (", then dK", ", then dV") if self.stages_outputs else ("", "")
        self.smem = SharedMemory(
            Buffer("k", self.dtype, keys, self.k_stages, at, f"K{then[0]}"),
            Buffer("v", self.dtype, keys, 1, at, f"V{then[1]}"),
            Buffer("q", self.dtype, q, self.q_stages, at, "Q"),
            Buffer("do", self.dtype, q, DO_STAGES, at, "dO"),
            *self.more_buffers(),
            Buffer("lse", Float32, spec.tile_m, self.q_stages, holds="lse of queries"),
            Buffer("delta", Float32, spec.tile_m, DO_STAGES, holds="delta of queries"),
            TileQueue.buffer(Work),
            Buffer("barriers", Int64, self.pipeline.count),
        )
        self.q_rows = BoxedRows(spec.tile_m, spec.head_dim, spec.ragged_q, not spec.varlen_q)
        self.k_rows, self.out_rows = (
            BoxedRows(rows, spec.head_dim, spec.ragged_k, not spec.varlen_k)
            for rows in (spec.tile_n, ROWS)
        )

    def more_edges(self) -> tuple[Edge, ...]:
        """Further edges of a kernel that computes dQ too."""
        return ()

    def more_buffers(self) -> tuple[Buffer, ...]:
        """Further buffers of a kernel that computes dQ too."""
        return ()

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.smem, self.pipeline, (CONSUMERS, LOAD), shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        fake = FakeArguments(self.spec, self.spec.head_dim)
        out = fake.k_partial if self.spec.partial else fake.k
        of_dq = dict.fromkeys(("dq_sums", "zeroed"))
        if self.adds_dq:
            of_dq = {"dq_sums": fake.query_sums(), "zeroed": fake.zeroed()}
        return placeholders(fake.arguments(Arguments, dk=out(), dv=out(), **of_dq))

    # -- host ---------------------------------------------------------------------------------

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel. Each split of a group counts as a K/V head."""
        a, stream = gathered(Arguments, args)
        spec = self.spec
        queries = Sequences(a.q.shape[-3], a.cu_seqlens_q, a.seqused_q)
        keys = Sequences(a.k.shape[-3], a.cu_seqlens_k, a.seqused_k)
        batch, split_heads = keys.batch(a.k), a.k.shape[-2] * a.num_splits
        group = a.q.shape[-2] // split_heads
        head_bytes = Int64(queries.tokens) * (self.element_bytes * spec.head_dim) * group
        tiles = TileMap(
            spec.tile_n, 1, False, queries, keys, split_heads, group, batch,
            heads_in_l2(head_bytes * self.l2_parts, split_heads * batch), of_keys=True,
        ).balanced(spec, a.num_ctas)  # fmt: skip
        num_tiles = tiles.count()
        visible = Visibility.of(spec, spec.tile_m, spec.tile_n, 1, a.window_left, a.window_right)
        scaling = Scaling.of(a.softmax_scale, a.softcap if spec.softcap else None)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        outputs = (None, a.dk, None, a.dv)
        if cutlass.const_expr(self.stages_outputs and not spec.partial):
            outputs = (*self.out_rows.atom(store, a.dk), *self.out_rows.atom(store, a.dv))
        x = Operands(
            *self.q_rows.atom(load, a.q), *self.k_rows.atom(load, a.k),
            *self.k_rows.atom(load, a.v), *self.q_rows.atom(load, a.do), *outputs, a.stats,
            a.dq_sums, a.zeroed, a.softmax_scale, a.num_splits, num_tiles, a.counter,
        )  # fmt: skip
        self.kernel(x, tiles, visible, scaling).launch(
            grid=[CounterScheduler.clusters(num_tiles, a.num_ctas), 1, 1],
            block=[(WARPGROUPS + 1) * WARPGROUP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    # -- device: set-up -----------------------------------------------------------------------

    @cute.kernel
    def kernel(self, x: Operands, tiles: TileMap, visible: Visibility, scaling: Scaling) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = self.smem.allocate()
        barriers = self.pipeline.at(storage.barriers)
        if warp == LOAD.warps[0]:
            prepare((x.q_tma, x.k_tma, x.v_tma, x.do_tma), barriers)
        cute.arch.sync_threads()

        if warp >= LOAD.warps[0]:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == LOAD.warps[0]:
                self.load_warp(x, storage, barriers, tiles, visible)
            else:
                self.more_warps(x, storage, barriers, tiles, warp)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            own = self.consumer(x, storage, barriers, tiles, warp, visible, scaling)
            self.consumer_warps(x, own, storage)

    def more_warps(
        self, x: Operands, storage: Pointers, barriers: Barriers, tiles: TileMap, warp: Int32
    ) -> None:
        """The warps behind the load warp."""

    def consumer(
        self, x: Operands, storage: Pointers, barriers: Barriers, tiles: TileMap, warp: Int32,
        visible: Visibility, scaling: Scaling,
    ) -> Consumer:  # fmt: skip
        spec = self.spec
        group = warp // WARPGROUP_WARPS
        rows = group * (ROWS * BOX * 2)
        return Consumer(
            warp=warp,
            group=group,
            barriers=barriers,
            queue=TileQueue(Work, storage.work, barriers),
            tiles=tiles,
            k=shared_address(storage.k) + rows,
            v=shared_address(storage.v) + rows,
            q=shared_address(storage.q),
            do=shared_address(storage.do),
            lse=shared_address(storage.lse),
            delta=shared_address(storage.delta),
            s=fragments.accumulators(spec.tile_m),
            dp=fragments.accumulators(spec.tile_m),
            p=cute.make_rmem_tensor((spec.tile_m // 4,), Int32),
            ds=cute.make_rmem_tensor((spec.tile_m // 4,), Int32),
            dk=fragments.accumulators(spec.head_dim),
            dv=fragments.accumulators(spec.head_dim),
            scaling=scaling,
            visible=visible,
        )

    # -- device: load -------------------------------------------------------------------------

    @cute.jit
    def load_warp(
        self,
        x: Operands,
        storage: Pointers,
        barriers: Barriers,
        tiles: TileMap,
        visible: Visibility,
    ) -> None:
        """Take the CTA's tiles one after the other, and load what they need."""
        to = self.rings(storage, barriers, tiles)
        scheduler = CounterScheduler(x.num_tiles, barriers, x.counter.iterator)
        queue = TileQueue(Work, storage.work, barriers)
        taken = Int32(0)  # tiles of keys
        n = Int32(0)  # tiles of queries
        number = scheduler.initial_work_tile()
        while number >= 0:
            exists, block, split_head, sequence = tiles.locate(number)
            if exists:
                work = tiles.work(block, split_head, sequence)
                taken, n = self.load_work(x, to, queue, visible, work, taken, n)
            number = scheduler.advance_to_next_work(number, taken)
        queue.publish_end(taken)

    @cute.jit
    def load_work(
        self, x: Operands, to: Rings, queue: TileQueue, visible: Visibility, work: Work,
        taken: Int32, n: Int32,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """Publish a tile of keys as work `taken`, and load what it needs, its queries from use n
        on; return the counts after it."""
        queue.publish_work(taken, work)
        self.load_keys("k", x, to, work, taken)
        self.load_keys("v", x, to, work, taken)
        first, end = visible.query_tiles(work.block, work.seqlen_q, work.seqlen_k)
        return taken + 1, self.load_uses(x, to, work, taken, first, end, n)

    @cute.jit
    def load_uses(
        self, x: Operands, to: Rings, work: Work, taken: Int32, first: Int32, end: Int32, n: Int32
    ) -> Int32:
        """Load tiles first to end - 1 of the queries of each head, from use n on; return the number
        of uses after them."""
        stats_start = padded_start(to.tiles.queries, work.sequence)
        start = self.start_of(work, first, end)
        tile, head = start, work.head
        for i in cutlass.range((end - first) * to.tiles.group, unroll=1):
            row = stats_start + tile * self.spec.tile_m
            self.load_queries("q", x, to, work, tile, head, row, n)
            if cutlass.const_expr(self.loads_v_late):
                if i == 0:
                    self.load_keys("v", x, to, work, taken)
            self.load_queries("do", x, to, work, tile, head, row, n)
            if cutlass.const_expr(self.adds_dq):
                # Nothing is added before the consumers have the use, or work, after this one.
                if i == 0:
                    to.barriers.wait("zeros_full", taken)
            n += 1
            tile, head = following(tile, head, start, end, lowest=self.lowest)
        return n

    @property
    def lowest(self) -> int | None:
        """The `lowest` of `work.following`."""
        return None

    def start_of(self, work: Work, first: Int32, end: Int32) -> Int32:
        """With which of tiles first to end - 1 of the queries each head begins."""
        return first

    def rings(self, storage: Pointers, barriers: Barriers, tiles: TileMap) -> Rings:
        spec = self.spec
        across, q_across = ((spec.head_dim // BOX, n * BOX) for n in (spec.tile_n, spec.tile_m))
        keys, queries = self.k_bytes // 2, self.q_bytes // 2
        return Rings(
            barriers=barriers,
            tiles=tiles,
            k=boxes(storage.k, spec.tile_n, across, (self.k_stages, keys)),
            v=boxes(storage.v, spec.tile_n, across, (1, keys)),
            q=boxes(storage.q, spec.tile_m, q_across, (self.q_stages, queries)),
            do=boxes(storage.do, spec.tile_m, q_across, (DO_STAGES, queries)),
            lse=storage.lse,
            delta=storage.delta,
        )

    def load_keys(self, name: str, x: Operands, to: Rings, work: Work, taken: Int32) -> None:
        """Load "k" or "v" of work `taken`."""
        of_k = name == "k"
        tma, source, ring = (x.k_tma, x.k, to.k) if of_k else (x.v_tma, x.v, to.v)
        kv_head, _ = head_and_split(work, x.num_splits, self.spec.partial)
        rows = self.k_rows.box(source, work.block, kv_head, *work.keys[1:])
        load_use(name, tma, rows, ring, to.barriers, taken)

    def load_queries(
        self, name: str, x: Operands, to: Rings, work: Work, tile: Int32, head: Int32, row: Int32,
        n: Int32,
    ) -> None:  # fmt: skip
        """Load use n of "q" with its lse, or of "do" with its delta, whose first row of the
        statistics is `row`."""
        of_q = name == "q"
        tma, source, ring = (x.q_tma, x.q, to.q) if of_q else (x.do_tma, x.do, to.do)
        buffer, kind = (to.lse, LSE) if of_q else (to.delta, DELTA)
        rows = self.q_rows.box(source, tile, head, *work.queries[1:])
        load_use(name, tma, rows, ring, to.barriers, n, self.stats_bytes)
        load_stats(name, buffer, kind, x.stats, head, row, self.spec.tile_m, to.barriers, n)

    # -- device: products ---------------------------------------------------------------------

    @cute.jit
    def consumer_warps(self, x: Operands, own: Consumer, storage: Pointers) -> None:
        queue = own.queue
        taken = Int32(0)  # tiles of keys
        n = Int32(0)  # tiles of queries
        queue.wait(taken)
        work = queue.read(taken)
        while work.exists:
            own.dk.fill(0.0)
            own.dv.fill(0.0)
            own.barriers.wait("k_full", taken)
            own.barriers.wait("v_full", taken)
            first, end = own.visible.query_tiles(work.block, work.seqlen_q, work.seqlen_k)
            if first < end:
                n = self.compute_tile(
                    own, work, first, end, (end - first) * own.tiles.group, taken, n
                )
            # The work is read again where it is needed, and its stage computed again: registers are
            # scarce in between.
            taken = opaque(taken)
            work = queue.read(taken)
            queue.release(taken)
            fragments.scale_rows(own.dk, [x.softmax_scale] * fragments.LANE_ROWS)
            if cutlass.const_expr(self.unit != 1.0):
                fragments.scale_rows(own.dv, [Float32(self.unit)] * fragments.LANE_ROWS)
            if cutlass.const_expr(self.spec.partial):
                self.store_partial(x, own, work)
            else:
                self.store_tile(x, own, storage, work)
            own.barriers.warp_arrives("k_empty", taken)
            own.barriers.warp_arrives("v_empty", taken)
            taken += 1
            queue.wait(taken)
            work = queue.read(taken)
        queue.release(taken)

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
        """Compute dK and dV of work `taken` from `count` tiles of queries, before which there were
        n; return how many there are then."""
        # Whole tiles of queries need no mask: every query sees every key of the warpgroup.
        whole_first, whole_end = own.visible.whole_query_tiles(
            self.first_key(own, work), ROWS, work.seqlen_q, work.seqlen_k
        )
        tile = first
        masked = tile < whole_first or tile >= whole_end
        self.next_query_tile(own, taken, tile, n, masked, True)
        n += 1
        for _ in cutlass.range(count - 1, unroll=1):
            tile = cutlass.select_(tile + 1 == end, first, tile + 1)
            masked = tile < whole_first or tile >= whole_end
            self.next_query_tile(own, taken, tile, n, masked, False)
            n += 1
        dk = self.start_dk(own, n - 1)
        fragments.assign(own.dk, wgmma.wait(dk))
        own.barriers.warp_arrives("q_empty", n - 1)
        return n

    @cute.jit
    def next_query_tile(
        self,
        own: Consumer,
        taken: Int32,
        tile: Int32,
        n: Int32,
        masked: Boolean,
        starts: cutlass.Constexpr[bool],
    ) -> None:
        """P^T, dV and dS^T of use n of Q and dO, beside the product of the dS^T and Q before; with
        `starts` there is none before."""
        barriers = own.barriers
        barriers.wait("q_full", n)
        scores = self.start_scores(own, n)
        if cutlass.const_expr(not starts):
            dk = self.start_dk(own, n - 1)
        barriers.wait("do_full", n)
        dp = self.start_dp(own, n)
        fragments.assign(own.s, wgmma.wait(scores, pending=1 if starts else 2))
        self.probabilities(own, taken, tile, masked, self.lse(own, n))
        dv = self.start_dv(own, n)
        fragments.assign(own.dp, wgmma.wait(dp, pending=1))
        if cutlass.const_expr(not starts):
            fragments.assign(own.dk, wgmma.wait(dk, pending=1))
            barriers.warp_arrives("q_empty", n - 1)
        self.score_gradients(own, taken, tile, masked, self.delta(own, n))
        fragments.assign(own.dv, wgmma.wait(dv))
        barriers.warp_arrives("do_empty", n)

    @cute.jit
    def probabilities(
        self, own: Consumer, taken: Int32, tile: Int32, masked: Boolean, lse: Statistics,
        small_lse: cutlass.Constexpr = False,
    ) -> None:  # fmt: skip
        """P^T from S^T of a use of Q, which is `tile`; `small_lse` as of `exponentiate`."""
        exponentiate(
            own.s, lse, own.scaling, lambda *p: self.keep_probabilities(own, *p),
            softcap=self.spec.softcap, unit=self.unit, small_lse=small_lse,
        )  # fmt: skip
        if masked:
            self.mask(own, taken, tile, own.p)

    @cute.jit
    def score_gradients(
        self, own: Consumer, taken: Int32, tile: Int32, masked: Boolean, delta: Statistics
    ) -> None:
        """dS^T from P^T and dP^T of a use of dO, which is `tile`."""
        differentiate(
            own.dp, lambda *at: self.kept_probabilities(own, *at), own.ds, delta, self.dtype,
            self.unit,
        )  # fmt: skip
        if masked:
            self.mask(own, taken, tile, own.ds)

    def lse(self, own: Consumer, n: Int32) -> Statistics:
        """Loads lse of the queries of use n."""
        at = own.lse + own.barriers.stage("q_full", n) * self.stats_bytes
        return lambda columns: of_columns(at, columns)

    def delta(self, own: Consumer, n: Int32) -> Statistics:
        """Loads delta of the queries of use n."""
        at = own.delta + own.barriers.stage("do_full", n) * self.stats_bytes
        return lambda columns: of_columns(at, columns)

    def keep_probabilities(
        self, own: Consumer, lane_row: int, columns: range, p: list[Any], with_slope: list[Any]
    ) -> None:
        store_words(own.p, lane_row, columns, p, self.dtype)
        if self.keeps_float32:
            keep_pairs(own.s, lane_row, columns, with_slope)

    def kept_probabilities(self, own: Consumer, lane_row: int, columns: range) -> list[Any]:
        """P': with a softcap not rounded, which where the cap saturates would underflow."""
        if self.keeps_float32:
            return kept_pairs(own.s, lane_row, columns)
        return [unpack(self.dtype, own.p[word(lane_row, j)]) for j in columns[::2]]

    def start_scores(self, own: Consumer, n: Int32, k_offset: Int32 = 0) -> list[Float32]:
        """Start S^T = K Q^T, with use n of Q, and K so many bytes behind the start of its
        buffer."""
        queries = own.q + own.barriers.stage("q_full", n) * self.q_bytes
        return self.start_transposed(self.own_rows(own, own.k + k_offset), queries)

    def start_dp(self, own: Consumer, n: Int32) -> list[Float32]:
        """Start dP^T = V dO^T, with use n of dO."""
        stage = own.barriers.stage("do_full", n) * self.q_bytes
        return self.start_transposed(self.own_rows(own, own.v), own.do + stage)

    def start_transposed(self, keys: Int32, queries: Int32) -> list[Float32]:
        spec = self.spec
        return start_scores(
            self.dtype, opaque(keys), queries,
            tile_m=spec.tile_n, tile_n=spec.tile_m, head_dim=spec.head_dim,
        )  # fmt: skip

    def start_dv(self, own: Consumer, n: Int32, adds: Int32 | None = None) -> list[Float32]:
        """Start dV + P^T dO, with use n of dO; `adds` as of `start_sum`."""
        stage = own.barriers.stage("do_full", n) * self.q_bytes
        return self.start_sum(own.dv, own.p, own.do + stage, adds)

    def start_dk(self, own: Consumer, n: Int32, adds: Int32 | None = None) -> list[Float32]:
        """Start dK + dS^T Q, with use n of Q; `adds` as of `start_sum`."""
        stage = own.barriers.stage("q_full", n) * self.q_bytes
        return self.start_sum(own.dk, own.ds, own.q + stage, adds)

    def start_sum(
        self, acc: cute.Tensor, left: cute.Tensor, queries: Int32, adds: Int32 | None = None
    ) -> list[Float32]:
        """Start acc + left times the rows at `queries`; where `adds` is 0, the product alone."""
        spec = self.spec
        return start_output(
            self.dtype, fragments.values(acc), fragments.values(left), queries,
            tile_n=spec.tile_m, head_dim=spec.head_dim, adds=adds,
        )  # fmt: skip

    def own_rows(self, own: Consumer, rows: Int32) -> Int32:
        """The shared address of the warpgroup's rows of K or V."""
        return rows

    def first_key(self, own: Consumer, work: Work) -> Int32:
        """The first key of the warpgroup."""
        return work.block * self.spec.tile_n + own.group * ROWS

    def key(self, own: Consumer, work: Work, lane_row: int) -> Int32:
        """A lane row's key."""
        first = work.block * self.spec.tile_n + fragments.first_row(own.warp)
        return first + lane_row * fragments.LANE_ROW_STEP

    def mask(self, own: Consumer, taken: Int32, tile: Int32, words: cute.Tensor) -> None:
        """Set the columns of queries that do not see a row's key to 0."""
        work = own.queue.read(taken)
        keys = [self.key(own, work, lane_row) for lane_row in range(fragments.LANE_ROWS)]
        mask_queries(words, keys, tile, own.visible, work, bounded=self.bounded)

    # -- device: epilogue ---------------------------------------------------------------------

    @cute.jit
    def store_tile(self, x: Operands, own: Consumer, storage: Pointers, work: Work) -> None:
        """Store the warpgroup's rows of dK and dV through the buffers of K and V, by TMA."""
        spec = self.spec
        self.wait_for_readers(own)
        warp = own.warp % WARPGROUP_WARPS
        for acc, buffer in ((own.dk, own.k), (own.dv, own.v)):
            at = self.own_rows(own, buffer)
            words = fragments.operand(acc, self.dtype)
            fragments.stage_rows(words, at, warp, spec.tile_n, opaque(cute.arch.lane_idx()))
        cute.arch.fence_view_async_shared()
        group_barrier(own.group)
        if warp == 0:
            block = work.block * WARPGROUPS + own.group
            with cute.arch.elect_one():
                for tma, out, staged in (
                    (x.dk_tma, x.dk, storage.k),
                    (x.dv_tma, x.dv, storage.v),
                ):
                    rows = self.out_rows.box(out, block, *work.keys, stored=True)
                    store_staged(
                        tma, rows, staged, own.group, WARPGROUPS, spec.tile_n, spec.head_dim
                    )
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    def wait_for_readers(self, own: Consumer) -> None:
        """Until all warps of the warpgroup are done with its rows of K and V."""
        group_barrier(own.group)

    @cute.jit
    def store_partial(self, x: Operands, own: Consumer, work: Work) -> None:
        """Store the warpgroup's rows of a split's partial sums."""
        head, split = head_and_split(work, x.num_splits, self.spec.partial)
        for lane_row in cutlass.range_constexpr(fragments.LANE_ROWS):
            key = self.key(own, work, lane_row)
            if key < work.seqlen_k:
                offset = partial_offset(x.dk, split, work, key, head, own.tiles.batch, self.spec)
                for acc, out in ((own.dk, x.dk), (own.dv, x.dv)):
                    store_partial_row(acc, lane_row, out, offset)
