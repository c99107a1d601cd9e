"""gated_delta_rule_decode, one token of each sequence, against FLA's
fused_recurrent_gated_delta_rule and the copy bandwidth, without and with the causal convolution.

The cases, the checks and the times are `kda-decode`'s. States are float32. FLA's call is timed
without the convolution, and without a pool.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..harness.environment import describe
from ..harness.progress import track
from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Report, Row, Verdict
from ..harness.roofline import beside_copy, measure_roofline
from ..kda.cases import DecodeCase, Slots, add_arguments, at_least, chosen
from ..kda.decode_case import MODES, time_case

HEADS = ((16, 32), (16, 64))  # heads of q and k, of v: Qwen3-Next, Qwen3.5
BATCHES = (1, 8, 32, 128, 256)
SHORT_BATCHES = (1, 32, 256)
# Where the states are, and whether there is a convolution.
KINDS: tuple[tuple[Slots, bool], ...] = (("batch", False), ("random", False), ("random", True))

LARGE_BATCH = 32  # from this batch on, a call is compared with a copy
SPEEDUP = 1.1
CONVOLUTION = 1.1  # the time with a convolution, at most, as a share of the time without one


def add_options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, ("B", "H", "HV", "slots"))
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=MODES)


def run(args: argparse.Namespace) -> Report:
    import torch

    from ..kda.problem import DECODE_PEERS, peer, worst_errors

    few = args.short and not args.only
    cases = [
        DecodeCase(batch, *heads, slots=slots, decays="head", convolution=convolution)
        for heads in HEADS
        for batch in (SHORT_BATCHES if few else BATCHES)
        for slots, convolution in KINDS
    ]
    cases = chosen(cases, args.only)
    rep_ms = 30.0 if args.short else 100.0
    roofline = measure_roofline(matmul=False, rep_ms=rep_ms)
    notes = []
    with_peer = not args.no_peer and peer(DECODE_PEERS[True]) is not None
    if not with_peer:
        why = "--no-peer" if args.no_peer else "flash-linear-attention cannot be imported"
        notes.append(f"FLA was left out: {why}")
    rows: list[Row] = []
    errors = []
    with torch.no_grad():
        for case in track(cases, "gdn-decode"):
            beside = with_peer and case.slots == "batch"  # FLA's kernel has no slots
            found, made, more = time_case(case, beside, args.mode, roofline, rep_ms)
            errors.append(found)
            rows += [row | {"convolution": case.convolution} for row in made]
            notes += [note for note in more if note not in notes]
    return Report(
        benchmark="gdn-decode",
        title="Gated Delta Net, decode, K = V = 128, bfloat16 tokens, float32 state",
        environment=describe(args.argv, commit=args.commit),
        parameters={"gate": "softplus", "rep_ms": rep_ms},
        roofline=roofline.to_dict(),
        rows=rows,
        verdicts=verdicts(rows),
        notes=[worst_errors(errors), *notes],
    )


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Verdicts on a call's time against a copy of as many bytes, FLA's time, and the time without
    the convolution."""
    found = []
    names = ("batch", "heads", "heads_v", "slots", "mode")
    without = {tuple(row[name] for name in names): row for row in rows if not row["convolution"]}
    for row in rows:
        what = f"B={row['batch']} H={row['heads']} HV={row['heads_v']}"
        what += f" {row['slots']} slots ({row['mode']})"
        batch, time_us = row["batch"], row["time_us"]
        assert isinstance(batch, int) and isinstance(time_us, float)
        if row["convolution"]:
            plain = without.get(tuple(row[name] for name in names))
            if plain is None:
                continue
            assert isinstance(plain["time_us"], float)
            share = time_us / plain["time_us"]
            name = f"{what}: with the convolution at most {CONVOLUTION:g} of the time without"
            detail = f"{share:.3f}, {time_us:.1f} us"
            found.append(Verdict(name, share <= CONVOLUTION, detail))
            continue
        if batch >= LARGE_BATCH:
            found.append(beside_copy(what, row))
        if row["slots"] == "batch":
            found.append(at_least(what, row, "speedup_vs_fla", SPEEDUP))
    return found


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_options,
    gpu_check=(GpuCheckStage(("--no-peer",), 50),),
)
