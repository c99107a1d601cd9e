"""The PTX of each compiled module, found by the machine code that is loaded.

The host code loads a module by the address of its machine code. Addresses are used again, so that a
digest of the code names the module. Packages keep compiled functions in files and load them in
other processes, so that the PTX is kept in a file too.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .. import build, machine
from ..program import Program

_ELF = b"\x7fELF"
_FATBIN_HEADER = 16


class UnknownModule(RuntimeError):
    """A module was loaded whose PTX is not known."""


@functools.cache
def _store() -> Path:
    return build.kept("ptx")


def register(ptx: str | bytes | None, code: str | bytes | None) -> None:
    """Keep the PTX from which machine code was made."""
    if not ptx or not isinstance(code, bytes):
        return
    text = (ptx.decode() if isinstance(ptx, bytes) else ptx).rstrip("\0")
    target = _store() / hashlib.sha256(code).hexdigest()
    if target.exists():
        return
    fd, scratch = tempfile.mkstemp(prefix=".", dir=_store())
    with os.fdopen(fd, "w") as file:
        file.write(text)
    Path(scratch).replace(target)


@dataclass(frozen=True)
class Module:
    """A compiled module: its kernels by symbol, and an object file with its machine code."""

    programs: dict[str, Program]
    code: bytes


def module(image: int) -> Module:
    """The module whose machine code is at an address.

    Raises:
        UnknownModule: the module was compiled elsewhere, or its machine code is compressed.
    """
    return _module(_code(image))


@functools.cache
def _module(code: bytes) -> Module:
    kept = _store() / hashlib.sha256(code).hexdigest()
    if not kept.exists():
        raise UnknownModule(
            "the PTX of this kernel is not known: the emulator keeps the PTX of kernels that are "
            "compiled while a program runs in it. Remove the file or cache from which the program "
            "loads the kernel, so that it is compiled again"
        )
    # A byte before the code: `register_uses` looks for code inside of an object file.
    return Module(machine.programs(kept.read_text(), b"\0" + code), b"\0" + code)


def _code(image: int) -> bytes:
    if ctypes.string_at(image, 4) == _ELF:
        return ctypes.string_at(image, _elf_bytes(image))
    payload = int.from_bytes(ctypes.string_at(image + 8, 8), "little")
    container = ctypes.string_at(image, _FATBIN_HEADER + payload)
    at = container.find(_ELF)
    if at < 0:
        raise UnknownModule("the machine code of this kernel is compressed, or there is none")
    return container[at : at + _elf_bytes(image + at)]


def _elf_bytes(address: int) -> int:
    header = ctypes.string_at(address, 64)

    def number(offset: int, size: int) -> int:
        return int.from_bytes(header[offset : offset + size], "little")

    segments = number(32, 8) + number(54, 2) * number(56, 2)
    sections = number(40, 8) + number(58, 2) * number(60, 2)
    return max(segments, sections)
