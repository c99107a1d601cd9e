"""cp.async against TMA, and plain loads beside them: copies of tiles of K or V to shared memory.

    repeated    one tile a CTA again and again, which an L1 or L2 serves: the published experiment
    streams     tiles from memory and from L2, by the bytes in flight
    producers   1 to 4 warps that copy
    boxes       one tile in instructions of different shapes
    latency     a single tile on an idle GPU
    products    a loop that also does a fixed number of MMAs a tile
    kda         a kernel of this package with other copies than it chooses

The sums that the kernels return show that every tile of every run has landed. A run with a wrong
sum fails the benchmark. Without a GPU, or with --emulate, all kernels run in the emulator on a few
tiles. The tables then have registers and instructions of a tile in place of times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from ...cache.arch import check_arch
from ..harness.environment import describe
from ..harness.progress import track
from ..harness.registry import Benchmark, GpuCheckStage
from ..harness.report import Plot, Report, Row, Scalar, Verdict
from . import cases
from .cases import PARTS, PUBLISHED, REPEATS, Run

if TYPE_CHECKING:
    from .machines import Emulator, Gpu

T = TypeVar("T")

LEVELS = ("hbm", "l2")
KDA = "kda"
TITLES = {
    "repeated": "One tile a CTA, copied 4096 times: as published for an RTX 5090",
    "streams": "Tiles copied to shared memory, by the bytes in flight on an SM",
    "producers": "Producer warps, 64 KiB in flight, 16 of vector loads",
    "boxes": "Tiles of 64 by 128 in boxes of different shapes, 64 KiB in flight",
    "latency": "Clocks from the start of the copy of a single tile until it may be used",
    "products": "Loops with MMAs: tiles of 64 by 128, 64 KiB in flight",
    KDA: "The state pass of chunk_kda, 8192 tokens, K = V = 128",
}
EVERYTHING = (*PARTS, KDA)
KDA_TOKENS, KDA_HEADS = 8192, (16, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=EVERYTHING, choices=EVERYTHING, help="parts")
    parser.add_argument("--emulate", action="store_true", help="in the emulator, for --arch")
    parser.add_argument(
        "--arch", default="sm_90a", type=check_arch, help="that the emulator emulates"
    )


def run(args: argparse.Namespace) -> Report:
    from .machines import Gpu

    machine = _machine(args)
    on_gpu = isinstance(machine, Gpu)
    runs = {name: make(machine.arch, args.short) for name, make in PARTS.items()}
    runs = {name: runs[name] for name in PARTS if name in args.only}
    parts: list[Report] = []
    course = Course()
    ceilings: dict[str, float | None] = {}
    if isinstance(machine, Gpu):
        ceilings = _ceilings(machine, [r for some in runs.values() for r in some])
    for name, some in runs.items():
        if isinstance(machine, Gpu):
            rows = _measure(name, machine, some, course)
        else:
            rows = _emulate(name, machine, some, course)
        parts.append(_part(name, rows))
    if KDA in args.only:
        parts.append(_part(KDA, _kda(machine, course)))
    # The streams are the report's own table, so that the plots of the streams are drawn.
    first = next((part for part in parts if part.benchmark.endswith("streams")), None)
    report = Report(
        benchmark="async-copy" if on_gpu else f"async-copy-emulated-{machine.arch}",
        title=TITLES["streams"] if first else "Copies of tiles to shared memory",
        environment=describe(args.argv, commit=args.commit),
        parameters=_parameters(on_gpu),
        roofline=ceilings,
        rows=first.rows if first else [],
        verdicts=[
            Verdict(
                "every tile landed where it belongs, in every run",
                not course.problems,
                "; ".join(course.problems) or f"{machine.checked} tiles",
            )
        ],
        notes=_notes(machine.arch),
        parts=[part for part in parts if part is not first],
        log=course.log,
        succeeded=not course.problems,
    )
    if on_gpu and first:
        report.plots = _plots(report.columns, ceilings)
    return report


def _part(name: str, rows: list[Row]) -> Report:
    return Report(f"async-copy-{name}", TITLES[name], {}, rows=rows)


def _machine(args: argparse.Namespace) -> Gpu | Emulator:
    import torch

    from .machines import Emulator, Gpu

    return Gpu() if torch.cuda.is_available() and not args.emulate else Emulator(args.arch)


def _parameters(on_gpu: bool) -> dict[str, object]:
    if not on_gpu:
        return {"ctas": 2, "consumer_warps": 4}
    from . import machines

    return {
        "ctas": "one an SM",
        "consumer_warps": 4,
        "hbm_bytes": machines.MEMORY_BYTES,
        "l2_bytes": machines.L2_BYTES,
        "rep_ms": machines.REP_MS,
    }


def _notes(arch: str) -> list[str]:
    notes = [
        "GB/s are bytes that land in shared memory; those of multicast and of pairs are read from "
        "L2 or memory for two CTAs at once",
        "published_gbps: RTX 5090, 170 CTAs, 7 repeats, not measured here",
    ]
    missing = [copy for copy in cases.COPIES if not cases.supported(copy, arch)]
    if missing:
        notes.append(f"{arch} has no {', '.join(missing)}: these need sm_90 or newer")
    return notes


def _ceilings(gpu: Gpu, runs: list[Run]) -> dict[str, float | None]:
    from ..harness.roofline import measure_roofline

    gpu.prepare(runs)
    ceilings = measure_roofline(flush="none", matmul=False, rep_ms=10.0).to_dict()
    return {**ceilings, **{f"{level}_read_gbps": gpu.read(level) for level in LEVELS}}


@dataclass
class Course:
    """The problems that a run of the benchmark has found, and the run's log."""

    problems: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def attempt(
        self, part: str, function: Callable[..., T], run: Run, *arguments: object
    ) -> T | None:
        """The result of a run; None, and a line in `problems`, if the result is wrong."""
        from .problem import WrongTiles

        try:
            result = function(run, *arguments)
        except WrongTiles as error:
            self.problems.append(f"{dict(run.labels)}: {error}")
            self.note(f"{part} {dict(run.labels)} {arguments} FAILED: {error}")
            return None
        shown = "checked" if result is None else f"{result:.4g}"
        self.note(f"{part} {dict(run.labels)} {arguments}: {shown}")
        return result

    def note(self, line: str) -> None:
        self.log.append(f"{time.strftime('%H:%M:%S')} {line}")


