"""chunk_kda, whole prompts from raw projections to outputs and final states, against FLA, and where
its frontend is installed also against cuDNN.

Dense and packed sequences; the kernels apply gate, normalisation and sigmoid. Each case is checked
against the float64 reference, then timed. The do_bench median is the cost of a call; the replay of
a CUDA graph is the device's part of this cost. The roofline is a copy's time for the bytes that the
path's kernels must move, see docs/kernels/kda.md. `--path fused modular` also times the modular
path, which runs stage by stage, as with `return_intermediate_states=True`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from ..harness.environment import describe
from ..harness.progress import track
from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Plot, Report, Row, Verdict
from ..harness.roofline import Roofline, measure_roofline
from ..harness.timing import Mode
from .cases import (
    CHUNK_FILTERS,
    GATES,
    HEADS,
    LENGTHS,
    PATHS,
    RAW_GATES,
    Case,
    Path,
    add_arguments,
    add_tuning,
    at_least,
    chosen,
    dense_cases,
    label,
    packed_cases,
    that_fit,
    timing_columns,
    tuning_cases,
)

TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
GATE_TOKENS = 8192
FEW_HEADS_TOKENS = (2048, 8192, 32768)
MODES: tuple[Mode, ...] = ("do_bench", "graph")

# Targets of `chunk_kda`, from this many tokens on.
TARGET, GOAL, TARGET_TOKENS = 1.6, 2.0, 4096
FUSED_TARGET, FUSED_TOKENS, FUSED_HEADS = 2.0, 8192, 64


def add_options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, CHUNK_FILTERS)
    add_tuning(parser)
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument(
        "--path",
        nargs="+",
        default=[PATHS[0]],
        choices=PATHS,
        help="of ours; modular is what return_intermediate_states=True asks for",
    )


def all_cases() -> list[Case]:
    gates = [Case(64, 64, GATE_TOKENS, gate=gate) for gate in GATES[1:]]
    return [*dense_cases(TOKENS), *packed_cases(LENGTHS), *gates, *few_heads()]


def few_heads() -> list[Case]:
    """Few heads, whose time depends on the gates: where gates are strong, segments of a sequence
    start from a state of zero."""
    return [Case(12, 12, tokens, gate=gate) for tokens in FEW_HEADS_TOKENS for gate in RAW_GATES]


def short_cases() -> list[Case]:
    return [
        Case(64, 64, 512),
        Case(12, 12, 8192),
        Case(12, 12, 8192, gate=RAW_GATES[0]),
        Case(64, 64, 8192),
        Case(32, 64, 4096),
        Case(64, 64, 8192, sequences=8, lengths="skewed"),
    ]


def run(args: argparse.Namespace) -> Report:
    import torch

    from .fla_tuning import compiled_peer
    from .problem import compile_chunk, worst_errors

    cases = chosen(all_cases() if args.only or not args.short else short_cases(), args.only)
    cases, notes = that_fit(cases, torch.cuda.mem_get_info()[0])
    compile_chunk(cases, args.path)
    rep_ms = 30.0 if args.short else 100.0
    roofline = measure_roofline(matmul=False, rep_ms=rep_ms)
    rows: list[Row] = []
    errors = []
    with torch.no_grad():
        with_peer, peer_notes = compiled_peer("chunk", tuning_cases(cases), args)
        for case in track(cases, "kda-chunk"):
            found, made, more = time_case(
                case, with_peer, not args.no_peer, args.mode, args.path, roofline, rep_ms
            )
            errors.append(found)
            rows += made
            notes += [note for note in more if note not in notes]
    return Report(
        benchmark="kda-chunk",
        title="Kimi Delta Attention, chunked forward, K = V = 128, bfloat16",
        environment=describe(args.argv, commit=args.commit),
        parameters={
            "initial_state": "given",
            "final_state": "asked for",
            "gates": "A_log of rates 0.5 to 2, dt_bias -6 to 0, normal g; strong: 1 to 16, normal; "
            "raw: -5 sigmoid of a normal g; weak: about -0.034 a token; mixed: raw, one channel "
            "of 16 weak",
            "state_v_first": False,
            "rep_ms": rep_ms,
        },
        roofline=roofline.to_dict(),
        rows=rows,
        verdicts=verdicts(rows),
        notes=[worst_errors(errors), *peer_notes, *notes],
        plots=plots(rows),
    )


def time_case(
    case: Case,
    with_peer: bool,
    with_cudnn: bool,
    modes: Sequence[Mode],
    paths: Sequence[Path],
    roofline: Roofline,
    rep_ms: float,
) -> tuple[dict[str, float], list[Row], list[str]]:
    """Return (errors, a row for each mode and path, notes)."""
    from .problem import (
        agreed,
        check_chunk,
        chunk_arguments,
        chunk_calls,
        cudnn_calls,
        freed,
        time_calls,
    )

    rows: list[Row] = []
    with freed():
        arguments = chunk_arguments(case)
        calls = chunk_calls(arguments, with_peer=with_peer, paths=paths)
        if with_cudnn:
            calls |= cudnn_calls(arguments)
        errors, calls, notes = agreed(partial(check_chunk, case, arguments), calls)
        for mode in modes:
            timings, more = time_calls(calls, mode, rep_ms)
            notes += more
            least_us = case.one_kernel_bytes / roofline.copy_gbps / 1e3
            for path in paths:
                of_path = dict(timings)
                if path == "modular":
                    of_path["ours"] = of_path.pop("modular")
                moved = case.fused_bytes if path == "fused" else case.modular_bytes
                rows.append(
                    {
                        **case.rows,
                        "path": path,
                        "mode": mode,
                        **timing_columns(of_path, moved, roofline),
                        "cudnn_us": timings["cudnn"].median_us if "cudnn" in timings else None,
                        "inputs_and_outputs_us": least_us,
                    }
                )
        del arguments, calls
    return errors, rows, notes


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Verdicts on the targets, by the cost of a call."""
    found = []
    for row in rows:
        tokens = row["tokens"]
        assert isinstance(tokens, int)
        judged = (row["path"], row["mode"], row["gate"]) == (PATHS[0], MODES[0], GATES[0])
        if not judged or tokens < TARGET_TOKENS:
            continue
        found.append(at_least(label(row), row, "speedup_vs_fla", TARGET, GOAL))
        large = row["heads"] == row["heads_v"] == FUSED_HEADS and tokens == FUSED_TOKENS
        if large:
            found.append(at_least(label(row), row, "speedup_vs_fla", FUSED_TARGET))
    return found


def plots(rows: Sequence[Row]) -> list[Plot]:
    """Time over tokens, for each number of heads with several dense cases."""
    found = []
    for heads, heads_v in HEADS:
        where: Row = {
            "heads": heads, "heads_v": heads_v, "lengths": "dense", "gate": GATES[0],
            "path": rows[0]["path"], "mode": "do_bench",
        }  # fmt: skip
        chosen_rows = [row for row in rows if all(row[k] == v for k, v in where.items())]
        if len(chosen_rows) > 1:
            ys: tuple[str, ...] = ("time_us", "fla_us", "roofline_us")
            if chosen_rows[0]["fla_us"] is None:
                ys = ("time_us", "roofline_us")
            title = f"H={heads} HV={heads_v}"
            found.append(Plot("tokens", ys, title, "us", where, log_x=True, log_y=True))
    return found


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_options,
    gpu_check=(GpuCheckStage(("--no-peer",), 80),),
)
