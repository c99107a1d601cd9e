"""The engine as a shared library: C interface through ctypes, enumerations, forms."""

from __future__ import annotations

import ctypes
import functools
import importlib
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import build
from .forms import Form, FormTable
from .program import INSTRUCTION, OPERAND, SPECIAL_REGISTERS, Program

CHECKS = (
    "deadlock",
    "race",
    "proxy-fence",
    "tcgen05-sync",
    "uninitialised",
    "out-of-bounds",
    "misaligned",
    "descriptor",
    "barrier",
    "tmem",
    "exit",
    "registers",
    "warp-sync",
    "wgmma",
    "cluster",
    "assert",
    "counters",
)
"""Names of the checks, in the order of the enumeration CK_ in engine.h."""

MAX_WARPS = 32
SEVERITIES = ("error", "note")
EVENT_KINDS = ("wait", "async", "mma", "instant")
STEP_BYTES = 40  # of a Step of stream.c
PROGRESS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
_POINTER = ctypes.c_void_p
STRING = ctypes.c_char_p
_INT = ctypes.c_int
_U64 = ctypes.c_uint64


class FindingRecord(ctypes.Structure):
    _fields_ = (
        ("check", ctypes.c_int32),
        ("severity", ctypes.c_int32),
        ("insn", ctypes.c_int32),
        ("other", ctypes.c_int32),
        ("cta", ctypes.c_int32),
        ("warp", ctypes.c_int32),
        ("count", ctypes.c_uint64),
        ("message", ctypes.c_char_p),
    )


class EventRecord(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("cta", ctypes.c_int32),
        ("warp", ctypes.c_int32),
        ("insn", ctypes.c_int32),
        ("object", ctypes.c_uint64),
        ("detail", ctypes.c_uint64),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "emu_form_count": (_INT, ()),
    "emu_form_pattern": (STRING, (_INT,)),
    "emu_form_operands": (STRING, (_INT,)),
    "emu_form_flags": (_INT, (_INT,)),
    "emu_form_family": (STRING, (_INT,)),
    "emu_check_name": (STRING, (_INT,)),
    "emu_counter_name": (STRING, (_INT,)),
    "emu_special_register_name": (STRING, (_INT,)),
    "emu_tensor_map": (_INT, (STRING, ctypes.POINTER(ctypes.c_int64))),
    "emu_program_new": (_POINTER, (STRING, _INT, STRING, _INT, STRING, STRING)),
    "emu_program_free": (None, (_POINTER,)),
    "emu_new": (_POINTER, ()),
    "emu_free": (None, (_POINTER,)),
    "emu_set": (None, (_POINTER, STRING, ctypes.c_int64)),
    "emu_strings": (None, (_POINTER, ctypes.POINTER(STRING), _INT)),
    "emu_region": (_INT, (_POINTER, _U64, _U64, STRING, _INT, _INT)),
    "emu_regions_clear": (None, (_POINTER,)),
    "emu_name_shared": (
        None,
        (_POINTER, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32, STRING),
    ),
    "emu_name_warps": (None, (_POINTER, _INT, _INT, STRING)),
    "emu_names_clear": (None, (_POINTER,)),
    "emu_launch": (
        _INT,
        (_POINTER, _POINTER, ctypes.POINTER(ctypes.c_uint32), STRING, _U64, PROGRESS),
    ),
    "emu_met": (_INT, (_POINTER, _POINTER)),
    "emu_finding_count": (_INT, (_POINTER,)),
    "emu_finding": (None, (_POINTER, _INT, ctypes.POINTER(FindingRecord))),
    "emu_findings_clear": (None, (_POINTER,)),
    "emu_counters": (ctypes.POINTER(_U64), (_POINTER,)),
    "emu_executed": (ctypes.POINTER(_U64), (_POINTER,)),
    "emu_warp_executed": (ctypes.POINTER(_U64), (_POINTER,)),
    "emu_counters_clear": (None, (_POINTER,)),
    "emu_mma": (
        _U64,
        (_POINTER, _INT, ctypes.POINTER(STRING), ctypes.POINTER(ctypes.c_int32)),
    ),
    "emu_events": (_INT, (_POINTER, ctypes.POINTER(ctypes.POINTER(EventRecord)))),
    "emu_events_clear": (None, (_POINTER,)),
    "emu_stream": (ctypes.c_int64, (_POINTER, ctypes.POINTER(_POINTER))),
    "emu_stream_clear": (None, (_POINTER,)),
    "emu_output": (STRING, (_POINTER,)),
    "emu_output_clear": (None, (_POINTER,)),
    "emu_wait_name": (STRING, (_INT,)),
    "emu_product": (None, (_INT, _INT, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER)),
}


class Engine:
    """The library with typed functions, and the engine's forms of instructions."""

    def __init__(self, path: Path) -> None:
        self.library = build.load(path)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        library = self.library
        self.forms = FormTable(
            [
                Form(
                    i,
                    library.emu_form_pattern(i).decode(),
                    library.emu_form_operands(i).decode(),
                    library.emu_form_flags(i),
                    library.emu_form_family(i).decode(),
                )
                for i in range(library.emu_form_count())
            ]
        )
        self.counters = _names(library.emu_counter_name)
        self.waits = _names(library.emu_wait_name)
        assert _names(library.emu_check_name) == CHECKS
        assert _names(library.emu_special_register_name) == SPECIAL_REGISTERS

    def program(self, program: Program) -> int:
        """The engine's copy of a program; the copy lives as long as the program."""
        handle = program.handles.get(self)
        if handle is None:
            handle = self.library.emu_program_new(
                program.records,
                len(program.records) // INSTRUCTION.size,
                program.operands,
                len(program.operands) // OPERAND.size,
                struct.pack(f"<{len(program.header)}i", *program.header),
                program.name.encode(),
            )
            program.handles[self] = handle
            weakref.finalize(program, self.library.emu_program_free, handle)
        return handle


def _names(function: Callable[[int], bytes | None]) -> tuple[str, ...]:
    found: list[str] = []
    while (name := function(len(found))) is not None:
        found.append(name.decode())
    return tuple(found)


@functools.cache
def engine() -> Engine:
    """The engine; built if not in the cache.

    Raises:
        EmulatorUnavailable: there is no C compiler to build the emulator with, or no pyelftools.
    """
    _check_elf_reader()  # fails before a build that takes a minute
    return Engine(build.engine_library())


def _check_elf_reader() -> None:
    try:
        importlib.import_module("elftools.elf.elffile")
    except ImportError as error:
        raise build.EmulatorUnavailable(
            f"the emulator reads machine code with pyelftools, which cannot be imported ({error}): "
            "pip install 'pyelftools>=0.31'"
        ) from None
