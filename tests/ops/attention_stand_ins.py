"""What stands in for the attention kernels where a test is about the operators around them.

Each computes what the kernel of its name does, from the same arguments, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cute_attn.cache import KernelDef
from cute_attn.emulation import Emulation
from cute_attn.kernels.attention import table
from cute_attn.kernels.attention.statistics import STATS_ROWS, round_up
from cute_attn.kernels.common.table import SUM_PARTIALS, ZERO_UNUSED
from cute_attn.ops.attention.arguments import ALIGNMENT, has_readable_strides
from cute_attn.reference.attention import attention_reference, sequences, visible


class StandIns:
    """The kernels that were launched: their names, specs and arguments, in order."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, Any, tuple[Any, ...]]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.launched]

    def function(self, _: Emulation, kernel: KernelDef, spec: Any) -> Callable[..., None]:
        def run(*args: Any) -> None:
            _refuse_what_host_code_refuses(args)
            KERNELS[kernel.name](spec, *args)
            self.launched.append((kernel.name, spec, args))

        return run


@contextmanager
def stand_ins() -> Iterator[StandIns]:
    """Within it, no attention kernel is compiled."""
    found = StandIns()
    with mock.patch.object(Emulation, "function", lambda *args: found.function(*args)):
        yield found


def _refuse_what_host_code_refuses(args: tuple[Any, ...]) -> None:
    for x in args:
        if not isinstance(x, Tensor) or x.dim() < 3 or x.shape[-1] != 256:
            continue
        if not has_readable_strides(x) or x.data_ptr() % ALIGNMENT:
            raise ValueError(f"host code refuses strides {x.stride()}, {x.data_ptr():#x}")


def _options(spec: Any, softcap: float, left: int, right: int) -> dict[str, Any]:
    return {
        "window_size": (left if spec.window_left else None, right if spec.window_right else None),
        "softcap": softcap if spec.softcap else 0.0,
    }


def _forward(
    spec: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, sink: Tensor | None,
    cu_q: Tensor | None, cu_k: Tensor | None, used_q: Tensor | None, used_k: Tensor | None,
    pages: Tensor | None, scale: float, softcap: float, left: int, right: int, clusters: int,
    *shared: Tensor | None,
) -> None:  # fmt: skip
    assert bool(spec.page_rows) == (pages is not None)
    *shared, k_descale, v_descale, tree_mask = shared or (None, None, None)
    if spec.scheduler == "pieces":
        counters, parts = shared
        assert counters is not None and parts is not None
        assert len(counters) == 2 + 2 * clusters and len(parts) == 2 * clusters
    else:
        assert [x is not None for x in shared] == [True, False] * (spec.scheduler == "counter")
    if pages is not None:
        where = pages.long().clamp(0, len(k) - 1)
        k, v = (x.view(torch.uint8)[where].view(x.dtype).flatten(1, 2) for x in (k, v))
    for name, factor in (("k_descale", k_descale), ("v_descale", v_descale)):
        assert getattr(spec, name, False) == (factor is not None)
    assert getattr(spec, "tree_mask", False) == (tree_mask is not None)
    if k_descale is not None:
        k = k.double() * k_descale[:, None, :, None]
    if v_descale is not None:
        v = v.double() * v_descale[:, None, :, None]
    if spec.split:  # the first has all keys, the others none
        assert lse is not None
        o[1:], lse[1:] = math.nan, -math.inf
        o, lse = o[0], lse[0]
    exact_o, exact_lse = attention_reference(
        q, k, v, softmax_scale=scale, learnable_sink=sink, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
        seqused_q=used_q, seqused_k=used_k, tree_mask=tree_mask,
        **_options(spec, softcap, left, right),
    )  # fmt: skip
    assert spec.lse == (lse is not None)
    for index_q, rows_q, _, _ in sequences(q, k, cu_q, cu_k, used_q, used_k):
        at = (rows_q,) if index_q is None else (index_q, rows_q)
        o[at].copy_(exact_o[at])
        if lse is not None:
            of_rows = lse[(*at[:-1], slice(None), rows_q)]
            of_rows.copy_(exact_lse[(*at[:-1], slice(None), rows_q)])


