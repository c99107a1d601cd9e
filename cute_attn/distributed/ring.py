"""Context parallelism in which K and V of each rank pass around all ranks.

In hop h, a rank has the keys of the h-th rank before it. The rank sends these keys to the next rank
while its kernels read them. Each hop has float32 results. A kernel combines the results after the
last hop, and earlier whenever `MOST_PARTS` results are waiting. Only the last combination rounds o.

In the backward, the rank that holds the keys of a hop sends them directly. A hop's dK and dV are
complete after the hop, so they return in float32 beside the next hop's kernels. The rank's own keys
come first with the first half of the heads, beside the first message, and last with the other half,
beside the last message. dQ is a float32 sum over the hops too.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..ops.attention.partial import combine_partial
from .calls import Options, attend_in_float32, float32_gradients
from .exchange import Messages, Rows, beside, event, send
from .gather import add_ranges
from .layout import Layout, Pass, Range

MOST_PARTS = 4  # the most float32 results that are kept at once
MOST_SUMS = 3  # the most parts of a gradient that are kept at once
# Buffers of K and V. Kernels of this hop read one, and the next hop's keys arrive in another. The
# third may still be in use by the hop before.
BUFFERS = 3


_Part = tuple[Rows, list[Tensor]]


class Ring:
    """The hops of one rank."""

    def __init__(self, layout: Layout, rank: int, causal: bool) -> None:
        self.rank, self.world = rank, layout.world
        self.sources = [(rank - hop) % layout.world for hop in range(layout.world)]
        self.hops: list[tuple[Pass, ...]] = [layout.hop(rank, s, causal) for s in self.sources]
        self.rows = [layout.tokens(source) for source in self.sources]
        # For each hop of the backward, the source's keys that this rank's queries see, and this
        # rank's keys that the queries of the rank `targets[hop]` see; (0, 0) for none.
        self.targets = [(rank + hop) % layout.world for hop in range(layout.world)]
        self.seen = [keys_of(passes) for passes in self.hops]
        # The calls of each hop, whose keys are rows of `seen`.
        self.of_seen = [
            tuple(_moved(of, first) for of in passes)
            for passes, (first, _) in zip(self.hops, self.seen, strict=True)
        ]
        self.shown = [keys_of(layout.hop(target, rank, causal)) for target in self.targets]


def keys_of(passes: tuple[Pass, ...]) -> Range:
    """The range of rows of keys in which all keys of the passes lie."""
    rectangles = [r for of in passes for r in of.rectangles]
    if not rectangles:
        return 0, 0
    return min(r.k for r in rectangles), max(r.k_end for r in rectangles)


def _moved(of: Pass, first: int) -> Pass:
    """The pass if rows of keys count from `first`."""
    rectangles = [r._replace(k=r.k - first, k_end=r.k_end - first) for r in of.rectangles]
    return Pass(tuple(rectangles), of.window)


class _Hops:
    """K and V of every hop in turn. Received K and V share one buffer, so they go on as one
    message."""

    def __init__(self, ring: Ring, group: Any, k: Tensor, v: Tensor) -> None:
        self.ring, self.group = ring, group
        self.rows_of = [x.shape[2:] for x in (k, v)]
        self.columns = [x.shape[2] * x.shape[3] for x in (k, v)]
        most = k.shape[0] * max(ring.rows) * sum(self.columns)
        self.memory = [k.new_empty(most) for _ in range(min(BUFFERS, ring.world - 1))]
        self.keys: list[list[Tensor]] = [[k, v]]
        self.sent: list[Tensor] = []  # the messages of the next hop, without the first hop's
        self.begin = event(k.device)
        self.computed: list[Any] = []  # after each hop's kernels, an event
        self.messages: list[Messages] = []

    def start(self, hop: int) -> None:
        """Start to receive the keys of a hop, beside the kernels of the previous hop."""
        world, rank = self.ring.world, self.ring.rank
        if hop >= world:
            return
        batch, rows = self.keys[0][0].shape[0], self.ring.rows[hop]
        sizes = [batch * rows * columns for columns in self.columns]
        flat = self.memory[hop % len(self.memory)][: sum(sizes)]
        parts = zip(flat.split_with_sizes(sizes), self.rows_of, strict=True)
        into = [x.view(batch, rows, *shape) for x, shape in parts]
        # The kernels of hop `reader` were the last to read this buffer. Hop 0 reads no buffer.
        reader = hop - len(self.memory)
        after = self.computed[reader] if reader > 0 else self.begin
        with beside(flat.device, after):
            if self.messages:
                self.messages[-1].wait()
            before = self.sent or [x.contiguous() for x in self.keys[0]]
            received = into if hop == 1 else [flat]
            sent = send(self.group, {(rank + 1) % world: before}, {(rank - 1) % world: received})
        self.messages.append(sent)
        self.keys.append(into)
        self.sent = [flat]

    def wait(self, hop: int) -> list[Tensor]:
        if hop:
            self.messages[hop - 1].wait()
        return self.keys[hop]

    def done(self, device: torch.device) -> None:
        """Note that the kernels of one more hop have been launched."""
        self.computed.append(event(device))


class _Parts:
    """Float32 results of several calls, each over other keys."""

    def __init__(self, count: int, out: Tensor) -> None:
        self.o = out.new_empty(count, *out.shape, dtype=torch.float32)
        self.lse = self.o.new_empty(self.o.shape[:-1])
        self.used = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Memory for the results of the next call."""
        if self.used == len(self.o):
            o, lse = torch.empty_like(self.o[0]), torch.empty_like(self.lse[0])
            combine_partial(self.o, self.lse, o, lse.mT, None)
            self.o[0].copy_(o)
            self.lse[0].copy_(lse)
            self.used = 1
        self.used += 1
        return self.o[self.used - 1], self.lse[self.used - 1]

    def combine(self, out: Tensor, lse: Tensor | None, sink: Tensor | None) -> None:
        """Write the results over all keys."""
        if not self.used:
            self.lse[:1].fill_(-torch.inf)
        used = max(self.used, 1)
        combine_partial(self.o[:used], self.lse[:used], out, lse, sink)


