import importlib.util
import json
import sys
from dataclasses import replace

import pytest

from cute_attn.bench.__main__ import main
from cute_attn.bench.harness import environment
from cute_attn.bench.harness.output import write_report
from cute_attn.bench.harness.report import (
    Plot,
    Report,
    ReportError,
    Verdict,
    format_value,
    plain_table,
    print_table,
)
from cute_attn.environment import version_of

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def make_report(**changes):
    fields = {
        "benchmark": "toy",
        "title": "A toy",
        "environment": {"gpu": "NVIDIA H100 80GB", "date": "2026-11-20 10:00 UTC", "command": "x"},
        "parameters": {"heads": 4, "kernels": ["a", "b"]},
        "roofline": {"copy_gbps": 3020.25, "matmul_tflops": None},
        "rows": [
            {"batch": 1, "mode": "graph", "time_us": 5.25, "share_of_copy": 0.5, "fla_us": None},
            {"batch": 8, "mode": "graph", "time_us": 25.5, "share_of_copy": 0.9, "fla_us": 88.0},
        ],
        "verdicts": [Verdict("fast", True, "5x"), Verdict("steady", False, "no")],
        "notes": ["a note"],
        "plots": [
            Plot("batch", ("time_us", "fla_us"), "time", "us", {"mode": "graph"}, log_x=True)
        ],
    }
    return Report(**{**fields, **changes})


def test_json_round_trip():
    report = make_report(parts=[make_report(benchmark="part", succeeded=False)])
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"batch": 2}, "columns"),
        ({"batch": 2, "time_us": float("nan")}, "time_us is nan"),
        ({"batch": 2, "time_us": float("inf")}, "time_us is inf"),
        ({"batch": 2, "time_us": [1.0]}, "list"),
    ],
)
def test_rows_that_mislead_are_refused(row, message, tmp_path):
    report = make_report(rows=[{"batch": 1, "time_us": 1.0}, row], plots=[])
    with pytest.raises(ReportError, match=message):
        write_report(report, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_fractional_number_needs_a_unit():
    with pytest.raises(ReportError, match="speed has no unit"):
        make_report(rows=[{"speed": 1.5}], plots=[]).to_json()
    make_report(rows=[{"speed": 1.5, "unit": "m/s"}], plots=[]).to_json()
    make_report(rows=[{"speedup_vs_fla": 1.5, "warps": 4}], plots=[]).to_json()


def test_a_plot_of_no_column_is_refused():
    with pytest.raises(ReportError, match="a plot of nothing_us"):
        make_report(plots=[Plot("batch", ("nothing_us",), "", "us")]).validate()


@pytest.mark.parametrize(
    "change", [{"schema": 99}, {"colour": "red"}, {"verdicts": [{"name": "x"}]}]
)
def test_a_foreign_document_is_refused(change):
    with pytest.raises(ReportError):
        Report.from_dict({**make_report().to_dict(), **change})


def test_markdown_holds_the_table_the_missed_targets_and_the_machine():
    parts = [make_report(title="Part", environment={}), make_report(title="Another run")]
    lines = make_report(parts=parts).to_markdown("toy", "toy.png").splitlines()
    assert lines[:4] == ["## toy", "", "**A toy**", ""]
    assert "`x`" in lines and "gpu NVIDIA H100 80GB, date 2026-11-20 10:00 UTC" in lines
    assert "| batch | mode | time_us | share_of_copy | fla_us |" in lines
    assert "| ---: | --- | ---: | ---: | ---: |" in lines
    assert "| 1 | graph | 5.25 | 0.5 | - |" in lines
    assert "Targets: 1 of 2 are met." in lines
    assert "- MISSED: steady (no)" in lines
    assert "- copy_gbps: 3020" in lines
    assert "![A toy](toy.png)" in lines
    assert "### Part" in lines
    assert not any("matmul" in line or "Another" in line for line in lines)


def test_cells():
    values = (None, True, 3, 0.97123, 5.25, 3020.25, 123456.0, ["a", 1])
    assert [format_value(value) for value in values] == [
        "-", "yes", "3", "0.9712", "5.25", "3020", "123456", "a, 1",
    ]  # fmt: skip


def test_plain_table_is_aligned():
    rows = [{"name": "a", "time_us": 1.5}, {"name": "longer", "time_us": 12.0}]
    assert plain_table(["name", "time_us"], rows).splitlines() == [
        "name    time_us",
        "a           1.5",
        "longer       12",
    ]


def test_tables_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    make_report().print()
    out = capsys.readouterr().out
    assert "batch  mode" in out
    assert "[MISSED] steady: no" in out


def test_rich_tables_are_not_wrapped_in_a_pipe(capsys):
    columns = [f"column_{i}_us" for i in range(20)]
    print_table("wide", columns, [dict.fromkeys(columns, 1.0)])
    assert any(all(c in line for c in columns) for line in capsys.readouterr().out.splitlines())


def test_a_run_writes_over_the_last_one_of_its_machine(tmp_path):
    (last,) = write_report(make_report(), tmp_path)
    assert last == tmp_path / "h100/toy.json"
    rows = [{**make_report().rows[0], "time_us": 4.5}]
    environment = make_report().environment | {"date": "2026-11-21 10:00 UTC", "driver": "1"}
    assert write_report(make_report(rows=rows, environment=environment), tmp_path) == [last]
    assert json.loads(last.read_text())["rows"][0]["time_us"] == 4.5
    tagged = make_report(tag="Short KV", environment={"gpu": "NVIDIA H200"})
    assert write_report(tagged, tmp_path) == [tmp_path / "h200/toy-short-kv.json"]
    assert len(list(tmp_path.rglob("*.*"))) == 2


def test_a_report_of_nothing_but_runs_is_kept_as_these(tmp_path):
    runs = [make_report(benchmark=name) for name in ("one", "two")]
    whole = make_report(rows=[], plots=[], parts=runs)
    assert write_report(whole, tmp_path) == [tmp_path / "h100/one.json", tmp_path / "h100/two.json"]
    table = make_report(benchmark="table", environment={})
    assert write_report(make_report(parts=[table]), tmp_path) == [tmp_path / "h100/toy.json"]


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm4"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 5090", "geforce-rtx-5090"),
        (None, "no-gpu"),
    ],
)
def test_machines_have_short_names(gpu, machine):
    environment = {"cpu": "C"} if gpu is None else {"cpu": "C", "gpu": gpu}
    assert make_report(environment=environment).machine == machine


