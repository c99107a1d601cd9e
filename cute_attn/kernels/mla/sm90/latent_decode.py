"""Decode of multi-head latent attention over a latent cache, for SM90: wgmma, TMA,
warp-specialised.

All heads of a sequence share one cached row for each key. The whole row is the key, and its first
head_dim_v columns are the value. The rows of a CTA's tile are 64 pairs of a query and a head, in
this order, so any number of heads fills tiles without padding. The CTA goes over the visible tiles
of 64 keys from the last to the first.

    S = Q C^T            64 x 64           by one warpgroup, Q and C in shared memory
    P = 2^(c S - m)                        in registers, then rounded in shared memory
    O = O a + P C_v      64 x head_dim_v   by two warpgroups, with half of the columns each

C is a tile of the cache, which serves as K and as V. O takes half of the register file. So two
warpgroups hold O, and a third computes the scores once for both; see docs/kernels/mla_decode.md.

    warps     role       work on a tile of keys
    0 to 3    softmax    S, softmax, P to shared memory, and the factors of O's rows
    4 to 11   outputs    O; at the end O / sum, from registers to global memory
    12 to 14  queries    the next tile's Q, by cp.async, which takes any strides and zeros rows
    15        load       finds the next work; tiles of the cache, by TMA

Long sequences are cut into pieces, as in the other kernels for few query rows, see `pieces`. Each
piece's CTA stores float32 results, and counts its arrival. The CTA that arrives last adds up the
segment's pieces, in the order of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...attention.parts import fragments
from ...attention.parts.fragment_softmax import HEADROOM, FragmentSoftmax
from ...attention.parts.merge import VECTOR, Parts, add_up, finish, store_rounded
from ...attention.parts.pages import Pages
from ...attention.parts.pieces import PieceMap, PieceWork
from ...attention.parts.softmax import Scaling, finish_row
from ...attention.parts.visibility import HeadsVisibility
from ...attention.parts.work import TileMap
from ...attention.sm90.mma import (
    ROWS,
    STEP,
    WARPGROUP,
    WARPGROUP_WARPS,
    held_rows,
    start_output_of_stored,
    start_scores,
)
from ...attention.sm90.store import row_parts, store_parts
from ...common.arguments import fake_contiguous, fake_rows, fake_strided
from ...common.carried import Carried
from ...common.cluster import prepare
from ...common.dtypes import DTYPE
from ...common.entry import entry, gathered, placeholders
from ...common.overlap import overlaps
from ...common.pair_scheduler import PairNumbers
from ...common.pipeline import CTAS, Barriers, Edge, Kind, Pipeline, Reach, Role, report_names
from ...common.ptx import wgmma
from ...common.ptx.async_copy import copy_async
from ...common.ptx.memory import (
    LINE_WORDS,
    NEVER,
    count_arrival,
    increment_global,
    load_shared,
    prefetch_global,
    shared_address,
    store_global,
    store_shared,
)
from ...common.scheduler import TileQueue
from ...common.sequences import Sequences
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ...common.spec import MAX_SMEM_BYTES, VECTOR_BYTES, WARP_SIZE
from ...common.tma import BOX, BoxedRows, boxes
from ..even_pieces import EvenPieces
from ..spec import PART_COLUMNS, TILE_M, TILE_N, LatentDecodeSpec

OUTPUT_GROUPS = 2  # warpgroups that hold O
WARP_ROWS = ROWS // WARPGROUP_WARPS
LINE_BYTES = 2 * BOX
BOX_BYTES = ROWS * LINE_BYTES
UNITS = LINE_BYTES // VECTOR_BYTES  # 16-byte units of a row of a box

SOFTMAX = Role("softmax", range(0, 4))
OUTPUTS = Role("outputs", range(4, 12))
HALF = Role("outputs of its columns", range(4, 8))  # or the next four warps
QUERIES = Role("queries", range(12, 15))
LOAD = Role("load", range(15, 16))
WORKERS = Role("softmax, outputs and queries", range(0, 15))
WARPS = 16

# Registers of a thread in the warpgroups of softmax, outputs, and queries and load.
REGISTERS = (120, 176, 40)

OUTPUTS_BARRIER = 1  # named barrier of the outputs' warps; all threads share barrier 0
GROUP = 12  # pieces that one CTA adds up
AT_ONCE = 8  # rows that a thread adds up at a time: their loads are in flight together


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        q: `[batch, queries, heads, head_dim_v]`.
        q_rope: `[batch, queries, heads, head_dim - head_dim_v]`, or None.
        cache: `[pages, page_size, head_dim]`.
        o: `[batch, queries, heads, head_dim_v]`.
        lse: `[batch, heads, queries]`, float32, or None.
        block_table: `[batch, max_pages]`.
        cache_seqlens: `[batch]`.
        counter: `[2 + 2 * slots]`: the next piece, the number of CTAs that are done, for the first
            piece of each group of pieces the number of pieces that have arrived, and for each
            segment's first piece the number of its groups. All are 0 before and after the launch.
        parts: results of pieces: `[slots, 64, head_dim_v + PART_COLUMNS]`. With `num_splits` of 0
            there are 2 * num_ctas slots, otherwise num_splits slots for each segment.
        softmax_scale: factor of the scores.
        num_splits: into how many pieces each segment is cut; 0: as many as balance the CTAs.
        num_ctas: how many CTAs are resident at once.
    """

    q: cute.Tensor
    q_rope: cute.Tensor | None
    cache: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor | None
    block_table: cute.Tensor
    cache_seqlens: cute.Tensor
    counter: cute.Tensor
    parts: cute.Tensor
    softmax_scale: Float32
    num_splits: Int32
    num_ctas: Int32


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors and numbers that the device code reads and writes; see `Arguments`.

    Attributes:
        cache_tma, cache: TMA's copies of the cache, and coordinates for them.
    """

    cache_tma: cute.CopyAtom
    cache: cute.Tensor
    q: cute.Tensor
    q_rope: cute.Tensor | None
    o: cute.Tensor
    lse: cute.Tensor | None
    pages: Pages
    counter: cute.Tensor
    parts: cute.Tensor
    heads: Int32
    num_splits: Int32
    num_ctas: Int32


@dataclass(frozen=True)
class Shared(Carried):
    """Shared addresses.

    Attributes:
        q: the tile of Q, in boxes of 64 rows.
        cache: the ring of tiles of the cache.
        p: the stages of P.
        factors: in each stage of P, the factors of O's rows.
        moved: in each stage of P, for each warp of rows, whether the factors are not 1.
        log_sums: in each stage of P, the log-sum-exps of the rows.
        arrived: the number of a segment's pieces that have arrived.
    """

    q: Int32
    cache: Int32
    p: Int32
    factors: Int32
    moved: Int32
    log_sums: Int32
    arrived: Int32


@dataclass(frozen=True)
class Scores(Carried):
    """What a warp of the softmax keeps: registers of S and of the first chunk of Q, and the rows'
    references and sums."""

    warp: Int32
    barriers: Barriers
    shared: Shared
    s: cute.Tensor
    held: cute.Tensor
    softmax: FragmentSoftmax
    visible: HeadsVisibility


@dataclass(frozen=True)
class Outputs(Carried):
    """What a warp of the outputs keeps.

    Attributes:
        warp: the warp's number in its warpgroup.
        group: the warpgroup's number, 0 or 1.
        acc: registers of O's rows, with the warpgroup's columns.
    """

    warp: Int32
    group: Int32
    barriers: Barriers
    shared: Shared
    acc: cute.Tensor
    visible: HeadsVisibility


@dataclass(frozen=True)
class Pieces(Carried):
    """Results of pieces, or of groups of pieces, to add up.

    Attributes:
        first: the slot of the first result.
        step: the difference between the slots of consecutive results.
        count: the number of results.
        lse_column: the column of a row's log-sum-exp.
    """

    first: Int32
    step: Int32
    count: Int32
    lse_column: Int32


class Sm90LatentDecode:
    """The kernel for one LatentDecodeSpec; see the module's docstring."""

    def __init__(self, spec: LatentDecodeSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.columns = spec.head_dim_v // OUTPUT_GROUPS
        self.tile_bytes = TILE_N * spec.head_dim * 2
        self.held = len(spec.chunk_columns[0])  # columns of Q that stay in registers
        self.rows = BoxedRows(spec.page_rows, spec.head_dim, ragged=True, batched=True)
        self.pair = spec.cluster == CTAS
        self.parts_of_p = 2 if spec.halves else 1  # parts of P's columns, published in turn
        self.tile_rows = TILE_M * spec.cluster  # rows of all CTAs of a cluster
        # Two stages of P where they fit.
        self.p_stages = next(
            stages
            for stages in (2, 1)
            if self.buffers(stages).nbytes <= MAX_SMEM_BYTES or stages == 1
        )
        self.pipeline = Pipeline(*self.edges(self.p_stages))
        self.smem = self.buffers(self.p_stages, limit=MAX_SMEM_BYTES)

    def edges(self, p_stages: int) -> tuple[Edge, ...]:
        stages, full = self.spec.stages, self.spec.stages * self.spec.chunks
        reach = Reach.EACH if self.pair else Reach.CTA
        p_full = p_stages * self.parts_of_p
        released, empty = (HALF, full) if self.spec.early else (OUTPUTS, stages)
        return (
            *TileQueue.edges(LOAD, WORKERS),
            *(PairNumbers.edges(LOAD) if self.pair else ()),
            Edge("q_full", QUERIES, SOFTMAX, 1, Kind.WARPS, payload="Q"),
            Edge("q_empty", SOFTMAX, QUERIES, 1, Kind.WARPS, payload="its stage"),
            Edge("cache_full", LOAD, OUTPUTS, full, Kind.BYTES, payload="a chunk of a cache tile"),
            Edge("cache_empty", released, LOAD, empty, Kind.WARPS, reach, "its stage"),
            Edge("p_full", SOFTMAX, OUTPUTS, p_full, Kind.WARPS, payload="P, and O's factors"),
            Edge("p_empty", OUTPUTS, SOFTMAX, p_stages, Kind.WARPS, payload="its stage"),
        )

    def buffers(self, p_stages: int, limit: int = 2 * MAX_SMEM_BYTES) -> SharedMemory:
        spec, at = self.spec, SWIZZLE_ALIGNMENT
        count = Pipeline(*self.edges(p_stages)).count
        return SharedMemory(
            Buffer("q", self.dtype, TILE_M * spec.head_dim, 1, at, "Q"),
            Buffer("cache", self.dtype, TILE_N * spec.head_dim, spec.stages, at, "the cache"),
            Buffer("p", self.dtype, TILE_M * TILE_N, p_stages, at, "P"),
            Buffer("factors", Float32, TILE_M, p_stages, holds="factors of O's rows"),
            Buffer("moved", Int32, WARPGROUP_WARPS, p_stages, holds="whether factors are not 1"),
            Buffer("log_sums", Float32, TILE_M, p_stages, holds="log-sum-exps of the rows"),
            Buffer("arrived", Int32, 4, holds="the number of pieces that have arrived"),
            *((PairNumbers.buffer(),) if self.pair else ()),
            TileQueue.buffer(PieceWork),
            Buffer("barriers", Int64, count),
            limit=limit,
        )

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        roles = (SOFTMAX, OUTPUTS, QUERIES, LOAD)
        return report_names(self.smem, self.pipeline, roles, shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        spec = self.spec
        batch, queries, heads, pages, size = (cute.sym_int() for _ in range(5))
        rows = batch, queries, heads
        part = (cute.sym_int(), TILE_M, spec.head_dim_v + PART_COLUMNS)
        return placeholders(
            Arguments(
                q=fake_rows(self.dtype, (*rows, spec.head_dim_v)),
                q_rope=fake_rows(self.dtype, (*rows, spec.rope)) if spec.rope else None,
                cache=fake_rows(self.dtype, (pages, size, spec.head_dim)),
                o=fake_rows(self.dtype, (*rows, spec.head_dim_v)),
                lse=fake_strided(Float32, (batch, heads, queries)) if spec.lse else None,
                block_table=fake_rows(Int32, (batch, cute.sym_int()), align=Int32.width // 8),
                cache_seqlens=fake_contiguous(Int32, (batch,)),
                counter=fake_contiguous(Int32, (cute.sym_int(),)),
                parts=fake_contiguous(Float32, part, VECTOR_BYTES),
                softmax_scale=Float32(1.0),
                num_splits=Int32(0),
                num_ctas=Int32(1),
            )
        )

    # -- host ---------------------------------------------------------------------------------

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        spec = self.spec
        batch, queries, heads, _ = a.q.shape
        pages = Pages.of(a.block_table, a.cache, spec, TILE_N)
        keys = Sequences(pages.most_keys, None, a.cache_seqlens)
        tiles = TileMap(
            self.tile_rows, heads, spec.causal, Sequences(queries), keys, 1, 1, batch, Int32(1)
        )  # fmt: skip
        scaling = Scaling.of(a.softmax_scale, None, HEADROOM[spec.dtype])
        visible = HeadsVisibility(
            self.tile_rows, TILE_N, 1, None, Int32(0) if spec.causal else None,
            cute.fast_divmod_create_divisor_v2(heads),
        )  # fmt: skip
        num_ctas = a.num_ctas
        read = (a.q, a.q_rope, a.cache, a.block_table, a.cache_seqlens)
        if overlaps((a.o, a.lse), read):
            num_ctas = Int32(0)  # the driver rejects an empty grid; the operator says why
        # One head, as the boxes of attention's K and V have heads.
        outer, row, one = a.cache.stride
        shape = (a.cache.shape[0], a.cache.shape[1], 1, spec.head_dim)
        cache = cute.make_tensor(
            a.cache.iterator, cute.make_layout(shape, stride=(outer, row, row, one))
        )
        copies = cpasync.CopyBulkTensorTileG2SOp, cpasync.CopyBulkTensorTileG2SMulticastOp
        tma, cache = self.rows.atom(copies[self.pair](), cache)
        x = Operands(
            tma, cache, a.q, a.q_rope, a.o, a.lse, pages, a.counter, a.parts, heads, a.num_splits,
            a.num_ctas,
        )  # fmt: skip
        self.kernel(x, tiles, visible, scaling).launch(
            grid=[spec.cluster * num_ctas if self.pair else num_ctas, 1, 1],
            block=[WARPS * WARP_SIZE, 1, 1],
            cluster=[CTAS, 1, 1] if self.pair else None,
            min_blocks_per_mp=1,
            stream=stream,
        )

    # -- device: set-up -----------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self, x: Operands, tiles: TileMap, visible: HeadsVisibility, scaling: Scaling
    ) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = self.smem.allocate()
        barriers = self.pipeline.at(storage.barriers)
        if warp == LOAD.warps[0]:
            prefetch_global(tiles.keys.seqused, cute.arch.lane_idx() * LINE_WORDS)
            x.pages.prefetch_first()
            prepare((x.cache_tma,), barriers)
        if cutlass.const_expr(self.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        shared = Shared(
            *(
                shared_address(getattr(storage, name))
                for name in ("q", "cache", "p", "factors", "moved", "log_sums", "arrived")
            )
        )
        softmax_registers, output_registers, load_registers = REGISTERS
        if warp >= QUERIES.warps[0]:
            cute.arch.setmaxregister_decrease(load_registers)
            if warp == LOAD.warps[0]:
                self.load_warp(x, storage, barriers, tiles, visible)
            else:
                self.query_warps(x, storage, barriers, shared, visible, warp - QUERIES.warps[0])
        elif warp >= OUTPUTS.warps[0]:
            cute.arch.setmaxregister_increase(output_registers)
            number = warp - OUTPUTS.warps[0]
            outputs = Outputs(
                warp=number % WARPGROUP_WARPS,
                group=number // WARPGROUP_WARPS,
                barriers=barriers,
                shared=shared,
                acc=fragments.accumulators(self.columns),
                visible=visible,
            )
            self.output_warps(x, storage, outputs)
        else:
            cute.arch.setmaxregister_decrease(softmax_registers)
            scores = Scores(
                warp=warp,
                barriers=barriers,
                shared=shared,
                s=fragments.accumulators(TILE_N),
                held=cute.make_rmem_tensor((self.held // 4,), Int32),
                softmax=FragmentSoftmax(scaling),
                visible=visible,
            )
            self.softmax_warps(x, storage, scores)
        if cutlass.const_expr(self.pair):
            # Neither CTA may end while the other CTA signals it or loads to its shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def first_row(self, work: PieceWork) -> Any:
        """The CTA's first row of a tile of the cluster."""
        row = work.block * self.tile_rows
        return row + cute.arch.block_idx_in_cluster() * TILE_M if self.pair else row

    def slot(self, number: Int32) -> Any:
        """The place of a piece's result; each CTA of a pair has its own place."""
        return number * CTAS + cute.arch.block_idx_in_cluster() if self.pair else number

    def key_tiles(self, visible: HeadsVisibility, work: PieceWork) -> tuple[Any, Any]:
        """[first, end) of the key tiles of a piece."""
        return work.part(*visible.key_tiles(work.block, work.seqlen_q, work.seqlen_k))

    # -- device: loads ------------------------------------------------------------------------

    @cute.jit
    def load_warp(
        self, x: Operands, storage: Pointers, barriers: Barriers, tiles: TileMap,
        visible: HeadsVisibility,
    ) -> None:  # fmt: skip
        """Publish and load pieces and whole segments, one after the other."""
        smem = [self.chunk(storage.cache, x.pages, c) for c in range(self.spec.chunks)]
        queue = TileQueue(PieceWork, storage.work, barriers)
        pieces = PieceMap.of(
            tiles, visible, x.num_ctas, self.spec.least_key_tiles, x.num_splits, fits=True
        )
        # Single CTAs that have several tiles of rows of a sequence read the cache at the same time,
        # so that memory sends the cache once. Equal shares would end this. Pairs need less memory.
        alone = self.pair or tiles.blocks(tiles.queries.tokens) == 1
        even = EvenPieces.of(pieces, x.num_ctas, (x.num_splits == 0) & alone)
        taken = Int32(0)
        if even.used:
            taken = self.load_shares(x, smem, queue, visible, even)
        else:
            taken = self.load_pieces(x, storage, smem, queue, visible, pieces)
        queue.publish_end(taken)
        if cute.arch.lane_idx() == 0:
            # The last CTA to come here leaves the counters as it found them.
            at = x.counter.iterator.toint()
            ctas = cute.arch.grid_dim()[0]
            if count_arrival(at + 4, ctas) == ctas - 1:
                store_global(Int32, at, [Int32(0)])

    @cute.jit
    def load_shares(
        self, x: Operands, smem: list[cute.Tensor], queue: TileQueue, visible: HeadsVisibility,
        even: EvenPieces,
    ) -> Int32:  # fmt: skip
        """Publish and load the pieces and segments of the CTA's equal share. Return their
        number."""
        cta = cute.arch.cluster_idx()[0] if self.pair else cute.arch.block_idx()[0]
        unit, taken, n = Int32(cta * even.share), Int32(0), Int32(0)
        end = cutlass.min(unit + even.share, even.total)
        window = even.start()
        while unit < end:
            window = even.window_of(unit, window)
            work, unit, has_work = even.work(cta, unit, window)
            if has_work:
                queue.publish_work(taken, work)
                n = self.load_tiles(x, smem, queue.barriers, work, visible, n)
                taken += 1
        return taken

    @cute.jit
    def load_pieces(
        self, x: Operands, storage: Pointers, smem: list[cute.Tensor], queue: TileQueue,
        visible: HeadsVisibility, pieces: PieceMap,
    ) -> Int32:  # fmt: skip
        """Publish and load the pieces and segments whose numbers the CTA takes. Return how many
        these are."""
        barriers = queue.barriers
        number = cute.arch.cluster_idx()[0] if self.pair else cute.arch.block_idx()[0]
        window = pieces.start()
        window = pieces.window_of(number, window)
        taken, n = Int32(0), Int32(0)
        while window.order < pieces.orders:
            work = pieces.work(number, window)
            queue.publish_work(taken, work)
            n = self.load_tiles(x, smem, barriers, work, visible, n)
            taken += 1
            number = Int32(0)
            if cutlass.const_expr(self.pair):
                numbers = PairNumbers.of(barriers, storage, x.counter)
                number = numbers.take(Int32(NEVER), taken - 1) + cute.arch.cluster_dim()[0]
            else:
                if cute.arch.lane_idx() == 0:
                    number = increment_global(x.counter.iterator.toint(), NEVER)
                number = cute.arch.shuffle_sync(number, 0) + cute.arch.grid_dim()[0]
            window = pieces.window_of(number, window)
        return taken

    def chunk(self, buffer: Any, pages: Pages, number: int) -> cute.Tensor:
        """The stages of a chunk of the cache's tiles, as `Pages.load` fills them."""
        spec, columns = self.spec, self.spec.chunk_columns[number]
        return boxes(
            buffer + TILE_N * columns.start, spec.page_rows, (pages.boxes, spec.page_rows * BOX),
            (len(columns) // BOX, TILE_N * BOX), (spec.stages, TILE_N * spec.head_dim),
        )  # fmt: skip

    @cute.jit
    def load_tiles(
        self, x: Operands, smem: list[cute.Tensor], barriers: Barriers, work: PieceWork,
        visible: HeadsVisibility, n: Int32,
    ) -> Int32:  # fmt: skip
        """Load a piece's tiles of the cache, from the last to the first, which are uses n and up.
        Return the number of the next use."""
        first, end = self.key_tiles(visible, work)
        for i in cutlass.range(end - first, unroll=1):
            found = x.pages.of_tile(end - 1 - i, work.sequence, work.seqlen_k, self.rows)
            if cutlass.const_expr(not self.spec.early):
                barriers.wait_previous("cache_empty", n)
            stage = self.stage(barriers, n)
            for c in cutlass.range_constexpr(self.spec.chunks):
                columns, use = self.spec.chunk_columns[c], n * self.spec.chunks + c
                if cutlass.const_expr(self.spec.early):
                    barriers.wait_previous("cache_empty", use)
                with cute.arch.elect_one():
                    barriers.expect("cache_full", use, 2 * TILE_N * len(columns))
                x.pages.load(
                    x.cache_tma, x.cache, self.rows, found, Int32(0), smem[c], barriers,
                    "cache_full", use, columns.start, stage, self.pair,
                )  # fmt: skip
            n += 1
        return n

    @cute.jit
    def query_warps(
        self, x: Operands, storage: Pointers, barriers: Barriers, shared: Shared,
        visible: HeadsVisibility, warp: Int32,
    ) -> None:  # fmt: skip
        """Load the tiles of Q."""
        queue = TileQueue(PieceWork, storage.work, barriers)
        taken = Int32(0)
        work = queue.take(taken)
        while work.exists:
            barriers.wait_previous("q_empty", taken)
            self.load_queries(x, shared, visible, work, warp)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            barriers.warp_arrives("q_full", taken)
            taken += 1
            work = queue.take(taken)

    @cute.jit
    def load_queries(
        self, x: Operands, shared: Shared, visible: HeadsVisibility, work: PieceWork, warp: Int32
    ) -> None:
        """Start to copy the warp's rows of Q. A lane copies every 32nd unit of 16 bytes of a row.
        Rows that do not exist become 0."""
        spec, lane = self.spec, cute.arch.lane_idx()
        units, of_rope = 2 * spec.head_dim_v // VECTOR_BYTES, 2 * spec.rope // VECTOR_BYTES
        for row in cutlass.range(warp, TILE_M, len(QUERIES), unroll=2):
            token, head = divmod(self.first_row(work) + row, visible.by_heads)
            present = token < work.seqlen_q
            token = cutlass.select_(present, token, 0)
            to = shared.q + row * LINE_BYTES
            source = x.q[work.sequence, token, head, None].iterator.toint()
            for first in cutlass.range_constexpr(0, units, WARP_SIZE):
                unit = first + lane
                copy_async(to + _place(unit, row), source + unit * VECTOR_BYTES, present)
            if cutlass.const_expr(of_rope > 0):
                source = x.q_rope[work.sequence, token, head, None].iterator.toint()
                if lane < of_rope:
                    copy_async(
                        to + _place(units + lane, row), source + lane * VECTOR_BYTES, present
                    )

    # -- device: scores and softmax -----------------------------------------------------------

    @cute.jit
    def softmax_warps(self, x: Operands, storage: Pointers, own: Scores) -> None:
        queue = TileQueue(PieceWork, storage.work, own.barriers)
        taken = Int32(0)  # pieces
        n = Int32(0)  # key tiles
        used = Int32(0)  # stages of P: each piece uses one more for the sums
        work = queue.take(taken)
        while work.exists:
            own.softmax.start()
            own.softmax.exact[0] = Int32(1)  # no row has a reference
            own.barriers.wait("q_full", taken)
            fragments.assign(own.held, held_rows(own.shared.q, own.warp, ROWS, self.held))
            first, end = self.key_tiles(own.visible, work)
            for i in cutlass.range(end - first, unroll=1):
                self.compute_scores(x, own, work, end - 1 - i, n, used)
                n += 1
                used += 1
            own.barriers.warp_arrives("q_empty", taken)
            self.publish_sums(own, used)
            used += 1
            taken += 1
            work = queue.take(taken)

    @cute.jit
    def compute_scores(
        self, x: Operands, own: Scores, work: PieceWork, key_tile: Int32, n: Int32, used: Int32
    ) -> None:
        """Compute P of a tile of keys, use n of the cache, and store P as use `used`."""
        fragments.assign(own.s, wgmma.wait(self.start_tile(own, n)))
        self.store_probabilities(x, own, work, key_tile, used)

    def start_tile(self, own: Scores, n: Int32) -> list[Any]:
        """Start S of a tile of keys, use n of the cache, chunk by chunk."""
        spec = self.spec
        stage = self.stage(own.barriers, n) * self.tile_bytes
        scores: Any = None
        for c in range(spec.chunks):
            own.barriers.wait("cache_full", n * spec.chunks + c)
            scores = start_scores(
                self.dtype, own.shared.q, own.shared.cache + stage, tile_m=TILE_M, tile_n=TILE_N,
                head_dim=spec.head_dim, columns=spec.chunk_columns[c], acc=scores,
                held=fragments.values(own.held) if c == 0 else None,
            )  # fmt: skip
        return scores

    def stage(self, barriers: Barriers, n: Int32) -> Any:
        """The stage of use n of the cache."""
        if self.spec.early:
            return barriers.stage("cache_empty", n * self.spec.chunks) // self.spec.chunks
        return barriers.stage("cache_empty", n)

    @cute.jit
    def store_probabilities(
        self, x: Operands, own: Scores, work: PieceWork, key_tile: Int32, used: Int32
    ) -> None:
        """Replace S of a tile of keys by P, and store P as use `used`."""
        row = self.first_row(work)
        _, whole_end = own.visible.whole_key_tiles(row, ROWS, work.seqlen_q, work.seqlen_k)
        if key_tile >= whole_end:
            self.mask(own, work, key_tile)
        rows = work.seqlen_q * x.heads - row
        rows = rows - own.warp * WARP_ROWS
        moved = Boolean(False)
        if cutlass.const_expr(self.spec.halves):
            moved = own.softmax.start_used(own.s, rows)
            own.softmax.finish_used(own.s, rows, range(TILE_N // 8))
        else:
            moved = own.softmax.update_used(own.s, rows)
        own.barriers.wait_previous("p_empty", used)
        lane = cute.arch.lane_idx()
        stage = own.barriers.stage("p_empty", used)
        to = own.shared.p + stage * BOX_BYTES
        half = TILE_N * ROWS // (2 * WARPGROUP * 2)  # words of a half
        words = fragments.operand(own.s, self.dtype)
        if cutlass.const_expr(self.spec.halves):
            words = words[:half]
        fragments.stage_matrices(words, to, own.warp, ROWS, lane)
        if moved:
            factors = [own.softmax.factor[r] for r in range(fragments.LANE_ROWS)]
            self.store_rows(own, own.shared.factors + stage * (TILE_M * 4), factors)
        if lane == 0:
            at = own.shared.moved + (stage * WARPGROUP_WARPS + own.warp) * 4
            store_shared(Int32, at, [Int32(moved)])
        cute.arch.fence_view_async_shared()
        own.barriers.warp_arrives("p_full", used * self.parts_of_p)
        if cutlass.const_expr(self.spec.halves):
            own.softmax.finish_used(own.s, rows, range(TILE_N // 8, TILE_N // 4))
            words = fragments.operand(own.s, self.dtype)[half:]
            fragments.stage_matrices(words, to, own.warp, ROWS, lane, TILE_N // 2)
            cute.arch.fence_view_async_shared()
            own.barriers.warp_arrives("p_full", used * 2 + 1)

    @cute.jit
    def store_rows(self, own: Scores, at: Int32, values: list[Any]) -> None:
        """Store a number for each of the lane's rows, from shared address `at` on."""
        if cute.arch.lane_idx() % fragments.LANES == 0:
            row = fragments.first_row(own.warp)
            for r in cutlass.range_constexpr(fragments.LANE_ROWS):
                store_shared(Float32, at + (row + r * fragments.LANE_ROW_STEP) * 4, [values[r]])

    @cute.jit
    def publish_sums(self, own: Scores, used: Int32) -> None:
        """Hand the factors 1 / sum and the log-sum-exps to the outputs, as use `used` of P."""
        totals = own.softmax.totals()
        found = [
            finish_row(totals[r], own.softmax.maximum[r], own.softmax.scaling, None)
            for r in range(fragments.LANE_ROWS)
        ]
        own.barriers.wait_previous("p_empty", used)
        stage = own.barriers.stage("p_empty", used) * (TILE_M * 4)
        inverses, log_sums = [x for x, _ in found], [x for _, x in found]
        self.store_rows(own, own.shared.factors + stage, inverses)
        self.store_rows(own, own.shared.log_sums + stage, log_sums)
        for part in cutlass.range_constexpr(self.parts_of_p):
            own.barriers.warp_arrives("p_full", used * self.parts_of_p + part)

    def mask(self, own: Scores, work: PieceWork, key_tile: Any) -> None:
        """Set the columns of keys that a row does not see to -inf."""
        highs = []
        for lane_row in range(fragments.LANE_ROWS):
            row = self.first_row(work) + fragments.first_row(own.warp)
            token = own.visible.token(row + lane_row * fragments.LANE_ROW_STEP)
            _, high = own.visible.keys(token, work.seqlen_q, work.seqlen_k)
            highs.append(high - key_tile * TILE_N)
        fragments.mask_rows(own.s, highs)

    # -- device: outputs ----------------------------------------------------------------------

    @cute.jit
    def output_warps(self, x: Operands, storage: Pointers, own: Outputs) -> None:
        queue = TileQueue(PieceWork, storage.work, own.barriers)
        taken, n, used = Int32(0), Int32(0), Int32(0)
        work = queue.take(taken)
        while work.exists:
            own.acc.fill(0.0)
            first, end = self.key_tiles(own.visible, work)
            for _ in cutlass.range(end - first, unroll=1):
                self.add_tile(own, n, used)
                n += 1
                used += 1
            for part in cutlass.range_constexpr(self.parts_of_p):
                own.barriers.wait("p_full", used * self.parts_of_p + part)
            log_sums = self.finish_rows(own, used)
            own.barriers.warp_arrives("p_empty", used)
            self.finish_piece(x, own, work, log_sums)
            used += 1
            taken += 1
            work = queue.take(taken)

    @cute.jit
    def add_tile(self, own: Outputs, n: Int32, used: Int32) -> None:
        """Add P C_v, with use n of the cache and use `used` of P."""
        if cutlass.const_expr(self.spec.early):
            # Chunks of the other warpgroup may be loaded again before this warpgroup looks.
            for c in cutlass.range_constexpr(self.spec.chunks // OUTPUT_GROUPS):
                own.barriers.wait("cache_full", self.release(own, n, c))
        else:
            for c in cutlass.range_constexpr(self.spec.chunks):
                own.barriers.wait("cache_full", n * self.spec.chunks + c)
        own.barriers.wait("p_full", used * self.parts_of_p)
        stage = own.barriers.stage("p_empty", used)
        at = own.shared.moved + (stage * WARPGROUP_WARPS + own.warp) * 4
        if load_shared(Int32, at)[0] != 0:
            fragments.scale_rows(own.acc, self.of_rows(own, own.shared.factors, used))
        v = own.shared.cache + self.stage(own.barriers, n) * self.tile_bytes
        v += own.group * (self.columns // BOX * BOX_BYTES)
        p = own.shared.p + stage * BOX_BYTES
        # A chunk of columns is released by itself, or all columns together.
        chunks = self.spec.chunks // OUTPUT_GROUPS if self.spec.early else 1
        columns = self.columns // chunks
        size, keys = columns // 2, TILE_N // STEP // self.parts_of_p
        values = fragments.values(own.acc)
        outs = [values[c * size : (c + 1) * size] for c in range(chunks)]
        for part in cutlass.range_constexpr(self.parts_of_p):
            if cutlass.const_expr(part > 0):
                own.barriers.wait("p_full", used * self.parts_of_p + part)
            for c in cutlass.range_constexpr(chunks):
                outs[c] = start_output_of_stored(
                    self.dtype, outs[c], p, v + c * columns // BOX * BOX_BYTES, tile_n=TILE_N,
                    columns=columns, steps=range(part * keys, (part + 1) * keys),
                )  # fmt: skip
        found: list[Any] = []
        for c in cutlass.range_constexpr(chunks):
            found += wgmma.wait(outs[c], pending=chunks - 1 - c)
            if cutlass.const_expr(c < chunks - 1):
                own.barriers.warp_arrives("cache_empty", self.release(own, n, c))
        fragments.assign(own.acc, found)
        own.barriers.warp_arrives("p_empty", used)
        own.barriers.warp_arrives("cache_empty", self.release(own, n, chunks - 1))

    def release(self, own: Outputs, n: Int32, chunk: int) -> Any:
        """The use of the edge `cache_empty` that the warpgroup releases after a chunk of its
        columns of use n of the cache."""
        if not self.spec.early:
            return n
        return n * self.spec.chunks + own.group * (self.spec.chunks // OUTPUT_GROUPS) + chunk

    def of_rows(self, own: Outputs, ring: Any, used: Int32) -> list[Any]:
        """The numbers of the lane's rows in the stage of use `used` of P; `ring` is the shared
        address of all stages."""
        at = ring + own.barriers.stage("p_empty", used) * (TILE_M * 4)
        row = fragments.first_row(own.warp)
        rows = [row + r * fragments.LANE_ROW_STEP for r in range(fragments.LANE_ROWS)]
        return [load_shared(Float32, at + row * 4)[0] for row in rows]

    @cute.jit
    def finish_rows(self, own: Outputs, used: Int32) -> list[Float32]:
        """Divide the rows of O by their sums, and return the log-sum-exps."""
        inverses = self.of_rows(own, own.shared.factors, used)
        for lane_row in cutlass.range_constexpr(fragments.LANE_ROWS):
            inverse = inverses[lane_row]
            values = own.acc[None, lane_row, None]
            for j in cutlass.range_constexpr(self.columns // 4):
                # A row without a visible key is 0, whatever P V holds.
                scaled = values[j] * inverse
                values[j] = cutlass.select_(inverse == 0.0, Float32(0.0), scaled)
        return self.of_rows(own, own.shared.log_sums, used)

    @cute.jit
    def finish_piece(
        self, x: Operands, own: Outputs, work: PieceWork, log_sums: list[Float32]
    ) -> None:
        """Store the result of a whole segment, or of a piece. After the last piece of a segment,
        add up its pieces. A segment with more than GROUP pieces is added up in two steps: first
        groups of GROUP neighbouring pieces, each by the CTA that arrives last in its group."""
        if work.pieces == 1:
            self.store_piece(x, own, work, log_sums, False)
        else:
            self.store_piece(x, own, work, log_sums, True)
            grouped = work.pieces > GROUP
            group = Int32(cutlass.select_(grouped, (work.slot - work.first_slot) // work.apart, 0))
            group = group // GROUP
            first = work.first_slot + group * (GROUP * work.apart)
            count = cutlass.min(work.pieces - group * GROUP, GROUP)
            if self.is_last(x, own, self.slot(first), count):
                if grouped:
                    parts = Pieces(first, work.apart, count, self.spec.head_dim_v)
                    self.add_pieces(x, own, work, parts, True)
                    groups = (work.pieces + (GROUP - 1)) // GROUP
                    of_groups = x.parts.shape[0] + self.slot(work.first_slot)
                    if self.is_last(x, own, of_groups, groups):
                        step = GROUP * work.apart
                        parts = Pieces(work.first_slot, step, groups, self.spec.head_dim_v + 1)
                        self.add_pieces(x, own, work, parts, False)
                else:
                    parts = Pieces(first, work.apart, count, self.spec.head_dim_v)
                    self.add_pieces(x, own, work, parts, False)

    @cute.jit
    def is_last(self, x: Operands, own: Outputs, number: Int32, count: Int32) -> Boolean:
        """Count the CTA's arrival at a counter of arrivals. Return whether all other CTAs of
        `count` have arrived, whose results the CTA then sees."""
        outputs_barrier()
        if cute.arch.thread_idx()[0] == OUTPUTS.warps[0] * WARP_SIZE:
            # All threads' stores come before the arrival, which a later arrival sees.
            at = x.counter.iterator.toint() + (2 + number) * 4
            store_shared(Int32, own.shared.arrived, [count_arrival(at, count)])
        outputs_barrier()
        return load_shared(Int32, own.shared.arrived)[0] == count - 1

    @cute.jit
    def store_piece(
        self, x: Operands, own: Outputs, work: PieceWork, log_sums: list[Float32],
        piece: cutlass.Constexpr[bool],
    ) -> None:  # fmt: skip
        """Store the warp's rows from registers: to o and lse, or as the result of a `piece`."""
        stored = Float32 if piece else self.dtype
        first = own.group * self.columns
        for lane_row in cutlass.range_constexpr(fragments.LANE_ROWS):
            in_tile = fragments.first_row(own.warp) + lane_row * fragments.LANE_ROW_STEP
            token, head = divmod(self.first_row(work) + in_tile, own.visible.by_heads)
            values = own.acc[None, lane_row, None]
            pairs = [[values[j], values[j + 1]] for j in range(0, self.columns // 4, 2)]
            parts = row_parts(pairs, stored)
            if token < work.seqlen_q:
                keeps_sum = (own.group == 0) & (cute.arch.lane_idx() % fragments.LANES == 0)
                if cutlass.const_expr(piece):
                    to = x.parts[self.slot(work.slot), in_tile, None]
                    if keeps_sum:
                        to[self.spec.head_dim_v] = log_sums[lane_row]
                else:
                    to = x.o[work.sequence, token, head, None]
                    if cutlass.const_expr(x.lse is not None):
                        if keeps_sum:
                            x.lse[work.sequence, head, token] = log_sums[lane_row]
                store_parts(cute.domain_offset((first,), to), parts, stored)

    @cute.jit
    def add_pieces(
        self, x: Operands, own: Outputs, work: PieceWork, pieces: Pieces,
        group: cutlass.Constexpr[bool],
    ) -> None:  # fmt: skip
        """Add up results of a segment, to o and lse, or of a `group` to the result of the group's
        first piece. A thread has four columns of AT_ONCE rows at a time."""
        spec = self.spec
        across = spec.head_dim_v // VECTOR
        abreast = OUTPUT_GROUPS * WARPGROUP // across  # rows that the threads have side by side
        thread = cute.arch.thread_idx()[0] - OUTPUTS.warps[0] * WARP_SIZE
        in_row, vector = thread // across, thread % across
        rows = cutlass.min(work.seqlen_q * x.heads - self.first_row(work), TILE_M)
        step = Int64(pieces.step) * (x.parts.stride[0] * (4 * self.spec.cluster))
        for first in cutlass.range(in_row, rows, abreast * AT_ONCE, unroll=1):
            of_thread = [first + i * abreast for i in range(AT_ONCE)]
            # A row that does not exist stands for the thread's own first row, because another
            # thread may be storing a group's result to its row.
            found = [cutlass.select_(row < rows, row, first) for row in of_thread]
            starts = [x.parts[self.slot(pieces.first), row, None].iterator.toint() for row in found]
            parts = [
                Parts.of_row(at, vector, pieces.lse_column, step, pieces.count) for at in starts
            ]
            sums = cute.make_rmem_tensor((VECTOR, AT_ONCE), Float32)
            maxima, totals = add_up(parts, Int32(0), 1, sums)
            for i in cutlass.range_constexpr(AT_ONCE):
                whole = cute.make_rmem_tensor((VECTOR,), Float32)
                log_sum = finish([sums[None, i]], [maxima[i]], [totals[i]], None, whole)
                if of_thread[i] < rows:
                    if cutlass.const_expr(group):
                        store_global(Float32, parts[i].o, [whole[j] for j in range(VECTOR)])
                        if vector == 0:  # other threads may still read the lse of the first piece
                            at = starts[i] + (spec.head_dim_v + 1) * 4
                            store_global(Float32, at, [log_sum])
                    else:
                        self.store_sum(x, own, work, of_thread[i], vector, whole, log_sum)

    @cute.jit
    def store_sum(
        self, x: Operands, own: Outputs, work: PieceWork, in_tile: Int32, vector: Int32,
        whole: cute.Tensor, log_sum: Float32,
    ) -> None:  # fmt: skip
        """Store four columns of a row of o, and the row's log-sum-exp."""
        token, head = divmod(self.first_row(work) + in_tile, own.visible.by_heads)
        if cutlass.const_expr(x.lse is not None):
            if vector == 0:
                x.lse[work.sequence, head, token] = log_sum
        store_rounded(x.o[work.sequence, token, head, None], vector, whole)


def outputs_barrier() -> None:
    """Wait for the threads of the outputs."""
    threads = OUTPUT_GROUPS * WARPGROUP
    cute.arch.barrier(barrier_id=OUTPUTS_BARRIER, number_of_threads=threads)


def _place(unit: Any, row: Any) -> Any:
    """The place of a unit of 16 bytes of a row, relative to the row in the first box of 64 rows,
    with TMA's swizzle."""
    return unit // UNITS * BOX_BYTES + ((unit % UNITS) ^ (row % UNITS)) * VECTOR_BYTES
