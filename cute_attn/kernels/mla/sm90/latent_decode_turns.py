"""Decode of multi-head latent attention over a latent cache, for SM90, where a sequence has more
than 64 pairs of a query and a head: two warpgroups take turns at the scores.

The tensor cores bound this case, so no warpgroup may leave the tensor cores idle during its
softmax. O of 64 rows is 64 x 512, of which each of two warpgroups has half of the columns. The
tiles of a piece are numbered from 0, from the last keys to the first. Warpgroup 0 computes P of the
even tiles, warpgroup 1 P of the odd tiles, and each adds P V of all tiles to its columns of O:

    S = Q C^T            64 x 64           by the tile's warpgroup
    P = 2^(c S - m)                        in registers, and rounded in shared memory
    O = O a + P C_v      64 x head_dim_v   by both warpgroups, with half of the columns each

This is FlashMLA's schedule, with two changes. The references m are rarely moved, so P of an even
tile is final when the tile's warpgroup stores P. And warpgroup 1 starts P V of the even tile before
its own softmax, which so runs beside two products.

    warps     role      work
    0 to 3    even      S and P of even tiles; the first half of the columns of O
    4 to 7    odd       S and P of odd tiles; the second half of the columns of O
    8 to 10   queries   the next tile's Q, by cp.async, which takes any strides and zeros rows
    11        load      finds the next work; tiles of the cache, by TMA

The last 64 columns of Q stay in registers, and P of odd tiles takes their place in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...attention.parts import fragments
from ...attention.parts.fragment_softmax import FragmentSoftmax
from ...attention.parts.softmax import Scaling, finish_row
from ...attention.parts.visibility import HeadsVisibility
from ...attention.parts.work import TileMap
from ...attention.sm90.mma import (
    ROWS,
    WARPGROUP_WARPS,
    held_rows,
    start_output,
    start_output_of_stored,
    start_scores,
)
from ...common.carried import Carried
from ...common.pipeline import Barriers, Edge, Kind, Pipeline, Role
from ...common.ptx import wgmma
from ...common.ptx.memory import load_shared, store_shared
from ...common.scheduler import TileQueue
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ...common.spec import MAX_SMEM_BYTES
from ...common.tma import BOX
from ..even_pieces import LatentWork
from ..spec import TILE_M, TILE_N, LatentTurnsSpec
from .latent import (
    BOX_BYTES,
    CHUNK,
    OUTPUT_GROUPS,
    WARP_ROWS,
    LatentKernel,
    Operands,
    addresses,
    load_rows,
    store_rows,
)

EVEN, ODD = 0, 1  # warpgroups, the parities of their tiles, and the stages of their tiles
MATH = Role("even and odd", range(0, 8))
OWN = Role("the tile's warpgroup", range(0, 4))  # or the next four warps
OTHER = Role("the other warpgroup", range(4, 8))  # or the four warps before
COLUMNS = Role("the warpgroup of the columns", range(0, 4))  # or the next four warps
QUERIES = Role("queries", range(8, 11))
LOAD = Role("load", range(11, 12))
WORKERS = Role("even, odd and queries", range(0, 11))

HELD = BOX  # columns of Q, the last ones, that stay in registers
REGISTERS = (232, 40)  # of a thread in even and odd, and in queries and load

MOVED, EXACT = 1, 2  # bits of a flag
PART = "its half of its stage"  # what a warpgroup gives back


@dataclass(frozen=True)
class Shared(Carried):
    """Shared addresses. "For each parity" means a part for even tiles, and then one for odd tiles.

    Attributes:
        q: the tile of Q, in boxes of 64 rows; the last box is P of odd tiles.
        cache: the tiles of the cache, one for each parity.
        p: P of even tiles.
        factors: for each parity, the factors of O's rows; at the end of a piece, the rows' sums.
        maxima, offsets: for each parity, the rows' references and offsets.
        flags: for each parity and each warp of rows, whether the references have moved, and whether
            the next tile needs S itself.
        arrived: the number of a segment's pieces that have arrived.
    """

    q: Int32
    cache: Int32
    p: Int32
    factors: Int32
    maxima: Int32
    offsets: Int32
    flags: Int32
    arrived: Int32


@dataclass(frozen=True)
class Turns(Carried):
    """What a warp of even or odd keeps.

    Attributes:
        warp: the warp's number in its warpgroup.
        group: the warpgroup's number, EVEN or ODD.
        s: registers of S.
        held: registers of the last columns of Q.
        acc: registers of O's rows, with the warpgroup's columns.
    """

    warp: Int32
    group: Int32
    barriers: Barriers
    shared: Shared
    s: cute.Tensor
    held: cute.Tensor
    acc: cute.Tensor
    softmax: FragmentSoftmax
    visible: HeadsVisibility


@dataclass(frozen=True)
class Piece(Carried):
    """A piece, for a warp of even or odd.

    Attributes:
        work: the piece.
        end: the tile of keys after the last one.
        count: tiles of keys.
        even, odd: the uses of the stage of even and of odd tiles before the piece.
        taken: pieces before this one.
    """

    work: LatentWork
    end: Int32
    count: Int32
    even: Int32
    odd: Int32
    taken: Int32

    def use(self, parity: int, pair: Int32) -> Any:
        """The use of a tile's stage. `pair` counts the pairs of an even and an odd tile."""
        return (self.odd if parity else self.even) + pair

    def published(self, parity: int, pair: Int32) -> Any:
        """The use of the stage of P; each piece uses one more for the sums."""
        return 2 * (self.use(parity, pair) + self.taken) + parity

    def key_tile(self, parity: int, pair: Int32) -> Any:
        return self.end - 1 - (2 * pair + parity)


