"""Tuning of the attention kernels.

The packing rule counts tiles; it is not measured. Each tile of TILE_M rows reads its K/V head from
end to end. With `p` query heads for each K/V head, `seqlen_q` tokens take p * ceil(seqlen_q /
TILE_M) tiles unpacked and ceil(p * seqlen_q / TILE_M) packed, so packing never reads more. But
masks and addresses of packed rows need a division. So heads are packed where packing at least
halves the number of tiles: where a head fills at most half a tile.

The caller chooses the scheduler. The operators never choose "single" (one cluster for each tile,
not persistent). "single" would suit few tiles, but then the batch size would select the kernel, and
serving would compile one more kernel.

The backward's dK/dV kernel loops over the query heads of a K/V head. The blocks of keys may be too
few for the GPU, or leave a part of the GPU idle at the end. Then the heads of a group are split
among clusters, and each cluster writes float32 partial sums. `num_splits` weighs the clocks of the
busiest cluster against the clocks of writing and adding up the partial sums. A row's `SplitCosts`
has these clocks. The clocks are measured for the fused kernels of SM90
(`docs/log/sm90_backward.md`), and estimated from the design for all other kernels
(`docs/log/hd256_backward.md`). `num_splits` looks at shapes and the number of SMs only, so that a
call always adds in the same order.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from . import configs, ds_tiles
from .configs import SplitCosts
from .spec import (
    GATHERED,
    TILE_M,
    BackwardSpec,
    ForwardSpec,
    Hd256BackwardSpec,
    Hd256ForwardSpec,
    Sm90BackwardSpec,
    Sm90ForwardSpec,
)

SHORT_SEQLEN_Q = TILE_M // 2
# Queries of a sequence from which on two CTAs share K and V. Measured on an H100, dense calls of
# 16k tokens: 1.03 to 1.07 times as fast at head_dim 64, 1.01 to 1.05 at 256. At 1024 queries calls
# are up to 5 % slower.
LONG_SEQLEN_Q = 4096
# Maxima over the rows that have a tile for few query rows of a K/V head.
FEW_ROWS = max(row.few.m for row in configs.FORWARD.values() if row.few)
PIECE_ROWS = max(row.pieces.m for row in configs.FORWARD.values() if row.pieces)
MOST_PIECE_ROWS = 2 * PIECE_ROWS  # the most query rows of a K/V head in calls with pieces
MOST_PACKED_OF_FEW = max(row.most_packed_heads for row in configs.FORWARD.values() if row.few)

# How `sum_partials` adds up the few partial sums of dk and dv, and the many, of few elements, of
# dsink.
FEW_PARTIALS = {"vector": 4, "slices": 1}
MANY_PARTIALS = {"vector": 1, "slices": 32}

# Splits of the forward.
MOST_SPLITS = 128
FEWEST_KEY_TILES = 2  # key tiles of a split; fewer take less time than the combination
# No split pays if tiles fill this share of the clusters. Measured on 132 SMs of an H200, 96 tiles
# of 8192 keys: 64.5 us at head_dim 64 and 117.6 us at 128; in four splits 68.6 and 114.3 us.
ENOUGH_TILES = 0.7
NEARLY = 1.03
# Fixed costs of a CTA and of the combination, in units of a K/V tile's time, about 1 us.
_START = 3
_COMBINATION = 3

# Keys of a split of a `batch_invariant` call. A CTA alone reads 1024 keys of head_dim 128 in 20 us.
INVARIANT_SPLIT = 1024
SHORT_WINDOW = 4 * INVARIANT_SPLIT

# Rows of a page that TMA loads at once; fewer are gathered. Measured on an H100, pages of 16 and 48
# gathered against boxes of 16 rows: 0.96 to 1.19 times as fast in decode, 1.01 to 1.04 in prefill.
# Kernels that do not gather take boxes of at least BOX_STEP rows.
LEAST_BOX_ROWS, BOX_STEP = 32, 16

# Bytes of K and V in 16 bits: a CTA alone reads them in 9 us on an H100. Pieces of fp8 have as many
# keys, whose products take as long.
LEAST_PIECE = 512 * 1024

# Fixed orders of additions for causal calls whose query heads share K/V heads, by head_dim: queries
# of a sequence from and below, and the order. Other calls take "alternating". by_head was 1.02 to
# 1.16 times as fast with 4096 queries (docs/log/sm90_backward.md).
FIXED_ORDERS = {64: ((3072, 12288, "by_head"),)}

_SAMPLES = 32  # blocks of keys whose visible query tiles are counted

# Keeping dS of a part of the keys pays if the part's blocks fill this share of the clusters.
_BUSY = 0.8


def packed_heads(
    arch: str,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    heads: int,
    heads_k: int,
    short: bool,
) -> int:
    """How many query heads of a K/V head share a tile.

    Args:
        arch: such as "sm_100a".
        head_dim: head dimension of q and k.
        head_dim_v: head dimension of v; head_dim if None.
        heads, heads_k: numbers of query heads and of K/V heads.
        short: whether no sequence has more than SHORT_SEQLEN_Q queries.
    """
    if not short:
        return 1
    return _packed(heads // heads_k, configs.forward(arch, head_dim, head_dim_v).most_packed_heads)


def _packed(group: int, most: int) -> int:
    return min(group & -group, most)  # the largest power of two that divides the group


@functools.lru_cache(maxsize=4096)  # each call of the operator comes here
def has_few_rows(*, heads: int, heads_k: int, most_queries: int, few_rows: int = FEW_ROWS) -> bool:
    """Whether the query rows of a K/V head in a sequence of at most `most_queries` queries fit the
    tile of `few_rows` rows. Without the tile of FEW_ROWS, two of three warpgroups had no row in a
    decode step at head_dim 64: the products held the step to 58 % of an H200's copy bandwidth."""
    return most_queries * _packed(heads // heads_k, MOST_PACKED_OF_FEW) <= few_rows


def page_rows(
    arch: str,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    page_size: int,
    fp8: bool = False,
) -> int:
    """How many rows of a page are loaded at a time: as many as divide the page and a K/V tile,
    `GATHERED` where these are few.

    Raises:
        NotImplementedError: the kernel takes no pages of this size.
    """
    row = configs.forward(arch, head_dim, head_dim_v)
    if page_size % row.page_step:
        raise NotImplementedError(
            f"k has pages of {page_size} rows; on {arch} the kernel takes multiples of "
            f"{row.page_step}"
        )
    rows = math.gcd(page_size, row.page_keys)
    if fp8 and rows % BOX_STEP:
        raise NotImplementedError(
            f"k is fp8 and has pages of {page_size} rows; the kernel for fp8 takes multiples of "
            f"{BOX_STEP}"
        )
    gathers = row.page_step == 1 and not fp8
    return GATHERED if gathers and rows < LEAST_BOX_ROWS else rows


def has_clc(arch: str) -> bool:
    """Whether the kernels on `arch` can take tiles from the hardware's queue."""
    return any(row.scheduler is None for key, row in configs.FORWARD.items() if key[1] == arch)


@functools.lru_cache(maxsize=4096)
def num_splits_of_forward(
    arch: str,
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    rows: int,
    batch: int,
    heads: int,
    heads_k: int,
    short: bool,
    few: bool,
    seqlen_k: int,
    clusters: int,
    fp8: bool = False,
) -> int:
    """Return into how many parts the keys of a query tile are split. This is the smallest number
    with nearly the shortest time of the busiest cluster, if all sequences are as long as the
    longest.

    Args:
        head_dim: head dimension of q and k.
        head_dim_v: head dimension of v; head_dim if None.
        rows: rows of q in all sequences together.
        batch: number of sequences.
        heads, heads_k: numbers of query heads and of K/V heads.
        short: as for `packed_heads`.
        few: as for `forward_spec`.
        seqlen_k: the most keys of a sequence that a query sees, as far as the host knows.
        clusters: how many clusters of the kernel run at once.
        fp8: whether k and v are fp8.
    """
    if not (rows and heads and batch):
        return 1
    tile_m, tile_n, _ = configs.forward(arch, head_dim, head_dim_v).tile_for(few, fp8)
    packed = packed_heads(arch, head_dim, head_dim_v, heads=heads, heads_k=heads_k, short=short)
    tiles = heads // packed * max(batch, -(-rows * packed // tile_m))
    key_tiles = -(-seqlen_k // tile_n)
    most = min(key_tiles // FEWEST_KEY_TILES, MOST_SPLITS)
    if tiles >= ENOUGH_TILES * clusters or most <= 1:
        return 1

    def time(splits: int) -> int:
        waves = -(-tiles * splits // clusters)
        combination = 0 if splits == 1 else _COMBINATION
        return waves * (-(-key_tiles // splits) + _START) + combination

    shortest = min(map(time, range(1, most + 1)))
    return next(n for n in range(1, most + 1) if time(n) <= NEARLY * shortest)


def invariant_splits(
    *, seqlen_k: int, window_left: int | None, few: bool, sink: bool, most: int
) -> int:
    """Into how many parts of INVARIANT_SPLIT keys a `batch_invariant` call with num_splits of 0
    splits the keys. Parts without a key change no bit, so neither does `seqlen_k`. Only calls with
    few rows have splits: other calls have enough tiles. Nor are the keys of a short window split.

    Args:
        seqlen_k: at least the keys of the longest sequence.
        window_left: keys that a query sees to its left; None is no bound.
        few: see `has_few_rows`.
        sink: whether there is a learnable sink. The combination adds the sink with other roundings
            than a kernel without splits, so there is always a combination.
        most: the most splits.
    """
    if not few or (window_left is not None and window_left < SHORT_WINDOW):
        return 1
    return min(max(-(-seqlen_k // INVARIANT_SPLIT), 2 if sink else 1), most)


def forward_spec(
    arch: str,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    scheduler: str,
    page_size: int | None,
    split: bool,
    few: bool,
    pieces: bool = False,
    fp8: str = "none",
    k_descale: bool = False,
    v_descale: bool = False,
    batch_invariant: bool = False,
    tree_mask: bool = False,
    long: bool = False,
    **fields: Any,
) -> ForwardSpec:
    """The specialisation of the forward on `arch`, with `fields` as in `ForwardSpec`. The caller's
    scheduler is "static" or "clc"; SM90 uses "counter" for both, which gives the same bits. `few`
    selects the small tile, see `has_few_rows`. `pieces` selects pieces of long sequences; without
    `few`, in tiles of PIECE_ROWS. With `batch_invariant`, splits have INVARIANT_SPLIT keys. On
    SM100 no kernel takes a `tree_mask`. The parameters of fp8 K and V are as in `Sm90ForwardSpec`;
    see `configs.has_fp8`. `long` says that sequences have at least LONG_SEQLEN_Q queries."""
    fields |= {"split": True, "lse": True, "sink_dtype": "none"} if split else {}
    row = configs.forward(arch, head_dim, head_dim_v)
    rows = 0
    if page_size is not None:
        rows = page_rows(arch, head_dim, head_dim_v, page_size=page_size, fp8=fp8 != "none")
    scheduler = "pieces" if pieces else row.scheduler or scheduler
    fields |= {"scheduler": scheduler, "page_rows": rows}
    if batch_invariant and split:
        fields["split_key_tiles"] = INVARIANT_SPLIT // row.tile.n
    if arch in configs.SM100:
        return Hd256ForwardSpec(**fields)
    tile_m, tile_n, stages = row.tile_for(few, pieces, fp8 != "none")
    if fp8 != "none" and row.fp8:
        fields |= {"fp8": fp8, "k_descale": k_descale, "v_descale": v_descale}
        fields["loaded"] = row.fp8.loaded_few if few else row.fp8.loaded
        fields["k_warps"] = row.fp8.k_warps_few if few else row.fp8.k_warps
    if row.capped_m and fields["softcap"] and fields["window_left"]:
        tile_m = min(tile_m, row.capped_m)
    if pieces:
        tile_bytes = 2 * (row.head_dim + row.head_dim_v) * tile_n
        fields["least_key_tiles"] = max(1, LEAST_PIECE // tile_bytes)
    ragged = ("varlen_q", "varlen_k", "seqused_q", "seqused_k")
    alike = not any(fields[name] for name in ("window_left", "window_right", *ragged))
    return Sm90ForwardSpec(
        shared_keys=row.shared_keys
        and long
        and alike
        and not (few or pieces or split or rows)
        and fp8 == "none",
        head_dim=row.head_dim,
        head_dim_v=row.head_dim_v,
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
        batch_invariant=batch_invariant,
        tree_mask=tree_mask,
        **fields,
    )


def has_fused_dq(
    arch: str,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    softcap: bool,
    dq: bool = True,
    dkdv: bool = True,
) -> bool:
    """Whether one kernel on `arch` computes dK, dV and sums of dQ, if all three gradients are
    needed."""
    dims = head_dim, head_dim_v
    if not (dq and dkdv) or not configs.has("backward_fused", arch, *dims):
        return False
    return not softcap or configs.backward("backward_fused", arch, *dims).capped_m != 0


class Parts(NamedTuple):
    """The parts in which the dK/dV kernel runs.

    Attributes:
        splits: into how many parts the query heads of each K/V head are split.
        heads: the number of these parts whose dS is kept at once; 0: dS is not kept.
        key_blocks: the number of blocks of `ds_tiles.CLUSTER_KEYS` keys in each sequence whose dS
            is kept at once; 0: all keys.
    """

    splits: int
    heads: int = 0
    key_blocks: int = 0


@functools.lru_cache(maxsize=4096)
def parts_with_ds(
    arch: str,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    rows: int,
    keys: int,
    heads: int,
    heads_k: int,
    splits: int,
    limit: int,
    packed: bool,
    batch: int,
    clusters: int,
) -> Parts:
    """How the dK/dV kernel on `arch` keeps dS for the dQ kernel, in at most `limit` bytes. dS of
    several heads is kept at once, in launches of about equally many heads. If one head is too
    large, dS of one query head and a part of the keys is kept. Otherwise the dQ kernel computes dS
    itself.

    Args:
        rows: padded rows of a head, see `statistics`.
        keys: the most keys of a sequence.
        heads, heads_k: numbers of query heads and of K/V heads.
        splits: the fewest splits of a group.
        packed: whether sequences of keys are packed. With packed sequences the host does not know
            which parts have keys, and empty parts cost more than the kept dS gains.
        batch: number of sequences.
        clusters: how many clusters of the kernel run at once.
    """
    if configs.has("backward_ds_dq", arch, head_dim, head_dim_v) and heads_k and rows and keys:
        group = heads // heads_k
        for parts in (n for n in range(splits, group + 1) if group % n == 0):
            count = heads_k * parts
            fit = min(limit // ds_tiles.nbytes(group // parts, rows, keys), count)
            if fit:
                return Parts(parts, math.ceil(count / math.ceil(count / fit)))
        if not packed:
            blocks = _key_blocks_with_ds(head_dim, rows, keys, limit, batch, clusters)
            if blocks:
                return Parts(group, 1, blocks)
    return Parts(splits)


def _key_blocks_with_ds(
    head_dim: int, rows: int, keys: int, limit: int, batch: int, clusters: int
) -> int:
    """The number of blocks of keys whose dS is kept at once, for one query head; 0 if the limit is
    too small."""
    blocks = -(-keys // ds_tiles.CLUSTER_KEYS)
    sums = 4 * rows * head_dim  # bytes of dQ between the parts
    fit = (limit - sums) // ds_tiles.nbytes(1, rows, ds_tiles.CLUSTER_KEYS)
    if fit <= 0 or fit * batch < _BUSY * clusters:
        return 0
    if fit > clusters > 0:
        return fit - fit % clusters  # blocks of whole waves of clusters
    return math.ceil(blocks / math.ceil(blocks / fit))


def backward_spec(
    arch: str,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    of_keys: bool,
    fused: bool = False,
    ds: bool = False,
    **fields: Any,
) -> BackwardSpec:
    """The specialisation of the dQ kernel on `arch`; of the dK/dV kernel with `of_keys`; of the
    kernel that computes dK, dV and dQ with `fused`. The scheduler is the caller's, see
    `forward_spec`. With `ds` the dQ kernel reads dS from the dK/dV kernel."""
    way = "backward_fused" if fused else "backward_dkdv" if of_keys else "backward_dq"
    if ds and not of_keys:
        way = "backward_ds_dq"
        fields["softcap"] = False  # the kept dS includes the cap's slope
    row = configs.backward(way, arch, head_dim, head_dim_v)
    fields["scheduler"] = row.scheduler or fields["scheduler"]
    if arch in configs.SM100:
        return Hd256BackwardSpec(**fields)
    return Sm90BackwardSpec(
        head_dim=row.head_dim,
        head_dim_v=row.head_dim_v,
        tile_m=row.tile_m(fields["softcap"]),
        tile_n=row.tile.n,
        stores_ds=ds and of_keys,
        **fields,
    )


def fixed_orders(
    head_dim: int, *, window_left: bool, window_right: bool, batch_invariant: bool
) -> tuple[str, ...]:
    """The orders that `fixed_order` chooses from."""
    if window_left or not window_right or batch_invariant:
        return ("rising",)
    rows = FIXED_ORDERS.get(head_dim, ())
    return tuple(dict.fromkeys(("alternating", *(order for *_, order in rows))))


def fixed_order(
    head_dim: int,
    *,
    window_left: bool,
    window_right: bool,
    batch_invariant: bool,
    packed: bool,
    seqlen_q: int,
    group: int,
) -> str:
    """The order of additions to the sums of dQ, of `OrderedTileMap`, for a kernel of all gradients.

    Args:
        window_left, window_right: whether the window has bounds; causal is a right bound.
        batch_invariant: whether a sequence's place in the batch must not change a bit.
        packed: whether sequences of q or k are packed.
        seqlen_q: queries of a sequence.
        group: query heads of a K/V head.
    """
    orders = fixed_orders(
        head_dim, window_left=window_left, window_right=window_right,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    if len(orders) > 1 and group > 1 and not packed:
        for low, high, order in FIXED_ORDERS[head_dim]:
            if low <= seqlen_q < high:
                return order
    return orders[0]


@functools.lru_cache(maxsize=4096)
def num_splits(
    *,
    seqlen_q: int,
    seqlen_k: int,
    batch: int,
    heads: int,
    heads_k: int,
    window_left: int | None,
    window_right: int | None,
    clusters: int,
    tile: tuple[int, int],
    costs: SplitCosts,
    most_splits: int | None = None,
    order: str = "any",
) -> int:
    """Return into how many parts of equal size the query heads of a K/V head are split.

    Args:
        seqlen_q, seqlen_k: lengths of the sequences; the mean length of packed sequences.
        batch: number of sequences.
        heads, heads_k: numbers of query heads and of K/V heads.
        window_left, window_right: bounds of the window; None is no bound; a right bound of 0 is
            causal.
        clusters: how many clusters of the dK/dV kernel run at once.
        tile: queries and keys of a cluster's tile.
        costs: the kernel's costs; see `configs`.
        most_splits: the most splits whose partial sums have memory; None: there is no limit.
        order: the order in which blocks of keys add to the sums of dQ. In "alternating", blocks of
            several query heads walk together, and a block is behind the block before.
    """
    blocks = -(-seqlen_k // tile[1]) * batch * heads_k
    if not (blocks and heads and clusters):
        return 1
    group = heads // heads_k
    most, mean = _query_tiles(seqlen_q, seqlen_k, window_left, window_right, tile)

    def clocks(splits: int) -> float:
        of_block: float = group // splits * costs.tile
        if order == "alternating" and splits < group:
            of_block += costs.lag * costs.tile
        epilogue = costs.epilogue if splits == 1 else costs.partial_epilogue
        waves = _waves(blocks * splits / clusters, most, mean, costs.drift)
        sums = 0 if splits == 1 else splits * blocks * costs.sums
        return max(most * of_block + epilogue, waves * (mean * of_block + epilogue)) + sums

    most_splits = group if most_splits is None else min(max(most_splits, 1), group)
    best = min((n for n in range(1, most_splits + 1) if group % n == 0), key=clocks)
    return best if clocks(best) <= costs.least_gain * clocks(1) else 1


def _waves(share: float, most: int, mean: float, drift: float) -> float:
    """The time of the busiest cluster, in mean blocks; `share` is an even share. Blocks of one
    length take whole waves. Blocks of different lengths fill the last wave, but drift apart."""
    if not (drift and mean):
        return math.ceil(share)
    spread = most / mean - 1
    idle = (math.ceil(share) - share) * max(0.0, 1 - spread)
    return share + max(idle, drift * spread)


def _query_tiles(
    seqlen_q: int,
    seqlen_k: int,
    window_left: int | None,
    window_right: int | None,
    tile: tuple[int, int],
) -> tuple[int, float]:
    """The maximum and the mean, over up to _SAMPLES blocks of keys, of the number of query tiles
    that see a block."""
    tile_m, tile_n = tile
    offset = seqlen_k - seqlen_q  # query i is at the position of key i + offset
    counts = []
    step = -(-seqlen_k // (_SAMPLES * tile_n)) * tile_n
    for first in range(0, seqlen_k, step):
        last = min(first + tile_n, seqlen_k) - 1
        low = 0 if window_right is None else max(0, first - window_right - offset)
        high = seqlen_q if window_left is None else min(seqlen_q, last + window_left + 1 - offset)
        counts.append(max(0, -(-high // tile_m) - low // tile_m) if high > low else 0)
    return max(counts), sum(counts) / len(counts)
