"""The last kernel of the fused backward on SM90, which computes dQ from its float32 sums.

    dQ = softmax_scale * sums        rounded, or float32; 0 in rows that see no key

The sums are in the order of `query_sums`. A thread reads 64 consecutive bytes: 8 columns of two
rows. The kernel is bound by memory bandwidth.

    CTA (tile of STATS_ROWS rows, head, sequence), 16 warps

Tiles are taken in reverse order, because the sums of the last heads may still be in L2.

The sums of rows that see no key may be NaN or infinite, from hidden keys that are not finite.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.dtypes import DTYPE
from ...common.entry import entry, gathered, placeholders
from ...common.numbers import INF
from ...common.ptx.convert import pack
from ...common.ptx.memory import load_global, load_global_where, store_global
from ...common.sequences import Sequences
from ..parts.arguments import FakeArguments
from ..parts.work import TileMap
from ..query_sums import GROUP_COLUMNS, PART_ROWS, VECTOR, VECTORS, QuerySums
from ..spec import PostprocessSpec
from ..statistics import LSE, STATS_ROWS, counters_of_tile, padded_start

NUM_THREADS = 512
LANES = 4  # lanes that share a row
LANE_ROWS = PART_ROWS // 2  # rows from a lane's first row to its second row


class Arguments(NamedTuple):
    """The kernel's arguments. `FakeArguments` has the shapes.

    Attributes:
        sums: the sums of dQ, `[heads, padded rows, head_dim]`; see `query_sums`.
        stats: lse and delta, `[2, heads, padded rows]`; see `statistics`.
        counters: of additions to the sums, with `ordered`; see `ordered_sums`.
    """

    sums: cute.Tensor
    stats: cute.Tensor
    dq: cute.Tensor
    cu_seqlens_q: cute.Tensor | None
    seqused_q: cute.Tensor | None
    softmax_scale: Float32
    counters: cute.Tensor | None


class BackwardPostprocess:
    """The kernel for one PostprocessSpec; see the module's docstring."""

    def __init__(self, spec: PostprocessSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.rounds = self.dtype is not Float32
        self.element_bytes = self.dtype.width // 8
        self.sums = QuerySums(spec.tile_m, spec.head_dim, spec.columns)

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        fake = FakeArguments(self.spec, self.spec.head_dim)
        counters = fake.zeroed() if self.spec.ordered else None
        return placeholders(fake.arguments(Arguments, sums=fake.query_sums(), counters=counters))

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch a CTA for each tile of a head."""
        a, stream = gathered(Arguments, args)
        self.kernel(a).launch(
            grid=[self.tile_map(a).count(), 1, 1], block=[NUM_THREADS, 1, 1], stream=stream
        )

    def tile_map(self, x: Arguments) -> TileMap:
        """The tiles, in the order in which the dK/dV kernel takes heads."""
        queries, heads = Sequences(x.dq.shape[-3], x.cu_seqlens_q, x.seqused_q), x.dq.shape[-2]
        return TileMap(STATS_ROWS, 1, False, queries, queries, heads, 1, queries.batch(x.dq), 1)

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        layout = self.sums
        groups = layout.head_dim // GROUP_COLUMNS
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        tiles = self.tile_map(x)
        exists, block, head, sequence = tiles.locate(tiles.count() - 1 - number)
        if exists:
            queries = tiles.queries
            length = queries.length(sequence)
            padded = padded_start(queries, sequence) + block * STATS_ROWS
            source = x.sums.iterator.toint() + Int64(head) * x.sums.stride[0] * 4
            # A thread keeps one group of columns; its rows are a warp's part apart.
            group, first = thread % groups, thread // groups
            part, inside = (group // (layout.columns // 8), group % (layout.columns // 8))
            step = NUM_THREADS // groups
            for i in cutlass.range_constexpr(STATS_ROWS // 2 // step):
                number_of_pair = first + i * step
                row_block = number_of_pair // LANE_ROWS
                lane_row = number_of_pair % LANE_ROWS
                row = row_block * PART_ROWS + lane_row
                tile = Int64(padded + row_block * PART_ROWS) // layout.tile_m
                at = tile * layout.tile
                at += part * layout.row_blocks * layout.part
                at += row_block % layout.row_blocks * layout.part
                at += inside * (VECTORS * VECTOR) + lane_row * (LANES * VECTOR)
                places = [source + (at + VECTOR * lane) * 4 for lane in range(LANES)]
                if cutlass.const_expr(self.spec.ordered):
                    tiles_of_head = x.sums.shape[1] // layout.tile_m
                    counter = (Int64(head) * tiles_of_head + tile) * counters_of_tile(layout.tile_m)
                    has_sum = x.counters[counter] != 0
                    vectors = [load_global_where(has_sum, Float32, y, VECTOR) for y in places]
                else:
                    vectors = [load_global(Float32, y, VECTOR) for y in places]
                for half in cutlass.range_constexpr(2):
                    token = block * STATS_ROWS + row + half * LANE_ROWS
                    if token < length:
                        lse = x.stats[LSE, head, Int64(padded + row + half * LANE_ROWS)]
                        words = []
                        for v in vectors:
                            pair = [
                                cutlass.select_(lse != INF, y * x.softmax_scale, Float32(0.0))
                                for y in (v[2 * half], v[2 * half + 1])
                            ]
                            words += [pack(self.dtype, *pair)] if self.rounds else pair
                        to = self.row_of(x.dq, queries, sequence, token, head)
                        to += group * (self.element_bytes * GROUP_COLUMNS)
                        self.store(to, words)

    def row_of(
        self, dq: cute.Tensor, queries: Sequences, sequence: Int32, token: Int32, head: Int32
    ) -> Int64:
        """The global address of a token's row of dq."""
        offset = Int64(queries.start(sequence) + token) * dq.stride[-3]
        offset += Int64(head) * dq.stride[-2]
        if not self.spec.varlen_q:
            offset += Int64(sequence) * dq.stride[0]
        return dq.iterator.toint() + offset * self.element_bytes

    def store(self, to: Int64, words: list[Any]) -> None:
        """Store 8 columns of a row: packed pairs, or float32."""
        kind = Int32 if self.rounds else Float32
        for i in range(0, len(words), VECTOR):
            store_global(kind, to + i * (kind.width // 8), words[i : i + VECTOR])
