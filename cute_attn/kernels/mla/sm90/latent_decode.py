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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...attention.parts import fragments
from ...attention.parts.fragment_softmax import HEADROOM, FragmentSoftmax
from ...attention.parts.pages import Pages
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
from ...common.carried import Carried
from ...common.pipeline import Barriers, Edge, Kind, Pipeline, Role
from ...common.ptx import wgmma
from ...common.ptx.memory import load_shared, shared_address, store_shared
from ...common.scheduler import TileQueue
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ...common.spec import MAX_SMEM_BYTES
from ...common.tma import BOX
from ..even_pieces import LatentWork
from ..spec import TILE_M, TILE_N, LatentDecodeSpec
from .fp8_rows import Fp8Rows
from .latent import (
    BOX_BYTES,
    CHUNK,
    OUTPUT_GROUPS,
    WARP_ROWS,
    LatentKernel,
    Operands,
    Outputs,
    addresses,
    load_rows,
    store_rows,
)

SOFTMAX = Role("softmax", range(0, 4))
OUTPUTS = Role("outputs", range(4, 12))
HALF = Role("outputs of its columns", range(4, 8))  # or the next four warps
QUERIES = Role("queries", range(12, 15))
LOAD = Role("load", range(15, 16))
WORKERS = Role("softmax, outputs and queries", range(0, 15))

# Registers of a thread in the warpgroups of softmax, outputs, and queries and load.
REGISTERS = (120, 176, 40)
REGISTERS_WITH_FP8 = (96, 176, 64)  # warps that convert hold more


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
    """What a warp of the softmax keeps: registers of S and of the first chunk of Q, the rows'
    references and sums, and the factor of an fp8 cache."""

    warp: Int32
    barriers: Barriers
    shared: Shared
    s: cute.Tensor
    held: cute.Tensor
    softmax: FragmentSoftmax
    visible: HeadsVisibility
    descale: Float32 | None


