"""What the kernels of the latent decode share: arguments, the launch, loads, and the results of
pieces.

A kernel derives from `LatentKernel`, and has the warps that compute scores and outputs. Long
sequences are cut into pieces, as in the other kernels for few query rows, see `pieces`. Each
piece's CTA stores float32 results, and counts its arrival. Where each CTA has at most one piece,
the CTAs of a segment wait for one another, and each adds up a part of the results. Otherwise the
CTA that arrives last adds up all results. The order of the keys is the order of the sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric
from cutlass.cute.nvgpu import cpasync

from ...attention.parts import fragments
from ...attention.parts.fragment_softmax import HEADROOM
from ...attention.parts.gather import Gather
from ...attention.parts.merge import VECTOR, Parts, add_up, finish, store_rounded
from ...attention.parts.pages import Pages
from ...attention.parts.pieces import PieceMap
from ...attention.parts.softmax import Scaling
from ...attention.parts.visibility import HeadsVisibility
from ...attention.parts.work import TileMap
from ...attention.sm90.mma import ROWS, WARPGROUP, WARPGROUP_WARPS
from ...attention.sm90.store import row_parts, store_parts
from ...common.arguments import fake_contiguous, fake_rows, fake_strided
from ...common.carried import Carried
from ...common.cluster import prepare
from ...common.dtypes import DTYPE
from ...common.entry import entry, gathered, placeholders
from ...common.overlap import overlaps
from ...common.pipeline import Barriers, Kind, Pipeline, Role, report_names
from ...common.ptx.async_copy import copies_arrive, copy_async
from ...common.ptx.memory import (
    LINE_WORDS,
    NEVER,
    count_arrival,
    increment_global,
    load_acquire,
    load_global,
    load_shared,
    prefetch_global,
    shared_address,
    store_global,
    store_shared,
)
from ...common.scheduler import TileQueue, restore_counter
from ...common.sequences import Sequences
from ...common.smem import Pointers, SharedMemory
from ...common.spec import VECTOR_BYTES, WARP_SIZE
from ...common.tma import BOX, BoxedRows, boxes
from ..even_pieces import EvenPieces, LatentWork
from ..spec import GATHERED, PART_COLUMNS, TILE_M, TILE_N

OUTPUT_GROUPS = 2  # warpgroups that hold O
WARP_ROWS = ROWS // WARPGROUP_WARPS
LINE_BYTES = 2 * BOX
BOX_BYTES = ROWS * LINE_BYTES
UNITS = LINE_BYTES // VECTOR_BYTES  # 16-byte units of a row of a box

CHUNK = "a chunk of a cache tile"  # what the load warps hand over

OUTPUTS_BARRIER = 1  # named barrier of the outputs' warps; all threads share barrier 0

GROUP = 12  # pieces that are added up in one step
ADDERS = OUTPUT_GROUPS * WARPGROUP  # threads that add up
ENTRY_BYTES = 32  # of four columns of a group's result, with the log-sum-exp
AT_ONCE = 8  # items that a thread adds up at a time, if it adds up a whole segment
FEW_AT_ONCE = 4  # if it adds up a part of a segment


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        q: `[batch, queries, heads, head_dim_v]`.
        q_rope: `[batch, queries, heads, head_dim - head_dim_v]`, or None.
        cache: `[pages, page_size, head_dim]`, dtype of q, or fp8.
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
        kv_descale: factor of an fp8 cache, `[1]`, or None.
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
    kv_descale: cute.Tensor | None


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors and numbers that the device code reads and writes; see `Arguments`.

    Attributes:
        cache_tma, cache: TMA's copies of the cache, and coordinates for them; None, and the cache
            with one head, if rows are gathered.
        tokens: the cache as it lies in memory.
        softmax_scale: only beside `kv_descale`, otherwise None.
    """

    cache_tma: cute.CopyAtom | None
    cache: cute.Tensor
    tokens: cute.Tensor
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
    softmax_scale: Float32 | None
    kv_descale: cute.Tensor | None


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
    shared: Any
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


