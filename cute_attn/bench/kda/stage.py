"""Timing of one stage of the modular path, for `kda-intra` and `kda-recompute`.

B = 2, and 64 heads of q and k with 64 and with 128 value heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from ..harness.environment import describe
from ..harness.progress import track
from ..harness.report import Report, Row, Verdict
from ..harness.roofline import measure_roofline
from .cases import (
    Case,
    add_arguments,
    add_tuning,
    at_least,
    chosen,
    label,
    that_fit,
    timing_columns,
)

TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
SHORT_TOKENS = (1024, 4096)
HEADS = ((64, 64), (64, 128))
BATCH = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, ("H", "HV", "T"))
    add_tuning(parser)


def run_stage(stage: str, title: str, target: float, args: argparse.Namespace) -> Report:
    """The report of "intra" or "recompute".

    Args:
        target: the speedup over the peer that every case should reach.
    """
    import torch

    from . import problem
    from .fla_tuning import compiled_peer

    tokens = SHORT_TOKENS if args.short and not args.only else TOKENS
    cases = [Case(h, hv, t, batch=BATCH) for h, hv in HEADS for t in tokens]
    cases, notes = that_fit(chosen(cases, args.only), torch.cuda.mem_get_info()[0])
    rep_ms = 30.0 if args.short else 100.0
    roofline = measure_roofline(matmul=False, rep_ms=rep_ms)
    make = {"intra": problem.intra_calls, "recompute": problem.recompute_calls}[stage]
    rows: list[Row] = []
    errors = []
    with torch.no_grad():
        with_peer, peer_notes = compiled_peer(stage, tuning_cases(cases), args)
        for case in track(cases, f"kda-{stage}"):
            with problem.freed():
                arguments = problem.stage_arguments(case)
                calls = make(arguments, with_peer=with_peer)
                check = partial(problem.check_stage, stage, case, arguments)
                found, calls, refused = problem.agreed(check, calls)
                errors.append(found)
                notes += refused
                timings, _ = problem.time_calls(calls, "do_bench", rep_ms)
                floor = case.intra_bytes if stage == "intra" else case.recompute_bytes
                sizes = {name: case.rows[name] for name in ("batch", "heads", "heads_v", "tokens")}
                rows.append({**sizes, **timing_columns(timings, floor, roofline)})
                del arguments, calls
    return Report(
        benchmark=f"kda-{stage}",
        title=title,
        environment=describe(args.argv, commit=args.commit),
        parameters={"head_dim_k": 128, "head_dim_v": 128, "dtype": "bfloat16", "rep_ms": rep_ms},
        roofline=roofline.to_dict(),
        rows=rows,
        verdicts=verdicts(rows, target),
        notes=[problem.worst_errors(errors), *peer_notes, *notes],
    )


def tuning_cases(cases: Sequence[Case]) -> list[Case]:
    """The case of the middle size for each number of heads."""
    by_heads: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        by_heads.setdefault((case.heads, case.heads_v), []).append(case)
    return [few[len(few) // 2] for few in by_heads.values()]


def verdicts(rows: Sequence[Row], target: float) -> list[Verdict]:
    return [
        at_least(label({**row, "lengths": "dense"}), row, "speedup_vs_fla", target) for row in rows
    ]
