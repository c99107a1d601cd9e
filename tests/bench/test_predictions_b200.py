"""Whole launches of a B200 from reduced ones; the kernels themselves take minutes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cute_attn.bench.launch_times import blackwell
from cute_attn.bench.launch_times.blackwell import Piece, cases


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Predictions of 10 us and 3 us for each unit of work, of an empty kernel of 1 us."""
    asked: list[Any] = []

    def predict(recordings: list[Any], *, gpu: str, whole: Any) -> list[Any]:
        asked.append(whole)
        return [SimpleNamespace(us=10.0 + 3.0 * recordings[0])]

    from cute_attn import timing
    from cute_attn.timing.blackwell import Blackwell

    monkeypatch.setattr(timing, "predict", predict)
    monkeypatch.setattr(Blackwell, "launch_us", lambda self, ctas: 1.0)
    return asked


def test_two_reduced_launches_give_the_time_of_a_unit(predicted: list[Any]) -> None:
    """9 + 3 x 100 us for a cluster, four of them one after the other, and one start."""
    piece = Piece(1, lambda work: [None, work], (2, 4), 100, rounds=4, readers=8)  # type: ignore[list-item]
    assert piece.us() == pytest.approx(1 + 4 * (9 + 3 * 100))
    assert [(whole.ctas, whole.readers) for whole in predicted] == [(148, 8), (148, 8)]


def test_one_reduced_launch_stands_for_all_ctas(predicted: list[Any]) -> None:
    piece = Piece(0, lambda work: [work], (2,), 0, ctas=4096)  # type: ignore[list-item]
    assert piece.us() == pytest.approx(16)
    assert predicted[0].ctas == 4096


def test_every_call_of_ours_has_one_of_flash_attention_4() -> None:
    """The error at FlashAttention-4's published rates is the error to expect at ours."""
    found = cases()
    theirs = {case.name: case for case in found if case.who != "cute_attn"}
    assert all(case.published and case.source for case in theirs.values())
    for case in found:
        if case.who == "cute_attn":
            name = case.name.removesuffix(", static").removesuffix(", clc")
            assert theirs[name].tflop == case.tflop
            assert case.published is None


def test_flops_of_a_call() -> None:
    """Two products of 2 S S D for each head, and five with gradients, half of it if causal."""
    tflop = {case.name: case.tflop for case in cases()}
    one = 2 * 8192**2 * 128 * 64 * 1e-12
    assert tflop["forward, head_dim 128, 4 x 8192, 16 heads"] == pytest.approx(2 * one)
    causal = "backward, head_dim 256, causal, 1 x 8192, 32/2 heads"
    assert tflop[causal] == pytest.approx(5 * 2 * 8192**2 * 256 * 32 / 2 * 1e-12)


def test_requests_cover_the_reduced_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of FlashAttention-4 is captured at once, before the first call."""
    captured: set[Any] = set()

    def theirs(*shape: int, backward: bool = False) -> list[Any]:
        captured.add(blackwell._request(*shape, backward))
        return []

    monkeypatch.setattr(blackwell, "_theirs", theirs)
    for case in cases():
        if case.who != "cute_attn":
            for piece in case.pieces:
                for work in piece.work:
                    piece.record(work)
    assert captured == set(blackwell._requests())
