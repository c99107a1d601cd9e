"""A good call of every operator of the Gated Delta Net."""

from __future__ import annotations

from typing import Any

import torch

import cute_attn
from tests.ops import kda_calls
from tests.ops.calls import INT32, Operator, values
from tests.ops.gated_delta_rule_chunk_calls import CHUNKS


def decode() -> dict[str, Any]:
    """With positions and a convolution, which do not go with records."""
    given = kda_calls.decode()
    for name in ("record_k", "record_g", "record_u"):
        del given[name]
    return given | {
        "g": values(2, 2, 4, dtype=torch.float32),
        "dt_bias": values(4, dtype=torch.float32),
        "state_indices": torch.tensor([[3, 1], [0, 2]], dtype=INT32),
        "conv_state": values(4, 512, 4),
        "conv_weight": values(512, 4),
        "conv_bias": values(512),
    }


def recurrent() -> dict[str, Any]:
    return kda_calls.sequences() | {
        "g": values(1, 5, 4, dtype=torch.float32),
        "dt_bias": values(4, dtype=torch.float32),
    }


OPERATORS = CHUNKS | {
    "gated_delta_rule_decode": Operator(
        cute_attn.gated_delta_rule_decode,
        decode,
        written=("state", "out", "conv_state"),
        pools=("state", "conv_state"),
    ),
    "fused_recurrent_gated_delta_rule": Operator(
        cute_attn.fused_recurrent_gated_delta_rule, recurrent
    ),
}
