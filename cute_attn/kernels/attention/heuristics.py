"""Which tuning the attention forwards get.

Packing follows from a count, not from a measurement: a tile has TILE_M rows, and each tile of a
head reads the K/V head from end to end. With `p` query heads to a K/V head, `seqlen_q` tokens take
p * ceil(seqlen_q / TILE_M) tiles unpacked and ceil(p * seqlen_q / TILE_M) packed, so that packing
never reads more. But a mask or an address then has to divide a row's number to find its token. So
heads are packed where that at least halves the tiles: where a head fills at most half of one.

The caller chooses the scheduler. Nobody chooses "single" (a cluster for each tile, none of them
persistent): it would suit small numbers of tiles, but a kernel that changes with the size of a
batch is one more to compile while serving.
"""

from __future__ import annotations

from .spec import MAX_PACKED_HEADS, TILE_M

SHORT_SEQLEN_Q = TILE_M // 2


def packed_heads(*, heads: int, heads_k: int, short: bool) -> int:
    """How many query heads of a K/V head share a tile.

    Args:
        heads, heads_k: of q, and of k and v.
        short: whether a sequence's queries are at most SHORT_SEQLEN_Q.
    """
    if not short:
        return 1
    group = heads // heads_k
    return min(group & -group, MAX_PACKED_HEADS)  # the largest power of two that divides it
