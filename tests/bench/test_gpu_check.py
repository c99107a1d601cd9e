import argparse
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cute_attn.bench import gpu_check
from cute_attn.bench.__main__ import main
from cute_attn.bench.gpu_check import Outcome, Stage, judge, run_limited, stages
from cute_attn.bench.harness.output import write_report
from cute_attn.bench.harness.registry import BENCHMARKS, EXIT_UNAVAILABLE, load
from cute_attn.bench.harness.report import Report, Verdict

ENVIRONMENT = {"gpu": "G", "date": "2026-11-20"}


def junit(tests, failures=0, errors=0, skipped=0):
    return (
        f'<testsuites><testsuite tests="{tests}" failures="{failures}" errors="{errors}" '
        f'skipped="{skipped}"/></testsuites>'
    )


@pytest.mark.parametrize(
    ("xml", "returncode", "result", "detail"),
    [
        (junit(12, skipped=2), 0, "passed", "10 passed, 0 failed, 2 skipped"),
        (junit(12, failures=1, errors=1), 1, "failed", "10 passed, 2 failed, 0 skipped"),
        (junit(3, skipped=3), 0, "failed", "0 passed, 0 failed, 3 skipped"),
        (junit(0), 5, "failed", "0 passed, 0 failed, 0 skipped"),
        (junit(4), 3, "failed", "4 passed, 0 failed, 0 skipped"),  # a crash after the tests
        ("<cut", 1, "failed", "pytest exited with 1 and left no results"),
    ],
)
def test_judging_tests(tmp_path, xml, returncode, result, detail):
    results = tmp_path / "tests.xml"
    results.write_text(xml)
    row, part = judge(Stage("tests", (), 10, results), Outcome(returncode, 1.5), 10)
    assert (row["result"], row["time_s"], part) == (result, 1.5, None)
    assert str(row["detail"]).startswith(detail)


@pytest.mark.parametrize(
    ("xml", "returncode", "result"),
    [
        (junit(24, skipped=24), 0, "unavailable"),
        (junit(24, skipped=24), 1, "failed"),
        (junit(24, failures=1, skipped=23), 1, "failed"),
        (junit(24, skipped=1), 0, "passed"),
        (junit(0), 5, "failed"),
    ],
)
def test_judging_tests_that_may_skip(tmp_path, xml, returncode, result):
    results = tmp_path / "sanitizers.xml"
    results.write_text(xml)
    stage = Stage("sanitizers", (), 10, results, may_skip=True)
    row, _ = judge(stage, Outcome(returncode, 1.5), 10)
    assert row["result"] == result


@pytest.mark.parametrize(
    ("outcome", "text", "result", "detail"),
    [
        (Outcome(0, 1.0), None, "ran", "1 of 2 targets met; missed: b"),
        (Outcome(0, 1.0), "{}", "failed", "left no readable report"),
        (Outcome(1, 1.0), None, "failed", "exited with 1"),
        (Outcome(-9, 1.0), None, "failed", "exited with -9"),
        (Outcome(None, 1.0), None, "cut", "not done after 10 s"),
        (Outcome(EXIT_UNAVAILABLE, 1.0), None, "unavailable", "cannot run"),
    ],
)
def test_judging_benchmarks(tmp_path, outcome, text, result, detail):
    verdicts = [Verdict("a", True, ""), Verdict("b", False, ""), Verdict("c", None, "")]
    report = Report("toy", "Toy", ENVIRONMENT, verdicts=verdicts)
    path = tmp_path / "1.json"
    path.write_text(report.to_json() if text is None else text)
    row, part = judge(Stage("toy", (), 10, path), outcome, 10)
    assert row["result"] == result
    assert str(row["detail"]).startswith(detail)
    assert (part == report) is (result == "ran")


def test_the_stages_fit_the_time_and_are_all_short(tmp_path):
    everything = {name: load(name) for name in BENCHMARKS}
    tests = Path(__file__).parents[1]
    found = stages(everything, tests, 200.0, tmp_path)
    assert [s.name for s in found if s.is_tests] == ["tests", "sanitizers"]
    assert f"--ignore={found[1].command[3]}" in found[0].command
    assert gpu_check.TEST_LIMIT_S + found[1].limit_s < gpu_check.TOTAL_LIMIT_S
    names = [s.name for s in found[2:]]
    assert "fmha-ladder --no-peers --seqlens 1024" in names
    assert "lightning-decode --sms 78 --mode graph" in names
    # All but the check itself, those that measure no GPU, and the one of many GPUs.
    left_out = (
        "context-parallel",
        "emulator",
        "gpu-check",
        "predictions",
        "predictions-b200",
        "sass",
    )
    measured = [name for name in BENCHMARKS if name not in left_out]
    assert list(dict.fromkeys(name.split()[0] for name in names)) == measured
    for name in names:
        parser = argparse.ArgumentParser()
        everything[name.split()[0]].add_arguments(parser)
        assert "--no-peer" in name or "--no-peer" not in parser.format_help()
    assert all("--short" in s.command for s in found[2:])
    assert not any("--commit" in s.command for s in found)
    named = stages(everything, tests, 200.0, tmp_path, "abc")
    assert all(s.command[-2:] == ("--commit", "abc") for s in named[2:])
    assert len({s.result for s in found}) == len(found)


