"""How long a fresh process waits for its first KDA result, with cold and with warm caches. The
results are of chunk_kda, of a training step (forward and backward) and of kda_decode. See
`harness.first_result`.

Our package compiles without tuning; FLA's autotuner times every configuration of every kernel for
each number of heads.
"""

from __future__ import annotations

import argparse

from ..harness import first_result
from ..harness.first_result import Peer, Study
from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Report

SHORT_CALLS = ("chunk_kda", "kda_decode")
CALLS = {
    "chunk_kda": "B=1, T=4096, then T=5000",
    "training_step": "the same, forward and backward",
    "kda_decode": "B=8, then B=24",
}
MODULES = {  # the modules that a user imports
    ("ours", "chunk_kda"): "cute_attn.ops.kda.chunk",
    ("ours", "training_step"): "cute_attn.ops.kda.chunk",
    ("ours", "kda_decode"): "cute_attn.ops.kda.decode",
    ("fla", "chunk_kda"): "fla.ops.kda",
    ("fla", "training_step"): "fla.ops.kda",
    ("fla", "kda_decode"): "fla.ops.kda",
}

_SETUP = """
from cute_attn.bench.kda import problem, training
from cute_attn.bench.kda.cases import Case, DecodeCase

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

def call_of(arguments):
    return calls(arguments, with_peer=who == "fla")[who]
"""


def study(heads: int, heads_v: int) -> Study:
    return Study(
        benchmark="kda-first-result",
        title="Kimi Delta Attention: the time until the first result of a process",
        peer=Peer("fla", "FLA", "fla"),
        calls=CALLS,
        modules=MODULES,
        setup=_SETUP.format(heads=heads, heads_v=heads_v),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-v", type=int, default=32)
    first_result.add_arguments(parser, tuple(CALLS), "flash-linear-attention")


def run(args: argparse.Namespace) -> Report:
    return first_result.run(
        study(args.heads, args.heads_v), args, SHORT_CALLS,
        {"heads": args.heads, "heads_v": args.heads_v},
    )  # fmt: skip


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_arguments,
    gpu_check=(GpuCheckStage(("--no-peer",), 80),),
)
