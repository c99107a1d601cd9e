"""Tuning of the Lightning decode kernel. The measurements are in docs/log/lightning_decode.md;
`python -m cute_attn.bench lightning-decode --variants` repeats them.

The same rule holds for every batch size, so that the kernel does not change as a batch grows. It
sets how many 16-byte vectors of the state a thread holds:

    one token a call      2    at most 32 registers, so that an SM holds its full 2048 threads
    few SMs (H20)         4    each SM must keep more bytes in flight
    several tokens        8    rows share loads of q and k, and arithmetic is no longer free
                          (4 for a bfloat16 state, whose vectors have twice as many elements)

L2 holds the state's lines from load to store.
"""

from __future__ import annotations

from typing import Any

from ..common.spec import VECTOR_BYTES, WARP_SIZE
from .spec import HINTS, PIPELINES

TILE_BYTES = 16 * 1024  # a CTA's tile of a float32 state in layout "vk"
TILE_V_KV = 64  # columns of a tile in layout "kv": rows are whole 128-byte lines
MAX_WARPS = 32
FEW_SMS = 100  # an H20 has the bandwidth of an H200, but 78 SMs rather than 132


def decode_config(
    *,
    state_dtype: str,
    head_dim_k: int,
    head_dim_v: int,
    state_layout: str,
    multi_token: bool,
    num_sms: int,
) -> dict[str, Any]:
    """The tuning fields of a DecodeSpec for these tensors on a GPU with `num_sms` SMs."""
    vector = VECTOR_BYTES // (4 if state_dtype == "float32" else 2)
    few_sms = num_sms < FEW_SMS and not multi_token
    vectors = 32 // vector if multi_token else 4 if few_sms else 2
    if state_layout == "vk":
        row_vectors = head_dim_k // vector
        lanes_per_row = min(WARP_SIZE, row_vectors // 2 if few_sms else row_vectors)
        tile_v = min(head_dim_v, TILE_BYTES // 4 // head_dim_k)
    else:
        tile_v = TILE_V_KV
        lanes_per_row = tile_v // vector
    accesses = tile_v * head_dim_k // (vector * WARP_SIZE)  # of one warp each
    return {
        "tile_v": tile_v,
        "num_warps": min(MAX_WARPS, max(1, accesses // vectors)),
        "lanes_per_row": lanes_per_row,
        "hints": "hold",
    }


def candidate_configs(head_dim_k: int = 128) -> list[dict[str, Any]]:
    """Tunings to measure for a float32 state in layout "vk": those with "num_stages" are of the
    pipelined kernel, the others of the register kernel."""
    lanes = min(WARP_SIZE, head_dim_k // 4)
    register: list[dict[str, Any]] = [
        {"tile_v": tile_v, "num_warps": num_warps, "lanes_per_row": lanes_per_row}
        for tile_v, num_warps, lanes_per_row in (
            (4, 1, lanes),
            (16, 4, lanes),
            (16, 8, lanes),
            (32, 4, lanes),
            (32, 8, lanes),
            (32, 8, lanes // 2),
            (32, 16, lanes),
            (32, 16, lanes // 2),
            (64, 8, lanes),
            (64, 16, lanes),
            (64, 32, lanes),
        )
    ]
    register = [
        config | {"hints": hints}
        for hints in HINTS
        for config in register
        if hints != "streaming" or config["tile_v"] == 32
    ]
    pipelined = [
        {
            "tile_v": tile_v,
            "num_warps": num_warps,
            "num_stages": num_stages,
            "lanes_per_row": lanes,
            "load": load,
            "write_back": write_back,
        }
        for load, write_back in PIPELINES
        for tile_v, num_warps, num_stages in (
            (4, 16, 3),
            (8, 4, 4),
            (8, 8, 3),
            (16, 4, 3),
            (32, 4, 3),
        )
    ]
    return register + [config | {"hints": "none"} for config in pipelined]
