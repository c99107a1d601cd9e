"""Output of reports to files and the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .environment import checkout
from .report import Report

DEFAULT_OUT = Path("docs/benchmarks")  # in a checkout
PART = "part"  # the tag of a run that left cases out


def add_options(parser: argparse.ArgumentParser) -> None:
    add_out(parser)
    parser.add_argument("--json", type=Path, help="write the report's JSON to this file as well")
    parser.add_argument("--print-only", action="store_true", help="write no file in --out")


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        help=f"where reports go, into a folder for each GPU (default: {DEFAULT_OUT} of the "
        "checkout that this runs in; outside a checkout of cute_attn nothing is written)",
    )


def directory(out: Path | None) -> Path | None:
    """The directory of the folders of reports, or None."""
    root = checkout()
    return out or (root and root / DEFAULT_OUT)


def kept_in(args: argparse.Namespace) -> Path | None:
    """`directory` of a run, or None. Warns, before a long run, if the report is not kept."""
    if args.print_only:
        return None
    out = directory(args.out)
    if out is None and args.json is None:
        print(
            f"{args.name}: {Path.cwd()} is not in a checkout of cute_attn: the report is printed, "
            "and kept only with --out DIR",
            file=sys.stderr,
        )
    return out


def deliver(report: Report, out: Path | None, json: Path | None) -> None:
    """Write the report to `out` and `json`, if given, then print the report."""
    written = []
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(report.to_json())
        written.append(json)
    if out is not None:
        written += write_report(report, out)
    report.print()
    for path in written:
        print(f"wrote {path}")


def path_of(report: Report, directory: Path) -> Path:
    """The report's file below `directory`. A later run of the same benchmark overwrites the
    file."""
    return directory / report.machine / f"{report.stem}.json"


def write_report(report: Report, directory: Path) -> list[Path]:
    """Write the JSON of the report's runs over the JSON of earlier runs, and return the paths.

    Raises:
        ReportError: see `Report.validate`; nothing is written.
    """
    report.validate()
    paths = []
    for run in report.runs:
        path = path_of(run, directory)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(run.to_json())
        paths.append(path)
    return paths
