"""Run every operator, forward and backward, and check it against its float64 reference.

    python examples/quickstart.py

The folder `checks` has the checks of each family. Without a GPU, or on a GPU that an operator has
no kernel for, the same kernels run in the emulator, for Hopper and for Blackwell, with fewer heads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pkgutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
from checks.common import Check, Errors
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import cute_attn
from cute_attn import cache
from cute_attn.emulator import Emulator, EmulatorUnavailable
from cute_attn.families import FAMILIES

HEADS = 16
EMULATED_HEADS = 3
MOST_PROCESSES = 8
ROUNDING = torch.finfo(torch.float32).eps

console = Console()
if not console.is_terminal:
    console = Console(width=120)  # of a log or a pipe, where rich would take 80


def main() -> bool:
    """Run everything, and return whether every result agrees with the reference."""
    console.print(f"cute_attn {cute_attn.__version__}, torch {torch.__version__}")
    runs = [(name, emulated) for name in CHECKS for emulated in targets(CHECKS[name])]
    table = Table("operator", "on", "results", "relative error", "plain PyTorch's", "")
    passed = True
    found: dict[tuple[str, str | None], Errors] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("Running", total=len(runs))
        for run, errors in results(runs):
            found[run] = errors
            progress.update(task, description=run[0], advance=1)
    for name, emulated in runs:
        errors = found[name, emulated]
        # The rule of docs/testing.md: at most twice plain PyTorch's error, plus one rounding.
        agrees = all(error <= 2 * plain + ROUNDING for error, plain in errors.values())
        passed &= agrees
        ours, plain = zip(*errors.values(), strict=True)
        table.add_row(
            name,
            f"{emulated} (emulated)" if emulated else torch.cuda.get_device_name(),
            " / ".join(errors),
            " / ".join(f"{error:.1e}" for error in ours),
            " / ".join(f"{error:.1e}" for error in plain),
            "agrees" if agrees else "WRONG",
        )
    console.print(table)
    if any(emulated for _, emulated in runs):
        console.print(
            "Emulated means that no GPU here runs these kernels: the emulator ran the "
            "compiled code, and found no race, no missing fence, no access out of bounds and no "
            "uninitialised read."
        )
    return passed


Run = tuple[str, str | None]  # a check, and the architecture to emulate; None stands for the GPU
CHECKS: dict[str, Check] = {
    name: check
    for family in FAMILIES
    for name, check in pkgutil.resolve_name(family.checks).items()
}


def results(runs: list[Run]) -> Iterator[tuple[Run, Errors]]:
    """What each run finds, in the order in which they end: emulated ones in a few processes."""
    emulated = [run for run in runs if run[1]]
    for run in runs:
        if run not in emulated:
            yield run, result(*run)
    if emulated:
        Emulator()  # builds its engine where that was not done yet
        workers = min(os.cpu_count() or 1, MOST_PROCESSES)
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            pending = {pool.submit(result, *run): run for run in emulated}
            for done in as_completed(pending):
                yield pending[done], done.result()


def result(name: str, emulated: str | None) -> Errors:
    torch.manual_seed(0)
    with machine(emulated):
        if emulated:
            return CHECKS[name].run("cpu", EMULATED_HEADS)
        return CHECKS[name].run("cuda", HEADS)


def targets(check: Check) -> tuple[str | None, ...]:
    """Where to run it: as in `Run`."""
    on_gpu = torch.cuda.is_available() and (
        check.gpus is None or cache.current_arch() in check.gpus
    )
    return (None,) if on_gpu else check.emulated


@contextlib.contextmanager
def machine(emulated: str | None) -> Iterator[None]:
    """The GPU, or an emulator that raises an exception on anything it finds wrong."""
    if emulated is None:
        yield
    else:
        with cute_attn.emulated(emulated):
            yield


if __name__ == "__main__":
    try:
        passed = main()
    except EmulatorUnavailable as error:
        raise SystemExit(f"There is no GPU here, and {error}") from None
    raise SystemExit(0 if passed else 1)
