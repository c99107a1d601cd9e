"""Instructions that a warp executes for a tile in the middle of a loop over tiles, without a mask
and without waiting."""

from __future__ import annotations

from collections.abc import Collection

from .disassembly import disassemble, find_nvdisasm
from .listing import Function, Instruction, Loop, functions

MMAS = ("HMMA", "HGMMA")


def middle_tile(cubin: bytes, through: Collection[str]) -> list[Instruction]:
    """The instructions of one path through the loop with the most MMAs. Of the paths with the most
    MMAs and instructions of the opcodes `through` together, it is the shortest path.

    Raises:
        DisassemblyError: nvdisasm is not installed.
        ListingError: the code has several kernels, or no loop with an MMA.
    """
    (function,) = functions(disassemble(cubin, find_nvdisasm()))
    with_mma = [loop for loop in function.loops() if _mmas(function, loop)]
    inner = [a for a in with_mma if not any(b.blocks < a.blocks for b in with_mma)]
    most = max(_mmas(function, loop) for loop in inner)

    def path(loop: Loop) -> list[Instruction]:
        blocks = function.path(loop, lambda i: float(i.base in MMAS or i.base in through))
        return [i for block in blocks for i in function.blocks[block]]

    return min((path(loop) for loop in inner if _mmas(function, loop) == most), key=len)


def _mmas(function: Function, loop: Loop) -> int:
    return sum(i.base in MMAS for i in function.within(loop))
