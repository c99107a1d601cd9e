"""Calls of the attention kernels on rectangles of a rank's queries and keys.

Tensors here are `[batch, rows, heads, dim]`, and lse is `[batch, heads, rows]`. A pass of one
rectangle calls the kernels with views of the rectangle's rows. A pass of several rectangles is one
call with packed sequences. Each rectangle is a sequence. Rows between two rectangles are a sequence
without used queries.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.attention.arguments import Arguments
from ..ops.attention.backward import BACKWARD, BackwardArguments
from ..ops.attention.call import attend as attend_with
from ..ops.attention.partial import attend_partial
from .layout import Pass, Rectangle, Window


class Options(NamedTuple):
    """The options that all kernel calls of one attention call share."""

    window: Window
    softmax_scale: float | None = None
    softcap: float = 0.0
    scheduler: str | None = None
    deterministic: bool = False
    batch_invariant: bool = False


Counts = tuple[Tensor, Tensor]  # see `used.UsedRows.counts`


class Packed(NamedTuple):
    """A pass of several rectangles, as arguments of `flash_attn_varlen_func`."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def lengths(self) -> dict[str, Any]:
        """The tensors by name."""
        return {name: getattr(self, name) for name in self._fields[:4]}


def packed(
    of: Pass, batch: int, rows_q: int, rows_k: int, device: torch.device, counts: Counts | None
) -> Packed:
    """The packed sequences of a pass, for all batch entries. Every row belongs to a sequence.
    `counts` says how many rows of each rectangle are used."""
    found, rectangles = _packed(of, batch, rows_q, rows_k, device)
    if counts is None:
        return found
    used_q, used_k = (x.index_select(0, rectangles) for x in counts)
    return found._replace(seqused_q=used_q, seqused_k=used_k)


@lru_cache(maxsize=1024)
def _packed(
    of: Pass, batch: int, rows_q: int, rows_k: int, device: torch.device
) -> tuple[Packed, Tensor]:
    """The packed sequences of a pass in which all rows are used. And the number of each sequence's
    rectangle, or the number of rectangles for rows between two rectangles."""
    bounds_q, bounds_k, used, rectangles = [0], [0], [], []

    def add(end_q: int, end_k: int, queries: int, rectangle: int) -> None:
        bounds_q.append(end_q)
        bounds_k.append(end_k)
        used.append(queries)
        rectangles.append(rectangle)

    last = Rectangle(rows_q, rows_q, rows_k, rows_k)
    for entry in range(batch):
        at_q, at_k = entry * rows_q, entry * rows_k
        for number, (q, q_end, k, k_end) in enumerate((*of.rectangles, last)):
            if (bounds_q[-1], bounds_k[-1]) != (at_q + q, at_k + k):
                add(at_q + q, at_k + k, 0, len(of.rectangles))
            if q < q_end:
                add(at_q + q_end, at_k + k_end, q_end - q, number)
    lengths_q = [b - a for a, b in pairwise(bounds_q)]
    tensors = [torch.tensor(x, dtype=torch.int32) for x in (bounds_q, bounds_k, used, rectangles)]
    cu_q, cu_k, seqused, numbers = (x.to(device) for x in tensors)
    sequences = Packed(
        cu_q,
        cu_k,
        None if used == lengths_q else seqused,
        None,
        max((r.q_end - r.q for r in of.rectangles), default=0),
        max((r.k_end - r.k for r in of.rectangles), default=0),
    )
    return sequences, numbers


def attend(
    of: Pass, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None,
    sink: Tensor | None, options: Options, counts: Counts | None = None,
) -> None:  # fmt: skip
    """Write out and lse of the pass's queries; other rows keep their values. With `counts`, rows
    of queries that are not used are undefined."""
    left, right = of.window
    scale, cap, scheduler = options.softmax_scale, options.softcap, options.scheduler
    invariant, need_lse = options.batch_invariant, lse is not None
    if len(of.rectangles) == 1 and counts is None:
        ((first, end, first_k, end_k),) = of.rectangles
        if (first, end) != (0, q.shape[1]):
            q, out = q[:, first:end], out[:, first:end]
            lse = None if lse is None else lse[..., first:end]
        if (first_k, end_k) != (0, k.shape[1]):
            k, v = k[:, first_k:end_k], v[:, first_k:end_k]
        attend_with(
            q, k, v, out, None, None, None, None, None, None, None, None, None, None, scale, False,
            left, right, sink, cap, scheduler, 1, need_lse, False, invariant, lse,
        )  # fmt: skip
        return
    batch, rows, heads, _ = q.shape
    sequences = packed(of, batch, rows, k.shape[1], q.device, counts)
    # The kernel writes lse in place if no other rows keep their values.
    whole = sequences.seqused_q is None
    given = lse[0] if lse is not None and batch == 1 and whole else None
    _, found = attend_with(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), out.view(-1, *out.shape[2:]),
        sequences.cu_seqlens_q, sequences.cu_seqlens_k, sequences.max_seqlen_q,
        sequences.max_seqlen_k, sequences.seqused_q, sequences.seqused_k, None, None, None, None,
        scale, False, left, right, sink, cap, scheduler, 1, need_lse, False, invariant, given,
    )  # fmt: skip
    if lse is not None and found is not None and given is None:
        by_batch = found.view(heads, batch, rows).transpose(0, 1)
        _copy(of, lse, by_batch, -1, whole=whole)


