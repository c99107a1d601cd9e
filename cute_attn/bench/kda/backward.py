"""The gradient of chunk_kda, as training needs it, against FLA's.

Dense and packed sequences, without states at the ends; the kernels apply gate, normalisation and
sigmoid. For each number of heads, gradients of few tokens are compared with the float64 reference.
Each case's gradients are compared with FLA's. Then the case is timed: the forward, the forward as a
training step calls it, the backward, and 16 layers in a row, forward and backward. In the mode
do_bench a call waits for the host; in the mode eager the host runs ahead. Each kernel's time, as
CUPTI reports it, stands beside a copy's time for the bytes that the kernel must move, see
docs/kernels/kda_backward.md. Kernels of both packages are grouped by task. `--stage` compares the
public stages of the backward with FLA's. The memory of a training step is measured at B=1 T=32768
H=32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from ..harness.environment import describe
from ..harness.progress import track
from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Plot, Report, Row, Verdict
from ..harness.roofline import Roofline, measure_roofline
from ..harness.timing import Mode
from .cases import (
    HEADS,
    MEMORY_SHARE,
    Case,
    add_arguments,
    add_tuning,
    at_least,
    chosen,
    dense_cases,
    label,
    packed_cases,
    that_fit,
    tuning_cases,
)

if TYPE_CHECKING:
    from ..harness.timing import Timing
    from .problem import Arguments
    from .training import Step

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
LENGTHS = ("skewed", "random")
FILTERS = ("B", "H", "HV", "T", "N", "lengths")
RECOMPUTE = {"yes": False, "no": True}  # disable_recompute by the option's name
MEMORY_CASE = Case(32, 32, 32768)
MODES: tuple[Mode, ...] = ("do_bench", "eager")

# Targets, from this many tokens on.
TARGET_TOKENS = 4096
TARGET, FEW_HEADS_TARGET, FEW_HEADS = 2.5, 3.0, 12
STEP_TARGET = 2.5  # forward and backward together
MAX_RATIO = 2.5  # our backward's time over our forward's

# Our kernels by a part of the name, and the bytes that each kernel must move.
KERNELS = {
    "prepare": ("KdaPrepare", attrgetter("prepare_bytes")),
    "adjoint_pass": ("KdaAdjointPass", attrgetter("adjoint_pass_bytes")),
    "gradients": ("KdaGradients", attrgetter("gradients_bytes")),
}
OTHERS = "others"

# The task of both packages' kernels, by a part of the kernel's name.
GROUPS = {
    "KdaPrepare": "records, states again",
    "KdaAdjointPass": "gradients of states",
    "KdaSegments": "gradients of states",
    "kda_gate_chunk_cumsum": "records, states again",
    "recompute_w_u_fwd": "records, states again",
    "chunk_gated_delta_rule_fwd_kernel_h": "records, states again",
    "chunk_kda_bwd_kernel_dAv": "gradients of states",
    "chunk_gated_delta_rule_bwd_kernel_dhu": "gradients of states",
}
REST = "gradients of tokens and parameters"  # all other kernels

MEMORY_NOTE = (
    "peak_mib has the inputs and their gradients, kept_mib what lies between forward and backward, "
    "o included; FLA's tuned kernels were not launched"
)

CULA = (
    "cuLA publishes no backward; its forward stages on SM100, beside FLA with repeated heads: "
    "chunk_intra 1.5, recompute_w_u 1.27, and 2.7 with two value heads a head of q and k"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, FILTERS)
    add_tuning(parser)
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument(
        "--recompute",
        nargs="+",
        default=["yes"],
        choices=tuple(RECOMPUTE),
        help="no: disable_recompute=True",
    )
    parser.add_argument(
        "--memory", action="store_true", help="measure the memory of a training step, and no times"
    )
    parser.add_argument(
        "--stage", action="store_true", help="also compare the public stages with FLA's"
    )


def all_cases() -> list[Case]:
    return [*dense_cases(TOKENS), *packed_cases(LENGTHS)]


def short_cases() -> list[Case]:
    return [
        Case(12, 12, 8192),
        Case(64, 64, 8192),
    ]


def run(args: argparse.Namespace) -> Report:
    import torch

    from . import training
    from .fla_tuning import compiled_peer
    from .problem import freed, worst_errors

    if args.memory:
        return run_memory(args)
    cases = chosen(all_cases() if args.only or not args.short else short_cases(), args.only)
    free = torch.cuda.mem_get_info()[0]
    cases, notes = that_fit(cases, free, attrgetter("training_bytes"))
    keep = [RECOMPUTE[name] for name in args.recompute]
    training.compile_ours(cases, [*keep, *([True] if MEMORY_CASE in cases else [])])
    rep_ms = 20.0 if args.short else 100.0
    roofline = measure_roofline(matmul=False, rep_ms=rep_ms)
    with_peer, peer_notes = compiled_peer("training", tuning_cases(cases), args)
    errors: list[Mapping[str, float]] = []
    for case in tuning_cases(cases):
        with freed():
            found, more = training.checks(case, with_peer=with_peer)
        errors.append(found)
        notes += more
    timer = Timer(with_peer, roofline, rep_ms, args.mode, args.stage, MEMORY_SHARE * free)
    try:
        for case in track(cases, "kda-backward"):
            for disable_recompute in keep:
                with freed():
                    timer.time(case, disable_recompute=disable_recompute)
    except KeyboardInterrupt:  # the results so far are worth a report
        notes.append(f"interrupted: {len(timer.rows)} rows of {len(cases)} cases")
    memory = memory_rows(with_peer=with_peer) if MEMORY_CASE in cases else []
    parts = [
        Report(f"kda-backward-{name}", title, {}, rows=rows)
        for name, title, rows in (
            ("kernels", "Kernels of our backward", timer.kernels),
            ("stages", "Public stages of the backward", timer.stages),
            ("groups", "Kernels of the backward by what they compute", timer.groups),
            ("memory", f"Memory of a training step, {MEMORY_CASE}", memory),
        )
        if rows
    ]
    return Report(
        benchmark="kda-backward",
        title="Kimi Delta Attention, gradients, K = V = 128, bfloat16",
        environment=describe(args.argv, commit=args.commit),
        parameters={"states": "none", "layers": training.LAYERS, "rep_ms": rep_ms},
        roofline=roofline.to_dict(),
        rows=timer.rows,
        verdicts=[*verdicts(timer.rows), *memory_verdicts(memory)],
        notes=[
            worst_errors(errors),
            *timer.differences(),
            f"layer_us: forward and backward of one of {training.LAYERS} layers",
            "kernels: CUPTI's times in repeated backwards, with a warm L2",
            *([MEMORY_NOTE] if memory else []),
            *([CULA] if args.stage else []),
            *peer_notes,
            *notes,
            *timer.notes,
        ],
        plots=plots(timer.rows),
        parts=parts,
    )


def run_memory(args: argparse.Namespace) -> Report:
    """The report of `--memory`, for which FLA's kernels need not be compiled."""
    from . import training

    training.compile_ours([MEMORY_CASE], [True])
    rows = memory_rows(with_peer=not args.no_peer)
    return Report(
        benchmark="kda-backward-memory",
        title=f"Memory of a training step of chunk_kda, {MEMORY_CASE}",
        environment=describe(args.argv, commit=args.commit),
        rows=rows,
        verdicts=memory_verdicts(rows),
        notes=[MEMORY_NOTE],
    )


