"""Instruction counts of a step's loop over K/V tiles, from its machine code."""

from __future__ import annotations

from collections import Counter

from ...cache.entry import Built, Entry
from ...machine_code.cubin import cubins
from ...machine_code.disassembly import disassemble, find_nvdisasm
from ...machine_code.listing import Function, Instruction, Loop, functions
from ..harness.report import Row

# Opcodes by column; what is in none is "other".
KINDS = {
    "mma": ("HMMA", "HGMMA"),
    "ldmatrix": ("LDSM",),
    "exponentials": ("MUFU",),
    "fp32": ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP"),
    "conversions": ("F2FP", "F2F"),
    "copies": ("LDGSTS", "UTMALDG", "LDS", "STS"),
    "shuffles": ("SHFL",),
    "spills": ("LDL", "STL"),
}
_KIND = {opcode: kind for kind, opcodes in KINDS.items() for opcode in opcodes}


def loop_row(name: str, entry: Entry | Built) -> Row:
    """Instructions of a warp for a K/V tile in the middle, without a mask.

    Raises:
        DisassemblyError: there is no nvdisasm.
    """
    nvdisasm = find_nvdisasm()
    (function,) = (
        function
        for cubin in cubins(entry.read("kernel.o"))
        for function in functions(disassemble(cubin, nvdisasm))
    )
    loop = max(function.loops(), key=lambda found: _density(function, found))
    # Through all MMAs and copies, else the shortest path: it leaves the mask out.
    blocks = function.path(loop, lambda i: float(_KIND.get(i.base) in ("mma", "copies")))
    counts = Counter(_KIND.get(i.base, "other") for block in blocks for i in function.blocks[block])
    return {
        "step": name,
        "instructions": sum(counts.values()),
        **{kind: counts[kind] for kind in (*KINDS, "other")},
    }


def _density(function: Function, loop: Loop) -> tuple[int, int]:
    """For the innermost of the loops with the most MMAs."""
    body: list[Instruction] = function.within(loop)
    return sum(_KIND.get(i.base) == "mma" for i in body), -len(body)
