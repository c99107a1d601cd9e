"""Calls in which sequences use a part of their tokens (`seqused_q`, `seqused_k`).

The numbers are on the device, and the host does not read them. So a plan's rectangles stay as they
are, and each call computes on the device how many rows of each rectangle are used.

Kernels align the last used query of a sequence with its last used key. If both numbers of every
sequence are equal, causal queries see the keys of the plan's rectangles. Otherwise queries may see
any keys of their sequence, so a rank gathers whole sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Layout, Pass, Range, token_of


class Used(NamedTuple):
    """The used tokens of each sequence of a plan, int32 `[sequences]`; None: all tokens."""

    queries: Tensor | None
    keys: Tensor | None

    @property
    def equal(self) -> bool:
        """Whether every sequence uses as many keys as queries, because one tensor says both."""
        return self.queries is not None and self.queries is self.keys


class UsedRows:
    """How many rows of each rectangle of a pass are used.

    Attributes:
        of: the pass.
        queries: int32 `[pieces, 4]`: for each piece of a rectangle's queries, its rectangle,
            sequence, first position, and number of tokens.
        keys: int32 `[rectangles, 4]`: the sequence, the position of the first query minus the
            position of the first key, the position of the first key, and the number of keys.
        lengths: int32 `[sequences]`: the plan's lengths.
    """

    def __init__(
        self, of: Pass, layout: Layout, held: tuple[Range, ...], gathered: tuple[Range, ...],
        device: torch.device,
    ) -> None:  # fmt: skip
        """`held` has the tokens of rows of queries, and `gathered` the tokens of rows of keys."""
        self.of = of
        queries, keys = [], []
        for number, r in enumerate(of.rectangles):
            first_key = token_of(gathered, r.k)
            sequence = bisect_right(layout.bounds, first_key) - 1
            start, row = layout.bounds[sequence], r.q
            while row < r.q_end:
                token = token_of(held, row)
                end = next(end for begin, end in held if begin <= token < end)
                count = min(r.q_end - row, end - token)
                queries.append((number, sequence, token - start, count))
                row += count
            past = token_of(held, r.q) - first_key
            keys.append((sequence, past, first_key - start, r.k_end - r.k))

        def table(rows: list[tuple[int, int, int, int]]) -> Tensor:
            return torch.tensor(rows, dtype=torch.int32).view(-1, 4).to(device)

        self.queries, self.keys = table(queries), table(keys)
        self.lengths = torch.tensor(layout.lengths, dtype=torch.int32).to(device)

    def counts(self, used: Used) -> tuple[Tensor, Tensor]:
        """The used rows of queries and of keys of each rectangle, int32 `[rectangles + 1]`. The
        last number is 0, for rows of no rectangle."""
        limit, none = self.lengths, torch.zeros_like(self.lengths)
        of_q, of_k = (limit if x is None else x.clamp(none, limit) for x in used)
        rectangle, sequence, position, most = self.queries.unbind(1)
        found = self.queries.new_zeros(len(self.keys) + 1)
        pieces = (of_q[sequence] - position).clamp(torch.zeros_like(most), most)
        queries = found.index_add(0, rectangle, pieces)
        sequence, past, position, most = self.keys.unbind(1)
        keys = of_k[sequence] - position
        if self.of.window.right == 0:  # align the last used query of the rectangle
            keys = queries[:-1] + past + of_k[sequence] - of_q[sequence]
        keys = keys.clamp(torch.zeros_like(most), most)
        return queries, torch.cat([keys, found[-1:]])


def takes(left: int | None, right: int | None) -> bool:
    """Whether modes that split tokens take a window with `seqused_q` or `seqused_k`. Other windows
    would differ between the sequences of one call."""
    return right == 0 or (left is None and right is None)
