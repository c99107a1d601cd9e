"""Bugs planted in the kernels of KDA's backward: each must be found by the kernel's own test.

As in `test_planted_bugs`, a bug is an edit of the PTX text, which every schedule and seed must
report. What breaks no rule of the machine, such as a term left out, must fail the test's comparison
with float64. Waits and arrivals are found by the edge of the pipeline that they belong to.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_attn.emulator import Emulator, Finding, FindingsError
from cute_attn.emulator.emulator import SCHEDULES
from cute_attn.kernels.delta.chunk import heuristics
from cute_attn.kernels.delta.chunk.backward.gradients import KdaGradients
from cute_attn.kernels.delta.chunk.spec import AdjointPassSpec
from tests.sweeps import slow_but

from .mutations import (
    EXPECT,
    MORE_SEEDS,
    SEEDS,
    Bug,
    Edged,
    Planted,
    name_of,
    operand,
    reported,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
import test_kda_backward_gradients as gradients
import test_kda_backward_passes as passes
import test_kda_intra as intra
from test_kda_state_pass import SHARED_BASE

BF16 = torch.bfloat16

# -- kernels, with the tests that judge them

passes_inputs = passes.inputs_of
CASE = passes.Case([200], False, (64, 64), BF16)  # the ring of two stages is used twice
SPEC = CASE.fields("bulk", "wgmma")


def _inputs(case: passes.Case) -> dict[str, Any]:
    """With gates so small that the last tokens of a chunk count in the first ones' gradients."""
    x = passes_inputs(case)
    x["g"] *= 0.1
    return x


def _adjoint_pass(copies: str, products: str) -> None:
    spec = AdjointPassSpec(**CASE.fields(copies, products))
    passes.check_adjoints(spec, "sm_90a", passes.inputs_of(CASE), CASE)


def _prepare() -> None:
    x = intra.draw(1, 73, 1, 1, 64)
    intra.check_prepare(x, cu_seqlens=torch.tensor([0, 70, 70, 73], dtype=torch.int32))


# A chunk is whole, one is not; the first is of two CTAs, which share a group of two value heads.
PROBLEM = gradients.Problem(
    [70, 0, 1, 64], (1, 2), (128, 128), (BF16, BF16, BF16), 1.0, **gradients.IN_KERNEL
)
SMALL_PROBLEM = gradients.Problem([64])


JUDGES: dict[str, Callable[[], None]] = {
    "adjoint_pass": lambda: _adjoint_pass("bulk", "wgmma"),
    "adjoint_pass cp.async": lambda: _adjoint_pass("cp_async", "mma"),
    "state_pass": lambda: passes.test_the_state_pass_keeps_what_a_backward_needs(
        "sm_90a", "bulk", "wgmma", CASE
    ),
    "prepare": _prepare,
    "prepare, norms": lambda: intra.test_prepare_may_store_the_inverse_norms(BF16),
    "prepare, beta": lambda: intra.test_prepare_may_keep_beta_away_from_zero(BF16, 2.0**-40),
    "gradients": PROBLEM.check,
    "gradients, K = 64": SMALL_PROBLEM.check,
}
# What their comparisons are with, which is the same each time.
COMPARED = {
    passes: ("exact_adjoints", "plain_adjoints"),
    intra: ("matrices_of",),
    gradients: ("exact", "gradients", "passes"),
}
PASSES = ("adjoint_pass", "state_pass")


@dataclass(frozen=True)
class Played:
    """A kernel's test, played once.

    Attributes:
        loaded: PTX of its kernels, and the names of what is in their shared memory.
        right: it passed, or something but the comparison failed.
    """

    loaded: list[tuple[str, Any]]
    findings: list[Finding]
    right: bool


_known: dict[tuple[Any, ...], Any] = {}


