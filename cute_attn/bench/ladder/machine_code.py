"""Instruction counts of a step's loop over K/V tiles, from its machine code."""

from __future__ import annotations

from collections import Counter

from ...cache.entry import Built, Entry
from ...emulator.cubin import cubins
from ...kernels.ladder.spec import FmhaLadderSpec
from ...machine_code.listing import Instruction
from ...machine_code.middle_tile import MMAS, middle_tile
from ..harness.report import Row

# Opcodes by column; an opcode in no column is "other".
KINDS = {
    "mma": MMAS,
    "ldmatrix": ("LDSM",),
    "exponentials": ("MUFU",),
    "fp32": ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP"),
    "conversions": ("F2FP", "F2F"),
    "copies": ("LDGSTS", "UTMALDG", "LDS", "STS"),
    "shuffles": ("SHFL",),
    "spills": ("LDL", "STL"),
}
_KIND = {opcode: kind for kind, opcodes in KINDS.items() for opcode in opcodes}


def key_tile(entry: Entry | Built) -> list[Instruction]:
    """The instructions that a warp executes for a K/V tile in the middle, without a mask.

    Raises:
        DisassemblyError: there is no nvdisasm.
    """
    (cubin,) = cubins(entry.read("kernel.o"))
    return middle_tile(cubin, KINDS["copies"])


def loop_row(name: str, entry: Entry | Built, spec: FmhaLadderSpec) -> Row:
    """Instructions of a warp for its rows of a K/V tile in the middle, without a mask.

    Raises:
        DisassemblyError: there is no nvdisasm.
    """
    counts = Counter(_KIND.get(i.base, "other") for i in key_tile(entry))
    return {
        "step": name,
        "rows": spec.tile_m // spec.num_warps,
        "keys": spec.tile_n,
        "instructions": sum(counts.values()),
        **{kind: counts[kind] for kind in (*KINDS, "other")},
    }