class Timer:
    """Times cases; `rows`, `kernels`, `stages` and `groups` are its tables."""

    def __init__(
        self,
        with_peer: bool,
        roofline: Roofline,
        rep_ms: float,
        modes: Sequence[Mode],
        by_stage: bool,
        memory: float,
    ) -> None:
        self.with_peer, self.roofline, self.rep_ms = with_peer, roofline, rep_ms
        self.modes, self.by_stage, self.limit = modes, by_stage, memory
        self.rows: list[Row] = []
        self.kernels: list[Row] = []
        self.stages: list[Row] = []
        self.groups: list[Row] = []
        self.notes: list[str] = []
        self.beside: dict[str, float] = {}  # FLA's largest difference, for each gradient

    def time(self, case: Case, *, disable_recompute: bool) -> None:
        """Compare the gradients of both sides, then add the case's rows."""
        from . import training
        from .problem import agreed

        given = training.arguments(case, disable_recompute=disable_recompute)
        steps = training.steps(given, with_peer=self.with_peer)
        first = steps["ours"].both()
        repeats = training.repeats(first, steps["ours"].both())
        peers = {who: step.both for who, step in steps.items() if who != "ours"}
        found, agreeing, notes = agreed(partial(training.check_beside, case, first), peers)
        del first
        for name, difference in found.items():
            self.beside[name] = max(difference, self.beside.get(name, 0.0))
        self.notes += notes
        steps = {who: step for who, step in steps.items() if who == "ours" or who in agreeing}
        sizes: Row = {name: value for name, value in case.rows.items() if name != "gate"}
        sizes["disable_recompute"] = disable_recompute
        layer = self.layer_times(case, steps)
        first_row, before = len(self.rows), len(self.kernels)
        for mode in self.modes:
            times = self.times(steps, mode)
            self.rows.append(sizes | {"mode": mode} | times | layer | {"bitwise_repeat": repeats})
        self.time_kernels(case, sizes, steps)
        if self.by_stage and not case.sequences and not disable_recompute:
            self.time_stages(sizes, given, with_peer=len(steps) > 1)
        # Rows are printed at once, since a peer with an autotuner may outlast a time limit.
        known = [
            f"{name} {x:.4g} ({row['mode']})"
            for row in self.rows[first_row:]
            for name, x in row.items()
            if isinstance(x, float)
        ]
        known += [f"{row['kernel']} {row['time_us']:.4g}" for row in self.kernels[before:]]
        print(f"{case}: {', '.join(known)}", file=sys.stderr, flush=True)

    def times(self, steps: Mapping[str, Step], mode: Mode) -> Row:
        from .problem import time_calls

        def median(call: str) -> dict[str, float]:
            timings, _ = time_calls(
                {who: getattr(step, call) for who, step in steps.items()}, mode, self.rep_ms
            )
            return {who: timing.median_us for who, timing in timings.items()}

        forward, training_forward = median("forward"), median("training_forward")
        backwards: dict[str, Timing] = {}
        for who, step in steps.items():
            o = step.training_forward()
            timings, _ = time_calls({who: partial(step.backward, o)}, mode, self.rep_ms)
            backwards |= timings
            del o
        ours = backwards["ours"]
        fla = backwards["fla"].median_us if "fla" in backwards else None
        return {
            "forward_us": forward["ours"],
            "training_forward_us": training_forward["ours"],
            "backward_us": ours.median_us,
            "p20_us": ours.p20_us,
            "p80_us": ours.p80_us,
            "backward_to_forward_ratio": ours.median_us / forward["ours"],
            "fla_forward_us": forward.get("fla"),
            "fla_training_forward_us": training_forward.get("fla"),
            "fla_backward_us": fla,
            "speedup_vs_fla": None if fla is None else fla / ours.median_us,
        }

    def layer_times(self, case: Case, steps: Mapping[str, Step]) -> Row:
        from . import training
        from .problem import time_calls

        layer: dict[str, float] = {}
        if training.LAYERS * case.layer_bytes + case.training_bytes <= self.limit:
            calls = {who: step.layers() for who, step in steps.items()}
            timings, _ = time_calls(calls, "do_bench", self.rep_ms)
            layer = {who: t.median_us / training.LAYERS for who, t in timings.items()}
        else:
            self.notes.append(f"no layers in a row for want of memory: {case}")
        return {
            "layer_us": layer.get("ours"),
            "fla_layer_us": layer.get("fla"),
            "speedup_vs_fla_layer": layer["fla"] / layer["ours"] if "fla" in layer else None,
        }

    def time_kernels(self, case: Case, sizes: Row, steps: Mapping[str, Step]) -> None:
        """Add rows on the kernels of the backward."""
        from . import training

        found = {}
        for who, step in steps.items():
            o = step.training_forward()
            found[who] = training.kernel_times(partial(step.backward, o))
            del o
        self.kernels += [sizes | row for row in kernel_rows(case, found["ours"], self.roofline)]
        if "fla" in found:
            self.groups += [sizes | row for row in group_rows(found)]

    def time_stages(self, sizes: Row, given: Arguments, *, with_peer: bool) -> None:
        """Compare each public stage of the backward with the peer's stage, then add the stage's
        row."""
        from . import training_stages
        from .problem import agreed, time_calls

        for name, stage in training_stages.stages(given, with_peer=with_peer).items():
            peers = {who: call for who, call in stage.calls.items() if who != "ours"}
            check = partial(training_stages.check, name, stage)
            _, peers, notes = agreed(check, peers)
            self.notes += notes
            calls = {"ours": stage.calls["ours"], **peers}
            timings, _ = time_calls(calls, "do_bench", self.rep_ms)
            ours = timings["ours"].median_us
            fla = timings["fla"].median_us if "fla" in timings else None
            times: Row = {"time_us": ours, "fla_us": fla}
            speedup = None if fla is None else fla / ours
            self.stages.append(sizes | {"stage": name} | times | {"speedup_vs_fla": speedup})

    def differences(self) -> list[str]:
        """A note on the largest differences of FLA's gradients from ours."""
        if not self.beside:
            return []
        listed = ", ".join(f"{name} {error:.2e}" for name, error in self.beside.items())
        return [f"largest relative difference of a gradient from ours over all cases: {listed}"]


