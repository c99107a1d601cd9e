"""References for peers' kernels: results in float64, and of plain PyTorch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from cute_attn.bench.peers import Captured, flash_attention_4, quack_kernels

from . import attention_reference


class Expected(NamedTuple):
    """A result in float64, and as a plain computation in the kernel's data types has it."""

    exact: torch.Tensor
    plain: torch.Tensor


Tensors = dict[str, torch.Tensor]


def inputs(captured: Captured, seed: int = 0) -> Tensors:
    """Consistent random inputs: out and lse of a backward pass come from a forward pass."""
    given = captured.random_inputs(seed)
    options = dict(captured.request.options)
    function = captured.request.function
    for name, tensor in given.items():
        if name.endswith("_descale") or (function == "norm_backward" and name == "rstd"):
            given[name] = tensor.abs() + 0.5
        elif name in ("sfa", "sfb") and tensor.dtype == torch.float8_e4m3fn:
            given[name] = (tensor.float().abs() + 0.25).to(tensor.dtype)
    if function == "backward":
        out, lse = attention_reference.forward(
            given["q"], given["k"], given["v"], **_attention(options)
        )
        given["out"], given["lse"] = out.to(given["q"].dtype), lse.float()
    elif function == "softmax_backward":
        given["y"] = torch.softmax(given["y"].float(), -1).to(given["y"].dtype)
    elif function == "cross_entropy_backward":
        given["lse"] = torch.logsumexp(given["x"].float(), -1)
    elif function == "topk_backward":  # no index comes twice
        rows, k = given["indices"].shape
        order = torch.rand(rows, options["n"], generator=torch.Generator().manual_seed(seed))
        given["indices"] = order.argsort(-1)[:, :k].to(given["indices"].dtype)
    return given


def expected(captured: Captured, given: Tensors) -> dict[str, Expected]:
    """Expected results by name of the output, or of an entry of `results`."""
    compute = {"forward": _attend, "backward": _attend_backward, "gemm": _gemm}
    function = captured.request.function
    options = dict(captured.request.options)
    if function in compute:
        return compute[function](options, given)
    rows = _ROWS[function]
    exact, plain = (rows(options, given, dtype) for dtype in (torch.float64, torch.float32))
    dtypes = {b.name: getattr(torch, b.view.dtype) for b in captured.outputs}
    return {name: Expected(exact[name], plain[name].to(dtypes[name])) for name in exact}


