"""Checks of the machine code of every kernel, with any installed compiler."""

from __future__ import annotations

from functools import cache

from cute_attn.cache import Entry
from cute_attn.emulator.cubin import cubins
from cute_attn.machine_code.disassembly import disassemble, find_nvdisasm
from cute_attn.machine_code.listing import functions
from cute_attn.machine_code.unset_registers import unset_reads


def assert_sound(entry: Entry) -> None:
    """No register is read that was never set: a compiler has done that, and the emulator, which
    runs PTX, does not see it."""
    for reads in _unset_reads(entry):
        assert not reads, f"{entry.directory}: " + "; ".join(reads[:3])


def machine_code(entry: Entry) -> str:
    """The listing of all kernels."""
    return "\n".join(disassemble(cubin, _nvdisasm()) for cubin in cubins(entry.read("kernel.o")))


_nvdisasm = cache(find_nvdisasm)


def _unset_reads(entry: Entry) -> list[list[str]]:
    return [
        [str(read) for read in unset_reads(function)]
        for cubin in cubins(entry.read("kernel.o"))
        for function in functions(disassemble(cubin, _nvdisasm()))
    ]
