"""Which tuning the KDA kernels that go token by token get.

One rule serves every batch size, so that no dispatch switches as a batch grows. As in Lightning
decode, a copy wants many threads with a few loads each in flight:

    one token a call      2 vectors of 16 bytes a thread, and as few registers as a full SM takes
    several tokens        8 (4 for a bfloat16 state): rows share the reads of k, q and decay, and a
                          reduction over K serves several rows at once
"""

from __future__ import annotations

from typing import Any

from ..common.spec import WARP_SIZE
from .spec_decode import VECTOR_BYTES

TILE_BYTES = 16 * 1024  # of the state in float32, to a block
MAX_WARPS = 32
SECTOR_BYTES = 32  # what a warp has of a row of V at least, where rows are along V
FEWER_THREADS = ("sm_86", "sm_87", "sm_89", "sm_12")  # 1536 an SM rather than 2048
FULL_SM_VALUES = 8  # of the state in float32: with so many a thread has no more than 32 registers


def step_config(
    *,
    arch: str,
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
    num_warps = min(MAX_WARPS, max(1, accesses // vectors))
    threads = 1536 if arch.startswith(FEWER_THREADS) else 2048
    full_sm = vector * vectors <= FULL_SM_VALUES and head_dim_k <= 128
    return {
        "tile_v": tile_v,
        "num_warps": num_warps,
        "lanes_per_row": min(WARP_SIZE, head_dim_k // vector),
        "blocks_per_sm": threads // (num_warps * WARP_SIZE) if full_sm else 0,
    }


def candidate_configs() -> list[dict[str, Any]]:
    """Tunings worth measuring against each other for one token a call, K = V = 128, and a float32
    state with K contiguous."""
    return [
        {
            "tile_v": tile_v,
            "num_warps": num_warps,
            "lanes_per_row": lanes,
            "blocks_per_sm": blocks_per_sm,
        }
        for tile_v, num_warps, lanes, blocks_per_sm in (
            (32, 16, 32, 4),
            (32, 16, 32, 0),
            (32, 8, 32, 6),
            (32, 8, 32, 0),
            (32, 8, 16, 0),
            (32, 4, 32, 0),
            (32, 4, 8, 0),
            (16, 8, 32, 8),
            (16, 8, 32, 0),
            (16, 4, 32, 0),
            (64, 32, 32, 2),
            (64, 16, 32, 3),
            (8, 4, 32, 16),
            (128, 32, 32, 0),
        )
    ]
