"""A good call of each operator of multi-head latent attention."""

from __future__ import annotations

from typing import Any

import torch

import cute_attn
from tests.ops.calls import BF16, INT32, Operator, values


def decode() -> dict[str, Any]:
    return {
        "q_nope": values(2, 2, 3, 512),
        "q_rope": values(2, 2, 3, 64),
        "kv_cache": values(3, 16, 576),
        "block_table": torch.tensor([[0, 0], [1, 2]], dtype=INT32),
        "cache_seqlens": torch.tensor([5, 20], dtype=INT32),
        "softmax_scale": 0.1,
        "return_lse": True,
    }


def into() -> dict[str, Any]:
    given = decode() | {"out": torch.zeros(2, 2, 3, 512, dtype=BF16)}
    del given["return_lse"]
    return given


HOPPER: dict[str, Any] = {"majors": (9,)}

OPERATORS = {
    "mla_decode": Operator(cute_attn.mla_decode, decode, **HOPPER),
    "mla_decode_out": Operator(cute_attn.mla_decode, into, **HOPPER, written=("out",)),
}
