"""Gradients of k and v for SM90, at head_dim 64, 128 and 192: wgmma, TMA, warp-specialised.

A CTA computes dK and dV of a tile of keys of a K/V head, 64 for each of two consumer warpgroups.
The CTA loops over the query heads of the head's group or split. For each query head the CTA loops
over the tiles of queries that see some of the keys.

    S^T = K Q^T            64 x tile_m a warpgroup     K and Q in shared memory
    P^T = exp(c S^T - lse)                             in registers
    dV += P^T dO           64 x head_dim_v             P^T and dV in registers
    dP^T = V dO^T          64 x tile_m                 V and dO in shared memory
    dS^T = P'^T * (dP^T - delta)                       in registers
    dK += dS^T Q           64 x head_dim               dS^T and dK in registers

P' is P; with a softcap, P' is P times the slope of the cap. A warpgroup starts S^T of the next tile
of queries before this tile's dS^T Q, and computes P^T while dS^T Q and dP^T run.

    warps    role         work on a tile of keys
    0-7      consumers    compute all of the above; at the end store dK and dV by TMA
    8        load         finds the next tile; loads K and V, then Q, lse, dO and delta of each tile

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

from ...common.carried import Carried
from ...common.cluster import prepare
from ...common.dtypes import DTYPE
from ...common.entry import entry, gathered, placeholders
from ...common.pipeline import Barriers, Edge, Kind, Pipeline, Role, report_names
from ...common.ptx import wgmma
from ...common.ptx.compiler import opaque
from ...common.ptx.memory import shared_address
from ...common.scheduler import CounterScheduler, TileQueue
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ...common.tma import BOX
from ..parts import fragments
from ..parts.arguments import FakeArguments
from ..parts.softmax import Scaling
from ..parts.visibility import Visibility
from ..parts.work import TileMap, Work, following, head_and_split, tiles_of_keys
from ..spec import Sm90BackwardSpec
from ..statistics import STATS_ROWS, padded_start
from .key_loads import KeyLoads, QueryLoads, key_rows, query_rows
from .key_tiles import KeyProducts, KeyTiles, partial_offset, store_partial_row
from .mma import ROWS, WARPGROUP, WARPGROUP_WARPS
from .score_tile import ScoreTile
from .store import group_barrier, store_staged

WARPGROUPS = 2
CONSUMERS = Role("consumers", range(0, WARPGROUPS * WARPGROUP_WARPS))
LOAD = Role("load", range(len(CONSUMERS), len(CONSUMERS) + 1))

# Registers of a thread. All 384 threads start with 168, and the load warp's warpgroup gives some
# up.
LOAD_REGISTERS, CONSUMER_REGISTERS = 24, 240
assert LOAD_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS <= 3 * 168

# A tile's Q stays in use longer than its dO: dS^T Q runs beside the next tile's products.
Q_STAGES, DO_STAGES = 3, 2


# The edges in the order in which a tile meets them. A use is a tile of keys for k and v, otherwise
# a tile of queries.
EDGES = (
    *TileQueue.edges(LOAD, CONSUMERS),
    Edge("k_full", LOAD, CONSUMERS, 1, Kind.BYTES, payload="K"),
    Edge("k_empty", CONSUMERS, LOAD, 1, Kind.WARPS, payload="its buffer, with dK stored"),
    Edge("v_full", LOAD, CONSUMERS, 1, Kind.BYTES, payload="V"),
    Edge("v_empty", CONSUMERS, LOAD, 1, Kind.WARPS, payload="its buffer, with dV stored"),
    Edge("q_full", LOAD, CONSUMERS, Q_STAGES, Kind.BYTES, payload="Q and lse"),
    Edge("q_empty", CONSUMERS, LOAD, Q_STAGES, Kind.WARPS, payload="their stage"),
    Edge("do_full", LOAD, CONSUMERS, DO_STAGES, Kind.BYTES, payload="dO and delta"),
    Edge("do_empty", CONSUMERS, LOAD, DO_STAGES, Kind.WARPS, payload="their stage"),
)


class Arguments(NamedTuple):
    """The kernel's arguments. `FakeArguments` has the shapes.

    Attributes:
        stats: lse and delta of the query rows; see `statistics`.
        dk, dv: gradients, or float32 sums of the splits.
        num_ctas: how many CTAs are resident at once.
        counter: the next tile of a CounterScheduler, `[1]`.
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


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors that the device code reads and writes.

    Attributes:
        q_tma, k_tma, v_tma, do_tma: TMA's copies into shared memory.
        q, k, v, do: the tensors' coordinates for TMA.
        dk_tma, dv_tma: TMA's stores; None where the sums of splits are stored.
        dk, dv: the gradients' coordinates for TMA, or the sums of the splits.
        num_tiles, counter: the scheduler's number of tiles, and its counter.
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
    softmax_scale: Float32
    num_splits: Int32
    num_tiles: Int32
    counter: cute.Tensor