def report_of(date, ran, others=(), parts=()):
    rows = [{"stage": name, "result": "ran", "time_s": s} for name, s in ran.items()]
    rows += [{"stage": name, "result": "left out", "time_s": 0.0} for name in others]
    environment = {"gpu": "G", "date": date}
    return Report("gpu-check", "GPU check", environment, rows=rows, parts=list(parts))


def test_the_benchmark_that_ran_longest_ago_comes_first(tmp_path):
    first = report_of("2026-11-20 10:00 UTC", {"old": 10.0, "new": 20.0})
    second = report_of("2026-11-21 10:00 UTC", {"new": 30.0}, ["old", "never"])
    kept = None
    for report in (first, second):
        kept = gpu_check.with_earlier(report, kept)
        path = write_report(kept, tmp_path)
    assert path == [tmp_path / "g/gpu-check.json"]  # one file, that of the last run
    found = [Stage("tests", (), 200, Path("tests.xml"))]
    found += [Stage(name, (), 60, Path("x.json")) for name in ("new", "old", "never")]
    turns = gpu_check.in_turn(found, tmp_path)
    assert [s.name for s in turns] == ["tests", "never", "old", "new"]
    assert [s.expected_s for s in turns] == [None, None, 13.0, 39.0]
    assert gpu_check.in_turn(found, None) == found


def test_a_report_keeps_what_only_the_one_before_knows():
    def part(name, date):
        return Report(name, name, {"gpu": "G", "date": date}, tag="short")

    first = report_of("1", {"a": 10.0, "b": 20.0}, ["c"], [part("a", "1"), part("b", "1")])
    second = report_of("2", {"b": 30.0}, ["a", "c"], [part("b", "2")])
    kept = gpu_check.with_earlier(second, gpu_check.with_earlier(first, None))
    assert [(r["stage"], r["result"], r["last_ran"], r["last_s"]) for r in kept.rows] == [
        ("b", "ran", "2", 30.0), ("a", "left out", "1", 10.0), ("c", "left out", None, None),
    ]  # fmt: skip
    assert [(p.benchmark, p.environment["date"]) for p in kept.parts] == [("b", "2"), ("a", "1")]


@pytest.mark.parametrize("directory", ["h100", "h200"])
def test_the_reports_kept_know_when_each_benchmark_ran(directory):
    path = Path(__file__).parents[2] / "docs/benchmarks" / directory / "gpu-check.json"
    report = Report.from_json(path.read_text())
    benchmarks = [row for row in report.rows if row["stage"] not in ("tests", "sanitizers")]
    assert len(report.parts) >= len(benchmarks) > 10
    assert all(row["last_ran"] and row["last_s"] > 1 for row in benchmarks)
    dates = {part.environment["date"][:10] for part in report.parts}
    assert dates == {row["last_ran"][:10] for row in benchmarks}


@pytest.mark.parametrize(
    ("result_file", "expected_s", "limit", "code", "result", "detail"),
    [
        ("toy.json", 30.0, "20", 0, "left out", "may take 30 s, and "),
        ("toy.json", None, "0", 0, "left out", "no time left"),
        ("toy.json", 30.0, "0", 0, "left out", "no time left"),
        ("toy.xml", None, "0", 1, "cut", "no time left"),
    ],
    ids=["too long", "never reported", "nothing left", "tests"],
)
def test_benchmarks_without_time_are_left_out_and_tests_are_not(
    tmp_path, monkeypatch, on_a_gpu, result_file, expected_s, limit, code, result, detail
):
    def one_stage(found, results):
        return [Stage("toy", ("no-such-command",), 60, tmp_path / result_file, expected_s)]

    monkeypatch.setattr(gpu_check, "in_turn", one_stage)
    out = tmp_path / "out.json"
    argv = ["gpu-check", "--limit", limit, "--tests", str(tmp_path), "--print-only"]
    assert main([*argv, "--json", str(out)]) == code
    (row,) = json.loads(out.read_text())["rows"]
    assert row["result"] == result and row["detail"].startswith(detail)


