"""Sums of dQ in float32 while a kernel adds to them: their order in memory.

The SM90 backward adds up dQ in global memory, `[heads, padded rows, head_dim]` with the padded rows
of `statistics`. Each tile of queries is contiguous. In the tile, each warp's part, 16 rows by
`columns`, is contiguous too, in the order of the warp's registers:

    part      (blocks of `columns` columns, blocks of 16 rows)
    in it     (columns / 8, lanes, (2 rows, 2 columns))

so that a warp's additions, of 16 bytes by a thread, are consecutive. Importing this loads no
compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

WARPS = 8  # warps that add to a tile
PART_ROWS = 16
VECTOR = 4  # a lane's float32 values of 8 columns
GROUP_COLUMNS = 8
VECTORS = 32  # vectors of 8 columns, one for each lane


@dataclass(frozen=True)
class QuerySums:
    """The order of the sums of a tile.

    Attributes:
        tile_m: queries of a tile.
        head_dim: columns of a tile.
        columns: columns of a warp's part.
    """

    tile_m: int
    head_dim: int
    columns: int

    @classmethod
    def of(cls, tile_m: int, head_dim: int) -> QuerySums:
        """The order in which each warp has a part."""
        return cls(tile_m, head_dim, tile_m * head_dim // (WARPS * PART_ROWS))

    @property
    def part(self) -> int:
        """Elements of a warp's part."""
        return PART_ROWS * self.columns

    @property
    def row_blocks(self) -> int:
        return self.tile_m // PART_ROWS

    @property
    def tile(self) -> int:
        """Elements of a tile."""
        return self.tile_m * self.head_dim