def forward(
    ring: Ring, group: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, options: Options,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(o, lse) of the rank's queries."""
    batch, rows, heads, _ = q.shape
    device = q.device
    out = q.new_empty(batch, rows, heads, v.shape[-1])
    lse = q.new_empty(batch, heads, rows, dtype=torch.float32) if need_lse else None
    calls = sum(map(len, ring.hops))
    parts = _Parts(min(max(calls, 1), MOST_PARTS), out)
    hops = _Hops(ring, group, k, v)
    for hop, passes in enumerate(ring.hops):
        hop_k, hop_v = hops.wait(hop)
        hops.start(hop + 1)
        for of in passes:
            o, of_lse = parts.next()
            attend_in_float32(of, q, hop_k, hop_v, o, of_lse, options)
        hops.done(device)
    parts.combine(out, lse, sink)
    return out, lse


class _Sums:
    """The parts of dQ, dK and dV of some of the rank's heads, in float32, in the order in which
    they are added. At most `MOST_SUMS` parts of each are kept."""

    def __init__(self, rows: int) -> None:
        """`rows` is the number of the rank's tokens."""
        self.rows = rows
        self.dq: list[_Part] = []
        self.dk: list[_Part] = []
        self.dv: list[_Part] = []

    def add_queries(self, rows: Range, dq: Tensor) -> None:
        self._add(self.dq, rows, dq)

    def add_keys(self, rows: Range, dk: Tensor, dv: Tensor) -> None:
        self._add(self.dk, rows, dk)
        self._add(self.dv, rows, dv)

    def _add(self, parts: list[_Part], rows: Range, part: Tensor) -> None:
        parts.append((Rows([rows]), [part]))
        if len(parts) <= MOST_SUMS:
            return
        total = part.new_zeros(part.shape[0], self.rows, *part.shape[2:])
        for of, pieces in parts:
            of.add(total, pieces)
        parts[:] = [(Rows([(0, self.rows)]), [total])]


class _Returns:
    """The messages of a hop's dK and dV to the rank that holds the keys, and of another rank's dK
    and dV of this rank's keys."""

    def __init__(
        self, ring: Ring, group: Any, hop: int, parts: list[Tensor], like: tuple[Tensor, Tensor]
    ) -> None:
        low, high = self.rows = ring.shown[hop]
        self.found = [
            x.new_empty(x.shape[0], high - low, *x.shape[2:], dtype=torch.float32) for x in like
        ]
        with beside(like[0].device):
            self.messages = send(group, {ring.sources[hop]: parts}, {ring.targets[hop]: self.found})

    def add_to(self, sums: list[_Sums], halves: list[tuple[slice, slice]]) -> None:
        """Wait for the messages, and add the received parts."""
        self.messages.wait()
        for (_, heads_k), of_half in zip(halves, sums, strict=True):
            of_half.add_keys(self.rows, *(x[:, :, heads_k] for x in self.found))


def backward(
    ring: Ring, group: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    dlse: Tensor | None, sink: Tensor | None, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dsink) of the rank's rows; dsink is the sum over the rank's queries."""
    halves = _halves(q.shape[2], k.shape[2])
    sums = [_Sums(q.shape[1]) for _ in halves]
    dsinks: list[Tensor] = []

    def own(half: int) -> None:
        heads, heads_k = halves[half]
        of_sink = None if sink is None else sink[heads].contiguous()
        for of in ring.hops[0]:
            rows, dq, dk, dv, dsink = float32_gradients(
                of, q[:, :, heads], k[:, :, heads_k], v[:, :, heads_k], o[:, :, heads],
                lse[:, heads], do[:, :, heads], None if dlse is None else dlse[:, heads], of_sink,
                options,
            )  # fmt: skip
            sums[half].add_queries((rows.q, rows.q_end), dq)
            sums[half].add_keys((rows.k, rows.k_end), dk, dv)
            if dsink is not None:
                dsinks.append(dsink)

    def start(hop: int) -> tuple[list[Tensor], Messages]:
        """Start to receive the keys of a hop."""
        low, high = ring.seen[hop]
        into = [x.new_empty(x.shape[0], high - low, *x.shape[2:]) for x in (k, v)]
        with beside(k.device):
            first, end = ring.shown[hop]
            parts = [x[:, first:end].contiguous() for x in (k, v)]
            messages = send(group, {ring.targets[hop]: parts}, {ring.sources[hop]: into})
        return into, messages

    ahead = start(1) if ring.world > 1 else None
    own(0)
    returned = None
    for hop in range(1, ring.world):
        assert ahead is not None
        keys, messages = ahead
        messages.wait()
        ahead = start(hop + 1) if hop + 1 < ring.world else None
        parts = _hop(ring, hop, q, keys, o, lse, do, dlse, options, sums, halves)
        if returned is not None:
            returned.add_to(sums, halves)
        returned = _Returns(ring, group, hop, parts, (k, v))
    if len(halves) > 1:
        own(1)
    if returned is not None:
        returned.add_to(sums, halves)
    results = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    for (heads, heads_k), of_half in zip(halves, sums, strict=True):
        found = (heads, of_half.dq), (heads_k, of_half.dk), (heads_k, of_half.dv)
        for out, (of_heads, of_out) in zip(results, found, strict=True):
            add_ranges(out[:, :, of_heads], of_out)
    dq, dk, dv = results
    if sink is None:
        return dq, dk, dv, None
    return dq, dk, dv, torch.cat(dsinks) if dsinks else torch.zeros_like(sink)


def _halves(heads: int, heads_k: int) -> list[tuple[slice, slice]]:
    """The halves of the heads of q and of k, or all heads if there is one K/V head."""
    cuts = [0, heads_k // 2, heads_k] if heads_k > 1 else [0, heads_k]
    group = heads // max(heads_k, 1)
    return [(slice(a * group, b * group), slice(a, b)) for a, b in pairwise(cuts)]


def _hop(
    ring: Ring, hop: int, q: Tensor, keys: list[Tensor], o: Tensor, lse: Tensor, do: Tensor,
    dlse: Tensor | None, options: Options, sums: list[_Sums], halves: list[tuple[slice, slice]],
) -> list[Tensor]:  # fmt: skip
    """Add the parts of dQ of a hop. Return dK and dV of the hop's keys."""
    k, v = keys
    parts: list[Tensor] = []
    for of in ring.of_seen[hop]:
        rows, dq, *found, _ = float32_gradients(of, q, k, v, o, lse, do, dlse, None, options)
        for (heads, _), of_half in zip(halves, sums, strict=True):
            of_half.add_queries((rows.q, rows.q_end), dq[:, :, heads])
        if (rows.k, rows.k_end) == (0, k.shape[1]) and not parts:
            parts = found
            continue
        if not parts:
            parts = [x.new_zeros(k.shape[0], k.shape[1], *x.shape[2:]) for x in found]
        for x, part in zip(parts, found, strict=True):
            x[:, rows.k : rows.k_end] += part
    return parts or [x.new_empty(x.shape, dtype=torch.float32) for x in keys]