def results(captured: Captured, tensors: Tensors) -> Tensors:
    """The outputs; those that hold parts of a sum are added up."""
    return {
        b.name: tensors[b.name].double().sum(0) if b.name.endswith("_partial") else tensors[b.name]
        for b in captured.outputs
    }


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, in the Frobenius norm; infinities must be where they should be."""
    finite = torch.isfinite(exact)
    if not torch.equal(torch.isfinite(result.double()), finite):
        return math.inf
    exact, difference = exact[finite], (result.double() - exact)[finite]
    return (difference.norm() / exact.norm().clamp_min(1e-30)).item()


# -- attention ------------------------------------------------------------------------------------


def _attention(options: dict[str, Any]) -> dict[str, Any]:
    names = ("causal", "window", "softcap", "seqlens_q", "seqlens_k")
    return {name: options[name] for name in names}


def _dequantised(given: Tensors, name: str) -> torch.Tensor:
    tensor = given[name]
    if f"{name}_descale" not in given:
        return tensor
    scale = given[f"{name}_descale"].repeat_interleave(
        tensor.shape[-2] // given[f"{name}_descale"].shape[-1], -1
    )
    return tensor.double() * scale.double()[:, None, :, None]


def _attend(options: dict[str, Any], given: Tensors) -> dict[str, Expected]:
    q, k, v = (_dequantised(given, name) for name in "qkv")
    if options["page_size"] is not None:
        seqlen_k = options["seqlen_k"] or options["seqlen_q"]
        table = torch.tensor(
            flash_attention_4.page_table(options["batch"], seqlen_k, options["page_size"])
        )
        k, v = (pages[table].flatten(1, 2)[:, :seqlen_k] for pages in (k, v))
    sink = given.get("learnable_sink")
    exact = attention_reference.forward(q, k, v, **_attention(options), learnable_sink=sink)
    kept = given["q"].dtype  # of the probabilities
    wide = kept if kept.itemsize > 1 else torch.bfloat16
    pieces = [
        _plain_forward(options, *tensors, sink, kept)
        for tensors in _pieces(options, (q.to(wide),), (k.to(wide), v.to(wide)))
    ]
    return {
        "out": Expected(exact.out, _joined(pieces, options)),
        "lse": Expected(exact.lse, exact.lse * (1 + 1e-5)),
    }


def _attend_backward(options: dict[str, Any], given: Tensors) -> dict[str, Expected]:
    q, k, v, out, dout, lse = (given[n] for n in ("q", "k", "v", "out", "dout", "lse"))
    exact = attention_reference.backward(q, k, v, out, dout, lse, **_attention(options))
    lse = lse.transpose(-1, -2)  # rows first, as the others
    pieces = [
        _plain_backward(options, *tensors)
        for tensors in _pieces(options, (q, out, dout, lse), (k, v))
    ]
    return {
        name: Expected(getattr(exact, name), _joined([p[i] for p in pieces], options))
        for i, name in enumerate(("dq", "dk", "dv"))
    }


def _pieces(
    options: dict[str, Any], by_q: tuple[torch.Tensor, ...], by_k: tuple[torch.Tensor, ...]
) -> list[tuple[torch.Tensor, ...]]:
    """The sequences of a varlen batch, each with a batch dimension; else the tensors."""
    if options["seqlens_q"] is None:
        return [(*by_q, *by_k)]
    lengths = options["seqlens_q"], options["seqlens_k"] or options["seqlens_q"]
    split = [
        t.split(list(n)) for tensors, n in zip((by_q, by_k), lengths, strict=True) for t in tensors
    ]
    return [tuple(t[None] for t in piece) for piece in zip(*split, strict=True)]


def _joined(pieces: list[torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    return pieces[0] if options["seqlens_q"] is None else torch.cat([p[0] for p in pieces])


def _plain_scores(
    options: dict[str, Any], q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked scores [B, H, SQ, SK] of a product in q's type, and their derivative by it."""
    scale = q.shape[-1] ** -0.5
    scores = torch.einsum("bshd,bthd->bhst", q, k).float() * scale
    derivative = torch.full_like(scores, scale)
    if options["softcap"]:
        bounded = torch.tanh(scores / options["softcap"])
        scores, derivative = options["softcap"] * bounded, scale * (1 - bounded**2)
    mask = attention_reference.visible(q.shape[1], k.shape[1], options["causal"], options["window"])
    return scores.masked_fill(~mask, -math.inf), derivative


