"""The cost of the tests of `make test`, and the budget for it.

    pytest -n 2 -m "not slow" --record-durations     # all of them, or only the files that changed
    python -m tests.durations                        # the table of docs/testing.md, written there

The record holds CPU seconds by file, of the tests and of the processes that they start: wall time
would depend on what else the machine does. A kernel counts for the test that compiles it first.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("durations.json")
PAGE = ROOT / "docs" / "testing.md"
MACHINE = "2 cores of an Intel Xeon at 2.3 GHz"
CORES, MINUTES = 2, 6.0
BUDGET_S = CORES * MINUTES * 60
FULL_EXAMPLES = 10
"""The factor by which `make test-full` draws more random examples."""

START = "start and collection"


def cpu_seconds() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def test_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py"))


def read() -> dict[str, dict[str, Any]]:
    """File -> CPU seconds of its quick tests, their number, and the number of all its tests."""
    record: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    return record


class Recorder:
    """A plugin that measures, with pytest-xdist in every worker and in their parent process."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.started = cpu_seconds()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.quick: defaultdict[str, int] = defaultdict(int)
        self.total: defaultdict[str, int] = defaultdict(int)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.total[item.nodeid.partition("::")[0]] += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        before = cpu_seconds()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid.partition("::")[0]] += cpu_seconds() - before
            self.quick[item.nodeid.partition("::")[0]] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name in ("seconds", "quick"):
            for file, number in node.workeroutput["durations"][name].items():
                getattr(self, name)[file] += number
        self.total.update(node.workeroutput["durations"]["total"])

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workerinput"):
            self.add_start()
            own = {name: dict(getattr(self, name)) for name in ("seconds", "quick", "total")}
            self.config.workeroutput["durations"] = own  # type: ignore[attr-defined]

    def pytest_unconfigure(self) -> None:
        if not hasattr(self.config, "workerinput"):
            if START not in self.seconds:
                self.add_start()
            self.write()

    def add_start(self) -> None:
        self.seconds[START] += cpu_seconds() - self.started - sum(self.seconds.values())

    def write(self) -> None:
        """Replace the records of the files that have run; drop files that no longer exist."""
        there = {START, *test_files()}
        if set(self.total) < set(test_files()):  # the start of a part of the files is no measure
            del self.seconds[START]
        record = {file: row for file, row in read().items() if file in there}
        for file in self.seconds | self.total:  # a file may have slow tests only
            record[file] = {
                "seconds": round(self.seconds[file], 1),
                "quick": self.quick[file],
                "all": self.total[file],
            }
        lines = (f"  {json.dumps(file)}: {json.dumps(row)}" for file, row in sorted(record.items()))
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# -- the table


def full_seconds(file: str, row: dict[str, Any]) -> float:
    """An estimate: slow tests cost as much as the file's quick ones; random examples, tenfold."""
    seconds = row["seconds"] * row["all"] / max(1, row["quick"])
    random = file != START and "hypothesis" in (ROOT / file).read_text()
    return seconds * FULL_EXAMPLES if random else seconds


def table() -> str:
    """Markdown: a row for each directory, and the times of both targets of make."""
    rows: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for file, row in read().items():
        part = file if file == START else "/".join(file.split("/")[:2])
        part = "other tests" if part.endswith(".py") else part
        for n, value in enumerate(
            (row["quick"], row["all"], row["seconds"], full_seconds(file, row))
        ):
            rows[part][n] += value
    lines = ["| | tests | in `make test` | CPU seconds of these |", "| --- | --- | --- | --- |"]
    for part, (quick, total, seconds, _) in sorted(rows.items(), key=lambda item: -item[1][2]):
        lines.append(f"| {part} | {total:.0f} | {quick:.0f} | {seconds:.0f} |")
    quick, total, seconds, full = (sum(column) for column in zip(*rows.values(), strict=True))
    lines.append(f"| all | {total:.0f} | {quick:.0f} | {seconds:.0f} |")
    minutes, hours = seconds / CORES / 60, full / CORES / 3600
    lines += [
        "",
        f"On {MACHINE}, `make test` then takes about {minutes:.1f} minutes, of {MINUTES:.0f} "
        f"that it may. `make test-full` takes about {hours:.1f} hours there.",
    ]
    return "\n".join(lines)


MARKS = "<!-- python -m tests.durations -->", "<!-- end of the table -->"


def page() -> str:
    """The page with an up-to-date table."""
    begin, end = map(re.escape, MARKS)
    pattern = re.compile(f"(?<={begin}\n).*?(?=\n{end})", re.DOTALL)
    text, count = pattern.subn(lambda _: f"\n{table()}\n", PAGE.read_text())
    assert count == 1, f"{PAGE} has no {MARKS}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
