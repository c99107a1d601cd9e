"""Which tuning the attention forwards get.

Packing is decided by counting, not by measuring: a tile has TILE_M rows, and each tile of a head
reads the K/V head from end to end. With `p` query heads to a K/V head, `seqlen_q` tokens take
p * ceil(seqlen_q / TILE_M) tiles unpacked and ceil(p * seqlen_q / TILE_M) packed, so packing never
reads more; but rows that are heads cost a division each where a mask or an address needs the token.
It is used where it at least halves the tiles, which is where a head fills at most half of one.

The scheduler is the caller's. "single" (a cluster for each tile, none persistent) is never chosen:
what would choose it is the number of tiles, and a kernel that changes with the size of a batch is
one more to compile while serving.
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
