"""The exchange of few keys, in one process: every rank's rows, and its sums of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn.distributed import few_keys
from cute_attn.distributed.exchange import Messages
from cute_attn.distributed.few_keys import FewKeys
from cute_attn.distributed.layout import Layout, Window, shared_rows


class Group:
    """Rows that ranks have sent to other ranks, which one process moves when all have sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Tensor, list[int], Tensor, list[int]]] = []
        monkeypatch.setattr(few_keys, "exchange_rows", self.exchange)

    def exchange(
        self, _: Any, sent: Tensor, to: list[int], memory: Tensor, of: list[int]
    ) -> Messages:
        assert sent.is_contiguous() and memory.is_contiguous()
        self.calls.append((sent, to, memory, of))
        return Messages([], None)

    def move(self) -> None:
        messages = [sent.split(to) for sent, to, _, _ in self.calls]
        for rank, (_, _, memory, of) in enumerate(self.calls):
            for part, other in zip(memory.split(of), messages, strict=True):
                part.copy_(other[rank])
        self.calls.clear()


CASES = {
    "causal": ((40,), Window(5, 0)),
    "long": ((40,), Window(23, 0)),  # over several ranks
    "both": ((40,), Window(3, 4)),
    "right": ((40,), Window(None, 2)),
    "all": ((40,), Window(None, None)),
    "packed": ((13, 0, 22, 5), Window(6, 0)),
    "packed both": ((3, 30, 1, 6), Window(2, 3)),
    "short": ((2,), Window(5, 0)),  # ranks without tokens
}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_rows_and_sums(monkeypatch: pytest.MonkeyPatch, case: str, world: int) -> None:
    lengths, window = CASES[case]
    layout, group = Layout.of("contiguous", lengths, world), Group(monkeypatch)
    needs = tuple(layout.needs(rank, window) for rank in range(world))
    k, v = torch.randn(1, layout.total, 2, 4), torch.randn(1, layout.total, 2, 3)
    own = [[x[:, a:b] for x in (k, v)] for ((a, b),) in layout.ranges]
    found = [FewKeys.of(layout, rank, needs) for rank in range(world)]
    few = [x for x in found if x is not None]
    assert len(few) == world and len({x.most_rows for x in few}) == 1
    memories = [x.gather(None, *of_rank)[0] for x, of_rank in zip(few, own, strict=True)]
    group.move()
    seen = [x.keys(memory, k, v) for x, memory in zip(few, memories, strict=True)]
    for of_rank, pair in zip(needs, seen, strict=True):
        tokens = torch.tensor([i for a, b in of_rank.ranges for i in range(a, b)], dtype=torch.long)
        assert all(torch.equal(x, y[:, tokens]) for x, y in zip(pair, (k, v), strict=True))
    # Integers, so that sums do not depend on an order.
    gradients = [[torch.randint(9, x.shape).float() for x in pair] for pair in seen]
    parts = [
        x.give_back(None, of_keys if of_keys[0].shape[1] else None, (k, v))[0]
        for x, of_keys in zip(few, gradients, strict=True)
    ]
    group.move()
    for rank, x in enumerate(few):
        sums = [torch.randint(9, y.shape).float() for y in own[rank]]
        expected = [y.clone() for y in sums]
        for of_rank, of_keys in zip(needs, gradients, strict=True):
            of_own, gathered = shared_rows(layout.ranges[rank], of_rank.ranges)
            for (a, b), (c, d) in zip(of_own, gathered, strict=True):
                for y, part in zip(expected, of_keys, strict=True):
                    y[:, a:b] += part[:, c:d]
        out = torch.empty_like(own[rank][0]), torch.empty_like(own[rank][1])
        x.add(parts[rank], sums, out)
        assert all(torch.equal(y, z) for y, z in zip(out, expected, strict=True))


def test_other_layouts_have_no_such_exchange() -> None:
    for layout in ("zigzag", [[(20, 40)], [(0, 20)]]):
        of_ranks = Layout.of(layout, (40,), 2)
        needs = tuple(of_ranks.needs(rank, Window(None, None)) for rank in range(2))
        assert all(FewKeys.of(of_ranks, rank, needs) is None for rank in range(2))
