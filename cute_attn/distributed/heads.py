"""Exchange of tokens for heads: each rank gets all tokens of some heads, and back (Ulysses)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import Rows, beside, send


class Swap(NamedTuple):
    """What the ranks of a group exchange.

    Attributes:
        group: the ranks, each of which gets some heads.
        rank: the own rank in the group.
        rows: for each rank, its tokens as rows of the tokens that the group holds together.
        count: how many tokens the group holds.
    """

    group: Any
    rank: int
    rows: tuple[Rows, ...]
    count: int

    def heads(self, rank: int, heads: int) -> slice:
        """The heads of a rank."""
        own = heads // len(self.rows)
        return slice(rank * own, (rank + 1) * own)

    def to_heads(self, x: Tensor) -> Tensor:
        """All tokens of the own heads, from own tokens of all heads: `[batch, rows, heads, dim]`"""
        batch, _, heads, dim = x.shape
        own = self.heads(self.rank, heads)
        found = x.new_empty(batch, self.count, own.stop - own.start, dim)
        others = [r for r in range(len(self.rows)) if r != self.rank]
        into = {r: [found.new_empty(batch, self.rows[r].count, *found.shape[2:])] for r in others}
        with beside(x.device):
            to = {r: [x[:, :, self.heads(r, heads)].contiguous()] for r in others}
            messages = send(self.group, to, into)
        self.rows[self.rank].put(found, x[:, :, own])
        messages.wait()
        for rank, (part,) in into.items():
            self.rows[rank].put(found, part)
        return found

    def to_tokens(self, x: Tensor) -> Tensor:
        """Own tokens of all heads, from all tokens of the own heads."""
        batch, _, own_heads, dim = x.shape
        heads = own_heads * len(self.rows)
        found = x.new_empty(batch, self.rows[self.rank].count, heads, dim)
        others = [r for r in range(len(self.rows)) if r != self.rank]
        into = {r: [x.new_empty(batch, found.shape[1], own_heads, dim)] for r in others}
        with beside(x.device):
            to = {r: [self.rows[r].take(x)] for r in others}
            messages = send(self.group, to, into)
        found[:, :, self.heads(self.rank, heads)] = self.rows[self.rank].take(x)
        messages.wait()
        for rank, (part,) in into.items():
            found[:, :, self.heads(rank, heads)] = part
        return found


class _Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, swap: Swap, to_heads: bool) -> Tensor:
        ctx.swap, ctx.to_heads = swap, to_heads
        return swap.to_heads(x) if to_heads else swap.to_tokens(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        back = ctx.swap.to_tokens if ctx.to_heads else ctx.swap.to_heads
        return back(gradient), None, None


def swapped(x: Tensor, swap: Swap, *, to_heads: bool) -> Tensor:
    """The exchange as a differentiable function."""
    found: Tensor = _Swapped.apply(x, swap, to_heads)
    return found
