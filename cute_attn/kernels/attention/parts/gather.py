"""Rows of keys and values from pages of any size, gathered by the warps of one warpgroup.

TMA loads boxes of rows that lie in one page, and takes as long for a box of one row as for a box of
many. So small pages, and pages whose size no box divides, are loaded row by row, with `cp.async` of
16 bytes a lane:

    warp w     gathers rows w * tile_n / 4 and up of each K/V tile
    lane l     looks up the page of row l of these rows; then all lanes get the pages by shuffles
    copies     eight lanes copy 128 bytes of a row, a column box; a warp copies four rows at a time

The rows lie in shared memory as TMA lays a box down, with the 128-byte swizzle. A row that does not
exist becomes zeros. `cp.async` writes through the generic proxy: a warp that waits for the rows
needs a proxy fence before its products read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from ...common.carried import Carried
from ...common.ptx.async_copy import copies_arrive, copy_async
from ...common.spec import VECTOR_BYTES, WARP_SIZE
from ...common.tma import BOX
from .pages import Pages

WARPS = 4
ELEMENT_BYTES = 2
BOX_BYTES = BOX * ELEMENT_BYTES  # of a row
LANES = BOX_BYTES // VECTOR_BYTES  # that copy a row's part of a box
AT_ONCE = WARP_SIZE // LANES  # rows that a warp copies at a time
SWIZZLED_ROWS = 8  # the swizzle repeats after so many rows


@dataclass(frozen=True)
class Gather(Carried):
    """A warp's part of K/V tiles.

    Attributes:
        pages: the page table.
        warp: the warp's number among WARPS.
    """

    pages: Pages
    warp: Any

    @classmethod
    def of_warp(cls, pages: Pages) -> Gather:
        """The calling warp's part; the warps of a warpgroup call this."""
        return cls(pages, cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS)

    @property
    def rows(self) -> int:
        """The rows that the warp gathers of a K/V tile."""
        return self.pages.tile_n // WARPS

    def of_tile(self, key_tile: Int32, sequence: Int32, seqlen_k: Int32) -> tuple[Any, Any]:
        """Return (page, row in the page) of the lane's row of a K/V tile; the row is negative
        behind the last key. The table is read only for keys that exist."""
        pages = self.pages
        own = cute.arch.lane_idx() % self.rows
        key = key_tile * pages.tile_n + self.warp * self.rows + own
        number, row = divmod(cutlass.min(key, seqlen_k - 1), pages.by_size)
        return pages.table[sequence, number], cutlass.select_(key < seqlen_k, row, -1)

    @cute.jit
    def load(
        self,
        x: cute.Tensor,
        found: tuple[Any, Any],
        head: Int32,
        columns: cutlass.Constexpr[int],
        tile: Int32,
        full: Int32,
    ) -> None:
        """Start to copy the warp's rows of k or v, x, to the K/V tile at the shared address `tile`.
        `of_tile` has found the rows. Each lane arrives once at the mbarrier `full` when its copies
        have landed."""
        page, row = found
        # As with TMA, a page that does not exist is zeros: keys that no query sees may have one.
        exists = (row >= 0) & (Uint32(page) < Uint32(x.shape[0]))
        place = Int64(page) * x.stride[0] + Int64(row) * x.stride[1]
        place = cutlass.select_(exists, place * ELEMENT_BYTES, Int64(-1))
        low, high = Int32(place), Int32(place >> 32)
        lane = cute.arch.lane_idx()
        in_row, vector = lane // LANES, lane % LANES
        source = x[0, 0, head, None].iterator.toint() + vector * VECTOR_BYTES
        to = tile + (self.warp * self.rows + in_row) * BOX_BYTES
        for first in cutlass.range_constexpr(0, self.rows, AT_ONCE):
            from_low = cute.arch.shuffle_sync(low, first + in_row)
            from_high = cute.arch.shuffle_sync(high, first + in_row)
            present = from_high >= 0
            at = (Int64(from_high) << 32) | Int64(Uint32(from_low))
            at = source + cutlass.select_(present, at, Int64(0))
            swizzled = vector ^ (first % SWIZZLED_ROWS + in_row)
            for box in cutlass.range_constexpr(columns // BOX):
                rows_before = box * self.pages.tile_n + first
                copy_async(
                    to + rows_before * BOX_BYTES + swizzled * VECTOR_BYTES,
                    at + box * BOX_BYTES,
                    present,
                )
        copies_arrive(full)
