"""Context parallelism in which each rank receives the keys that its queries see.

Calls that need only the rank's own keys run beside the messages. Every query sees all of its keys
in one call, so no results are combined, and o is rounded once. In the backward, each rank computes
float32 dK and dV of all gathered keys. These parts go back to the ranks that hold the keys. Each of
those ranks adds up the parts in a fixed order, and rounds the sum once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .calls import Options, attend, gradients
from .exchange import Messages, Rows, beside, copy_rows, flat, send
from .layout import Layout, Needs, Pass, Range, Window, shared_rows


class Route:
    """The rows of keys that one rank sends and receives.

    Attributes:
        needs: the keys that this rank's queries see, and the calls that take these keys.
        sent: other rank -> the rows of this rank's keys that the other rank's queries see.
        received: other rank -> the rows of `needs` that the other rank sends. Both dictionaries
            also have this rank: it copies these rows.
        passes: the calls. The first `local` calls need only this rank's keys.
        rows: the number of keys in `needs`.
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
        own = self.received[rank].ranges if rank in self.received else ()
        self.passes = sorted(self.needs.passes, key=lambda of: not _lies_in(of, own))
        self.local = sum(_lies_in(of, own) for of in self.passes)


def _lies_in(of: Pass, rows: tuple[Range, ...]) -> bool:
    """Whether all keys of a pass are in these rows."""
    return all(any(a <= r.k and r.k_end <= b for a, b in rows) for r in of.rectangles)


class _Keys:
    """K and V that a rank's queries see. The constructor starts the messages."""

    def __init__(self, route: Route, group: Any, own: tuple[Tensor, Tensor]) -> None:
        self.route = route
        self.rows = [x.new_empty(x.shape[0], route.rows, *x.shape[2:]) for x in own]
        others = [rank for rank in route.received if rank != route.rank]
        self.into = {
            r: [route.received[r].memory(x, inside=True) for x in self.rows] for r in others
        }
        with beside(own[0].device):
            to = {
                rank: [piece for x in own for piece in rows.pieces(x)]
                for rank, rows in route.sent.items()
                if rank != route.rank
            }
            self.messages: Messages = send(group, to, flat(self.into))
        if route.rank in route.received:
            for x, source in zip(self.rows, own, strict=True):
                copy_rows(x, route.received[route.rank], source, route.sent[route.rank])

    def passes(self) -> Iterator[Pass]:
        """The passes in turn: first the passes over the rank's own keys, beside the messages."""
        yield from self.route.passes[: self.route.local]
        self.messages.wait()
        for rank, both in self.into.items():
            for x, parts in zip(self.rows, both, strict=True):
                self.route.received[rank].fill(x, parts)
        yield from self.route.passes[self.route.local :]


def forward(
    route: Route, group: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    options: Options, need_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(o, lse) of the rank's queries."""
    keys = _Keys(route, group, (k, v))
    seen_k, seen_v = keys.rows
    batch, rows, heads, _ = q.shape
    out = q.new_empty(batch, rows, heads, v.shape[-1])
    lse = q.new_empty(batch, heads, rows, dtype=torch.float32) if need_lse else None
    for of in keys.passes():
        attend(of, q, seen_k, seen_v, out, lse, sink, options)
    return out, lse


def backward(
    route: Route, group: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    dlse: Tensor | None, sink: Tensor | None, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dsink) of the rank's rows; dsink is the sum over the rank's queries."""
    keys = _Keys(route, group, (k, v))
    seen_k, seen_v = keys.rows
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    dsink = None if sink is None else torch.zeros_like(sink)
    if not route.passes:
        dq.zero_()
    sums = _KeySums()
    for of in keys.passes():
        rows, *of_keys, of_sink = gradients(
            of, q, seen_k, seen_v, o, lse, do, dlse, sink, options, dq
        )
        sums.add(slice(rows.k, rows.k_end), of_keys, route.rows)
        if dsink is not None and of_sink is not None:
            dsink += of_sink
    _return(route, group, sums.values(*keys.rows), (dk, dv))
    return dq, dk, dv, dsink


class _KeySums:
    """Sums of dK and dV over the passes, in float32."""

    def __init__(self) -> None:
        self.sums: list[Tensor] | None = None
        self.first = slice(0, 0)

    def add(self, rows: slice, parts: list[Tensor], count: int) -> None:
        whole = rows == slice(0, count)
        if self.sums is None:
            self.sums, self.first = parts, rows
            return
        if whole and self.first != rows:  # the last pass often has all keys
            self.sums, parts, rows, self.first = parts, self.sums, self.first, rows
        if self.first != slice(0, count):
            wide = [x.new_zeros(x.shape[0], count, *x.shape[2:]) for x in parts]
            for x, part in zip(wide, self.sums, strict=True):
                x[:, self.first] = part
            self.sums, self.first = wide, slice(0, count)
        for x, part in zip(self.sums, parts, strict=True):
            x[:, rows] += part

    def values(self, *keys: Tensor) -> list[Tensor]:
        """The sums of all keys."""
        rows = keys[0].shape[1]
        if self.sums is None or self.first != slice(0, rows):
            wide = [torch.zeros_like(x, dtype=torch.float32) for x in keys]
            for x, part in zip(wide, self.sums or (), strict=False):
                x[:, self.first] = part
            return wide
        return self.sums


def _return(route: Route, group: Any, sums: list[Tensor], gradients: tuple[Tensor, Tensor]) -> None:
    """Send parts of dK and dV to the ranks that hold the keys. Add up the parts of this rank's keys
    and round the sums. This rank's part comes first, then the other parts by rank."""
    own = route.rank
    others = [rank for rank in sorted(route.sent) if rank != own]
    received = {
        rank: [route.sent[rank].memory(x, inside=False, dtype=torch.float32) for x in gradients]
        for rank in others
    }
    with beside(sums[0].device):
        to = {
            rank: [piece for x in sums for piece in rows.pieces(x)]
            for rank, rows in route.received.items()
            if rank != own
        }
        messages = send(group, to, flat(received))
    messages.wait()
    if own not in route.sent:
        return  # this rank holds no keys
    batch = gradients[0].shape[0]
    few = all(route.sent[rank].in_pieces(batch) for rank in (own, *others))
    for i, (out, x) in enumerate(zip(gradients, sums, strict=True)):
        parts = [(route.sent[rank], received[rank][i]) for rank in others]
        if few:
            _add_ranges(out, [(route.sent[own], route.received[own].pieces(x)), *parts])
            continue
        total = torch.empty_like(out, dtype=torch.float32)
        copy_rows(total, route.sent[own], x, route.received[own])
        for rows, pieces in parts:
            rows.add(total, pieces)
        out.copy_(total)


def _add_ranges(out: Tensor, parts: list[tuple[Rows, list[Tensor]]]) -> None:
    """Write the sums of parts to `out`, range by range of rows. The last addition of a range also
    rounds its sum, which saves a pass over memory."""
    cuts = {0, out.shape[1], *(end for rows, _ in parts for both in rows.ranges for end in both)}
    for start, end in pairwise(sorted(cuts)):
        found = [
            piece[:, start - first : end - first]
            for rows, pieces in parts
            for (first, stop), piece in zip(rows.ranges, pieces, strict=True)
            if first <= start and end <= stop
        ]
        to = out[:, start:end]
        if len(found) == 1:
            to.copy_(found[0])
            continue
        for piece in found[1:-1]:
            found[0].add_(piece)
        torch.add(found[0], found[-1], out=to)