def _padded(q: Tensor, cu_q: Tensor | None, sequence: int) -> int:
    if cu_q is None:
        return sequence * round_up(q.shape[1])
    return (int(cu_q[sequence]) + STATS_ROWS * sequence) // STATS_ROWS * STATS_ROWS


def _preprocess(
    spec: Any, o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None, sink: Tensor | None,
    cu_q: Tensor | None, used_q: Tensor | None, stats: Tensor, zeroed: Tensor | None,
    parts: Tensor | None, seen_do: Tensor | None, cu_k: Tensor | None, used_k: Tensor | None,
    seqlen_k: int, right: int, left: int | None,
) -> None:  # fmt: skip
    assert spec.negative_left == (left is not None)
    assert not spec.sums and zeroed is None  # of SM90
    assert (spec.sink_dtype != "none") == (sink is not None) == (parts is not None)
    assert spec.rows_without_keys == (seen_do is not None)
    if seen_do is not None:
        _hide(do, seen_do, (cu_q, cu_k, used_q, used_k), seqlen_k, right, left)
    stats.fill_(math.nan)
    if parts is not None:
        parts.zero_()
    for number, (index, rows, _, _) in enumerate(sequences(o, o, cu_q, cu_q, used_q, used_q)):
        x, dx, y, dy = (
            None if t is None else t if index is None else t[index] for t in (o, do, lse, dlse)
        )
        assert x is not None and dx is not None and y is not None
        delta = (x[rows].double() * dx[rows].double()).sum(-1).T
        if dy is not None:
            delta = delta - dy[:, rows]
        y = y[:, rows].double()
        if parts is not None and sink is not None:
            p = torch.where(y == sink[:, None], 1.0, (sink.double()[:, None] - y).exp())
            parts[0] -= (p * delta).sum(-1)
        first, count = _padded(o, cu_q, number), y.shape[1]
        stats[0, :, first : first + round_up(count)] = math.inf
        stats[1, :, first : first + round_up(count)] = 0.0
        seen = y != -math.inf
        stats[0, :, first : first + count] = torch.where(seen, y, math.inf)
        stats[1, :, first : first + count] = torch.where(seen, delta, 0.0)


def _hide(
    do: Tensor, seen_do: Tensor, lengths: Any, seqlen_k: int, right: int, left: int | None
) -> None:
    """Copy the used rows of do, with zeros in rows that see no key."""
    seen_do.fill_(math.nan)
    keys = do.new_empty(1, seqlen_k)
    for index_q, rows_q, _, rows_k in sequences(do, keys, *lengths):
        at = rows_q if index_q is None else (index_q, rows_q)
        queries, count = rows_q.stop - rows_q.start, rows_k.stop - rows_k.start
        seen_do[at] = do[at]
        seen_do[at][: max(0, min(queries, queries - count - right))] = 0
        if left is not None:
            seen_do[at][max(0, queries + left) if count else 0 :] = 0


