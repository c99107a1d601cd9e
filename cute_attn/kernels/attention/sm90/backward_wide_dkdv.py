"""Gradients of k and v for SM90 at head_dim 256, and at 192 with head_dim_v 128: wgmma, TMA with
multicast, warp-specialised.

A cluster of two CTAs computes dK and dV of 128 keys of a K/V head, 64 in each CTA. Both CTAs loop
over the query heads of the head's group or split. For each query head the CTAs loop over the tiles
of queries that see some of the 128 keys. Each CTA loads a part of Q and dO for both CTAs.

At head_dim 256, dK and dV of 64 keys take 256 registers of each thread of a warpgroup. So one
warpgroup has dV, and the other warpgroup has dK of the same keys. At head_dim 192 the warpgroups
share the work in the same way:

    value warpgroup                        key warpgroup
    S^T = K Q^T       64 x tile_m          dP^T = V dO^T       64 x tile_m
    P^T = exp(c S^T - lse)                 dS^T = P'^T * (dP^T - delta)
    dV += P^T dO      64 x head_dim_v      dK += dS^T Q        64 x head_dim

P' is P; with a softcap, P' is P times the slope of the cap. P and P' are in units of
`PROBABILITY_UNIT`. The value warpgroup hands P' over, rounded, through shared memory. The key
warpgroup may store dS to global memory, see `ds_tiles`, for the kernel of dQ. Both warpgroups run
the same steps with exchanged operands: T = X Y^T, then T' from T in registers; then T' Z is added
to an accumulator. T of the next tile starts before T' Z of this tile, so that T' is computed beside
a product. This order takes a further stage of Q. At head_dim 192, K and V stay in registers. At
head_dim 256, only the first columns of K and V do. The last stage of Q takes the memory of these
columns.

    warps    role         work on a tile of keys
    0-3      value        computes as above; at the end stores dV through a stage of Q, by TMA
    4-7      key          computes as above; at the end stores dK through another stage, by TMA
    8        load         finds the tile; loads K and V, then Q with lse, and dO with delta

At head_dim 256 a cluster handles one tile of keys, so the hardware hands out tiles as SMs become
free. At head_dim 192 clusters are persistent. CTA 0 takes the next tile from a counter for both
CTAs. dK and dV are staged in the shared memory of K and V. Partial sums of splits are stored from
registers. The load warp's warpgroup gives registers to the other warpgroups; its three other
warps idle.
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
from ...common.pair_scheduler import PairCounterScheduler, PairNumbers
from ...common.pipeline import CTAS, Barriers, Edge, Kind, Pipeline, Reach, Role, report_names
from ...common.ptx import wgmma
from ...common.ptx.barrier import meet
from ...common.ptx.cluster import cta_rank
from ...common.ptx.compiler import opaque
from ...common.ptx.convert import pack, unpack
from ...common.ptx.memory import load_shared, shared_address, store_global, store_shared
from ...common.scheduler import SingleTileScheduler, TileQueue
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ...common.spec import WARP_SIZE
from ...common.tma import BOX, boxes, load_boxes
from .. import ds_tiles
from ..parts import fragments
from ..parts.arguments import FakeArguments
from ..parts.gradient import PROBABILITY_UNIT, score_gradients
from ..parts.softmax import Scaling
from ..parts.visibility import Visibility
from ..parts.work import TileMap, Work, following, head_and_split, tiles_of_keys
from ..spec import Sm90BackwardSpec
from ..statistics import padded_start
from .key_loads import QueryLoads, key_rows, query_rows
from .key_tiles import mask_queries, of_columns, partial_offset, store_partial_row
from .mma import ROWS, WARPGROUP, WARPGROUP_WARPS, held_rows, start_output, start_scores_of_held
from .score_tile import STEP, exponentiate, keep_pairs, word
from .store import group_barrier, store_staged

VALUE = Role("value", range(0, WARPGROUP_WARPS))
KEY = Role("key", range(len(VALUE), 2 * WARPGROUP_WARPS))
CONSUMERS = Role("consumers", range(0, 2 * WARPGROUP_WARPS))
LOAD = Role("load", range(len(CONSUMERS), len(CONSUMERS) + 1))

# Registers of a thread. All 384 threads start with 168, and the load warp's warpgroup gives some
# up.
LOAD_REGISTERS, CONSUMER_REGISTERS = 24, 240
assert LOAD_REGISTERS + 2 * CONSUMER_REGISTERS <= 3 * 168

BOTH_BARRIER = 3  # the named barrier of both warpgroups; 0 to 2 are taken
OPERANDS = {VALUE.name: ("q", "do"), KEY.name: ("do", "q")}  # the edges of Y and Z


@dataclass(frozen=True)
class Stages:
    """The number of stages, and the columns in registers.

    Attributes:
        q, do: stages of Q, and of dO. S^T of a tile may start before dS^T Q of the previous tile,
            so Q has more stages than dO.
        held_k, held_v: columns of K, and of V, in registers.
        overlaid: the last stage of Q overwrites the columns of K and V that have moved to
            registers. Otherwise shared memory would be too small.
    """

    q: int
    do: int
    held_k: int
    held_v: int
    overlaid: bool = False


STAGES = {
    (256, 256): Stages(3, 2, 128, 128, overlaid=True),
    (192, 128): Stages(4, 3, 192, 128),
}


def edges(stages: Stages, persistent: bool) -> tuple[Edge, ...]:
    """The edges in the order in which a tile meets them. A use of Q, dO or P' is a tile of queries.
    A use of K or V is a tile of keys."""
    q, do = stages.q, stages.do
    held = Edge("held", CONSUMERS, LOAD, 1, Kind.WARPS, Reach.EACH, "the last stage of Q")
    kept = Edge("x_empty", CONSUMERS, LOAD, 1, Kind.WARPS, payload="the places of K and V")
    return (
        *TileQueue.edges(LOAD, CONSUMERS),
        Edge("k_full", LOAD, VALUE, 1, Kind.BYTES, payload="K"),
        Edge("v_full", LOAD, KEY, 1, Kind.BYTES, payload="V"),
        *((held,) if stages.overlaid else ()),
        *((kept, *PairNumbers.edges(LOAD)) if persistent else ()),
        Edge("q_full", LOAD, CONSUMERS, q, Kind.BYTES, payload="Q and lse"),
        Edge("q_empty", CONSUMERS, LOAD, q, Kind.WARPS, Reach.EACH, "their stage"),
        Edge("do_full", LOAD, CONSUMERS, do, Kind.BYTES, payload="dO and delta"),
        Edge("do_empty", CONSUMERS, LOAD, do, Kind.WARPS, Reach.EACH, "their stage"),
        # P' of use n is read before Q of use n is released. The next P' in the same stage needs
        # Q's stage.
        Edge("p_full", VALUE, KEY, q, Kind.WARPS, payload="P'^T"),
    )


class Arguments(NamedTuple):
    """The kernel's arguments. `FakeArguments` has the shapes.

    Each split of a group counts as a K/V head. A call has `num_split_heads` such heads.

    Attributes:
        stats: lse and delta of the query rows; see `statistics`.
        ds: dS of the call's query heads and keys; see `ds_tiles`.
        dk, dv: gradients, or float32 sums of the splits.
        first_split_head: the first split head of the call.
        first_block, num_blocks: the call's blocks of tile_n keys of each sequence.
        num_clusters: how many clusters are resident at once.
        counter: the next tile of persistent clusters, `[1]`; None without persistent clusters.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    stats: cute.Tensor
    ds: cute.Tensor | None
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
    first_split_head: Int32
    num_split_heads: Int32
    first_block: Int32
    num_blocks: Int32
    num_clusters: Int32
    counter: cute.Tensor | None


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors that the device code reads and writes.

    Attributes:
        q_tma, k_tma, v_tma, do_tma: TMA's copies into shared memory.
        q, k, v, do: the tensors' coordinates for TMA.
        dk_tma, dv_tma: TMA's stores; None where the sums of splits are stored.
        dk, dv: the gradients' coordinates for TMA, or the sums of the splits.
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
    ds: cute.Tensor | None
    num_splits: Int32
    first_split_head: Int32
    first_block: Int32
    softmax_scale: Float32
    num_tiles: Int32 | None
    counter: cute.Tensor | None


