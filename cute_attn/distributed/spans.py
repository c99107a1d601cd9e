"""The states of delta rules at the ends of spans, from the transitions of all ranks.

A span is a `Piece` of a rank's tokens: a range in one sequence. Its effect on the state is affine,
S' = M S + B. Each rank computes [B | M] of its spans, and receives [B | M] of the spans that come
before its own spans. From these the rank computes the state at the start of each of its spans. The
backward runs the other way: the gradient of the state at a span's end comes from later spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.kda.chunk_spans import followed
from .exchange import Messages, Rows, beside, send
from .layout import Layout, Piece, Range


class Step(NamedTuple):
    """A step of all chains: the first chains of the list take a transition each, from `pool`.

    Attributes:
        pool: for each of these chains, the transition's place in the pool.
        chains, spans: chains whose matrix is now at the start of a rank's own span, and that span.
    """

    pool: Rows
    chains: Rows
    spans: Rows


class Route:
    """The transitions that a rank sends, receives and applies, in one direction.

    Attributes:
        count: the rank's spans.
        needed: for each of the rank's spans, whether another span needs the span's transition.
        sent: other rank -> the rank's spans whose transitions the other rank needs.
        received: other rank -> the number of transitions from this rank.
        sequences: the sequence of each chain; longer chains come first.
        steps: the steps of the chains. Step 0 has no transitions.
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
        self.received = {
            other: sum(r == other for r, _ in pool)
            for other in sorted({r for r, _ in pool} - {rank})
        }
        chains = []
        for sequence in sorted({p.sequence for p in pieces[rank]}):
            order = orders[sequence]
            last = max(at for at, (r, _) in enumerate(order) if r == rank)
            chains.append((sequence, order[: last + 1]))
        chains.sort(key=lambda x: -len(x[1]))
        self.sequences = _rows([sequence for sequence, _ in chains])
        self.steps = []
        for at in range(max((len(order) for _, order in chains), default=0)):
            active = [(n, order) for n, (_, order) in enumerate(chains) if len(order) > at]
            own = [(n, order[at][1]) for n, order in active if order[at][0] == rank]
            self.steps.append(
                Step(
                    _rows([pool.index(order[at - 1]) for _, order in active] if at else []),
                    _rows([n for n, _ in own]),
                    _rows([i for _, i in own]),
                )
            )
        ends = [
            (i, p.sequence)
            for i, p in enumerate(pieces[rank])
            if orders[p.sequence][-1] == (rank, i)
        ]
        self.ends = _rows([i for i, _ in ends]), _rows([sequence for _, sequence in ends])

    def states(self, group: Any, moves: Tensor | None, first: Tensor, out: Tensor) -> Messages:
        """Write the matrix at the start of each of the rank's spans. Return the messages, for which
        the caller waits at the end, because a rank that only sends need not wait before its pass.

        Args:
            moves: [B | M] of the rank's spans, `[batch, spans, HV, V + K, K]`; None if no span's is
                needed.
            first: the matrix at the start of each sequence, `[batch, sequences, HV, V, K]`.
            out: `[batch, spans, HV, V, K]`, which is written.
        """
        pool, messages = self._pool(group, moves, out)
        dim_v = out.shape[-2]
        states = self.sequences.take(first).double()
        for step in self.steps:
            if step.pool.count:
                # Chains that have ended come last, and are not needed again.
                moves = step.pool.take(pool).double()
                states = followed(states[:, : step.pool.count], moves, dim_v)
            if step.spans.count:
                step.spans.put(out, step.chains.take(states).to(out.dtype))
        return messages

    def _pool(self, group: Any, moves: Tensor | None, like: Tensor) -> tuple[Tensor, Messages]:
        """The transitions that the steps take: the rank's own, then other ranks'."""
        batch, _, heads, dim_v, dim_k = like.shape
        shape = heads, dim_v + dim_k, dim_k
        into = {
            other: [like.new_empty(batch, count, *shape)] for other, count in self.received.items()
        }
        with beside(like.device):
            to = {} if moves is None else {r: [rows.take(moves)] for r, rows in self.sent.items()}
            messages = send(group, to, into)
        own = [] if moves is None or not self.own.count else [self.own.take(moves)]
        if into:
            messages.wait()
        parts = [*own, *(part for (part,) in into.values())]
        if not parts:
            return like.new_empty(batch, 0, *shape), messages
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1), messages


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
