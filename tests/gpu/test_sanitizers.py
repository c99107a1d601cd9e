"""compute-sanitizer's tools over small calls of every operator: they find nothing, but for what is
settled, which is exempt by kernel and line.

The kernels are compiled beforehand, in a process of its own, with line numbers. Each tool runs over
each group of calls in a process of its own, several of them at once.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from .small_calls import GROUPS

ROOT = Path(__file__).parents[2]
CALLS = [sys.executable, "-m", "tests.gpu.small_calls"]
WITH_LINES = os.environ | {"CUTE_DSL_LINEINFO": "1"}
LIMIT_S = 120  # of each process
COMPILE_LIMIT_S = 180  # for 150 kernels, beside other tests
PROCESSES = 10  # at once; most of their time is spent starting
PORTS = 100  # for each process, to the tool from what it watches

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


Lines = set[tuple[str, int]]  # (name of the file, line)


def lines_of(file: str, *functions: str) -> Lines:
    """All lines of some functions of cute_attn."""
    path = ROOT / "cute_attn" / file
    tree = ast.parse(path.read_text())
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in functions]
    assert len(found) == len(functions)
    return {
        (path.name, line) for f in found for line in range(f.lineno, (f.end_lineno or f.lineno) + 1)
    }


# Kernels with rings whose readers give a stage back by `__syncwarp` and one lane's arrival at an
# mbarrier, which orders what all lanes have read before the copy that follows; racecheck does not
# see that (docs/emulator.md). By what is copied.
RINGS = (
    "KdaStatePass", "KdaAdjointPass",  # operands
    "HeadStatePass", "HeadPoolPass", "HeadAdjointPass",  # operands
    "Sm90DkDv", "Sm90Hd64Backward", "Sm90Hd128Backward", "Sm90WideDkDv",  # lse and delta
    "Sm90LatentDecode",  # q
)  # fmt: skip
STORES = ("Sm90WideDkDv", "Sm90LatentDecode")
FACTORS = ("HeadForward", "HeadPoolForward")
ZEROS = ("HeadAdjointPass",)
FIRST_ARRIVALS = ("KdaGradients", "GatedDeltaGradients")


def is_settled(race: list[tuple[str, str, str, str]]) -> bool:
    """Whether a race of racecheck's is one of those whose cause is known:

    - a copy into a stage that its readers have given back;
    - the same of P', or of factors of rows, stored by the warps of one warpgroup for those of
      another, which receive and give back a stage in that way;
    - the same of the factors of a chunk's tokens, which warps that prepare store for the state's;
    - zeros that the lanes of a warp store, before one lane of the warp signals other warps;
    - one thread's initialisation of an mbarrier, and its own arrival there.
    """
    memory, pipeline = "kernels/common/ptx/memory.py", "kernels/common/pipeline.py"
    copies = lines_of("kernels/common/ptx/async_copy.py", "copy_async", "copy_bulk")
    matrices = lines_of("kernels/common/ptx/matrices.py", "load_matrices")
    scores = "kernels/delta/chunk/per_head/head_scores.py"
    settled = (  # kernels, lines that write, and lines that read: None for all others
        (RINGS, copies, None),
        (STORES, lines_of(memory, "_store"), lines_of(memory, "_load")),
        (FACTORS, lines_of(scores, "store_factors"), lines_of(memory, "_load")),
        (ZEROS, lines_of(memory, "_store"), matrices),
        (FIRST_ARRIVALS, lines_of(pipeline, "init"), lines_of(pipeline, "expect")),
    )

    def is_at(kind: str, place: tuple[str, int], writes: Lines, reads: Lines | None) -> bool:
        if kind == "Write":
            return place in writes
        return place not in writes if reads is None else place in reads

    return {kind for kind, *_ in race} == {"Read", "Write"} and any(
        all(
            re.search("|".join(kernels), kernel) and is_at(kind, (file, int(line)), writes, reads)
            for kind, kernel, file, line in race
        )
        for kernels, writes, reads in settled
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


Run = Future[subprocess.CompletedProcess[str]]


def run(*command: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=WITH_LINES, capture_output=True, text=True, timeout=limit_s,
        check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Run]]:
    """The processes of all tests of this module that are selected, by tool and group."""
    sanitizer = find_compute_sanitizer()
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    done = run(*CALLS, "compile", limit_s=COMPILE_LIMIT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    with ThreadPoolExecutor(PROCESSES) as pool:
        runs = {}
        for item in request.session.items:
            if isinstance(item, pytest.Function) and item.path == request.path:
                tool, group = (item.callspec.params[name] for name in ("tool", "group"))
                command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
                port = 20_000 + PORTS * len(runs)
                command += ["--print-limit", "1000", "--port", str(port), *TOOLS[tool]]
                runs[tool, group] = pool.submit(run, *command, *CALLS, group)
        yield runs
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_sanitizer_finds_nothing(tool: str, group: str, runs: dict[tuple[str, str], Run]) -> None:
    done = runs[tool, group].result()
    lines = [x for x in done.stdout.splitlines() if "Host Frame" not in x]
    said = "\n".join(lines)
    assert f"done: {group}" in lines, f"{tool}:\n{said[-6000:]}\n{done.stderr[-2000:]}"
    if tool == "racecheck" and done.returncode == 9:
        races = unsettled(said)
        assert not races, "\n".join(races)[:6000]
        return
    assert done.returncode == 0, f"{tool}:\n{said[-6000:]}\n{done.stderr[-2000:]}"
    summary = [line for line in lines if "SUMMARY" in line]
    assert len(summary) == 1 and CLEAN.get(tool, "0 errors") in summary[0], summary
