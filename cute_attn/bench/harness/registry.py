"""The table of benchmarks, and their interface. A benchmark is imported when its name is given."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...families import FAMILIES
from .report import Report

EXIT_UNAVAILABLE = 3  # the command's exit status for Unavailable


class Listed(NamedTuple):
    """The module below cute_attn.bench that defines `BENCHMARK`, and one line of help."""

    module: str
    summary: str


_OF_NO_FAMILY = {
    "async-copy": Listed(
        "async_copy.study", "copies of tiles to shared memory: plain loads, cp.async, bulk and TMA"
    ),
    "cache": Listed("cache", "imports, look-ups and races of the kernel cache, on the CPU"),
    "emulator": Listed(
        "emulator", "speed of the emulator, with and without its checks; needs no GPU"
    ),
    "fmha-ladder": Listed(
        "ladder.fmha", "what each optimisation of an attention forward brings, step by step"
    ),
    "gpu-check": Listed(
        "gpu_check", "everything that needs a GPU: its tests, then short benchmarks"
    ),
    "launch-overhead": Listed(
        "launch_overhead", "host time of a launch, by layer, beside torch.mul"
    ),
    "launch-times": Listed(
        "launch_times.study", "times of single launches, which judge the timing model"
    ),
    "predictions": Listed(
        "launch_times.predictions", "the timing model's predictions of launches; needs no GPU"
    ),
    "predictions-b200": Listed(
        "launch_times.blackwell",
        "predicted rates of attention on a B200 beside FlashAttention-4's; needs no GPU",
    ),
    "rates": Listed(
        "rates.study", "rates and latencies of the GPU's units, which the timing model reads"
    ),
    "sass": Listed(
        "sass", "static analysis of a kernel's machine code beside FlashAttention-4's; needs no GPU"
    ),
}
_OF_FAMILIES = {
    name: Listed(*listed) for family in FAMILIES for name, listed in family.benchmarks.items()
}
BENCHMARKS = dict(sorted((_OF_NO_FAMILY | _OF_FAMILIES).items()))


class Unavailable(RuntimeError):
    """This machine cannot run the benchmark: no GPU, a tool or package is missing."""


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """`Benchmark.add_arguments` of a benchmark that adds no options."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Attributes:
        run: measures and returns the report. The argument of `run` holds the parsed options,
            including `short`, and the command line as `argv`. Raises `Unavailable` if the benchmark
            cannot run.
        needs_gpu: whether the benchmark is refused on a machine without a GPU.
        add_arguments: adds the benchmark's own options to a parser.
        gpu_check: the command lines, without the name, that `gpu-check` runs.
    """

    run: Callable[[argparse.Namespace], Report]
    needs_gpu: bool = True
    add_arguments: Callable[[argparse.ArgumentParser], None] = no_arguments
    gpu_check: Sequence[GpuCheckStage] = ()


@dataclass(frozen=True)
class GpuCheckStage:
    """One run of a benchmark in `gpu-check`: options added to --short, and a limit in seconds."""

    arguments: tuple[str, ...]
    limit_s: float


def load(name: str) -> Benchmark:
    """The benchmark of this name, a key of `BENCHMARKS`."""
    module = importlib.import_module(f"cute_attn.bench.{BENCHMARKS[name].module}")
    benchmark = module.BENCHMARK
    assert isinstance(benchmark, Benchmark), name
    return benchmark


def require_gpu() -> None:
    """Raise `Unavailable` unless torch sees a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise Unavailable("needs a CUDA device, and torch sees none")
