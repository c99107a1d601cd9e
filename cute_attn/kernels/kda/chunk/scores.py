"""Scores within a chunk: what `prepare` and `chunk_intra` do with q, k and the gates alike.

With G the sum of a channel's gates (base 2) from the start of the chunk, a chunk needs

    Aqk_ij = scale sum_d q_id k_jd exp2(G_id - G_jd)     j <= i
    L_ij   = beta_i sum_d k_id k_jd exp2(G_id - G_jd)    j < i

by products on the tensor cores, so that exp2 has to be split into a factor of row i and one of
column j. Tokens are in sub-chunks of 16, and P is the sum of gates from the first token of its
sub-chunk (0 there). The factor of row i is exp2(P_i), and that of a column of an earlier sub-chunk
the decay from j to the first token of i's: both are at most 1 for gates that are at most 0.

The factor of a column j of i's own sub-chunk is exp2(-P_j). With bfloat16, whose exponents are
those of float32, this is taken as it is, divided by 2^60, and rows are multiplied by 2^60, as long
as P stays within -120 and 40. A row i where it does not, by any channel, is said to be out of
range, and so are those after it: a row's result depends on no token after it, not even by rounding.
Such rows, and with float16 all of them, have their scores by halves: 8 tokens against the 8 before
them, with the first of the later ones as the reference of both factors; then 4, 2 and 1.

Exponentials are few: where 64 channels of a sub-chunk are in range, exp2(-P - 60) is stored instead
of P, and all factors are products of that, or of its reciprocal, and one exponential a channel.

Factors are multiplied in float32, and the products rounded once, as operands. Scores of a token
with itself have no decay, and come from `norms`, which also finds the lengths of q and k: these are
factors of the scores, and of all else that is made of q and k, which are never rounded again.

All 8 warps work on scores: warps b and b + 4 have the rows of sub-chunk b, each for half of the
channels. Then warp b adds up and keeps L, warp b + 4 Aqk. In every product the order of channels is
the one that lets a thread load 8 neighbours at a time: with row = lane // 4, a thread has channels
8 (lane % 4) to + 7 of each 32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64
from cutlass.cutlass_dsl import BaseDSL

from ...common.dtypes import DTYPE
from ...common.ptx.async_copy import copy_async
from ...common.ptx.compiler import keep_branch, opaque
from ...common.ptx.convert import pack, unpack
from ...common.ptx.math import exp2, log2, reciprocal, reciprocal_sqrt
from ...common.ptx.memory import load_shared, store_shared
from ...common.ptx.mma import mma
from ...common.spec import WARP_SIZE
from .chunks import ChunkPlace, chunk_place
from .spec import CHUNK, L2NORM_EPSILON, smem_bytes
from .tiles import LINE_BYTES, UNIT_BYTES

SUB_CHUNK = 16
SUB_CHUNKS = CHUNK // SUB_CHUNK
NUM_WARPS = 2 * SUB_CHUNKS
NUM_THREADS = NUM_WARPS * WARP_SIZE
GROUP = 32  # channels that a warp takes at a time, 8 a thread
BLOCK_BYTES = SUB_CHUNK * SUB_CHUNK * 4
# In a region are a sub-chunk's partial sums, and then its rows of the two 16-bit tiles.
REGION_BYTES = 8192
LOWEST, HIGHEST = -120.0, 40.0  # of P in range
SHIFT = 60.0  # of exponents of rows, with bfloat16
# With the norm within, rows longer than LONG are multiplied by SHORTENED before anything else: the
# shifted product of two others stays below 2^120, and so do those of rows up to 2^64.
LONG, SHORTENED = 2.0**30, 2.0**-34
NUM_BLOCKS = SUB_CHUNKS * (SUB_CHUNKS + 1) // 2
RESERVED_BYTES = 1024  # of an SM's shared memory, for each block


def target_architecture() -> str:
    """What is compiled for, such as "sm_90a"."""
    return str(BaseDSL._get_dsl().get_arch_enum().name)


def block_offset(i: Any, j: Any) -> Any:
    """Bytes to block (i, j), j <= i, of the 16 by 16 blocks of L."""
    return (((i * (i + 1)) >> 1) + j) * BLOCK_BYTES


def block_element(i: Any, j: Any) -> Any:
    """Bytes to element (i, j) of a block of float32. Halves of rows change places in every other
    pair of rows, so that 4 rows of 32 bytes are in different banks."""
    return (i << 6) + ((j << 2) ^ ((i & 2) << 4))


def tile_unit(row: Any, unit: Any) -> Any:
    """Bytes to a 16-byte unit (0 to 7) of a row of a sub-tile."""
    return row * LINE_BYTES + ((unit ^ (row & 7)) << 4)


def parity(row: Any) -> Any:
    """The bit by which rows of q, k and P are swizzled: it differs between neighbours, and between
    neighbours of every other row."""
    return (row ^ (row >> 1)) & 1


def groups_of_half(groups: int) -> Any:
    """How many groups of channels a warp goes through. The compiler is not to know that it is one:
    without the loop it keeps more in registers than there are."""
    if groups > 2:
        return groups // 2
    return opaque(Int32(groups // 2))


class Rows(NamedTuple):
    """The chunk's rows of a tensor."""

    start: Any  # address of the first
    pitch: Any  # bytes from one to the next: Uint32, as nobody has rows of 4 GB


def row_offset(row: Any, pitch: Any) -> Any:
    """Bytes to a row, in one multiplication."""
    return Int64(Uint64(Uint32(row)) * Uint64(pitch))


