"""How long a fresh process waits for its first result, with cold and with warm caches.

Each program runs in its own process. The program makes random inputs and waits for the device. Then
the program times importing the library, the first call, and the first call of another size. A
call's time ends when its result is complete. The first result is import and first call together.
Cold: the compilers' caches are empty directories, as on a new machine. Warm: the previous run has
filled these directories.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .environment import describe
from .processes import ChildError, run_child
from .report import Report, Row, Verdict

LIMIT_S = 420.0

# Limits of a first call: seconds with a cold cache, next to nothing with a warm cache.
COLD_S, WARM_S = 30.0, 1.0

TIMES = ("first_result_s", "import_s", "first_call_s", "other_size_s")

_PROGRAM = """
import json, sys, time
import torch
who, call = {who!r}, {call!r}
{setup}
torch.cuda.synchronize()
with torch.no_grad():
    start = time.perf_counter()
    __import__({module!r})
    imported = time.perf_counter()
    seconds = []
    for arguments in inputs:
        run = call_of(arguments)
        torch.cuda.synchronize()
        before = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - before)
import_s = imported - start
found = {{
    "first_result_s": import_s + seconds[0], "import_s": import_s, "first_call_s": seconds[0],
    "other_size_s": seconds[1],
}}
if who == "ours":
    from cute_attn import cache
    found["compiles"] = cache.stats().compiles
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Peer:
    """Another library.

    Attributes:
        key: the name in rows.
        name: the name in prose.
        package: the package that is imported.
    """

    key: str
    name: str
    package: str


@dataclass(frozen=True)
class Study:
    """A measurement of first results.

    Attributes:
        benchmark: the benchmark's name.
        calls: the sizes of each call, in words.
        modules: the modules that a user imports, by library and call.
        setup: source that defines `inputs`, the arguments of two calls of different sizes, and
            `call_of(arguments)`, which returns the call as a function. The source knows `who` and
            `call`, and must not import a library whose import is timed.
    """

    benchmark: str
    title: str
    peer: Peer
    calls: Mapping[str, str]
    modules: Mapping[tuple[str, str], str]
    setup: str

    def program(self, who: str, call: str) -> str:
        """The source of a process."""
        return _PROGRAM.format(who=who, call=call, module=self.modules[who, call], setup=self.setup)


def add_arguments(parser: argparse.ArgumentParser, calls: Sequence[str], peer: str) -> None:
    parser.add_argument("--calls", nargs="+", choices=calls, help="all of them by default")
    parser.add_argument("--no-peer", action="store_true", help=f"leave {peer} out")
    parser.add_argument("--repeats", type=int, help="processes with warm caches, of each kind")


def run(
    study: Study, args: argparse.Namespace, short_calls: Sequence[str], parameters: Row
) -> Report:
    """The report of `args.calls`, or of all calls; of `short_calls` in a short run."""
    repeats = args.repeats or (1 if args.short else 3)
    notes = []
    peer = study.peer
    contenders = ["ours", peer.key]
    if args.no_peer or importlib.util.find_spec(peer.package) is None:
        contenders.remove(peer.key)
        why = "--no-peer" if args.no_peer else f"{peer.package} cannot be imported"
        notes.append(f"{peer.name} was left out: {why}")
    rows: list[Row] = []
    for call in args.calls or (short_calls if args.short else study.calls):
        for who in contenders:
            found, note = measure(study, call, who, repeats)
            rows += found
            notes += note
    return Report(
        benchmark=study.benchmark,
        title=study.title,
        environment=describe(args.argv, commit=args.commit),
        parameters={**parameters, **study.calls, "repeats_warm": repeats},
        rows=rows,
        verdicts=verdicts(rows, peer),
        notes=[
            "torch is imported, and the device in use, before the time starts",
            *notes,
        ],
    )


def measure(study: Study, call: str, who: str, repeats: int) -> tuple[list[Row], list[str]]:
    """Return a row with cold caches, a row with warm caches, and notes. Times are the shortest of
    `repeats`.

    A process that takes longer than LIMIT_S ends the measurement with a note. An error of the peer
    also ends the measurement. Rows are printed to stderr at once, since a peer with an autotuner
    takes minutes for each row.
    """
    code = study.program(who, call)
    rows: list[Row] = []

    def add(caches: str, found: Mapping[str, Any]) -> None:
        rows.append(_row(call, who, caches, found))
        seconds = found["first_result_s"]
        print(f"{call}, {who}, {caches}: {seconds:.2f} s", file=sys.stderr, flush=True)

    try:
        with tempfile.TemporaryDirectory() as directory:
            env = cold_environment(Path(directory))
            cold = run_child(code, env, LIMIT_S)
            add("cold", cold)
            warm = [run_child(code, env, LIMIT_S) for _ in range(repeats)]
            add("warm", {name: min(found[name] for found in warm) for name in cold})
    except (subprocess.TimeoutExpired, ChildError) as error:
        why = f"no result after {LIMIT_S:.0f} s"
        if isinstance(error, ChildError):
            if who == "ours":
                raise
            why = str(error).splitlines()[-1]
        return rows, [f"{call}, {who}, {'warm' if rows else 'cold'}: {why}"]
    return rows, []


def cold_environment(directory: Path) -> dict[str, str]:
    """The environment of a process whose compilers keep their caches under `directory`."""
    ours = directory / "cute_attn"
    ours.mkdir(mode=0o700)
    env = {
        **os.environ,
        "CUTE_ATTN_CACHE_DIR": str(ours),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        "CUDA_CACHE_PATH": str(directory / "cuda"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(directory / "flash_attention"),
    }
    env.pop("CUTE_ATTN_PREBUILT", None)
    return env


def _row(call: str, who: str, caches: str, found: Mapping[str, Any]) -> Row:
    return {
        "call": call,
        "library": who,
        "caches": caches,
        **{name: found[name] for name in TIMES},
        "compiles": found.get("compiles"),
    }


def verdicts(rows: Sequence[Row], peer: Peer) -> list[Verdict]:
    """Verdicts: a cold call takes seconds, a warm call or another length compiles nothing."""
    found = []
    for row in rows:
        if row["library"] != "ours":
            continue
        first, other = row["first_result_s"], row["other_size_s"]
        assert isinstance(first, float) and isinstance(other, float)
        limit = COLD_S if row["caches"] == "cold" else WARM_S
        name = f"{row['call']}, {row['caches']}"
        others = [r for r in rows if r["library"] == peer.key and _same_run(r, row)]
        beside = f"; {peer.name} {others[0]['first_result_s']:.2f} s" if others else ""
        found.append(
            Verdict(
                f"{name}: first result in at most {limit:g} s",
                first <= limit,
                f"{first:.2f} s, {row['compiles']} kernels compiled{beside}",
            )
        )
        found.append(
            Verdict(f"{name}: another size compiles nothing", other <= WARM_S, f"{other:.4f} s")
        )
    return found


def _same_run(a: Row, b: Row) -> bool:
    return a["call"] == b["call"] and a["caches"] == b["caches"]