def _of_heads(
    spec: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor, stats: Tensor, lengths: Any,
    scale: float, softcap: float, left: int, right: int,
) -> Iterator[tuple[Any, Any, int, Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """For each sequence and query head: the places of its rows of q and k, the head, P, dS, Q, K,
    dO."""
    group = q.shape[-2] // k.shape[-2]
    options = _options(spec, softcap, left, right)
    for number, (index_q, rows_q, index_k, rows_k) in enumerate(sequences(q, k, *lengths)):
        at_q = rows_q if index_q is None else (index_q, rows_q)
        at_k = rows_k if index_k is None else (index_k, rows_k)
        first = _padded(q, lengths[0], number)
        for head in range(q.shape[-2]):
            q_h, do_h = (x[at_q][:, head].double() for x in (q, do))
            k_h, v_h = (x[at_k][:, head // group].double() for x in (k, v))
            rows = slice(first, first + len(q_h))
            lse, delta = stats[:, head, rows, None].double()
            score, slope = scale * (q_h @ k_h.T), 1.0
            if options["softcap"]:
                t = torch.tanh(score / softcap)
                score, slope = softcap * t, 1 - t**2
            seen = visible(len(q_h), len(k_h), window_size=options["window_size"])
            p = torch.exp(score - lse).masked_fill(~seen, 0.0)
            ds = (p * (do_h @ v_h.T - delta) * slope).masked_fill(~seen, 0.0)
            yield at_q, at_k, head, p, ds, q_h, k_h, do_h


def _dq(
    spec: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor, stats: Tensor, dq: Tensor,
    *rest: Any,
) -> None:  # fmt: skip
    *lengths, scale, softcap, left, right, clusters = rest
    assert not spec.partial and clusters >= 1
    for at_q, _, head, _, ds, _, k_h, _ in _of_heads(
        spec, q, k, v, do, stats, lengths, scale, softcap, left, right
    ):
        dq[at_q][:, head] = (scale * (ds @ k_h)).to(dq.dtype)


def _dkdv(
    spec: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor, stats: Tensor, dk: Tensor, dv: Tensor,
    *rest: Any,
) -> None:  # fmt: skip
    *lengths, scale, softcap, left, right, splits, clusters = rest
    assert clusters >= 1 and (splits == 1 or spec.partial)
    group = q.shape[-2] // k.shape[-2]
    assert group % splits == 0
    exact_k, exact_v = (torch.zeros(splits, *k.shape, dtype=torch.float64) for _ in range(2))
    written = torch.zeros(k.shape[:-2], dtype=torch.bool)
    for _, at_k, head, p, ds, q_h, _, do_h in _of_heads(
        spec, q, k, v, do, stats, lengths, scale, softcap, left, right
    ):
        split = head % group // (group // splits)
        exact_k[split][at_k][:, head // group] += scale * (ds.T @ q_h)
        exact_v[split][at_k][:, head // group] += p.T @ do_h
        written[at_k] = True
    for exact, out in ((exact_k, dk), (exact_v, dv)):
        if not spec.partial:
            exact, out = exact, out[None]
        assert out.shape == exact.shape
        assert out.dtype == (torch.float32 if spec.partial else k.dtype)
        out[:, written] = exact[:, written].to(out.dtype)


def _sum_partials(spec: Any, partials: Tensor, out: Tensor) -> None:
    assert partials.is_contiguous() and partials.dtype == torch.float32
    assert partials.shape[-1] % spec.vector == 0
    out.copy_(partials.double().sum(0))


def _zero_unused(spec: Any, x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None) -> None:
    assert x.is_contiguous() and x.dtype == torch.int32 and x.dim() == 3
    assert spec.varlen == (cu_seqlens is not None) and spec.seqused == (seqused is not None)
    rows = torch.ones(x.shape[:2], dtype=torch.bool)
    for n in range(len(x)):
        batch = x if seqused is None or cu_seqlens is not None else x[: len(seqused)]
        for number, at in enumerate(
            sequences(batch, batch, cu_seqlens, cu_seqlens, seqused, seqused)
        ):
            if cu_seqlens is not None or number == n % len(batch):
                rows[n, at.rows_q] = False
    x[rows] = 0


def _combine(
    spec: Any, o_splits: Tensor, lse_splits: Tensor, o: Tensor, lse: Tensor | None,
    sink: Tensor | None,
) -> None:  # fmt: skip
    assert spec.lse == (lse is not None) and (spec.sink_dtype != "none") == (sink is not None)
    total = lse_splits.double()
    if sink is not None:
        total = torch.cat([total, sink.double().expand_as(total[:1])])
    total = total.logsumexp(0)
    weights = (lse_splits.double() - total).exp().nan_to_num(0.0)
    o.copy_((weights[..., None] * o_splits.double().nan_to_num(0.0)).sum(0))
    if lse is not None:
        lse.copy_(total)


KERNELS = {
    table.SM90_FORWARD.name: _forward,
    table.COMBINE.name: _combine,
    table.HD256_FORWARD.name: _forward,
    table.BACKWARD_PREPROCESS.name: _preprocess,
    table.HD256_BACKWARD_DQ.name: _dq,
    table.HD256_BACKWARD_DKDV.name: _dkdv,
    SUM_PARTIALS.name: _sum_partials,
    ZERO_UNUSED.name: _zero_unused,
}
