"""The exchange of few keys, such as the keys in reach of a short window.

Such calls are short, so the host's time counts rather than bytes. K and V of a key are adjacent
columns of one row of memory, and one collective call exchanges the rows of all ranks. A rank's own
keys pass through it too. The gathered keys are kept for the backward, which so receives no keys
again.
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

_OPTIONS = AllToAllOptions()
_OPTIONS.asyncOp = True  # beside the kernels of the current stream


class FewKeys:
    """Rows of gathered keys, in the order of the ranks that hold the keys.

    Attributes:
        received: for each rank, how many gathered keys it holds.
        shown: for each rank, how many of this rank's keys it gathers.
        most_rows: the most rows that a rank sends or gathers.
        batches: the parts of gradients of this rank's keys, in the order in which they are added:
            keys, and their rows in a message. No keys of a batch overlap.
    """

    def __init__(self, layout: Layout, rank: int, needs: tuple[Needs, ...]) -> None:
        """`needs` are the needs of all ranks."""
        held, world = layout.ranges, range(layout.world)
        rows = [[shared_rows(held[of], needs[to].ranges)[0] for to in world] for of in world]
        counts = [[_count(x) for x in of_rank] for of_rank in rows]
        self.received = [counts[of][rank] for of in world]
        self.shown = counts[rank]
        self.most_rows = max(*map(sum, counts), *map(sum, zip(*counts, strict=True)))
        self.rows_shown, self.rows = sum(self.shown), sum(self.received)
        self._packed = [row for ranges in rows[rank] for a, b in ranges for row in range(a, b)]
        self._index: dict[torch.device, Tensor] = {}
        own = [(rank, x) for x in rows[rank][rank]]
        others = [(to, x) for to in world if to != rank for x in rows[rank][to]]
        firsts = list(accumulate(self.shown, initial=0))
        self.batches = _disjoint(
            [(x, (firsts[to], firsts[to] + x[1] - x[0])) for to, x in own + others]
        )

    @classmethod
    def of(cls, layout: Layout, rank: int, needs: tuple[Needs, ...]) -> FewKeys | None:
        """The exchange of a rank; None if the gathered keys of a rank are not in the order of the
        ranks that hold the keys. The answer is the same on all ranks."""
        if any(len(ranges) > 1 for ranges in layout.ranges):
            return None
        for of_rank in needs:
            found = [x for ranges in layout.ranges for x in shared_rows(ranges, of_rank.ranges)[1]]
            if len(found) > layout.world or any(a[1] != b[0] for a, b in pairwise(found)):
                return None
        return cls(layout, rank, needs)

    def takes(self, k: Tensor, v: Tensor) -> bool:
        """Whether the keys are few and k and v have a batch of 1. All ranks agree."""
        if k.shape[0] != 1:
            return False
        columns = k.shape[2] * (k.shape[3] + v.shape[3])
        return self.most_rows * columns * k.element_size() <= MOST_BYTES

    def gather(self, group: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Messages]:
        """Start to exchange keys. Returns memory of the gathered keys, `[rows, columns of K and
        V]`, and the messages."""
        _, rows, heads, dim = k.shape
        sizes = heads * dim, heads * v.shape[3]
        sent = k.new_empty(self.rows_shown, sum(sizes))
        if self.rows_shown:
            index = self._index.get(k.device)
            if index is None:
                index = self._index[k.device] = torch.tensor(self._packed).to(k.device)
            for x, to in zip((k, v), sent.split_with_sizes(sizes, 1), strict=True):
                torch.index_select(x.reshape(rows, -1), 0, index, out=to)
        memory = sent.new_empty(self.rows, sent.shape[1])
        return memory, exchange_rows(group, sent, self.shown, memory, self.received)

    def keys(self, memory: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The gathered K and V, `[1, rows, heads, dim]`; k and v are the rank's own."""
        _, _, heads, dim = k.shape
        size, row = memory.numel(), memory.shape[1]
        shape, dim_v = (1, self.rows, heads), v.shape[3]
        return (
            memory.as_strided((*shape, dim), (size, row, dim, 1)),
            memory.as_strided((*shape, dim_v), (size, row, dim_v, 1), heads * dim),
        )

    def give_back(
        self, group: Any, gathered: list[Tensor] | None, like: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Messages]:
        """Start to send gradients of gathered keys to the ranks that hold the keys. Returns memory
        of the parts of this rank's gradients, and the messages.

        Args:
            gathered: dK and dV in float32; None without gathered keys.
            like: the rank's own k and v.
        """
        columns = sum(x.shape[2] * x.shape[3] for x in like)
        if gathered is None:
            sent = like[0].new_empty(0, columns, dtype=torch.float32)
        else:
            sent = torch.cat([x.flatten(2)[0] for x in gathered], 1)
        parts = sent.new_empty(self.rows_shown, columns)
        return parts, exchange_rows(group, sent, self.received, parts, self.shown)

    def add(self, parts: Tensor, sums: list[Tensor], out: tuple[Tensor, Tensor]) -> None:
        """Write the sums of all parts of this rank's dK and dV to `out`: first `sums`, then the
        rank's part of gathered keys, then the other parts by rank. `sums` are overwritten."""
        if self.batches:
            of_sums = [x.flatten(2)[0] for x in sums]
            of_parts = parts.split_with_sizes([x.shape[1] for x in of_sums], 1)
            for batch in self.batches:
                torch._foreach_add_(
                    [x[a:b] for (a, b), _ in batch for x in of_sums],
                    [x[a:b] for _, (a, b) in batch for x in of_parts],
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


def _disjoint(parts: list[tuple[Range, Range]]) -> list[list[tuple[Range, Range]]]:
    """Parts in the same order, in batches in which no two first ranges overlap."""
    found: list[list[tuple[Range, Range]]] = []
    for part in parts:
        (start, end), _ = part
        if not found or any(start < b and a < end for (a, b), _ in found[-1]):
            found.append([])
        found[-1].append(part)
    return found
