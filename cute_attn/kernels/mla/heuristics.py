"""Tuning of the kernels of multi-head latent attention.

A CTA has as many tiles of the cache in shared memory as fit beside Q and P. A piece has at least
LEAST_KEY_TILES tiles of the cache, because each piece stores its result and is added up.
"""

from __future__ import annotations

import math
from typing import Any

from .spec import GATHERED, TILE_M, TILE_N, LatentDecodeSpec, LatentSpec, LatentTurnsSpec

LEAST_KEY_TILES = 2
LEAST_BOX_ROWS = 16  # of TMA's boxes; pages that no such box divides are gathered
STAGES = {576: 2, 512: 2, 320: 4}
# Beside tiles of fp8, one tile of 576 columns fits.
STAGES_WITH_FP8, LOADED = {576: 1, 512: 1, 320: 2}, 2
CHUNKS = 4
# A cut costs about so many tiles: a float32 result is written and read again.
SLACK, SLACK_OF_MANY = 3, 12
AHEAD = 1
PARTS = 1
PREFETCH = 0
HELD = 1


def page_rows(page_size: int) -> int:
    """Rows of TMA's boxes, which divide a page and a tile, or GATHERED if these would be few."""
    rows = math.gcd(page_size, TILE_N)
    return rows if rows >= LEAST_BOX_ROWS else GATHERED


def latent_decode_spec(
    *,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    rows: int,
    causal: bool,
    page_size: int,
    lse: bool,
    fp8: str = "none",
    descale: bool = False,
) -> LatentSpec:
    """The specialisation of a decode kernel, for `rows` pairs of a query and a head. `fp8` is the
    cache's dtype if it is fp8."""
    many = rows > TILE_M
    of_all: dict[str, Any] = {
        "dtype": dtype,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "causal": causal,
        "page_rows": page_rows(page_size),
        "lse": lse,
        "chunks": CHUNKS,
        "least_key_tiles": LEAST_KEY_TILES,
        "slack": SLACK_OF_MANY if many else SLACK,
    }
    if fp8 != "none":
        of_all["page_rows"] = GATHERED
        return LatentDecodeSpec(
            **of_all,
            stages=STAGES_WITH_FP8.get(head_dim, 1),
            early=head_dim_v == 512,
            halves=True,
            fp8=fp8,
            descale=descale,
            loaded=LOADED,
        )
    # A tile of 64 rows waits for memory, several tiles for the tensor cores.
    if many and head_dim_v == 512:
        return LatentTurnsSpec(
            **of_all,
            ahead=AHEAD,
            parts=PARTS,
            prefetch=PREFETCH,
            held=HELD,
        )
    return LatentDecodeSpec(
        **of_all,
        stages=STAGES.get(head_dim, 2),
        # Chunks of columns are those of the outputs' warpgroups.
        early=head_dim_v == 512,
        halves=True,
    )
