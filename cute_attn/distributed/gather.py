"""Context parallelism in which each rank receives the keys that its queries see.

Calls that need only the rank's own keys run beside the messages, and read K and V in place. Other
calls read gathered keys. Every query sees all of its keys in one call, so no results are combined,
and o is rounded once.

In the backward, each rank computes float32 dK and dV of all keys that its queries see. These parts
go back to the ranks that hold the keys. Each of those ranks adds up the parts in a fixed order, and
rounds the sum once.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..ops.attention.arguments import readable_or_copied
from .calls import Counts, Options, attend, gradients
from .exchange import Messages, Rows, beside, copy_rows, event, flat, send, wait_for
from .few_keys import FewKeys
from .layout import Layout, Needs, Pass, Window, shared_rows
from .used import Used, UsedRows


class Route:
    """The rows of keys that one rank sends and receives.

    Attributes:
        needs: the keys that this rank's queries see, and the calls that take these keys.
        rows: the number of gathered keys.
        own: this rank's rows that are gathered too, and their rows among the gathered keys. None:
            no such rows.
        sent: other rank -> the rows of this rank's keys that the other rank gathers.
        received: other rank -> the rows of gathered keys that the other rank sends.
        few: the exchange of these keys for calls with few keys; None: there is no such exchange.
    """

    def __init__(self, layout: Layout, rank: int, window: Window, *, whole: bool = False) -> None:
        """`whole` is as for `Layout.needs`."""
        self.layout, self.held = layout, layout.ranges[rank]
        needs = tuple(layout.needs(other, window, whole=whole) for other in range(layout.world))
        self.needs: Needs = needs[rank]
        self.few = FewKeys.of(layout, rank, needs)
        self._used: dict[Any, UsedRows] = {}
        self.rows = sum(end - start for start, end in self.needs.ranges)
        self.own: tuple[Rows, Rows] | None = None
        self.sent: dict[int, Rows] = {}
        self.received: dict[int, Rows] = {}
        for other in range(layout.world):
            if other == rank:
                held, gathered = shared_rows(layout.ranges[rank], self.needs.ranges)
                self.own = (Rows(held), Rows(gathered)) if held else None
                continue
            rows, _ = shared_rows(layout.ranges[rank], needs[other].ranges)
            if rows:
                self.sent[other] = Rows(rows)
            _, rows = shared_rows(layout.ranges[other], self.needs.ranges)
            if rows:
                self.received[other] = Rows(rows)

    def few_keys(self, k: Tensor, v: Tensor) -> FewKeys | None:
        """The exchange of few keys, if a call's keys are few."""
        return self.few if self.few is not None and self.few.takes(k, v) else None

    def counts(self, of: Pass, used: Used | None, keys: Tensor, *, local: bool) -> Counts | None:
        """How many rows of each rectangle of a pass are used; None: all rows. `keys` are the
        pass's keys: the rank's own with `local`, otherwise gathered keys."""
        if used is None:
            return None
        key = of, local, keys.device
        if key not in self._used:
            ranges = self.held if local else self.needs.ranges
            self._used[key] = UsedRows(of, self.layout, self.held, ranges, keys.device)
        return self._used[key].counts(used)


class _Keys:
    """The gathered K and V. The constructor starts the messages."""

    def __init__(self, route: Route, group: Any, own: tuple[Tensor, Tensor]) -> None:
        self.route = route
        self.rows = [x.new_empty(x.shape[0], route.rows, *x.shape[2:]) for x in own]
        self.into = {
            rank: [rows.memory(x, inside=True) for x in self.rows]
            for rank, rows in route.received.items()
        }
        with beside(own[0].device):
            to = {
                rank: [piece for x in own for piece in rows.pieces(x)]
                for rank, rows in route.sent.items()
            }
            self.messages: Messages = send(group, to, flat(self.into))
            if route.own is not None:
                copy_rows(self.rows, route.own[1], own, route.own[0])
            self.copied = event(own[0].device)

    def wait(self) -> list[Tensor]:
        """K and V, for later work of the current stream."""
        wait_for(self.copied)
        self.messages.wait()
        for rank, both in self.into.items():
            for x, parts in zip(self.rows, both, strict=True):
                self.route.received[rank].fill(x, parts)
        return self.rows


class _FewKeys:
    """The gathered K and V of few keys. The constructor starts the messages."""

    def __init__(self, few: FewKeys, group: Any, own: tuple[Tensor, Tensor]) -> None:
        self.few, self.own = few, own
        self.memory, self.messages = few.gather(group, *own)

    def wait(self) -> tuple[Tensor, Tensor]:
        """K and V, for later work of the current stream."""
        self.messages.wait()
        return self.few.keys(self.memory, *self.own)