def _once(kernel: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which gives a kernel's test the same results each time it is played."""

    def call(*args: Any, **kwargs: Any) -> Any:
        dtypes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
        key = (kernel, function.__name__, *dtypes)
        if key not in _known:
            _known[key] = function(*args, **kwargs)
        return _known[key]

    return call


def play(kernel: str, schedule: int, seed: int, original: str = "", text: str = "") -> Played:
    """Play a test with `text` in place of the PTX `original`."""
    emulator = Emulator(schedule=SCHEDULES[schedule], seed=seed, on_findings="collect")
    loaded: list[tuple[str, Any]] = []
    load = Emulator.load_object

    def replaced(_: Emulator, image: bytes, ptx: str, function: str, names: Any) -> Any:
        loaded.append((ptx, names))
        return load(emulator, image, text if ptx == original else ptx, function, names)

    right = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Emulator, "load_object", replaced)
        for module in (intra, gradients):
            patch.setattr(module, "function", module.function.__wrapped__)
        for module, names in COMPARED.items():
            for name in names:
                patch.setattr(module, name, _once(kernel, getattr(module, name)))
        patch.setattr(passes, "inputs_of", _inputs)
        try:
            JUDGES[kernel]()
        except FindingsError:  # of a launch that did not end
            pass
        except AssertionError:
            right = False
    return Played(loaded, emulator.report.findings, right)


@functools.cache
def kernel_of(kernel: str) -> Edged:
    """The PTX of the kernel that the test loads first."""
    ptx, names = play(kernel, *SEEDS[0]).loaded[0]
    if names is not None:
        shared, base = names.shared, SHARED_BASE
    elif kernel == "gradients":
        config = heuristics.gradients_config(arch="sm_90a", head_dim_k=128, head_dim_v=128)
        shared, base = KdaGradients(PROBLEM.spec(**config)).names(0)["shared"], 0
    else:
        shared, base = {}, 0
    return Edged(ptx, {name: (at - base, size) for name, (at, size, *_) in shared.items()})


# -- bugs

WAIT = r"mbarrier\.(test|try)_wait"
ARRIVE = r"mbarrier\.arrive\.shared"
COPIES_ARRIVE = r"cp\.async\.mbarrier\.arrive"
COPY = r"^\s*cp\.async\.c[ag]"
BULK = r"^\s*cp\.async\.bulk\.shared"
MATRIX = r"^\s*ldmatrix"
SHARED = r"^\s*(@%p\d+ )?(ld|st)\.shared"
WGMMA = r"^\s*wgmma\.mma_async"
MMA = r"^\s*mma\.sync"
ASYNC_STORE = r"^\s*st\.async"
STORE = r"^\s*(@some )?st\.global"
READS = (MATRIX, SHARED, WGMMA)

BUGS: list[Bug] = []


def planted(
    kernels: str | tuple[str, ...], name: str, checks: str, severity: str = "error"
) -> Callable[..., Any]:
    """Decorates a function that plants a bug, and tells the lines that it shows at."""

    def add(plant: Callable[[Edged], Planted]) -> Callable[[Edged], Planted]:
        each = (kernels,) if isinstance(kernels, str) else kernels
        expected = tuple(checks.split())
        BUGS.extend(Bug(name, kernel, plant, expected, severity) for kernel in each)  # type: ignore[arg-type]
        return plant

    return add


def lines(p: Edged, *patterns: str) -> list[int]:
    return [line for pattern in patterns for line in p.all(pattern)]


def waits(p: Edged, *edges: str) -> list[int]:
    """Waits of these edges, with the branches of their loops."""
    found = [line for edge in edges for line in p.of(edge, WAIT)]
    return [line + n for line in found for n in range(4)]


def swapped(p: Edged, found: Iterable[int], pattern: str, replacement: str) -> Edged:
    """The text with a replacement in each of these lines."""
    text = list(p.lines)
    found = list(found)
    assert found
    for line in found:
        text[line - 1], count = re.subn(pattern, replacement, p[line])
        assert count == 1, p[line]
    return Edged("\n".join(text), p.mbarriers)


# The passes


@planted(PASSES, "wait for a chunk dropped", "race uninitialised")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("chunk_full", WAIT)), lines(p, BULK, COPY, *READS)


@planted(PASSES, "wait for a stage dropped", "race barrier")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("chunk_empty", WAIT)), lines(p, BULK, COPY, EXPECT, *READS)


@planted(PASSES, "release of a stage dropped", "deadlock")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("chunk_empty", ARRIVE)), waits(p, "chunk_empty")


@planted(PASSES, "stage released while products read it", "race wgmma")
def _(p: Edged) -> Planted:
    line = p.before(r"wgmma\.wait_group\S*\s+0", p.of("chunk_empty", ARRIVE)[0])
    return p.drop(line), lines(p, BULK, COPY, WGMMA)


@planted(PASSES, "arrival of the rows dropped", "deadlock")
def _(p: Edged) -> Planted:
    return p.drop(p.one(COPIES_ARRIVE)), waits(p, "chunk_full")


