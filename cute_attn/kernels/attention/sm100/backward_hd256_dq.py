"""Gradient of q of softmax attention at head_dim 256 for SM100: clusters of two CTAs, MMAs across
both.

A cluster computes dQ of a tile of 256 query rows, over its visible K/V tiles of 128 keys from the
last to the first. Each CTA holds 128 of the rows. Each CTA loads half of the keys of K and V, and K
once more as half of its columns. The MMAs of cta_group::2 read both CTAs' halves.

    S  = Q K^T       256 x 128, K = 256    Q and K in shared memory, S in tensor memory
    dP = dO V^T      256 x 128, K = 256    dO and V in shared memory, dP in tensor memory
    dS = P (dP - delta)                    in place of dP; P = exp(c S - lse), see `gradient`
    dQ = dQ + dS K   256 x 256, K = 128    dS and dQ in tensor memory, K in shared memory

S and dP have one stage each, yet the MMAs need not wait. P of the next K/V tile is made during the
MMAs of dQ and dP, and dS during the MMA of S. At the end dQ is staged in shared memory, in a stage
of the ring of K and V, while the next tile's first S and dP are computed.

    warps    role         work on a tile
    8        load         Q, K_0, dO, V_0, K_1, K_0 by columns, V_1, K_2, ... by TMA
    9        mma          S_0, dP_0, S_1, dQ += dS_0 K_0, dP_1, S_2, ... (CTA 0 issues for both)
    0-7      elementwise  half a row for each thread: S, dP -> dS; at the end dQ -> shared memory
    10       store        dQ by TMA
    11       scheduler    publishes the next tile to all other warps

`EDGES` declares the pipeline; `TMEM`, `Sm100Hd256Dq.smem` and the register counts below
declare the budgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05

from ...common.carried import Carried
from ...common.cluster import finish_cluster, start_cluster
from ...common.dtypes import DTYPE
from ...common.entry import entry, gathered, placeholders
from ...common.numbers import INF
from ...common.pipeline import CTAS, Barriers, Edge, Kind, Pipeline, Reach, Role, report_names
from ...common.ptx.cluster import cta_rank
from ...common.ptx.compiler import keep_branch
from ...common.ptx.convert import pack
from ...common.ptx.tcgen05 import tcgen05_fence_after, tcgen05_fence_before
from ...common.scheduler import CLC_RESPONSE_BYTES, SCHEDULER_CLASSES, TileQueue
from ...common.sequences import Sequences
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ...common.spec import WARP_SIZE
from ...common.tma import BOX, BoxedRows, boxes, load_boxes, store_boxes
from ...common.tmem import Region, TensorMemory, first_columns, row_load, row_store, shifted
from ..parts.arguments import FakeArguments
from ..parts.gradient import probabilities, score_gradients
from ..parts.mask import mask_words
from ..parts.softmax import Scaling
from ..parts.visibility import Visibility
from ..parts.work import TileMap, Work, heads_in_l2
from ..spec import TILE_M, TILE_N, Hd256BackwardSpec
from ..statistics import DELTA, LSE, padded_start
from .epilogue import stage_accumulator
from .mma import (
    accumulator,
    halves_apart,
    issue_mma,
    mma_over_head_dim,
    mma_over_tile,
    over_head_dim,
    over_tile,
    shared_a,
    shared_b,
    tensor_a,
)

ROWS = TILE_M // CTAS  # query rows of a CTA
KEYS = TILE_N // CTAS  # rows of K and V that a CTA loads
HEAD_DIM = 256
OVER_HEAD_DIM, OVER_TILE = over_head_dim(HEAD_DIM), over_tile(HEAD_DIM)
DIMS = HEAD_DIM // CTAS  # columns of K that a CTA loads
COLUMNS = TILE_N // 2  # columns of S and dP of each elementwise thread

KV_STAGES = 3  # uses of a K/V tile: a tile's last use always has the last stage
LAST_STAGE = KV_STAGES - 1
DQ_STAGES = 2  # boxes of dQ that wait for TMA

STEP = 16  # columns whose P is computed together

TMEM = TensorMemory(
    Region("s", TILE_N, holds="S"),
    Region("dp", TILE_N, holds="dP, and dS in its place"),
    Region("dq", HEAD_DIM, holds="dQ"),
    pair=True,
)

# Warps.
ELEMENTWISE = Role("elementwise", range(0, 8))
LOAD, MMA = Role("load", range(8, 9)), Role("mma", range(9, 10))
STORE, SCHEDULER = Role("store", range(10, 11)), Role("scheduler", range(11, 12))
ROLES = (ELEMENTWISE, LOAD, MMA, STORE, SCHEDULER)
WORKERS = Role("all others", range(0, 11))
NUM_WARPS = sum(map(len, ROLES))

# Registers of a thread. All 384 threads start with 168, and warps 8-11 give some up to elementwise.
ELEMENTWISE_REGISTERS, OTHER_REGISTERS = 208, 88
assert 2 * ELEMENTWISE_REGISTERS + OTHER_REGISTERS <= 3 * 168

# The edges in the order in which a tile meets them. A use is a tile with visible keys for Q, dO and
# dQ's columns; a box for staged dQ; K, V or K by columns for "kv"; otherwise a K/V tile. Tiles
# without visible keys use no edge.
EDGES = (
    *TileQueue.edges(SCHEDULER, WORKERS),
    Edge("q_full", LOAD, MMA, 1, Kind.BYTES, Reach.LEADER, "Q"),
    # Other edges imply q_empty and dq_read, through the order of the producers' work. Both edges
    # stay declared, so that a change of the order does not become a race. The edges cost one
    # arrival for each tile of queries.
    Edge("q_empty", MMA, LOAD, 1, Kind.COMMIT, Reach.PAIR, "Q's buffer, after the tile's last S"),
    Edge("do_full", LOAD, MMA, 1, Kind.BYTES, Reach.LEADER, "dO"),
    Edge("do_empty", MMA, LOAD, 1, Kind.COMMIT, Reach.PAIR, "dO's buffer, after the last dP"),
    Edge("kv_full", LOAD, MMA, KV_STAGES, Kind.BYTES, Reach.LEADER, "K, V or K by columns"),
    # For a tile's last use the store warp arrives, once dQ is stored, in place of a commit.
    Edge("kv_empty", MMA, LOAD, KV_STAGES, Kind.COMMIT, Reach.PAIR, "its stage"),
    Edge("s_full", MMA, ELEMENTWISE, 1, Kind.COMMIT, Reach.PAIR, "S"),
    Edge("s_read", ELEMENTWISE, MMA, 1, Kind.WARPS, Reach.LEADER, "S's columns"),
    Edge("dp_full", MMA, ELEMENTWISE, 1, Kind.COMMIT, Reach.PAIR, "dP"),
    Edge("ds_full", ELEMENTWISE, MMA, 1, Kind.WARPS, Reach.LEADER, "dS, in place of dP"),
    Edge("dq_full", MMA, ELEMENTWISE, 1, Kind.COMMIT, Reach.PAIR, "dQ"),
    Edge("dq_read", ELEMENTWISE, MMA, 1, Kind.WARPS, Reach.LEADER, "dQ's columns"),
    Edge("dq_staged", ELEMENTWISE, STORE, DQ_STAGES, Kind.WARPS, payload="a box of dQ"),
    Edge("dq_stored", STORE, ELEMENTWISE, DQ_STAGES, Kind.WARPS, payload="its stage"),
)

Q_BYTES = ROWS * HEAD_DIM * 2
KV_BYTES = KEYS * HEAD_DIM * 2
assert KV_BYTES == TILE_N * DIMS * 2, "K by rows and K by columns share a ring"
assert KV_BYTES == DQ_STAGES * ROWS * BOX * 2, "dQ is staged in a stage of the ring"


class Arguments(NamedTuple):
    """The kernel's arguments. `FakeArguments` has the shapes.

    Attributes:
        stats: lse and delta of the query rows; see `statistics`.
        num_clusters: how many clusters are resident at once.
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
    num_clusters: Int32


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors that the device code reads and writes.

    Attributes:
        q_tma, do_tma, k_tma, v_tma, k_columns_tma, dq_tma: TMA's copies.
        q, do, k, v, k_columns, dq_boxes: the tensors' coordinates for TMA.
        num_tiles: the scheduler's number of tiles.
    """

    q_tma: cute.CopyAtom
    q: cute.Tensor
    do_tma: cute.CopyAtom
    do: cute.Tensor
    k_tma: cute.CopyAtom
    k: cute.Tensor
    v_tma: cute.CopyAtom
    v: cute.Tensor
    k_columns_tma: cute.CopyAtom
    k_columns: cute.Tensor
    dq_tma: cute.CopyAtom
    dq_boxes: cute.Tensor
    dq: cute.Tensor
    stats: cute.Tensor
    softmax_scale: Float32
    num_tiles: Int32


@dataclass(frozen=True)
class Shared(Carried):
    """The values that all warps of a CTA share.

    Attributes:
        s, dp, dq: accumulators in tensor memory.
    """

    storage: Pointers
    barriers: Barriers
    queue: TileQueue
    tiles: TileMap
    visible: Visibility
    s: cute.Tensor
    dp: cute.Tensor
    dq: cute.Tensor


class Sm100Hd256Dq:
    """The kernel for one Hd256BackwardSpec; see the module's docstring."""

    def __init__(self, spec: Hd256BackwardSpec):
        if spec.partial:
            raise ValueError("partial is True, the dQ kernel has no partial sums")
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.scheduler = SCHEDULER_CLASSES[spec.scheduler]
        self.pipeline = Pipeline(*EDGES, *self.scheduler.edges(SCHEDULER))
        self.smem = SharedMemory(
            Buffer("q", self.dtype, ROWS * HEAD_DIM, 1, SWIZZLE_ALIGNMENT, "Q, 128 x 256"),
            Buffer("do", self.dtype, ROWS * HEAD_DIM, 1, SWIZZLE_ALIGNMENT, "dO, 128 x 256"),
            Buffer(
                "kv", self.dtype, KEYS * HEAD_DIM, KV_STAGES, SWIZZLE_ALIGNMENT,
                "K or V, 64 x 256, K, 128 x 128, or dQ, 2 x 128 x 64",
            ),
            TileQueue.buffer(Work),
            Buffer("clc_response", Int32, CLC_RESPONSE_BYTES // 4),
            Buffer("barriers", Int64, self.pipeline.count),
            Buffer("tmem_address", Int32, 1),
        )  # fmt: skip
        self.q_rows = BoxedRows(ROWS, HEAD_DIM, spec.ragged_q, batched=not spec.varlen_q)
        self.k_rows, self.k_columns = (
            BoxedRows(rows, HEAD_DIM, spec.ragged_k, batched=not spec.varlen_k)
            for rows in (KEYS, TILE_N)
        )

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.smem, self.pipeline, ROLES, shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        return placeholders(FakeArguments(self.spec, HEAD_DIM).arguments(Arguments))

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
        head_bytes = Int64(keys.tokens) * (2 * 2 * HEAD_DIM)  # bytes of K and V
        tiles = TileMap(
            TILE_M, 1, spec.window_right, queries, keys, heads, heads // a.k.shape[-2], batch,
            heads_in_l2(head_bytes, heads * batch),
        )  # fmt: skip
        num_tiles = tiles.count()
        visible = Visibility.of(spec, TILE_M, TILE_N, 1, a.window_left, a.window_right)
        scaling = Scaling.of(a.softmax_scale, a.softcap if spec.softcap else None)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        store = cpasync.CopyBulkTensorTileS2GOp()
        x = Operands(
            *self.q_rows.atom(load, a.q), *self.q_rows.atom(load, a.do),
            *self.k_rows.atom(load, a.k), *self.k_rows.atom(load, a.v),
            *self.k_columns.atom(load, a.k), *self.q_rows.atom(store, a.dq), a.dq, a.stats,
            a.softmax_scale, num_tiles,
        )  # fmt: skip
        self.kernel(x, tiles, visible, scaling).launch(
            grid=[CTAS * self.scheduler.clusters(num_tiles, a.num_clusters), 1, 1],
            block=[NUM_WARPS * WARP_SIZE, 1, 1],
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

        copies = (x.q_tma, x.do_tma, x.k_tma, x.v_tma, x.k_columns_tma, x.dq_tma)
        start_cluster(warp, LOAD, MMA, copies, barriers, TMEM, storage.tmem_address)

        s_mma, dq_mma = mma_over_head_dim(self.dtype), mma_over_tile(self.dtype, HEAD_DIM)
        own = Shared(
            storage=storage,
            barriers=barriers,
            queue=TileQueue(Work, storage.work, barriers),
            tiles=tiles,
            visible=visible,
            s=accumulator(s_mma, TILE_N, TMEM.pointer("s")),
            dp=accumulator(s_mma, TILE_N, TMEM.pointer("dp")),
            dq=accumulator(dq_mma, HEAD_DIM, TMEM.pointer("dq")),
        )

        # setmaxregister applies to whole warpgroups.
        if warp >= LOAD.warps[0]:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == SCHEDULER.warps[0]:
                scheduler = self.scheduler(x.num_tiles, barriers, storage.clc_response)
                own.queue.fill(scheduler, tiles)
            elif warp == LOAD.warps[0]:
                self.load_warp(x, own)
            elif warp == MMA.warps[0]:
                self.mma_warp(own, s_mma, dq_mma)
            else:
                self.store_warp(x, own)
        else:
            cute.arch.setmaxregister_increase(ELEMENTWISE_REGISTERS)
            self.elementwise_warps(x, own, scaling)

        finish_cluster(warp, MMA, TMEM)

    # -- device: load -------------------------------------------------------------------------

    @cute.jit
    def load_warp(self, x: Operands, own: Shared) -> None:
        """Load the operands of each tile in the order of the MMAs; each CTA loads its half."""
        storage, barriers, queue, visible = own.storage, own.barriers, own.queue, own.visible
        across = HEAD_DIM // BOX
        q_smem = boxes(storage.q, ROWS, (across, ROWS * BOX), (1, Q_BYTES // 2))
        do_smem = boxes(storage.do, ROWS, (across, ROWS * BOX), (1, Q_BYTES // 2))
        rows_smem = boxes(storage.kv, KEYS, (across, KEYS * BOX), (KV_STAGES, KV_BYTES // 2))
        columns_smem = boxes(
            storage.kv, TILE_N, (DIMS // BOX, TILE_N * BOX), (KV_STAGES, KV_BYTES // 2)
        )
        taken = Int32(0)  # tiles taken from the queue
        loaded = Int32(0)  # tiles with visible keys
        n = Int32(0)  # uses of the ring
        work = queue.take(taken)
        while work.exists:
            cta = cta_rank()
            first, end = visible.key_tiles(work.block, work.seqlen_q, work.seqlen_k)
            if first < end:
                barriers.wait_previous("q_empty", loaded)
                barriers.leader_expects("q_full", loaded, Q_BYTES, cta)
                rows = self.q_rows.box(x.q, CTAS * work.block + cta, *work.queries)
                load_boxes(x.q_tma, rows, q_smem, barriers, "q_full", loaded)
                for i in cutlass.range(end - first + 1, unroll=1):
                    key_tile = end - 1 - i
                    if key_tile >= first:
                        self.load_rows(x.k_tma, x.k, key_tile, work, rows_smem, barriers, n)
                        n += 1
                    if i == 0:
                        barriers.wait_previous("do_empty", loaded)
                        barriers.leader_expects("do_full", loaded, Q_BYTES, cta)
                        rows = self.q_rows.box(x.do, CTAS * work.block + cta, *work.queries)
                        load_boxes(x.do_tma, rows, do_smem, barriers, "do_full", loaded)
                    else:
                        barriers.wait_previous("kv_empty", n)
                        barriers.leader_expects("kv_full", n, KV_BYTES, cta)
                        keys = self.k_columns.box(x.k_columns, key_tile + 1, *work.keys)
                        keys = cute.domain_offset((0, cta * DIMS), keys)
                        load_boxes(x.k_columns_tma, keys, columns_smem, barriers, "kv_full", n)
                        n += 1
                    if key_tile >= first:
                        self.load_rows(x.v_tma, x.v, key_tile, work, rows_smem, barriers, n)
                        n += 1
                loaded += 1
            taken += 1
            work = queue.take(taken)

    @cute.jit
    def load_rows(
        self,
        tma: cute.CopyAtom,
        x: cute.Tensor,
        key_tile: Int32,
        work: Work,
        smem: cute.Tensor,
        barriers: Barriers,
        n: Int32,
    ) -> None:
        """Load a CTA's half of the rows of K or V."""
        cta = cta_rank()
        barriers.wait_previous("kv_empty", n)
        barriers.leader_expects("kv_full", n, KV_BYTES, cta)
        rows = self.k_rows.box(x, CTAS * key_tile + cta, *work.keys)
        load_boxes(tma, rows, smem, barriers, "kv_full", n)

    # -- device: MMA --------------------------------------------------------------------------

    @cute.jit
    def mma_warp(self, own: Shared, s_mma: cute.TiledMma, dq_mma: cute.TiledMma) -> None:
        """Issue S of the next K/V tile before dQ of this tile, so that dS is made during an MMA.

        dP overwrites dS of the K/V tile before. The MMA that reads the old dS has been issued, and
        MMAs run in order.
        """
        storage, barriers, queue, visible = own.storage, own.barriers, own.queue, own.visible
        q_frag = shared_a(s_mma, OVER_HEAD_DIM, self.dtype, storage.q)
        do_frag = shared_a(s_mma, OVER_HEAD_DIM, self.dtype, storage.do)
        rows_frag = shared_b(s_mma, OVER_HEAD_DIM, self.dtype, storage.kv, KV_STAGES)
        columns_frag = shared_b(dq_mma, OVER_TILE, self.dtype, storage.kv, KV_STAGES)
        ds_frag = tensor_a(dq_mma, OVER_TILE, self.dtype, TMEM.offsets["dp"])
        ds_frag = halves_apart(ds_frag, COLUMNS)

        taken = Int32(0)  # tiles taken from the queue
        done = Int32(0)  # tiles with visible keys
        n = Int32(0)  # uses of the ring
        issued = Int32(0)  # K/V tiles whose S and dP have been issued
        added = Int32(0)  # K/V tiles whose dS K has been issued
        work = queue.take(taken)
        while work.exists:
            first, end = visible.key_tiles(work.block, work.seqlen_q, work.seqlen_k)
            if first < end and cta_rank() == 0:
                barriers.wait("q_full", done)
                for i in cutlass.range(end - first + 1, unroll=1):
                    if i < end - first:
                        barriers.wait("kv_full", n)
                        barriers.wait_previous("s_read", issued)
                        tcgen05_fence_after()
                        stage = barriers.stage("kv_full", n)
                        issue_mma(s_mma, own.s, q_frag, rows_frag, stage, False)
                        barriers.commit("kv_empty", n)
                        barriers.commit("s_full", issued)
                        if i == end - first - 1:
                            barriers.commit("q_empty", done)
                        n += 1
                    if i > 0:
                        if i == 1:
                            barriers.wait_previous("dq_read", done)
                        barriers.wait("kv_full", n)
                        barriers.wait("ds_full", added)
                        tcgen05_fence_after()
                        stage = barriers.stage("kv_full", n)
                        issue_mma(dq_mma, own.dq, ds_frag, columns_frag, stage, i > 1)
                        if i < end - first:
                            barriers.commit("kv_empty", n)
                        n += 1
                        added += 1
                    if i < end - first:
                        if i == 0:
                            barriers.wait("do_full", done)
                        barriers.wait("kv_full", n)
                        tcgen05_fence_after()
                        stage = barriers.stage("kv_full", n)
                        issue_mma(s_mma, own.dp, do_frag, rows_frag, stage, False)
                        barriers.commit("kv_empty", n)
                        barriers.commit("dp_full", issued)
                        if i == end - first - 1:
                            barriers.commit("do_empty", done)
                        n += 1
                        issued += 1
                barriers.commit("dq_full", done)
                done += 1
            taken += 1
            work = queue.take(taken)

    # -- device: elementwise ------------------------------------------------------------------

    @cute.jit
    def elementwise_warps(self, x: Operands, own: Shared, scaling: Scaling) -> None:
        """Each thread has half a row of S and dP, and writes dS over dP. At the end the thread
        stages half of each box of its row of dQ."""
        barriers, queue, visible = own.barriers, own.queue, own.visible
        row = cute.arch.thread_idx()[0] % ROWS
        half = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // ROWS)
        s_load, s_from, _ = row_load(first_columns(own.s, COLUMNS), row, COLUMNS)
        dp_load, dp_from, shape = row_load(first_columns(own.dp, COLUMNS), row, COLUMNS)
        ds_columns = first_columns(own.dp, COLUMNS // 2)
        ds_store, ds_to, words_shape = row_store(ds_columns, row, COLUMNS // 2)
        s_from, dp_from = shifted(s_from, half * COLUMNS), shifted(dp_from, half * COLUMNS)
        ds_to = shifted(ds_to, half * COLUMNS)

        taken = Int32(0)  # tiles taken from the queue
        done = Int32(0)  # tiles with visible keys
        n = Int32(0)  # K/V tiles
        # The stage is released late: reading the work twice saves registers.
        queue.wait(taken)
        work = queue.read(taken)
        while work.exists:
            first, end = visible.key_tiles(work.block, work.seqlen_q, work.seqlen_k)
            first_row = (CTAS * work.block + cta_rank()) * ROWS
            # Whole K/V tiles need no mask, because every row of this CTA sees every key.
            whole_first, whole_end = visible.whole_key_tiles(
                first_row, ROWS, work.seqlen_q, work.seqlen_k
            )
            lse, delta = Float32(INF), Float32(0.0)
            if first_row + row < work.seqlen_q:
                at = padded_start(own.tiles.queries, work.sequence) + first_row + row
                lse, delta = x.stats[LSE, work.head, at], x.stats[DELTA, work.head, at]
            for i in cutlass.range(end - first, unroll=1):
                key_tile = end - 1 - i
                barriers.wait("s_full", n)
                tcgen05_fence_after()
                values = cute.make_rmem_tensor(shape, Float32)
                cute.copy(s_load, s_from, values)
                cute.arch.fence_view_async_tmem_load()
                tcgen05_fence_before()
                barriers.warp_arrives("s_read", n)
                self.to_probabilities(values, lse, scaling)

                barriers.wait("dp_full", n)
                tcgen05_fence_after()
                gradients = cute.make_rmem_tensor(shape, Float32)
                cute.copy(dp_load, dp_from, gradients)
                cute.arch.fence_view_async_tmem_load()
                words = self.score_gradients(values, gradients, delta, words_shape)
                if key_tile < whole_first or key_tile >= whole_end:
                    self.mask(own, words, key_tile, row, half, taken)
                cute.copy(ds_store, cute.recast_tensor(words, Float32), ds_to)
                cute.arch.fence_view_async_tmem_store()
                tcgen05_fence_before()
                barriers.warp_arrives("ds_full", n)
                n += 1

            if first < end:
                queue.release(taken)
                self.stage_dq(x, own, row, half, done, lse != INF)
                done += 1
            else:
                if first_row + row < work.seqlen_q:
                    self.fill_zero(x.dq, work, first_row + row, half)
                queue.release(taken)
            taken += 1
            queue.wait(taken)
            work = queue.read(taken)
        queue.release(taken)

    @cute.jit
    def to_probabilities(self, values: cute.Tensor, lse: Float32, scaling: Scaling) -> None:
        """Replace S by P, times the slope of a softcap."""
        for first in cutlass.range_constexpr(0, COLUMNS, STEP):
            columns = range(first, first + STEP)
            _, p = probabilities(values, columns, lse, scaling, softcap=self.spec.softcap)
            for j in cutlass.range_constexpr(STEP // 2):
                values[columns[2 * j]], values[columns[2 * j + 1]] = p[j]

    @cute.jit
    def score_gradients(
        self, p: cute.Tensor, dp: cute.Tensor, delta: Float32, shape: Any
    ) -> cute.Tensor:
        """Return dS, rounded, with two values in a word."""
        pairs = [(p[j], p[j + 1]) for j in range(0, COLUMNS, 2)]
        ds = score_gradients(pairs, dp, range(COLUMNS), delta)
        words = cute.make_rmem_tensor(shape, Int32)
        for j in cutlass.range_constexpr(COLUMNS // 2):
            words[j] = pack(self.dtype, *ds[j])
        return words

    @cute.jit
    def mask(
        self,
        own: Shared,
        words: cute.Tensor,
        key_tile: Int32,
        row: Int32,
        half: Int32,
        taken: Int32,
    ) -> None:
        """Set dS of keys that the row does not see to 0."""
        keep_branch()
        work = own.queue.read(taken)
        token = (CTAS * work.block + cta_rank()) * ROWS + row
        low, high = own.visible.keys(token, work.seqlen_q, work.seqlen_k)
        left = key_tile * TILE_N + half * COLUMNS
        low, high = low - left, high - left
        mask_words(words, low if self.spec.window_left else None, high)

    @cute.jit
    def stage_dq(
        self, x: Operands, own: Shared, row: Int32, half: Int32, done: Int32, sees: Boolean
    ) -> None:
        """Stage dQ for TMA, in the stage of the tile's last K by columns."""
        barriers = own.barriers
        barriers.wait("dq_full", done)
        tcgen05_fence_after()
        # A row that sees no key may have a NaN or infinite dQ, from a hidden key that is not
        # finite.
        stage_accumulator(
            own.dq, HEAD_DIM, x.softmax_scale, Boolean(True), sees, row, half,
            self.staged_boxes(own.storage), barriers, ("dq_staged", "dq_stored"),
            HEAD_DIM // BOX * done,
        )  # fmt: skip
        tcgen05_fence_before()
        barriers.warp_arrives("dq_read", done)

    @cute.jit
    def fill_zero(self, dq: cute.Tensor, work: Work, token: Int32, half: Int32) -> None:
        """Set half a row of a tile without visible keys to 0."""
        if cutlass.const_expr(self.spec.varlen_q):
            dq_row = dq[work.q_start + token, work.head, None]
        else:
            dq_row = dq[work.sequence, token, work.head, None]
        chunk = 128 // self.dtype.width
        chunks = cute.logical_divide(dq_row, cute.make_layout(chunk))
        zeros = cute.make_rmem_tensor((chunk,), self.dtype)
        zeros.fill(0.0)
        for c in cutlass.range_constexpr(HEAD_DIM // 2 // chunk):
            cute.autovec_copy(zeros, chunks[None, half * (HEAD_DIM // 2 // chunk) + c])

    def staged_boxes(self, storage: Pointers) -> cute.Tensor:
        """The shared memory where dQ is staged: (rows, columns, stages)."""
        last = storage.kv + LAST_STAGE * (KV_BYTES // 2)
        return boxes(last, ROWS, (DQ_STAGES, ROWS * BOX))

    # -- device: store ------------------------------------------------------------------------

    @cute.jit
    def store_warp(self, x: Operands, own: Shared) -> None:
        barriers, queue, visible = own.barriers, own.queue, own.visible
        dq_smem = self.staged_boxes(own.storage)
        taken = Int32(0)  # tiles taken from the queue
        stored = Int32(0)  # boxes
        n = Int32(0)  # uses of the ring
        work = queue.take(taken)
        while work.exists:
            first, end = visible.key_tiles(work.block, work.seqlen_q, work.seqlen_k)
            if first < end:
                n += 3 * (end - first)
                rows = self.q_rows.box(
                    x.dq_boxes, CTAS * work.block + cta_rank(), *work.queries, stored=True
                )
                stored = store_boxes(
                    x.dq_tma, rows, dq_smem, barriers, ("dq_staged", "dq_stored"), stored
                )
                with cute.arch.elect_one():
                    barriers.arrive("kv_empty", n - 1)
            taken += 1
            work = queue.take(taken)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)
