"""The time until a process's first result, of the benchmarks that have it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cute_attn.bench.__main__ import main
from cute_attn.bench.attention import first_result as attention
from cute_attn.bench.harness import first_result
from cute_attn.bench.harness.first_result import Study
from cute_attn.bench.harness.processes import ChildError
from cute_attn.bench.kda import first_result as kda

STUDIES = [kda.study(32, 32), attention.study(256)]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: Any) -> None:
    monkeypatch.setattr("cute_attn.bench.__main__.require_gpu", lambda: None)


def run(tmp_path: Path, *argv: str) -> Any:
    path = tmp_path / "report.json"
    assert main([*argv, "--print-only", "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("name", "call", "peer", "title"),
    [
        ("kda-first-result", "chunk_kda", "fla", "FLA"),
        ("attention-first-result", "decode", "fa4", "FlashAttention-4"),
    ],
)
def test_from_cold_and_warm_caches(
    monkeypatch: Any, tmp_path: Path, name: str, call: str, peer: str, title: str
):
    environments: list[dict[str, str]] = []

    def child(code: str, env: dict[str, str], _: float) -> dict[str, float]:
        environments.append(env)
        cold = len({e["CUTE_ATTN_CACHE_DIR"] for e in environments}) == len(environments)
        found = {
            "first_result_s": 8.5 if cold else 0.6,
            "import_s": 0.5,
            "first_call_s": 8.0 if cold else 0.1,
            "other_size_s": 0.001,
        }
        if "who, call = 'ours'" in code:
            found["compiles"] = 2 if cold else 0
        return found

    monkeypatch.setattr(first_result, "run_child", child)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(first_result, "measure", each_apart(environments))
    report = run(tmp_path, name, "--calls", call)
    assert [(r["library"], r["caches"], r["first_result_s"]) for r in report["rows"]] == [
        ("ours", "cold", 8.5), ("ours", "warm", 0.6), (peer, "cold", 8.5), (peer, "warm", 0.6),
    ]  # fmt: skip
    assert all(v["passed"] for v in report["verdicts"])
    assert f"{title} 8.50 s" in report["verdicts"][0]["detail"]


def each_apart(environments: list[dict[str, str]]) -> Callable[..., Any]:
    """`measure`, forgetting the processes of the one before."""
    measure = first_result.measure

    def wrapped(*args: Any) -> Any:
        environments.clear()
        return measure(*args)

    return wrapped


@pytest.mark.parametrize(("done", "missing"), [(0, "cold"), (1, "warm")])
def test_a_result_that_does_not_come_is_noted(
    monkeypatch: Any, tmp_path: Path, capsys: Any, done: int, missing: str
):
    results = [dict.fromkeys(first_result.TIMES, 7.5) | {"compiles": 1}] * done

    def child(code: str, env: dict[str, str], _: float) -> dict[str, float]:
        if results:
            return results.pop()
        raise subprocess.TimeoutExpired("python", first_result.LIMIT_S)

    monkeypatch.setattr(first_result, "run_child", child)
    report = run(tmp_path, "kda-first-result", "--calls", "kda_decode", "--no-peer")
    assert [r["caches"] for r in report["rows"]] == ["cold"] * done
    assert f"kda_decode, ours, {missing}: no result after 420 s" in report["notes"]
    assert ("kda_decode, ours, cold: 7.50 s" in capsys.readouterr().err) == bool(done)


def test_an_error_of_the_peer_is_noted_and_one_of_ours_is_not(monkeypatch: Any):
    def child(code: str, env: dict[str, str], _: float) -> dict[str, float]:
        raise ChildError("a measured process exited with 1:\nAssertionError: not on this GPU")

    monkeypatch.setattr(first_result, "run_child", child)
    rows, notes = first_result.measure(attention.study(256), "decode", "fa4", 1)
    assert (rows, notes) == ([], ["decode, fa4, cold: AssertionError: not on this GPU"])
    with pytest.raises(ChildError):
        first_result.measure(attention.study(256), "decode", "ours", 1)


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.benchmark)
def test_programs_compile_and_import_what_exists(study: Study):
    for who, call in study.modules:
        program = study.program(who, call)
        compile(program, "child", "exec")
        lines = [x for x in program.splitlines() if x.startswith(("from ", "import "))]
        exec("\n".join(lines), {})
