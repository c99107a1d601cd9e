"""Calls of a few launches each, small enough for the emulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

SEED = 20261126
Call = Callable[[], Any]
Make = Callable[[torch.device], Call]


class _Random:
    """A stream of random numbers, the same on every device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(SEED)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)


def _attention(head_dim: int, heads: int, seqlen: int, causal: bool, device: torch.device) -> Call:
    from cute_attn import flash_attn_func

    random = _Random(device)
    q, k, v = (random.normal(1, seqlen, heads, head_dim) for _ in range(3))
    return partial(flash_attn_func, q, k, v, causal=causal, out=torch.empty_like(q))


def _gradients(head_dim: int, heads: int, seqlen: int, causal: bool, device: torch.device) -> Call:
    from cute_attn import flash_attn_func

    random = _Random(device)
    leaves = [random.normal(1, seqlen, heads, head_dim).requires_grad_() for _ in range(3)]
    do = random.normal(1, seqlen, heads, head_dim)

    def call() -> Any:
        o, _ = flash_attn_func(*leaves, causal=causal)
        return torch.autograd.grad(o, leaves, do)

    return call


def _decode(
    head_dim: int, heads: int, heads_k: int, batch: int, seqlen: int, device: torch.device
) -> Call:
    from cute_attn import flash_attn_varlen_func

    random = _Random(device)
    pages = seqlen // 64
    q = random.normal(batch, 1, heads, head_dim)
    k, v = (random.normal(batch * pages, 64, heads_k, head_dim) for _ in range(2))
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    lengths = torch.full((batch,), seqlen, dtype=torch.int32, device=device)
    return partial(
        flash_attn_varlen_func, q, k, v, seqused_k=lengths, page_table=table,
        max_seqlen_k=seqlen, causal=True, num_splits=0,
    )  # fmt: skip


def _latent_decode(batch: int, seqlen: int, heads: int, device: torch.device) -> Call:
    from cute_attn import mla_decode

    random = _Random(device)
    pages = seqlen // 64
    cache = random.normal(batch * pages, 64, 1, 576)
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    lengths = torch.full((batch,), seqlen, dtype=torch.int32, device=device)
    q = random.normal(batch, 1, heads, 512), random.normal(batch, 1, heads, 64)
    return partial(
        mla_decode, *q, cache, block_table=table, cache_seqlens=lengths, softmax_scale=192**-0.5
    )


def _delta_rule(
    per_head: bool, tokens: int, heads: int, heads_v: int, backward: bool, device: torch.device
) -> Call:
    from cute_attn import chunk_gated_delta_rule, chunk_kda

    random = _Random(device)
    q, k = (random.normal(1, tokens, heads, 128) for _ in range(2))
    v = random.normal(1, tokens, heads_v, 128)
    gates = (1, tokens, heads_v) if per_head else (1, tokens, heads_v, 128)
    given: dict[str, Any] = {
        "q": q, "k": k, "v": v, "g": random.normal(*gates),
        "beta": random.normal(1, tokens, heads_v),
        "A_log": random.normal(heads_v, dtype=torch.float32).abs(),
        "dt_bias": random.normal(
            heads_v * (1 if per_head else 128), dtype=torch.float32
        ),
    }  # fmt: skip
    function: Callable[..., Any] = chunk_gated_delta_rule if per_head else chunk_kda
    options: dict[str, Any] = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    if not backward:
        return partial(function, **given, **options)
    leaves = [x.requires_grad_() for x in given.values()]
    do = random.normal(1, tokens, heads_v, 128)

    def call() -> Any:
        o, _ = function(**given, **options)
        return torch.autograd.grad(o, leaves, do)

    return call


def _lightning(batch: int, heads: int, device: torch.device) -> Call:
    from cute_attn import lightning_attn_decode

    random = _Random(device)
    q, k, v = (random.normal(batch, heads, 128) for _ in range(3))
    state = random.normal(batch, heads, 128, 128, dtype=torch.float32)
    decay = torch.rand(heads, generator=random.generator).to(device)
    return partial(lightning_attn_decode, q, k, v, state, decay, out=torch.empty_like(q))


