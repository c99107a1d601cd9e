"""What each warp of a recorded launch does, as items for the simulator."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..emulator.library import engine
from ..emulator.operands import Address, Name, Negated, Operand, Pair, TensorAddress, Vector
from ..emulator.program import Program
from ..emulator.recording import KINDS, Recording
from .costs import UNITS, Cost

(
    RUN, ARRIVE, WAIT, POLL, ISSUE, COPY, ORDER, AWAIT, SHARED, GLOBAL, ATOMIC, SIGNAL, TENSOR,
    DELIVER,
) = range(14)  # fmt: skip
assert KINDS[DELIVER] == "deliver"

LINE, SECTOR = 128, 32  # bytes of the L2's lines, and of what an access moves


class Work(NamedTuple):
    """Instructions between two points at which warps meet.

    Attributes:
        units: clocks of each of `UNITS`.
        latency: the shortest time, alone on the SM.
        wavefronts: of shared memory.
        loaded, missed: bytes of global memory that are loaded, and that the L2 does not hold.
        stored, added: bytes that are stored, and added atomically.
        runs: the PTX instructions: first and number, of each run.
        fences: fences of the asynchronous proxy behind stores to shared memory.
    """

    units: tuple[float, ...]
    latency: float
    wavefronts: int
    loaded: int
    missed: int
    stored: int
    added: int
    runs: tuple[tuple[int, int], ...] = ()
    fences: int = 0


class Arrive(NamedTuple):
    """`fence`: at a cluster's barrier, after a fence."""

    object: int
    phase: int
    fence: bool = False


class Wait(NamedTuple):
    object: int
    phase: int
    insn: int


class Copy(NamedTuple):
    """An asynchronous copy. `kind` is "load", "store", "add", "cp.async" or "signal"; `number` is
    its own, `order` that of its bulk group, or among the warp's cp.async. A multicast moves the
    bytes to the CTAs `also` as well. A "query" asks for another cluster's work."""

    kind: str
    number: int
    nbytes: int
    missed: bool
    order: int
    also: tuple[int, ...] = ()


class Multiply(NamedTuple):
    """A warp's share of a wgmma, the `order`-th of its warpgroup."""

    order: int
    n: int
    from_registers: bool
    insn: int


class Product(NamedTuple):
    """A tcgen05.mma of `m` x `n` x `k`, the `number`-th operation. `kind` counts as in
    engine/tcgen05_mma.c from 1 on: f16, tf32, f8f6f4, i8, mxf8f6f4, mxf4, mxf4nvf4. `pair` is the
    other CTA of a cta_group::2, else None."""

    number: int
    m: int
    n: int
    k: int
    kind: int
    from_tensor_memory: bool
    pair: int | None


class TensorCopy(NamedTuple):
    """A tcgen05.cp of so many bytes to the tensor memory of a CTA, or of both of a pair."""

    number: int
    nbytes: int
    pair: int | None


class Commit(NamedTuple):
    """A tcgen05.commit, which signals when the products and copies before it are done."""

    number: int


class TensorMemory(NamedTuple):
    """A warp's "tcgen05.ld" or "tcgen05.st" of so many bytes."""

    kind: str
    nbytes: int


class Await(NamedTuple):
    """A wait for the warp's own operations: "wgmma", "bulk", "bulk read", "cp.async",
    "tcgen05.ld" or "tcgen05.st"."""

    kind: str
    order: int
    insn: int


@dataclass
class WarpItems:
    """The items of a warp, and how many instructions it executes."""

    cta: int
    warp: int
    items: list[Any] = field(default_factory=list)
    instructions: int = 0


@dataclass
class LaunchItems:
    """The items of all recorded warps of a launch.

    Attributes:
        signals: what an asynchronous operation signals, by its number.
        contributions: arrivals and signals of each (object, phase).
        memory_share: bytes that memory is read for, of each byte that a CTA misses.
        code: of each PTX instruction, the lines of machine code of each of its copies.
    """

    warps: list[WarpItems]
    signals: Mapping[int, list[tuple[int, int]]]
    contributions: Counter[tuple[int, int]]
    memory_share: float
    code: Sequence[tuple[tuple[int, ...], ...]] = ()

    def sharers(self, sms: int, ctas: int) -> tuple[float, float]:
        """How many SMs share the rates of loads and of stores with the busiest CTA's, as if all had
        as many bytes: at most `sms`, for a grid of `ctas`."""
        loads: Counter[int] = Counter({w.cta: 0 for w in self.warps})
        stores: Counter[int] = Counter({w.cta: 0 for w in self.warps})
        for w in self.warps:
            for item in w.items:
                if isinstance(item, Work):
                    loads[w.cta] += item.loaded
                    stores[w.cta] += item.stored + item.added
                elif isinstance(item, Copy):
                    out = item.kind in ("store", "add")
                    (stores if out else loads)[w.cta] += item.nbytes
        found = []
        for each in (loads, stores):
            most = max(each.values(), default=0)
            mean = sum(each.values()) / max(1, len(each))
            found.append(min(sms, max(1.0, ctas * mean / most)) if most else float(sms))
        return found[0], found[1]

    def alike(self) -> dict[int, int]:
        """For each CTA, the first CTA whose warps do the same."""
        keys: dict[int, list[Any]] = defaultdict(list)
        for w in self.warps:
            keys[w.cta].append((w.warp, tuple(map(_anonymous, w.items))))
        first: dict[Any, int] = {}
        return {cta: first.setdefault(tuple(key), cta) for cta, key in sorted(keys.items())}


