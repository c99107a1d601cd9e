"""The FMHA ladder: the speedup by each optimisation of an attention forward, by sequence length.

Every contender's output is compared with float64 before it is timed, by
`triton.testing.do_bench_cudagraph`. A contender that fails is reported, and all other contenders go
on. PyTorch's flash backend (FlashAttention-2), FlashAttention-4 and this package's operator stand
beside the steps where they exist. `--emulate sm_90a` needs no GPU: the run checks the steps in the
emulator, and counts instructions in place of time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..harness.environment import describe
from ..harness.progress import track
from ..harness.registry import Benchmark, GpuCheckStage, require_gpu
from ..harness.report import Plot, Report, Row, Scalar, Verdict
from . import FA2, FA4, PRODUCTION
from .published import PUBLISHED

if TYPE_CHECKING:
    from ...kernels.ladder.spec import FmhaLadderSpec
    from ...kernels.ladder.table import LadderStep
    from .problem import Call, Case

SEQLENS = (1024, 2048, 4096, 8192, 16384)
SHORT_SEQLENS = (1024, 4096)
SEED = 20261122
REP_MS, SHORT_REP_MS = 50, 20
EMULATED = {"batch": 1, "heads": 1, "seqlens": [200]}
GPU = {"batch": 4, "heads": 32}

BASELINE = "0_pytorch"
LAST_PORTABLE, LAST_HOPPER = (4, 5), 10
TARGET, TARGET_SEQLEN = 0.9, 4096  # share of the peers' speed, from this length on


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _arch(text: str) -> str:
    from ...cache.arch import check_arch

    try:
        return check_arch(text)
    except (ValueError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ...kernels.ladder.heuristics import CONFIGS
    from ...kernels.ladder.spec import DTYPES, HEAD_DIMS
    from ...kernels.ladder.table import STEPS

    numbers = [step.number for step in STEPS]
    add = parser.add_argument
    add("--seqlens", type=_positive, nargs="+", help=f"default: {' '.join(map(str, SEQLENS))}")
    add("--batch", type=_positive, help=f"default: {GPU['batch']}")
    add("--heads", type=_positive, help=f"default: {GPU['heads']}")
    add("--head-dim", type=int, default=128, choices=HEAD_DIMS)
    add("--dtype", default="float16", choices=DTYPES)
    add("--causal", action=argparse.BooleanOptionalAction, default=True)
    add("--steps", type=int, nargs="+", choices=numbers, default=numbers)
    add("--config", choices=CONFIGS, help="tiles by name (default: those of the GPU)")
    for name in ("tile-m", "tile-n", "num-warps", "occupancy", "k-stages", "v-stages"):
        add(f"--{name}", type=_positive, help="in place of the configuration's")
    add(
        "--swizzled",
        action=argparse.BooleanOptionalAction,
        help="tiles of all steps that copy by cp.async (default: from step 5 on)",
    )
    add("--no-peers", action="store_true", help=f"leave out {FA2}, {FA4} and the operator")
    add("--rep", type=_positive, help=f"milliseconds of each timing (default: {REP_MS})")
    add(
        "--emulate",
        type=_arch,
        metavar="ARCH",
        help="check in the emulator, such as sm_90a; needs no GPU",
    )


def run(args: argparse.Namespace) -> Report:
    from ... import cache
    from ...kernels.ladder.table import find

    emulated = args.emulate is not None
    if not emulated:
        require_gpu()
    sizes: dict[str, Any] = EMULATED if emulated else GPU
    seqlens = args.seqlens or sizes.get("seqlens") or (SHORT_SEQLENS if args.short else SEQLENS)
    arch = args.emulate if emulated else cache.current_arch()
    from .problem import Case

    cases = [
        Case(
            batch=args.batch or sizes["batch"],
            heads=args.heads or sizes["heads"],
            seqlen=seqlen,
            head_dim=args.head_dim,
            causal=args.causal,
            dtype=args.dtype,
        )
        for seqlen in sorted(seqlens)
    ]
    ladder = Ladder(args, arch, [find(number) for number in sorted(set(args.steps))])
    report = ladder.emulated(cases) if emulated else ladder.timed(cases)
    report.environment = describe(args.argv, commit=args.commit)
    report.log = ladder.lines
    report.succeeded = not ladder.wrong
    report.notes += ladder.notes
    return report


class Ladder:
    """A run of the benchmark.

    Attributes:
        specs: the steps that this target has, with their specs.
        lines: the log.
        notes: the contenders that were left out, and why.
        wrong: whether a contender failed.
    """

    def __init__(self, args: argparse.Namespace, arch: str, steps: Sequence[LadderStep]):
        self.args = args
        self.arch = arch
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.wrong = False
        self.specs: dict[str, tuple[LadderStep, FmhaLadderSpec | None]] = {}
        for step in steps:
            if step.runs_on(arch):
                self._add(step)
            else:
                self._leave_out(f"step {step.number} {step.name} needs {', '.join(step.archs)}")

    def _add(self, step: LadderStep) -> None:
        from ...kernels.ladder.heuristics import spec_of

        spec = None
        if step.kernel is not None:
            tuning = ("config", "tile_m", "tile_n", "num_warps", "occupancy", "k_stages")
            names = (*tuning, "v_stages", "swizzled", "dtype", "head_dim", "causal")
            try:
                spec = spec_of(
                    step.number, self.arch, **{name: getattr(self.args, name) for name in names}
                )
            except ValueError as error:
                self._fail(f"{step.number}_{step.name}", error)
                return
        self.specs[f"{step.number}_{step.name}"] = step, spec

    def _log(self, line: str) -> None:
        self.lines.append(f"{time.strftime('%H:%M:%S')} {line}")

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
            self._log(note)

    def _leave_out(self, why: str) -> None:
        self._note(f"left out: {why}")

    def _fail(self, name: str, error: Exception) -> None:
        self.wrong = True
        message = f"{name} FAILED: {type(error).__name__}: {error}"
        self.notes.append(message)
        self._log(message)
        print(message, file=sys.stderr)

    def parameters(self, cases: Sequence[Case]) -> dict[str, Any]:
        case = cases[0]
        tiles = {
            name: f"{s.tile_m}x{s.tile_n}, {s.num_warps} warps, occupancy {s.occupancy}, stages of "
            f"K {s.k_stages} and of V {s.v_stages}{', swizzled' * s.swizzled}"
            for name, (_, s) in self.specs.items()
            if s is not None
        }
        return {
            "batch": case.batch, "heads": case.heads, "head_dim": case.head_dim,
            "causal": case.causal, "dtype": case.dtype, "arch": self.arch, **tiles,
        }  # fmt: skip

    def title(self, cases: Sequence[Case]) -> str:
        case = cases[0]
        return (
            f"FMHA ladder, batch {case.batch}, {case.heads} heads, head_dim {case.head_dim}, "
            f"{case.dtype}, {'causal' if case.causal else 'not causal'}"
        )

    # -- in the emulator ----------------------------------------------------------------------

    def emulated(self, cases: Sequence[Case]) -> Report:
        """Each step's error, and the instructions that the step executes."""
        from ... import cache
        from ...emulation import emulated
        from ...emulator import Emulator
        from ...machine_code.disassembly import DisassemblyError
        from .machine_code import loop_row
        from .problem import Problem

        rows: list[Row] = []
        loops: dict[str, Row] = {}
        for case in cases:
            problem = Problem(case, "cpu", SEED)
            for name, (step, spec) in track(list(self.specs.items()), f"S={case.seqlen}"):
                if step.kernel is None or spec is None:
                    continue
                try:
                    entry = cache.compile(step.kernel, spec, arch=self.arch)
                    with emulated(self.arch, Emulator(schedule="random", seed=0)) as emulator:
                        error = problem.check(name, problem.step(step, spec))
                except Exception as failure:
                    self._fail(name, failure)
                    continue
                try:
                    loops.setdefault(name, loop_row(name, entry, spec))
                except DisassemblyError as reason:
                    self._leave_out(f"the machine code: {reason}")
                (use,) = entry.kernels
                counts = emulator.report.by_opcode
                rows.append(
                    {
                        "seqlen": case.seqlen,
                        "step": name,
                        "error_ratio": error,
                        "registers": use.registers,
                        "spill_bytes": use.spills,
                        "warp_instructions": emulator.report.instructions,
                        "mma": _count(counts, ("mma.sync", "wgmma.mma_async")),
                        "ldmatrix": _count(counts, ("ldmatrix",)),
                        "exponentials": _count(counts, ("ex2",)),
                        "barriers": _count(counts, ("bar.", "barrier.")),
                        "shared_wavefronts": emulator.report.counters["shared_wavefronts"],
                        "bank_conflicts_ratio": emulator.report.bank_conflicts,
                    }
                )
                self._log(f"S={case.seqlen} {name}: {rows[-1]}")
        return Report(
            benchmark=f"fmha-ladder-emulated-{self.arch}",
            title=f"{self.title(cases)}, in the emulator for {self.arch}",
            environment={},
            parameters=self.parameters(cases),
            rows=rows,
            parts=[
                part(
                    "machine-code",
                    "Machine code: instructions of a warp for its rows of a K/V tile, no mask",
                    list(loops.values()),
                )
            ],
        )

    # -- on the GPU ---------------------------------------------------------------------------

    def timed(self, cases: Sequence[Case]) -> Report:
        """All tables."""
        import torch

        from .problem import Problem, compile_all, peers

        compile_all([(s, spec) for s, spec in self.specs.values() if spec is not None], self.arch)
        tables: dict[int, dict[str, Row]] = {}
        for case in track(cases, "fmha-ladder"):
            problem = Problem(case, "cuda", SEED + case.seqlen)
            if BASELINE in self.specs:
                self._note(f"{BASELINE} is PyTorch's {problem.pytorch_backend()}")
            makers: dict[str, Callable[[], Call]] = {
                name: partial(problem.step, step, spec) for name, (step, spec) in self.specs.items()
            }
            if not self.args.no_peers:
                makers |= peers(problem)
            tables[case.seqlen] = {}
            for name, make in makers.items():
                row = self._time(case, name, make, problem)
                if row is not None:
                    tables[case.seqlen][name] = row
            del problem, makers, make  # and the tensors that these objects hold
            torch.cuda.empty_cache()
        return self.report(cases, tables)

    def _time(self, case: Case, name: str, make: Callable[[], Call], problem: Any) -> Row | None:
        from ..harness.timing import time_cudagraph
        from .problem import NotHere

        rep_ms = self.args.rep or (SHORT_REP_MS if self.args.short else REP_MS)
        try:
            call = make()
            error = problem.check(name, call)
            timing = time_cudagraph(call, rep_ms)
        except NotHere as reason:
            self._leave_out(f"{name}: {reason}")
            return None
        except Exception as failure:
            self._fail(f"S={case.seqlen} {name}", failure)
            return None
        tflops = case.tflops(timing.median_us)
        self._log(
            f"S={case.seqlen} {name}: {timing.median_us / 1e3:.4f} ms, {tflops:.1f} TFLOP/s, error "
            f"{error:.2f} x that of plain arithmetic"
        )
        return {
            "step": name,
            "latency_ms": timing.median_us / 1e3,
            "p20_ms": timing.p20_us / 1e3,
            "p80_ms": timing.p80_us / 1e3,
            "tflops": tflops,
            "error_ratio": error,
        }

    def report(self, cases: Sequence[Case], tables: dict[int, dict[str, Row]]) -> Report:
        """The report of the timings, by sequence length and contender."""
        names = list(dict.fromkeys(name for table in tables.values() for name in table))
        steps = [name for name in names if name in self.specs or name == PRODUCTION]
        performance = [performance_row(seqlen, tables[seqlen], names) for seqlen in tables]
        parts = [
            part(
                f"s{seqlen}",
                f"Sequence length {seqlen}",
                [with_speedup(row, table.get(BASELINE)) for row in table.values()],
            )
            for seqlen, table in tables.items()
        ]
        parts += [
            part(
                "impact",
                "Optimization impact by sequence length: gain over the step before",
                [impact_row(seqlen, tables[seqlen], steps) for seqlen in tables],
            ),
            part(
                "published",
                "Published by others, not measured here",
                [published._asdict() for published in PUBLISHED],
            ),
        ]
        return Report(
            benchmark="fmha-ladder" + ("" if self.args.causal else "-dense"),
            title=f"{self.title(cases)}: performance vs sequence length",
            environment={},
            parameters=self.parameters(cases),
            rows=performance,
            parts=parts,
            verdicts=verdicts(tables, self.arch),
            plots=plots(performance, names, steps),
        )


