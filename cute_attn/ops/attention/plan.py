"""Softmax attention: which kernels a call gets."""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

from ... import launch
from ...kernels.attention import configs, table
from ...kernels.attention.heuristics import (
    FEW_PARTIALS,
    MANY_PARTIALS,
    backward_spec,
    fixed_orders,
    forward_spec,
    has_clc,
    has_fused_dq,
    packed_heads,
)
from ...kernels.attention.query_sums import QuerySums
from ...kernels.attention.spec import (
    HEAD_DIMS_V,
    SINK_DTYPES,
    CombineSpec,
    PostprocessSpec,
    PreprocessSpec,
)
from ...kernels.common.sum_partials_spec import SumPartialsSpec
from ...kernels.common.table import SUM_PARTIALS, ZERO_UNUSED
from ...kernels.common.zero_unused_spec import ZeroUnusedSpec
from ...settings import settings
from .arguments import USER_SCHEDULERS, check_fp8, check_tree_arch

logger = logging.getLogger(__name__)


@launch.planner
def plan_attention(
    arch: str,
    *,
    head_dim: int = 256,
    head_dim_v: int | None = None,
    dtype: str = "bfloat16",
    heads: int = 1,
    heads_k: int = 1,
    causal: bool = False,
    window_left: bool = False,
    window_right: bool = False,
    sink: str | None = None,
    softcap: bool = False,
    varlen_q: bool = False,
    varlen_k: bool = False,
    seqused_q: bool = False,
    seqused_k: bool = False,
    page_size: int | None = None,
    scheduler: str | None = None,
    num_splits: int = 1,
    return_lse: bool = False,
    short: bool | None = None,
    long: bool | None = None,
    few: bool | None = None,
    pieces: bool | None = None,
    kv_dtype: str | None = None,
    k_descale: bool = False,
    v_descale: bool = False,
    batch_invariant: bool = False,
    tree_mask: bool = False,
) -> list[launch.Request]:
    """The kernels that the attention functions use for such tensors, for `cute_attn.warmup` and
    spec files. The kernels do not depend on batch size or lengths.

    Args:
        arch: such as "sm_100a".
        head_dim: head dimension of q and k.
        head_dim_v: head dimension of v; head_dim if None.
        dtype: dtype of q, k and v.
        heads: heads of q; only the ratio of heads to heads_k counts.
        heads_k: heads of k and v.
        causal: as the operator's.
        window_left: whether window_size has a bound to the left.
        window_right: whether window_size has a bound to the right.
        sink: dtype of learnable_sink; None without one.
        softcap: whether softcap is not 0.
        varlen_q: whether cu_seqlens_q is given.
        varlen_k: whether cu_seqlens_k is given.
        seqused_q: whether seqused_q is given.
        seqused_k: whether seqused_k is given.
        page_size: rows of a page of k and v; None without page_table.
        scheduler: as the operator's; None follows `FA_CLC`.
        num_splits: 1 for calls without splits, more for calls with splits, 0 for calls that leave
            the number to the operator.
        return_lse: as the operator's.
        short: True for at most 128 queries in each sequence (decode), False for more (prefill),
            None for both: these are two kernels if heads_k < heads.
        long: True for at least 4096 queries in each sequence, False for fewer, None for both. These
            are two kernels on Hopper at head_dim 64 and 256, without a window or a causal mask,
            packed sequences, used lengths, pages, splits and fp8.
        few: only for short sequences. True for at most 64 query rows of a K/V head in each
            sequence, False for more, None for both: these are two kernels on Hopper. The rows are
            the queries times the query heads of the K/V head, if this is a power of two.
        pieces: only for at most 256 query rows of a K/V head, with num_splits of 0. True for
            several sequences, whose keys are cut into pieces where sequences are long; False for
            one sequence or more rows, None for both. Calls with batch_invariant have no pieces.
        kv_dtype: dtype of k and v, "float8_e4m3fn" or "float8_e5m2"; None for dtype.
        k_descale: whether k_descale is given.
        v_descale: whether v_descale is given.
        batch_invariant: as the operator's.
        tree_mask: whether tree_mask is given; needs `causal`.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names the
            parameter.
        NotImplementedError: there is no kernel for these head dimensions on this architecture.
    """
    dims = head_dim, head_dim_v
    kernel, row = table.find("forward", arch, *dims)
    fp8 = "none" if kv_dtype is None or kv_dtype == dtype else kv_dtype
    if fp8 != "none":
        check_fp8(arch, head_dim, row.head_dim_v, fp8)
    elif k_descale or v_descale:
        raise ValueError("k_descale or v_descale is True, they need kv_dtype of fp8")
    if tree_mask:
        check_tree_arch(arch)
        if not (causal or window_right):
            raise ValueError("tree_mask is True, it needs causal")
    if heads_k < 1 or heads < 1 or heads % heads_k:
        raise ValueError(f"heads is {heads}, must be a positive multiple of heads_k, {heads_k}")
    _check_sink(sink)
    if num_splits < 0:
        raise ValueError(f"num_splits is {num_splits}, must be at least 0")
    if page_size is not None and page_size < 1:
        raise ValueError(f"page_size is {page_size}, must be positive")
    if page_size is not None and (varlen_k or not seqused_k):
        raise ValueError("page_size is given, it needs seqused_k, and varlen_k must be False")
    chosen = _scheduler(scheduler)
    if chosen == "clc" and not has_clc(arch):
        _say_static(arch)
    # (packed heads, whether rows are few, whether there are pieces)
    tiles: list[tuple[int, bool, bool]] = []
    for case in (False, True) if short is None else (short,):
        packing = packed_heads(arch, *dims, heads=heads, heads_k=heads_k, short=case)
        tuning = configs.forward(arch, *dims)
        can_be_few = case and tuning.few is not None
        of_case = ((False, True) if few is None else (few,)) if can_be_few else (False,)
        has_pieces = can_be_few and tuning.pieces is not None
        tiles += [(packing, value, value or has_pieces) for value in of_case]
    requests: list[launch.Request] = [
        (
            kernel,
            forward_spec(
                arch,
                *dims,
                dtype=dtype,
                scheduler=chosen,
                packed_heads=packing,
                window_left=window_left,
                window_right=window_right or causal,
                softcap=softcap,
                sink_dtype=sink or "none",
                varlen_q=varlen_q,
                varlen_k=varlen_k,
                seqused_q=seqused_q,
                seqused_k=seqused_k,
                page_size=page_size,
                split=way == "splits",
                few=few_rows,
                pieces=way == "pieces",
                batch_invariant=batch_invariant,
                lse=return_lse,
                fp8=fp8,
                k_descale=k_descale,
                v_descale=v_descale,
                tree_mask=tree_mask,
                long=is_long,
            ),
        )
        for packing, few_rows, has_pieces in tiles
        for is_long in (((False, True) if long is None else (long,)) if not short else (False,))
        for way in _ways(num_splits, has_pieces, False if batch_invariant else pieces)
    ]
    requests = list(dict.fromkeys(requests))
    if any(getattr(spec, "split", False) for _, spec in requests):
        combine = CombineSpec(
            dtype, row.head_dim_v, sink_dtype=sink or "none", lse=return_lse, dependent=True
        )
        requests.append((table.COMBINE, combine))
    return requests