def _anonymous(item: Any) -> Any:
    """An item without the numbers of its CTA and its operations."""
    if isinstance(item, Arrive | Wait):
        return type(item).__name__, item.object & ~(0xFFFFFF << 32), item.phase
    if isinstance(item, Copy | Product | TensorCopy | Commit):
        return item._replace(number=0)
    return item


class Latencies(NamedTuple):
    """Clocks from an instruction's issue until its result may be used."""

    arithmetic: float
    special: float
    shuffle: float
    mma: float
    shared: float
    matrix: float
    from_l2: float
    from_memory: float


class Memory:
    """The lines of global memory that the L2 holds, since earlier launches have touched them.

    CTAs that run at the same time all wait for a line's first load, but memory is read only once:
    `shared` is the share of missed bytes that memory is read for.
    """

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._touched: dict[int, set[int]] = defaultdict(set)  # by CTA, in this launch
        self._missed = 0
        self._sizes: dict[int, int] = {}

    def missed(self, address: int, nbytes: int, cta: int) -> bool:
        """Whether an access waits for memory: the CTA's first to a line that the L2 does not
        hold."""
        first, last = address // LINE, (address + max(nbytes, 1) - 1) // LINE
        mine = self._touched[cta]
        fresh = (first not in self._held and first not in mine) or (
            last not in self._held and last not in mine
        )
        # A box of several rows counts as its first line; its other rows belong to the same box.
        mine.update((first, last))
        if fresh:
            self._missed += nbytes
            self._sizes[first] = nbytes
        return fresh

    @property
    def shared(self) -> float:
        """Bytes of distinct missed lines, over all missed bytes."""
        return min(1.0, sum(self._sizes.values()) / self._missed) if self._missed else 1.0

    def end_launch(self) -> None:
        """The L2 holds what the launch has touched."""
        for lines in self._touched.values():
            self._held |= lines
        self._touched.clear()
        self._sizes.clear()
        self._missed = 0


def launch_items(
    recording: Recording, costs: Sequence[Cost], latencies: Latencies, memory: Memory
) -> LaunchItems:
    """The items of a recording's warps."""
    import numpy as np

    step = np.dtype(
        [("kind", "i4"), ("cta", "i4"), ("warp", "i4"), ("insn", "i4"),
         ("a", "u8"), ("b", "u8"), ("c", "u8")]
    )  # fmt: skip
    steps = np.frombuffer(recording.steps, step)
    readers = _Instructions(recording.program, costs, latencies)
    streams: dict[tuple[int, int], _Stream] = {}
    signals: dict[int, list[tuple[int, int]]] = defaultdict(list)
    contributions: Counter[tuple[int, int]] = Counter()
    for kind, cta, warp, insn, a, b, c in steps.tolist():
        if kind == SIGNAL:
            signals[c].append((a, b))
            contributions[a, b] += 1
            continue
        stream = streams.get((cta, warp))
        if stream is None:
            stream = streams[cta, warp] = _Stream(WarpItems(cta, warp), readers, memory)
        stream.step(kind, insn, a, b, c)
        if kind == ARRIVE:
            contributions[a, b] += 1
    for stream in streams.values():
        stream.finish()
    warps = [stream.out for _, stream in sorted(streams.items())]
    code = [cost.lines for cost in costs]
    launch = LaunchItems(warps, signals, contributions, memory.shared, code)
    memory.end_launch()
    return launch


