"""Tuning of the kernels of multi-head latent attention.

A CTA has as many tiles of the cache in shared memory as fit beside Q and P. A piece has at least
LEAST_KEY_TILES tiles of the cache, because each piece stores its result and is added up.
"""

from __future__ import annotations

import math
from typing import Any

from .spec import TILE_M, TILE_N, LatentDecodeSpec, LatentSpec, LatentTurnsSpec

LEAST_KEY_TILES = 2
STAGES = {576: 2, 512: 2, 320: 4}
CHUNKS = 4
# A cut costs about so many tiles: a float32 result is written and read again.
SLACK, SLACK_OF_MANY = 3, 12
HELD = 1
ROPE_APART = False
RELEASED_AT = 16


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
    many = rows > TILE_M
    of_all: dict[str, Any] = {
        "dtype": dtype,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "causal": causal,
        "page_rows": math.gcd(page_size, TILE_N),
        "lse": lse,
        "chunks": CHUNKS,
        "least_key_tiles": LEAST_KEY_TILES,
        "slack": SLACK_OF_MANY if many else SLACK,
    }
    # A tile of 64 rows waits for memory, several tiles for the tensor cores.
    if many and head_dim_v == 512:
        return LatentTurnsSpec(
            **of_all,
            held=HELD,
            rope_apart=ROPE_APART,
            released_at=RELEASED_AT,
        )
    return LatentDecodeSpec(
        **of_all,
        stages=STAGES.get(head_dim, 2),
        # Chunks of columns are those of the outputs' warpgroups.
        early=head_dim_v == 512,
        halves=True,
    )
