import json
import os

import pytest

from cute_attn.bench import cache
from cute_attn.bench.__main__ import main
from cute_attn.bench.cache import run_race
from cute_attn.bench.harness.processes import ChildError, run_child
from cute_attn.bench.harness.report import Report

ENV = dict(os.environ)


def test_an_import_is_timed_apart_from_torch(tmp_path):
    (tmp_path / "torch.py").write_text("import time; time.sleep(0.3)")
    (tmp_path / "added.py").write_text("import time; time.sleep(0.1)")
    env = {**ENV, "PYTHONPATH": str(tmp_path)}
    with_added = run_child(cache._TIMED_IMPORT.format(statement="import added"), env)
    without = run_child(cache._TIMED_IMPORT.format(statement=""), env)
    assert with_added["torch_ms"] >= 300
    assert 100 <= with_added["after_ms"] < 300
    assert without["after_ms"] < 100


def test_racers_start_together(tmp_path):
    """No process starts before all are ready: each sees the marks of all others."""
    text = f"""
import json, os, pathlib, sys
mine = pathlib.Path({str(tmp_path)!r}) / str(os.getpid())
mine.touch()
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps({{"ready_ms": 1.0, "compiles": len(list(mine.parent.iterdir()))}}))
"""
    assert [result["compiles"] for result in run_race(text, ENV, 4)] == [4] * 4


def test_a_racer_that_dies_is_an_error():
    with pytest.raises(ChildError, match="exited with 3"):
        run_race("import sys; sys.exit(3)", ENV, 2)


@pytest.fixture
def measured():
    return {
        "samples": {
            "torch": [{"torch_ms": 1500.0, "after_ms": 0.0}] * 3,
            "cute_attn": [{"torch_ms": 1490.0, "after_ms": ms} for ms in (1.0, 2.0, 30.0)],
            "ready": [{"ready_ms": 120.0, "compiles": 0, "compiler_imported": False}] * 3,
            "peer": [{"torch_ms": 1500.0, "after_ms": 2700.0}] * 3,
        },
        "lookup_ns": [700.0, 710.0, 5000.0],
        "race": [{"ready_ms": 1800.0, "compiles": int(i == 0)} for i in range(16)],
    }


def rows_by_name(measured):
    rows = cache._rows(**measured, cold={"ready_ms": 2000.0})
    Report("cache", "", {}, rows=rows).validate()
    return {row["measurement"]: row for row in rows}


def test_the_table(measured):
    rows = rows_by_name(measured)
    assert rows["import torch; import cute_attn"]["median"] == 1492.0
    assert rows["import cute_attn, after torch"]["median"] == 2.0
    assert rows["warm look-up in process"]["median"] == 710.0
    assert rows["race for one key, compiles of all"]["median"] == 1
    assert rows["race for one key, each process"]["samples"] == 16
    assert rows["import flash_attn.cute, after torch"]["median"] == 2700.0


def test_a_peer_that_is_absent_is_said_to_be(measured):
    name = "import flash_attn.cute, after torch"
    measured["samples"]["peer"] = []
    assert rows_by_name(measured)[name]["unit"] == "does not import here"
    del measured["samples"]["peer"]
    row = rows_by_name(measured)[name]
    assert (row["unit"], row["median"]) == ("not installed", None)


def verdicts(measured):
    return [verdict.passed for verdict in cache.verdicts(**measured)]


def test_targets_met(measured):
    assert verdicts(measured) == [True] * 5


def test_targets_missed(measured):
    measured["samples"]["cute_attn"] = [{"torch_ms": 1.0, "after_ms": 51.0}]
    measured["samples"]["ready"][0] = {"ready_ms": 151.0, "compiles": 1, "compiler_imported": False}
    measured["lookup_ns"] = [1001.0]
    measured["race"][1]["compiles"] = 1
    assert verdicts(measured) == [False, True, False, False, False]


def test_the_whole_benchmark_with_canned_processes(measured, monkeypatch, tmp_path):
    def canned(text, env):
        assert env["CUTE_ATTN_CACHE_DIR"]
        assert "CUTE_ATTN_PREBUILT" not in env
        compile(text, "<child>", "exec")
        if "timeit" in text:
            return {"lookup_ns": measured["lookup_ns"]}
        kind = "ready" if "ready_ms" in text else "cute_attn" if "cute_attn" in text else "torch"
        return measured["samples"][kind][0]

    monkeypatch.setenv("CUTE_ATTN_PREBUILT", "/nowhere")
    monkeypatch.setattr(cache, "run_child", canned)
    monkeypatch.setattr(cache, "run_race", lambda text, env, racers: measured["race"][:racers])
    monkeypatch.setattr(cache, "version_of", lambda name: None)
    argv = ["cache", "--arch", "sm_90a", "--repeats", "2", "--racers", "5", "--out", str(tmp_path)]
    assert main(argv) == 0
    report = json.loads(next(tmp_path.rglob("cache*.json")).read_text())
    assert report["parameters"]["racers"] == 5
    assert [verdict["passed"] for verdict in report["verdicts"]] == [True] * 5


@pytest.mark.slow
def test_the_whole_benchmark(tmp_path):
    pytest.importorskip("cutlass")
    argv = ["cache", "--arch", "sm_90a", "--repeats", "1", "--racers", "2", "--out", str(tmp_path)]
    assert main(argv) == 0
    report = json.loads(next(tmp_path.rglob("cache*.json")).read_text())
    named = {verdict["name"]: verdict["passed"] for verdict in report["verdicts"]}
    # times depend on the machine; these do not
    assert named["a warm start neither compiles nor imports the compiler"] is True
    assert named["2 racing processes compile once"] is True
