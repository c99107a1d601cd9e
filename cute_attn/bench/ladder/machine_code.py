"""Instruction counts of a step's loop over K/V tiles, from its machine code."""

from __future__ import annotations

from collections import Counter

from ...cache.entry import Built, Entry
from ...kernels.ladder.spec import FmhaLadderSpec
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


def key_tile(entry: Entry | Built) -> list[Instruction]:
    """What a warp executes for a K/V tile in the middle, without a mask.

    Raises:
        DisassemblyError: there is no nvdisasm.
    """
    nvdisasm = find_nvdisasm()
    (function,) = (
        function
        for cubin in cubins(entry.read("kernel.o"))
        for function in functions(disassemble(cubin, nvdisasm))
    )
    with_mma = [loop for loop in function.loops() if _mmas(function, loop)]
    inner = [a for a in with_mma if not any(b.blocks < a.blocks for b in with_mma)]
    most = max(_mmas(function, loop) for loop in inner)

    def path(loop: Loop) -> list[Instruction]:
        # Through all MMAs and copies, else the shortest path: it leaves the mask out.
        blocks = function.path(loop, lambda i: float(_KIND.get(i.base) in ("mma", "copies")))
        return [i for block in blocks for i in function.blocks[block]]

    return min((path(loop) for loop in inner if _mmas(function, loop) == most), key=len)


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


def _mmas(function: Function, loop: Loop) -> int:
    return sum(_KIND.get(i.base) == "mma" for i in function.within(loop))
