"""kda_chunk_intra, the part of a chunk that needs no state, against FLA's chunk_kda_fwd_intra.

The stage computes Aqk, the inverse Akk, w, u and kg, from normalised q and k and the summed gate.
FLA runs with safe_gate. The roofline is a copy's time for the bytes that the stage reads and
writes.
"""

from __future__ import annotations

import argparse

from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Report
from .stage import add_options, run_stage

TARGET = 1.5


def run(args: argparse.Namespace) -> Report:
    return run_stage("intra", "kda_chunk_intra: Aqk, Akk, w, u and kg", TARGET, args)


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_options,
    gpu_check=(GpuCheckStage(("--no-peer",), 40),),
)
