"""Predictions of the launches that an emulator has recorded."""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..emulator import trace
from ..emulator.recording import Recording
from .blackwell import Blackwell
from .costs import code_bytes, costs
from .model import HELD_CODE, Model
from .rates import Rates, load_rates
from .simulate import Machine, Result, simulate
from .steps import LaunchItems, Memory, launch_items

if TYPE_CHECKING:
    from ..emulator import Emulator

SHARED_BYTES = 233_472  # of an SM; each CTA takes 1 KiB more than it asks for
REGISTERS = 65_536
MOST_THREADS, MOST_CTAS = 2048, 32
MOST_WAITS = 6  # shown


@dataclass(frozen=True)
class Whole:
    """A launch that a recorded launch is a part of: each recorded CTA stands for equally many.

    Attributes:
        ctas: CTAs of the whole grid.
        readers: so many CTAs at a time read the bytes that one recorded CTA reads.
    """

    ctas: int
    readers: float = 1.0


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a launch.

    Attributes:
        kernel: the kernel's symbol.
        gpu: the GPU that the rates are of.
        us: microseconds, with the launch itself if it was measured.
        without: what the microseconds leave out, because nobody has measured it on this GPU.
        parts: microseconds for which each unit is busy, on the average SM.
        waits: microseconds that warps wait, by what they wait for, for the average warp.
        ctas, resident, simulated: CTAs of the grid, at most on an SM at a time, and simulated.
        result: what the simulator found.
    """

    kernel: str
    gpu: str
    us: float
    without: tuple[str, ...]
    parts: Mapping[str, float]
    waits: Mapping[str, float]
    ctas: int
    resident: int
    simulated: int
    result: Result = field(repr=False)
    clock_mhz: float

    def __str__(self) -> str:
        lines = [
            f"{self.kernel}: predicted {self.us:.1f} us on {self.gpu} "
            f"({self.ctas} CTAs, {self.simulated} simulated)"
            + "".join(f", without {what}" for what in self.without)
        ]
        busy = ", ".join(f"{unit} {us:.1f}" for unit, us in self.parts.items() if us >= 0.05)
        lines.append(f"  busy, us of an SM: {busy}")
        longest = sorted(self.waits.items(), key=lambda w: -w[1])[:MOST_WAITS]
        if longest:
            lines.append(
                "  waits, us of a warp: " + ", ".join(f"{what} {us:.1f}" for what, us in longest)
            )
        return "\n".join(lines)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the simulated timeline for Perfetto, in nanoseconds. Needs `timeline=True`."""
        scale = 1e3 / self.clock_mhz
        events = [
            trace.TraceEvent(
                "wait" if i.kind == "wait" else "instant",
                i.what,
                i.cta,
                i.warp,
                round(i.start * scale),
                round(i.end * scale),
                {"clocks": i.end - i.start},
            )
            for i in self.result.intervals
        ]
        trace.write(path, events, {})


def predict(
    emulator: Emulator | list[Recording],
    *,
    gpu: str = "h100",
    rates: Rates | None = None,
    timeline: bool = False,
    whole: Whole | None = None,
) -> list[Prediction]:
    """Predict each launch that an emulator has recorded, in order. The L2 is empty before the first
    launch, and keeps what later launches find. The SMs have run all of these launches before, so
    that they hold the machine code, unless it is larger than their caches.

    Args:
        emulator: an `Emulator(record=...)` after its calls, or its recordings.
        gpu: the folder of the GPU's rates in docs/benchmarks.
        rates: rates to use instead of the GPU's.
        timeline: keep what `Prediction.trace` writes.
        whole: the launch that each recorded launch is a part of.

    Raises:
        RatesError: there are no rates of this GPU.
        NoLines: a kernel was compiled without line information.
        Stuck: the simulated warps wait for each other.
    """
    recordings = emulator if isinstance(emulator, list) else emulator.recordings
    found = rates or load_rates(gpu)
    model = Blackwell(found) if found.otherwise else Model(found)
    memory = Memory()
    sizes = {r.program.name: code_bytes(r.program, r.image) for r in recordings}
    held = sum(sizes.values()) <= HELD_CODE
    seen: set[str] = set()
    predictions = []
    for recording in recordings:
        name = recording.program.name
        code_from = None if held else "L2" if name in seen else "memory"
        seen.add(name)
        predictions.append(_predict(recording, model, memory, code_from, timeline, whole))
    return predictions


