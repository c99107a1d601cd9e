"""Softmax attention, forward, backward and decode, beside FlashAttention-4, FlashAttention-3, cuDNN
and PyTorch's flash backend.

Forward and backward have 16k tokens in sequences of several lengths (or one sequence of 32k), with
2048 columns of query heads. Decode has caches of equal and unequal lengths, of few bytes, with
several queries, with pages of one token, and in fp8. The part "batches" has one query of 16 heads
and 2 K/V heads over caches of equal lengths, contiguous and in pages. A further part shows the cost
of pages. Every contender is checked before it is timed. Outputs of some heads are compared with
float64: our error may be twice plain arithmetic's error, a peer's at most 2 %. Gradients of few
tokens are compared with float64, and the case's gradients with the peers'. An H200 lowers its
clocks under load, so each contender is timed after a rest, in rounds. On Hopper FlashAttention-4
has no split-KV: decode is compared with FlashAttention-4's single pass. FlashAttention-3's package
has no pages: FlashAttention-3 reads the same K and V in one piece.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..harness.choosing import add_only, chosen
from ..harness.environment import describe
from ..harness.progress import track
from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Report, Row
from ..harness.roofline import Roofline, copies, copy_columns, measure_roofline
from ..harness.timing import FLUSHES, MODES, REST_S, Flush, Mode, time_rested
from .cases import (
    FILTERS,
    PEERS,
    Case,
    all_cases,
    batches_plots,
    decode_row,
    pages_row,
    short_cases,
    verdicts,
    whole_plots,
    whole_row,
)

if TYPE_CHECKING:
    from .problem import Call

PARTS = {
    "forward": "Forward",
    "backward": "Backward",
    "decode": "Decode",
    "batches": "Decode, one query, equal lengths by batch",
    "pages": "K and V in pages beside the same in one piece",
}
# The time that a caller waits, and for a decode step also the device's part of this time.
DEFAULT_MODES: Mapping[str, Mode] = {
    "forward": "do_bench", "backward": "do_bench", "decode": "graph", "batches": "graph",
    "pages": "graph",
}  # fmt: skip
# A flush with zeros leaves dirty lines in L2. A decode step writes almost nothing, and would wait
# for the write-back of all these lines, 9 us on an H200; a copy waits for 2 to 4 us.
DEFAULT_FLUSHES: Mapping[str, Flush] = {
    "decode": "read", "batches": "read", "pages": "read",
}  # fmt: skip
ROUNDS, SHORT_ROUNDS = 3, 1
REP_MS, SHORT_REP_MS = 25.0, 15.0
MEMORY_SHARE = 0.75  # share of the GPU's free memory that a case's tensors may take


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_only(parser, FILTERS, "D=128,S=4096")
    parser.add_argument("--part", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--no-peer", action="store_true", help=f"leave out {', '.join(PEERS)}")
    parser.add_argument(
        "--mode",
        nargs="+",
        choices=MODES,
        help="default: graph for decode, batches and pages, otherwise do_bench",
    )
    parser.add_argument(
        "--flush", choices=FLUSHES, help="default: read where the mode is graph, otherwise zero"
    )
    parser.add_argument("--rounds", type=int, help=f"timings of each (default: {ROUNDS})")
    parser.add_argument(
        "--rest", type=float, default=REST_S, metavar="S", help=f"seconds (default: {REST_S})"
    )


def run(args: argparse.Namespace) -> Report:
    import torch

    from . import problem

    cases = chosen(all_cases() if args.only or not args.short else short_cases(), args.only)
    cases, notes = problem.with_kernel([case for case in cases if case.part in args.part])
    free = torch.cuda.mem_get_info()[0]
    fit = [case for case in cases if case.memory_bytes <= MEMORY_SHARE * free]
    notes += [f"left out for want of memory: {case}" for case in cases if case not in fit]
    problem.compile_all(fit)
    roofline = measure_roofline(rep_ms=30.0 if args.short else 100.0)
    theirs: Mapping[str, Any] | None = None
    if not args.no_peer:
        theirs, more = problem.peer_functions()
        notes += more
    timer = Timer(args, roofline, theirs)
    done = 0
    try:
        for case in track(fit, "attention"):
            timer.time(case)
            done += 1
    except KeyboardInterrupt:  # the results so far are worth a report
        notes.append(f"interrupted: {done} of {len(fit)} cases are done")
    return report(args, timer, roofline, notes)


class Timer:
    """Times cases. `tables` has the rows by part, `failures` the errors of our kernels."""

    def __init__(
        self, args: argparse.Namespace, roofline: Roofline, theirs: Mapping[str, Any] | None
    ) -> None:
        self.args, self.roofline, self.theirs = args, roofline, theirs
        self.tables: dict[str, list[Row]] = {part: [] for part in PARTS}
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.worst: dict[str, float] = {}
        self.checked: set[tuple[object, ...]] = set()

    def time(self, case: Case) -> None:
        """Check the contenders, then add a row for each mode."""
        import torch

        try:
            contenders = self.agreeing(case)
            for mode in self.args.mode or (DEFAULT_MODES[case.part],):
                self.add_row(case, mode, contenders)
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            self.failures.append(f"FAILED: {case}: {type(error).__name__}: {reason}")
            print(self.failures[-1], file=sys.stderr, flush=True)
        contenders = {}  # free the contenders, and the tensors that they hold
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def agreeing(self, case: Case) -> dict[str, Call]:
        """The contenders to time; none if there is no kernel of ours.

        Raises:
            Disagreement: our kernel's result is wrong.
        """
        from . import problem

        if case.part == "backward":
            return self.agreeing_backward(case)
        given = problem.make_inputs(case)
        contenders, errors, notes = problem.agreeing(
            case, given, problem.calls(case, given, self.theirs)
        )
        self.keep(errors, notes)
        return contenders

    def agreeing_backward(self, case: Case) -> dict[str, Call]:
        from . import problem

        kind = (case.head_dim, case.group, case.causal)
        try:
            if kind not in self.checked:
                self.keep(problem.check_gradients(case), [])
                self.checked.add(kind)
            contenders, notes = problem.backward_calls(case, problem.make_inputs(case), self.theirs)
        except NotImplementedError as error:
            self.keep({}, [f"backward: {error}"])
            return {}
        contenders, more = problem.agreeing_gradients(case, contenders)
        self.keep({}, [*notes, *more])
        return contenders

    def keep(self, errors: Mapping[str, float], notes: Sequence[str]) -> None:
        for who, error in errors.items():
            self.worst[who] = max(error, self.worst.get(who, 0.0))
        self.notes += [note for note in notes if note not in self.notes]

    def add_row(self, case: Case, mode: Mode, contenders: Mapping[str, Call]) -> None:
        from . import problem

        if mode == "graph" and contenders:
            contenders, notes = problem.capturable(case, contenders)
            self.keep({}, notes)
        copied = case.part in ("decode", "batches")
        if copied and contenders:
            contenders = {**contenders, **copies(case.min_bytes, problem.DEVICE)}
        short = self.args.short
        flush = self.args.flush or DEFAULT_FLUSHES.get(case.part, "zero")
        flush = "zero" if mode == "do_bench" else flush  # do_bench has its own flush
        timings = time_rested(
            contenders,
            mode=mode,
            flush=flush,
            rounds=self.args.rounds or (SHORT_ROUNDS if short else ROUNDS),
            rest_s=self.args.rest,
            rep_ms=SHORT_REP_MS if short else REP_MS,
        )
        if copied:
            row = decode_row(case, timings, self.roofline) | copy_columns(timings, mode)
        elif case.part == "pages":
            row = pages_row(case, timings)
        else:
            row = whole_row(case, timings, self.roofline)
        self.tables[case.part].append(row | {"mode": mode, "flush": flush})
        # Rows are printed at once, since a run may be cut short.
        times = [f"{who} {timing.median_us:.4g} us" for who, timing in timings.items()]
        print(f"{case} ({mode}): {', '.join(times) or 'no kernel'}", file=sys.stderr, flush=True)


def report(
    args: argparse.Namespace, timer: Timer, roofline: Roofline, notes: Sequence[str]
) -> Report:
    """The report of the part that was timed; with several parts, a report that contains the parts'
    reports.
    """
    plots = {
        "forward": whole_plots(timer.tables["forward"], roofline),
        "backward": whole_plots(timer.tables["backward"], roofline),
        "batches": batches_plots(timer.tables["batches"]),
    }
    errors = ", ".join(f"{who} {error:.3g}" for who, error in timer.worst.items())
    whole = Report(
        benchmark="attention",
        title="Softmax attention, bfloat16",
        environment=describe(args.argv, commit=args.commit),
        parameters={
            "rounds": args.rounds or (SHORT_ROUNDS if args.short else ROUNDS),
            "rest_s": args.rest,
        },
        roofline=roofline.to_dict(),
        notes=[
            f"largest errors; ours as a multiple of plain bfloat16's, a peer's relative: {errors}",
            "causal counts half of the products, a backward 2.5 times the forward's",
            "copy_us is a copy of as many bytes as a decode step must move, timed as the step is",
            *timer.failures,
            *notes,
            *timer.notes,
        ],
        succeeded=not timer.failures,
    )
    parts = [
        replace(
            whole,
            benchmark=f"attention-{part}",
            title=f"{whole.title}: {title}",
            rows=rows,
            verdicts=verdicts({part: rows}),
            plots=plots.get(part, []),
        )
        for part, title in PARTS.items()
        if (rows := timer.tables[part])
    ]
    return parts[0] if len(parts) == 1 else replace(whole, notes=[], parts=parts)


BENCHMARK = Benchmark(
    run=run,
    add_arguments=add_arguments,
    gpu_check=(GpuCheckStage(("--no-peer",), 80),),
)
