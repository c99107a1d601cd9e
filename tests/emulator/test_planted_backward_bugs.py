"""Bugs planted in the dQ and dK/dV kernels: each must be reported on every schedule and seed.

As in `test_planted_bugs`, a bug is an edit of the PTX text. Waits, arrivals and commits are found by
the edge of the pipeline that they belong to: by the offset of its mbarriers in shared memory.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from cute_attn import cache
from cute_attn.kernels.attention.spec import Hd256BackwardSpec
from cute_attn.kernels.attention.statistics import DELTA, LSE, padded_rows
from cute_attn.kernels.attention.table import HD256_BACKWARD_DKDV, HD256_BACKWARD_DQ
from cute_attn.reference.attention import attention_in_low_precision
from tests.sweeps import slow_but

from .mutations import (
    COMMIT_MMA,
    EXPECT,
    LOAD,
    MMA,
    MORE_SEEDS,
    SEEDS,
    STORE,
    TMEM_LOAD,
    TMEM_STORE,
    TRY,
    Bug,
    Edged,
    Planted,
    Prepared,
    Recorded,
    launch_recorded,
    name_of,
    operand,
    record,
    reported,
)

ARCH = "sm_100a"
KERNELS = {"dq": HD256_BACKWARD_DQ, "dkdv": HD256_BACKWARD_DKDV}
SPEC = Hd256BackwardSpec(
    dtype="bfloat16",
    scheduler="static",
    window_left=False,
    window_right=True,
    softcap=False,
    varlen_q=False,
    varlen_k=False,
    seqused_q=False,
    seqused_k=False,
)
SHARED_LOAD = r"^\s*ld\.shared"
SHARED_STORE = r"^\s*st\.shared"
ARRIVE = r"mbarrier\.arrive\.shared"
REMOTE_ARRIVE = r"mbarrier\.arrive\.shared::cluster"
BULK_LOAD = r"cp\.async\.bulk\.shared"
ASYNC_STORE = r"^\s*st\.async"

# -- kernels --------------------------------------------------------------------------------------


@functools.cache
def recorded(name: str) -> Recorded:
    """A launch of one cluster, which works on several tiles. Two query heads share a K/V head; the
    last tiles are not full."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(1, 300, heads, 256, generator=generator).to(torch.bfloat16)
        for heads in (2, 1, 1, 2)
    )
    o, lse = attention_in_low_precision(q, k, v, causal=True)
    stats = torch.zeros(2, 2, padded_rows(300, 1, varlen=False))
    stats[LSE].fill_(torch.inf)
    stats[LSE, :, :300] = lse[0]
    stats[DELTA, :, :300] = (o.float() * do.float()).sum(-1)[0].T
    tensors = {"q": q, "k": k, "v": v, "do": do, "stats": stats}
    results = {"dq": {"dq": q}, "dkdv": {"dk": k, "dv": v}}[name]
    tensors |= {result: torch.empty_like(x) for result, x in results.items()}
    splits = [1] if name == "dkdv" else []
    entry = cache.compile(KERNELS[name], SPEC, arch=ARCH)
    (found,) = record(
        entry.read("kernel.o"),
        entry.read("kernel.ptx").decode(),
        [*tensors.values(), *[None] * 4, 1 / 16, 1.0, 0, 0, *splits, 1],
        [(t.data_ptr(), t.numel() * t.element_size(), name) for name, t in tensors.items()],
    )
    return found


@functools.cache
def kernel_of(name: str) -> tuple[Edged, Prepared]:
    module, _, made = KERNELS[name].target.partition(":")
    kernel = getattr(importlib.import_module(module), made)(SPEC)
    names = kernel.names(0)["shared"]
    edges = {edge.name: names[edge.name][:2] for edge in kernel.pipeline}
    launched = recorded(name)
    return Edged(launched.text, edges), launch_recorded(launched)


# -- bugs -----------------------------------------------------------------------------------------

BUGS: list[Bug] = []


def planted(kernel: str, name: str, checks: str) -> Callable[..., Any]:
    """Decorates a function that plants a bug, and tells the lines that it shows at."""

    def add(plant: Callable[[Edged], Planted]) -> Callable[[Edged], Planted]:
        BUGS.append(Bug(name, kernel, plant, tuple(checks.split())))  # type: ignore[arg-type]
        return plant

    return add


def wait_dropped(kernel: str, what: str, edge: str, *at: str, checks: str = "race") -> None:
    """A bug: nobody waits at that edge. It shows where both sides access what the edge hands over."""

    def plant(p: Edged) -> Planted:
        return p.drop(*p.of(edge, TRY)), [line for pattern in at for line in p.all(pattern)]

    planted(kernel, f"wait for {what} dropped", checks)(plant)


