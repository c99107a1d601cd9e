"""The gradient of q for SM90, at head_dim 64, 128, 192 and 256: wgmma, TMA, warp-specialised.

A CTA computes dQ of a tile of query rows, 64 for each of two consumer warpgroups, over the K/V
tiles that the rows see.

    S = Q K^T            64 x tile_n a warpgroup     Q and K in shared memory
    P = exp(c S - lse)                               in registers
    dP = dO V^T          64 x tile_n                 dO and V in shared memory
    dS = P' * (dP - delta)                           in registers
    dQ += dS K           64 x head_dim               dS and dQ in registers

P' is P; with a softcap, P' is P times the slope of the cap. A warpgroup starts S of the next K/V
tile before this tile's dS K, and computes P while dS K and dP run. At head_dim 256, where shared
memory has no third K tile, dS K comes first, so that its K tile can be replaced a product earlier.

    warps    role         work on a tile of queries
    0-7      consumers    compute all of the above; at the end store dQ by TMA
    8        load         finds the next tile; loads Q and dO, then each K/V tile, by TMA

dQ is staged in the buffer of Q. The load warp's warpgroup gives its registers to the consumers;
its three other warps idle.
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
from ...common.numbers import INF
from ...common.pipeline import Barriers, Edge, Kind, Pipeline, Role, report_names
from ...common.ptx import wgmma
from ...common.ptx.compiler import opaque
from ...common.ptx.memory import shared_address
from ...common.scheduler import CounterScheduler, TileQueue
from ...common.sequences import Sequences
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ...common.tma import BOX, BoxedRows, load_use
from .. import configs
from ..parts import fragments
from ..parts.arguments import FakeArguments
from ..parts.softmax import Scaling
from ..parts.visibility import Visibility
from ..parts.work import TileMap, Work, heads_in_l2
from ..spec import Sm90BackwardSpec
from ..statistics import DELTA, LSE, padded_start
from .key_loads import key_rows, ring
from .mma import ROWS, WARPGROUP, WARPGROUP_WARPS, start_output, start_scores
from .score_tile import ScoreTile
from .store import group_barrier, store_staged

WARPGROUPS = 2
CONSUMERS = Role("consumers", range(0, WARPGROUPS * WARPGROUP_WARPS))
LOAD = Role("load", range(len(CONSUMERS), len(CONSUMERS) + 1))

REGISTERS = 3 * 168  # all 384 threads start with 168; the load warp's warpgroup gives some up


def edges(k_stages: int, v_stages: int) -> tuple[Edge, ...]:
    """The edges in the order in which a tile meets them. A use is a tile of queries for q and do,
    otherwise a K/V tile."""
    return (
        *TileQueue.edges(LOAD, CONSUMERS),
        Edge("q_full", LOAD, CONSUMERS, 1, Kind.BYTES, payload="Q"),
        Edge("q_empty", CONSUMERS, LOAD, 1, Kind.WARPS, payload="its buffer, with dQ stored"),
        Edge("do_full", LOAD, CONSUMERS, 1, Kind.BYTES, payload="dO"),
        Edge("do_empty", CONSUMERS, LOAD, 1, Kind.WARPS, payload="its buffer"),
        Edge("k_full", LOAD, CONSUMERS, k_stages, Kind.BYTES, payload="K"),
        Edge("k_empty", CONSUMERS, LOAD, k_stages, Kind.WARPS, payload="its stage"),
        Edge("v_full", LOAD, CONSUMERS, v_stages, Kind.BYTES, payload="V"),
        Edge("v_empty", CONSUMERS, LOAD, v_stages, Kind.WARPS, payload="its stage"),
    )


class Arguments(NamedTuple):
    """The kernel's arguments. `FakeArguments` has the shapes.

    Attributes:
        stats: lse and delta of the query rows; see `statistics`.
        num_ctas: how many CTAs are resident at once.
        counter: the next tile of a CounterScheduler, `[1]`.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    stats: cute.Tensor
    dq: cute.Tensor
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    softmax_scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    num_ctas: Int32
    counter: cute.Tensor


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors that the device code reads and writes.

    Attributes:
        q_tma, k_tma, v_tma, do_tma, dq_tma: TMA's copies.
        q, k, v, do, dq: the tensors' coordinates for TMA.
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
    dq_tma: cute.CopyAtom
    dq: cute.Tensor
    stats: cute.Tensor
    softmax_scale: Float32
    num_tiles: Int32
    counter: cute.Tensor


