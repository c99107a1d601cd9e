"""The registers, stack, shared memory and spills of each device kernel.

Registers, stack and static shared memory are in the cubin. Spills come from the output of ptxas,
because a stack frame may also hold an array that the program indexes. Dynamic shared memory, an
argument of the launch, comes from the host code.
"""

from __future__ import annotations

import io
import re
import struct
from typing import Any

from .entry import KernelUse

READER = "elftools.elf.elffile"
"""The module that reads a cubin. The import takes 60 ms, and only a compilation needs the
module."""

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

# The third field of cudaLaunchConfig_t is the dynamic shared memory. Each launch fills in a
# cudaLaunchConfig_t, and then names its kernel.
_HOST_CODE = re.compile(
    r"(?P<constant>%\w+) = llvm\.mlir\.constant\((?P<value>\d+) : i64\)"
    r"|(?P<field>%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
    r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    r"|llvm\.store (?P<stored>%\w+), (?P<place>%\w+) : i64"
    r"|llvm\.mlir\.addressof @kernels_(?P<kernel>\w+) :"
    r"|@(?P<launch>_cudaLaunchKernelEx)\("
)


def kernel_uses(cubin: bytes, ptxas_log: str, host_code: str) -> tuple[KernelUse, ...]:
    """The kernels of a cubin, in the order of their names.

    Args:
        cubin: the ELF file.
        ptxas_log: the output of `ptxas -v`.
        host_code: the text of the MLIR module, in the LLVM dialect, that launches the kernels.
    """
    from elftools.elf.elffile import ELFFile

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

    dynamic_shared = _dynamic_shared_memory(host_code)
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
                dynamic_shared=dynamic_shared.get(name),
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


def _dynamic_shared_memory(host_code: str) -> dict[str, int | None]:
    """The largest dynamic shared memory of each kernel's launches; None if not a constant."""
    found: dict[str, int | None] = {}
    constants: dict[str, int] = {}
    field = kernel = ""
    size: int | None = None
    for match in _HOST_CODE.finditer(host_code):
        if match["constant"]:
            constants[match["constant"]] = int(match["value"])
        elif match["field"]:
            field = match["field"]
        elif match["stored"] and match["place"] == field:
            size = constants.get(match["stored"])
        elif match["kernel"]:
            kernel = match["kernel"]
        elif match["launch"] and kernel:
            before = found.get(kernel, 0)
            found[kernel] = None if size is None or before is None else max(size, before)
    return found
