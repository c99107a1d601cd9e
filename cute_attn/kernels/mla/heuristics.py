"""Tuning of the kernels of multi-head latent attention.

A CTA has as many tiles of the cache in shared memory as fit beside Q and P. A piece has at least
LEAST_KEY_TILES tiles of the cache, because each piece stores its result and is added up.
"""

from __future__ import annotations

import math

from .spec import TILE_M, TILE_N, LatentDecodeSpec, LatentSpec, LatentTurnsSpec

LEAST_KEY_TILES = 2
STAGES = {576: 2, 512: 2, 320: 4}
CHUNKS = 4
TURNS = True
MULTICAST = True
AHEAD = 1
EVICT_FIRST = False
TOGETHER = True


def latent_decode_spec(
    *,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    rows: int,
    causal: bool,
    page_size: int,
    lse: bool,
) -> LatentSpec:
    """The specialisation of a decode kernel, for `rows` pairs of a query and a head."""
    cluster = cluster_of(rows)
    # A tile of 64 rows waits for memory, several tiles for the tensor cores.
    turns = TURNS and rows > TILE_M and head_dim_v == 512
    multicast = cluster > 1 and (MULTICAST or not turns)
    of_all = {
        "dtype": dtype,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "causal": causal,
        "page_rows": math.gcd(page_size, TILE_N // (cluster if multicast else 1)),
        "lse": lse,
        "chunks": CHUNKS,
        "least_key_tiles": LEAST_KEY_TILES,
        "cluster": cluster,
        "together": TOGETHER,
    }
    if turns:
        return LatentTurnsSpec(**of_all, multicast=multicast, ahead=AHEAD, evict_first=EVICT_FIRST)
    return LatentDecodeSpec(
        **of_all,
        stages=STAGES.get(head_dim, 2),
        # Chunks of columns are those of the outputs' warpgroups.
        early=head_dim_v == 512,
        halves=True,
    )


def cluster_of(rows: int) -> int:
    """CTAs of a cluster: a pair has two tiles of rows, so that ragged batches have equal shares.

    With two tiles, pairs take 14 % less in a ragged batch, and 8 % more where lengths are equal.
    With four, they take 13 % more where lengths are equal.
    """
    tiles = -(-rows // TILE_M)
    return 2 if tiles == 2 else 1