@planted(PASSES, "arrival of the rows before their copies are done", "race uninitialised")
def _(p: Edged) -> Planted:
    line = p.one(COPIES_ARRIVE)
    early = "{ .reg .b64 planted; mbarrier.arrive.shared.b64 planted,"
    return swapped(p, [line], r"cp\.async\S*(.*);", rf"{early}\1; }}"), lines(p, COPY, *READS)


@planted(PASSES, "expect_tx 16 too few", "barrier race uninitialised")
def _(p: Edged) -> Planted:
    line = p.of("chunk_full", EXPECT)[0]
    changed = p.changed_operand(line, operand(p, line), "add.s32", -16)
    return changed, [line, *waits(p, "chunk_full"), *lines(p, BULK)]


@planted(PASSES, "expect_tx 16 too many", "deadlock")
def _(p: Edged) -> Planted:
    line = p.of("chunk_full", EXPECT)[0]
    changed = p.changed_operand(line, operand(p, line), "add.s32", 16)
    return changed, waits(p, "chunk_full")


@planted(PASSES, "parity of the wait for a chunk wrong", "deadlock race uninitialised")
def _(p: Edged) -> Planted:
    line = p.of("chunk_full", WAIT)[0]
    changed = p.changed_operand(line, operand(p, line), "xor.b32", 1)
    return changed, [*waits(p, "chunk_full", "chunk_empty"), *lines(p, BULK, COPY, *READS)]


@planted(PASSES, "parity of the wait for a stage wrong", "deadlock race barrier")
def _(p: Edged) -> Planted:
    line = p.of("chunk_empty", WAIT)[0]
    changed = p.changed_operand(line, operand(p, line), "xor.b32", 1)
    return changed, [*waits(p, "chunk_full", "chunk_empty"), *lines(p, BULK, COPY, EXPECT, *READS)]


@planted(PASSES, "one arrival of the warps counts as all", "race barrier deadlock")
def _(p: Edged) -> Planted:
    line = p.of("chunk_empty", r"mbarrier\.init")[0]
    changed = p.changed_operand(line, operand(p, line), "shr.u32", 2)
    at = waits(p, "chunk_full", "chunk_empty")
    return changed, [line, *at, *lines(p, BULK, COPY, ARRIVE, EXPECT, *READS)]


@planted(PASSES, "barrier after the initialisation dropped", "barrier race")
def _(p: Edged) -> Planted:
    return p.drop(p.one(r"bar\.sync")), lines(p, r"mbarrier\.", COPIES_ARRIVE, BULK)


@planted(PASSES, "record of the head before", "value out-of-bounds")
def _(p: Edged) -> Planted:
    line = p.one(BULK)
    return p.swap(line, r"(\[%rd\d+)\]", r"\1+-40960]"), [line]


def quarter_left_out(nth: int) -> None:
    def plant(p: Edged) -> Planted:
        line = p.before(WGMMA, p.all(r"wgmma\.commit")[nth])
        return p.drop(line), [line]

    planted(PASSES, f"a quarter of product {nth} left out", "value")(plant)


for product in range(5):
    quarter_left_out(product)


def waits_dropped(nth: int) -> None:
    """Drop what waits between two products."""

    def plant(p: Edged) -> Planted:
        fences = p.all(r"wgmma\.fence")
        between = [p.all(r"wgmma\.wait", *pair) for pair in itertools.pairwise(fences)]
        return p.drop(*[x for x in between if x][nth]), lines(p, WGMMA, BULK, COPY, r"cvt|mul|mov")

    planted(PASSES, f"wait {nth} for products dropped", "wgmma race")(plant)


waits_dropped(-1)
waits_dropped(-2)


@planted(PASSES, "commit of a product dropped", "wgmma race")
def _(p: Edged) -> Planted:
    return p.drop(p.one(r"wgmma\.commit", nth=-1)), lines(p, WGMMA, BULK, COPY)


@planted("adjoint_pass", "product added rather than subtracted", "value")
def _(p: Edged) -> Planted:
    signs = p.all(r"xor\.b32.*, -2147450880;")
    return swapped(p, signs, "-2147450880", "0"), signs


@planted("state_pass", "product added rather than subtracted", "value")
def _(p: Edged) -> Planted:
    differences = p.all(r"sub\.f32")
    return swapped(p, differences, r"sub\.f32", "add.f32"), differences


