"""The backward's passes over chunks, in PyTorch: what `backward.gradients` reads, and what it does.

`passes` computes its inputs chunk by chunk, and `gradients` its results, in any precision. In
float64 they agree with autograd of the reference; in float32, with operands rounded to 16 bits,
they are the plain implementation whose error the kernel is compared with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from kda_tiles import slot_of, slots, split_beta, swizzled

from cute_attn.kernels.delta.chunk.spec import CHUNK
from cute_attn.kernels.delta.spec import L2NORM_EPSILON
from cute_attn.reference import kda

SMALLEST_BETA = {torch.bfloat16: 2.0**-40, torch.float16: 2.0**-14, torch.float64: 2.0**-40}

Tensors = dict[str, torch.Tensor]


class Passes(NamedTuple):
    """States, their gradients and corrections; of tokens of no sequence, NaN."""

    states: Tensors  # by (slot, head): K by V, at the start of the chunk
    adjoints: Tensors  # the gradients of the states after the chunk
    v_new: Tensors  # 64 by V
    m: Tensors  # of the 64 tokens: the factor of v_new that the kernels leave out
    dr: torch.Tensor  # [B, T, HV, V]


def exact(
    x: dict[str, Any], options: dict[str, Any], do: torch.Tensor, dfinal: torch.Tensor
) -> Tensors:
    """The gradients by autograd through the reference in float64."""
    leaves = {
        name: y.double().requires_grad_()
        for name, y in x.items()
        if isinstance(y, torch.Tensor) and y.is_floating_point()
    }
    cu_seqlens = x.get("cu_seqlens")
    result = kda.kda_reference(**leaves, **options, cu_seqlens=cu_seqlens)
    loss = (result.final_state * dfinal.double()).sum()
    for chunk in kda.chunks(do, cu_seqlens):
        at = (chunk.batch, chunk.rows)
        loss = loss + (result.o[at] * do[at].double()).sum()
    names = list(leaves)
    found = torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)
    return {name: y for name, y in zip(names, found, strict=True) if y is not None}


def nonzero_beta(beta: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    smallest = torch.full_like(beta, SMALLEST_BETA[dtype])
    return torch.where(beta.abs() < smallest, torch.copysign(smallest, beta), beta)


def _chunk(x: Tensors, at: Any, head: int, of_qk: int, scale: float) -> Any:
    """(q, k, G, decays of pairs, Aqk, Lhat) of a chunk in x's dtype."""
    q, k = (x[name][at][:, of_qk] for name in ("q", "k"))
    g = x["g"][at][:, head].cumsum(0)
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    pairs = torch.exp((g[:, None] - g[None, :]).masked_fill(later[..., None], -torch.inf))
    scores = scale * torch.einsum("id,jd,ijd->ij", q, k, pairs)
    lower = torch.einsum("id,jd,ijd->ij", k, k, pairs).tril(-1)
    return q, k, g, pairs, scores, lower


def prepared(x: dict[str, Any], options: dict[str, Any], dtype: torch.dtype) -> Tensors:
    """q, k, g and beta as the recurrence takes them, in `dtype`."""
    known = {
        name: y
        for name, y in options.items()
        if name.startswith("use_") or name in ("allow_neg_eigval", "lower_bound")
    }
    names = ("q", "k", "g", "beta")
    given = {name: x.get(name) for name in ("A_log", "dt_bias")}
    found = kda.prepare(*(x[name] for name in names), **known, **given, dtype=dtype)
    return dict(zip(names, found, strict=True))