def resident_ctas(recording: Recording) -> int:
    """How many CTAs fit an SM at a time."""
    threads = recording.block[0] * recording.block[1] * recording.block[2]
    warps = -(-threads // 32)
    registers = -(-recording.registers // 8) * 8 * 32
    return max(
        1,
        min(
            SHARED_BYTES // (recording.shared_bytes + 1024),
            REGISTERS // registers // warps,
            MOST_THREADS // (warps * 32),
            MOST_CTAS,
        ),
    )


def _predict(
    recording: Recording,
    model: Model,
    memory: Memory,
    code_from: str | None,
    timeline: bool,
    whole: Whole | None,
) -> Prediction:
    launch = launch_items(
        recording,
        costs(recording.program, recording.image, model.unit_clocks),
        model.latencies,
        memory,
    )
    grid, cluster = (a * b * c for a, b, c in (recording.grid, recording.cluster))
    memory_share = launch.memory_share
    if whole:
        grid, memory_share = whole.ctas, memory_share / whole.readers
    resident = resident_ctas(recording)
    sms = min(model.rates.sms, grid)
    together = min(resident, -(-grid // model.rates.sms)) if cluster == 1 else 1
    alike = launch.alike() if cluster == 1 and together == 1 else {}
    sharers = launch.sharers(sms, grid)
    machine = model.machine(*sharers, memory_share, code_from)
    result = _simulate(launch, machine, together, alike, timeline)
    clocks = _whole_launch(result, alike, grid, sms * together)
    warps = sum(w.cta in result.ends for w in launch.warps)
    share = 1.0 / result.sms
    turns = math.ceil(grid / (sms * together))
    busy = result.busy.get("tensor cores", 0.0) * share * turns / clocks
    clock_mhz = model.clock_mhz(busy * sms / model.rates.sms)
    to_us = 1.0 / clock_mhz
    return Prediction(
        kernel=recording.kernel,
        gpu=model.rates.gpu,
        us=clocks * to_us + (model.launch_us(grid) or 0.0),
        without=model.unmeasured,
        parts={unit: busy * share * to_us for unit, busy in sorted(result.busy.items())},
        waits={
            _waited(recording, kind, what): clocks * to_us / warps
            for (kind, what), clocks in result.waits.items()
        },
        ctas=grid,
        resident=resident,
        simulated=len(result.ends),
        result=result,
        clock_mhz=clock_mhz,
    )


def _simulate(
    launch: LaunchItems,
    machine: Machine,
    together: int,
    alike: Mapping[int, int],
    timeline: bool,
) -> Result:
    """Simulate the recorded CTAs, `together` of them on each SM; of CTAs that do the same, one."""
    ctas = sorted(set(alike.values()) or {w.cta for w in launch.warps})
    places = {cta: i // together for i, cta in enumerate(ctas)}
    return simulate(launch, machine, places, timeline=timeline)


def _whole_launch(result: Result, alike: Mapping[int, int], grid: int, at_once: int) -> float:
    """Clocks of the whole grid: the recorded CTAs stand for all, and take turns on the SMs."""
    if grid <= at_once:
        return max(result.ends.values())
    # The CTAs in the order of their numbers, each on the SM that is free first.
    recorded = sorted(alike or result.ends)
    free = [0.0] * at_once
    for cta in range(grid):
        like = recorded[cta * len(recorded) // grid]
        heapq.heapreplace(free, free[0] + result.ends[alike.get(like, like)])
    return max(free)


def _waited(recording: Recording, kind: str, what: int) -> str:
    if kind != "barrier":
        return f"{kind} (PTX line {recording.program.line(what)})"
    which = what & 0xFFFFFFFF
    if what >> 56 == 1:
        return f"named barrier {which}"
    return "cluster barrier" if what >> 56 else f"mbarrier {which:#x}"
