"""Context parallelism in which each rank receives the keys that its queries see.

Calls that need only the rank's own keys run beside the messages, and read K and V in place. Other
calls read gathered keys. Messages travel in two groups. The first group has all keys of the early
calls (`layout.Needs`), so that late calls' keys travel beside the early calls. Every query sees all
of its keys in one call, so no results are combined, and o is rounded once.

In the backward, each rank computes float32 dK and dV of all keys that its queries see. These parts
go back to the ranks that hold the keys. Each of those ranks adds up the parts in a fixed order, and
rounds the sum once.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.attention.arguments import readable_or_copied
from .calls import Options, attend, gradients
from .exchange import Lanes, Messages, Rows, beside, copy_rows, event, flat, send
from .layout import (
    Layout,
    Needs,
    Range,
    Window,
    common,
    count,
    divide,
    row_of,
    shared_rows,
    without,
)

# In how many parts of the heads K and V travel, in the forward and in the backward.
PARTS = BACKWARD_PARTS = 1


class Route:
    """The rows of keys that one rank sends and receives.

    Attributes:
        needs: the keys that this rank's queries see, and the calls that take these keys.
        rows: the number of gathered keys.
        own: this rank's rows that are gathered too, and their rows among the gathered keys. None:
            no such rows.
        groups: the groups of messages. A group has the rows to send and the rows to receive, each
            by the other rank. Received rows count gathered keys.
        sent: other rank -> the rows of this rank's keys that the other rank gathers.
        received: other rank -> the rows of `needs` that the other rank sends.
    """

    def __init__(self, layout: Layout, rank: int, window: Window) -> None:
        self.rank = rank
        everyone = [layout.needs(other, window) for other in range(layout.world)]
        self.needs: Needs = everyone[rank]
        self.rows = count(self.needs.ranges)
        own = shared_rows(layout.ranges[rank], self.needs.ranges)
        self.own = (Rows(own[0]), Rows(own[1])) if own[0] else None
        others = [other for other in range(layout.world) if other != rank]
        most = _tokens_of_first_group(layout, everyone)
        sent = {other: _messages(layout, rank, other, everyone[other], most) for other in others}
        received = {other: _messages(layout, other, rank, self.needs, most) for other in others}
        self.groups = [
            tuple(
                {other: Rows([r[side] for r in x[number]]) for other, x in way.items() if x[number]}
                for side, way in enumerate((sent, received))
            )
            for number in range(2)
        ]
        self.sent: dict[int, Rows] = {}
        self.received: dict[int, Rows] = {}
        for other in others:
            rows, _ = shared_rows(layout.ranges[rank], everyone[other].ranges)
            if rows:
                self.sent[other] = Rows(rows)
            _, rows = shared_rows(layout.ranges[other], self.needs.ranges)
            if rows:
                self.received[other] = Rows(rows)


def _tokens_of_first_group(layout: Layout, everyone: list[Needs]) -> int:
    """How many tokens a message of the first group has, if its early keys are fewer. The first
    group then uses both directions between two ranks for an equal time."""
    most = 0
    for rank, needs in enumerate(everyone):
        early = count(needs.early.keys) - count(common(layout.ranges[rank], needs.early.keys))
        most = max(most, -(-early // max(layout.world - 1, 1)))
    return most


def _messages(
    layout: Layout, source: int, to: int, needs: Needs, most: int
) -> tuple[list[tuple[Range, Range]], ...]:
    """The messages from rank `source` to rank `to`, which has `needs`, for both groups. A message
    has a range of the source's rows, and a range of gathered rows."""
    held = layout.ranges[source]
    early = common(held, needs.early.keys)
    late = without(common(held, needs.late.keys), early)
    first, rest = divide(late, max(0, most - count(early)))

    def rows(ranges: list[Range]) -> list[tuple[Range, Range]]:
        found: list[tuple[Range, Range]] = []
        for start, end in ranges:
            x, y, n = row_of(held, start), row_of(needs.ranges, start), end - start
            if found and found[-1][0][1] == x and found[-1][1][1] == y:
                found[-1] = (found[-1][0][0], x + n), (found[-1][1][0], y + n)
            else:
                found.append(((x, x + n), (y, y + n)))
        return found

    return rows([*early, *first]), rows(rest)


