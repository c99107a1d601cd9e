"""How long a fresh process waits for its first KDA result, with cold and with warm caches: of
chunk_kda, of a training step (forward and backward) and of kda_decode.

Each program runs in a process of its own: it makes random inputs, waits for the device, and then
times importing the library, the first call and the first call of another size. A call's time ends
when its result is complete. The first result is import and first call together. Cold: the
compilers' caches are empty directories, as on a new machine; warm: the same directories, filled by
the run before. Ours compiles without tuning; FLA's autotuner times every configuration of every
kernel for each number of heads.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.environment import describe
from ..harness.processes import run_child
from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Report, Row, Verdict

LIMIT_S = 420.0
CALLS = ("chunk_kda", "training_step", "kda_decode")
SHORT_CALLS = ("chunk_kda", "kda_decode")
MODULES = {  # what a user imports
    ("ours", "chunk_kda"): "cute_attn.ops.kda.chunk",
    ("ours", "training_step"): "cute_attn.ops.kda.chunk",
    ("ours", "kda_decode"): "cute_attn.ops.kda.decode",
    ("fla", "chunk_kda"): "fla.ops.kda",
    ("fla", "training_step"): "fla.ops.kda",
    ("fla", "kda_decode"): "fla.ops.kda",
}

# Limits of a first call: seconds with a cold cache, next to nothing with a warm one.
COLD_S, WARM_S = 30.0, 1.0

TIMES = ("first_result_s", "import_s", "first_call_s", "other_size_s")

_PROGRAM = """
import json, sys, time
import torch
from cute_attn.bench.kda import problem, training
from cute_attn.bench.kda.cases import Case, DecodeCase

who, call = {who!r}, {call!r}
if call == "chunk_kda":
    cases = [Case({heads}, {heads_v}, tokens) for tokens in (4096, 5000)]
    make, calls = problem.chunk_arguments, problem.chunk_calls
elif call == "training_step":
    cases = [Case({heads}, {heads_v}, tokens) for tokens in (4096, 5000)]
    make, calls = training.arguments, training.calls
else:
    cases = [DecodeCase(batch, {heads}, {heads_v}) for batch in (8, 24)]
    make, calls = problem.decode_arguments, problem.decode_calls
inputs = [make(case) for case in cases]
torch.cuda.synchronize()
with torch.no_grad():
    start = time.perf_counter()
    __import__({module!r})
    imported = time.perf_counter()
    seconds = []
    for arguments in inputs:
        run = calls(arguments, with_peer=who == "fla")[who]
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-v", type=int, default=32)
    parser.add_argument("--calls", nargs="+", choices=CALLS, help="all of them by default")
    parser.add_argument("--no-peer", action="store_true", help="leave flash-linear-attention out")
    parser.add_argument("--repeats", type=int, help="processes with warm caches, of each kind")


def run(args: argparse.Namespace) -> Report:
    repeats = args.repeats or (1 if args.short else 3)
    notes = []
    contenders = ["ours", "fla"]
    if args.no_peer or importlib.util.find_spec("fla") is None:
        contenders.remove("fla")
        why = "--no-peer" if args.no_peer else "flash-linear-attention cannot be imported"
        notes.append(f"FLA was left out: {why}")
    rows: list[Row] = []
    for call in args.calls or (SHORT_CALLS if args.short else CALLS):
        for who in contenders:
            found, note = measure(call, who, args.heads, args.heads_v, repeats)
            rows += found
            notes += note
    return Report(
        benchmark="kda-first-result",
        title="Kimi Delta Attention: the time until the first result of a process",
        environment=describe(args.argv, commit=args.commit),
        parameters={
            "heads": args.heads,
            "heads_v": args.heads_v,
            "chunk_kda": "B=1, T=4096, then T=5000",
            "training_step": "the same, forward and backward",
            "kda_decode": "B=8, then B=24",
            "repeats_warm": repeats,
        },
        rows=rows,
        verdicts=verdicts(rows),
        notes=[
            "torch is imported, and the device in use, before the time starts",
            *notes,
        ],
    )


def measure(
    call: str, who: str, heads: int, heads_v: int, repeats: int
) -> tuple[list[Row], list[str]]:
    """A row with cold caches and one with warm ones, the shortest times of `repeats`; and notes.

    A process that takes longer than LIMIT_S ends the measurement with a note. Rows are printed to
    stderr at once, since a peer with an autotuner takes minutes for each.
    """
    code = _PROGRAM.format(
        call=call, who=who, heads=heads, heads_v=heads_v, module=MODULES[who, call]
    )
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
    except subprocess.TimeoutExpired:
        missing = "warm" if rows else "cold"
        return rows, [f"{call}, {who}, {missing}: no result after {LIMIT_S:.0f} s"]
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


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Verdicts: a cold call takes seconds, a warm call or another length compiles nothing."""
    found = []
    for row in rows:
        if row["library"] != "ours":
            continue
        first, other = row["first_result_s"], row["other_size_s"]
        assert isinstance(first, float) and isinstance(other, float)
        limit = COLD_S if row["caches"] == "cold" else WARM_S
        name = f"{row['call']}, {row['caches']}"
        others = [r for r in rows if r["library"] == "fla" and _same_run(r, row)]
        beside = f"; FLA {others[0]['first_result_s']:.2f} s" if others else ""
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


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_arguments,
    gpu_check=(GpuCheckStage(("--no-peer",), 80),),
)
