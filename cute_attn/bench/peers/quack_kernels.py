"""quack: its GEMM on sm_90a, sm_100a and sm_120a, and its row reductions."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .common import Request, offsets, request

if TYPE_CHECKING:
    from .recording import Recorder

PEER = "quack_kernels"
PACKAGE = "quack"


class BlockScaled(NamedTuple):
    """A block-scaled format of GEMM operands.

    Attributes:
        dtype: dtype of the data, with `packing` elements in one torch element.
        scale_dtype: dtype of the scale factors; `vector` elements along K share a factor.
    """

    dtype: str
    packing: int
    scale_dtype: str
    vector: int


BLOCK_SCALED = {
    "mxfp8_e4m3": BlockScaled("float8_e4m3fn", 1, "float8_e8m0fnu", 32),
    "mxfp4": BlockScaled("float4_e2m1fn_x2", 2, "float8_e8m0fnu", 32),
    "nvfp4": BlockScaled("float4_e2m1fn_x2", 2, "float8_e4m3fn", 16),
}
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def gemm(
    *,
    arch: str,
    m: int = 256,
    n: int = 256,
    k: int = 128,
    batch: int = 1,
    dtype: str = "bfloat16",
    out_dtype: str = "bfloat16",
    tile: tuple[int, int] = (128, 128),
    cluster: tuple[int, int] = (1, 1),
    scheduler: str = "static",
    pingpong: bool = False,
    a_major: str = "k",
    b_major: str = "k",
    alpha: float = 1.0,
    beta: float = 1.0,
    c: bool = False,
    bias: bool = False,
    split_k: int = 1,
    block_scaled: str | None = None,
    seqlens_m: Sequence[int] | None = None,
    num_sms: int | None = None,
) -> Request:
    """d = alpha * a b^T + beta * c + bias, for a [batch, m, k], b [batch, n, k], d [batch, m, n].

    Args:
        tile, cluster: (M, N). On sm_100a an even M of the cluster with a tile of 256 (or 128)
            selects the MMA of two CTAs.
        scheduler: "static" and "dynamic" are persistent; dynamic is cluster launch control on
            sm_100a, and a counter in global memory on sm_90a. "none" (not on sm_100a) is one tile
            for each CTA.
        a_major, b_major: which dimension is contiguous: "k", or "m" and "n".
        block_scaled: a name of BLOCK_SCALED, in place of dtype. a and b then have scale factors sfa
            and sfb [batch, rows / 128, k / (4 * vector), 32, 4, 4].
        seqlens_m: rows of each matrix of the batch, in place of batch and m: a is [sum, k], d is
            [sum, n].
    """
    options = {key: v for key, v in locals().items() if key not in ("arch", "num_sms")}
    if seqlens_m is not None:
        options["seqlens_m"] = tuple(seqlens_m)
    if scheduler not in ("static", "dynamic", "none"):
        raise ValueError(f"scheduler is {scheduler!r}")
    if scheduler == "none" and arch.startswith("sm_10"):
        raise ValueError("scheduler is 'none': on sm_100a every GEMM of quack is persistent")
    return request(PEER, "gemm", arch, num_sms, options)


def norm_forward(
    *,
    arch: str,
    m: int = 4,
    n: int = 1024,
    dtype: str = "bfloat16",
    weight_dtype: str = "float32",
    layernorm: bool = False,
    bias: bool = False,
    residual: bool = False,
    eps: float = 1e-6,
) -> Request:
    """RMSNorm or LayerNorm: out and rstd from x and weight; LayerNorm also returns the mean.

    With a residual, x + residual is normalised, and written to residual_out. From n = 32768 (bf16)
    on, a row belongs to a cluster.
    """
    return _rows("norm_forward", locals())


def norm_backward(
    *,
    arch: str,
    m: int = 4,
    n: int = 1024,
    dtype: str = "bfloat16",
    weight_dtype: str = "float32",
    layernorm: bool = False,
    blocks: int = 2,
) -> Request:
    """dx and dw_partial [blocks, n], whose sum is the weight's gradient, from x, weight, dout and
    rstd. LayerNorm also takes the mean and returns db_partial."""
    return _rows("norm_backward", locals())


def softmax_forward(*, arch: str, m: int = 4, n: int = 1024, dtype: str = "bfloat16") -> Request:
    """out = softmax(x), of rows."""
    return _rows("softmax_forward", locals())


def softmax_backward(*, arch: str, m: int = 4, n: int = 1024, dtype: str = "bfloat16") -> Request:
    """dx from dy and y."""
    return _rows("softmax_backward", locals())


def cross_entropy_forward(
    *, arch: str, m: int = 4, n: int = 1024, dtype: str = "bfloat16", dx: bool = False
) -> Request:
    """loss and lse, and dx if asked for, from x and target (int64)."""
    return _rows("cross_entropy_forward", locals())


def cross_entropy_backward(
    *, arch: str, m: int = 4, n: int = 1024, dtype: str = "bfloat16"
) -> Request:
    """dx from x, target, dloss and lse."""
    return _rows("cross_entropy_backward", locals())


def topk_forward(
    *,
    arch: str,
    m: int = 4,
    n: int = 1024,
    k: int = 32,
    dtype: str = "bfloat16",
    softmax: bool = False,
) -> Request:
    """values [m, k] and indices, largest first, from x; with `softmax`, softmax of the values."""
    return _rows("topk_forward", locals())


def topk_backward(
    *,
    arch: str,
    m: int = 4,
    n: int = 1024,
    k: int = 32,
    dtype: str = "bfloat16",
    softmax: bool = False,
) -> Request:
    """dx from dvalues, indices and, with softmax, values."""
    return _rows("topk_backward", locals())


def _rows(function: str, given: dict[str, Any]) -> Request:
    options = dict(given)
    return request(PEER, function, options.pop("arch"), None, options)


# -- block-scaled operands ------------------------------------------------------------------------


def scale_shape(fmt: str, rows: int, k: int) -> tuple[int, ...]:
    """The shape of the scale factors of a [rows, k] operand, without the batch."""
    return (-(-rows // 128), -(-k // (4 * BLOCK_SCALED[fmt].vector)), 32, 4, 4)


def dequantise(fmt: str, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of an operand [batch, rows, k] in float64, from the data and the scale factors."""
    form = BLOCK_SCALED[fmt]
    if form.packing == 2:  # the low half of a byte is the first element
        pairs = data.view(torch.uint8)
        codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).long()
        values = torch.tensor(FP4, dtype=torch.float64)[codes & 7] * (1.0 - 2.0 * (codes >> 3))
    else:
        values = data.double()
    if form.scale_dtype == "float8_e8m0fnu":
        factors = torch.exp2(scales.view(torch.uint8).double() - 127)
    else:
        factors = scales.double()
    # [batch, R, C, r, q, c] is row 128 R + 32 q + r, block 4 C + c
    factors = factors.permute(0, 1, 4, 3, 2, 5).flatten(1, 3).flatten(2, 3)
    factors = factors.repeat_interleave(form.vector, dim=2)
    return values * factors[:, : values.shape[1], : values.shape[2]]


