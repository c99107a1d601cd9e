"""Machines of the engine, and the results of their launches."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .cores import reason_for_one_core
from .cubin import register_uses
from .library import (
    CHECKS,
    EVENT_KINDS,
    MAX_WARPS,
    PROGRESS,
    SEVERITIES,
    STEP_BYTES,
    STRING,
    EventRecord,
    FindingRecord,
    engine,
)
from .lowering import lower
from .program import Program
from .ptx import parse
from .report import Finding
from .trace import TraceEvent
from .variables import ModuleMemory

MOST_BYTES, BYTES_PER_CLUSTER = 1 << 30, 1 << 20
"""The most memory that is copied before a launch on several cores, in all and by cluster."""


def programs(text: str, object_file: bytes = b"") -> dict[str, Program]:
    """The lowered kernels of a PTX text, by symbol. The kernels share the module's variables.

    Register counts come from the machine code in `object_file`, if given.

    Raises:
        PtxError: the text cannot be parsed.
        UnsupportedInstruction: the PTX has an instruction that is not emulated.
    """
    module = parse(text)
    memory = ModuleMemory(module)
    registers = register_uses(object_file)
    return {
        kernel.name: lower(module, engine().forms, kernel.name, memory, registers.get(kernel.name))
        for kernel in module.kernels
    }


class Turn:
    """A lock. A thread that takes the lock twice gets an error instead of a deadlock."""

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
        """Whether another thread holds the lock."""
        return self._lock.locked() and self._owner != threading.get_ident()


@dataclass
class Run:
    """The results of a launch.

    Attributes:
        stopped: whether the launch ended early.
        findings: findings of this launch.
        by_opcode: warp-instructions executed, by opcode with its modifiers.
        by_instruction: warp-instructions executed, by the instruction's number in the program.
        by_warp: warp-instructions executed, by the warp's index in its CTA.
        counters: the engine's counters, by name.
        mma: kind, shape (m, n, k) and number of matrix instructions.
        output: text that the kernel printed.
        events: events of the trace, if the machine keeps a trace.
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
    stream: bytes = b""

    @property
    def errors(self) -> list[Finding]:
        """The findings of severity "error"."""
        return [finding for finding in self.findings if finding.severity == "error"]


