"""Microseconds of single launches, by the profiler, to judge predictions by.

The calls are small enough for the emulator, which `bench predictions` runs them in.
"""

from __future__ import annotations

import argparse

from ..harness.environment import describe
from ..harness.progress import track
from ..harness.registry import Benchmark, GpuCheckStage, Unavailable
from ..harness.report import Report, Row, Verdict

SHORT = ("forward hd128 4x1024", "lightning decode B=4 H=32")


def run(args: argparse.Namespace) -> Report:
    import torch

    from ..harness.timing import CudaDevice
    from .cases import CASES
    from .measure import kernel_name, launches

    if torch.cuda.get_device_capability() != (9, 0):
        raise Unavailable("runs kernels for sm_90a, as the predictions do")
    device = torch.device("cuda", torch.cuda.current_device())
    flush = CudaDevice().flusher("read")
    rows: list[Row] = []
    problems = []
    for name in track(SHORT if args.short else list(CASES), "launches"):
        try:
            cold, warm = launches(CASES[name](device), [flush, lambda: None])
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
            continue
        rows += [
            {
                "call": name,
                "launch": number,
                "kernel": kernel_name(kernel),
                "cold_us": cold_us,
                "warm_us": warm_us,
            }
            for number, ((kernel, cold_us), (_, warm_us)) in enumerate(zip(cold, warm, strict=True))
        ]
    return Report(
        benchmark="launch-times",
        title="Single launches, by the profiler, with a cold and a warm L2",
        environment=describe(args.argv, commit=args.commit),
        rows=rows,
        verdicts=[Verdict("every call ran", not problems, "; ".join(problems) or "all of them")],
        succeeded=not problems,
    )


BENCHMARK = Benchmark(run=run, gpu_check=(GpuCheckStage((), 30),))
