"""Plots of a report, if matplotlib is installed."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from .report import UNIT_SUFFIXES, Plot, Report

PANEL_INCHES = (4.2, 3.5)
WIDE_PANEL_INCHES = (6.4, 4.8)  # size of a panel with a legend beside it, or many bars
FONT_SIZE = 11  # a page shows the plot at about half its size
STYLE = {"font.size": FONT_SIZE, "axes.titlesize": FONT_SIZE, "figure.titlesize": FONT_SIZE + 1}
CHARACTERS_IN_AN_INCH = 11  # at FONT_SIZE
COLOURS = 10  # matplotlib's colours; further lines are dashed
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MOST_INSIDE = 8  # entries of a legend that finds room beside the lines

OURS = "cute_attn"
SERIES = {  # a column's name without its unit -> the name of its line
    "": OURS,
    "time": OURS,
    "production": OURS,
    "forward": f"{OURS}, forward",
    "backward": f"{OURS}, backward",
    "cudnn": "cuDNN",
    "flashinfer": "FlashInfer",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "flash_attention_2": "FlashAttention-2",
    "flash_attention_4": "FlashAttention-4",
    "fla": "flash-linear-attention",
    "fla_backward": "flash-linear-attention, backward",
    "0_pytorch": "PyTorch",
    "copy": "copying as many bytes",
    "roofline": "its bytes at copy bandwidth",
}
AXES = {  # a plot's x column, or a unit -> the name of the axis
    "batch": "batch (sequences)",
    "in_flight_kib": "in flight on an SM (KiB)",
    "seqlen": "length of a sequence (tokens)",
    "GB/s": "bandwidth (GB/s)",
    "TFLOP/s": "speed (TFLOP/s)",
    "us": "time (us)",
}


def series(column: str) -> str:
    """The name in a legend of a column such as "tflops" or "fa4_tflops"."""
    suffix = next((unit for unit in UNIT_SUFFIXES if f"_{column}".endswith(unit)), "")
    name = f"_{column}".removesuffix(suffix).removeprefix("_")
    return SERIES.get(name, name.replace("_", " "))


def columns_of(count: int) -> int:
    """Plots beside one another: the number, up to four, that leaves the fewest places empty."""
    return count if count <= 4 else min((4, 3), key=lambda columns: -count % columns)


def chosen(report: Report, titles: Collection[str] | None = None) -> list[tuple[Report, Plot]]:
    """The plots of a report, and of parts that are tables of the report, each with its table.

    Args:
        titles: only the plots with these titles.
    """
    tables = [report, *(part for part in report.parts if not part.environment)]
    return [
        (table, plot)
        for table in tables
        if table.rows
        for plot in table.plots
        if titles is None or plot.title in titles
    ]


def fingerprint(report: Report, titles: Collection[str] | None = None) -> str:
    """A digest of what `draw` shows (names, points, lines), stored as the PNG's Description."""
    shown = [
        (plot.title, AXES.get(plot.x, plot.x), AXES.get(plot.y_label, plot.y_label),
         [series(column) for column in plot.ys], dict(plot.lines),
         [[row[column] for column in (plot.x, *plot.ys)] for row in plot.matching(table.rows)])
        for table, plot in chosen(report, titles)
    ]  # fmt: skip
    return hashlib.sha256(json.dumps([_heading(report, 0), shown]).encode()).hexdigest()


def fingerprint_in(picture: Path) -> str:
    """The fingerprint that a PNG of `draw` has; "" for any other PNG."""
    data = picture.read_bytes()
    at = len(PNG_SIGNATURE)
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        if kind == b"tEXt" and content.startswith(b"Description\0"):
            return content.partition(b"\0")[2].decode("latin-1")
        at += length + 12
    return ""