class Sm90LatentDecode(LatentKernel):
    """The kernel for one LatentDecodeSpec; see the module's docstring."""

    QUERIES, LOAD, OUTPUTS, WARPS = QUERIES, LOAD, OUTPUTS, 16
    ROLES = (SOFTMAX, OUTPUTS, QUERIES, LOAD)

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.stages = spec.stages
        self.registers = REGISTERS if self.fp8 is None else REGISTERS_WITH_FP8
        self.held = len(spec.chunk_columns[0])  # columns of Q that stay in registers
        self.parts_of_p = 2 if spec.halves else 1  # parts of P's columns, published in turn
        # Two stages of P where they fit.
        self.p_stages = next(
            stages
            for stages in (2, 1)
            if self.buffers(stages).nbytes <= MAX_SMEM_BYTES or stages == 1
        )
        # The chunks of fp8 come in the order in which P V releases them.
        chunks = list(range(spec.chunks))
        middle = spec.chunks // OUTPUT_GROUPS
        self.order = chunks
        if self.fp8 is not None and spec.early:
            self.order = [c + half for c in chunks[:middle] for half in (0, middle)]
        self.pipeline = Pipeline(*self.edges(self.p_stages))
        self.smem = self.buffers(self.p_stages, limit=MAX_SMEM_BYTES)

    def edges(self, p_stages: int) -> tuple[Edge, ...]:
        stages, full = self.spec.stages, self.spec.stages * self.spec.chunks
        p_full = p_stages * self.parts_of_p
        released, empty = (HALF, full) if self.spec.early else (OUTPUTS, stages)
        return (
            *TileQueue.edges(LOAD, WORKERS),
            Edge("q_full", QUERIES, SOFTMAX, 1, self.of_queries, payload="Q"),
            Edge("q_empty", SOFTMAX, QUERIES, 1, Kind.WARPS, payload="its stage"),
            Edge("cache_full", self.loaders, OUTPUTS, full, self.of_cache, payload=CHUNK),
            Edge("cache_empty", released, self.loaders, empty, Kind.WARPS, payload="its stage"),
            Edge("p_full", SOFTMAX, OUTPUTS, p_full, Kind.WARPS, payload="P, and O's factors"),
            Edge("p_empty", OUTPUTS, SOFTMAX, p_stages, Kind.WARPS, payload="its stage"),
        )

    def buffers(self, p_stages: int, limit: int = 2 * MAX_SMEM_BYTES) -> SharedMemory:
        spec, at = self.spec, SWIZZLE_ALIGNMENT
        count = Pipeline(*self.edges(p_stages)).count
        return SharedMemory(
            Buffer("q", self.dtype, TILE_M * spec.head_dim, 1, at, "Q"),
            Buffer("cache", self.dtype, TILE_N * spec.head_dim, spec.stages, at, "the cache"),
            *self.fp8_buffers(),
            Buffer("p", self.dtype, TILE_M * TILE_N, p_stages, at, "P"),
            Buffer("factors", Float32, TILE_M, p_stages, holds="factors of O's rows"),
            Buffer("moved", Int32, WARPGROUP_WARPS, p_stages, holds="whether factors are not 1"),
            Buffer("log_sums", Float32, TILE_M, p_stages, holds="log-sum-exps of the rows"),
            Buffer("arrived", Int32, 4, holds="the number of pieces that have arrived"),
            TileQueue.buffer(LatentWork),
            Buffer("barriers", Int64, count),
            limit=limit,
        )

    def fp8_buffers(self) -> tuple[Buffer, ...]:
        """The ring of tiles of fp8, if the cache is fp8."""
        if self.fp8 is None:
            return ()
        elements, at = TILE_N * self.spec.head_dim, SWIZZLE_ALIGNMENT
        return (Buffer("fp8", self.fp8, elements, self.spec.loaded, at, "the cache in fp8"),)

    # -- device: set-up -----------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self, x: Operands, tiles: TileMap, visible: HeadsVisibility, scaling: Scaling
    ) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = self.smem.allocate()
        barriers = self.pipeline.at(storage.barriers)
        self.start(x, tiles, barriers, warp)

        shared = addresses(Shared, storage)
        softmax_registers, output_registers, load_registers = self.registers
        if warp >= QUERIES.warps[0]:
            self.load_warps(x, storage, barriers, shared, tiles, visible, warp, load_registers)
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
            descale = None
            if cutlass.const_expr(self.descale):
                descale = Float32(x.kv_descale[0])
                scaling = Scaling.of(x.softmax_scale * descale, None, HEADROOM[self.spec.dtype])
            scores = Scores(
                warp=warp,
                barriers=barriers,
                shared=shared,
                s=fragments.accumulators(TILE_N),
                held=cute.make_rmem_tensor((self.held // 4,), Int32),
                softmax=FragmentSoftmax(scaling),
                visible=visible,
                descale=descale,
            )
            self.softmax_warps(x, storage, scores)

    # -- device: loads ------------------------------------------------------------------------

    @cute.jit
    def load_tiles(
        self, x: Operands, smem: Any, barriers: Barriers, work: LatentWork,
        visible: HeadsVisibility, n: Int32,
    ) -> Int32:  # fmt: skip
        """Load a piece's tiles of the cache, from the last to the first, which are uses n and up.
        Return the number of the next use."""
        first, end = self.key_tiles(visible, work)
        for i in cutlass.range(end - first, unroll=1):
            found = self.found(x, end - 1 - i, work)
            self.load_found(x, smem, barriers, found, n)
            n += 1
        return n

    @cute.jit
    def gather_tiles(
        self, x: Operands, smem: Any, barriers: Barriers, work: LatentWork,
        visible: HeadsVisibility, n: Int32,
    ) -> Int32:  # fmt: skip
        first, end = self.key_tiles(visible, work)
        if end > first:
            following = self.found(x, end - 1, work)
            for i in cutlass.range(end - first, unroll=1):
                found = following
                following = self.found(x, cutlass.max(end - 2 - i, first), work)
                self.load_found(x, smem, barriers, found, n)
                n += 1
        return n

    def load_found(self, x: Operands, smem: Any, barriers: Barriers, found: Any, n: Int32) -> None:
        """Load use n, a tile whose rows `found` tells."""
        if not self.spec.early:
            barriers.wait_previous("cache_empty", n)
        stage = self.stage(barriers, n)
        for c in range(self.spec.chunks):
            use = n * self.spec.chunks + c
            if self.spec.early:
                barriers.wait_previous("cache_empty", use)
            self.load_chunk(x, smem, barriers, found, c, use, stage)

    def ring(self, storage: Pointers, pages: Pages) -> Any:
        if self.fp8 is None:
            return super().ring(storage, pages)
        return shared_address(storage.cache), shared_address(storage.fp8)

    def load_piece(
        self, x: Operands, smem: Any, barriers: Barriers, work: LatentWork,
        visible: HeadsVisibility, n: Int32, load_queries: Callable[[], None] | None = None,
    ) -> Int32:  # fmt: skip
        if self.fp8 is None:
            return super().load_piece(x, smem, barriers, work, visible, n, load_queries)
        cache, ring = smem
        rows = Fp8Rows.of_warp(self.fp8, self.dtype, x.pages, x.tokens, ring, cache)
        # Q arrives with the copies before it, so only the first tile comes before Q.
        self.start_tiles(rows, work, visible, n, range(1))
        if load_queries is not None:
            load_queries()
        self.start_tiles(rows, work, visible, n, range(1, self.spec.loaded))
        return Int32(self.convert_tiles(rows, barriers, work, visible, n))

    @cute.jit
    def start_tiles(
        self, rows: Fp8Rows, work: LatentWork, visible: HeadsVisibility, n: Int32,
        numbers: cutlass.Constexpr[range],
    ) -> None:  # fmt: skip
        """Start to copy some of a piece's first tiles of fp8; each chunk is a group of copies."""
        first, end = self.key_tiles(visible, work)
        for i in cutlass.range_constexpr(numbers.start, numbers.stop):
            if end - first > i:
                found = rows.of_tile(end - 1 - i, work.sequence, work.seqlen_k)
                sources = rows.sources(found)
                stage = (n + i) % self.spec.loaded
                for c in self.order:
                    rows.start(sources, self.spec.chunk_columns[c], stage)
                    cute.arch.cp_async_commit_group()
            else:
                for _ in self.order:
                    cute.arch.cp_async_commit_group()

    @cute.jit
    def convert_tiles(
        self, rows: Fp8Rows, barriers: Barriers, work: LatentWork, visible: HeadsVisibility,
        n: Int32,
    ) -> Int32:  # fmt: skip
        """Convert a piece's tiles, from the last to the first, as uses n and up of the cache. Each
        chunk's place in the ring is filled again, with the chunk of a later tile. Return the number
        of the next use."""
        spec = self.spec
        first, end = self.key_tiles(visible, work)
        if end > first:
            # A tile's pages are looked up one tile ahead: a look-up may take a microsecond.
            found = self.pages_of(rows, work, end - 1 - spec.loaded)
            for i in cutlass.range(end - first, unroll=1):
                following = end - 1 - i - spec.loaded
                sources = rows.sources(found)
                found = self.pages_of(rows, work, following - 1)
                loaded, stage = n % spec.loaded, self.stage(barriers, n)
                for i_chunk in cutlass.range_constexpr(spec.chunks):
                    c = self.order[i_chunk]
                    use, columns = n * spec.chunks + c, spec.chunk_columns[c]
                    cute.arch.cp_async_wait_group(spec.loaded * spec.chunks - 1)
                    if cutlass.const_expr(spec.early):
                        barriers.wait_previous("cache_empty", use)
                    elif cutlass.const_expr(c == 0):
                        barriers.wait_previous("cache_empty", n)
                    rows.convert(columns, loaded, stage * self.tile_bytes)
                    # No proxy fence here: it would wait for the copies in flight.
                    barriers.warp_arrives("cache_full", use)
                    if following >= first:
                        rows.start(sources, columns, loaded)
                    cute.arch.cp_async_commit_group()
                n += 1
        return n

    def pages_of(self, rows: Fp8Rows, work: LatentWork, key_tile: Any) -> tuple[Int32, ...]:
        """The pages of a tile's rows; of tile 0 where there is no such tile."""
        return rows.of_tile(cutlass.max(key_tile, 0), work.sequence, work.seqlen_k)

    # -- device: scores and softmax -----------------------------------------------------------

    @cute.jit
    def softmax_warps(self, x: Operands, storage: Pointers, own: Scores) -> None:
        queue = TileQueue(LatentWork, storage.work, own.barriers)
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
        self, x: Operands, own: Scores, work: LatentWork, key_tile: Int32, n: Int32, used: Int32
    ) -> None:
        """Compute P of a tile of keys, use n of the cache, and store P as use `used`."""
        fragments.assign(own.s, wgmma.wait(self.start_tile(own, n)))
        self.store_probabilities(x, own, work, key_tile, used)

    def start_tile(self, own: Scores, n: Int32) -> list[Any]:
        """Start S of a tile of keys, use n of the cache, chunk by chunk."""
        spec = self.spec
        stage = self.stage(own.barriers, n) * self.tile_bytes
        scores: Any = None
        for c in self.order:
            self.wait_chunk(own.barriers, n * spec.chunks + c)
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
        self, x: Operands, own: Scores, work: LatentWork, key_tile: Int32, used: Int32
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
            store_rows(own.warp, own.shared.factors + stage * (TILE_M * 4), factors)
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
        if cutlass.const_expr(own.descale is not None):
            inverses = [x * own.descale for x in inverses]
        store_rows(own.warp, own.shared.factors + stage, inverses)
        store_rows(own.warp, own.shared.log_sums + stage, log_sums)
        for part in cutlass.range_constexpr(self.parts_of_p):
            own.barriers.warp_arrives("p_full", used * self.parts_of_p + part)

    # -- device: outputs ----------------------------------------------------------------------

    @cute.jit
    def output_warps(self, x: Operands, storage: Pointers, own: Outputs) -> None:
        queue = TileQueue(LatentWork, storage.work, own.barriers)
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
                self.wait_chunk(own.barriers, self.release(own, n, c))
        else:
            for c in cutlass.range_constexpr(self.spec.chunks):
                self.wait_chunk(own.barriers, n * self.spec.chunks + c)
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
        return load_rows(own.warp, at)

    @cute.jit
    def finish_rows(self, own: Outputs, used: Int32) -> list[Float32]:
        """Divide the rows of O by their sums, and return the log-sum-exps."""
        self.divide_rows(own, self.of_rows(own, own.shared.factors, used))
        return self.of_rows(own, own.shared.log_sums, used)
