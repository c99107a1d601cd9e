"""Code that the two SM90 kernels of all gradients of q, k and v share: arguments, launch, the load
warp, and the state of a consumer warp. Each kernel has its own loop. A use is one tile of queries
with one tile of keys; see `uses.Use`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
from ...common.ptx.memory import load_shared, shared_address
from ...common.scheduler import CounterScheduler, TicketScheduler, TileQueue
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ...common.tma import BOX
from ..parts import fragments
from ..parts.arguments import FakeArguments
from ..parts.softmax import Scaling
from ..parts.visibility import Visibility
from ..parts.work import TileMap, Work, tiles_of_keys
from ..query_sums import WARPS, QuerySums
from ..spec import Sm90BackwardSpec
from ..statistics import FLAG_ROWS, padded_start
from . import ordered_sums
from .dq_sums import RegisterSums, StagedSums
from .ds_ring import DsRing
from .key_loads import KeyLoads, QueryLoads, key_rows, query_rows
from .key_rows import KeyRows
from .key_tiles import KeyProducts, KeyTiles, group_anew, lane_anew
from .mma import ROWS, WARPGROUP, WARPGROUP_WARPS
from .ordered_sums import OrderedAdditions
from .query_zeros import QueryZeros
from .score_tile import ScoreTile, Statistics
from .turns import Turns
from .uses import QueryOrder, Use, Uses

WARPGROUPS = 2
CONSUMERS = Role("consumers", range(0, WARPGROUPS * WARPGROUP_WARPS))
LOAD = Role("load", range(len(CONSUMERS), len(CONSUMERS) + 1))
# In any order of additions the consumers add, and a warp writes zeros; in a fixed order, warps add.
ZEROS = Role("zeros", range(LOAD.warps[-1] + 1, LOAD.warps[-1] + 2))
ADDERS = Role("adders", range(LOAD.warps[-1] + 1, LOAD.warps[-1] + WARPGROUP_WARPS))
assert len(CONSUMERS) == WARPS

# Registers of a thread. All 384 threads start with 168, and the load warp's warpgroup gives some
# up.
LOAD_REGISTERS, CONSUMER_REGISTERS = 24, 240
assert LOAD_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS <= 3 * 168

# Bytes of a query that tiles of keys reread: Q, dO and the sums of dQ. A budget of half of L2 for
# these data makes kernels up to 8 % faster than all of L2.
ELEMENT_BYTES, L2_PARTS = 2 + 2 + 4, 2


class Arguments(NamedTuple):
    """The kernels' arguments. `FakeArguments` has the shapes.

    Attributes:
        stats: lse and delta of the query rows; see `statistics`.
        dk, dv: gradients, or float32 sums of the splits.
        num_ctas: how many CTAs are resident at once.
        counter: the next tile of a CounterScheduler, `[1]`.
        dq_sums, zeroed: see `query_sums` and `query_zeros`.
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
    dq_sums: cute.Tensor
    zeroed: cute.Tensor


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors that the device code reads and writes.

    Attributes:
        q_tma, k_tma, v_tma, do_tma: TMA's copies into shared memory.
        q, k, v, do: the tensors' coordinates for TMA.
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
    dk: cute.Tensor
    dv: cute.Tensor
    stats: cute.Tensor
    dq_sums: cute.Tensor
    zeroed: cute.Tensor
    softmax_scale: Float32
    num_splits: Int32
    num_tiles: Int32
    counter: cute.Tensor


def fake_arguments(spec: Sm90BackwardSpec) -> Arguments:
    """Placeholders for the arguments."""
    fake = FakeArguments(spec, spec.head_dim)
    out = fake.k_partial if spec.partial else fake.k
    return fake.arguments(
        Arguments, dk=out(), dv=out(), dq_sums=fake.query_sums(), zeroed=fake.zeroed()
    )


