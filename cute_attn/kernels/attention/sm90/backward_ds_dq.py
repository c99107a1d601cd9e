"""The gradient of q from dS in global memory, for SM90 at head_dim 192 and 256: wgmma, TMA with
multicast, warp-specialised.

    dQ = dS K            64 x head_dim a warpgroup        dS and K in shared memory

The dK/dV kernel has written dS, see `ds_tiles`. A cluster of two CTAs has 256 queries of a head, 64
for each consumer warpgroup. The cluster goes through the tiles of 64 keys that some of the queries
see. Each CTA loads a part of K for both CTAs, and its own tiles of dS. A warpgroup leaves out tiles
of keys that none of its 64 queries sees: dS of such a tile may be unwritten.

If dS is kept for only a part of the keys at once, the kernel runs for one part after the other. In
between, dQ is in global memory in float32, in the order of the registers (`query_sums`).

    warps    role         work on a tile of queries
    0-7      consumers    compute the product; at the end store dQ from registers
    8        load         finds the tile; loads K and dS of each tile of keys

At head_dim 256 a cluster handles one tile of queries, so the hardware hands out tiles as SMs become
free. At head_dim 192 clusters are persistent, and take tiles from a counter. The load warp's
warpgroup gives registers to the other warpgroups; its three other warps idle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...common.carried import Carried
from ...common.cluster import prepare
from ...common.dtypes import DTYPE
from ...common.entry import entry, gathered, placeholders
from ...common.numbers import INF
from ...common.pair_scheduler import PairCounterScheduler, PairNumbers
from ...common.pipeline import CTAS, Barriers, Edge, Kind, Pipeline, Reach, Role, report_names
from ...common.ptx import wgmma
from ...common.ptx.async_copy import copy_bulk
from ...common.ptx.cluster import cta_rank
from ...common.ptx.memory import load_global, shared_address, store_global
from ...common.scheduler import SingleTileScheduler, TileQueue
from ...common.sequences import Sequences
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ...common.tma import BOX, boxes, load_boxes
from .. import ds_tiles
from ..ds_tiles import TILE_BYTES
from ..parts import fragments
from ..parts.arguments import FakeArguments
from ..parts.visibility import Visibility
from ..parts.work import TileMap, Work
from ..query_sums import VECTOR, VECTORS, QuerySums
from ..spec import Sm90BackwardSpec
from ..statistics import LSE, padded_start
from .key_loads import key_rows
from .mma import ROWS, WARPGROUP, WARPGROUP_WARPS, start_query_gradients
from .store import row_parts, store_parts

WARPGROUPS = 2
CONSUMERS = Role("consumers", range(0, WARPGROUPS * WARPGROUP_WARPS))
LOAD = Role("load", range(len(CONSUMERS), len(CONSUMERS) + 1))

# Registers of a thread. All 384 threads start with 168, and the load warp's warpgroup gives some
# up.
LOAD_REGISTERS, CONSUMER_REGISTERS = 40, 232
assert LOAD_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS <= 3 * 168

STAGES = 4  # stages of K and of dS

# The edges in the order in which a tile meets them. A use is a tile of keys.
EDGES = (
    *TileQueue.edges(LOAD, CONSUMERS),
    Edge("k_full", LOAD, CONSUMERS, STAGES, Kind.BYTES, payload="K and dS"),
    Edge("k_empty", CONSUMERS, LOAD, STAGES, Kind.WARPS, Reach.EACH, "their stage"),
)


class Arguments(NamedTuple):
    """The kernel's arguments. `FakeArguments` has the shapes.

    Attributes:
        ds: dS of the call's query heads; with `sums`, dS of a part of the tiles of keys. See
            `ds_tiles`. The parts run in the order of the keys.
        stats: lse and delta of the query rows; see `statistics`.
        sums: dQ of the call's query heads between the parts; see `query_sums`.
        first_head, num_heads: the call's query heads.
        first_tile: the part's first tile of keys.
        num_clusters: how many clusters are resident at once.
        counter: the next tile of persistent clusters, `[1]`; None without persistent clusters.
    """

    k: cute.Tensor
    ds: cute.Tensor
    stats: cute.Tensor
    sums: cute.Tensor | None
    dq: cute.Tensor
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    softmax_scale: Float32
    window_left: Int32
    window_right: Int32
    first_head: Int32
    num_heads: Int32
    first_tile: Int32
    num_clusters: Int32
    counter: cute.Tensor | None


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors that the device code reads and writes.

    Attributes:
        k: K's coordinates for TMA.
        group: the number of query heads of a K/V head.
        visible: which keys the cluster's queries see.
    """

    k_tma: cute.CopyAtom
    k: cute.Tensor
    ds: cute.Tensor
    stats: cute.Tensor
    sums: cute.Tensor | None
    dq: cute.Tensor
    group: Int32
    first_head: Int32
    first_tile: Int32
    softmax_scale: Float32
    visible: Visibility
    num_tiles: Int32 | None
    counter: cute.Tensor | None

    @property
    def visible_of_group(self) -> Visibility:
        """The keys that a warpgroup's queries see."""
        return replace(self.visible, tile_m=ROWS)


