"""Step 10 of the ladder, persistent: a CTA for each SM takes one tile after another.

While the consumers finish a tile, the load warp already fetches Q, K and V of the next tile, so
that a tile's end overlaps the next tile's start. The stores of O also run beside the next tile.

The load warp takes the next tile after starting the last load of the current tile. A counter in
global memory gives the next tile that no CTA has taken. The load warp tells the consumers through a
queue in shared memory. Heads whose K and V fit L2 together are worked on together, longest tiles
first.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from ..attention.parts.work import TileMap, Work, heads_in_l2
from ..common.arguments import fake_contiguous
from ..common.entry import entry, placeholders
from ..common.pipeline import Barriers, Edge
from ..common.scheduler import CounterScheduler, TileQueue
from ..common.sequences import Sequences
from ..common.smem import Buffer, Pointers
from .arguments import Arguments, fake_arguments
from .step7_wgmma import Operands
from .step9_overlap import ConsumerInTurns, FmhaStep9


class FmhaStep10(FmhaStep9):
    def edges(self) -> tuple[Edge, ...]:
        return (*super().edges(), *TileQueue.edges(self.load, self.consumers))

    def buffers(self) -> tuple[Buffer, ...]:
        return (*super().buffers(), TileQueue.buffer(Work))

    def fake_args(self) -> tuple[Any, ...]:
        return placeholders(fake_arguments(self.spec), Int32(1), fake_contiguous(Int32, (1,)))

    @entry(Arguments, num_ctas=Int32, counter=cute.Tensor)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel. `num_ctas` CTAs are resident at once; `CounterScheduler` explains
        `counter`."""
        *given, num_ctas, counter, stream = args
        a = Arguments(*given)
        batch, seqlen, heads, _ = a.q.shape
        num_tiles = self.tile_map(seqlen, heads, batch).count()
        ctas = CounterScheduler.clusters(num_tiles, num_ctas)
        self.launch([ctas, 1, 1], a, counter, stream)

    def tile_map(self, seqlen: Int32, heads: Int32, batch: Int32) -> TileMap:
        tokens = Sequences(seqlen)
        head_bytes = Int64(seqlen) * (2 * self.spec.row_bytes)  # bytes of K and V
        return TileMap(
            self.spec.tile_m, 1, self.spec.causal, tokens, tokens, heads, 1, batch,
            heads_in_l2(head_bytes, heads * batch),
        )  # fmt: skip

    @cute.jit
    def load_warp(self, x: Operands, storage: Pointers, barriers: Barriers) -> None:
        (_, seqlen), _, heads, batch = x.q.shape
        tiles = self.tile_map(seqlen, heads, batch)
        scheduler = CounterScheduler(tiles.count(), barriers, x.counter.iterator)
        queue = TileQueue(Work, storage.work, barriers)
        index = Int32(0)  # counts the CTA's tiles
        n = Int32(0)  # counts K/V tiles
        number = scheduler.initial_work_tile()
        while number >= 0:
            _, block, head, sequence = tiles.locate(number)
            queue.publish_work(index, tiles.work(block, head, sequence))
            n = self.load_tile(x, storage, barriers, self.tile(x, block, head, sequence), index, n)
            index += 1
            number = scheduler.advance_to_next_work(number, index)
        queue.publish_end(index)

    @cute.jit
    def consumer_warps(self, x: Operands, own: ConsumerInTurns, storage: Pointers) -> None:
        queue = TileQueue(Work, storage.work, own.barriers)
        own.turns.begin()
        index = Int32(0)
        n = Int32(0)
        work = queue.take(index)
        while work.exists:
            tile = self.tile(x, work.block, work.head, work.sequence)
            n = self.compute_tile(own, tile, index, n)
            self.store_tile(x, own, storage, tile)
            index += 1
            work = queue.take(index)
        self.stores_done(own)
        own.turns.end()
