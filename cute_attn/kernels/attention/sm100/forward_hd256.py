"""Softmax attention forward at head_dim 256 for SM100: clusters of two CTAs, MMAs across both.

A cluster computes a tile of 256 query rows over its visible K/V tiles of 128 keys, from the last to
the first. Each CTA holds 128 of the rows. Each CTA loads half of the keys of K and half of the
columns of V. The MMAs of cta_group::2 read both CTAs' halves.

    S = Q K^T        256 x 128, K = 256    Q and K in shared memory, S in tensor memory
    P = 2^(c S - m)  in place of S         c = softmax_scale * log2(e), m the row's (late) maximum
    O = O a + P V    256 x 256, K = 128    P and O in tensor memory, V in shared memory

The maximum m moves only when it has grown by more than RESCALE_THRESHOLD (in log2), so O is rarely
rescaled (by a). The sums use the same m, so the result is exact (see `softmax`). Half of the
exponentials, except in the last quarter of a K/V tile, run on the FMA units (see `common.exp2`).
The special function unit alone would need half of the MMAs' time.

    warps    role         work on a tile
    8        load         Q, then K_0, K_1, V_0, K_2, V_1, ... by TMA
    9        mma          S_0, S_1, O += P_0 V_0, S_2, O += P_1 V_1, ... (CTA 0 issues for both)
    0-3      softmax      one row for each thread: S -> P, the row's maximum and sum
    4-7      correction   rescales O where a maximum moved; at the end O / sum -> shared memory
    10       store        O by TMA
    11       scheduler    publishes the next tile to all other warps

With splits, a tile's K/V tiles are shared out among clusters. The correction warps store each
split's O in float32, straight from registers, and `combine` adds up the splits.

`EDGES` declares the pipeline; `TMEM`, `Sm100Hd256Forward.smem` and the register counts below
declare the budgets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05

from ...common.carried import Carried
from ...common.cluster import finish_cluster, start_cluster
from ...common.dtypes import DTYPE
from ...common.entry import entry, gathered, placeholders
from ...common.exp2 import exp2_mixed
from ...common.numbers import INF
from ...common.overlap import overlaps
from ...common.pipeline import CTAS, Barriers, Edge, Kind, Pipeline, Reach, Role, report_names
from ...common.ptx.cluster import cta_rank
from ...common.ptx.compiler import keep_branch
from ...common.ptx.memory import store_global
from ...common.ptx.tcgen05 import tcgen05_fence_after, tcgen05_fence_before
from ...common.scheduler import CLC_RESPONSE_BYTES, SCHEDULER_CLASSES, TileQueue
from ...common.sequences import Sequences
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ...common.spec import WARP_SIZE
from ...common.tma import BOX, BoxedRows, boxes, load_boxes, store_boxes
from ...common.tmem import Region, TensorMemory, first_columns, row_load, row_store, shifted
from ..parts.arguments import FakeArguments
from ..parts.mask import mask_row
from ..parts.pages import Pages
from ..parts.softmax import (
    Scaling,
    cap_row,
    exponents,
    finish_row,
    move_maximum,
    row_maximum,
    subtract_maximum,
)
from ..parts.visibility import Visibility
from ..parts.work import SplitTileMap, SplitWork, TileMap, Work, heads_in_l2
from ..spec import TILE_M, TILE_N, Hd256ForwardSpec
from .epilogue import round_row, scale_row, stage_row
from .mma import (
    accumulator,
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
KEYS = TILE_N // CTAS  # rows of K that a CTA loads
HEAD_DIM = 256
OVER_HEAD_DIM, OVER_TILE = over_head_dim(HEAD_DIM), over_tile(HEAD_DIM)
DIMS = HEAD_DIM // CTAS  # columns of V that a CTA loads

KV_STAGES = 4
S_STAGES = 2
O_STAGES = 2  # boxes of O that wait for TMA
VECTOR = 4  # float32 values of a split's O that a thread stores at once

FRAGMENT = 32  # columns of a row that a TMEM instruction loads or stores
ON_FMA_UNITS = range(1, FRAGMENT // 2, 2)  # pairs of a fragment for `exp2_mixed`

TMEM = TensorMemory(
    Region("s", TILE_N, S_STAGES, "S, and P in its place"),
    Region("o", HEAD_DIM, holds="O"),
    pair=True,
)

# Warps.
SOFTMAX, CORRECTION = Role("softmax", range(0, 4)), Role("correction", range(4, 8))
LOAD, MMA = Role("load", range(8, 9)), Role("mma", range(9, 10))
STORE, SCHEDULER = Role("store", range(10, 11)), Role("scheduler", range(11, 12))
ROLES = (SOFTMAX, CORRECTION, LOAD, MMA, STORE, SCHEDULER)
WORKERS = Role("all others", range(0, 11))
NUM_WARPS = sum(map(len, ROLES))

# Registers of a thread. All 384 threads start with 168, and warps 8-11 give some up to softmax.
SOFTMAX_REGISTERS, CORRECTION_REGISTERS, OTHER_REGISTERS = 240, 168, 96
assert SOFTMAX_REGISTERS + CORRECTION_REGISTERS + OTHER_REGISTERS <= 3 * CORRECTION_REGISTERS

# The edges in the order in which a tile meets them. A use is a tile for Q, sums and work, a box for
# O's buffers, and otherwise a K/V tile. K and V are two uses of one ring.
EDGES = (
    *TileQueue.edges(SCHEDULER, WORKERS),
    Edge("q_full", LOAD, MMA, 1, Kind.BYTES, Reach.LEADER, "Q"),
    Edge("q_empty", MMA, LOAD, 1, Kind.COMMIT, Reach.PAIR, "Q's buffer, after the tile's last S"),
    Edge("kv_full", LOAD, MMA, KV_STAGES, Kind.BYTES, Reach.LEADER, "K or V"),
    Edge("kv_empty", MMA, LOAD, KV_STAGES, Kind.COMMIT, Reach.PAIR, "its stage"),
    Edge("s_full", MMA, SOFTMAX, S_STAGES, Kind.COMMIT, Reach.PAIR, "S"),
    Edge("scale_full", SOFTMAX, CORRECTION, S_STAGES, Kind.WARPS, payload="factors for O"),
    Edge("o_ready", CORRECTION, MMA, S_STAGES, Kind.WARPS, Reach.LEADER, "O, to add P V to"),
    Edge("p_full", SOFTMAX, MMA, S_STAGES, Kind.WARPS, Reach.LEADER, "P, in place of S"),
    Edge("pv_done", MMA, CORRECTION, S_STAGES, Kind.COMMIT, Reach.PAIR, "O with P V added"),
    Edge("sum_full", SOFTMAX, CORRECTION, 2, Kind.WARPS, payload="what to divide O by"),
    # A tile without visible keys has no S, so no other edge would hold softmax back.
    Edge("sum_read", CORRECTION, SOFTMAX, 2, Kind.WARPS, payload="its stage"),
    Edge("o_staged", CORRECTION, STORE, O_STAGES, Kind.WARPS, payload="a box of O"),
    Edge("o_stored", STORE, CORRECTION, O_STAGES, Kind.WARPS, payload="its stage"),
)

Q_BYTES = ROWS * HEAD_DIM * 2
KV_BYTES = KEYS * HEAD_DIM * 2
O_BYTES = ROWS * BOX * 2
assert KV_BYTES == TILE_N * DIMS * 2, "K and V share a ring"


class Arguments(NamedTuple):
    """The kernel's arguments. `FakeArguments` has the shapes.

    Attributes:
        num_clusters: how many clusters are resident at once.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor | None
    sink: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    page_table: cute.Tensor | None
    softmax_scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    num_clusters: Int32


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors that the device code reads and writes.

    Attributes:
        q_tma, k_tma, v_tma, o_tma: TMA's copies; o_tma only where the tiles have no splits.
        q, k, v: the tensors' coordinates for TMA.
        o: o's coordinates for TMA, or the tensor o if the tiles have splits.
        num_tiles: the scheduler's number of tiles.
    """

    q_tma: cute.CopyAtom
    q: cute.Tensor
    k_tma: cute.CopyAtom
    k: cute.Tensor
    v_tma: cute.CopyAtom
    v: cute.Tensor
    o_tma: cute.CopyAtom | None
    o: cute.Tensor
    lse: cute.Tensor | None
    sink: cute.Tensor | None
    pages: Pages | None
    num_tiles: Int32


@dataclass(frozen=True)
class Shared(Carried):
    """The values that all warps of a CTA share.

    Attributes:
        s: stage 0 of S in tensor memory.
        o: O in tensor memory.
        scale: factors of the rows of O, `[rows, stages]`.
        inverse_sum: the factors of the rows of O at the end, `[rows, 2]`.
    """

    storage: Pointers
    barriers: Barriers
    queue: TileQueue
    visible: Visibility
    s: cute.Tensor
    o: cute.Tensor
    scale: cute.Tensor
    inverse_sum: cute.Tensor


class Sm100Hd256Forward:
    """The kernel for one Hd256ForwardSpec; see the module's docstring."""

    def __init__(self, spec: Hd256ForwardSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.scheduler = SCHEDULER_CLASSES[spec.scheduler]
        self.pipeline = Pipeline(*EDGES, *self.scheduler.edges(SCHEDULER))
        self.packed = spec.packed_heads
        self.work = SplitWork if spec.split else Work
        self.smem = SharedMemory(
            Buffer("q", self.dtype, ROWS * HEAD_DIM, 1, SWIZZLE_ALIGNMENT, "Q, 128 x 256"),
            Buffer(
                "kv", self.dtype, KEYS * HEAD_DIM, KV_STAGES, SWIZZLE_ALIGNMENT,
                "K, 64 x 256, or V, 128 x 128",
            ),
            Buffer("o", self.dtype, ROWS * BOX, O_STAGES, SWIZZLE_ALIGNMENT, "O, 128 x 64"),
            Buffer("scale", Float32, ROWS, S_STAGES, holds="factors of O's rows"),
            Buffer("inverse_sum", Float32, ROWS, 2, holds="1 / sum of rows"),
            TileQueue.buffer(self.work),
            Buffer("clc_response", Int32, CLC_RESPONSE_BYTES // 4),
            Buffer("barriers", Int64, self.pipeline.count),
            Buffer("tmem_address", Int32, 1),
        )  # fmt: skip
        self.q_rows = BoxedRows(
            ROWS, HEAD_DIM, spec.ragged_q, batched=not spec.varlen_q, packed=self.packed
        )
        self.k_rows, self.v_rows = (
            BoxedRows(spec.page_rows or rows, HEAD_DIM, spec.ragged_k, batched=not spec.varlen_k)
            for rows in (KEYS, TILE_N)
        )

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.smem, self.pipeline, ROLES, shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        spec, fake = self.spec, FakeArguments(self.spec, HEAD_DIM)
        given = {"lse": fake.lse() if spec.lse else None}
        if spec.split:
            given = {"o": fake.o_splits(), "lse": fake.lse_splits()}
        return placeholders(fake.arguments(Arguments, **given))

    # -- host ---------------------------------------------------------------------------------

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        spec = self.spec
        queries = Sequences(a.q.shape[-3], a.cu_seqlens_q, a.seqused_q)
        keys = Sequences(a.k.shape[-3], a.cu_seqlens_k, a.seqused_k)
        pages = None
        if cutlass.const_expr(a.page_table is not None):
            pages = Pages.of(a.page_table, a.k, spec, TILE_N)
            keys = Sequences(pages.most_keys, a.cu_seqlens_k, a.seqused_k)
        tiles = self.tile_map(a, queries, keys)
        num_tiles = tiles.count()
        visible = Visibility.of(spec, TILE_M, TILE_N, self.packed, a.window_left, a.window_right)
        scaling = Scaling.of(a.softmax_scale, a.softcap if spec.softcap else None)
        num_ctas = CTAS * self.scheduler.clusters(num_tiles, a.num_clusters)
        if cutlass.const_expr(not spec.split):  # partial results have their own memory
            lengths = (a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_q, a.seqused_k)
            if overlaps((a.o, a.lse), (a.q, a.k, a.v, a.sink, *lengths, a.page_table)):
                num_ctas = Int32(0)  # the driver rejects an empty grid; the operator says why
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        o_copy = (None, a.o)
        if cutlass.const_expr(not spec.split):
            o_copy = self.q_rows.atom(cpasync.CopyBulkTensorTileS2GOp(), a.o)
        x = Operands(
            *self.q_rows.atom(load, a.q), *self.k_rows.atom(load, a.k),
            *self.v_rows.atom(load, a.v), *o_copy, a.lse, a.sink, pages, num_tiles,
        )  # fmt: skip
        self.kernel(x, tiles, visible, scaling).launch(
            grid=[num_ctas, 1, 1],
            block=[NUM_WARPS * WARP_SIZE, 1, 1],
            cluster=[CTAS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    def tile_map(self, a: Arguments, queries: Sequences, keys: Sequences) -> TileMap:
        heads, batch = a.q.shape[-2] // self.packed, queries.batch(a.q)
        head_bytes = Int64(keys.tokens) * (2 * 2 * HEAD_DIM)  # bytes of K and V
        given = (
            TILE_M, self.packed, self.spec.window_right, queries, keys, heads,
            a.q.shape[-2] // a.k.shape[-2], batch, heads_in_l2(head_bytes, heads * batch),
        )  # fmt: skip
        return SplitTileMap(*given, splits=a.o.shape[0]) if self.spec.split else TileMap(*given)

    def key_tiles(self, visible: Visibility, work: Work | SplitWork) -> tuple[Int32, Int32]:
        """Return [first, end), the K/V tiles of a tile, or of a split of the tile."""
        first, end = visible.key_tiles(work.block, work.seqlen_q, work.seqlen_k)
        if isinstance(work, SplitWork):
            return work.part(first, end, self.spec.split_key_tiles)
        return first, end

    # -- device: set-up -----------------------------------------------------------------------

    @cute.kernel
    def kernel(self, x: Operands, tiles: TileMap, visible: Visibility, scaling: Scaling) -> None:
        tiles = tiles.on_device(x.o)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = self.smem.allocate()
        barriers = self.pipeline.at(storage.barriers)

        copies = (x.q_tma, x.k_tma, x.v_tma, *(() if self.spec.split else (x.o_tma,)))
        start_cluster(warp, LOAD, MMA, copies, barriers, TMEM, storage.tmem_address)

        qk_mma, pv_mma = mma_over_head_dim(self.dtype), mma_over_tile(self.dtype, HEAD_DIM)
        own = Shared(
            storage=storage,
            barriers=barriers,
            queue=TileQueue(self.work, storage.work, barriers),
            visible=visible,
            s=accumulator(qk_mma, TILE_N, TMEM.pointer("s")),
            o=accumulator(pv_mma, HEAD_DIM, TMEM.pointer("o")),
            scale=cute.make_tensor(storage.scale, cute.make_layout((ROWS, S_STAGES))),
            inverse_sum=cute.make_tensor(storage.inverse_sum, cute.make_layout((ROWS, 2))),
        )

        # setmaxregister applies to whole warpgroups. Correction keeps its 168 registers, but ptxas
        # has to be told the limit of each branch.
        if warp >= LOAD.warps[0]:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == SCHEDULER.warps[0]:
                scheduler = self.scheduler(x.num_tiles, barriers, storage.clc_response)
                own.queue.fill(scheduler, tiles)
            elif warp == LOAD.warps[0]:
                self.load_warp(x, own)
            elif warp == MMA.warps[0]:
                self.mma_warp(own, qk_mma, pv_mma)
            else:
                self.store_warp(x, own)
        elif warp < SOFTMAX.warps.stop:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            self.softmax_warps(x, own, scaling)
        else:
            cute.arch.setmaxregister_decrease(CORRECTION_REGISTERS)
            self.correction_warps(x, own)

        finish_cluster(warp, MMA, TMEM)

    # -- device: load -------------------------------------------------------------------------

    @cute.jit
    def load_warp(self, x: Operands, own: Shared) -> None:
        """Load Q of each tile, then its K/V tiles from the last to the first; each CTA loads its
        half."""
        storage, barriers, queue, pages = own.storage, own.barriers, own.queue, x.pages
        across = HEAD_DIM // BOX
        q_smem = boxes(storage.q, ROWS, (across, ROWS * BOX), (1, Q_BYTES // 2))
        k_smem = boxes(storage.kv, KEYS, (across, KEYS * BOX), (KV_STAGES, KV_BYTES // 2))
        v_smem = boxes(storage.kv, TILE_N, (DIMS // BOX, TILE_N * BOX), (KV_STAGES, KV_BYTES // 2))
        if cutlass.const_expr(pages is not None):
            k_pages = replace(pages, tile_n=KEYS)  # type: ignore[type-var]
            k_smem = k_pages.view(storage.kv, HEAD_DIM, KV_STAGES)
            v_smem = pages.view(storage.kv, DIMS, KV_STAGES)
        taken = Int32(0)  # tiles taken from the queue
        loaded_q = Int32(0)
        n = Int32(0)  # uses of the ring
        work = queue.take(taken)
        while work.exists:
            cta = cta_rank()
            first, end = self.key_tiles(own.visible, work)
            if first < end:
                barriers.wait_previous("q_empty", loaded_q)
                barriers.leader_expects("q_full", loaded_q, Q_BYTES, cta)
                rows = self.q_rows.box(x.q, CTAS * work.block + cta, *work.queries)
                load_boxes(x.q_tma, rows, q_smem, barriers, "q_full", loaded_q)
                loaded_q += 1
                for i in cutlass.range(end - first + 1, unroll=1):
                    if i < end - first:
                        tile = CTAS * (end - 1 - i) + cta
                        if cutlass.const_expr(pages is not None):
                            found = k_pages.of_tile(tile, work.sequence, work.seqlen_k, self.k_rows)
                        barriers.wait_previous("kv_empty", n)
                        barriers.leader_expects("kv_full", n, KV_BYTES, cta)
                        if cutlass.const_expr(pages is None):
                            keys = self.k_rows.box(x.k, tile, *work.keys)
                            load_boxes(x.k_tma, keys, k_smem, barriers, "kv_full", n)
                        else:
                            k_pages.load(
                                x.k_tma, x.k, self.k_rows, found, work.kv_head, k_smem, barriers,
                                "kv_full", n,
                            )  # fmt: skip
                        n += 1
                    if i > 0:
                        if cutlass.const_expr(pages is not None):
                            found = pages.of_tile(
                                end - i, work.sequence, work.seqlen_k, self.v_rows
                            )
                        barriers.wait_previous("kv_empty", n)
                        barriers.leader_expects("kv_full", n, KV_BYTES, cta)
                        if cutlass.const_expr(pages is None):
                            values = self.v_rows.box(x.v, end - i, *work.keys)
                            values = cute.domain_offset((0, cta * DIMS), values)
                            load_boxes(x.v_tma, values, v_smem, barriers, "kv_full", n)
                        else:
                            pages.load(
                                x.v_tma, x.v, self.v_rows, found, work.kv_head, v_smem, barriers,
                                "kv_full", n, cta * DIMS,
                            )  # fmt: skip
                        n += 1
            taken += 1
            work = queue.take(taken)

    # -- device: MMA --------------------------------------------------------------------------

    @cute.jit
    def mma_warp(self, own: Shared, qk_mma: cute.TiledMma, pv_mma: cute.TiledMma) -> None:
        """Issue S of the next K/V tile before P V of this tile, so that softmax overlaps an MMA."""
        storage, barriers, queue = own.storage, own.barriers, own.queue
        q_frag = shared_a(qk_mma, OVER_HEAD_DIM, self.dtype, storage.q)
        k_frag = shared_b(qk_mma, OVER_HEAD_DIM, self.dtype, storage.kv, KV_STAGES)
        v_frag = shared_b(pv_mma, OVER_TILE, self.dtype, storage.kv, KV_STAGES)
        p_frag = tensor_a(pv_mma, OVER_TILE, self.dtype, TMEM.offsets["s"])

        taken = Int32(0)  # tiles taken from the queue
        loaded_q = Int32(0)
        n = Int32(0)  # uses of the ring
        issued = Int32(0)  # K/V tiles whose S has been issued
        added = Int32(0)  # K/V tiles whose P V has been issued
        work = queue.take(taken)
        while work.exists:
            first, end = self.key_tiles(own.visible, work)
            if first < end and cta_rank() == 0:
                barriers.wait("q_full", loaded_q)
                for i in cutlass.range(end - first + 1, unroll=1):
                    if i < end - first:
                        barriers.wait("kv_full", n)
                        # This overwrites the P of two K/V tiles ago. The P V that reads the old P
                        # has been issued, and MMAs run in order.
                        tcgen05_fence_after()
                        to = shifted(own.s, TILE_N * (issued & (S_STAGES - 1)))
                        stage = barriers.stage("kv_full", n)
                        issue_mma(qk_mma, to, q_frag, k_frag, stage, Boolean(False))
                        barriers.commit("kv_empty", n)
                        barriers.commit("s_full", issued)
                        n += 1
                        issued += 1
                        if i == end - first - 1:
                            barriers.commit("q_empty", loaded_q)
                    if i > 0:
                        barriers.wait("kv_full", n)
                        barriers.wait("o_ready", added)
                        barriers.wait("p_full", added)
                        tcgen05_fence_after()
                        # A 32-bit column of tensor memory holds two values of P.
                        p = shifted(p_frag, 2 * TILE_N * (added & (S_STAGES - 1)))
                        stage = barriers.stage("kv_full", n)
                        issue_mma(pv_mma, own.o, p, v_frag, stage, i > 1)
                        barriers.commit("kv_empty", n)
                        barriers.commit("pv_done", added)
                        n += 1
                        added += 1
                loaded_q += 1
            taken += 1
            work = queue.take(taken)

    # -- device: softmax ----------------------------------------------------------------------

    @cute.jit
    def softmax_warps(self, x: Operands, own: Shared, scaling: Scaling) -> None:
        """Each thread has a row of S, and writes P over it."""
        barriers, queue, visible = own.barriers, own.queue, own.visible
        row = cute.arch.thread_idx()[0] % ROWS
        load, s_from, values_shape = row_load(first_columns(own.s, TILE_N), row, FRAGMENT)
        store, p_to, words_shape = row_store(first_columns(own.s, TILE_N // 2), row, FRAGMENT // 2)

        taken = Int32(0)  # tiles taken from the queue
        n = Int32(0)  # K/V tiles
        # The stage is released late: reading the work twice saves registers.
        queue.wait(taken)
        work = queue.read(taken)
        while work.exists:
            first, end = self.key_tiles(own.visible, work)
            # Whole K/V tiles need no mask, because every row of this CTA sees every key.
            whole_first, whole_end = visible.whole_key_tiles(
                (CTAS * work.block + cta_rank()) * ROWS, ROWS, work.seqlen_q, work.seqlen_k
            )
            maximum = Float32(-INF)
            total = Float32(0.0)
            for i in cutlass.range(end - first, unroll=1):
                key_tile = end - 1 - i
                barriers.wait("s_full", n)
                tcgen05_fence_after()
                column = TILE_N * (n & (S_STAGES - 1))
                values = cute.make_rmem_tensor(values_shape, Float32)
                cute.copy(load, shifted(s_from, column), values)
                cute.arch.fence_view_async_tmem_load()
                if cutlass.const_expr(self.spec.softcap):
                    cap_row(values, scaling)
                if key_tile < whole_first or key_tile >= whole_end:
                    self.mask(own, values, key_tile, row, taken)

                previous = maximum
                highest = row_maximum(values, previous)
                maximum, used, stays, large = move_maximum(highest, previous, scaling)
                offset = -used * scaling.log2
                if large:
                    used, offset = subtract_maximum(values, maximum), Float32(0.0)
                factor = cute.math.exp2((previous - used) * scaling.log2, fastmath=True)
                if stays:
                    factor = Float32(1.0)
                own.scale[row, n & (S_STAGES - 1)] = factor
                barriers.warp_arrives("scale_full", n)

                tile_sum = self.exponentiate(
                    values, store, shifted(p_to, column), words_shape, scaling.log2, offset
                )
                cute.arch.fence_view_async_tmem_store()
                tcgen05_fence_before()
                barriers.warp_arrives("p_full", n)
                total = total * factor + tile_sum
                n += 1

            ended = queue.read(taken)
            queue.release(taken)
            packed_row = (CTAS * ended.block + cta_rank()) * ROWS + row
            token = visible.token(packed_row)
            head = ended.head * self.packed + (packed_row & (self.packed - 1))
            sink_value = None
            if cutlass.const_expr(x.sink is not None):
                sink_value = Float32(0.0)
                if token < ended.seqlen_q:
                    sink_value = Float32(x.sink[head])
            inverse, log_sum = finish_row(total, maximum, scaling, sink_value)
            barriers.wait_previous("sum_read", taken)
            own.inverse_sum[row, taken & 1] = inverse
            barriers.warp_arrives("sum_full", taken)
            if cutlass.const_expr(x.lse is not None):
                if token < ended.seqlen_q:
                    x.lse[ended.lse_at(head, token, self.spec.varlen_q)] = log_sum
            taken += 1
            queue.wait(taken)
            work = queue.read(taken)
        queue.release(taken)

    @cute.jit
    def mask(
        self, own: Shared, values: cute.Tensor, key_tile: Int32, row: Int32, taken: Int32
    ) -> None:
        """Set the columns of keys that the row does not see to -inf."""
        keep_branch()
        visible, work = own.visible, own.queue.read(taken)
        token = visible.token((CTAS * work.block + cta_rank()) * ROWS + row)
        low, high = visible.keys(token, work.seqlen_q, work.seqlen_k)
        low, high = low - key_tile * TILE_N, high - key_tile * TILE_N
        mask_row(values, range(TILE_N), low if self.spec.window_left else None, high)

    @cute.jit
    def exponentiate(
        self,
        values: cute.Tensor,
        store: cute.TiledCopy,
        to: cute.Tensor,
        shape: Any,
        scale_log2: Float32,
        offset: Float32,
    ) -> Float32:
        """Store P = 2 ** (values * scale_log2 + offset), two in a word, to tensor memory, and
        return its sum."""
        words = cute.make_rmem_tensor(shape, Float32)  # (words of a fragment, 1, fragments)
        sums = [(Float32(0.0), Float32(0.0)) for _ in range(4)]
        for fragment in cutlass.range_constexpr(TILE_N // FRAGMENT):
            columns = range(fragment * FRAGMENT, (fragment + 1) * FRAGMENT)
            pairs = exponents(values, columns, scale_log2, offset)
            # The MMA waits for the last fragment, and the special function unit has less latency.
            last = fragment == TILE_N // FRAGMENT - 1
            pairs = exp2_mixed(pairs, on_fma=range(0) if last else ON_FMA_UNITS)
            floats = cute.make_rmem_tensor((FRAGMENT,), Float32)
            for j in cutlass.range_constexpr(FRAGMENT // 2):
                floats[2 * j], floats[2 * j + 1] = pairs[j]
                sums[j % 4] = cute.arch.add_packed_f32x2(sums[j % 4], pairs[j])
            part = words[None, None, fragment]
            rounded = cute.make_tensor(
                cute.recast_ptr(part.iterator, dtype=self.dtype), cute.make_layout(FRAGMENT)
            )
            rounded.store(floats.load().to(self.dtype))
            cute.copy(store, part, to[None, None, fragment])
        add = cute.arch.add_packed_f32x2
        x, y = add(add(sums[0], sums[1]), add(sums[2], sums[3]))
        return x + y

    # -- device: correction -------------------------------------------------------------------

    @cute.jit
    def correction_warps(self, x: Operands, own: Shared) -> None:
        """Each thread has a row of O. The thread rescales the row where its maximum moved, and
        divides the row by the sum at the end."""
        barriers, queue = own.barriers, own.queue
        row = cute.arch.thread_idx()[0] % ROWS
        load, o_from, shape = row_load(first_columns(own.o, BOX), row, FRAGMENT)
        store, o_to, _ = row_store(first_columns(own.o, BOX), row, FRAGMENT)
        o_smem = boxes(own.storage.o, ROWS, (O_STAGES, O_BYTES // 2))

        taken = Int32(0)  # tiles taken from the queue
        n = Int32(0)  # K/V tiles
        staged = Int32(0)  # boxes of O
        work = queue.take(taken)
        while work.exists:
            first, end = self.key_tiles(own.visible, work)
            for i in cutlass.range(end - first, unroll=1):
                barriers.wait("scale_full", n)
                factor = own.scale[row, n & (S_STAGES - 1)]
                if i > 0:
                    if cute.arch.vote_any_sync(factor != 1.0):
                        barriers.wait("pv_done", n - 1)
                        tcgen05_fence_after()
                        for box in cutlass.range(HEAD_DIM // BOX, unroll=1):
                            at = box * BOX
                            values = cute.make_rmem_tensor(shape, Float32)
                            cute.copy(load, shifted(o_from, at), values)
                            cute.arch.fence_view_async_tmem_load()
                            scale_row(values, factor)
                            cute.copy(store, values, shifted(o_to, at))
                        cute.arch.fence_view_async_tmem_store()
                        tcgen05_fence_before()
                # This is needed before a tile's first P V too, which overwrites the previous tile's
                # O.
                barriers.warp_arrives("o_ready", n)
                n += 1

            barriers.wait("sum_full", taken)
            inverse = own.inverse_sum[row, taken & 1]
            barriers.warp_arrives("sum_read", taken)
            if first < end:
                barriers.wait("pv_done", n - 1)
                tcgen05_fence_after()
            for box in cutlass.range(HEAD_DIM // BOX, unroll=1):
                values = cute.make_rmem_tensor(shape, Float32)
                if first < end:
                    at = box * BOX
                    cute.copy(load, shifted(o_from, at), values)
                    cute.arch.fence_view_async_tmem_load()
                if inverse == 0.0:  # no visible key; O may hold anything
                    values.fill(0.0)
                scale_row(values, inverse)
                if cutlass.const_expr(self.spec.split):
                    self.store_split(x, own, values, work, box * BOX, row)
                else:
                    rounded = round_row(values, self.dtype)
                    barriers.wait_previous("o_stored", staged)
                    stage_row(rounded, o_smem[row, None, staged & (O_STAGES - 1)])
                    cute.arch.fence_view_async_shared()
                    barriers.warp_arrives("o_staged", staged)
                    staged += 1
            tcgen05_fence_before()
            taken += 1
            work = queue.take(taken)

    @cute.jit
    def store_split(
        self,
        x: Operands,
        own: Shared,
        values: cute.Tensor,
        work: SplitWork,
        column: Int32,
        row: Int32,
    ) -> None:
        """Store columns of a split's row from registers."""
        packed_row = (CTAS * work.block + cta_rank()) * ROWS + row
        token = own.visible.token(packed_row)
        head = work.head * self.packed + (packed_row & (self.packed - 1))
        if token < work.seqlen_q:
            if cutlass.const_expr(self.spec.varlen_q):
                to = x.o[work.split, work.q_start + token, head, None]
            else:
                to = x.o[work.split, work.sequence, token, head, None]
            address = (to.iterator + column).toint()
            for j in cutlass.range_constexpr(0, cute.size(values), VECTOR):
                store_global(Float32, address + 4 * j, [values[j + c] for c in range(VECTOR)])

    # -- device: store ------------------------------------------------------------------------

    @cute.jit
    def store_warp(self, x: Operands, own: Shared) -> None:
        o_smem = boxes(own.storage.o, ROWS, (O_STAGES, O_BYTES // 2))
        taken = Int32(0)  # tiles taken from the queue
        stored = Int32(0)
        work = own.queue.take(taken)
        while work.exists:
            if cutlass.const_expr(not self.spec.split):
                rows = self.q_rows.box(
                    x.o, CTAS * work.block + cta_rank(), *work.queries, stored=True
                )
                edges = ("o_staged", "o_stored")
                stored = store_boxes(x.o_tma, rows, o_smem, own.barriers, edges, stored)
            taken += 1
            work = own.queue.take(taken)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)
