"""A good call of chunk_gated_delta_rule, and of its form with a pool."""

from __future__ import annotations

from typing import Any

import torch

import cute_attn
from tests.ops import kda_calls
from tests.ops.calls import Operator, values


def of_heads(given: dict[str, Any]) -> dict[str, Any]:
    """A call of chunk_kda with one gate a head."""
    return given | {
        "g": values(1, 5, 4, dtype=torch.float32) - 1,
        "dt_bias": values(4, dtype=torch.float32),
    }


def sequences() -> dict[str, Any]:
    return of_heads(kda_calls.sequences()) | {"cu_seqlens_cpu": torch.tensor([0, 2, 5])}


CHUNKS = {
    "chunk_gated_delta_rule": Operator(
        cute_attn.chunk_gated_delta_rule, sequences, differentiable=True
    ),
    "chunk_gated_delta_rule_in_pool": Operator(
        cute_attn.chunk_gated_delta_rule,
        lambda: of_heads(kda_calls.in_pool()),
        written=("initial_state", "out"),
    ),
}