class LatentKernel:
    """A kernel for one LatentSpec, of 64 rows in each CTA.

    Attributes:
        kernel: the device code.
        fp8: the cache's type if it is fp8, otherwise None.
        descale: whether an argument has the factor of an fp8 cache.
        QUERIES, LOAD: roles of the warps that load Q, and of the warp that loads the cache.
        OUTPUTS: the role of the warps that hold O, in two warpgroups.
        ROLES: roles of all warps, in order.
        WARPS: the warps of a CTA.
        stages: tiles of the cache in shared memory at once.
        gathers: the warps of QUERIES and LOAD gather the cache's rows, from pages of any size;
            otherwise TMA loads boxes of rows.
        smem, pipeline: shared memory and edges.
    """

    kernel: Any
    QUERIES: ClassVar[Role]
    LOAD: ClassVar[Role]
    OUTPUTS: ClassVar[Role]
    ROLES: ClassVar[tuple[Role, ...]]
    WARPS: ClassVar[int]
    stages: int
    smem: SharedMemory
    pipeline: Pipeline

    def __init__(self, spec: Any):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.columns = spec.head_dim_v // OUTPUT_GROUPS
        self.across = spec.head_dim_v // VECTOR  # items of a row, in sums
        self.tile_bytes = TILE_N * spec.head_dim * 2
        self.gathers = spec.page_rows == GATHERED
        fp8 = getattr(spec, "fp8", "none")
        self.fp8 = None if fp8 == "none" else DTYPE[fp8]
        self.descale = getattr(spec, "descale", False)
        self.rows = BoxedRows(spec.page_rows, spec.head_dim, ragged=True, batched=True)
        self.q_parts = {
            "q_empty": range(spec.head_dim)
        }  # columns of Q, by the edge that frees them
        # How the edges of Q and of the cache are completed, and by whom.
        gatherers = Role(
            f"{self.QUERIES.name} and {self.LOAD.name}",
            range(self.QUERIES.warps.start, self.LOAD.warps.stop),
        )
        self.of_queries = Kind.THREADS if self.gathers else Kind.WARPS
        self.loaders, self.of_cache = self.LOAD, Kind.BYTES
        if self.gathers:
            # Warps that convert wait for their own copies.
            self.loaders = gatherers
            self.of_cache = Kind.WARPS if self.fp8 else Kind.THREADS

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
                cache=fake_rows(self.fp8 or self.dtype, (pages, size, spec.head_dim)),
                o=fake_rows(self.dtype, (*rows, spec.head_dim_v)),
                lse=fake_strided(Float32, (batch, heads, queries)) if spec.lse else None,
                block_table=fake_rows(Int32, (batch, cute.sym_int()), align=Int32.width // 8),
                cache_seqlens=fake_contiguous(Int32, (batch,)),
                counter=fake_contiguous(Int32, (cute.sym_int(),)),
                parts=fake_contiguous(Float32, part, VECTOR_BYTES),
                softmax_scale=Float32(1.0),
                num_splits=Int32(0),
                num_ctas=Int32(1),
                kv_descale=fake_contiguous(Float32, (1,)) if self.descale else None,
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
            TILE_M, heads, spec.causal, Sequences(queries), keys, 1, 1, batch, Int32(1)
        )  # fmt: skip
        scaling = Scaling.of(a.softmax_scale, None, HEADROOM[spec.dtype])
        visible = HeadsVisibility(
            TILE_M, TILE_N, 1, None, Int32(0) if spec.causal else None,
            cute.fast_divmod_create_divisor_v2(heads),
        )  # fmt: skip
        num_ctas = a.num_ctas
        read = (a.q, a.q_rope, a.cache, a.block_table, a.cache_seqlens, a.kv_descale)
        if overlaps((a.o, a.lse), read):
            num_ctas = Int32(0)  # the driver rejects an empty grid; the operator says why
        # One head, as the boxes of attention's K and V have heads.
        outer, row, one = a.cache.stride
        shape = (a.cache.shape[0], a.cache.shape[1], 1, spec.head_dim)
        cache = cute.make_tensor(
            a.cache.iterator, cute.make_layout(shape, stride=(outer, row, row, one))
        )
        tma = None
        if cutlass.const_expr(not self.gathers):
            tma, cache = self.rows.atom(cpasync.CopyBulkTensorTileG2SOp(), cache)
        x = Operands(
            tma, cache, a.cache, a.q, a.q_rope, a.o, a.lse, pages, a.counter, a.parts, heads,
            a.num_splits, a.num_ctas, a.softmax_scale if self.descale else None, a.kv_descale,
        )  # fmt: skip
        self.kernel(x, tiles, visible, scaling).launch(
            grid=[num_ctas, 1, 1],
            block=[self.WARPS * WARP_SIZE, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.smem, self.pipeline, self.ROLES, shared_base)

    # -- device: set-up -----------------------------------------------------------------------

    @cute.jit
    def start(self, x: Operands, tiles: TileMap, barriers: Barriers, warp: Int32) -> None:
        """Initialise the mbarriers. All threads take part."""
        if warp == self.LOAD.warps[0]:
            prefetch_global(tiles.keys.seqused, cute.arch.lane_idx() * LINE_WORDS)
            x.pages.prefetch_first()
            prepare(() if x.cache_tma is None else (x.cache_tma,), barriers)
        cute.arch.sync_threads()

    def first_row(self, work: LatentWork) -> Any:
        """The CTA's first row."""
        return work.block * TILE_M

    def key_tiles(self, visible: HeadsVisibility, work: LatentWork) -> tuple[Any, Any]:
        """[first, end) of the key tiles of a piece."""
        return work.part(*visible.key_tiles(work.block, work.seqlen_q, work.seqlen_k))

    # -- device: loads ------------------------------------------------------------------------

    @cute.jit
    def load_warps(
        self, x: Operands, storage: Pointers, barriers: Barriers, shared: Any, tiles: TileMap,
        visible: HeadsVisibility, warp: Int32, registers: cutlass.Constexpr[int],
    ) -> None:  # fmt: skip
        """Load the cache or Q, with so many registers of a thread."""
        cute.arch.setmaxregister_decrease(registers)
        if warp == self.LOAD.warps[0]:
            self.load_warp(x, storage, barriers, tiles, visible)
        else:
            number = warp - self.QUERIES.warps[0]
            self.query_warps(x, storage, barriers, shared, visible, number)

    @cute.jit
    def load_warp(
        self, x: Operands, storage: Pointers, barriers: Barriers, tiles: TileMap,
        visible: HeadsVisibility,
    ) -> None:  # fmt: skip
        """Publish and load pieces and whole segments, one after the other."""
        smem = self.ring(storage, x.pages)
        queue = TileQueue(LatentWork, storage.work, barriers)
        pieces = PieceMap.of(
            tiles, visible, x.num_ctas, self.spec.least_key_tiles, x.num_splits, fits=True
        )
        even = EvenPieces.of(pieces, x.num_ctas, x.num_splits == 0)
        taken = Int32(0)
        if even.used:
            taken = self.load_shares(x, smem, queue, visible, even)
        else:
            taken = self.load_pieces(x, smem, queue, visible, even)
        queue.publish_end(taken)
        if cute.arch.lane_idx() == 0:
            restore_counter(x.counter.iterator.toint())

    @cute.jit
    def load_shares(
        self, x: Operands, smem: Any, queue: TileQueue, visible: HeadsVisibility,
        even: EvenPieces,
    ) -> Int32:  # fmt: skip
        """Publish and load the pieces and segments of the CTA's equal share. Return their
        number."""
        cta = cute.arch.block_idx()[0]
        unit, taken, n = Int32(cta // even.blocks * even.share), Int32(0), Int32(0)
        end = cutlass.min(unit + even.share, even.total)
        window = even.start()
        while unit < end:
            window = even.window_of(unit, window)
            work, unit, has_work = even.work(cta, unit, window)
            if has_work:
                queue.publish_work(taken, work)
                n = self.load_piece(x, smem, queue.barriers, work, visible, n)
                taken += 1
        return taken

    @cute.jit
    def load_pieces(
        self, x: Operands, smem: Any, queue: TileQueue, visible: HeadsVisibility,
        even: EvenPieces,
    ) -> Int32:  # fmt: skip
        """Publish and load the pieces and segments whose numbers the CTA takes. Return how many
        these are."""
        barriers, pieces = queue.barriers, even.pieces
        number = cute.arch.block_idx()[0]
        window = pieces.start()
        window = pieces.window_of(number, window)
        taken, n = Int32(0), Int32(0)
        while window.order < pieces.orders:
            found = pieces.work(number, window)
            work = LatentWork(**vars(found), together=Int32(even.together))
            queue.publish_work(taken, work)
            n = self.load_piece(x, smem, barriers, work, visible, n)
            taken += 1
            number = Int32(0)
            if cute.arch.lane_idx() == 0:
                number = increment_global(x.counter.iterator.toint(), NEVER)
            number = cute.arch.shuffle_sync(number, 0) + cute.arch.grid_dim()[0]
            window = pieces.window_of(number, window)
        return taken

    def ring(self, storage: Pointers, pages: Pages) -> Any:
        """The stages of the cache's tiles: for each chunk as TMA fills them, or the shared address,
        where rows are gathered."""
        if self.gathers:
            return shared_address(storage.cache)
        return [self.chunk(storage.cache, pages, c) for c in range(self.spec.chunks)]

    def chunk(self, buffer: Any, pages: Pages, number: int) -> cute.Tensor:
        """The stages of a chunk of the cache's tiles, as `Pages.load` fills them."""
        spec, columns = self.spec, self.spec.chunk_columns[number]
        return boxes(
            buffer + TILE_N * columns.start, spec.page_rows, (pages.boxes, spec.page_rows * BOX),
            (len(columns) // BOX, TILE_N * BOX), (self.stages, TILE_N * spec.head_dim),
        )  # fmt: skip

    def load_piece(
        self, x: Operands, smem: Any, barriers: Barriers, work: LatentWork,
        visible: HeadsVisibility, n: Int32, load_queries: Callable[[], None] | None = None,
    ) -> Int32:  # fmt: skip
        """Load a piece's tiles of the cache as `load_tiles` does. A warp that loads Q too gives
        `load_queries`."""
        if load_queries is not None:
            load_queries()
        load = self.gather_tiles if self.gathers else self.load_tiles
        return Int32(load(x, smem, barriers, work, visible, n))

    def load_tiles(
        self, x: Operands, smem: Any, barriers: Barriers, work: LatentWork,
        visible: HeadsVisibility, n: Int32,
    ) -> Int32:  # fmt: skip
        """Load a piece's tiles of the cache. `n` counts the uses of the cache's stages before the
        piece; the method returns the count after the piece."""
        raise NotImplementedError

    def gather_tiles(
        self, x: Operands, smem: Any, barriers: Barriers, work: LatentWork,
        visible: HeadsVisibility, n: Int32,
    ) -> Int32:  # fmt: skip
        """Load a piece's tiles by gathering rows, as `load_tiles` does. The pages of a tile are
        looked up before the previous tile is loaded: a look-up may take a microsecond."""
        raise NotImplementedError

    def found(self, x: Operands, key_tile: Int32, work: LatentWork) -> Any:
        """The pages of a tile's boxes, or of the rows that the warp gathers."""
        if self.gathers:
            return Gather.of_warp(x.pages).of_tile(key_tile, work.sequence, work.seqlen_k)
        return x.pages.of_tile(key_tile, work.sequence, work.seqlen_k, self.rows)

    def load_chunk(
        self, x: Operands, smem: Any, barriers: Barriers, found: Any, chunk: int, use: Int32,
        stage: Int32,
    ) -> None:  # fmt: skip
        """Load a chunk of columns of a tile to a free stage, as a use of `cache_full`. `found` is
        where the tile's rows are."""
        columns = self.spec.chunk_columns[chunk]
        if self.gathers:
            to = smem + stage * self.tile_bytes + columns.start // BOX * BOX_BYTES
            full = barriers.address("cache_full", barriers.stage("cache_full", use))
            source = cute.domain_offset((0, 0, 0, columns.start), x.cache)
            Gather.of_warp(x.pages).load(source, found, Int32(0), len(columns), to, full)
            return
        with cute.arch.elect_one():
            barriers.expect("cache_full", use, 2 * TILE_N * len(columns))
        x.pages.load(
            x.cache_tma, x.cache, self.rows, found, Int32(0), smem[chunk], barriers, "cache_full",
            use, columns.start, stage,
        )  # fmt: skip

    def wait_chunk(self, barriers: Barriers, use: Any) -> None:
        """Wait for a chunk of the cache, so that products may read it, and Q if Q has arrived."""
        barriers.wait("cache_full", use)
        # Gathered rows, and Q beside them, come without a fence of the warps that copy.
        if self.gathers:
            cute.arch.fence_view_async_shared()

    @cute.jit
    def query_warps(
        self, x: Operands, storage: Pointers, barriers: Barriers, shared: Any,
        visible: HeadsVisibility, warp: Int32,
    ) -> None:  # fmt: skip
        """Load the tiles of Q, and gather the warp's rows of the cache."""
        queue = TileQueue(LatentWork, storage.work, barriers)
        smem = self.ring(storage, x.pages) if self.gathers else None
        taken, n = Int32(0), Int32(0)
        work = queue.take(taken)
        while work.exists:
            given = (x, barriers, shared, visible, work, warp, taken)
            if cutlass.const_expr(self.gathers):
                load_queries = functools.partial(self.start_queries, *given)
                n = self.load_piece(x, smem, barriers, work, visible, n, load_queries)
            else:
                self.load_parts_of_queries(*given)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)
                cute.arch.fence_view_async_shared()
                barriers.warp_arrives("q_full", taken)
            taken += 1
            work = queue.take(taken)

    def start_queries(
        self, x: Operands, barriers: Barriers, shared: Any, visible: HeadsVisibility,
        work: LatentWork, warp: Int32, taken: Int32,
    ) -> None:  # fmt: skip
        """Start to copy the warp's rows of Q. Each lane arrives when its copies have landed."""
        self.load_parts_of_queries(x, barriers, shared, visible, work, warp, taken)
        copies_arrive(barriers.address("q_full", barriers.stage("q_full", taken)))

    def load_parts_of_queries(
        self, x: Operands, barriers: Barriers, shared: Any, visible: HeadsVisibility,
        work: LatentWork, warp: Int32, taken: Int32,
    ) -> None:  # fmt: skip
        """Start to copy the warp's rows of Q, some columns after the other, as their place becomes
        free."""
        for edge, columns in self.q_parts.items():
            barriers.wait_previous(edge, taken)
            self.load_queries(x, shared, visible, work, warp, columns)

    @cute.jit
    def load_queries(
        self, x: Operands, shared: Any, visible: HeadsVisibility, work: LatentWork, warp: Int32,
        columns: cutlass.Constexpr[range],
    ) -> None:  # fmt: skip
        """Start to copy some columns of the warp's rows of Q. A lane copies every 32nd unit of 16
        bytes of a row. Rows that do not exist become 0."""
        spec, lane, warps = self.spec, cute.arch.lane_idx(), len(self.QUERIES)
        of_q = range(columns.start, min(columns.stop, spec.head_dim_v))
        first_unit, units = 2 * columns.start // VECTOR_BYTES, 2 * len(of_q) // VECTOR_BYTES
        of_rope = 2 * max(0, columns.stop - spec.head_dim_v) // VECTOR_BYTES
        # Each lane finds one row's addresses.
        of_lane = warp + lane * warps
        token, head = divmod(self.first_row(work) + of_lane, visible.by_heads)
        exists = token < work.seqlen_q
        token, head = (cutlass.select_(exists, place, 0) for place in (token, head))
        presents = Int32(exists)
        q = x.q[work.sequence, token, head, None].iterator.toint()
        rope = q
        if cutlass.const_expr(of_rope > 0):
            rope = x.q_rope[work.sequence, token, head, None].iterator.toint()
        for i in cutlass.range((TILE_M - warp + (warps - 1)) // warps, unroll=2):
            row = warp + i * warps
            present = cute.arch.shuffle_sync(presents, i) != 0
            to = shared.q + row * LINE_BYTES
            if cutlass.const_expr(units > 0):
                source = of_other_lane(q, i)
                for first in cutlass.range_constexpr(first_unit, first_unit + units, WARP_SIZE):
                    unit = first + lane
                    if cutlass.const_expr(first + WARP_SIZE <= first_unit + units):
                        copy_async(to + _place(unit, row), source + unit * VECTOR_BYTES, present)
                    elif unit < first_unit + units:
                        copy_async(to + _place(unit, row), source + unit * VECTOR_BYTES, present)
            if cutlass.const_expr(of_rope > 0):
                source = of_other_lane(rope, i)
                if lane < of_rope:
                    at = _place(2 * spec.head_dim_v // VECTOR_BYTES + lane, row)
                    copy_async(to + at, source + lane * VECTOR_BYTES, present)

    # -- device: results ----------------------------------------------------------------------

    def mask(self, own: Any, work: LatentWork, key_tile: Any) -> None:
        """Set the columns of keys that a row does not see to -inf."""
        highs = []
        for lane_row in range(fragments.LANE_ROWS):
            row = self.first_row(work) + fragments.first_row(own.warp)
            token = own.visible.token(row + lane_row * fragments.LANE_ROW_STEP)
            _, high = own.visible.keys(token, work.seqlen_q, work.seqlen_k)
            highs.append(high - key_tile * TILE_N)
        fragments.mask_rows(own.s, highs)

    @cute.jit
    def divide_rows(self, own: Outputs, inverses: list[Float32]) -> None:
        """Multiply the rows of O by the inverses of their sums."""
        for lane_row in cutlass.range_constexpr(fragments.LANE_ROWS):
            inverse = inverses[lane_row]
            values = own.acc[None, lane_row, None]
            for j in cutlass.range_constexpr(self.columns // 4):
                # A row without a visible key is 0, whatever P V holds.
                scaled = values[j] * inverse
                values[j] = cutlass.select_(inverse == 0.0, Float32(0.0), scaled)

    @cute.jit
    def finish_piece(
        self, x: Operands, own: Outputs, work: LatentWork, log_sums: list[Float32]
    ) -> None:
        """Store the result of a whole segment, or of a piece, and add up the pieces. A segment with
        more than GROUP pieces is added up in two steps: first groups of GROUP neighbouring
        pieces. All ways of adding up give the same bits."""
        if work.pieces == 1:
            self.store_piece(x, own, work, log_sums, False)
        else:
            self.store_piece(x, own, work, log_sums, True)
            if work.together != 0:
                self.add_together(x, own, work)
            else:
                self.add_last(x, own, work)

    @cute.jit
    def add_last(self, x: Operands, own: Outputs, work: LatentWork) -> None:
        """Add up the pieces of a group, and then of the segment, in the CTA that arrives last."""
        grouped = work.pieces > GROUP
        group = Int32(cutlass.select_(grouped, (work.slot - work.first_slot) // work.apart, 0))
        group = group // GROUP
        first = work.first_slot + group * (GROUP * work.apart)
        count = cutlass.min(work.pieces - group * GROUP, GROUP)
        parts = Pieces(Int32(first), work.apart, Int32(count), Int32(self.spec.head_dim_v))
        items = self.rows_of(x, work) * self.across
        adds = self.is_last(x, own, first, count)
        # The code is long, so it is there once for groups and for segments.
        while adds:
            self.add_pieces(x, own, work, parts, grouped, Int32(0), items)
            adds = Boolean(False)
            if grouped:
                groups = (work.pieces + (GROUP - 1)) // GROUP
                adds = self.is_last(x, own, x.parts.shape[0] + work.first_slot, groups)
                step, column = work.apart * GROUP, self.spec.head_dim_v + 1
                parts = Pieces(work.first_slot, step, Int32(groups), Int32(column))
                grouped = Boolean(False)

    @cute.jit
    def add_together(self, x: Operands, own: Outputs, work: LatentWork) -> None:
        """Wait for all pieces of a segment, and add up the CTA's part of the sums."""
        outputs_barrier()
        if self.thread() == 0:
            # Arrivals and departures share a counter, which ends at 0 again. All threads' stores
            # come before the arrival.
            at = x.counter.iterator.toint() + (2 + work.first_slot) * 4
            arrived = count_arrival(at, 2 * work.pieces) + 1
            while arrived < work.pieces:
                arrived = load_acquire(at)
            count_arrival(at, 2 * work.pieces)
        outputs_barrier()
        items = self.rows_of(x, work) * self.across
        share = (items + (work.pieces - 1)) // work.pieces
        begin = (work.slot - work.first_slot) // work.apart * share
        end = cutlass.min(begin + share, items)
        if work.pieces > GROUP:
            self.add_groups(x, own, work, begin, end)
        else:
            column = Int32(self.spec.head_dim_v)
            parts = Pieces(work.first_slot, work.apart, work.pieces, column)
            group = Boolean(False)
            # Less code is executed where each thread has one item at most.
            if end - begin <= ADDERS:
                self.add_pieces(x, own, work, parts, group, begin, end, 1)
            else:
                self.add_pieces(x, own, work, parts, group, begin, end, FEW_AT_ONCE)

    def thread(self) -> Any:
        """The thread's number among those that add up."""
        return cute.arch.thread_idx()[0] - self.OUTPUTS.warps[0] * WARP_SIZE

    def rows_of(self, x: Operands, work: LatentWork) -> Any:
        """The rows of the CTA's tile that exist."""
        return cutlass.min(work.seqlen_q * x.heads - self.first_row(work), TILE_M)

    @cute.jit
    def is_last(self, x: Operands, own: Outputs, number: Int32, count: Int32) -> Boolean:
        """Count the CTA's arrival at a counter of arrivals. Return whether all other CTAs of
        `count` have arrived, whose results the CTA then sees."""
        outputs_barrier()
        if cute.arch.thread_idx()[0] == self.OUTPUTS.warps[0] * WARP_SIZE:
            # All threads' stores come before the arrival, which a later arrival sees.
            at = x.counter.iterator.toint() + (2 + number) * 4
            store_shared(Int32, own.shared.arrived, [count_arrival(at, count)])
        outputs_barrier()
        return load_shared(Int32, own.shared.arrived)[0] == count - 1

    @cute.jit
    def store_piece(
        self, x: Operands, own: Outputs, work: LatentWork, log_sums: list[Float32],
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
                    to = x.parts[work.slot, in_tile, None]
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
        self, x: Operands, own: Outputs, work: LatentWork, pieces: Pieces, group: Boolean,
        begin: Int32, end: Int32, at_once: cutlass.Constexpr[int] = AT_ONCE,
    ) -> None:  # fmt: skip
        """Add up results of a segment, to o and lse, or of a `group` to the result of the group's
        first piece. Items `begin` to `end` - 1 are added up: four columns of a row each. The loads
        of `at_once` items of a thread are in flight together."""
        spec = self.spec
        step = self.step(x, pieces.step)
        for first in cutlass.range(begin + self.thread(), end, ADDERS * at_once, unroll=1):
            of_thread = [first + i * ADDERS for i in range(at_once)]
            # An item that does not exist stands for the thread's own first item, because another
            # thread may be storing a group's result to its row.
            found = [cutlass.select_(item < end, item, first) for item in of_thread]
            starts = [
                x.parts[pieces.first, item // self.across, None].iterator.toint() for item in found
            ]
            vector = first % self.across
            parts = [
                Parts.of_row(at, vector, pieces.lse_column, step, pieces.count) for at in starts
            ]
            sums = cute.make_rmem_tensor((VECTOR, at_once), Float32)
            maxima, totals = add_up(parts, Int32(0), 1, sums)
            for i in cutlass.range_constexpr(at_once):
                whole = cute.make_rmem_tensor((VECTOR,), Float32)
                log_sum = finish([sums[None, i]], [maxima[i]], [totals[i]], None, whole)
                if of_thread[i] < end:
                    if group:
                        store_global(Float32, parts[i].o, [whole[j] for j in range(VECTOR)])
                        if vector == 0:  # other threads may still read the lse of the first piece
                            at = starts[i] + (spec.head_dim_v + 1) * 4
                            store_global(Float32, at, [log_sum])
                    else:
                        self.store_sum(x, own, work, of_thread[i], whole, log_sum)

    @cute.jit
    def add_groups(
        self, x: Operands, own: Outputs, work: LatentWork, begin: Int32, end: Int32
    ) -> None:
        """Add up items of a segment with more than GROUP pieces. The results of groups go through
        the shared memory of the cache, because the CTA has no more work."""
        items, groups = end - begin, (work.pieces + (GROUP - 1)) // GROUP
        step = self.step(x, work.apart)
        for number in cutlass.range(self.thread(), items * groups, ADDERS, unroll=1):
            group = number // items
            item = begin + number - group * items
            first = work.first_slot + group * (GROUP * work.apart)
            row = x.parts[first, item // self.across, None].iterator.toint()
            count = cutlass.min(work.pieces - group * GROUP, GROUP)
            parts = Parts.of_row(
                row, item % self.across, self.spec.head_dim_v, step, Int32(count)
            )  # fmt: skip
            whole, log_sum = self.add_item(parts)
            at = own.shared.cache + number * ENTRY_BYTES
            store_shared(Float32, at, [whole[j] for j in range(VECTOR)])
            store_shared(Float32, at + VECTOR * 4, [log_sum])
        outputs_barrier()
        for each in cutlass.range(self.thread(), items, ADDERS, unroll=1):
            at, apart = Int64(own.shared.cache + each * ENTRY_BYTES), Int64(items * ENTRY_BYTES)
            parts = Parts(at, at + VECTOR * 4, apart, apart, groups)
            whole, log_sum = self.add_item(parts, load_item)
            self.store_sum(x, own, work, begin + each, whole, log_sum)

    def add_item(self, parts: Parts, load: Any = load_global) -> tuple[cute.Tensor, Any]:
        """Add up one item."""
        sums = cute.make_rmem_tensor((VECTOR, 1), Float32)
        maxima, totals = add_up([parts], Int32(0), 1, sums, load)
        whole = cute.make_rmem_tensor((VECTOR,), Float32)
        return whole, finish([sums[None, 0]], maxima, totals, None, whole)

    def step(self, x: Operands, slots: Int32) -> Int64:
        """The bytes between results that are `slots` slots apart."""
        return Int64(slots) * (x.parts.stride[0] * 4)

    @cute.jit
    def store_sum(
        self, x: Operands, own: Outputs, work: LatentWork, item: Int32, whole: cute.Tensor,
        log_sum: Float32,
    ) -> None:  # fmt: skip
        """Store four columns of a row of o, and the row's log-sum-exp."""
        in_tile, vector = item // self.across, item % self.across
        token, head = divmod(self.first_row(work) + in_tile, own.visible.by_heads)
        if cutlass.const_expr(x.lse is not None):
            if vector == 0:
                x.lse[work.sequence, head, token] = log_sum
        store_rounded(x.o[work.sequence, token, head, None], vector, whole)


_Addresses = TypeVar("_Addresses", bound="Carried")


def addresses(kind: type[_Addresses], storage: Pointers) -> _Addresses:
    """The shared addresses of the buffers that have the names of the fields of `kind`."""
    found: Any = kind
    of_kernel: _Addresses = found(
        *(shared_address(getattr(storage, field.name)) for field in fields(found))
    )
    return of_kernel


@cute.jit
def store_rows(warp: Int32, at: Int32, values: list[Any]) -> None:
    """Store a number for each of the lane's rows, from shared address `at` on."""
    if cute.arch.lane_idx() % fragments.LANES == 0:
        row = fragments.first_row(warp)
        for r in cutlass.range_constexpr(fragments.LANE_ROWS):
            store_shared(Float32, at + (row + r * fragments.LANE_ROW_STEP) * 4, [values[r]])


def load_rows(warp: Int32, at: Int32) -> list[Any]:
    """The numbers of the lane's rows, from shared address `at` on."""
    row = fragments.first_row(warp)
    rows = [row + r * fragments.LANE_ROW_STEP for r in range(fragments.LANE_ROWS)]
    return [load_shared(Float32, at + row * 4)[0] for row in rows]


def outputs_barrier() -> None:
    """Wait for the threads of the outputs."""
    cute.arch.barrier(barrier_id=OUTPUTS_BARRIER, number_of_threads=ADDERS)


def load_item(kind: type[Numeric], address: Int64, count: int = 1) -> Any:
    """Load from a shared address, as `load_global` loads."""
    return load_shared(kind, Int32(address), count)


def _place(unit: Any, row: Any) -> Any:
    """The place of a unit of 16 bytes of a row, relative to the row in the first box of 64 rows,
    with TMA's swizzle."""
    return unit // UNITS * BOX_BYTES + ((unit % UNITS) ^ (row % UNITS)) * VECTOR_BYTES


def of_other_lane(value: Int64, lane: Any) -> Int64:
    """The value of another lane."""
    low, high = (
        cute.arch.shuffle_sync(Int32(half), lane).to(Int64) for half in (value, value >> 32)
    )
    return (high << 32) | (low & 0xFFFFFFFF)
