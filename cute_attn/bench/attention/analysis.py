"""Analysis, rows and notes that the reports on all attention kernels' machine code share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...machine_code import tile_model as model
from ...machine_code.disassembly import disassemble
from ..harness.report import Row, Verdict
from .programs import OURS, Program

NOTES = (
    "A static analysis of machine code. The bound is the busiest unit's time, as if all units "
    "overlapped without a gap, at the boost clock. Latencies, barriers between roles, launch, "
    "prologue, epilogue, partial waves, caches and power are not in it.",
    '"warp: ROLE" adds up the stall counts that the compiler wrote into the instructions: the '
    "time that a warp with a scheduler to itself needs for a tile if it never waits for a result "
    "of the SFU, tensor memory or a barrier. How they are encoded is not NVIDIA's word, but that "
    "of those who took the encoding apart (arXiv:1804.06826).",
    "Rates: MMA, SFU, shared memory as in FlashAttention-4's paper; fp32 and integer as in the "
    "CUDA C++ Programming Guide; tensor memory 57 bytes a clock and warp as measured by "
    "github.com/ademeure/QuickRunCUDA, half of that for writing as in arXiv:2512.02189 (16 and "
    "8 TB/s).",
)


@dataclass(frozen=True)
class Analysed:
    """A program, and the cost of a tile in one kind of its CTAs.

    Attributes:
        part: the kind of CTA, if there are several.
    """

    program: Program
    tile: model.TileCost
    geometry: model.Geometry
    part: str = ""


def analyse(program: Program, nvdisasm: Path, geometry: model.Geometry, part: str = "") -> Analysed:
    """Raises DisassemblyError, or AnalysisError if the kernel does not have the expected form."""
    listing = disassemble(program.cubin, nvdisasm)
    cost = model.tile_cost(listing, program.ptx, geometry, program.name)
    return Analysed(program, cost, geometry, part)


def presumed_shapes(analysed: Sequence[Analysed]) -> list[str]:
    """A note, if there are programs whose MMAs have shapes that the PTX does not show."""
    presumed = [a.program for a in analysed if not a.tile.shapes_checked]
    if not presumed:
        return []
    names = ", ".join(f"{p.kernel} {p.specialisation}" for p in presumed)
    return [f"the shapes of the MMAs are presumed, not read from the PTX: {names}"]


def no_spills(analysed: Sequence[Analysed]) -> Verdict:
    """The verdict that no program of ours spills."""
    ours = [a for a in analysed if a.program.kernel == OURS]
    spilling = [
        f"{a.program.specialisation} {a.part}".strip()
        for a in ours
        if a.program.spilled != 0 or a.tile.counted.local_accesses or a.program.stack
    ]
    return Verdict(
        f"none of {len(ours)} specialisations of ours spills",
        not spilling,
        ", ".join(spilling) or "no spilled bytes, no stack, no local memory",
    )


# -- rows -----------------------------------------------------------------------------------------


def _names(analysed: Analysed) -> Row:
    names: Row = {
        "specialisation": analysed.program.specialisation,
        "kernel": analysed.program.kernel,
    }
    return names | {"part": analysed.part} if analysed.part else names


def summary(analysed: Analysed) -> Row:
    program, tile = analysed.program, analysed.tile
    clocks = tile.clocks
    first, second = clocks.order[:2]
    return {
        **_names(analysed),
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
    }


def counts(analysed: Analysed) -> Iterator[Row]:
    """The instructions of one warp of each role for a tile."""
    roles = dict(analysed.tile.counted.roles)
    if analysed.tile.counted.rescale is not None:
        roles["correction, rescaling"] = analysed.tile.counted.rescale
    for role, counted in roles.items():
        yield {
            **_names(analysed),
            "role": role,
            "instructions": round(counted.instructions),
            **{kind: round(counted.kinds[kind]) for kind in model.KINDS},
            "tmem_load_columns": round(counted.tmem_read / (4 * model.WARP)),
            "tmem_store_columns": round(counted.tmem_written / (4 * model.WARP)),
            "scheduled_clocks": round(counted.schedule),
        }


def units(analysed: Analysed) -> Row:
    """The clocks that each unit is busy with a tile."""
    return {
        **_names(analysed),
        **{unit: round(time) for unit, time in analysed.tile.clocks.units.items()},
    }
