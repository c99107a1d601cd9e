"""A listing of nvdisasm as instructions, basic blocks and loops.

    (function,) = functions(text)           # of `nvdisasm -c -hex`
    for loop in function.loops(): ...       # natural loops
    blocks = function.path(loop, gain)      # one path through a loop's body

Only what the analysis of a loop body needs is parsed: operands stay text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

_FUNCTION = re.compile(r"^\s*\.section\s+\.text\.([^\s,\"]+)")
_LABEL = re.compile(r"^\s*(\.L\w+):")
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]+)\*/\s+"
    r"(?:@(?P<predicate>!?U?P[0-9T]+)\s+)?"
    r"(?P<opcode>[A-Z][A-Z0-9]*(?:\.[A-Za-z0-9_]+)*)"
    r"(?P<operands>[^;]*);"
    r"(?:\s*/\* 0x(?P<low>[0-9a-f]+) \*/)?"
)
_SECOND_WORD = re.compile(r"^\s*/\* 0x(?P<high>[0-9a-f]+) \*/\s*$")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_TABLE = re.compile(r"BRANCH_TARGETS\s+([^\"]*)")
_REGISTERS = re.compile(r"\.x(\d+)$")

# Bits of the second 64-bit word: the clocks that the warp stalls after the instruction. NVIDIA does
# not document these bits; arXiv:1804.06826 does, from Volta on.
_STALL_SHIFT, _STALL_MASK = 41, 0xF


class ListingError(ValueError):
    """The text is not a listing of nvdisasm, or has a branch to an unknown label."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        predicate: such as "P0", "!UP1"; "" without a predicate.
        opcode: opcode with modifiers, such as "FADD2.RM".
        stall: clocks until the warp's next instruction; None in a listing without encodings.
    """

    address: int
    predicate: str
    opcode: str
    operands: str
    stall: int | None = None

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def targets(self) -> tuple[str, ...]:
        """The labels to which the instruction may branch."""
        if self.base == "BRX":
            table = _TABLE.search(self.operands)
            return tuple(re.findall(r"\.L\w+", table[1])) if table else ()
        if self.base not in ("BRA", "JMP"):
            return ()
        return tuple(_TARGET.findall(self.operands))

    @property
    def falls_through(self) -> bool:
        """Whether execution may go on to the next instruction."""
        if self.predicate not in ("", "PT"):
            return True
        if self.base in ("EXIT", "RET", "BRX"):
            return False
        if self.base in ("BRA", "JMP"):
            # `BRA.U UP0, target` has its condition among the operands.
            condition = self.operands.partition("`")[0].strip(" ,")
            return condition not in ("", "UPT", "PT")
        return True

    @property
    def width(self) -> int:
        """Registers per lane that the instruction moves: N of `.xN`, 2 for 64 bits, 4 for 128."""
        if match := _REGISTERS.search(self.opcode):
            return int(match[1])
        bits = {"64": 64, "128": 128}
        return next((bits[part] // 32 for part in self.opcode.split(".") if part in bits), 1)


@dataclass(frozen=True)
class Loop:
    """A natural loop: the numbers of its blocks, and of its entry block, `header`."""

    header: int
    blocks: frozenset[int]


class Function:
    """A kernel's basic blocks, in the order of the listing; block 0 is the entry.

    Attributes:
        blocks: the instructions of each block.
        successors: for each block, the blocks that may follow.
    """

    def __init__(self, name: str, instructions: list[Instruction], labels: dict[str, int]):
        self.name = name
        self.instructions = instructions
        starts = {0, *labels.values()}
        for index, instruction in enumerate(instructions):
            if instruction.targets or not instruction.falls_through:
                starts.add(index + 1)
        order = sorted(start for start in starts if start < len(instructions))
        at = {start: number for number, start in enumerate(order)}
        ends = [*order[1:], len(instructions)]
        self.blocks = [instructions[a:b] for a, b in zip(order, ends, strict=True)]
        self.successors: list[tuple[int, ...]] = []
        for number, block in enumerate(self.blocks):
            last = block[-1]
            following = [at[labels[t]] for t in self._known(last.targets, labels)]
            if last.falls_through and number + 1 < len(self.blocks):
                following.append(number + 1)
            self.successors.append(tuple(dict.fromkeys(following)))

    def _known(self, targets: Iterable[str], labels: dict[str, int]) -> Iterator[str]:
        for target in targets:
            if target not in labels:
                raise ListingError(
                    f"{self.name}: a branch to {target}, which is not in the listing"
                )
            yield target

    @cached_property
    def _reached(self) -> frozenset[int]:
        """The blocks that can be reached from the entry."""
        found, waiting = {0}, [0]
        while waiting:
            for successor in self.successors[waiting.pop()]:
                if successor not in found:
                    found.add(successor)
                    waiting.append(successor)
        return frozenset(found)

    @cached_property
    def _dominators(self) -> list[frozenset[int]]:
        """For each block its dominators; for an unreachable block, all blocks."""
        predecessors: list[list[int]] = [[] for _ in self.blocks]
        for number, following in enumerate(self.successors):
            for successor in following:
                predecessors[successor].append(number)
        everything = frozenset(range(len(self.blocks)))
        found = [everything for _ in self.blocks]
        found[0] = frozenset({0})
        changed = True
        while changed:
            changed = False
            for number in range(1, len(self.blocks)):
                before = [found[p] for p in predecessors[number]]
                common = frozenset.intersection(*before) if before else everything
                if (new := common | {number}) != found[number]:
                    found[number], changed = new, True
        return found

    @cached_property
    def back_edges(self) -> list[tuple[int, int]]:
        """Return (from, to) of each branch back to a block that dominates the branch."""
        return [
            (number, successor)
            for number, following in enumerate(self.successors)
            for successor in following
            if number in self._reached and successor in self._dominators[number]
        ]

    def loops(self) -> list[Loop]:
        """The natural loops, smallest first; loops with a common header are one loop."""
        predecessors: list[list[int]] = [[] for _ in self.blocks]
        for number, following in enumerate(self.successors):
            for successor in following:
                predecessors[successor].append(number)
        bodies: dict[int, set[int]] = {}
        for latch, header in self.back_edges:
            body = bodies.setdefault(header, {header})
            waiting = [latch]
            while waiting:
                block = waiting.pop()
                if block not in body:
                    body.add(block)
                    waiting += predecessors[block]
        found = [Loop(header, frozenset(body)) for header, body in bodies.items()]
        return sorted(found, key=lambda loop: (len(loop.blocks), loop.header))

    def within(self, loop: Loop) -> list[Instruction]:
        """All instructions of a loop, on all of its paths."""
        return [i for block in sorted(loop.blocks) for i in self.blocks[block]]

    def path(self, loop: Loop, gain: Callable[[Instruction], float]) -> list[int]:
        """The blocks of one path from a loop's header back to the header.

        The path has the largest sum of `gain`, and among such paths the fewest instructions. The
        path goes through an inner loop at most once.
        """
        back = set(self.back_edges)
        best: dict[int, tuple[float, float, list[int]] | None] = {}

        def value(block: int) -> tuple[float, float]:
            instructions = self.blocks[block]
            return sum(map(gain, instructions)), -len(instructions)

        # Without back edges the body has no cycles: depth first, each block once.
        stack = [loop.header]
        while stack:
            block = stack[-1]
            following = [
                s for s in self.successors[block] if s in loop.blocks and (block, s) not in back
            ]
            if waiting := [s for s in following if s not in best]:
                stack += waiting
                continue
            stack.pop()
            if block in best:
                continue
            own = value(block)
            ends = (block, loop.header) in back
            options = [best[s] for s in following]
            found = [(o[0] + own[0], o[1] + own[1], [block, *o[2]]) for o in options if o]
            if ends:
                found.append((*own, [block]))
            best[block] = max(found, key=lambda f: f[:2], default=None)
        chosen = best[loop.header]
        if chosen is None:
            raise ListingError(f"{self.name}: no way through the loop at block {loop.header}")
        return chosen[2]

    def path_with(
        self, loop: Loop, counts: Callable[[Instruction], bool], total: int
    ) -> list[int] | None:
        """The blocks of the shortest path from a loop's header back to the header with exactly
        `total` instructions that count; None if no path has so many."""
        back = set(self.back_edges)

        @functools.cache
        def best(block: int, left: int) -> tuple[int, tuple[int, ...]] | None:
            left -= sum(map(counts, self.blocks[block]))
            if left < 0:
                return None
            own = len(self.blocks[block])
            found = [
                (own + rest[0], (block, *rest[1]))
                for s in self.successors[block]
                if s in loop.blocks and (block, s) not in back and (rest := best(s, left))
            ]
            if (block, loop.header) in back and left == 0:
                found.append((own, (block,)))
            return min(found, default=None)

        chosen = best(loop.header, total)
        return None if chosen is None else list(chosen[1])


def functions(text: str) -> list[Function]:
    """The functions of an nvdisasm listing.

    Raises:
        ListingError: the listing has no function, or a function branches out of itself.
    """
    found: list[Function] = []
    name = ""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}

    def finish() -> None:
        if instructions:
            found.append(Function(name, instructions, labels))

    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            finish()
            name, instructions, labels = match[1], [], {}
        elif match := _LABEL.match(line):
            labels[match[1]] = len(instructions)
        elif match := _INSTRUCTION.match(line):
            instructions.append(
                Instruction(
                    int(match["address"], 16),
                    match["predicate"] or "",
                    match["opcode"],
                    match["operands"].strip(),
                )
            )
        elif (match := _SECOND_WORD.match(line)) and instructions:
            stall = int(match["high"], 16) >> _STALL_SHIFT & _STALL_MASK
            last = instructions[-1]
            instructions[-1] = Instruction(
                last.address, last.predicate, last.opcode, last.operands, stall
            )
    finish()
    if not found:
        raise ListingError("no function in the listing: is it the output of `nvdisasm -c`?")
    return found
