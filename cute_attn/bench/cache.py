"""Costs of the package before its first launch, on the CPU: imports, cache look-ups, races.

Start-up is measured in fresh processes. The alternatives take turns, so that a busy machine slows
all alternatives. Each process times its own statements; starting the interpreter is not included.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..environment import version_of
from .harness.environment import describe
from .harness.processes import TIMEOUT_S, ChildError, last_line, run_child
from .harness.progress import track
from .harness.registry import Benchmark, GpuCheckStage
from .harness.report import Report, Row, Verdict
from .harness.timing import quantile

# The first kernel of a server, see cute_attn.ops.lightning.plan_decode.
PLAN = "cute_attn.ops.lightning:plan_decode"
PARAMETERS: dict[str, Any] = {"dtype": "bfloat16", "head_dim_k": 128, "head_dim_v": 128}
DEFAULT_ARCH = "sm_90a"
PEER, PEER_IMPORT = "flash-attn-4", "import flash_attn.cute"

MAX_IMPORT_MS, MAX_READY_MS, MAX_LOOKUP_NS = 50.0, 150.0, 1000.0
RACERS = 16

# Each program's last line is JSON: milliseconds by name, and counts.
_TIMED_IMPORT = """
import json, time
start = time.perf_counter()
import torch
after_torch = time.perf_counter()
{statement}
end = time.perf_counter()
torch_ms, after_ms = (after_torch - start) * 1e3, (end - after_torch) * 1e3
print(json.dumps({{"torch_ms": torch_ms, "after_ms": after_ms}}))
"""

_GET = """
import importlib
from cute_attn import cache
module, _, function = {plan!r}.partition(":")
plan = getattr(importlib.import_module(module), function)
kernel, spec = plan({arch!r}, **{parameters!r})[0]
"""

_READY = """
import json, sys, time
import torch
start = time.perf_counter()
{get}
assert callable(cache.get(kernel, spec, {arch!r}))
ready = time.perf_counter()
print(json.dumps({{"ready_ms": (ready - start) * 1e3, "compiles": {compiles},
                  "compiler_imported": "cutlass" in sys.modules}}))
"""

_LOOKUP = """
import json, timeit
{get}
cache.get(kernel, spec, {arch!r})
names = {{"get": cache.get, "kernel": kernel, "spec": spec, "arch": {arch!r}}}
timer = timeit.Timer("get(kernel, spec, arch)", globals=names)
number = 100_000
print(json.dumps({{"lookup_ns": [s / number * 1e9 for s in timer.repeat(9, number)]}}))
"""

_RACER = """
import json, sys, time
{get}
print("ready", flush=True)
sys.stdin.readline()
start = time.perf_counter()
assert callable(cache.get(kernel, spec, {arch!r}))
print(json.dumps({{"ready_ms": (time.perf_counter() - start) * 1e3, "compiles": {compiles}}}))
"""

_COMPILES = "cache.stats().compiles"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help=f"compile for (default: this GPU's, else {DEFAULT_ARCH})")
    parser.add_argument("--repeats", type=int, help="fresh processes of each kind")
    parser.add_argument("--racers", type=int, default=RACERS, help="processes that race for a key")


def program(template: str, arch: str) -> str:
    get = _GET.format(plan=PLAN, arch=arch, parameters=PARAMETERS)
    return template.format(get=get, arch=arch, compiles=_COMPILES)


def run(args: argparse.Namespace) -> Report:
    arch = args.arch or _detect_arch()
    repeats = args.repeats or (3 if args.short else 9)
    with tempfile.TemporaryDirectory() as directory:
        env = {**os.environ, "CUTE_ATTN_CACHE_DIR": str(Path(directory) / "warm")}
        env.pop("CUTE_ATTN_PREBUILT", None)
        ready = program(_READY, arch)
        cold = run_child(ready, env)
        samples = _start_up_samples(ready, env, repeats)
        lookup_ns = run_child(program(_LOOKUP, arch), env)["lookup_ns"]
        race_env = {**env, "CUTE_ATTN_CACHE_DIR": str(Path(directory) / "race")}
        race = run_race(program(_RACER, arch), race_env, args.racers)
    rows = _rows(samples, lookup_ns, race, cold)
    return Report(
        benchmark="cache",
        title="Before the first launch: imports, the kernel cache, a race",
        environment=describe(args.argv, commit=args.commit),
        parameters={"arch": arch, "repeats": repeats, "racers": args.racers, "plan": PLAN}
        | PARAMETERS,
        rows=rows,
        verdicts=verdicts(samples, lookup_ns, race),
        notes=[
            "'ready' is from after `import torch` to a callable kernel in a fresh process: "
            "importing cute_attn, planning, reading and loading the cached entry",
        ],
    )


def _detect_arch() -> str:
    from cute_attn import cache

    try:
        return str(cache.current_arch())
    except cache.CacheError:
        return DEFAULT_ARCH


def _start_up_samples(
    ready: str, env: Mapping[str, str], repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """The start-up measurements in turns, without the peer if the peer is not installed."""
    programs = {
        "torch": _TIMED_IMPORT.format(statement=""),
        "cute_attn": _TIMED_IMPORT.format(statement="import cute_attn"),
        "ready": ready,
    }
    if version_of(PEER) is not None:
        programs["peer"] = _TIMED_IMPORT.format(statement=PEER_IMPORT)
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    for _ in track(range(repeats), "cache: fresh processes"):
        for name, text in programs.items():
            with contextlib.ExitStack() as stack:
                if name == "peer":  # the peer may be installed but fail to import without a GPU
                    stack.enter_context(contextlib.suppress(ChildError))
                samples[name].append(run_child(text, env))
    return samples


def run_race(text: str, env: Mapping[str, str], racers: int) -> list[dict[str, Any]]:
    """Start processes that print "ready", release them at once, and collect their output."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", text],
            env=dict(env), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(racers)
    ]  # fmt: skip
    try:
        for process in processes:
            _pipe(process.stdout).readline()
        for process in processes:
            with contextlib.suppress(BrokenPipeError):  # the process died; communicate() will tell
                _pipe(process.stdin).write("go\n")
                _pipe(process.stdin).flush()
        results = []
        for process in processes:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
            results.append(last_line(stdout, stderr, process.returncode))
        return results
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None  # all three are pipes
    return stream


