"""Kimi Delta Attention in plain PyTorch: the definition that tests hold the kernels to.

With the state of a value head a K by V matrix S, a token does (Kimi Linear, arXiv 2510.26692):

    S <- Diag(exp(g)) S        forget, each row of S at its own rate
    u  = beta (v - S^T k)      what k should recall, less what it does recall
    S <- S + k u^T
    o  = scale S^T q

`kda_reference` and `kda_decode_reference` do just that, token by token, and are the arbiters. The
functions named for a stage do the same a chunk of 64 tokens at a time, as the kernels do, so that
each stage can be tested alone; `kda_chunk_reference` runs them all.

Shapes: q, k `[B, T, HQK, K]`; v `[B, T, HV, V]`; g `[B, T, HV, K]`; beta `[B, T, HV]`. With grouped
value heads, HV is a multiple of HQK, and value head h uses query and key head h // (HV // HQK).
With cu_seqlens `[N + 1]`, B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1], of
which there may be none. Results hold NaN for tokens that belong to no sequence: they are undefined.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

CHUNK = 64
L2NORM_EPSILON = 1e-6  # added to the sum of squares, as in flash-linear-attention


class KdaResult(NamedTuple):
    """What a run over whole sequences gives.

    Of the states, `final_state` is `[N, HV, K, V]`, and `h`, those at the start of every chunk,
    `[B, chunks, HV, K, V]`, the chunks of packed sequences one after the other. With state_v_first
    both end in `V, K`.
    """

    o: torch.Tensor
    final_state: torch.Tensor
    h: torch.Tensor


class KdaRecords(NamedTuple):
    """The drafted tokens of each slot, from which the state after any of them can be rebuilt.

    k and g are as the call was given them, so that a replay repeats the arithmetic of the draft
    exactly; u is the correction, which saves the product of state and k.
    """

    k: torch.Tensor  # [slots, S, HQK, K]
    g: torch.Tensor  # [slots, S, HV, K]
    u: torch.Tensor  # [slots, S, HV, V]


class KdaDecodeResult(NamedTuple):
    """What a decode step gives; `records` is None unless it was given some."""

    o: torch.Tensor
    state: torch.Tensor
    records: KdaRecords | None


class KdaIntra(NamedTuple):
    """What is computed for each chunk on its own. Aqk and Akk are 0 above the diagonal."""

    Aqk: torch.Tensor  # [B, T, HV, CHUNK], includes the scale
    Akk: torch.Tensor  # [B, T, HV, CHUNK], the inverse
    w: torch.Tensor  # [B, T, HV, K]
    u: torch.Tensor  # [B, T, HV, V]
    qg: torch.Tensor  # [B, T, HV, K], does not include the scale
    kg: torch.Tensor  # [B, T, HV, K]


class KdaStates(NamedTuple):
    """What the recurrence over chunks gives: states as in `KdaResult`."""

    h: torch.Tensor
    v_new: torch.Tensor  # [B, T, HV, V]
    final_state: torch.Tensor


class KdaStages(NamedTuple):
    """The results of all stages, in their order; q, k and beta as the stages take them."""

    q: torch.Tensor
    k: torch.Tensor
    beta: torch.Tensor
    g: torch.Tensor  # [B, T, HV, K], base 2, summed from the start of the chunk
    intra: KdaIntra
    states: KdaStates
    o: torch.Tensor


# ---- what a kernel may do to its inputs


def log_decay(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The gate: the natural logarithm of the decay, from what a layer projects.

        -exp(A_log) softplus(g + dt_bias)                    without a lower bound
        lower_bound sigmoid(exp(A_log) (g + dt_bias))        with one; exp(A_log) is 1 without A_log

    Args:
        g: `[..., HV, K]`.
        A_log: HV numbers, of any shape.
        dt_bias: HV * K numbers, of any shape.
    """
    heads = g.shape[-2]
    g = g.to(dtype)
    if dt_bias is not None:
        g = g + dt_bias.to(dtype).reshape(heads, -1)
    rate = None if A_log is None else torch.exp(A_log.to(dtype)).reshape(heads, 1)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(g if rate is None else rate * g)
    assert rate is not None, "A_log may be left out only where there is a lower_bound"
    return -rate * torch.logaddexp(g, torch.zeros_like(g))


