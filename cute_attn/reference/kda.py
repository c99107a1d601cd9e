"""Kimi Delta Attention in plain PyTorch: the reference for tests of the kernels.

For each token, where the state S of a value head is a K by V matrix (Kimi Linear, arXiv
2510.26692):

    S <- Diag(exp(g)) S        decay, each row of S at its own rate
    u  = beta (v - S^T k)      the correction: v minus S's prediction for k
    S <- S + k u^T
    o  = scale S^T q

`kda_reference` and `kda_decode_reference` compute this token by token, and are the references. The
functions named for a stage compute the stage in chunks of 64 tokens, as the kernels do, so that
each stage can be tested alone; `kda_chunk_reference` runs all stages. `kda_gradients`
differentiates the reference by autograd; `kda_chunk_gradients` computes these gradients by chunks.

Shapes: q, k `[B, T, HQK, K]`; v `[B, T, HV, V]`; g `[B, T, HV, K]`; beta `[B, T, HV]`. With grouped
value heads, HV is a multiple of HQK, and value head h uses query and key head h // (HV // HQK). g
may be `[B, T, HV, 1]`, a decay for all channels of a head; `gated_delta_rule` uses that.
With cu_seqlens `[N + 1]`, B is 1 and tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1 are sequence n,
which may be empty. Results for tokens of no sequence are undefined, and NaN here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .convolution import causal_convolution_reference
from .rounding import rounded

CHUNK = 64
L2NORM_EPSILON = 1e-6  # added to the sum of squares, as flash-linear-attention does
# The backward divides by beta. A smaller |beta| counts as this value with beta's sign.
SMALLEST_BETA = {torch.bfloat16: 2.0**-40, torch.float16: 2.0**-14}

_Tensors = dict[str, torch.Tensor]


class KdaResult(NamedTuple):
    """Results for whole sequences.

    `final_state` is `[N, HV, K, V]`. `h`, the states at the start of every chunk, is
    `[B, chunks, HV, K, V]`, with the chunks of packed sequences one after the other. With
    state_v_first both shapes end in `V, K`.
    """

    o: torch.Tensor
    final_state: torch.Tensor
    h: torch.Tensor


class KdaGradients(NamedTuple):
    """Gradients, in the arguments' shapes; None for an argument not given or not used."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    dA_log: torch.Tensor | None
    ddt_bias: torch.Tensor | None
    dinitial_state: torch.Tensor | None


class KdaRecords(NamedTuple):
    """The drafted tokens of each slot, from which the state after any drafted token can be
    computed.

    k and g are the call's arguments, unchanged, so that a replay repeats the draft's arithmetic
    exactly. u is the correction. With u a replay needs no product of state and k.
    """

    k: torch.Tensor  # [slots, S, HQK, K]
    g: torch.Tensor  # [slots, S, HV, K]
    u: torch.Tensor  # [slots, S, HV, V]


class KdaDecodeResult(NamedTuple):
    """Results of a decode step; None for what a call does not have."""

    o: torch.Tensor
    state: torch.Tensor
    records: KdaRecords | None
    draft_states: torch.Tensor | None
    conv_state: torch.Tensor | None = None
    draft_windows: torch.Tensor | None = None


class KdaIntra(NamedTuple):
    """The results of a chunk that need no state. Aqk and Akk are 0 above the diagonal."""

    Aqk: torch.Tensor  # [B, T, HV, CHUNK], includes the scale
    Akk: torch.Tensor  # [B, T, HV, CHUNK], the inverse
    w: torch.Tensor  # [B, T, HV, K]
    u: torch.Tensor  # [B, T, HV, V]
    qg: torch.Tensor  # [B, T, HV, K], does not include the scale
    kg: torch.Tensor  # [B, T, HV, K]


class KdaStates(NamedTuple):
    """Results of the pass over chunks, with states as in `KdaResult`."""

    h: torch.Tensor
    v_new: torch.Tensor  # [B, T, HV, V]
    final_state: torch.Tensor


