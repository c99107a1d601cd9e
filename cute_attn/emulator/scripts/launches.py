"""The launches of an emulated program: schedules, CUDA graphs, findings, the report."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import pkgutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..emulator import Emulator
from ..host import HOOK, LAUNCH_FAILURE, Launch
from ..program import Program
from ..report import Finding, FindingsError, by_cause
from . import images, memory
from .options import TIMED, Options

QUIET_SECONDS = 5.0
"""A launch that takes longer shows its progress, as soon as its first clusters have ended."""
PREDICT = "cute_attn.timing:predict"  # in a checkout, and itself a user of the emulator
_TOO_LARGE = 720  # cudaErrorCooperativeLaunchTooLarge
_REPEAT_SECONDS = 30.0  # between two lines of progress, where lines cannot be overwritten


@dataclass(frozen=True)
class Recorded:
    """A launch in a CUDA graph, with a copy of its arguments."""

    program: Program
    launch: Launch
    code: bytes
    kept: tuple[Any, ...]


class Launches:
    """Receives the launches of the whole process, and runs them in emulators.

    Args:
        options: how the program is emulated.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._errors: list[BaseException] = []  # of launches of the present call of host code
        self._callers = 0  # calls that wait for such errors
        self.recording: list[Recorded] | None = None  # the graph that is being captured
        self._progress = Progress(options.resident)
        self._emulators = [
            Emulator(
                options.resident,
                schedule,
                seed,
                options.checks,
                on_findings="raise" if options.on_findings == "raise" else "collect",
                progress=self._progress,
                record=int(options.time and schedule == "fair"),
                cores=options.cores,
            )
            for schedule, seed in _schedules(options)
        ]
        self._hook = HOOK(self._launched)

    def install(self) -> None:
        """Receive the process's launches from now on."""
        device = self.options.device
        address = ctypes.cast(self._hook, ctypes.c_void_p)
        memory.stand_in().emulator_set_hook(address, device.num_sms, *device.capability)

    def _launched(self, image: int, kernel: bytes, dims: Any, arguments: Any) -> int:
        try:
            launch = Launch.requested(kernel, dims, arguments)
            if launch.cooperative and math.prod(launch.grid) > self.options.device.resident(launch):
                return _TOO_LARGE
            module = images.module(image)
            program = module.programs[launch.kernel]
            if self.recording is not None:
                self.recording.append(_recorded(program, launch, module.code))
            else:
                self.run(program, launch, module.code)
        except BaseException as error:  # exceptions cannot pass through the host code
            if self._callers:
                self._errors.append(error)
            else:  # the caller gets the number of a CUDA error
                print(f"emulator: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return LAUNCH_FAILURE
        return 0

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Context of a call of host code, in which a launch's own error replaces a CUDA error."""
        self._callers += 1
        self._errors.clear()
        try:
            yield
        except Exception:
            if self._errors:
                raise self._errors.pop() from None
            raise
        finally:
            self._callers -= 1
        if self._errors:
            raise self._errors.pop()

    def run(self, program: Program, launch: Launch, code: bytes) -> None:
        """Run a launch of a kernel with this machine code under every schedule; the last one's
        results stay.

        Raises:
            FindingsError: a check found an error, and errors are raised; or a deadlock.
        """
        regions = memory.allocations()
        before = self._contents(program, regions) if len(self._emulators) > 1 else []
        for i, emulator in enumerate(self._emulators):
            if i:
                for base, content in before:
                    ctypes.memmove(base, content, len(content))
            printed = len(emulator.report.output)
            ended = False
            self._progress.begin(launch)
            try:
                emulator.launch_within(regions, program, launch, code)
                ended = True
            finally:
                self._progress.end()
                if not ended or emulator is self._emulators[-1]:
                    sys.stdout.write(emulator.report.output[printed:])
                    sys.stdout.flush()

    def _contents(
        self, program: Program, regions: list[tuple[int, int, str]]
    ) -> list[tuple[int, bytes]]:
        """Addresses and contents of all memory that a launch may write."""
        variables = ((base, size) for base, size, _, _ in program.memory.regions())
        pieces = itertools.chain(((base, size) for base, size, _ in regions), variables)
        return [(base, ctypes.string_at(base, size)) for base, size in pieces]

    # -- results

    @property
    def findings(self) -> list[Finding]:
        """The findings of all launches, each once for a pair of instructions and a severity."""
        return _once([emulator.report.findings for emulator in self._emulators])

    @property
    def errors_found(self) -> list[Finding]:
        """The findings of severity "error"."""
        return [f for f in self.findings if f.severity == "error"]

    @property
    def count(self) -> int:
        """The number of launches."""
        return len(self._emulators[-1].report.launches)

    def marks(self) -> list[int]:
        """The numbers of findings so far, for `errors_since`."""
        return [len(emulator.report.findings) for emulator in self._emulators]

    def errors_since(self, marks: list[int]) -> list[Finding]:
        """The errors of launches after `marks` were taken."""
        new = [e.report.findings[n:] for e, n in zip(self._emulators, marks, strict=True)]
        return [f for f in _once(new) if f.severity == "error"]

    def counts(self) -> str:
        """A line with numbers of launches and findings."""
        errors = len(self.errors_found)
        records = [r for e in self._emulators for r in e.report.launches]
        instructions = sum(record.instructions for record in records)
        seconds = sum(record.seconds for record in records)
        return (
            f"emulator: {self.options.arch}: {self.count} launches, {instructions} "
            f"warp-instructions in {seconds:.1f} s, {errors} errors, "
            f"{len(self.findings) - errors} notes"
        )

    def summary(self) -> str:
        """The errors, and the line that counts."""
        text = "\n".join(by_cause(self.errors_found))
        return "\n".join([*(f"emulator: {line}" for line in text.splitlines()), self.counts()])

    def predictions(self) -> str:
        """The predicted time of each launch. Where a launch cannot be predicted, the reason."""
        predict = pkgutil.resolve_name(PREDICT)
        try:
            gpu = TIMED[self.options.arch]
            return "\n".join(map(str, predict(self._emulators[-1], gpu=gpu)))
        except (ValueError, RuntimeError) as error:
            return f"emulator: no times are predicted: {error}"

    def write(self, path: Path) -> None:
        """Write a report in JSON."""
        options = asdict(self.options) | {"report": str(path)}
        report = {
            "options": options,
            "cpu_seconds": round(time.process_time(), 1),
            "schedules": [
                {
                    "schedule": schedule,
                    "seed": seed,
                    "launches": [asdict(record) for record in emulator.report.launches],
                }
                for (schedule, seed), emulator in zip(
                    _schedules(self.options), self._emulators, strict=True
                )
            ],
            "findings": [asdict(finding) for finding in self.findings],
        }
        path.write_text(json.dumps(report, indent=1) + "\n")


def _once(lists: list[list[Finding]]) -> list[Finding]:
    found: dict[tuple[Any, ...], Finding] = {}
    for f in itertools.chain.from_iterable(lists):
        found.setdefault((f.check, f.severity, f.kernel, f.line, f.other_line), f)
    return list(found.values())


def _schedules(options: Options) -> list[tuple[str, int]]:
    """Schedules and seeds; the fair one comes last, so that its results stay."""
    others = [("adversarial", options.seed)]
    for seed in range(options.seed, options.seed + options.schedules // 2):
        others += [("starving", seed), ("random", seed)]
    return [*reversed(others[: options.schedules - 1]), ("fair", options.seed)]


def _recorded(program: Program, launch: Launch, code: bytes) -> Recorded:
    kept = tuple(
        ctypes.create_string_buffer(
            ctypes.string_at(launch.arguments[i], parameter.bytes), parameter.bytes
        )
        for i, parameter in enumerate(program.parameters)
    )
    addresses = (ctypes.c_void_p * max(1, len(kept)))(*map(ctypes.addressof, kept))
    sizes = launch.grid, launch.block, launch.cluster, launch.dynamic_shared, launch.cooperative
    return Recorded(program, Launch(launch.kernel, *sizes, addresses), code, kept)


class Progress:
    """Lines on stderr about a launch that takes long, the first as soon as that is known.

    Args:
        resident: the number of CTAs that are resident at a time.
    """

    def __init__(self, resident: int) -> None:
        self._resident = resident
        self._launch: Launch | None = None
        self._started = self._shown = 0.0
        self._overwrite = sys.stderr.isatty()

    def begin(self, launch: Launch) -> None:
        """A launch starts."""
        self._launch, self._started, self._shown = launch, time.monotonic(), 0.0

    def __call__(self, done: int, total: int) -> None:
        """So many clusters of the launch have ended."""
        if self._launch is None:
            return
        now = time.monotonic()
        seconds = now - self._started
        # Clusters that run together end together, so that the first few tell the rate.
        first = 1 if self._launch.cooperative else self._resident // math.prod(self._launch.cluster)
        left = seconds / done * (total - done) if done >= max(1, first) else None
        pause = 0.5 if self._overwrite else _REPEAT_SECONDS
        if now < self._shown + pause if self._shown else seconds + (left or 0.0) < QUIET_SECONDS:
            return
        self._shown = now
        line = (
            f"emulator: {self._launch.kernel[:60]}: {done} of {total} clusters in {seconds:.0f} s"
        )
        if left is not None:
            line += f", about {left:.0f} s left"
        print(f"\r{line:<79}" if self._overwrite else line, end="" if self._overwrite else "\n",
              file=sys.stderr, flush=True)  # fmt: skip

    def end(self) -> None:
        """The launch has ended."""
        if self._shown and self._overwrite:
            print(file=sys.stderr)
        self._launch = None


__all__ = ["FindingsError", "Launches", "Progress", "Recorded"]
