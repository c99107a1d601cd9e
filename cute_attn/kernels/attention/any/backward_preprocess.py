"""The first kernel of the backward, which computes the statistics of query rows, and dsink's sums.

For row i of a head, with s the sink (`statistics` has the layout, and the lse of unseen rows):

    delta_i = sum_d o_id do_id - dlse_i
    dsink   = sum_i -exp(s - lse_i) delta_i

If the gradient of q is added up in global memory, the kernel also sets the counters of
`query_zeros` or `ordered_sums` to 0. If rows may see no key, the kernel copies do, with zeros in
these rows. P is 0 in these rows, but 0 times a NaN of do would be NaN in the gradient of v.

The kernel is bound by memory bandwidth, and reads o and do once. Eight threads share a row, so an
instruction of a warp reads whole 128-byte lines of four rows. Each CTA writes its part of dsink,
which `sum_partials` adds up in a fixed order.

    CTA (tile of STATS_ROWS rows, head, sequence), 8 warps
      rows        32 rows at once: the sums of o * do, to shared memory
      statistics  a thread for each row: lse and delta, to global memory, and its part of dsink

Runs on sm_80 and newer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...common.arguments import fake_contiguous
from ...common.dtypes import DTYPE
from ...common.entry import entry, gathered, placeholders
from ...common.numbers import INF, LOG2_E
from ...common.ptx.convert import unpack_all
from ...common.ptx.math import exp2
from ...common.ptx.memory import load_global, store_global
from ...common.sequences import Sequences
from ...common.smem import Buffer, SharedMemory
from ...common.spec import VECTOR_BYTES, WARP_SIZE
from ..parts.arguments import FakeArguments
from ..parts.work import TileMap
from ..spec import PreprocessSpec
from ..statistics import (
    DELTA,
    FLAG_ROWS,
    LARGE,
    LSE,
    ORDER_COUNTERS,
    STATS_ROWS,
    padded_start,
)

NUM_THREADS = 256
THREADS_A_ROW = 8
VECTOR = VECTOR_BYTES // 2  # elements of a load
ROWS = NUM_THREADS // THREADS_A_ROW  # rows at once
STATS_WARPS = STATS_ROWS // WARP_SIZE

assert FLAG_ROWS == WARP_SIZE


class Arguments(NamedTuple):
    """The kernel's arguments. `FakeArguments` has the shapes.

    Attributes:
        stats: lse and delta, `[2, heads, padded rows]`; see `statistics`.
        zeroed: the counters of finished zeros, or of additions; see `query_zeros` and
            `ordered_sums`.
        dsink_partial: `[tiles, heads]` with the tiles of a head that `num_tiles` counts.
        seen_do: the copy of do. The kernel uses this field and the next fields with
            `rows_without_keys`.
        seqlen_k: rows of k.
        window_right: how many keys right of the diagonal a query sees; a number that no
            sequence reaches is no bound.
        window_left: with `negative_left`, a negative number: a query sees keys from `-window_left`
            right of the diagonal on.
    """

    o: cute.Tensor
    do: cute.Tensor
    lse: cute.Tensor
    dlse: cute.Tensor | None
    sink: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    seqused_q: cute.Tensor | None
    stats: cute.Tensor
    zeroed: cute.Tensor | None
    dsink_partial: cute.Tensor | None
    seen_do: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_k: cute.Tensor | None
    seqlen_k: Int32
    window_right: Int32
    window_left: Int32 | None


class BackwardPreprocess:
    """The kernel for one PreprocessSpec; see the module's docstring."""

    def __init__(self, spec: PreprocessSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.smem = SharedMemory(
            Buffer("sums", Float32, STATS_ROWS, holds="sums of o * do of the rows"),
            Buffer("dsink", Float32, STATS_WARPS, holds="parts of dsink of the warps"),
        )

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        spec, fake = self.spec, FakeArguments(self.spec, self.spec.head_dim_v)
        dsink_partial = None
        if spec.sink_dtype != "none":
            dsink_partial = fake_contiguous(Float32, (cute.sym_int(), fake.heads))
        return placeholders(
            fake.arguments(
                Arguments,
                dlse=fake.lse() if spec.dlse else None,
                zeroed=fake.zeroed() if spec.sums else None,
                dsink_partial=dsink_partial,
                seen_do=fake.o() if spec.rows_without_keys else None,
                window_left=Int32(1) if spec.negative_left else None,
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch a CTA for each tile of a head."""
        a, stream = gathered(Arguments, args)
        self.kernel(a).launch(
            grid=[self.tile_map(a).count(), 1, 1], block=[NUM_THREADS, 1, 1], stream=stream
        )

    def tile_map(self, x: Arguments) -> TileMap:
        """The tiles; the head is the fast index, since heads of a token are neighbours."""
        queries, heads = Sequences(x.o.shape[-3], x.cu_seqlens_q, x.seqused_q), x.o.shape[-2]
        batch = queries.batch(x.o)
        return TileMap(STATS_ROWS, 1, False, queries, queries, heads, 1, batch, heads * batch)

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        storage = self.smem.allocate()
        sums = cute.make_tensor(storage.sums, cute.make_layout(STATS_ROWS))
        warp_dsink = cute.make_tensor(storage.dsink, cute.make_layout(STATS_WARPS))
        tiles = self.tile_map(x)
        exists, block, head, sequence = tiles.locate(number)

        dsink = Float32(0.0)
        if cutlass.const_expr(x.zeroed is not None and not self.spec.ordered):
            if number == 0 and thread == 0:
                x.zeroed[0] = 0
        if exists:
            length = tiles.queries.length(sequence)
            first = block * STATS_ROWS
            if cutlass.const_expr(self.spec.ordered):
                if thread < ORDER_COUNTERS:
                    row = padded_start(tiles.queries, sequence) + first
                    tile = Int64(head) * (x.stats.shape[2] // STATS_ROWS) + row // STATS_ROWS
                    x.zeroed[tile * ORDER_COUNTERS + thread] = 0
            elif cutlass.const_expr(x.zeroed is not None):
                if thread == 0:
                    row = padded_start(tiles.queries, sequence) + first
                    tile = Int64(head) * (x.stats.shape[2] // STATS_ROWS) + row // STATS_ROWS
                    x.zeroed[1 + tile] = 0
            copy, copy_stride, first_seen, end_seen = None, Int64(0), Int32(0), None
            if cutlass.const_expr(self.spec.rows_without_keys):
                keys = Sequences(x.seqlen_k, x.cu_seqlens_k, x.seqused_k).length(sequence)
                # Query i sees keys up to i + keys - length + window_right.
                first_seen = length - cutlass.max(keys, 0) - x.window_right
                if cutlass.const_expr(x.window_left is not None):
                    # Query i sees keys from i + keys - length - window_left on.
                    end_seen = length + x.window_left
                    if keys <= 0:
                        end_seen = Int32(0)
                copy = self.sequence_of(x.seen_do, tiles.queries, sequence, head)
                copy_stride = x.seen_do.stride[-3]
            self.sum_rows(
                self.sequence_of(x.o, tiles.queries, sequence, head),
                self.sequence_of(x.do, tiles.queries, sequence, head),
                x.o.stride[-3], x.do.stride[-3], first, length, sums, copy, copy_stride, first_seen,
                end_seen,
            )  # fmt: skip
            cute.arch.sync_threads()
            if thread < STATS_ROWS:
                dsink = self.write_statistics(
                    x, tiles.queries, sums[thread], head, sequence, first + thread, length
                )
        if cutlass.const_expr(x.sink is not None):
            for bit in cutlass.range_constexpr(5):
                dsink += cute.arch.shuffle_sync_bfly(dsink, offset=1 << bit)
            if thread < STATS_ROWS and cute.arch.lane_idx() == 0:
                warp_dsink[thread // WARP_SIZE] = dsink
            cute.arch.sync_threads()
            if thread == 0:
                total = warp_dsink[0]
                for warp in cutlass.range_constexpr(1, STATS_WARPS):
                    total += warp_dsink[warp]
                (x.dsink_partial.iterator + number).store(total)

    def sequence_of(
        self, x: cute.Tensor, queries: Sequences, sequence: Int32, head: Int32
    ) -> cute.Pointer:
        """The pointer to a head's row of a sequence's first token."""
        offset = Int64(queries.start(sequence)) * x.stride[-3] + Int64(head) * x.stride[-2]
        if not self.spec.varlen_q:
            offset = offset + Int64(sequence) * x.stride[0]
        return x.iterator + offset

    @cute.jit
    def sum_rows(
        self,
        o: cute.Pointer,
        do: cute.Pointer,
        o_stride: Int64,
        do_stride: Int64,
        first: Int32,
        length: Int32,
        sums: cute.Tensor,
        copy: cute.Pointer | None,
        copy_stride: Int64,
        first_seen: Int32,
        end_seen: Int32 | None,
    ) -> None:
        """Store the tile's sums of o * do over head_dim_v, and a `copy` of do. Past the end of the
        sequence, the last row is read again."""
        thread, _, _ = cute.arch.thread_idx()
        column = thread % THREADS_A_ROW * VECTOR
        for step in cutlass.range_constexpr(STATS_ROWS // ROWS):
            row = step * ROWS + thread // THREADS_A_ROW
            token = Int64(cutlass.min(first + row, length - 1))
            loaded = []
            for x, stride in ((o, o_stride), (do, do_stride)):
                at = (x + (token * stride + column)).toint()
                loaded.append(
                    [
                        load_global(Int32, at + 2 * i, VECTOR // 2)
                        for i in range(0, self.spec.head_dim_v, THREADS_A_ROW * VECTOR)
                    ]
                )
            if cutlass.const_expr(copy is not None):
                if first + row < length:
                    to = copy + (token * copy_stride + column)
                    seen = first + row >= first_seen
                    if cutlass.const_expr(end_seen is not None):
                        seen = seen & (first + row < end_seen)
                    self.copy_row(loaded[1], to, seen)
            # Each vector has its own sum, so that several chains of additions run at once.
            parts = []
            for x, y in zip(*loaded, strict=True):
                part = Float32(0.0)
                for a, b in zip(unpack_all(self.dtype, x), unpack_all(self.dtype, y), strict=True):
                    part += a * b
                parts.append(part)
            total = pairwise_sum(parts)
            if cutlass.const_expr(self.spec.sink_dtype != "none"):
                # A row that sees no key has o = 0. The row's do may be NaN, and must not reach
                # dsink.
                bits = Int32(0)
                for words in loaded[0]:
                    for word in words:
                        bits = bits | word
                total = Float32(cutlass.select_((bits & 0x7FFF7FFF) == 0, Float32(0.0), total))
            for distance in (1, 2, 4):
                total += cute.arch.shuffle_sync_bfly(total, offset=distance)
            if thread % THREADS_A_ROW == 0:
                sums[row] = total

    def copy_row(self, row: Sequence[Sequence[Int32]], to: cute.Pointer, seen: Boolean) -> None:
        """Store the vectors of a row of do, or zeros for a row that sees no key."""
        for i, words in enumerate(row):
            kept = [Int32(cutlass.select_(seen, word, Int32(0))) for word in words]
            store_global(Int32, (to + i * THREADS_A_ROW * VECTOR).toint(), kept)

    @cute.jit
    def write_statistics(
        self,
        x: Arguments,
        queries: Sequences,
        delta: Float32,
        head: Int32,
        sequence: Int32,
        token: Int32,
        length: Int32,
    ) -> Float32:
        """Write lse and delta of a row, and return its part of dsink."""
        log_sum, dsink = Float32(INF), Float32(0.0)
        if token < length:
            if cutlass.const_expr(self.spec.varlen_q):
                place: tuple[Int32, ...] = (head, queries.start(sequence) + token)
            else:
                place = (sequence, head, token)
            log_sum = x.lse[place]
            if cutlass.const_expr(x.dlse is not None):
                delta -= x.dlse[place]
            if cutlass.const_expr(x.sink is not None):
                score = Float32(x.sink[head])
                # A row that sees no key has lse = sink; both may be infinite, and their difference
                # NaN.
                probability = Float32(1.0)
                if score != log_sum:
                    probability = exp2((score - log_sum) * LOG2_E)
                dsink = -probability * delta
            if log_sum == -INF:
                log_sum = Float32(INF)
        if log_sum == INF:
            delta = Float32(0.0)
        size = cute.math.absf(log_sum)
        large = cute.arch.vote_any_sync((size >= LARGE) & (size < INF))
        delta = ((delta.bitcast(Int32) & -2) | Int32(large)).bitcast(Float32)
        row = Int64(padded_start(queries, sequence) + token)
        x.stats[LSE, head, row] = log_sum
        x.stats[DELTA, head, row] = delta
        return dsink


def pairwise_sum(parts: list[Float32]) -> Float32:
    """The sum of parts, pair by pair."""
    while len(parts) > 1:
        last = parts[len(parts) & ~1 :]  # a part without a partner
        parts = [x + y for x, y in zip(parts[::2], parts[1::2], strict=False)] + last
    return parts[0]