def _measure(part: str, gpu: Gpu, runs: Sequence[Run], course: Course) -> list[Row]:
    """The rows of a part."""
    from .machines import registers

    rows: dict[object, Row] = {}
    for run in track(runs, f"async-copy {part}"):
        labels: Row = dict(run.labels)
        if part == "repeated":
            rate = course.attempt(part, gpu.repeated, run, REPEATS)
            rows[run] = {**labels, "gbps": rate, "published_gbps": _published(run)}
            continue
        for level in LEVELS:
            if part == "latency":
                value = course.attempt(part, gpu.latency, run, level)
                _put(rows, run, f"{level}_clocks", value)
                continue
            value = course.attempt(part, gpu.stream, run, level)
            if part in ("streams", "producers"):
                # Each copy has a column; each combination of the other fields has a row.
                key = (level, *(v for k, v in run.labels if k != "copy"))
                row = rows.setdefault(key, _wide(level, run, runs))
                row[f"{run['copy']}_gbps"] = value
            else:
                _put(rows, run, f"{level}_gbps", value)
                if part == "products" and level == "l2":
                    rows[run]["registers"] = registers(run.spec, gpu.arch)
    return _finish(part, list(rows.values()))


def _put(rows: dict[object, Row], run: Run, column: str, value: Scalar) -> None:
    rows.setdefault(run, dict(run.labels))[column] = value


def _wide(level: str, run: Run, runs: Sequence[Run]) -> Row:
    row: Row = {"source": level, **{k: v for k, v in run.labels if k != "copy"}}
    copies = dict.fromkeys(str(r["copy"]) for r in runs)
    return {**row, **{f"{copy}_gbps": None for copy in copies}}


