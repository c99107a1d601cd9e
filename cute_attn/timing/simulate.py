"""A discrete-event model of the SMs that run the recorded CTAs.

Warps on a quarter of an SM share its units: each advances at its own rate until a unit is full.
Products queue at the tensor cores, copies and loads at the SM's port to the L2.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .code import CodeCache, Fetch
from .costs import UNITS
from .steps import (
    Arrive,
    Await,
    Commit,
    Copy,
    LaunchItems,
    Multiply,
    Product,
    TensorCopy,
    TensorMemory,
    Wait,
    WarpItems,
    Work,
)

QUARTERS = 4
WAVEFRONT_BYTES = 128
WARPGROUP = 4


class Stuck(RuntimeError):
    """The simulated warps wait for each other; the message says for what."""


@dataclass(frozen=True)
class TensorCore:
    """Clocks of tcgen05.

    Attributes:
        multiply: of a product while others follow.
        late: from the end of that time until a committed product is signalled.
        operands: wavefronts of a CTA's shared memory for a product's operands.
        load_rate, store_rate: bytes a clock of tensor memory and a quarter.
        load_latency, store_latency: without the time that the bytes take.
        copy: of a tcgen05.cp of so many bytes.
        query: of a request for another cluster's work.
    """

    multiply: Callable[[Product], float]
    late: Callable[[Product], float]
    operands: Callable[[Product], float]
    load_rate: float
    load_latency: float
    store_rate: float
    store_latency: float
    copy: Callable[[int], float]
    query: float


@dataclass(frozen=True)
class Machine:
    """Clocks and rates of an SM, and its share of the L2's and of the memory's rate.

    Attributes:
        multiply: clocks of a wgmma of (n, A in registers) while others follow.
        multiply_latency: clocks from the end of that interval until a warp sees the result, with A
            in registers or not.
        hand_over: clocks from an arrival at an mbarrier until a waiting warp runs.
        meet: clocks of a named barrier of so many warps.
        l2_latency, memory_latency: of a bulk copy, without the time that its bytes take.
        l2_rate, memory_rate: bytes a clock of this SM.
        store_rate, add_rate: bytes a clock of this SM's stores, and of its additions.
        store_latency: until a bulk store has read its source, or has written.
        wavefront: clocks of a wavefront of shared memory.
        operands: wavefronts for the operands of a wgmma of (n, A in registers).
        fence: clocks of a fence.proxy.async behind stores to shared memory.
        cluster_fence: clocks of the fence in an arrival at a cluster's barrier.
        fetch: what fetching machine code takes.
        holds_code: whether the SM holds all of the kernel's code when it starts.
        tensor: of a GPU with tcgen05.
    """

    multiply: Callable[[int, bool], float]
    multiply_latency: Callable[[bool], float]
    hand_over: float
    meet: Callable[[int], float]
    l2_latency: float
    memory_latency: float
    l2_rate: float
    memory_rate: float
    store_rate: float
    add_rate: float
    store_latency: float
    wavefront: float
    operands: Callable[[int, bool], float]
    fence: float
    fetch: Fetch
    cluster_fence: float = 0.0
    holds_code: bool = True
    tensor: TensorCore | None = None


@dataclass
class Interval:
    """Part of a row of the timeline, in clocks."""

    kind: str
    cta: int
    warp: int
    start: float
    end: float
    what: str


@dataclass
class Result:
    """What the simulation found, in clocks.

    Attributes:
        ends: end of each CTA.
        busy: clocks for which a unit is busy, summed over SMs: units of quarters are averages.
        waits: clocks that warps wait, by what they wait for: (kind, object or instruction).
        sms: number of simulated SMs.
    """

    ends: dict[int, float]
    busy: dict[str, float]
    waits: dict[tuple[str, int], float]
    sms: int
    intervals: list[Interval] = field(default_factory=list)


class _Quarter:
    """Warps that work on one quarter of an SM at a time."""

    def __init__(self) -> None:
        self.active: dict[Any, list[Any]] = {}  # warp, or product -> [left, shortest time, units]
        self.since = 0.0
        self.version = 0
        self.speeds: dict[Any, float] = {}

    def advance(self, now: float) -> None:
        passed = now - self.since
        self.since = now
        if passed > 0:
            for warp, speed in self.speeds.items():
                self.active[warp][0] -= passed * speed

    def settle(self) -> float | None:
        """Set the speeds. Returns the time until the next warp is done."""
        self.version += 1
        load = [0.0] * len(UNITS)
        for _, shortest, units in self.active.values():
            for i, clocks in enumerate(units):
                load[i] += clocks / shortest
        self.speeds = {}
        nearest = None
        for warp, (left, shortest, units) in self.active.items():
            slow = max((load[i] for i, clocks in enumerate(units) if clocks), default=1.0)
            speed = 1.0 / (shortest * max(slow, 1.0))
            self.speeds[warp] = speed
            until = max(left, 0.0) / speed
            nearest = until if nearest is None else min(nearest, until)
        return nearest


@dataclass
class _Product:
    """A wgmma that the tensor cores of all quarters work on."""

    key: tuple[int, int, int]
    late: float
    left: int = QUARTERS
    floor: float = 0.0  # until its operands have been read


class _Sm:
    def __init__(self, code: CodeCache | None) -> None:
        self.code = code
        self.fetching = 0.0
        self.come: dict[Any, float] = {}  # when the code of an execution has come
        self.quarters = [_Quarter() for _ in range(QUARTERS)]
        self.queues: dict[Any, deque[tuple[int, int, bool]]] = {}
        self.turn: deque[Any] = deque()
        self.multiplying: _Product | None = None
        self.port = self.out = self.shared = 0.0
        self.tensor: deque[Product | TensorCopy | Commit] = deque()
        self.tensor_busy = False
        self.tensor_late = 0.0  # of the latest product
        self.tensor_memory = [0.0] * QUARTERS


class Simulator:
    """Simulates recorded CTAs. `places` gives the SM of each CTA."""

    def __init__(
        self,
        launch: LaunchItems,
        machine: Machine,
        places: Mapping[int, int],
        *,
        timeline: bool = False,
    ) -> None:
        self._m = machine
        self._launch = launch
        self._timeline = timeline
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = itertools.count()
        self._missing = dict(launch.contributions)
        self._phase_end: dict[tuple[int, int], float] = {}
        self._latest: dict[tuple[int, int], float] = defaultdict(float)
        self._waiting: dict[tuple[int, int], list[tuple[int, float, Wait]]] = defaultdict(list)
        self._warps: list[WarpItems] = [w for w in launch.warps if w.cta in places]
        self._sm_of = [places[w.cta] for w in self._warps]
        self._places = places
        self._fenced = [False] * len(self._warps)
        self._tensor_memory_until: dict[tuple[int, str], float] = defaultdict(float)
        numbers = sorted(set(places.values()))
        self._sms = {
            number: _Sm(
                CodeCache(launch.code, machine.fetch, machine.holds_code) if launch.code else None
            )
            for number in numbers
        }
        self._next = [0] * len(self._warps)
        self._issued: dict[tuple[int, int, int], int] = defaultdict(int)
        self._done: dict[tuple[int, int, int], float] = {}
        self._await_multiply: dict[tuple[int, int, int], list[tuple[int, float, int]]] = (
            defaultdict(list)
        )
        self._own: dict[tuple[int, str], list[tuple[int, float, float]]] = defaultdict(list)
        self._ends: dict[int, float] = {}
        self._floor = [0.0] * len(self._warps)
        self._written = [0.0] * len(self._warps)  # until a warp's stores have arrived
        self._starts = [0.0] * len(self._warps)
        self._busy: dict[str, float] = defaultdict(float)
        self._waits: dict[tuple[str, int], float] = defaultdict(float)
        self._intervals: list[Interval] = []
        self._live = len(self._warps)

    def run(self) -> Result:
        """Simulate to the end.

        Raises:
            Stuck: some warps never end.
        """
        for index in range(len(self._warps)):
            self._at(0.0, lambda now, i=index: self._go(i, now))  # type: ignore[misc]
        while self._heap:
            now, _, action = heapq.heappop(self._heap)
            action(now)
        if self._live:
            raise Stuck(self._blocked())
        return Result(
            self._ends, dict(self._busy), dict(self._waits), len(self._sms), self._intervals
        )

    def _blocked(self) -> str:
        waiting = [f"{o:#x} phase {p}" for (o, p), some in self._waiting.items() if some]
        return f"{self._live} warps never end; they wait for {', '.join(waiting[:5])}"

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._count), action))

    def _note(self, kind: str, index: int, start: float, end: float, what: str) -> None:
        if self._timeline and end > start:
            w = self._warps[index]
            self._intervals.append(Interval(kind, w.cta, w.warp, start, end, what))

    # -- a warp's items

    def _go(self, index: int, now: float) -> None:
        """Run a warp's items until it has to wait."""
        items = self._warps[index].items
        while self._next[index] < len(items):
            item = items[self._next[index]]
            self._next[index] += 1
            if isinstance(item, Work):
                self._work(index, item, now)
                return
            if isinstance(item, Arrive):
                if item.fence and not self._fenced[index]:
                    self._fenced[index] = True
                    self._next[index] -= 1
                    self._at(now + self._m.cluster_fence, lambda t: self._go(index, t))
                    return
                self._fenced[index] = False
                self._contribute((item.object, item.phase), now)
            elif isinstance(item, Wait) and self._wait(index, item, now):
                return
            elif isinstance(item, Multiply):
                self._multiply(index, item, now)
            elif isinstance(item, Copy):
                self._copy(index, item, now)
            elif isinstance(item, Product | TensorCopy | Commit):
                sm = self._sms[self._sm_of[index]]
                sm.tensor.append(item)
                self._tensor(sm, now)
            elif isinstance(item, TensorMemory):
                self._access_tensor_memory(index, item, now)
            elif isinstance(item, Await) and self._await(index, item, now):
                return
        cta = self._warps[index].cta
        self._ends[cta] = max(self._ends.get(cta, 0.0), now, self._written[index])
        self._live -= 1

    def _work(self, index: int, work: Work, now: float) -> None:
        sm = self._sms[self._sm_of[index]]
        until = now
        if work.wavefronts:
            clocks = work.wavefronts * self._m.wavefront
            sm.shared = max(sm.shared, now) + clocks
            self._busy["shared memory"] += clocks
            until = max(until, sm.shared)
        until += work.fences * self._m.fence
        if work.loaded:
            hit = work.loaded - work.missed
            clocks = hit / self._m.l2_rate + work.missed / self._m.memory_rate
            sm.port = max(sm.port, now) + clocks
            self._busy["L2"] += work.loaded / self._m.l2_rate
            self._busy["memory"] += work.missed / self._m.memory_rate
            latency = self._m.memory_latency if work.missed else self._m.l2_latency
            until = max(until, sm.port + latency)
        if work.stored or work.added:
            clocks = work.stored / self._m.store_rate + work.added / self._m.add_rate
            sm.out = max(sm.out, now) + clocks
            self._busy["stores"] += clocks
            self._written[index] = sm.out + self._m.l2_latency
        if sm.code:
            clocks, execution = sm.code.clocks(work.runs, index)
            if clocks:
                sm.fetching = sm.come[execution] = max(sm.fetching, now) + clocks
                self._busy["instruction fetch"] += clocks
            until = max(until, sm.come.get(execution, 0.0))
        self._floor[index] = until
        for unit, clocks in zip(UNITS, work.units, strict=True):
            self._busy[unit] += clocks / QUARTERS
        shortest = max(work.latency, *work.units, 1e-3)
        quarter = sm.quarters[self._warps[index].warp % QUARTERS]
        quarter.advance(now)
        quarter.active[index] = [1.0, shortest, work.units]
        self._settle(quarter, now)
        self._starts[index] = now

    def _settle(self, quarter: _Quarter, now: float) -> None:
        nearest = quarter.settle()
        if nearest is None:
            return
        version = quarter.version
        self._at(now + nearest, lambda then: self._quarter_done(quarter, version, then))

    def _quarter_done(self, quarter: _Quarter, version: int, now: float) -> None:
        if version != quarter.version:
            return
        quarter.advance(now)
        # What is left may be a rounding error, less than a clock at this warp's speed.
        ended = [
            i for i, (left, _, _) in quarter.active.items() if left <= 1e-3 * quarter.speeds[i]
        ]
        for index in ended:
            del quarter.active[index]
        self._settle(quarter, now)
        for index in ended:
            if isinstance(index, tuple):
                self._part_multiplied(index[0], now)
                continue
            then = max(now, self._floor[index])
            self._note("work", index, self._starts[index], then, "work")
            if then > now:
                self._at(then, lambda t, i=index: self._go(i, t))  # type: ignore[misc]
            else:
                self._go(index, now)

    # -- barriers

    def _contribute(self, key: tuple[int, int], now: float) -> None:
        self._latest[key] = max(self._latest[key], now)
        self._missing[key] -= 1
        if self._missing[key]:
            return
        mbarrier = key[0] >> 56 == 0
        warps = self._launch.contributions[key]
        end = self._latest[key] + (self._m.hand_over if mbarrier else self._m.meet(warps))
        self._phase_end[key] = end
        for index, since, item in self._waiting.pop(key, ()):
            self._waited(index, "barrier", item.object, since, end)
            self._at(end, lambda then, i=index: self._go(i, then))  # type: ignore[misc]

    def _wait(self, index: int, item: Wait, now: float) -> bool:
        key = item.object, item.phase
        if key not in self._launch.contributions:
            return False  # the phase before the first
        end = self._phase_end.get(key)
        if end is None:
            self._waiting[key].append((index, now, item))
            return True
        if end <= now:
            return False
        self._waited(index, "barrier", item.object, now, end)
        self._at(end, lambda then: self._go(index, then))
        return True

    def _waited(self, index: int, kind: str, what: int, since: float, end: float) -> None:
        self._waits[kind, what] += end - since
        self._note("wait", index, since, end, f"{kind} {what:#x}")

    # -- products

    def _multiply(self, index: int, item: Multiply, now: float) -> None:
        w = self._warps[index]
        group = w.cta, w.warp // WARPGROUP
        key = (*group, item.order)
        self._issued[key] += 1
        if self._issued[key] < WARPGROUP:
            return
        sm = self._sms[self._sm_of[index]]
        if group not in sm.queues:
            sm.queues[group] = deque()
            sm.turn.append(group)
        sm.queues[group].append((item.order, item.n, item.from_registers))
        self._start_multiply(sm, now)

    def _start_multiply(self, sm: _Sm, now: float) -> None:
        if sm.multiplying:
            return
        for _ in range(len(sm.turn)):
            group = sm.turn[0]
            sm.turn.rotate(-1)
            if sm.queues[group]:
                break
        else:
            return
        order, n, from_registers = sm.queues[group].popleft()
        clocks = self._m.multiply(n, from_registers)
        reading = self._m.operands(n, from_registers) * self._m.wavefront
        sm.shared = max(sm.shared, now) + reading
        self._busy["tensor cores"] += clocks
        self._busy["shared memory"] += reading
        late = self._m.multiply_latency(from_registers)
        product = sm.multiplying = _Product((*group, order), late, floor=sm.shared)
        units = tuple(clocks if unit == "dispatch" else 0.0 for unit in UNITS)
        for quarter in sm.quarters:
            quarter.advance(now)
            quarter.active[sm, product.key] = [1.0, clocks, units]
            self._settle(quarter, now)

    def _part_multiplied(self, sm: _Sm, now: float) -> None:
        """A quarter has done its part of the product."""
        product = sm.multiplying
        assert product
        product.left -= 1
        if not product.left:
            if product.floor > now:
                self._at(product.floor, lambda then: self._multiplied(sm, then))
            else:
                self._multiplied(sm, now)

    def _multiplied(self, sm: _Sm, now: float) -> None:
        product, sm.multiplying = sm.multiplying, None
        assert product
        end = now + product.late
        self._done[product.key] = end
        for index, since, insn in self._await_multiply.pop(product.key, ()):
            self._waited(index, "wgmma", insn, since, end)
            self._at(end, lambda then, i=index: self._go(i, then))  # type: ignore[misc]
        self._start_multiply(sm, now)

    # -- tcgen05

    def _tensor(self, sm: _Sm, now: float) -> None:
        """Start what comes next in the queue of a tensor core, or of a pair's."""
        core = self._m.tensor
        assert core, "a recording with tcgen05, and a GPU without"
        while sm.tensor and not sm.tensor_busy:
            item = sm.tensor.popleft()
            if isinstance(item, Commit):
                self._signal(item.number, now + max(0.0, sm.tensor_late - self._m.hand_over))
                continue
            sms = [sm]
            if item.pair is not None and item.pair in self._places:
                sms.append(self._sms[self._places[item.pair]])
            if isinstance(item, Product):
                clocks, reading = core.multiply(item), core.operands(item)
                sm.tensor_late = core.late(item)
            else:
                clocks, reading = core.copy(item.nbytes), item.nbytes / WAVEFRONT_BYTES
            end = now + clocks
            for each in sms:
                each.shared = max(each.shared, now) + reading * self._m.wavefront
                end = max(end, each.shared)
                self._busy["shared memory"] += reading * self._m.wavefront
                self._busy["tensor cores"] += clocks
            sm.tensor_busy = True
            self._at(end, lambda then: self._tensor_done(sm, then))

    def _tensor_done(self, sm: _Sm, now: float) -> None:
        sm.tensor_busy = False
        self._tensor(sm, now)

    def _access_tensor_memory(self, index: int, item: TensorMemory, now: float) -> None:
        core = self._m.tensor
        assert core, "a recording with tcgen05, and a GPU without"
        load = item.kind == "tcgen05.ld"
        rate, latency = (
            (core.load_rate, core.load_latency) if load else (core.store_rate, core.store_latency)
        )
        sm, quarter = self._sms[self._sm_of[index]], self._warps[index].warp % QUARTERS
        sm.tensor_memory[quarter] = max(sm.tensor_memory[quarter], now) + item.nbytes / rate
        self._busy["tensor memory"] += item.nbytes / rate / QUARTERS
        self._tensor_memory_until[index, item.kind] = sm.tensor_memory[quarter] + latency

    def _signal(self, number: int, when: float) -> None:
        for key in self._launch.signals.get(number, ()):
            self._at(when, lambda then, k=key: self._contribute(k, then))  # type: ignore[misc]

    # -- copies

    def _copy(self, index: int, item: Copy, now: float) -> None:
        sm = self._sms[self._sm_of[index]]
        m = self._m
        if item.kind == "signal":
            end = now
            earlier = self._own.get((index, "cp.async"))
            if earlier:
                end = max(now, *(e for _, e, _ in earlier))
        elif item.kind == "query":
            assert m.tensor, "a recording with cluster launch control, and a GPU without"
            end = now + m.tensor.query
        elif item.kind in ("load", "cp.async"):
            rate, latency = (
                (m.memory_rate, m.memory_latency) if item.missed else (m.l2_rate, m.l2_latency)
            )
            sm.port = max(sm.port, now) + item.nbytes / rate
            self._busy["L2"] += item.nbytes / m.l2_rate
            if item.missed:
                self._busy["memory"] += item.nbytes / m.memory_rate
            end = sm.port + latency
            for cta in item.also:
                if cta in self._places:
                    other = self._sms[self._places[cta]]
                    other.port = max(other.port, now) + item.nbytes / rate
                    self._busy["L2"] += item.nbytes / m.l2_rate
                    end = max(end, other.port + latency)
            if item.kind == "cp.async":
                self._own[index, "cp.async"].append((item.order, end, end))
        else:
            rate = m.store_rate if item.kind == "store" else m.add_rate
            sm.out = max(sm.out, now) + item.nbytes / rate
            self._busy["stores"] += item.nbytes / rate
            until = sm.out + m.store_latency
            self._written[index] = until
            self._own[index, "bulk"].append((item.order, until, until))
            return
        self._signal(item.number, end)

    def _await(self, index: int, item: Await, now: float) -> bool:
        if item.kind == "wgmma":
            w = self._warps[index]
            key = w.cta, w.warp // WARPGROUP, item.order
            end = self._done.get(key) if item.order else 0.0  # the first product is number 1
            if end is None:
                self._await_multiply[key].append((index, now, item.insn))
                return True
        elif item.kind.startswith("tcgen05"):
            end = self._tensor_memory_until[index, item.kind]
        else:
            kind = "cp.async" if item.kind == "cp.async" else "bulk"
            which = 2 if item.kind == "bulk read" else 1
            ends = [op[which] for op in self._own[index, kind] if op[0] <= item.order]
            end = max(ends, default=0.0)
        if end <= now:
            return False
        self._waited(index, item.kind, item.insn, now, end)
        self._at(end, lambda then: self._go(index, then))
        return True


def simulate(
    launch: LaunchItems,
    machine: Machine,
    places: Mapping[int, int],
    *,
    timeline: bool = False,
) -> Result:
    """Simulate the CTAs of `places` on the SMs that it gives. See `Simulator`."""
    return Simulator(launch, machine, places, timeline=timeline).run()
