"""Softmax attention in plain PyTorch: the reference for tests of the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .rounding import rounded


class Sequence(NamedTuple):
    """The indices and rows of one sequence's queries and keys."""

    index_q: int | None  # index in the batch dimension; None for packed sequences
    rows_q: slice
    index_k: int | None
    rows_k: slice


class Gradients(NamedTuple):
    """Gradients of q, k, v and learnable_sink, in their shapes; dsink is None without a sink."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None


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
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    p_dtype: torch.dtype | None = None,
    jitter: torch.Generator | None = None,
    by_row: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cute_attn.flash_attn_func` and `flash_attn_varlen_func`, a sequence and head at a time.

    With sq queries and sk keys in a sequence, query i is at position i + sk - sq, so that the last
    query is at the last key. Query i sees key j if the distance j - (i + sk - sq) is at least
    -window_size[0] and at most window_size[1]; causal is a window of 0 to the right. Then

        s_j = softmax_scale * q . k_j              softcap * tanh(s_j / softcap), with a softcap
        lse = log(sum over visible j of exp(s_j) + exp(sink))
        o   = sum over visible j of exp(s_j - lse) v_j

    A key that is not visible contributes nothing, even if its k or v is NaN. A row without visible
    keys, or with scores of -inf only, has output 0, and as lse the sink, or -inf without a sink. A
    visible score of NaN or +inf makes the row's output and lse NaN. A sink of NaN or +inf does the
    same if the row sees a key.

    Args:
        q: `[B, SQ, HQ, D]`, or `[total, HQ, D]` with cu_seqlens_q.
        k: `[B, SK, HK, D]`, or `[total, HK, D]` with cu_seqlens_k. HK divides HQ: query head h uses
            head h // (HQ // HK).
        v: of k's shape, except that its head dimension DV may differ from D.
        window_size: keys to the left and right that a query sees; None or -1 is all.
        cu_seqlens_q, cu_seqlens_k: `[B + 1]`, where each sequence's rows begin and end.
        seqused_q, seqused_k: `[B]`, the number of used rows of each sequence.
        k_descale, v_descale: factors of k and v, a number or `[B, HK]`.
        tree_mask: `[B, SQ]` or `[total]`: bit j says whether query i sees the key at query j's
            position; see `flash_attn_varlen_func`.
        dtype: dtype of the arithmetic; float64 gives the reference.
        p_dtype: dtype to which the probabilities are rounded before the product with v.
        jitter: generator of a factor in [1, 2) for each probability. A probability is rounded while
            multiplied by its factor. The rounding errors change, but not their size.
        by_row: form each row's products with its visible keys only, so that a hidden pair adds 0 to
            gradients even if its q, k, v or do is NaN. Where v is not finite, P V is always formed
            by row.

    Returns:
        (o, lse) in `dtype`: o is `[B, SQ, HQ, DV]` or `[total, HQ, DV]`, lse `[B, HQ, SQ]` or
        `[HQ, total]`. Rows that belong to no sequence are undefined, and NaN here.
    """
    heads, heads_k = q.shape[-2], k.shape[-2]
    group = heads // heads_k if heads_k else 1
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    o = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, dtype=dtype, device=q.device)
    lse_rows = torch.full(q.shape[:-1], math.nan, dtype=dtype, device=q.device)
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    for number, sequence in enumerate(sequences(q, k, *lengths)):
        index_q, rows_q, index_k, rows_k = sequence
        o_b, lse_b = (x if index_q is None else x[index_q] for x in (o, lse_rows))
        q_b = (q if index_q is None else q[index_q])[rows_q]
        k_b, v_b = ((x if index_k is None else x[index_k])[rows_k] for x in (k, v))
        mask = visible(q_b.shape[0], k_b.shape[0], causal, window_size).to(q.device)
        if tree_mask is not None:
            bits = (tree_mask if index_q is None else tree_mask[index_q])[rows_q]
            mask = mask & _tree(bits, *mask.shape)
        for head in range(heads):
            sink = None if learnable_sink is None else learnable_sink[head].to(dtype)
            o_b[rows_q, head], lse_b[rows_q, head] = _one_head(
                q_b[:, head].to(dtype),
                _scaled(k_b[:, head // group].to(dtype), k_descale, number, head // group),
                _scaled(v_b[:, head // group].to(dtype), v_descale, number, head // group),
                mask,
                scale,
                softcap,
                sink,
                p_dtype,
                jitter,
                by_row,
            )
    return o, lse_rows.transpose(-1, -2)


def _tree(bits: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """The mask of the queries' bits for the keys at their positions; True for all earlier keys."""
    seen = torch.ones(queries, max(queries, keys), dtype=torch.bool, device=bits.device)
    if queries:
        seen[:, -queries:] = (bits[:, None] >> torch.arange(queries, device=bits.device)) & 1 == 1
    return seen[:, seen.shape[1] - keys :]


def attention_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    *,
    learnable_sink: torch.Tensor | None = None,
    **options: Any,
) -> Gradients:
    """The gradients of sum(o * do) + sum(lse * dlse) in float64, by autograd of the definition.

    A hidden pair of query and key adds 0 to every gradient, even if its do, q, k or v is NaN. Rows
    that belong to no sequence have gradient 0, whatever their do and dlse.

    Args:
        do, dlse: of the shapes of o and lse of `attention_reference`; None is 0.
        learnable_sink, options: as for `attention_reference`.
    """
    sinks = [] if learnable_sink is None else [learnable_sink]
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *sinks)]
    given = [g.double() for g in (do, dlse) if g is not None]
    results = attention_reference(
        *leaves[:3],
        learnable_sink=leaves[3] if sinks else None,
        by_row=not all(bool(x.isfinite().all()) for x in (*leaves[:3], *given)),
        **options,
    )
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    outputs = [x for x, g in zip(results, (do, dlse), strict=True) if g is not None]
    # Without queries or without keys, a result may depend on nothing.
    pairs = [(x, g) for x, g in zip(outputs, given, strict=True) if x.requires_grad]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
    dq, dk, dv, *dsinks = (leaf.grad for leaf in leaves)
    assert dq is not None and dk is not None and dv is not None
    return Gradients(dq, dk, dv, dsinks[0] if dsinks else None)


def attention_in_low_precision(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_reference` in plain low-precision code: tests compare the kernels' error with this
    function's.

    Products are summed in float32, and the softmax is float32. Only the probabilities, an operand
    of the second product, and the output are rounded to q.dtype, so the error is about the smallest
    that inputs of this dtype allow.
    """
    o, lse = attention_reference(
        q, k, v, **options, dtype=torch.float32, p_dtype=q.dtype  # type: ignore[arg-type]
    )  # fmt: skip
    return o.to(q.dtype), lse


def attention_gradients_in_low_precision(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    *,
    learnable_sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    jitter: torch.Generator | None = None,
    **lengths: torch.Tensor | None,
) -> Gradients:
    """The gradients in plain low-precision code, for finite inputs.

    With o in q.dtype and lse in float32, as `attention_in_low_precision` returns them,

        P = exp(s - lse),  dP = do . v,  delta = sum(do * o) - dlse
        dS = P * (dP - delta)                 * (1 - tanh(...)^2), with a softcap
        dV = P^T do,  dQ = softmax_scale * dS K,  dK = softmax_scale * dS^T Q

    Products are summed in float32. P and dS are rounded to q.dtype as operands of a product; the
    gradients are rounded at the end.

    Args:
        jitter: as for `attention_reference`, for the roundings of o, P and dS too.
        lengths: cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k.
    """
    o, lse = attention_reference(
        q,
        k,
        v,
        learnable_sink=learnable_sink,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        dtype=torch.float32,
        p_dtype=q.dtype,
        jitter=jitter,
        **lengths,  # type: ignore[arg-type]
    )
    o = rounded(o, q.dtype, jitter)
    dlse_rows = (torch.zeros_like(lse) if dlse is None else dlse.float()).transpose(-1, -2)
    lse_rows = lse.transpose(-1, -2)
    do = torch.zeros_like(o) if do is None else do
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    dsink = None if learnable_sink is None else dq.new_zeros(len(learnable_sink))
    group = q.shape[-2] // k.shape[-2]
    for index_q, rows_q, index_k, rows_k in sequences(q, k, **lengths):
        at_q = rows_q if index_q is None else (index_q, rows_q)
        at_k = rows_k if index_k is None else (index_k, rows_k)
        mask = visible(q[at_q].shape[0], k[at_k].shape[0], causal, window_size).to(q.device)
        for head in range(q.shape[-2]):
            q_h, o_h, do_h = (x[at_q][:, head].float() for x in (q, o, do))
            k_h, v_h = (x[at_k][:, head // group].float() for x in (k, v))
            lse_h, dlse_h = (x[at_q][:, head, None] for x in (lse_rows, dlse_rows))
            scores = scale * (q_h @ k_h.T)
            slope = torch.ones_like(scores)
            if softcap:
                bounded = torch.tanh(scores / softcap)
                scores, slope = softcap * bounded, 1 - bounded**2
            p = torch.exp(scores - lse_h).masked_fill(~mask, 0.0)
            delta = (do_h * o_h).sum(1, keepdim=True) - dlse_h
            ds = p * (do_h @ v_h.T - delta) * slope
            p, ds = (rounded(x, q.dtype, jitter) for x in (p, ds))
            dq[at_q][:, head] = scale * (ds @ k_h)
            dk[at_k][:, head // group] += scale * (ds.T @ q_h)
            dv[at_k][:, head // group] += p.T @ do_h
            if dsink is not None and learnable_sink is not None:
                dsink[head] -= (torch.exp(learnable_sink[head].float() - lse_h) * delta).sum()
    if dsink is not None and learnable_sink is not None:
        dsink = dsink.to(learnable_sink.dtype)
    return Gradients(dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dsink)


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


def _scaled(
    x: torch.Tensor, descale: torch.Tensor | None, sequence: int, head: int
) -> torch.Tensor:
    """x times the factor of a sequence and K/V head."""
    if descale is None:
        return x
    return x * (descale if descale.numel() == 1 else descale[sequence, head]).to(x.dtype)


def _one_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
    sink: torch.Tensor | None,
    p_dtype: torch.dtype | None,
    jitter: torch.Generator | None,
    by_row: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o `[SQ, D]` and lse `[SQ]` of one head of one sequence."""
    scores = scale * (_products_by_row(q, k, mask) if by_row else q @ k.T)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    unseen = (scores == -math.inf).all(dim=1)
    if sink is not None:  # an extra key, whose value is 0
        scores = torch.cat([scores, sink.expand(scores.shape[0], 1)], dim=1)
    if scores.shape[1] == 0:
        return q.new_zeros(q.shape[0], v.shape[1]), q.new_full((q.shape[0],), -math.inf)
    maximum = scores.detach().amax(dim=1, keepdim=True)  # cancels, with its gradient
    shift = maximum.masked_fill(maximum == -math.inf, 0.0)
    p = torch.exp(scores - shift)
    total = p.sum(dim=1, keepdim=True)
    empty = total == 0
    divisor = total.masked_fill(empty, 1.0)
    lse = (shift + torch.log(divisor)).masked_fill(empty, -math.inf).squeeze(1)
    p = (p / divisor)[:, : k.shape[0]]
    if sink is not None:  # a sink may be NaN or infinite
        lse = torch.where(unseen, sink, lse)
        p = p.masked_fill(unseen[:, None], 0.0)
    if p_dtype is not None:
        p = rounded(p, p_dtype, jitter)
    if len(p) == 0 or (not by_row and bool(v.isfinite().all())):
        return p @ v, lse
    # 0 times NaN is NaN, so each row sums over its visible keys only.
    return torch.stack([p[i, mask[i]] @ v[mask[i]] for i in range(len(p))]), lse


def _products_by_row(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """q @ k.T where `mask`, else 0. A hidden pair affects neither the result nor the gradients of q
    and k."""
    products = q.new_zeros(mask.shape)
    for i in range(q.shape[0]):
        products[i, mask[i]] = k[mask[i]] @ q[i]
    return products