# -- in the capturing process ---------------------------------------------------------------------


def _gemm(r: Recorder, **o: Any) -> None:
    m, n, k, batch = o["m"], o["n"], o["k"], o["batch"]
    varlen = o["seqlens_m"] is not None
    if varlen:
        m, batch = sum(o["seqlens_m"]), len(o["seqlens_m"])
    dtype, width = o["dtype"], k
    keywords: dict[str, Any] = {}
    if o["block_scaled"] is not None:
        form = BLOCK_SCALED[o["block_scaled"]]
        dtype, width = form.dtype, k // form.packing
        for name, rows in (("sfa", m), ("sfb", n)):
            shape = (batch, *scale_shape(o["block_scaled"], rows, k))
            keywords[name.upper()] = r.input(name, shape, form.scale_dtype)
            keywords[f"bs_format_{name[-1]}"] = o["block_scaled"]
    outer = () if varlen else (batch,)
    a_shape, d_shape = (*outer, m, width), (*outer, m, n)
    a = r.input("a", a_shape, dtype, transposed=o["a_major"] == "m")
    b = r.input("b", (batch, n, width), dtype, transposed=o["b_major"] == "n")
    d = r.output("d", d_shape, o["out_dtype"])
    c = r.input("c", d_shape, o["out_dtype"]) if o["c"] else None
    semaphore = None
    if o["scheduler"] == "dynamic" and r.arch == "sm_90a":
        semaphore = r.scratch("tile_count_semaphore", (1,), "int32", fill=0)
    if varlen:
        starts = offsets(o["seqlens_m"])
        keywords["cu_seqlens_m"] = r.input("cu_seqlens_m", (len(starts),), "int32", values=starts)
    if o["bias"]:
        keywords["rowvec_bias"] = r.input("bias", (batch, n))
    _function("gemm", "gemm")(
        a,
        b,
        d,
        c,
        semaphore,
        *o["tile"],
        *o["cluster"],
        pingpong=o["pingpong"],
        persistent=o["scheduler"] != "none",
        is_dynamic_persistent=o["scheduler"] == "dynamic",
        alpha=o["alpha"],
        beta=o["beta"],
        split_k=o["split_k"],
        **keywords,
    )