class Machine:
    """A machine of the engine: options, and the memory that kernels may touch.

    Machines share no mutable state, so that each may run in its own thread. Launches of one
    machine wait for each other. A caller that sets regions and names before a launch holds `calls`.

    Args:
        num_sms: number of CTAs that are resident at a time.
        schedule: 0 fair, 1 random, 2 adversarial, 3 starving.
        seed: seed of all random choices.
        checks: names from `CHECKS`.
        numerics: arithmetic of tensor cores; 0 plain float32 sums, 1 sums as in the hardware.
        spurious_cancel: cluster launch control sometimes answers "none left" too early.
        tracing: keep the events of each launch.
        record_every: keep the stream of steps of every such cluster; 0 keeps none.
        max_findings: number of findings kept; further findings are only counted.
        slice: instructions that a warp runs before the next warp's turn.
        cores: number of threads that share the clusters of a launch, where the results are those
            of one thread (`_split`).
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
        record_every: int = 0,
        max_findings: int = 100,
        slice: int = 64,  # noqa: A002 - the engine's word
        cores: int = 1,
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
            "record_every": record_every,
            "max_findings": max_findings,
            "slice": slice,
        }
        self._cores = 1 if schedule or tracing or record_every else cores
        self._parts: list[_Side] = []  # the machines of a launch on several cores
        self._one_core: weakref.WeakSet[Program] = weakref.WeakSet()
        self._side = self._make()
        _machines.add(self)

    def _make(self, **options: int) -> _Side:
        """Make an engine's side of the machine."""
        side = _Side(self._library)
        for name, value in (self._options | options).items():
            self._library.emu_set(side.handle, name.encode(), value)
        return side

    @property
    def _handle(self) -> Any:
        return self._side.handle

    def _forked(self) -> None:
        """Reset the machine in a forked process, in which the other threads do not exist."""
        if self.calls.is_anothers:
            self.calls = Turn(self.calls.what)
        if self._launching.is_anothers:
            self._launching = Turn(self._launching.what)
            for side in (self._side, *self._parts):
                side.detach()  # its launch never ends in this process
            self._side, self._parts = self._make(), []

    def reseed(self, seed: int) -> None:
        """Set the seed of the next launch."""
        self._library.emu_set(self._handle, b"seed", seed)

    def add_region(
        self, base: int, size: int, name: str, *, initialised: bool = True, writable: bool = True
    ) -> None:
        """Let kernels access `size` bytes of this process at `base`."""
        self._regions.append((base, size, name, initialised, writable))

    def clear_regions(self) -> None:
        """Forget all regions."""
        self._regions.clear()

    def name_shared(self, address: int, size: int, element: int, name: str) -> None:
        """Name a buffer or an array of barriers at a shared-memory address."""
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
        cooperative: bool = False,
    ) -> Run:
        """Run a kernel to its end, or to an error after which the kernel cannot go on.

        `progress(ended, total)` is called from time to time with numbers of clusters; exceptions of
        `progress` end the launch and are raised here. All CTAs of a `cooperative` launch are
        resident together.

        Raises:
            ValueError: the kernel was compiled for other sizes; a driver would refuse it as well.
            RuntimeError: `progress` launches on the same machine.
        """
        with self._launching:
            return self._launch(
                program, grid, block, cluster, dynamic_shared, params, progress, cooperative
            )

    def _launch(
        self,
        program: Program,
        grid: Sequence[int],
        block: Sequence[int],
        cluster: Sequence[int],
        dynamic_shared: int,
        params: bytes,
        progress: Callable[[int, int], None] | None,
        cooperative: bool,
    ) -> Run:
        for directive, sizes in (("reqntid", block), ("reqnctapercluster", cluster)):
            required = program.kernel.directive(directive)
            if required and _three(required) != _three(sizes):
                raise ValueError(f"{program.name} has .{directive} {required}: {tuple(sizes)}")
        dims = (ctypes.c_uint32 * 11)(*_three(grid), *_three(block), *_three(cluster))
        dims[9], dims[10] = dynamic_shared, cooperative
        clusters = math.prod(_three(grid)) // math.prod(_three(cluster))
        if self._may_split(program, clusters, cooperative):
            run = self._split(program, dims, params, progress, clusters)
            if run is not None:
                return run
            self._one_core.add(program)
        raised: list[BaseException] = []
        code = self._start(self._handle, program, dims, params, _catching(progress, raised))
        if raised:
            raise raised[0]
        run = self._read(program, code, [self._handle])
        run.findings = self._findings(program)
        run.output = (self._library.emu_output(self._handle) or b"").decode("utf-8", "replace")
        run.events = self._events(program)
        run.stream = self._stream()
        return run

    def _start(
        self,
        handle: Any,
        program: Program,
        dims: Any,
        params: bytes,
        report: Callable[[int, int], int],
    ) -> int:
        """Run a launch on an engine's side of the machine."""
        library = self._library
        library.emu_findings_clear(handle)
        library.emu_counters_clear(handle)
        library.emu_events_clear(handle)
        library.emu_stream_clear(handle)
        library.emu_output_clear(handle)
        library.emu_regions_clear(handle)
        for base, size, name, initialised, writable in self._memory(program):
            library.emu_region(handle, base, size, name.encode(), initialised, writable)
        names = (STRING * len(program.strings))(*(name.encode() for name in program.strings))
        library.emu_strings(handle, names, len(program.strings))
        code: int = library.emu_launch(
            handle, self._engine.program(program), dims, params, len(params), PROGRESS(report)
        )
        return code

    def _memory(self, program: Program) -> list[tuple[int, int, str, bool, bool]]:
        """The regions of a launch: all memory that the kernel may access."""
        variables = ((*region[:3], True, region[3]) for region in program.memory.regions())
        return [*self._regions, *variables]

    # -- several cores

    def _may_split(self, program: Program, clusters: int, cooperative: bool) -> bool:
        if self._cores == 1 or cooperative or clusters < 2 or program in self._one_core:
            return False
        if reason_for_one_core(program):
            self._one_core.add(program)
            return False
        size = sum(size for _, size, _, _, writable in self._memory(program) if writable)
        return size <= min(MOST_BYTES, clusters * BYTES_PER_CLUSTER)

    def _split(
        self,
        program: Program,
        dims: Any,
        params: bytes,
        progress: Callable[[int, int], None] | None,
        clusters: int,
    ) -> Run | None:
        """Run a launch on several cores. None: the launch must run on one core, and memory is as
        before.

        A core's machine stops at the first finding. So the findings that a caller gets, and their
        order, are always those of one core. A machine that checks races also knows the words that
        its clusters have accessed: no two machines may have accessed the same word, except to read.
        """
        cores = min(self._cores, clusters)
        while len(self._parts) < cores:
            self._parts.append(self._make())
        parts = [side.handle for side in self._parts[:cores]]
        before = [
            (base, ctypes.string_at(base, size))
            for base, size, _, _, writable in self._memory(program)
            if writable
        ]
        self._engine.program(program)  # made by one thread
        raised: list[BaseException] = []
        ended, codes, stop = [0] * cores, [1] * cores, threading.Event()

        def total(done: int, _: int) -> None:
            ended[0] = done
            if progress is not None:
                progress(sum(ended), clusters)

        def of_others(core: int) -> Callable[[int, int], int]:
            def report(done: int, _: int) -> int:
                ended[core] = done
                return 0

            return report

        def run(core: int) -> None:
            report = of_others(core) if core else _catching(total, raised)
            for name, value in (("first_cluster", core), ("cluster_stride", cores)):
                self._library.emu_set(parts[core], name.encode(), value)
            codes[core] = self._start(
                parts[core], program, dims, params, lambda *at: report(*at) or stop.is_set()
            )
            if codes[core]:
                stop.set()

        threads = [threading.Thread(target=run, args=(core,)) for core in range(1, cores)]
        for thread in threads:
            thread.start()
        try:
            run(0)  # in this thread, which `progress` expects
        except BaseException:
            stop.set()
            raise
        finally:
            for thread in threads:
                thread.join()
        if raised:
            raise raised[0]
        met = any(self._library.emu_met(a, b) for a, b in itertools.combinations(parts, 2))
        result = None if any(codes) or met else self._read(program, 0, parts)
        for part in parts:
            self._library.emu_regions_clear(part)  # with the record of accesses
        if result is None:
            for base, content in before:
                ctypes.memmove(base, content, len(content))
            self._parts.clear()  # a fatal finding changes the checks of its machine
        return result

    def _read(self, program: Program, code: int, handles: Sequence[Any]) -> Run:
        """The counts of a launch on one machine or several."""
        library = self._library
        run = Run(stopped=code != 0)
        count = len(program.instructions)
        names = self._engine.counters
        counters = [library.emu_counters(handle)[: len(names)] for handle in handles]
        run.counters = dict(zip(names, map(sum, zip(*counters, strict=True)), strict=True))
        matrices: Counter[tuple[str, tuple[int, int, int]]] = Counter()
        for handle in handles:
            kind, shape = STRING(), (ctypes.c_int32 * 3)()
            at = 0
            while times := library.emu_mma(handle, at, ctypes.byref(kind), shape):
                matrices[(kind.value or b"").decode(), (shape[0], shape[1], shape[2])] += times
                at += 1
        run.mma = [(kind, shape, times) for (kind, shape), times in matrices.items()]
        if code < 0:
            return run
        executed = [library.emu_executed(handle)[:count] for handle in handles]
        run.by_instruction = [sum(times) for times in zip(*executed, strict=True)]
        for number, times in zip(program.opcode_numbers, run.by_instruction, strict=True):
            if times:
                run.by_opcode[program.opcodes[number]] += times
        for handle in handles:
            for warp, times in enumerate(library.emu_warp_executed(handle)[:MAX_WARPS]):
                if times:
                    run.by_warp[warp] += times
        return run

    def _stream(self) -> bytes:
        pointer = ctypes.c_void_p()
        count = self._library.emu_stream(self._handle, ctypes.byref(pointer))
        steps = ctypes.string_at(pointer, count * STEP_BYTES) if count else b""
        self._library.emu_stream_clear(self._handle)
        return steps

    def _findings(self, program: Program) -> list[Finding]:
        found = []
        record = FindingRecord()
        for i in range(self._library.emu_finding_count(self._handle)):
            self._library.emu_finding(self._handle, i, ctypes.byref(record))
            line, ptx, source = _place(program, record.insn)
            other_line, other_ptx, other_source = _place(program, record.other)
            found.append(
                Finding(
                    CHECKS[record.check],
                    SEVERITIES[record.severity],
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
        offset = place & 0xFFFFFF  # the address without the CTA's rank
        for address, size, element, name in self._shared_names:
            if 0 <= offset - address < size:
                return f"{name}[{(offset - address) // element}]" if element else name
        return f"mbarrier {place:#x}"

    def _events(self, program: Program) -> list[TraceEvent]:
        pointer = ctypes.POINTER(EventRecord)()
        count = self._library.emu_events(self._handle, ctypes.byref(pointer))
        found = []
        for event in pointer[:count]:
            line, ptx, source = _place(program, event.insn)
            detail: dict[str, Any] = {"object": event.object, "detail": event.detail}
            if line is not None:
                detail |= {"line": line, "ptx": ptx, "source": source}
            name = program.opcode(event.insn) if event.insn >= 0 else ""
            if EVENT_KINDS[event.kind] == "wait":  # the lowest byte is the WaitKind
                name = self._wait_name(self._engine.waits[event.detail & 255], event.object)
                detail["detail"] = event.detail >> 8
            found.append(
                TraceEvent(
                    EVENT_KINDS[event.kind],
                    name,
                    event.cta,
                    event.warp,
                    event.start,
                    event.end,
                    detail,
                )
            )
        return found


class _Side:
    """An engine's side of a machine."""

    def __init__(self, library: Any) -> None:
        self.handle = library.emu_new()
        self.detach = weakref.finalize(self, library.emu_free, self.handle).detach


def _catching(
    progress: Callable[[int, int], None] | None, raised: list[BaseException]
) -> Callable[[int, int], int]:
    """What the engine calls with numbers of clusters; 1 ends the launch."""

    def report(done: int, total: int) -> int:
        try:
            if progress is not None:
                progress(done, total)
        except BaseException as error:  # exceptions cannot pass through C
            raised.append(error)
            return 1
        return 0

    return report


_machines: weakref.WeakSet[Machine] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_machines):
        one._forked()


os.register_at_fork(after_in_child=_after_fork)


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    padded = (*sizes, 1, 1, 1)
    return padded[0], padded[1], padded[2]


def _place(program: Program, instruction: int) -> tuple[int | None, str, str | None]:
    """Line, text and source of an instruction, if the finding has one."""
    if instruction < 0:
        return None, "", None
    source = program.module.source(program.location(instruction))
    return program.line(instruction), program.text(instruction), source or None


def _named(program: Program, message: str) -> str:
    """A message with names in place of the engine's register numbers."""

    def name(match: re.Match[str]) -> str:
        number = int(match[1])
        names = program.register_names
        return f"register {names[number]}" if number < len(names) else match[0]

    return re.sub(r"\bregister (\d+)\b", name, message)
