"""Softmax attention on GPUs other than sm_90 and sm_100, for `test_other_gpus`."""

from __future__ import annotations

import torch

import cute_attn
from cute_attn.reference.attention import (
    attention_gradients,
    attention_gradients_in_low_precision,
    attention_in_low_precision,
    attention_reference,
)

from . import kda_cases
from .calls import OTHER_ARCHS, ArchCall


def flash_attn_func() -> None:
    """Forward and backward, causal, GQA."""
    q, k, v = (torch.randn(1, 130, n, 256).to(torch.bfloat16) for n in (2, 1, 1))
    do = torch.randn_like(q)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, _ = cute_attn.flash_attn_func(*leaves, causal=True)
    found = torch.autograd.grad(o, leaves, do)
    exact = attention_reference(q, k, v, causal=True)[0].detach()
    plain = attention_in_low_precision(q, k, v, causal=True)[0].detach()
    kda_cases.assert_no_worse(o.detach(), plain, exact, "o")
    exact_gradients = attention_gradients(q, k, v, do, causal=True)
    plain_gradients = attention_gradients_in_low_precision(q, k, v, do, causal=True)
    for name, ours in zip(("dq", "dk", "dv"), found, strict=True):
        theirs, true = (getattr(x, name) for x in (plain_gradients, exact_gradients))
        kda_cases.assert_no_worse(ours, theirs.detach(), true, name)


def flash_attn_combine() -> None:
    o, lse = torch.randn(3, 2, 9, 2, 128), torch.randn(3, 2, 9, 2)
    exact, plain = (
        ((lse.to(dtype) - lse.to(dtype).logsumexp(0)).exp()[..., None] * o.to(dtype)).sum(0)
        for dtype in (torch.float64, torch.float32)
    )
    out, _ = cute_attn.flash_attn_combine(o, lse)
    kda_cases.assert_no_worse(out, plain, exact)


BOTH_WAYS = (("flash_attn_func", "forward"), ("flash_attn_func", "backward"))

CALLS = {
    "flash_attn_combine": ArchCall(
        flash_attn_combine, covers=(("flash_attn_combine", "forward"),), quick=("sm_86",)
    ),
    "flash_attn_func": ArchCall(
        flash_attn_func,
        covers=BOTH_WAYS,
        refused=tuple(arch for arch in OTHER_ARCHS if arch != "sm_103a"),
    ),
}