def _ways(num_splits: int, has_pieces: bool, pieces: bool | None) -> list[str]:
    """How the keys of a query tile are shared out: "whole", "splits" or "pieces"."""
    if num_splits:
        return ["splits" if num_splits > 1 else "whole"]
    found = [] if has_pieces and pieces else ["whole", "splits"]
    return [*found, "pieces"] if has_pieces and pieces is not False else found


def _check_sink(sink: str | None) -> None:
    if sink is not None and sink not in SINK_DTYPES[1:]:
        raise ValueError(f"sink is {sink!r}, must be one of {SINK_DTYPES[1:]} or None")


@launch.planner
def plan_attention_combine(
    arch: str, *, head_dim: int = 256, out_dtype: str = "float32", return_lse: bool = True
) -> list[launch.Request]:
    """The kernel of `flash_attn_combine`. `plan_attention` names the kernel that combines splits of
    attention calls.

    Args:
        arch: such as "sm_100a".
        head_dim: head dimension of out_partial.
        out_dtype: as the operator's, "float32" for None.
        return_lse: as the operator's.

    Returns:
        A pair of the kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: out_dtype is not supported.
        NotImplementedError: there is no kernel for this head_dim.
    """
    if head_dim not in HEAD_DIMS_V:
        raise NotImplementedError(f"head_dim is {head_dim}, there are kernels for {HEAD_DIMS_V}")
    allowed = CombineSpec.ALLOWED["dtype"]
    if out_dtype not in allowed:
        raise ValueError(f"out_dtype is {out_dtype!r}, must be one of {allowed}")
    return [(table.COMBINE, CombineSpec(out_dtype, head_dim, "none", return_lse))]


