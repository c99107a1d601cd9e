"""kda_decode, one token of each sequence, against FLA's fused_recurrent_kda and the copy bandwidth.

The kernels apply gate, normalisation and sigmoid. Our kernel updates the float32 state in place;
FLA's kernel writes a new state. With slots "batch" the states are in the order of the batch, as
FLA's call needs. With "random", which only our kernel supports, indices point into a pool in
another order. Each case is checked against the float64 reference, then timed: do_bench medians (the
cost of a call), and the replay of a CUDA graph. The roofline is the time of moving the states twice
and all other tensors once, at the bandwidth of a large copy. copy_us is the time of a copy of as
many bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..harness.environment import describe
from ..harness.progress import track
from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Plot, Report, Row, Verdict
from ..harness.roofline import beside_copy, measure_roofline
from .cases import SLOTS, DecodeCase, add_arguments, at_least, chosen
from .decode_case import MODES, time_case

HEADS = ((64, 64), (32, 64), (8, 64), (64, 128), (32, 128), (8, 128))  # heads of q and k, of v
SHORT_HEADS = ((64, 64), (32, 128))
PLOTTED_HEADS = ((64, 64), (64, 128))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT_BATCHES = (1, 8, 64, 256)
SMALL_BATCH, SMALL_SPEEDUP = 8, 4.0  # speedup of a call
LARGE_BATCH = 64  # from this batch on, a call is compared with a copy
SPEEDUP = 1.13


def add_options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, ("B", "H", "HV", "slots"))
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=MODES)


def run(args: argparse.Namespace) -> Report:
    import torch

    from .problem import peer, worst_errors

    few = args.short and not args.only
    cases = [
        DecodeCase(batch, heads, heads_v, slots=slots)
        for heads, heads_v in (SHORT_HEADS if few else HEADS)
        for batch in (SHORT_BATCHES if few else BATCHES)
        for slots in SLOTS
    ]
    cases = chosen(cases, args.only)
    rep_ms = 30.0 if args.short else 100.0
    roofline = measure_roofline(matmul=False, rep_ms=rep_ms)
    notes = []
    with_peer = not args.no_peer and peer("fla.ops.kda:fused_recurrent_kda") is not None
    if not with_peer:
        why = "--no-peer" if args.no_peer else "flash-linear-attention cannot be imported"
        notes.append(f"FLA was left out: {why}")
    rows: list[Row] = []
    errors = []
    with torch.no_grad():
        for case in track(cases, "kda-decode"):
            beside = with_peer and case.slots == "batch"  # FLA's kernel has no slots
            found, made, more = time_case(case, beside, args.mode, roofline, rep_ms)
            errors.append(found)
            rows += made
            notes += [note for note in more if note not in notes]
    return Report(
        benchmark="kda-decode",
        title="Kimi Delta Attention, decode, K = V = 128, bfloat16 tokens, float32 state",
        environment=describe(args.argv, commit=args.commit),
        parameters={"gate": "lower_bound", "rep_ms": rep_ms},
        roofline=roofline.to_dict(),
        rows=rows,
        verdicts=verdicts(rows),
        notes=[worst_errors(errors), *notes],
        plots=plots(rows),
    )


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Verdicts on a call's time against FLA's time and the time of a copy of as many bytes."""
    found = []
    for row in rows:
        batch = row["batch"]
        assert isinstance(batch, int)
        what = f"B={batch} H={row['heads']} HV={row['heads_v']}"
        what += f" {row['slots']} slots ({row['mode']})"
        if batch >= LARGE_BATCH:
            found.append(beside_copy(what, row))
        if row["mode"] == "do_bench" and row["slots"] == "batch":
            target = SMALL_SPEEDUP if batch <= SMALL_BATCH else SPEEDUP
            found.append(at_least(what, row, "speedup_vs_fla", target))
    return found


def plots(rows: Sequence[Row]) -> list[Plot]:
    found = []
    for heads, heads_v in PLOTTED_HEADS:
        for mode in MODES:
            where: Row = {"heads": heads, "heads_v": heads_v, "slots": "batch", "mode": mode}
            chosen_rows = [row for row in rows if all(row[k] == v for k, v in where.items())]
            if len(chosen_rows) > 1:
                ys: tuple[str, ...] = ("time_us", "fla_us", "roofline_us")
                if any(row["fla_us"] is None for row in chosen_rows):
                    ys = ("time_us", "roofline_us")
                title = f"H={heads} HV={heads_v} ({mode})"
                found.append(Plot("batch", ys, title, "us", where, log_x=True, log_y=True))
    return found


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_options,
    gpu_check=(GpuCheckStage(("--no-peer",), 50),),
)