def _count(by_opcode: dict[str, int], prefixes: tuple[str, ...]) -> int:
    return sum(n for opcode, n in by_opcode.items() if opcode.startswith(prefixes))


# -- tables ---------------------------------------------------------------------------------------


def part(name: str, title: str, rows: list[Row]) -> Report:
    return Report(benchmark=f"fmha-ladder-{name}", title=title, environment={}, rows=rows)


def column(name: str) -> str:
    """The column of a contender's speed."""
    return f"{name.replace('-', '_')}_tflops"


def with_speedup(row: Row, baseline: Row | None) -> Row:
    return {**row, "speedup_vs_pytorch": ratio(row, baseline)}


def ratio(row: Row | None, other: Row | None) -> float | None:
    """A contender's speed over another's; None if one of the two speeds is missing."""
    if row is None or other is None:
        return None
    tflops, others = row["tflops"], other["tflops"]
    assert isinstance(tflops, float) and isinstance(others, float)
    return tflops / others


def performance_row(seqlen: int, table: dict[str, Row], names: Sequence[str]) -> Row:
    speeds = {column(name): table[name]["tflops"] if name in table else None for name in names}
    return {"seqlen": seqlen, **speeds}


def impact_row(seqlen: int, table: dict[str, Row], steps: Sequence[str]) -> Row:
    """The speedup of each step over the last step that was timed, and of all steps together."""
    row: Row = {"seqlen": seqlen}
    timed = [name for name in steps if name != BASELINE]
    before: Row | None = None
    first = table.get(timed[0]) if timed else None
    for name in timed:
        gain: Scalar = None
        if before is not None and (times := ratio(table.get(name), before)) is not None:
            gain = 100 * (times - 1)
        row[f"{name}_pct"] = gain
        before = table.get(name, before)
    row["speedup_vs_first"] = ratio(before, first)
    return row


