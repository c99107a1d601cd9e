"""The names of lines and axes, the places of plots, and the committed pictures."""

import json
import sys
from functools import cache
from pathlib import Path

import pytest

from cute_attn.bench.harness.plot import (
    OURS,
    chosen,
    columns_of,
    draw,
    fingerprint,
    fingerprint_in,
    series,
)
from cute_attn.bench.harness.report import Plot, Report
from cute_attn.families import FAMILIES
from docs import page_plots

from .test_report import make_report, needs_matplotlib

ROOT = Path(__file__).parents[3]
REPORTS = sorted(ROOT.glob("docs/benchmarks/*/*.json"))


@cache
def read(path: Path) -> Report:
    return Report.from_json(path.read_text())


@pytest.mark.parametrize(
    ("column", "name"),
    [
        ("tflops", OURS),
        ("time_us", OURS),
        ("gbps", OURS),
        ("production_tflops", OURS),
        ("backward_us", "cute_attn, backward"),
        ("fa4_tflops", "FlashAttention-4"),
        ("flash_attention_2_tflops", "FlashAttention-2"),
        ("cudnn_us", "cuDNN"),
        ("fla_gbps", "flash-linear-attention"),
        ("10_persistent_tflops", "10 persistent"),
        ("cp_async_same_warps_gbps", "cp async same warps"),
    ],
)
def test_lines_have_the_names_of_packages(column, name):
    assert series(column) == name


def test_our_own_line_is_named_for_the_package_in_every_report():
    without = set()
    for path in REPORTS:
        for _, plot in chosen(read(path)):
            names = [series(column) for column in plot.ys]
            assert len(set(names)) == len(names), (path.name, plot.title)
            assert not {"tflops", "us", "time us", "gbps"} & set(names), (path.name, plot.title)
            if not any(name.startswith(OURS) for name in names):
                without.add(path.stem)
    assert without == {"async-copy", "fmha-ladder-swizzled"}  # studies: each line is a way to do it


@pytest.mark.parametrize(
    ("plots", "columns"), [(1, 1), (2, 2), (4, 4), (5, 3), (6, 3), (7, 4), (8, 4), (9, 3), (12, 4)]
)
def test_few_places_stay_empty(plots, columns):
    assert columns_of(plots) == columns


def test_only_the_plots_asked_for_are_chosen():
    report = make_report(plots=[Plot("batch", ("time_us",), title, "us") for title in "abc"])
    assert [plot.title for _, plot in chosen(report, ["c", "a"])] == ["a", "c"]
    assert len(chosen(report)) == 3


def test_a_fingerprint_is_of_what_is_shown(monkeypatch):
    report = make_report()
    before = fingerprint(report)
    assert fingerprint(make_report(notes=["another"])) == before
    rows = [{**report.rows[0], "time_us": 5.5}, report.rows[1]]
    assert fingerprint(make_report(rows=rows)) != before
    monkeypatch.setattr("cute_attn.bench.harness.plot.SERIES", {})
    assert fingerprint(report) != before


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw(make_report(), tmp_path / "no.png") is None
    assert "no plot" in capsys.readouterr().err


@needs_matplotlib
@pytest.mark.parametrize("count", [1, 2, 5])
def test_pictures_have_their_fingerprint(tmp_path, count):
    plot = make_report().plots[0]
    report = make_report(plots=[plot] * count)
    picture = draw(report, tmp_path / "picture.png")
    assert fingerprint_in(picture) == fingerprint(report)


@pytest.mark.parametrize("name", page_plots.SHOWN)
def test_pictures_on_pages_are_up_to_date(name):
    shown = page_plots.SHOWN[name]
    report = shown.read()
    assert len(chosen(report, shown.titles)) == len(shown.titles or report.plots)
    expected = fingerprint(report, shown.titles)
    assert fingerprint_in(page_plots.PLOTS / f"{name}.png") == expected, "python -m docs.page_plots"


@pytest.mark.parametrize("page", page_plots.PAGES)
def test_pages_show_them_with_their_machine(page):
    text = (ROOT / page).read_text()
    assert page_plots.text(page) == text, "python -m docs.page_plots"
    for name in page_plots.PAGES[page]:
        facts = page_plots.SHOWN[name].read().environment
        caption = " ".join(page_plots.on_page(page, name).split())
        for fact in ("gpu", "driver", "cuda", "torch", "command"):
            assert str(facts[fact]) in caption
        assert str(facts["date"])[:10] in caption


def test_every_page_of_a_measured_kernel_has_a_plot():
    shown = {name for page in page_plots.PAGES for name in page_plots.PAGES[page]}
    assert shown == set(page_plots.SHOWN)
    pages = {page.name for page in ROOT.glob("docs/kernels/*.md")}
    without = pages - {Path(page).name for page in page_plots.PAGES}
    unmeasured = {  # no such GPU was at hand
        Path(page).name
        for family in FAMILIES
        if not any(row.measured for row in family.support)
        for page in family.pages
    }
    # The plot of the backward's three head dimensions is on sm90_backward.md, those of KDA on the
    # pages of its parts.
    others = {"sm90_backward_hd256.md", "kda.md", "kda_stages.md"}
    # Measured by scripts; their benchmarks have no report yet.
    others |= {"gated_delta_rule.md", "gated_delta_rule_backward.md"}
    others |= {"mla_decode.md", "mla_rows.md", "mla_turns.md", "wide_heads.md"}
    assert without == {"hd256_forward.md", "hd256_backward.md"} | unmeasured | others
    assert len({json.dumps(page_plots.PAGES[page]) for page in ("README.md", "docs/index.md")}) == 1