class KdaStages(NamedTuple):
    """The results of all stages, in their order; q, k and beta are the stages' inputs."""

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
    """The gate, which is the natural logarithm of the decay, from a layer's projection g:

        -exp(A_log) softplus(g + dt_bias)                    without a lower bound
        lower_bound sigmoid(exp(A_log) (g + dt_bias))        with a lower bound

    Without A_log, exp(A_log) is 1.

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
    """x with every row divided by its norm; see L2NORM_EPSILON."""
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
    """Apply the norms, the gate and the sigmoid to q, k, g and beta where they are requested."""
    assert use_beta_sigmoid_in_kernel or not allow_neg_eigval
    q, k = (l2norm(x, dtype) if use_qk_l2norm_in_kernel else x.to(dtype) for x in (q, k))
    g = log_decay(g, A_log, dt_bias, lower_bound, dtype) if use_gate_in_kernel else g.to(dtype)
    beta = beta.to(dtype)
    if use_beta_sigmoid_in_kernel:
        beta = (2.0 if allow_neg_eigval else 1.0) * torch.sigmoid(beta)
    return q, k, g, beta


def per_value_head(x: torch.Tensor, heads_v: int) -> torch.Tensor:
    """q or k, `[..., HQK, K]`, with each head repeated for its value heads: `[..., HV, K]`."""
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
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> KdaResult:
    """The reference for `chunk_kda` and `fused_recurrent_kda`.

    Args:
        beta: `[B, T, HV]`, or `[B, T, HV, V]` for a beta of each column of V.
        gk: `[B, T, HV, K]`: logarithms of decays that multiply those of g, which are not the input
            of a gate.
        gv: `[B, T, HV, V]`, as gk: a decay for each column of V.
        scale: factor of q; 1 / sqrt(K) by default.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with state_v_first; zeros by default.
        use_gate_in_kernel: whether g is the input of `log_decay`, not the gate itself.
        allow_neg_eigval: beta is 2 sigmoid(beta).
        safe_gate: the gates are bounded. The flag changes no result.
        lower_bound: lower bound of the gate; ignored without use_gate_in_kernel.
        dtype: dtype of the arithmetic. float64 gives the reference, float32 a plain PyTorch
            implementation.
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
    g = g if gk is None else g + gk.to(dtype)
    scale = _scale(scale, q)
    o = torch.full_like(v, math.nan)
    h = _states_of_chunks(q, v, cu_seqlens)
    states = _initial_states(initial_state, q, v, cu_seqlens, state_v_first, dtype)
    for chunk in chunks(q, cu_seqlens):
        state, rows = states[chunk.sequence], []
        h[chunk.state] = state.detach()
        for t in range(chunk.rows.start, chunk.rows.stop):
            at = (chunk.batch, t)
            of_columns = None if gv is None else gv[at].to(dtype)
            state, _ = advance(state, k[at], v[at], g[at], beta[at], of_columns)
            rows.append(scale * torch.einsum("hkv,hk->hv", state, q[at]))
        o[chunk.batch, chunk.rows] = torch.stack(rows)
        states[chunk.sequence] = state
    final_state = _stacked(states, q, v)
    return KdaResult(o, _laid_out(final_state, state_v_first), _laid_out(h, state_v_first))


