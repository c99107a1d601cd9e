"""The report of a benchmark, as a table on the terminal, as JSON and as Markdown.

`Report.from_dict` reads the JSON back, so that Markdown and plots can be made again from it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Union

from .environment import slug

Scalar = Union[str, int, float, bool, None]  # noqa: UP007  (evaluated at run time on 3.10)
Row = dict[str, Scalar]

SCHEMA = 1

NO_GPU = "no-gpu"

# A fractional number without its unit in its column's name is refused. `share`, `speedup` and
# `error` are pure numbers; a table whose rows differ in unit has a `unit` column instead.
UNIT_SUFFIXES = (
    "_ns", "_us", "_ms", "_s", "_clocks", "_gbps", "_tflops", "_per_clock", "_pct", "_ratio",
    "_mib", "_error",
)  # fmt: skip
PLOT_KINDS = ("lines", "waterfall")
UNIT_PREFIXES = ("share_of_", "speedup_vs_")


class ReportError(ValueError):
    """A report that would mislead or could not be read back; the message names the place."""


@dataclass(frozen=True)
class Verdict:
    """A target of the benchmark; `passed` is None if the target could not be judged."""

    name: str
    passed: bool | None
    detail: str

    @property
    def mark(self) -> str:
        return {True: "met", False: "MISSED", None: "not asked"}[self.passed]


@dataclass(frozen=True)
class Plot:
    """A plot of the columns `ys` over column `x`, one line each, for the rows that match `where`.

    Attributes:
        lines: a horizontal line at each value, by label.
        kind: "lines", or "waterfall": bars for the one row that matches. A bar runs from the
            previous column's value to its own column's value.
    """

    x: str
    ys: tuple[str, ...]
    title: str
    y_label: str
    where: Mapping[str, Scalar] = field(default_factory=dict)
    lines: Mapping[str, float] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False
    kind: str = "lines"

    def matching(self, rows: Sequence[Row]) -> list[Row]:
        return [r for r in rows if all(r[key] == value for key, value in self.where.items())]


@dataclass
class Report:
    """A benchmark's numbers, and all that is needed to understand and repeat the measurement.

    Attributes:
        benchmark: name on the command line.
        title: one line, what was measured.
        environment: see `environment.describe`.
        parameters: the benchmark's own settings.
        roofline: ceilings measured in the same run, units in the names.
        rows: the table; all rows have the same keys, units in the names.
        verdicts: the targets; notes: lines of text; plots: to draw from the rows.
        parts: reports that this report summarises.
        log: lines, in the order of time.
        succeeded: False if the run itself failed, whatever its numbers.
        tag: part of the file name, to distinguish runs.
    """

    benchmark: str
    title: str
    environment: Row
    parameters: dict[str, Any] = field(default_factory=dict)
    roofline: dict[str, float | None] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    parts: list[Report] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    succeeded: bool = True
    tag: str = ""

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0]) if self.rows else []

    @property
    def stem(self) -> str:
        """File name without suffix: benchmark and tag. The name is the same in every run."""
        return "-".join(filter(None, (self.benchmark, slug(self.tag))))

    @property
    def machine(self) -> str:
        """The GPU in short, which names the folder of the report; `NO_GPU` without one."""
        gpu = slug(str(self.environment.get("gpu", "")))
        return re.sub(r"^nvidia-|-(\d+gb|hbm\d\w?)(?=-|$)", "", gpu) or NO_GPU

    @property
    def runs(self) -> list[Report]:
        """The reports to keep: this report, or its parts if this report has nothing else and the
        parts have machines."""
        parts = [part for part in self.parts if part.environment]
        return parts if parts and not self.rows else [self]

    def joined(self, other: Report) -> Report:
        """This report with the rows of another run of the benchmark, over other cases.

        Raises:
            ReportError: the runs differ in more than cases: in benchmark, machine or columns.
        """
        names = ("date", "command")
        first, second = (
            {k: v for k, v in x.environment.items() if k not in names} for x in (self, other)
        )
        for what, mine, theirs in (
            ("names", self.stem, other.stem),
            ("environments", first, second),
            ("columns", self.columns, other.columns),
        ):
            if mine != theirs:
                raise ReportError(f"two runs cannot be joined, their {what} differ: {theirs}")
        commands = [str(x.environment["command"]) for x in (self, other)]
        ceilings = ", ".join(
            f"{k} {format_value(v)}" for k, v in other.roofline.items() if v is not None
        )
        note = f"Ceilings during `{commands[1]}`: {ceilings}"
        return replace(
            self,
            environment=self.environment | {"command": "; ".join(commands)},
            rows=[*self.rows, *other.rows],
            verdicts=[*self.verdicts, *other.verdicts],
            notes=list(dict.fromkeys([*self.notes, *other.notes, note])),
            plots=[*self.plots, *other.plots],
            succeeded=self.succeeded and other.succeeded,
        )

    def validate(self) -> None:
        """Check the table.

        Raises:
            ReportError: rows have different columns, a value is no scalar, NaN or infinity, or a
                fractional number has no unit.
        """
        for index, row in enumerate(self.rows):
            where = f"{self.benchmark}, row {index}"
            if list(row) != self.columns:
                raise ReportError(f"{where}: columns {list(row)}, the first row has {self.columns}")
            for name, value in row.items():
                if value is not None and not isinstance(value, (str, int, float)):
                    raise ReportError(f"{where}: {name} is a {type(value).__name__}, not a scalar")
                if isinstance(value, float):
                    if not math.isfinite(value):
                        raise ReportError(f"{where}: {name} is {value}")
                    if not _has_unit(name, self.columns):
                        raise ReportError(f"{where}: column {name} has no unit in its name")
        for name in (column for plot in self.plots for column in (plot.x, *plot.ys)):
            if self.rows and name not in self.columns:
                raise ReportError(f"{self.benchmark}: a plot of {name}, which is no column")
        for plot in self.plots:
            if plot.kind not in PLOT_KINDS:
                raise ReportError(f"{self.benchmark}: a plot of kind {plot.kind!r}: {PLOT_KINDS}")
            if plot.kind == "waterfall" and self.rows and len(plot.matching(self.rows)) != 1:
                raise ReportError(f"{self.benchmark}: a waterfall shows one row, {plot.where}")
        for part in self.parts:
            part.validate()

    def to_dict(self) -> dict[str, Any]:
        self.validate()
        return {"schema": SCHEMA, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Report:
        """The report whose `to_dict` is `document`.

        Raises:
            ReportError: another schema version, or fields missing or unknown.
        """
        if document.get("schema", SCHEMA) != SCHEMA:
            raise ReportError(f"schema {document['schema']}, this version reads {SCHEMA}")
        fields = {name: value for name, value in document.items() if name != "schema"}
        try:
            fields["verdicts"] = [Verdict(**verdict) for verdict in fields["verdicts"]]
            fields["plots"] = [
                Plot(**{**plot, "ys": tuple(plot["ys"])}) for plot in fields["plots"]
            ]
            fields["parts"] = [cls.from_dict(part) for part in fields["parts"]]
            report = cls(**fields)
        except (KeyError, TypeError) as error:
            raise ReportError(f"not a benchmark report: {error}") from error
        report.validate()
        return report

    @classmethod
    def from_json(cls, text: str) -> Report:
        return cls.from_dict(json.loads(text))

    def to_markdown(self, name: str, picture: str | None = None) -> str:
        """A section `name` of a Markdown page, with the parts that are tables of this run.
        `picture` is the address of the plots."""
        lines = [f"## {name}", "", f"**{self.title}**", "", *self._origin()]
        if picture is not None:
            lines += [f"![{self.title}]({picture})", ""]
        lines += self._body()
        for part in self.parts:
            if not part.environment:
                lines += [f"### {part.title}", "", *part._body()]
        return "\n".join(lines).rstrip() + "\n"

    def _origin(self) -> list[str]:
        """The command, and all that is known of the machine and the run."""
        facts = {k: v for k, v in self.environment.items() if v is not None and k != "command"}
        lines = [f"`{self.environment['command']}`", ""] if "command" in self.environment else []
        if facts:
            lines += [", ".join(f"{k} {format_value(v)}" for k, v in facts.items()), ""]
        return lines

    def _body(self) -> list[str]:
        lines: list[str] = []
        if self.rows:
            lines += [*markdown_table(self.columns, self.rows), ""]
        if self.verdicts:
            met = sum(1 for v in self.verdicts if v.passed)
            lines += [f"Targets: {met} of {len(self.verdicts)} are met.", ""]
            if others := [v for v in self.verdicts if not v.passed]:
                lines += [*(f"- {v.mark}: {v.name} ({v.detail})" for v in others), ""]
        if self.notes:
            lines += ["Notes:", "", *(f"- {note}" for note in self.notes), ""]
        for title, values in (
            ("Ceilings in this run", self.roofline),
            ("Parameters", self.parameters),
        ):
            shown = {k: v for k, v in values.items() if v is not None}
            if shown:
                lines += [f"{title}:", ""]
                lines += [f"- {key}: {format_value(value)}" for key, value in shown.items()]
                lines += [""]
        return lines

    def print(self) -> None:
        """The report on the terminal: a rich table, or plain text where rich is not installed."""
        date = self.environment.get("date")
        print(f"\n{self.title}" + (f", {date}" if date else ""))
        for part in self.parts:
            part.print()
        print_table(self.benchmark, self.columns, self.rows)
        if self.roofline:
            known = (f"{k} {format_value(v)}" for k, v in self.roofline.items() if v is not None)
            print("ceilings: " + ", ".join(known))
        for verdict in self.verdicts:
            print(f"[{verdict.mark}] {verdict.name}: {verdict.detail}")
        for note in self.notes:
            print(f"note: {note}")


def _has_unit(column: str, columns: Sequence[str]) -> bool:
    return (
        f"_{column}".endswith(UNIT_SUFFIXES)
        or column.startswith(UNIT_PREFIXES)
        or "unit" in columns
    )


def format_value(value: object) -> str:
    """A cell: floats have four significant digits, or all of their integer digits."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(format_value(item) for item in value)
    return str(value)


def _is_numeric(column: str, rows: Sequence[Row]) -> bool:
    values = [row[column] for row in rows if row[column] is not None]
    return bool(values) and all(isinstance(v, (int, float)) for v in values)


def markdown_table(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Lines of a Markdown table, numbers to the right."""
    rules = ["---:" if _is_numeric(column, rows) else "---" for column in columns]
    cells = [[format_value(row[c]).replace("|", "\\|") for c in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (list(columns), rules, *cells)]


def plain_table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """A table of aligned columns in plain text."""
    cells = [list(columns), *([format_value(row[c]) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    right = [_is_numeric(column, rows) for column in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )


def print_table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    if not rows:
        return
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain_table(columns, rows))
        return
    console = Console()
    if not console.is_terminal:
        # rich would wrap cells at 80 columns in a log or a pipe.
        console = Console(width=10_000, no_color=True)
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right" if _is_numeric(column, rows) else "left")
    for row in rows:
        table.add_row(*(format_value(row[column]) for column in columns))
    console.print(table)
