"""Working kernels with a call of each, and edits of their PTX that plant bugs.

A kernel is recorded once: its real host code runs, and every launch is kept with its parameters and
the memory it found. `Recorded.run` then plays one launch again, of the same PTX or of a changed one.

An edit keeps the number of lines, so that a line of the changed text is the same line of the
original; lines count from 1. An instruction that is taken out leaves a comment.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cute_attn.emulator import Finding, machine
from cute_attn.emulator.host import HostFunction, Launch
from cute_attn.emulator.machine import Machine, Run
from cute_attn.emulator.program import Program

# -- PTX text -------------------------------------------------------------------------------------


class Ptx:
    """A PTX text and its lines; every edit returns a new text."""

    def __init__(self, text: str):
        self.text = text
        self.lines = text.split("\n")

    def __getitem__(self, line: int) -> str:
        return self.lines[line - 1]

    def all(self, pattern: str, first: int = 1, last: int | None = None) -> list[int]:
        """Lines from `first` to `last` that match `pattern`, ignoring comments."""
        search = re.compile(pattern).search
        end = len(self.lines) if last is None else last
        return [n for n in range(first, end + 1) if search(self[n].split("//")[0])]

    def one(self, pattern: str, first: int = 1, last: int | None = None, nth: int = 0) -> int:
        """The nth of these lines, which must exist."""
        found = self.all(pattern, first, last)
        assert found, f"no line matches {pattern!r}"
        return found[nth]

    def before(self, pattern: str, line: int) -> int:
        """The last line before `line` that matches."""
        return self.one(pattern, 1, line - 1, -1)

    def after(self, pattern: str, line: int) -> int:
        """The first line after `line` that matches."""
        return self.one(pattern, line + 1)

    def marked(self, name: str) -> list[int]:
        """Lines with the mark `// @name`."""
        found = [n for n, text in enumerate(self.lines, 1) if text.endswith(f"// @{name}")]
        assert found, f"no line is marked {name!r}"
        return found

    def mark(self, name: str) -> int:
        """The only line with a mark."""
        (line,) = self.marked(name)
        return line

    def with_line(self, line: int, text: str) -> Ptx:
        assert "\n" not in text and text != self[line], text
        return Ptx("\n".join([*self.lines[: line - 1], text, *self.lines[line:]]))

    def drop(self, *lines: int) -> Ptx:
        """The text without these instructions. A wait for an mbarrier becomes "complete"."""
        changed = self
        for line in lines:
            wait = re.match(r"\s*mbarrier\.\w+_wait\S*\s+([%\w]+)\s*,", self[line])
            instead = f"setp.eq.u32 {wait[1]}, 0, 0; " if wait else ""
            changed = changed.with_line(line, f"{instead}// dropped: {self[line].strip()}")
        return changed

    def double(self, line: int) -> Ptx:
        """The text with an instruction doubled on the same line."""
        return self.with_line(line, f"{self[line].split('//')[0]} {self[line].strip()}")

    def swap(self, line: int, pattern: str, replacement: str) -> Ptx:
        """The text with a replacement in one line; the pattern must match once."""
        text, count = re.subn(pattern, replacement, self[line])
        assert count == 1, f"{count} matches of {pattern!r} in {self[line]!r}"
        return self.with_line(line, text)

    def insert(self, line: int, text: str, *, behind: bool = False) -> Ptx:
        """The text with instructions inserted before or after those of a line."""
        code, slashes, comment = self[line].partition("//")
        parts = (code, text) if behind else (text, code)
        return self.with_line(line, " ".join(parts) + slashes + comment)

    def changed_operand(self, line: int, operand: str, opcode: str, by: int) -> Ptx:
        """The text with a 32-bit operand of one instruction replaced by `opcode operand, by`."""
        pattern = re.escape(operand) + r"(?!\w)"
        code, slashes, comment = self[line].partition("//")
        changed, count = re.subn(pattern, "planted", code)
        assert count == 1, f"{count} operands {operand!r} in {self[line]!r}"
        return self.with_line(
            line,
            f"{{ .reg .b32 planted; {opcode} planted, {operand}, {by}; {changed} }}"
            f"{slashes}{comment}",
        )


class Edged(Ptx):
    """A kernel's PTX, and the mbarriers in it.

    Attributes:
        mbarriers: of each edge, the offset in shared memory and the bytes.
    """

    def __init__(self, text: str, mbarriers: dict[str, tuple[int, int]]):
        super().__init__(text)
        self.mbarriers = mbarriers

    def of(self, edge: str, pattern: str) -> list[int]:
        """The lines that match the pattern, at an mbarrier of that edge."""
        found = [line for line in self.all(pattern) if self._edge(line) == edge]
        assert found, f"no {pattern!r} of {edge}"
        return found

    def _edge(self, line: int) -> str | None:
        """The edge whose mbarrier an instruction has as its last address."""
        register, offset = re.findall(r"\[(%\w+)(?:\+(\d+))?\]", self[line])[-1]
        if offset:
            return self._at(int(offset))
        waiting = [(register, line)]  # registers that its address depends on
        for name, before in itertools.islice(waiting, 20):
            definition = self.all(rf"^\s*[\w.:]+\s+{re.escape(name)}\s*,", 1, before - 1)
            if definition:
                operands = self[definition[-1]].split(",", 1)[1]
                for constant in re.findall(r"(?<![\w%.-])\d+\b", operands):
                    if edge := self._at(int(constant)):
                        return edge
                waiting += [(r, definition[-1]) for r in re.findall(r"%r\d+", operands)]
        return None

    def _at(self, offset: int) -> str | None:
        found = (e for e, (first, n) in self.mbarriers.items() if first <= offset < first + n)
        return next(found, None)


# -- patterns of lines ----------------------------------------------------------------------------

MMA = r"tcgen05\.mma"
LOAD = r"cp\.async\.bulk\.tensor\S*\.shared::c\w+\.global"
STORE = r"cp\.async\.bulk\.tensor\S*\.global\.shared"
TRY = r"mbarrier\.try_wait"
LOOP = rf"{TRY}\.parity\.shared"  # in a loop of its own
PEEK = rf"{TRY}\.parity\.acquire"  # a look beforehand, with the loop skipped where it succeeds
RELEASE = r"mbarrier\.arrive\.shared(::cluster)?\.b64"
EXPECT = r"mbarrier\.arrive\.expect_tx"
STMATRIX = r"^\s*stmatrix"
TMEM_LOAD = r"^\s*tcgen05\.ld"
TMEM_STORE = r"^\s*tcgen05\.st"
COMMIT_MMA = r"^\s*tcgen05\.commit"


def operand(p: Ptx, line: int) -> str:
    """The operand after the address, or the last one."""
    found = re.search(r"\],\s*(%\w+)|,\s*(%\w+);", p[line])
    assert found is not None, p[line]
    return found[1] or found[2]


def address(p: Ptx, line: int) -> str:
    found = re.search(r"\[.*\]", p[line])
    assert found is not None, p[line]
    return found[0]


# -- kernels that work ----------------------------------------------------------------------------

Span = tuple[int, int, str]  # address, bytes, name


@dataclass(frozen=True)
class _Snapshot:
    spans: tuple[Span, ...]
    content: tuple[bytes, ...]

    @classmethod
    def take(cls, spans: Sequence[Span]) -> _Snapshot:
        return cls(tuple(spans), tuple(ctypes.string_at(base, size) for base, size, _ in spans))

    def restore(self) -> None:
        for (base, size, _), content in zip(self.spans, self.content, strict=True):
            ctypes.memmove(base, content, size)


@dataclass
class Recorded:
    """One launch of a kernel that works.

    Attributes:
        text: the PTX of its module; kernel: its symbol there.
        spans: the global memory that it may touch.
        num_sms: of the machines that run it.
    """

    text: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared: int
    parameters: bytes
    spans: tuple[Span, ...]
    num_sms: int = 4
    _before: _Snapshot | None = None
    _keep: list[Any] = field(default_factory=list)

    def program(self, text: str | None = None) -> Program:
        return machine.programs(self.text if text is None else text)[self.kernel]

    def run(self, program: Program, **options: Any) -> Run:
        """Repeat the launch with this program, on the memory contents of the recorded launch."""
        assert self._before is not None
        self._before.restore()
        emulator = Machine(num_sms=self.num_sms, **options)
        for base, size, name in self.spans:
            emulator.add_region(base, size, name)
        return emulator.launch(
            program, self.grid, self.block, self.cluster, self.dynamic_shared, self.parameters
        )

    def content(self) -> list[bytes]:
        """The contents of the memory after a run."""
        return [ctypes.string_at(base, size) for base, size, _ in self.spans]


def record(
    image: bytes,
    text: str,
    arguments: Sequence[Any],
    spans: Sequence[Span],
    *,
    function: str = "k",
    num_sms: int = 4,
) -> list[Recorded]:
    """Run a compiled function, and keep its launches.

    Args:
        image, text: its object file and PTX.
        arguments: of the call; CPU tensors stand for CUDA ones.
        spans: the memory that its kernels may touch.
    """
    programs = machine.programs(text)
    kept: list[Recorded] = []

    def launched(launch: Launch) -> None:
        program = programs[launch.kernel]
        block = bytearray(program.parameter_bytes)
        for i, parameter in enumerate(program.parameters):
            value = ctypes.string_at(launch.arguments[i], parameter.bytes)
            block[parameter.offset : parameter.offset + parameter.bytes] = value
        recorded = Recorded(
            text,
            launch.kernel,
            launch.grid,
            launch.block,
            launch.cluster,
            launch.dynamic_shared,
            bytes(block),
            tuple(spans),
            num_sms,
            _Snapshot.take(spans),
            [arguments],
        )
        kept.append(recorded)
        run = recorded.run(program, checks=())
        assert not run.stopped, run.findings

    target = re.search(r"^\s*\.target\s+sm_(\d+)(\d)", text, re.MULTILINE)
    assert target is not None
    capability = (int(target[1]), int(target[2]))
    host = HostFunction(image, function, launched, num_sms=num_sms, capability=capability)
    host(*arguments)
    return kept


def record_capture(captured: Any) -> Iterator[Recorded]:
    """The launches of all calls in a capture of a peer, in order."""
    memory = captured.materialise(captured.random_inputs(0))
    spans = [(*memory.address(name), name) for name in captured.buffers]
    for call in captured.calls:
        for recorded in record(
            call.function.object_file.read_bytes(),
            call.function.ptx,
            memory.arguments(call),
            spans,
        ):
            recorded._keep.append(memory)
            yield recorded


# -- bugs -----------------------------------------------------------------------------------------

FAIR, RANDOM, ADVERSARIAL, STARVING = range(4)
SEEDS = [(FAIR, 0), (RANDOM, 0), (ADVERSARIAL, 0)]
MORE_SEEDS = [
    *((RANDOM, seed) for seed in range(1, 23)),
    *((ADVERSARIAL, seed) for seed in range(1, 9)),
]
STARVING_SEEDS = [(STARVING, seed) for seed in range(8)]

Planted = tuple[Ptx, Iterable[int]]  # the text with the bug, and the lines that it shows at


@dataclass(frozen=True)
class Bug:
    """A bug and how it is reported.

    Attributes:
        kernel: the key of the kernel that it is planted in.
        plant: makes the text with the bug, and tells its lines.
        checks: names of checks, one of which must report it; "value" stands for a wrong result, of
            bugs that break no rule.
        severity: of that finding, or "error".
    """

    name: str
    kernel: str
    plant: Callable[[Ptx], Planted]
    checks: tuple[str, ...]
    severity: str = "error"


def name_of(bug: Bug) -> str:
    """The bug's name among the bugs of all kernels."""
    return f"{bug.kernel}: {bug.name}"


