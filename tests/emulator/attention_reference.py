"""Attention in float64, forward and backward, as FlashAttention-4 defines it.

The last query sees the last key: with `causal`, query i of sq sees keys 0 to i + sk - sq. A query
that sees nothing gives zeros and an lse of -inf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cute_attn.reference.attention import visible

__all__ = ["Backward", "Forward", "backward", "forward", "visible"]


class Forward(NamedTuple):
    """out is shaped as q, with the head_dim of v; lse is [B, H, S], or [H, total] if varlen."""

    out: torch.Tensor
    lse: torch.Tensor


class Backward(NamedTuple):
    """Gradients, shaped as q, k and v; dpsum is the sum of dout * out over head_dim, as lse."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dpsum: torch.Tensor


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    learnable_sink: torch.Tensor | None = None,
    seqlens_q: Sequence[int] | None = None,
    seqlens_k: Sequence[int] | None = None,
) -> Forward:
    """From q [B, S, H, D] and k, v [B, S, HK, D], or [total, heads, D] with seqlens."""
    if seqlens_q is not None:
        pieces = [
            forward(
                *(t[None] for t in tensors),
                causal=causal,
                window=window,
                softmax_scale=softmax_scale,
                softcap=softcap,
                learnable_sink=learnable_sink,
            )
            for tensors in _sequences(seqlens_q, seqlens_k or seqlens_q, (q,), (k, v))
        ]
        return Forward(
            torch.cat([p.out[0] for p in pieces]), torch.cat([p.lse[0] for p in pieces], dim=-1)
        )
    q, k, v = (t.double() for t in (q, k, v))
    scores, _ = _scores(q, k, causal, window, softmax_scale, softcap)
    sink = None
    if learnable_sink is not None:
        sink = learnable_sink.double()[None, :, None, None].expand(*scores.shape[:3], 1)
    lse = torch.logsumexp(scores if sink is None else torch.cat([scores, sink], -1), dim=-1)
    p = _probabilities(scores, lse)
    return Forward(torch.einsum("bhst,bthd->bshd", p, _repeat(v, q)), lse)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    seqlens_q: Sequence[int] | None = None,
    seqlens_k: Sequence[int] | None = None,
) -> Backward:
    """From the inputs of `forward`, what it returned, and the gradient of out.

    Rounded inputs give the gradient that a kernel with such inputs should give: out and lse are
    used as they are, and not computed again.
    """
    if seqlens_q is not None:
        rows = (q, out, dout, lse.transpose(0, 1))  # lse to [total, H], to be cut as the others
        pieces = [
            backward(
                qi[None],
                ki[None],
                vi[None],
                oi[None],
                doi[None],
                li.transpose(0, 1)[None],
                causal=causal,
                window=window,
                softmax_scale=softmax_scale,
                softcap=softcap,
            )
            for qi, oi, doi, li, ki, vi in _sequences(
                seqlens_q, seqlens_k or seqlens_q, rows, (k, v)
            )
        ]
        return Backward(
            torch.cat([p.dq[0] for p in pieces]),
            torch.cat([p.dk[0] for p in pieces]),
            torch.cat([p.dv[0] for p in pieces]),
            torch.cat([p.dpsum[0] for p in pieces], dim=-1),
        )
    q, k, v, out, dout, lse = (t.double() for t in (q, k, v, out, dout, lse))
    scores, derivative = _scores(q, k, causal, window, softmax_scale, softcap)
    p = _probabilities(scores, lse)
    dp = torch.einsum("bshd,bthd->bhst", dout, _repeat(v, q))
    dpsum = (dout * out).sum(-1).transpose(1, 2)
    ds = p * (dp - dpsum[..., None]) * derivative
    return Backward(
        torch.einsum("bhst,bthd->bshd", ds, _repeat(k, q)),
        _sum_groups(torch.einsum("bhst,bshd->bthd", ds, q), k),
        _sum_groups(torch.einsum("bhst,bshd->bthd", p, dout), k),
        dpsum,
    )


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    causal: bool,
    window: tuple[int | None, int | None],
    softmax_scale: float | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked scores [B, H, SQ, SK], and their derivative by the product of q and k."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bshd,bthd->bhst", q, _repeat(k, q)) * scale
    derivative = torch.full_like(scores, scale)
    if softcap:
        bounded = torch.tanh(scores / softcap)
        scores, derivative = softcap * bounded, scale * (1 - bounded**2)
    mask = visible(q.shape[1], k.shape[1], causal, window)
    return scores.masked_fill(~mask, -math.inf), derivative


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    seen = torch.isfinite(scores)
    return torch.where(seen, torch.exp(scores - lse[..., None]), 0.0)


def _repeat(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """k or v with one head for each of q's."""
    return k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)


def _sum_groups(gradient: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A gradient by head of q, summed to the heads of k."""
    grouped: torch.Tensor = gradient.unflatten(-2, (k.shape[-2], -1))
    return grouped.sum(-2)


def _sequences(
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int],
    by_q: Sequence[torch.Tensor],
    by_k: Sequence[torch.Tensor],
) -> list[list[torch.Tensor]]:
    """For each sequence its rows of each tensor."""
    bounds_q, bounds_k = (
        list(itertools.pairwise(itertools.accumulate(s, initial=0))) for s in (seqlens_q, seqlens_k)
    )
    return [
        [t[a:b] for t in by_q] + [t[c:d] for t in by_k]
        for (a, b), (c, d) in zip(bounds_q, bounds_k, strict=True)
    ]