class ChunkScores:
    """Shared memory, and the phases of a block that works on one chunk of one value head.

    Rows of q and k are of 2 K bytes; halves of 128 bytes (64) change places where `parity` is 1.
    Rows of P, or of exp2(-shift - P) where a sub-chunk's 64 channels are all in range, are of 4 K
    bytes; 16-byte units 2 u and 2 u + 1 change places where `parity` is 1. So
    two rows that a quarter of a warp reads together are in different banks.
    """

    few_registers = False  # whether decayed rows leave few registers to the scores

    def __init__(self, dtype: str, head_dim_k: int, *, l2norm: bool):
        self.dtype = DTYPE[dtype]
        self.l2norm = l2norm
        self.head_dim_k = head_dim_k
        self.groups = head_dim_k // GROUP
        self.qk_row, self.p_row = 2 * head_dim_k, 4 * head_dim_k
        offset = 0

        def buffer(nbytes: int) -> int:
            nonlocal offset
            offset += nbytes
            return offset - nbytes

        # Byte offsets in shared memory.
        self.q = buffer(CHUNK * self.qk_row)
        self.k = buffer(CHUNK * self.qk_row)
        self.p = buffer(CHUNK * self.p_row)
        # L, block by block. Of those on the diagonal, what is below the diagonal is overwritten by
        # the inverse; above it stands Aqk, transposed, of rows out of range.
        self.blocks = buffer(NUM_BLOCKS * BLOCK_BYTES)
        # Of each sub-chunk and channel:
        self.start = buffer(SUB_CHUNKS * self.p_row)  # exp2(G - shift) at its first token
        self.to_next = buffer(SUB_CHUNKS * self.p_row)  # G from its first token to the next one's
        self.to_end = buffer(SUB_CHUNKS * self.p_row)  # G from its first token to the chunk's end
        # Of each token:
        self.beta = buffer(CHUNK * 4)
        self.own_score = buffer(CHUNK * 4)  # scale q . k
        self.inverse_norm_q = buffer(CHUNK * 4)  # times scale
        self.inverse_norm_k = buffer(CHUNK * 4)
        # Of each warp that has gates, the first row that is out of range; 16 where there is none.
        self.out_of_range = buffer(NUM_WARPS * 4)
        self.smem_bytes = offset
        # Once the scores are done, their operands' place is that of partial sums, and then of 16
        # rows of Aqk and Akk as 16-bit tiles: of each sub-chunk a region, half of it each, of
        # which again half is free then.
        self.tile_qk = self.q
        self.exchange = self.q + REGION_BYTES // 4
        self.tile_kk = self.q + REGION_BYTES // 2
        assert self.q + SUB_CHUNKS * REGION_BYTES <= self.blocks
        self.in_one_product = dtype == "bfloat16"
        self.shift = SHIFT if self.in_one_product else 0.0

    def blocks_per_sm(self) -> int:
        """Two, if the architecture that is compiled for has the shared memory: threads then have
        128 registers."""
        available = smem_bytes(target_architecture()) + RESERVED_BYTES
        return min(2, available // (self.smem_bytes + RESERVED_BYTES))

    # -- small things -------------------------------------------------------------------------

    def row_and_part(self) -> tuple[Any, Any]:
        lane = cute.arch.lane_idx()
        return lane >> 2, lane & 3

    def unpacked(self, packed: Any) -> list[Any]:
        values: list[Any] = []
        for x in packed:
            values += unpack(self.dtype, x)
        return values

    def packed(self, values: list[Any]) -> list[Any]:
        return [pack(self.dtype, values[i], values[i + 1]) for i in range(0, len(values), 2)]

    def load_channels(self, address: Any, swap: Any) -> list[Any]:
        """8 neighbours of a row of float32; `swap` is 16 where the row's units change places."""
        return [
            *load_shared(Float32, address + swap, 4),
            *load_shared(Float32, (address + 16) - swap, 4),
        ]

    # -- places -------------------------------------------------------------------------------

    def divisors(self, g: cute.Tensor, q: cute.Tensor) -> tuple[Any, Any, Any]:
        """For host code: of a block by value heads, of a value head by those of a group, and of a
        slot by chunks of a sequence where these are not packed."""
        heads = g.shape[2]
        return tuple(
            cute.fast_divmod_create_divisor_v2(x)
            for x in (heads, heads // q.shape[2], (g.shape[1] + (CHUNK - 1)) // CHUNK)
        )

    @cute.jit
    def place_of(
        self,
        by_heads: cute.FastDivmodDivisorV2,
        by_group: cute.FastDivmodDivisorV2,
        by_chunks: cute.FastDivmodDivisorV2,
        tokens: Int32,
        cu_seqlens: cute.Tensor | None,
    ) -> Any:
        """(slot, value head, head of q and k, chunk) of this block. Value heads of a group are
        neighbours, and find q and k in L2."""
        block, _, _ = cute.arch.block_idx()
        slot, head = divmod(block, by_heads)
        head_qk, _ = divmod(head, by_group)
        if cutlass.const_expr(cu_seqlens is None):
            sequence, index = divmod(slot, by_chunks)
            start = index * CHUNK
            length = cutlass.min(tokens - start, Int32(CHUNK))
            place = ChunkPlace(cutlass.Boolean(True), sequence, sequence, index, start, length)
        else:
            place = chunk_place(slot, tokens, cu_seqlens)
        return slot, head, head_qk, place

    def rows_of(self, x: cute.Tensor | None, place: Any, head: Any) -> Rows | None:
        """The chunk's rows of a tensor [B, T, heads, columns]."""
        if x is None:
            return None
        width = x.element_type.width // 8
        start = (
            x.iterator
            + (Int64(place.batch) * x.stride[0] + Int64(head) * x.stride[2])
            + Int64(place.start) * x.stride[1]
        ).toint()
        return Rows(start, Uint32(x.stride[1] * width))

    # -- q and k ------------------------------------------------------------------------------

    @cute.jit
    def start_copy(self, rows: Any, shared: Int32, length: Int32) -> None:
        """cp.async of the chunk's rows of q or k; rows past its end become 0."""
        thread, _, _ = cute.arch.thread_idx()
        units = self.qk_row // UNIT_BYTES
        step = NUM_THREADS // units
        assert step % 4 == 0, "a thread's rows have the same parity"
        row, unit = thread // units, thread % units
        place = shared + row * self.qk_row + ((unit ^ (parity(row) << 2)) << 4)
        source = rows.start + Int64(unit * UNIT_BYTES)
        for i in cutlass.range_constexpr(CHUNK // step):
            at = row + i * step
            present = at < length
            copy_async(
                place + i * (step * self.qk_row),
                source + row_offset(cutlass.select_(present, at, Int32(0)), rows.pitch),
                present,
            )

    @cute.jit
    def norms(self, smem: Int32, scale: Float32) -> None:
        """Of 8 rows of each warp: scale q . k, and with l2norm the inverses of both lengths.

        The left operand has q in rows 0 to 7 and k in rows 8 to 15, the right one k, and q. What
        is wanted is on the diagonals of the results.
        """
        thread, _, _ = cute.arch.thread_idx()
        r, c = self.row_and_part()
        row = (thread >> 5) * 8 + r
        at = smem + self.q + row * self.qk_row + c * 16
        by_k, by_q = self._products_of_rows(at, parity(row) << 6)
        # By so much rows of q and k are longer than what is left of them.
        longer_q, longer_k = Float32(1.0), Float32(1.0)
        if cutlass.const_expr(self.l2norm and self.in_one_product):
            q_square, k_square = (
                Float32(cutlass.select_((r & 1) == 1, x[1], x[0])) for x in (by_q, by_k[2:])
            )
            is_long = cute.arch.fmax(q_square, k_square) > LONG * LONG
            if cute.arch.vote_any_sync((c == r >> 1) & is_long):
                keep_branch()
                longer_q = self._shorten(at, parity(row) << 6, q_square)
                longer_k = self._shorten(at + (self.k - self.q), parity(row) << 6, k_square)
        if c == r >> 1:
            odd = (r & 1) == 1
            dot = cutlass.select_(odd, by_k[1], by_k[0]) * scale
            place = smem + row * 4
            if cutlass.const_expr(self.l2norm):
                of_q = self._inverse_norm(cutlass.select_(odd, by_q[1], by_q[0]))
                of_k = self._inverse_norm(cutlass.select_(odd, by_k[3], by_k[2]))
                dot = dot * (of_q * of_k)
                if cutlass.const_expr(self.in_one_product):
                    of_q, of_k = of_q * longer_q, of_k * longer_k
                store_shared(Float32, place + self.inverse_norm_q, [of_q * scale])
                store_shared(Float32, place + self.inverse_norm_k, [of_k])
            store_shared(Float32, place + self.own_score, [dot])

    def _shorten(self, at: Any, swap: Any, square: Any) -> Any:
        """Multiply the thread's row in shared memory by SHORTENED if it is long, and return what
        that takes from its length. Its sum of squares has lane r / 2 of the row's four."""
        lane = cute.arch.lane_idx()
        is_long = cute.arch.shuffle_sync(square, (lane & ~3) + (lane >> 3)) > LONG * LONG
        factor = cutlass.select_(is_long, Float32(SHORTENED), Float32(1.0))
        for g in range(self.groups):
            address = at + ((g << 6) ^ swap)
            x = self.unpacked(load_shared(Int32, address, 4))
            store_shared(Int32, address, self.packed([y * factor for y in x]))
        return Float32(cutlass.select_(is_long, Float32(1.0 / SHORTENED), Float32(1.0)))

    def _products_of_rows(self, at: Any, swap: Any) -> tuple[list[Any], list[Any]]:
        by_k, by_q = [Float32(0.0)] * 4, [Float32(0.0)] * 4
        for g in range(self.groups):
            address = at + ((g << 6) ^ swap)
            q = load_shared(Int32, address, 4)
            k = load_shared(Int32, address + (self.k - self.q), 4)
            for t in (0, 2):
                a = (q[t], k[t], q[t + 1], k[t + 1])
                by_k = list(mma(self.dtype, by_k, a, k[t : t + 2]))
                if self.l2norm:
                    by_q = list(mma(self.dtype, by_q, a, q[t : t + 2]))
        return by_k, by_q

    def _inverse_norm(self, square: Any) -> Any:
        return reciprocal_sqrt(Float32(square) + L2NORM_EPSILON)

    def of_row(self, smem: Any, vector: int, row: Any) -> Any:
        return load_shared(Float32, smem + vector + row * 4)[0]

    # -- gates --------------------------------------------------------------------------------

    def store_sums(
        self, smem: Any, pair: Any, sub: Any, gates: list[Any], *, ascending: bool
    ) -> None:
        """P of a sub-chunk, two channels, and what `finish_tables` needs of it.

        Args:
            pair: of channels, 2 pair and 2 pair + 1.
            gates: of the 16 tokens, base 2; 0 past the chunk's end.
            ascending: gates may be above 0.
        """
        total = [Float32(0.0), Float32(0.0)]
        sums = [total]
        for t in range(1, SUB_CHUNK):
            total = [x + y for x, y in zip(total, gates[t], strict=True)]
            sums.append(total)
        self.store_rows_of_sums(smem, pair, sub, sums, ascending=ascending)
        at = smem + sub * self.p_row + (pair << 3)
        store_shared(Float32, at + self.start, gates[0])
        store_shared(Float32, at + self.to_next, total)

    def store_rows_of_sums(
        self, smem: Any, pair: Any, sub: Any, sums: list[Any], *, ascending: bool
    ) -> None:
        """A sub-chunk's rows of P, or of its factors, for two channels."""
        if not self.in_one_product:
            self._store_rows_of_p(smem, pair, sub, sums)
            return
        checked = range(1, SUB_CHUNK) if ascending else range(SUB_CHUNK - 1, SUB_CHUNK)
        found = self._is_outside(sums[checked[0]])
        for t in checked[1:]:
            found = found | self._is_outside(sums[t])
        self._store_factors(smem, pair, sub, sums, found)

    def _store_rows_of_p(self, smem: Any, pair: Any, sub: Any, rows: list[Any]) -> None:
        unit, within = pair >> 1, (pair & 1) << 3
        row = smem + self.p + sub * (SUB_CHUNK * self.p_row) + within
        places = [row + (unit << 4), row + ((unit ^ 1) << 4)]
        for t in range(SUB_CHUNK):
            store_shared(Float32, places[parity(t)] + t * self.p_row, rows[t])

    @cute.jit
    def _store_factors(
        self, smem: Int32, pair: Int32, sub: Int32, sums: Any, found: cutlass.Boolean
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        first = Int32(SUB_CHUNK)
        if cute.arch.vote_any_sync(found):
            first = self._first_outside(sums)
            self._store_rows_of_p(smem, pair, sub, sums)
        else:
            self._store_rows_of_p(
                smem, pair, sub, [[exp2(-self.shift - x) for x in row] for row in sums]
            )
        if (thread & (WARP_SIZE - 1)) == 0:
            store_shared(Int32, smem + self.out_of_range + (thread >> 5) * 4, [first])

    def _is_outside(self, sums: Any) -> Any:
        center, reach = (HIGHEST + LOWEST) / 2, (HIGHEST - LOWEST) / 2
        distance = [cute.arch.fmax(x - center, center - x) for x in sums]
        return cute.arch.fmax(*distance) > reach

    def _first_outside(self, sums: Any) -> Any:
        first = Int32(SUB_CHUNK)
        for t in reversed(range(1, SUB_CHUNK)):
            first = Int32(cutlass.select_(self._is_outside(sums[t]), Int32(t), first))
        for distance in (1, 2, 4, 8, 16):
            first = cutlass.min(first, cute.arch.shuffle_sync_bfly(first, distance))
        return first

    def rows_in_range(self, smem: Any, b: Any) -> Any:
        """How many rows of sub-chunk b are in range, from the first on."""
        if not self.in_one_product:
            return Int32(0)
        warps = self.head_dim_k // 2 // WARP_SIZE
        at = smem + self.out_of_range + b * (4 * warps)
        found = load_shared(Int32, at, warps)
        rows = found[0]
        for other in found[1:]:
            rows = cutlass.min(rows, other)
        return rows

    def rows_of_half(self, smem: Any, b: Any, half: Any) -> Any:
        """The same for half of the channels. All 16: P's place holds exp2(-shift - P)."""
        if not self.in_one_product:
            return Int32(0)
        warps = self.head_dim_k // 2 // WARP_SIZE
        at = b * (4 * warps) + (half * 4 if warps == 2 else 0)
        return load_shared(Int32, smem + self.out_of_range + at)[0]

    def finish_tables(self, smem: Any, channel: Any) -> Any:
        """From the gate of the first token and the sum of the others of each sub-chunk, all that
        `start`, `to_next` and `to_end` are to hold; G at the chunk's end is returned."""
        at = smem + (channel << 2)
        first, total = (
            [load_shared(Float32, at + table + b * self.p_row)[0] for b in range(SUB_CHUNKS)]
            for table in (self.start, self.to_next)
        )
        steps = [x + y for x, y in zip(total, [*first[1:], Float32(0.0)], strict=True)]
        to_end = Float32(0.0)
        for b in reversed(range(SUB_CHUNKS)):
            to_end = to_end + steps[b]
            store_shared(Float32, at + self.to_end + b * self.p_row, [to_end])
            store_shared(Float32, at + self.to_next + b * self.p_row, [steps[b]])
        start = first[0]
        for b in range(SUB_CHUNKS):
            self.store_start(at + b * self.p_row, start)
            start = start + steps[b]
        return start

    def store_start(self, at: Any, start: Any) -> None:
        store_shared(Float32, at + self.start, [exp2(start - self.shift)])

    # -- scores -------------------------------------------------------------------------------

    @cute.jit
    def score(
        self, smem: Int32, b: Int32, half: Int32, scale: Float32, out: Any, acc: cute.Tensor
    ) -> None:
        """All that q, k and P are read for, which may be overwritten afterwards: `score_rows`, and
        k decayed to the end of the chunk."""
        self.score_rows(smem, b, half, scale, out, acc)
        # Those with few blocks of scores have more of kg: sub-chunks 0 and 1, 2, 3, none.
        first = Int32(0) if b == 0 else b + 1
        last = cutlass.min(b + 2, Int32(SUB_CHUNKS))
        for sub in cutlass.range(first, last, unroll=1):
            self.decay_to_end(smem, sub, half, out)
        cute.arch.sync_threads()

    @cute.jit
    def score_rows(
        self, smem: Int32, b: Int32, half: Int32, scale: Float32, out: Any, acc: cute.Tensor
    ) -> None:
        """The rows of sub-chunk b against its own and the sub-chunks before it, for half of the
        channels: sums without scale and beta. On the way q and k, decayed, go to `put_decayed_q`
        and `put_decayed_k`.

        Args:
            out: for these.
            acc: 64 float32 in registers: [q, k][sub-chunks back][half of its tokens][accumulators].
        """
        acc.fill(0.0)
        first = half * (self.groups // 2)
        for g in cutlass.range(first, first + groups_of_half(self.groups), unroll=1):
            self._row_group(smem, b, half, scale, out, g, acc)
        rows = self.rows_in_range(smem, b)
        if rows < SUB_CHUNK:
            self.levels(smem, b, half, scale)

    @cute.jit
    def _row_group(
        self,
        smem: Int32,
        b: Int32,
        half: Int32,
        scale: Float32,
        out: Any,
        g: Int32,
        acc: cute.Tensor,
    ) -> None:
        """`score_rows` for 32 channels."""
        r, c = self.row_and_part()
        at_qk = smem + ((g << 6) ^ ((parity(r) << 6) + c * 16))
        at_p = smem + (g << 7) + c * 32
        # Left operands: [q, k][half of the rows][4].
        rows = cute.make_rmem_tensor((16,), Int32)
        in_range = self.rows_of_half(smem, b, half)
        if in_range < SUB_CHUNK:
            keep_branch()
            self._own_rows(smem, b, scale, out, g, at_qk, at_p, rows, acc, in_range)
        else:
            self._own_rows(smem, b, scale, out, g, at_qk, at_p, rows, acc, None)
        # G from the columns' next sub-chunk to this one, plus the shift.
        gap = cute.make_rmem_tensor((8,), Float32)
        gap.fill(self.shift)
        for back in cutlass.range_constexpr(1, SUB_CHUNKS):
            if b >= back:
                keep_branch()
                j = b - back
                if self.rows_of_half(smem, j, half) < SUB_CHUNK:
                    keep_branch()
                    self._columns(back, False, j, at_qk, at_p, rows, gap, acc)
                else:
                    self._columns(back, True, j, at_qk, at_p, rows, gap, acc)

    def _own_rows(
        self, smem: Any, b: Any, scale: Any, out: Any, g: Any, at_qk: Any, at_p: Any,
        rows: cute.Tensor, acc: cute.Tensor, in_range: Any,
    ) -> None:  # fmt: skip
        """The rows as left operands, times the columns of the sub-chunk itself. `in_range` is None
        where all rows are; a row that is has the same factors in either case, bit by bit."""
        r, _ = self.row_and_part()
        own = []
        slow = in_range is not None
        # Registers are short here: loads are held back, and some are repeated.
        frugal = slow or self.few_registers
        late = frugal or target_architecture().startswith("sm_10")
        for half in range(2):
            if half and self.in_one_product:
                cute.arch.sync_warp()
            row = b * SUB_CHUNK + half * 8 + r
            place = at_qk + row * self.qk_row
            if not late:
                q = self.unpacked(load_shared(Int32, place + self.q, 4))
            if not slow:
                k = self.unpacked(load_shared(Int32, place + self.k, 4))
            p = self.load_channels(at_p + self.p + row * self.p_row, parity(r) << 4)
            if not self.in_one_product:
                decay = [exp2(x) for x in p]
            else:
                inverse = [exp2(-self.shift - x) for x in p] if slow else p
                if not slow:
                    own.append(self.packed([x * y for x, y in zip(k, inverse, strict=True)]))
                decay = [reciprocal(x) for x in inverse]
                if slow:
                    inside = r + half * 8 < in_range
                    for n, y in enumerate(p):
                        x = cutlass.select_(inside, -self.shift - y, y + self.shift)
                        x = exp2(x)
                        decay[n] = Float32(cutlass.select_(inside, reciprocal(x), x))
            if slow:
                cute.arch.sync_warp()
                k = self.unpacked(load_shared(Int32, place + self.k, 4))
            k = [x * y for x, y in zip(k, decay, strict=True)]
            for n, x in enumerate(self.packed(k)):
                rows[8 + half * 4 + n] = x
            if slow:
                cute.arch.sync_warp()
            start = self.load_channels(at_p + self.start + b * self.p_row, 0)
            self.put_decayed_k(out, smem, b, half, g, k, start)
            if frugal:
                cute.arch.sync_warp()
            if late:
                q = self.unpacked(load_shared(Int32, place + self.q, 4))
            q = [x * y for x, y in zip(q, decay, strict=True)]
            for n, x in enumerate(self.packed(q)):
                rows[half * 4 + n] = x
            if frugal:
                start = self.load_channels(at_p + self.start + b * self.p_row, 0)
            self.put_decayed_q(out, smem, b, half, g, q, start, scale)
        if self.in_one_product and slow:
            for half in range(2):
                cute.arch.sync_warp()
                row = b * SUB_CHUNK + half * 8 + r
                k = self.unpacked(load_shared(Int32, at_qk + self.k + row * self.qk_row, 4))
                p = self.load_channels(at_p + self.p + row * self.p_row, parity(r) << 4)
                inverse = [exp2(-self.shift - x) for x in p]
                own.append(self.packed([x * y for x, y in zip(k, inverse, strict=True)]))
        for half, column in enumerate(own):
            self._accumulate(acc, 0, half, rows, column)

    def _columns(
        self, back: int, in_range: bool, j: Any, at_qk: Any, at_p: Any, rows: cute.Tensor,
        gap: cute.Tensor, acc: cute.Tensor,
    ) -> None:  # fmt: skip
        """The rows times the columns of sub-chunk j, `back` before."""
        r, _ = self.row_and_part()
        step = self.load_channels(at_p + self.to_next + j * self.p_row, 0)
        for i in range(8):
            gap[i] = gap[i] + step[i]
        to_rows = [exp2(gap[i]) if in_range else gap[i] for i in range(8)]
        for half in range(2):
            row = j * SUB_CHUNK + half * 8 + r
            k = self.unpacked(load_shared(Int32, at_qk + self.k + row * self.qk_row, 4))
            p = self.load_channels(at_p + self.p + row * self.p_row, parity(r) << 4)
            factors = self._decays(p, to_rows, in_range)
            column = self.packed([x * y for x, y in zip(k, factors, strict=True)])
            self._accumulate(acc, back, half, rows, column)

    def _decays(self, p: list[Any], until: list[Any], in_range: bool) -> list[Any]:
        """From tokens whose P, or factors if `in_range`, are given, until a later one. `until` is G
        from the sub-chunk's first token to that one, plus the shift, or exp2 of that."""
        if in_range:
            return [x * y for x, y in zip(p, until, strict=True)]
        return [
            exp2((y - self.shift if self.shift else y) - x) for x, y in zip(p, until, strict=True)
        ]

    def _accumulate(
        self, acc: cute.Tensor, back: int, half: int, rows: cute.Tensor, column: Any
    ) -> None:
        """Both matrices' rows times 8 columns of 32 channels."""
        for which in range(2):
            first = which * 8
            n = ((which * SUB_CHUNKS + back) * 2 + half) * 4
            product = [acc[n + i] for i in range(4)]
            for t in (0, 2):
                a = [rows[first + m] for m in (t, 4 + t, t + 1, 4 + t + 1)]
                product = mma(self.dtype, product, a, column[t : t + 2])
            for i in range(4):
                acc[n + i] = product[i]

    def swap_sums(self, smem: Any, b: Any, half: Any, acc: cute.Tensor) -> None:
        """The two warps of sub-chunk b give each other what they do not `take`: warp b (half 0)
        its part of the sums of q, warp b + 4 that of the sums of k."""
        first = half == 0
        at = [self._partial_sums(smem, b, which) for which in (0, 1)]
        at = cutlass.select_(first, *at)
        for n in range(0, 8 * SUB_CHUNKS, 4):
            values = [
                cutlass.select_(first, acc[n + i], acc[8 * SUB_CHUNKS + n + i]) for i in range(4)
            ]
            store_shared(Float32, at + n // 4 * (WARP_SIZE * 16), values)
        # One instruction for both warps: PTX does not ask for that, compute-sanitizer does.
        cute.arch.barrier(barrier_id=1 + b, number_of_threads=2 * WARP_SIZE)

    def take(self, smem: Any, b: Any, which: int, acc: cute.Tensor) -> list[Any]:
        """The whole sums of q (0) or k (1): [sub-chunks back][half of its tokens][accumulators]."""
        at = self._partial_sums(smem, b, which)
        result: list[Any] = []
        for n in range(2 * SUB_CHUNKS):
            other = load_shared(Float32, at + n * (WARP_SIZE * 16), 4)
            first = (which * 2 * SUB_CHUNKS + n) * 4
            result += [acc[first + i] + other[i] for i in range(4)]
        return result

    def _partial_sums(self, smem: Any, b: Any, which: int) -> Any:
        at = (self.tile_qk, self.tile_kk)[which]
        return smem + at + b * REGION_BYTES + cute.arch.lane_idx() * 16

    def unshifted(self, back: int, factor: Any) -> Any:
        """A factor of sums over earlier columns, whose rows are too large by the shift."""
        return factor * 2.0**-self.shift if back and self.shift else factor

    def row_factor(self, smem: Any, row: Any) -> Any:
        """Of a row of L: beta, and the norm."""
        factor = self.of_row(smem, self.beta, row)
        if self.l2norm:
            factor = factor * self.of_row(smem, self.inverse_norm_k, row)
        return factor

    def normalised(self, smem: Any, row: Any, k: list[Any]) -> list[Any]:
        """Channels of a row of k, or of what is a multiple of it, times the norm."""
        if not self.l2norm:
            return k
        norm = self.of_row(smem, self.inverse_norm_k, row)
        return [x * norm for x in k]

    def column_factors(self, smem: Any, j: Any) -> Any:
        """Of the thread's columns of sub-chunk j: the norms of k, [half of its tokens][2]."""
        if not self.l2norm:
            return (None, None)
        _, c = self.row_and_part()
        at = smem + self.inverse_norm_k + (j * SUB_CHUNK + 2 * c) * 4
        return tuple(load_shared(Float32, at + 32 * half, 2) for half in range(2))

    def scaled(self, sums: Any, n: int, row: Any, columns: Any) -> list[Any]:
        """Two sums times their row's and their columns' factors."""
        if columns is None:
            return [sums[n + e] * row for e in range(2)]
        return [sums[n + e] * (row * columns[e]) for e in range(2)]

    @cute.jit
    def finish_scores(self, smem: Int32, b: Int32, scale: Float32, acc: cute.Tensor) -> None:
        """The rows of Aqk of sub-chunk b to `tile_qk`, by warp b + 4, where it can read them; after
        `swap_sums`."""
        sums = self.take(smem, b, 0, acc)
        cute.arch.sync_warp()
        self.stage_scores(smem, b, scale, sums)
        cute.arch.sync_warp()

    @cute.jit
    def store_lower(self, smem: Int32, b: Int32, sums: Any) -> None:
        """The rows of L of sub-chunk b, from the sums of k."""
        r, c = self.row_and_part()
        in_range = self.rows_in_range(smem, b)
        factors = [self.row_factor(smem, b * SUB_CHUNK + r + 8 * half) for half in range(2)]
        for back in cutlass.range_constexpr(SUB_CHUNKS):
            if b >= back:
                columns = self.column_factors(smem, b - back)
                block = smem + self.blocks + block_offset(b, b - back)
                for half in cutlass.range_constexpr(2):
                    for rows in cutlass.range_constexpr(2):
                        i, j = r + 8 * rows, 8 * half + 2 * c
                        n = back * 8 + half * 4 + rows * 2
                        pair = self.scaled(
                            sums, n, self.unshifted(back, factors[rows]), columns[half]
                        )
                        if cutlass.const_expr(back > 0):
                            store_shared(Float32, block + block_element(i, j), pair)
                        else:
                            for e in cutlass.range_constexpr(2):
                                if j + e < i and i < in_range:
                                    at = block + block_element(i, j + e)
                                    store_shared(Float32, at, [pair[e]])

    @cute.jit
    def stage_scores(self, smem: Int32, b: Int32, scale: Float32, sums: Any) -> None:
        """The 16 rows of Aqk of sub-chunk b, from the sums of q, to `tile_qk`."""
        r, c = self.row_and_part()
        tile = smem + self.tile_qk + b * REGION_BYTES
        in_range = self.rows_in_range(smem, b)
        factors = [scale, scale]
        if cutlass.const_expr(self.l2norm):
            factors = [
                self.of_row(smem, self.inverse_norm_q, b * SUB_CHUNK + r + 8 * rows)
                for rows in range(2)
            ]
        own = cute.make_rmem_tensor((8,), Float32)
        columns = self.column_factors(smem, b)
        for n in cutlass.range_constexpr(0, 8, 2):
            pair = self.scaled(sums, n, factors[n // 2 % 2], columns[n // 4])
            own[n], own[n + 1] = pair[0], pair[1]
        if in_range < SUB_CHUNK:
            block = smem + self.blocks + block_offset(b, b)
            for n in cutlass.range_constexpr(8):
                i, j = r + 8 * (n // 2 % 2), 8 * (n // 4) + 2 * c + n % 2
                if j < i and i >= in_range:
                    own[n] = load_shared(Float32, block + block_element(j, i))[0]
        for half in cutlass.range_constexpr(2):
            for rows in cutlass.range_constexpr(2):
                i = r + 8 * rows
                same = self.of_row(smem, self.own_score, b * SUB_CHUNK + i)
                values = []
                for e in cutlass.range_constexpr(2):
                    j = 8 * half + 2 * c + e
                    x = cutlass.select_(j == i, same, Float32(0.0))
                    values.append(cutlass.select_(j < i, own[half * 4 + rows * 2 + e], x))
                at = tile + tile_unit(i, 2 * b + half) + 4 * c
                store_shared(Int32, at, self.packed(values))
        for back in cutlass.range_constexpr(1, SUB_CHUNKS):
            if b >= back:
                of_columns = self.column_factors(smem, b - back)
                for half in cutlass.range_constexpr(2):
                    for rows in cutlass.range_constexpr(2):
                        n = back * 8 + half * 4 + rows * 2
                        at = tile + tile_unit(r + 8 * rows, 2 * (b - back) + half) + 4 * c
                        factor = self.unshifted(back, factors[rows])
                        values = self.scaled(sums, n, factor, of_columns[half])
                        store_shared(Int32, at, self.packed(values))
        lane = cute.arch.lane_idx()
        for j in cutlass.range_constexpr(1, SUB_CHUNKS):
            if j > b:
                at = tile + tile_unit(lane >> 1, 2 * j + (lane & 1))
                store_shared(Int32, at, [Int32(0)] * 4)

    # -- scores by halves ---------------------------------------------------------------------

    @cute.jit
    def levels(self, smem: Int32, b: Int32, half: Int32, scale: Float32) -> None:
        """Half of the scores within sub-chunk b: L below the diagonal of its block, scale q k above
        it, transposed.

        At a level with h later tokens against the h before them there are 8 of each in all: the 8
        rows of q are rows 0 to 7 of the left operand, those of k rows 8 to 15, and the 8 columns
        are the right operand. Of the result those elements count whose tokens are of the same 2 h.
        """
        for level in cutlass.range(2 * half, 2 * half + 2, unroll=1):
            shift = 3 - level
            h = 1 << shift
            r, c = self.row_and_part()
            pair = r >> shift
            # Tokens of the sub-chunk.
            reference = (pair << (shift + 1)) + h
            later = reference + (r & (h - 1))
            product = self._level(smem, b, later, later - h, reference)
            of_k = self.row_factor(smem, b * SUB_CHUNK + later)
            of_q = scale
            if cutlass.const_expr(self.l2norm):
                of_q = self.of_row(smem, self.inverse_norm_q, b * SUB_CHUNK + later)
            block = smem + self.blocks + block_offset(b, b)
            for i in cutlass.range_constexpr(2):
                n = 2 * c + i
                if (n >> shift) == pair:
                    earlier = (pair << (shift + 1)) + (n & (h - 1))
                    column = Float32(1.0)
                    if cutlass.const_expr(self.l2norm):
                        column = self.of_row(smem, self.inverse_norm_k, b * SUB_CHUNK + earlier)
                    transposed = block + block_element(earlier, later)
                    store_shared(Float32, transposed, [product[i] * (of_q * column)])
                    at = block + block_element(later, earlier)
                    store_shared(Float32, at, [product[2 + i] * (of_k * column)])

    def _level(self, smem: Any, b: Any, later: Any, earlier: Any, reference: Any) -> list[Any]:
        """The product of a level, as accumulators, for the thread's tokens of sub-chunk b."""
        _, c = self.row_and_part()
        acc = [[Float32(0.0)] * 4 for _ in range(2)]  # two, since a sum is a chain
        first = b * SUB_CHUNK
        k_later, k_earlier = (
            (smem + self.k + (first + row) * self.qk_row + c * 16, parity(row) << 6)
            for row in (later, earlier)
        )
        rows_p = [
            (smem + self.p + (first + row) * self.p_row + c * 32, parity(row) << 4, row)
            for row in (later, earlier, reference)
        ]
        # With 255 registers the compiler would work on all groups at once, and spill for it.
        hasty = self.blocks_per_sm() == 1
        for g in range(self.groups):
            if hasty:
                cute.arch.sync_warp()
            at = k_later[0] + ((g << 6) ^ k_later[1])
            q = self.unpacked(load_shared(Int32, at + (self.q - self.k), 4))
            k = self.unpacked(load_shared(Int32, at, 4))
            column = self.unpacked(load_shared(Int32, k_earlier[0] + ((g << 6) ^ k_earlier[1]), 4))
            in_range = self.rows_of_half(smem, b, g // (self.groups // 2))
            p_later, p_earlier, p_reference = (
                self._sums(self.load_channels(at + (g << 7), swap), row, in_range)
                for at, swap, row in rows_p
            )
            decay = [exp2(x - y) for x, y in zip(p_later, p_reference, strict=True)]
            q = self.packed([x * y for x, y in zip(q, decay, strict=True)])
            k = self.packed([x * y for x, y in zip(k, decay, strict=True)])
            decay = [exp2(x - y) for x, y in zip(p_reference, p_earlier, strict=True)]
            column = self.packed([x * y for x, y in zip(column, decay, strict=True)])
            for t in range(2):
                a = (q[2 * t], k[2 * t], q[2 * t + 1], k[2 * t + 1])
                acc[t] = mma(self.dtype, acc[t], a, column[2 * t : 2 * t + 2])
            if hasty:
                cute.arch.sync_warp()
        return [x + y for x, y in zip(*acc, strict=True)]

    def _sums(self, p: list[Any], row: Any, in_range: Any) -> list[Any]:
        """P from what is stored. A row that is in range is taken from its factor even where P
        itself is stored, so that its bits do not depend on the rows behind it."""
        if not self.in_one_product:
            return p
        whole, inside = in_range == SUB_CHUNK, row < in_range
        result = []
        for x in p:
            factor = cutlass.select_(whole, x, exp2(-self.shift - x))
            back = -self.shift - log2(factor)
            result.append(Float32(cutlass.select_(inside, back, x)))
        return result

    # -- what becomes of q and k --------------------------------------------------------------

    @cute.jit
    def decay_to_end(self, smem: Int32, b: Int32, half: Int32, out: Any) -> None:
        """exp2(G_e - G) * k of sub-chunk b, half of the channels, to `put_to_end`."""
        first = half * (self.groups // 2)
        in_range = self.rows_of_half(smem, b, half)
        for g in cutlass.range(first, first + groups_of_half(self.groups), unroll=1):
            if in_range < SUB_CHUNK:
                keep_branch()
                self._group_to_end(smem, b, out, g, False)
            else:
                self._group_to_end(smem, b, out, g, True)

    def _group_to_end(self, smem: Any, b: Any, out: Any, g: Any, in_range: bool) -> None:
        r, c = self.row_and_part()
        at_qk = smem + self.k + ((g << 6) ^ ((parity(r) << 6) + c * 16))
        at_p = smem + (g << 7) + c * 32
        end = self.load_channels(at_p + self.to_end + b * self.p_row, 0)
        end = [x + self.shift if self.shift else x for x in end]
        end = [exp2(x) if in_range else x for x in end]
        for half in range(2):
            row = b * SUB_CHUNK + half * 8 + r
            k = self.unpacked(load_shared(Int32, at_qk + row * self.qk_row, 4))
            p = self.load_channels(at_p + self.p + row * self.p_row, parity(r) << 4)
            k = [x * y for x, y in zip(k, self._decays(p, end, in_range), strict=True)]
            self.put_to_end(out, smem, b, half, g, k)

    def put_decayed_k(
        self, out: Any, smem: Any, b: Any, half: int, group: Any, k: list[Any], start: Any
    ) -> None:
        """Take the thread's 8 channels of k of row 8 half + lane // 4 of sub-chunk b; times
        `start`, and the norm, they are decayed from the start of the chunk."""
        raise NotImplementedError

    def put_decayed_q(
        self, out: Any, smem: Any, b: Any, half: int, group: Any, q: list[Any], start: Any,
        scale: Any,
    ) -> None:  # fmt: skip
        """Take the same of q."""
        raise NotImplementedError

    def put_to_end(self, out: Any, smem: Any, b: Any, half: int, group: Any, k: list[Any]) -> None:
        """Take the same of k, decayed to the end of the chunk."""
        raise NotImplementedError
