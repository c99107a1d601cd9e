"""The outcomes of tests with real servers, as results.json keeps them."""

from __future__ import annotations

import json
import platform
from collections.abc import Generator
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

FILE = Path(__file__).parent / "results.json"
# Packages whose versions a row of the table depends on, beside the client's own.
BESIDE = ("torch", "transformers", "triton", "nvidia-cutlass-dsl")
DISTRIBUTIONS = {"fla": "fla-core"}  # where the package on the registry has another name


def read() -> dict[str, dict[str, Any]]:
    """Client -> its version, the date, and the outcome of each feature."""
    known: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    return known


class Recorder:
    """A plugin of pytest that writes a client's outcomes at the end of a run of all its tests."""

    def __init__(self, client: str):
        self.client = client
        self.features: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        marker = item.get_closest_marker("clients")
        if marker is None or (report.when != "call" and report.passed):
            return report
        row = self.features.setdefault(marker.args[0], {"outcome": "passed", "tests": 0})
        row["tests"] += 1
        if hasattr(report, "wasxfail"):
            row.update(outcome="does not work", why=report.wasxfail.removeprefix("reason: "))
        elif report.outcome != "passed":
            row["outcome"] = report.outcome
        return report

    def pytest_sessionfinish(self) -> None:
        write(self.client, self.features)


def write(client: str, features: dict[str, dict[str, Any]]) -> None:
    """Keep the outcomes of a client's features, with the versions that they are true of."""
    known = read()
    beside = {name: found for name in BESIDE if (found := installed(name))}
    if torch.cuda.is_available():
        beside["on"] = torch.cuda.get_device_name()
    known[client] = {
        "version": version(DISTRIBUTIONS.get(client, client)),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "beside": beside,
        "python": platform.python_version(),
        "features": features,
    }
    FILE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
