"""Rows of an fp8 cache, from pages of any size: gathered, and converted to the products' type.

Four warps share a tile of 64 rows, of which a warp has 16. The rows pass through a ring in shared
memory. A lane copies units of 16 bytes there by `cp.async`, and reads back only the units that the
lane has copied itself, so no lane waits for another:

    copies     four lanes copy the 64 columns of a box of a row; a warp copies eight rows at a time
    converts   a lane turns 16 bytes into two units of the products' type, and stores the units as
               TMA lays a box down, with the 128-byte swizzle

Neither loads nor stores of shared memory have bank conflicts, see `dequantise`. The conversion is
exact, because every fp8 number is a bfloat16 and a float16. A row that does not exist becomes
zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Numeric, Uint32

from ...attention.parts.gather import SWIZZLED_ROWS, WARPS
from ...attention.parts.pages import Pages
from ...common.carried import Carried
from ...common.ptx.async_copy import copy_async
from ...common.ptx.convert import from_fp8
from ...common.ptx.memory import load_shared, store_shared
from ...common.spec import VECTOR_BYTES, WARP_SIZE
from ...common.tma import BOX

LANES = BOX // VECTOR_BYTES  # that copy a row's part of a box
AT_ONCE = WARP_SIZE // LANES  # rows that a warp copies at a time
UNITS = WARP_SIZE * VECTOR_BYTES  # bytes that a warp copies at a time
READS = 4  # units of a lane whose loads from the ring are in flight together
LINE_BYTES = 2 * BOX  # of a row of a box of the products' type


@dataclass(frozen=True)
class Fp8Rows(Carried):
    """A warp's part of the tiles.

    Attributes:
        fp8, dtype: the element types before and after the conversion.
        head_dim: columns of a row.
        pages: the page table.
        cache: `[pages, page_size, head_dim]`.
        ring: the shared address of the lane's units in the ring's first stage.
        to: the shared address of the lane's first unit in a tile of the products' type.
    """

    fp8: type[Numeric]
    dtype: type[Numeric]
    head_dim: int
    pages: Pages
    cache: cute.Tensor
    ring: Int32
    to: Int32

    @classmethod
    def of_warp(
        cls, fp8: type[Numeric], dtype: type[Numeric], pages: Pages, cache: cute.Tensor,
        ring: Int32, tile: Int32,
    ) -> Fp8Rows:  # fmt: skip
        """The calling warp's part; the warps of a warpgroup call this. `ring` and `tile` are the
        shared addresses of the rings of fp8 and of the products' type."""
        head_dim = cache.shape[2]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
        rows, lane = pages.tile_n // WARPS, cute.arch.lane_idx()
        row, unit = lane // LANES, lane % LANES * 2
        place = warp * rows + row
        to = tile + place * LINE_BYTES + (unit ^ (row % SWIZZLED_ROWS)) * VECTOR_BYTES
        own = warp * (rows * head_dim) + lane * VECTOR_BYTES
        return cls(fp8, dtype, head_dim, pages, cache, Int32(ring + own), Int32(to))

    @property
    def steps(self) -> int:
        """How often a warp copies AT_ONCE rows of a box of a tile."""
        return self.pages.tile_n // (WARPS * AT_ONCE)

    @property
    def nbytes(self) -> int:
        """Bytes of a tile of fp8."""
        return self.pages.tile_n * self.head_dim

    def of_tile(self, key_tile: Any, sequence: Int32, seqlen_k: Int32) -> tuple[Int32, ...]:
        """The pages of the lane's rows of a tile, and then the rows in their pages, negative behind
        the last key. The table is read only for keys that exist."""
        pages = self.pages
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
        lane = cute.arch.lane_idx()
        first = key_tile * pages.tile_n + warp * (self.steps * AT_ONCE) + lane // LANES
        found, places = [], []
        for step in range(self.steps):
            key = first + step * AT_ONCE
            number, row = divmod(cutlass.min(key, seqlen_k - 1), pages.by_size)
            found.append(Int32(pages.table[sequence, number]))
            places.append(Int32(cutlass.select_(key < seqlen_k, row, -1)))
        return (*found, *places)

    def sources(self, found: tuple[Int32, ...]) -> list[Int64]:
        """The addresses of the lane's part of its rows, which `of_tile` has found; 0 for a row that
        does not exist."""
        base = self.cache.iterator.toint() + cute.arch.lane_idx() % LANES * VECTOR_BYTES
        addresses = []
        for page, row in zip(found[: self.steps], found[self.steps :], strict=True):
            # As with TMA, a page that does not exist is zeros.
            exists = (row >= 0) & (Uint32(page) < Uint32(self.cache.shape[0]))
            at = base + Int64(page) * self.cache.stride[0] + Int64(row) * self.cache.stride[1]
            addresses.append(Int64(cutlass.select_(exists, at, Int64(0))))
        return addresses

    def start(self, sources: list[Int64], columns: range, stage: Any) -> None:
        """Start to copy some columns of rows to a stage of the ring."""
        for box, step, at in self.places(columns):
            present = sources[step] != 0
            to = self.ring + stage * self.nbytes + at
            copy_async(to, sources[step] + box * BOX, present)

    def convert(self, columns: range, stage: Any, tile: Any) -> None:
        """Convert some columns of the rows in a stage of the ring, to the tile that lies `tile`
        bytes after the first."""
        box_bytes = self.pages.tile_n * LINE_BYTES
        places = self.places(columns)
        # Loads before stores, because the compiler keeps their order.
        for first in range(0, len(places), READS):
            of_lane = places[first : first + READS]
            loaded = [
                load_shared(Int32, self.ring + stage * self.nbytes + at, 4) for _, _, at in of_lane
            ]
            for (box, step, _), words in zip(of_lane, loaded, strict=True):
                units = [from_fp8(self.fp8, self.dtype, word) for word in words]
                to = self.to + (tile + box * box_bytes + step * (AT_ONCE * LINE_BYTES))
                store_shared(Int32, to, [*units[0], *units[1]])
                store_shared(Int32, to ^ VECTOR_BYTES, [*units[2], *units[3]])

    def places(self, columns: range) -> list[tuple[int, int, int]]:
        """For each unit of the lane: the box, the step, and where the unit lies in the ring."""
        boxes = range(columns.start // BOX, columns.stop // BOX)
        steps = range(self.steps)
        return [(box, i, (box * self.steps + i) * UNITS) for box in boxes for i in steps]
