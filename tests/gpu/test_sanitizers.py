"""compute-sanitizer's tools over small calls of every operator: they find nothing.

The kernels are compiled beforehand, in a process of its own, since the tools would report what the
driver answers to a compiler.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = [sys.executable, "-m", "tests.gpu.small_calls"]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
LIMIT_S = 120


def find_compute_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


@pytest.fixture(scope="module")
def compiled() -> None:
    done = subprocess.run(
        [*CALLS, "compile"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_sanitizer_finds_nothing(tool: str, compiled: None) -> None:
    sanitizer = find_compute_sanitizer()
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    # Findings change the exit status, warnings of racecheck included.
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    if tool == "racecheck":
        command += ["--racecheck-report", "analysis"]
    done = subprocess.run(
        [*command, *CALLS], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    said = "\n".join(line for line in done.stdout.splitlines() if "Host Frame" not in line)
    assert done.returncode == 0, f"{tool}:\n{said[-6000:]}\n{done.stderr[-2000:]}"
    summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
    expected = "0 hazards displayed (0 errors, 0 warnings)" if tool == "racecheck" else "0 errors"
    assert len(summary) == 1 and expected in summary[0], summary
