"""The cubins in an object file, and the registers that ptxas gave the kernels.

The cache has its own reader of .nv.info (`cache/cubin.py`, for an entry's record). The cache must
work without the rest of the package, and the emulator must work without the cache.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass

EM_CUDA = 190  # machine of an ELF file that holds code for a GPU

# Entries of .nv.info: format, attribute and two bytes, which are the value or its size.
_HAS_SIZED_VALUE = 0x04
_REGISTER_COUNT = 0x2F  # value: index of the kernel's symbol, registers
_INSTRUCTION_BYTES = 16
# The lowest 12 bits of USETMAXREG, whether it increases or decreases, on sm_90a to sm_120a.
_OPCODE_BITS, _USETMAXREG = 0xFFF, 0x9C8


@dataclass(frozen=True)
class RegisterUse:
    """The registers of a kernel in its machine code.

    Attributes:
        registers: registers per thread at launch.
        sets_registers: whether the kernel has a USETMAXREG. ptxas drops every USETMAXREG if the
            number of registers at launch is unknown at compile time.
    """

    registers: int
    sets_registers: bool


def cubins(object_file: bytes) -> list[bytes]:
    """The cubins (ELF files) in an object file of the compiler."""
    found = []
    at = object_file.find(b"\x7fELF", 1)
    while at >= 0:
        header = object_file[at : at + 64]
        if len(header) == 64 and int.from_bytes(header[18:20], "little") == EM_CUDA:
            # The cubin ends with the later of its two header tables.
            programs, sections = (int.from_bytes(header[i : i + 8], "little") for i in (32, 40))
            size, count = (int.from_bytes(header[i : i + 2], "little") for i in (54, 56))
            section_size, section_count = (
                int.from_bytes(header[i : i + 2], "little") for i in (58, 60)
            )
            end = max(programs + size * count, sections + section_size * section_count)
            found.append(object_file[at : at + end])
        at = object_file.find(b"\x7fELF", at + 1)
    return found


def register_uses(object_file: bytes) -> dict[str, RegisterUse]:
    """Symbol -> registers of the kernels in an object file of the compiler."""
    found: dict[str, RegisterUse] = {}
    for image in cubins(object_file):
        found.update(_kernels(image))
    return found


def _kernels(image: bytes) -> dict[str, RegisterUse]:
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        elf = ELFFile(io.BytesIO(image))
        info, symbols = (elf.get_section_by_name(name) for name in (".nv.info", ".symtab"))
        if info is None or symbols is None:
            return {}
        found = {}
        for index, registers in _register_counts(info.data()):
            name = symbols.get_symbol(index).name
            text = elf.get_section_by_name(f".text.{name}")
            if text is not None:
                found[name] = RegisterUse(registers, _sets_registers(text.data()))
    except (ELFError, struct.error):  # bytes that only look like a cubin
        return {}
    return found


def _register_counts(info: bytes) -> list[tuple[int, int]]:
    found = []
    offset = 0
    while offset + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form != _HAS_SIZED_VALUE:
            continue
        if attribute == _REGISTER_COUNT:
            found.append(struct.unpack_from("<II", info, offset))
        offset += size
    return found


def _sets_registers(code: bytes) -> bool:
    starts = range(0, len(code) - 1, _INSTRUCTION_BYTES)
    return any(
        int.from_bytes(code[at : at + 2], "little") & _OPCODE_BITS == _USETMAXREG for at in starts
    )
