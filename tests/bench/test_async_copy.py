"""The benchmark of copies: its sums notice wrong tiles, and its tables hold what was measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_attn.bench.__main__ import main
from cute_attn.bench.async_copy import cases, study
from cute_attn.bench.async_copy.cases import PARTS, Run, make_spec
from cute_attn.bench.async_copy.kda import differing
from cute_attn.bench.async_copy.machines import Gpu
from cute_attn.bench.async_copy.problem import (
    Tiles,
    WrongTiles,
    compare,
    expected_sums,
    in_shared_memory,
    make_memory,
    source_of,
)
from cute_attn.kernels.common.spec import smem_bytes

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
CPU = torch.device("cpu")
SPECS = [
    make_spec("cp_async", "sm_90a", rows=16),
    make_spec("tensor_swizzled", "sm_90a", rows=16, products=4),
    make_spec("tensor", "sm_90a", rows=16, producers=1, box=(8, 32), heads=2),
    make_spec("multicast", "sm_90a", rows=16, producers=1),
]


@given(spec=st.sampled_from(SPECS), data=st.data())
def test_one_wrong_element_is_noticed(spec: Any, data: st.DataObject) -> None:
    how = Tiles(4, 12, 3, 2)
    right = source_of(make_memory(12 * spec.tile_bytes, CPU, 1), spec, 12)
    wrong = right.clone().flatten()
    # The two streams take tiles 0, 2, 4 and 1, 3, 5.
    rows = 6 // spec.heads * spec.tile_rows
    element = data.draw(st.integers(0, right[:rows].numel() - 1))
    wrong[element] = -wrong[element] if wrong[element] else 1.0
    sums = expected_sums(spec, wrong.view_as(right), how)
    with pytest.raises(WrongTiles, match="wrong sums of CTAs"):
        compare(spec, how, sums, expected_sums(spec, right, how))


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1, 1), (0, 2)])
def test_checksums_notice_tiles_out_of_order_twice_and_missing(order: tuple[int, ...]) -> None:
    spec = SPECS[0]
    source = source_of(make_memory(3 * spec.tile_bytes, CPU, 1), spec, 3)
    right = expected_sums(spec, source, Tiles(1, 3, 3))
    other = source.unflatten(0, (3, -1))[list(order)].flatten(0, 1)
    assert not torch.equal(expected_sums(spec, other, Tiles(1, len(order), len(order))), right)


def test_the_swizzle_permutes_units_of_16_bytes() -> None:
    spec = make_spec("tensor_swizzled", "sm_90a", rows=16)
    source = torch.arange(16 * 128, dtype=torch.int16).view(torch.float16).view(16, 128)
    (tile,) = in_shared_memory(spec, source)
    boxes = tile.view(2, 16, 8, 8)
    for box, row, unit in ((0, 0, 3), (1, 5, 0), (1, 15, 7)):
        found = boxes[box, row, unit ^ (row % 8)]
        first = row * 128 + box * 64 + unit * 8
        assert found.tolist() == list(range(first, first + 8))


@pytest.mark.parametrize("arch", ARCHS)
def test_the_runs_fit_the_architecture(arch: str) -> None:
    for part, make in PARTS.items():
        runs = make(arch, False)
        assert set(make(arch, True)) <= set(runs), part
        assert len({run.labels for run in runs}) == len(runs)
        for run in runs:
            assert run.spec.smem_bytes <= smem_bytes(arch)
            assert cases.supported(run.spec.copy, arch)
            if part == "streams":
                assert run.spec.bytes_in_flight == run["in_flight_kib"] * 1024


class FakeGpu(Gpu):
    """Rates that depend on the run alone; no GPU."""

    arch = "sm_90a"

    def __init__(self, wrong: str = "") -> None:
        self.wrong, self.checked = wrong, 1

    def repeated(self, run: Run, count: int) -> float:
        return self.stream(run, "l2")

    def stream(self, run: Run, level: str) -> float:
        if run.spec.copy == self.wrong:
            raise WrongTiles("wrong sums of CTAs [0]")
        return float(run.spec.bytes_in_flight * (2 if level == "l2" else 1))

    def latency(self, run: Run, level: str) -> float:
        return float(run.spec.tile_bytes)

    def kda(self, tokens: int, heads: int) -> tuple[dict[str, float | None], list[str]]:
        return {"bulk, mma.sync": float(heads)}, ["kda differs"] if self.wrong == "kda" else []


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cute_attn.bench.async_copy.machines.registers", lambda spec, arch: 32)
    monkeypatch.setattr(
        study, "_ceilings", lambda gpu, runs: {"hbm_read_gbps": 1.0, "l2_read_gbps": 2.0}
    )


def report_of(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, *parts: str) -> Any:
    monkeypatch.setattr(study, "_machine", lambda args: gpu)
    args = argparse.Namespace(
        only=parts or study.EVERYTHING, emulate=False, short=False, argv=[], commit="c"
    )
    report = study.run(args)
    report.validate()
    return report


def test_the_tables(no_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(monkeypatch, FakeGpu())
    assert report.succeeded
    parts = {part.benchmark.removeprefix("async-copy-"): part.rows for part in report.parts}
    row = next(r for r in report.rows if r["source"] == "l2" and r["in_flight_kib"] == 64)
    assert row["tensor_gbps"] == 2 * 64 * 1024
    assert row["vector_gbps"] is None  # more than registers hold
    row = next(r for r in parts["repeated"] if (r["head_dim"], r["copy"]) == (256, "tensor"))
    assert (row["published_gbps"], row["gbps_to_tma_ratio"]) == (4646, 1.0)
    row = next(r for r in parts["products"] if r["how"] == "cp.async, by the same warps")
    assert row["l2_time_to_no_copies_ratio"] == 1.0
    assert {r["box_columns"] for r in parts["boxes"]} == {8, 16, 32, 64, 128}
    assert [r["time_us"] for r in parts["kda"]] == list(study.KDA_HEADS)
    assert (
        f"copies, products': 'bulk, mma.sync', 'time_us': {study.KDA_HEADS[-1]:.1f}"
        in (report.log[-1])
    )


def test_a_wrong_tile_fails_the_benchmark(
    no_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = report_of(monkeypatch, FakeGpu(wrong="bulk"), "streams", "repeated")
    assert not report.succeeded
    assert "wrong sums of CTAs [0]" in report.verdicts[0].detail
    assert all(row["bulk_gbps"] is None for row in report.rows)
    assert any(row["tensor_gbps"] is not None for row in report.rows)
    failed = [line for line in report.log if "FAILED: wrong sums of CTAs [0]" in line]
    assert len(failed) == len(report.verdicts[0].detail.split("; "))
    assert all("bulk" in line for line in failed) and len(failed) < len(report.log)


def test_other_bits_of_the_state_pass_fail_the_benchmark(
    no_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = report_of(monkeypatch, FakeGpu(wrong="kda"), "kda")
    assert not report.succeeded
    x = torch.ones(2)
    outputs = {"bulk, wgmma": x, "bulk, mma.sync": 2 * x, "cp.async, mma.sync": 2 * x}
    assert differing(outputs) == []
    (line,) = differing(outputs | {"cp.async, mma.sync": x})
    assert "with cp.async, mma.sync differs" in line
    assert len(differing({"bulk, mma.sync": x * torch.nan})) == 1


def test_emulated_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def few(arch: str, short: bool) -> list[Run]:
        return [run for run in cases.latency(arch, short) if run["tile_kib"] == 2][:2]

    monkeypatch.setitem(PARTS, "latency", few)
    path = tmp_path / "report.json"
    argv = ["async-copy", "--emulate", "--arch", "sm_80", "--only", "latency", "--short"]
    assert main([*argv, "--print-only", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    (part,) = report["parts"]
    assert [row["copy"] for row in part["rows"]] == ["vector", "cp_async"]
    assert all(row["consumer_instructions"] > 0 for row in part["rows"])
    assert any("sm_80 has no bulk, tensor" in note for note in report["notes"])
