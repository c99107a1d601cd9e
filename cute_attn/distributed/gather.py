"""Context parallelism in which each rank receives the keys that its queries see.

K and V travel in parts of their heads. All messages are started at once, and the kernel of one part
of the heads runs beside the messages of the next parts. Every query meets all of its keys in one
call, so nothing is merged or rounded twice. In the backward, each rank computes dK and dV of the
keys that it has received, in float32. These go back to the ranks that hold the keys, which add them
up in the order of the ranks and round the sums once.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from .calls import Options, attend, gradients
from .exchange import Messages, Rows, beside, copy_rows, send
from .layout import Layout, Needs, Window, shared_rows


class Route:
    """What one rank exchanges for the keys that queries see.

    Attributes:
        needs: the keys that the rank's queries see, and the calls that take these keys.
        sent: rank -> the own rows that its queries see.
        received: rank -> the rows of the own `needs` that it sends; for the own rank, its copies.
    """

    def __init__(self, layout: Layout, rank: int, window: Window) -> None:
        self.rank = rank
        self.needs: Needs = layout.needs(rank, window)
        self.sent: dict[int, Rows] = {}
        self.received: dict[int, Rows] = {}
        for other in range(layout.world):
            theirs = self.needs if other == rank else layout.needs(other, window)
            rows, _ = shared_rows(layout.ranges[rank], theirs.ranges)
            if rows:
                self.sent[other] = Rows(rows)
            _, rows = shared_rows(layout.ranges[other], self.needs.ranges)
            if rows:
                self.received[other] = Rows(rows)
        self.rows = sum(end - start for start, end in self.needs.ranges)


class _Keys:
    """K and V of some heads on their way: the rows that a rank's queries see."""

    def __init__(self, route: Route, group: Any, tensors: tuple[Tensor, Tensor]) -> None:
        self.route, self.own = route, tensors
        self.rows = [x.new_empty(x.shape[0], route.rows, *x.shape[2:]) for x in tensors]
        self.into = {
            rank: [rows.memory(x, inside=True) for x in self.rows]
            for rank, rows in route.received.items()
            if rank != route.rank
        }
        self.group = group
        self.messages: Messages | None = None

    def start(self) -> None:
        """Start the messages; called on the stream for messages."""
        route = self.route
        to = {
            rank: [piece for x in self.own for piece in rows.pieces(x)]
            for rank, rows in route.sent.items()
            if rank != route.rank
        }
        into = {rank: [x for parts in both for x in parts] for rank, both in self.into.items()}
        self.messages = send(self.group, to, into)

    def wait(self) -> list[Tensor]:
        """K and V, once they are complete."""
        assert self.messages is not None
        self.messages.wait()  # the own rows, too, were made contiguous on the other stream
        route = self.route
        own = route.received.get(route.rank)
        for i, x in enumerate(self.rows):
            if own is not None:
                copy_rows(x, own, self.own[i], route.sent[route.rank])
            for rank, both in self.into.items():
                route.received[rank].fill(x, both[i])
        return self.rows


