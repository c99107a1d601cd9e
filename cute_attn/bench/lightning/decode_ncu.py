"""Hardware counters of the Lightning decode kernel, from Nsight Compute.

One ncu process per batch size profiles a few launches in a separate program (`--drive`). Profiled
durations are not benchmark times, because each pass starts from a flushed cache and idle clocks.
"""

from __future__ import annotations

import argparse
import sys

from ..harness import ncu
from ..harness.environment import describe
from ..harness.progress import track
from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Report, Row
from ..harness.roofline import gbps

NAME = "lightning-decode-ncu"
BATCHES = (64, 128, 256)
SHORT_BATCHES = (64,)
WARMUP = 3
LAUNCHES = 3
SEED = 20261120
TOP_STALLS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes")
    parser.add_argument(
        "--kernel", default="lightning", help="profile kernels whose name contains this"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one batch")
    parser.add_argument("--drive", type=int, metavar="BATCH", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> Report:
    if args.drive is not None:
        drive(args.drive)
        raise SystemExit(0)
    from .problem import Case

    batches = args.batches or (SHORT_BATCHES if args.short else BATCHES)
    rows = []
    names = set()
    for batch in track(batches, NAME):
        program = [
            sys.executable, "-m", "cute_attn.bench", NAME, "--drive", str(batch)
        ]  # fmt: skip
        launches = ncu.profile(
            program, kernel_word=args.kernel, launches=LAUNCHES, timeout_s=args.timeout
        )
        kernel = ncu.median_kernel(launches)
        names.add(kernel.name)
        rows.append(row(batch, Case(batch=batch).min_bytes, kernel))
    return Report(
        benchmark=NAME,
        title="Lightning Attention decode, hardware counters",
        environment=describe(args.argv, commit=args.commit),
        parameters={"launches": LAUNCHES, "kernels": sorted(names)},
        rows=rows,
        notes=[
            "counters of a cold L2 with the clocks as they are; time_us is ncu's own, not a "
            "benchmark's",
            "a stall's share is of all warp cycles from one issue of a warp to its next",
        ],
    )


def row(batch: int, min_bytes: int, kernel: ncu.Kernel) -> Row:
    """A row of the table; values that ncu did not report are None."""
    stalls: list[tuple[str, float] | None] = [*kernel.stalls()[:TOP_STALLS]]
    stalls += [None] * (TOP_STALLS - len(stalls))
    duration, moved = kernel.duration_us, kernel.dram_bytes
    return {
        "batch": batch,
        "time_us": duration,
        "dram_throughput_pct": kernel.get(ncu.DRAM_THROUGHPUT),
        "dram_gbps": gbps(moved, duration) if moved and duration else None,
        "dram_bytes_over_min_ratio": moved / min_bytes if moved else None,
        "achieved_occupancy_pct": kernel.get(ncu.OCCUPANCY),
        "l2_hit_rate_pct": kernel.get(ncu.L2_HIT_RATE),
        "registers": _whole(kernel.get(ncu.REGISTERS)),
        "block": kernel.block,
        "grid": kernel.grid,
        **{
            f"stall_{rank}": f"{stall[0]} {stall[1]:.0%}" if stall else None
            for rank, stall in enumerate(stalls, start=1)
        },
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def drive(batch: int) -> None:
    """The profiled program: a few warm calls, then a few calls between profiler start and stop."""
    import torch

    from .problem import Case, make_inputs, ours

    case = Case(batch=batch)
    call = ours(case, make_inputs(case, SEED))
    for _ in range(WARMUP):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for _ in range(LAUNCHES):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_arguments,
    gpu_check=(GpuCheckStage((), 60),),
)
