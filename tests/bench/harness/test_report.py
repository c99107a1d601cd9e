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


def test_markdown_holds_the_table_the_verdicts_and_the_machine():
    text = make_report(parts=[make_report(title="Part")]).to_markdown("toy.png")
    lines = text.splitlines()
    assert lines[0] == "# A toy"
    assert "| batch | mode | time_us | share_of_copy | fla_us |" in lines
    assert "| ---: | --- | ---: | ---: | ---: |" in lines
    assert "| 1 | graph | 5.25 | 0.5 | - |" in lines
    assert "- met: fast (5x)" in lines
    assert "- MISSED: steady (no)" in lines
    assert "- copy_gbps: 3020" in lines
    assert "- gpu: NVIDIA H100 80GB" in lines
    assert "![A toy](toy.png)" in lines
    assert "## Part" in lines
    assert not any("matmul" in line for line in lines)


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


def test_files_are_named_for_benchmark_machine_and_date(tmp_path):
    paths = write_report(make_report(plots=[]), tmp_path)
    assert [path.name for path in paths] == [
        "toy-nvidia-h100-80gb-2026-11-20.json",
        "toy-nvidia-h100-80gb-2026-11-20.md",
    ]
    assert json.loads(paths[0].read_text())["rows"][1]["fla_us"] == 88.0


def test_the_log_is_a_file(tmp_path):
    *_, path = write_report(make_report(plots=[], log=["10:00 a", "10:01 b"]), tmp_path)
    assert path.suffix == ".log" and path.read_text() == "10:00 a\n10:01 b\n"


def test_a_waterfall_is_of_one_row(tmp_path):
    waterfall = Plot("batch", ("time_us", "fla_us"), "w", "us", {"batch": 8}, kind="waterfall")
    paths = write_report(make_report(plots=[waterfall]), tmp_path)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths if path.suffix == ".png")
    assert Report.from_json(paths[0].read_text()).plots == [waterfall]
    for wrong, message in (({"where": {}}, "shows one row"), ({"kind": "pie"}, "kind 'pie'")):
        with pytest.raises(ReportError, match=message):
            make_report(plots=[replace(waterfall, **wrong)]).validate()


@needs_matplotlib
def test_the_plot_is_drawn_and_linked(tmp_path):
    _, markdown, picture = write_report(make_report(), tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"({picture.name})" in markdown.read_text()


def test_no_plot_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    paths = write_report(make_report(), tmp_path)
    assert [path.suffix for path in paths] == [".json", ".md"]
    assert "![" not in paths[1].read_text()
    assert "no plot" in capsys.readouterr().err


def test_render_makes_the_files_again(tmp_path, capsys):
    source = tmp_path / "in.json"
    table = make_report(benchmark="table", environment={})  # of this run, so no file of its own
    parts = [make_report(benchmark="part", tag="kv"), table]
    source.write_text(make_report(parts=parts).to_json())
    assert main(["render", str(source), "--out", str(tmp_path / "out")]) == 0
    again = tmp_path / "out" / "toy-nvidia-h100-80gb-2026-11-20.json"
    assert again.read_text() == source.read_text()
    assert (tmp_path / "out" / "part-kv-nvidia-h100-80gb-2026-11-20.md").exists()
    assert not list((tmp_path / "out").glob("table*"))
    assert f"wrote {again}" in capsys.readouterr().out


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
