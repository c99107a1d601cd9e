"""Finding the benchmarks: the modules of this package that define `BENCHMARK`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .report import Report

EXIT_UNAVAILABLE = 3  # of the command, for Unavailable


class Unavailable(RuntimeError):
    """This machine cannot run the benchmark: no GPU, a tool or package is missing."""


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """`Benchmark.add_arguments` of a benchmark without options of its own."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Attributes:
        name: what one types; of the form lightning-decode.
        summary: one line of help.
        run: does it. Its argument holds the parsed options, `short` among them, and the command
            line as `argv`. Raises `Unavailable` where it cannot run.
        needs_gpu: it is refused on a machine without one.
        add_arguments: adds the options of its own.
        gpu_check: the command lines, name left out, that `gpu-check` runs.
    """

    name: str
    summary: str
    run: Callable[[argparse.Namespace], Report]
    needs_gpu: bool = True
    add_arguments: Callable[[argparse.ArgumentParser], None] = no_arguments
    gpu_check: Sequence[GpuCheckStage] = field(default=())


@dataclass(frozen=True)
class GpuCheckStage:
    """One run of a benchmark within `gpu-check`: options beside --short, and a limit in seconds."""

    arguments: tuple[str, ...]
    limit_s: float


def discover() -> dict[str, Benchmark]:
    """All benchmarks, by name."""
    package = importlib.import_module(__package__ or "cute_attn.bench")
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("_") or info.ispkg:
            continue  # what benchmarks share
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        benchmark = getattr(module, "BENCHMARK", None)
        if isinstance(benchmark, Benchmark):
            found[benchmark.name] = benchmark
    return dict(sorted(found.items()))


def require_gpu() -> None:
    """Raise `Unavailable` unless torch sees a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise Unavailable("needs a CUDA device, and torch sees none")
