"""What each device kernel uses: registers, stack, shared memory and spills.

Registers, stack and static shared memory are read from the cubin. Spills are not in it: a stack
may be a spill or an array that the program indexes, so they are taken from what ptxas says.
"""

from __future__ import annotations

import io
import re
import struct
from typing import Any, NamedTuple

# Attributes in a cubin's .nv.info section: (format, attribute) and then the size of the value.
_HAS_SIZED_VALUE = 0x04  # EIFMT_SVAL; the other formats hold a value of two bytes in place
_REGISTER_COUNT = 0x2F  # EIATTR_REGCOUNT: symbol index, registers
_FRAME_SIZE = 0x11  # EIATTR_FRAME_SIZE: symbol index, bytes of stack

_PTXAS_FUNCTION = re.compile(
    r"Function properties for (?P<name>\S+)\s+"
    r"(?:ptxas\s*(?:info\s*:|\.)\s*)?"
    r"(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)


class KernelUse(NamedTuple):
    """What one device kernel uses, per thread or per block.

    Attributes:
        name: its symbol.
        registers: per thread.
        spill_stores: bytes of registers written to memory, per thread; None if ptxas did not say.
        spill_loads: bytes read back.
        stack: bytes of stack frame, per thread.
        static_shared: bytes of shared memory that the code reserves, per block. What a launch
            adds to it is no property of the code.
    """

    name: str
    registers: int
    spill_stores: int | None
    spill_loads: int | None
    stack: int
    static_shared: int

    @property
    def spills(self) -> int | None:
        """Bytes spilled, stores and loads together; None if unknown."""
        if self.spill_stores is None or self.spill_loads is None:
            return None
        return self.spill_stores + self.spill_loads


def kernel_uses(cubin: bytes, ptxas_log: str) -> tuple[KernelUse, ...]:
    """The kernels of a cubin, in the order of their names."""
    from elftools.elf.elffile import ELFFile  # 60 ms, and only a compilation needs it

    elf = ELFFile(io.BytesIO(cubin))
    symbols = elf.get_section_by_name(".symtab")
    info = elf.get_section_by_name(".nv.info")
    attributes = list(_sized_attributes(info.data())) if info is not None else []
    spills = {
        match["name"]: (int(match["stores"]), int(match["loads"]))
        for match in _PTXAS_FUNCTION.finditer(ptxas_log)
    }

    def of_symbol(attribute: int) -> dict[str, int]:
        pairs = [struct.unpack("<II", value) for kind, value in attributes if kind == attribute]
        return {symbols.get_symbol(index).name: number for index, number in pairs}

    registers, frames = of_symbol(_REGISTER_COUNT), of_symbol(_FRAME_SIZE)
    found = []
    for name in sorted(registers):
        if elf.get_section_by_name(f".text.{name}") is None:
            continue
        stores, loads = spills.get(name, (None, None))
        shared: Any = elf.get_section_by_name(f".nv.shared.{name}")
        found.append(
            KernelUse(
                name=name,
                registers=registers[name],
                spill_stores=stores,
                spill_loads=loads,
                stack=frames.get(name, 0),
                static_shared=shared["sh_size"] if shared is not None else 0,
            )
        )
    return tuple(found)


def _sized_attributes(info: bytes) -> list[tuple[int, bytes]]:
    found = []
    offset = 0
    while offset + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form == _HAS_SIZED_VALUE:
            found.append((attribute, info[offset : offset + size]))
            offset += size
    return found
