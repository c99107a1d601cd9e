"""The emulator: run a compiled function on CPU tensors, and check and report what its kernels
do."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import library, machine, trace
from .cores import default_cores
from .host import HostFunction, Launch, aligned_copies, tensors_in
from .program import Program
from .recording import Recording
from .report import Finding, FindingsError, LaunchRecord, Report

SCHEDULES = ("fair", "random", "adversarial", "starving")
_OBJECT, _PTX = "kernel.o", "kernel.ptx"  # the files of a cache entry
_ENTRY_FUNCTION = "k"  # the exported name of an entry's function
_MISALIGNED = "Misaligned Tensor data"  # how the host code's error begins


@dataclass(frozen=True)
class Names:
    """Names of a kernel's barriers, buffers and warps, for reports and traces.

    Attributes:
        shared: name -> (shared-memory address in the kernel, bytes, bytes of an element). An array
            of mbarriers has elements of 8 bytes, and is reported as `name[2]`.
        warps: name of a role -> (first warp, last warp).
    """

    shared: Mapping[str, tuple[int, int, int]]
    warps: Mapping[str, tuple[int, int]]


class Emulator:
    """Runs compiled kernels without a GPU, and checks what they do.

    Threads may share an emulator: their calls take turns. Threads that each have an emulator of
    their own run concurrently.

    Args:
        num_sms: streaming multiprocessors; each holds one CTA at a time. All CTAs of a cluster, and
            of a cooperative launch, are resident even if there are fewer SMs.
        schedule: "fair" runs warps in turn and asynchronous operations at once; "random" chooses
            the warps, and the times at which each asynchronous operation reads and writes, by
            `seed`; "adversarial" delays each asynchronous effect until no warp can run;
            "starving" gives each warp a priority by `seed`, and runs a warp only while no warp of
            a higher priority can run.
        seed: seed of the random choices; equal seeds give equal runs.
        checks: "all", "none", or names of checks in `Emulator.CHECKS`.
        on_findings: "raise" a FindingsError at the end of a call that had errors, or "collect"
            them in the report. A deadlock always raises.
        numerics: "exact" accumulates matrix products as tensor cores do, bit for bit; "fast" uses
            plain float32. None: "fast" if `checks` is "none", else "exact".
        spurious_cancel: cluster launch control sometimes answers "none left" too early.
        traced: keep the events that `trace` writes.
        record: keep the steps of every so many clusters in `recordings`, for `cute_attn.timing`; 0
            keeps none. Turns the check `counters` on.
        progress: function that is called from time to time with numbers of clusters, as
            progress(ended, total).
        cores: number of processor cores for a launch whose clusters share nothing. None: the value
            of `CUTE_ATTN_EMULATOR_CORES`, else 1 in a worker of pytest-xdist, else all cores of
            the process, at most 8.

    Raises:
        ValueError: an argument, or `CUTE_ATTN_EMULATOR_CORES`, has none of the values above.
        EmulatorUnavailable: there is no C compiler to build the engine with, or no pyelftools.
    """

    CHECKS: tuple[str, ...] = library.CHECKS

    def __init__(
        self,
        num_sms: int = 4,
        schedule: str = "fair",
        seed: int = 0,
        checks: str | Iterable[str] = "all",
        *,
        on_findings: str = "raise",
        numerics: str | None = None,
        spurious_cancel: bool = False,
        traced: bool = False,
        record: int = 0,
        progress: Callable[[int, int], None] | None = None,
        cores: int | None = None,
    ) -> None:
        _one_of("schedule", schedule, SCHEDULES)
        _one_of("on_findings", on_findings, ("raise", "collect"))
        _one_of("numerics", numerics, (None, "exact", "fast"))
        if type(num_sms) is not int or num_sms < 1:
            raise ValueError(f"num_sms is {num_sms!r}, must be a positive integer")
        if type(record) is not int or record < 0:
            raise ValueError(f"record is {record!r}, must be an integer of at least 0")
        if cores is not None and (type(cores) is not int or cores < 1):
            raise ValueError(f"cores is {cores!r}, must be None or a positive integer")
        chosen = _checks(checks)
        if numerics is None:
            numerics = "exact" if chosen else "fast"
        if record:
            chosen |= {"counters"}
        self.num_sms = num_sms
        self.report = Report()
        self.recordings: list[Recording] = []
        self._record = record
        self._seed = seed
        self._raise = on_findings == "raise"
        self._progress = progress
        self._roles: dict[int, str] = {}
        self._exposed: list[tuple[str, Any]] = []
        self._trace: list[trace.TraceEvent] | None = [] if traced else None
        self._machine = machine.Machine(
            num_sms=num_sms,
            schedule=SCHEDULES.index(schedule),
            seed=seed,
            checks=chosen,
            numerics=int(numerics == "exact"),
            spurious_cancel=spurious_cancel,
            tracing=traced,
            record_every=record,
            cores=default_cores() if cores is None else cores,
        )

    def load(self, compiled: Any, names: Names | None = None) -> EmulatedFunction:
        """A function that runs `compiled` in this emulator.

        Args:
            compiled: the result of `cute.compile` with options "--enable-tvm-ffi --keep-ptx", or an
                entry of `cute_attn.cache`, or the entry's directory.
            names: names of the kernel's barriers, buffers and warps.

        Returns:
            The function, which takes CPU tensors in place of CUDA tensors.

        Raises:
            ValueError: the function was compiled without PTX, or the directory holds no entry.
            UnsupportedInstruction: the PTX has an instruction that is not emulated.
        """
        image, ptx, function = _parts(compiled)
        return self.load_object(image, ptx, function, names)

    def load_object(
        self, image: bytes, ptx: str, function: str = _ENTRY_FUNCTION, names: Names | None = None
    ) -> EmulatedFunction:
        """Like `load`, for an object file.

        Args:
            image: the object file's bytes, as `export_to_c` writes them.
            ptx: the PTX from which the object file was compiled.
            function: the function's exported name.
            names: as for `load`.

        Returns:
            The function, as for `load`.

        Raises:
            UnsupportedInstruction: as `load`.
        """
        return EmulatedFunction(self, image, ptx, function, names)

    def expose(self, tensor: Any, name: str) -> None:
        """Let kernels access the memory of a CPU tensor that is passed to them as a bare address.

        Args:
            tensor: the tensor.
            name: the tensor's name, for reports.
        """
        self._exposed.append((name, tensor))

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline of all calls so far, for Perfetto or chrome://tracing.

        Args:
            path: path of the JSON file.

        Raises:
            ValueError: the Emulator was made without `traced=True`.
        """
        if self._trace is None:
            raise ValueError("nothing was traced: make the Emulator with traced=True")
        trace.write(path, self._trace, self._roles)

    # -- for scripts/launches.py

    def launch_within(
        self,
        regions: Iterable[tuple[int, int, str]],
        program: Program,
        launch: Launch,
        image: bytes,
    ) -> None:
        """Run one launch of a program whose memory is known by address alone.

        Args:
            regions: address, bytes and name of each piece of device memory.
            program: the kernel.
            launch: the launch.
            image: the machine code of the kernel's module, for recordings.

        Raises:
            FindingsError: as a call of an `EmulatedFunction`.
        """
        with self._machine.calls:
            self._machine.clear_regions()
            for base, size, name in regions:
                self._machine.add_region(base, size, name)
            self._launch(program, launch, image)

    # -- for EmulatedFunction

    def _begin(self, tensors: Sequence[tuple[str, Any]], names: Names | None) -> None:
        self._machine.clear_regions()
        for base, size, name in _extents([*tensors, *self._exposed]):
            self._machine.add_region(base, size, name)
        self._machine.clear_names()
        self._roles = {}
        if names is None:
            return
        for name, (address, size, element) in names.shared.items():
            self._machine.name_shared(address, size, element, name)
        for name, (first, last) in names.warps.items():
            self._machine.name_warps(first, last, name)
            self._roles.update(dict.fromkeys(range(first, last + 1), name))

    def _launch(self, program: Program, launch: Launch, image: bytes) -> None:
        parameters = _parameter_block(program, launch)
        # Each launch makes different random choices, so that repeated calls find more.
        self._machine.reseed(self._seed + len(self.report.launches))
        started = time.perf_counter()
        run = self._machine.launch(
            program,
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            dynamic_shared=launch.dynamic_shared,
            cooperative=launch.cooperative,
            params=parameters,
            progress=self._progress,
        )
        seconds = time.perf_counter() - started
        self._account(program, launch, run, seconds)
        if self._record:
            self.recordings.append(_recording(program, launch, image, self._record, run.stream))
        errors = [f for f in run.findings if f.severity == "error"]
        if errors and (self._raise or run.stopped):
            raise FindingsError(run.findings)

    def _account(self, program: Program, launch: Launch, run: machine.Run, seconds: float) -> None:
        report = self.report
        instructions = sum(run.by_opcode.values())
        report.launches.append(
            LaunchRecord(
                launch.kernel,
                launch.grid,
                launch.block,
                launch.cluster,
                launch.dynamic_shared,
                instructions,
                seconds,
            )
        )
        report.by_opcode.update(run.by_opcode)
        for warp, count in run.by_warp.items():
            report.by_warp[self._roles.get(warp, warp)] += count
        for name, value in run.counters.items():
            if name.endswith("_bytes"):
                report.bytes[name.removesuffix("_bytes")] += value
            else:
                report.counters[name] += value
        for kind, (m, n, k), count in run.mma:
            key = f"{kind} m{m}n{n}k{k}"
            before = report.mma.get(key, (0, 0))
            report.mma[key] = (before[0] + count, before[1] + 2 * m * n * k * count)
        report.findings += run.findings
        report.output += run.output
        if self._trace is not None:
            self._trace += run.events


