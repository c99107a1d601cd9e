"""Run a benchmark, or write the pages of the reports kept."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from .harness import output, pages
from .harness.choosing import is_part
from .harness.registry import BENCHMARKS, EXIT_UNAVAILABLE, Unavailable, load, require_gpu
from .harness.report import Report


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of the command line; only the `chosen` benchmark adds options of its own."""
    parser = argparse.ArgumentParser(prog="python -m cute_attn.bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", metavar="NAME")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--short", action="store_true", help="fewer sizes and repetitions")
    common.add_argument("--tag", default="", help="part of the names of the files written")
    common.add_argument("--commit", help="the source's commit, where there is no git history")
    output.add_options(common)
    for name, (_, summary) in BENCHMARKS.items():
        command = commands.add_parser(name, help=summary, description=summary, parents=[common])
        if name == chosen:
            load(name).add_arguments(command)
            command.set_defaults(default_of=command.get_default)
    of_pages = commands.add_parser(
        "pages", help="write the pages of results, with plots, of the reports kept"
    )
    of_pages.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="reports of other machines, kept first"
    )
    output.add_out(of_pages)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser(next((word for word in argv if not word.startswith("-")), None))
    args = parser.parse_args(argv)
    if args.name is None:
        parser.print_help()
        return 0
    if args.name == "pages":
        return write_pages(args)
    out = output.kept_in(args)
    benchmark = load(args.name)
    args.argv = list(argv)
    try:
        if benchmark.needs_gpu:
            require_gpu()
        report = benchmark.run(args)
    except Unavailable as reason:
        print(f"{args.name}: {reason}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    tag = args.tag or output.PART * is_part(args)  # a part never replaces the whole report
    for each in (report, *report.runs):
        each.tag = "-".join(word for word in ("short" * args.short, tag) if word)
    output.deliver(report, out, args.json)
    return 0 if report.succeeded else 1


def write_pages(args: argparse.Namespace) -> int:
    """The command `pages`: keep the given reports, then write the pages of all reports."""
    directory = output.directory(args.out)
    if directory is None:
        print(f"pages: {Path.cwd()} is not in a checkout of cute_attn: give --out", file=sys.stderr)
        return 1
    found: dict[str, list[Report]] = {}
    for file in args.files:
        report = Report.from_json(file.read_text())
        found.setdefault(report.stem, []).append(report)
    for reports in found.values():
        whole = functools.reduce(Report.joined, reports)
        if len(reports) > 1:
            whole.tag = whole.tag.removesuffix(output.PART).rstrip("-")
        output.write_report(whole, directory)
    for page in pages.write_pages(directory):
        print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
