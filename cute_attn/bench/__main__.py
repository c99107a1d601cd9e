"""Command line of the benchmarks; see `python -m cute_attn.bench --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .environment import checkout
from .registry import EXIT_UNAVAILABLE, Benchmark, Unavailable, discover, require_gpu
from .report import Report, write_report

DEFAULT_OUT = Path("docs/benchmarks")  # in a checkout


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
        help=f"where JSON, Markdown and plot go (default: {DEFAULT_OUT} of the checkout that this "
        "runs in; outside a checkout of cute_attn nothing is written)",
    )
    parser.add_argument("--json", type=Path, help="write the JSON to this file as well")
    parser.add_argument("--print-only", action="store_true", help="do not write these files")


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    benchmarks = discover()
    parser = build_parser(benchmarks)
    args = parser.parse_args(argv)
    if args.name is None:
        parser.print_help()
        return 0
    out = _output_directory(args)
    if args.name == "render":
        report = Report.from_json(args.file.read_text())
        if out is not None:
            for part in report.parts:
                write_report(part, out)
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
    _deliver(report, out, args.json)
    return 0 if report.succeeded else 1


def _output_directory(args: argparse.Namespace) -> Path | None:
    """Where files go, or None. What is kept nowhere is said before the run, which may be long."""
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


def _deliver(report: Report, out: Path | None, json: Path | None) -> None:
    """Write the report, and print it last."""
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


if __name__ == "__main__":
    sys.exit(main())