class _Keys:
    """K and V that a rank's queries see. The constructor starts the messages."""

    def __init__(self, route: Route, group: Any, own: tuple[Tensor, Tensor]) -> None:
        self.route = route
        self.rows = [x.new_empty(x.shape[0], route.rows, *x.shape[2:]) for x in own]
        self.messages: list[Messages] = []
        self.into: list[dict[int, list[list[Tensor]]]] = []
        with beside(own[0].device):
            for sent, received in route.groups:
                into = {
                    rank: [rows.memory(x, inside=True) for x in self.rows]
                    for rank, rows in received.items()
                }
                to = {
                    rank: [piece for x in own for piece in rows.pieces(x)]
                    for rank, rows in sent.items()
                }
                self.messages.append(send(group, to, flat(into)))
                self.into.append(into)
            if route.own is not None:
                for x, source in zip(self.rows, own, strict=True):
                    copy_rows(x, route.own[1], source, route.own[0])
            self.copied = event(own[0].device)
        self.filled = 0
        self.complete: list[Any] = []  # after each group's rows are in place, an event

    def wait(self, stage: int) -> list[Tensor]:
        """The gathered K and V, with the keys of the early stage (0) or also the late stage (1)."""
        device = self.rows[0].device
        if self.copied is not None:
            torch.cuda.current_stream(device).wait_event(self.copied)
        for group in range(stage + 1):
            if group == self.filled:
                self.messages[group].wait()
                for rank, both in self.into[group].items():
                    for x, parts in zip(self.rows, both, strict=True):
                        self.route.groups[group][1][rank].fill(x, parts)
                self.complete.append(event(device))
                self.filled += 1
            elif self.complete[group] is not None:
                torch.cuda.current_stream(device).wait_event(self.complete[group])
        return self.rows

    def finish(self) -> None:
        """Make the current stream wait for messages that no call waited for."""
        self.wait(len(self.messages) - 1)


