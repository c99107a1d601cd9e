"""The engine, as Python sees it: its forms, machines that run programs, and what they report."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..machine_code.cubin import register_uses
from . import build
from .forms import Form, FormTable
from .program import SPECIAL_REGISTERS, ModuleMemory, Parameter, Program, lower
from .ptx import Module, parse
from .report import Finding
from .trace import TraceEvent

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
"""What can be checked, in the order of the enumeration CK_ in engine.h."""

_MAX_WARPS = 32
_SEVERITIES = ("error", "note")
_EVENT_KINDS = ("wait", "async", "mma", "instant")
_PROGRESS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
_POINTER = ctypes.c_void_p
_STRING = ctypes.c_char_p
_INT = ctypes.c_int
_U64 = ctypes.c_uint64


class _Finding(ctypes.Structure):
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


class _Event(ctypes.Structure):
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
    "emu_form_pattern": (_STRING, (_INT,)),
    "emu_form_operands": (_STRING, (_INT,)),
    "emu_form_flags": (_INT, (_INT,)),
    "emu_form_family": (_STRING, (_INT,)),
    "emu_check_name": (_STRING, (_INT,)),
    "emu_counter_name": (_STRING, (_INT,)),
    "emu_special_register_name": (_STRING, (_INT,)),
    "emu_tensor_map": (_INT, (_STRING, ctypes.POINTER(ctypes.c_int64))),
    "emu_program_new": (_POINTER, (_STRING, _INT, _STRING, _INT, _STRING, _STRING)),
    "emu_program_free": (None, (_POINTER,)),
    "emu_new": (_POINTER, ()),
    "emu_free": (None, (_POINTER,)),
    "emu_set": (None, (_POINTER, _STRING, ctypes.c_int64)),
    "emu_strings": (None, (_POINTER, ctypes.POINTER(_STRING), _INT)),
    "emu_region": (_INT, (_POINTER, _U64, _U64, _STRING, _INT, _INT)),
    "emu_regions_clear": (None, (_POINTER,)),
    "emu_name_shared": (
        None,
        (_POINTER, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32, _STRING),
    ),
    "emu_name_warps": (None, (_POINTER, _INT, _INT, _STRING)),
    "emu_names_clear": (None, (_POINTER,)),
    "emu_launch": (
        _INT,
        (_POINTER, _POINTER, ctypes.POINTER(ctypes.c_uint32), _STRING, _U64, _PROGRESS),
    ),
    "emu_finding_count": (_INT, (_POINTER,)),
    "emu_finding": (None, (_POINTER, _INT, ctypes.POINTER(_Finding))),
    "emu_findings_clear": (None, (_POINTER,)),
    "emu_counters": (ctypes.POINTER(_U64), (_POINTER,)),
    "emu_executed": (ctypes.POINTER(_U64), (_POINTER,)),
    "emu_warp_executed": (ctypes.POINTER(_U64), (_POINTER,)),
    "emu_counters_clear": (None, (_POINTER,)),
    "emu_mma": (
        _U64,
        (_POINTER, _INT, ctypes.POINTER(_STRING), ctypes.POINTER(ctypes.c_int32)),
    ),
    "emu_events": (_INT, (_POINTER, ctypes.POINTER(ctypes.POINTER(_Event)))),
    "emu_events_clear": (None, (_POINTER,)),
    "emu_output": (_STRING, (_POINTER,)),
    "emu_output_clear": (None, (_POINTER,)),
    "emu_wait_name": (_STRING, (_INT,)),
}


# ---- the engine


class Engine:
    """The library, its functions typed, and the forms of instructions that it knows."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
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
        """The engine's copy of a program; it lives as long as the program."""
        handle = program.handles.get(self)
        if handle is None:
            handle = self.library.emu_program_new(
                program.records,
                len(program.records) // 64,
                program.operands,
                len(program.operands) // 24,
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
    """The engine, built if need be.

    Raises:
        EmulatorUnavailable: there is no C compiler to build it with.
    """
    return Engine(str(build.engine_library()))


def programs(text: str, object_file: bytes = b"") -> dict[str, Program]:
    """The kernels of a PTX text, lowered, by their symbols. They share the module's variables.

    What PTX leaves to the assembler is as in the machine code that `object_file` holds, if any.

    Raises:
        PtxError: the text cannot be read; UnsupportedInstruction: or not emulated.
    """
    module = parse(text)
    memory = ModuleMemory(module)
    registers = register_uses(object_file)
    return {
        kernel.name: lower(module, engine().forms, kernel.name, memory, registers.get(kernel.name))
        for kernel in module.kernels
    }


# ---- machines


class Turn:
    """Held by one thread at a time; others wait. Taking it twice is an error, not a deadlock."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise RuntimeError(f"{self.what} from within another one of the same thread")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = None
        self._lock.release()

    @property
    def is_anothers(self) -> bool:
        """Whether another thread has it."""
        return self._lock.locked() and self._owner != threading.get_ident()


@dataclass
class Run:
    """What a launch has done.

    Attributes:
        stopped: it did not run to its end.
        findings: of this launch.
        by_opcode: warp-instructions executed, by opcode with its modifiers.
        by_instruction: the same by number of the instruction in the program.
        by_warp: the same by the warp's index in its block.
        counters: the engine's, by name.
        mma: kind, shape m, n, k, and how many, of matrix instructions.
        output: what the kernel printed.
        events: of the trace, if it was asked for.
    """

    stopped: bool
    findings: list[Finding] = field(default_factory=list)
    by_opcode: Counter[str] = field(default_factory=Counter)
    by_instruction: list[int] = field(default_factory=list)
    by_warp: Counter[int] = field(default_factory=Counter)
    counters: dict[str, int] = field(default_factory=dict)
    mma: list[tuple[str, tuple[int, int, int], int]] = field(default_factory=list)
    output: str = ""
    events: list[TraceEvent] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """The findings of severity "error"."""
        return [finding for finding in self.findings if finding.severity == "error"]


class Machine:
    """A machine of the engine: its options, and the memory that kernels may touch.

    Machines share nothing that is written, so that each may run in a thread of its own. Launches
    of one machine wait for each other; who sets regions and names before takes `calls`.

    Args:
        num_sms: how many blocks are resident at a time.
        schedule: 0 fair, 1 random, 2 adversarial.
        seed: of all random choices.
        checks: names from `CHECKS`.
        numerics: of tensor cores; 0 plain float32 sums, 1 as the hardware adds up.
        spurious_cancel: cluster launch control sometimes says "none left" too early.
        tracing: keep the events of each launch.
        max_findings: further ones are only counted.
        slice: instructions that a warp runs before it is another's turn.
    """

    def __init__(
        self,
        *,
        num_sms: int = 4,
        schedule: int = 0,
        seed: int = 0,
        checks: Iterable[str] = CHECKS,
        numerics: int = 1,
        spurious_cancel: bool = False,
        tracing: bool = False,
        max_findings: int = 100,
        slice: int = 64,  # noqa: A002 - the engine's word
    ) -> None:
        self._engine = engine()
        self._library = self._engine.library
        self.calls = Turn("a call of a function of an emulator")
        self._launching = Turn("a launch on a machine")
        self._regions: list[tuple[int, int, str, bool, bool]] = []
        self._shared_names: list[tuple[int, int, int, str]] = []
        self._options = {
            "num_sms": num_sms,
            "schedule": schedule,
            "seed": seed,
            "checks": sum(1 << CHECKS.index(name) for name in set(checks)),
            "numerics": numerics,
            "spurious_cancel": int(spurious_cancel),
            "tracing": int(tracing),
            "max_findings": max_findings,
            "slice": slice,
        }
        self._make()
        _machines.add(self)

    def _make(self) -> None:
        """The engine's side, new."""
        self._handle = self._library.emu_new()
        self._finalizer = weakref.finalize(self, self._library.emu_free, self._handle)
        for name, value in self._options.items():
            self._library.emu_set(self._handle, name.encode(), value)

    def _forked(self) -> None:
        """In a new process, of whose threads only this one has gone on."""
        if self.calls.is_anothers:
            self.calls = Turn(self.calls.what)
        if self._launching.is_anothers:
            self._launching = Turn(self._launching.what)
            self._finalizer.detach()  # it is in the middle of something, for ever
            self._make()

    def reseed(self, seed: int) -> None:
        """Choose the random choices of the next launch."""
        self._library.emu_set(self._handle, b"seed", seed)

    def add_region(
        self, base: int, size: int, name: str, *, initialised: bool = True, writable: bool = True
    ) -> None:
        """Let kernels touch `size` bytes of this process at `base`."""
        self._regions.append((base, size, name, initialised, writable))

    def clear_regions(self) -> None:
        """Forget all regions."""
        self._regions.clear()

    def name_shared(self, address: int, size: int, element: int, name: str) -> None:
        """Name a buffer or array of barriers in shared memory, by the address kernels see."""
        self._shared_names.append((address, size, element, name))
        self._library.emu_name_shared(self._handle, address, size, element, name.encode())

    def name_warps(self, first: int, last: int, name: str) -> None:
        """Name the role of a range of warps."""
        self._library.emu_name_warps(self._handle, first, last, name.encode())

    def clear_names(self) -> None:
        """Forget all names."""
        self._shared_names.clear()
        self._library.emu_names_clear(self._handle)

    def launch(
        self,
        program: Program,
        grid: Sequence[int] = (1, 1, 1),
        block: Sequence[int] = (32, 1, 1),
        cluster: Sequence[int] = (1, 1, 1),
        dynamic_shared: int = 0,
        params: bytes = b"",
        progress: Callable[[int, int], None] | None = None,
    ) -> Run:
        """Run a kernel to its end, or to an error after which nothing sensible follows.

        `progress(done, total)` is called with numbers of clusters now and then; what it raises
        ends the launch and is raised here.

        Raises:
            ValueError: the kernel was compiled for other sizes, so that a driver would refuse too.
            RuntimeError: `progress` launches on the same machine.
        """
        with self._launching:
            return self._launch(program, grid, block, cluster, dynamic_shared, params, progress)

    def _launch(
        self,
        program: Program,
        grid: Sequence[int],
        block: Sequence[int],
        cluster: Sequence[int],
        dynamic_shared: int,
        params: bytes,
        progress: Callable[[int, int], None] | None,
    ) -> Run:
        for directive, sizes in (("reqntid", block), ("reqnctapercluster", cluster)):
            required = program.kernel.directive(directive)
            if required and _three(required) != _three(sizes):
                raise ValueError(f"{program.name} has .{directive} {required}: {tuple(sizes)}")
        library, handle = self._library, self._handle
        library.emu_findings_clear(handle)
        library.emu_counters_clear(handle)
        library.emu_events_clear(handle)
        library.emu_output_clear(handle)
        library.emu_regions_clear(handle)
        variables = ((*region[:3], True, region[3]) for region in program.memory.regions())
        for base, size, name, initialised, writable in (*self._regions, *variables):
            library.emu_region(handle, base, size, name.encode(), initialised, writable)
        names = (_STRING * len(program.strings))(*(name.encode() for name in program.strings))
        library.emu_strings(handle, names, len(program.strings))
        dims = (ctypes.c_uint32 * 10)(*_three(grid), *_three(block), *_three(cluster))
        dims[9] = dynamic_shared
        raised: list[BaseException] = []

        def report(done: int, total: int) -> int:
            try:
                if progress is not None:
                    progress(done, total)
            except BaseException as error:  # C does not know exceptions
                raised.append(error)
                return 1
            return 0

        code = library.emu_launch(
            handle, self._engine.program(program), dims, params, len(params), _PROGRESS(report)
        )
        if raised:
            raise raised[0]
        return self._read(program, code)

    def _read(self, program: Program, code: int) -> Run:
        library, handle = self._library, self._handle
        run = Run(stopped=code != 0, findings=self._findings(program))
        count = len(program.instructions)
        if code >= 0:
            executed = library.emu_executed(handle)[:count]
            run.by_instruction = executed
            for number, times in zip(program.opcode_numbers, executed, strict=True):
                if times:
                    run.by_opcode[program.opcodes[number]] += times
            for warp, times in enumerate(library.emu_warp_executed(handle)[:_MAX_WARPS]):
                if times:
                    run.by_warp[warp] = times
        counters = self._engine.counters
        run.counters = dict(
            zip(counters, library.emu_counters(handle)[: len(counters)], strict=True)
        )
        kind, shape = _STRING(), (ctypes.c_int32 * 3)()
        while times := library.emu_mma(handle, len(run.mma), ctypes.byref(kind), shape):
            sizes = (shape[0], shape[1], shape[2])
            run.mma.append(((kind.value or b"").decode(), sizes, times))
        run.output = (library.emu_output(handle) or b"").decode("utf-8", "replace")
        run.events = self._events(program)
        return run

    def _findings(self, program: Program) -> list[Finding]:
        found = []
        record = _Finding()
        for i in range(self._library.emu_finding_count(self._handle)):
            self._library.emu_finding(self._handle, i, ctypes.byref(record))
            line, ptx, source = _place(program, record.insn)
            other_line, other_ptx, other_source = _place(program, record.other)
            found.append(
                Finding(
                    CHECKS[record.check],
                    _SEVERITIES[record.severity],
                    _named(program, (record.message or b"").decode("utf-8", "replace")),
                    program.name,
                    line,
                    ptx,
                    source,
                    other_line,
                    other_ptx,
                    other_source,
                    record.cta if record.cta >= 0 else None,
                    record.warp if record.warp >= 0 else None,
                    record.count,
                )
            )
        return found

    def _wait_name(self, kind: str, place: int) -> str:
        if kind != "mbarrier":
            return f"{kind} {place}" if kind == "named barrier" else kind
        offset = place & 0xFFFFFF  # without the CTA's rank
        for address, size, element, name in self._shared_names:
            if 0 <= offset - address < size:
                return f"{name}[{(offset - address) // element}]" if element else name
        return f"mbarrier {place:#x}"

    def _events(self, program: Program) -> list[TraceEvent]:
        pointer = ctypes.POINTER(_Event)()
        count = self._library.emu_events(self._handle, ctypes.byref(pointer))
        found = []
        for event in pointer[:count]:
            line, ptx, source = _place(program, event.insn)
            detail: dict[str, Any] = {"object": event.object, "detail": event.detail}
            if line is not None:
                detail |= {"line": line, "ptx": ptx, "source": source}
            name = program.opcode(event.insn) if event.insn >= 0 else ""
            if _EVENT_KINDS[event.kind] == "wait":  # what for is in the lowest byte
                name = self._wait_name(self._engine.waits[event.detail & 255], event.object)
                detail["detail"] = event.detail >> 8
            found.append(
                TraceEvent(
                    _EVENT_KINDS[event.kind],
                    name,
                    event.cta,
                    event.warp,
                    event.start,
                    event.end,
                    detail,
                )
            )
        return found


_machines: weakref.WeakSet[Machine] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_machines):
        one._forked()