def _norm_forward(r: Recorder, **o: Any) -> None:
    m, n = o["m"], o["n"]
    _function("rmsnorm", "_rmsnorm_fwd")(
        r.input("x", (m, n), o["dtype"]),
        r.input("weight", (n,), o["weight_dtype"]),
        r.output("out", (m, n), o["dtype"]),
        r.input("bias", (n,), "float32") if o["bias"] else None,
        r.output("rstd", (m,), "float32"),
        r.output("mean", (m,), "float32") if o["layernorm"] else None,
        r.input("residual", (m, n), "float32") if o["residual"] else None,
        r.output("residual_out", (m, n), "float32") if o["residual"] else None,
        o["eps"],
        o["layernorm"],
    )


def _norm_backward(r: Recorder, **o: Any) -> None:
    m, n, layernorm = o["m"], o["n"], o["layernorm"]
    partial = (o["blocks"], n)
    _function("rmsnorm", "_rmsnorm_bwd")(
        r.input("x", (m, n), o["dtype"]),
        r.input("weight", (n,), o["weight_dtype"]),
        r.input("dout", (m, n), o["dtype"]),
        r.input("rstd", (m,), "float32"),
        r.output("dx", (m, n), o["dtype"]),
        r.output("dw_partial", partial, "float32"),
        r.output("db_partial", partial, "float32") if layernorm else None,
        sm_count=o["blocks"],
        mean=r.input("mean", (m,), "float32") if layernorm else None,
        is_layernorm=layernorm,
    )


def _softmax_forward(r: Recorder, m: int, n: int, dtype: str) -> None:
    _function("softmax", "_softmax_fwd")(
        r.input("x", (m, n), dtype), r.output("out", (m, n), dtype)
    )


def _softmax_backward(r: Recorder, m: int, n: int, dtype: str) -> None:
    _function("softmax", "_softmax_backward")(
        *(r.input(name, (m, n), dtype) for name in ("dy", "y")), r.output("dx", (m, n), dtype)
    )


def _cross_entropy_forward(r: Recorder, m: int, n: int, dtype: str, dx: bool) -> None:
    _function("cross_entropy", "cross_entropy_fwd_out")(
        r.input("x", (m, n), dtype),
        r.input("target", (m,), "int64", bounds=(0, n)),
        None,
        r.output("loss", (m,), "float32"),
        r.output("lse", (m,), "float32"),
        r.output("dx", (m, n), dtype) if dx else None,
        None,
    )


def _cross_entropy_backward(r: Recorder, m: int, n: int, dtype: str) -> None:
    _function("cross_entropy", "cross_entropy_bwd_out")(
        r.input("x", (m, n), dtype),
        r.input("target", (m,), "int64", bounds=(0, n)),
        r.input("dloss", (m,), "float32"),
        r.input("lse", (m,), "float32"),
        r.output("dx", (m, n), dtype),
    )


def _topk_forward(r: Recorder, m: int, n: int, k: int, dtype: str, softmax: bool) -> None:
    _function("topk", "_topk_fwd")(
        r.input("x", (m, n), dtype),
        k,
        softmax,
        r.output("values", (m, k), dtype),
        r.output("indices", (m, k), "int32"),
    )


def _topk_backward(r: Recorder, m: int, n: int, k: int, dtype: str, softmax: bool) -> None:
    _function("topk", "_topk_bwd")(
        r.input("dvalues", (m, k), dtype),
        r.input("values", (m, k), dtype) if softmax else None,
        r.input("indices", (m, k), "int32", bounds=(0, n)),
        k,
        softmax,
        r.output("dx", (m, n), dtype, fill=0),
    )


def _function(module: str, name: str) -> Any:
    """A function of a module of quack. The package has functions with the names of its modules."""
    return getattr(importlib.import_module(f"quack.{module}"), name)


FRONT_ENDS = {
    "gemm": _gemm,
    "norm_forward": _norm_forward,
    "norm_backward": _norm_backward,
    "softmax_forward": _softmax_forward,
    "softmax_backward": _softmax_backward,
    "cross_entropy_forward": _cross_entropy_forward,
    "cross_entropy_backward": _cross_entropy_backward,
    "topk_forward": _topk_forward,
    "topk_backward": _topk_backward,
}
