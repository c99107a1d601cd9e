"""Bugs planted in the last Hopper step of the FMHA ladder: every schedule must find each of them.

A bug is an edit of the PTX text, as in `test_planted_bugs`. What breaks no rule of the machine must
change the result. Waits and arrivals are found by the edge of the pipeline that they belong to.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable

import pytest
import torch

from cute_attn import cache
from cute_attn.kernels.ladder.heuristics import spec_of
from cute_attn.kernels.ladder.step10_persistent import FmhaStep10
from cute_attn.kernels.ladder.table import find

from .mutations import (
    EXPECT,
    LOAD,
    MORE_SEEDS,
    SEEDS,
    STORE,
    Bug,
    Edged,
    Planted,
    Prepared,
    launch_recorded,
    operand,
    record,
    reported,
)

SMS = 2
SPEC = spec_of(10, "sm_90a", dtype="float16", head_dim=64, tile_n=64)  # test_ladder_hopper has it


@functools.cache
def kernel() -> tuple[Edged, Prepared]:
    """The PTX, and a launch on four tiles, of which each CTA gets two."""
    entry = cache.compile(find(10).kernel, SPEC, arch="sm_90a")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 200, 2, SPEC.head_dim, generator=generator).to(torch.float16)
        for _ in range(3)
    )
    o = torch.full_like(q, float("nan"))
    counter = torch.zeros(1, dtype=torch.int32)
    tensors = {"q": q, "k": k, "v": v, "o": o, "counter": counter}
    spans = [(x.data_ptr(), x.nbytes, name) for name, x in tensors.items()]
    image, text = entry.read("kernel.o"), entry.read("kernel.ptx").decode()
    (recorded,) = record(image, text, (q, k, v, o, 0.125, SMS, counter), spans, num_sms=SMS)
    shared = FmhaStep10(SPEC).names(0)["shared"]
    ptx = Edged(recorded.text, {name: (at, size) for name, (at, size, *_) in shared.items()})
    return ptx, launch_recorded(recorded)


WAIT = r"mbarrier\.(test|try)_wait"
ARRIVE = r"mbarrier\.arrive\.shared"
WGMMA = r"^\s*wgmma\.mma_async"
SHARED = r"^\s*(@%p\d+ )?(ld|st)\.shared"
EDGES = ("q", "k", "v", "work")

BUGS: list[Bug] = []


def planted(name: str, checks: str, severity: str = "error") -> Callable[..., None]:
    """Decorates a function that plants a bug, and tells the lines that it shows at."""

    def add(plant: Callable[[Edged], Planted]) -> None:
        expected = tuple(checks.split())
        BUGS.append(Bug(name, "step 10", plant, expected, severity))  # type: ignore[arg-type]

    return add


def lines(p: Edged, *patterns: str) -> list[int]:
    return [line for pattern in patterns for line in p.all(pattern)]


def waits(p: Edged, *edges: str) -> list[int]:
    """Waits of these edges, with the branches of their loops."""
    return [line + n for edge in edges for line in p.of(edge, WAIT) for n in range(4)]


def all_waits(p: Edged) -> list[int]:
    return [line + n for line in p.all(WAIT) for n in range(4)]


def of_an_edge(name: str) -> None:
    """Bugs at the mbarriers of what the load warp hands to the consumers."""
    full, empty = f"{name}_full", f"{name}_empty"
    touched = (SHARED,) if name == "work" else (LOAD, WGMMA)

    @planted(f"wait for {full} dropped", "race uninitialised deadlock")
    def _(p: Edged) -> Planted:
        return p.drop(*p.of(full, WAIT)), [*lines(p, *touched), *all_waits(p)]

    @planted(f"release of {empty} dropped", "deadlock")
    def _(p: Edged) -> Planted:
        return p.drop(*p.of(empty, ARRIVE)), all_waits(p)

    @planted(f"parity of the wait for {full} wrong", "deadlock race uninitialised barrier value")
    def _(p: Edged) -> Planted:
        line = next(x for x in p.of(full, WAIT) if re.search(r"\], %r", p[x]))
        changed = p.changed_operand(line, operand(p, line), "xor.b32", 1)
        return changed, [*all_waits(p), *lines(p, *touched, ARRIVE)]


for edge in EDGES:
    of_an_edge(edge)


def wait_for_a_stage(name: str) -> None:
    @planted(f"wait for {name}_empty dropped", "race barrier")
    def _(p: Edged) -> Planted:
        return p.drop(*p.of(f"{name}_empty", WAIT)), lines(p, LOAD, WGMMA, EXPECT, ARRIVE)


# That for work_empty is not needed in this launch: the rings of K and V hold the load warp back.
for edge in EDGES[:3]:
    wait_for_a_stage(edge)


@planted("expect_tx of V 16 too many", "deadlock")
def _(p: Edged) -> Planted:
    line = p.of("v_full", EXPECT)[0]
    return p.changed_operand(line, operand(p, line), "add.s32", 16), all_waits(p)


@planted("barrier after the initialisation dropped", "barrier race")
def _(p: Edged) -> Planted:
    return p.drop(p.one(r"bar\.sync\s+0")), lines(p, r"mbarrier\.", LOAD)


def wait_for_products(nth: int, name: str) -> None:
    @planted(f"wait for {name} dropped", "wgmma race")
    def _(p: Edged) -> Planted:
        line = p.one(r"wgmma\.wait_group", nth=nth)
        return p.drop(line), range(1, len(p.lines))  # whatever touches an accumulator next


# In the order of the text: the first S, then S and O of the masked loop and of the other one.
for nth, name in enumerate(("the first S", "S, masked", "O, masked", "S", "O", "the last O")):
    wait_for_products(nth, name)


@planted("S not waited for, only the product before", "wgmma race")
def _(p: Edged) -> Planted:
    line = p.one(r"wgmma\.wait_group\S*\s+1", nth=-1)
    return p.swap(line, r"aligned 1", "aligned 2"), range(1, len(p.lines))


@planted("fence of a product dropped", "wgmma", "note")
def _(p: Edged) -> Planted:
    return p.drop(p.one(r"wgmma\.fence", nth=-1)), lines(p, WGMMA)


@planted("proxy fence before the store of O dropped", "proxy-fence")
def _(p: Edged) -> Planted:
    return p.drop(p.one(r"fence\.proxy\.async")), lines(p, STORE, SHARED)


def barrier_of_o(nth: int, checks: str) -> None:
    @planted(f"barrier {nth} around the staging of O dropped", checks)
    def _(p: Edged) -> Planted:
        fence = p.one(r"fence\.proxy\.async")
        line = p.after(r"bar\.sync", fence) if nth else p.before(r"bar\.sync", fence)
        return p.drop(line), lines(p, STORE, SHARED)


barrier_of_o(0, "race")
barrier_of_o(1, "race proxy-fence")


@planted("wait for the stores of O dropped", "race")
def _(p: Edged) -> Planted:
    return p.drop(*p.all(r"cp\.async\.bulk\.wait_group")), lines(p, STORE, SHARED)


@planted("turn not passed", "deadlock")
def _(p: Edged) -> Planted:
    return p.drop(*p.all(r"bar(rier)?(\.cta)?\.arrive")), range(1, len(p.lines))


@planted("a sixteenth of S left out", "value")
def _(p: Edged) -> Planted:
    line = p.before(WGMMA, p.all(r"wgmma\.commit")[-3])
    return p.drop(line), [line]


@planted("a tile left out", "value")
def _(p: Edged) -> Planted:
    line = p.one(r"atom\.\S*inc")
    taken = p[line].split(",")[0].split()[-1]
    return p.insert(line, f"add.s32 {taken}, {taken}, 1;", behind=True), [line]


@planted("the maximum of a lane alone", "value")
def _(p: Edged) -> Planted:
    line = p.one(r"shfl\.sync\.bfly", nth=-3)
    return p.swap(line, r", 1, 31", ", 0, 31"), [line]


QUICK = {
    "wait for k_full dropped",
    "release of v_empty dropped",
    "wait for O dropped",
}


def check(bug: Bug, seeds: Iterable[tuple[int, int]]) -> None:
    ptx, prepare = kernel()
    changed, at = bug.plant(ptx)
    run = prepare(changed.text)
    for schedule, seed in seeds:
        done, right = run(schedule, seed)
        found = "\n".join(map(str, done.findings)) or f"nothing; the result is right: {right}"
        assert reported(bug, done, set(at), right), f"{(schedule, seed)}: {found}"


def test_the_kernel_is_clean() -> None:
    _, prepare = kernel()
    run = prepare(None)
    for schedule, seed in SEEDS:
        done, right = run(schedule, seed)
        assert done.findings == [] and right, (schedule, seed)


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, id=bug.name, marks=() if bug.name in QUICK else pytest.mark.slow)
        for bug in BUGS
    ],
)
def test_the_bug_is_found(bug: Bug) -> None:
    check(bug, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_bug_is_found_on_more_seeds(bug: Bug) -> None:
    check(bug, MORE_SEEDS[::6])