class Sm90LatentDecodeTurns(LatentKernel):
    """The kernel for one LatentTurnsSpec; see the module's docstring."""

    QUERIES, LOAD, OUTPUTS, WARPS, stages = QUERIES, LOAD, MATH, 12, 2
    ROLES = (Role("even", range(0, 4)), Role("odd", range(4, 8)), QUERIES, LOAD)

    def __init__(self, spec: LatentTurnsSpec):
        super().__init__(spec)
        last = spec.head_dim - HELD  # these columns' place holds P of odd tiles too
        self.q_parts = {"q_empty": range(last), "last_empty": range(last, spec.head_dim)}
        self.pipeline = Pipeline(*self.edges())
        self.smem = self.buffers()
        chunks = list(range(spec.chunks))
        # The chunks of an odd tile's second half come first, because its warpgroup waits for them.
        middle = spec.chunks // OUTPUT_GROUPS
        self.order = chunks, chunks[middle:] + chunks[:middle]

    def edges(self) -> tuple[Edge, ...]:
        full, empty = 2 * self.spec.chunks, 2 * OUTPUT_GROUPS
        return (
            *TileQueue.edges(LOAD, WORKERS),
            Edge("q_full", QUERIES, MATH, 1, self.of_queries, payload="Q"),
            Edge("q_empty", MATH, QUERIES, 1, Kind.WARPS, payload="all columns but the last 64"),
            Edge("last_empty", MATH, QUERIES, 1, Kind.WARPS, payload="the last 64 columns"),
            Edge("cache_full", self.loaders, MATH, full, self.of_cache, payload=CHUNK),
            Edge("cache_empty", COLUMNS, self.loaders, empty, Kind.WARPS, payload=PART),
            Edge("p_full", OWN, OTHER, 2, Kind.WARPS, payload="P, and the rows' references"),
            Edge("p_empty", OTHER, OWN, 2, Kind.WARPS, payload="its stage"),
        )

    def buffers(self) -> SharedMemory:
        spec, at = self.spec, SWIZZLE_ALIGNMENT
        return SharedMemory(
            Buffer("q", self.dtype, TILE_M * spec.head_dim, 1, at, "Q, and P of odd tiles"),
            Buffer("cache", self.dtype, TILE_N * spec.head_dim, 2, at, "the cache"),
            Buffer("p", self.dtype, TILE_M * TILE_N, 1, at, "P of even tiles"),
            Buffer("factors", Float32, TILE_M, 2, holds="factors of O's rows"),
            Buffer("maxima", Float32, TILE_M, 2, holds="references of the rows"),
            Buffer("offsets", Float32, TILE_M, 2, holds="offsets of the rows"),
            Buffer("flags", Int32, WARPGROUP_WARPS, 2, holds="whether references have moved"),
            Buffer("arrived", Int32, 4, holds="the number of pieces that have arrived"),
            TileQueue.buffer(LatentWork),
            Buffer("barriers", Int64, Pipeline(*self.edges()).count),
            limit=MAX_SMEM_BYTES,
        )

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
        math_registers, load_registers = REGISTERS
        if warp >= QUERIES.warps[0]:
            self.load_warps(x, storage, barriers, shared, tiles, visible, warp, load_registers)
        else:
            cute.arch.setmaxregister_increase(math_registers)
            own = Turns(
                warp=warp % WARPGROUP_WARPS,
                group=warp // WARPGROUP_WARPS,
                barriers=barriers,
                shared=shared,
                s=fragments.accumulators(TILE_N),
                held=cute.make_rmem_tensor((HELD // 4,), Int32),
                acc=fragments.accumulators(self.columns),
                softmax=FragmentSoftmax(scaling),
                visible=visible,
            )
            self.math_warps(x, storage, own)

    # -- device: loads ------------------------------------------------------------------------

    @cute.jit
    def load_tiles(
        self, x: Operands, smem: Any, barriers: Barriers, work: LatentWork,
        visible: HeadsVisibility, n: Int32,
    ) -> Int32:  # fmt: skip
        """Load a piece's tiles of the cache, from the last to the first. Bit 0 of `n` is the parity
        of the uses of the even tiles' stage before the piece, bit 1 that of the odd tiles'
        stage."""
        first, end = self.key_tiles(visible, work)
        count = end - first
        even, odd = n & 1, n >> 1
        for pair in cutlass.range((count + 1) // 2, unroll=1):
            key_tile = end - 1 - 2 * pair
            self.load_tile(x, smem, barriers, work, key_tile, even + pair, EVEN)
            if key_tile > first:
                self.load_tile(x, smem, barriers, work, key_tile - 1, odd + pair, ODD)
        even, odd = (even + (count + 1) // 2) & 1, (odd + count // 2) & 1
        return even + 2 * odd

    def load_tile(
        self, x: Operands, smem: Any, barriers: Barriers, work: LatentWork,
        key_tile: Int32, use: Int32, parity: int,
    ) -> None:  # fmt: skip
        """Load a tile of the cache."""
        self.load_found(x, smem, barriers, self.found(x, key_tile, work), use, parity)

    @cute.jit
    def gather_tiles(
        self, x: Operands, smem: Any, barriers: Barriers, work: LatentWork,
        visible: HeadsVisibility, n: Int32,
    ) -> Int32:  # fmt: skip
        first, end = self.key_tiles(visible, work)
        count = end - first
        even, odd = n & 1, n >> 1
        if count > 0:
            following = self.found(x, end - 1, work)
            for pair in cutlass.range((count + 1) // 2, unroll=1):
                key_tile = end - 1 - 2 * pair
                found = following
                of_odd = self.found(x, cutlass.max(key_tile - 1, first), work)
                self.load_found(x, smem, barriers, found, even + pair, EVEN)
                following = self.found(x, cutlass.max(key_tile - 2, first), work)
                if key_tile > first:
                    self.load_found(x, smem, barriers, of_odd, odd + pair, ODD)
        even, odd = (even + (count + 1) // 2) & 1, (odd + count // 2) & 1
        return even + 2 * odd

    def load_found(
        self, x: Operands, smem: Any, barriers: Barriers, found: Any, use: Int32, parity: int
    ) -> None:
        """Load a tile whose rows `found` tells, in the order in which its stage becomes free."""
        for chunk in self.order[parity]:
            of_half = self.spec.chunks // OUTPUT_GROUPS
            if chunk % of_half == 0:
                n = self.empty(use, parity, chunk // of_half)
                barriers.wait_previous("cache_empty", n)
            n = self.full(use, parity, chunk)
            self.load_chunk(x, smem, barriers, found, chunk, n, Int32(parity))

    def full(self, use: Int32, parity: int, chunk: int) -> Any:
        """The use of the edge `cache_full`."""
        return (2 * use + parity) * self.spec.chunks + chunk

    def empty(self, use: Int32, parity: int, group: int) -> Any:
        """The use of the edge `cache_empty`, for the columns of a warpgroup."""
        return (2 * use + parity) * OUTPUT_GROUPS + group

    # -- device: even and odd -----------------------------------------------------------------

    @cute.jit
    def math_warps(self, x: Operands, storage: Pointers, own: Turns) -> None:
        queue = TileQueue(LatentWork, storage.work, own.barriers)
        taken, even, odd = Int32(0), Int32(0), Int32(0)
        work = queue.take(taken)
        while work.exists:
            own.softmax.start()
            own.softmax.exact[0] = Int32(1)  # no row has a reference
            own.acc.fill(0.0)
            own.barriers.wait("q_full", taken)
            held = own.shared.q + (self.spec.head_dim - HELD) // BOX * BOX_BYTES
            fragments.assign(own.held, held_rows(held, own.warp, ROWS, HELD))
            first, end = self.key_tiles(own.visible, work)
            piece = Piece(work, end, end - first, even, odd, taken)
            # What comes after the loop over keys is long, so both warpgroups have the same code.
            if own.group == EVEN:
                self.even_turns(x, own, piece)
            else:
                self.odd_turns(x, own, piece)
            own.barriers.warp_arrives("last_empty", taken)
            even += (piece.count + 1) // 2
            odd += piece.count // 2
            log_sums = self.finish_rows(own, taken + even, taken + odd)
            self.finish_piece(x, own, work, log_sums)
            taken += 1
            work = queue.take(taken)

    @cute.jit
    def even_turns(self, x: Operands, own: Turns, piece: Piece) -> None:
        """The tiles of a piece, for the even warpgroup."""
        if piece.count > 0:
            scores = self.start_tile(own, piece, EVEN, Int32(0), self.order[EVEN], None)
            fragments.assign(own.s, wgmma.wait(scores))
            last = (piece.count - 1) // 2
            for pair in cutlass.range(last, unroll=1):
                self.even_tile(x, own, piece, pair)
                self.odd_tile_and_scores(own, piece, pair)
        own.barriers.warp_arrives("q_empty", piece.taken)
        if piece.count > 0:
            last = (piece.count - 1) // 2
            self.even_tile(x, own, piece, last)
            if piece.count % 2 == 0:
                self.other_tile(own, piece, last, EVEN)

    @cute.jit
    def even_tile(self, x: Operands, own: Turns, piece: Piece, pair: Int32) -> None:
        """P and P V of an even tile, whose S is in registers, by the even warpgroup."""
        words, moved = self.probabilities(x, own, piece, pair, EVEN)
        if moved:
            fragments.scale_rows(own.acc, [own.softmax.factor[r] for r in range(2)])
        self.finish(own, piece, pair, EVEN, EVEN, self.start_own(own, words, EVEN))

    @cute.jit
    def odd_tile_and_scores(self, own: Turns, piece: Piece, pair: Int32) -> None:
        """P V of an odd tile, and S of the next even tile, by the even warpgroup."""
        self.follow(own, piece, pair, ODD)
        sums = self.start_other(own, ODD)
        first, *others = self.order[EVEN]
        scores = self.start_tile(own, piece, EVEN, pair + 1, [first], None)
        self.finish(own, piece, pair, ODD, EVEN, sums, pending=1)
        own.barriers.warp_arrives("p_empty", piece.published(ODD, pair))
        scores = self.start_tile(own, piece, EVEN, pair + 1, others, scores)
        fragments.assign(own.s, wgmma.wait(scores))

    @cute.jit
    def odd_turns(self, x: Operands, own: Turns, piece: Piece) -> None:
        """The tiles of a piece, for the odd warpgroup."""
        pairs = piece.count // 2
        if pairs == 0:
            own.barriers.warp_arrives("q_empty", piece.taken)
        for pair in cutlass.range(pairs, unroll=1):
            self.both_tiles(x, own, piece, pair)
        if piece.count % 2 == 1:
            self.other_tile(own, piece, pairs, ODD)

    @cute.jit
    def both_tiles(self, x: Operands, own: Turns, piece: Piece, pair: Int32) -> None:
        """P V of an even and an odd tile, and S and P of the odd tile, by the odd warpgroup."""
        scores = self.start_tile(own, piece, ODD, pair, self.order[ODD], None)
        self.follow(own, piece, pair, EVEN)
        sums = self.start_other(own, EVEN)
        fragments.assign(own.s, wgmma.wait(scores, pending=1))
        if pair == piece.count // 2 - 1:
            own.barriers.warp_arrives("q_empty", piece.taken)
        words, moved = self.probabilities(x, own, piece, pair, ODD)
        self.finish(own, piece, pair, EVEN, ODD, sums)
        own.barriers.warp_arrives("p_empty", piece.published(EVEN, pair))
        if moved:
            fragments.scale_rows(own.acc, [own.softmax.factor[r] for r in range(2)])
        self.finish(own, piece, pair, ODD, ODD, self.start_own(own, words, ODD))

    @cute.jit
    def other_tile(
        self, own: Turns, piece: Piece, pair: Int32, group: cutlass.Constexpr[int]
    ) -> None:
        """P V of a tile of the other warpgroup, with nothing beside."""
        parity = 1 - group
        self.follow(own, piece, pair, parity)
        self.finish(own, piece, pair, parity, group, self.start_other(own, parity))
        own.barriers.warp_arrives("p_empty", piece.published(parity, pair))

    def start_tile(
        self, own: Turns, piece: Piece, parity: int, pair: Int32, chunks: list[int], scores: Any
    ) -> Any:
        """Start S of a tile of keys, for some chunks of columns, each when it has arrived."""
        spec = self.spec
        last = spec.head_dim - HELD
        cache = own.shared.cache + parity * self.tile_bytes
        for chunk in chunks:
            columns = spec.chunk_columns[chunk]
            self.wait_chunk(own.barriers, self.full(piece.use(parity, pair), parity, chunk))
            middle = max(columns.start, min(columns.stop, last))
            for part in (range(columns.start, middle), range(middle, columns.stop)):
                if len(part):
                    held = None
                    if part.start >= last:
                        held = fragments.values(own.held)
                        held = held[(part.start - last) // 4 : (part.stop - last) // 4]
                    scores = start_scores(
                        self.dtype, own.shared.q, cache, tile_m=TILE_M, tile_n=TILE_N,
                        head_dim=spec.head_dim, columns=part, acc=scores, held=held,
                    )  # fmt: skip
        return scores

    @cute.jit
    def probabilities(
        self, x: Operands, own: Turns, piece: Piece, pair: Int32, parity: cutlass.Constexpr[int]
    ) -> tuple[list[Any], Boolean]:
        """Replace S of a tile of keys by P, and publish P and the references. Return P, rounded,
        and whether references have moved."""
        work, key_tile = piece.work, piece.key_tile(parity, pair)
        row = self.first_row(work)
        _, whole_end = own.visible.whole_key_tiles(row, ROWS, work.seqlen_q, work.seqlen_k)
        if key_tile >= whole_end:
            self.mask(own, work, key_tile)
        rows = work.seqlen_q * x.heads - row
        moved = own.softmax.update_used(own.s, rows - own.warp * WARP_ROWS)
        words = fragments.operand(own.s, self.dtype)
        use = piece.published(parity, pair)
        own.barriers.wait_previous("p_empty", use)
        lane = cute.arch.lane_idx()
        fragments.stage_matrices(words, self.p(own, parity), own.warp, ROWS, lane)
        flag = Int32(0)
        if moved:
            flag = MOVED + EXACT * own.softmax.exact[0]
            softmax, shared = own.softmax, own.shared
            for at, values in (
                (shared.factors, softmax.factor),
                (shared.maxima, softmax.maximum),
                (shared.offsets, softmax.offset),
            ):
                to = at + parity * (TILE_M * 4)
                store_rows(own.warp, to, [values[r] for r in range(fragments.LANE_ROWS)])
        if lane == 0:
            store_shared(Int32, self.flag(own, parity), [flag])
        cute.arch.fence_view_async_shared()
        own.barriers.warp_arrives("p_full", use)
        return words, moved

    def p(self, own: Turns, parity: int) -> Any:
        """The shared address of P."""
        if parity == ODD:
            return own.shared.q + (self.spec.head_dim // BOX - 1) * BOX_BYTES
        return own.shared.p

    def flag(self, own: Turns, parity: int) -> Any:
        """The shared address of the flag of the warp's rows."""
        return own.shared.flags + (parity * WARPGROUP_WARPS + own.warp) * 4

    @cute.jit
    def follow(self, own: Turns, piece: Piece, pair: Int32, parity: cutlass.Constexpr[int]) -> None:
        """Wait for P of a tile of the other warpgroup, and take over the references."""
        own.barriers.wait("p_full", piece.published(parity, pair))
        flag = load_shared(Int32, self.flag(own, parity))[0]
        if flag != 0:
            at = parity * (TILE_M * 4)
            softmax, shared = own.softmax, own.shared
            factors, maxima, offsets = (
                load_rows(own.warp, x + at) for x in (shared.factors, shared.maxima, shared.offsets)
            )
            for r in cutlass.range_constexpr(fragments.LANE_ROWS):
                softmax.use(r, maxima[r], offsets[r], factors[r])
            softmax.exact[0] = flag // EXACT
            fragments.scale_rows(own.acc, factors)

    def start_own(self, own: Turns, words: list[Any], parity: int) -> list[Any]:
        """Start P V of the warpgroup's own tile, with P in registers."""
        return start_output(
            self.dtype, fragments.values(own.acc), words, self.v(own, parity, parity),
            tile_n=TILE_N, head_dim=self.columns,
        )  # fmt: skip

    def start_other(self, own: Turns, parity: int) -> list[Any]:
        """Start P V of a tile of the other warpgroup, with P in shared memory."""
        return start_output_of_stored(
            self.dtype, fragments.values(own.acc), self.p(own, parity),
            self.v(own, parity, 1 - parity), tile_n=TILE_N, columns=self.columns,
            widest=self.columns,
        )  # fmt: skip

    def v(self, own: Turns, parity: int, group: int) -> Any:
        """The shared address of a warpgroup's columns of a tile."""
        at = parity * self.tile_bytes + group * (self.columns // BOX * BOX_BYTES)
        return own.shared.cache + at

    def finish(
        self, own: Turns, piece: Piece, pair: Int32, parity: int, group: int, sums: list[Any],
        pending: int = 0,
    ) -> None:  # fmt: skip
        """Wait for P V of a tile, and release the warpgroup's columns of the tile. `pending` groups
        of products have been started since."""
        fragments.assign(own.acc, wgmma.wait(sums, pending=pending))
        n = self.empty(piece.use(parity, pair), parity, group)
        own.barriers.warp_arrives("cache_empty", n)

    @cute.jit
    def finish_rows(self, own: Turns, even: Int32, odd: Int32) -> list[Float32]:
        """Exchange the rows' sums, as uses `even` and `odd` of the stages of P. Divide the rows of
        O by the sums, and return the log-sum-exps."""
        softmax, at = own.softmax, own.shared.factors
        totals = softmax.totals()
        is_odd = own.group == ODD
        mine = 2 * Int32(cutlass.select_(is_odd, odd, even)) + own.group
        other = 2 * Int32(cutlass.select_(is_odd, even, odd)) + (1 - own.group)
        own.barriers.wait_previous("p_empty", mine)
        store_rows(own.warp, at + own.group * (TILE_M * 4), totals)
        own.barriers.warp_arrives("p_full", mine)
        own.barriers.wait("p_full", other)
        others = load_rows(own.warp, at + (1 - own.group) * (TILE_M * 4))
        own.barriers.warp_arrives("p_empty", other)
        found = [
            finish_row(totals[r] + others[r], softmax.maximum[r], softmax.scaling, None)
            for r in range(fragments.LANE_ROWS)
        ]
        self.divide_rows(own, [x for x, _ in found])
        return [x for _, x in found]
