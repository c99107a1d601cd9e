"""Softmax attention with float32 results, which callers combine with results over other keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ... import launch
from ...settings import on_reload
from ..checks import DTYPE_NAMES
from ..counters import counter_for
from ..operator import MOST_READY, may_remember
from .arguments import Arguments, bounds
from .forward import FORWARD, requests_of
from .plan import plan_attention_combine

_ready: dict[tuple[Any, ...], tuple[Callable[..., None], int, bool]] = {}
_combinations: dict[tuple[Any, ...], Callable[..., None]] = {}
on_reload(_ready.clear)
on_reload(_combinations.clear)


def attend_partial(a: Arguments, o: Tensor, lse: Tensor) -> None:
    """Write float32 results of a call, for each of several parts of its keys.

    A row that sees no key of a part has lse -inf there. Unused rows, and rows of no sequence, keep
    their lse. If the call has no keys at all, o stays unwritten and all of lse is -inf.

    Args:
        a: the call. The function ignores `learnable_sink` and `num_splits`. k and v are not fp8.
        o: float32 `[parts, ...]`, contiguous; each part has q's shape but for head_dim_v.
        lse: float32, of o's shape without the last dimension, with any strides.
    """
    a = a._replace(learnable_sink=None, num_splits=2, return_lse=True)
    key = FORWARD.key(a)
    found = _ready.get(key)
    if found is None:
        FORWARD._validate(a)
        if not (a.q.numel() and a.k.numel()):
            lse.fill_(-math.inf)
            return
        found = _prepare(a)
        if may_remember(a.q):
            if len(_ready) >= MOST_READY:
                _ready.clear()
            _ready[key] = found
    function, clusters, counts = found
    a = FORWARD.readable(a)
    left, right = bounds(a)
    scale = a.q.shape[-1] ** -0.5 if a.softmax_scale is None else a.softmax_scale
    counter = (counter_for(a.q), *[None] * 4) if counts else ()
    function(
        a.q, a.k, a.v, o, lse.mT, None, a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_q,
        a.seqused_k, a.page_table, scale, float(a.softcap or 1.0), left or 0, right or 0, clusters,
        *counter,
    )  # fmt: skip


def _prepare(a: Arguments) -> tuple[Callable[..., None], int, bool]:
    ((kernel, spec), _), _, clusters = requests_of(
        a, num_splits=2, pieces=False, batch_invariant=False
    )
    function = launch.get_for(a.q.device, kernel, spec)
    return function, clusters, spec.scheduler == "counter"


def combine_partial(
    o: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor | None, sink: Tensor | None
) -> None:
    """Combine results over parts of the keys, and write the whole results to `out` and `out_lse`.

    Args:
        o: float32 `[parts, batch, seqlen, heads, head_dim_v]`.
        lse: float32 `[parts, batch, seqlen, heads]`.
        out: `[batch, seqlen, heads, head_dim_v]`, of any dtype that `flash_attn_combine` takes.
        out_lse: float32 `[batch, heads, seqlen]`, or None.
        sink: `[heads]`, or None. The sink counts once, not once for each part.
    """
    if out.numel():
        sink_dtype = "none" if sink is None else DTYPE_NAMES[sink.dtype]
        key = o.device, o.shape[-1], out.dtype, sink_dtype, out_lse is not None
        function = _combinations.get(key)
        if function is None:
            ((kernel, spec),) = plan_attention_combine(
                launch.arch_for(o.device),
                head_dim=o.shape[-1],
                out_dtype=DTYPE_NAMES[out.dtype],
                return_lse=out_lse is not None,
            )
            function = launch.get_for(o.device, kernel, replace(spec, sink_dtype=sink_dtype))
            if may_remember(o):
                if len(_combinations) >= MOST_READY:
                    _combinations.clear()
                _combinations[key] = function
        function(o, lse, out, None if out_lse is None else out_lse.mT, sink)
