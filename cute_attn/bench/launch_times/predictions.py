"""Predicted microseconds of launches beside measured ones. Needs no GPU.

Each call of `launch-times` runs in the emulator, which records what its warps do.
`cute_attn.timing` predicts each launch from the recording and from the GPU's rates. Calls at even
places of the list are for calibration; the others judge.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from ..harness.environment import describe
from ..harness.output import DEFAULT_OUT
from ..harness.progress import track
from ..harness.registry import Benchmark, Unavailable
from ..harness.report import Report, Row, Verdict

MEAN_PCT, WORST_PCT = 10.0, 25.0  # the goals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", default="h100", help="folder of docs/benchmarks")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="calls whose names have a TEXT")


def run(args: argparse.Namespace) -> Report:
    os.environ["CUTE_DSL_LINEINFO"] = "1"  # before the compiler is imported
    measured = measured_launches(Path(DEFAULT_OUT), args.gpu)
    from .cases import CASES

    names = [n for n in CASES if not args.only or any(text in n for text in args.only)]
    rows: list[Row] = []
    problems = []
    for name in track(names[:1] if args.short else names, "predictions"):
        try:
            rows += predicted_rows(name, list(CASES).index(name), measured, args.gpu)
        except Exception as error:  # noqa: PERF203  (one call that fails must not stop the others)
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return Report(
        benchmark="predictions",
        title=f"Predicted microseconds of launches on an {args.gpu.upper()}, beside measured ones",
        environment=describe(args.argv, commit=args.commit),
        rows=rows,
        verdicts=[*judgement(rows), *(Verdict("a prediction", False, p) for p in problems)],
        notes=["predicted_us are of the emulator's timing model, measured_us of launch-times"],
        tag="" if args.gpu == "h100" else args.gpu,
    )


def measured_launches(directory: Path, gpu: str) -> dict[tuple[str, int], Row]:
    """(call, number of the launch) -> row of the kept report of `launch-times`.

    Raises:
        Unavailable: there is no such report.
    """
    path = directory / gpu / "launch-times.json"
    if not path.is_file():
        raise Unavailable(f"needs {path}: run `bench launch-times` on that GPU")
    return {
        (str(row["call"]), int(row["launch"])): row  # type: ignore[arg-type]
        for row in Report.from_json(path.read_text()).rows
    }


def predicted_rows(
    name: str, place: int, measured: dict[tuple[str, int], Row], gpu: str
) -> list[Row]:
    """A row for each launch of a call."""
    import torch

    from ...emulation import emulated
    from ...emulator import Emulator
    from ...timing import load_rates, predict
    from .cases import CASES
    from .measure import kernel_name

    rates = load_rates(gpu)
    emulator = Emulator(num_sms=rates.sms, checks="none", on_findings="collect", record=1)
    with emulated("sm_90a", emulator):
        CASES[name](torch.device("cpu"))()
    rows: list[Row] = []
    for number, prediction in enumerate(predict(emulator, rates=rates)):
        row = measured.get((name, number))
        if row is None:
            continue
        actual = row["cold_us"]
        assert isinstance(actual, float)
        rows.append(
            {
                "call": name,
                "launch": number,
                "kernel": kernel_name(prediction.kernel),
                "set": "calibrate" if place % 2 == 0 else "judge",
                "measured_us": actual,
                "predicted_us": prediction.us,
                "error_pct": 100 * (prediction.us / actual - 1),
            }
        )
    return rows


def judgement(rows: Sequence[Row]) -> list[Verdict]:
    """Mean and worst error of the launches that judge, and of those for calibration."""
    verdicts = []
    for kind in ("judge", "calibrate"):
        errors = [abs(float(r["error_pct"])) for r in rows if r["set"] == kind]  # type: ignore[arg-type]
        if errors:
            mean, worst = statistics.mean(errors), max(errors)
            verdicts.append(
                Verdict(
                    f"{kind}: mean error at most {MEAN_PCT:g} %, worst at most {WORST_PCT:g} %",
                    mean <= MEAN_PCT and worst <= WORST_PCT,
                    f"mean {mean:.1f} %, worst {worst:.1f} %, {len(errors)} launches",
                )
            )
    return verdicts


BENCHMARK = Benchmark(run=run, needs_gpu=False, add_arguments=add_arguments)