def reported(bug: Bug, run: Run, lines: set[int], right: bool) -> bool:
    def names(finding: Finding) -> set[int | None]:
        if finding.check == "deadlock":
            return {int(line) for line in re.findall(r"PTX line (\d+)", finding.message)}
        return {finding.line, finding.other_line}

    if "value" in bug.checks and not right:
        return True
    return any(
        finding.check in bug.checks
        and finding.severity in (bug.severity, "error")
        and not lines.isdisjoint(names(finding))
        for finding in run.findings
    )


Prepared = Callable[[str | None], Callable[[int, int], tuple[Run, bool]]]


def launch_recorded(kernel: Recorded) -> Prepared:
    kernel.run(kernel.program())
    expected = kernel.content()

    def prepare(text: str | None) -> Callable[[int, int], tuple[Run, bool]]:
        program = kernel.program(text)

        def run(schedule: int, seed: int) -> tuple[Run, bool]:
            done = kernel.run(program, schedule=schedule, seed=seed)
            return done, kernel.content() == expected

        return run

    return prepare


def found_on(
    bug: Bug, kernel: tuple[Ptx, Prepared], seeds: Iterable[tuple[int, int]]
) -> Iterator[str]:
    """Yield the findings of each schedule and seed that misses the bug."""
    ptx, prepare = kernel
    changed, at = bug.plant(ptx)
    lines = set(at)
    run = prepare(changed.text)
    for schedule, seed in seeds:
        done, right = run(schedule, seed)
        if not reported(bug, done, lines, right):
            found = "\n".join(map(str, done.findings)) or f"nothing; the result is right: {right}"
            yield f"{(schedule, seed)}: {found}"


