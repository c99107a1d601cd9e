"""Tuning of the attention kernels.

The packing rule counts tiles; it is not measured. Each tile of TILE_M rows reads its K/V head from
end to end. With `p` query heads for each K/V head, `seqlen_q` tokens take p * ceil(seqlen_q /
TILE_M) tiles unpacked and ceil(p * seqlen_q / TILE_M) packed, so packing never reads more. But
masks and addresses of packed rows need a division. So heads are packed where that at least halves
the number of tiles: where a head fills at most half a tile.

The caller chooses the scheduler. The operators never choose "single" (one cluster for each tile,
not persistent). It would suit few tiles, but then the batch size would select the kernel, and
serving would compile one more.

The backward's dK/dV kernel loops over the query heads of a K/V head. Where its blocks of keys are
too few for the GPU, or leave a part of it idle at the end, the heads of a group are split among
clusters, each of which writes float32 partial sums. `num_splits` weighs the clocks of the busiest
cluster against the clocks of writing and adding up the partial sums. A row's `SplitCosts` has the
numbers. They are measured for the fused kernels of SM90 (`docs/log/sm90_backward.md`), and
estimated from the design for the others (`docs/log/hd256_backward.md`). `num_splits` looks at
shapes and the number of SMs only, so that a call always adds in the same order.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from . import configs, ds_tiles
from .configs import SplitCosts
from .spec import (
    TILE_M,
    BackwardSpec,
    ForwardSpec,
    Hd256BackwardSpec,
    Hd256ForwardSpec,
    Sm90BackwardSpec,
    Sm90ForwardSpec,
)

SHORT_SEQLEN_Q = TILE_M // 2
# Of the rows that have a tile for few rows of a K/V head.
FEW_ROWS = max(row.few.m for row in configs.FORWARD.values() if row.few)
MOST_PACKED_OF_FEW = max(row.most_packed_heads for row in configs.FORWARD.values() if row.few)

# How `sum_partials` adds up the few partial sums of dk and dv, and the many, of few elements, of
# dsink.
FEW_PARTIALS = {"vector": 4, "slices": 1}
MANY_PARTIALS = {"vector": 1, "slices": 32}

# Splits of the forward.
MOST_SPLITS = 128
FEWEST_KEY_TILES = 2  # of a split: fewer take less time than the combination
# Of the clusters at once, for which no split pays. 96 tiles of 8192 keys on an H200 with 132 SMs:
# 64.5 us at head_dim 64 and 117.6 at 128, in four splits 68.6 and 114.3.
ENOUGH_TILES = 0.7
NEARLY = 1.03
# In the time of a K/V tile, about 1 us: what a CTA takes beside its K/V tiles, and the combination.
_START = 3
_COMBINATION = 3

_SAMPLES = 32  # blocks of keys whose visible query tiles are counted

# dS of a part of the keys at once pays if the part has blocks for this share of the clusters.
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
def has_few_rows(*, heads: int, heads_k: int, most_queries: int) -> bool:
    """Whether the rows of a K/V head and sequence of at most `most_queries` queries fit a row's
    tile for few rows. With two of three warpgroups without a row, the products of a decode step at
    head_dim 64 held it to 58 % of the copy bandwidth of an H200."""
    return most_queries * _packed(heads // heads_k, MOST_PACKED_OF_FEW) <= FEW_ROWS


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
) -> int:
    """Into how many parts the keys of a tile of queries are split: the fewest for which the busiest
    cluster takes nearly the shortest time, if all sequences are as long as the longest.

    Args:
        head_dim: head dimension of q and k.
        head_dim_v: head dimension of v; head_dim if None.
        rows: of q, of all sequences together.
        batch: number of sequences.
        heads, heads_k: numbers of query heads and of K/V heads.
        short: as for `packed_heads`.
        few: as for `forward_spec`.
        seqlen_k: the most keys of a sequence that a query sees, as far as the host knows.
        clusters: how many clusters of the kernel run at once.
    """
    if not (rows and heads and batch):
        return 1
    tile_m, tile_n, _ = configs.forward(arch, head_dim, head_dim_v).tile_for(few)
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


def forward_spec(
    arch: str,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    scheduler: str,
    page_size: int | None,
    split: bool,
    few: bool,
    **fields: Any,
) -> ForwardSpec:
    """The specialisation of the forward on `arch`, whose other `fields` are those of every
    forward; the scheduler is the caller's, "static" or "clc". On SM90 both are "counter", which
    gives the same bits. With `few`, see `has_few_rows`, it has a small tile."""
    fields |= {"split": True, "lse": True, "sink_dtype": "none"} if split else {}
    row = configs.forward(arch, head_dim, head_dim_v)
    page_rows = 0 if page_size is None else math.gcd(page_size, row.page_keys)
    fields |= {"scheduler": row.scheduler or scheduler, "page_rows": page_rows}
    if arch in configs.SM100:
        return Hd256ForwardSpec(**fields)
    tile_m, tile_n, stages = row.tile_for(few)
    if row.capped_m and fields["softcap"] and fields["window_left"]:
        tile_m = min(tile_m, row.capped_m)
    return Sm90ForwardSpec(
        head_dim=row.head_dim,
        head_dim_v=row.head_dim_v,
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
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
    deterministic: bool = False,
) -> bool:
    """Whether one kernel on `arch` computes dK, dV and sums of dQ. All of them must be needed, and
    the bits of dQ vary."""
    if deterministic or not (dq and dkdv):
        return False
    dims = head_dim, head_dim_v
    if not configs.has("backward_fused", arch, *dims):
        return False
    return not softcap or configs.backward("backward_fused", arch, *dims).capped_m != 0


class Parts(NamedTuple):
    """How the dK/dV kernel runs.

    Attributes:
        splits: into how many parts the query heads of each K/V head are split.
        heads: dS is kept of so many of these parts at once; 0: it is not kept.
        key_blocks: dS is kept of so many blocks of keys of each sequence at once, of
            `ds_tiles.CLUSTER_KEYS` each; 0: of all keys.
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
    """How the dK/dV kernel on `arch` keeps dS for the dQ kernel, in at most `limit` bytes: of
    several heads at once, and about equally often, or if need be of one query head and a part of
    the keys. Otherwise dQ's kernel computes dS itself.

    Args:
        rows: padded ones of a head, see `statistics`.
        keys: the most of a sequence.
        heads, heads_k: numbers of query heads and of K/V heads.
        splits: the fewest of a group.
        packed: whether sequences of keys are packed. The host does not know which parts would
            have keys then, and empty parts cost more than is gained.
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
    """Of how many blocks of keys dS of one query head is kept at once; 0 if they are too few."""
    blocks = -(-keys // ds_tiles.CLUSTER_KEYS)
    sums = 4 * rows * head_dim  # of dQ, between the parts
    fit = (limit - sums) // ds_tiles.nbytes(1, rows, ds_tiles.CLUSTER_KEYS)
    if fit <= 0 or fit * batch < _BUSY * clusters:
        return 0
    if fit > clusters > 0:
        return fit - fit % clusters  # whole waves
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
    """The specialisation of the dQ kernel on `arch`, or with `of_keys` of the dK/dV kernel, with
    `fused` of the one that computes dQ too; the scheduler is the caller's, see `forward_spec`. With
    `ds` the first takes dS from the second."""
    way = "backward_fused" if fused else "backward_dkdv" if of_keys else "backward_dq"
    if ds and not of_keys:
        way = "backward_ds_dq"
        fields["softcap"] = False  # dS has the cap's slope
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
) -> int:
    """Into how many parts of equal size the query heads of a K/V head are split.

    Args:
        seqlen_q, seqlen_k: lengths of the sequences; of packed ones, their mean.
        batch: number of sequences.
        heads, heads_k: numbers of query heads and of K/V heads.
        window_left, window_right: bounds of the window, None for none; 0 to the right is causal.
        clusters: how many clusters of the dK/dV kernel run at once.
        tile: queries and keys of a cluster's tile.
        costs: of the kernel; see `configs`.
        most_splits: the most splits whose partial sums have memory; None: there is no limit.
    """
    blocks = -(-seqlen_k // tile[1]) * batch * heads_k
    if not (blocks and heads and clusters):
        return 1
    group = heads // heads_k
    most, mean = _query_tiles(seqlen_q, seqlen_k, window_left, window_right, tile)

    def clocks(splits: int) -> float:
        of_block = group // splits * costs.tile
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
    """The most query tiles that see a block of keys, and the mean, of up to _SAMPLES blocks."""
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
