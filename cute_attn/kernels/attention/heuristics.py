"""Tuning of the attention forwards.

The packing rule counts tiles; it is not measured. Each tile of TILE_M rows reads its K/V head from
end to end. With `p` query heads for each K/V head, `seqlen_q` tokens take p * ceil(seqlen_q /
TILE_M) tiles unpacked and ceil(p * seqlen_q / TILE_M) packed, so packing never reads more. But
masks and addresses of packed rows need a division. So heads are packed where that at least halves
the number of tiles: where a head fills at most half a tile.

The caller chooses the scheduler. The operators never choose "single" (one cluster for each tile,
not persistent). It would suit few tiles, but then the batch size would select the kernel, and
serving would compile one more.
"""

from __future__ import annotations

from .spec import MAX_PACKED_HEADS, TILE_M

SHORT_SEQLEN_Q = TILE_M // 2


def packed_heads(*, heads: int, heads_k: int, short: bool) -> int:
    """How many query heads of a K/V head share a tile.

    Args:
        heads, heads_k: numbers of query heads and of K/V heads.
        short: whether no sequence has more than SHORT_SEQLEN_Q queries.
    """
    if not short:
        return 1
    group = heads // heads_k
    return min(group & -group, MAX_PACKED_HEADS)  # the largest power of two that divides it
