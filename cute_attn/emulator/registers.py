"""Allocation of a program's registers in the engine's register file."""

from __future__ import annotations

from collections.abc import Iterable

from .variables import align


class Register:
    """A register of the program: its place in the register file, and its live range."""

    __slots__ = ("bits", "first", "last", "name", "number", "offset", "region", "shared")

    def __init__(self, number: int, name: str, bits: int) -> None:
        self.number = number
        self.name = name
        self.bits = bits
        self.offset = -1
        self.region = -1
        self.first = -1
        self.last = -1
        self.shared = True  # may share its words with other registers

    def touch(self, index: int, region: int, *, defines: bool) -> None:
        """Record an access by an instruction. Sources are recorded before destinations.

        Args:
            index: the instruction's index.
            region: number of the region between two labels that holds the instruction.
            defines: whether the instruction writes the register in all lanes that execute.
        """
        if self.first < 0:
            self.first, self.region = index, region
            self.shared = self.shared and defines
        elif self.region != region:
            self.shared = False
        self.last = index


def place(registers: Iterable[Register]) -> int:
    """Allocate the registers. Returns the number of words that a warp needs for its registers.

    Registers that are live only between two labels, and written before they are read, share words
    with other registers of their width. Each register keeps its own number, by which the engine
    tracks the lanes in which the register is defined.
    """
    births: dict[int, list[Register]] = {}
    deaths: dict[int, list[Register]] = {}
    words = 0
    predicates = []
    for register in registers:
        if register.bits == 1:
            predicates.append(register)
        elif register.shared:
            births.setdefault(register.first, []).append(register)
            deaths.setdefault(register.last, []).append(register)
        else:
            register.offset = words
            words += max(register.bits, 32)
    free: dict[int, list[int]] = {32: [], 64: [], 128: []}
    for index in sorted(births.keys() | deaths.keys()):
        for register in births.get(index, ()):
            size = max(register.bits, 32)
            if free[size]:
                register.offset = free[size].pop()
            else:
                register.offset = words
                words += size
        for register in deaths.get(index, ()):  # the words are free from the next instruction on
            free[max(register.bits, 32)].append(register.offset)
    for register in predicates:
        register.offset = words
        words += 1
    return align(words, 32)
