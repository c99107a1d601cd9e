"""Keys and values in pages, `[pages, page_size, heads_k, head_dim]`, as a page table orders them.

A K/V tile is loaded in boxes of `rows` keys. `rows` divides the tile and the page, so a box lies in
one page. The load warp's lanes look up the pages of all boxes of a tile at once, before the warp
waits for a free stage. Entries of the table are read only for keys that exist; rows of a box behind
the last key are loaded as 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32

from ...common.carried import Carried
from ...common.pipeline import BOTH_CTAS, CTAS, Barriers
from ...common.ptx.cluster import cta_rank
from ...common.ptx.memory import LINE_WORDS, prefetch_global
from ...common.spec import WARP_SIZE
from ...common.tma import BOX, BoxedRows, boxes, partition

PREFETCHED = 2048  # entries of a sequence's page table
PREFETCHED_LINES = 128  # cache lines of the first sequences' page tables


@dataclass(frozen=True)
class Pages(Carried):
    """The page table.

    Attributes:
        table: `[batch, max_pages]`.
        by_size: the divisor for divisions by `size`.
        size: tokens of a page.
        rows: keys of a box.
        tile_n: keys of a K/V tile, or of a CTA's part of it.
    """

    table: Any
    by_size: Any
    size: Any
    rows: int
    tile_n: int

    @classmethod
    def of(cls, table: cute.Tensor, x: cute.Tensor, spec: Any, tile_n: int) -> Pages:
        """The pages of x, `[pages, page_size, heads_k, head_dim]`; for host code."""
        size = x.shape[1]
        by_size = cute.fast_divmod_create_divisor_v2(size)
        return cls(table, by_size, size, spec.page_rows, tile_n)

    @property
    def most_keys(self) -> Any:
        """The most keys of a sequence."""
        return self.size * self.table.shape[1]

    @property
    def boxes(self) -> int:
        """The number of boxes of a K/V tile."""
        return self.tile_n // self.rows

    def prefetch_first(self) -> None:
        """Bring the first sequences' entries to L2, before the first lengths have come from
        memory."""
        batch, width = self.table.shape
        lines = (width + (LINE_WORDS - 1)) // LINE_WORDS  # of a sequence
        for first in range(0, PREFETCHED_LINES, WARP_SIZE):
            line = first + cute.arch.lane_idx()
            row = cutlass.min(line // lines, batch - 1)
            prefetch_global(self.table[row, None], line % lines * LINE_WORDS)

    def prefetch(self, sequence: Int32) -> None:
        """Bring a sequence's entries to L2, before the sequence's length has come from memory."""
        entries = self.table[sequence, None]
        for first in range(0, PREFETCHED, WARP_SIZE * LINE_WORDS):
            prefetch_global(entries, first + cute.arch.lane_idx() * LINE_WORDS)

    @cute.jit
    def of_tile(
        self,
        key_tile: Int32,
        sequence: Int32,
        seqlen_k: Int32,
        boxed: cutlass.Constexpr[BoxedRows],
    ) -> Any:
        """Return (page, *place in the page) of the box with the lane's number. If a tile is a
        single box, every lane gets this box."""
        # A box past the last key loads the last key's box again; its P is 0. TMA may fault on a box
        # that is out of bounds as a whole, since the TMA tensor starts before the pages.
        key = key_tile * self.tile_n
        if cutlass.const_expr(self.boxes > 1):
            key += cute.arch.lane_idx() * self.rows
        number, row = divmod(cutlass.min(key, seqlen_k - 1), self.by_size)
        used = cutlass.min(seqlen_k - number * self.size, self.size)
        return self.table[sequence, number], *boxed.place(row // self.rows, 0, used)

    def view(
        self, buffer: cute.Pointer, head_dim: int, stages: int, swizzle: bool = True
    ) -> cute.Tensor:
        """A ring of K/V tiles in shared memory, with the modes (rows, columns, boxes of rows, boxes
        of columns, stages)."""
        return boxes(
            buffer, self.rows, (self.boxes, self.rows * BOX), (head_dim // BOX, self.tile_n * BOX),
            (stages, self.tile_n * head_dim), swizzle=swizzle,
        )  # fmt: skip

    @cute.jit
    def load(
        self,
        tma: cute.CopyAtom,
        x: cute.Tensor,
        boxed: cutlass.Constexpr[BoxedRows],
        found: Any,
        head: Int32,
        smem: cute.Tensor,
        barriers: Barriers,
        edge: cutlass.Constexpr[str],
        n: Int32,
        column: Int32 | None = None,
        stage: Int32 | None = None,
        multicast: cutlass.Constexpr[bool] = False,
    ) -> None:
        """Load a tile, whose boxes `of_tile` has found, to the stage of use n of `edge`. `column`
        is the first column to load; `smem` has as many columns as are loaded. `stage` is the stage
        of `smem`, by default the stage of use n. With `multicast` each CTA of a pair loads half of
        the boxes of rows into both CTAs."""
        if cutlass.const_expr(stage is None):
            stage = barriers.stage(edge, n)
        first, count, more = 0, self.boxes, {}
        if cutlass.const_expr(multicast):
            count = self.boxes // CTAS
            first, more = cta_rank() * count, {"mcast_mask": Int16(BOTH_CTAS)}
        for each in cutlass.range(count, unroll=1):  # not unrolled, because registers are few
            i = first + each if cutlass.const_expr(multicast) else each
            if cutlass.const_expr(self.boxes > 1):
                page, *place = (cute.arch.shuffle_sync(value, i) for value in found)
            else:
                page, *place = found
            rows = boxed.at(x, place, head, page)
            if cutlass.const_expr(column is not None):
                rows = cute.domain_offset((0, column), rows)
            tiled = cute.local_tile(rows, (self.rows, BOX), (0, None))
            source, to = partition(tma, tiled, smem)
            for box in cutlass.range_constexpr(cute.size(to, mode=[2])):
                cute.copy(
                    tma, source[None, box], to[None, i, box, stage],
                    tma_bar_ptr=barriers.pointer(edge, n), **more,
                )  # fmt: skip