def passes(
    x: dict[str, Any],
    options: dict[str, Any],
    do: torch.Tensor,
    dfinal: torch.Tensor,
    dtype: torch.dtype,
) -> Passes:
    """What the kernels before `gradients` compute, in float64. `dtype` is that of q: it determines
    the smallest beta. initial_state and dfinal are `[N, HV, K, V]`."""
    y = prepared(x, options, torch.float64)
    cu_seqlens = x.get("cu_seqlens")
    v, do = x["v"].double(), do.double()
    tokens, heads = v.shape[1:3]
    group = heads // y["q"].shape[2]
    scale = options.get("scale") or y["q"].shape[-1] ** -0.5
    state = x["initial_state"].double().clone()
    found = Passes({}, {}, {}, {}, torch.full_like(v, torch.nan))
    todo = []
    for chunk in kda.chunks(v, cu_seqlens):
        at, slot = (chunk.batch, chunk.rows), slot_of(chunk, tokens, cu_seqlens)
        for head in range(heads):
            q, k, g, _, scores, lower = _chunk(y, at, head, head // group, scale)
            beta = nonzero_beta(y["beta"][at][:, head], dtype)[:, None]
            one = torch.eye(len(q), dtype=q.dtype)
            inverse = torch.linalg.inv(one + beta * lower) * beta.T
            s = state[chunk.sequence, head].clone()
            kd, qg, kg = g.exp() * k, scale * g.exp() * q, (g[-1] - g).exp() * k
            new = inverse @ (v[at][:, head] - kd @ s)
            state[chunk.sequence, head] = g[-1].exp()[:, None] * s + kg.T @ new
            found.states[slot, head] = s
            found.v_new[slot, head] = torch.nn.functional.pad(new, (0, 0, 0, CHUNK - len(new)))
            m, _ = split_beta(beta, dtype)
            found.m[slot, head] = torch.nn.functional.pad(m, (0, 0, 0, CHUNK - len(m)), value=1.0)
            todo.append((chunk, slot, head, inverse, scores, kd, qg, kg, g))
    adjoint = dfinal.double().clone()
    for chunk, slot, head, inverse, scores, kd, qg, kg, g in reversed(todo):
        at = (chunk.batch, chunk.rows)
        after = adjoint[chunk.sequence, head].clone()
        found.adjoints[slot, head] = after
        of_o = do[at][:, head]
        dr = inverse.T @ (scores.T @ of_o + kg @ after)
        found.dr[at[0], at[1], head] = dr
        adjoint[chunk.sequence, head] = g[-1].exp()[:, None] * after + qg.T @ of_o - kd.T @ dr
    return found


def pack_states(states: Tensors, count: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """`[slots, HV, V * K]`: transposed, by 64 rows of V, in sub-tiles. Other slots hold NaN."""
    dim_k, dim_v = next(iter(states.values())).shape
    out = torch.full((count, heads, dim_k * dim_v), torch.nan, dtype=dtype)
    for (slot, head), s in states.items():
        parts = [c for r in s.T.split(64) for c in r.split(64, dim=1)]
        out[slot, head] = torch.cat([swizzled(part).flatten() for part in parts]).to(dtype)
    return out


def pack_rows(rows: Tensors, count: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """`[slots, HV, 64 * V]`: sub-tiles of 64 columns. Other slots hold NaN."""
    dim_v = next(iter(rows.values())).shape[1]
    out = torch.full((count, heads, CHUNK * dim_v), torch.nan, dtype=dtype)
    for (slot, head), x in rows.items():
        out[slot, head] = torch.cat([swizzled(c).flatten() for c in x.split(64, dim=1)]).to(dtype)
    return out


def pack_norms(x: dict[str, Any], count: int) -> torch.Tensor:
    """`[slots, HQK, 2 * 64]`: the inverse norms of a chunk's q, then of its k. Rows past a chunk's
    end are 1, other slots NaN."""
    tokens, heads = x["q"].shape[1:3]
    out = torch.full((count, heads, 2, CHUNK), torch.nan)
    for chunk in kda.chunks(x["q"], x.get("cu_seqlens")):
        slot = slot_of(chunk, tokens, x.get("cu_seqlens"))
        for n, name in enumerate(("q", "k")):
            rows = x[name][chunk.batch, chunk.rows].double()
            norms = (rows.square().sum(-1) + L2NORM_EPSILON).rsqrt().float()
            out[slot, :, n] = 1.0
            out[slot, :, n, : len(rows)] = norms.T
    return out.flatten(2)


def gradients(
    x: dict[str, Any],
    options: dict[str, Any],
    do: torch.Tensor,
    found: Passes,
    dtype: torch.dtype = torch.float64,
    stage_dtype: torch.dtype | None = None,
) -> Tensors:
    """The gradients of q, k, v, g, beta, A_log and dt_bias.

    Args:
        dtype: of the arithmetic.
        stage_dtype: dtype that the inputs and the operands of products are rounded to; float64
            keeps the smallest beta of float64.
    """

    def stored(y: torch.Tensor) -> torch.Tensor:
        return y.to(dtype) if stage_dtype is None else y.to(stage_dtype).to(dtype)

    leaves = {name: x[name].to(dtype).requires_grad_() for name in ("q", "k", "g", "beta")}
    for name in ("A_log", "dt_bias"):
        if x.get(name) is not None:
            leaves[name] = x[name].to(dtype).requires_grad_()
    y = prepared(leaves, options, dtype)
    cu_seqlens = x.get("cu_seqlens")
    beta_dtype = torch.bfloat16 if stage_dtype is None else stage_dtype
    tokens, heads = found.dr.shape[1:3]
    group = heads // y["q"].shape[2]
    scale = options.get("scale") or y["q"].shape[-1] ** -0.5
    grad = {name: torch.zeros_like(y[name]) for name in ("q", "k", "g", "beta")}
    dv = torch.full_like(found.dr, torch.nan).to(dtype)
    plain = {name: stored(y[name].detach()) for name in ("q", "k")} | {"g": y["g"].detach()}
    for chunk in kda.chunks(do, cu_seqlens):
        at, slot = (chunk.batch, chunk.rows), slot_of(chunk, tokens, cu_seqlens)
        for head in range(heads):
            of_qk = head // group
            q, k, g, pairs, _, _ = _chunk(plain, at, head, of_qk, scale)
            size = len(q)
            beta = y["beta"][at][:, head].detach()
            safe = nonzero_beta(beta, beta_dtype)
            s, after = (stored(z[slot, head]) for z in (found.states, found.adjoints))
            new, dr = stored(found.v_new[slot, head][:size]), stored(found.dr[at][:, head])
            of_o = do[at][:, head].to(dtype)
            daqk = scale * (of_o @ new.T).tril()
            both = -(dr @ new.T)
            grad["beta"][chunk.batch, chunk.rows, head] = -both.diagonal() / safe**2
            dv[chunk.batch, chunk.rows, head] = dr * (beta / safe)[:, None]
            own, daqk, dlower = daqk.diagonal(), stored(daqk.tril(-1)), stored(both.tril(-1))
            row_q = scale * g.exp() * (of_o @ s.T)
            row_k = -g.exp() * (dr @ s.T)
            to_end = (g[-1] - g).exp() * (new @ after.T)
            row_q = row_q + torch.einsum("ij,jd,ijd->id", daqk, k, pairs)
            row_k = row_k + torch.einsum("ij,jd,ijd->id", dlower, k, pairs)
            column = to_end + torch.einsum("mi,md,mid->id", daqk, q, pairs)
            column = column + torch.einsum("mi,md,mid->id", dlower, k, pairs)
            dg = q * row_q + k * row_k - k * column
            dg[-1] += (k * to_end).sum(0) + g[-1].exp() * (s * after).sum(1)
            grad["g"][chunk.batch, chunk.rows, head] = dg.flip(0).cumsum(0).flip(0)
            grad["q"][chunk.batch, chunk.rows, of_qk] += row_q + own[:, None] * k
            grad["k"][chunk.batch, chunk.rows, of_qk] += row_k + column + own[:, None] * q
    names = list(leaves)
    backward = torch.autograd.grad(
        list(y.values()), [leaves[n] for n in names], [grad[n] for n in y], allow_unused=True
    )
    result = {name: z for name, z in zip(names, backward, strict=True) if z is not None}
    return result | {"v": dv}


__all__ = ["exact", "gradients", "pack_norms", "pack_rows", "pack_states", "passes", "slots"]
