"""kda_chunk_intra, everything of a chunk that needs no state, against FLA's chunk_kda_fwd_intra.

Aqk, the inverse Akk, w, u and kg, from normalised q and k and the summed gate; FLA with safe_gate.
The roofline is the time in which a copy moves what the stage reads and writes.
"""

from __future__ import annotations

import argparse

from ._kda_stage import add_options, run_stage
from .registry import Benchmark, GpuCheckStage
from .report import Report

TARGET = 1.5


def run(args: argparse.Namespace) -> Report:
    return run_stage("intra", "kda_chunk_intra: Aqk, Akk, w, u and kg", TARGET, args)


BENCHMARK = Benchmark(
    name="kda-intra",
    summary="kda_chunk_intra against FLA and the bytes that it must move",
    run=run,
    add_arguments=add_options,
    gpu_check=(GpuCheckStage(("--no-peer",), 40),),
)
