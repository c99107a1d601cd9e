"""Softmax attention: the operator that combines results over parts of the keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.attention.spec import HEAD_DIMS_V
from ..checks import DTYPE_NAMES, check_dtypes_are, check_flags
from ..operator import PLAIN, Operator, dispatch_mode_depth, forward_ad, is_dynamo_compiling
from .plan import plan_attention_combine

OUT_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class CombineArguments(NamedTuple):
    out_partial: Tensor
    lse_partial: Tensor
    out_dtype: str = "float32"
    return_lse: bool = True


class Combine(Operator[CombineArguments]):
    name = "flash_attn_combine"
    arguments = CombineArguments
    results = (("out", ""), ("lse", "return_lse"))

    def check(self, a: CombineArguments, given: dict[str, Tensor]) -> None:
        check_flags(return_lse=a.return_lse)
        check_dtypes_are(given, ("out_partial", "lse_partial"), torch.float32)
        shape = tuple(a.out_partial.shape)
        if len(shape) not in (4, 5):
            raise ValueError(
                f"out_partial has shape {list(shape)}, must be [num_splits, batch, seqlen, heads, "
                "head_dim] or [num_splits, total, heads, head_dim]"
            )
        if shape[0] < 1:
            raise ValueError("out_partial has 0 splits, must have at least 1")
        if shape[-1] not in HEAD_DIMS_V:
            raise NotImplementedError(
                f"head_dim of out_partial is {shape[-1]}, there are kernels for: {HEAD_DIMS_V}"
            )
        if tuple(a.lse_partial.shape) != shape[:-1]:
            raise ValueError(
                f"lse_partial has shape {list(a.lse_partial.shape)}, must be {list(shape[:-1])}"
            )

    def prepare(self, a: CombineArguments) -> Callable[..., None]:
        x = a.out_partial
        (request,) = plan_attention_combine(
            launch.arch_for(x.device),
            head_dim=x.shape[-1],
            out_dtype=a.out_dtype,
            return_lse=bool(a.return_lse),
        )
        return launch.get_for(x.device, *request)

    def key(self, a: CombineArguments) -> tuple[Any, ...]:
        return (
            a.out_partial.dim(),
            a.out_partial.shape[0] > 0,
            a.out_partial.shape[-1],
            a.out_partial.get_device(),
            a.out_dtype,
            a.return_lse,
            type(a.return_lse),
            a.out_partial.numel() > 0,
            a.lse_partial.is_neg(),  # kernels take any strides
        )

    def launch(self, ready: Any, a: CombineArguments) -> Any:
        out, lse = self.outputs(a)
        given = a.out_partial, a.lse_partial, out, lse
        if out.dim() == 3:
            out_partial, lse_partial = a.out_partial[:, None], a.lse_partial[:, None]
            given = out_partial, lse_partial, out[None], None if lse is None else lse[None]
        ready(*given, None)
        return out, lse

    def outputs(self, a: CombineArguments) -> tuple[Tensor, Tensor | None]:
        shape = a.out_partial.shape[1:]
        out = a.out_partial.new_empty(shape, dtype=OUT_DTYPES[a.out_dtype])
        return out, a.lse_partial.new_empty(shape[:-1]) if a.return_lse else None

    def readable(self, a: CombineArguments) -> CombineArguments:
        x = a.out_partial
        if x.stride(-1) == 1 and not any(s % 4 for s in x.stride()[:-1]) and not x.data_ptr() % 16:
            return a
        return a._replace(out_partial=x.clone(memory_format=torch.contiguous_format))

    def nothing(self, a: CombineArguments) -> Any:
        return None if a.out_partial.numel() else self.outputs(a)


COMBINATION = Combine()


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Combine attention outputs over parts of the keys. Parts are splits, a cascade's prefix and
    suffix, or the ranks of a context-parallel group.

        lse = log(sum_i exp(lse_partial[i]))
        out = sum_i exp(lse_partial[i] - lse) out_partial[i]

    Sums are float32, in an order that depends only on the number of parts, and are rounded once. A
    part with a log-sum-exp of -inf has no key; its output counts as 0, whatever it holds. A row
    without keys in any part is 0, and its lse is -inf.

    Args:
        out_partial: `[num_splits, batch, seqlen, heads, head_dim]`, or `[num_splits, total, heads,
            head_dim]`, float32. head_dim is 64, 128, 256 or 512.
        lse_partial: `[num_splits, batch, seqlen, heads]`, or `[num_splits, total, heads]`, float32,
            natural logarithm, with any strides: `lse.mT` of an attention function's lse.
        out_dtype: bfloat16, float16 or float32; None is float32.
        return_lse: whether to return lse.

    Returns:
        The pair (out, lse). out is `[batch, seqlen, heads, head_dim]`, or `[total, heads,
        head_dim]`; lse is float32 `[batch, seqlen, heads]`, or `[total, heads]`, or None without
        return_lse. Neither is differentiable.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: wrong shapes or devices.
        NotImplementedError: another head dimension.
    """
    dtype: Any = torch.float32 if out_dtype is None else out_dtype
    name = DTYPE_NAMES.get(dtype) if isinstance(dtype, torch.dtype) else None
    if name not in OUT_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}, must be one of {tuple(OUT_DTYPES)}")
    call = (
        COMBINATION.forward
        if not is_dynamo_compiling()
        and type(out_partial) in PLAIN
        and type(lse_partial) in PLAIN
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
        else COMBINATION.routed
    )
    result: tuple[Tensor, Tensor | None] = call(out_partial, lse_partial, name, return_lse)
    return result