def draw(report: Report, path: Path, titles: Collection[str] | None = None) -> Path | None:
    """Draw what is `chosen` of `report` into the PNG at `path`.

    Returns:
        `path`, or None if there is nothing to draw or matplotlib is not installed. A missing
        matplotlib is only reported on stderr, because the JSON holds all that a later `pages`
        needs.
    """
    plots = chosen(report, titles)
    if not plots:
        return None
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no plot", file=sys.stderr)
        return None
    columns = columns_of(len(plots))
    lines = -(-len(plots) // columns)
    wide = any(plot.kind == "waterfall" or _entries(plot) > MOST_INSIDE for _, plot in plots)
    width, height = WIDE_PANEL_INCHES if wide else PANEL_INCHES
    with rc_context(STYLE):
        figure = Figure(figsize=(width * columns, height * lines + 1), layout="constrained")
        FigureCanvasAgg(figure)
        places = [
            figure.add_subplot(lines, columns, number + 1) for number in range(lines * columns)
        ]
        for axes, (table, plot) in zip(places, plots, strict=False):
            draw_one = _waterfall if plot.kind == "waterfall" else _draw_one
            draw_one(axes, table, plot)
        _legends(figure, places[: len(plots)], places[len(plots) :], 2 * columns)
        figure.suptitle(_heading(report, int(width * columns * CHARACTERS_IN_AN_INCH)))
        described = {"Description": fingerprint(report, titles)}
        figure.savefig(path, dpi=120, metadata=described)
    return path


def _heading(report: Report, characters: int) -> str:
    """What was measured, then where and when, in lines of at most `characters`; 0: any length."""
    facts = report.environment
    machine = [str(facts.get("gpu") or facts.get("cpu")), str(facts.get("date"))]
    if facts.get("driver"):
        machine.insert(1, f"driver {facts['driver']}")
    lines = (report.title, ", ".join(machine))
    return "\n".join(textwrap.fill(line, characters) if characters else line for line in lines)


def _entries(plot: Plot) -> int:
    return len(plot.ys) + len(plot.lines)


def _legends(figure: Any, drawn: Sequence[Any], empty: Sequence[Any], columns: int) -> None:
    """Draw one legend if all plots have the same lines: in an empty place, or below in at most
    `columns` columns. Otherwise draw a legend in each plot."""
    for axes in empty:
        axes.set_axis_off()
    entries = [axes.get_legend_handles_labels() for axes in drawn]
    handles, names = entries[0]
    if len(drawn) > 1 and names and all(others == names for _, others in entries):
        if empty:
            empty[0].legend(handles, names, loc="center")
        else:
            columns = min(len(names), columns)
            figure.legend(handles, names, loc="outside lower center", ncols=columns)
        return
    for axes, (_, names) in zip(drawn, entries, strict=True):
        if len(names) > MOST_INSIDE:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        elif names:
            axes.legend()


def _waterfall(axes: Any, report: Report, plot: Plot) -> None:
    (row,) = plot.matching(report.rows)
    before = 0.0
    for name in plot.ys:
        value = row[name]
        if not isinstance(value, float):
            continue  # not measured
        colour = "C0" if value >= before else "C3"
        axes.bar(series(name), value - before, bottom=before, color=colour)
        axes.annotate(f"{value:.0f}", (series(name), max(value, before)), ha="center", va="bottom")
        before = value
    axes.set_ylim(top=1.1 * axes.dataLim.ymax)
    axes.set_title(plot.title)
    axes.set_ylabel(AXES.get(plot.y_label, plot.y_label))
    axes.tick_params(axis="x", rotation=60)
    axes.grid(alpha=0.3, axis="y")


def _draw_one(axes: Any, report: Report, plot: Plot) -> None:
    rows = plot.matching(report.rows)
    for i, column in enumerate(plot.ys):
        points = [(row[plot.x], row[column]) for row in rows if row[column] is not None]
        if points:
            label = series(column)
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=4,
                color=f"C{i % COLOURS}",
                linestyle="-" if i < COLOURS else "--",
                linewidth=2.5 if label.startswith(OURS) else 1.5,
                label=label,
            )
    for label, value in plot.lines.items():
        axes.axhline(value, linestyle="--", linewidth=1, color="black", label=label)
    if plot.log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({float(row[plot.x] or 0) for row in rows})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=60)
        axes.minorticks_off()
    if plot.log_y:
        from matplotlib.ticker import LogLocator, StrMethodFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(LogLocator(subs=()))
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(plot.title)
    axes.set_xlabel(AXES.get(plot.x, plot.x))
    axes.set_ylabel(AXES.get(plot.y_label, plot.y_label))
    axes.grid(alpha=0.3)
