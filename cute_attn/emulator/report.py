"""Reports of an emulator: launches, instructions, bytes, matrix operations, findings."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """An error, or a note, that a check found in a kernel's run.

    Attributes:
        check: the check that made the finding, such as "race"; `CHECKS` lists all checks.
        severity: "error", or "note" for code that is wrong by the specification but works on
            hardware as compiled today.
        message: what happened, in words.
        kernel: the kernel's symbol.
        line: the instruction's line in the PTX text.
        ptx: the text of that line.
        source: "file:line" of the Python source, if the PTX has line information.
        other_line: PTX line of the conflicting instruction, if any.
        other_ptx: the text of the conflicting instruction's line.
        other_source: "file:line" of the conflicting instruction.
        cta: linear index of the CTA that executed the instruction.
        warp: index in the CTA of the warp that executed the instruction.
        count: occurrences of this finding at the same instruction.
    """

    check: str
    severity: str
    message: str
    kernel: str
    line: int | None = None
    ptx: str = ""
    source: str | None = None
    other_line: int | None = None
    other_ptx: str = ""
    other_source: str | None = None
    cta: int | None = None
    warp: int | None = None
    count: int = 1

    def __str__(self) -> str:
        lines = [f"{self.check} ({self.severity}): {self.message}"]
        who = f"CTA {self.cta} warp {self.warp}, " if self.warp is not None else ""
        if self.line is not None:
            lines.append(f"  at {who}{_place(self.line, self.source)}: {self.ptx}")
        if self.other_line is not None:
            lines.append(f"  with {_place(self.other_line, self.other_source)}: {self.other_ptx}")
        if self.count > 1:
            lines.append(f"  {self.count} times")
        return "\n".join(lines)


def _place(line: int, source: str | None) -> str:
    return f"PTX line {line}" + (f" ({source})" if source else "")


# Checks whose findings follow from another error, if both findings name the same instruction.
_AFTERMATH = ("uninitialised",)


def causes(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Group findings that share an instruction, directly or through other findings.

    The findings of a group mostly have one cause. The first finding of a group is its root. Errors
    come before notes, findings of `_AFTERMATH` come last among errors, and otherwise earlier
    findings come first.
    """
    lists: list[list[Finding]] = []
    for found in findings:
        lines = _lines([found])
        same = [x for x in lists if lines & _lines(x)]
        lists = [x for x in lists if x not in same]
        lists.append([*itertools.chain.from_iterable(same), found])
    at = {id(found): i for i, found in enumerate(findings)}

    def rank(found: Finding) -> tuple[bool, bool, int]:
        return found.severity != "error", found.check in _AFTERMATH, at[id(found)]

    return sorted((sorted(x, key=rank) for x in lists), key=lambda x: at[id(x[0])])


def _lines(findings: Iterable[Finding]) -> set[tuple[str, int]]:
    named = ((f.kernel, line) for f in findings for line in (f.line, f.other_line))
    return {(kernel, line) for kernel, line in named if line is not None}


_NO_SOURCE = (
    "Compiled with CUTE_DSL_LINEINFO=1 in the environment, or --generate-line-info, a kernel has "
    "the lines of its Python source, and findings name them."
)


def by_cause(findings: Sequence[Finding]) -> list[str]:
    """The texts of findings: each root's full text, and short texts of the other findings."""
    lines = []
    for root, *others in causes(findings):
        lines.append(str(root))
        if others:
            lines.append(f"  {len(others)} more at these instructions, mostly of this cause:")
        for f in others:
            lines.append(f"    {f.check} ({f.severity}): {f.message}")
            if f.line is not None:
                other = f", with {_place(f.other_line, f.other_source)}" if f.other_line else ""
                lines.append(f"      at {_place(f.line, f.source)}{other}")
    if any(f.line is not None for f in findings) and not any(f.source for f in findings):
        lines.append(_NO_SOURCE)
    return lines


class FindingsError(RuntimeError):
    """A launch with findings of severity "error".

    Attributes:
        findings: all findings of the launch, including notes.
    """

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        errors = [f for f in findings if f.severity == "error"]
        super().__init__(f"{len(errors)} findings:\n" + "\n".join(by_cause(errors)))

    def __reduce__(self) -> tuple[type[FindingsError], tuple[list[Finding]]]:
        return type(self), (self.findings,)  # so that another process can raise it


@dataclass(frozen=True)
class LaunchRecord:
    """One launch.

    Attributes:
        kernel: the kernel's symbol.
        grid: CTAs in x, y and z.
        block: threads of a CTA in x, y and z.
        cluster: CTAs of a cluster in x, y and z.
        dynamic_shared: bytes of dynamic shared memory.
        instructions: warp-instructions executed.
        seconds: wall time of the emulation.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared: int
    instructions: int
    seconds: float


@dataclass
class Report:
    """The sum over all launches of an emulator.

    Attributes:
        launches: a record of each launch, in order.
        by_opcode: warp-instructions by opcode with its modifiers.
        by_warp: warp-instructions by the warp's index in its CTA, or its role's name.
        bytes: bytes moved, by path ("tma_load", "shared_store" ...).
        mma: number of matrix instructions and of floating-point operations, by kind and shape:
            `mma["wgmma bf16 m64n128k16"] == (count, flops)`.
        counters: the engine's other counters, such as shared-memory wavefronts and their ideal
            number.
        findings: findings of all launches, each once per pair of instructions.
        output: text that the kernels printed.
    """

    launches: list[LaunchRecord] = field(default_factory=list)
    by_opcode: Counter[str] = field(default_factory=Counter)
    by_warp: Counter[int | str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    mma: dict[str, tuple[int, int]] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    output: str = ""

    @property
    def instructions(self) -> int:
        """Warp-instructions executed."""
        return sum(launch.instructions for launch in self.launches)

    @property
    def errors(self) -> list[Finding]:
        """The findings of severity "error"."""
        return [f for f in self.findings if f.severity == "error"]

    @property
    def bank_conflicts(self) -> float:
        """Shared-memory wavefronts, divided by the fewest that these accesses can take; 1 is
        best."""
        return self._over_ideal("shared_wavefronts")

    @property
    def uncoalesced(self) -> float:
        """32-byte sectors of global memory touched, divided by the fewest for these bytes; 1 is
        best."""
        return self._over_ideal("global_sectors")

    def _over_ideal(self, name: str) -> float:
        ideal = self.counters[f"{name}_ideal"]
        return self.counters[name] / ideal if ideal else 1.0

    def __str__(self) -> str:
        lines = [f"{len(self.launches)} launches, {self.instructions} warp-instructions"]
        lines += [
            f"  {launch.kernel[:60]} grid {launch.grid} block {launch.block} "
            f"cluster {launch.cluster}: {launch.instructions} in {launch.seconds:.2f} s"
            for launch in self.launches
        ]
        lines += [f"  {count:>12} {opcode}" for opcode, count in self.by_opcode.most_common(20)]
        lines += [
            f"  {count:>12} bytes {path}" for path, count in sorted(self.bytes.items()) if count
        ]
        lines += [f"  {n:>12} {kind}: {flops} flop" for kind, (n, flops) in self.mma.items()]
        lines.append(
            f"shared memory: {self.bank_conflicts:.2f} x the ideal wavefronts; global memory: "
            f"{self.uncoalesced:.2f} x the ideal sectors"
        )
        lines += by_cause(self.findings) or ["no findings"]
        return "\n".join(lines)
