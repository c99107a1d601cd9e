"""Bugs planted in the last Hopper step of the FMHA ladder: every schedule must find each of them.

A bug is an edit of the PTX text, as in `test_planted_bugs`. What breaks no rule of the machine must
change the result. Waits and arrivals are found by the edge of the pipeline that they belong to.
"""

from __future__ import annotations

import functools

import pytest
import torch

from cute_attn import cache
from cute_attn.kernels.ladder.heuristics import spec_of
from cute_attn.kernels.ladder.step10_persistent import FmhaStep10
from cute_attn.kernels.ladder.table import find
from tests.sweeps import slow_but

from .mutations import (
    EXPECT,
    LOAD,
    MORE_SEEDS,
    SEEDS,
    SHARED,
    STORE,
    WGMMA,
    Bug,
    Edged,
    Planted,
    Planter,
    Prepared,
    all_waits,
    bug_of_a_stage,
    bug_of_products,
    bugs_of_an_edge,
    found_on,
    launch_recorded,
    lines_of,
    operand,
    record,
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


EDGES = ("q", "k", "v", "work")

planted = Planter("step 10")

for edge in EDGES:
    bugs_of_an_edge(planted, edge)


# That for work_empty is not needed in this launch: the rings of K and V hold the load warp back.
for edge in EDGES[:3]:
    bug_of_a_stage(planted, edge)


@planted("expect_tx of V 16 too many", "deadlock")
def _(p: Edged) -> Planted:
    line = p.of("v_full", EXPECT)[0]
    return p.changed_operand(line, operand(p, line), "add.s32", 16), all_waits(p)


@planted("barrier after the initialisation dropped", "barrier race")
def _(p: Edged) -> Planted:
    return p.drop(p.one(r"bar\.sync\s+0")), lines_of(p, r"mbarrier\.", LOAD)


# In the order of the text: the first S, then S and O of the masked loop and of the other one.
for nth, name in enumerate(("the first S", "S, masked", "O, masked", "S", "O", "the last O")):
    bug_of_products(planted, nth, name)


@planted("S not waited for, only the product before", "wgmma race")
def _(p: Edged) -> Planted:
    line = p.one(r"wgmma\.wait_group\S*\s+1", nth=-1)
    return p.swap(line, r"aligned 1", "aligned 2"), range(1, len(p.lines))


@planted("fence of a product dropped", "wgmma", "note")
def _(p: Edged) -> Planted:
    return p.drop(p.one(r"wgmma\.fence", nth=-1)), lines_of(p, WGMMA)


@planted("proxy fence before the store of O dropped", "proxy-fence")
def _(p: Edged) -> Planted:
    return p.drop(p.one(r"fence\.proxy\.async")), lines_of(p, STORE, SHARED)


def barrier_of_o(nth: int, checks: str) -> None:
    @planted(f"barrier {nth} around the staging of O dropped", checks)
    def _(p: Edged) -> Planted:
        fence = p.one(r"fence\.proxy\.async")
        line = p.after(r"bar\.sync", fence) if nth else p.before(r"bar\.sync", fence)
        return p.drop(line), lines_of(p, STORE, SHARED)


barrier_of_o(0, "race")
barrier_of_o(1, "race proxy-fence")


@planted("wait for the stores of O dropped", "race")
def _(p: Edged) -> Planted:
    return p.drop(*p.all(r"cp\.async\.bulk\.wait_group")), lines_of(p, STORE, SHARED)


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


def test_the_kernel_is_clean() -> None:
    _, prepare = kernel()
    run = prepare(None)
    for schedule, seed in SEEDS:
        done, right = run(schedule, seed)
        assert done.findings == [] and right, (schedule, seed)


@pytest.mark.parametrize(
    "bug", slow_but(planted.bugs, lambda bug: bug.name in QUICK, lambda bug: bug.name)
)
def test_the_bug_is_found(bug: Bug) -> None:
    assert list(found_on(bug, kernel(), SEEDS)) == []


@pytest.mark.slow
@pytest.mark.parametrize("bug", planted.bugs, ids=lambda bug: bug.name)
def test_the_bug_is_found_on_more_seeds(bug: Bug) -> None:
    assert list(found_on(bug, kernel(), MORE_SEEDS[::6])) == []
