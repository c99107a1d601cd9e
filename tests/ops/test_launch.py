"""How many clusters a launch gets."""

from __future__ import annotations

import pytest
import torch

import cute_attn
from cute_attn import launch
from cute_attn.cache.driver import DriverError
from cute_attn.emulator import Emulator

GPU = torch.device("cuda", 0)


@pytest.fixture
def sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "num_sms", lambda _: 148)


@pytest.mark.parametrize(("answer", "clusters"), [(35, 35), (0, 1), (99, 37)])
def test_as_many_as_the_driver_says(
    sms: None, monkeypatch: pytest.MonkeyPatch, answer: int, clusters: int
):
    monkeypatch.setattr(launch, "_resident_clusters", lambda *_: answer)
    assert launch.num_clusters(GPU, 4) == clusters
    assert launch.num_clusters(GPU, 1) == 148


def test_as_many_as_sms_hold_without_an_answer(sms: None, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> int:
        raise DriverError("cuOccupancyMaxActiveClusters failed")

    monkeypatch.setattr(launch, "_resident_clusters", fail)
    assert launch.num_clusters(GPU, 4) == 37


def test_in_the_emulator():
    cpu = torch.device("cpu")
    with cute_attn.emulated("sm_100a", Emulator(num_sms=7)):
        assert [launch.num_clusters(cpu, size) for size in (1, 2, 4, 8)] == [7, 3, 1, 1]
