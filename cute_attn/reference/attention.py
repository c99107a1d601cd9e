"""Softmax attention in plain PyTorch: the reference for tests of the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Sequence(NamedTuple):
    """The indices and rows of one sequence's queries and keys."""

    index_q: int | None  # in the batch dimension; None for packed sequences
    rows_q: slice
    index_k: int | None
    rows_k: slice


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    p_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cute_attn.flash_attn_func` and `flash_attn_varlen_func`, a sequence and head at a time.

    With sq queries and sk keys in a sequence, query i is at position i + sk - sq, so that the last
    query is at the last key. It sees key j if the distance j - (i + sk - sq) is at least
    -window_size[0] and at most window_size[1]; causal is a window of 0 to the right. Then

        s_j = softmax_scale * q . k_j              softcap * tanh(s_j / softcap), with a softcap
        lse = log(sum over visible j of exp(s_j) + exp(sink))
        o   = sum over visible j of exp(s_j - lse) v_j

    A key that is not visible contributes nothing, even if k or v is NaN there. A row without
    visible keys, or with scores of -inf only, has output 0 and as lse the sink, or -inf without
    one. A visible score of NaN or +inf makes the row's output and lse NaN; so does such a sink if
    the row sees a key.

    Args:
        q: `[B, SQ, HQ, D]`, or `[total, HQ, D]` with cu_seqlens_q; k and v likewise, with HK heads
            that divide HQ: query head h uses head h // (HQ // HK).
        window_size: keys to the left and right that a query sees; None or -1 is all.
        cu_seqlens_q, cu_seqlens_k: `[B + 1]`, where each sequence's rows begin and end.
        seqused_q, seqused_k: `[B]`, how many of each sequence's rows are used.
        dtype: of the arithmetic. float64 gives the reference.
        p_dtype: dtype that the probabilities are rounded to before the product with v.

    Returns:
        (o, lse) in `dtype`: o is shaped as q, lse `[B, HQ, SQ]` or `[HQ, total]`. Rows that belong
        to no sequence are undefined, and NaN here.
    """
    heads, heads_k = q.shape[-2], k.shape[-2]
    group = heads // heads_k if heads_k else 1
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    o = torch.full(q.shape, math.nan, dtype=dtype, device=q.device)
    lse_rows = torch.full(q.shape[:-1], math.nan, dtype=dtype, device=q.device)
    for sequence in sequences(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        index_q, rows_q, index_k, rows_k = sequence
        o_b, lse_b = (x if index_q is None else x[index_q] for x in (o, lse_rows))
        q_b = (q if index_q is None else q[index_q])[rows_q]
        k_b, v_b = ((x if index_k is None else x[index_k])[rows_k] for x in (k, v))
        mask = visible(q_b.shape[0], k_b.shape[0], causal, window_size).to(q.device)
        for head in range(heads):
            sink = None if learnable_sink is None else learnable_sink[head].to(dtype)
            o_b[rows_q, head], lse_b[rows_q, head] = _one_head(
                q_b[:, head].to(dtype),
                k_b[:, head // group].to(dtype),
                v_b[:, head // group].to(dtype),
                mask,
                scale,
                softcap,
                sink,
                p_dtype,
            )
    return o, lse_rows.transpose(-1, -2)


def attention_in_low_precision(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same formula in plain low-precision code: tests compare the kernels' error with its own.

    Products are summed in float32, and the softmax is float32. Only the probabilities, an operand
    of the second product, and the output are rounded to q.dtype, so the error is about the smallest
    that such inputs allow.
    """
    o, lse = attention_reference(
        q, k, v, **options, dtype=torch.float32, p_dtype=q.dtype  # type: ignore[arg-type]
    )  # fmt: skip
    return o.to(q.dtype), lse


def visible(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
) -> torch.Tensor:
    """Which keys each query of a sequence sees: booleans `[seqlen_q, seqlen_k]`."""
    left, right = (None if bound in (None, -1) else bound for bound in window_size)
    if causal:
        right = 0
    position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    distance = torch.arange(seqlen_k) - position
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right
    return mask


def sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
) -> Iterator[Sequence]:
    """The sequences of a batch."""
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    for b in range(batch):
        where: list[int | slice | None] = []
        for x, offsets, used in ((q, cu_seqlens_q, seqused_q), (k, cu_seqlens_k, seqused_k)):
            start, end = (0, x.shape[1]) if offsets is None else offsets[b : b + 2].tolist()
            if used is not None:
                end = start + max(0, min(int(used[b]), end - start))
            where += [b if offsets is None else None, slice(start, end)]
        yield Sequence(*where)  # type: ignore[arg-type]


def _one_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
    sink: torch.Tensor | None,
    p_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o `[SQ, D]` and lse `[SQ]` of one head of one sequence."""
    scores = scale * (q @ k.T)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    unseen = (scores == -math.inf).all(dim=1)
    if sink is not None:  # an extra key, whose value is 0
        scores = torch.cat([scores, sink.expand(scores.shape[0], 1)], dim=1)
    if scores.shape[1] == 0:
        return q.new_zeros(q.shape[0], v.shape[1]), q.new_full((q.shape[0],), -math.inf)
    maximum = scores.amax(dim=1, keepdim=True)
    shift = maximum.masked_fill(maximum == -math.inf, 0.0)
    p = torch.exp(scores - shift)
    total = p.sum(dim=1, keepdim=True)
    lse = (shift + torch.log(total)).squeeze(1)
    p = (p / total.masked_fill(total == 0, 1.0))[:, : k.shape[0]]
    if sink is not None:  # which may be NaN or infinite
        lse = torch.where(unseen, sink, lse)
        p = p.masked_fill(unseen[:, None], 0.0)
    if p_dtype is not None:
        p = p.to(p_dtype).to(p.dtype)
    if bool(v.isfinite().all()):
        return p @ v, lse
    # 0 times NaN is NaN, so each row sums over its visible keys only.
    o = torch.stack([p[i, mask[i]] @ v[mask[i]] for i in range(p.shape[0])]) if len(p) else p @ v
    return o, lse