def test_a_command_that_ends_in_time():
    outcome = run_limited([sys.executable, "-c", "raise SystemExit(7)"], 60)
    assert outcome.returncode == 7


def test_a_command_is_cut_with_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    outcome = run_limited([sys.executable, "-c", code], 3)
    assert outcome.returncode is None
    assert outcome.seconds < 30
    pid = int(pid_file.read_text())
    for _ in range(100):
        if not is_running(pid):
            break
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_no_time_left_is_said_and_nothing_runs(tmp_path):
    outcome = run_limited(["no-such-command"], 0)
    row, _ = judge(Stage("toy", (), 10, tmp_path / "x.json"), outcome, 0)
    assert (row["result"], row["detail"]) == ("cut", "no time left")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The check itself needs no GPU, but the stages that it starts do."""
    monkeypatch.setattr("cute_attn.bench.__main__.require_gpu", lambda: None)


WITHOUT_XDIST = SimpleNamespace(find_spec=lambda name: None)


def run_check(tmp_path, monkeypatch, test_code, benchmark_code):
    """The whole command, with a toy test file and a toy benchmark for its stages."""
    test_file = tmp_path / "test_toy.py"
    test_file.write_text(test_code)
    real = gpu_check.stages

    def toy_stages(benchmarks, tests, limit_s, directory, commit):
        result = directory / "toy.json"
        tests_stage = real({}, tests, limit_s, directory)[0]
        command = (sys.executable, "-c", benchmark_code, str(result))
        return [tests_stage, Stage("toy", command, 60, result)]

    monkeypatch.setattr(gpu_check, "stages", toy_stages)
    monkeypatch.setattr(gpu_check, "TEST_PROCESSES", 1)
    out = tmp_path / "out.json"
    argv = ["gpu-check", "--tests", str(test_file), "--print-only", "--json", str(out)]
    return main(argv), json.loads(out.read_text())


PASSING = "import pytest\n@pytest.mark.gpu\ndef test_toy(): pass\n"
FAILING = "import pytest\n@pytest.mark.gpu\ndef test_toy(): assert False\n"
REPORTING = (
    "import sys, pathlib; from cute_attn.bench.harness.report import Report; "
    "pathlib.Path(sys.argv[1]).write_text("
    f"Report('toy', 'Toy', {ENVIRONMENT!r}, rows=[{{'n': 1}}]).to_json())"
)


def test_a_check_that_passes(tmp_path, monkeypatch, on_a_gpu):
    code, report = run_check(tmp_path, monkeypatch, PASSING, REPORTING)
    assert code == 0
    assert [row["result"] for row in report["rows"]] == ["passed", "ran"]
    assert report["parts"][0]["rows"] == [{"n": 1}]


@pytest.mark.parametrize(
    ("test_code", "benchmark_code", "results"),
    [
        (FAILING, REPORTING, ["failed", "ran"]),
        (PASSING, "raise RuntimeError('no')", ["passed", "failed"]),
    ],
)
def test_a_check_that_fails(tmp_path, monkeypatch, on_a_gpu, test_code, benchmark_code, results):
    monkeypatch.setattr(gpu_check, "importlib", SimpleNamespace(util=WITHOUT_XDIST))
    code, report = run_check(tmp_path, monkeypatch, test_code, benchmark_code)
    assert code == 1
    assert [row["result"] for row in report["rows"]] == results


def test_what_was_not_asked_for_stays_in_the_table(tmp_path, monkeypatch, on_a_gpu):
    def toy_stages(benchmarks, tests, limit_s, directory, commit):
        results = [directory / f"{name}.json" for name in ("one", "other")]
        command = (sys.executable, "-c", REPORTING)
        return [Stage(path.stem, (*command, str(path)), 60, path) for path in results]

    monkeypatch.setattr(gpu_check, "stages", toy_stages)
    out = tmp_path / "out.json"
    argv = ["gpu-check", "--tests", str(tmp_path), "--print-only", "--json", str(out)]
    assert main([*argv, "--only", "other"]) == 0
    one, other = json.loads(out.read_text())["rows"]
    assert (one["result"], one["detail"]) == ("left out", "not asked for")
    assert other["result"] == "ran" and other["last_s"] == other["time_s"]
    assert main([*argv, "--only", "third"]) == EXIT_UNAVAILABLE
