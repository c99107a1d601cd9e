"""A good call of every KDA operator, and of the stages."""

from __future__ import annotations

from typing import Any

import torch

import cute_attn
from cute_attn.ops import kda
from tests.ops.calls import BF16, INT32, Operator, values


def decode() -> dict[str, Any]:
    return {
        "q": values(2, 2, 2, 64),
        "k": values(2, 2, 2, 64),
        "v": values(2, 2, 4, 64),
        "g": values(2, 2, 4, 64, dtype=torch.float32),
        "beta": values(2, 2, 4),
        "state": values(4, 4, 64, 64, dtype=torch.float32),
        "A_log": values(4, dtype=torch.float32),
        "dt_bias": values(4, 64, dtype=torch.float32),
        "out": torch.zeros(2, 2, 4, 64, dtype=BF16),
        "state_indices": torch.tensor([3, 0], dtype=INT32),
        "num_accepted_tokens": torch.tensor([1, 2], dtype=INT32),
        "record_k": values(4, 2, 2, 64),
        "record_g": values(4, 2, 4, 64, dtype=torch.float32),
        "record_u": values(4, 2, 4, 64, dtype=torch.float32),
        "has_initial_state": torch.tensor([True, False]),
    }


def tokens() -> dict[str, Any]:
    return {
        "q": values(1, 5, 2, 64),
        "k": values(1, 5, 2, 64),
        "v": values(1, 5, 4, 64),
        "g": values(1, 5, 4, 64, dtype=torch.float32) - 1,
        "beta": values(1, 5, 4),
    }


def sequences() -> dict[str, Any]:
    return tokens() | {
        "initial_state": values(2, 4, 64, 64, dtype=torch.float32),
        "output_final_state": True,
        "use_gate_in_kernel": True,
        "A_log": values(4, dtype=torch.float32),
        "dt_bias": values(4, 64, dtype=torch.float32),
        "cu_seqlens": torch.tensor([0, 2, 5]),
    }


def in_pool() -> dict[str, Any]:
    given = sequences()
    del given["output_final_state"]
    return given | {
        "initial_state": values(4, 4, 64, 64, dtype=torch.float32),
        "state_indices": torch.tensor([3, 0], dtype=INT32),
        "checkpoint_indices": torch.tensor([[2], [-1]], dtype=INT32),
        "has_initial_state": torch.tensor([True, False]),
        "out": torch.zeros(1, 5, 4, 64, dtype=BF16),
    }


def gate() -> dict[str, Any]:
    given = sequences()
    names = ("g", "A_log", "dt_bias", "use_gate_in_kernel", "cu_seqlens")
    return {name: given[name] for name in names}


def intra() -> dict[str, Any]:
    return tokens() | {"cu_seqlens": torch.tensor([0, 2, 5])}


def recompute() -> dict[str, Any]:
    return intra() | {"Akk": values(1, 5, 4, 64)}


def delta_h() -> dict[str, Any]:
    given = sequences()
    return {
        "kg": values(1, 5, 4, 64),
        "w": values(1, 5, 4, 64),
        "u": values(1, 5, 4, 64),
        **{name: given[name] for name in ("g", "initial_state", "cu_seqlens")},
        "cu_seqlens_cpu": given["cu_seqlens"].clone(),
    }


def output() -> dict[str, Any]:
    given = sequences()
    return {
        **{name: given[name] for name in ("q", "g", "cu_seqlens")},
        "v_new": values(1, 5, 4, 64),
        "Aqk": values(1, 5, 4, 64),
        "h": values(1, 2, 4, 64, 64),
    }


def float32s(*names: str) -> dict[str, Any]:
    """Gradients of `[1, 5, 4, 64]`."""
    return {name: values(1, 5, 4, 64, dtype=torch.float32) for name in names}


def gate_backward() -> dict[str, Any]:
    return gate() | float32s("dg")


def intra_backward() -> dict[str, Any]:
    given = intra()
    del given["v"]
    found = given | float32s("dAqk", "dAkk", "dq", "dk", "dg")
    return found | {"dbeta": values(1, 5, 4, dtype=torch.float32)}


def recompute_backward() -> dict[str, Any]:
    return recompute() | {
        **{name: values(1, 5, 4, 64) for name in ("v_new", "do", "dv")},
        **{name: values(1, 2, 4, 64, 64) for name in ("h", "dh")},
    }


def delta_h_backward() -> dict[str, Any]:
    given = delta_h()
    del given["u"]
    given["dfinal_state"] = given.pop("initial_state")
    return given | {name: values(1, 5, 4, 64) for name in ("qg", "do", "dv")}


def output_backward() -> dict[str, Any]:
    given = output()
    names = ("v_new", "Aqk", "cu_seqlens")
    return {name: given[name] for name in names} | {"do": values(1, 5, 4, 64), "scale": 0.5}


OPERATORS = {
    "kda_decode": Operator(
        cute_attn.kda_decode,
        decode,
        written=("state", "out", "record_k", "record_g", "record_u"),
        pools=("state", "record_k", "record_g", "record_u"),
    ),
    "fused_recurrent_kda": Operator(cute_attn.fused_recurrent_kda, sequences),
    "chunk_kda": Operator(
        cute_attn.chunk_kda,
        lambda: sequences() | {"cu_seqlens_cpu": torch.tensor([0, 2, 5])},
        differentiable=True,
    ),
    "chunk_kda_in_pool": Operator(cute_attn.chunk_kda, in_pool, written=("initial_state", "out")),
    "kda_gate_cumsum": Operator(kda.kda_gate_cumsum, gate),
    "kda_chunk_intra": Operator(kda.kda_chunk_intra, intra),
    "kda_recompute_w_u": Operator(kda.kda_recompute_w_u, recompute),
    "kda_chunk_delta_h": Operator(kda.kda_chunk_delta_h, delta_h),
    "kda_chunk_output": Operator(kda.kda_chunk_output, output),
    "kda_chunk_output_backward": Operator(kda.kda_chunk_output_backward, output_backward),
    "kda_chunk_delta_h_backward": Operator(kda.kda_chunk_delta_h_backward, delta_h_backward),
    "kda_recompute_w_u_backward": Operator(kda.kda_recompute_w_u_backward, recompute_backward),
    "kda_chunk_intra_backward": Operator(kda.kda_chunk_intra_backward, intra_backward),
    "kda_gate_cumsum_backward": Operator(kda.kda_gate_cumsum_backward, gate_backward),
}
