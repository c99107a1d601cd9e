"""What the naive functions of flash-linear-attention's KDA are given."""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.reference import kda

OF_PREPARATION = (
    "q", "k", "g", "beta", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "lower_bound", "A_log", "dt_bias",
)  # fmt: skip


def naive_inputs(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """q, k, v, g and beta in float32 from arguments of `chunk_kda`, whose norms, gate and sigmoid
    the naive functions do not know."""
    given = {name: arguments[name] for name in OF_PREPARATION if name in arguments}
    q, k, g, beta = kda.prepare(**given, dtype=torch.float32)
    return q, k, arguments["v"].float(), g, beta
