"""Static analysis of attention kernels, ours compared with FlashAttention-4's.

For Blackwell `cute_attn.machine_code.tile_model` counts the instructions of a tile for each warp
role, and the clocks for which the tile keeps each unit of an SM busy. The busiest unit bounds a
kernel's speed. For Hopper ("sm90") only instructions are counted. Nothing is measured, and no GPU
is needed.

FlashAttention-4's kernels are left out if FlashAttention-4 is missing (extras "test" and "bench").
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..machine_code import tile_model as model
from ..machine_code.disassembly import DisassemblyError, find_nvdisasm, version
from .attention import hd256_backward, sm90_tiles
from .attention import hd256_forward as forward
from .attention.analysis import (
    NOTES,
    Analysed,
    analyse,
    counts,
    no_spills,
    presumed_shapes,
    summary,
    units,
)
from .attention.hd256_forward import Specialisation
from .attention.programs import ARCH, OURS, THEIRS
from .harness.environment import describe
from .harness.progress import track
from .harness.registry import Benchmark, Unavailable
from .harness.report import Report, Row, Verdict

KERNELS = ("hd256-fwd", "hd256-bwd", "sm90")
SOFTMAX = "warp: softmax"


# -- the report -----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", choices=KERNELS, help="which kernels")
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
    report = {
        "hd256-fwd": _report, "hd256-bwd": hd256_backward.report, "sm90": sm90_tiles.report
    }[options.kernel]  # fmt: skip
    try:
        with _captures(options) as captures:
            return report(options, find_nvdisasm(), captures)
    except DisassemblyError as reason:
        raise Unavailable(str(reason)) from reason


def _report(options: argparse.Namespace, nvdisasm: Path, captures: Path) -> Report:
    specialisations = [s for s in forward.FORWARD if s.name in forward.SHORT or not options.short]
    geometry = model.HD256_FORWARD
    programs = [forward.our_program(s) for s in track(specialisations, f"compiling {OURS}")]
    notes: list[str] = []
    try:
        theirs, missing = forward.their_programs(specialisations, captures)
        programs += theirs
        notes += missing
    except ImportError as error:
        notes.append(f"without {THEIRS}: {error}")
    analysed = [analyse(p, nvdisasm, geometry) for p in track(programs, "taking apart")]
    notes += presumed_shapes(analysed)
    order = [s.name for s in specialisations]
    analysed.sort(key=lambda a: (order.index(a.program.specialisation), a.program.kernel != OURS))
    environment = describe(options.argv, commit=options.commit)
    return Report(
        benchmark=f"sass-{options.kernel}",
        title=f"{options.kernel}: what a K/V tile costs, from machine code (nothing is measured)",
        environment=environment,
        parameters={
            "arch": ARCH,
            "rows_of_a_cta": geometry.tile[0] // geometry.cluster,
            "keys_of_a_tile": geometry.tile[1],
            "mma_score": geometry.products[0].mma,
            "mma_output": geometry.products[1].mma,
            "nvdisasm": version(nvdisasm),
        },
        roofline={**model.RATES, "peak_tflops": model.PEAK_TFLOPS},
        rows=[_summary(a) for a in analysed],
        verdicts=verdicts(analysed, specialisations),
        notes=[*NOTES, *FORWARD_NOTES, *notes, *_calibration_notes(analysed)],
        parts=[
            Report(
                f"sass-{options.kernel}-counts",
                "Instructions of one warp for a K/V tile, by role",
                environment={},
                rows=[row for a in analysed for row in counts(a)],
            ),
            Report(
                f"sass-{options.kernel}-clocks",
                "Clocks that each unit of an SM is busy with a K/V tile",
                environment={},
                rows=[units(a) for a in analysed],
            ),
            Report(
                f"sass-{options.kernel}-calibration",
                f"The model beside what was published for {THEIRS}, non-causal",
                environment={},
                rows=_calibration(analysed),
            ),
        ],
    )


FORWARD_NOTES = (
    "Counted is the way through a role's loop that a tile in the middle takes: no mask, no "
    "waiting, and no rescaling of O, which follows from a maximum that grows by a factor of more "
    "than 2^8. `bound_if_rescaling` is for the case that every tile rescales. Predicated "
    "instructions count as if they were carried out: they take their issue slot either way.",
    "A packed instruction (FFMA2, FADD2, FMUL2) has two lanes of fp32 for each thread. Issue slots "
    "are those of the scheduler that has a softmax, a correction and the busier of the load and "
    "mma warps. Shared memory: what TMA writes, what MMAs read (each SM its own half of B), and "
    "accesses of the warps themselves. Tensor memory: accesses of the warps.",
    "Both kernels give the tensor cores the same work, so that where these are the busiest unit "
    "the bounds are equal by construction; what may then differ is the slack of the others.",
)


def _summary(analysed: Analysed) -> Row:
    rescaling = {"bound_if_rescaling": round(analysed.tile.rescaling.bound)}
    return summary(analysed) | rescaling


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
        f"The model's bound for {THEIRS} is {min(off):.2f} to {max(off):.2f} times the speed "
        f"published at {min(seqlens)} to {max(seqlens)} keys. The published speeds are of an "
        f"earlier kernel of {THEIRS} (pull request 2454), which emulated half of the exponentials; "
        "the kernel analysed here emulates fewer. What the model leaves out costs the difference: "
        "a bound that two kernels share does not make the kernels equally fast."
    ]


def verdicts(
    analysed: Sequence[Analysed], specialisations: Sequence[Specialisation]
) -> list[Verdict]:
    """Our kernel does not spill, and its busiest unit takes no more clocks than
    FlashAttention-4's."""
    at = {(a.program.kernel, a.program.specialisation): a for a in analysed}
    found = [no_spills(analysed)]
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
