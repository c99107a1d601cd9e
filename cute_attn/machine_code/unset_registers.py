"""Registers that a kernel's machine code reads without having set them.

Such a read is an error of the compiler, because the kernel computes with a value that another
kernel left in the register. ptxas 13.4 has emitted such a read (docs/log/kda.md).

    (function,) = functions(text)        # of `nvdisasm -c`
    unset_reads(function)                # [] in correct code
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .listing import Function, Instruction

_REGISTER = re.compile(r"(?<![\w.])(U?R)(\d+)\b")
_PREDICATE = re.compile(r"!?U?P(?:[0-9T]|R)")
_SHAPE = re.compile(r"\.(\d+)x(\d+)x(\d+)")

# These opcodes set no register, even if their first operand is a register.
_SETS_NOTHING = frozenset(
    (
        "BAR", "BRA", "BRX", "BSSY", "BSYNC", "CCTL", "CCTLL", "DEPBAR", "ERRBAR", "EXIT",
        "LDGDEPBAR", "LDGSTS", "MEMBAR", "NANOSLEEP", "PLOP3", "PMTRIG", "R2B", "R2P", "RED",
        "REDG", "REDS", "ST", "STG", "STL", "STS", "STSM", "STT", "STTM", "UBLKCP", "UBLKPF",
        "UPLOP3", "USETMAXREG", "UTCBAR", "UTMACCTL", "UTMACMDFLUSH", "UTMALDG", "UTMAREDG",
        "UTMASTG", "WARPSYNC",
    )
)  # fmt: skip
_PAIRS = frozenset(("DADD", "DFMA", "DMUL", "FADD2", "FFMA2", "FMUL2"))
_WARPGROUP_PRODUCTS = frozenset(("HGMMA", "IGMMA", "QGMMA"))

Register = tuple[str, int]  # ("R", 5), ("UR", 5)


@dataclass(frozen=True)
class UnsetRead:
    """A read of a register that no earlier instruction can have set."""

    instruction: Instruction
    register: str

    def __str__(self) -> str:
        i = self.instruction
        return f"{self.register} at {i.address:#x}: {i.opcode} {i.operands.strip()}"


def unset_reads(function: Function) -> list[UnsetRead]:
    """All reads of registers that no path from the entry sets, ignoring back edges.

    A register that only some paths set, or that is set under a predicate, counts as set: code often
    reads such a register and discards the value. A copy is no read; its target is unset if its
    source is. Of a wide operand only the first register is checked; predicate registers are not
    checked.
    """
    back = set(function.back_edges)
    # Reachable block -> registers that some path to the block sets.
    before: dict[int, frozenset[Register]] = {0: frozenset()}
    waiting = [0]
    while waiting:
        block = waiting.pop()
        known = set(before[block])
        for instruction in function.blocks[block]:
            _go_on(instruction, known)
        for successor in function.successors[block]:
            if (block, successor) in back:
                continue
            more = known | before.get(successor, frozenset())
            if successor not in before or more != before[successor]:
                before[successor] = frozenset(more)
                waiting.append(successor)
    found = []
    for block, start in sorted(before.items()):
        known = set(start)
        for instruction in function.blocks[block]:
            unset = _go_on(instruction, known)
            found += [UnsetRead(instruction, f"{kind}{number}") for kind, number in unset]
    return found


def _go_on(instruction: Instruction, known: set[Register]) -> list[Register]:
    """Add the registers that an instruction sets to `known`; return the unset registers that it
    reads."""
    target, sources = _target_and_sources(instruction)
    read = [
        (kind, int(number))
        for source in sources
        for kind, number in _REGISTER.findall(source)
        if not source.startswith("gdesc")  # the first two of its four registers are unused
    ]
    unset = [register for register in read if register not in known]
    if _is_copy(instruction):
        if unset and target is not None:
            known.discard(target)
            return []
    elif instruction.base in ("LOP3", "ULOP3", "PRMT", "UPRMT"):
        # Code that collects flags sets a register bit by bit, so the register's old value does not
        # matter.
        unset = [register for register in unset if register != target]
    if target is not None:
        kind, first = target
        known.update((kind, first + n) for n in range(_result_width(instruction)))
    return unset


def _is_copy(instruction: Instruction) -> bool:
    return instruction.base in ("MOV", "UMOV", "R2UR") or (
        instruction.base == "IMAD" and instruction.operands.count("RZ") == 2
    )


def _target_and_sources(instruction: Instruction) -> tuple[Register | None, list[str]]:
    operands = _split(instruction.operands)
    if instruction.base in _SETS_NOTHING or instruction.base.endswith("SETP"):
        return None, operands
    # The first result of some opcodes, such as SHFL, is a predicate.
    place = next((n for n, x in enumerate(operands) if not _PREDICATE.fullmatch(x)), None)
    if place is None:
        return None, operands
    match = _REGISTER.fullmatch(operands[place].partition(".")[0])
    if match is None:
        return None, operands
    return (match[1], int(match[2])), operands[:place] + operands[place + 1 :]


def _split(operands: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in operands:
        depth += (character in "[({") - (character in "])}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _result_width(instruction: Instruction) -> int:
    """The number of registers of the result."""
    base, modifiers = instruction.base, instruction.opcode.split(".")[1:]
    if base in _WARPGROUP_PRODUCTS and (shape := _SHAPE.search(instruction.opcode)):
        return int(shape[2]) // (2 if "F32" in modifiers else 4)
    if base in ("HMMA", "IMMA"):
        return 2 if base == "HMMA" and "F32" not in modifiers else 4
    if base == "LDSM":
        return int(modifiers[-1]) if modifiers[-1].isdigit() else 1
    if base == "CS2R":
        return 1 if "32" in modifiers else 2
    if "WIDE" in modifiers or base in _PAIRS:
        return 2
    return instruction.width