def attend_in_float32(
    of: Pass, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, options: Options
) -> None:
    """Write float32 o and lse of the pass's queries. All other rows get lse -inf, so that
    `combine_partial` ignores these rows.

    Args:
        o: float32 `[batch, rows, heads, dim]`, contiguous.
        lse: float32 `[batch, rows, heads]`, in this order unlike elsewhere in this module.
    """
    batch, rows, heads, _ = q.shape
    shared = _shared(of, options)
    shared["window_left"], shared["window_right"] = shared.pop("window_size")
    first, end, first_k, end_k = of.rectangles[0]
    if len(of.rectangles) == 1 and (batch == 1 or (first, end) == (0, rows)):
        lse[:, :first].fill_(-torch.inf)
        lse[:, end:].fill_(-torch.inf)
        keys = slice(first_k, end_k)
        call = Arguments(q[:, first:end], k[:, keys], v[:, keys], **shared)
        attend_partial(call, o[None, :, first:end], lse[None, :, first:end])
        return
    sequences = packed(of, batch, rows, k.shape[1], q.device, None)
    if sequences.seqused_q is not None:
        lse.fill_(-torch.inf)
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    call = Arguments(flat_q, flat_k, flat_v, **sequences._asdict(), **shared)
    attend_partial(call, o.view(1, -1, *o.shape[2:]), lse.view(1, -1, heads))


def gradients(
    of: Pass, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    dlse: Tensor | None, sink: Tensor | None, options: Options, dq: Tensor,
    counts: Counts | None, *, first: bool,
) -> tuple[Rectangle, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Write dq of the pass's queries, and return the gradients of the pass's keys.

    Args:
        first: whether this is the first pass, which may write to all rows of dq.
        o, lse: the queries' results over all keys, not only over the keys of the pass.
        do, dlse: the gradients of o and lse.
        sink: the sink if the caller needs dsink, otherwise None.

    Returns:
        (rows, dk, dv, dsink): dk and dv are float32, for the keys `rows.k` to `rows.k_end - 1`.
    """
    rows, call, sequences = _backward(of, q, k, v, o, lse, do, dlse, sink, options, counts)
    if sequences is None:
        dk, dv, dsink = BACKWARD.into(call, dq[:, rows.q : rows.q_end])
        return rows, dk, dv, dsink
    to = dq if first or sequences.seqused_q is None else torch.empty_like(dq)
    dk, dv, dsink = BACKWARD.into(call, to.flatten(0, 1))
    if to is not dq:
        _copy(of, dq, to, 1, whole=False)
    dk, dv = (x.view(len(q), -1, *x.shape[1:]) for x in (dk, dv))
    return rows, dk, dv, dsink


def float32_gradients(
    of: Pass, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    dlse: Tensor | None, sink: Tensor | None, options: Options,
) -> tuple[Rectangle, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(rows, dq, dk, dv, dsink) of a pass, in float32; arguments as for `gradients`. dq, dk and dv
    are of the queries and keys in `rows`. Of queries that are not in the pass, dq is 0."""
    rows, call, sequences = _backward(
        of, q, k, v, o, lse, do, dlse, sink, options, None, float32_dq=True
    )
    *found, dsink = BACKWARD.forward(*call)
    if sequences is not None:
        found = [x.view(len(q), -1, *x.shape[1:]) for x in found]
    dq, dk, dv = found
    return rows, dq, dk, dv, dsink


def _backward(
    of: Pass, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    dlse: Tensor | None, sink: Tensor | None, options: Options, counts: Counts | None, **more: Any,
) -> tuple[Rectangle, BackwardArguments, Packed | None]:  # fmt: skip
    """The rows of a pass's call, the call, and its packed sequences if the call has any."""
    shared: dict[str, Any] = {
        **_shared(of, options),
        "deterministic": options.deterministic,
        "batch_invariant": options.batch_invariant,
        "learnable_sink": sink,
        "need_dsink": sink is not None,
        "float32_dkdv": True,
        **more,
    }
    shared["window_left"], shared["window_right"] = shared.pop("window_size")
    batch, rows, _heads, _ = q.shape
    if len(of.rectangles) == 1 and counts is None:
        (r,) = of.rectangles
        if (r.q, r.q_end) != (0, rows):  # a slice costs the host time
            queries = slice(r.q, r.q_end)
            q, o, do, lse = q[:, queries], o[:, queries], do[:, queries], lse[..., queries]
            dlse = None if dlse is None else dlse[..., queries]
        if (r.k, r.k_end) != (0, k.shape[1]):
            k, v = k[:, r.k : r.k_end], v[:, r.k : r.k_end]
        return r, BackwardArguments(q, k, v, o, do, lse, dlse, **shared), None
    sequences = packed(of, batch, rows, k.shape[1], q.device, counts)
    flat_lse, flat_dlse = (None if x is None else x.transpose(0, 1).flatten(1) for x in (lse, dlse))
    assert flat_lse is not None
    q_rows, k_rows, v_rows, o_rows, do_rows = (x.flatten(0, 1) for x in (q, k, v, o, do))
    call = BackwardArguments(
        q_rows, k_rows, v_rows, o_rows, do_rows, flat_lse, flat_dlse, **sequences.lengths, **shared
    )
    return Rectangle(0, rows, 0, k.shape[1]), call, sequences


def _shared(of: Pass, options: Options) -> dict[str, Any]:
    return {
        "softmax_scale": options.softmax_scale,
        "window_size": tuple(of.window),
        "softcap": options.softcap,
        "scheduler": options.scheduler,
    }


def _copy(of: Pass, to: Tensor, source: Tensor, dim: int, *, whole: bool) -> None:
    """Copy the rows of a pass's queries; `whole` says that the pass has all queries."""
    if whole:
        to.copy_(source)
        return
    index = _queries(of, to.device)
    to.index_copy_(dim, index, source.index_select(dim, index))


@lru_cache(maxsize=1024)
def _queries(of: Pass, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(r.q, r.q_end) for r in of.rectangles]).to(device)