def hand_over_dropped(kernel: str, what: str, edge: str, by: str) -> None:
    """A bug: the first arrival or commit of that edge is missing, so that its waits never end."""

    def plant(p: Edged) -> Planted:
        return p.drop(p.of(edge, by)[0]), p.of(edge, TRY)

    planted(kernel, f"{what} dropped", "deadlock")(plant)


def parity_flipped(kernel: str, what: str, edge: str, *at: str) -> None:
    def plant(p: Edged) -> Planted:
        line = p.of(edge, TRY)[0]
        changed = p.changed_operand(line, operand(p, line), "xor.b32", 1)
        return changed, [*p.of(edge, TRY), *(other for pattern in at for other in p.all(pattern))]

    planted(kernel, f"parity of the wait for {what} wrong", "deadlock race uninitialised")(plant)


def bytes_changed(kernel: str, what: str, edge: str, by: int) -> None:
    def plant(p: Edged) -> Planted:
        line = p.of(edge, EXPECT)[0]
        lines = [line, *p.of(edge, TRY), *p.all(ASYNC_STORE)]
        return p.changed_operand(line, operand(p, line), "add.s32", by), lines

    much = f"{abs(by)} too {'few' if by < 0 else 'many'}"
    planted(kernel, f"expect_tx of {what} {much}", "barrier race" if by < 0 else "deadlock")(plant)


# dQ

wait_dropped("dq", "S", "s_full", TMEM_LOAD, MMA, checks="race uninitialised")
wait_dropped("dq", "the columns of S", "s_read", TMEM_LOAD, MMA)
wait_dropped("dq", "dP", "dp_full", TMEM_LOAD, MMA, checks="race uninitialised")
wait_dropped("dq", "dS", "ds_full", TMEM_LOAD, TMEM_STORE, MMA, checks="race uninitialised")
wait_dropped("dq", "dQ", "dq_full", TMEM_LOAD, MMA, checks="race uninitialised")
wait_dropped("dq", "dO", "do_full", LOAD, MMA, checks="race uninitialised")
wait_dropped(
    "dq", "a staged box of dQ", "dq_staged", STORE, SHARED_STORE, checks="race uninitialised"
)
wait_dropped(
    "dq", "the stage of a box of dQ", "dq_stored", STORE, SHARED_STORE, TRY, checks="race barrier"
)
hand_over_dropped("dq", "commit of a stage of K or V", "kv_empty", COMMIT_MMA)
hand_over_dropped("dq", "commit of dO's buffer", "do_empty", COMMIT_MMA)
hand_over_dropped("dq", "arrival of dS", "ds_full", REMOTE_ARRIVE)
parity_flipped("dq", "K or V", "kv_full", LOAD, MMA)
bytes_changed("dq", "Q", "q_full", -16)
bytes_changed("dq", "K or V", "kv_full", 32)


@planted("dq", "stage of the ring released before dQ is stored from it", "race")
def _(p: Edged) -> Planted:
    return p.drop(*p.all(r"bulk\.wait_group\.read")), [
        *p.all(STORE),
        *p.all(LOAD),
        *p.all(SHARED_STORE),
    ]


@planted("dq", "log-sum-exp of the next row", "value uninitialised out-of-bounds")
def _(p: Edged) -> Planted:
    line = p.one(r"^\s*ld\.global")
    return p.swap(line, r"\]", "+4]"), [line]


@planted("dq", "dQ accumulates on what was there", "uninitialised value")
def _(p: Edged) -> Planted:
    line = p.after(MMA, p.of("ds_full", TRY)[0])
    predicate = re.search(r"(%p\d+);", p[line])
    assert predicate is not None
    return p.insert(line, f"setp.eq.u32 {predicate[1]}, 0, 0;"), [line]


# dK and dV

wait_dropped("dkdv", "P'", "exchange_full", ASYNC_STORE, SHARED_LOAD, checks="race uninitialised")
wait_dropped("dkdv", "P's buffer", "exchange_free", ASYNC_STORE, SHARED_LOAD, STORE)
wait_dropped(
    "dkdv", "statistics", "stats_full", SHARED_LOAD, BULK_LOAD, checks="race uninitialised"
)
wait_dropped("dkdv", "T", "t_full", TMEM_LOAD, MMA, checks="race uninitialised")
wait_dropped(
    "dkdv", "T in its new form", "t_done", TMEM_LOAD, TMEM_STORE, MMA, checks="race uninitialised"
)
wait_dropped("dkdv", "a stage of the ring", "yz_empty", LOAD, MMA, checks="race barrier")
wait_dropped("dkdv", "X's buffer", "x_empty", LOAD, MMA)
wait_dropped("dkdv", "a staged box", "staged", STORE, SHARED_STORE, checks="race uninitialised")
wait_dropped(
    "dkdv", "the stage of a box", "stored", STORE, SHARED_STORE, TRY, checks="race barrier"
)
hand_over_dropped("dkdv", "commit of T", "t_full", COMMIT_MMA)
hand_over_dropped("dkdv", "commit of a stage of the ring", "yz_empty", COMMIT_MMA)
hand_over_dropped("dkdv", "release of P's buffer", "exchange_free", REMOTE_ARRIVE)
parity_flipped("dkdv", "a stage of the ring", "yz_full", LOAD, MMA)
bytes_changed("dkdv", "P'", "exchange_full", -16)
bytes_changed("dkdv", "P'", "exchange_full", 16)


