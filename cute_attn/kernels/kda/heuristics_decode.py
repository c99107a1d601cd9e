"""Which tuning the KDA kernels that go token by token get."""

from __future__ import annotations

from typing import Any

from ..common.spec import WARP_SIZE
from .spec_decode import VECTOR_BYTES

TILE_BYTES = 16 * 1024  # of the state in float32, to a block
MAX_WARPS = 32
SECTOR_BYTES = 32  # what a warp has of a row of V at least, where rows are along V


def step_config(
    *,
    state_dtype: str,
    head_dim_k: int,
    head_dim_v: int,
    state_v_first: bool,
    multi_token: bool,
) -> dict[str, Any]:
    """The tuning fields of a StepSpec for these tensors."""
    vector = VECTOR_BYTES // (4 if state_dtype == "float32" else 2)
    tile_v = min(head_dim_v, TILE_BYTES // 4 // head_dim_k)
    if not state_v_first:
        lanes_per_row = SECTOR_BYTES // VECTOR_BYTES
        tile_v = max(tile_v, vector * lanes_per_row)
        return {
            "tile_v": tile_v,
            "num_warps": tile_v // (vector * lanes_per_row),
            "lanes_per_row": lanes_per_row,
            "blocks_per_sm": 0,
        }
    vectors = 32 // vector if multi_token else 2  # that a thread holds
    accesses = tile_v * head_dim_k // (vector * WARP_SIZE)  # of one warp each
    return {
        "tile_v": tile_v,
        "num_warps": min(MAX_WARPS, max(1, accesses // vectors)),
        "lanes_per_row": min(WARP_SIZE, head_dim_k // vector),
        "blocks_per_sm": 0,
    }