def _published(run: Run) -> int | None:
    cp_async, tma = PUBLISHED[run.spec.tile_columns, run.spec.tile_rows]
    return {"cp_async": cp_async, "cp_async_l1": cp_async, "tensor": tma}.get(run.spec.copy)


def _finish(part: str, rows: list[Row]) -> list[Row]:
    """Add the columns that compare rows."""
    if part == "repeated":
        by_key = {(r["head_dim"], r["block_kv"], r["copy"]): r["gbps"] for r in rows}
        for row in rows:
            tma = by_key.get((row["head_dim"], row["block_kv"], "tensor"))
            row["gbps_to_tma_ratio"] = _ratio(row["gbps"], tma)
    if part == "products":
        # The column compares with a loop that has all hand-overs, but no copies.
        for row in rows:
            warps = "same warps" if "same warps" in str(row["how"]) else "1 producer warp"
            base = next(
                r for r in rows
                if r["mmas_per_fragment"] == row["mmas_per_fragment"]
                and str(r["how"]).startswith("no copies") and str(r["how"]).endswith(warps)
            )  # fmt: skip
            for level in LEVELS:
                column = f"{level}_gbps"
                row[f"{level}_time_to_no_copies_ratio"] = _ratio(base[column], row[column])
    return rows


def _ratio(x: Scalar, y: Scalar) -> float | None:
    return x / y if isinstance(x, float) and isinstance(y, float) else None


def _emulate(part: str, machine: Emulator, runs: Sequence[Run], course: Course) -> list[Row]:
    """Rows of each kernel's registers and instructions."""
    from .machines import registers

    rows: list[Row] = []
    for run in track(runs, f"async-copy {part} in the emulator"):
        course.attempt(part, machine.check, run)
        use, copy = _issue_slots(run, machine.arch)
        rows.append(
            {
                **dict(run.labels),
                "tile_kib": run.spec.tile_bytes // cases.KIB,
                "num_stages": run.spec.num_stages,
                "registers": registers(run.spec, machine.arch),
                "consumer_instructions": use,
                "producer_instructions": copy,
            }
        )
    return rows


def _kda(machine: Gpu | Emulator, course: Course) -> list[Row]:
    """Rows of the state pass with each choice of copies, timed on a GPU."""
    from . import kda
    from .machines import Gpu

    on_gpu = isinstance(machine, Gpu)
    rows: list[Row] = []
    for heads in KDA_HEADS if on_gpu else (1,):
        tokens = KDA_TOKENS if on_gpu else 2 * kda.CHUNK
        times, found = machine.kda(tokens, heads)
        course.problems += found
        for choice, time_us in times.items():
            labels: Row = {"heads": heads, "tokens": tokens, "copies, products": choice}
            rows.append({**labels, "time_us": time_us})
            course.note(f"{KDA} {rows[-1]}")
    return rows


def _issue_slots(run: Run, arch: str) -> tuple[int | None, int | None]:
    """See `issue.issue_slots`; None without a disassembler."""
    from ...machine_code.disassembly import DisassemblyError
    from .issue import issue_slots

    try:
        return issue_slots(run.spec, arch)
    except DisassemblyError:
        return None, None


def _plots(columns: Sequence[str], ceilings: dict[str, float | None]) -> list[Plot]:
    rates = tuple(column for column in columns if column.endswith("_gbps"))
    plots = []
    for level, place in (("hbm", "memory"), ("l2", "L2")):
        ceiling = ceilings[f"{level}_read_gbps"]
        assert ceiling is not None
        plots.append(
            Plot(
                "in_flight_kib", rates, f"tiles from {place}", "GB/s", {"source": level},
                lines={"plain reads": ceiling}, log_x=True,
            )
        )  # fmt: skip
    return plots


BENCHMARK = Benchmark(
    run=run, needs_gpu=False, add_arguments=add_arguments, gpu_check=(GpuCheckStage((), 60),)
)
