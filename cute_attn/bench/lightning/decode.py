"""Lightning Attention decode against flash-linear-attention and the copy bandwidth.

Every batch size is first checked against the float64 reference, then timed. This package, FLA's
`fused_recurrent_fwd`, and two plain copies of as many bytes as the call must move take turns in one
loop (see `timing`). `--sms N` runs everything, including the ceilings, in a CUDA green context.
`--variants` also times tunings other than the chosen tuning: the tunings that the package compared.
`--variants tile_v=8,16,32 num_warps=4,8` times all combinations of these fields.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

from ..harness.environment import describe
from ..harness.progress import track
from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Plot, Report, Row, Verdict
from ..harness.roofline import (
    Roofline,
    beside_copy,
    copies,
    copy_columns,
    gbps,
    measure_roofline,
)
from ..harness.timing import (
    FLUSHES,
    MODES,
    Call,
    Flush,
    Mode,
    Timing,
    first_drop,
    time_cuda_interleaved,
)

if TYPE_CHECKING:
    from .problem import Case

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SHORT_BATCHES = (1, 8, 64, 256)
SEED = 20261120

# Targets of the kernel at 64 heads, K = V = 128, one bf16 token and a float32 "vk" state.
SMALL_BATCHES, SMALL_SPEEDUP = (1, 8), 5.0
LARGE_BATCHES = (64, 128, 256)  # compared with a copy of as many bytes
PARTITION_MIN_BATCH, PARTITION_SPEEDUP = 64, 1.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=128, help="K, and V unless --head-dim-v")
    parser.add_argument("--head-dim-v", type=int)
    parser.add_argument("--tokens", type=int, default=1, help="new tokens per sequence")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--state-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--layout", default="vk", choices=("vk", "kv"), help="of the state")
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--flush", nargs="+", default=["zero"], choices=FLUSHES)
    parser.add_argument("--sms", type=int, help="run on so many SMs, in a CUDA green context")
    parser.add_argument(
        "--variants",
        nargs="*",
        type=_vary,
        metavar="FIELD=A,B",
        help="time other tunings: the package's candidates, or these values in all combinations",
    )


def _vary(text: str) -> tuple[str, list[int | str]]:
    """ "tile_v=8,16" -> ("tile_v", [8, 16]): a field of the Spec and its values."""
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form FIELD=VALUE,VALUE")
    return name, [int(value) if value.isdigit() else value for value in values.split(",")]


def run(args: argparse.Namespace) -> Report:
    from .problem import Case

    batches = args.batches or (SHORT_BATCHES if args.short else BATCHES)
    cases = [
        Case(
            batch=batch,
            heads=args.heads,
            head_dim_k=args.head_dim,
            head_dim_v=args.head_dim_v or args.head_dim,
            tokens=args.tokens,
            dtype=args.dtype,
            state_dtype=args.state_dtype,
            state_layout=args.layout,
        )
        for batch in sorted(batches)
    ]
    rep_ms = 30.0 if args.short else 100.0
    settings = [
        (mode, flush)
        for mode in args.mode
        for flush in args.flush
        if mode != "do_bench" or flush == "zero"
    ]
    tuning = args.variants is not None
    with _partition(args.sms) as partition:
        roofline = measure_roofline(flush=args.flush[0], matmul=not args.short, rep_ms=rep_ms)
        sms = partition.get("sms")
        if tuning:
            vary = dict(args.variants)
            rows, notes = _time_variants(cases, settings, roofline, rep_ms, sms, vary)
        else:
            rows, notes = _time_contenders(cases, settings, roofline, rep_ms, sms)
    report = Report(
        benchmark="lightning-decode"
        + ("-variants" if tuning else "")
        + (f"-{partition['sms']}sms" if partition else ""),
        title=_title(cases[0], partition.get("sms")),
        environment=describe(args.argv, commit=args.commit),
        parameters={
            "heads": args.heads,
            "head_dim_k": cases[0].head_dim_k,
            "head_dim_v": cases[0].head_dim_v,
            "tokens": args.tokens,
            "dtype": args.dtype,
            "state_dtype": args.state_dtype,
            "state_layout": args.layout,
            "rep_ms": rep_ms,
            **{f"partition_{name}": value for name, value in partition.items()},
        },
        roofline=roofline.to_dict(),
        rows=rows,
        notes=notes,
    )
    if not tuning:
        report.verdicts = verdicts(rows, standard=_is_standard(cases[0]), partition=bool(partition))
        report.plots = _plots(rows, roofline)
    return report


def _title(case: Case, sms: int | None) -> str:
    where = "" if sms is None else f", on {sms} SMs"
    return (
        f"Lightning Attention decode, {case.heads} heads, K={case.head_dim_k}, "
        f"V={case.head_dim_v}, {case.tokens} {case.dtype} token{'s' * (case.tokens > 1)}, "
        f"{case.state_dtype} state in layout {case.state_layout}{where}"
    )


def _is_standard(case: Case) -> bool:
    """Whether the targets were set for this case, whatever the batch."""
    return case == type(case)(batch=case.batch)


@contextmanager
def _partition(sms: int | None) -> Iterator[dict[str, int]]:
    """The GPU, or a part of the GPU with its number of SMs and the number that kernels really
    used."""
    if sms is None:
        yield {}
        return
    from ..harness.green_context import torch_sm_partition, visible_sms

    with torch_sm_partition(sms) as granted:
        yield {
            "sms": granted,
            "sms_seen_eager": visible_sms(graph=False),
            "sms_seen_graph": visible_sms(graph=True),
        }


def _time_contenders(
    cases: Sequence[Case],
    settings: Sequence[tuple[Mode, Flush]],
    roofline: Roofline,
    rep_ms: float,
    sms: int | None,
) -> tuple[list[Row], list[str]]:
    import torch

    from .problem import DEVICE, check_agreement, fla, fla_tuning, make_inputs, ours

    # FLA tunes once per process, for the first batch size. So the batch size that is judged comes
    # first, not the smallest.
    largest = make_inputs(cases[-1], SEED)
    fla(cases[-1], largest)()
    del largest

    rows: list[Row] = []
    worst: dict[str, float] = {}
    for case in track(cases, "lightning-decode"):
        for name, agreement in check_agreement(case, SEED + case.batch, sms).items():
            for what in ("output", "state"):
                key = f"{name} {what}"
                worst[key] = max(worst.get(key, 0.0), getattr(agreement, f"{what}_error"))
        inputs = make_inputs(case, SEED)
        contenders: dict[str, Call] = {
            "ours": ours(case, inputs, sms),
            "fla": fla(case, inputs),
            **copies(case.min_bytes, DEVICE),
        }
        for mode, flush in settings:
            timings = time_cuda_interleaved(contenders, mode=mode, flush=flush, rep_ms=rep_ms)
            rows.append(_row(case, mode, flush, timings, roofline))
        del inputs, contenders
        torch.cuda.empty_cache()
    errors = ", ".join(f"{name} {error:.2e}" for name, error in worst.items())
    return rows, [
        f"largest relative error against the float64 reference, over all batches: {errors}",
        f"FLA's autotuner chose {fla_tuning()}",
        "copy_us is Tensor.copy_ of as many bytes as the call must move, in a graph an elementwise "
        "kernel; share_of_copy refers to copy_gbps, the faster of two 1 GiB copies",
    ]


def _row(
    case: Case, mode: Mode, flush: Flush, timings: dict[str, Timing], roofline: Roofline
) -> Row:
    ours, fla = timings["ours"], timings["fla"]
    ours_gbps = gbps(case.min_bytes, ours.median_us)
    fla_gbps = gbps(case.min_bytes, fla.median_us)
    return {
        "batch": case.batch,
        "mode": mode,
        "flush": flush,
        "time_us": ours.median_us,
        "p20_us": ours.p20_us,
        "p80_us": ours.p80_us,
        "min_us": ours.min_us,
        "fla_us": fla.median_us,
        **copy_columns(timings, mode),
        "gbps": ours_gbps,
        "fla_gbps": fla_gbps,
        "share_of_copy": ours_gbps / roofline.copy_gbps,
        "share_of_copy_fla": fla_gbps / roofline.copy_gbps,
        "speedup_vs_fla": fla.median_us / ours.median_us,
    }


def _time_variants(
    cases: Sequence[Case],
    settings: Sequence[tuple[Mode, Flush]],
    roofline: Roofline,
    rep_ms: float,
    sms: int | None,
    vary: Mapping[str, Sequence[int | str]],
) -> tuple[list[Row], list[str]]:
    """Time each tuning candidate; the candidates of a batch take turns in one loop."""
    from .problem import make_inputs, variants

    rows: list[Row] = []
    refused: list[str] = []
    for case in track(cases, "lightning-decode --variants"):
        candidates, refused = variants(case, make_inputs(case, SEED), vary, sms)
        for mode, flush in settings:
            timings = time_cuda_interleaved(candidates, mode=mode, flush=flush, rep_ms=rep_ms)
            for name, timing in sorted(timings.items(), key=lambda item: item[1].median_us):
                rate = gbps(case.min_bytes, timing.median_us)
                rows.append(
                    {
                        "batch": case.batch,
                        "mode": mode,
                        "flush": flush,
                        "config": name,
                        "time_us": timing.median_us,
                        "p20_us": timing.p20_us,
                        "p80_us": timing.p80_us,
                        "gbps": rate,
                        "share_of_copy": rate / roofline.copy_gbps,
                    }
                )
    notes = ["bare calls of the compiled functions, each checked, the fastest first"]
    if refused:
        notes.append(f"do not compile: {'; '.join(refused)}")
    return rows, notes


def verdicts(rows: Sequence[Row], *, standard: bool, partition: bool) -> list[Verdict]:
    """The targets met or missed, and whether time grows with the batch, per mode and flush.

    Args:
        standard: the targets were set for these sizes.
        partition: the run was on a part of the GPU, which has other targets.
    """
    found: list[Verdict] = []
    for mode, flush in dict.fromkeys((row["mode"], row["flush"]) for row in rows):
        chosen = [row for row in rows if (row["mode"], row["flush"]) == (mode, flush)]
        how = f"{mode}, flush {flush}"
        if standard and partition:
            found += [
                _at_least(row, "speedup_vs_fla", PARTITION_SPEEDUP, how)
                for row in chosen
                if _number(row["batch"]) >= PARTITION_MIN_BATCH
            ]
        elif standard:
            for row in chosen:
                if row["batch"] in SMALL_BATCHES and mode == "do_bench":  # includes host time
                    found.append(_at_least(row, "speedup_vs_fla", SMALL_SPEEDUP, how))
                if row["batch"] in LARGE_BATCHES:
                    found.append(beside_copy(f"batch {row['batch']} ({how})", row))
        found.append(_monotone(chosen, how))
    return found


def _number(value: object) -> float:
    assert isinstance(value, (int, float))
    return float(value)


def _at_least(row: Row, column: str, target: float, how: str) -> Verdict:
    value = _number(row[column])
    detail = f"{value:.3f}"
    if column == "speedup_vs_fla":
        shares = (_number(row["share_of_copy"]), _number(row["share_of_copy_fla"]))
        detail += "; share of copy {:.3f}, FLA {:.3f}".format(*shares)
    name = f"batch {row['batch']}: {column} at least {target:g} ({how})"
    return Verdict(name, value >= target, detail)


def _monotone(rows: Sequence[Row], how: str) -> Verdict:
    """Verdict: time does not fall as the batch grows, within the spread (p80 - p20) of samples."""
    times = [_number(row["time_us"]) for row in rows]
    spreads = [_number(row["p80_us"]) - _number(row["p20_us"]) for row in rows]
    rates = [_number(row["gbps"]) for row in rows]
    name = f"time grows with the batch ({how})"
    if len(rows) < 2:
        return Verdict(name, None, "needs two batches")
    drop = first_drop(times, spreads)
    steps = [(after / before - 1, i) for i, (before, after) in enumerate(pairwise(rates))]
    worst, at = min(steps)
    between = f"from batch {rows[at]['batch']} to {rows[at + 1]['batch']}"
    detail = f"smallest step of GB/s is {worst:+.1%}, {between}"
    if drop is not None:
        detail += (
            f"; {times[drop - 1]:.2f} us at batch {rows[drop - 1]['batch']}, "
            f"{times[drop]:.2f} us at {rows[drop]['batch']}"
        )
    return Verdict(name, drop is None, detail)


def _plots(rows: Sequence[Row], roofline: Roofline) -> list[Plot]:
    flush = rows[0]["flush"]
    mode = "graph" if any(row["mode"] == "graph" for row in rows) else rows[0]["mode"]
    where = {"mode": mode, "flush": flush}
    how = f"{mode}, flush {flush}"
    return [
        Plot("batch", ("time_us", "fla_us", "copy_us"), f"time of a call ({how})", "us", where,
             log_x=True, log_y=True),
        Plot("batch", ("gbps", "fla_gbps"), f"bandwidth ({how})", "GB/s", where,
             lines={"copy of 1 GiB": roofline.copy_gbps}, log_x=True),
    ]  # fmt: skip


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_arguments,
    gpu_check=(GpuCheckStage((), 80), GpuCheckStage(("--sms", "78", "--mode", "graph"), 60)),
)
