"""The pages of results, and that those committed are what the command makes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cute_attn.bench.__main__ import main
from cute_attn.bench.harness.output import path_of, write_report
from cute_attn.bench.harness.pages import COMMAND, folders, page, read, write_pages
from cute_attn.bench.harness.plot import chosen, fingerprint, fingerprint_in
from cute_attn.bench.harness.report import Report, ReportError

from .test_report import make_report, needs_matplotlib

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs/benchmarks"
FOLDERS = folders(RESULTS)
KEPT = sorted(RESULTS.glob("*/*.json"))


# ---- those committed


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_page_is_what_the_command_makes(folder):
    assert folder.with_suffix(".md").read_text() == page(folder), COMMAND


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_report_lies_where_its_next_run_goes_and_names_what_it_was_measured_with(path):
    report = Report.from_json(path.read_text())
    assert path_of(report, RESULTS) == path
    facts = {"cpu", "python", "torch", "nvidia-cutlass-dsl", "date", "commit", "command"}
    if report.machine != "no-gpu":
        facts |= {"gpu", "driver", "cuda"}
    assert facts <= set(report.environment)
    picture = path.with_suffix(".png")
    assert picture.exists() == bool(chosen(report)), COMMAND
    if picture.exists():
        assert fingerprint_in(picture) == fingerprint(report), COMMAND


def test_nothing_else_is_there():
    found = {path for path in RESULTS.rglob("*") if path.is_file()}
    expected = {RESULTS / "index.md", *(folder.with_suffix(".md") for folder in FOLDERS)}
    assert {path.with_suffix(".json") for path in found - expected} == set(KEPT)
    assert {path.suffix for path in found - expected} == {".json", ".png"}
    assert {folder.name for folder in FOLDERS} == {"h100", "h200", "no-gpu"}


def test_the_index_links_to_every_page():
    index = (RESULTS / "index.md").read_text()
    assert [folder.name for folder in FOLDERS if f"({folder.name}.md)" not in index] == []


# ---- how they are made


def test_a_new_run_and_the_command_are_all(tmp_path):
    first = make_report(plots=[])
    write_report(first, tmp_path)
    write_report(make_report(tag="kv", plots=[], environment={"cpu": "C"}), tmp_path)
    pages = write_pages(tmp_path)
    assert pages == [tmp_path / "h100.md", tmp_path / "no-gpu.md"]
    text = pages[0].read_text()
    assert "# Results on NVIDIA H100 80GB\n" in text
    assert "| [toy](#toy) | A toy | 2026-11-20 | - |" in text
    assert "## toy\n" in text and "(h100/toy.json)" in text and "toy-kv" not in text
    assert "# Results without a GPU\n" in pages[1].read_text()

    rows = [{**row, "time_us": 4.125} for row in first.rows]
    write_report(make_report(plots=[], rows=rows), tmp_path)
    assert main(["pages", "--out", str(tmp_path)]) == 0
    again = pages[0].read_text()
    assert again.count("| 4.125 |") == 2 and again.count("5.25") == 0
    assert text.count("## ") == again.count("## ")


def test_reports_of_another_machine_are_kept_first(tmp_path):
    source = tmp_path / "run.json"
    source.write_text(make_report(plots=[]).to_json())
    out = tmp_path / "out"
    assert main(["pages", str(source), "--out", str(out)]) == 0
    assert (out / "h100/toy.json").read_text() == source.read_text()
    assert (out / "h100.md").exists()


def test_runs_of_other_cases_become_one_report(tmp_path):
    first = make_report(plots=[])
    command = first.environment | {"command": "y", "date": "2026-11-20 10:05 UTC"}
    other = make_report(
        plots=[], environment=command, rows=[first.rows[0] | {"batch": 64}],
        roofline={"copy_gbps": 3001.0}, notes=["a note", "another"], verdicts=[],
    )  # fmt: skip
    sources = [tmp_path / name for name in ("a.json", "b.json")]
    for source, report in zip(sources, (first, other), strict=True):
        source.write_text(replace(report, tag="part").to_json())
    out = tmp_path / "out"
    assert main(["pages", *map(str, sources), "--out", str(out)]) == 0
    (found,) = read(out / "h100")
    assert found.stem == "toy"
    assert [row["batch"] for row in found.rows] == [1, 8, 64]
    assert found.environment == first.environment | {"command": "x; y"}
    ceilings = "Ceilings during `y`: copy_gbps 3001"
    assert found.notes == ["a note", "another", ceilings]
    assert found.verdicts == first.verdicts and found.roofline == first.roofline

    for changes, message in (
        ({"tag": "kv"}, "names differ"),
        ({"environment": command | {"gpu": "B200"}}, "environments differ"),
        ({"rows": [{"batch": 1, "time_us": 5.0}]}, "columns differ"),
    ):
        with pytest.raises(ReportError, match=message):
            first.joined(make_report(plots=[], **changes))


def test_short_runs_show_what_has_no_report_of_its_own(tmp_path):
    parts = [make_report(benchmark=name, tag="short", plots=[]) for name in ("toy", "other")]
    write_report(make_report(plots=[]), tmp_path)
    write_report(make_report(benchmark="gpu-check", parts=parts, plots=[]), tmp_path)
    (made,) = write_pages(tmp_path)
    headings = [line for line in made.read_text().splitlines() if line.startswith("##")]
    assert headings == ["## gpu-check", "## toy", "## other-short"]


@needs_matplotlib
def test_plots_are_drawn_where_they_are_out_of_date(tmp_path):
    write_report(make_report(), tmp_path)
    picture = tmp_path / "h100/toy.png"
    write_pages(tmp_path)
    assert "![A toy](h100/toy.png)" in (tmp_path / "h100.md").read_text()
    (report,) = read(tmp_path / "h100")
    assert fingerprint_in(picture) == fingerprint(report)
    drawn = picture.stat().st_mtime_ns
    write_pages(tmp_path)
    assert picture.stat().st_mtime_ns == drawn
    write_report(make_report(title="A new toy"), tmp_path)
    write_pages(tmp_path)
    assert picture.stat().st_mtime_ns > drawn
    write_report(make_report(plots=[]), tmp_path)
    write_pages(tmp_path)
    assert not picture.exists() and "![" not in (tmp_path / "h100.md").read_text()


def test_without_matplotlib_the_page_has_no_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_report(make_report(), tmp_path)
    (made,) = write_pages(tmp_path)
    assert "![" not in made.read_text()
    assert "no plot" in capsys.readouterr().err