def verdicts(tables: dict[int, dict[str, Row]], arch: str) -> list[Verdict]:
    """The targets, for every length that has a target."""
    found = []
    for seqlen, table in tables.items():
        if seqlen < TARGET_SEQLEN:
            continue
        portable = [table[name] for name in table if _number(name) in LAST_PORTABLE]
        hopper = [table[name] for name in table if _number(name) == LAST_HOPPER]
        for what, rows, peer in (
            ("step 4 or 5", portable, FA2),
            *((("step 10", hopper, FA4),) if arch == "sm_90a" else ()),
        ):
            times = [x for row in rows if (x := ratio(row, table.get(peer))) is not None]
            found.append(
                Verdict(
                    f"S={seqlen}: {what} at least {TARGET:g}x {peer}",
                    max(times) >= TARGET if times else None,
                    f"{max(times):.3f}x" if times else "one of them was not timed",
                )
            )
    return found


def _number(name: str) -> int | None:
    """The step's number; None for a peer."""
    first = name.partition("_")[0]
    return int(first) if first.isdigit() else None


def plots(rows: Sequence[Row], names: Sequence[str], steps: Sequence[str]) -> list[Plot]:
    if not rows:
        return []
    columns = tuple(column(name) for name in names)
    longest = max(row["seqlen"] for row in rows)  # type: ignore[type-var]
    climbed = tuple(column(name) for name in steps if name != BASELINE)
    return [
        Plot(
            x="seqlen", ys=columns, title="Speed by sequence length", y_label="TFLOP/s", log_x=True
        ),
        Plot(
            x="seqlen",
            ys=climbed,
            title=f"What each step brings at S={longest}",
            y_label="TFLOP/s",
            where={"seqlen": longest},
            kind="waterfall",
        ),
    ]


BENCHMARK = Benchmark(
    run=run,
    needs_gpu=False,
    add_arguments=add_arguments,
    gpu_check=(GpuCheckStage(("--no-peers", "--seqlens", "1024"), 60),),
)