@planted(PASSES, "no decay", "value")
def _(p: Edged) -> Planted:
    decays = p.all(r"^\s*mul\.f32\s+(%r\d+), \1,")
    assert len(decays) >= 32
    return p.drop(*decays), decays


def or_equal(p: Edged, first: int, last: int) -> Edged:
    """The text in which comparisons of rows with a length, between these lines, hold for one more
    row."""
    pattern = r"setp\.([lg])t(\.s32.*%r\d+, %r\d+;)"
    return swapped(p, p.all(pattern, first, last), pattern, r"setp.\1e\2")


@planted(PASSES, "row past the end loaded", "out-of-bounds uninitialised")
def _(p: Edged) -> Planted:
    return or_equal(p, p.one(BULK), p.one(COPIES_ARRIVE)), lines(p, COPY)


@planted(PASSES, "row past the end stored", "out-of-bounds")
def _(p: Edged) -> Planted:
    return or_equal(p, p.of("chunk_full", WAIT)[0], len(p.lines)), lines(p, STORE)


@planted(PASSES, "state stored at the next head's place", "race out-of-bounds value")
def _(p: Edged) -> Planted:
    line = p.one(r"^\s*st\.global\.v2", p.of("chunk_full", WAIT)[0])
    return p.swap(line, r"\]", "+8192]"), [line]


@planted(
    "adjoint_pass cp.async", "arrival of the copies before they are done", "race uninitialised"
)
def _(p: Edged) -> Planted:
    line = p.one(COPIES_ARRIVE)
    early = "{ .reg .b64 planted; mbarrier.arrive.shared.b64 planted,"
    return swapped(p, [line], r"cp\.async\S*(.*);", rf"{early}\1; }}"), lines(p, COPY, *READS)


# prepare


def barrier_dropped(kernel: str, name: str, nth: int, checks: str, severity: str = "error") -> None:
    def plant(p: Edged) -> Planted:
        found = p.one(rf"{name}\s", nth=nth)
        return p.drop(found), lines(p, COPY, MATRIX, SHARED, r"mbarrier\.")

    planted(kernel, f"{name} {nth} dropped", checks, severity)(plant)


for place in range(4):
    barrier_dropped("prepare", "bar.sync", place, "race uninitialised")
for place in range(-5, 0):  # those of the inverse
    barrier_dropped("prepare", "bar.warp.sync", place, "race", "note")


@planted("prepare", "wait for the copies dropped", "race uninitialised")
def _(p: Edged) -> Planted:
    return p.drop(p.one(r"cp\.async\.wait_group")), lines(p, COPY, MATRIX, SHARED)


@planted("prepare", "row past the end loaded", "out-of-bounds uninitialised value")
def _(p: Edged) -> Planted:
    return or_equal(p, 1, p.one(r"cp\.async\.commit")), lines(p, COPY, r"ld\.global")


def product_left_out(kernel: str, nth: int) -> None:
    def plant(p: Edged) -> Planted:
        # What it would have set is used in many places, if it is the first of a sum.
        return p.drop(p.one(MMA, nth=nth)), range(1, len(p.lines))

    planted(kernel, f"product {nth} left out", "value uninitialised")(plant)


for place in (0, 6, -1, -5):
    product_left_out("prepare", place)
for place in (-1, -9):
    product_left_out("adjoint_pass cp.async", place)


@planted("prepare, norms", "norms of the next row", "value out-of-bounds race")
def _(p: Edged) -> Planted:
    line = p.before(r"^\s*st\.global\.b32", p.one(r"^\s*st\.global\.v4"))
    return p.swap(line, r"\]", "+4]"), [line]


@planted("prepare, beta", "beta of 0 kept", "value")
def _(p: Edged) -> Planted:
    bound = p.one(r"setp\.lt\.f32.*, 0f2B800000")  # 2^-40
    return p.swap(bound, "0f2B800000", "0f00000000"), [bound]


# gradients


@planted("gradients", "wait for a stage dropped", "race uninitialised")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("stage_full", WAIT)), lines(p, BULK, *READS)


@planted("gradients", "wait for the rows' copies dropped", "race uninitialised")
def _(p: Edged) -> Planted:
    return p.drop(*p.all(r"cp\.async\.wait_group")), lines(p, COPY, *READS)


@planted("gradients", "wait for the other CTA's sums dropped", "race uninitialised")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("along_full", WAIT)), lines(p, ASYNC_STORE, SHARED)