def _step(per_head: bool, batch: int, heads: int, device: torch.device) -> Call:
    from cute_attn import gated_delta_rule_decode, kda_decode

    random = _Random(device)
    q, k, v = (random.normal(batch, 1, heads, 128) for _ in range(3))
    gates = (batch, 1, heads) if per_head else (batch, 1, heads, 128)
    return partial(
        gated_delta_rule_decode if per_head else kda_decode,
        q, k, v, random.normal(*gates), random.normal(batch, 1, heads),
        random.normal(batch, heads, 128, 128, dtype=torch.float32),
        A_log=random.normal(heads, dtype=torch.float32).abs(),
        dt_bias=random.normal(heads * (1 if per_head else 128), dtype=torch.float32),
    )  # fmt: skip


def _ladder(step: int, device: torch.device) -> Call:
    from ...kernels.ladder.heuristics import spec_of
    from ...kernels.ladder.table import find
    from ..ladder.problem import Case, Problem

    problem = Problem(Case(1, 4, 512, 128, False, "bfloat16"), str(device), SEED)
    spec = spec_of(step, "sm_90a", dtype="bfloat16", head_dim=128, causal=False)
    return problem.step(find(step), spec)


CASES: dict[str, Make] = {
    **{
        f"forward hd{d} {h}x{s}{' causal' * causal}": partial(_attention, d, h, s, causal)
        for d, h, s, causal in (
            (64, 4, 1024, False),
            (64, 4, 1024, True),
            (64, 16, 512, False),
            (128, 4, 1024, False),
            (128, 4, 1024, True),
            (128, 16, 1024, False),
            (256, 4, 1024, False),
            (256, 4, 1024, True),
            (256, 16, 512, False),
        )
    },
    **{
        f"backward hd{d} {h}x{s}{' causal' * causal}": partial(_gradients, d, h, s, causal)
        for d, h, s, causal in (
            (64, 4, 512, False),
            (64, 4, 512, True),
            (128, 4, 512, False),
            (128, 4, 512, True),
            (256, 4, 512, False),
            (256, 4, 512, True),
        )
    },
    "decode hd128 64/8 16x512": partial(_decode, 128, 64, 8, 16, 512),
    "decode hd128 64/8 1x4096": partial(_decode, 128, 64, 8, 1, 4096),
    "decode hd256 32/2 8x1024": partial(_decode, 256, 32, 2, 8, 1024),
    "decode hd64 64/8 8x1024": partial(_decode, 64, 64, 8, 8, 1024),
    "latent decode 16 heads 4x1024": partial(_latent_decode, 4, 1024, 16),
    "chunk_kda T=512 H=12": partial(_delta_rule, False, 512, 12, 12, False),
    "chunk_kda backward T=256 H=4": partial(_delta_rule, False, 256, 4, 4, True),
    "chunk_gated_delta_rule T=512 8/16": partial(_delta_rule, True, 512, 8, 16, False),
    "chunk_gated_delta_rule backward T=256 4/8": partial(_delta_rule, True, 256, 4, 8, True),
    "lightning decode B=4 H=32": partial(_lightning, 4, 32),
    "lightning decode B=16 H=32": partial(_lightning, 16, 32),
    "kda_decode B=4 H=32": partial(_step, False, 4, 32),
    "gated_delta_rule_decode B=4 H=32": partial(_step, True, 4, 32),
    **{f"ladder step {n}": partial(_ladder, n) for n in range(1, 11)},
    **{
        f"decode hd{d} {h}/{k} {b}x2048": partial(_decode, d, h, k, b, 2048)
        for b in (1, 8)
        for d, h, k in ((64, 64, 8), (128, 64, 8), (256, 32, 2))
    },
}
