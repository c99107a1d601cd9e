"""The layout of dS in global memory, between the SM90 dK/dV and dQ kernels at head_dim 192
and 256.

A tile is dS^T of 64 keys and 64 queries in 16 bits. The tile has the layout that `wgmma` reads from
shared memory: a row of 128 bytes for each key, with TMA's swizzle of 16-byte units. So one bulk
copy loads a tile. In a row, queries are permuted so that a lane of the accumulators' fragment has
whole units. Unit 4 h + j has queries 2 j and 2 j + 1 of each 8 of the h-th 32 queries. The rows of
dQ are permuted in the same way: see `query_of`.

The tensor is `[heads, padded rows / 64, tiles of keys, 64 * 64]`, with the padded rows of
`statistics`. A sequence has an even number of tiles of keys, since a cluster writes two. A tile in
which no query sees a key may be left unwritten. Importing this loads no compiler.
"""

from __future__ import annotations

from typing import Any

TILE = 64  # queries, and keys
TILE_BYTES = 2 * TILE * TILE
ROW_BYTES = 2 * TILE
UNIT_BYTES = 16
CLUSTER_KEYS = 2 * TILE


def shape(heads: int, rows: int, keys: int) -> tuple[int, int, int, int]:
    """The shape of the tensor of dS, from heads, padded rows and the most keys of a sequence."""
    return heads, rows // TILE, -(-keys // CLUSTER_KEYS) * 2, TILE * TILE


def nbytes(heads: int, rows: int, keys: int) -> int:
    heads, of_queries, of_keys, _ = shape(heads, rows, keys)
    return heads * of_queries * of_keys * TILE_BYTES


def lane_offset(warp: Any, lane: Any) -> Any:
    """The byte offset in a tile of a lane's first unit: the first lane row, the first 32 queries.
    For the other 32 queries, the bit 4 * UNIT_BYTES of the offset is inverted."""
    row = lane // 4
    return (warp * 16 + row) * ROW_BYTES + (lane % 4 ^ row) * UNIT_BYTES


def query_of(row: Any) -> Any:
    """The query of a tile that a row of dQ belongs to."""
    unit, within = row >> 3, row & 7
    return (unit >> 2) * 32 + (within >> 1) * 8 + (unit & 3) * 2 + (within & 1)
