"""The gradients of KDA's stages in plain PyTorch: what the kernels of their backward compute.

Each function takes what the public function of that name takes. With `dtype` float64 it is the
reference; with float32 and a `stage_dtype` its results, and the operands of its products, are
rounded as in the kernels.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from cute_attn.reference import kda


def stored(x: torch.Tensor, stage_dtype: torch.dtype | None) -> torch.Tensor:
    return x if stage_dtype is None else x.to(stage_dtype).to(x.dtype)


def undefined(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def laid_out(states: torch.Tensor, state_v_first: bool) -> torch.Tensor:
    return states.transpose(-1, -2) if state_v_first else states


def by_heads(
    at: tuple[Any, ...], dtype: torch.dtype, heads: int, *tensors: torch.Tensor
) -> list[torch.Tensor]:
    """A chunk's rows of `[B, T, heads, ...]`, with q and k repeated: `[HV, C, ...]`."""
    return [kda.per_value_head(x[at].to(dtype), heads).transpose(0, 1) for x in tensors]


# -- output


class OutputGradients(NamedTuple):
    dAqk: torch.Tensor
    dv: torch.Tensor


def output(
    v_new: torch.Tensor,
    Aqk: torch.Tensor,
    do: torch.Tensor,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    stage_dtype: torch.dtype | None = None,
) -> OutputGradients:
    found = OutputGradients(
        undefined(*v_new.shape[:3], kda.CHUNK, dtype=dtype), undefined(*v_new.shape, dtype=dtype)
    )
    for chunk in kda.chunks(v_new, cu_seqlens):
        at = (chunk.batch, chunk.rows)
        v_c, scores, do_c = by_heads(at, dtype, v_new.shape[2], v_new, Aqk, do)
        size = v_c.shape[1]
        dAqk = scale * (do_c @ v_c.mT).tril()
        found.dAqk[at] = torch.nn.functional.pad(dAqk, (0, kda.CHUNK - size)).transpose(0, 1)
        dv = scores[..., :size].tril().mT @ do_c
        found.dv[at] = stored(dv, stage_dtype).transpose(0, 1)
    return found


# -- delta_h


class StateGradients(NamedTuple):
    dh: torch.Tensor
    dinitial_state: torch.Tensor
    dv: torch.Tensor