def parameters(
    a: Arguments, spec: Sm90BackwardSpec
) -> tuple[Operands, TileMap, Visibility, Scaling]:
    """The structs that the host passes to the device code. Each split of a group counts as a K/V
    head."""
    row_bytes = L2_PARTS * ELEMENT_BYTES * spec.head_dim
    tiles = tiles_of_keys(a, spec.tile_n, row_bytes)
    if spec.ordered:
        tiles = tiles.ordered(spec.order, a.num_ctas)
    else:
        tiles = tiles.balanced(spec, a.num_ctas)
        if spec.window_right and not spec.window_left:
            tiles = tiles.in_halves(a.num_ctas)
    visible = Visibility.of(spec, spec.tile_m, spec.tile_n, 1, a.window_left, a.window_right)
    scaling = Scaling.of(a.softmax_scale, a.softcap if spec.softcap else None)
    load = cpasync.CopyBulkTensorTileG2SOp()
    (q_rows, _), (k_rows, _) = query_rows(spec), key_rows(spec, spec.tile_n)
    x = Operands(
        *q_rows.atom(load, a.q), *k_rows.atom(load, a.k), *k_rows.atom(load, a.v),
        *q_rows.atom(load, a.do), a.dk, a.dv, a.stats, a.dq_sums, a.zeroed, a.softmax_scale,
        a.num_splits, tiles.count(), a.counter,
    )  # fmt: skip
    return x, tiles, visible, scaling


def roles(ordered: bool) -> tuple[Role, ...]:
    """The roles, with or without a fixed order of additions."""
    return CONSUMERS, LOAD, ADDERS if ordered else ZEROS


def edges(ordered: bool, *, k: int, q: int, do: int, ds: int) -> tuple[Edge, ...]:
    """The edges in the order in which a tile meets them, from the stages of the rings. A use is a
    tile of keys for k, v and zeros, otherwise a tile of queries."""
    readers = CONSUMERS
    if ordered:  # an edge counts the warps of a role, whichever they are
        readers = Role("consumers and adders", range(len(CONSUMERS) + len(ADDERS)))
    sums = (Edge("zeros_full", ZEROS, LOAD, 1, Kind.WARPS, payload="sums of dQ, which are zeros"),)
    return (
        *TileQueue.edges(LOAD, readers),
        Edge("k_full", LOAD, CONSUMERS, k, Kind.BYTES, payload="K"),
        Edge("k_empty", CONSUMERS, LOAD, k, Kind.WARPS, payload="its stage"),
        Edge("v_full", LOAD, CONSUMERS, 1, Kind.BYTES, payload="V"),
        Edge("v_empty", CONSUMERS, LOAD, 1, Kind.WARPS, payload="its buffer"),
        Edge("q_full", LOAD, CONSUMERS, q, Kind.BYTES, payload="Q and lse"),
        Edge("q_empty", CONSUMERS, LOAD, q, Kind.WARPS, payload="their stage"),
        Edge("do_full", LOAD, CONSUMERS, do, Kind.BYTES, payload="dO and delta"),
        Edge("do_empty", CONSUMERS, LOAD, do, Kind.WARPS, payload="their stage"),
        Edge("ds_full", CONSUMERS, CONSUMERS, ds, Kind.WARPS, payload="dS"),
        Edge("ds_empty", CONSUMERS, CONSUMERS, ds, Kind.WARPS, payload="its stage"),
        *(ordered_sums.edges(CONSUMERS, ADDERS) if ordered else sums),
    )