@dataclass(frozen=True)
class Consumer(Carried):
    """The values that a consumer warp keeps throughout the kernel.

    Attributes:
        warp: the warp's number in the CTA.
        group: the number of the warp's warpgroup.
        k: shared address of the ring.
        ds: shared address of the warpgroup's tiles in their ring.
        acc: accumulators of dQ.
    """

    warp: Int32
    group: Int32
    barriers: Barriers
    tiles: TileMap
    k: Int32
    ds: Int32
    acc: cute.Tensor


class Sm90DsDq:
    """The kernel for one Sm90BackwardSpec; see the module's docstring."""

    def __init__(self, spec: Sm90BackwardSpec):
        if spec.tile_m != CTAS * WARPGROUPS * ROWS:
            raise ValueError(f"tile_m is {spec.tile_m}, must be {CTAS * WARPGROUPS * ROWS}")
        if spec.tile_n != ds_tiles.TILE:
            raise ValueError(f"tile_n is {spec.tile_n}, must be {ds_tiles.TILE}")
        self.spec = spec
        # A persistent cluster handles several tiles of queries. So the load warp can load the next
        # tile's K and dS while consumers finish a tile.
        self.persistent = spec.scheduler == "counter"
        self.scheduler = PairCounterScheduler if self.persistent else SingleTileScheduler
        self.dtype = DTYPE[spec.dtype]
        k = spec.tile_n * spec.head_dim
        self.k_bytes = 2 * k
        self.ds_bytes = WARPGROUPS * TILE_BYTES
        more = PairNumbers.edges(LOAD) if self.persistent else ()
        self.pipeline = Pipeline(*EDGES, *more)
        self.smem = SharedMemory(
            Buffer("k", self.dtype, k, STAGES, SWIZZLE_ALIGNMENT, "K"),
            Buffer("ds", self.dtype, self.ds_bytes // 2, STAGES, SWIZZLE_ALIGNMENT, "dS^T"),
            TileQueue.buffer(Work),
            *((PairNumbers.buffer(),) if self.persistent else ()),
            Buffer("barriers", Int64, self.pipeline.count),
        )
        self.sums = QuerySums(ROWS, spec.head_dim, spec.head_dim)
        self.k_rows, _ = key_rows(spec, spec.tile_n)

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.smem, self.pipeline, (CONSUMERS, LOAD), shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        fake = FakeArguments(self.spec, self.spec.head_dim)
        sums = fake.query_sums(some_heads=True) if self.spec.partial else None
        counter = fake.counter() if self.persistent else None
        given = {"ds": fake.ds_tiles(), "sums": sums, "counter": counter}
        return placeholders(fake.arguments(Arguments, **given))

    # -- host ---------------------------------------------------------------------------------

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        spec = self.spec
        queries = Sequences(a.dq.shape[-3], a.cu_seqlens_q, a.seqused_q)
        keys = Sequences(a.k.shape[-3], a.cu_seqlens_k, a.seqused_k)
        # Heads come one after the other, so that a head's K stays in L2. dS is read once.
        tiles = TileMap(
            spec.tile_m, 1, spec.window_right, queries, keys, a.num_heads, 1,
            queries.batch(a.dq), 1,
        ).balanced(spec, a.num_clusters)  # fmt: skip
        visible = Visibility.of(spec, spec.tile_m, spec.tile_n, 1, a.window_left, a.window_right)
        k_tma, k = self.k_rows.atom(cpasync.CopyBulkTensorTileG2SMulticastOp(), a.k)
        x = Operands(
            k_tma, k, a.ds, a.stats, a.sums, a.dq, a.dq.shape[-2] // a.k.shape[-2], a.first_head,
            a.first_tile, a.softmax_scale, visible,
            tiles.count() if self.persistent else None, a.counter,
        )  # fmt: skip
        self.kernel(x, tiles).launch(
            grid=[CTAS * self.scheduler.clusters(tiles.count(), a.num_clusters), 1, 1],
            block=[(WARPGROUPS + 1) * WARPGROUP, 1, 1],
            cluster=[CTAS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    # -- device: set-up -----------------------------------------------------------------------

    @cute.kernel
    def kernel(self, x: Operands, tiles: TileMap) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = self.smem.allocate()
        barriers = self.pipeline.at(storage.barriers)
        if warp == LOAD.warps[0]:
            prepare((x.k_tma,), barriers)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        if warp >= LOAD.warps[0]:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == LOAD.warps[0]:
                self.load_warp(x, storage, barriers, tiles)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            group = warp // WARPGROUP_WARPS
            own = Consumer(
                warp=warp,
                group=group,
                barriers=barriers,
                tiles=tiles,
                k=shared_address(storage.k),
                ds=shared_address(storage.ds) + group * TILE_BYTES,
                acc=fragments.accumulators(self.spec.head_dim),
            )
            self.consumer_warps(x, own, TileQueue(Work, storage.work, barriers))
        # Neither CTA may end while the other CTA signals it or copies to it.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def tile_of_queries(self, work: Work, group: Int32) -> Int32:
        """The index of a warpgroup's tile of 64 queries within the sequence."""
        return (work.block * CTAS + cta_rank()) * WARPGROUPS + group

    def seen_key_tiles(self, x: Operands, work: Work, tile: Int32) -> tuple[Int32, Int32]:
        """Return [first, end), the tiles of keys that a tile of 64 queries sees."""
        first, end = x.visible_of_group.key_tiles(tile, work.seqlen_q, work.seqlen_k)
        return first, cutlass.select_(tile * ROWS < work.seqlen_q, end, first)

    def key_tiles(self, x: Operands, work: Work, tile: Int32) -> tuple[Int32, Int32]:
        """Return [first, end), the tiles of keys that a tile of 64 queries sees and whose dS is
        kept."""
        return self.of_part(x, *self.seen_key_tiles(x, work, tile))

    def key_tiles_of_cluster(self, x: Operands, work: Work) -> tuple[Int32, Int32]:
        """Return [first, end), the tiles of keys that the cluster's queries see and whose dS is
        kept."""
        return self.of_part(x, *x.visible.key_tiles(work.block, work.seqlen_q, work.seqlen_k))

    def of_part(self, x: Operands, first: Int32, end: Int32) -> tuple[Int32, Int32]:
        """Return [first, end), the tiles of keys in a range whose dS is kept."""
        if not self.spec.partial:
            return first, end
        first = cutlass.max(first, x.first_tile)
        return first, cutlass.max(first, cutlass.min(end, x.first_tile + x.ds.shape[2]))

    def kept(self, x: Operands, tile: Int32) -> Int32:
        """The place of a tile of keys among the tiles whose dS is kept."""
        return tile - x.first_tile if self.spec.partial else tile

    # -- device: load -------------------------------------------------------------------------

    @cute.jit
    def load_warp(self, x: Operands, storage: Pointers, barriers: Barriers, tiles: TileMap) -> None:
        """Publish the cluster's tile, and load the tile's operands."""
        queue = TileQueue(Work, storage.work, barriers)
        if cutlass.const_expr(self.persistent):
            queue.fill(
                PairCounterScheduler(x.num_tiles, PairNumbers.of(barriers, storage, x.counter)),
                tiles,
                lambda where, published, loaded: self.load_tile(
                    x, storage, queue, tiles, where, published, loaded
                ),
            )  # fmt: skip
        else:
            queue.fill_with_one(
                tiles, lambda where: self.load_tile(x, storage, queue, tiles, where)
            )

    @cute.jit
    def load_tile(
        self, x: Operands, storage: Pointers, queue: TileQueue, tiles: TileMap, where: list[Int32],
        published: Int32 | int = 0, loaded: Int32 | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Publish the cluster's tile. For each tile of keys, load a part of K for both CTAs, and
        the CTA's dS. Return how many tiles of queries and of keys this warp has loaded so far."""
        spec, barriers = self.spec, queue.barriers
        across = (spec.head_dim // BOX, spec.tile_n * BOX)
        k_smem = boxes(storage.k, spec.tile_n, across, (STAGES, self.k_bytes // 2))
        block, head, sequence = where
        work = tiles.work(block, head + x.first_head, sequence)
        queue.publish_work(published, work)
        of_queries, of_keys = x.ds.shape[1], x.ds.shape[2]
        before = head * of_queries + padded_start(tiles.queries, sequence) // ds_tiles.TILE
        of_groups = [self.tile_of_queries(work, group) for group in range(WARPGROUPS)]
        at = [
            x.ds.iterator.toint() + Int64((before + tile) * of_keys) * TILE_BYTES
            for tile in of_groups
        ]
        seen = [self.key_tiles(x, work, tile) for tile in of_groups]
        first, end = self.key_tiles_of_cluster(x, work)
        for i in cutlass.range(end - first, unroll=1):
            n = i if loaded is None else loaded + i
            tile = first + i
            nbytes = Int32(self.k_bytes)
            for group in cutlass.range_constexpr(WARPGROUPS):
                low, high = seen[group]
                sees = tile >= low and tile < high
                nbytes += cutlass.select_(sees, Int32(TILE_BYTES), Int32(0))
            barriers.wait_previous("k_empty", n)
            with cute.arch.elect_one():
                barriers.expect("k_full", n, nbytes)
            keys = self.k_rows.box(x.k, tile, work.head // x.group, *work.keys[1:])
            load_boxes(x.k_tma, keys, k_smem, barriers, "k_full", n, True)
            to = shared_address(storage.ds) + barriers.stage("k_full", n) * self.ds_bytes
            for group in cutlass.range_constexpr(WARPGROUPS):
                low, high = seen[group]
                if tile >= low and tile < high:
                    with cute.arch.elect_one():
                        copy_bulk(
                            to + group * TILE_BYTES,
                            at[group] + Int64(self.kept(x, tile)) * TILE_BYTES,
                            TILE_BYTES,
                            shared_address(barriers.pointer("k_full", n)),
                        )
        return published + 1, 0 if loaded is None else loaded + cutlass.max(end - first, 0)

    # -- device: the product ------------------------------------------------------------------

    @cute.jit
    def consumer_warps(self, x: Operands, own: Consumer, queue: TileQueue) -> None:
        if cutlass.const_expr(self.persistent):
            taken, n = Int32(0), Int32(0)
            work = queue.take(taken)
            while work.exists:
                n = self.tile_of_work(x, own, work, n)
                taken += 1
                work = queue.take(taken)
        else:
            queue.wait(0)
            work = queue.read(0)
            if work.exists:
                self.tile_of_work(x, own, work, None, lambda: queue.read(0))

    @cute.jit
    def tile_of_work(
        self,
        x: Operands,
        own: Consumer,
        work: Work,
        n: Int32 | None,
        again: cutlass.Constexpr[Any] = None,
    ) -> Int32 | None:
        """Compute and store the warpgroup's dQ of a tile of queries.

        Args:
            n: tiles of keys before this tile of queries; None if the cluster has no earlier tile.
            again: reads `work` again, to save registers; None keeps `work` in registers.

        Returns:
            The number of tiles of keys so far; None if n is None.
        """
        own.acc.fill(0.0)
        first, end = self.key_tiles_of_cluster(x, work)
        low, high = self.key_tiles(x, work, self.tile_of_queries(work, own.group))
        # Uses of keys that the warpgroup does not see are released at once.
        low, high = low - first, high - first
        if low >= high:
            low, high = end - first, end - first
        for i in cutlass.range(low, unroll=1):
            self.leave_out(own, i if n is None else n + i)
        if low < high:
            if cutlass.const_expr(self.spec.partial):
                self.load_sums(x, own, work if again is None else again())
            self.compute_tile(own, *((low, high) if n is None else (n + low, n + high)))
        for i in cutlass.range(high, end - first, unroll=1):
            self.leave_out(own, i if n is None else n + i)
        if cutlass.const_expr(self.spec.partial):
            self.store_part(x, own, work if again is None else again(), low < high)
        else:
            self.store_rows(x, own, work if again is None else again())
        if cutlass.const_expr(n is not None):
            n += cutlass.max(end - first, 0)
        return n

    def leave_out(self, own: Consumer, n: Int32) -> None:
        own.barriers.wait("k_full", n)
        own.barriers.warp_arrives("k_empty", n)

    @cute.jit
    def compute_tile(self, own: Consumer, low: Int32, high: Int32) -> None:
        """Compute dQ from the uses low to high - 1 of K and dS. A product is started before the
        previous product is done."""
        self.start_product(own, low)
        for n in cutlass.range(low + 1, high, unroll=1):
            self.start_product(own, n)
            wgmma.wait_for_all_but(1)
            own.barriers.warp_arrives("k_empty", n - 1)
        fragments.assign(own.acc, wgmma.wait(fragments.values(own.acc)))
        own.barriers.warp_arrives("k_empty", high - 1)

    def start_product(self, own: Consumer, n: Int32) -> None:
        """Start the accumulators + dS K, with use n of dS and K."""
        own.barriers.wait("k_full", n)
        stage = own.barriers.stage("k_full", n)
        started = start_query_gradients(
            self.dtype, own.ds + stage * self.ds_bytes, own.k + stage * self.k_bytes,
            acc=fragments.values(own.acc), tile_n=self.spec.tile_n, columns=self.spec.head_dim,
        )  # fmt: skip
        fragments.assign(own.acc, started)

    # -- device: parts of the keys ------------------------------------------------------------

    @cute.jit
    def load_sums(self, x: Operands, own: Consumer, work: Work) -> None:
        """Load the sums of the earlier parts of the keys, if there are any."""
        first, _ = self.seen_key_tiles(x, work, self.tile_of_queries(work, own.group))
        if first < x.first_tile:
            at = self.sums_of_lane(x, own, work)
            loaded: list[Any] = []
            for i in cutlass.range_constexpr(cute.size(own.acc) // VECTOR):
                loaded += load_global(Float32, at + i * (VECTORS * 4 * VECTOR), VECTOR)
            fragments.assign(own.acc, loaded)

    @cute.jit
    def store_part(self, x: Operands, own: Consumer, work: Work, sees: Boolean) -> None:
        """Store the sums for the next part of the keys, if the queries see a tile of keys after
        this part. Otherwise the sums are complete: store dQ. Queries that see no key are complete
        at once."""
        first, end = self.seen_key_tiles(x, work, self.tile_of_queries(work, own.group))
        goes_on = end > x.first_tile + x.ds.shape[2]
        if sees and goes_on:
            at = self.sums_of_lane(x, own, work)
            values = fragments.values(own.acc)
            for i in cutlass.range_constexpr(len(values) // VECTOR):
                vector = values[VECTOR * i : VECTOR * (i + 1)]
                store_global(Float32, at + i * (VECTORS * 4 * VECTOR), vector)
        if (sees and not goes_on) or (first >= end and x.first_tile == 0):
            self.store_rows(x, own, work)

    def sums_of_lane(self, x: Operands, own: Consumer, work: Work) -> Int64:
        """The global address of the lane's first vector."""
        start = padded_start(own.tiles.queries, work.sequence)
        start += (work.head - x.first_head) * x.sums.shape[1]
        tile = start // ROWS + self.tile_of_queries(work, own.group)
        part = Int64(tile) * self.sums.row_blocks + own.warp % WARPGROUP_WARPS
        at = x.sums.iterator.toint() + part * (4 * self.sums.part)
        return at + Int64(cute.arch.lane_idx() * (4 * VECTOR))

    # -- device: epilogue ---------------------------------------------------------------------

    @cute.jit
    def store_rows(self, x: Operands, own: Consumer, work: Work) -> None:
        """Scale, round and store the warpgroup's rows. A row that sees no key becomes 0: its dQ may
        be NaN or infinite, from a hidden key that is not finite."""
        start = padded_start(own.tiles.queries, work.sequence)
        tile = self.tile_of_queries(work, own.group)
        for lane_row in cutlass.range_constexpr(fragments.LANE_ROWS):
            row = fragments.first_row(own.warp % WARPGROUP_WARPS)
            row += lane_row * fragments.LANE_ROW_STEP
            query = tile * ROWS + ds_tiles.query_of(row)
            exists = query < work.seqlen_q
            lse = Float32(INF)
            if exists:
                lse = x.stats[LSE, work.head, Int64(start + query)]
            values = own.acc[None, lane_row, None]
            pairs = []
            for j in cutlass.range_constexpr(0, cute.size(values), 2):
                pair = [values[i] * x.softmax_scale for i in (j, j + 1)]
                pairs.append([cutlass.select_(lse == INF, Float32(0.0), y) for y in pair])
            parts = row_parts(pairs, self.dtype)
            if exists:
                if cutlass.const_expr(self.spec.varlen_q):
                    to = x.dq[(work.q_start + query, work.head, None)]
                else:
                    to = x.dq[(work.sequence, query, work.head, None)]
                store_parts(to, parts, self.dtype)