class _Stream:
    """Turns a warp's steps into items."""

    def __init__(self, out: WarpItems, readers: _Instructions, memory: Memory) -> None:
        self.out = out
        self._readers = readers
        self._memory = memory
        self._runs: list[tuple[int, int]] = []
        self._wavefronts = self._loaded = self._missed = self._stored = self._added = 0
        self._cold: list[int] = []
        self._polled: dict[int, tuple[int, int]] = {}

    def step(self, kind: int, insn: int, a: int, b: int, c: int) -> None:
        if kind == RUN:
            if self._runs and sum(self._runs[-1]) == insn:
                self._runs[-1] = (self._runs[-1][0], self._runs[-1][1] + a)
            else:
                self._runs.append((insn, a))
            self.out.instructions += a
        elif kind == SHARED:
            self._wavefronts += a
        elif kind == GLOBAL:
            self._global(insn, a * SECTOR, b)
        elif kind == ATOMIC:
            self._added += a
            self._memory.missed(b, a, self.out.cta)
        elif kind == POLL:
            self._repeat(insn)
            self._polled.setdefault(insn, (len(self.out.items), len(self._runs)))
        elif kind == WAIT:
            self._repeat(insn)
            self._polled.pop(insn, None)
            self._emit(Wait(a, b, insn))
        elif kind == ARRIVE:
            last = self.out.items[-1] if self.out.items and not self._runs else None
            opcode = self._readers.opcode(insn)
            fence = opcode.startswith("barrier.cluster.arrive") and "relaxed" not in opcode
            if last == Arrive(a, b, fence):  # further lanes of one instruction
                self.out.items.append(Arrive(a, b))
            else:
                self._emit(Arrive(a, b, fence))
        elif kind == ISSUE:
            opcode = self._readers.opcode(insn)
            if opcode.startswith("tcgen05.commit"):
                self._emit(Commit(a))
            else:
                query = opcode.startswith("clusterlaunchcontrol")
                self._emit(Copy("query" if query else "signal", a, 0, False, 0))
        elif kind == TENSOR:
            self.out.items[-1] = self._tensor(insn, a, b, c)
        elif kind == DELIVER:
            last = self.out.items[-1]
            self.out.items[-1] = last._replace(also=(*last.also, b))
        elif kind == COPY:
            opcode = self._readers.opcode(insn)
            number = self.out.items[-1].number
            what = "load" if c == 0 else "store"
            if opcode.startswith("cp.reduce"):
                what = "add"
            elif not opcode.startswith("cp.async.bulk"):
                what = "cp.async"
            missed = b != 0 and self._memory.missed(b, a, self.out.cta)
            self.out.items[-1] = Copy(what, number, a, missed, c)
        elif kind == ORDER:
            last = self.out.items[-1]
            if last.kind == "cp.async":
                self.out.items[-1] = last._replace(order=a)
            else:
                self.out.items[-1] = Multiply(a, b, bool(c), insn)
        elif kind == AWAIT:
            opcode = self._readers.opcode(insn)
            if opcode.startswith("wgmma"):
                what = "wgmma"
            elif opcode.startswith("tcgen05.wait"):
                what = "tcgen05.st" if "::st" in opcode else "tcgen05.ld"
            elif "bulk" in opcode:
                what = "bulk read" if b else "bulk"
            else:
                what = "cp.async"
            self._emit(Await(what, a, insn))

    def _tensor(self, insn: int, a: int, b: int, c: int) -> Product | TensorCopy | TensorMemory:
        """The item of a tcgen05 instruction, which has been issued as the latest operation."""
        opcode, number = self._readers.opcode(insn), self.out.items[-1].number
        pair = c - 1 if c else None
        if opcode.startswith("tcgen05.mma"):
            m, n, k = (a >> shift & 0xFFFF for shift in (0, 16, 32))
            return Product(number, m, n, k, b & 0xFF, bool(b >> 8 & 1), pair)
        if opcode.startswith("tcgen05.cp"):
            return TensorCopy(number, a, pair)
        return TensorMemory(opcode[: len("tcgen05.ld")], a)

    def _global(self, insn: int, nbytes: int, address: int) -> None:
        if self._readers.opcode(insn).startswith("st"):
            self._stored += nbytes
            self._memory.missed(address, nbytes, self.out.cta)
            return
        self._loaded += nbytes
        if self._memory.missed(address, nbytes, self.out.cta):
            self._missed += nbytes
            self._cold.append(insn)

    def _repeat(self, insn: int) -> None:
        """Forget what came since an earlier failed test by the same instruction."""
        if insn in self._polled:
            items, runs = self._polled[insn]
            if len(self.out.items) == items:
                del self._runs[runs:]

    def _emit(self, item: Any) -> None:
        self._flush()
        self.out.items.append(item)

    def _flush(self) -> None:
        if not self._runs and not self._wavefronts and not self._loaded and not self._stored:
            return
        runs = tuple(self._runs)
        units, latency = self._readers.work(runs, tuple(self._cold))
        self.out.items.append(
            Work(units, latency, self._wavefronts, self._loaded, self._missed, self._stored,
                 self._added, runs, self._readers.fences(runs) if self._wavefronts else 0)
        )  # fmt: skip
        self._runs = []
        self._cold = []
        self._wavefronts = self._loaded = self._missed = self._stored = self._added = 0

    def finish(self) -> None:
        self._flush()