# -- bugs of Hopper's pipelines: a load warp hands tiles to consumer warpgroups --------------------

WAIT = r"mbarrier\.(test|try)_wait"
ARRIVE = r"mbarrier\.arrive\.shared"
WGMMA = r"^\s*wgmma\.mma_async"
SHARED = r"^\s*(@%p\d+ )?(ld|st)\.shared"


class Planter:
    """The bugs of a kernel, planted by decorated functions, which tell the lines that they show
    at."""

    def __init__(self, kernel: str):
        self.kernel = kernel
        self.bugs: list[Bug] = []

    def __call__(
        self, name: str, checks: str, severity: str = "error"
    ) -> Callable[[Callable[[Any], Planted]], None]:
        """Decorates what plants the bug of this name; checks are separated by spaces."""

        def add(plant: Callable[[Any], Planted]) -> None:
            self.bugs.append(Bug(name, self.kernel, plant, tuple(checks.split()), severity))

        return add


def lines_of(p: Ptx, *patterns: str) -> list[int]:
    return [line for pattern in patterns for line in p.all(pattern)]


def all_waits(p: Ptx) -> list[int]:
    """Waits for mbarriers, with the branches of their loops."""
    return [line + n for line in p.all(WAIT) for n in range(4)]


def bugs_of_an_edge(
    planted: Planter, name: str, *more: str, nth: int = 0, implied: bool = False
) -> None:
    """At the mbarriers of what the load warp hands to the consumers: "q", "k", "v" or "work".
    `more` are patterns of lines that touch it too; `nth` numbers a wait for it; `implied`: other
    edges imply that wait, which may be left out therefore."""
    full, empty = f"{name}_full", f"{name}_empty"
    touched = ((SHARED,) if name == "work" else (LOAD, WGMMA)) + more

    if not implied:

        @planted(f"wait for {full} dropped", "race uninitialised deadlock")
        def _(p: Edged) -> Planted:
            return p.drop(*p.of(full, WAIT)), [*lines_of(p, *touched), *all_waits(p)]

    @planted(f"release of {empty} dropped", "deadlock")
    def _(p: Edged) -> Planted:
        return p.drop(*p.of(empty, ARRIVE)), all_waits(p)

    @planted(f"parity of the wait for {full} wrong", "deadlock race uninitialised barrier value")
    def _(p: Edged) -> Planted:
        line = [x for x in p.of(full, WAIT) if re.search(r"\], %r", p[x])][nth]
        changed = p.changed_operand(line, operand(p, line), "xor.b32", 1)
        return changed, [*all_waits(p), *lines_of(p, *touched, ARRIVE)]


def bug_of_a_stage(planted: Planter, name: str, *more: str) -> None:
    """The wait for a stage to be empty."""

    @planted(f"wait for {name}_empty dropped", "race barrier")
    def _(p: Edged) -> Planted:
        lines = lines_of(p, LOAD, WGMMA, EXPECT, ARRIVE, *more)
        return p.drop(*p.of(f"{name}_empty", WAIT)), lines


def bug_of_products(planted: Planter, nth: int, name: str) -> None:
    """The nth wait for products in the text."""

    @planted(f"wait for {name} dropped", "wgmma race")
    def _(p: Edged) -> Planted:
        line = p.one(r"wgmma\.wait_group", nth=nth)
        return p.drop(line), range(1, len(p.lines))  # whatever touches an accumulator next
