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
# Tiles of 64 rows of all sequences, from which on two warpgroups take turns: an H100 has as many
# SMs. With fewer tiles, scores by warps of their own take 1 to 6 % less time.
FEWEST_TILES = 132


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
    sequences: int | None = None,
    causal: bool,
    page_size: int,
    lse: bool,
    fp8: str = "none",
    descale: bool = False,
) -> LatentSpec:
    """The specialisation of a decode kernel.

    Args:
        rows: pairs of a query and a head of a sequence.
        sequences: where the kernel may depend on the number of sequences, this number.
        fp8: the cache's dtype if it is fp8.
        descale: whether an argument has the factor of an fp8 cache.
    """
    blocks = -(-rows // TILE_M)
    many = sequences is None or sequences * blocks >= FEWEST_TILES
    of_all: dict[str, Any] = {
        "dtype": dtype,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "causal": causal,
        "page_rows": page_rows(page_size),
        "lse": lse,
        "chunks": CHUNKS,
        "least_key_tiles": LEAST_KEY_TILES,
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
    if blocks > 1 and many and head_dim_v == 512:
        return LatentTurnsSpec(**of_all)
    return LatentDecodeSpec(
        **of_all,
        stages=STAGES.get(head_dim, 2),
        # Chunks of columns are those of the outputs' warpgroups.
        early=head_dim_v == 512,
        halves=True,
    )