@dataclass(frozen=True)
class Consumer(Carried):
    """The values that a consumer warp keeps throughout the kernel.

    Attributes:
        k, v: shared addresses of the warpgroup's rows in the buffers of K and V.
        dk, dv: accumulators.
    """

    barriers: Barriers
    keys: KeyTiles
    products: KeyProducts
    k: Int32
    v: Int32
    scores: ScoreTile
    dk: cute.Tensor
    dv: cute.Tensor


class Sm90DkDv:
    """The kernel for one Sm90BackwardSpec; see the module's docstring."""

    def __init__(self, spec: Sm90BackwardSpec):
        if spec.tile_n != WARPGROUPS * ROWS:
            raise ValueError(f"tile_n is {spec.tile_n}, must be {WARPGROUPS * ROWS}")
        if STATS_ROWS % spec.tile_m or spec.tile_m % 32:
            raise ValueError(f"tile_m is {spec.tile_m}, must be 32, 64 or {STATS_ROWS}")
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.pipeline = Pipeline(*EDGES)
        at, (d, d_v) = SWIZZLE_ALIGNMENT, (spec.head_dim, spec.head_dim_v)
        self.smem = SharedMemory(
            Buffer("k", self.dtype, spec.tile_n * d, 1, at, "K, then dK"),
            Buffer("v", self.dtype, spec.tile_n * d_v, 1, at, "V, then dV"),
            Buffer("q", self.dtype, spec.tile_m * d, Q_STAGES, at, "Q"),
            Buffer("do", self.dtype, spec.tile_m * d_v, DO_STAGES, at, "dO"),
            Buffer("lse", Float32, spec.tile_m, Q_STAGES, holds="lse of queries"),
            Buffer("delta", Float32, spec.tile_m, DO_STAGES, holds="delta of queries"),
            TileQueue.buffer(Work),
            Buffer("barriers", Int64, self.pipeline.count),
        )
        self.q_rows, self.do_rows = query_rows(spec)
        self.k_rows, self.v_rows = key_rows(spec, spec.tile_n)
        self.dk_rows, self.dv_rows = key_rows(spec, ROWS)

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.smem, self.pipeline, (CONSUMERS, LOAD), shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        fake = FakeArguments(self.spec, self.spec.head_dim, self.spec.head_dim_v)
        dk, dv = (fake.k_partial, fake.v_partial) if self.spec.partial else (fake.k, fake.v)
        return placeholders(fake.arguments(Arguments, dk=dk(), dv=dv()))

    # -- host ---------------------------------------------------------------------------------

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel. Each split of a group counts as a K/V head."""
        a, stream = gathered(Arguments, args)
        spec = self.spec
        row_bytes = 2 * (spec.head_dim + spec.head_dim_v)  # bytes of a row of Q and dO
        tiles = tiles_of_keys(a, spec.tile_n, row_bytes).balanced(spec, a.num_ctas)
        num_tiles = tiles.count()
        visible = Visibility.of(spec, spec.tile_m, spec.tile_n, 1, a.window_left, a.window_right)
        scaling = Scaling.of(a.softmax_scale, a.softcap if spec.softcap else None)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        outputs = (None, a.dk, None, a.dv)
        if cutlass.const_expr(not spec.partial):
            outputs = (*self.dk_rows.atom(store, a.dk), *self.dv_rows.atom(store, a.dv))
        x = Operands(
            *self.q_rows.atom(load, a.q), *self.k_rows.atom(load, a.k),
            *self.v_rows.atom(load, a.v), *self.do_rows.atom(load, a.do), *outputs, a.stats,
            a.softmax_scale, a.num_splits, num_tiles, a.counter,
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
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            own = self.consumer(storage, barriers, tiles, warp, visible, scaling)
            self.consumer_warps(x, own, storage)

    def consumer(
        self, storage: Pointers, barriers: Barriers, tiles: TileMap, warp: Int32,
        visible: Visibility, scaling: Scaling,
    ) -> Consumer:  # fmt: skip
        spec = self.spec
        group = warp // WARPGROUP_WARPS
        rows = group * (ROWS * BOX * 2)
        queue = TileQueue(Work, storage.work, barriers)
        return Consumer(
            barriers=barriers,
            keys=KeyTiles(warp, group, queue, tiles, visible, bounded=False),
            products=KeyProducts.of(spec, storage, barriers),
            k=shared_address(storage.k) + rows,
            v=shared_address(storage.v) + rows,
            scores=ScoreTile.of(spec, spec.tile_m, scaling),
            dk=fragments.accumulators(spec.head_dim),
            dv=fragments.accumulators(spec.head_dim_v),
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
        """Publish the CTA's tiles one after the other, and load the tiles' operands."""
        keys = KeyLoads.of(self.spec, storage, barriers)
        queries = QueryLoads.of(self.spec, storage, barriers)
        scheduler = CounterScheduler(x.num_tiles, barriers, x.counter.iterator)
        queue = TileQueue(Work, storage.work, barriers)
        queue.fill(
            scheduler,
            tiles,
            lambda *tile: self.load_tile(x, keys, queries, queue, tiles, visible, *tile),
        )

    @cute.jit
    def load_tile(
        self, x: Operands, keys: KeyLoads, queries: QueryLoads, queue: TileQueue, tiles: TileMap,
        visible: Visibility, where: list[Int32], taken: Int32, n: Int32,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """Publish a tile of keys as work `taken`, and load K, V and the tile's queries, which are
        uses n and up. Return the next values of `taken` and n."""
        work = tiles.work(*where)
        queue.publish_work(taken, work)
        keys.load("k", x, work, taken)
        keys.load("v", x, work, taken)
        first, end = visible.query_tiles(work.block, work.seqlen_q, work.seqlen_k)
        taken += 1
        stats_start = padded_start(tiles.queries, work.sequence)
        tile, head = first, work.head
        for _ in cutlass.range((end - first) * tiles.group, unroll=1):
            row = stats_start + tile * self.spec.tile_m
            queries.load("q", x, work, tile, head, row, n)
            queries.load("do", x, work, tile, head, row, n)
            n += 1
            tile, head = following(tile, head, first, end)
        return taken, n

    # -- device: products ---------------------------------------------------------------------

    @cute.jit
    def consumer_warps(self, x: Operands, own: Consumer, storage: Pointers) -> None:
        queue = own.keys.queue
        taken = Int32(0)  # counts tiles of keys
        n = Int32(0)  # counts tiles of queries
        queue.wait(taken)
        work = queue.read(taken)
        while work.exists:
            own.dk.fill(0.0)
            own.dv.fill(0.0)
            own.barriers.wait("k_full", taken)
            own.barriers.wait("v_full", taken)
            first, end = own.keys.query_tiles(work)
            if first < end:
                n = self.compute_tile(own, work, first, end, taken, n)
            # Registers are scarce, so each place of use reads the work again, and computes its
            # stage again.
            taken = opaque(taken)
            work = queue.read(taken)
            queue.release(taken)
            fragments.scale_rows(own.dk, [x.softmax_scale] * fragments.LANE_ROWS)
            unit = own.scores.unit
            if cutlass.const_expr(unit != 1.0):
                fragments.scale_rows(own.dv, [Float32(unit)] * fragments.LANE_ROWS)
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
        self, own: Consumer, work: Work, first: Int32, end: Int32, taken: Int32, n: Int32
    ) -> Int32:
        """Compute dK and dV of work `taken` from its tiles of queries. n tiles of queries came
        before; return the number after this work."""
        count = (end - first) * own.keys.tiles.group
        whole_first, whole_end = own.keys.whole_query_tiles(work)
        tile = first
        masked = tile < whole_first or tile >= whole_end
        self.next_query_tile(own, taken, tile, n, masked, True)
        n += 1
        for _ in cutlass.range(count - 1, unroll=1):
            tile = cutlass.select_(tile + 1 == end, first, tile + 1)
            masked = tile < whole_first or tile >= whole_end
            self.next_query_tile(own, taken, tile, n, masked, False)
            n += 1
        dk = own.products.start_sum(own.dk, own.scores.ds, own.products.q_of(n - 1))
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
        """Compute P^T, dV and dS^T of use n of Q and dO, beside the product dS^T Q of use n - 1.
        With `starts` no use comes before."""
        barriers, products, scores = own.barriers, own.products, own.scores
        barriers.wait("q_full", n)
        s = products.start_scores(own.k, products.q_of(n))
        if cutlass.const_expr(not starts):
            dk = products.start_sum(own.dk, scores.ds, products.q_of(n - 1))
        barriers.wait("do_full", n)
        dp = products.start_dp(own.v, products.do_of(n))
        fragments.assign(scores.s, wgmma.wait(s, pending=1 if starts else 2))
        scores.exponentiate(products.lse_of(n))
        if masked:
            own.keys.mask(scores.p, taken, tile)
        dv = products.start_sum(own.dv, scores.p, products.do_of(n))
        fragments.assign(scores.dp, wgmma.wait(dp, pending=1))
        if cutlass.const_expr(not starts):
            fragments.assign(own.dk, wgmma.wait(dk, pending=1))
            barriers.warp_arrives("q_empty", n - 1)
        scores.differentiate(products.delta_of(n))
        if masked:
            own.keys.mask(scores.ds, taken, tile)
        fragments.assign(own.dv, wgmma.wait(dv))
        barriers.warp_arrives("do_empty", n)

    # -- device: epilogue ---------------------------------------------------------------------

    @cute.jit
    def store_tile(self, x: Operands, own: Consumer, storage: Pointers, work: Work) -> None:
        """Store the warpgroup's rows of dK and dV through the buffers of K and V, by TMA."""
        spec, keys = self.spec, own.keys
        # All warps of the warpgroup are done with its rows of K and V.
        group_barrier(keys.group)
        warp = keys.warp % WARPGROUP_WARPS
        for acc, at in ((own.dk, own.k), (own.dv, own.v)):
            words = fragments.operand(acc, self.dtype)
            fragments.stage_rows(words, at, warp, spec.tile_n, opaque(cute.arch.lane_idx()))
        cute.arch.fence_view_async_shared()
        group_barrier(keys.group)
        if warp == 0:
            block = work.block * WARPGROUPS + keys.group
            with cute.arch.elect_one():
                for tma, out, boxed, staged in (
                    (x.dk_tma, x.dk, self.dk_rows, storage.k),
                    (x.dv_tma, x.dv, self.dv_rows, storage.v),
                ):
                    rows = boxed.box(out, block, *work.keys, stored=True)
                    store_staged(
                        tma, rows, staged, keys.group, WARPGROUPS, spec.tile_n, boxed.columns
                    )
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_partial(self, x: Operands, own: Consumer, work: Work) -> None:
        """Store the warpgroup's rows of a split's partial sums."""
        head, split = head_and_split(work, x.num_splits, self.spec.partial)
        for lane_row in cutlass.range_constexpr(fragments.LANE_ROWS):
            key = own.keys.key(work, lane_row)
            if key < work.seqlen_k:
                place = (split, work, key, head, own.keys.tiles.batch, self.spec)
                offset = of_v = partial_offset(x.dk, *place)
                if cutlass.const_expr(self.spec.head_dim_v != self.spec.head_dim):
                    of_v = partial_offset(x.dv, *place)
                store_partial_row(own.dk, lane_row, x.dk, offset)
                store_partial_row(own.dv, lane_row, x.dv, of_v)
