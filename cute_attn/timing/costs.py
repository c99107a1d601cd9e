"""What a PTX instruction costs, from the machine code that comes of it.

The cubin names the line of PTX that each machine instruction comes from. The cost of a PTX
instruction is that of its line's machine instructions.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..emulator.cubin import cubins
from ..emulator.program import Program
from ..machine_code.disassembly import disassemble, find_nvdisasm
from ..machine_code.listing import Function, Instruction, functions

# Units of a quarter of an SM. "issue" is its scheduler, "dispatch" the port to all units that
# compute, tensor cores included; integer products take half of "fma".
UNITS = ("issue", "fma", "imad", "alu", "xu", "mma", "dispatch")

INSTRUCTION_BYTES, CODE_LINE = 16, 128

_LINE = re.compile(r'^\s*//## File "\.nv_debug_ptx_txt", line (\d+)')
_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s")

# Machine instructions by unit. The simulator counts other units' instructions by their steps.
_FMA = ("FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2", "HFMA2", "HADD2", "HMUL2")
_IMAD = ("IMAD",)
_ALU = (
    "IADD3", "VIADD", "VIADDMNMX", "VIMNMX", "LOP3", "SHF", "SEL", "FSEL", "FMNMX", "ISETP",
    "FSETP", "PRMT",
    "LEA", "F2FP", "PLOP3", "IABS", "IMNMX", "I2FP", "BMSK", "SGXT", "P2R", "R2P", "MOV",
    "FMNMX3", "VIMNMX3", "HMNMX2", "HSETP2", "VABSDIFF", "LOP", "POPC", "FCHK",
)  # fmt: skip
_XU = ("MUFU", "F2F", "F2I", "I2F", "FRND", "F2IP", "BREV", "FLO")
_MMA = ("HMMA", "IMMA", "QMMA")
_TENSOR = ("HGMMA", "QGMMA", "IGMMA", "BGMMA")  # their time is that of the steps
_FREE = ("NOP",)

# The machine instruction that a PTX instruction gives once, so that copies of a block can be
# counted.
_ONCE = {
    "ex2.": "MUFU", "ld.shared": "LDS", "st.shared": "STS", "ldmatrix": "LDSM", "stmatrix": "STSM",
    "mma.sync": "HMMA", "shfl.": "SHFL", "ld.global": "LDG", "st.global": "STG",
    "fma.rn.f32": "FFMA", "tcgen05.ld": "LDTM", "tcgen05.st": "STTM",
    "max.f32": "FMNMX", "cvt.rn.bf16x2": "F2FP", "cvt.rn.f16x2": "F2FP", "mul.f32": "FMUL",
    "wgmma.wait_group": "WARPGROUP", "bar.sync": "BAR", "barrier.sync": "BAR",
    "mbarrier.": "SYNCS", "fence.proxy.async": "FENCE",
}  # fmt: skip


class NoLines(ValueError):
    """The machine code does not say which PTX it comes from."""


@dataclass(frozen=True)
class Cost:
    """What a warp's execution of one PTX instruction takes.

    Attributes:
        units: clocks of each of `UNITS`.
        stall: clocks for which the machine code stalls the warp after issuing.
        block: the number of the basic block.
        copies: how often the machine code repeats the block, since the assembler unrolls loops.
        lines: lines of machine code that each copy of the instruction has.
    """

    units: tuple[float, ...]
    stall: float
    block: int = 0
    copies: float = 1.0
    lines: tuple[tuple[int, ...], ...] = ()


def unit_of(base: str) -> str | None:
    """The unit of `UNITS` that executes a machine instruction, besides its issue."""
    for unit, names in (
        ("fma", _FMA), ("imad", _IMAD), ("alu", _ALU), ("xu", _XU), ("mma", _MMA),
    ):  # fmt: skip
        if base in names:
            return unit
    return None


def costs(program: Program, image: bytes, clocks: dict[str, float]) -> list[Cost]:
    """The cost of each PTX instruction of a kernel.

    Args:
        clocks: clocks of a machine instruction on its unit: by its name, else by its unit.

    Raises:
        NoLines: the kernel was compiled without line information.
    """
    function, lines = _function(program, image)
    by_line: dict[int, list[Instruction]] = defaultdict(list)
    for instruction in function.instructions:
        line = lines.get(instruction.address)
        if line is not None and instruction.base not in (*_TENSOR, *_FREE):
            by_line[line].append(instruction)
    sharing = Counter(i.line for i in program.instructions)
    blocks = _blocks(program)
    copies = _copies(program, by_line, blocks)
    found = []
    for index, ptx in enumerate(program.instructions):
        units, stall = [0.0] * len(UNITS), 0.0
        for machine in by_line.get(ptx.line, ()):
            units[0] += 1
            stall += machine.stall or 1
            unit = unit_of(machine.base)
            if unit is not None:
                units[UNITS.index(unit)] += clocks.get(machine.base, clocks[unit])
                # Matrix instructions of warps need the port for all of their clocks.
                port = {"xu": "dispatch xu", "mma": "mma"}.get(unit, "dispatch")
                units[UNITS.index("dispatch")] += clocks[port]
            if unit == "imad":
                units[UNITS.index("fma")] += clocks["imad"] / 2
        share = sharing[ptx.line] * copies[index]
        found.append(
            Cost(
                tuple(u / share for u in units),
                stall / share,
                blocks[index],
                copies[index],
                _lines_of(by_line.get(ptx.line, ()), copies[index]),
            )
        )
    return found


def _lines_of(machine: Sequence[Instruction], copies: float) -> tuple[tuple[int, ...], ...]:
    """The lines of code of each copy, which lie one after the other."""
    lines = sorted(i.address // CODE_LINE for i in machine)
    number = max(1, min(round(copies), len(lines)))
    parts = (
        lines[k * len(lines) // number : (k + 1) * len(lines) // number] for k in range(number)
    )
    return tuple(tuple(dict.fromkeys(part)) for part in parts)


def code_bytes(program: Program, image: bytes) -> int:
    """Bytes of a kernel's machine code."""
    instructions = _function(program, image)[0].instructions
    return max(i.address for i in instructions) + INSTRUCTION_BYTES


