"""The tables of the FMHA ladder's benchmark, and a run in the emulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cute_attn.bench.__main__ import main
from cute_attn.bench.harness.output import write_report
from cute_attn.bench.harness.report import Report
from cute_attn.bench.ladder import fmha, problem
from cute_attn.kernels.ladder import heuristics
from cute_attn.kernels.ladder.table import find

# A kernel that tests/kernels/test_ladder.py has too.
SMALL = ("--tile-m=32", "--tile-n=16", "--num-warps=2", "--head-dim=64", "--dtype=bfloat16")


def timed(tflops: float) -> dict[str, object]:
    return {"step": "", "latency_ms": 1.0, "tflops": tflops}


def test_gains_are_over_the_last_step_that_was_timed():
    names = ["0_pytorch", "1_basic", "2_math", "3_memory"]
    table = {"0_pytorch": timed(50.0), "1_basic": timed(100.0), "3_memory": timed(150.0)}
    assert fmha.impact_row(1024, table, names) == {
        "seqlen": 1024,
        "1_basic_pct": None,
        "2_math_pct": None,
        "3_memory_pct": 50.0,
        "speedup_vs_first": 1.5,
    }
    assert fmha.performance_row(1024, table, names)["2_math_tflops"] is None
    assert fmha.with_speedup(table["1_basic"], table["0_pytorch"])["speedup_vs_pytorch"] == 2.0


def test_targets_are_judged_from_4096_on_and_only_with_the_peer():
    table = {"4_full": timed(80.0), "5_swizzle": timed(91.0), "flash-attention-2": timed(100.0)}
    found = fmha.verdicts({1024: table, 4096: table}, "sm_90a")
    assert [(v.name[:18], v.passed) for v in found] == [
        ("S=4096: step 4 or ", True),
        ("S=4096: step 10 at", None),
    ]
    table["5_swizzle"] = timed(89.0)
    (portable,) = fmha.verdicts({4096: table}, "sm_80")
    assert portable.passed is False and portable.detail == "0.890x"


def test_a_report_has_all_tables_and_files(tmp_path: Path):
    arguments = fmha.argparse.Namespace(causal=True, steps=[0, 1])
    names = (
        "config",
        "tile_m",
        "tile_n",
        "num_warps",
        "occupancy",
        "k_stages",
        "v_stages",
        "swizzled",
    )
    vars(arguments).update(dict.fromkeys(names), dtype="float16", head_dim=128)
    ladder = fmha.Ladder(arguments, "sm_90a", [find(0), find(1)])
    case = problem.Case(4, 32, 1024, 128, True, "float16")
    row = {"step": "1_basic", "latency_ms": 1.0, "tflops": 34.4, "error_ratio": 0.9}
    report = ladder.report([case], {1024: {"1_basic": row}})
    report.log = ["12:00:00 S=1024 1_basic"]
    report.environment = {"gpu": "Test", "date": "2026-11-22"}
    titles = [part.title for part in report.parts]
    assert titles[0] == "Sequence length 1024"
    assert titles[1].startswith("Optimization impact")
    assert titles[2] == "Published by others, not measured here"
    (path,) = write_report(report, tmp_path)
    assert Report.from_json(path.read_text()).to_json() == report.to_json()


def test_flops_of_a_causal_case_are_half():
    case = problem.Case(4, 32, 1024, 128, True, "float16")
    assert case.flops == 4 * 4 * 32 * 1024**2 * 128 / 2
    assert case.tflops(1e3) == pytest.approx(34.36, rel=1e-3)


def test_a_wrong_step_is_reported_and_a_right_one_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    step = problem.Problem.step

    def wrong(self, which, spec):
        call = step(self, which, spec)
        return (lambda: call().mul_(1.01)) if which.number == 1 else call

    monkeypatch.setattr(problem.Problem, "step", wrong)
    out = tmp_path / "out.json"
    sizes = ("--seqlens", "20", "--steps", "1", *SMALL)
    code = main(["fmha-ladder", "--emulate=sm_80", *sizes, "--print-only", "--json", str(out)])
    assert code == 1
    document = json.loads(out.read_text())
    assert document["rows"] == []
    assert "1_basic FAILED: Disagreement: 1_basic has" in document["notes"][0]

    monkeypatch.undo()
    code = main(["fmha-ladder", "--emulate=sm_80", *sizes, "--print-only", "--json", str(out)])
    assert code == 0
    document = json.loads(out.read_text())
    (row,), (loop,) = document["rows"], document["parts"][0]["rows"]
    assert row["error_ratio"] <= 2 and row["bank_conflicts_ratio"] > 4
    # A warp's 16 rows: 2 times 4 MMAs for 16 keys and 64 columns, then 8 for 8 blocks of columns.
    assert loop["mma"] == 16 and row["mma"] == 4 * 16
    assert any("1_basic" in line for line in document["log"])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"])
@pytest.mark.parametrize("step", [1, 3, 4])
def test_every_target_has_a_configuration_that_fits(arch: str, step: int):
    spec = heuristics.spec_of(step, arch)
    limit = heuristics.smem_bytes(arch)
    assert spec.smem_bytes <= limit
    assert spec.k_stages in (1, 2) and spec.v_stages in (1, 2, 4)
    if step >= heuristics.OCCUPANCY:
        of_one = spec.smem_bytes + heuristics.RESERVED_BYTES
        assert of_one * spec.occupancy <= limit + heuristics.RESERVED_BYTES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--emulate", "sm_70"), "compute capability 7.0 is not supported"),
        (("--emulate", "hopper"), "'hopper' is not an architecture"),
        (("--seqlens", "0"), "0 is not at least 1"),
        (("--steps", "99"), "invalid choice: 99"),
        (("--config", "sm_70"), "invalid choice: 'sm_70'"),
    ],
)
def test_bad_options_are_refused(
    options: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        main(["fmha-ladder", *options])
    assert message in capsys.readouterr().err


def test_an_unknown_configuration_is_refused():
    with pytest.raises(ValueError, match="config is 'sm_70', must be one of"):
        heuristics.spec_of(1, "sm_90a", config="sm_70")
    with pytest.raises(ValueError, match="tile_m is 48, must be one of"):
        heuristics.spec_of(1, "sm_90a", tile_m=48)
    with pytest.raises(ValueError, match="tile_m is 64, must be a multiple of 16 rows for each"):
        heuristics.spec_of(1, "sm_90a", tile_m=64, num_warps=8)
    with pytest.raises(ValueError, match="tile_n is 32, must be a multiple of 64 to swizzle the t"):
        heuristics.spec_of(1, "sm_90a", tile_n=32, swizzled=True)
    with pytest.raises(
        ValueError, match="tile_n is 16, must be a multiple of the 32 rows that 8 w"
    ):
        heuristics.spec_of(3, "sm_90a", tile_n=16, num_warps=8, head_dim=64)
    with pytest.raises(ValueError, match="step is 99, must be one of"):
        find(99)
