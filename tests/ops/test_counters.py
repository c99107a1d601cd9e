"""Counters of launches in CUDA graphs; tests/gpu has the graphs."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from cute_attn.ops import counters


def test_each_launch_in_a_graph_has_a_counter_of_its_own(monkeypatch: pytest.MonkeyPatch):
    x = torch.empty(3)
    spare = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(counters, "_spare", {0: [spare]})
    found = [counters._of_graph(x, 0, 1) for _ in range(3)]
    for count, counter in enumerate(found, 1):
        assert counter.shape == (1,) and counter.item() == 0
        counter.fill_(count)
    assert [int(counter) for counter in found] == [1, 2, 3]
    # The first two were set to 0 before the capture, and the last one in the graph.
    assert spare.tolist() == [1, 2]
    assert counters._of_graph(x, 1, 1).tolist() == [0]  # a device without a launch before


def test_a_launch_in_a_graph_may_have_several_counters(monkeypatch: pytest.MonkeyPatch):
    x = torch.empty(3)
    spare = torch.zeros(5, dtype=torch.int32)
    monkeypatch.setattr(counters, "_spare", {0: [spare]})
    for number in (1, 2):
        counters._of_graph(x, 0, 3).fill_(number)
    assert spare.tolist() == [1, 1, 1, 0, 0]  # two are too few for the second launch


def test_threads_that_capture_at_once_share_no_counter(monkeypatch: pytest.MonkeyPatch):
    both = threading.Barrier(2)

    class Meeting(list[torch.Tensor]):
        """Where two threads may read the spare counters, they both do before one goes on."""

        def __getitem__(self, i: Any) -> Any:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)
            return super().__getitem__(i)

    monkeypatch.setattr(counters, "_spare", {0: Meeting([torch.zeros(4, dtype=torch.int32)])})
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: counters._of_graph(torch.empty(1), 0, 1), range(2)))
    assert found[0].data_ptr() != found[1].data_ptr()
