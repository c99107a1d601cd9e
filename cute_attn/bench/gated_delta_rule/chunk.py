"""chunk_gated_delta_rule, forward and backward over whole sequences, against FLA's; the forward
also against cuDNN and FlashInfer, where these are installed.

The kernels apply gate, normalisation and sigmoid. Each case's forward is checked against the
float64 reference, and then timed. The do_bench median is the cost of a call. The replay of a CUDA
graph is the device's part of this cost. For each number of heads, gradients of few tokens are
compared with the reference. Then the backward is timed, without states at the ends. The goals are
for an H200. The benchmark `gdn-decode` times a decode step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from ..harness.environment import describe
from ..harness.progress import track
from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Report, Row, Verdict
from ..harness.roofline import Roofline, measure_roofline
from ..harness.timing import Mode
from ..kda.cases import FLOAT, Case, add_arguments, chosen, that_fit, timing_columns

MODES: tuple[Mode, ...] = ("do_bench", "graph")
PASSES = ("forward", "backward")
FILTERS = ("B", "H", "HV", "T", "gate")

# Bytes that `prepare` passes to `state_pass` for a chunk and value head: T, Aqk and factors.
BETWEEN = 2 * 64 * 64 * 2 + (4 * 64 + 4) * FLOAT

# Microseconds on an H200, by heads of q and k, heads of v, sequences and their tokens.
GOALS: dict[str, dict[tuple[int, int, int, int], float]] = {
    "forward": {
        (16, 64, 1, 8192): 200, (16, 64, 4, 2048): 150,
        (8, 32, 1, 8192): 140, (8, 32, 4, 2048): 80,
        (2, 8, 1, 8192): 60, (2, 8, 1, 32768): 150,
    },
    "backward": {(16, 32, 1, 8192): 450, (16, 32, 1, 32768): 1600},
}  # fmt: skip
# The mode of the time that a goal judges: the device's time, or for a backward the cost of a call.
OTHER_PEERS = ("cudnn", "flashinfer")  # of the forward
JUDGED: dict[str, Mode] = {"forward": "graph", "backward": "do_bench"}
GATES = ("softplus", "softplus-strong")

Timed = tuple[dict[str, float], list[Row], list[str]]  # errors, rows, notes


@dataclass(frozen=True)
class GatedCase(Case):
    """The sizes of a call with one decay a head."""

    gate: str = GATES[0]

    @property
    def one_kernel_bytes(self) -> int:
        """The bytes of inputs, outputs and states."""
        return 2 * self.qk_bytes + 2 * self.v_wide + 2 * self.beta + 2 * self.state

    @property
    def fused_bytes(self) -> int:
        """The bytes that both kernels of the forward move."""
        return self.one_kernel_bytes + 2 * self.qk_bytes + 2 * BETWEEN * self.chunk_heads

    @property
    def backward_bytes(self) -> int:
        """The bytes that the backward's kernels move; see
        docs/kernels/gated_delta_rule_backward.md."""
        adjoint = 2 * self.qk_bytes + BETWEEN * self.chunk_heads + 2 * self.v_wide
        gradients = 4 * self.qk_bytes + 3 * self.v_wide + self.chunk_states
        return adjoint + gradients + 2 * self.chunk_states + BETWEEN * self.chunk_heads


def add_options(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, FILTERS)
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)


def cases_of(which: str, *, short: bool) -> list[Case]:
    """The cases with a goal; of a forward with few heads also with strong gates."""
    cases: list[Case] = [
        GatedCase(heads, heads_v, tokens, batch=batch)
        for heads, heads_v, batch, tokens in GOALS[which]
    ]
    if which == "forward":
        cases += [GatedCase(2, 8, tokens, gate=GATES[1]) for tokens in (2048, 8192, 32768)]
        cases.append(GatedCase(2, 8, 2048))
    return [case for case in cases if case.tokens <= 8192][::2] if short else cases


def run(args: argparse.Namespace) -> Report:
    import torch

    from ..kda.problem import peer, worst_errors
    from . import problem

    cases: dict[str, list[Case]] = {}
    notes: list[str] = []
    for which in args.passes:
        found = chosen(cases_of(which, short=args.short and not args.only), args.only)
        need = attrgetter("peak_bytes" if which == "forward" else "training_bytes")
        cases[which], left_out = that_fit(found, torch.cuda.mem_get_info()[0], need)
        notes += left_out
    problem.compile_ours([x for each in cases.values() for x in each], backward="backward" in cases)
    with_peer = not args.no_peer and peer(problem.PEER) is not None
    if not with_peer:
        why = "--no-peer" if args.no_peer else "flash-linear-attention cannot be imported"
        notes.append(f"FLA was left out: {why}")
    rep_ms = 30.0 if args.short else 100.0
    roofline = measure_roofline(matmul=False, rep_ms=rep_ms)
    errors: list[dict[str, float]] = []
    rows: list[Row] = []
    times: dict[str, Callable[..., Timed]] = {
        "forward": partial(time_forward, modes=args.mode, others=not args.no_peer),
        "backward": time_backward,
    }
    for which in cases:
        for case in track(cases[which], f"gdn {which}"):
            found_errors, made, more = times[which](case, with_peer, roofline, rep_ms)
            errors.append(found_errors)
            rows += [{"pass": which, **row} for row in made]
            notes += [note for note in more if note not in notes]
    return Report(
        benchmark="gdn",
        title="Gated Delta Net by chunks, K = V = 128, bfloat16",
        environment=describe(args.argv, commit=args.commit),
        parameters={
            "gates": "A_log of rates 0.5 to 2, dt_bias -6 to 0, normal g; strong: 1 to 16, normal",
            "forward": "with an initial and a final state",
            "backward": "without states",
            "rep_ms": rep_ms,
        },
        roofline=roofline.to_dict(),
        rows=rows,
        verdicts=verdicts(rows),
        notes=[worst_errors(errors), *notes],
    )


def time_forward(
    case: Case,
    with_peer: bool,
    roofline: Roofline,
    rep_ms: float,
    *,
    modes: Sequence[Mode],
    others: bool,
) -> Timed:
    """Return (errors, a row for each mode, notes). `others` says whether to time OTHER_PEERS."""
    import torch

    from ..kda.problem import agreed, cudnn_calls, freed, time_calls
    from . import problem

    rows: list[Row] = []
    with freed(), torch.no_grad():
        given = problem.arguments(case)
        calls = problem.forward_calls(given, with_peer=with_peer)
        if others:
            calls |= cudnn_calls(given) | problem.flashinfer_call(given)
        errors, calls, notes = agreed(partial(problem.check_forward, case, given), calls)
        for mode in modes:
            timings, more = time_calls(calls, mode, rep_ms)
            notes += more
            columns = timing_columns(timings, case.fused_bytes, roofline)
            more_columns = {
                f"{who}_us": timings[who].median_us if who in timings else None
                for who in OTHER_PEERS
            }
            rows.append({**case.rows, "mode": mode, **columns, **more_columns})
        del given, calls
    return errors, rows, notes


def time_backward(
    case: Case,
    with_peer: bool,
    roofline: Roofline,
    rep_ms: float,
) -> Timed:
    """Return (errors, a row, notes). A graph cannot capture autograd's call."""
    from ..kda import training
    from ..kda.problem import agreed, freed, time_calls
    from . import problem

    with freed():
        small = training.check_case(case)
        given = problem.training_arguments(small)
        checked = {
            who: step.both for who, step in problem.steps(given, with_peer=with_peer).items()
        }
        check = partial(problem.check_gradients, small, given)
        errors, agreeing, notes = agreed(check, checked)
        steps = problem.steps(problem.training_arguments(case), with_peer="fla" in agreeing)
        calls = {
            who: partial(step.backward, step.training_forward()) for who, step in steps.items()
        }
        timings, more = time_calls(calls, JUDGED["backward"], rep_ms)
        columns = timing_columns(timings, case.backward_bytes, roofline)  # type: ignore[attr-defined]
        del steps, calls
    untimed = {f"{who}_us": None for who in OTHER_PEERS}
    row = {**case.rows, "mode": JUDGED["backward"], **columns, **untimed}
    return errors, [row], [*notes, *more]


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Verdicts on the goals."""
    from ..kda.problem import PEERS

    found = []
    for row in rows:
        which = str(row["pass"])
        sizes = tuple(row[name] for name in ("heads", "heads_v", "batch", "tokens"))
        goal = GOALS[which].get(sizes)  # type: ignore[arg-type]
        if goal is None or row["mode"] != JUDGED[which] or row["gate"] != GATES[0]:
            continue
        time_us = row["time_us"]
        assert isinstance(time_us, float)
        name = (
            f"{which} {sizes[0]}/{sizes[1]} {sizes[2]}x{sizes[3]}: at most {goal:g} us on an H200"
        )
        detail = f"{time_us:.1f} us"
        for who, peer_name in PEERS.items():
            if row[f"{who}_us"] is not None:
                detail += f", {peer_name} {row[f'{who}_us']:.1f} us"
        found.append(Verdict(name, time_us <= goal, detail))
    return found


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_options,
    gpu_check=(GpuCheckStage(("--no-peer",), 60),),
)