class EmulatedFunction:
    """A compiled function that runs in an emulator. Made by `Emulator.load`."""

    def __init__(
        self, emulator: Emulator, image: bytes, ptx: str, function: str, names: Names | None
    ) -> None:
        self._emulator = emulator
        self._names = names
        self._programs = machine.programs(ptx, image)
        self._image = image
        self._host = HostFunction(
            image,
            function,
            self._launched,
            num_sms=emulator.num_sms,
            capability=_capability(ptx),
        )

    @property
    def kernels(self) -> tuple[str, ...]:
        """The symbols of the function's kernels."""
        return tuple(self._programs)

    def __call__(self, *arguments: Any) -> None:
        """Run the function.

        Args:
            arguments: the compiled function's arguments. CPU torch tensors stand for CUDA tensors,
                and are changed in place.

        CUDA memory is aligned to 512 bytes, CPU memory to 64. If the host code refuses a tensor for
        its alignment, the call runs on aligned copies, and changed bytes are copied back.

        Raises:
            FindingsError: a check found an error, see `Emulator`.
            RuntimeError: called by `progress` of the same emulator, during a launch.
            Exception: the compiled host code's exception for arguments that it does not take.
        """
        with self._emulator._machine.calls:
            launches = len(self._emulator.report.launches)
            try:
                self._run(arguments)
                return
            except ValueError as error:
                refused = str(error).startswith(_MISALIGNED)
                if not refused or len(self._emulator.report.launches) != launches:
                    raise
                exposed = {t.untyped_storage().data_ptr() for _, t in self._emulator._exposed}
                given = {t.untyped_storage().data_ptr() for _, t in tensors_in(arguments)}
                if exposed & given:  # kernels have the tensor's address, so a copy does not help
                    raise
            with aligned_copies(arguments) as copies:
                self._run(copies)

    def _run(self, arguments: Sequence[Any]) -> None:
        self._emulator._begin(tensors_in(arguments), self._names)
        self._host(*arguments)

    def _launched(self, launch: Launch) -> None:
        self._emulator._launch(self._programs[launch.kernel], launch, self._image)