def advance(
    state: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gv: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance all value heads by a token: the state after the token, `[HV, K, V]`, and the
    correction. beta is `[HV]` or `[HV, V]`, gv `[HV, V]`."""
    state = torch.exp(g).unsqueeze(-1) * state
    if gv is not None:
        state = torch.exp(gv).unsqueeze(-2) * state
    beta = beta if beta.dim() == v.dim() else beta.unsqueeze(-1)
    u = beta * (v - torch.einsum("hkv,hk->hv", state, k))
    return state + k.unsqueeze(-1) * u.unsqueeze(-2), u


def replay(state: torch.Tensor, k: torch.Tensor, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The state after a token whose correction u is known."""
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
    cu_seqlens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    draft_states: torch.Tensor | None = None,
    draft_indices: torch.Tensor | None = None,
    conv_state: torch.Tensor | None = None,
    conv_weight: torch.Tensor | None = None,
    conv_bias: torch.Tensor | None = None,
    draft_windows: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> KdaDecodeResult:
    """The reference for `kda_decode`: one or more tokens of every sequence. No input is changed.

    Plain decoding: sequence b starts from slot state_indices[b] (or b) of the pool, and stores the
        state after its last token in the same slot.

    Speculative decoding with a slot for each position: state_indices is `[B, 1 + S]`, and there are
    at most 1 + S tokens. The state after token t is stored in slot state_indices[b, t]. The first
    num_accepted_tokens[b] tokens of the last call were accepted, so this call starts from slot
    state_indices[b, num_accepted_tokens[b] - 1]. Values of `num_accepted_tokens` are clamped to at
    least 1 and at most 1 + S.

    Speculative decoding with records: the slot holds the state before the tokens of the last call,
    and `records` holds those tokens. This call replays the first num_accepted_tokens[b] recorded
    tokens and stores the resulting state in the slot. Then the call computes its own tokens, at
    most S, and stores them in the records, not in the state. Values of `num_accepted_tokens` are
    clamped to at least 0 and at most S.

    Speculative decoding with a tensor for drafts: the state after token t is stored in
        draft_states[draft_indices[b], t], and the pool does not change.

    A sequence whose starting slot is negative, or past the pool, is padding. Its output is 0, and
    neither state nor records change. If a position's slot is negative or past the pool, the state
    after that position is not stored. With pad_slot_id 0, slot 0 counts as negative.

    A sequence whose has_initial_state is False starts from a state of 0. With cu_seqlens,
    `[1, T, ...]` holds sequences of different lengths; the result is NaN for tokens of no sequence,
    and an empty sequence changes nothing.

    With conv_state, q, k and v go through `causal_convolution_reference` first.

    Args:
        q, k, v, g, beta: `[B, T, ...]`, or without the dimension of tokens.
        state: the pool, `[slots, HV, V, K]`, or `[slots, HV, K, V]` without state_v_first.
        dtype: dtype of the arithmetic, as in `kda_reference`.

    Returns:
        All results in `dtype`. Unless `dtype` is float64, states and records have been rounded to
        the dtypes that they are stored in.
    """
    squeeze = q.dim() == 3
    if squeeze:
        q, k, v, g, beta = (x.unsqueeze(1) for x in (q, k, v, g, beta))
    batch, tokens, heads = v.shape[:3]
    raw_k, raw_g = k.to(dtype), g.to(dtype)
    record_k = None if records is None else records.k.to(dtype)
    windows = None
    if conv_state is not None:
        assert conv_weight is not None
        q, k, v, conv_state, record_k, windows = causal_convolution_reference(
            q,
            k,
            v,
            conv_state,
            conv_weight,
            conv_bias,
            state_indices=state_indices,
            num_accepted_tokens=num_accepted_tokens,
            record_k=record_k,
            cu_seqlens=cu_seqlens,
            has_initial_state=has_initial_state,
            pad_slot_id=pad_slot_id,
            draft_windows=draft_windows,
            draft_indices=draft_indices,
            dtype=dtype,
        )
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
    spans = [(b, 0, tokens) for b in range(batch)]
    if cu_seqlens is not None:
        spans = [(0, start, end) for start, end in itertools.pairwise(cu_seqlens.tolist())]
        o.fill_(math.nan)
    slots = torch.arange(len(spans)) if state_indices is None else state_indices
    if slots.dim() == 1:
        slots = slots.unsqueeze(1)
    drafts = None
    if draft_states is not None:
        assert draft_indices is not None
        drafts = _laid_out(draft_states.to(dtype), state_v_first).clone()

    def in_pool(slot: int) -> bool:
        return int(pad_slot_id == 0) <= slot < pool.shape[0]

    for b, (row, first, end) in enumerate(spans):
        accepted = None if num_accepted_tokens is None else int(num_accepted_tokens[b])
        start = 0
        if accepted is not None and kept is None:
            start = min(max(accepted, 1), slots.shape[1]) - 1
        slot = int(slots[b, start])
        if not in_pool(slot):
            o[row, first:end] = 0
            continue
        if first == end:
            continue
        s = pool[slot]
        if has_initial_state is not None and not has_initial_state[b]:
            s = torch.zeros_like(s)
        if kept is not None:
            assert accepted is not None and tokens <= kept.u.shape[1]
            count = min(max(accepted, 0), kept.u.shape[1])
            assert record_k is not None
            past_k, past_g, past_u = (x[slot, :count] for x in (record_k, kept.g, kept.u))
            if use_qk_l2norm_in_kernel:
                past_k = l2norm(past_k, dtype)
            if use_gate_in_kernel:
                past_g = log_decay(past_g, A_log, dt_bias, lower_bound, dtype)
            past_k = per_value_head(past_k, heads)
            for i in range(count):
                s = replay(s, past_k[i], past_g[i], past_u[i])
            pool[slot] = s
        for t in range(end - first):
            at = (row, first + t)
            s, u = advance(s, k[at], v[at], g[at], beta[at])
            o[at] = scale * torch.einsum("hkv,hk->hv", s, q[at])
            if kept is not None:
                kept.k[slot, t], kept.g[slot, t], kept.u[slot, t] = raw_k[at], raw_g[at], u
            elif drafts is not None:
                draft = int(draft_indices[b])  # type: ignore[index]
                if 0 <= draft < drafts.shape[0] and t < drafts.shape[1]:
                    drafts[draft, t] = s
            elif 1 < slots.shape[1] > t and in_pool(int(slots[b, t])):
                pool[int(slots[b, t])] = s
        if kept is None and drafts is None and slots.shape[1] == 1:
            pool[slot] = s

    if dtype is not torch.float64:
        pool = pool.to(state.dtype).to(dtype)
        drafts = None if drafts is None else drafts.to(state.dtype).to(dtype)
        if kept is not None and records is not None:
            kept = KdaRecords(
                *(new.to(old.dtype).to(dtype) for new, old in zip(kept, records, strict=True))
            )
    return KdaDecodeResult(
        o.squeeze(1) if squeeze else o,
        _laid_out(pool, state_v_first),
        kept,
        None if drafts is None else _laid_out(drafts, state_v_first),
        conv_state,
        windows,
    )


# ---- a chunk at a time


class Chunk(NamedTuple):
    """A chunk: its batch index and rows, its sequence, and its index in h."""

    batch: int
    rows: slice
    sequence: int
    state: tuple[int, int]


def chunks(x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> Iterator[Chunk]:
    """The chunks of all sequences of x, `[B, T, ...]`, in order within each sequence."""
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
    """G: the cumulative sum of g, `[B, T, HV, K]`, within each chunk, divided by ln 2."""
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
    jitter: torch.Generator | None = None,
) -> KdaIntra:
    """The part of a chunk that needs no state. For one value head, with i and j tokens of the
    chunk:

        Aqk_ij = scale sum_d q_id k_jd exp2(G_id - G_jd)                     for j <= i
        L_ij   = beta_i sum_d k_id k_jd exp2(G_id - G_jd)                    for j < i
        Akk    = (I + L)^-1

    and w, u, qg and kg of `kda_recompute_w_u_reference`. Each exponent is a difference of sums, so
    that no gate overflows.

    Args:
        g: G, the result of `kda_gate_cumsum_reference`.
        stage_dtype: as in `kda_chunk_reference`.
        jitter: as in `kda_chunk_gradients`, for Aqk and Akk.
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
            whole[at] = _stored(rows, stage_dtype, jitter).transpose(0, 1)
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
    """The factors of a chunk that multiply or update its initial state. With e the chunk's last
    token:

    w = Akk Diag(beta) (exp2(G) * k)        qg = exp2(G) * q
    u = Akk Diag(beta) v                    kg = exp2(G_e - G) * k
    """
    heads = v.shape[2]
    shape = (*g.shape[:-1], k.shape[-1])
    w, qg, kg = (torch.full(shape, math.nan, dtype=dtype, device=v.device) for _ in range(3))
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
    """The pass of the state over chunks, where e is a chunk's last token:

    h = S        v_new = u - w S        S <- Diag(exp2(G_e)) S + kg^T v_new
    """
    kg, w, u, g = (x.to(dtype) for x in (kg, w, u, g))
    v_new = torch.full_like(u, math.nan)
    h = _states_of_chunks(w, u, cu_seqlens)
    states = _initial_states(initial_state, w, u, cu_seqlens, state_v_first, dtype)
    for chunk in chunks(u, cu_seqlens):
        at = (chunk.batch, chunk.rows)
        state = states[chunk.sequence]
        start = _stored(state, stage_dtype)
        h[chunk.state] = start
        new = _stored(u[at] - torch.einsum("ihk,hkv->ihv", w[at], start), stage_dtype)
        v_new[at] = new
        states[chunk.sequence] = torch.exp2(g[at][-1]).unsqueeze(-1) * state + torch.einsum(
            "ihk,ihv->hkv", kg[at], new
        )
    final_state = _stacked(states, w, u)
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

    A gate of -inf, which is a decay of 0 in `kda_reference`, makes NaN here, because the difference
    of two sums that are -inf is NaN.

    Args:
        stage_dtype: dtype to which these are rounded: normalised q and k, the results that a stage
            passes to the next stage, and product operands computed from these tensors. G, the state
            and o are not rounded. With `dtype` float32 this is plain code that stores tensors in 16
            bits; tests compare the kernels' error with this code's error. None rounds nothing.
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


# ---- gradients


def kda_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    do: torch.Tensor | None = None,
    dfinal_state: torch.Tensor | None = None,
    **options: Any,
) -> KdaGradients:
    """The gradients of sum(o * do) + sum(final_state * dfinal_state) in float64, by autograd of
    `kda_reference`. Tokens of no sequence have gradient 0, whatever their values.

    Args:
        do, dfinal_state: of the shapes of o and final_state of `kda_reference`; None is 0.
        options: the other arguments of `kda_reference`.
    """

    def slopes(leaves: _Tensors, options: dict[str, Any], *weights: torch.Tensor) -> _Tensors:
        results = kda_reference(**options | leaves)[:2]
        return _slopes(results, weights, leaves)

    return _of_used_tokens(slopes, torch.float64, (q, k, v, g, beta), (do, dfinal_state), options)


def kda_chunk_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    do: torch.Tensor | None = None,
    dfinal_state: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    stage_dtype: torch.dtype | None = None,
    jitter: torch.Generator | None = None,
    **options: Any,
) -> KdaGradients:
    """The gradients of `kda_reference` by chunks, in the kernels' order: states forwards, gradients
    of states backwards, then each chunk's tokens. docs/kernels/kda_backward.md has the formulas.

    Args:
        dtype: dtype of the arithmetic and of the gradients.
        stage_dtype: dtype to which these are rounded: normalised q and k, tensors that a stage
            passes to the next stage (states, gradients of states, v_new ...), and product operands
            computed from these tensors. With `dtype` float32 this is plain code; tests compare the
            kernels' error with this code's error. None rounds nothing.
        jitter: a generator of random factors. A value is rounded to `stage_dtype` while multiplied
            by its factor. The rounding errors change, but not their size.
    """

    def slopes(leaves: _Tensors, options: dict[str, Any], *weights: torch.Tensor) -> _Tensors:
        options = dict(options)
        scale = _scale(options.pop("scale", None), q)
        cu_seqlens = options.pop("cu_seqlens", None)
        v_first = options.pop("state_v_first", False)
        options.pop("safe_gate", None)
        state = leaves.get("initial_state", options.pop("initial_state", None))
        v = leaves["v"].detach()
        prepared_of = {x: leaves[x] for x in leaves if x not in ("v", "initial_state")}
        prepared = prepare(**options | prepared_of, dtype=dtype)
        q_, k_, g_, beta_ = (x.detach() for x in prepared)
        states = _initial_states(
            None if state is None else state.detach(), q_, v, cu_seqlens, v_first, dtype
        )
        adjoints = list(_laid_out(weights[1], v_first))
        found = [torch.zeros_like(x) for x in (q_, k_, v, g_, beta_)]
        of_chunks = []
        for chunk in chunks(q_, cu_seqlens):
            at = (chunk.batch, chunk.rows)
            tokens = (x[at] for x in (q_, k_, v, g_, beta_))
            tiles = _Tiles(scale, stage_dtype, jitter, *tokens)
            start = states[chunk.sequence]
            states[chunk.sequence] = tiles.forwards(start)
            of_chunks.append((chunk, tiles, start))
        for chunk, tiles, start in reversed(of_chunks):
            at = (chunk.batch, chunk.rows)
            after = adjoints[chunk.sequence]
            adjoints[chunk.sequence] = tiles.backwards(after, weights[0][at])
            for whole, part in zip(found, tiles.gradients(start, after), strict=True):
                whole[at] = part
        dq, dk, dv, dg, dbeta = found
        slopes = _slopes(prepared, (dq, dk, dg, dbeta), prepared_of) | {"v": dv}
        if "initial_state" in leaves:
            stacked = _stacked(adjoints, q_, v)
            slopes["initial_state"] = _laid_out(stacked, v_first)
        return slopes

    return _of_used_tokens(slopes, dtype, (q, k, v, g, beta), (do, dfinal_state), options)


class _Tiles:
    """A chunk of all value heads, `[HV, C, ...]`, and its gradients; the arguments hold its
    tokens."""

    def __init__(
        self,
        scale: float,
        stage_dtype: torch.dtype | None,
        jitter: torch.Generator | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> None:
        heads = v.shape[1]
        self.jitter = jitter
        self.group, self.scale, self.stage_dtype = heads // q.shape[1], scale, stage_dtype
        self.q, self.k = (per_value_head(self.stored(x), heads).transpose(0, 1) for x in (q, k))
        self.v, g = v.transpose(0, 1), g.transpose(0, 1).cumsum(dim=1)
        self.decay_per_head = g.shape[-1] == 1
        later = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).triu(1)
        pairs = (g.unsqueeze(2) - g.unsqueeze(1)).masked_fill(later[..., None], -math.inf)
        self.pairs = torch.exp(pairs)  # decay from token j to token i, [HV, i, j, K]
        self.from_start, self.to_end = torch.exp(g), torch.exp(g[:, -1:] - g)
        # The gradient of beta is divided by beta.
        smallest = SMALLEST_BETA[stage_dtype or torch.bfloat16]
        self.true_beta = beta.T.unsqueeze(-1)
        self.beta = torch.copysign(self.true_beta.abs().clamp(min=smallest), self.true_beta)
        Aqk = scale * torch.einsum("hid,hjd,hijd->hij", self.q, self.k, self.pairs)
        lower = self.beta * torch.einsum("hid,hjd,hijd->hij", self.k, self.k, self.pairs).tril(-1)
        one = torch.eye(g.shape[1], dtype=g.dtype, device=g.device).expand_as(lower)
        inverse = torch.linalg.solve_triangular(one + lower, one, upper=False)
        self.Aqk, self.Akk = self.stored(Aqk), self.stored(inverse)
        self.kd = self.stored(self.from_start * self.k)
        self.qg = self.stored(scale * self.from_start * self.q)
        self.kg = self.stored(self.to_end * self.k)
        self.decay = self.from_start[:, -1].unsqueeze(-1)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        return _stored(x, self.stage_dtype, self.jitter)

    def forwards(self, state: torch.Tensor) -> torch.Tensor:
        """The state after the chunk."""
        residual = self.beta * (self.v - self.kd @ self.stored(state))
        self.v_new = self.stored(self.Akk @ self.stored(residual))
        return self.decay * state + self.kg.mT @ self.v_new

    def backwards(self, after: torch.Tensor, do: torch.Tensor) -> torch.Tensor:
        """The gradient of the state before the chunk, from the gradient of the state after the
        chunk."""
        self.do = do.transpose(0, 1)
        dv_new = self.Aqk.mT @ self.do + self.kg @ self.stored(after)
        self.dr = self.stored(self.beta * (self.Akk.mT @ self.stored(dv_new)))
        return self.decay * after + self.qg.mT @ self.do - self.kd.mT @ self.dr

    def gradients(self, state: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradients of q, k, v, g and beta, in their shapes."""
        q, k, scale = self.q, self.k, self.scale
        state, after = self.stored(state), self.stored(after)
        dAqk = scale * self.do @ self.v_new.mT
        both = -self.dr @ self.v_new.mT
        own = dAqk.diagonal(dim1=1, dim2=2).unsqueeze(-1)  # no decay where i == j
        dAqk, dlower = (self.stored(x.tril(-1)) for x in (dAqk, both))
        row_q = scale * self.from_start * (self.do @ state.mT)
        row_q = row_q + torch.einsum("hij,hjd,hijd->hid", dAqk, k, self.pairs)
        row_k = -self.from_start * (self.dr @ state.mT)
        row_k = row_k + torch.einsum("hij,hjd,hijd->hid", dlower, k, self.pairs)
        of_end = self.to_end * (self.v_new @ after.mT)
        column = torch.einsum("hij,hid,hijd->hjd", dAqk, q, self.pairs)
        column = column + torch.einsum("hij,hid,hijd->hjd", dlower, k, self.pairs) + of_end
        dg = q * row_q + k * row_k - k * column
        dg[:, -1] += (k * of_end).sum(1) + (self.decay * state * after).sum(2)
        if self.decay_per_head:
            dg = dg.sum(dim=-1, keepdim=True)
        dg = dg.flip(1).cumsum(dim=1).flip(1)
        dbeta = -both.diagonal(dim1=1, dim2=2).unsqueeze(-1) / self.beta**2
        dv = self.dr * (self.true_beta / self.beta)
        dq, dk = (
            x.unflatten(0, (-1, self.group)).sum(1)
            for x in (row_q + own * k, row_k + column + own * q)
        )
        return *(x.transpose(0, 1) for x in (dq, dk, dv, dg)), dbeta.squeeze(-1).T


def _slopes(
    results: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], leaves: _Tensors
) -> _Tensors:
    """The gradients of the sum of results * weights."""
    pairs = [(x, dx) for x, dx in zip(results, weights, strict=True) if x.requires_grad]
    if not pairs:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    found = torch.autograd.grad(
        [x for x, _ in pairs],
        list(leaves.values()),
        [dx for _, dx in pairs],
        materialize_grads=True,
    )
    return dict(zip(leaves, found, strict=True))