os.register_at_fork(after_in_child=_after_fork)


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    padded = (*sizes, 1, 1, 1)
    return padded[0], padded[1], padded[2]


def _place(program: Program, instruction: int) -> tuple[int | None, str, str | None]:
    """Line, text and source of an instruction, if there is one."""
    if instruction < 0:
        return None, "", None
    source = program.module.source(program.location(instruction))
    return program.line(instruction), program.text(instruction), source or None


def _named(program: Program, message: str) -> str:
    """The engine knows registers by number."""

    def name(match: re.Match[str]) -> str:
        number = int(match[1])
        names = program.register_names
        return f"register {names[number]}" if number < len(names) else match[0]

    return re.sub(r"\bregister (\d+)\b", name, message)


# ---- running PTX by itself


@dataclass(frozen=True)
class Buffer:
    """Memory to pass to `run_ptx`, with what a plain array cannot say.

    Attributes:
        array: a numpy array, torch tensor, bytearray or ctypes array.
        initialised: False if the kernel has to write it before it reads it.
        writable: False if the kernel may only read it.
        name: what findings call it.
    """

    array: Any
    initialised: bool = True
    writable: bool = True
    name: str = ""


def run_ptx(
    text: str | Module,
    kernel: str | None = None,
    grid: int | Sequence[int] = 1,
    block: int | Sequence[int] = 32,
    args: Sequence[Any] = (),
    *,
    cluster: int | Sequence[int] | None = None,
    dynamic_shared: int = 0,
    machine: Machine | None = None,
    **options: Any,
) -> Run:
    """Run one kernel of a PTX text.

    Args:
        text: the PTX, or a module that is parsed already.
        kernel: its symbol; needed if there are several.
        grid, block, cluster: sizes, as a number or up to three. Without `cluster` the size that
            the kernel requires.
        args: one for each parameter: integers, floats, bytes, or arrays (see `Buffer`), whose
            addresses are passed.
        dynamic_shared: bytes.
        machine: to run on; otherwise a new one with `options`, those of `Machine`.
    """
    module = parse(text) if isinstance(text, str) else text
    program = lower(module, engine().forms, kernel)
    runner = machine or Machine(**options)
    if cluster is None:
        cluster = program.kernel.directive("reqnctapercluster") or 1
    keep: list[Any] = []
    return runner.launch(
        program,
        _sizes(grid),
        _sizes(block),
        _sizes(cluster),
        dynamic_shared,
        pack_arguments(program, args, runner, keep),
    )


