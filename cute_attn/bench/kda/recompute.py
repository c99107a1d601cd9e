"""kda_recompute_w_u, the part of kda_chunk_intra that a backward pass repeats, against FLA's.

The stage computes w, u and kg from k, v, the summed gate, beta and the inverse Akk. The roofline is
a copy's time for the bytes that the stage reads and writes.
"""

from __future__ import annotations

import argparse

from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Report
from .stage import add_options, run_stage

TARGET = 1.3


def run(args: argparse.Namespace) -> Report:
    return run_stage("recompute", "kda_recompute_w_u: w, u and kg", TARGET, args)


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_options,
    gpu_check=(GpuCheckStage(("--no-peer",), 40),),
)
