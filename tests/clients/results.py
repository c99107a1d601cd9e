"""The outcomes of tests with real servers, as results.json keeps them.

A run of some of a client's files keeps the outcomes of the others, as long as the client and the
packages beside it have the same versions.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Generator, Iterator, Sequence
from datetime import datetime, timezone
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

FILE = Path(__file__).parent / "results.json"
# Packages whose versions a row of the table depends on, beside the client's own.
BESIDE = ("torch", "transformers", "nvidia-cutlass-dsl")
OF_CLIENT = {"fla": ("triton",)}
# Where the package on the registry has another name. The tests of "gpu" are PyTorch's on a GPU.
DISTRIBUTIONS = {"fla": "fla-core", "gpu": "torch"}


def read() -> dict[str, dict[str, Any]]:
    """Client -> its version, the date, and the outcome of each feature."""
    known: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    return known


def features(client: str) -> Iterator[str]:
    """The features that a client's tests name, in the order of the tests."""
    for path in sorted(Path(__file__).parent.glob(f"test_{client}*.py")):
        for test in vars(import_module(f"tests.clients.{path.stem}")).values():
            if not isinstance(test, FunctionType):
                continue
            for mark in getattr(test, "pytestmark", ()):
                if mark.name == "clients":
                    yield mark.args[0]
                elif mark.name == "parametrize":
                    for case in mark.args[1]:
                        yield from (
                            m.args[0] for m in getattr(case, "marks", ()) if m.name == "clients"
                        )


class Recorder:
    """A plugin of pytest that writes a client's outcomes at the end of a run. Features of which the
    run left out tests, or had no GPU for some, are not recorded. The workers of pytest-xdist hand
    their outcomes to the main process."""

    def __init__(self, client: str):
        self.client = client
        self.features: dict[str, dict[str, Any]] = {}
        self.left_out: set[str] = set()
        self.whole = True

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        markers = (item.get_closest_marker("clients") for item in items)
        self.left_out |= {marker.args[0] for marker in markers if marker}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        marker = item.get_closest_marker("clients")
        if marker is None or (report.when != "call" and report.passed):
            return report
        if report.skipped and item.get_closest_marker("gpu") and not torch.cuda.is_available():
            self.left_out.add(marker.args[0])
        row = {"outcome": "passed", "tests": 1}
        if hasattr(report, "wasxfail"):
            row.update(outcome="does not work", why=report.wasxfail.removeprefix("reason: "))
        elif report.outcome != "passed":
            row["outcome"] = report.outcome
        self.add(marker.args[0], row)
        return report

    def add(self, feature: str, found: dict[str, Any]) -> None:
        """Count tests of a feature, which passed only if all its tests passed."""
        row = self.features.setdefault(feature, {"outcome": "passed", "tests": 0})
        tests = row["tests"] + found["tests"]
        row.update(found if found["outcome"] != "passed" else {}, tests=tests)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take a worker's outcomes. A worker that died has none, and then nothing is recorded."""
        outcomes = getattr(node, "workeroutput", {}).get("clients")
        if outcomes is None:
            self.whole = False
            return
        features, left_out = outcomes
        self.left_out |= set(left_out)
        for feature, row in features.items():
            self.add(feature, row)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["clients"] = self.features, sorted(self.left_out)
            return
        found = {name: row for name, row in self.features.items() if name not in self.left_out}
        to_the_end = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if found and self.whole and to_the_end:
            write(self.client, found)


def write(client: str, found: dict[str, dict[str, Any]]) -> None:
    """Keep the outcomes of a client's features, with the versions that they are true of."""
    known = read()
    names = (*BESIDE, *OF_CLIENT.get(client, ()))
    beside = {name: x for name in names if (x := installed(name))}
    if torch.cuda.is_available():
        beside["on"] = torch.cuda.get_device_name()
    versions = {
        "version": version(DISTRIBUTIONS.get(client, client)),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "beside": beside,
        "python": platform.python_version(),
    }
    before = known.get(client, {})
    kept = all(before.get(name) == x for name, x in versions.items() if name != "date")
    rows = (before["features"] if kept else {}) | found
    ordered = {name: rows[name] for name in features(client) if name in rows}
    known[client] = {**versions, "features": ordered}
    FILE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
