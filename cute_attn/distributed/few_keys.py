"""The exchange of few keys, such as the keys in reach of a short window.

Such calls are short, so the host's time counts rather than bytes. K and V of a key are adjacent
columns of one row of memory, and one collective call exchanges the rows of all ranks. The gathered
keys are kept for the backward, which so receives no keys again.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions

from .exchange import Messages
from .layout import Layout, Needs, Range, shared_rows

MOST_BYTES = 2**24  # of the keys that a rank sends or gathers; a pass over them takes about 10 us

_Part = tuple[Range, bool, Range]

_OPTIONS = AllToAllOptions()
_OPTIONS.asyncOp = True  # beside the kernels of the current stream


class FewKeys:
    """Rows of gathered keys, in the order of the ranks that hold the keys, and after these the rows
    of messages to other ranks.

    If no rank gathers keys of a later rank, a rank's own keys are the last gathered rows, and the
    rank copies them there. Otherwise the own keys pass through the collective call too.

    Attributes:
        rows, shown_rows: the number of gathered rows, and of the rows of messages.
        copied: the number of own keys that the rank copies.
        received: for each rank, how many rows it sends to this rank.
        shown: for each rank, how many rows this rank sends to it.
        most_rows: the most rows that a rank has.
        batches: the parts of gradients of this rank's keys, in the order in which they are added:
            keys, whether the part is a message, and its rows in the message, or else in the copied
            rows. No keys of a batch overlap.
    """

    def __init__(self, layout: Layout, rank: int, needs: tuple[Needs, ...]) -> None:
        """`needs` are the needs of all ranks."""
        held, world = layout.ranges, range(layout.world)
        rows = [[shared_rows(held[of], needs[to].ranges)[0] for to in world] for of in world]
        counts = [[_count(x) for x in of_rank] for of_rank in rows]
        copies = not any(counts[of][to] for of in world for to in range(of))
        self.rows = sum(counts[of][rank] for of in world)
        self.most_rows = max(sum(counts[of][to] + counts[to][of] for of in world) for to in world)
        self.copied = counts[rank][rank] if copies else 0
        sent = {to: rows[rank][to] for to in world if to != rank or not copies}
        self.received = [counts[of][rank] if of != rank or not copies else 0 for of in world]
        self.shown = [_count(sent.get(to, ())) for to in world]
        self.shown_rows = sum(self.shown)
        packed = [*(rows[rank][rank] if copies else ()), *(x for of in sent.values() for x in of)]
        self._packed = [row for a, b in packed for row in range(a, b)]
        self._index: dict[torch.device, Tensor] = {}
        parts: list[_Part] = []
        ends = [0, *accumulate(self.shown)]
        if copies:
            ends[rank] = 0  # in the copied rows
        for to in sorted(world, key=lambda to: to != rank):
            for start, end in rows[rank][to]:
                first, ends[to] = ends[to], ends[to] + end - start
                parts.append(((start, end), to in sent, (first, ends[to])))
        self.batches = _disjoint(parts)

    @classmethod
    def of(cls, layout: Layout, rank: int, needs: tuple[Needs, ...]) -> FewKeys | None:
        """The exchange of a rank; None if the gathered keys of a rank are not in the order of the
        ranks that hold the keys. The answer is the same on all ranks."""
        if any(len(ranges) > 1 for ranges in layout.ranges):
            return None
        for of_rank in needs:
            found = [x for ranges in layout.ranges for x in shared_rows(ranges, of_rank.ranges)[1]]
            if any(a[1] != b[0] for a, b in pairwise(found)):
                return None
        return cls(layout, rank, needs)

    def takes(self, k: Tensor, v: Tensor) -> bool:
        """Whether the keys are few and k and v have a batch of 1. All ranks agree."""
        if k.shape[0] != 1:
            return False
        columns = k.shape[2] * (k.shape[3] + v.shape[3])
        return self.most_rows * columns * k.element_size() <= MOST_BYTES

    def gather(self, group: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Messages]:
        """Start to exchange keys. Returns memory of all rows, `[rows, columns of K and V]`, and the
        messages."""
        _, rows, heads, dim = k.shape
        sizes = heads * dim, heads * v.shape[3]
        memory = k.new_empty(self.rows + self.shown_rows, sum(sizes))
        received = self.rows - self.copied
        if self._packed:
            index = self._index.get(k.device)
            if index is None:
                index = self._index[k.device] = torch.tensor(self._packed).to(k.device)
            packed = memory[received:].split_with_sizes(sizes, 1)
            for x, to in zip((k, v), packed, strict=True):
                torch.index_select(x.reshape(rows, -1), 0, index, out=to)
        return memory, exchange_rows(
            group, memory[self.rows :], self.shown, memory[:received], self.received
        )

    def keys(self, memory: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The gathered K and V, `[1, rows, heads, dim]`; k and v are the rank's own."""
        _, _, heads, dim = k.shape
        size, row = memory.numel(), memory.shape[1]
        shape, dim_v = (1, self.rows, heads), v.shape[3]
        # Hooks of saved tensors may return memory inside a larger buffer.
        first = memory.storage_offset()
        return (
            memory.as_strided((*shape, dim), (size, row, dim, 1), first),
            memory.as_strided((*shape, dim_v), (size, row, dim_v, 1), first + heads * dim),
        )

    def give_back(
        self, group: Any, gathered: list[Tensor] | None, like: tuple[Tensor, Tensor]
    ) -> tuple[tuple[Tensor, Tensor], Messages]:
        """Start to send gradients of gathered keys to the ranks that hold the keys. Returns the
        parts of this rank's gradients: of copied rows, and memory of messages; and the messages.

        Args:
            gathered: dK and dV in float32; None without gathered keys.
            like: the rank's own k and v.
        """
        columns = sum(x.shape[2] * x.shape[3] for x in like)
        if gathered is None:
            sent = like[0].new_empty(0, columns, dtype=torch.float32)
        else:
            sent = torch.cat([x.view(self.rows, -1) for x in gathered], 1)
        parts = sent.new_empty(self.shown_rows, columns)
        copied = self.rows - self.copied
        messages = exchange_rows(group, sent[:copied], self.received, parts, self.shown)
        return (sent[copied:], parts), messages

    def add(
        self, parts: tuple[Tensor, Tensor], sums: list[Tensor], out: tuple[Tensor, Tensor]
    ) -> None:
        """Write the sums of all parts of this rank's dK and dV to `out`: first `sums`, then the
        rank's part of gathered keys, then the other parts by rank. `sums` are overwritten."""
        if self.batches:
            of_sums = [x.view(x.shape[1], -1) for x in sums]
            sizes = [x.shape[1] for x in of_sums]
            of_parts = [x.split_with_sizes(sizes, 1) for x in parts]
            for batch in self.batches:
                torch._foreach_add_(
                    [x[a:b] for (a, b), _, _ in batch for x in of_sums],
                    [x[a:b] for _, sent, (a, b) in batch for x in of_parts[sent]],
                )
        torch._foreach_copy_(list(out), sums)


def exchange_rows(
    group: Any, sent: Tensor, to: list[int], memory: Tensor, of: list[int]
) -> Messages:
    """Start to send rows to all ranks, and to receive rows of all ranks. `to` and `of` have the
    number of rows for each rank."""
    on_host = sent.device.type == "cpu"
    if on_host:  # gloo supports few dtypes
        sent, memory = sent.view(torch.uint8), memory.view(torch.uint8)
    work = group.alltoall_base(memory, sent, of, to, _OPTIONS)
    return Messages([work], (sent, memory), on_host=on_host)


def _count(ranges: tuple[Range, ...]) -> int:
    return sum(end - start for start, end in ranges)


def _disjoint(parts: list[_Part]) -> list[list[_Part]]:
    """Parts in the same order, in batches in which no two ranges of keys overlap."""
    found: list[list[_Part]] = []
    for part in parts:
        start, end = part[0]
        if not found or any(start < b and a < end for (a, b), *_ in found[-1]):
            found.append([])
        found[-1].append(part)
    return found
