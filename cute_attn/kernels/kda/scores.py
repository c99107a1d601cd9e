"""Scores within a chunk: what `prepare` and `chunk_intra` do with q, k and the gates alike.

With G the sum of a channel's gates (base 2) from the start of the chunk, a chunk needs

    Aqk_ij = scale sum_d q_id k_jd exp2(G_id - G_jd)     j <= i
    L_ij   = beta_i sum_d k_id k_jd exp2(G_id - G_jd)    j < i

by products on the tensor cores, so that exp2 has to be split into a factor of row i and one of
column j, at a reference token between them: then both are at most 1 for gates that are at most 0.
Tokens are in sub-chunks of 16, and P is the sum of gates from the first token of its sub-chunk (0
there). The reference is

    between sub-chunks     the first token of i's
    within one             by halves: 8 tokens against the 8 before them, then 4, 2 and 1; the
                           first of the later ones

Factors are multiplied in float32, and the products rounded once, as operands.

Each of the two halves of the warps has its part: `row_blocks`, warp b the rows of sub-chunk b
against those before; `diagonal_block`, warp b the scores within it. In every product the order of
channels is the one that lets a thread load 8 neighbours at a time: with row = lane // 4, a thread
has channels 8 (lane % 4) to + 7 of each 32.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..common import warp
from ..common.dtypes import DTYPE
from ..common.spec import WARP_SIZE
from .spec import CHUNK, SUB_TILE

SUB_CHUNK = 16
SUB_CHUNKS = CHUNK // SUB_CHUNK
NUM_WARPS = 2 * SUB_CHUNKS
NUM_THREADS = NUM_WARPS * WARP_SIZE
UNIT_BYTES = 16
SUB_TILE_BYTES = 2 * SUB_TILE
TILE_ROW_BYTES = 128
GROUP = 32  # channels that a warp takes at a time, 8 a thread
BLOCK_BYTES = SUB_CHUNK * SUB_CHUNK * 4
NUM_BLOCKS = SUB_CHUNKS * (SUB_CHUNKS + 1) // 2
L2NORM_EPSILON = 1e-6


def block_offset(i: Any, j: Any) -> Any:
    """Bytes to block (i, j), j <= i, of the 16 by 16 blocks of L."""
    return (((i * (i + 1)) >> 1) + j) * BLOCK_BYTES


def block_element(i: Any, j: Any) -> Any:
    """Bytes to element (i, j) of a block of float32. Halves of rows change places in every other pair
    of rows, so that 4 rows of 32 bytes are in different banks."""
    return (i << 6) + ((j << 2) ^ ((i & 2) << 4))


def tile_unit(row: Any, unit: Any) -> Any:
    """Bytes to a 16-byte unit (0 to 7) of a row of a sub-tile."""
    return row * TILE_ROW_BYTES + ((unit ^ (row & 7)) << 4)


def parity(row: Any) -> Any:
    """The bit by which rows of q, k and P are swizzled: it differs between neighbours, and between
    neighbours of every other row."""
    return (row ^ (row >> 1)) & 1


class ChunkScores:
    """Shared memory, and the phases of a block that works on one chunk of one value head.

    Rows of q and k are of 2 K bytes; halves of 128 bytes (64) change places where `parity` is 1.
    Rows of P are of 4 K bytes; 16-byte units 2 u and 2 u + 1 change places where `parity` is 1. So
    two rows that a quarter of a warp reads together are in different banks.
    """

    def __init__(self, dtype: str, head_dim_k: int):
        self.dtype = DTYPE[dtype]
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
        # L, block by block. In those on the diagonal Aqk, transposed, stands above the diagonal,
        # and what is below it is overwritten by the inverse.
        self.blocks = buffer(NUM_BLOCKS * BLOCK_BYTES)
        # Of each sub-chunk and channel:
        self.start = buffer(SUB_CHUNKS * self.p_row)  # exp2(G) at its first token
        self.to_next = buffer(SUB_CHUNKS * self.p_row)  # G from its first token to the next one's
        self.to_end = buffer(SUB_CHUNKS * self.p_row)  # G from its first token to the chunk's end
        # Of each token:
        self.beta = buffer(CHUNK * 4)
        self.own_score = buffer(CHUNK * 4)  # scale q . k
        self.smem_bytes = offset
        # Once the scores are done, their operands' place is that of Aqk and Akk as 16-bit tiles.
        self.tile_qk = self.q
        self.tile_kk = self.q + SUB_TILE_BYTES if head_dim_k > 64 else self.k
        assert self.tile_kk + SUB_TILE_BYTES <= self.p

    # -- small things -------------------------------------------------------------------------

    def row_and_part(self) -> tuple[Any, Any]:
        lane = cute.arch.lane_idx()
        return lane >> 2, lane & 3

    def unpacked(self, packed: Any) -> list[Any]:
        values: list[Any] = []
        for x in packed:
            values += warp.unpack(self.dtype, x)
        return values

    def packed(self, values: list[Any]) -> list[Any]:
        return [warp.pack(self.dtype, values[i], values[i + 1]) for i in range(0, len(values), 2)]

    def load_channels(self, address: Any, swap: Any) -> list[Any]:
        """8 neighbours of a row of float32; `swap` is 16 where the row's units change places."""
        return [
            *warp.load_shared(Float32, address + swap, 4),
            *warp.load_shared(Float32, (address + 16) - swap, 4),
        ]

    # -- q and k ------------------------------------------------------------------------------

    @cute.jit
    def start_copy(self, x: cute.Tensor, shared: Int32, place: Any, head: Int32) -> None:
        """cp.async of the chunk's rows of q or k; rows past its end become 0."""
        thread, _, _ = cute.arch.thread_idx()
        units = self.qk_row // UNIT_BYTES
        rows = NUM_THREADS // units
        row = thread // units
        unit = thread % units
        base = (
            x.iterator
            + (Int64(place.batch) * x.stride[0] + Int64(head) * x.stride[2])
            + unit * (UNIT_BYTES // 2)
        ).toint()
        for i in cutlass.range_constexpr(CHUNK // rows):
            at = row + i * rows
            present = at < place.length
            token = place.start + (at if present else Int32(0))
            warp.copy_async(
                shared + at * self.qk_row + ((unit ^ (parity(at) << 2)) << 4),
                base + Int64(token) * (x.stride[1] * 2),
                present,
            )

    @cute.jit
    def normalise(self, smem: Int32, scale: Float32, l2norm: cutlass.Constexpr) -> None:
        """8 rows of each warp: q and k to length 1, if asked to, and scale q . k."""
        thread, _, _ = cute.arch.thread_idx()
        r, c = self.row_and_part()
        row = (thread >> 5) * 8 + r
        at = smem + self.q + row * self.qk_row + c * 16
        swap = parity(row) << 6
        to_k = self.k - self.q
        q, k = [], []
        for g in cutlass.range_constexpr(self.groups):
            address = at + ((g << 6) ^ swap)
            q.append(warp.load_shared(Int32, address, 4))
            k.append(warp.load_shared(Int32, address + to_k, 4))
        sums = [Float32(0.0), Float32(0.0), Float32(0.0)]
        for g in cutlass.range_constexpr(self.groups):
            for x, y in zip(self.unpacked(q[g]), self.unpacked(k[g]), strict=True):
                sums[0] = cute.math.fma(x, y, sums[0])
                if cutlass.const_expr(l2norm):
                    sums[1] = cute.math.fma(x, x, sums[1])
                    sums[2] = cute.math.fma(y, y, sums[2])
        for distance in (1, 2):
            sums = [x + cute.arch.shuffle_sync_bfly(x, distance) for x in sums]
        dot = sums[0]
        if cutlass.const_expr(l2norm):
            of_q, of_k = (warp.reciprocal_sqrt(x + L2NORM_EPSILON) for x in sums[1:])
            dot = dot * (of_q * of_k)
            for g in cutlass.range_constexpr(self.groups):
                address = at + ((g << 6) ^ swap)
                for shift, values, factor in ((0, q[g], of_q), (to_k, k[g], of_k)):
                    scaled = [x * factor for x in self.unpacked(values)]
                    warp.store_shared(Int32, address + shift, self.packed(scaled))
        if c == 0:
            warp.store_shared(Float32, smem + self.own_score + row * 4, [dot * scale])

    # -- gates --------------------------------------------------------------------------------

    def store_sums(self, smem: Any, pair: Any, sub: Any, gates: list[tuple[Any, Any]]) -> None:
        """P of a sub-chunk, two channels, and what `finish_tables` needs of it.

        Args:
            pair: of channels, 2 pair and 2 pair + 1.
            gates: of the 16 tokens, base 2; 0 past the chunk's end.
        """
        total = (Float32(0.0), Float32(0.0))
        unit, within = pair >> 1, (pair & 1) << 3
        for t in range(SUB_CHUNK):
            if t > 0:
                total = (total[0] + gates[t][0], total[1] + gates[t][1])
            at = (sub * SUB_CHUNK + t) * self.p_row + ((unit ^ parity(t)) << 4) + within
            warp.store_shared(Float32, smem + self.p + at, total)
        at = smem + sub * self.p_row + (pair << 3)
        warp.store_shared(Float32, at + self.start, gates[0])
        warp.store_shared(Float32, at + self.to_next, total)

    def finish_tables(self, smem: Any, channel: Any) -> Any:
        """From the gate of the first token and the sum of the others of each sub-chunk, all that
        `start`, `to_next` and `to_end` are to hold; G at the chunk's end is returned."""
        at = smem + (channel << 2)
        first, total = (
            [warp.load_shared(Float32, at + table + b * self.p_row)[0] for b in range(SUB_CHUNKS)]
            for table in (self.start, self.to_next)
        )
        steps = [x + y for x, y in zip(total, [*first[1:], Float32(0.0)], strict=True)]
        to_end = Float32(0.0)
        for b in reversed(range(SUB_CHUNKS)):
            to_end = to_end + steps[b]
            warp.store_shared(Float32, at + self.to_end + b * self.p_row, [to_end])
            warp.store_shared(Float32, at + self.to_next + b * self.p_row, [steps[b]])
        start = first[0]
        for b in range(SUB_CHUNKS):
            warp.store_shared(Float32, at + self.start + b * self.p_row, [warp.exp2(start)])
            start = start + steps[b]
        return start

    # -- blocks below the diagonal ------------------------------------------------------------

    @cute.jit
    def row_blocks(self, smem: Int32, b: Int32, scale: Float32, out: Any, own: cute.Tensor) -> None:
        """The rows of sub-chunk b against the sub-chunks before it: L to shared memory, and
        scale q k as 16-bit accumulators to `own`. On the way q and k, decayed within the sub-chunk,
        go to `put_decayed`.

        Args:
            out: for `put_decayed`.
            own: 12 Int32 in registers: [sub-chunks back, from 1][half of its tokens][half of the
                rows].
        """
        acc = cute.make_rmem_tensor((2 * (SUB_CHUNKS - 1) * 8,), Float32)
        acc.fill(0.0)
        for g in cutlass.range(self.groups, unroll=1):
            self._row_group(smem, b, scale, out, g, acc)
        self._store_rows(smem, b, scale, acc, own)

    def _row_group(self, smem: Any, b: Any, scale: Any, out: Any, g: Any, acc: cute.Tensor) -> None:
        """`row_blocks` for 32 channels."""
        r, c = self.row_and_part()
        first = b * SUB_CHUNK + r
        at_qk = (g << 6) ^ ((parity(r) << 6) + c * 16)
        at_p = smem + (g << 7) + c * 32
        swap = parity(r) << 4
        rows_q, rows_k = [], []
        start = self.load_channels(at_p + self.start + b * self.p_row, 0)
        for half in range(2):
            row = first + half * 8
            address = smem + at_qk + row * self.qk_row
            q = self.unpacked(warp.load_shared(Int32, address + self.q, 4))
            k = self.unpacked(warp.load_shared(Int32, address + self.k, 4))
            p = self.load_channels(at_p + self.p + row * self.p_row, swap)
            decay = [warp.exp2(x) for x in p]
            q = [x * y for x, y in zip(q, decay, strict=True)]
            k = [x * y for x, y in zip(k, decay, strict=True)]
            rows_q.append(self.packed(q))
            rows_k.append(self.packed(k))
            self.put_decayed(out, smem, row, g, c, q, k, start, scale)
        gap = cute.make_rmem_tensor((8,), Float32)  # from the columns' next sub-chunk to this one
        gap.fill(0.0)
        for back in range(1, SUB_CHUNKS):
            self._columns_back(back, smem, b, r, at_qk, at_p, swap, rows_q, rows_k, gap, acc)

    @cute.jit
    def _columns_back(
        self,
        back: cutlass.Constexpr,
        smem: Int32,
        b: Int32,
        r: Int32,
        at_qk: Int32,
        at_p: Int32,
        swap: Int32,
        rows_q: Any,
        rows_k: Any,
        gap: cute.Tensor,
        acc: cute.Tensor,
    ) -> None:
        """Rows against the columns of the sub-chunk `back` before, if there is one."""
        if b >= back:
            self._columns(back, smem, b - back, r, at_qk, at_p, swap, rows_q, rows_k, gap, acc)

    def _columns(
        self, back: int, smem: Any, j: Any, r: Any, at_qk: Any, at_p: Any, swap: Any,
        rows_q: Any, rows_k: Any, gap: cute.Tensor, acc: cute.Tensor,
    ) -> None:  # fmt: skip
        step = self.load_channels(at_p + self.to_next + j * self.p_row, 0)
        for i in range(8):
            gap[i] = gap[i] + step[i]
        to_rows = [gap[i] for i in range(8)]
        for half in range(2):
            row = j * SUB_CHUNK + half * 8 + r
            k = self.unpacked(warp.load_shared(Int32, smem + self.k + at_qk + row * self.qk_row, 4))
            p = self.load_channels(at_p + self.p + row * self.p_row, swap)
            column = self.packed(
                [x * warp.exp2(y - z) for x, y, z in zip(k, to_rows, p, strict=True)]
            )
            for which, rows in enumerate((rows_q, rows_k)):
                n = (which * (SUB_CHUNKS - 1) + back - 1) * 8 + half * 4
                product = [acc[n + i] for i in range(4)]
                for t in (0, 2):
                    a = (rows[0][t], rows[1][t], rows[0][t + 1], rows[1][t + 1])
                    product = warp.mma(self.dtype, product, a, column[t : t + 2])
                for i in range(4):
                    acc[n + i] = product[i]

    @cute.jit
    def _store_rows(
        self, smem: Int32, b: Int32, scale: Float32, acc: cute.Tensor, own: cute.Tensor
    ) -> None:
        r, c = self.row_and_part()
        at = smem + self.beta + (b * SUB_CHUNK + r) * 4
        beta = [warp.load_shared(Float32, at + 32 * half)[0] for half in range(2)]
        for back in cutlass.range_constexpr(1, SUB_CHUNKS):
            if b >= back:
                block = smem + self.blocks + block_offset(b, b - back)
                for half in cutlass.range_constexpr(2):
                    for rows in cutlass.range_constexpr(2):
                        n = (back - 1) * 8 + half * 4 + rows * 2
                        m = (SUB_CHUNKS - 1) * 8 + n
                        warp.store_shared(
                            Float32,
                            block + block_element(r + 8 * rows, 8 * half + 2 * c),
                            [acc[m] * beta[rows], acc[m + 1] * beta[rows]],
                        )
                        own[n // 2] = warp.pack(self.dtype, acc[n] * scale, acc[n + 1] * scale)

    # -- blocks on the diagonal ---------------------------------------------------------------

    @cute.jit
    def diagonal_block(self, smem: Int32, b: Int32, scale: Float32) -> None:
        """The scores within sub-chunk b: L below the diagonal of its block, scale q k above it,
        transposed.

        At a level with h later tokens against the h before them there are 8 of each in all: the 8
        rows of q are rows 0 to 7 of the left operand, those of k rows 8 to 15, and the 8 columns are
        the right operand. Of the result those elements count whose tokens are of the same 2 h.
        """
        for level in cutlass.range(4, unroll=1):
            shift = 3 - level
            h = 1 << shift
            r, c = self.row_and_part()
            pair = r >> shift
            # Tokens of the sub-chunk.
            reference = (pair << (shift + 1)) + h
            later = reference + (r & (h - 1))
            product = self._level(smem, b * SUB_CHUNK, later, later - h, reference)
            beta = warp.load_shared(Float32, smem + self.beta + (b * SUB_CHUNK + later) * 4)[0]
            block = smem + self.blocks + block_offset(b, b)
            for i in cutlass.range_constexpr(2):
                n = 2 * c + i
                if (n >> shift) == pair:
                    earlier = (pair << (shift + 1)) + (n & (h - 1))
                    transposed = block + block_element(earlier, later)
                    warp.store_shared(Float32, transposed, [product[i] * scale])
                    at = block + block_element(later, earlier)
                    warp.store_shared(Float32, at, [product[2 + i] * beta])

    def _level(self, smem: Any, first: Any, later: Any, earlier: Any, reference: Any) -> list[Any]:
        """The product of a level, as accumulators; the thread's rows are given as tokens of the
        sub-chunk that starts at `first`."""
        _, c = self.row_and_part()
        acc = [[Float32(0.0)] * 4 for _ in range(2)]  # two, since a sum is a chain
        k_later, k_earlier = (
            (smem + self.k + (first + row) * self.qk_row + c * 16, parity(row) << 6)
            for row in (later, earlier)
        )
        rows_p = [
            (smem + self.p + (first + row) * self.p_row + c * 32, parity(row) << 4)
            for row in (later, earlier, reference)
        ]
        for g in range(self.groups):
            at = k_later[0] + ((g << 6) ^ k_later[1])
            q = self.unpacked(warp.load_shared(Int32, at + (self.q - self.k), 4))
            k = self.unpacked(warp.load_shared(Int32, at, 4))
            column = self.unpacked(
                warp.load_shared(Int32, k_earlier[0] + ((g << 6) ^ k_earlier[1]), 4)
            )
            p_later, p_earlier, p_reference = (
                self.load_channels(at + (g << 7), swap) for at, swap in rows_p
            )
            decay = [warp.exp2(x - y) for x, y in zip(p_later, p_reference, strict=True)]
            q = self.packed([x * y for x, y in zip(q, decay, strict=True)])
            k = self.packed([x * y for x, y in zip(k, decay, strict=True)])
            decay = [warp.exp2(x - y) for x, y in zip(p_reference, p_earlier, strict=True)]
            column = self.packed([x * y for x, y in zip(column, decay, strict=True)])
            for t in range(2):
                a = (q[2 * t], k[2 * t], q[2 * t + 1], k[2 * t + 1])
                acc[t] = warp.mma(self.dtype, acc[t], a, column[2 * t : 2 * t + 2])
        return [x + y for x, y in zip(*acc, strict=True)]

    # -- what becomes of q and k --------------------------------------------------------------

    @cute.jit
    def decay_to_end(self, smem: Int32, b: Int32, out: Any) -> None:
        """exp2(G_e - G) * k of sub-chunk b, to `put_to_end`."""
        for g in cutlass.range(self.groups, unroll=1):
            self._group_to_end(smem, b, out, g)

    def _group_to_end(self, smem: Any, b: Any, out: Any, g: Any) -> None:
        r, c = self.row_and_part()
        at_qk = smem + self.k + ((g << 6) ^ ((parity(r) << 6) + c * 16))
        at_p = smem + (g << 7) + c * 32
        end = self.load_channels(at_p + self.to_end + b * self.p_row, 0)
        for half in range(2):
            row = b * SUB_CHUNK + half * 8 + r
            k = self.unpacked(warp.load_shared(Int32, at_qk + row * self.qk_row, 4))
            p = self.load_channels(at_p + self.p + row * self.p_row, parity(r) << 4)
            k = [x * warp.exp2(y - z) for x, y, z in zip(k, end, p, strict=True)]
            self.put_to_end(out, row, g, c, k)

    @cute.jit
    def stage_scores(self, smem: Int32, b: Int32, own: cute.Tensor) -> None:
        """The 16 rows of Aqk of sub-chunk b, as rows of a sub-tile, to `tile_qk`."""
        r, c = self.row_and_part()
        lane = cute.arch.lane_idx()
        tile = smem + self.tile_qk + b * (SUB_CHUNK * TILE_ROW_BYTES)
        for step in cutlass.range_constexpr(SUB_CHUNKS - 1):
            j = b - 1 - step
            if j >= 0:
                for half in cutlass.range_constexpr(2):
                    for rows in cutlass.range_constexpr(2):
                        at = tile + tile_unit(r + 8 * rows, 2 * j + half) + 4 * c
                        warp.store_shared(Int32, at, [own[(step * 2 + half) * 2 + rows]])
        # From here on a lane has a unit: of row lane // 2.
        row, unit = lane >> 1, lane & 1
        block = smem + self.blocks + block_offset(b, b)
        same = warp.load_shared(Float32, smem + self.own_score + (b * SUB_CHUNK + row) * 4)[0]
        values = []
        for i in cutlass.range_constexpr(8):
            j = unit * 8 + i
            x = warp.load_shared(Float32, block + block_element(j, row))[0]
            x = cutlass.select_(j < row, x, cutlass.select_(j == row, same, Float32(0.0)))
            values.append(x)
        warp.store_shared(Int32, tile + tile_unit(row, 2 * b + unit), self.packed(values))
        for j in cutlass.range_constexpr(1, SUB_CHUNKS):
            if j > b:
                warp.store_shared(Int32, tile + tile_unit(row, 2 * j + unit), [Int32(0)] * 4)

    def put_decayed(
        self, out: Any, smem: Any, row: Any, group: Any, part: Any, q: list[Any], k: list[Any],
        start: Any, scale: Any,
    ) -> None:  # fmt: skip
        """Take 8 channels of a row of q and k, decayed from its sub-chunk's first token; `start` is
        the decay from the start of the chunk to that token."""
        raise NotImplementedError

    def put_to_end(self, out: Any, row: Any, group: Any, part: Any, k: list[Any]) -> None:
        """Take 8 channels of a row of k, decayed to the end of the chunk."""
        raise NotImplementedError
