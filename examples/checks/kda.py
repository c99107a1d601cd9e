"""Kimi Delta Attention: prefill, gradients, token by token, and decode in a pool of states."""

from __future__ import annotations

import torch
from checks.common import HEAD_DIM, SLOTS, Check, Errors, relative_errors

import cute_attn
from cute_attn.reference.kda import (
    kda_chunk_gradients,
    kda_chunk_reference,
    kda_decode_reference,
    kda_gradients,
    kda_reference,
)


def kda_inputs(device: str, heads: int, *rows: int) -> dict[str, torch.Tensor]:
    """Two value heads for each head of q and k; the kernels apply gate, norm and sigmoid."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*rows, *shape, device=device).to(torch.bfloat16)

    return {
        "q": normal(heads, HEAD_DIM),
        "k": normal(heads, HEAD_DIM),
        "v": normal(2 * heads, HEAD_DIM),
        "g": normal(2 * heads, HEAD_DIM),
        "beta": normal(2 * heads),
        "A_log": torch.rand(2 * heads, device=device),
        "dt_bias": -4 * torch.rand(2 * heads * HEAD_DIM, device=device),
    }


def kda_prefill(device: str, heads: int) -> Errors:
    """Three packed sequences; `plain` is the chunked formula with bfloat16 between its stages."""
    call = kda_inputs(device, max(1, heads // 2), 1, 150) | {
        "lower_bound": -5.0,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "cu_seqlens": torch.tensor([0, 70, 71, 150], device=device),
    }
    o, state = cute_attn.chunk_kda(**call, output_final_state=True)
    exact = kda_chunk_reference(**call)
    plain = kda_chunk_reference(**call, dtype=torch.float32, stage_dtype=torch.bfloat16)
    exact_state, plain_state = exact.states.final_state, plain.states.final_state
    return relative_errors(
        o=(o, plain.o.to(o.dtype), exact.o), state=(state, plain_state, exact_state)
    )


def kda_backward(device: str, heads: int) -> Errors:
    """The gradients of one sequence; `plain` is the chunked formula as above."""
    inputs = kda_inputs(device, max(1, heads // 2), 1, 70)
    do = torch.randn_like(inputs["v"])
    call = inputs | {
        "lower_bound": -5.0,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    names = ("q", "k", "v", "g", "beta")
    leaves = {name: inputs[name].detach().requires_grad_() for name in names}
    o, _ = cute_attn.chunk_kda(**call | leaves)
    gradients = torch.autograd.grad(o, list(leaves.values()), do)
    exact = kda_gradients(**call, do=do)
    plain = kda_chunk_gradients(**call, do=do, dtype=torch.float32, stage_dtype=torch.bfloat16)
    return relative_errors(
        **{
            f"d{name}": (
                found,
                getattr(plain, f"d{name}").to(found.dtype),
                getattr(exact, f"d{name}"),
            )
            for name, found in zip(names, gradients, strict=True)
        }
    )


def kda_recurrent(device: str, heads: int) -> Errors:
    """Two short sequences, token by token; `plain` is the formula in PyTorch float32."""
    call = kda_inputs(device, max(1, heads // 2), 1, 7) | {
        "lower_bound": -5.0,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "cu_seqlens": torch.tensor([0, 5, 7], device=device),
    }
    o, state = cute_attn.fused_recurrent_kda(**call, output_final_state=True)
    exact, plain = kda_reference(**call), kda_reference(**call, dtype=torch.float32)
    return relative_errors(
        o=(o, plain.o.to(o.dtype), exact.o),
        state=(state, plain.final_state, exact.final_state),
    )


def kda_decode(device: str, heads: int) -> Errors:
    """One token; `plain` is the formula in PyTorch float32."""
    heads = max(1, heads // 2)
    slots = torch.randperm(SLOTS, device=device)[:8].to(torch.int32)
    slots[0] = -1  # a padded row
    state = torch.randn(SLOTS, 2 * heads, HEAD_DIM, HEAD_DIM, device=device)
    call = kda_inputs(device, heads, 8) | {"state_indices": slots, "lower_bound": -5.0}
    exact = kda_decode_reference(**call, state=state)
    plain = kda_decode_reference(**call, state=state, dtype=torch.float32)
    o = cute_attn.kda_decode(**call, state=state)
    return relative_errors(
        o=(o, plain.o.to(o.dtype), exact.o), state=(state, plain.state, exact.state)
    )


CHECKS = {
    "KDA, prefill": Check(kda_prefill),
    "KDA, gradients": Check(kda_backward),
    "KDA, recurrent": Check(kda_recurrent),
    "KDA, decode": Check(kda_decode),
}