def forward(
    route: Route, group: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    options: Options, need_lse: bool, used: Used | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(o, lse) of the rank's queries, and gathered keys that the backward takes, if they are few
    and there are any."""
    few = route.few_keys(k, v)
    keys = _Keys(route, group, (k, v)) if few is None else _FewKeys(few, group, (k, v))
    batch, rows, heads, _ = q.shape
    out = q.new_empty(batch, rows, heads, v.shape[-1])
    lse = q.new_empty(batch, heads, rows, dtype=torch.float32) if need_lse else None
    if route.needs.local.forward:
        own_k, own_v = readable_or_copied(k), readable_or_copied(v)
        for of in route.needs.local.forward:
            counts = route.counts(of, used, own_k, local=True)
            attend(of, q, own_k, own_v, out, lse, sink, options, counts)
    seen_k, seen_v = keys.wait()
    for of in route.needs.remote.forward:
        counts = route.counts(of, used, seen_k, local=False)
        attend(of, q, seen_k, seen_v, out, lse, sink, options, counts)
    return out, lse, keys.memory if isinstance(keys, _FewKeys) and route.rows else None


def backward(
    route: Route, group: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    dlse: Tensor | None, sink: Tensor | None, options: Options, used: Used | None = None,
    kept: Tensor | None = None, after_ring: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dsink) of the rank's rows; dsink is the sum over the rank's queries. `kept` are
    the gathered keys of the forward. With `after_ring`, the forward was by hops and kept none."""
    few = None if after_ring else route.few_keys(k, v)
    keys = _Keys(route, group, (k, v)) if few is None else None
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    dsink = None if sink is None else torch.zeros_like(sink)
    local, gathered = _KeySums(k.shape[1]), _KeySums(route.rows)
    first = True

    def add(sums: _KeySums, of: Pass, of_k: Tensor, of_v: Tensor) -> None:
        nonlocal first
        counts = route.counts(of, used, of_k, local=sums is local)
        rows, *of_keys, of_sink = gradients(
            of, q, of_k, of_v, o, lse, do, dlse, sink, options, dq, counts, first=first
        )
        first = False
        sums.add(slice(rows.k, rows.k_end), of_keys)
        if dsink is not None and of_sink is not None:
            dsink.add_(of_sink)

    def add_local() -> None:
        if route.needs.local.backward:
            own_k, own_v = readable_or_copied(k), readable_or_copied(v)
            for of in route.needs.local.backward:
                add(local, of, own_k, own_v)

    if few is None:
        assert keys is not None
        add_local()
        seen_k, seen_v = keys.wait()
        for of in route.needs.remote.backward:
            add(gathered, of, seen_k, seen_v)
        if first:
            dq.zero_()
        _return(route, group, local, gathered.values(seen_k, seen_v), (dk, dv))
        return dq, dk, dv, dsink
    # The keys are here already, so their gradients return beside the local calls.
    of_keys = None
    if kept is not None:
        seen_k, seen_v = few.keys(kept, k, v)
        for of in route.needs.remote.backward:
            add(gathered, of, seen_k, seen_v)
        of_keys = gathered.values(seen_k, seen_v)
    parts, messages = few.give_back(group, of_keys, (k, v))
    add_local()
    if first:
        dq.zero_()
    messages.wait()
    few.add(parts, local.values(k, v), (dk, dv))
    return dq, dk, dv, dsink


class _KeySums:
    """Sums of dK and dV over the passes, in float32."""

    def __init__(self, count: int) -> None:
        """`count` is the number of keys."""
        self.count = count
        self.sums: list[Tensor] | None = None
        self.first = slice(0, 0)

    def add(self, rows: slice, parts: list[Tensor]) -> None:
        count = self.count
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
            # Not `zeros_like`, which takes the strides of keys that are transposed.
            wide = [x.new_zeros(x.shape, dtype=torch.float32) for x in keys]
            for x, part in zip(wide, self.sums or (), strict=False):
                x[:, self.first] = part
            return wide
        return self.sums


def _return(
    route: Route, group: Any, local: _KeySums, gathered: list[Tensor],
    gradients: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Send parts of dK and dV to the ranks that hold the keys. Add up the parts of this rank's keys
    and round the sums. The local calls' part comes first, then this rank's part of gathered keys,
    then the other parts by rank."""
    received = {
        rank: [rows.memory(x, inside=False, dtype=torch.float32) for x in gradients]
        for rank, rows in sorted(route.sent.items())
    }
    with beside(gathered[0].device):
        to = {
            rank: [piece for x in gathered for piece in rows.pieces(x)]
            for rank, rows in route.received.items()
        }
        messages = send(group, to, flat(received))
    messages.wait()
    for i, out in enumerate(gradients):
        parts = [(route.sent[rank], both[i]) for rank, both in received.items()]
        if route.own is not None:
            parts.insert(0, (route.own[0], route.own[1].pieces(gathered[i])))
        if local.sums is not None:
            parts.insert(0, (Rows([(local.first.start, local.first.stop)]), [local.sums[i]]))
        if all(rows.in_pieces(out.shape[0]) for rows, _ in parts):
            add_ranges(out, parts)
            continue
        total = torch.zeros_like(out, dtype=torch.float32)
        for rows, pieces in parts:
            rows.add(total, pieces)
        out.copy_(total)


def add_ranges(out: Tensor, parts: list[tuple[Rows, list[Tensor]]]) -> None:
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
        if not found:
            to.zero_()  # no query sees these keys
            continue
        if len(found) == 1:
            to.copy_(found[0])
            continue
        for piece in found[1:-1]:
            found[0].add_(piece)
        torch.add(found[0], found[-1], out=to)
