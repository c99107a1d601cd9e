"""Context parallelism in which K and V of each rank pass around all ranks.

In hop h, a rank has the keys of the h-th rank before it. The rank sends these keys to the next rank
while its kernels read them. Each hop has float32 results. A kernel combines the results after the
last hop, and earlier whenever `MOST_PARTS` results are waiting. Only the last combination rounds o.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.attention.partial import combine_partial
from .calls import Options, attend_in_float32
from .exchange import Messages, beside, event, send
from .layout import Layout, Pass

MOST_PARTS = 4  # the most float32 results that are kept at once
# Buffers of K and V. Kernels of this hop read one, and the next hop's keys arrive in another. The
# third may still be in use by the hop before.
BUFFERS = 3


class Ring:
    """The hops of one rank."""

    def __init__(self, layout: Layout, rank: int, causal: bool) -> None:
        self.rank, self.world = rank, layout.world
        self.sources = [(rank - hop) % layout.world for hop in range(layout.world)]
        self.hops: list[tuple[Pass, ...]] = [layout.hop(rank, s, causal) for s in self.sources]
        self.rows = [layout.tokens(source) for source in self.sources]


class _Hops:
    """K and V of every hop in turn."""

    def __init__(self, ring: Ring, group: Any, k: Tensor, v: Tensor) -> None:
        self.ring, self.group = ring, group
        most = max(ring.rows)
        buffers = min(BUFFERS, ring.world - 1)
        self.memory = [
            [x.new_empty(x.shape[0] * most, *x.shape[2:]) for x in (k, v)] for _ in range(buffers)
        ]
        self.keys: list[list[Tensor]] = [[k, v]]
        self.begin = event(k.device)
        self.computed: list[Any] = []  # after each hop's kernels, an event
        self.messages: list[Messages] = []

    def start(self, hop: int) -> None:
        """Start to receive the keys of a hop, beside the kernels of the previous hop."""
        if hop >= self.ring.world:
            return
        rows, batch = self.ring.rows[hop], self.keys[0][0].shape[0]
        memory = self.memory[hop % len(self.memory)]
        into = [x[: batch * rows].unflatten(0, (batch, rows)) for x in memory]
        # The kernels of hop `reader` were the last to read this buffer. Hop 0 reads no buffer.
        reader = hop - len(self.memory)
        after = self.computed[reader] if reader > 0 else self.begin
        with beside(into[0].device, after):
            if self.messages:
                self.messages[-1].wait()
            before = [x.contiguous() for x in self.keys[hop - 1]]
            world, rank = self.ring.world, self.ring.rank
            sent = send(self.group, {(rank + 1) % world: before}, {(rank - 1) % world: into})
        self.messages.append(sent)
        self.keys.append(into)

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