def _recording(
    program: Program, launch: Launch, image: bytes, every: int, steps: bytes
) -> Recording:
    return Recording(
        kernel=launch.kernel,
        program=program,
        image=image,
        grid=launch.grid,
        block=launch.block,
        cluster=launch.cluster,
        shared_bytes=program.static_shared + launch.dynamic_shared,
        registers=program.header[8],
        every=every,
        steps=steps,
    )


def _one_of(name: str, value: object, allowed: Sequence[str | None]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(map(repr, allowed))}")


def _checks(checks: str | Iterable[str]) -> frozenset[str]:
    if checks == "all":
        return frozenset(library.CHECKS)
    if checks == "none":
        return frozenset()
    chosen = frozenset([checks] if isinstance(checks, str) else checks)
    for name in chosen:
        _one_of("checks", name, library.CHECKS)
    return chosen


def _parts(compiled: Any) -> tuple[bytes, str, str]:
    """The object file, its PTX, and the function's exported name."""
    if isinstance(compiled, str | os.PathLike):
        directory = Path(compiled)
        missing = [name for name in (_OBJECT, _PTX) if not (directory / name).is_file()]
        if missing:
            raise ValueError(f"{directory} holds no {' and no '.join(missing)}")
        return (
            (directory / _OBJECT).read_bytes(),
            (directory / _PTX).read_text(),
            _ENTRY_FUNCTION,
        )
    if hasattr(compiled, "read"):  # an entry of the cache
        return compiled.read(_OBJECT), compiled.read(_PTX).decode(), _ENTRY_FUNCTION
    ptx = getattr(getattr(compiled, "artifacts", None), "PTX", None)
    if not ptx:
        raise ValueError(
            f"{compiled!r} carries no PTX: compile it with options='--enable-tvm-ffi --keep-ptx'"
        )
    fd = os.memfd_create("function")
    with os.fdopen(fd, "rb") as file:
        compiled.export_to_c(f"/proc/self/fd/{fd}", function_name=_ENTRY_FUNCTION)
        return file.read(), ptx, _ENTRY_FUNCTION


