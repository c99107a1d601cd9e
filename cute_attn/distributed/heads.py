"""Exchange of tokens for heads (Ulysses): each rank gets all tokens of some heads. A second
exchange gives each rank its tokens of all heads again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import Rows, beside, copy_rows, event, flat, send, wait_for


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
        ranks, own_rows = len(self.rows), self.rows[self.rank]
        device = tensors[0].device
        found = [
            x.new_empty(x.shape[0], self.total, x.shape[2] // ranks, x.shape[3]) for x in tensors
        ]
        into = {
            rank: [self.rows[rank].memory(x, inside=True) for x in found] for rank in self.others
        }
        with beside(device):
            # [ranks, batch, rows, heads of a rank, dim]: one copy packs the messages to all ranks.
            packed = [x.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous() for x in tensors]
            to = {
                rank: [piece for x in packed for piece in own_rows.cut(x[rank])]
                for rank in self.others
            }
            messages = send(self.group, to, flat(into))
            own = [of_ranks[self.rank] for of_ranks in packed]
            copy_rows(found, own_rows, own, own_rows.packed)
            copied = event(device)
        wait_for(copied)
        messages.wait()
        for rank, parts in into.items():
            for x, pieces in zip(found, parts, strict=True):
                self.rows[rank].fill(x, pieces)
        return found

    def to_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """From all tokens of this rank's heads, get this rank's tokens of all heads."""
        ranks, own_rows = len(self.rows), self.rows[self.rank]
        device = tensors[0].device
        received = [x.new_empty(ranks, x.shape[0], own_rows.count, *x.shape[2:]) for x in tensors]
        into = {
            rank: [piece for x in received for piece in own_rows.cut(x[rank])]
            for rank in self.others
        }
        with beside(device):
            to = {
                rank: [piece for x in tensors for piece in self.rows[rank].pieces(x)]
                for rank in self.others
            }
            messages = send(self.group, to, into)
            own = [x[self.rank] for x in received]
            copy_rows(own, own_rows.packed, tensors, own_rows)
            copied = event(device)
        wait_for(copied)
        messages.wait()
        return [x.movedim(0, 2).flatten(2, 3) for x in received]


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