def _of_used_tokens(
    slopes: Callable[..., _Tensors],
    dtype: torch.dtype,
    tensors: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    options: dict[str, Any],
) -> KdaGradients:
    """Gradients computed by `slopes`, for tokens of sequences only. `slopes` gets the arguments
    that have a gradient, by name, the other options, and the gradients of o and final_state."""
    q, _, v, *_ = tensors
    options = dict(options)
    tokens = torch.arange(q.shape[1], device=q.device)
    cu_seqlens = options.get("cu_seqlens")
    if cu_seqlens is not None:
        tokens = tokens[cu_seqlens[0] : cu_seqlens[-1]]
        options["cu_seqlens"] = cu_seqlens - cu_seqlens[0]
    names = ["q", "k", "v", "g", "beta"]
    leaves = {name: x[:, tokens] for name, x in zip(names, tensors, strict=True)}
    used = {"A_log": "use_gate_in_kernel", "dt_bias": "use_gate_in_kernel", "initial_state": ""}
    for name, flag in used.items():
        x = options.pop(name, None)
        if x is not None and (not flag or options.get(flag)):
            leaves[name] = x
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
    do, dfinal_state = weights
    if dfinal_state is None:
        sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        matrix = (q.shape[-1], v.shape[-1])
        matrix = matrix[::-1] if options.get("state_v_first") else matrix
        dfinal_state = q.new_zeros((sequences, v.shape[2], *matrix), dtype=dtype)
    do = torch.zeros_like(v) if do is None else do
    with torch.enable_grad():
        found = slopes(leaves, options, do[:, tokens].to(dtype), dfinal_state.to(dtype))
    for name, x in zip(names, tensors, strict=True):
        whole = torch.zeros(x.shape, dtype=dtype, device=x.device)
        found[name] = whole.index_copy(1, tokens, found[name])
    return KdaGradients(*(found.get(name) for name in (*names, *used)))  # type: ignore[arg-type]