def _parts_of_heads(k: Tensor, v: Tensor, parts: int) -> list[tuple[slice, Tensor, Tensor]]:
    """(the heads, contiguous K and V) of each part of the heads."""
    if parts == 1:
        return [(slice(None), k, v)]
    heads = k.shape[2]
    cuts = [heads * i // parts for i in range(parts + 1)]
    slices = [slice(a, b) for a, b in itertools.pairwise(cuts) if a < b]
    return [(s, k[:, :, s].contiguous(), v[:, :, s].contiguous()) for s in slices]


def _of_queries(heads: slice, group: int) -> slice:
    """The query heads of some K/V heads."""
    if heads == slice(None):
        return heads
    return slice(heads.start * group, heads.stop * group)


def _start(route: Route, group: Any, k: Tensor, v: Tensor, parts: int) -> list[tuple[slice, _Keys]]:
    """Start the messages of all parts of the heads."""
    with beside(k.device):
        pieces = _parts_of_heads(k, v, parts)
    found = [(heads, _Keys(route, group, (x, y))) for heads, x, y in pieces]
    with beside(k.device):
        for _, keys in found:
            keys.start()
    return found


def forward(
    route: Route, group: Any, parts: int, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    options: Options, need_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(o, lse) of the rank's queries."""
    under_way = _start(route, group, k, v, parts)
    batch, rows, heads, _ = q.shape
    out = q.new_empty(batch, rows, heads, v.shape[-1])
    lse = q.new_empty(batch, heads, rows, dtype=torch.float32) if need_lse else None
    for heads_k, keys in under_way:
        of_q = _of_queries(heads_k, q.shape[2] // k.shape[2])
        own_k, own_v = keys.wait()
        for of in route.needs.passes:
            attend(
                of, q[:, :, of_q], own_k, own_v, out[:, :, of_q],
                None if lse is None else lse[:, of_q], None if sink is None else sink[of_q],
                options,
            )  # fmt: skip
    return out, lse


def backward(
    route: Route, group: Any, parts: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    do: Tensor, dlse: Tensor | None, sink: Tensor | None, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dsink) of the rank's rows; dsink is the sum over its queries."""
    under_way = _start(route, group, k, v, parts)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    dsink = None if sink is None else torch.zeros_like(sink)
    if not route.needs.passes:
        dq.zero_()
    returning: list[tuple[slice, _Returns]] = []
    for heads_k, keys in under_way:
        of_q = _of_queries(heads_k, q.shape[2] // k.shape[2])
        own_k, own_v = keys.wait()
        sums = _KeySums()
        for of in route.needs.passes:
            rows, *of_keys, of_sink = gradients(
                of, q[:, :, of_q], own_k, own_v, o[:, :, of_q], lse[:, of_q], do[:, :, of_q],
                None if dlse is None else dlse[:, of_q], None if sink is None else sink[of_q],
                options, dq[:, :, of_q],
            )  # fmt: skip
            sums.add(slice(rows.k, rows.k_end), of_keys, route.rows)
            if dsink is not None and of_sink is not None:
                dsink[of_q] += of_sink
        if returning:
            heads, earlier = returning.pop()
            earlier.finish(dk[:, :, heads], dv[:, :, heads])
        returning.append((heads_k, _Returns(route, group, sums.values(own_k, own_v), k.shape[1])))
    for heads, last in returning:
        last.finish(dk[:, :, heads], dv[:, :, heads])
    return dq, dk, dv, dsink


class _KeySums:
    """Sums of dK and dV over the passes, in float32."""

    def __init__(self) -> None:
        self.sums: list[Tensor] | None = None

    def add(self, rows: slice, parts: list[Tensor], count: int) -> None:
        if self.sums is None and rows == slice(0, count):
            self.sums = parts
            return
        if self.sums is None:
            self.sums = [x.new_zeros(x.shape[0], count, *x.shape[2:]) for x in parts]
        for x, part in zip(self.sums, parts, strict=True):
            x[:, rows] += part

    def values(self, *keys: Tensor) -> list[Tensor]:
        if self.sums is None:
            return [torch.zeros_like(x, dtype=torch.float32) for x in keys]
        return self.sums


class _Returns:
    """dK and dV on their way to the ranks that hold the keys."""

    def __init__(self, route: Route, group: Any, sums: list[Tensor], rows: int) -> None:
        self.route, self.sums = route, sums
        held = [x.new_zeros(x.shape[0], rows, *x.shape[2:]) for x in sums]
        self.totals = held
        self.into = {
            rank: [sent.memory(x, inside=False) for x in held]
            for rank, sent in route.sent.items()
            if rank != route.rank
        }
        into = {rank: [x for parts in both for x in parts] for rank, both in self.into.items()}
        with beside(sums[0].device):
            to = {
                rank: [piece for x in sums for piece in received.pieces(x)]
                for rank, received in route.received.items()
                if rank != route.rank
            }
            self.messages = send(group, to, into)

    def finish(self, *gradients: Tensor) -> None:
        """Add up what all ranks computed, in the order of the ranks, and round the sums."""
        self.messages.wait()
        route = self.route
        for i, (out, total) in enumerate(zip(gradients, self.totals, strict=True)):
            for rank, sent in sorted(route.sent.items()):
                if rank == route.rank:
                    parts = route.received[rank].pieces(self.sums[i])
                else:
                    parts = self.into[rank][i]
                sent.add(total, parts)
            out.copy_(total)