def l2norm(x: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Rows of length 1, nearly: see L2NORM_EPSILON."""
    x = x.to(dtype)
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + L2NORM_EPSILON)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k as they multiply the state, g as a natural logarithm, beta as a factor."""
    assert use_beta_sigmoid_in_kernel or not allow_neg_eigval
    q, k = (l2norm(x, dtype) if use_qk_l2norm_in_kernel else x.to(dtype) for x in (q, k))
    g = log_decay(g, A_log, dt_bias, lower_bound, dtype) if use_gate_in_kernel else g.to(dtype)
    beta = beta.to(dtype)
    if use_beta_sigmoid_in_kernel:
        beta = (2.0 if allow_neg_eigval else 1.0) * torch.sigmoid(beta)
    return q, k, g, beta


def per_value_head(x: torch.Tensor, heads_v: int) -> torch.Tensor:
    """q or k, `[..., HQK, K]`, with the head that each value head uses: `[..., HV, K]`."""
    heads = x.shape[-2]
    assert heads_v % heads == 0, f"{heads_v} value heads cannot share {heads} query and key heads"
    return x[..., torch.arange(heads_v, device=x.device) // (heads_v // heads), :]


# ---- token by token


def kda_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> KdaResult:
    """What `chunk_kda` and `fused_recurrent_kda` compute.

    Args:
        scale: of q; 1 / sqrt(K) by default.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with state_v_first; zeros by default.
        use_gate_in_kernel: g is what `log_decay` takes, rather than what it gives.
        allow_neg_eigval: beta is twice the sigmoid.
        safe_gate: a promise that the gates are bounded. It changes no result.
        lower_bound: of the gate; without use_gate_in_kernel it is ignored.
        dtype: the arithmetic. float64 gives the reference; float32 gives what a plain PyTorch
            implementation computes.
    """
    q, k, g, beta = prepare(
        q,
        k,
        g,
        beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        dtype=dtype,
    )
    heads, v = v.shape[2], v.to(dtype)
    q, k = per_value_head(q, heads), per_value_head(k, heads)
    scale = _scale(scale, q)
    o = torch.full_like(v, math.nan)
    h = _states_of_chunks(q, v, cu_seqlens)
    final_state = _initial_states(initial_state, q, v, cu_seqlens, state_v_first, dtype)
    for chunk in chunks(q, cu_seqlens):
        state = final_state[chunk.sequence]
        h[chunk.state] = state
        for t in range(chunk.rows.start, chunk.rows.stop):
            at = (chunk.batch, t)
            state, _ = advance(state, k[at], v[at], g[at], beta[at])
            o[at] = scale * torch.einsum("hkv,hk->hv", state, q[at])
        final_state[chunk.sequence] = state
    return KdaResult(o, _laid_out(final_state, state_v_first), _laid_out(h, state_v_first))


def advance(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of all value heads: the state after it, `[HV, K, V]`, and the correction u."""
    state = torch.exp(g).unsqueeze(-1) * state
    u = beta.unsqueeze(-1) * (v - torch.einsum("hkv,hk->hv", state, k))
    return state + k.unsqueeze(-1) * u.unsqueeze(-2), u


def replay(state: torch.Tensor, k: torch.Tensor, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """`advance` by a token whose correction is known."""
    return torch.exp(g).unsqueeze(-1) * state + k.unsqueeze(-1) * u.unsqueeze(-2)


def kda_decode_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    state_v_first: bool = True,
    state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    records: KdaRecords | None = None,
    dtype: torch.dtype = torch.float64,
) -> KdaDecodeResult:
    """One token, or a few, of every sequence of a batch; no input is changed.

    Plain decoding: sequence b starts from slot state_indices[b] (or b) of the pool, and leaves
    there the state after its last token.

    Speculative decoding with a slot for each position: state_indices is `[B, 1 + S]`, and there are
    at most 1 + S tokens. The state after token t is left in slot state_indices[b, t]. Of the tokens
    of the last call the first num_accepted_tokens[b] were right, so that this one starts from slot
    state_indices[b, num_accepted_tokens[b] - 1]. Counts are taken to be at least 1 and at most
    1 + S.

    Speculative decoding with records: the slot holds the state before the tokens of the last call,
    and `records` those tokens. This call replays the first num_accepted_tokens[b] of them, leaves
    that state in the slot, and goes on to its own tokens, at most S, which it leaves in the records
    and not in the state. Counts are taken to be at least 0 and at most S.

    A sequence whose starting slot is negative, or past the pool, is padding: it gives 0 and touches
    neither state nor records. The state for a position with such a slot is not kept.

    Args:
        q, k, v, g, beta: with their second dimension, the tokens, or without.
        state: the pool, `[slots, HV, V, K]`, or `[slots, HV, K, V]` without state_v_first.
        dtype: the arithmetic, as in `kda_reference`.

    Returns:
        Everything in `dtype`, except that states and records have passed through the dtype that
        they are kept in: their rounding belongs to the definition unless `dtype` is float64.
    """
    squeeze = q.dim() == 3
    if squeeze:
        q, k, v, g, beta = (x.unsqueeze(1) for x in (q, k, v, g, beta))
    batch, tokens, heads = v.shape[:3]
    raw_k, raw_g = k.to(dtype), g.to(dtype)
    q, k, g, beta = prepare(
        q,
        k,
        g,
        beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        dtype=dtype,
    )
    v = v.to(dtype)
    q, k = per_value_head(q, heads), per_value_head(k, heads)
    scale = _scale(scale, q)
    o = torch.zeros_like(v)
    pool = _laid_out(state.to(dtype), state_v_first).clone()
    kept = None if records is None else KdaRecords(*(x.to(dtype).clone() for x in records))
    slots = torch.arange(batch) if state_indices is None else state_indices
    if slots.dim() == 1:
        slots = slots.unsqueeze(1)

    def in_pool(slot: int) -> bool:
        return 0 <= slot < pool.shape[0]

    for b in range(batch):
        accepted = None if num_accepted_tokens is None else int(num_accepted_tokens[b])
        start = 0
        if accepted is not None and kept is None:
            start = min(max(accepted, 1), slots.shape[1]) - 1
        slot = int(slots[b, start])
        if not in_pool(slot):
            continue
        s = pool[slot]
        if kept is not None:
            assert accepted is not None and tokens <= kept.u.shape[1]
            count = min(max(accepted, 0), kept.u.shape[1])
            past_k, past_g, past_u = (x[slot, :count] for x in kept)
            if use_qk_l2norm_in_kernel:
                past_k = l2norm(past_k, dtype)
            if use_gate_in_kernel:
                past_g = log_decay(past_g, A_log, dt_bias, lower_bound, dtype)
            past_k = per_value_head(past_k, heads)
            for i in range(count):
                s = replay(s, past_k[i], past_g[i], past_u[i])
            pool[slot] = s
        for t in range(tokens):
            s, u = advance(s, k[b, t], v[b, t], g[b, t], beta[b, t])
            o[b, t] = scale * torch.einsum("hkv,hk->hv", s, q[b, t])
            if kept is not None:
                kept.k[slot, t], kept.g[slot, t], kept.u[slot, t] = raw_k[b, t], raw_g[b, t], u
            elif slots.shape[1] > 1 and in_pool(int(slots[b, t])):
                pool[int(slots[b, t])] = s
        if kept is None and slots.shape[1] == 1:
            pool[slot] = s

    if dtype is not torch.float64:
        pool = pool.to(state.dtype).to(dtype)
        if kept is not None and records is not None:
            kept = KdaRecords(
                *(new.to(old.dtype).to(dtype) for new, old in zip(kept, records, strict=True))
            )
    return KdaDecodeResult(o.squeeze(1) if squeeze else o, _laid_out(pool, state_v_first), kept)


# ---- a chunk at a time


class Chunk(NamedTuple):
    """Where a chunk lies: its rows of a batch, its sequence, and its place among the states h."""

    batch: int
    rows: slice
    sequence: int
    state: tuple[int, int]


def chunks(x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> Iterator[Chunk]:
    """The chunks of all sequences of x, `[B, T, ...]`, those of a sequence in their order."""
    if cu_seqlens is None:
        bounds = [(b, 0, x.shape[1]) for b in range(x.shape[0])]
    else:
        assert x.shape[0] == 1
        offsets = cu_seqlens.tolist()
        bounds = [(0, start, end) for start, end in itertools.pairwise(offsets)]
    packed = 0
    for sequence, (batch, start, end) in enumerate(bounds):
        for i, first in enumerate(range(start, end, CHUNK)):
            place = (0, packed) if cu_seqlens is not None else (batch, i)
            yield Chunk(batch, slice(first, min(first + CHUNK, end)), sequence, place)
            packed += 1


def kda_gate_cumsum_reference(
    g: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """G: natural logarithms of decay, `[B, T, HV, K]`, summed in each chunk, in base 2."""
    total = torch.full(g.shape, math.nan, dtype=dtype, device=g.device)
    for chunk in chunks(g, cu_seqlens):
        at = (chunk.batch, chunk.rows)
        total[at] = g[at].to(dtype).cumsum(dim=0) / math.log(2)
    return total


def kda_chunk_intra_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    stage_dtype: torch.dtype | None = None,
) -> KdaIntra:
    """Within a chunk, with i and j its tokens, and all for one value head:

        Aqk_ij = scale sum_d q_id k_jd exp2(G_id - G_jd)                     for j <= i
        L_ij   = beta_i sum_d k_id k_jd exp2(G_id - G_jd)                    for j < i
        Akk    = (I + L)^-1

    and w, u, qg and kg as `kda_recompute_w_u_reference` has them. Each exponent is a difference
    of sums, none is split in two, so that no gate overflows.

    Args:
        g: G, what `kda_gate_cumsum_reference` gives.
        stage_dtype: as in `kda_chunk_reference`.
    """
    heads = v.shape[2]
    shape = (*v.shape[:3], CHUNK)
    Aqk, Akk = (torch.full(shape, math.nan, dtype=dtype, device=v.device) for _ in range(2))
    scale = _scale(scale, q)
    for chunk in chunks(q, cu_seqlens):
        at = (chunk.batch, chunk.rows)
        q_c, k_c = (per_value_head(x[at].to(dtype), heads).transpose(0, 1) for x in (q, k))
        g_c = g[at].to(dtype).transpose(0, 1)
        size = g_c.shape[1]
        later = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
        exponent = g_c.unsqueeze(2) - g_c.unsqueeze(1)  # [HV, i, j, K]
        decayed = torch.exp2(exponent.masked_fill(later[:, :, None], -math.inf)) * k_c.unsqueeze(1)
        qk, kk = (torch.einsum("hid,hijd->hij", x, decayed) for x in (q_c, k_c))
        lower = beta[at].to(dtype).T.unsqueeze(-1) * kk.tril(-1)
        one = torch.eye(size, dtype=dtype, device=v.device).expand_as(lower)
        inverse = torch.linalg.solve_triangular(one + lower, one, upper=False)
        for whole, part in ((Aqk, scale * qk), (Akk, inverse)):
            rows = torch.nn.functional.pad(part, (0, CHUNK - size))
            whole[at] = _stored(rows, stage_dtype).transpose(0, 1)
    w, u, qg, kg = kda_recompute_w_u_reference(
        q, k, v, g, beta, Akk, cu_seqlens=cu_seqlens, dtype=dtype, stage_dtype=stage_dtype
    )
    return KdaIntra(Aqk, Akk, w, u, qg, kg)


def kda_recompute_w_u_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    Akk: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    stage_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The chunk as seen from the state that it starts from; with e its last token:

    w = Akk Diag(beta) (exp2(G) * k)        qg = exp2(G) * q
    u = Akk Diag(beta) v                    kg = exp2(G_e - G) * k
    """
    heads = v.shape[2]
    w, qg, kg = (torch.full(g.shape, math.nan, dtype=dtype, device=v.device) for _ in range(3))
    u = torch.full(v.shape, math.nan, dtype=dtype, device=v.device)
    for chunk in chunks(q, cu_seqlens):
        at = (chunk.batch, chunk.rows)
        q_c, k_c = (per_value_head(x[at].to(dtype), heads) for x in (q, k))
        g_c, v_c = g[at].to(dtype), v[at].to(dtype)
        beta_c = beta[at].to(dtype).unsqueeze(-1)
        inverse = Akk[at].to(dtype)[..., : g_c.shape[0]]
        k_seen = _stored(beta_c * torch.exp2(g_c) * k_c, stage_dtype)
        w[at] = torch.einsum("ihj,jhk->ihk", inverse, k_seen)
        u[at] = torch.einsum("ihj,jhv->ihv", inverse, _stored(beta_c * v_c, stage_dtype))
        qg[at] = torch.exp2(g_c) * q_c
        kg[at] = torch.exp2(g_c[-1] - g_c) * k_c
    w, u, qg, kg = (_stored(x, stage_dtype) for x in (w, u, qg, kg))
    return w, u, qg, kg


def kda_chunk_delta_h_reference(
    kg: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    stage_dtype: torch.dtype | None = None,
) -> KdaStates:
    """From chunk to chunk, with e the last token:

    h = S        v_new = u - w S        S <- Diag(exp2(G_e)) S + kg^T v_new
    """
    kg, w, u, g = (x.to(dtype) for x in (kg, w, u, g))
    v_new = torch.full_like(u, math.nan)
    h = _states_of_chunks(w, u, cu_seqlens)
    final_state = _initial_states(initial_state, w, u, cu_seqlens, state_v_first, dtype)
    for chunk in chunks(u, cu_seqlens):
        at = (chunk.batch, chunk.rows)
        state = final_state[chunk.sequence]
        h[chunk.state] = _stored(state, stage_dtype)
        new = u[at] - torch.einsum("ihk,hkv->ihv", w[at], h[chunk.state])
        v_new[at] = _stored(new, stage_dtype)
        final_state[chunk.sequence] = torch.exp2(g[at][-1]).unsqueeze(-1) * state + torch.einsum(
            "ihk,ihv->hkv", kg[at], v_new[at]
        )
    return KdaStates(_laid_out(h, state_v_first), v_new, _laid_out(final_state, state_v_first))


def kda_chunk_output_reference(
    q: torch.Tensor,
    v_new: torch.Tensor,
    g: torch.Tensor,
    Aqk: torch.Tensor,
    h: torch.Tensor,
    scale: float | None = None,
    *,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    stage_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """o = scale (exp2(G) * q) h + Aqk v_new"""
    heads = v_new.shape[2]
    scale = _scale(scale, q)
    h = _laid_out(h.to(dtype), state_v_first)
    o = torch.full(v_new.shape, math.nan, dtype=dtype, device=q.device)
    for chunk in chunks(q, cu_seqlens):
        at = (chunk.batch, chunk.rows)
        g_c, new = g[at].to(dtype), v_new[at].to(dtype)
        qg = _stored(torch.exp2(g_c) * per_value_head(q[at].to(dtype), heads), stage_dtype)
        scores = Aqk[at].to(dtype)[..., : g_c.shape[0]].transpose(0, 1).tril()
        o[at] = scale * torch.einsum("ihk,hkv->ihv", qg, h[chunk.state])
        o[at] += torch.einsum("hij,jhv->ihv", scores, new)
    return o


def kda_chunk_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    stage_dtype: torch.dtype | None = None,
) -> KdaStages:
    """`kda_reference` by chunks, with the results of every stage.

    A gate of -inf, which the recurrence takes for a decay of 0, makes NaN here: a sum of gates
    that is -inf cannot be subtracted from another.

    Args:
        stage_dtype: what q and k after their normalisation, and all that a stage leaves to the
            next, are rounded to, as are the operands of products that are made of them. G and the
            state from chunk to chunk stay in `dtype`. With `dtype` float32 this is what plain code
            computes that keeps these tensors in 16 bits: the yardstick for errors. None rounds
            nothing. o is not rounded.
    """
    q, k, g, beta = prepare(
        q,
        k,
        g,
        beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        dtype=dtype,
    )
    q, k = _stored(q, stage_dtype), _stored(k, stage_dtype)
    scale = _scale(scale, q)
    g = kda_gate_cumsum_reference(g, cu_seqlens=cu_seqlens, dtype=dtype)
    intra = kda_chunk_intra_reference(
        q, k, v, g, beta, scale, cu_seqlens=cu_seqlens, dtype=dtype, stage_dtype=stage_dtype
    )
    states = kda_chunk_delta_h_reference(
        intra.kg,
        intra.w,
        intra.u,
        g,
        initial_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        dtype=dtype,
        stage_dtype=stage_dtype,
    )
    o = kda_chunk_output_reference(
        q,
        states.v_new,
        g,
        intra.Aqk,
        states.h,
        scale,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        dtype=dtype,
        stage_dtype=stage_dtype,
    )
    return KdaStages(q, k, beta, g, intra, states, o)


def _scale(scale: float | None, q: torch.Tensor) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def _stored(x: torch.Tensor, stage_dtype: torch.dtype | None) -> torch.Tensor:
    return x if stage_dtype is None else x.to(stage_dtype).to(x.dtype)


def _laid_out(states: torch.Tensor, state_v_first: bool) -> torch.Tensor:
    """Between the layout that a caller asked for and `[..., K, V]`, which is used here."""
    return states.transpose(-1, -2) if state_v_first else states


def _states_of_chunks(
    q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Room for the state at the start of every chunk."""
    count = sum(1 for _ in chunks(q[:1], cu_seqlens))
    return v.new_full((q.shape[0], count, v.shape[2], q.shape[-1], v.shape[-1]), math.nan)


def _initial_states(
    initial_state: torch.Tensor | None,
    q: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    state_v_first: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`[N, HV, K, V]`, to be written to."""
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        shape = (sequences, v.shape[2], q.shape[-1], v.shape[-1])
        return torch.zeros(shape, dtype=dtype, device=q.device)
    assert initial_state.shape[0] == sequences
    return _laid_out(initial_state.to(dtype), state_v_first).clone()