class _Heads(NamedTuple):
    """A part of the heads, whose keys travel and are read apart from other parts."""

    of_k: slice
    of_q: slice

    @classmethod
    def parts(cls, heads: int, heads_k: int, count: int) -> list[_Heads]:
        cuts = [heads_k * i // count for i in range(count + 1)]
        group = heads // max(heads_k, 1)
        return [
            cls(slice(a, b), slice(a * group, b * group)) for a, b in pairwise(cuts) if a < b
        ] or [cls(slice(0, heads_k), slice(0, heads))]


def forward(
    route: Route, group: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    options: Options, need_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(o, lse) of the rank's queries."""
    batch, rows, heads, _ = q.shape
    out = q.new_empty(batch, rows, heads, v.shape[-1])
    lse = q.new_empty(batch, heads, rows, dtype=torch.float32) if need_lse else None
    lanes = Lanes(q.device)
    parts = _Heads.parts(heads, k.shape[2], PARTS)
    under_way = [_Keys(route, group, (k[:, :, of_k], v[:, :, of_k])) for of_k, _ in parts]
    local, *stages = route.needs.stages
    if local.forward:
        own = readable_or_copied(k), readable_or_copied(v)
        with lanes.next():
            for of in local.forward:
                attend(of, q, *own, out, lse, sink, options)
    for keys, (_, of_q) in zip(under_way, parts, strict=True):
        for number, stage in enumerate(stages):
            if stage.forward:
                with lanes.next():
                    seen_k, seen_v = keys.wait(number)
                    for of in stage.forward:
                        attend(
                            of, q[:, :, of_q], seen_k, seen_v, out[:, :, of_q],
                            None if lse is None else lse[:, of_q],
                            None if sink is None else sink[of_q], options,
                        )  # fmt: skip
    lanes.join()
    for keys in under_way:
        keys.finish()
    return out, lse


def backward(
    route: Route, group: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    dlse: Tensor | None, sink: Tensor | None, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dsink) of the rank's rows; dsink is the sum over the rank's queries."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    dsink = None if sink is None else torch.zeros_like(sink)
    lanes = Lanes(q.device)
    parts = _Heads.parts(q.shape[2], k.shape[2], BACKWARD_PARTS)
    under_way = [_Keys(route, group, (k[:, :, of_k], v[:, :, of_k])) for of_k, _ in parts]
    local, *stages = route.needs.stages
    of_own, sinks, returns = _KeySums(), [], []
    kept: list[Any] = []  # results stay alive until both streams have met
    if local.backward:
        own = readable_or_copied(k), readable_or_copied(v)
        with lanes.next():
            for of in local.backward:
                rows, *of_keys, of_sink = gradients(
                    of, q, *own, o, lse, do, dlse, sink, options, dq
                )
                of_own.add(slice(rows.k, rows.k_end), of_keys, k.shape[1])
                sinks.append((slice(None), of_sink))
                kept.append(of_keys)
    for keys, (of_k, of_q) in zip(under_way, parts, strict=True):
        calls: list[Any] = []
        before = None
        stream = lanes.next()
        for number, stage in enumerate(stages):
            if number and stage.backward and calls:
                before, stream = lanes.event(stream), lanes.next()
            with stream:
                seen_k, seen_v = keys.wait(number)
                for of in stage.backward:
                    call = gradients(
                        of, q[:, :, of_q], seen_k, seen_v, o[:, :, of_q], lse[:, of_q],
                        do[:, :, of_q], None if dlse is None else dlse[:, of_q],
                        None if sink is None else sink[of_q], options, dq[:, :, of_q],
                    )  # fmt: skip
                    calls.append(call)
        kept.append(calls)
        with stream:
            lanes.wait(before)
            gathered = _KeySums()
            for rows, *of_keys, of_sink in calls:
                gathered.add(slice(rows.k, rows.k_end), of_keys, route.rows)
                sinks.append((of_q, of_sink))
            sums = gathered.values(*keys.rows)
            of_part = dk[:, :, of_k], dv[:, :, of_k]
            returns.append((_Returns(route, group, sums, of_part), of_k))
    if not (local.backward or any(stage.backward for stage in stages)):
        dq.zero_()
    lanes.join()
    for keys in under_way:
        keys.finish()
    for returned, of_k in returns:
        returned.finish(of_own.part(of_k))
    for of_q, of_sink in sinks:
        if dsink is not None and of_sink is not None:
            dsink[of_q] += of_sink
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

    def part(self, heads: slice) -> list[tuple[Rows, Tensor]]:
        """The rows of the sums of dK and dV, and the sums of some heads; nothing if there are no
        sums."""
        rows = Rows([(self.first.start, self.first.stop)])
        return [(rows, x[:, :, heads]) for x in self.sums or ()]

    def values(self, *keys: Tensor) -> list[Tensor]:
        """The sums of all keys."""
        rows = keys[0].shape[1]
        if self.sums is None or self.first != slice(0, rows):
            wide = [torch.zeros_like(x, dtype=torch.float32) for x in keys]
            for x, part in zip(wide, self.sums or (), strict=False):
                x[:, self.first] = part
            return wide
        return self.sums


class _Returns:
    """Parts of dK and dV on their way to the ranks that hold the keys."""

    def __init__(
        self, route: Route, group: Any, gathered: list[Tensor], gradients: tuple[Tensor, Tensor]
    ) -> None:
        """Start to send the parts of gathered keys. `finish` writes the sums to `gradients`."""
        self.route, self.gathered, self.gradients = route, gathered, gradients
        self.received = {
            rank: [rows.memory(x, inside=False, dtype=torch.float32) for x in gradients]
            for rank, rows in sorted(route.sent.items())
        }
        with beside(gathered[0].device):
            to = {
                rank: [piece for x in gathered for piece in rows.pieces(x)]
                for rank, rows in route.received.items()
            }
            self.messages = send(group, to, flat(self.received))

    def finish(self, local: list[tuple[Rows, Tensor]]) -> None:
        """Add up the parts of this rank's keys and round the sums. The local calls' part comes
        first, then this rank's part of gathered keys, then the other parts by rank."""
        self.messages.wait()
        for i, out in enumerate(self.gradients):
            parts = [(self.route.sent[rank], both[i]) for rank, both in self.received.items()]
            if self.route.own is not None:
                parts.insert(0, (self.route.own[0], self.route.own[1].pieces(self.gathered[i])))
            if local:
                parts.insert(0, (local[i][0], [local[i][1]]))
            if all(rows.in_pieces(out.shape[0]) for rows, _ in parts):
                _add_ranges(out, parts)
                continue
            total = torch.zeros_like(out, dtype=torch.float32)
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
        if not found:
            to.zero_()  # no query sees these keys
            continue
        if len(found) == 1:
            to.copy_(found[0])
            continue
        for piece in found[1:-1]:
            found[0].add_(piece)
        torch.add(found[0], found[-1], out=to)