def _function(program: Program, image: bytes) -> tuple[Function, dict[int, int]]:
    """The kernel's machine code, and the PTX line of each address."""
    for cubin in cubins(image):
        text = disassemble(cubin, find_nvdisasm(), ptx_lines=True)
        for function in functions(text):
            if function.name == program.name:
                break
        else:
            continue
        lines: dict[int, int] = {}
        at, inside = None, False
        for row in text.splitlines():
            if ".section" in row and ".text." in row:
                inside = f".text.{program.name}," in row
                at = None
            elif match := _LINE.match(row):
                at = int(match[1])
            elif inside and at is not None and (match := _ADDRESS.match(row)):
                lines[int(match[1], 16)] = at
        if not lines:
            raise NoLines(
                f"{program.name} has no line information: set CUTE_DSL_LINEINFO=1 before it is "
                "compiled"
            )
        return function, lines
    raise NoLines(f"the object file has no machine code of {program.name}")


def _copies(
    program: Program, by_line: dict[int, list[Instruction]], blocks: list[int]
) -> list[float]:
    """How many copies of each PTX instruction's block the machine code has: the assembler unrolls
    loops."""
    seen: dict[int, list[int]] = defaultdict(list)
    for index, ptx in enumerate(program.instructions):
        for prefix, base in _ONCE.items():
            if ptx.opcode.startswith(prefix):
                count = sum(i.base == base for i in by_line.get(ptx.line, ()))
                if count:
                    seen[blocks[index]].append(count)
    return [max(1.0, statistics.median(seen[b])) if seen[b] else 1.0 for b in blocks]


def _blocks(program: Program) -> list[int]:
    """The number of each instruction's basic block."""
    starts = {0}
    scopes = {id(i.scope): i.scope for i in program.instructions}
    for scope in scopes.values():
        while scope is not None:
            starts.update(scope.labels.values())
            scope = scope.parent  # type: ignore[assignment]
    for index, ptx in enumerate(program.instructions):
        if ptx.opcode.startswith(("bra", "ret", "brx", "exit")):
            starts.add(index + 1)
    number, found = -1, []
    for index in range(len(program.instructions)):
        number += index in starts
        found.append(number)
    return found
