"""compute-sanitizer's tools over small calls of every operator: they find nothing, but for what is
settled, which is exempt by kernel and line.

The kernels are compiled beforehand, in a process of its own, with line numbers.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = [sys.executable, "-m", "tests.gpu.small_calls"]
LAST_CALL = "Lightning decode, drafts"
WITH_LINES = os.environ | {"CUTE_DSL_LINEINFO": "1"}
LIMIT_S = 120

# Findings change the exit status. Of memcheck those about the driver's interface are left out:
# cuda-python asks the driver for functions that it may not have.
TOOLS = {
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),
    "initcheck": (),
    "synccheck": (),
}
CLEAN = {"racecheck": "0 hazards displayed (0 errors, 0 warnings)"}  # others: "0 errors"

ACCESS = re.compile(r"(Read|Write) access at (\S+)\+0x[0-9a-f]+ in (\S+):(\d+)")


def lines_of(file: str, *functions: str) -> set[tuple[str, int]]:
    """(name of the file, line) of all lines of some functions of cute_attn."""
    path = ROOT / "cute_attn" / file
    tree = ast.parse(path.read_text())
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in functions]
    assert len(found) == len(functions)
    return {
        (path.name, line) for f in found for line in range(f.lineno, (f.end_lineno or f.lineno) + 1)
    }


def is_settled(race: list[tuple[str, str, str, str]]) -> bool:
    """Whether a race of racecheck is a copy into a stage that its readers have given back.

    They do by `__syncwarp` and one lane's arrival at an mbarrier, which orders what all of them
    have read before the copy; racecheck does not see that (docs/emulator.md).
    """
    copies = lines_of("kernels/common/ptx/async_copy.py", "copy_async", "copy_bulk")
    return {kind for kind, *_ in race} == {"Read", "Write"} and all(
        re.search("Kda(State|Adjoint)Pass", kernel)
        and ((file, int(line)) in copies) == (kind == "Write")
        for kind, kernel, file, line in race
    )


def unsettled(said: str) -> list[str]:
    """The races of racecheck's report that are not exempt."""
    blocks = re.split(r"(?m)^=+ (?=(?:Error|Warning): )", said)[1:]
    races = [(block, ACCESS.findall(block)) for block in blocks]
    return [
        block
        for block, race in races
        if len(race) != block.count(" access at ") or not is_settled(race)
    ]


def find_compute_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


@pytest.fixture(scope="module")
def compiled() -> None:
    done = subprocess.run(
        [*CALLS, "compile"], cwd=ROOT, env=WITH_LINES, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_sanitizer_finds_nothing(tool: str, compiled: None) -> None:
    sanitizer = find_compute_sanitizer()
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "1000"]
    done = subprocess.run(
        [*command, *TOOLS[tool], *CALLS], cwd=ROOT, env=WITH_LINES, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    lines = [x for x in done.stdout.splitlines() if "Host Frame" not in x]
    said = "\n".join(lines)
    assert LAST_CALL in said, f"{tool}:\n{said[-6000:]}\n{done.stderr[-2000:]}"
    if tool == "racecheck" and done.returncode == 9:
        races = unsettled(said)
        assert not races, "\n".join(races)[:6000]
        return
    assert done.returncode == 0, f"{tool}:\n{said[-6000:]}\n{done.stderr[-2000:]}"
    summary = [line for line in lines if "SUMMARY" in line]
    assert len(summary) == 1 and CLEAN.get(tool, "0 errors") in summary[0], summary
