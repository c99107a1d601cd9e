"""Softmax attention into a given tensor: the operator.

This is a separate operator, because it writes one of its arguments. The operator uses the forward's
kernels, whose host code refuses an `out` that overlaps an argument.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from ..checks import (
    check_dtype,
    check_dtypes_are,
    check_not_expanded,
    check_shapes,
)
from ..memory import check_memory
from ..operator import increment_version
from .arguments import (
    ALIGNMENT,
    Arguments,
    check,
    check_alignment,
    check_strides,
    with_strides_for_tma,
)
from .forward import Attention

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
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    tree_mask: Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    learnable_sink: Tensor | None = None
    softcap: float = 0.0
    scheduler: str | None = None
    num_splits: int = 1
    batch_invariant: bool = False

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
        check_shapes(given, {"out": (*a.q.shape[:-1], a.v.shape[-1]), "lse": (*batch, heads, rows)})
        check_not_expanded(given, _WRITTEN)
        check_strides(given, ("out",))
        if "lse" in given:
            check_dtype("lse", given["lse"], ("float32",))

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

    def launch(self, ready: Any, a: IntoArguments) -> tuple[Tensor, Tensor | None]:
        # Host code checks `out`. With splits, however, host code gets partial sums in place of
        # `out`.
        others = [x for name, x in self.tensors(a).items() if name not in ("out", "q", "k", "v")]
        if a.num_splits != 1 and not apart(a.out, a.q, a.k, a.v, *others):
            self._validate(a)
        results = super().launch(ready, a)
        increment_version((a.out,) if a.lse is None else (a.out, a.lse))
        return results


INTO = Into()


def apart(out: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> bool:
    """Whether `out` is a usual tensor that shares no storage with an argument. A call with splits
    needs this check, because its combination does not get the other arguments."""
    storage = out.untyped_storage().data_ptr()
    for x in (k, v, *others):
        if x is not None and storage == x.untyped_storage().data_ptr():
            return False
    return (
        out.is_contiguous()
        and out.shape[:-1] == q.shape[:-1]
        and out.shape[-1] == v.shape[-1]
        and out.dtype is q.dtype
        and not out.data_ptr() % ALIGNMENT
        and out.get_device() == q.get_device()
        and storage != q.untyped_storage().data_ptr()
    )