def delta_h(
    qg: torch.Tensor,
    kg: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    do: torch.Tensor,
    dv: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    scale: float,
    *,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    stage_dtype: torch.dtype | None = None,
) -> StateGradients:
    heads = dv.shape[2]
    sequences = dv.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    found = list(kda.chunks(dv, cu_seqlens))
    matrix = (kg.shape[-1], dv.shape[-1])
    dh = undefined(dv.shape[0], len(found) // dv.shape[0], heads, *matrix, dtype=dtype)
    if dfinal_state is None:
        states = torch.zeros(sequences, heads, *matrix, dtype=dtype)
    else:
        states = laid_out(dfinal_state.to(dtype), state_v_first).clone()
    of_u = undefined(*dv.shape, dtype=dtype)
    for chunk in reversed(found):
        at = (chunk.batch, chunk.rows)
        qg_c, kg_c, w_c, g_c, do_c, dv_c = by_heads(at, dtype, heads, qg, kg, w, g, do, dv)
        state = states[chunk.sequence]
        after = stored(state, stage_dtype)
        dh[chunk.state] = after
        du = stored(dv_c + kg_c @ after, stage_dtype)
        of_u[at] = du.transpose(0, 1)
        decay = torch.exp2(g_c[:, -1]).unsqueeze(-1)
        states[chunk.sequence] = decay * state + scale * qg_c.mT @ do_c - w_c.mT @ du
    return StateGradients(laid_out(dh, state_v_first), laid_out(states, state_v_first), of_u)


# -- recompute_w_u


class RecomputedGradients(NamedTuple):
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbeta: torch.Tensor
    dg: torch.Tensor
    dAkk: torch.Tensor


def recompute_w_u(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    v_new: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    Akk: torch.Tensor,
    h: torch.Tensor,
    do: torch.Tensor,
    dh: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    *,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    stage_dtype: torch.dtype | None = None,
) -> RecomputedGradients:
    heads = v.shape[2]
    dq, dk, dg = (undefined(*g.shape, dtype=dtype) for _ in range(3))
    of_v, dbeta = (undefined(*x.shape, dtype=dtype) for x in (v, beta))
    dAkk = undefined(*Akk.shape, dtype=dtype)
    for chunk in kda.chunks(v, cu_seqlens):
        at = (chunk.batch, chunk.rows)
        names = (q, k, v, v_new, g, beta.unsqueeze(-1), Akk, do, dv)
        q_c, k_c, v_c, new, g_c, beta_c, inverse, do_c, du = by_heads(at, dtype, heads, *names)
        state, after = (laid_out(x[chunk.state].to(dtype), state_v_first) for x in (h, dh))
        size = v_c.shape[1]
        dy = inverse[..., :size].mT @ du
        dv_c = stored(beta_c * dy, stage_dtype)
        operand = stored(dy, stage_dtype)
        lower = (-operand @ new.mT).tril(-1)
        decay, to_end = torch.exp2(g_c), torch.exp2(g_c[:, -1:] - g_c)
        dq_c = scale * decay * (do_c @ state.mT)
        of_end = to_end * (new @ after.mT)
        of_start = decay * (-operand @ state.mT)
        dg_c = q_c * dq_c - k_c * of_end + beta_c * k_c * of_start
        dg_c[:, -1] += (k_c * of_end).sum(1) + decay[:, -1] * (state * after).sum(2)
        for whole, part in (
            (dq, dq_c),
            (dk, of_end + beta_c * of_start),
            (of_v, dv_c),
            (dg, dg_c),
            (dAkk, torch.nn.functional.pad(lower, (0, kda.CHUNK - size))),
        ):
            whole[at] = part.transpose(0, 1)
        dbeta[at] = ((dy * v_c).sum(-1) + (of_start * k_c).sum(-1)).T
    return RecomputedGradients(dq, dk, of_v, dbeta, dg, dAkk)


# -- intra


class IntraGradients(NamedTuple):
    dq: torch.Tensor
    dk: torch.Tensor
    dbeta: torch.Tensor
    dg: torch.Tensor


def intra(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    dAqk: torch.Tensor,
    dAkk: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dbeta: torch.Tensor,
    dg: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> IntraGradients:
    heads, heads_qk = g.shape[2], q.shape[2]
    found = IntraGradients(*(undefined(*x.shape, dtype=dtype) for x in (q, k, beta, g)))
    for chunk in kda.chunks(g, cu_seqlens):
        at = (chunk.batch, chunk.rows)
        names = (q, k, g, beta.unsqueeze(-1), dAqk, dAkk, dq, dk, dg)
        q_c, k_c, g_c, beta_c, of_qk, of_kk, dq_c, dk_c, dg_c = by_heads(at, dtype, heads, *names)
        size = q_c.shape[1]
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        pairs = (g_c.unsqueeze(2) - g_c.unsqueeze(1)).masked_fill(later[..., None], -math.inf)
        pairs = torch.exp2(pairs)
        own = of_qk[..., :size].diagonal(dim1=1, dim2=2).unsqueeze(-1)
        of_qk, of_kk = (x[..., :size].tril(-1) for x in (of_qk, of_kk))
        row_q = torch.einsum("hij,hjd,hijd->hid", of_qk, k_c, pairs)
        row_k = torch.einsum("hij,hjd,hijd->hid", of_kk, k_c, pairs)
        column = torch.einsum("hij,hid,hijd->hjd", of_qk, q_c, pairs)
        column = column + torch.einsum("hij,hid,hijd->hjd", beta_c * of_kk, k_c, pairs)
        dg_c = dg_c + q_c * row_q + k_c * (beta_c * row_k - column)
        dq_c = dq_c + row_q + own * k_c
        dk_c = dk_c + beta_c * row_k + column + own * q_c
        dq_c, dk_c = (x.unflatten(0, (heads_qk, -1)).sum(1) for x in (dq_c, dk_c))
        for whole, part in zip((found.dq, found.dk, found.dg), (dq_c, dk_c, dg_c), strict=True):
            whole[at] = part.transpose(0, 1)
        found.dbeta[at] = dbeta[at].to(dtype) + (k_c * row_k).sum(-1).T
    return found


# -- gate_cumsum


class GateGradients(NamedTuple):
    dg: torch.Tensor
    dA_log: torch.Tensor | None  # the terms of the sum, [tokens of sequences, HV, K]
    ddt_bias: torch.Tensor | None  # likewise


def gate_cumsum(
    dg: torch.Tensor,
    g: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> GateGradients:
    """By autograd of the reference, in which every element of g has parameters of its own."""
    total, used = undefined(*g.shape, dtype=dtype), torch.zeros(g.shape[:2], dtype=torch.bool)
    for chunk in kda.chunks(g, cu_seqlens):
        at = (chunk.batch, chunk.rows)
        total[at] = dg[at].to(dtype).flip(0).cumsum(0).flip(0)
        used[at] = True
    if not use_gate_in_kernel:
        return GateGradients(total, None, None)
    shape = int(used.sum()), *g.shape[2:]
    leaves = [
        None if x is None else x.to(dtype).expand(shape).reshape(-1, 1).requires_grad_()
        for x in (
            g[used],
            None if A_log is None else A_log.unsqueeze(-1),
            dt_bias,
        )
    ]
    assert leaves[0] is not None
    with torch.enable_grad():
        decay = kda.log_decay(leaves[0], leaves[1], leaves[2], lower_bound, dtype)
        given = [x for x in leaves if x is not None]
        slopes = iter(torch.autograd.grad(decay, given, total[used].view(-1, 1)))
    of_g, *of_parameters = (None if x is None else next(slopes).view(shape) for x in leaves)
    assert of_g is not None
    return GateGradients(total.index_put((used,), of_g), *of_parameters)
