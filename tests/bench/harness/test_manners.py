"""The benchmarks write, and read git history and tests, only in this project's checkout."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from cute_attn import environment
from cute_attn.bench import __main__ as command
from cute_attn.bench.harness.environment import describe
from cute_attn.bench.harness.registry import Benchmark, Listed
from cute_attn.bench.harness.report import Report


@pytest.fixture(autouse=True)
def one_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> Report:
        print("runs", file=sys.stderr)
        return Report("toy", "A toy", {"cpu": "C", "date": "2026-11-22 00:00 UTC"}, rows=[{"n": 1}])

    monkeypatch.setattr(command, "BENCHMARKS", {"toy": Listed("toy", "a toy")})
    monkeypatch.setattr(command, "load", {"toy": Benchmark(run, needs_gpu=False)}.get)


def make_checkout(directory: Path, name: str = "cute-attn") -> Path:
    directory.mkdir(parents=True)
    (directory / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    return directory


def files(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*.*")}


WRITTEN = {"pyproject.toml", "docs/benchmarks/no-gpu/toy.json"}


@pytest.mark.parametrize("below", ["", "docs/deep"])
def test_a_checkout_keeps_results_in_its_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    root = make_checkout(tmp_path / "checkout")
    (root / below).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(root / below)
    assert command.main(["toy"]) == 0
    assert files(root) == WRITTEN


@pytest.mark.parametrize("other", ["empty", "with docs/benchmarks", "another project"])
def test_elsewhere_nothing_is_written_unless_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    other: str,
) -> None:
    root = tmp_path / "elsewhere"
    if other == "another project":
        make_checkout(root, "another")
    else:
        root.mkdir()
    if other != "empty":
        (root / "docs/benchmarks").mkdir(parents=True)
    before = files(root)
    monkeypatch.chdir(root)
    assert command.main(["toy"]) == 0
    assert files(root) == before
    heard = capsys.readouterr()
    assert "A toy" in heard.out  # the table
    said = "not in a checkout of cute_attn"
    assert said in heard.err and "--out" in heard.err

    assert command.main(["toy", "--out", "here"]) == 0
    assert files(root) - before == {"here/no-gpu/toy.json"}
    assert said not in capsys.readouterr().err
    assert command.main(["toy", "--print-only"]) == 0
    assert said not in capsys.readouterr().err


def test_it_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A benchmark can take an hour: that nothing is kept is reported before it starts."""
    monkeypatch.chdir(tmp_path)
    assert command.main(["toy"]) == 0
    heard = capsys.readouterr().err
    assert heard.index("not in a checkout") < heard.index("runs")


def test_pages_have_the_same_manners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "toy.json"
    source.write_text(Report("toy", "A toy", {"cpu": "C"}, rows=[{"n": 1}]).to_json())
    monkeypatch.chdir(tmp_path)
    assert command.main(["pages", "toy.json"]) == 1
    assert "give --out" in capsys.readouterr().err
    assert files(tmp_path) == {"toy.json"}
    root = make_checkout(tmp_path / "checkout")
    monkeypatch.chdir(root)
    assert command.main(["pages", str(source)]) == 0
    assert files(root) == {*WRITTEN, "docs/benchmarks/no-gpu.md"}


def test_the_commit_is_of_this_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in another project's folder is not that project."""
    project = make_checkout(tmp_path / "project", "another")
    git = ["git", "-C", str(project), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    installed = project / ".venv/lib/site-packages/cute_attn/environment.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(installed))
    assert "commit" not in describe([])
    (project / "pyproject.toml").write_text('[project]\nname = "cute-attn"\n')
    in_checkout = project / "cute_attn/environment.py"
    in_checkout.parent.mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(in_checkout))
    assert "commit" in describe([])


def test_gpu_check_runs_no_other_projects_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cute_attn.bench import gpu_check
    from cute_attn.bench.harness.registry import Unavailable

    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    gpu_check.add_arguments(parser)
    with pytest.raises(Unavailable, match="not in a checkout of cute_attn"):
        gpu_check.run(parser.parse_args([]))