def memory_rows(*, with_peer: bool) -> list[Row]:
    """The memory of a training step of each contender, with both values of disable_recompute."""
    from . import training
    from .problem import freed

    rows: list[Row] = []
    for disable_recompute in (False, True):
        for who, function in training.functions(with_peer=with_peer).items():
            with freed(), training.without_launches(who):
                given = training.arguments(MEMORY_CASE, disable_recompute=disable_recompute)
                step = training.Step(function, given, training.slope(given))
                found = training.memory(step)
                rows.append({"who": who, "disable_recompute": disable_recompute, **found})
                del given, step
    return rows


def kernel_rows(case: Case, found: Mapping[str, float], roofline: Roofline) -> list[Row]:
    """Rows of our kernels, from each kernel's microseconds by full name."""
    rows: list[Row] = []
    rest = dict(found)
    for kernel, (part, of_case) in KERNELS.items():
        names = [name for name in rest if part in name]
        if names:
            us, bytes_ = sum(rest.pop(name) for name in names), of_case(case)
            floor_us = bytes_ / roofline.copy_gbps / 1e3
            rows.append(
                {
                    "kernel": kernel,
                    "time_us": us,
                    "floor_us": floor_us,
                    "share_of_floor": floor_us / us,
                }
            )
    others: Row = {"kernel": OTHERS, "time_us": sum(rest.values()), "floor_us": None}
    return [*rows, others | {"share_of_floor": None}]


