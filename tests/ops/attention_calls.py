"""A good call of every softmax attention operator."""

from __future__ import annotations

from typing import Any

import torch

import cute_attn
from tests.ops.calls import BF16, INT32, Operator, values


def dense() -> dict[str, Any]:
    return {
        "q": values(2, 3, 4, 256),
        "k": values(2, 5, 2, 256),
        "v": values(2, 5, 2, 256),
        "learnable_sink": values(4, dtype=torch.float32),
        "return_lse": True,
    }


def splits() -> dict[str, Any]:
    return {
        "out_partial": values(3, 2, 5, 4, 64, dtype=torch.float32),
        "lse_partial": values(3, 2, 5, 4, dtype=torch.float32),
    }


def varlen() -> dict[str, Any]:
    return {
        "q": values(6, 4, 256),
        "k": values(10, 2, 256),
        "v": values(10, 2, 256),
        "cu_seqlens_q": torch.tensor([0, 2, 6], dtype=INT32),
        "cu_seqlens_k": torch.tensor([0, 5, 10], dtype=INT32),
        "seqused_q": torch.tensor([2, 3], dtype=INT32),
        "seqused_k": torch.tensor([4, 5], dtype=INT32),
        "learnable_sink": values(4, dtype=torch.float32),
    }


def into() -> dict[str, Any]:
    return varlen() | {"out": torch.zeros(6, 4, 256, dtype=BF16)}


HEAD_DIM_256: dict[str, Any] = {"arch": "sm_100a", "majors": (9, 10)}

OPERATORS = {
    "flash_attn_func": Operator(
        cute_attn.flash_attn_func,
        dense,
        **HEAD_DIM_256,
        differentiable=True,
        registered="flash_attn",
    ),
    "flash_attn_varlen_func": Operator(
        cute_attn.flash_attn_varlen_func,
        varlen,
        **HEAD_DIM_256,
        differentiable=True,
        registered="flash_attn",
    ),
    "flash_attn_out": Operator(
        cute_attn.flash_attn_varlen_func, into, **HEAD_DIM_256, written=("out",)
    ),
    "flash_attn_combine": Operator(cute_attn.flash_attn_combine, splits),
}