def _heads_of(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return k.repeat_interleave(q.shape[-2] // k.shape[-2], -2)


def _plain_forward(
    options: dict[str, Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    kept: torch.dtype,
) -> torch.Tensor:
    scores, _ = _plain_scores(options, q, _heads_of(k, q))
    keys = scores.shape[-1]
    if sink is not None:
        more = sink.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, more], -1)
    p = torch.softmax(scores, -1)[..., :keys].nan_to_num(0.0).to(kept).to(q.dtype)
    return torch.einsum("bhst,bthd->bshd", p, _heads_of(v, q))


def _plain_backward(
    options: dict[str, Any],
    q: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    scores, derivative = _plain_scores(options, q, _heads_of(k, q))
    p = torch.exp(scores - lse.transpose(-1, -2)[..., None]).nan_to_num(0.0, posinf=0.0)
    dp = torch.einsum("bshd,bthd->bhst", dout, _heads_of(v, q)).float()
    row_sums = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    ds = (p * (dp - row_sums[..., None]) * derivative).to(q.dtype)

    def grouped(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.unflatten(-2, (k.shape[-2], -1)).float().sum(-2).to(q.dtype)

    return (
        torch.einsum("bhst,bthd->bshd", ds, _heads_of(k, q)),
        grouped(torch.einsum("bhst,bshd->bthd", ds, q)),
        grouped(torch.einsum("bhst,bshd->bthd", p.to(q.dtype), dout)),
    )


# -- GEMM and rows --------------------------------------------------------------------------------


def _gemm(options: dict[str, Any], given: Tensors) -> dict[str, Expected]:
    a, b = given["a"], given["b"]
    if options["block_scaled"] is not None:
        a = quack_kernels.dequantise(options["block_scaled"], a, given["sfa"])
        b = quack_kernels.dequantise(options["block_scaled"], b, given["sfb"])
    a, b = a.double(), b.double()
    if options["seqlens_m"] is None:
        d = a @ b.transpose(1, 2)
    else:
        d = torch.cat(
            [x @ y.T for x, y in zip(a.split(list(options["seqlens_m"])), b, strict=True)]
        )
    d *= options["alpha"]
    if options["c"]:
        d += options["beta"] * given["c"].double()
    if options["bias"]:
        d += given["bias"].double()[:, None]
    return {"d": Expected(d, d.to(getattr(torch, options["out_dtype"])))}


def _norm(options: dict[str, Any], given: Tensors, dtype: torch.dtype) -> Tensors:
    x = given["x"].to(dtype)
    result: Tensors = {}
    if options["residual"]:
        x = result["residual_out"] = x + given["residual"].to(dtype)
    centred = x
    if options["layernorm"]:
        result["mean"] = x.mean(-1)
        centred = x - result["mean"][:, None]
    result["rstd"] = (centred.pow(2).mean(-1) + options["eps"]).rsqrt()
    result["out"] = centred * result["rstd"][:, None] * given["weight"].to(dtype)
    if options["bias"]:
        result["out"] = result["out"] + given["bias"].to(dtype)
    return result


def _norm_backward(options: dict[str, Any], given: Tensors, dtype: torch.dtype) -> Tensors:
    x, weight, dout, rstd = (given[name].to(dtype) for name in ("x", "weight", "dout", "rstd"))
    if options["layernorm"]:
        x = x - given["mean"].to(dtype)[:, None]
    normal, weighted = x * rstd[:, None], weight * dout
    dx = weighted - normal * (normal * weighted).mean(-1, keepdim=True)
    result = {"dw_partial": (dout * normal).sum(0)}
    if options["layernorm"]:
        dx = dx - weighted.mean(-1, keepdim=True)
        result["db_partial"] = dout.sum(0)
    return result | {"dx": dx * rstd[:, None]}


def _softmax(options: dict[str, Any], given: Tensors, dtype: torch.dtype) -> Tensors:
    return {"out": torch.softmax(given["x"].to(dtype), -1)}


def _softmax_backward(options: dict[str, Any], given: Tensors, dtype: torch.dtype) -> Tensors:
    dy, y = given["dy"].to(dtype), given["y"].to(dtype)
    return {"dx": y * (dy - (dy * y).sum(-1, keepdim=True))}


def _minus_target(p: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return p.scatter_add(1, target[:, None], p.new_full((len(target), 1), -1.0))


def _cross_entropy(options: dict[str, Any], given: Tensors, dtype: torch.dtype) -> Tensors:
    x, target = given["x"].to(dtype), given["target"]
    lse = torch.logsumexp(x, -1)
    result = {"lse": lse, "loss": lse - x.gather(1, target[:, None])[:, 0]}
    if options["dx"]:
        result["dx"] = _minus_target(torch.softmax(x, -1), target)
    return result


def _cross_entropy_backward(options: dict[str, Any], given: Tensors, dtype: torch.dtype) -> Tensors:
    p = torch.exp(given["x"].to(dtype) - given["lse"].to(dtype)[:, None])
    return {"dx": _minus_target(p, given["target"]) * given["dloss"].to(dtype)[:, None]}


def _topk(options: dict[str, Any], given: Tensors, dtype: torch.dtype) -> Tensors:
    values = torch.topk(given["x"].to(dtype), options["k"], -1).values
    return {"values": torch.softmax(values, -1) if options["softmax"] else values}


def _topk_backward(options: dict[str, Any], given: Tensors, dtype: torch.dtype) -> Tensors:
    gradient, index = given["dvalues"].to(dtype), given["indices"].long()
    if options["softmax"]:
        y = given["values"].to(dtype)
        gradient = y * (gradient - (gradient * y).sum(-1, keepdim=True))
    zeros = gradient.new_zeros(options["m"], options["n"])
    return {"dx": zeros.scatter(1, index, gradient)}


_ROWS = {
    "norm_forward": _norm,
    "norm_backward": _norm_backward,
    "softmax_forward": _softmax,
    "softmax_backward": _softmax_backward,
    "cross_entropy_forward": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "topk_forward": _topk,
    "topk_backward": _topk_backward,
}
