"""Everything that needs a GPU, in one offline command of at most eight minutes.

The GPU tests that are not slow come first, for at most 60 % of the time. Then comes
compute-sanitizer, alone, because it slows other processes on the GPU. Short runs of the benchmarks
that have `gpu_check` stages follow; benchmarks with the oldest kept reports come first. A benchmark
that would not end in time is left to a later run.

Each stage is a separate process with a time limit, so that a hang or a crash of the driver's
context does not affect other stages. The table comes last; the JSON holds the reports of all parts.

The exit code is 0 only if all tests passed and every benchmark ran to its end. A stage that cannot
run on this machine (without ncu or compute-sanitizer) is reported, and does not fail the check.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from .harness.environment import checkout, describe
from .harness.output import DEFAULT_OUT, path_of
from .harness.registry import BENCHMARKS, EXIT_UNAVAILABLE, Benchmark, Unavailable, load
from .harness.report import Report, ReportError, Row

TOTAL_LIMIT_S = 465.0  # eight minutes, less start-up and the report
TEST_LIMIT_S = 280.0
SANITIZER_LIMIT_S = 175.0
SANITIZERS = Path("gpu/test_sanitizers.py")
SPREAD = 1.3  # a benchmark may take this much longer than in its last report
TEST_PROCESSES = 16  # the processes compile first, then take turns on the GPU
KILL_GRACE_S = 5.0


@dataclass(frozen=True)
class Stage:
    """A process of the check.

    Attributes:
        result: the file that the process writes, JUnit XML or a report's JSON.
        expected_s: seconds that the process may take by its last report; None without a report.
        may_skip: for tests, whether this machine may lack a tool that all tests need.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    result: Path
    expected_s: float | None = None
    may_skip: bool = False

    @property
    def is_tests(self) -> bool:
        return self.result.suffix == ".xml"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a process: its exit code, or None if the check ended the process at its time
    limit.
    """

    returncode: int | None
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=float, default=TOTAL_LIMIT_S, help="seconds for everything")
    parser.add_argument("--test-limit", type=float, default=TEST_LIMIT_S, help="seconds for tests")
    parser.add_argument(
        "--tests", type=Path, help="tests to run (default: those of the checkout that this runs in)"
    )
    parser.add_argument(
        "--only",
        dest="asked",
        nargs="+",
        metavar="STAGE",
        help="stages to run, by a part of their name",
    )


def stages(
    benchmarks: Mapping[str, Benchmark],
    tests: Path,
    test_limit_s: float,
    directory: Path,
    commit: str | None = None,
) -> list[Stage]:
    """The stages in order; their files go to `directory`."""
    # Each process compiles, then awaits the GPU. Processes that are done take tests of other
    # processes.
    side_by_side: tuple[str, ...] = ()
    if importlib.util.find_spec("xdist") is not None:
        side_by_side = ("-n", str(TEST_PROCESSES), "--dist", "worksteal")
    sanitizers = tests / SANITIZERS

    def of_tests(name: str, path: Path, limit_s: float, *options: str, may_skip: bool) -> Stage:
        results = directory / f"{name}.xml"
        command = (
            sys.executable, "-m", "pytest", str(path), "-m", "gpu and not slow", "-q",
            "--tb=short", "-p", "no:cacheprovider", f"--junitxml={results}", *options,
        )  # fmt: skip
        return Stage(name, command, limit_s, results, may_skip=may_skip)

    without = f"--ignore={sanitizers}"
    found = [of_tests("tests", tests, test_limit_s, without, *side_by_side, may_skip=False)]
    if sanitizers.exists():
        found.append(of_tests("sanitizers", sanitizers, SANITIZER_LIMIT_S, may_skip=True))
    for name, benchmark in benchmarks.items():
        for stage in benchmark.gpu_check:
            result = directory / f"{len(found)}.json"
            command = (
                sys.executable, "-m", "cute_attn.bench", name, "--short",
                *stage.arguments, "--print-only", "--json", str(result),
                *(("--commit", commit) if commit else ()),
            )  # fmt: skip
            label = " ".join((name, *stage.arguments))
            found.append(Stage(label, command, stage.limit_s, result))
    return found


def in_turn(found: Sequence[Stage], results: Path | None) -> list[Stage]:
    """The tests, then the benchmarks in the order of their last reports, the oldest first."""
    last: dict[str, tuple[str, float]] = {}
    for path in results.glob("*/gpu-check*.json") if results is not None else ():
        for row in Report.from_json(path.read_text()).rows:
            if row["last_ran"] is not None:
                ran = (str(row["last_ran"]), float(row["last_s"]))  # type: ignore[arg-type]
                last[str(row["stage"])] = max(ran, last.get(str(row["stage"]), ("", 0.0)))
    return [
        replace(stage, expected_s=SPREAD * last[stage.name][1]) if stage.name in last else stage
        for stage in sorted(found, key=lambda s: (not s.is_tests, last.get(s.name, ("", 0.0))[0]))
    ]


def with_earlier(report: Report, earlier: Report | None) -> Report:
    """The report, with facts that only the earlier report has. Its file replaces the earlier file.
    The facts are when a benchmark last ran to its end, for how long, and the numbers of benchmarks
    not run now."""
    before = {row["stage"]: row for row in earlier.rows} if earlier else {}
    date = str(report.environment["date"])
    rows: list[Row] = []
    for row in report.rows:
        if row["result"] == "ran":
            last: Row = {"last_ran": date, "last_s": row["time_s"]}
        else:
            known = before.get(row["stage"], {})
            last = {name: known.get(name) for name in ("last_ran", "last_s")}
        rows.append(row | last)
    stems = {part.stem for part in report.parts}
    parts = [part for part in earlier.parts if part.stem not in stems] if earlier else []
    return replace(report, rows=rows, parts=[*report.parts, *parts])


def run(args: argparse.Namespace) -> Report:
    start = time.monotonic()
    root, tests = checkout(), args.tests
    if tests is None:
        if root is None:
            raise Unavailable(
                f"{Path.cwd()} is not in a checkout of cute_attn, which has the tests"
            )
        tests = root / "tests"
    if not tests.exists():
        raise Unavailable(f"there are no tests at {tests}")
    rows: list[Row] = []
    parts: list[Report] = []
    with tempfile.TemporaryDirectory() as directory:
        everything = {name: load(name) for name in BENCHMARKS}
        todo = in_turn(
            stages(everything, tests, args.test_limit, Path(directory), args.commit),
            root / DEFAULT_OUT if root is not None else None,
        )
        asked = [s for s in todo if not args.asked or any(x in s.name for x in args.asked)]
        if not asked:
            raise Unavailable(f"no stage named {' or '.join(args.asked)}")
        for stage in todo:
            if stage not in asked:
                rows.append(left_out(stage, "not asked for"))
                continue
            left_s = args.limit - (time.monotonic() - start)
            if not stage.is_tests and left_s <= (stage.expected_s or 0.0):
                wanted = f"may take {stage.expected_s:.0f} s" if stage.expected_s else ""
                why = f"{wanted}, and {left_s:.0f} s are left" if left_s > 0 else "no time left"
                rows.append(left_out(stage, why))
                continue
            limit_s = min(stage.limit_s, left_s)
            print(f"\n=== {stage.name} (at most {max(limit_s, 0):.0f} s)", flush=True)
            outcome = run_limited(stage.command, limit_s)
            row, part = judge(stage, outcome, limit_s)
            print(f"=== {stage.name}: {row['result']}, {row['detail']}", flush=True)
            rows.append(row)
            if part is not None:
                parts += part.runs
    import torch  # noqa: F401  (so that the environment names the GPU)

    report = Report(
        benchmark="gpu-check",
        title="GPU check",
        environment=describe(args.argv, commit=args.commit),
        rows=rows,
        parts=parts,
        succeeded=all(
            row["result"] in ("passed", "ran", "unavailable", "left out") for row in rows
        ),
    )
    kept = path_of(report, root / DEFAULT_OUT) if root is not None else None
    earlier = Report.from_json(kept.read_text()) if kept and kept.exists() else None
    return with_earlier(report, earlier)


def run_limited(command: Sequence[str], limit_s: float) -> Outcome:
    """Run a command with the caller's output. End the command and its children after `limit_s`
    seconds."""
    start = time.monotonic()
    if limit_s <= 0:
        return Outcome(None, 0.0)
    # The command has its own session, so that its children (ncu's, pytest's) can be ended too.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        process.wait(limit_s)
        cut = False
    except subprocess.TimeoutExpired:
        cut = True
    finally:
        if process.poll() is None:
            _end_group(process)
    return Outcome(None if cut else process.returncode, time.monotonic() - start)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_GRACE_S)
            return


def left_out(stage: Stage, why: str) -> Row:
    """The summary line of stages that are left to a later run."""
    return {"stage": stage.name, "result": "left out", "time_s": 0.0, "detail": why}


def judge(stage: Stage, outcome: Outcome, limit_s: float) -> tuple[Row, Report | None]:
    """The summary line of a stage, and the report that a benchmark wrote."""
    part = None
    if outcome.returncode is None:
        result, detail = "cut", f"not done after {limit_s:.0f} s" if limit_s > 0 else "no time left"
    elif outcome.returncode == EXIT_UNAVAILABLE and not stage.is_tests:
        result, detail = "unavailable", "cannot run on this machine, see above"
    elif stage.is_tests:
        result, detail = _judge_tests(stage, outcome.returncode)
    else:
        result, detail, part = _judge_benchmark(stage.result, outcome.returncode)
    row: Row = {"stage": stage.name, "result": result, "time_s": outcome.seconds, "detail": detail}
    return row, part


def _judge_tests(stage: Stage, returncode: int) -> tuple[str, str]:
    """Return a test stage's result ("passed", "failed" or "unavailable"), and a text with the
    numbers of passed, failed and skipped tests, or with the error if pytest left no results. A run
    in which no test passed has failed, unless the stage may skip all tests."""
    try:
        suites = ElementTree.parse(stage.result).getroot().iter("testsuite")
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        for suite in suites:
            for name in counts:
                counts[name] += int(suite.get(name, 0))
    except (OSError, ElementTree.ParseError) as error:
        return "failed", f"pytest exited with {returncode} and left no results: {error}"
    broken = counts["failures"] + counts["errors"]
    passed = counts["tests"] - broken - counts["skipped"]
    detail = f"{passed} passed, {broken} failed, {counts['skipped']} skipped"
    if stage.may_skip and returncode == 0 and counts["tests"] == counts["skipped"] > 0:
        return "unavailable", detail
    return ("passed" if returncode == 0 and passed > 0 else "failed"), detail


def _judge_benchmark(result: Path, returncode: int) -> tuple[str, str, Report | None]:
    if returncode != 0:
        return "failed", f"exited with {returncode}", None
    try:
        report = Report.from_json(result.read_text())
    except (OSError, ValueError, ReportError) as error:
        return "failed", f"left no readable report: {error}", None
    asked = [v for run in report.runs for v in run.verdicts if v.passed is not None]
    met = sum(1 for verdict in asked if verdict.passed)
    missed = [verdict.name for verdict in asked if not verdict.passed]
    detail = (
        f"{met} of {len(asked)} targets met"
        if asked
        else f"{sum(len(run.rows) for run in report.runs)} rows"
    )
    if missed:
        detail += f"; missed: {'; '.join(missed)}"
    return "ran", detail, report


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_arguments,
)
