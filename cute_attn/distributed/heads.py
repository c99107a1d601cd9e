"""Exchange of tokens for heads (Ulysses): each rank gets all tokens of some heads. A second
exchange gives each rank its tokens of all heads again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import Rows, beside, flat, send


class Swap(NamedTuple):
    """The exchange among the ranks of a group.

    Attributes:
        group: the process group; each of its ranks gets an equal part of the heads.
        rank: this rank in the group.
        rows: for each rank, the rank's tokens as rows of all tokens that the group holds.
        total: how many tokens the group holds.
    """

    group: Any
    rank: int
    rows: tuple[Rows, ...]
    total: int

    def heads(self, rank: int, heads: int) -> slice:
        """The heads that a rank gets, of `heads` heads."""
        own = heads // len(self.rows)
        return slice(rank * own, (rank + 1) * own)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(len(self.rows)) if rank != self.rank]

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """From this rank's tokens of all heads, get all tokens of this rank's heads. Every tensor
        is `[batch, rows, heads, dim]`."""
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
        """From all tokens of this rank's heads, get this rank's tokens of all heads."""
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
            own_heads = self.heads(self.rank, x.shape[2])
            row = 0
            for piece in own_rows.pieces(source):
                x[:, row : row + piece.shape[1], own_heads] = piece
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
    """Exchange several tensors at once. The exchange is differentiable."""
    found: tuple[Tensor, ...] = _Swapped.apply(swap, to_heads, *tensors)
    return found
