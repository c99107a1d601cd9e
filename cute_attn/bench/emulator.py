"""Speed of the emulator in warp-instructions per second, with and without its checks.

The yardstick is FlashAttention-4's head_dim 256 forward for sm_100a, because FlashAttention-4 is
not our code. The yardstick is left out if FlashAttention-4 is missing. Lightning decode shows how
time grows with size. No GPU is needed.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..emulator import Emulator
from .harness.environment import describe
from .harness.progress import track
from .harness.registry import Benchmark
from .harness.report import Report, Row, Verdict

MAX_SECONDS, GOAL_SECONDS = 15.0, 5.0
MAX_MIB = 2048.0
MIN_SPEEDUP = 2.0
PEER_LENGTHS = (256, 512, 1024, 2048)
YARDSTICK = 512
BATCHES = (1, 4, 16, 64)
CHECKS = ("all", "none")

Call = Callable[[Emulator], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the fastest")


def run(options: argparse.Namespace) -> Report:
    repeats = 1 if options.short else options.repeats
    calls = list(_lightning(options.short))
    notes = [
        "seconds are of the launches alone; parsing and lowering come once for a kernel",
        "with checks, matrix products are added up as tensor cores do; without, in plain float32",
    ]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            calls += _flash_attention(Path(scratch), options.short)
    except ImportError as error:
        notes.append(f"without FlashAttention-4: {error}")
    rows = [
        _measure(name, size, call, checks, repeats)
        for name, size, call in track(calls, "emulator")
        for checks in CHECKS
    ]
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Report(
        benchmark="emulator",
        title="The emulator: warp-instructions a second",
        environment=describe(options.argv, commit=options.commit),
        parameters={"repeats": repeats, "num_sms": 4, "schedule": "fair"},
        rows=rows,
        verdicts=_verdicts(rows, mib),
        notes=[*notes, f"the largest resident size of the process was {mib:.0f} MiB"],
    )


def _measure(name: str, size: int, call: Call, checks: str, repeats: int) -> Row:
    best, instructions = float("inf"), 0
    for _ in range(repeats):
        emulator = Emulator(checks=checks)
        started = time.perf_counter()
        call(emulator)
        wall = time.perf_counter() - started
        instructions = emulator.report.instructions
        launches = sum(launch.seconds for launch in emulator.report.launches)
        best = min(best, launches, wall)
    return {
        "kernel": name,
        "size": size,
        "checks": checks,
        "warp_instructions": instructions,
        "time_s": best,
        "warp_instructions_per_ms": round(instructions / best / 1e3),
    }


def _lightning(short: bool) -> Iterator[tuple[str, int, Call]]:
    import torch

    import cute_attn

    def decode(batch: int) -> Call:
        q, k, v = torch.randn(3, batch, 4, 128).to(torch.bfloat16)
        state, decay = torch.randn(batch, 4, 128, 128), torch.rand(4)

        def call(emulator: Emulator) -> None:
            with cute_attn.emulated("sm_90a", emulator):
                cute_attn.lightning_attn_decode(q, k, v, state.clone(), decay)

        return call

    for batch in BATCHES[:2] if short else BATCHES:
        yield "lightning_decode sm_90a, H=4, B=", batch, decode(batch)


def _flash_attention(scratch: Path, short: bool) -> list[tuple[str, int, Call]]:
    """FlashAttention-4's kernels, compiled into `scratch`.

    Raises:
        ImportError: FlashAttention-4 is not installed.
    """
    from . import peers  # imports torch

    if reason := peers.missing("flash_attention_4"):
        raise ImportError(reason)
    lengths = (YARDSTICK,) if short else PEER_LENGTHS
    requests = [
        peers.flash_attention_4.forward(arch="sm_100a", head_dim=256, seqlen_q=n) for n in lengths
    ]
    calls: list[tuple[str, int, Call]] = []
    for n, captured in zip(lengths, peers.capture_all(scratch, requests), strict=True):
        (step,) = captured.calls
        image, ptx = Path(step.function.object_file).read_bytes(), step.function.ptx

        def call(
            emulator: Emulator, captured: Any = captured, image: bytes = image, ptx: str = ptx
        ) -> None:
            memory = captured.materialise(captured.random_inputs())
            function = emulator.load_object(image, ptx)
            function(*memory.arguments(captured.calls[0]))

        calls.append(("FlashAttention-4 forward sm_100a hd256, B=1 H=2, S=", n, call))
    return calls


def _verdicts(rows: list[Row], mib: float) -> list[Verdict]:
    at = {
        str(row["checks"]): float(row["time_s"] or 0)
        for row in rows
        if str(row["kernel"]).startswith("Flash") and row["size"] == YARDSTICK
    }
    names = (
        f"FlashAttention-4 hd256, S={YARDSTICK}, every check, under {MAX_SECONDS:g} s",
        f"the same under {GOAL_SECONDS:g} s",
        f"at least {MIN_SPEEDUP:g}x faster without checks",
    )
    memory = Verdict(f"under {MAX_MIB:g} MiB", mib < MAX_MIB, f"{mib:.0f} MiB")
    if not at:
        return [*(Verdict(name, None, "FlashAttention-4 is not here") for name in names), memory]
    every, none = at["all"], at["none"]
    return [
        Verdict(names[0], every < MAX_SECONDS, f"{every:.2f} s"),
        Verdict(names[1], every < GOAL_SECONDS, f"{every:.2f} s"),
        Verdict(names[2], every / none >= MIN_SPEEDUP, f"{every / none:.2f}x, {none:.2f} s"),
        memory,
    ]


BENCHMARK = Benchmark(
    run=run,
    needs_gpu=False,
    add_arguments=add_arguments,
)
