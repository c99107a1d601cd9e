"""Softmax attention, forward and backward, packed, over pages and in parts."""

from __future__ import annotations

from functools import partial

import torch
from checks.common import BLACKWELL, HEAD_DIM, HOPPER, Check, Errors, relative_errors

import cute_attn
from cute_attn.reference.attention import (
    attention_gradients,
    attention_gradients_in_low_precision,
    attention_in_low_precision,
    attention_reference,
)


def attention(head_dim: int, device: str, heads: int) -> Errors:
    """Causal, GQA, and the gradients; `plain` is PyTorch with products of bfloat16."""
    group = heads // 2 + 1
    q, k, v = (
        torch.randn(1, rows, heads, head_dim, device=device).to(torch.bfloat16)
        for rows, heads in ((70, group), (130, 1), (130, 1))
    )
    do = torch.randn_like(q)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, _ = cute_attn.flash_attn_func(*leaves, causal=True)
    gradients = torch.autograd.grad(o, leaves, do)
    exact, _ = attention_reference(q, k, v, causal=True)
    plain, _ = attention_in_low_precision(q, k, v, causal=True)
    exact_gradients = attention_gradients(q, k, v, do, causal=True)
    plain_gradients = attention_gradients_in_low_precision(q, k, v, do, causal=True)
    return relative_errors(
        o=(o, plain, exact),
        dq=(gradients[0], plain_gradients.dq, exact_gradients.dq),
        dk=(gradients[1], plain_gradients.dk, exact_gradients.dk),
        dv=(gradients[2], plain_gradients.dv, exact_gradients.dv),
    )


def packed_attention(head_dim: int, device: str, heads: int) -> Errors:
    """Three packed sequences with a sliding window; `plain` is as above."""
    q, k, v = (
        torch.randn(150, n, head_dim, device=device).to(torch.bfloat16) for n in (heads, 1, 1)
    )
    cu_seqlens = torch.tensor([0, 70, 71, 150], device=device, dtype=torch.int32)
    call = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "window_size": (40, 0)}
    exact, _ = attention_reference(q, k, v, **call)
    plain, _ = attention_in_low_precision(q, k, v, **call)
    o, _ = cute_attn.flash_attn_varlen_func(q, k, v, **call, max_seqlen_q=79, max_seqlen_k=79)
    return relative_errors(o=(o, plain, exact))


def paged_attention(head_dim: int, device: str, heads: int) -> Errors:
    """One new token of each of three sequences, whose K and V are in pages of a pool; `plain` is
    as above."""
    sequences, page_size, pages = 3, 16, 5
    lengths = torch.tensor([80, 17, 1], device=device, dtype=torch.int32)
    q = torch.randn(sequences, heads, head_dim, device=device).to(torch.bfloat16)
    pool = torch.randn(2, 2 * sequences * pages, page_size, 1, head_dim, device=device)
    k_pool, v_pool = pool.to(torch.bfloat16)
    table = torch.randperm(len(k_pool), device=device)[: sequences * pages].view(sequences, pages)
    k, v = (x[table].view(sequences, pages * page_size, 1, head_dim) for x in (k_pool, v_pool))
    exact, _ = attention_reference(q[:, None], k, v, seqused_k=lengths)
    plain, _ = attention_in_low_precision(q[:, None], k, v, seqused_k=lengths)
    o, _ = cute_attn.flash_attn_varlen_func(
        q,
        k_pool,
        v_pool,
        cu_seqlens_q=torch.arange(sequences + 1, device=device, dtype=torch.int32),
        max_seqlen_q=1,
        seqused_k=lengths,
        page_table=table.to(torch.int32),
    )
    return relative_errors(o=(o, plain[:, 0], exact[:, 0]))


def combination(device: str, heads: int) -> Errors:
    """Three parts of the keys; `plain` is the formula in PyTorch float32."""
    o = torch.randn(3, 2, 9, heads, HEAD_DIM, device=device)
    lse = torch.randn(3, 2, 9, heads, device=device)
    exact, plain = (
        ((lse.to(dtype) - lse.to(dtype).logsumexp(0)).exp()[..., None] * o.to(dtype)).sum(0)
        for dtype in (torch.float64, torch.float32)
    )
    out, _ = cute_attn.flash_attn_combine(o, lse)
    return relative_errors(out=(out, plain, exact))


CHECKS = {
    "Softmax attention, head_dim 64": Check(partial(attention, 64), HOPPER, HOPPER),
    "Softmax attention, head_dim 128": Check(partial(attention, 128), HOPPER, HOPPER),
    "Softmax attention, head_dim 256": Check(partial(attention, 256), HOPPER + BLACKWELL),
    "Softmax attention, packed, head_dim 128": Check(
        partial(packed_attention, 128), HOPPER, HOPPER
    ),
    "Softmax attention, packed, head_dim 256": Check(
        partial(packed_attention, 256), HOPPER + BLACKWELL, BLACKWELL[:1]
    ),
    "Softmax attention, pages, head_dim 128": Check(partial(paged_attention, 128), HOPPER, HOPPER),
    "Softmax attention, pages, head_dim 256": Check(
        partial(paged_attention, 256), HOPPER + BLACKWELL, BLACKWELL[:1]
    ),
    "Softmax attention, parts combined": Check(combination),
}