@planted("gradients", "sums for the other CTA dropped", "deadlock")
def _(p: Edged) -> Planted:
    return p.drop(p.one(ASYNC_STORE)), waits(p, "along_full")


@planted("gradients", "sums for the other CTA stored here", "deadlock race barrier value")
def _(p: Edged) -> Planted:
    line = p.one(ASYNC_STORE)
    data, mbarrier = (p.before(r"^\s*mapa", at) for at in (line, p.before(r"^\s*mapa", line)))
    changed = p.swap(data, r"(%\w+), (%\w+), %\w+;", r"\1, \2, %cluster_ctarank;")
    changed = changed.swap(mbarrier, r"(%\w+), (%\w+), %\w+;", r"\1, \2, %cluster_ctarank;")
    return changed, [line, *waits(p, "along_full")]


@planted("gradients", "wait for the other CTA's start dropped", "barrier race cluster")
def _(p: Edged) -> Planted:
    return p.drop(p.one(r"barrier\.cluster\.wait")), lines(
        p, ASYNC_STORE, r"mbarrier\.init", EXPECT
    )


@planted("gradients", "parity of the wait for a stage wrong", "deadlock race uninitialised")
def _(p: Edged) -> Planted:
    line = p.of("stage_full", WAIT)[0]
    changed = p.changed_operand(line, operand(p, line), "xor.b32", 1)
    return changed, [*waits(p, "stage_full"), *lines(p, BULK, *READS)]


@planted("gradients", "expect_tx 16 too few", "barrier race uninitialised")
def _(p: Edged) -> Planted:
    line = p.of("stage_full", EXPECT)[0]
    changed = p.changed_operand(line, operand(p, line), "add.s32", -16)
    return changed, [line, *waits(p, "stage_full"), *lines(p, BULK, *READS)]


@planted("gradients", "expect_tx 16 too many", "deadlock")
def _(p: Edged) -> Planted:
    line = p.of("stage_full", EXPECT)[0]
    return p.changed_operand(line, operand(p, line), "add.s32", 16), waits(p, "stage_full")


@planted("gradients", "proxy fence dropped", "proxy-fence")
def _(p: Edged) -> Planted:
    return p.drop(*p.all(r"fence\.proxy\.async")), lines(p, BULK, SHARED, MATRIX)


# The first one's work the cluster's barrier does too.
for place in (1, 2, 3, 6, 7):
    barrier_dropped("gradients", "bar.sync", place, "race uninitialised barrier")
barrier_dropped("gradients", "bar.warp.sync", -1, "race", "note")
for place in (1, 3):
    barrier_dropped("gradients, K = 64", "bar.sync", place, "race uninitialised")
for place in (*range(0, 80, 16), -1, -20):
    product_left_out("gradients", place)


def function_left_out(kernel: str, name: str, nth: int) -> None:
    def plant(p: Edged) -> Planted:
        line = p.one(rf"^\s*{name}\.approx", nth=nth)
        return p.swap(line, rf"{name}\.approx\S*", "mov.f32"), [line]

    planted(kernel, f"{name} {nth} left out", "value")(plant)


for function in ("ex2", "rcp"):
    for place in (0, -1):
        function_left_out("gradients", function, place)


# -- the tests


def check(bug: Bug, seeds: Iterable[tuple[int, int]]) -> None:
    ptx = kernel_of(bug.kernel)
    changed, at = bug.plant(ptx)
    for schedule, seed in seeds:
        done = play(bug.kernel, schedule, seed, ptx.text, changed.text)
        found = "\n".join(map(str, done.findings)) or f"nothing; the result is right: {done.right}"
        run: Any = SimpleNamespace(findings=done.findings)
        assert reported(bug, run, set(at), done.right), f"{(schedule, seed)}: {found}"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", JUDGES)
def test_the_kernel_is_clean(kernel: str) -> None:
    for schedule, seed in SEEDS:
        done = play(kernel, schedule, seed)
        assert done.findings == [] and done.right, (schedule, seed)


QUICK = {
    ("adjoint_pass", "wait for a chunk dropped"),
}


@pytest.mark.parametrize(
    "bug", slow_but(BUGS, lambda bug: (bug.kernel, bug.name) in QUICK, name_of)
)
def test_the_bug_is_found(bug: Bug) -> None:
    check(bug, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_bug_is_found_on_more_seeds(bug: Bug) -> None:
    check(bug, MORE_SEEDS[::6])