def _capability(ptx: str) -> tuple[int, int]:
    match = re.search(r"^\s*\.target\s+sm_(\d+)(\d)", ptx, re.MULTILINE)
    if match is None:
        raise ValueError("the PTX names no target architecture")
    return int(match[1]), int(match[2])


def _parameter_block(program: Program, launch: Launch) -> bytes:
    """The parameters of a launch in one piece of memory, laid out as the PTX declares them."""
    import ctypes

    block = bytearray(program.parameter_bytes)
    for i, parameter in enumerate(program.parameters):
        value = ctypes.string_at(launch.arguments[i], parameter.bytes)
        block[parameter.offset : parameter.offset + parameter.bytes] = value
    return bytes(block)


def _extents(tensors: Sequence[tuple[str, Any]]) -> list[tuple[int, int, str]]:
    """Address, bytes and name of the memory of each tensor. Overlapping spans are merged."""
    spans = []
    for name, tensor in tensors:
        if tensor.numel() == 0:
            continue
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size()
        spans.append((tensor.data_ptr(), size, f"argument {name} {list(tensor.shape)}"))
    merged: list[tuple[int, int, str]] = []
    for base, size, name in sorted(spans):
        if merged and base < merged[-1][0] + merged[-1][1]:
            start, length, names = merged[-1]
            merged[-1] = (start, max(length, base + size - start), f"{names} / {name}")
        else:
            merged.append((base, size, name))
    return merged


__all__ = ["EmulatedFunction", "Emulator", "Finding", "FindingsError", "Names", "Report"]
