"""Which launches run on several cores: kernels whose clusters share nothing.

Each core runs every n-th cluster on a machine of its own (machine.py). By the rule below a cluster
never waits for another cluster, and no result depends on the order of clusters.
"""

from __future__ import annotations

import os
import re

from .program import K_SREG, OPERAND, SPECIAL_REGISTERS, Program

MOST_CORES = 8
"""The most cores by default: each core keeps its own record of accesses."""

_STRONG = re.compile(r"\.(volatile|relaxed|acquire|release|mmio)\b")
_WIDE = re.compile(r"\.(gl|gpu|sys)\b")
_OF_THE_MACHINE = re.compile(r"%(smid|nsmid|clock\w*|globaltimer\w*)")
_HARMLESS_CALLS = frozenset({"__assertfail"})  # it ends the launch


def default_cores() -> int:
    """The number of cores where nobody says one: 1 in a worker of pytest-xdist.

    Raises:
        ValueError: CUTE_ATTN_EMULATOR_CORES is not a positive integer.
    """
    text = os.environ.get("CUTE_ATTN_EMULATOR_CORES", "").strip()
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"CUTE_ATTN_EMULATOR_CORES is {text!r}, must be a positive integer")
        return int(text)
    if "PYTEST_XDIST_WORKER" in os.environ:
        return 1
    return min(len(os.sched_getaffinity(0)), MOST_CORES)


def reason_for_one_core(program: Program) -> str | None:
    """What in a kernel may tie its clusters together, or None if nothing does."""
    for opcode in program.opcodes:
        if _ties(opcode):
            return opcode
    for name in program.strings:
        if name not in _HARMLESS_CALLS:
            return f"call of {name}"
    for kind, _, _, _, _, register, _, _ in OPERAND.iter_unpack(program.operands):
        special: str = SPECIAL_REGISTERS[register] if kind == K_SREG else ""
        if _OF_THE_MACHINE.fullmatch(special):
            return special
    return None


def _ties(opcode: str) -> bool:
    """Whether clusters may communicate by an instruction, or its effect depends on their order."""
    family = opcode.split(".", 1)[0]
    if family == "clusterlaunchcontrol":
        return True
    if opcode.startswith(("st.async", "red.async")):  # of shared memory, except for releases
        return ".release" in opcode
    if opcode.startswith("cp.reduce"):
        return ".global" in opcode
    if family in ("atom", "red"):
        return ".shared" not in opcode
    if family in ("ld", "st"):
        return ".shared" not in opcode and _STRONG.search(opcode) is not None
    if family in ("fence", "membar"):
        return not opcode.startswith("fence.proxy") and _WIDE.search(opcode) is not None
    return family == "multimem"
