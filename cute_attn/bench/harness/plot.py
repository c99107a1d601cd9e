"""Plots of a report, if matplotlib is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .report import Plot, Report

COLUMNS = 4  # of plots in a picture
COLOURS = 10  # that matplotlib has; lines beyond are dashed
MOST_INSIDE = 8  # entries of a legend that finds room beside the lines


def draw(report: Report, path: Path) -> Path | None:
    """Draw all plots of `report`, and of those parts that are its tables, into the PNG at `path`.

    Returns:
        `path`, or None if there is nothing to draw or matplotlib is not installed. The latter is
        reported on stderr: the JSON holds all that a later `render` needs.
    """
    tables = [report, *(part for part in report.parts if not part.environment)]
    plots = [(table, plot) for table in tables if table.rows for plot in table.plots]
    if not plots:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no plot", file=sys.stderr)
        return None
    columns = min(len(plots), COLUMNS)
    lines = -(-len(plots) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.8 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (table, plot) in enumerate(plots, start=1):
        draw_one = _waterfall if plot.kind == "waterfall" else _draw_one
        draw_one(figure.add_subplot(lines, columns, number), table, plot)
    facts = report.environment
    figure.suptitle(f"{facts.get('gpu') or facts.get('cpu')}, {facts.get('date')}")
    figure.savefig(path, dpi=120)
    return path


def _waterfall(axes: Any, report: Report, plot: Plot) -> None:
    (row,) = plot.matching(report.rows)
    before = 0.0
    for name in plot.ys:
        value = row[name]
        if not isinstance(value, float):
            continue  # not measured
        axes.bar(name, value - before, bottom=before, color="C0" if value >= before else "C3")
        axes.annotate(f"{value:.0f}", (name, max(value, before)), ha="center", va="bottom")
        before = value
    axes.set_ylim(top=1.1 * axes.dataLim.ymax)
    axes.set_title(plot.title)
    axes.set_ylabel(plot.y_label)
    axes.tick_params(axis="x", rotation=60)
    axes.grid(alpha=0.3, axis="y")


def _draw_one(axes: Any, report: Report, plot: Plot) -> None:
    rows = plot.matching(report.rows)
    for i, column in enumerate(plot.ys):
        points = [(row[plot.x], row[column]) for row in rows if row[column] is not None]
        if points:
            line = "-" if i < COLOURS else "--"
            axes.plot(
                *zip(*points, strict=True),
                marker="o", markersize=4, color=f"C{i % COLOURS}", linestyle=line, label=column,
            )  # fmt: skip
    for label, value in plot.lines.items():
        axes.axhline(value, linestyle="--", linewidth=1, color="black", label=label)
    if plot.log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({float(row[plot.x] or 0) for row in rows})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=60)
        axes.minorticks_off()
    if plot.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(plot.title)
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y_label)
    axes.grid(alpha=0.3)
    if len(plot.ys) + len(plot.lines) > MOST_INSIDE:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    else:
        axes.legend()