def test_a_waterfall_is_of_one_row(tmp_path):
    waterfall = Plot("batch", ("time_us", "fla_us"), "w", "us", {"batch": 8}, kind="waterfall")
    (path,) = write_report(make_report(plots=[waterfall]), tmp_path)
    assert Report.from_json(path.read_text()).plots == [waterfall]
    for wrong, message in (({"where": {}}, "shows one row"), ({"kind": "pie"}, "kind 'pie'")):
        with pytest.raises(ReportError, match=message):
            make_report(plots=[replace(waterfall, **wrong)]).validate()


def test_the_command_leaves_out_where_results_go():
    argv = [
        "toy",
        "--short",
        "--json",
        "a.json",
        "--out=/x",
        "--batches",
        "1",
        "2",
        "--commit",
        "c",
    ]
    assert environment.command_line(argv) == "python -m cute_attn.bench toy --short --batches 1 2"


def test_environment_on_this_machine():
    facts = environment.describe(["toy"], commit="abc")
    assert facts["commit"] == "abc"
    assert facts["cute-attn"] == version_of("cute-attn")
    assert facts["python"] == sys.version.split()[0]
    assert None not in facts.values()


def test_a_distribution_that_is_not_installed_has_no_version():
    assert version_of("no-such-distribution-anywhere") is None


def test_a_gpu_benchmark_is_refused_without_one(capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["lightning-decode", "--short"]) == 3
    assert "needs a CUDA device" in capsys.readouterr().err
