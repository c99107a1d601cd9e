"""Output of reports to files and the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .environment import checkout
from .plot import draw
from .report import Report

DEFAULT_OUT = Path("docs/benchmarks")  # in a checkout


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        help=f"where JSON, Markdown and plot go (default: {DEFAULT_OUT} of the checkout that this "
        "runs in; outside a checkout of cute_attn nothing is written)",
    )
    parser.add_argument("--json", type=Path, help="write the JSON to this file as well")
    parser.add_argument("--print-only", action="store_true", help="do not write these files")


def directory(args: argparse.Namespace) -> Path | None:
    """The directory of the files, or None. Warns, before a long run, if the report is not kept."""
    if args.print_only:
        return None
    if args.out is not None:
        out: Path = args.out
        return out
    root = checkout()
    if root is not None:
        return root / DEFAULT_OUT
    if args.json is None:
        print(
            f"{args.name}: {Path.cwd()} is not in a checkout of cute_attn: the report is printed, "
            "and kept only with --out DIR",
            file=sys.stderr,
        )
    return None


def deliver(report: Report, out: Path | None, json: Path | None) -> None:
    """Write the report to `out` and `json` where they are given, then print it."""
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


def write_report(report: Report, directory: Path) -> list[Path]:
    """Write JSON, Markdown, the log if there is one and, for plots and with matplotlib, a PNG.
    Returns their paths.

    Raises:
        ReportError: see `Report.validate`; nothing is written.
    """
    text = report.to_json()
    directory.mkdir(parents=True, exist_ok=True)
    json_path = directory / f"{report.stem}.json"
    json_path.write_text(text)
    picture = draw(report, directory / f"{report.stem}.png")
    markdown_path = directory / f"{report.stem}.md"
    markdown_path.write_text(report.to_markdown(picture.name if picture else None))
    log_path = directory / f"{report.stem}.log"
    if report.log:
        log_path.write_text("\n".join(report.log) + "\n")
    return [
        json_path,
        markdown_path,
        *([picture] if picture else []),
        *([log_path] if report.log else []),
    ]
