"""The Gated Delta Net: token by token, and decode with the causal convolution."""

from __future__ import annotations

import torch
from checks.common import HEAD_DIM, SLOTS, Check, Errors, relative_errors

import cute_attn
from cute_attn.reference.gated_delta_rule import (
    gated_delta_rule_chunk_gradients,
    gated_delta_rule_chunk_reference,
    gated_delta_rule_decode_reference,
    gated_delta_rule_gradients,
    gated_delta_rule_reference,
)


def gdn_inputs(device: str, heads: int, *rows: int) -> dict[str, torch.Tensor]:
    """Two value heads for each head of q and k; the kernels apply gate, norm and sigmoid."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*rows, *shape, device=device).to(torch.bfloat16)

    return {
        "q": normal(heads, HEAD_DIM),
        "k": normal(heads, HEAD_DIM),
        "v": normal(2 * heads, HEAD_DIM),
        "g": normal(2 * heads),
        "beta": normal(2 * heads),
        "A_log": torch.rand(2 * heads, device=device),
        "dt_bias": -4 * torch.rand(2 * heads, device=device),
    }


def gdn_recurrent(device: str, heads: int) -> Errors:
    """Two short sequences, token by token; `plain` is the formula in PyTorch float32."""
    call = gdn_inputs(device, max(1, heads // 2), 1, 7) | {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "cu_seqlens": torch.tensor([0, 5, 7], device=device),
    }
    o, state = cute_attn.fused_recurrent_gated_delta_rule(**call, output_final_state=True)
    exact = gated_delta_rule_reference(**call)
    plain = gated_delta_rule_reference(**call, dtype=torch.float32)
    return relative_errors(
        o=(o, plain.o.to(o.dtype), exact.o),
        state=(state, plain.final_state, exact.final_state),
    )


def gdn_decode(device: str, heads: int) -> Errors:
    """One token through convolution and delta rule; `plain` is the formula in PyTorch float32."""
    heads = max(1, heads // 2)
    slots = torch.randperm(SLOTS, device=device)[:8].to(torch.int32)
    slots[0] = -1  # a padded row
    call = gdn_inputs(device, heads, 8)
    state = torch.randn(SLOTS, 2 * heads, HEAD_DIM, HEAD_DIM, device=device)
    channels = 4 * heads * HEAD_DIM
    windows = torch.randn(SLOTS, channels, 3, device=device).to(torch.bfloat16)
    weight = torch.randn(channels, 4, device=device).to(torch.bfloat16)
    call |= {"state_indices": slots, "conv_state": windows, "conv_weight": weight}
    results = {}
    for dtype in (torch.float64, torch.float32):
        results[dtype] = gated_delta_rule_decode_reference(**call, state=state, dtype=dtype)
    exact, plain = results[torch.float64], results[torch.float32]
    o = cute_attn.gated_delta_rule_decode(**call, state=state)
    return relative_errors(
        o=(o, plain.o.to(o.dtype), exact.o), state=(state, plain.state, exact.state)
    )


IN_KERNEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
PLAIN = {"dtype": torch.float32, "stage_dtype": torch.bfloat16}


def gdn_prefill(device: str, heads: int) -> Errors:
    """Three packed sequences; `plain` is the chunked formula with bfloat16 between its stages."""
    call = gdn_inputs(device, max(1, heads // 2), 1, 150) | IN_KERNEL
    call |= {"cu_seqlens": torch.tensor([0, 70, 71, 150], device=device)}
    o, state = cute_attn.chunk_gated_delta_rule(**call, output_final_state=True)
    exact, plain = (gated_delta_rule_chunk_reference(**call, **options) for options in ({}, PLAIN))
    exact_state, plain_state = exact.states.final_state, plain.states.final_state
    return relative_errors(
        o=(o, plain.o.to(o.dtype), exact.o), state=(state, plain_state, exact_state)
    )


def gdn_backward(device: str, heads: int) -> Errors:
    """The gradients of one sequence; `plain` is the chunked formula as above."""
    inputs = gdn_inputs(device, max(1, heads // 2), 1, 70)
    do = torch.randn_like(inputs["v"])
    call = inputs | IN_KERNEL
    names = ("q", "k", "v", "g", "beta")
    leaves = {name: inputs[name].detach().requires_grad_() for name in names}
    o, _ = cute_attn.chunk_gated_delta_rule(**call | leaves)
    gradients = torch.autograd.grad(o, list(leaves.values()), do)
    exact = gated_delta_rule_gradients(**call, do=do)
    plain = gated_delta_rule_chunk_gradients(**call, do=do, **PLAIN)
    found = {f"d{name}": x for name, x in zip(names, gradients, strict=True)}
    return relative_errors(
        **{
            name: (x, getattr(plain, name).to(x.dtype), getattr(exact, name))
            for name, x in found.items()
        }
    )


CHECKS = {
    "Gated Delta Net, prefill": Check(gdn_prefill),
    "Gated Delta Net, gradients": Check(gdn_backward),
    "Gated Delta Net, recurrent": Check(gdn_recurrent),
    "Gated Delta Net, decode": Check(gdn_decode),
}
