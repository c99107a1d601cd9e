"""Exchange of tokens for heads: each rank gets all tokens of some heads, and back (Ulysses)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import Rows, beside, flat, send


class Swap(NamedTuple):
    """What the ranks of a group exchange.

    Attributes:
        group: the ranks, each of which gets some heads.
        rank: the own rank in the group.
        rows: for each rank, its tokens as rows of the tokens that the group holds together.
        total: how many tokens the group holds.
    """

    group: Any
    rank: int
    rows: tuple[Rows, ...]
    total: int

    def heads(self, rank: int, heads: int) -> slice:
        """The heads of a rank."""
        own = heads // len(self.rows)
        return slice(rank * own, (rank + 1) * own)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(len(self.rows)) if rank != self.rank]

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """All tokens of the own heads, from own tokens of all heads, `[batch, rows, heads, dim]`,
        of each tensor."""
        found, own_rows = [], self.rows[self.rank]
        for x in tensors:
            heads = x.shape[2] // len(self.rows)
            found.append(x.new_empty(x.shape[0], self.total, heads, x.shape[3]))
        into = {
            rank: [self.rows[rank].memory(x, inside=True) for x in found] for rank in self.others
        }
        with beside(tensors[0].device):
            to = {
                rank: [
                    piece
                    for x in tensors
                    for piece in own_rows.cut(x[:, :, self.heads(rank, x.shape[2])].contiguous())
                ]
                for rank in self.others
            }
            messages = send(self.group, to, flat(into))
        for x, source in zip(found, tensors, strict=True):
            own_rows.put(x, source[:, :, self.heads(self.rank, source.shape[2])])
        messages.wait()
        for rank, parts in into.items():
            for x, pieces in zip(found, parts, strict=True):
                self.rows[rank].fill(x, pieces)
        return found

    def to_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """Own tokens of all heads, from all tokens of the own heads."""
        own_rows = self.rows[self.rank]
        found, received = [], []
        for x in tensors:
            batch, _, heads, dim = x.shape
            found.append(x.new_empty(batch, own_rows.count, heads * len(self.rows), dim))
            received.append(x.new_empty(batch, own_rows.count, heads, dim))
        into = {rank: [own_rows.cut(torch.empty_like(x)) for x in received] for rank in self.others}
        with beside(tensors[0].device):
            to = {
                rank: [piece for x in tensors for piece in self.rows[rank].pieces(x)]
                for rank in self.others
            }
            messages = send(self.group, to, flat(into))
        for x, source in zip(found, tensors, strict=True):
            heads = self.heads(self.rank, x.shape[2])
            row = 0
            for piece in own_rows.pieces(source):
                x[:, row : row + piece.shape[1], heads] = piece
                row += piece.shape[1]
        messages.wait()
        for rank, parts in into.items():
            for x, pieces in zip(found, parts, strict=True):
                row = 0
                for piece in pieces:
                    x[:, row : row + piece.shape[1], self.heads(rank, x.shape[2])] = piece
                    row += piece.shape[1]
        return found


class _Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, swap: Swap, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.swap, ctx.to_heads = swap, to_heads
        return tuple((swap.to_heads if to_heads else swap.to_tokens)(*tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back = ctx.swap.to_tokens if ctx.to_heads else ctx.swap.to_heads
        return (None, None, *back(*gradients))


def swapped(swap: Swap, *tensors: Tensor, to_heads: bool) -> tuple[Tensor, ...]:
    """The exchange of several tensors at once, as a differentiable function."""
    found: tuple[Tensor, ...] = _Swapped.apply(swap, to_heads, *tensors)
    return found
