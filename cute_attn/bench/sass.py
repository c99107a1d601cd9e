"""Static analysis of attention kernels for Blackwell, ours compared with FlashAttention-4's.

`cute_attn.machine_code.tile_model` counts the instructions of a K/V tile for each warp role, and
the clocks for which each unit of an SM is busy with it. Nothing is measured, and no GPU is needed:
the result is an upper bound of a kernel's speed, not its speed.

FlashAttention-4's kernels are left out if that package is missing (extras "test" and "bench").
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..machine_code import tile_model as model
from ..machine_code.disassembly import DisassemblyError, disassemble, find_nvdisasm, version
from .attention import hd256_forward as forward
from .attention.hd256_forward import OURS, THEIRS, Program, Specialisation
from .harness.environment import describe
from .harness.progress import track
from .harness.registry import Benchmark, Unavailable
from .harness.report import Report, Row, Verdict

KERNELS = ("hd256-fwd",)
SOFTMAX = "warp: softmax"


@dataclass(frozen=True)
class Analysed:
    program: Program
    tile: model.TileCost


def analyse(program: Program, nvdisasm: Path) -> Analysed:
    """Raises DisassemblyError, or AnalysisError if the kernel does not have the expected form."""
    listing = disassemble(program.cubin, nvdisasm)
    return Analysed(program, model.tile_cost(listing, program.ptx, model.HD256_FORWARD))


# -- the report -----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", choices=KERNELS, help="which kernel")
    parser.add_argument(
        "--captures",
        type=Path,
        help="directory that keeps FlashAttention-4's compiled kernels (default: a temporary one)",
    )


@contextmanager
def _captures(options: argparse.Namespace) -> Iterator[Path]:
    if options.captures is not None:
        options.captures.mkdir(parents=True, exist_ok=True)
        yield options.captures
    else:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)


def run(options: argparse.Namespace) -> Report:
    try:
        return _report(options, find_nvdisasm())
    except DisassemblyError as reason:
        raise Unavailable(str(reason)) from reason


def _report(options: argparse.Namespace, nvdisasm: Path) -> Report:
    specialisations = [s for s in forward.FORWARD if s.name in forward.SHORT or not options.short]
    geometry = model.HD256_FORWARD
    programs = [forward.our_program(s) for s in track(specialisations, f"compiling {OURS}")]
    notes: list[str] = []
    try:
        with _captures(options) as directory:
            theirs, missing = forward.their_programs(specialisations, directory)
        programs += theirs
        notes += missing
    except ImportError as error:
        notes.append(f"without {THEIRS}: {error}")
    analysed = [analyse(p, nvdisasm) for p in track(programs, "taking apart")]
    if presumed := [a.program for a in analysed if not a.tile.shapes_checked]:
        names = ", ".join(f"{p.kernel} {p.specialisation}" for p in presumed)
        notes.append(f"the shapes of the MMAs are presumed, not read from the PTX: {names}")
    order = [s.name for s in specialisations]
    analysed.sort(key=lambda a: (order.index(a.program.specialisation), a.program.kernel != OURS))
    environment = describe(options.argv, commit=options.commit)
    return Report(
        benchmark=f"sass-{options.kernel}",
        title=f"{options.kernel}: what a K/V tile costs, from machine code (nothing is measured)",
        environment=environment,
        parameters={
            "arch": forward.ARCH,
            "rows_of_a_cta": geometry.rows,
            "keys_of_a_tile": geometry.keys,
            "mma_score": geometry.score_mma,
            "mma_output": geometry.output_mma,
            "nvdisasm": version(nvdisasm),
        },
        roofline={**model.RATES, "peak_tflops": model.PEAK_TFLOPS},
        rows=[_summary(a) for a in analysed],
        verdicts=verdicts(analysed, specialisations),
        notes=[*NOTES, *notes, *_calibration_notes(analysed)],
        parts=[
            Report(
                f"sass-{options.kernel}-counts",
                "Instructions of one warp for a K/V tile, by role",
                environment={},
                rows=[row for a in analysed for row in _counts(a)],
            ),
            Report(
                f"sass-{options.kernel}-clocks",
                "Clocks that each unit of an SM is busy with a K/V tile",
                environment={},
                rows=[_units(a) for a in analysed],
            ),
            Report(
                f"sass-{options.kernel}-calibration",
                f"The model beside what was published for {THEIRS}, non-causal",
                environment={},
                rows=_calibration(analysed),
            ),
        ],
    )


NOTES = (
    "A static analysis of machine code. The bound is the busiest unit's time, as if all units "
    "overlapped without a gap, at the boost clock. Latencies, barriers between roles, launch, "
    "prologue, epilogue, partial waves, caches and power are not in it.",
    "Counted is the way through a role's loop that a tile in the middle takes: no mask, no "
    "waiting, and no rescaling of O, which follows from a maximum that grows by a factor of more "
    "than 2^8. `bound_if_rescaling` is for the case that every tile rescales. Predicated "
    "instructions count as if they were carried out: they take their issue slot either way.",
    '"warp: ROLE" adds up the stall counts that the compiler wrote into the instructions: the '
    "time that a warp with a scheduler to itself needs for a tile if it never waits for a result "
    "of the SFU, tensor memory or a barrier. How they are encoded is not NVIDIA's word, but that "
    "of those who took the encoding apart (arXiv:1804.06826).",
    "A packed instruction (FFMA2, FADD2, FMUL2) has two lanes of fp32 for each thread. Issue slots "
    "are those of the scheduler that has a softmax, a correction and the busier of the load and "
    "mma warps. Shared memory: what TMA writes, what MMAs read (each SM its own half of B), and "
    "accesses of the warps themselves. Tensor memory: accesses of the warps.",
    "Both kernels give the tensor cores the same work, so that where these are the busiest unit "
    "the bounds are equal by construction; what may then differ is the slack of the others.",
    "Rates: MMA, SFU, shared memory as in FlashAttention-4's paper; fp32 and integer as in the "
    "CUDA C++ Programming Guide; tensor memory 57 bytes a clock and warp as measured by "
    "github.com/ademeure/QuickRunCUDA, half of that for writing as in arXiv:2512.02189 (16 and "
    "8 TB/s).",
)


def _summary(analysed: Analysed) -> Row:
    program, tile = analysed.program, analysed.tile
    clocks = tile.clocks
    first, second = clocks.order[:2]
    return {
        "specialisation": program.specialisation,
        "kernel": program.kernel,
        "registers": program.registers,
        "spilled_bytes": program.spilled,
        "local_accesses": tile.counted.local_accesses,
        "shared_bytes": program.shared,
        "instructions": tile.counted.instructions,
        "busiest": first,
        "bound_clocks": round(clocks.bound),
        "next_busiest": second,
        "next_clocks": round(clocks.units[second]),
        "share_of_peak": clocks.share_of_peak,
        "bound_tflops": clocks.share_of_peak * model.PEAK_TFLOPS,
        "bound_if_rescaling": round(tile.rescaling.bound),
    }


def _counts(analysed: Analysed) -> Iterator[Row]:
    roles = dict(analysed.tile.counted.roles)
    if analysed.tile.counted.rescale is not None:
        roles["correction, rescaling"] = analysed.tile.counted.rescale
    for role, counted in roles.items():
        yield {
            "specialisation": analysed.program.specialisation,
            "kernel": analysed.program.kernel,
            "role": role,
            "instructions": round(counted.instructions),
            **{kind: round(counted.kinds[kind]) for kind in model.KINDS},
            "tmem_load_columns": round(counted.tmem_read / (4 * model.WARP)),
            "tmem_store_columns": round(counted.tmem_written / (4 * model.WARP)),
            "scheduled_clocks": round(counted.schedule),
        }


def _units(analysed: Analysed) -> Row:
    return {
        "specialisation": analysed.program.specialisation,
        "kernel": analysed.program.kernel,
        **{unit: round(time) for unit, time in analysed.tile.clocks.units.items()},
    }


def _plain(analysed: Sequence[Analysed], kernel: str) -> Analysed | None:
    return next(
        (
            a
            for a in analysed
            if a.program.kernel == kernel and a.program.specialisation == "non-causal"
        ),
        None,
    )


def _calibration(analysed: Sequence[Analysed]) -> list[Row]:
    theirs = _plain(analysed, THEIRS)
    if theirs is None:
        return []
    predicted = theirs.tile.clocks.share_of_peak * model.PEAK_TFLOPS
    return [
        {
            "seqlen": seqlen,
            "published_tflops": published,
            "published_share_of_peak_ratio": published / model.PEAK_TFLOPS,
            "bound_tflops": predicted,
            "bound_to_published_ratio": predicted / published,
        }
        for seqlen, published in forward.PUBLISHED_TFLOPS.items()
    ]


def _calibration_notes(analysed: Sequence[Analysed]) -> list[str]:
    theirs = _plain(analysed, THEIRS)
    if theirs is None:
        return []
    predicted = theirs.tile.clocks.share_of_peak * model.PEAK_TFLOPS
    seqlens, published = zip(*forward.PUBLISHED_TFLOPS.items(), strict=True)
    off = [predicted / tflops for tflops in published]
    return [
        f"How far off: for {THEIRS} the bound is {min(off):.2f} to {max(off):.2f} times what was "
        f"published at {min(seqlens)} to {max(seqlens)} keys. Those numbers are "
        "of an earlier kernel of theirs (pull request 2454), which emulated half of the "
        "exponentials; the one analysed here emulates fewer. What the model leaves out costs that "
        "much: a bound that two kernels share does not make them equally fast."
    ]


def verdicts(
    analysed: Sequence[Analysed], specialisations: Sequence[Specialisation]
) -> list[Verdict]:
    """Our kernel does not spill, and its busiest unit takes no more clocks than theirs."""
    at = {(a.program.kernel, a.program.specialisation): a for a in analysed}
    ours = [a for a in analysed if a.program.kernel == OURS]
    spilling = [
        a.program.specialisation
        for a in ours
        if a.program.spilled != 0 or a.tile.counted.local_accesses or a.program.stack
    ]
    found = [
        Verdict(
            f"none of {len(ours)} specialisations of ours spills",
            not spilling,
            ", ".join(spilling) or "no spilled bytes, no stack, no local memory",
        )
    ]
    for specialisation in specialisations:
        name = specialisation.name
        other = at.get((THEIRS, specialisation.beside or name))
        question = f"{name}: ours is not above theirs on the busiest unit"
        if specialisation.beside:
            question += f" (theirs {specialisation.beside})"
        if other is None:
            found.append(Verdict(question, None, f"{THEIRS} has none"))
            continue
        mine, its = at[OURS, name].tile.clocks, other.tile.clocks
        found.append(
            Verdict(
                question,
                round(mine.bound) <= round(its.bound),
                f"{mine.order[0]} {mine.bound:.0f} clocks, theirs {its.order[0]} {its.bound:.0f}",
            )
        )
    pairs = [
        (s.name, at[OURS, s.name], at[THEIRS, s.beside or s.name])
        for s in specialisations
        if (THEIRS, s.beside or s.name) in at
    ]
    longer = [
        f"{name} {mine.tile.clocks.units[SOFTMAX]:.0f} to {its.tile.clocks.units[SOFTMAX]:.0f}"
        for name, mine, its in pairs
        if round(mine.tile.clocks.units[SOFTMAX]) > round(its.tile.clocks.units[SOFTMAX])
    ]
    found.append(
        Verdict(
            "a softmax warp of ours takes no longer for a tile than theirs",
            not longer if pairs else None,
            "clocks: " + ", ".join(longer) if longer else f"in none of {len(pairs)}",
        )
    )
    return found


BENCHMARK = Benchmark(
    run=run,
    needs_gpu=False,
    add_arguments=add_arguments,
)