def group_rows(found: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Rows of groups of a backward's kernels, from the kernels' microseconds by contender."""
    sums: dict[str, dict[str, float]] = {who: {} for who in found}
    for who, kernels in found.items():
        for name, us in kernels.items():
            group = next((group for part, group in GROUPS.items() if part in name), REST)
            sums[who][group] = sums[who].get(group, 0.0) + us
    rows: list[Row] = []
    for group in (*dict.fromkeys(GROUPS.values()), REST):
        ours, fla = sums["ours"].get(group, 0.0), sums.get("fla", {}).get(group)
        both = ours > 0 and fla is not None
        speedup = fla / ours if both and fla is not None else None
        rows.append({"group": group, "time_us": ours, "fla_us": fla, "speedup_vs_fla": speedup})
    return rows


# ---- verdicts


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for row in rows:
        what, tokens, heads = label(row), row["tokens"], row["heads"]
        what += ", disable_recompute" if row["disable_recompute"] else ""
        once, how = row["mode"] == rows[0]["mode"], f"backward ({row['mode']})"
        assert isinstance(tokens, int)
        if once and not row["bitwise_repeat"]:
            found.append(Verdict(f"{what}: repeated runs have the same bits", False, "they differ"))
        if tokens < TARGET_TOKENS:
            continue
        target = FEW_HEADS_TARGET if heads == FEW_HEADS else TARGET
        of_backward = row | {"time_us": row["backward_us"], "fla_us": row["fla_backward_us"]}
        found.append(at_least(f"{what}, {how}", of_backward, "speedup_vs_fla", target))
        if once and row["layer_us"] is not None:
            of_layer = row | {"time_us": row["layer_us"], "fla_us": row["fla_layer_us"]}
            found.append(at_least(f"{what}, layer", of_layer, "speedup_vs_fla_layer", STEP_TARGET))
        ratio = row["backward_to_forward_ratio"]
        assert isinstance(ratio, float)
        name = f"{what}, {how}: at most {MAX_RATIO:g} of our forward"
        found.append(Verdict(name, ratio <= MAX_RATIO, f"{ratio:.2f}"))
    if rows and all(row["bitwise_repeat"] for row in rows):
        detail = f"{sum(row['mode'] == rows[0]['mode'] for row in rows)} cases"
        found.insert(0, Verdict("repeated runs have the same bits", True, detail))
    return found


def memory_verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Whether our peak memory of a training step is at most FLA's."""
    found = []
    for ours in [row for row in rows if row["who"] == "ours"]:
        same = [r for r in rows if r["disable_recompute"] == ours["disable_recompute"]]
        fla = next((row["peak_mib"] for row in same if row["who"] == "fla"), None)
        peak = ours["peak_mib"]
        name = f"disable_recompute={ours['disable_recompute']}: peak memory at most FLA's"
        assert isinstance(peak, float)
        if fla is None:
            found.append(Verdict(name, None, f"{peak:.0f} MiB; FLA's was not measured"))
        else:
            assert isinstance(fla, float)
            found.append(Verdict(name, peak <= fla, f"{peak:.0f} MiB, FLA {fla:.0f} MiB"))
    return found


def plots(rows: Sequence[Row]) -> list[Plot]:
    """Time of a backward over tokens, for each number of heads with several dense cases."""
    found = []
    for heads, heads_v in HEADS:
        where: Row = {
            "heads": heads, "heads_v": heads_v, "lengths": "dense",
            "disable_recompute": rows[0]["disable_recompute"], "mode": rows[0]["mode"],
        }  # fmt: skip
        of_heads = [row for row in rows if all(row[k] == v for k, v in where.items())]
        if len(of_heads) > 1:
            ys: tuple[str, ...] = ("backward_us", "forward_us")
            if all(row["fla_backward_us"] is not None for row in of_heads):
                ys += ("fla_backward_us",)
            title = f"H={heads} HV={heads_v}"
            found.append(Plot("tokens", ys, title, "us", where, log_x=True, log_y=True))
    return found


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_options,
    gpu_check=(GpuCheckStage(("--no-peer",), 40),),
)
