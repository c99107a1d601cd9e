"""Bugs planted in decode with a convolution, whose CTAs share windows of q and k: each must be
found by the comparison with float64, or by the emulator's checks, on every schedule and seed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

import cute_attn
from cute_attn.emulator import Emulator, Finding, FindingsError
from cute_attn.emulator.emulator import SCHEDULES
from tests.ops import kda_decode_cases as decode
from tests.sweeps import slow_but

from .mutations import MORE_SEEDS, SEEDS, Bug, Planted, Planter, Ptx, name_of, reported

# Two CTAs, of the value heads of a group, read the same windows of q and k.
KERNELS = {
    "one token": decode.GATED_DELTA_RULE[1],
    "positions": decode.GATED_DELTA_RULE[2],
}
ARRIVAL = r"atom\.acq_rel\.gpu\.global\.inc\.u32"
BARRIER = r"^\s*(bar\.sync|barrier\.sync)"


@dataclass(frozen=True)
class Played:
    """A call, played once.

    Attributes:
        ptx: of the kernel, before the edit.
        right: the results agreed with the reference.
    """

    ptx: str
    findings: list[Finding]
    right: bool


def play(kernel: str, schedule: int, seed: int, edit: Callable[[str], str]) -> Played:
    """Play a call with the edited PTX."""
    case = decode.Case(KERNELS[kernel], batch=1, tokens=2, heads=1, group=2)
    args = replace(case, packing="separate").inputs("cpu")
    load, seen = Emulator.load_object, []

    def replaced(emulator: Any, image: bytes, ptx: str, function: str, names: Any) -> Any:
        seen.append(ptx)
        return load(emulator, image, edit(ptx), function, names)

    right = True
    emulator = Emulator(schedule=SCHEDULES[schedule], seed=seed, on_findings="collect")
    with pytest.MonkeyPatch.context() as patch, cute_attn.emulated("sm_90a", emulator=emulator):
        patch.setattr(Emulator, "load_object", replaced)
        try:
            decode.assert_agrees(args, decode.run(args))
        except FindingsError:  # of a launch that did not end
            pass
        except AssertionError:
            right = False
    return Played(seen[0], emulator.report.findings, right)


@functools.cache
def ptx_of(kernel: str) -> Ptx:
    done = play(kernel, *SEEDS[0], lambda ptx: ptx)
    assert done.right and not done.findings
    return Ptx(done.ptx)


bugs = [Planter(kernel) for kernel in KERNELS]


def planted(name: str, checks: str) -> Callable[[Callable[[Ptx], Planted]], None]:
    def add(plant: Callable[[Ptx], Planted]) -> None:
        for planter in bugs:
            planter(name, checks)(plant)

    return add


def accesses(p: Ptx) -> list[int]:
    return p.all(r"(ld|st)\.global")


@planted("every CTA writes", "race value")
def _(p: Ptx) -> Planted:
    line = p.one(ARRIVAL)
    result, _, last = _operands(p[line])
    return p.with_line(line, f"mov.u32 {result}, {last};"), accesses(p)


@planted("an arrival orders nothing", "race")
def _(p: Ptx) -> Planted:
    line = p.one(ARRIVAL)
    return p.swap(line, "acq_rel", "relaxed"), accesses(p)


@planted("the first CTA to arrive writes", "race value")
def _(p: Ptx) -> Planted:
    line = p.one(ARRIVAL)
    result, _, last = _operands(p[line])
    count = f"{p[line].split('//')[0]} sub.u32 {result}, {last}, {result};"
    return p.with_line(line, count), accesses(p)


@planted("the arrival comes before the CTA's reads", "race")
def _(p: Ptx) -> Planted:
    line = p.before(BARRIER, p.one(ARRIVAL))
    return p.drop(line), [*accesses(p), *p.all(r"(ld|st)\.shared")]


@planted("a tap is left out", "value")
def _(p: Ptx) -> Planted:
    fma = re.compile(r"fma\.rn\.f32\s+(%\w+), %\w+, %\w+, (%\w+);")
    lines = [line for line in p.all(r"fma\.rn\.f32") if fma.search(p[line])]
    results = {fma.search(p[line])[1] for line in lines}  # type: ignore[index]
    # The first sum of products whose addend is such a sum.
    for line in lines:
        result, addend = fma.search(p[line]).groups()  # type: ignore[union-attr]
        if addend in results:
            return p.with_line(line, f"mov.f32 {result}, {addend};"), []
    raise AssertionError("no sum of products")


def _operands(text: str) -> tuple[str, str, str]:
    """The result, the address and the bound of an arrival."""
    found = re.search(r"u32\s+(%\w+),\s*\[(%\w+)\],\s*(%\w+)", text)
    assert found is not None, text
    return found[1], found[2], found[3]


BUGS = [bug for planter in bugs for bug in planter.bugs]
QUICK = {("one token", "every CTA writes")}


def check(bug: Bug, seeds: list[tuple[int, int]]) -> None:
    ptx = ptx_of(bug.kernel)
    changed, lines = bug.plant(ptx)
    for schedule, seed in seeds:
        done = play(bug.kernel, schedule, seed, lambda text: changed.text)
        found = reported(bug, done, set(lines), done.right)  # type: ignore[arg-type]
        assert found, (schedule, seed, _shown(done.findings), done.right)


def _shown(findings: list[Finding]) -> str:
    return "\n".join(map(str, findings)) or "nothing"


@pytest.mark.parametrize(
    "bug", slow_but(BUGS, lambda bug: (bug.kernel, bug.name) in QUICK, name_of)
)
def test_the_bug_is_found(bug: Bug) -> None:
    check(bug, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_bug_is_found_on_more_seeds(bug: Bug) -> None:
    check(bug, MORE_SEEDS[::6])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_is_clean(kernel: str) -> None:
    for schedule, seed in (*SEEDS, *MORE_SEEDS[::6]):
        done = play(kernel, schedule, seed, lambda ptx: ptx)
        assert done.findings == [] and done.right, (schedule, seed, _shown(done.findings))
