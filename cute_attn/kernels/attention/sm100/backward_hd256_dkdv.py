"""Gradients of k and v at head_dim 256 for SM100: clusters of four CTAs, two pairs.

A cluster computes dK and dV of 256 keys of a K/V head. The cluster loops over the query heads of
the head's group or split. For each query head the cluster loops over the tiles of 128 queries that
see some of the keys. The CTAs of a pair hold 128 keys each, and the MMAs of cta_group::2 read both
CTAs' operands.

    value pair (CTAs 0 and 1)                   key pair (CTAs 2 and 3)
    S^T = K Q^T        256 x 128, K = 256       dP^T = V dO^T
    P^T = exp(c S^T - lse), over S^T            dS^T = P'^T * (dP^T - delta), over dP^T
    dV += P^T dO       256 x 256, K = 128       dK += dS^T Q

P' is P; with a softcap, P' is P times the slope of the cap. P and P' are in units of
`PROBABILITY_UNIT`. By st.async, P' goes from a thread of CTA c to the thread of CTA c + 2 that has
the same key and queries. Apart from this, both pairs run one pipeline. T = X Y^T is computed in
tensor memory, from a resident X and tiles Y. The elementwise warps turn T into T', and the MMAs add
T' Z to the accumulator.

    warps    role         work on a tile
    8        load         X of the keys, then Y_0, Y_1, Z_0, Y_2, Z_1, ... and statistics, by TMA
    9        mma          T_0, T_1, acc += T'_0 Z_0, T_2, acc += T'_1 Z_1, ... (the leader only)
    0-7      elementwise  half a row of T for each thread: T -> T'; at the end acc -> shared memory
    10       store        dV or dK by TMA
    11       scheduler    publishes the next tile of keys to all other warps

`EDGES` declares the pipeline; `TMEM`, `Sm100Hd256DkDv.smem` and the register counts below declare
the budgets.
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
from ...common.pipeline import CTAS, Barriers, Edge, Kind, Pipeline, Reach, Role, report_names
from ...common.ptx.async_copy import copy_bulk
from ...common.ptx.cluster import cta_rank, remote_address, store_async
from ...common.ptx.compiler import keep_branch
from ...common.ptx.convert import pack, unpack
from ...common.ptx.memory import load_shared, shared_address
from ...common.ptx.tcgen05 import tcgen05_fence_after, tcgen05_fence_before
from ...common.scheduler import CLC_RESPONSE_BYTES, SCHEDULER_CLASSES, TileQueue
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ...common.spec import WARP_SIZE
from ...common.tma import BOX, FLOAT32_BOX, BoxedRows, boxes, load_boxes, store_boxes
from ...common.tmem import Region, TensorMemory, first_columns, row_load, row_store, shifted
from ..parts.arguments import FakeArguments
from ..parts.gradient import PROBABILITY_UNIT, probabilities, score_gradients
from ..parts.mask import mask_words
from ..parts.softmax import Scaling
from ..parts.visibility import Visibility
from ..parts.work import TileMap, Work, following, head_and_split, tiles_of_keys
from ..spec import DKDV_TILE_M, DKDV_TILE_N, Hd256BackwardSpec
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

CLUSTER = 2 * CTAS  # a value pair and a key pair
ROWS = DKDV_TILE_N // CTAS  # keys of a CTA
QUERIES = DKDV_TILE_M
Y_ROWS = QUERIES // CTAS  # queries of Y that a CTA loads
HEAD_DIM = 256
OVER_HEAD_DIM, OVER_TILE = over_head_dim(HEAD_DIM), over_tile(HEAD_DIM)
DIMS = HEAD_DIM // CTAS  # columns of Z that a CTA loads

YZ_STAGES = 4
T_STAGES = 2
STATS_STAGES = 4
OUT_STAGES = 2  # boxes of dV or dK that wait for TMA

COLUMNS = QUERIES // 2  # columns of a row of T that a thread has
CHUNK = 8  # values of P' in 16 bytes
STEP = 16  # columns whose statistics are in registers at once

TMEM = TensorMemory(
    Region("t", QUERIES, T_STAGES, "S^T or dP^T, and P^T or dS^T over it"),
    Region("acc", HEAD_DIM, holds="dV or dK"),
    pair=True,
)

# Warps.
ELEMENTWISE = Role("elementwise", range(0, 8))
LOAD, MMA = Role("load", range(8, 9)), Role("mma", range(9, 10))
STORE, SCHEDULER = Role("store", range(10, 11)), Role("scheduler", range(11, 12))
ROLES = (ELEMENTWISE, LOAD, MMA, STORE, SCHEDULER)
WORKERS = Role("all others", range(0, 11))
NUM_WARPS = sum(map(len, ROLES))

# Registers of a thread. All 384 threads start with 168, and warps 8-11 give some up.
ELEMENTWISE_REGISTERS, OTHER_REGISTERS = 208, 88
assert 2 * ELEMENTWISE_REGISTERS + OTHER_REGISTERS <= 3 * 168

# The edges in the order in which a tile meets them. A use is a work item for X and acc, a box for
# the staged output, and otherwise a tile of queries. Y and Z are two uses of one ring.
EDGES = (
    *TileQueue.edges(SCHEDULER, WORKERS),
    Edge("x_full", LOAD, MMA, 1, Kind.BYTES, Reach.LEADER, "K or V"),
    Edge("x_empty", MMA, LOAD, 1, Kind.COMMIT, Reach.PAIR, "its buffer, after the last T"),
    Edge("yz_full", LOAD, MMA, YZ_STAGES, Kind.BYTES, Reach.LEADER, "Q or dO, as Y or Z"),
    Edge("yz_empty", MMA, LOAD, YZ_STAGES, Kind.COMMIT, Reach.PAIR, "its stage"),
    Edge("stats_full", LOAD, ELEMENTWISE, STATS_STAGES, Kind.BYTES, payload="lse or delta"),
    # t_done implies stats_empty and acc_empty, through the order of the elementwise warps' work.
    # Both edges stay declared, so that a change of the order does not become a race.
    Edge("stats_empty", ELEMENTWISE, LOAD, STATS_STAGES, Kind.WARPS, payload="its stage"),
    Edge("t_full", MMA, ELEMENTWISE, T_STAGES, Kind.COMMIT, Reach.PAIR, "T"),
    Edge("t_done", ELEMENTWISE, MMA, T_STAGES, Kind.WARPS, Reach.LEADER, "T', in place of T"),
    # P' goes to the key pair, and the grant of the buffer back, warp by warp. The key pair grants
    # every use, because a work item that no query sees stages zeros in the buffer, but exchanges
    # nothing.
    Edge(
        "exchange_free", ELEMENTWISE, ELEMENTWISE, 1, Kind.WARPS, Reach.PARTNER,
        "the warp's part of P's buffer", by_warp=True,
    ),
    Edge(
        "exchange_full", ELEMENTWISE, ELEMENTWISE, 1, Kind.BYTES, Reach.PARTNER,
        "the warp's part of P'", by_warp=True,
    ),
    Edge("acc_full", MMA, ELEMENTWISE, 1, Kind.COMMIT, Reach.PAIR, "dV or dK"),
    Edge("acc_empty", ELEMENTWISE, MMA, 1, Kind.WARPS, Reach.LEADER, "its columns"),
    Edge("staged", ELEMENTWISE, STORE, OUT_STAGES, Kind.WARPS, payload="a box of dV or dK"),
    Edge("stored", STORE, ELEMENTWISE, OUT_STAGES, Kind.WARPS, payload="its stage"),
)  # fmt: skip

X_BYTES = ROWS * HEAD_DIM * 2
YZ_BYTES = Y_ROWS * HEAD_DIM * 2
STATS_BYTES = QUERIES * 4
EXCHANGE_BYTES = ROWS * QUERIES * 2
BOX_BYTES = ROWS * 128
assert YZ_BYTES == QUERIES * DIMS * 2, "Y and Z share a ring"
assert OUT_STAGES * BOX_BYTES == EXCHANGE_BYTES, "dV and dK are staged in P's buffer"
assert OUT_STAGES == QUERIES // COLUMNS, "a box for each half of P'"


class Arguments(NamedTuple):
    """The kernel's arguments. `FakeArguments` has the shapes.

    Attributes:
        stats: lse and delta of the query rows; see `statistics`.
        dk, dv: gradients, or float32 sums of the splits.
        num_clusters: how many clusters are resident at once.
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
    num_clusters: Int32