def _scale(scale: float | None, q: torch.Tensor) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def _stored(
    x: torch.Tensor, stage_dtype: torch.dtype | None, jitter: torch.Generator | None = None
) -> torch.Tensor:
    return x if stage_dtype is None else rounded(x, stage_dtype, jitter)


def _laid_out(states: torch.Tensor, state_v_first: bool) -> torch.Tensor:
    """Convert states between the caller's layout and this module's layout, `[..., K, V]`."""
    return states.transpose(-1, -2) if state_v_first else states


def _states_of_chunks(
    q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """A tensor of NaN for the states at the start of every chunk."""
    count = sum(1 for _ in chunks(q[:1], cu_seqlens))
    return v.new_full((q.shape[0], count, v.shape[2], q.shape[-1], v.shape[-1]), math.nan)


def _initial_states(
    initial_state: torch.Tensor | None,
    q: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    state_v_first: bool,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """The initial state of each sequence, or zeros: `[HV, K, V]`."""
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        zero = torch.zeros((v.shape[2], q.shape[-1], v.shape[-1]), dtype=dtype, device=q.device)
        return [zero] * sequences
    assert initial_state.shape[0] == sequences
    return list(_laid_out(initial_state.to(dtype, copy=True), state_v_first))


def _stacked(states: list[torch.Tensor], q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The states of all sequences, `[N, HV, K, V]`."""
    if not states:
        return v.new_zeros((0, v.shape[2], q.shape[-1], v.shape[-1]))
    return torch.stack(states)