@launch.planner
def plan_attention_backward(
    arch: str,
    *,
    head_dim: int = 256,
    head_dim_v: int | None = None,
    dtype: str = "bfloat16",
    causal: bool = False,
    window_left: bool = False,
    window_right: bool = False,
    sink: str | None = None,
    softcap: bool = False,
    varlen_q: bool = False,
    varlen_k: bool = False,
    seqused_q: bool = False,
    seqused_k: bool = False,
    scheduler: str | None = None,
    dlse: bool = False,
    dq: bool = True,
    dkdv: bool = True,
    split: bool | None = None,
    keeps_ds: bool | None = None,
    rows_without_keys: bool | None = None,
    negative_left: bool = False,
    short: bool | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    float32_dkdv: bool = False,
    float32_dq: bool = False,
) -> list[launch.Request]:
    """The kernels for the gradient of the attention functions. `plan_attention`, with return_lse,
    has the kernels of the forward.

    Args:
        arch: such as "sm_100a".
        head_dim: head dimension of q and k.
        head_dim_v: head dimension of v; head_dim if None.
        dtype: dtype of q, k and v.
        causal: as the operator's.
        window_left: whether window_size has a bound to the left.
        window_right: whether window_size has a bound to the right.
        sink: dtype of a learnable_sink that requires a gradient; None without one.
        softcap: whether softcap is not 0.
        varlen_q: whether cu_seqlens_q is given.
        varlen_k: whether cu_seqlens_k is given.
        seqused_q: whether seqused_q is given.
        seqused_k: whether seqused_k is given.
        scheduler: as the operator's; None follows `FA_CLC`.
        dlse: whether lse is returned and has a gradient.
        dq: whether q requires a gradient.
        dkdv: whether k or v requires a gradient.
        split: True for calls that split the query heads of a K/V head among clusters (few K/V
            heads, short sequences), False for others, None for both.
        keeps_ds: True for calls that keep dS between kernels (on Hopper, at head_dim 192 and 256,
            if dS fits `CUTE_ATTN_WORKSPACE_MIB`), False for others, None for both.
        rows_without_keys: True for calls in which queries may see no key because of `causal` or a
            bound to the right; False for others, None for both. Queries may see no key if there are
            more queries than keys, or if the lengths of q and k are different tensors.
        negative_left: whether window_size has a negative number to the left, other than -1.
        short: True for sequences of at most 1024 queries on average, False for longer ones, None
            for both: these are two kernels on Hopper at head_dim 64 and 128.
        deterministic: as the operator's, or `torch.use_deterministic_algorithms` is on. On Hopper
            at head_dim 64, causal calls take one of two kernels, by their lengths and heads.
        batch_invariant: as the operator's.
        float32_dkdv: whether dk and dv are float32, as calls with `cp` need them.
        float32_dq: whether dq is float32, as calls with `cp` in hops need it.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names the
            parameter.
        NotImplementedError: there is no kernel for these head dimensions on this architecture.
    """
    _check_sink(sink)
    orders = fixed_orders(
        head_dim,
        window_left=window_left,
        window_right=window_right or causal,
        batch_invariant=batch_invariant,
    )
    requests = [
        request
        for case in ((False, True) if split is None else (split,))
        for ds in ((False, True) if keeps_ds is None else (keeps_ds,))
        for of_keys in ((False, True) if ds and not varlen_k else (False,))
        for unseen in ((False, True) if rows_without_keys is None else (rows_without_keys,))
        for in_order in ((False, True) if short is None else (short,))
        for order in (orders if deterministic or batch_invariant or in_order else ("any",))
        for request in backward_requests(
            arch,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            window_left=window_left,
            window_right=window_right or causal,
            sink=sink,
            softcap=softcap,
            varlen_q=varlen_q,
            varlen_k=varlen_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            scheduler=scheduler,
            dlse=dlse,
            dq=dq,
            dkdv=dkdv,
            split=case,
            ds=ds and table.has("backward_ds_dq", arch, head_dim, head_dim_v),
            ds_of_keys=of_keys,
            rows_without_keys=unseen,
            negative_left=negative_left,
            order=order,
            float32_dkdv=float32_dkdv,
            float32_dq=float32_dq,
        )
        if request is not None
    ]
    return list(dict.fromkeys(requests))


class BackwardRequests(NamedTuple):
    """The kernels of a backward; None for a kernel that is not needed."""

    preprocess: launch.Request
    dq: launch.Request | None
    dkdv: launch.Request | None
    sum_dkdv: launch.Request | None
    sum_dsink: launch.Request | None
    zero_dq: launch.Request | None
    zero_dkdv: launch.Request | None
    postprocess: launch.Request | None  # dkdv adds up dq too
    ds_dq: launch.Request | None  # dkdv keeps dS for ds_dq