@dataclass(frozen=True)
class OfPair(Carried):
    """TMA's copies of a pair of CTAs, and their coordinates; see the module's docstring.

    Attributes:
        out: dV or dK.
    """

    x_tma: cute.CopyAtom
    x: cute.Tensor
    y_tma: cute.CopyAtom
    y: cute.Tensor
    z_tma: cute.CopyAtom
    z: cute.Tensor
    out_tma: cute.CopyAtom
    out: cute.Tensor

    @property
    def copies(self) -> tuple[cute.CopyAtom, ...]:
        return self.x_tma, self.y_tma, self.z_tma, self.out_tma


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors that the device code reads and writes.

    Attributes:
        num_tiles: the scheduler's number of tiles.
    """

    of_values: OfPair
    of_keys: OfPair
    stats: cute.Tensor
    softmax_scale: Float32
    num_splits: Int32
    num_tiles: Int32


@dataclass(frozen=True)
class Shared(Carried):
    """The values that all warps of a CTA share.

    Attributes:
        t: stage 0 of T in tensor memory.
        acc: the accumulators in tensor memory.
    """

    storage: Pointers
    barriers: Barriers
    queue: TileQueue
    tiles: TileMap
    visible: Visibility
    t: cute.Tensor
    acc: cute.Tensor


class Sm100Hd256DkDv:
    """The kernel for one Hd256BackwardSpec; see the module's docstring."""

    def __init__(self, spec: Hd256BackwardSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.unit = PROBABILITY_UNIT.get(self.dtype, 1.0)
        self.out_dtype = Float32 if spec.partial else self.dtype
        self.box = FLOAT32_BOX if spec.partial else BOX
        self.scheduler = SCHEDULER_CLASSES[spec.scheduler]
        self.pipeline = Pipeline(*EDGES, *self.scheduler.edges(SCHEDULER), cluster=CLUSTER)
        self.smem = SharedMemory(
            Buffer("x", self.dtype, ROWS * HEAD_DIM, 1, SWIZZLE_ALIGNMENT, "K or V, 128 x 256"),
            Buffer(
                "yz", self.dtype, Y_ROWS * HEAD_DIM, YZ_STAGES, SWIZZLE_ALIGNMENT,
                "Q or dO, 64 x 256 or 128 x 128",
            ),
            Buffer(
                "exchange", self.dtype, ROWS * QUERIES, 1, SWIZZLE_ALIGNMENT,
                "P', 128 x 128, then dV or dK, 2 x 128 x 64",
            ),
            Buffer("stats", Float32, QUERIES, STATS_STAGES, holds="lse or delta of queries"),
            TileQueue.buffer(Work),
            Buffer("clc_response", Int32, CLC_RESPONSE_BYTES // 4),
            Buffer("barriers", Int64, self.pipeline.count),
            Buffer("tmem_address", Int32, 1),
        )  # fmt: skip
        self.x_rows = BoxedRows(ROWS, HEAD_DIM, spec.ragged_k, batched=not spec.varlen_k)
        self.y_rows, self.z_rows = (
            BoxedRows(rows, HEAD_DIM, spec.ragged_q, batched=not spec.varlen_q)
            for rows in (Y_ROWS, QUERIES)
        )
        self.out_rows = BoxedRows(
            ROWS, HEAD_DIM, spec.ragged_k, batched=spec.partial or not spec.varlen_k,
            box_columns=self.box,
        )  # fmt: skip

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.smem, self.pipeline, ROLES, shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        fake = FakeArguments(self.spec, HEAD_DIM)
        out = fake.k_partial if self.spec.partial else fake.k
        return placeholders(fake.arguments(Arguments, dk=out(), dv=out()))

    # -- host ---------------------------------------------------------------------------------

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel. Each split of a group counts as a K/V head."""
        a, stream = gathered(Arguments, args)
        spec = self.spec
        tiles = tiles_of_keys(a, DKDV_TILE_N, (2 + 2) * HEAD_DIM)  # bytes of a row of Q and dO
        num_tiles = tiles.count()
        visible = Visibility.of(spec, QUERIES, DKDV_TILE_N, 1, a.window_left, a.window_right)
        scaling = Scaling.of(a.softmax_scale, a.softcap if spec.softcap else None)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        store = cpasync.CopyBulkTensorTileS2GOp()
        of_values, of_keys = (
            OfPair(
                *self.x_rows.atom(load, x), *self.y_rows.atom(load, y),
                *self.z_rows.atom(load, z), *self.out_rows.atom(store, self.outputs(out)),
            )
            for x, y, z, out in ((a.k, a.q, a.do, a.dv), (a.v, a.do, a.q, a.dk))
        )  # fmt: skip
        x = Operands(of_values, of_keys, a.stats, a.softmax_scale, a.num_splits, num_tiles)
        self.kernel(x, tiles, visible, scaling).launch(
            grid=[CLUSTER * self.scheduler.clusters(num_tiles, a.num_clusters), 1, 1],
            block=[NUM_WARPS * WARP_SIZE, 1, 1],
            cluster=[CLUSTER, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    def outputs(self, x: cute.Tensor) -> cute.Tensor:
        """Return dk or dv, with the splits of partial sums in the mode of sequences."""
        if not self.spec.partial or self.spec.varlen_k:
            return x
        splits, batch, *rest = x.shape
        _, *strides = x.stride
        return cute.make_tensor(
            x.iterator, cute.make_layout((splits * batch, *rest), stride=tuple(strides))
        )

    # -- device: set-up -----------------------------------------------------------------------

    @cute.kernel
    def kernel(self, x: Operands, tiles: TileMap, visible: Visibility, scaling: Scaling) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = self.smem.allocate()
        barriers = self.pipeline.at(storage.barriers)

        copies = (*x.of_values.copies, *x.of_keys.copies)
        start_cluster(warp, LOAD, MMA, copies, barriers, TMEM, storage.tmem_address)

        t_mma, acc_mma = mma_over_head_dim(self.dtype), mma_over_tile(self.dtype, HEAD_DIM)
        own = Shared(
            storage=storage,
            barriers=barriers,
            queue=TileQueue(Work, storage.work, barriers),
            tiles=tiles,
            visible=visible,
            t=accumulator(t_mma, QUERIES, TMEM.pointer("t")),
            acc=accumulator(acc_mma, HEAD_DIM, TMEM.pointer("acc")),
        )

        # setmaxregister applies to whole warpgroups.
        if warp >= LOAD.warps[0]:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == SCHEDULER.warps[0]:
                scheduler = self.scheduler(x.num_tiles, barriers, storage.clc_response)
                own.queue.fill(scheduler, tiles)
            elif warp == LOAD.warps[0]:
                if cta_rank() < CTAS:
                    self.load_warp(x, x.of_values, LSE, own)
                else:
                    self.load_warp(x, x.of_keys, DELTA, own)
            elif warp == MMA.warps[0]:
                self.mma_warp(own, t_mma, acc_mma)
            elif cta_rank() < CTAS:
                self.store_warp(x, x.of_values, own)
            else:
                self.store_warp(x, x.of_keys, own)
        else:
            cute.arch.setmaxregister_increase(ELEMENTWISE_REGISTERS)
            if cta_rank() < CTAS:
                self.elementwise_warps(False, x, own, scaling)
            else:
                self.elementwise_warps(True, x, own, scaling)

        finish_cluster(warp, MMA, TMEM)

    # -- device: load -------------------------------------------------------------------------

    @cute.jit
    def load_warp(self, x: Operands, of: OfPair, kind: cutlass.Constexpr[int], own: Shared) -> None:
        """Load X of each work item, then its Y, Z and statistics, head by head; each CTA loads
        its half of X, Y and Z."""
        storage, barriers, queue, visible = own.storage, own.barriers, own.queue, own.visible
        group, stats = own.tiles.group, x.stats
        across = HEAD_DIM // BOX
        x_smem = boxes(storage.x, ROWS, (across, ROWS * BOX), (1, X_BYTES // 2))
        y_smem = boxes(storage.yz, Y_ROWS, (across, Y_ROWS * BOX), (YZ_STAGES, YZ_BYTES // 2))
        z_smem = boxes(
            storage.yz, QUERIES, (DIMS // BOX, QUERIES * BOX), (YZ_STAGES, YZ_BYTES // 2)
        )
        heads, padded_rows = stats.shape[1], stats.shape[2]
        taken = Int32(0)  # work items taken from the queue
        loaded_x = Int32(0)
        n = Int32(0)  # uses of the ring
        loaded_stats = Int32(0)
        work = queue.take(taken)
        while work.exists:
            cta = cta_rank() & (CTAS - 1)
            first, end = visible.query_tiles(work.block, work.seqlen_q, work.seqlen_k)
            if first < end:
                barriers.wait_previous("x_empty", loaded_x)
                barriers.leader_expects("x_full", loaded_x, X_BYTES, cta)
                kv_head, _ = head_and_split(work, x.num_splits, self.spec.partial)
                x_box = self.x_rows.box(of.x, CTAS * work.block + cta, kv_head, *work.keys[1:])
                load_boxes(of.x_tma, x_box, x_smem, barriers, "x_full", loaded_x)
                loaded_x += 1
                stats_start = padded_start(own.tiles.queries, work.sequence)
                y_tile, y_head = first, work.head
                z_tile, z_head = first, work.head
                for i in cutlass.range((end - first) * group + 1, unroll=1):
                    if i < (end - first) * group:
                        barriers.wait_previous("yz_empty", n)
                        barriers.leader_expects("yz_full", n, YZ_BYTES, cta)
                        y_index = CTAS * y_tile + cta
                        y_box = self.y_rows.box(of.y, y_index, y_head, *work.queries[1:])
                        load_boxes(of.y_tma, y_box, y_smem, barriers, "yz_full", n)
                        n += 1
                        barriers.wait_previous("stats_empty", loaded_stats)
                        row = Int64(kind * heads + y_head) * padded_rows
                        row += stats_start + y_tile * QUERIES
                        with cute.arch.elect_one():
                            barriers.expect("stats_full", loaded_stats, STATS_BYTES)
                            copy_bulk(
                                shared_address(storage.stats)
                                + (loaded_stats & (STATS_STAGES - 1)) * STATS_BYTES,
                                stats.iterator.toint() + row * 4,
                                STATS_BYTES,
                                shared_address(barriers.pointer("stats_full", loaded_stats)),
                            )
                        loaded_stats += 1
                        y_tile, y_head = following(y_tile, y_head, first, end)
                    if i > 0:
                        barriers.wait_previous("yz_empty", n)
                        barriers.leader_expects("yz_full", n, YZ_BYTES, cta)
                        z_box = self.z_rows.box(of.z, z_tile, z_head, *work.queries[1:])
                        z_box = cute.domain_offset((0, cta * DIMS), z_box)
                        load_boxes(of.z_tma, z_box, z_smem, barriers, "yz_full", n)
                        n += 1
                        z_tile, z_head = following(z_tile, z_head, first, end)
            taken += 1
            work = queue.take(taken)

    # -- device: MMA --------------------------------------------------------------------------

    @cute.jit
    def mma_warp(self, own: Shared, t_mma: cute.TiledMma, acc_mma: cute.TiledMma) -> None:
        """Issue T of the next tile before T' Z of this tile, so that the elementwise warps overlap
        an MMA.
        """
        storage, barriers, queue, visible = own.storage, own.barriers, own.queue, own.visible
        x_frag = shared_a(t_mma, OVER_HEAD_DIM, self.dtype, storage.x)
        y_frag = shared_b(t_mma, OVER_HEAD_DIM, self.dtype, storage.yz, YZ_STAGES)
        z_frag = shared_b(acc_mma, OVER_TILE, self.dtype, storage.yz, YZ_STAGES)
        done_frag = tensor_a(acc_mma, OVER_TILE, self.dtype, TMEM.offsets["t"])
        done_frag = halves_apart(done_frag, COLUMNS)

        taken = Int32(0)  # work items taken from the queue
        computed = Int32(0)  # work items that some query sees
        n = Int32(0)  # uses of the ring
        issued = Int32(0)  # tiles whose T has been issued
        added = Int32(0)  # tiles whose T' Z has been issued
        work = queue.take(taken)
        while work.exists:
            first, end = visible.query_tiles(work.block, work.seqlen_q, work.seqlen_k)
            count = (end - first) * own.tiles.group
            if first < end and cta_rank() & (CTAS - 1) == 0:
                barriers.wait("x_full", computed)
                for i in cutlass.range(count + 1, unroll=1):
                    if i < count:
                        barriers.wait("yz_full", n)
                        # This overwrites the T' of two tiles ago. The T' Z that reads the old T'
                        # has been issued, and MMAs run in order.
                        tcgen05_fence_after()
                        to = shifted(own.t, QUERIES * (issued & (T_STAGES - 1)))
                        stage = barriers.stage("yz_full", n)
                        issue_mma(t_mma, to, x_frag, y_frag, stage, Boolean(False))
                        barriers.commit("yz_empty", n)
                        barriers.commit("t_full", issued)
                        n += 1
                        issued += 1
                        if i == count - 1:
                            barriers.commit("x_empty", computed)
                    if i > 0:
                        barriers.wait("yz_full", n)
                        if i == 1:
                            barriers.wait_previous("acc_empty", computed)
                        barriers.wait("t_done", added)
                        tcgen05_fence_after()
                        # A 32-bit column of tensor memory holds two values of T'.
                        done = shifted(done_frag, 2 * QUERIES * (added & (T_STAGES - 1)))
                        stage = barriers.stage("yz_full", n)
                        issue_mma(acc_mma, own.acc, done, z_frag, stage, i > 1)
                        barriers.commit("yz_empty", n)
                        n += 1
                        added += 1
                barriers.commit("acc_full", computed)
                computed += 1
            taken += 1
            work = queue.take(taken)

    # -- device: elementwise ------------------------------------------------------------------

    @cute.jit
    def elementwise_warps(
        self,
        key_pair: cutlass.Constexpr[bool],
        x: Operands,
        own: Shared,
        scaling: Scaling,
    ) -> None:
        """Each thread has half a row of T: a key and 64 queries. The value pair makes P and sends
        P'; the key pair (`key_pair`) makes dS."""
        storage, barriers, queue, visible = own.storage, own.barriers, own.queue, own.visible
        row = cute.arch.thread_idx()[0] % ROWS
        half = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (ROWS // WARP_SIZE)
        load, t_from, values_shape = row_load(first_columns(own.t, COLUMNS), row, COLUMNS)
        t_from = shifted(t_from, half * COLUMNS)
        done_columns = first_columns(own.t, COLUMNS // 2)
        store, words_to, words_shape = row_store(done_columns, row, COLUMNS // 2)
        words_to = shifted(words_to, half * COLUMNS)

        stats = cute.make_tensor(
            storage.stats, cute.make_layout((COLUMNS, QUERIES // COLUMNS, STATS_STAGES))
        )
        # A thread's chunks of 16 bytes lie ROWS chunks apart, so that a warp's are contiguous.
        exchange = shared_address(storage.exchange)
        exchange += (half * (COLUMNS // CHUNK) * ROWS + row) * 16

        taken = Int32(0)  # work items taken from the queue
        computed = Int32(0)  # work items that some query sees
        n = Int32(0)  # tiles of queries
        staged = Int32(0)  # boxes of acc
        queue.wait(taken)
        work = queue.read(taken)
        while work.exists:
            first, end = visible.query_tiles(work.block, work.seqlen_q, work.seqlen_k)
            # Whole tiles of queries need no mask, because every query sees every key of this CTA.
            whole_first, whole_end = visible.whole_query_tiles(
                first_key(work.block), ROWS, work.seqlen_q, work.seqlen_k
            )
            count = (end - first) * own.tiles.group
            tile = first
            if cutlass.const_expr(key_pair):
                if first < end:
                    # P' overwrites the previous work item's staged output: the chunks of each half
                    # take one box.
                    barriers.wait_previous("stored", staged + half)
                    barriers.warp_arrives("exchange_free", n)
            for i in cutlass.range(count, unroll=1):
                masked = tile < whole_first or tile >= whole_end
                statistic = stats[None, half, n & (STATS_STAGES - 1)]
                words = cute.make_rmem_tensor(words_shape, Int32)
                if cutlass.const_expr(key_pair):
                    received = cute.make_rmem_tensor((COLUMNS // 2,), Int32)
                    barriers.wait("exchange_full", n)
                    for chunk in cutlass.range_constexpr(COLUMNS // CHUNK):
                        part = load_shared(Int32, exchange + chunk * ROWS * 16, 4)
                        for j in cutlass.range_constexpr(4):
                            received[4 * chunk + j] = part[j]
                    if i < count - 1:
                        barriers.warp_arrives("exchange_free", n + 1)
                barriers.wait("stats_full", n)
                barriers.wait("t_full", n)
                tcgen05_fence_after()
                column = QUERIES * (n & (T_STAGES - 1))
                values = cute.make_rmem_tensor(values_shape, Float32)
                cute.copy(load, shifted(t_from, column), values)
                cute.arch.fence_view_async_tmem_load()
                sent = words  # the words to send: P', where P' differs from P
                if cutlass.const_expr(key_pair):
                    self.differentiate(values, statistic, received, words)
                else:
                    if cutlass.const_expr(self.spec.softcap):
                        sent = cute.make_rmem_tensor(words_shape, Int32)
                    self.exponentiate(values, statistic, scaling, words, sent)
                barriers.warp_arrives("stats_empty", n)
                if masked:
                    self.mask(own, words, sent, tile, row, half, taken)
                cute.copy(store, cute.recast_tensor(words, Float32), shifted(words_to, column))
                cute.arch.fence_view_async_tmem_store()
                tcgen05_fence_before()
                barriers.warp_arrives("t_done", n)
                if cutlass.const_expr(not key_pair):
                    self.send(sent, exchange, barriers, n)
                n += 1
                tile += 1
                if tile == end:
                    tile = first

            queue.release(taken)
            factor = None
            if cutlass.const_expr(key_pair):
                factor = x.softmax_scale
            elif cutlass.const_expr(self.unit != 1.0):
                factor = Float32(self.unit)
            if first < end:
                barriers.wait("acc_full", computed)
                tcgen05_fence_after()
            staged = stage_accumulator(
                own.acc, HEAD_DIM, factor, first < end, None, row, half,
                self.staged_boxes(storage), barriers, ("staged", "stored"), staged,
            )  # fmt: skip
            if first < end:
                tcgen05_fence_before()
                barriers.warp_arrives("acc_empty", computed)
                computed += 1
            taken += 1
            queue.wait(taken)
            work = queue.read(taken)
        queue.release(taken)

    @cute.jit
    def exponentiate(
        self,
        values: cute.Tensor,
        lse: cute.Tensor,
        scaling: Scaling,
        words: cute.Tensor,
        sent: cute.Tensor,
    ) -> None:
        """Compute P from S, and P' to send where P' differs from P."""
        for first in cutlass.range_constexpr(0, COLUMNS, STEP):
            columns = range(first, first + STEP)
            p, with_slope = probabilities(
                values, columns, of_columns(lse, columns), scaling, softcap=self.spec.softcap,
                unit=self.unit,
            )  # fmt: skip
            for j in cutlass.range_constexpr(STEP // 2):
                words[first // 2 + j] = pack(self.dtype, *p[j])
                if cutlass.const_expr(sent is not words):
                    sent[first // 2 + j] = pack(self.dtype, *with_slope[j])

    @cute.jit
    def differentiate(
        self,
        values: cute.Tensor,
        delta: cute.Tensor,
        received: cute.Tensor,
        words: cute.Tensor,
    ) -> None:
        """dS from dP and P'."""
        for first in cutlass.range_constexpr(0, COLUMNS, STEP):
            columns = range(first, first + STEP)
            p = [unpack(self.dtype, received[first // 2 + j]) for j in range(STEP // 2)]
            ds = score_gradients(p, values, columns, of_columns(delta, columns), unit=self.unit)
            for j in cutlass.range_constexpr(STEP // 2):
                words[first // 2 + j] = pack(self.dtype, *ds[j])

    @cute.jit
    def mask(
        self,
        own: Shared,
        words: cute.Tensor,
        sent: cute.Tensor,
        tile: Int32,
        row: Int32,
        half: Int32,
        taken: Int32,
    ) -> None:
        """Set the columns of queries that do not see the row's key to 0."""
        keep_branch()
        work = own.queue.read(taken)
        low, high = own.visible.tokens(first_key(work.block) + row, work.seqlen_q, work.seqlen_k)
        start = tile * QUERIES + half * COLUMNS
        if cutlass.const_expr(self.spec.window_right):
            low = low - start
        else:
            low = None
        mask_words(words, low, high - start)
        if cutlass.const_expr(sent is not words):
            mask_words(sent, low, high - start)

    @cute.jit
    def send(self, words: cute.Tensor, exchange: Int32, barriers: Barriers, n: Int32) -> None:
        """Send P' to the key pair's thread of the same row and columns."""
        barriers.wait("exchange_free", n)
        with cute.arch.elect_one():
            barriers.expect("exchange_full", n, EXCHANGE_BYTES // len(ELEMENTWISE))
        partner = cta_rank() ^ CTAS
        to = remote_address(exchange, partner)
        full = remote_address(shared_address(barriers.pointer("exchange_full", n)), partner)
        for chunk in cutlass.range_constexpr(COLUMNS // CHUNK):
            store_async(to + chunk * ROWS * 16, [words[4 * chunk + j] for j in range(4)], full)

    def staged_boxes(self, storage: Pointers) -> cute.Tensor:
        """The shared memory where dV or dK is staged: (rows, columns, stages)."""
        buffer = cute.recast_ptr(storage.exchange, dtype=self.out_dtype)
        elements = BOX_BYTES // (self.out_dtype.width // 8)
        return boxes(buffer, ROWS, (OUT_STAGES, elements), columns=self.box)

    # -- device: store ------------------------------------------------------------------------

    @cute.jit
    def store_warp(self, x: Operands, of: OfPair, own: Shared) -> None:
        barriers, queue = own.barriers, own.queue
        out_smem = self.staged_boxes(own.storage)
        taken = Int32(0)  # work items taken from the queue
        stored = Int32(0)
        work = queue.take(taken)
        while work.exists:
            head, split = head_and_split(work, x.num_splits, self.spec.partial)
            outer = work.sequence
            if cutlass.const_expr(self.spec.partial):
                outer = split if self.spec.varlen_k else split * own.tiles.batch + work.sequence
            index = CTAS * work.block + (cta_rank() & (CTAS - 1))
            rows = self.out_rows.box(
                of.out, index, head, outer, work.k_start, work.seqlen_k, stored=True
            )
            stored = store_boxes(of.out_tma, rows, out_smem, barriers, ("staged", "stored"), stored)
            taken += 1
            work = queue.take(taken)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)


def first_key(block: Int32) -> Int32:
    """The first key of this CTA in tile `block` of keys."""
    return (CTAS * block + (cta_rank() & (CTAS - 1))) * ROWS


def of_columns(stats: cute.Tensor, columns: range) -> dict[int, Float32]:
    """Statistics of the columns, loaded from shared memory, indexed by column."""
    values = cute.make_rmem_tensor((len(columns),), Float32)
    part = cute.logical_divide(stats, cute.make_layout(len(columns)))
    cute.autovec_copy(part[None, columns.start // len(columns)], values)
    return {column: values[j] for j, column in enumerate(columns)}