class _Instructions:
    """Costs of runs of a program's instructions."""

    def __init__(self, program: Program, costs: Sequence[Cost], latencies: Latencies) -> None:
        self._program = program
        self._costs = costs
        self._latencies = latencies
        self._known: dict[Any, tuple[tuple[float, ...], float]] = {}
        forms = engine().forms.forms
        self._edges = []
        self._fences = [
            number
            for number, ptx in enumerate(program.instructions)
            if ptx.opcode.startswith("fence.proxy.async")
        ]
        for ptx, form in zip(program.instructions, program.forms, strict=True):
            results = sum(t.startswith("d") for t in forms[form].signature.split())
            names = [list(_registers(o, id(ptx.scope))) for o in ptx.operands]
            written = [n for group in names[:results] for n in group]
            read = [n for group in names[results:] for n in group]
            if ptx.guard:
                read.append(_named(ptx.guard, id(ptx.scope)))
            if ptx.opcode.startswith(("wgmma.mma", "wgmma.wait", "tcgen05.ld")):
                written = read = []
            self._edges.append((written, read, self._latency(ptx.opcode)))

    def opcode(self, insn: int) -> str:
        return self._program.opcode(insn)

    def fences(self, runs: tuple[tuple[int, int], ...]) -> int:
        """How many fence.proxy.async the runs execute."""
        return sum(
            start <= fence < start + count for start, count in runs for fence in self._fences
        )

    def _latency(self, opcode: str) -> float:
        some = self._latencies
        for prefixes, clocks in (
            (("mov.", "cvt.u64", "cvta"), 0.0),
            (("ex2", "rcp", "lg2", "rsqrt", "sqrt", "tanh", "sin", "cos"), some.special),
            (("shfl", "vote", "redux", "match"), some.shuffle),
            (("mma.sync",), some.mma),
            (("ldmatrix",), some.matrix),
            (("ld.shared", "ld.volatile.shared", "atom.shared"), some.shared),
            (("ld.global", "ld.volatile.global", "ld.relaxed", "ld.acquire", "atom"), some.from_l2),
        ):
            if opcode.startswith(prefixes):
                return clocks
        return some.arithmetic

    def work(
        self, runs: tuple[tuple[int, int], ...], cold: tuple[int, ...]
    ) -> tuple[tuple[float, ...], float]:
        """Units and latency of runs of instructions; loads of `cold` come from memory."""
        key = runs, frozenset(cold)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._work(runs, key[1])
        return found

    def _work(
        self, runs: tuple[tuple[int, int], ...], cold: frozenset[int]
    ) -> tuple[tuple[float, ...], float]:
        units = [0.0] * len(UNITS)
        stall = longest = issued = latest = 0.0
        ready: dict[Any, float] = {}
        block, executed = -1, 1.0
        for start, count in runs:
            for index in range(start, start + count):
                cost = self._costs[index]
                if cost.block != block or index == start:
                    # The assembler reorders a block and its unrolled copies. Blocks issue in order.
                    executed = executed + 1 if cost.block == block else 1.0
                    if executed == 1 or executed > cost.copies:
                        issued, executed = latest, 1.0
                    block = cost.block
                for i, clocks in enumerate(cost.units):
                    units[i] += clocks
                stall += cost.stall
                written, read, latency = self._edges[index]
                if index in cold:
                    latency = self._latencies.from_memory
                begin = issued
                for name in read:
                    if (at := ready.get(name, 0.0)) > begin:
                        begin = at
                if begin > latest:
                    latest = begin
                end = begin + latency
                for name in written:
                    ready[name] = end
                if written and end > longest:
                    longest = end
        return tuple(units), max(stall, longest)


def _named(name: str, scope: int) -> Any:
    return name if name.startswith("%") else (name, scope)


def _registers(operand: Operand, scope: int) -> Iterator[Any]:
    if isinstance(operand, Name):
        yield _named(operand.name, scope)
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from _registers(element, scope)
    elif isinstance(operand, Pair):
        yield from _registers(operand.first, scope)
        yield from _registers(operand.second, scope)
    elif isinstance(operand, Address):
        yield from _registers(operand.base, scope)
    elif isinstance(operand, TensorAddress):
        yield from _registers(operand.address, scope)
        yield from _registers(operand.coordinates, scope)
    elif isinstance(operand, Negated):
        yield _named(operand.text.lstrip("!"), scope)
