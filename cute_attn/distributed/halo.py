"""The tokens before each span of a rank, for causal convolutions.

A convolution with n taps reads the n - 1 tokens before a token. At the start of a span these tokens
belong to another span of the sequence, which often lies on another rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import beside, send
from .layout import Layout
from .plan import Plan


class Part(NamedTuple):
    """Tokens that a span of the rank `to` needs from the rank `of`.

    Attributes:
        row: the first token's row in the tokens of `of`.
        span, place: the span of `to`, and the first token's place before the span.
        tokens: the number of tokens.
    """

    of: int
    row: int
    to: int
    span: int
    place: int
    tokens: int


def parts_of(layout: Layout, count: int) -> tuple[Part, ...]:
    """The tokens that all ranks' spans need, at most `count` tokens for a span."""
    pieces = [(rank, p) for rank in range(layout.world) for p in layout.pieces(rank)]
    found = []
    for rank in range(layout.world):
        for span, piece in enumerate(layout.pieces(rank)):
            low = max(layout.bounds[piece.sequence], piece.start - count)
            for of, other in pieces:
                start, end = max(low, other.start), min(piece.start, other.end)
                if start < end:
                    row, place = other.row + start - other.start, count - (piece.start - start)
                    found.append(Part(of, row, rank, span, place, end - start))
    return tuple(found)


class Exchange:
    """The parts that one rank copies, sends and receives.

    Attributes:
        own: parts whose tokens the rank holds itself.
        sent, received: other rank -> the parts of a message, in its order.
    """

    def __init__(self, layout: Layout, rank: int, count: int) -> None:
        parts = parts_of(layout, count)
        self.count, self.spans = count, len(layout.pieces(rank))
        self.own = [p for p in parts if p.of == p.to == rank]
        self.sent: dict[int, list[Part]] = {}
        self.received: dict[int, list[Part]] = {}
        for part in parts:
            if part.of == rank != part.to:
                self.sent.setdefault(part.to, []).append(part)
            elif part.to == rank != part.of:
                self.received.setdefault(part.of, []).append(part)

    def forward(self, group: Any, x: Tensor) -> Tensor:
        """The tokens before each span, `[batch, spans, count, ...]`."""
        out = x.new_zeros(x.shape[0], self.spans, self.count, *x.shape[2:])
        into = _memory(x, x.shape[2:], self.received)
        with beside(x.device):
            to = {r: [torch.cat([_rows(x, p) for p in parts], 1)] for r, parts in self.sent.items()}
            messages = send(group, to, into)
        for part in self.own:
            _places(out, part).copy_(_rows(x, part))
        messages.wait()
        for rank, parts in self.received.items():
            for part, values in zip(parts, _cut(into[rank][0], parts), strict=True):
                _places(out, part).copy_(values)
        return out

    def backward(self, group: Any, dout: Tensor, tokens: int) -> Tensor:
        """The gradient of x, which has `tokens` tokens. Sums have a fixed order: the own parts come
        first, then other ranks' parts by rank."""
        dx = dout.new_zeros(dout.shape[0], tokens, *dout.shape[3:])
        into = _memory(dout, dout.shape[3:], self.sent)
        with beside(dout.device):
            to = {
                rank: [torch.cat([_places(dout, p) for p in parts], 1)]
                for rank, parts in self.received.items()
            }
            messages = send(group, to, into)
        for part in self.own:
            _rows(dx, part).add_(_places(dout, part))
        messages.wait()
        for rank, parts in sorted(self.sent.items()):
            for part, values in zip(parts, _cut(into[rank][0], parts), strict=True):
                _rows(dx, part).add_(values)
        return dx


def _memory(
    x: Tensor, shape: torch.Size, messages: dict[int, list[Part]]
) -> dict[int, list[Tensor]]:
    """Memory for messages, `[batch, tokens, *shape]`."""
    return {
        rank: [x.new_empty(x.shape[0], sum(p.tokens for p in parts), *shape)]
        for rank, parts in messages.items()
    }


def _rows(x: Tensor, part: Part) -> Tensor:
    return x[:, part.row : part.row + part.tokens]


def _places(x: Tensor, part: Part) -> Tensor:
    return x[:, part.span, part.place : part.place + part.tokens]


def _cut(x: Tensor, parts: list[Part]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = x.split([p.tokens for p in parts], 1)
    return found


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, group: Any) -> Tensor:
        ctx.exchange, ctx.group, ctx.tokens = exchange, group, x.shape[1]
        return exchange.forward(group, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        return ctx.exchange.backward(ctx.group, dout, ctx.tokens), None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def causal_halo(plan: Plan, x: Tensor, count: int = 3) -> Tensor:
    """The tokens before each span of this rank, for a causal convolution of `count` + 1 taps.

    Every rank of the plan calls this function. The function is differentiable: a token's gradient
    returns to the rank that holds the token.

    Args:
        plan: a plan of `context_parallel`.
        x: this rank's tokens, `[batch, tokens, ...]`; batch is 1 for packed sequences.
        count: tokens before each span.

    Returns:
        `[batch, spans, count, ...]`, with zeros before the first token of a sequence. The spans are
        the rank's ranges, cut at the ends of sequences; `plan.span_lengths` has their lengths.

    Raises:
        TypeError: plan is no plan, x no tensor, or count no int.
        ValueError: x has another number of tokens, or count is negative.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is {type(plan).__name__}, must be a plan of context_parallel")
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"count must be an int, got {type(count).__name__}")
    if count < 0:
        raise ValueError(f"count is {count}, must be at least 0")
    if x.dim() < 2 or x.shape[1] != plan.tokens:
        raise ValueError(
            f"x has shape {list(x.shape)} on rank {plan.rank}, must be [batch, {plan.tokens}, ...]"
        )
    key = "halo", count
    if key not in plan.kept:
        plan.kept[key] = Exchange(plan.layout, plan.rank, count)
    found: Tensor = _Halo.apply(x, plan.kept[key], plan.all_ranks)
    return found