@dataclass(frozen=True)
class Consumer(Carried):
    """The values that a consumer warp keeps throughout the kernel.

    Attributes:
        warp: the warp's number in the CTA.
        group: the number of the warp's warpgroup.
        q, do: shared addresses of the warpgroup's rows of Q and dO.
        k, v: shared addresses of the rings.
        dq: accumulators.
        lse, delta: statistics of the lane's rows.
    """

    warp: Int32
    group: Int32
    barriers: Barriers
    queue: TileQueue
    tiles: TileMap
    q: Int32
    do: Int32
    k: Int32
    v: Int32
    scores: ScoreTile
    dq: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor
    visible: Visibility


class Sm90Dq:
    """The kernel for one Sm90BackwardSpec; see the module's docstring."""

    def __init__(self, spec: Sm90BackwardSpec):
        if spec.tile_m != WARPGROUPS * ROWS:
            raise ValueError(f"tile_m is {spec.tile_m}, must be {WARPGROUPS * ROWS}")
        if spec.partial:
            raise ValueError("partial is True, dq has no partial sums")
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.k_bytes, self.v_bytes = (2 * spec.tile_n * d for d in (spec.head_dim, spec.head_dim_v))
        row = configs.backward("backward_dq", "sm_90a", spec.head_dim, spec.head_dim_v)
        assert row.registers is not None
        self.k_stages, self.v_stages = row.tile.stages, row.v_stages
        self.load_registers, self.consumer_registers = row.registers
        if self.load_registers + WARPGROUPS * self.consumer_registers > REGISTERS:
            raise ValueError(f"registers are {row.registers}, must be at most {REGISTERS} together")
        self.dq_first = self.k_stages < 3
        self.pipeline = Pipeline(*edges(self.k_stages, self.v_stages))
        at, (d, d_v) = SWIZZLE_ALIGNMENT, (spec.head_dim, spec.head_dim_v)
        self.smem = SharedMemory(
            Buffer("q", self.dtype, spec.tile_m * d, 1, at, "Q, then dQ"),
            Buffer("do", self.dtype, spec.tile_m * d_v, 1, at, "dO"),
            Buffer("k", self.dtype, spec.tile_n * d, self.k_stages, at, "K"),
            Buffer("v", self.dtype, spec.tile_n * d_v, self.v_stages, at, "V"),
            TileQueue.buffer(Work),
            Buffer("barriers", Int64, self.pipeline.count),
        )
        self.q_rows, self.do_rows, self.dq_rows = (
            BoxedRows(rows, columns, spec.ragged_q, not spec.varlen_q)
            for rows, columns in ((spec.tile_m, d), (spec.tile_m, d_v), (ROWS, d))
        )
        self.k_rows, self.v_rows = key_rows(spec, spec.tile_n)

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.smem, self.pipeline, (CONSUMERS, LOAD), shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        fake = FakeArguments(self.spec, self.spec.head_dim, self.spec.head_dim_v)
        return placeholders(fake.arguments(Arguments))

    # -- host ---------------------------------------------------------------------------------

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        spec = self.spec
        queries = Sequences(a.q.shape[-3], a.cu_seqlens_q, a.seqused_q)
        keys = Sequences(a.k.shape[-3], a.cu_seqlens_k, a.seqused_k)
        heads, batch = a.q.shape[-2], queries.batch(a.q)
        head_bytes = Int64(keys.tokens) * (2 * (spec.head_dim + spec.head_dim_v))  # K and V
        tiles = TileMap(
            spec.tile_m, 1, spec.window_right, queries, keys, heads, heads // a.k.shape[-2],
            batch, heads_in_l2(head_bytes, heads * batch),
        ).balanced(spec, a.num_ctas)  # fmt: skip
        num_tiles = tiles.count()
        visible = Visibility.of(spec, spec.tile_m, spec.tile_n, 1, a.window_left, a.window_right)
        scaling = Scaling.of(a.softmax_scale, a.softcap if spec.softcap else None)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        x = Operands(
            *self.q_rows.atom(load, a.q), *self.k_rows.atom(load, a.k),
            *self.v_rows.atom(load, a.v), *self.do_rows.atom(load, a.do),
            *self.dq_rows.atom(store, a.dq), a.stats, a.softmax_scale, num_tiles, a.counter,
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
            prepare((x.q_tma, x.k_tma, x.v_tma, x.do_tma, x.dq_tma), barriers)
        cute.arch.sync_threads()

        if warp >= LOAD.warps[0]:
            cute.arch.setmaxregister_decrease(self.load_registers)
            if warp == LOAD.warps[0]:
                self.load_warp(x, storage, barriers, tiles, visible)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            own = self.consumer(storage, barriers, tiles, warp, visible, scaling)
            self.consumer_warps(x, own, storage)

    def consumer(
        self, storage: Pointers, barriers: Barriers, tiles: TileMap, warp: Int32,
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
            q=shared_address(storage.q) + rows,
            do=shared_address(storage.do) + rows,
            k=shared_address(storage.k),
            v=shared_address(storage.v),
            scores=ScoreTile.of(spec, spec.tile_n, scaling, float32=True, rounds_p=False),
            dq=fragments.accumulators(spec.head_dim),
            lse=cute.make_rmem_tensor((fragments.LANE_ROWS,), Float32),
            delta=cute.make_rmem_tensor((fragments.LANE_ROWS,), Float32),
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
        """Publish the CTA's tiles one after the other, and load the tiles' operands."""
        spec = self.spec
        d, d_v = spec.head_dim, spec.head_dim_v
        q_smem, do_smem = (
            ring(buffer, spec.tile_m, columns, 1)
            for buffer, columns in ((storage.q, d), (storage.do, d_v))
        )
        k_smem = ring(storage.k, spec.tile_n, d, self.k_stages)
        v_smem = ring(storage.v, spec.tile_n, d_v, self.v_stages)
        scheduler = CounterScheduler(x.num_tiles, barriers, x.counter.iterator)
        queue = TileQueue(Work, storage.work, barriers)
        smem = q_smem, do_smem, k_smem, v_smem
        queue.fill(
            scheduler, tiles, lambda *tile: self.load_tile(x, smem, queue, tiles, visible, *tile)
        )

    @cute.jit
    def load_tile(
        self, x: Operands, smem: tuple[cute.Tensor, ...], queue: TileQueue, tiles: TileMap,
        visible: Visibility, where: list[Int32], taken: Int32, n: Int32,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """Publish a tile of queries as work `taken`, and load Q, dO and the tile's K/V tiles, which
        are uses n and up. Return the next values of `taken` and n."""
        barriers = queue.barriers
        q_smem, do_smem, k_smem, v_smem = smem
        work = tiles.work(*where)
        queue.publish_work(taken, work)
        queries = self.q_rows.box(x.q, work.block, *work.queries)
        load_use("q", x.q_tma, queries, q_smem, barriers, taken)
        gradients = self.do_rows.box(x.do, work.block, *work.queries)
        load_use("do", x.do_tma, gradients, do_smem, barriers, taken)
        first, end = visible.key_tiles(work.block, work.seqlen_q, work.seqlen_k)
        for i in cutlass.range(first, end, unroll=1):
            keys = self.k_rows.box(x.k, i, *work.keys)
            load_use("k", x.k_tma, keys, k_smem, barriers, n)
            values = self.v_rows.box(x.v, i, *work.keys)
            load_use("v", x.v_tma, values, v_smem, barriers, n)
            n += 1
        return taken + 1, n

    # -- device: products ---------------------------------------------------------------------

    @cute.jit
    def consumer_warps(self, x: Operands, own: Consumer, storage: Pointers) -> None:
        queue = own.queue
        taken = Int32(0)  # counts tiles of queries
        n = Int32(0)  # counts K/V tiles
        queue.wait(taken)
        work = queue.read(taken)
        while work.exists:
            own.dq.fill(0.0)
            self.read_statistics(x, own, work)
            own.barriers.wait("q_full", taken)
            own.barriers.wait("do_full", taken)
            first, end = own.visible.key_tiles(work.block, work.seqlen_q, work.seqlen_k)
            if first < end:
                n = self.compute_tile(own, work, first, end, taken, n)
            own.barriers.warp_arrives("do_empty", taken)
            # Registers are scarce, so each place of use reads the work again.
            work = queue.read(taken)
            queue.release(taken)
            self.finish_rows(x, own)
            self.store_tile(x, own, storage, work)
            own.barriers.warp_arrives("q_empty", taken)
            taken += 1
            queue.wait(taken)
            work = queue.read(taken)
        queue.release(taken)

    def read_statistics(self, x: Operands, own: Consumer, work: Work) -> None:
        """Read the statistics of the lane's rows. Rows past the end of the sequence are padding,
        which exists in memory."""
        start = padded_start(own.tiles.queries, work.sequence)
        for lane_row in range(fragments.LANE_ROWS):
            row = Int64(start + self.row(own, work, lane_row))
            own.lse[lane_row] = x.stats[LSE, work.head, row]
            own.delta[lane_row] = x.stats[DELTA, work.head, row]

    @cute.jit
    def compute_tile(
        self, own: Consumer, work: Work, first: Int32, end: Int32, taken: Int32, n: Int32
    ) -> Int32:
        """Compute dQ of work `taken` over its K/V tiles. n K/V tiles came before; return the number
        after this work."""
        spec = self.spec
        # Whole K/V tiles need no mask, because every query of the warpgroup sees every key.
        whole_first, whole_end = own.visible.whole_key_tiles(
            work.block * spec.tile_m + own.group * ROWS, ROWS, work.seqlen_q, work.seqlen_k
        )
        tile = first
        masked = tile < whole_first or tile >= whole_end
        self.next_key_tile(own, taken, tile, n, masked, True)
        n += 1
        for _ in cutlass.range(end - first - 1, unroll=1):
            tile += 1
            masked = tile < whole_first or tile >= whole_end
            self.next_key_tile(own, taken, tile, n, masked, False)
            n += 1
        dq = self.start_dq(own, n - 1)
        fragments.assign(own.dq, wgmma.wait(dq))
        own.barriers.warp_arrives("k_empty", n - 1)
        return n

    @cute.jit
    def next_key_tile(
        self,
        own: Consumer,
        taken: Int32,
        tile: Int32,
        n: Int32,
        masked: Boolean,
        starts: cutlass.Constexpr[bool],
    ) -> None:
        """Compute dS of use n of K and V, beside the product dS K of use n - 1. With `starts` no
        use comes before."""
        barriers, scores = own.barriers, own.scores
        if cutlass.const_expr(self.dq_first and not starts):
            dq = self.start_dq(own, n - 1)
        barriers.wait("k_full", n)
        s = self.start_scores(own, n)
        if cutlass.const_expr(not self.dq_first and not starts):
            dq = self.start_dq(own, n - 1)
        barriers.wait("v_full", n)
        dp = self.start_dp(own, n)
        if cutlass.const_expr(self.dq_first and not starts):
            fragments.assign(own.dq, wgmma.wait(dq, pending=2))
            barriers.warp_arrives("k_empty", n - 1)
        after_scores = 1 if starts or self.dq_first else 2
        fragments.assign(scores.s, wgmma.wait(s, pending=after_scores))
        scores.exponentiate(lambda _: of_rows(own.lse))
        fragments.assign(scores.dp, wgmma.wait(dp))
        barriers.warp_arrives("v_empty", n)
        if cutlass.const_expr(not self.dq_first and not starts):
            fragments.assign(own.dq, wgmma.wait(dq))
            barriers.warp_arrives("k_empty", n - 1)
        scores.differentiate(lambda _: of_rows(own.delta))
        if masked:
            self.mask(own, taken, tile)

    def start_scores(self, own: Consumer, n: Int32) -> list[Float32]:
        """Start S = Q K^T, with use n of K."""
        stage = own.barriers.stage("k_full", n) * self.k_bytes
        return self.start_over_head_dim(own.q, own.k + stage, self.spec.head_dim)

    def start_dp(self, own: Consumer, n: Int32) -> list[Float32]:
        """Start dP = dO V^T, with use n of V."""
        stage = own.barriers.stage("v_full", n) * self.v_bytes
        return self.start_over_head_dim(own.do, own.v + stage, self.spec.head_dim_v)

    def start_over_head_dim(self, queries: Int32, keys: Int32, columns: int) -> list[Float32]:
        spec = self.spec
        return start_scores(
            self.dtype, opaque(queries), keys,
            tile_m=spec.tile_m, tile_n=spec.tile_n, head_dim=columns,
        )  # fmt: skip

    def start_dq(self, own: Consumer, n: Int32) -> list[Float32]:
        """Start dQ + dS K, with use n of K."""
        spec = self.spec
        stage = own.barriers.stage("k_full", n) * self.k_bytes
        return start_output(
            self.dtype, fragments.values(own.dq), fragments.values(own.scores.ds), own.k + stage,
            tile_n=spec.tile_n, head_dim=spec.head_dim,
        )  # fmt: skip

    def row(self, own: Consumer, work: Work, lane_row: int) -> Int32:
        """The row, in its sequence, that a lane row holds."""
        first = work.block * self.spec.tile_m + fragments.first_row(own.warp)
        return first + lane_row * fragments.LANE_ROW_STEP

    def mask(self, own: Consumer, taken: Int32, tile: Int32) -> None:
        """Set dS of keys that a row does not see to 0."""
        work = own.queue.read(taken)
        lows, highs = [], []
        for lane_row in range(fragments.LANE_ROWS):
            row = self.row(own, work, lane_row)
            low, high = own.visible.keys(row, work.seqlen_q, work.seqlen_k)
            lows.append(low - tile * self.spec.tile_n)
            highs.append(high - tile * self.spec.tile_n)
        fragments.mask_operand(own.scores.ds, highs, lows if self.spec.window_left else None)

    # -- device: epilogue ---------------------------------------------------------------------

    def finish_rows(self, x: Operands, own: Consumer) -> None:
        """Scale dQ. A row that sees no key becomes 0: its dQ may be NaN or infinite, from a hidden
        key that is not finite."""
        for lane_row in range(fragments.LANE_ROWS):
            values = own.dq[None, lane_row, None]
            sees = own.lse[lane_row] != INF
            for j in range(cute.size(values)):
                scaled = values[j] * x.softmax_scale
                values[j] = cutlass.select_(sees, scaled, Float32(0.0))

    @cute.jit
    def store_tile(self, x: Operands, own: Consumer, storage: Pointers, work: Work) -> None:
        """Store the warpgroup's rows of dQ through the buffer of Q, by TMA."""
        spec = self.spec
        # All warps of the warpgroup are done with its rows of Q.
        group_barrier(own.group)
        warp = own.warp % WARPGROUP_WARPS
        words = fragments.operand(own.dq, self.dtype)
        fragments.stage_rows(words, own.q, warp, spec.tile_m, opaque(cute.arch.lane_idx()))
        cute.arch.fence_view_async_shared()
        group_barrier(own.group)
        if warp == 0:
            rows = self.dq_rows.box(
                x.dq, work.block * WARPGROUPS + own.group, *work.queries, stored=True
            )
            with cute.arch.elect_one():
                store_staged(
                    x.dq_tma, rows, storage.q, own.group, WARPGROUPS, spec.tile_m, spec.head_dim
                )
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)


def of_rows(statistics: cute.Tensor) -> list[Float32]:
    """Read the statistics of each lane row."""
    return [statistics[lane_row] for lane_row in range(fragments.LANE_ROWS)]