def _sizes(sizes: int | Sequence[int]) -> Sequence[int]:
    return (sizes,) if isinstance(sizes, int) else sizes


def pack_arguments(
    program: Program, args: Sequence[Any], machine: Machine, keep: list[Any]
) -> bytes:
    """The parameter block of a launch. Arrays among `args` become regions of the machine.

    `keep` gets what has to live until the launch is over.
    """
    if len(args) != len(program.parameters):
        raise ValueError(f"{program.name} takes {len(program.parameters)} parameters: {len(args)}")
    block = bytearray(program.parameter_bytes)
    for number, (argument, parameter) in enumerate(zip(args, program.parameters, strict=True)):
        data = _argument_bytes(argument, parameter, machine, keep, f"args[{number}]")
        block[parameter.offset : parameter.offset + parameter.bytes] = data
    return bytes(block)


def _argument_bytes(
    argument: Any, parameter: Parameter, machine: Machine, keep: list[Any], name: str
) -> bytes:
    size = parameter.bytes
    if isinstance(argument, bytes):
        if len(argument) != size:
            raise ValueError(f"{name} is {len(argument)} bytes, the parameter has {size}")
        return argument
    if isinstance(argument, float):
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], argument)
    if isinstance(argument, int):
        return (argument & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    buffer = argument if isinstance(argument, Buffer) else Buffer(argument)
    base, extent = _extent(buffer.array, keep)
    if extent:
        machine.add_region(
            base,
            extent,
            buffer.name or name,
            initialised=buffer.initialised,
            writable=buffer.writable,
        )
    return base.to_bytes(size, "little")


def _extent(array: Any, keep: list[Any]) -> tuple[int, int]:
    """Address and bytes of an array's memory."""
    keep.append(array)
    if hasattr(array, "data_ptr"):  # torch
        last = sum((n - 1) * s for n, s in zip(array.shape, array.stride(), strict=True))
        return array.data_ptr(), (last + 1) * array.element_size() if array.numel() else 0
    if hasattr(array, "__array_interface__"):  # numpy
        if not array.flags.c_contiguous:
            raise ValueError("arrays of numpy have to be contiguous")
        return array.ctypes.data, array.nbytes
    view = (ctypes.c_char * len(memoryview(array).cast("B"))).from_buffer(array)
    keep.append(view)
    return ctypes.addressof(view), ctypes.sizeof(view)
