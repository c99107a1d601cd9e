"""The states of delta rules at the ends of spans, from the transitions of all ranks.

A span is a `Piece` of a rank's tokens: a range in one sequence. Its effect on the state is affine,
S' = M S + B. Each rank computes [B | M] of its spans, and receives [B | M] of the spans that come
before its own spans. From these the rank computes the state at the start of each of its spans. The
backward runs the other way: the gradient of the state at a span's end comes from later spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.kda.chunk_spans import chain
from .exchange import Messages, Rows, send
from .layout import Layout, Piece, Range

NOTHING = -1  # in a step of a chain: no matrix to take, or no place to write


class Route:
    """The transitions that a rank sends, receives and applies, in one direction.

    Attributes:
        count: the rank's spans.
        needed: for each of the rank's spans, whether another span needs the span's transition.
        sent: other rank -> the rank's spans whose transitions the other rank needs.
        received: other rank -> the places of this rank's transitions in the pool.
        pool: the number of transitions in the pool: the rank's own, then other ranks'.
        chains: for each sequence that the rank has a part of, the steps of
            `ops.kda.chunk_spans.chain`. A step after the first takes a transition from the pool. A
            step writes the matrix at the start of a rank's own span.
        ends: (spans, sequences): the rank's spans at the ends of sequences, and these sequences.
    """

    def __init__(self, layout: Layout, rank: int, *, backwards: bool) -> None:
        pieces = [layout.pieces(r) for r in range(layout.world)]
        orders: dict[int, list[tuple[int, int]]] = {}  # sequence -> (rank, span), in the direction
        for piece, r, i in sorted(
            ((p, r, i) for r, own in enumerate(pieces) for i, p in enumerate(own)),
            key=lambda x: x[0].start,
            reverse=backwards,
        ):
            orders.setdefault(piece.sequence, []).append((r, i))
        self.count = len(pieces[rank])
        self.needed = [orders[p.sequence][-1] != (rank, i) for i, p in enumerate(pieces[rank])]
        before = [_before(pieces[r], r, orders) for r in range(layout.world)]
        self.sent = {
            other: _rows(sorted(i for r, i in before[other] if r == rank))
            for other in range(layout.world)
            if other != rank and any(r == rank for r, _ in before[other])
        }
        pool = sorted(before[rank], key=lambda x: (x[0] != rank, *x))
        self.own = _rows([i for r, i in pool if r == rank])
        self.pool = len(pool)
        self.received = {}
        for other in sorted({r for r, _ in pool} - {rank}):
            places = [at for at, (r, _) in enumerate(pool) if r == other]
            self.received[other] = Rows([(places[0], places[-1] + 1)])
        self.chains: list[list[tuple[int, int]]] = []
        for sequence in sorted({p.sequence for p in pieces[rank]}):
            order = orders[sequence]
            last = max(at for at, (r, _) in enumerate(order) if r == rank)
            places = [i if r == rank else NOTHING for r, i in order[: last + 1]]
            taken = [sequence, *(pool.index(x) for x in order[:last])]
            self.chains.append(list(zip(taken, places, strict=True)))
        self._steps: dict[torch.device, Tensor] = {}
        ends = [
            (i, p.sequence)
            for i, p in enumerate(pieces[rank])
            if orders[p.sequence][-1] == (rank, i)
        ]
        self.ends = _rows([i for i, _ in ends]), _rows([sequence for _, sequence in ends])

    def steps(self, device: torch.device) -> Tensor:
        """The steps of all chains, int32 `[chains, steps, 2]`."""
        if device not in self._steps:
            longest = max(map(len, self.chains))
            nothing = NOTHING, NOTHING
            filled = [x + [nothing] * (longest - len(x)) for x in self.chains]
            self._steps[device] = torch.tensor(filled, dtype=torch.int32).to(device)
        return self._steps[device]

    def states(
        self, group: Any, moves: Tensor | None, first: Tensor | None, out: Tensor
    ) -> Messages:
        """Write the matrix at the start of each of the rank's spans. Return the messages, for which
        the caller waits at the end, because a rank that only sends need not wait before its pass.

        Args:
            moves: [B | M] of the rank's spans, `[batch, spans, HV, V + K, K]`; None if no span's is
                needed.
            first: the matrix at the start of each sequence, `[batch, sequences, HV, V, K]`; None
                is 0.
            out: `[batch, spans, HV, V, K]`, which is written.
        """
        batch, _, heads, dim_v, dim_k = out.shape
        # The current stream packs and sends, because nothing else is ready to run meanwhile.
        to = {} if moves is None else {r: [rows.take(moves)] for r, rows in self.sent.items()}
        pool = out.new_empty(batch, self.pool, heads, dim_v + dim_k, dim_k)
        into = {other: rows.memory(pool, inside=True) for other, rows in self.received.items()}
        messages = send(group, to, into)
        if self.own.count and moves is not None:
            self.own.packed.put(pool, self.own.take(moves))
        if into:
            messages.wait()
            for other, rows in self.received.items():
                rows.fill(pool, into[other])
        if self.pool:
            chain(first, pool, self.steps(out.device), out)
        elif first is None:
            out.zero_()
        else:
            for ((sequence, span),) in self.chains:
                out[:, span].copy_(first[:, sequence])
        return messages


def _before(
    own: Sequence[Piece], rank: int, orders: dict[int, list[tuple[int, int]]]
) -> set[tuple[int, int]]:
    """The spans whose transitions a rank needs: all spans before the rank's last span of a
    sequence."""
    found: set[tuple[int, int]] = set()
    for sequence in {p.sequence for p in own}:
        order = orders[sequence]
        last = max(at for at, (r, _) in enumerate(order) if r == rank)
        found.update(order[:last])
    return found


def _rows(places: Sequence[int]) -> Rows:
    """Places as rows; places that follow one another form one range."""
    found: list[Range] = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1] = found[-1][0], place + 1
        else:
            found.append((place, place + 1))
    return Rows(found)
