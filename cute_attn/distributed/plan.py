"""The plan of context parallelism: which tokens each rank holds, and how calls exchange keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.operator import PLAIN, dispatch_mode_depth, forward_ad
from .exchange import Rows, beside, send
from .gather import Route
from .heads import Swap
from .layout import Layout, Range, Window, shared_rows
from .ring import Ring

_interpreter = torch._C._functorch.peek_interpreter_stack


class Plan:
    """Which tokens each rank of a group holds. `context_parallel` makes a plan.

    Attributes:
        rank, world: this rank in the group, and the number of ranks.
        lengths: the length of each sequence.
        ranges: for each rank, the ranges of its tokens. Tokens are numbered through all sequences.
        tokens: the number of tokens that this rank holds.
        packed: whether tensors are `[total, ...]`, rather than `[batch, seqlen, ...]`.
        mode: "gather", "ring" or "heads"; None: each call's shapes choose the mode.
    """

    def __init__(
        self,
        group: Any,
        heads_group: Any,
        all_ranks: Any,
        layout: Layout,
        *,
        packed: bool,
        mode: str | None,
    ) -> None:
        self.group, self.heads_group, self.all_ranks = group, heads_group, all_ranks
        self.rows_of = layout
        self.packed, self.mode = packed, mode
        self.by_tokens = dist.get_world_size(group)
        self.by_heads = 1 if heads_group is None else dist.get_world_size(heads_group)
        self.token_rank = dist.get_rank(group)
        self.head_rank = 0 if heads_group is None else dist.get_rank(heads_group)
        self.agreed: set[Any] = set()
        self.calls: dict[Any, Any] = {}  # see `attention.Call`
        self._routes: dict[tuple[Window, bool], Route] = {}
        self._rings: dict[bool, Ring] = {}
        self.kept: dict[Any, Any] = {}  # what other modules compute once for a plan
        self._received: dict[Window, int] = {}

    @property
    def rank(self) -> int:
        return self.token_rank * self.by_heads + self.head_rank

    @property
    def world(self) -> int:
        return self.by_tokens * self.by_heads

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.rows_of.lengths

    @cached_property
    def layout(self) -> Layout:
        """The layout of all ranks. Ranks of one row of a mesh split the row's tokens."""
        return self.rows_of if self.by_heads == 1 else self.rows_of.part(self.by_heads)

    @property
    def ranges(self) -> tuple[tuple[Range, ...], ...]:
        return self.layout.ranges

    @property
    def tokens(self) -> int:
        """How many tokens this rank holds."""
        return self.layout.tokens(self.rank)

    @cached_property
    def rows(self) -> list[Rows]:
        """For each rank, the rank's tokens as rows of all tokens."""
        return [Rows(ranges) for ranges in self.ranges]

    def shard(self, x: Tensor, dim: int | None = None) -> Tensor:
        """Take this rank's tokens of x. The function is differentiable.

        Args:
            x: a tensor of all tokens.
            dim: the dimension of tokens; None means 0 for packed sequences, otherwise 1.

        Returns:
            x's tokens of this rank, in the order of the rank's ranges, in x's dtype.

        Raises:
            TypeError: x is not a tensor.
            ValueError: x has no such dimension, or another number of tokens.
        """
        dim = self._dim(x, dim, self.layout.total)
        return self.rows[self.rank].take(x.movedim(dim, 0)[None])[0].movedim(0, dim)

    def unshard(self, x: Tensor, dim: int | None = None) -> Tensor:
        """Gather the tokens of all ranks. Every rank calls this function.

        Args:
            x: a tensor of this rank's tokens. The other sizes are equal on all ranks.
            dim: as for `shard`.

        Returns:
            A contiguous tensor of all tokens, on every rank, without a gradient.

        Raises:
            TypeError: x is not a tensor.
            ValueError: x has no such dimension, or another number of tokens.
        """
        with torch.no_grad():
            dim = self._dim(x, dim, self.tokens)
            own = x.detach().movedim(dim, 0).contiguous()[None]
            found = own.new_empty(1, self.layout.total, *own.shape[2:])
            into = {
                rank: [found.new_empty(1, rows.count, *own.shape[2:])]
                for rank, rows in enumerate(self.rows)
                if rank != self.rank
            }
            with beside(x.device):
                messages = send(self.all_ranks, {rank: [own] for rank in into}, into)
            messages.wait()
            for rank, (part,) in into.items():
                self.rows[rank].put(found, part)
            self.rows[self.rank].put(found, own)
            return found[0].movedim(0, dim).contiguous()

    def position_ids(self, device: torch.device | str | None = None) -> Tensor:
        """The position of each of this rank's tokens in its sequence.

        Args:
            device: the result's device; None is torch's default device.

        Returns:
            int64 `[tokens]`.
        """
        pieces = self.layout.pieces(self.rank)
        firsts = self.layout.bounds
        found = [
            torch.arange(p.start - firsts[p.sequence], p.end - firsts[p.sequence]) for p in pieces
        ]
        return torch.cat(found or [torch.arange(0)]).to(device)

    # -- what calls exchange

    def route(self, window: Window, *, whole: bool = False) -> Route:
        """The exchange of keys among the ranks that split tokens, for a window. `whole` is as for
        `Layout.needs`."""
        found = self._routes.get((window, whole))
        if found is None:
            found = Route(self.rows_of, self.token_rank, window, whole=whole)
            self._routes[window, whole] = found
        return found

    def received(self, window: Window) -> int:
        """How many keys a rank that splits tokens receives at most; equal on all ranks."""
        if window not in self._received:
            found = 0
            for rank, held in enumerate(self.rows_of.ranges):
                wanted = self.rows_of.needs(rank, window).ranges
                own, _ = shared_rows(held, wanted)
                found = max(found, _count(wanted) - _count(own))
            self._received[window] = found
        return self._received[window]

    def ring(self, causal: bool) -> Ring:
        """The hops of this rank in the ring."""
        if causal not in self._rings:
            self._rings[causal] = Ring(self.rows_of, self.token_rank, causal)
        return self._rings[causal]

    @cached_property
    def swap(self) -> Swap:
        """The exchange of tokens for heads among the ranks of the mesh's row."""
        held = self.rows_of.ranges[self.token_rank]
        first = self.token_rank * self.by_heads
        rows = [Rows(shared_rows(self.ranges[first + i], held)[1]) for i in range(self.by_heads)]
        count = self.rows_of.tokens(self.token_rank)
        return Swap(self.heads_group, self.head_rank, tuple(rows), count)

    @cached_property
    def all_heads(self) -> Swap:
        """The exchange of tokens for heads among all ranks of a plan without a mesh of heads."""
        return Swap(self.group, self.token_rank, tuple(self.rows), self.layout.total)

    @property
    def span_lengths(self) -> tuple[int, ...]:
        """The lengths of this rank's spans: its ranges, cut at the ends of sequences."""
        return tuple(p.end - p.start for p in self.layout.pieces(self.rank))

    def agree(
        self, what: tuple[tuple[str, Any], ...], verb: str = "calls flash attention with"
    ) -> None:
        """Raise ValueError on all ranks if ranks call with different arguments. Only a rank's first
        call with given arguments asks the other ranks, which must ask in the same call.

        Args:
            what: pairs of an argument's name and its value, which every rank must share.
            verb: what the ranks do, for the error's message.
        """
        if (what, verb) in self.agreed:
            return
        compare(self.all_ranks, dict(what), verb)
        self.agreed.add((what, verb))

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self  # a copy of a model that holds the plan has the same ranks

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a plan cannot be pickled, since its process groups belong to this process: call "
            "context_parallel in each process"
        )

    def _dim(self, x: Tensor, dim: int | None, tokens: int) -> int:
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor, got {type(x).__name__}")
        dim = (0 if self.packed else 1) if dim is None else dim
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != tokens:
            raise ValueError(
                f"x has shape {list(x.shape)} on rank {self.rank}, its dimension {dim} must have "
                f"{tokens} tokens"
            )
        return dim % x.dim()


def are_plain(given: Iterable[Any]) -> bool:
    """Whether shapes, strides, dtypes and devices are all that checks of these tensors depend on.
    Not for tensors, nor in a mode, that may intercept a call."""
    for x in given:
        if type(x) not in PLAIN or x.is_nested or x.layout is not torch.strided:
            return False
        if x.is_neg() or x._is_zerotensor():
            return False
    return not (forward_ad._current_level >= 0 or dispatch_mode_depth() or _interpreter())


def hashable(key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The key; None if it holds an argument that has no hash."""
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _count(ranges: Sequence[Range]) -> int:
    return sum(end - start for start, end in ranges)


def compare(group: Any, own: dict[str, Any], verb: str) -> None:
    """Raise ValueError on every rank of the group if a rank's values differ from the first
    rank's."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group)
    first = found[0]
    for rank, said in enumerate(found):
        for name, value in first.items():
            if said.get(name) != value:
                raise ValueError(
                    f"rank {rank} {verb} {name} {said.get(name)}, and rank 0 with "
                    f"{value}: all ranks must pass the same value"
                )