class FusedBackward:
    """A kernel of all gradients, for one Sm90BackwardSpec. A kernel derives from this class.

    Args:
        order: the order of queries.
        k, q, do, ds: stages of the rings of K, Q, dO and dS.
        staged: whether warps stage dQ in shared memory.

    Attributes:
        columns_ahead: as in `Consumer`.
    """

    columns_ahead: ClassVar[int] = 0

    def __init__(
        self, spec: Sm90BackwardSpec, order: QueryOrder, *, k: int, q: int, do: int, ds: int,
        staged: bool,
    ):  # fmt: skip
        if spec.tile_n != WARPGROUPS * ROWS:
            raise ValueError(f"tile_n is {spec.tile_n}, must be {WARPGROUPS * ROWS}")
        if spec.tile_m not in (ROWS, WARPGROUPS * ROWS):
            raise ValueError(f"tile_m is {spec.tile_m}, must be {ROWS} or {WARPGROUPS * ROWS}")
        self.spec, self.order = spec, order
        self.sums = QuerySums.of(spec.tile_m, spec.head_dim)
        self.rows = KeyRows(spec)
        self.others = OtherWarps(spec, order, self.rows, self.sums)
        self.pipeline = Pipeline(*edges(spec.ordered, k=k, q=q, do=do, ds=ds))
        dtype, at = DTYPE[spec.dtype], SWIZZLE_ALIGNMENT
        queries, keys = spec.tile_m * spec.head_dim, spec.tile_n * spec.head_dim
        staging = Buffer("dq", Float32, self.sums.part, len(CONSUMERS), 128, "dQ of each warp")
        self.smem = SharedMemory(
            Buffer("k", dtype, keys, k, at, "K"),
            Buffer("v", dtype, keys, 1, at, "V"),
            Buffer("q", dtype, queries, q, at, "Q"),
            Buffer("do", dtype, queries, do, at, "dO"),
            Buffer("ds", dtype, spec.tile_m * spec.tile_n, ds, at, "dS^T"),
            *((staging,) if staged else ()),
            Buffer("lse", Float32, spec.tile_m, q, holds="lse of queries"),
            Buffer("delta", Float32, spec.tile_m, do, holds="delta of queries"),
            TileQueue.buffer(Work),
            Buffer("barriers", Int64, self.pipeline.count),
        )

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.smem, self.pipeline, roles(self.spec.ordered), shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        return placeholders(fake_arguments(self.spec))

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        x, tiles, visible, scaling = parameters(a, self.spec)
        self.kernel(x, tiles, visible, scaling).launch(
            grid=[CounterScheduler.clusters(x.num_tiles, a.num_ctas), 1, 1],
            block=[(WARPGROUPS + 1) * WARPGROUP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

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
            self.others.run(warp, x, storage, barriers, tiles, visible)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            own = Consumer.of(
                self.spec, self.order, storage, barriers, tiles, warp, visible, scaling,
                x.dq_sums, self.sums_of(x, storage, barriers), columns_ahead=self.columns_ahead,
            )  # fmt: skip
            self.consumer_warps(x, own)

    def sums_of(
        self, x: Operands, storage: Pointers, barriers: Barriers
    ) -> RegisterSums | StagedSums:
        """The sums to which a consumer warp adds dQ."""
        raise NotImplementedError

    @cute.jit
    def consumer_warps(self, x: Operands, own: Consumer) -> None:
        count = Int32(0)  # number of works done
        queue = own.keys.queue
        queue.wait(count)
        if queue.read(count).exists:
            own.turns.begin()
            count = self.compute_works(x, own)
        queue.release(count)

    def compute_works(self, x: Operands, own: Consumer) -> Int32:
        """Compute all works of the CTA, and return their number."""
        raise NotImplementedError


class OtherWarps:
    """The warps of the load warp's warpgroup. All methods run on the device."""

    def __init__(self, spec: Sm90BackwardSpec, order: QueryOrder, rows: KeyRows, sums: QuerySums):
        self.spec, self.order, self.sums = spec, order, sums
        self.load = LoadWarp(spec, order, rows)
        self.zeros = QueryZeros(spec.head_dim)

    @cute.jit
    def run(
        self,
        warp: Int32,
        x: Operands,
        storage: Pointers,
        barriers: Barriers,
        tiles: TileMap,
        visible: Visibility,
    ) -> None:
        queue = TileQueue(Work, storage.work, barriers)
        if warp == LOAD.warps[0]:
            self.load.run(x, storage, barriers, tiles, visible)
        elif cutlass.const_expr(self.spec.ordered):
            adder = warp - ADDERS.warps[0]
            keys = KeyTiles(warp, adder, queue, tiles, visible, bounded=True)
            uses = Uses(self.order, x.dq_sums.shape[1] // self.spec.tile_m)
            OrderedAdditions(
                self.sums, barriers, keys, uses, x.dq_sums.iterator.toint(),
                x.zeroed.iterator.toint(), shared_address(storage.dq), adder, len(ADDERS),
            ).run()  # fmt: skip
        elif warp == ZEROS.warps[0]:
            self.zeros.run(x.dq_sums, x.zeroed, tiles, queue, barriers)


class LoadWarp:
    """The load warp of a kernel. V is loaded late, after the first Q, because the previous work
    uses the buffer of V longer than its last Q. All methods run on the device."""

    def __init__(self, spec: Sm90BackwardSpec, order: QueryOrder, rows: KeyRows):
        self.spec, self.order, self.rows = spec, order, rows

    @cute.jit
    def run(
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
        kind = TicketScheduler if self.spec.ordered else CounterScheduler
        scheduler = kind(x.num_tiles, barriers, x.counter.iterator)
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
        uses n and up. Return the next values of `taken` and n. A tile that no query sees is not
        published, because this warp stores zeros as the tile's gradients."""
        work = tiles.work(*where)
        first, end = visible.query_tiles(work.block, work.seqlen_q, work.seqlen_k)
        if first < end:
            queue.publish_work(taken, work)
            keys.load("k", x, work, taken)
            stats_start = padded_start(tiles.queries, work.sequence)
            walk = self.order.walk(tiles, work, first, end)
            tile, head = walk.start, walk.head
            for i in cutlass.range((end - first) * tiles.group, unroll=1):
                row = stats_start + tile * self.spec.tile_m
                queries.load("q", x, work, tile, head, row, n)
                if i == 0:
                    keys.load("v", x, work, taken)
                queries.load("do", x, work, tile, head, row, n)
                # The wait may follow these loads. Consumers add a use's dQ to the sums only after
                # they get the next use's Q and dO, or the next work.
                if cutlass.const_expr(not self.spec.ordered):
                    if i == 0:
                        queue.barriers.wait("zeros_full", taken)
                n += 1
                tile, head = walk.following(tile, head)
            taken += 1
        else:
            self.rows.store_zeros(x, work)
        return taken, n


@dataclass(frozen=True)
class Consumer(Carried):
    """The values that a consumer warp keeps throughout the kernel.

    Attributes:
        k, v: shared addresses of the buffers of K and V.
        sums: the sums to which dQ is added.
        turns: the warpgroup's turns to start products.
        dk, dv: accumulators.
        columns_ahead: columns whose statistics are loaded before a product is waited for.
    """

    barriers: Barriers
    keys: KeyTiles
    uses: Uses
    products: KeyProducts
    k: Int32
    v: Int32
    scores: ScoreTile
    ds: DsRing
    sums: RegisterSums | StagedSums
    turns: Turns
    dk: cute.Tensor
    dv: cute.Tensor
    columns_ahead: int

    @classmethod
    def of(
        cls, spec: Sm90BackwardSpec, order: QueryOrder, storage: Pointers, barriers: Barriers,
        tiles: TileMap, warp: Int32, visible: Visibility, scaling: Scaling, dq_sums: cute.Tensor,
        sums: RegisterSums | StagedSums, *, columns_ahead: int = 0,
    ) -> Consumer:  # fmt: skip
        group = warp // WARPGROUP_WARPS
        queue = TileQueue(Work, storage.work, barriers)
        return cls(
            barriers=barriers,
            keys=KeyTiles(warp, group, queue, tiles, visible, bounded=True),
            uses=Uses(order, dq_sums.shape[1] // spec.tile_m),
            products=KeyProducts.of(spec, storage, barriers),
            k=shared_address(storage.k),
            v=shared_address(storage.v),
            scores=ScoreTile.of(spec, spec.tile_m, scaling, float32=True),
            ds=DsRing(spec, sums.sums, barriers, shared_address(storage.ds)),
            sums=sums,
            turns=Turns(group, spec.tile_n // ROWS),
            dk=fragments.accumulators(spec.head_dim),
            dv=fragments.accumulators(spec.head_dim),
            columns_ahead=columns_ahead,
        )

    # -- products -----------------------------------------------------------------------------

    def start_scores(self, n: Int32, taken: Int32) -> list[Float32]:
        """Start S^T = K Q^T, with use n of Q, and K of work `taken`."""
        offset, queries = self.k_offset(taken), self.products.q_of(n)
        return self.products.start_scores(self.own_rows(self.k + offset), queries)

    def start_dp(self, n: Int32) -> list[Float32]:
        """Start dP^T = V dO^T, with use n of dO."""
        stage = self.products.offset("do", n)
        return self.products.start_dp(self.own_rows(self.v), self.products.do + stage)

    def start_dv(self, n: Int32, adds: Int32) -> list[Float32]:
        """Start dV + P^T dO, with use n of dO; where `adds` is 0, P^T dO alone."""
        return self.products.start_sum(self.dv, self.scores.p, self.products.do_of(n), adds)

    def start_dk(self, n: Int32, adds: Int32) -> list[Float32]:
        """Start dK + dS^T Q, with use n of Q; where `adds` is 0, dS^T Q alone."""
        return self.products.start_sum(self.dk, self.scores.ds, self.products.q_of(n), adds)

    def start_dq(self, n: Int32, taken: Int32) -> list[Float32]:
        """Start the warpgroup's part of dQ = dS K, with use n of dS, and K of work `taken`."""
        offset = self.k_offset(taken)
        return self.ds.start_dq(group_anew(self.keys.warp), n, self.k, offset)

    def k_offset(self, taken: Int32) -> Int32:
        """The offset of a work's K in the ring of K, in bytes."""
        spec = self.products.spec
        return self.barriers.stage("k_full", taken) * (2 * spec.tile_n * spec.head_dim)

    def own_rows(self, rows: Int32) -> Int32:
        """The shared address of the warpgroup's rows of K or V."""
        return rows + group_anew(self.keys.warp) * (ROWS * BOX * 2)

    # -- P and dS -----------------------------------------------------------------------------

    def has_large_scores(self, n: Int32) -> Boolean:
        """Whether an lse of the queries of use n is large; see `statistics`."""
        tile_m = self.products.spec.tile_m
        groups = tile_m // FLAG_ROWS
        delta = self.products.delta + self.barriers.stage("do_full", n) * (4 * tile_m)
        (word,) = load_shared(Int32, delta + (lane_anew() & (groups - 1)) * (4 * FLAG_ROWS), 1)
        return cute.arch.vote_any_sync((word & 1) != 0)

    @cute.jit
    def compute_score_gradients(
        self, use: Use, n: Int32, s: list[Float32], dp: list[Float32], large: Boolean
    ) -> None:
        """Compute P^T and dS^T of use n, once the products of use n are done. The code for most
        tiles is one basic block, so that the last exponentials run beside the first dS^T."""
        if use.masked | large:
            self.compute_block(use, n, s, dp, plain=False)
        else:
            self.compute_block(use, n, s, dp, plain=True)

    def compute_block(
        self, use: Use, n: Int32, s: list[Float32], dp: list[Float32], *, plain: bool
    ) -> None:
        """Compute P^T and dS^T of `use`, which is use n. `plain` says that the tile needs no mask
        and has no large lse."""
        scores = self.scores
        lse = self.first_loaded(self.products.lse_of(n))
        fragments.assign(scores.s, wgmma.wait(s, pending=1))
        scores.exponentiate(lse, small_lse=plain)
        if not plain:
            self.keys.mask(scores.p, use.taken, use.tile)
        delta = self.first_loaded(self.products.delta_of(n))
        fragments.assign(scores.dp, wgmma.wait(dp))
        scores.differentiate(delta)
        if not plain:
            self.keys.mask(scores.ds, use.taken, use.tile)

    def first_loaded(self, statistics: Statistics) -> Statistics:
        """Load the statistics of the first columns before a wait, because the compiler does not
        move loads across a wait.
        """
        ahead = self.columns_ahead
        loaded = statistics(range(ahead))
        return lambda columns: loaded if columns.stop <= ahead else statistics(columns)