@planted("dkdv", "a store of P' dropped", "deadlock")
def _(p: Edged) -> Planted:
    return p.drop(p.one(ASYNC_STORE, nth=3)), p.of("exchange_full", TRY)


@planted("dkdv", "a store of P' doubled", "barrier race")
def _(p: Edged) -> Planted:
    line = p.one(ASYNC_STORE)
    return p.double(line), [line]


@planted("dkdv", "P' to the other CTA of the key pair", "value barrier race deadlock")
def _(p: Edged) -> Planted:
    line = p.before(r"xor\.b32.*, 2;", p.one(ASYNC_STORE))
    return p.swap(line, ", 2;", ", 3;"), [*p.all(ASYNC_STORE), *p.of("exchange_full", TRY)]


@planted("dkdv", "P' of other queries", "value")
def _(p: Edged) -> Planted:
    first, second = p.all(ASYNC_STORE)[:2]
    values = [re.search(r"\{.*\}", p[line])[0] for line in (first, second)]  # type: ignore[index]
    changed = p.with_line(first, p[first].replace(*values))
    return changed.with_line(second, p[second].replace(*reversed(values))), [first]


@planted("dkdv", "statistics of other queries", "value")
def _(p: Edged) -> Planted:
    first, second = p.all(r"ld\.shared\.v2\.b64")[:2]
    offsets = [re.search(r"\+\d+\]", p[line])[0] for line in (first, second)]  # type: ignore[index]
    changed = p.with_line(first, p[first].replace(*offsets))
    return changed.with_line(second, p[second].replace(*reversed(offsets))), [first]


@planted("dkdv", "proxy fence before the store dropped", "proxy-fence")
def _(p: Edged) -> Planted:
    fences = p.all(r"fence\.proxy\.async")
    return p.drop(*fences), [*p.all(STORE), *p.all(SHARED_STORE)]


@planted("dkdv", "commits reach one CTA", "deadlock")
def _(p: Edged) -> Planted:
    masks = {operand(p, line) for line in p.all(COMMIT_MMA)}
    (mask,) = masks
    defined = p.before(rf"\s{re.escape(mask)},", p.all(COMMIT_MMA)[0])
    return p.insert(defined, f"and.b16 {mask}, {mask}, 5;", behind=True), p.all(TRY)


@planted("dkdv", "T' is read before it is stored", "race")
def _(p: Edged) -> Planted:
    return p.drop(*p.all(r"tcgen05\.wait::st")), [*p.all(TMEM_STORE), *p.all(MMA)]


@planted("dkdv", "MMA of one tile of queries only half done", "value")
def _(p: Edged) -> Planted:
    line = p.one(MMA, nth=5)
    return p.drop(line), [line]


# -- the tests ------------------------------------------------------------------------------------

QUICK = "wait for P' dropped"


def check(bug: Bug, seeds: Iterable[tuple[int, int]]) -> None:
    ptx, launch = kernel_of(bug.kernel)
    changed, lines = bug.plant(ptx)
    run = launch(changed.text)
    for schedule, seed in seeds:
        done, right = run(schedule, seed)
        found = "\n".join(map(str, done.findings)) or f"nothing; the result is right: {right}"
        assert reported(bug, done, set(lines), right), f"{(schedule, seed)}: {found}"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_is_clean(kernel: str) -> None:
    _, launch = kernel_of(kernel)
    run = launch(None)
    for schedule, seed in (*SEEDS, *MORE_SEEDS):
        done, right = run(schedule, seed)
        assert done.errors == [] and right, (schedule, seed)


@pytest.mark.parametrize("bug", slow_but(BUGS, lambda bug: bug.name == QUICK, name_of))
def test_the_bug_is_reported(bug: Bug) -> None:
    check(bug, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_bug_is_reported_on_more_seeds(bug: Bug) -> None:
    check(bug, MORE_SEEDS)
