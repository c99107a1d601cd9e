"""The route of a call of the public attention functions.

A warm call with plain tensors that needs no gradient takes the shortest route. The call looks up
its *plan*, all that its launches need, by whole shapes. This look-up takes less time than an
operator takes to make a key. If the short route fails, the operator runs the call again (`FORWARD`,
or `INTO` with `out`), and finds what is wrong or missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_flags
from ..counters import counter_for
from ..operator import (
    PLAIN,
    dispatch_mode_depth,
    forward_ad,
    increment_version,
    is_dynamo_compiling,
    is_grad_enabled,
)
from .arguments import Arguments, check_scalars, descales_of
from .forward import FORWARD, PLANS, Splits, empty_lse, empty_o, shared_memory
from .into import INTO, IntoArguments, apart

_empty_like = torch.empty_like
_contiguous = torch.contiguous_format
# Names are bound once, which saves time in each call.
_forward, _plan_of = FORWARD.forward, PLANS.get


def attend(
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
    k_descale: Any,
    v_descale: Any,
    tree_mask: Any,
    softmax_scale: float | None,
    causal: Any,
    window_left: int | None,
    window_right: int | None,
    learnable_sink: Any,
    softcap: Any,
    scheduler: str | None,
    num_splits: int,
    return_lse: Any,
    deterministic: bool,
    batch_invariant: Any,
    given_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The public functions, with the arguments of both operators. `given_lse` is memory for lse,
    with any strides, of a call with `out` and `return_lse`."""
    # One test costs a dense call less than a test for each argument.
    dense = (
        cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is page_table is max_seqlen_q
        is max_seqlen_k is k_descale is v_descale is None
    )  # fmt: skip
    plain = (
        not is_dynamo_compiling()
        and tree_mask is None  # such calls take the operator's route
        and type(q) is type(k) is type(v) is Tensor
        and (out is None or type(out) is Tensor)
        and (
            dense
            or (
                (cu_seqlens_q is None or type(cu_seqlens_q) is Tensor)
                and (cu_seqlens_k is None or type(cu_seqlens_k) is Tensor)
                and (seqused_q is None or type(seqused_q) is Tensor)
                and (seqused_k is None or type(seqused_k) is Tensor)
                and (page_table is None or type(page_table) is Tensor)
                and (k_descale is None or type(k_descale) in PLAIN)
                and (v_descale is None or type(v_descale) in PLAIN)
            )
        )
        and (learnable_sink is None or type(learnable_sink) in PLAIN)
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
    )
    # Keys are compared with ==, and True == 1 == 1.0. So each call checks arguments of an unusual
    # type.
    usual = (
        (causal is False or causal is True or causal.__class__ is int)
        and (return_lse is False or return_lse is True or return_lse.__class__ is int)
        and (batch_invariant is False or batch_invariant is True)
        and (window_left is None or window_left.__class__ is int)
        and (window_right is None or window_right.__class__ is int)
        and (softcap.__class__ is float or softcap.__class__ is int)
        and num_splits.__class__ is int
    )
    plan = None
    if plain and usual:
        tracked = is_grad_enabled()
        if not (
            tracked
            and (
                q.requires_grad
                or k.requires_grad
                or v.requires_grad
                or (out is not None and out.requires_grad)
                or (learnable_sink is not None and learnable_sink.requires_grad)
                or (k_descale is not None and k_descale.requires_grad)
                or (v_descale is not None and v_descale.requires_grad)
            )
        ):
            try:
                device = q.get_device()
                sink_dtype = None if learnable_sink is None else learnable_sink.dtype
                # Two tuples: joining the tuples costs more.
                plan = (
                    q.shape, k.shape, q.dtype, k.dtype, device, softmax_scale, type(softmax_scale),
                    causal, window_left, window_right, sink_dtype, softcap, scheduler, num_splits,
                    return_lse, batch_invariant,
                ) if dense else (
                    q.shape, k.shape, q.dtype, k.dtype, device, softmax_scale, type(softmax_scale),
                    causal, window_left, window_right, sink_dtype, softcap, scheduler, num_splits,
                    return_lse, batch_invariant, max_seqlen_q, max_seqlen_k, k_descale is None,
                    v_descale is None,
                    # Host code refuses all but one dimension of these four.
                    None if cu_seqlens_q is None else cu_seqlens_q.numel(),
                    None if cu_seqlens_k is None else cu_seqlens_k.numel(),
                    None if seqused_q is None else seqused_q.numel(),
                    None if seqused_k is None else seqused_k.numel(),
                    None if page_table is None else page_table.shape,
                )  # fmt: skip
                found = _plan_of(plan)
                if found is not None:
                    (
                        function, scale, cap, left, right, clusters, counts, combine, columns,
                        shared, layouts,
                    ) = found  # fmt: skip
                    o = (
                        out if out is not None
                        else empty_o(q, columns) if columns
                        else _empty_like(q, memory_format=_contiguous)
                    )  # fmt: skip
                    lse = given_lse
                    if lse is None and return_lse:
                        lse = empty_lse(q)
                    if combine is None:
                        written, of_lse, sink = o, lse, learnable_sink
                    else:
                        if out is not None and not apart(
                            out, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
                            page_table, learnable_sink, k_descale, v_descale,
                        ):  # fmt: skip
                            raise ValueError  # the operator says why
                        parts = Splits.allocate(q, layouts)
                        written, of_lse, sink = parts.o, parts.lse.mT, None
                    if k_descale is not v_descale:  # at least one is not None
                        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
                        k_descale, v_descale = descales_of(k_descale, v_descale, batch, k.shape[-2])
                    if shared is not None:
                        counters, of_pieces = shared_memory(q, device, shared)
                        function(
                            q, k, v, o, lse, learnable_sink, cu_seqlens_q, cu_seqlens_k, seqused_q,
                            seqused_k, page_table, scale, cap, left, right, clusters, counters,
                            of_pieces, k_descale, v_descale, None,
                        )  # fmt: skip
                    elif counts:  # one call with *(...) costs more than a call for each case
                        function(
                            q, k, v, written, of_lse, sink, cu_seqlens_q, cu_seqlens_k, seqused_q,
                            seqused_k, page_table, scale, cap, left, right, clusters,
                            counter_for(q, device), None, k_descale, v_descale, None,
                        )  # fmt: skip
                    else:
                        function(
                            q, k, v, written, of_lse, sink, cu_seqlens_q, cu_seqlens_k, seqused_q,
                            seqused_k, page_table, scale, cap, left, right, clusters,
                        )  # fmt: skip
                    if combine is not None:
                        parts.combine(combine, o, lse, learnable_sink)
                    if out is not None:
                        increment_version((out,))
                    return o, lse
            except Exception:
                plan = None
    a = Arguments(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        page_table, k_descale, v_descale, tree_mask, softmax_scale, causal, window_left,
        window_right, learnable_sink, softcap, scheduler, num_splits, batch_invariant, return_lse,
        deterministic,
    )  # fmt: skip
    if not usual and (plain or not is_dynamo_compiling()):
        check_scalars(a)
    if out is not None:
        return _attend_into(a, out, plain, plan, given_lse)
    if not plain:
        result: tuple[Tensor, Tensor | None] = FORWARD.routed(*a)
        return result
    result = _forward(*a)
    if plan is not None:
        FORWARD.remember(plan, a)
    return result


def _attend_into(
    a: Arguments, out: Tensor, plain: bool, plan: tuple[Any, ...] | None, lse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if lse is None and a.return_lse is not False:
        check_flags(return_lse=a.return_lse)
        if a.return_lse:
            # An invalid q is refused, or handles the call, below.
            q: Any = a.q
            has_rows = isinstance(q, Tensor) and q.dim() > 2
            lse = empty_lse(a.q) if has_rows else torch.empty(0)
    given = IntoArguments._make((*a[:3], out, lse, *a[3:-2]))
    if not plain:
        INTO.routed(*given)
    else:
        INTO.forward(*given)
        if plan is not None:
            INTO.remember(plan, given)
    return out, lse
