"""Issue slots that a tile takes: the instructions of all warps of a CTA, from the machine code."""

from __future__ import annotations

from functools import cache

from ... import cache as kernels
from ...emulator.cubin import cubins
from ...kernels.async_copy import table
from ...kernels.async_copy.spec import BY_ONE_WARP, AsyncCopySpec
from ...machine_code.disassembly import disassemble, find_nvdisasm
from ...machine_code.listing import Function, Instruction, Loop, functions

COPYING = ("LDG.E.128", "STS.128", "LDGSTS", "UBLKCP", "UTMALDG")
USING = ("LDS.128", "HMMA")

_nvdisasm = cache(find_nvdisasm)


def issue_slots(spec: AsyncCopySpec, arch: str) -> tuple[int, int]:
    """Return two numbers of warp-instructions for each tile, without waits. The first counts warps
    that use the tile, the second warps that only copy.

    Raises:
        DisassemblyError: no nvdisasm is installed.
        ListingError: the loops are not as expected.
    """
    entry = kernels.compile(table.kernel_of(spec), spec, arch)
    (cubin,) = cubins(entry.read("kernel.o"))
    (function,) = functions(disassemble(cubin, _nvdisasm()))
    by_one_warp = spec.copy in BY_ONE_WARP
    using = [loop for loop in function.loops() if _has(function, loop, USING)]
    if not spec.producer_warps:
        others = _length(function, using, USING, () if not by_one_warp else COPYING)
        if not by_one_warp:
            return spec.consumer_warps * _length(function, using, (*USING, *COPYING)), 0
        copying = _length(function, using, (*USING, *COPYING))
        return copying + (spec.consumer_warps - 1) * others, 0
    loops = [loop for loop in function.loops() if _has(function, loop, COPYING)]
    warps = 1 if by_one_warp else spec.producer_warps
    # Even a run without copies copies the first tiles.
    way = ((), COPYING) if spec.copy == "none" else (COPYING, ())
    return (
        spec.consumer_warps * _length(function, using, USING),
        warps * _length(function, loops, *way),
    )


def _is(instruction: Instruction, opcodes: tuple[str, ...]) -> bool:
    return f"{instruction.opcode}.".startswith(tuple(f"{opcode}." for opcode in opcodes))


def _has(function: Function, loop: Loop, opcodes: tuple[str, ...]) -> bool:
    return any(_is(i, opcodes) for i in function.within(loop))


def _length(
    function: Function,
    loops: list[Loop],
    wanted: tuple[str, ...],
    unwanted: tuple[str, ...] = (),
) -> int:
    """Instructions of the largest of the loops, on the shortest path that has all wanted
    instructions."""

    def gain(instruction: Instruction) -> float:
        return float(_is(instruction, wanted)) - float(_is(instruction, unwanted))

    loop = max(loops, key=lambda loop: len(loop.blocks))
    return sum(len(function.blocks[block]) for block in function.path(loop, gain))