def _median(samples: Sequence[Mapping[str, Any]], *names: str) -> float:
    return quantile([sum(sample[name] for name in names) for sample in samples], 0.5)


def _rows(
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
    lookup_ns: Sequence[float],
    race: Sequence[Mapping[str, Any]],
    cold: Mapping[str, Any],
) -> list[Row]:
    def row(name: str, values: Sequence[float], unit: str) -> Row:
        return {
            "measurement": name,
            "median": quantile(values, 0.5) if values else None,
            "p20": quantile(values, 0.2) if values else None,
            "p80": quantile(values, 0.8) if values else None,
            "unit": unit,
            "samples": len(values),
        }

    def column(kind: str, *names: str) -> list[float]:
        return [sum(sample[name] for name in names) for sample in samples.get(kind, ())]

    peer_unit = "ms"
    if not samples.get("peer"):
        peer_unit = "does not import here" if "peer" in samples else "not installed"
    both = ("torch_ms", "after_ms")
    return [
        row("import torch", column("torch", "torch_ms"), "ms"),
        row("import torch; import cute_attn", column("cute_attn", *both), "ms"),
        row("import cute_attn, after torch", column("cute_attn", "after_ms"), "ms"),
        row("ready, warm disk cache, after torch", column("ready", "ready_ms"), "ms"),
        row("ready, empty disk cache, after torch", [cold["ready_ms"]], "ms"),
        row(f"{PEER_IMPORT}, after torch", column("peer", "after_ms"), peer_unit),
        row("warm look-up in process", lookup_ns, "ns"),
        row("race for one key, each process", [result["ready_ms"] for result in race], "ms"),
        row("race for one key, compiles of all", [sum(r["compiles"] for r in race)], "compiles"),
    ]


def verdicts(
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
    lookup_ns: Sequence[float],
    race: Sequence[Mapping[str, Any]],
) -> list[Verdict]:
    added = _median(samples["cute_attn"], "after_ms")
    ready = _median(samples["ready"], "ready_ms")
    lookup = quantile(lookup_ns, 0.5)
    compiles = sum(result["compiles"] for result in race)
    warm = samples["ready"]
    unclean = sum(1 for sample in warm if sample["compiles"] or sample["compiler_imported"])
    return [
        Verdict(f"import cute_attn adds at most {MAX_IMPORT_MS:g} ms", added <= MAX_IMPORT_MS,
                f"{added:.1f} ms"),
        Verdict(f"ready within {MAX_READY_MS:g} ms of a warm cache", ready <= MAX_READY_MS,
                f"{ready:.1f} ms"),
        Verdict("a warm start neither compiles nor imports the compiler", unclean == 0,
                f"{unclean} of {len(warm)} processes did"),
        Verdict(f"warm look-up in at most {MAX_LOOKUP_NS:g} ns", lookup <= MAX_LOOKUP_NS,
                f"{lookup:.0f} ns"),
        Verdict(f"{len(race)} racing processes compile once", compiles == 1,
                f"{compiles} compiles"),
    ]  # fmt: skip


BENCHMARK = Benchmark(
    run=run,
    needs_gpu=False,
    add_arguments=add_arguments,
    gpu_check=(GpuCheckStage(("--repeats", "1"), 120),),
)
