"""Memory of a module's variables, and the bits of constants."""

from __future__ import annotations

import ast
import ctypes
import re
import struct
from collections.abc import Iterator

from .operands import TYPE_BITS, Immediate, PtxError, parse_integer, parse_operand
from .ptx import Module, Variable, initialiser_items

MASK64 = (1 << 64) - 1


def align(value: int, alignment: int) -> int:
    """The next multiple of an alignment."""
    return -(-value // max(alignment, 1)) * max(alignment, 1)


class ModuleMemory:
    """The .global and .const variables of a module, in initialised memory of this process.

    The memory lives as long as the module is loaded, so a launch sees the writes of earlier
    launches.
    """

    def __init__(self, module: Module) -> None:
        self._variables: dict[str, Variable] = {}
        self._buffers: dict[str, ctypes.Array[ctypes.c_char]] = {}
        self._addresses: dict[str, int] = {}
        for variable in module.variables.values():
            if variable.space in ("global", "const") and variable.linkage != "extern":
                self.add(variable)
        for variable in list(self._variables.values()):
            self.initialise(variable)

    def add(self, variable: Variable) -> int:
        """Allocate memory for a variable, once. Returns its address."""
        if variable.name not in self._addresses:
            alignment = max(variable.alignment, 16)
            buffer = ctypes.create_string_buffer(variable.bytes + alignment)
            self._buffers[variable.name] = buffer
            self._addresses[variable.name] = align(ctypes.addressof(buffer), alignment)
            self._variables[variable.name] = variable
        return self._addresses[variable.name]

    def address(self, name: str) -> int | None:
        """The address of a variable, or None if no variable has this name."""
        return self._addresses.get(name)

    def initialise(self, variable: Variable) -> None:
        """Write a variable's initial value."""
        data = self._initial_bytes(variable)
        ctypes.memmove(self._addresses[variable.name], data, len(data))

    def regions(self) -> Iterator[tuple[int, int, str, bool]]:
        """Address, bytes, name and writability of every variable."""
        for name, variable in self._variables.items():
            yield self._addresses[name], variable.bytes, name, variable.space == "global"

    def _initial_bytes(self, variable: Variable) -> bytes:
        text = variable.initialiser
        if text.startswith('"'):
            data: bytes = ast.literal_eval("b" + text)
            return data.ljust(variable.bytes, b"\0")[: variable.bytes]
        size = max(TYPE_BITS[variable.type], 8) // 8
        items = (self._item(item, variable.type, size) for item in initialiser_items(text))
        data = b"".join(items)
        if len(data) > variable.bytes:
            raise PtxError(f"the initialiser of {variable.name!r} is longer than the variable")
        return data.ljust(variable.bytes, b"\0")

    def _item(self, text: str, kind: str, size: int) -> bytes:
        if match := re.fullmatch(r"(0[xX][fF]+)\s*\((.*)\)", text):  # a byte of an address
            mask = int(match[1], 16)
            shift = (mask & -mask).bit_length() - 1
            value = (self._symbol(match[2]) & mask) >> shift
        elif re.match(r"[A-Za-z_$%]", text):
            value = self._symbol(text)
        else:
            number = parse_operand(text)
            if not isinstance(number, Immediate):
                raise PtxError(f"cannot read the initialiser {text!r}")
            value = immediate_bits(number, kind, size * 8)
        return (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def _symbol(self, text: str) -> int:
        match = re.fullmatch(r"(?:generic\s*\(\s*)?([\w$%]+)\s*\)?\s*(?:([+-]\s*\w+))?", text)
        address = match and self._addresses.get(match[1])
        if match is None or address is None:
            raise PtxError(f"the initialiser {text!r} is not the address of a known variable")
        return address + (parse_integer(match[2].replace(" ", "")) if match[2] else 0)


# ---- constants

_INTEGERS_OF_16_BITS = ("b16", "u16", "s16")


def immediate_bits(constant: Immediate, kind: str, bits: int) -> int:
    """A constant as 64 bits, for an instruction of type `kind` with operands of `bits` bits.

    Integers are sign-extended, except 16-bit integers, which are zero-extended like all 16-bit
    values. Floats are converted to the type of the instruction. As in the assembler, a 0f...
    constant of an f64 instruction is not converted. Its 32 bits become the lower half of the
    operand.
    """
    value = constant.value
    if constant.kind == "int":
        assert isinstance(value, int)
        return value & (0xFFFF if kind in _INTEGERS_OF_16_BITS else MASK64)
    if isinstance(value, int):  # an int holds the bits of a NaN
        return _nan_bits(value, constant.kind, bits if kind.startswith("f") else None)
    if kind in ("f16", "bf16"):
        return _half_bits(value, kind)
    if constant.kind == "f64" and (kind == "f64" or bits == 64):
        return _pack_float("d", value)
    return _pack_float("f", value)


def _nan_bits(value: int, written: str, bits: int | None) -> int:
    if written == "f64" and bits == 32:
        return (value >> 63) << 31 | 0x7F800000 | (value >> 29 & 0x7FFFFF or 1 << 22)
    return value


def _pack_float(code: str, value: float) -> int:
    try:
        return int.from_bytes(struct.pack(f"<{code}", value), "little")
    except OverflowError:
        return _pack_float(code, float("inf") if value > 0 else float("-inf"))


def _half_bits(value: float, kind: str) -> int:
    if kind == "f16":
        return _pack_float("e", value)
    bits = _pack_float("f", value)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
