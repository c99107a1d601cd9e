"""A good call of Lightning Attention's operator."""

from __future__ import annotations

from typing import Any

import torch

import cute_attn
from tests.ops.calls import BF16, INT32, Operator, values


def decode() -> dict[str, Any]:
    return {
        "q": values(2, 2, 3, 64),
        "k": values(2, 2, 3, 64),
        "v": values(2, 2, 3, 64),
        "state": values(4, 3, 64, 64, dtype=torch.float32),
        "decay": values(3, dtype=torch.float32),
        "out": torch.zeros(2, 2, 3, 64, dtype=BF16),
        "state_indices": torch.tensor([3, 0], dtype=INT32),
        "num_accepted_tokens": torch.tensor([1, 2], dtype=INT32),
        "draft_k": values(4, 2, 3, 64),
        "draft_v": values(4, 2, 3, 64),
    }


OPERATORS = {
    "lightning_attn_decode": Operator(
        cute_attn.lightning_attn_decode,
        decode,
        written=("state", "out"),
        pools=("state", "draft_k", "draft_v"),
    ),
}
