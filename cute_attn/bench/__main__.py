"""Command line of the benchmarks; see `python -m cute_attn.bench --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .registry import EXIT_UNAVAILABLE, Benchmark, Unavailable, discover, require_gpu
from .report import Report, write_report

DEFAULT_OUT = Path("docs/benchmarks")


def build_parser(benchmarks: dict[str, Benchmark]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cute_attn.bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", metavar="NAME")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--short", action="store_true", help="fewer sizes and repetitions")
    common.add_argument("--tag", default="", help="part of the names of the files written")
    common.add_argument("--commit", help="the source's commit, where there is no git history")
    _add_output_options(common)
    for benchmark in benchmarks.values():
        benchmark.add_arguments(
            commands.add_parser(
                benchmark.name,
                help=benchmark.summary,
                description=benchmark.summary,
                parents=[common],
            )
        )
    render = commands.add_parser(
        "render", help="Markdown and plots again, from the JSON of a report and its parts"
    )
    render.add_argument("file", type=Path)
    _add_output_options(render)
    return parser


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUT,
        help="where JSON, Markdown and plot go (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="write the JSON to this file as well")
    parser.add_argument("--print-only", action="store_true", help="write nothing under --out")


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    benchmarks = discover()
    parser = build_parser(benchmarks)
    args = parser.parse_args(argv)
    if args.name is None:
        parser.print_help()
        return 0
    if args.name == "render":
        report = Report.from_json(args.file.read_text())
        for part in report.parts if not args.print_only else ():
            write_report(part, args.out)
    else:
        benchmark = benchmarks[args.name]
        args.argv = list(argv)
        try:
            if benchmark.needs_gpu:
                require_gpu()
            report = benchmark.run(args)
        except Unavailable as reason:
            print(f"{args.name}: {reason}", file=sys.stderr)
            return EXIT_UNAVAILABLE
        report.tag = "-".join(word for word in ("short" * args.short, args.tag) if word)
    _deliver(report, args)
    return 0 if report.succeeded else 1


def _deliver(report: Report, args: argparse.Namespace) -> None:
    """Write the report where the options say, and print it last."""
    written = []
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(report.to_json())
        written.append(args.json)
    if not args.print_only:
        written += write_report(report, args.out)
    report.print()
    for path in written:
        print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
