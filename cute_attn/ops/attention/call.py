"""The route of a call of the public attention functions.

A warm call with plain tensors that needs no gradient takes the shortest one: it finds all that its
launches need by whole shapes, its *plan*, sooner than the operators make a key. What fails there is
done again by the operator, `FORWARD` or with `out` `INTO`, which knows what is wrong or missing.
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
from .forward import FORWARD, PLANS, Splits, empty_lse
from .into import INTO, apart

_empty_like = torch.empty_like
_contiguous = torch.contiguous_format
# Bound once: this saves time per call.
_forward, _into, _plan_of = FORWARD.forward, INTO.forward, PLANS.get


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
    softmax_scale: float | None,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    learnable_sink: Any,
    softcap: float,
    scheduler: str | None,
    num_splits: int,
    return_lse: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor | None]:
    """The public functions, with the arguments of both operators."""
    plain = (
        not is_dynamo_compiling()
        and type(q) is type(k) is type(v) is Tensor
        and (out is None or type(out) is Tensor)
        and (cu_seqlens_q is None or type(cu_seqlens_q) is Tensor)
        and (cu_seqlens_k is None or type(cu_seqlens_k) is Tensor)
        and (seqused_q is None or type(seqused_q) is Tensor)
        and (seqused_k is None or type(seqused_k) is Tensor)
        and (page_table is None or type(page_table) is Tensor)
        and (learnable_sink is None or type(learnable_sink) in PLAIN)
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
    )
    plan = None
    if plain:
        tracked = is_grad_enabled()
        if not (
            tracked
            and (
                q.requires_grad
                or k.requires_grad
                or v.requires_grad
                or (out is not None and out.requires_grad)
                or (learnable_sink is not None and learnable_sink.requires_grad)
            )
        ):
            try:
                device = q.get_device()
                plan = (
                    q.shape, k.shape, q.dtype, device,
                    None if cu_seqlens_q is None else cu_seqlens_q.shape,
                    None if cu_seqlens_k is None else cu_seqlens_k.shape,
                    max_seqlen_q, max_seqlen_k,
                    None if seqused_q is None else seqused_q.shape,
                    None if seqused_k is None else seqused_k.shape,
                    None if page_table is None else page_table.shape,
                    softmax_scale, type(softmax_scale), causal, window_left, window_right,
                    None if learnable_sink is None else learnable_sink.dtype,
                    softcap, scheduler, num_splits, return_lse,
                )  # fmt: skip
                found = _plan_of(plan)
                if found is not None:
                    function, scale, cap, left, right, clusters, counts, combine, layouts = found
                    o = _empty_like(q, memory_format=_contiguous) if out is None else out
                    lse = empty_lse(q) if return_lse else None
                    if combine is None:
                        written, of_lse, sink = o, lse, learnable_sink
                    else:
                        if out is not None and not apart(
                            out, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
                            page_table, learnable_sink,
                        ):  # fmt: skip
                            raise ValueError  # the operator says why
                        parts = Splits.allocate(q, layouts)
                        written, of_lse, sink = parts.o, parts.lse.mT, None
                    if counts:  # two calls, since one with *(...) costs more
                        function(
                            q, k, v, written, of_lse, sink, cu_seqlens_q, cu_seqlens_k, seqused_q,
                            seqused_k, page_table, scale, cap, left, right, clusters,
                            counter_for(q, device),
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
    arguments: tuple[Any, ...]
    if out is None:
        arguments = (
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
            page_table, softmax_scale, causal, window_left, window_right, learnable_sink, softcap,
            scheduler, num_splits, return_lse, deterministic,
        )  # fmt: skip
        if plain:
            return _forward(*arguments, plan=plan)
        result: tuple[Tensor, Tensor | None] = FORWARD.routed(*arguments)
        return result
    lse = None
    if return_lse is not False:
        check_flags(return_lse=return_lse)
        if return_lse:
            # What is no q is refused, or handles the call, below.
            lse = empty_lse(q) if isinstance(q, Tensor) and q.dim() > 2 else torch.empty(0)
    arguments = (
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q,
        seqused_k, page_table, softmax_scale, causal, window_left, window_right, learnable_sink,
        softcap, scheduler, num_splits,
    )  # fmt: skip
    if plain:
        _into(*arguments, plan=plan)
    else:
        INTO.routed(*arguments)
    return out, lse
