"""Attention of DTensors, by two processes with gloo and an emulator each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)
pytest.importorskip("torch.distributed.tensor.experimental", exc_type=ImportError)

from tests.integrations import dtensor_worker

PROCESSES = 2


@pytest.mark.slow
@pytest.mark.parametrize("case", dtensor_worker.CASES)
def test_dtensors_agree_with_the_reference(case: str, tmp_path: Path):
    torch.multiprocessing.spawn(
        dtensor_worker.work, (PROCESSES, str(tmp_path / "rendezvous"), case), PROCESSES
    )


@pytest.mark.parametrize(
    ("shape_k", "packed", "ways"),
    [
        ((4, 16, 2, 64), False, ["replicated", "heads", "sequences"]),
        ((4, 16, 3, 64), False, ["replicated", "sequences"]),  # heads that devices do not divide
        ((64, 2, 64), True, ["replicated", "heads"]),
        ((64, 2, 64), False, ["replicated", "heads"]),  # packed keys alone
    ],
)
def test_ways_to_shard(shape_k: tuple[int, ...], packed: bool, ways: list[str]):
    """Of the forward: where q goes, and with it o."""
    from types import SimpleNamespace

    from cute_attn.integrations.torch_dtensor import _RESULTS, _rule

    def spec(shape: tuple[int, ...]) -> SimpleNamespace:
        return SimpleNamespace(
            shape=shape, placements=(), mesh=SimpleNamespace(size=lambda: PROCESSES)
        )

    operator = torch.ops.cute_attn.flash_attn.default
    q, k = spec((64, 6, 64) if packed else (4, 16, 6, 64)), spec(shape_k)
    bounds = spec((5,))
    found = _rule(operator, _RESULTS["flash_attn"])(q, k, k, bounds if packed else None, bounds)
    heads = {True: "S(1)", False: "S(2)"}[packed]
    names = {"R": "replicated", heads: "heads", "S(0)": "sequences"}
    assert [names[str(results[0])] for results, _ in found] == ways
    for results, arguments in found:
        assert results[0] == arguments[0]
        assert [x is None for x in arguments] == [False, False, False, not packed, False]
        assert str(arguments[4]) == "R"