@dataclass(frozen=True)
class Consumer(Carried):
    """The values that a warp of the value or key warpgroup keeps throughout the kernel.

    Attributes:
        warp: the warp's number in its warpgroup.
        x, x_first: shared addresses of K or V. `x` is such that the first columns would precede the
            other columns; the first columns are at `x_first` until they are in registers.
        y, z: shared addresses of the rings of Q and dO, or of dO and Q.
        stats: shared address of the ring of lse or delta.
        exchange: shared address of the lane's words in the ring of P'.
        held: registers of the first columns of X as an operand.
        t: registers of T.
        words: registers of T' as an operand.
        acc: accumulators of dV or dK.
        taken: the number of earlier tiles of keys.
    """

    warp: Int32
    barriers: Barriers
    queue: TileQueue
    tiles: TileMap
    x: Int32
    x_first: Int32
    y: Int32
    z: Int32
    stats: Int32
    exchange: Int32
    held: cute.Tensor
    t: cute.Tensor
    words: cute.Tensor
    acc: cute.Tensor
    scaling: Scaling
    visible: Visibility
    taken: Int32 | int = 0


# Tiles of queries that a persistent load warp loads before K and V. The previous tile of keys still
# uses the memory of K and V.
KV_AFTER = 2


class Sm90WideDkDv:
    """The kernel for one Sm90BackwardSpec; see the module's docstring."""

    def __init__(self, spec: Sm90BackwardSpec):
        if spec.tile_n != CTAS * ROWS:
            raise ValueError(f"tile_n is {spec.tile_n}, must be {CTAS * ROWS}")
        if spec.tile_m != ROWS:
            raise ValueError(f"tile_m is {spec.tile_m}, must be {ROWS}")
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.unit = PROBABILITY_UNIT.get(self.dtype, 1.0)
        self.out_dtype = Float32 if spec.partial else self.dtype
        self.stages = stages = STAGES[spec.head_dim, spec.head_dim_v]
        # A persistent cluster handles several tiles of keys. The load warp loads the next tile's Q
        # and dO while consumers finish a tile. So dK and dV are staged in the memory of K and V.
        self.persistent = spec.scheduler == "counter"
        if self.persistent and stages.overlaid:
            raise ValueError("scheduler is 'counter', must be 'single' where Q overlays K and V")
        self.scheduler = PairCounterScheduler if self.persistent else SingleTileScheduler
        # `bytes` of a stage are by the edge's name. By the role's name: `columns` of X and Y,
        # `out_columns` of the accumulator, and the columns of X that are `held` in registers.
        self.bytes = {"q": 2 * spec.tile_m * spec.head_dim, "do": 2 * spec.tile_m * spec.head_dim_v}
        self.columns = {VALUE.name: spec.head_dim, KEY.name: spec.head_dim_v}
        self.out_columns = {VALUE.name: spec.head_dim_v, KEY.name: spec.head_dim}
        self.held = {VALUE.name: stages.held_k, KEY.name: stages.held_v}
        self.stats_bytes = 4 * spec.tile_m
        self.p_bytes = 2 * spec.tile_m * ROWS
        self.pipeline = Pipeline(*edges(stages, self.persistent))
        q, do, at = spec.tile_m * spec.head_dim, spec.tile_m * spec.head_dim_v, SWIZZLE_ALIGNMENT
        k, v = ROWS * spec.head_dim, ROWS * spec.head_dim_v
        of_q, of_k, of_v = "Q; dV and dK", "K", "V"
        if stages.overlaid:
            k, v = k - stages.held_k * ROWS, v - stages.held_v * ROWS
            of_q = "Q; at first columns of K and V; dV and dK"
            of_k, of_v = "the other columns of K", "the other columns of V"
        self.smem = SharedMemory(
            Buffer("q", self.dtype, q, stages.q, at, of_q),
            Buffer("k", self.dtype, k, 1, at, of_k),
            Buffer("v", self.dtype, v, 1, at, of_v),
            Buffer("do", self.dtype, do, stages.do, at, "dO"),
            Buffer("p", self.dtype, spec.tile_m * ROWS, stages.q, holds="P'^T"),
            Buffer("lse", Float32, spec.tile_m, stages.q, holds="lse of queries"),
            Buffer("delta", Float32, spec.tile_m, stages.do, holds="delta of queries"),
            TileQueue.buffer(Work),
            *((PairNumbers.buffer(),) if self.persistent else ()),
            Buffer("barriers", Int64, self.pipeline.count),
        )
        self.q_rows, self.do_rows = query_rows(spec)
        self.k_rows, self.v_rows = key_rows(spec, ROWS)

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.smem, self.pipeline, (VALUE, KEY, LOAD), shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        fake = FakeArguments(self.spec, self.spec.head_dim, self.spec.head_dim_v)
        dk, dv = (fake.k_partial, fake.v_partial) if self.spec.partial else (fake.k, fake.v)
        ds = fake.ds_tiles() if self.spec.stores_ds else None
        counter = fake.counter() if self.persistent else None
        given = {"ds": ds, "dk": dk(), "dv": dv(), "counter": counter}
        return placeholders(fake.arguments(Arguments, **given))

    # -- host ---------------------------------------------------------------------------------

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        spec = self.spec
        tiles = tiles_of_keys(
            a, spec.tile_n, 2 * (spec.head_dim + spec.head_dim_v),  # Q and dO
            heads=a.num_split_heads,
            first_block=a.first_block, num_blocks=a.num_blocks,
        ).balanced(spec, a.num_clusters)  # fmt: skip
        visible = Visibility.of(spec, spec.tile_m, spec.tile_n, 1, a.window_left, a.window_right)
        scaling = Scaling.of(a.softmax_scale, a.softcap if spec.softcap else None)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_for_both = cpasync.CopyBulkTensorTileG2SMulticastOp()
        q_tma, q = self.q_rows.atom(load_for_both, a.q)
        k_tma, k = self.k_rows.atom(load, a.k)
        v_tma, v = self.v_rows.atom(load, a.v)
        do_tma, do = self.do_rows.atom(load_for_both, a.do)
        dk_tma, dk, dv_tma, dv = None, a.dk, None, a.dv
        if cutlass.const_expr(not spec.partial):
            dk_tma, dk = self.k_rows.atom(store, a.dk)
            dv_tma, dv = self.v_rows.atom(store, a.dv)
        x = Operands(
            q_tma, q, k_tma, k, v_tma, v, do_tma, do, dk_tma, dk, dv_tma, dv, a.stats, a.ds,
            a.num_splits, a.first_split_head, a.first_block, a.softmax_scale,
            tiles.count() if self.persistent else None, a.counter,
        )  # fmt: skip
        self.kernel(x, tiles, visible, scaling).launch(
            grid=[CTAS * self.scheduler.clusters(tiles.count(), a.num_clusters), 1, 1],
            block=[3 * WARPGROUP, 1, 1],
            cluster=[CTAS, 1, 1],
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
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        if warp >= LOAD.warps[0]:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == LOAD.warps[0]:
                self.load_warp(x, storage, barriers, tiles, visible)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            queue = TileQueue(Work, storage.work, barriers)
            if warp < KEY.warps[0]:
                own = self.consumer(storage, queue, tiles, warp, VALUE, visible, scaling)
                self.consumer_warps(x, own, storage, VALUE)
            else:
                own = self.consumer(storage, queue, tiles, warp, KEY, visible, scaling)
                self.consumer_warps(x, own, storage, KEY)
        # Neither CTA may end while the other CTA signals it or copies to it.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def consumer(
        self, storage: Pointers, queue: TileQueue, tiles: TileMap, warp: Int32, role: Role,
        visible: Visibility, scaling: Scaling,
    ) -> Consumer:  # fmt: skip
        spec = self.spec
        _, x, first = self.x_places(role, storage)
        y, z, stats = (
            (storage.q, storage.do, storage.lse)
            if role is VALUE
            else (storage.do, storage.q, storage.delta)
        )
        held_bytes = 2 * self.held[role.name] * ROWS
        warp = warp - role.warps[0]
        lane = warp * WARP_SIZE + cute.arch.lane_idx()
        return Consumer(
            warp=warp,
            barriers=queue.barriers,
            queue=queue,
            tiles=tiles,
            x=shared_address(x) - (held_bytes if self.stages.overlaid else 0),
            x_first=shared_address(first),
            y=shared_address(y),
            z=shared_address(z),
            stats=shared_address(stats),
            exchange=shared_address(storage.p) + lane * 16,
            held=cute.make_rmem_tensor((self.held[role.name] // 4,), Int32),
            t=fragments.accumulators(spec.tile_m),
            words=cute.make_rmem_tensor((spec.tile_m // 4,), Int32),
            acc=fragments.accumulators(self.out_columns[role.name]),
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
        """Publish the cluster's tile, and load the tile's operands."""
        queries = QueryLoads.of(self.spec, storage, barriers, multicast=True)
        queue = TileQueue(Work, storage.work, barriers)
        if cutlass.const_expr(self.persistent):
            queue.fill(
                PairCounterScheduler(x.num_tiles, PairNumbers.of(barriers, storage, x.counter)),
                tiles,
                lambda where, published, loaded: self.load_tile(
                    x, storage, queries, queue, tiles, visible, where, published, loaded
                ),
            )  # fmt: skip
        else:
            queue.fill_with_one(
                tiles,
                lambda where: self.load_tile(x, storage, queries, queue, tiles, visible, where),
            )

    @cute.jit
    def load_tile(
        self, x: Operands, storage: Pointers, queries: QueryLoads, queue: TileQueue,
        tiles: TileMap, visible: Visibility, where: list[Int32], published: Int32 | int = 0,
        loaded: Int32 | int = 0,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Publish the cluster's tile. Load the CTA's K and V. Then load, head by head, the CTA's
        part of the queries that see some of the cluster's keys. Return how many tiles of keys and
        of queries this warp has loaded so far."""
        spec, barriers, stages = self.spec, queue.barriers, self.stages
        block, split_head, sequence = where
        work = tiles.work(block, x.first_split_head + split_head, sequence)
        queue.publish_work(published, work)
        kv_head, _ = head_and_split(work, x.num_splits, spec.partial)
        keys = (work.block * CTAS + cta_rank(), kv_head, *work.keys[1:])
        if cutlass.const_expr(not self.persistent):
            self.load_kv(x, keys, storage, barriers, published)
        first, end = visible.query_tiles(work.block, work.seqlen_q, work.seqlen_k)
        stats_start = padded_start(tiles.queries, work.sequence)
        tile, head = first, work.head
        count = (end - first) * tiles.group
        for i in cutlass.range(count, unroll=1):
            n = loaded + i if self.persistent else i
            if cutlass.const_expr(self.persistent):
                if i == KV_AFTER:
                    self.load_kv(x, keys, storage, barriers, published)
            row = stats_start + tile * spec.tile_m
            if cutlass.const_expr(stages.overlaid):
                if n == stages.q - 1:
                    barriers.wait("held", 0)
            queries.load("q", x, work, tile, head, row, n)
            queries.load("do", x, work, tile, head, row, n)
            tile, head = following(tile, head, first, end)
        if cutlass.const_expr(self.persistent):
            count = cutlass.max(count, 0)
            if count <= KV_AFTER:
                self.load_kv(x, keys, storage, barriers, published)
        return published + 1, loaded + count

    @cute.jit
    def load_kv(
        self, x: Operands, keys: tuple[Any, ...], storage: Pointers, barriers: Barriers,
        published: Int32,
    ) -> None:  # fmt: skip
        """Load K and V of the CTA's tile number `published` of keys."""
        if cutlass.const_expr(self.persistent):
            barriers.wait_previous("x_empty", published)
        of_k, of_v = self.k_rows.box(x.k, *keys), self.v_rows.box(x.v, *keys)
        self.load_x(VALUE, x.k_tma, of_k, storage, barriers, published)
        self.load_x(KEY, x.v_tma, of_v, storage, barriers, published)

    def load_x(
        self, role: Role, tma: cute.CopyAtom, rows: cute.Tensor, storage: Pointers,
        barriers: Barriers, n: Int32 | int,
    ) -> None:  # fmt: skip
        """Load X of a warpgroup: K or V of the CTA's keys."""
        edge, x, first = self.x_places(role, storage)
        columns, held = self.columns[role.name], self.held[role.name]
        with cute.arch.elect_one():
            barriers.expect(edge, n, 2 * ROWS * columns)
        parts = (first, x) if self.stages.overlaid else (x,)
        shape = (ROWS, held if self.stages.overlaid else columns)
        for part, buffer in enumerate(parts):
            smem = boxes(buffer, ROWS, (shape[1] // BOX, ROWS * BOX), (1, 0))
            load_boxes(tma, cute.local_tile(rows, shape, (0, part)), smem, barriers, edge, Int32(n))

    def x_places(self, role: Role, storage: Pointers) -> tuple[str, cute.Pointer, cute.Pointer]:
        """The edge of X, the buffer of X, and the buffer of X's first columns. With
        `stages.overlaid`, the buffer of X has only the other columns; the first columns are in the
        last stage of Q until they are in registers."""
        edge, x = ("k_full", storage.k) if role is VALUE else ("v_full", storage.v)
        if not self.stages.overlaid:
            return edge, x, x
        first = storage.q + (self.stages.q - 1) * (self.bytes["q"] // 2)
        return edge, x, first + (0 if role is VALUE else self.stages.held_k * ROWS)

    # -- device: products ---------------------------------------------------------------------

    @cute.jit
    def consumer_warps(
        self, x: Operands, own: Consumer, storage: Pointers, role: cutlass.Constexpr[Role]
    ) -> None:
        queue = own.queue
        if cutlass.const_expr(self.persistent):
            taken, n = Int32(0), Int32(0)
            queue.wait(taken)
            work = queue.read(taken)
            while work.exists:
                n = self.tile_of_keys(x, replace(own, taken=taken), storage, work, role, n)
                queue.release(taken)
                taken += 1
                queue.wait(taken)
                work = queue.read(taken)
        else:
            queue.wait(0)
            work = queue.read(0)
            if work.exists:
                self.tile_of_keys(x, own, storage, work, role, None)

    @cute.jit
    def tile_of_keys(
        self,
        x: Operands,
        own: Consumer,
        storage: Pointers,
        work: Work,
        role: cutlass.Constexpr[Role],
        n: Int32 | None,
    ) -> Int32 | None:
        """Compute and store dV or dK of a tile of keys.

        Args:
            n: tiles of queries before this tile of keys; None if the cluster has no earlier tile.

        Returns:
            The number of tiles of queries so far; None if n is None.
        """
        own.acc.fill(0.0)
        own.barriers.wait(self.x_places(role, storage)[0], own.taken)
        fragments.assign(own.held, held_rows(own.x_first, own.warp, ROWS, self.held[role.name]))
        if cutlass.const_expr(self.stages.overlaid):
            # No register of ldmatrix has been used yet. Without the fence, the arrival
            # overtakes the ldmatrix, and TMA overwrites data that the ldmatrix has yet to read.
            cute.arch.fence_view_async_shared()
            own.barriers.warp_arrives("held", 0)
        first, end = own.visible.query_tiles(work.block, work.seqlen_q, work.seqlen_k)
        if first < end:
            self.compute_tile(x, own, work, first, end, (end - first) * own.tiles.group, role, n)
        # Registers are scarce, so each place of use reads the work again.
        work = own.queue.read(own.taken)
        factor = x.softmax_scale if cutlass.const_expr(role is KEY) else Float32(self.unit)
        if cutlass.const_expr(role is KEY or self.unit != 1.0):
            fragments.scale_rows(own.acc, [factor] * fragments.LANE_ROWS)
        if cutlass.const_expr(self.spec.partial):
            self.store_partial(x, own, work, role)
        else:
            self.store_tile(x, own, storage, work, role)
        if cutlass.const_expr(self.persistent):
            # TMA will overwrite the K and V that this warp has read.
            cute.arch.fence_view_async_shared()
            own.barriers.warp_arrives("x_empty", own.taken)
            n += cutlass.max(end - first, 0) * own.tiles.group
        return n

    @cute.jit
    def compute_tile(
        self,
        x: Operands,
        own: Consumer,
        work: Work,
        first: Int32,
        end: Int32,
        count: Int32,
        role: cutlass.Constexpr[Role],
        base: Int32 | None,
    ) -> None:
        """Compute dV or dK from `count` tiles of queries. `base` is the number of earlier tiles of
        queries, or None if the cluster has no earlier tile of keys."""
        # Whole tiles of queries need no mask, because every query sees every key of the CTA.
        whole_first, whole_end = own.visible.whole_query_tiles(
            self.first_key(work), ROWS, work.seqlen_q, work.seqlen_k
        )
        stores = cutlass.const_expr(self.spec.stores_ds and role is KEY)
        at = Int32(0)  # index of the head's tile 0 among the tiles of dS
        if cutlass.const_expr(stores):
            # A key past the end of the sequence would add to dQ.
            inside = self.first_key(work) + ROWS <= work.seqlen_k
            whole_end = cutlass.select_(inside, whole_end, Int32(0))
            at = (work.head - x.first_split_head * own.tiles.group) * x.ds.shape[1]
            at += padded_start(own.tiles.queries, work.sequence) // ds_tiles.TILE
            at = at * x.ds.shape[2] + (work.block - x.first_block) * CTAS + cta_rank()
        tile = first
        masked = tile < whole_first or tile >= whole_end
        start = Int32(0) if base is None else base
        self.next_query_tile(own, tile, start, masked, role, True)
        if cutlass.const_expr(stores):
            self.store_ds(x, own, at + tile * x.ds.shape[2])
        for i in cutlass.range(1, count, unroll=1):
            n = i if base is None else base + i
            last = tile + 1 == end
            tile = cutlass.select_(last, first, tile + 1)
            masked = tile < whole_first or tile >= whole_end
            self.next_query_tile(own, tile, n, masked, role, False)
            if cutlass.const_expr(stores):
                at = cutlass.select_(last, at + x.ds.shape[1] * x.ds.shape[2], at)
                self.store_ds(x, own, at + tile * x.ds.shape[2])
        _, z = OPERANDS[role.name]
        last_use = count - 1 if base is None else base + count - 1
        second = self.start_second(own, z, last_use, role)
        fragments.assign(own.acc, wgmma.wait(second))
        own.barriers.warp_arrives(f"{z}_empty", last_use)

    @cute.jit
    def next_query_tile(
        self,
        own: Consumer,
        tile: Int32,
        n: Int32,
        masked: Boolean,
        role: cutlass.Constexpr[Role],
        starts: cutlass.Constexpr[bool],
    ) -> None:
        """Compute T' of use n, beside the product T' Z of use n - 1. With `starts` no use comes
        before."""
        barriers = own.barriers
        y, z = OPERANDS[role.name]
        barriers.wait(f"{y}_full", n)
        first = self.start_first(own, y, n, role)
        if cutlass.const_expr(not starts):
            second = self.start_second(own, z, n - 1, role)
        fragments.assign(own.t, wgmma.wait(first, pending=0 if starts else 1))
        stats = own.stats + barriers.stage(f"{y}_full", n) * self.stats_bytes
        if cutlass.const_expr(role is VALUE):
            exponentiate(
                own.t, lambda columns: of_columns(stats, columns), own.scaling,
                lambda *p: self.keep_probabilities(own, n, *p), softcap=self.spec.softcap,
                unit=self.unit,
            )  # fmt: skip
        else:
            barriers.wait("p_full", n)
            self.keep_score_gradients(own, n, stats)
        if cutlass.const_expr(not starts):
            # T' goes through the wait, so that the compiler does not round T' earlier, into
            # registers of the product in flight.
            done = wgmma.wait([*second, *fragments.values(own.t)])
            fragments.assign(own.acc, done[: len(second)])
            fragments.assign(own.t, done[len(second) :])
            barriers.warp_arrives(f"{z}_empty", n - 1)
        fragments.assign(own.words, fragments.operand(own.t, self.dtype))
        if cutlass.const_expr(role is VALUE):
            if cutlass.const_expr(not self.spec.softcap):
                for columns, lane_row in self.parts():
                    words = [own.words[word(lane_row, j)] for j in columns[::2]]
                    self.hand_over(own, n, lane_row, columns, words)
            barriers.warp_arrives("p_full", n)
        if masked:
            self.mask(own, tile, own.words, bounded=self.spec.stores_ds and role is KEY)
        barriers.warp_arrives(f"{y}_empty", n)

    def start_first(self, own: Consumer, y: str, n: Int32, role: Role) -> list[Any]:
        """Start T = X Y^T, with use n of Y."""
        spec = self.spec
        stage = own.barriers.stage(f"{y}_full", n) * self.bytes[y]
        return start_scores_of_held(
            self.dtype, fragments.values(own.held), opaque(own.x), own.y + stage,
            tile_m=ROWS, tile_n=spec.tile_m, head_dim=self.columns[role.name],
        )  # fmt: skip

    def start_second(self, own: Consumer, z: str, n: Int32, role: Role) -> list[Any]:
        """Start the accumulators + T' Z, with use n of Z."""
        spec = self.spec
        own.barriers.wait(f"{z}_full", n)
        stage = own.barriers.stage(f"{z}_full", n) * self.bytes[z]
        return start_output(
            self.dtype, fragments.values(own.acc), fragments.values(own.words), own.z + stage,
            tile_n=spec.tile_m, head_dim=self.out_columns[role.name],
        )  # fmt: skip

    def keep_probabilities(
        self, own: Consumer, n: Int32, lane_row: int, columns: range, p: list[Any],
        with_slope: list[Any],
    ) -> None:  # fmt: skip
        """Replace S^T by P^T. P^T is rounded once the product with the previous P^T is done. If P'
        differs from P, P' is handed over at once."""
        keep_pairs(own.t, lane_row, columns, p)
        if self.spec.softcap:
            words = [pack(self.dtype, *pair) for pair in with_slope]
            self.hand_over(own, n, lane_row, columns, words)

    def parts(self) -> list[tuple[range, int]]:
        """The columns and lane rows of each part of P'. Each part is handed over as four words."""
        count = self.spec.tile_m // fragments.LANES
        starts = range(0, count, STEP)
        return [(range(i, i + STEP), row) for i in starts for row in range(fragments.LANE_ROWS)]

    def hand_over(
        self, own: Consumer, n: Int32, lane_row: int, columns: range, words: list[Any]
    ) -> None:
        """Store a part of P' of use n, for the thread of the key warpgroup with the same rows."""
        store_shared(Int32, self.exchange(own, n, lane_row, columns), words)

    def keep_score_gradients(self, own: Consumer, n: Int32, stats: Int32) -> None:
        """Replace dP^T by dS^T. A hidden pair of query and key may have any P'."""
        for columns, lane_row in self.parts():
            words = load_shared(Int32, self.exchange(own, n, lane_row, columns), 4)
            p = [unpack(self.dtype, x) for x in words]
            row = own.t[None, lane_row, None]
            delta = of_columns(stats, columns)[lane_row]
            ds = score_gradients(p, row, columns, delta, packed=False, unit=self.unit)
            keep_pairs(own.t, lane_row, columns, ds)

    def exchange(self, own: Consumer, n: Int32, lane_row: int, columns: range) -> Int32:
        """The shared address of a lane's part of P' of use n."""
        part = columns.start // STEP * fragments.LANE_ROWS + lane_row
        stage = own.barriers.stage("p_full", n) * self.p_bytes
        return own.exchange + stage + part * (WARPGROUP * 16)

    def first_key(self, work: Work) -> Int32:
        """The CTA's first key."""
        return (work.block * CTAS + cta_rank()) * ROWS

    def key(self, own: Consumer, work: Work, lane_row: int) -> Int32:
        """A lane row's key."""
        first = self.first_key(work) + fragments.first_row(own.warp)
        return first + lane_row * fragments.LANE_ROW_STEP

    def store_ds(self, x: Operands, own: Consumer, tile: Int32) -> None:
        """Store the warp's rows of dS^T to a tile in global memory."""
        ds = x.ds.iterator.toint() + Int64(tile) * ds_tiles.TILE_BYTES
        first = ds_tiles.lane_offset(own.warp, opaque(cute.arch.lane_idx()))
        for half in range(2):  # halves of the queries
            at = ds + Int64(first ^ half * (4 * ds_tiles.UNIT_BYTES))
            for lane_row in range(fragments.LANE_ROWS):
                to = at + lane_row * (fragments.LANE_ROW_STEP * ds_tiles.ROW_BYTES)
                words = [own.words[word(lane_row, 8 * half + j)] for j in range(0, 8, 2)]
                store_global(Int32, to, words)

    def mask(self, own: Consumer, tile: Int32, words: cute.Tensor, *, bounded: bool) -> None:
        """Set the columns of queries that do not see a row's key to 0. `mask_queries` explains
        `bounded`."""
        work = own.queue.read(own.taken)
        keys = [self.key(own, work, lane_row) for lane_row in range(fragments.LANE_ROWS)]
        mask_queries(words, keys, tile, own.visible, work, bounded=bounded)

    # -- device: epilogue ---------------------------------------------------------------------

    @cute.jit
    def store_tile(
        self,
        x: Operands,
        own: Consumer,
        storage: Pointers,
        work: Work,
        role: cutlass.Constexpr[Role],
    ) -> None:
        """Store the CTA's rows of dV or dK by TMA, from two stages of Q. A persistent cluster
        stages the rows in the memory of V or K instead."""
        if cutlass.const_expr(role is VALUE):
            group, tma, out, boxed = 0, x.dv_tma, x.dv, self.v_rows
        else:
            group, tma, out, boxed = 1, x.dk_tma, x.dk, self.k_rows
        staged, stage, stages = storage.q, group, 2
        if cutlass.const_expr(self.persistent):
            staged, stage, stages = storage.v if role is VALUE else storage.k, 0, 1
        # Both warpgroups are done with Q, and with the shared memory of K and V.
        meet(BOTH_BARRIER, 2 * WARPGROUP)
        words = fragments.operand(own.acc, self.dtype)
        at = shared_address(staged) + stage * self.bytes["q"]
        fragments.stage_rows(words, at, own.warp, ROWS, opaque(cute.arch.lane_idx()))
        cute.arch.fence_view_async_shared()
        group_barrier(group)
        if own.warp == 0:
            rows = boxed.box(out, work.block * CTAS + cta_rank(), *work.keys, stored=True)
            with cute.arch.elect_one():
                columns = self.out_columns[role.name]
                store_staged(tma, rows, staged, stage, stages, ROWS, columns)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_partial(
        self, x: Operands, own: Consumer, work: Work, role: cutlass.Constexpr[Role]
    ) -> None:
        """Store the CTA's rows of a split's partial sums."""
        out = x.dv if cutlass.const_expr(role is VALUE) else x.dk
        head, split = head_and_split(work, x.num_splits, self.spec.partial)
        for lane_row in cutlass.range_constexpr(fragments.LANE_ROWS):
            key = self.key(own, work, lane_row)
            if key < work.seqlen_k:
                offset = partial_offset(out, split, work, key, head, own.tiles.batch, self.spec)
                store_partial_row(own.acc, lane_row, out, offset)
