"""Tuning of the token-by-token KDA kernels, measured against `candidate_configs` on an H100.

One rule holds for every batch size, so that the kernel does not change as a batch grows. The rule
sets how many values of the state a thread holds:

    one token a call      16: a warp reduces 4 rows of V at once, and 5 CTAs fit an SM. 32 with a
                          convolution, whose windows fewer warps then read
    several tokens        32: rows share the reads of k, q and decay
    V contiguous          64 at most: a warp has 64 bytes of each of the K rows. 128 if a warp would
                          otherwise have less than a sector of 32 bytes, except with records, where
                          ptxas would spill

L2 holds the lines of a state that is updated in place from load to store
(docs/kernels/kda_decode.md).
"""

from __future__ import annotations

from math import gcd
from typing import Any

from ...common.spec import VECTOR_BYTES, WARP_SIZE

TILE = 4096  # values of the state that a CTA holds, with K contiguous
MAX_WARPS_V_CONTIGUOUS = 4
MAX_VALUES_V_CONTIGUOUS = 64
# CTAs of an SM; without a bound, a convolution takes registers for 4. K = 256 would spill.
OCCUPANCY = 5


def step_config(
    *,
    state_dtype: str,
    head_dim_k: int,
    head_dim_v: int,
    state_v_first: bool,
    multi_token: bool,
    in_place: bool,
    records: bool = False,
    convolution: bool = False,
) -> dict[str, Any]:
    """The tuning fields of a StepSpec for these tensors. With `in_place`, the kernel stores the
    state where it loaded it; with `records`, the kernel first replays recorded tokens."""
    # Without a register bound, ptxas spills in the loop over tokens to gain occupancy.
    blocks_per_sm = 1 if multi_token else 0
    if convolution and state_v_first and head_dim_k <= 128 and not multi_token:
        blocks_per_sm = OCCUPANCY
    vector = VECTOR_BYTES // (4 if state_dtype == "float32" else 2)
    if state_v_first:
        tile_v = min(head_dim_v, TILE // head_dim_k)
        values = 32 if multi_token or convolution else 16
        num_warps = tile_v * head_dim_k // (values * WARP_SIZE)
        lanes_per_row = min(WARP_SIZE, head_dim_k // vector)
    else:
        lanes_per_row, max_warps = 4, MAX_WARPS_V_CONTIGUOUS
        while head_dim_k * lanes_per_row * vector > MAX_VALUES_V_CONTIGUOUS * WARP_SIZE:
            if lanes_per_row == 2:  # a 32-byte sector is the smallest access
                if not records:
                    break
                max_warps *= 2  # two warps share a sector
            lanes_per_row //= 2
        num_warps = gcd(max_warps, head_dim_v // (lanes_per_row * vector))
        tile_v = num_warps * lanes_per_row * vector
    return {
        "tile_v": tile_v,
        "num_warps": num_warps,
        "lanes_per_row": lanes_per_row,
        "blocks_per_sm": blocks_per_sm,
        "hints": "hold" if in_place else "none",
    }


def candidate_configs() -> list[dict[str, Any]]:
    """Tunings to measure for one token a call, K = V = 128, a float32 state with K contiguous."""
    return [{"hints": "none"}] + [
        {
            "tile_v": tile_v,
            "num_warps": num_warps,
            "lanes_per_row": lanes,
            "blocks_per_sm": blocks_per_sm,
        }
        for tile_v, num_warps, lanes, blocks_per_sm in (
            (32, 16, 32, 4),
            (32, 8, 32, 6),
            (32, 8, 16, 0),
            (32, 4, 32, 0),
            (16, 8, 32, 8),
            (16, 4, 32, 0),
            (8, 2, 32, 0),
            (64, 32, 32, 2),
            (64, 16, 32, 0),
            (64, 8, 32, 0),
            (128, 32, 32, 0),
        )
    ]