def backward_requests(
    arch: str,
    *,
    head_dim: int,
    head_dim_v: int | None,
    dtype: str,
    window_left: bool,
    window_right: bool,
    sink: str | None,
    softcap: bool,
    varlen_q: bool,
    varlen_k: bool,
    seqused_q: bool,
    seqused_k: bool,
    scheduler: str | None,
    dlse: bool,
    dq: bool,
    dkdv: bool,
    split: bool,
    ds: bool,
    ds_of_keys: bool,
    rows_without_keys: bool,
    negative_left: bool,
    order: str = "any",
    float32_dkdv: bool = False,
    float32_dq: bool = False,
) -> BackwardRequests:
    """The kernels of a backward by task; arguments and errors as for `plan_attention_backward`.
    With `ds`, dS is kept if both kernels run; with `ds_of_keys`, dS of a part of the keys at once.
    `order` is the order of additions to the sums of dQ where one kernel computes all gradients.
    Rows without keys matter only to dkdv."""

    dims = head_dim, head_dim_v
    fused = has_fused_dq(arch, *dims, softcap=softcap, dq=dq, dkdv=dkdv)
    ds = ds and dq and dkdv
    ordered = fused and order != "any"
    of_order: dict[str, Any] = {"order": order} if ordered else {}

    def main(direction: str, *, partial: bool = False) -> launch.Request:
        kernel = table.find("backward_fused" if fused else direction, arch, *dims).kernel
        spec = backward_spec(
            arch,
            *dims,
            of_keys=direction == "backward_dkdv",
            fused=fused,
            ds=ds,
            dtype=dtype,
            scheduler=_scheduler(scheduler),
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
            varlen_q=varlen_q,
            varlen_k=varlen_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            partial=partial,
            **of_order,
        )
        return kernel, spec

    def zeros(varlen: bool, seqused: bool) -> launch.Request | None:
        if not (varlen or seqused):
            return None
        return ZERO_UNUSED, ZeroUnusedSpec(varlen=varlen, seqused=seqused)

    rows_without_keys = rows_without_keys and dkdv and (window_right or negative_left)
    preprocess_kernel, row = table.find("backward_preprocess", arch, *dims)
    preprocess = PreprocessSpec(
        dtype=dtype,
        varlen_q=varlen_q,
        seqused_q=seqused_q,
        sink_dtype=sink or "none",
        dlse=dlse,
        head_dim_v=row.head_dim_v,
        sums=fused,
        ordered=ordered,
        rows_without_keys=rows_without_keys,
        varlen_k=rows_without_keys and varlen_k,
        seqused_k=rows_without_keys and seqused_k,
        negative_left=rows_without_keys and negative_left,
    )
    partial = dkdv and (split or float32_dkdv)
    sums_dtype = "float32" if float32_dkdv else dtype
    keys = main("backward_dkdv", partial=partial) if dkdv else None
    postprocess = None
    if fused and keys is not None:
        sums = QuerySums.of(keys[1].tile_m, head_dim)
        dq_dtype = "float32" if float32_dq else dtype
        spec = PostprocessSpec(
            dq_dtype, varlen_q, seqused_q, head_dim, sums.tile_m, sums.columns, ordered
        )
        postprocess = table.find("backward_postprocess", arch, *dims).kernel, spec
    return BackwardRequests(
        preprocess=(preprocess_kernel, preprocess),
        dq=main("backward_dq") if dq and not (fused or ds) else None,
        dkdv=keys,
        sum_dkdv=(
            (SUM_PARTIALS, SumPartialsSpec(sums_dtype, **FEW_PARTIALS)) if dkdv and split else None
        ),
        sum_dsink=(SUM_PARTIALS, SumPartialsSpec(sink, **MANY_PARTIALS)) if sink else None,
        zero_dq=zeros(varlen_q, seqused_q) if dq else None,
        zero_dkdv=zeros(varlen_k, seqused_k) if dkdv else None,
        postprocess=postprocess,
        ds_dq=main("backward_ds_dq", partial=ds_of_keys) if ds else None,
    )


@functools.cache
def _say_static(arch: str) -> None:
    """Log, once for each architecture, that tiles are static."""
    logger.info("%s has no cluster launch control: attention runs with the static scheduler", arch)


def _scheduler(scheduler: str | None) -> str:
    chosen = settings().scheduler if scheduler is None else scheduler
    if chosen not in USER_SCHEDULERS:
        raise ValueError(f"scheduler is {scheduler!r}, must be one of {USER_SCHEDULERS} or None")
    return chosen
