"""Softmax attention into a given tensor: the operator.

It is an operator of its own since it writes one of its arguments. The kernels are the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..checks import (
    check_contiguous,
    check_dtype,
    check_dtypes_are,
    check_flags,
    check_not_expanded,
    check_shapes,
)
from ..memory import check_memory
from ..operator import (
    PLAIN,
    dispatch_mode_depth,
    forward_ad,
    increment_version,
    is_dynamo_compiling,
    is_grad_enabled,
)
from .arguments import (
    ALIGNMENT,
    Arguments,
    check,
    check_alignment,
    check_strides,
    with_strides_for_tma,
)
from .forward import Attention, empty_lse

_WRITTEN = ("out", "lse")


class IntoArguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    learnable_sink: Tensor | None = None
    softcap: float = 0.0
    scheduler: str | None = None
    num_splits: int = 1

    @property
    def return_lse(self) -> bool:
        return self.lse is not None


class Into(Attention[IntoArguments]):
    name = "flash_attn_out"
    public_name = "flash_attn_func, as flash_attn_varlen_func, with out"
    arguments = IntoArguments
    written = _WRITTEN

    def check(self, a: IntoArguments, given: dict[str, Tensor]) -> None:
        shared: tuple[Any, ...] = (*a[:3], *a[5:], a.return_lse)
        check(Arguments(*shared), given)
        check_dtypes_are(given, ("out",), a.q.dtype)
        *batch, rows, heads, _ = a.q.shape
        check_shapes(given, {"out": a.q.shape, "lse": (*batch, heads, rows)})
        check_not_expanded(given, _WRITTEN)
        check_strides(given, ("out",))
        if "lse" in given:
            check_dtype("lse", given["lse"], ("float32",))
            check_contiguous(given, ("lse",))

    def check_memory(self, a: IntoArguments) -> None:
        super().check_memory(a)
        check_alignment(out=a.out)
        tensors = self.tensors(a)
        written = {name: tensors.pop(name) for name in _WRITTEN}
        check_memory(written, tensors)

    def results_of(self, a: IntoArguments) -> tuple[Tensor, Tensor | None]:
        return a.out, a.lse

    def readable(self, a: IntoArguments) -> IntoArguments:
        found: IntoArguments = super().readable(a)
        return found._replace(out=with_strides_for_tma(a.out))

    def refuse_gradient(self) -> NoReturn:
        raise NotImplementedError(
            "out is given, and an argument requires a gradient: with out there is no backward, so "
            "leave it away, call under torch.no_grad() or torch.inference_mode(), or detach"
        )

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        page_table: Tensor | None,
        softmax_scale: float | None,
        causal: bool,
        window_left: int | None,
        window_right: int | None,
        learnable_sink: Tensor | None,
        softcap: float,
        scheduler: str | None,
        num_splits: int,
        ready: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        tracked = is_grad_enabled()
        if tracked:
            self.takes_gradient(q, k, v, out, lse, learnable_sink)
        try:
            # Host code checks `out`, but for overlaps; with splits it gets partial sums instead.
            storage = out.untyped_storage().data_ptr()
            usable = (
                out.is_contiguous()
                and (
                    num_splits == 1
                    or (
                        out.shape == q.shape
                        and out.dtype is q.dtype
                        and not out.data_ptr() % ALIGNMENT
                        and out.get_device() == q.get_device()
                    )
                )
                and storage != q.untyped_storage().data_ptr()
                and storage != k.untyped_storage().data_ptr()
                and storage != v.untyped_storage().data_ptr()
                and (cu_seqlens_q is None or storage != cu_seqlens_q.untyped_storage().data_ptr())
                and (cu_seqlens_k is None or storage != cu_seqlens_k.untyped_storage().data_ptr())
                and (seqused_q is None or storage != seqused_q.untyped_storage().data_ptr())
                and (seqused_k is None or storage != seqused_k.untyped_storage().data_ptr())
                and (page_table is None or storage != page_table.untyped_storage().data_ptr())
                and (
                    learnable_sink is None or storage != learnable_sink.untyped_storage().data_ptr()
                )
            )
        except Exception:
            usable = False
        if not usable:
            self._validate(
                IntoArguments(
                    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                    seqused_q, seqused_k, page_table, softmax_scale, causal, window_left,
                    window_right, learnable_sink, softcap, scheduler, num_splits,
                )
            )  # fmt: skip
        results = _attend(
            self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q,
            seqused_k, page_table, softmax_scale, causal, window_left, window_right,
            learnable_sink, softcap, scheduler, num_splits, lse is not None, False, ready,
            (out, lse),
        )  # fmt: skip
        if tracked:
            increment_version((out,) if lse is None else (out, lse))
        return results

    def failed(self, error: Exception, key: Any, ready: Any, *arguments: Any) -> Any:
        q, k, v, *rest, _, out, lse = arguments
        return super().failed(error, key, ready, q, k, v, out, lse, *rest)


_attend = Attention.forward
INTO = Into()
_into = INTO.forward


def attention_into(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Any,
    seqused_k: Any,
    page_table: Any,
    softmax_scale: float | None,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    learnable_sink: Any,
    softcap: float,
    scheduler: str | None,
    num_splits: int,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """The public functions with `out`."""
    lse = None
    if return_lse is not False:
        check_flags(return_lse=return_lse)
        if return_lse:
            # What is no q is refused, or handles the call, below.
            lse = empty_lse(q) if isinstance(q, Tensor) and q.dim() > 2 else torch.empty(0)
    call = (
        _into
        if not is_dynamo_compiling()
        and type(q) is type(k) is type(v) is type(out) is Tensor
        and (cu_seqlens_q is None or type(cu_seqlens_q) is Tensor)
        and (cu_seqlens_k is None or type(cu_seqlens_k) is Tensor)
        and (seqused_q is None or type(seqused_q) is Tensor)
        and (seqused_k is None or type(seqused_k) is Tensor)
        and (page_table is None or type(page_table) is Tensor)
        and (learnable_sink is None or type(learnable_sink) in PLAIN)
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
        else INTO.routed
    )
    call(
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q,
        seqused_k, page_table, softmax_scale, causal, window_left, window_right, learnable_sink,
        softcap, scheduler, num_splits,
    )  # fmt: skip
    return out, lse
