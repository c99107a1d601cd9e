"""Bugs planted in attention's backward on SM90 at head_dim 256: every schedule must find each of
them.

A bug is an edit of the PTX text, as in `test_planted_bugs`. What breaks no rule of the machine must
change the result.
"""

from __future__ import annotations

import functools
import importlib
import re

import pytest
import torch

from cute_attn import cache
from cute_attn.kernels.attention import ds_tiles, table
from cute_attn.kernels.attention.heuristics import backward_spec
from cute_attn.kernels.attention.statistics import DELTA, LSE, padded_rows
from cute_attn.reference.attention import attention_in_low_precision

from .mutations import (
    ADVERSARIAL,
    ARRIVE,
    EXPECT,
    LOAD,
    MORE_SEEDS,
    SEEDS,
    SHARED,
    STORE,
    WAIT,
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
    name_of,
    operand,
    record,
)

ARCH = "sm_90a"
SMS = 2
# Queries and keys: more tiles than stages, and the last ones are not full.
SIZES = {"dq": (150, 230), "dkdv": (330, 100), "ds_dq": (250, 400)}
# Keys left and right of the diagonal: a few pairs are hidden, and for "ds_dq" tiles of keys at both
# ends from warpgroups.
WINDOWS = {"dq": (None, 190), "dkdv": (None, 190), "ds_dq": (60, 20)}
REMOTE_ARRIVE = r"mbarrier\.arrive\.shared::cluster"
MATRICES = r"^\s*ldmatrix"


@functools.cache
def kernel(name: str) -> tuple[Edged, Prepared]:
    """The PTX, and a launch of one CTA, or one cluster."""
    (queries, keys), (left, right) = SIZES[name], WINDOWS[name]
    plain = dict.fromkeys(
        ("softcap", "varlen_q", "varlen_k", "seqused_q", "seqused_k", "partial"), False
    )
    spec = backward_spec(
        ARCH, 256, of_keys=name == "dkdv", ds=name != "dq", dtype="bfloat16", scheduler="static",
        window_left=left is not None, window_right=True, **plain,
    )  # fmt: skip
    definition = table.find(f"backward_{name}", ARCH, 256).kernel
    entry = cache.compile(definition, spec, arch=ARCH)
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(1, rows, 1, 256, generator=generator).to(torch.bfloat16)
        for rows in (queries, keys, keys, queries)
    )
    o, lse = attention_in_low_precision(q, k, v, window_size=(left, right))
    stats = torch.zeros(2, 1, padded_rows(queries, 1, varlen=False))
    stats[LSE].fill_(torch.inf)
    stats[LSE, :, :queries] = lse[0].masked_fill(lse[0] == -torch.inf, torch.inf)
    stats[DELTA, :, :queries] = (o.float() * do.float()).sum(-1)[0].T
    tensors = {"q": q, "k": k, "v": v, "do": do, "stats": stats}
    ds = torch.randn(ds_tiles.shape(1, stats.shape[2], keys), generator=generator).to(q.dtype)
    if name == "ds_dq":
        tensors = {"k": k, "ds": ds, "stats": stats}
    results = {"dq": {"dq": q}, "dkdv": {"ds": ds, "dk": k, "dv": v}, "ds_dq": {"dq": q}}[name]
    tensors |= {result: torch.full_like(x, float("nan")) for result, x in results.items()}
    counter = torch.zeros(1, dtype=torch.int32)
    last = {
        "dq": [1.0, 0, right, SMS, counter],
        # Splits, K/V heads, blocks and clusters, and no counter.
        "dkdv": [1.0, 0, right, 1, 0, 1, 0, 1, SMS, None],
        # K/V heads, tiles of keys and clusters, and no counter.
        "ds_dq": [left, right, 0, 1, 0, SMS, None],
    }[name]
    arguments = [*tensors.values(), *[None] * 4, 1 / 16, *last]
    if name == "ds_dq":
        arguments.insert(list(tensors).index("dq"), None)  # no sums
    if name == "dq":
        tensors["counter"] = counter
    spans = [(x.data_ptr(), x.nbytes, at) for at, x in tensors.items()]
    (recorded,) = record(
        entry.read("kernel.o"), entry.read("kernel.ptx").decode(), arguments, spans, num_sms=SMS
    )
    module, _, made = definition.target.partition(":")
    built = getattr(importlib.import_module(module), made)(spec)
    names = built.names(0)["shared"]
    ptx = Edged(recorded.text, {edge.name: names[edge.name][:2] for edge in built.pipeline})
    return ptx, launch_recorded(recorded)


dq, dkdv, ds_dq = Planter("dq"), Planter("dkdv"), Planter("ds_dq")

# -- dQ

for edge in ("k", "v"):
    bugs_of_an_edge(dq, edge)
    bug_of_a_stage(dq, edge)
bug_of_products(dq, -1, "the last dQ")


@dq("K is released before the product with it is done", "race")
def _(p: Edged) -> Planted:
    line = p.before(r"wgmma\.wait_group", p.of("k_empty", ARRIVE)[0])
    return p.drop(line), range(1, len(p.lines))


# -- dK and dV

for edge in ("q", "do"):
    bugs_of_an_edge(dkdv, edge)
    bug_of_a_stage(dkdv, edge)
for number, product in enumerate(("the first S", "dV", "S")):
    bug_of_products(dkdv, number, product)


@dkdv("wait for P' dropped", "race uninitialised")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("p_full", WAIT)), lines_of(p, SHARED)


@dkdv("arrival of P' dropped", "deadlock")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("p_full", ARRIVE)), all_waits(p)


@dkdv("P' of other queries", "value")
def _(p: Edged) -> Planted:
    first, second = p.all(r"st\.shared\.v4")[:2]
    values = [re.findall(r"\{.*\}", p[line])[0] for line in (first, second)]
    changed = p.with_line(first, p[first].replace(*values))
    return changed.with_line(second, p[second].replace(*reversed(values))), [first]


@dkdv("dS of other queries", "value")
def _(p: Edged) -> Planted:
    first, second = p.all(r"st\.global\.v4")[2:4]  # the first ones are of hidden pairs
    values = [re.findall(r"\{.*\}", p[line])[0] for line in (first, second)]
    changed = p.with_line(first, p[first].replace(*values))
    return changed.with_line(second, p[second].replace(*reversed(values))), [first]


@dkdv("dS stored to the row of another key", "value")
def _(p: Edged) -> Planted:
    line = p.one(r"st\.global\.v4")
    return p.swap(line, r"\[(%rd\d+)(\+\d+)?\]", r"[\1+128]"), [line]


@dkdv("wait for K dropped", "race uninitialised")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("k_full", WAIT)), lines_of(p, LOAD, WGMMA, MATRICES)


@dkdv("Q replaces columns of K and V that are not in registers yet", "race")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("held", WAIT)), lines_of(p, LOAD, MATRICES)


@dkdv("arrival of the held columns dropped", "deadlock")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("held", ARRIVE)), all_waits(p)


def fences_before_held(p: Edged) -> set[int]:
    return {p.before(r"fence\.proxy\.async", line) for line in p.of("held", ARRIVE)}


@dkdv("proxy fence before the arrival of the held columns dropped", "proxy-fence")
def _(p: Edged) -> Planted:
    return p.drop(*fences_before_held(p)), lines_of(p, LOAD, MATRICES)


@dkdv("dV and dK staged before both warpgroups are done with Q", "race")
def _(p: Edged) -> Planted:
    return p.drop(*p.all(r"bar\S*\s+(%r\d+|\d+), 256")), lines_of(p, SHARED, WGMMA)


@dkdv("the other CTA is not told that a stage of Q is empty", "deadlock")
def _(p: Edged) -> Planted:
    return p.drop(p.of("q_empty", REMOTE_ARRIVE)[0]), all_waits(p)


@dkdv("a load of dO reaches one CTA", "deadlock")
def _(p: Edged) -> Planted:
    line = p.of("do_full", LOAD)[0]
    mask = re.findall(r"%rs\d+", p[line])[-1]
    defined = p.before(rf"\s{re.escape(mask)},", line)
    return p.insert(defined, f"and.b16 {mask}, {mask}, 1;", behind=True), all_waits(p)


@dkdv("both CTAs load the same half of Q", "race uninitialised value")
def _(p: Edged) -> Planted:
    line = p.before(r"%cluster_ctarank", p.of("q_full", LOAD)[0])
    register = re.findall(r"%r\d+", p[line])[0]
    return p.insert(line, f"mov.b32 {register}, 0;", behind=True), lines_of(p, LOAD, WGMMA)


@dkdv("expect_tx of Q 16 too many", "deadlock")
def _(p: Edged) -> Planted:
    line = p.of("q_full", EXPECT)[0]
    return p.changed_operand(line, operand(p, line), "add.s32", 16), all_waits(p)


@dkdv("expect_tx of dO without delta", "race barrier uninitialised")
def _(p: Edged) -> Planted:
    line = p.of("do_full", EXPECT)[0]
    lines = lines_of(p, LOAD, WGMMA, EXPECT, SHARED, r"cp\.async\.bulk\.shared")
    return p.changed_operand(line, operand(p, line), "sub.s32", 256), [*lines, *all_waits(p)]


@dkdv("columns of K in registers are those of another key", "value")
def _(p: Edged) -> Planted:
    line = p.one(MATRICES)
    return p.swap(line, r"\[(%r\d+)(\+\d+)?\]", r"[\1+128]"), [line]


@dkdv("lse of other queries", "value uninitialised")
def _(p: Edged) -> Planted:
    line = p.one(r"ld\.shared\.v2\.f32", nth=6)
    return p.swap(line, r"\[(%r\d+)(\+\d+)?\]", r"[\1+32]"), [line]


@dkdv("proxy fence before the store dropped", "proxy-fence")
def _(p: Edged) -> Planted:
    fences = {*p.all(r"fence\.proxy\.async")} - fences_before_held(p)
    return p.drop(*fences), lines_of(p, STORE, SHARED)


@dkdv("cluster barrier after the initialisation dropped", "barrier race")
def _(p: Edged) -> Planted:
    lines = [p.one(rf"barrier\.cluster\.{half}") for half in ("arrive", "wait")]
    return p.drop(*lines), range(1, len(p.lines))


# -- dQ from dS

COPY = r"cp\.async\.bulk\.shared"

bugs_of_an_edge(ds_dq, "k", COPY)
bug_of_a_stage(ds_dq, "k", COPY)


@ds_dq("dS is not waited for", "race barrier uninitialised")
def _(p: Edged) -> Planted:
    lines = lines_of(p, LOAD, COPY, WGMMA, EXPECT)
    line = p.one(EXPECT)
    return p.changed_operand(line, operand(p, line), "sub.s32", 8192), [*lines, *all_waits(p)]


@ds_dq("a load of K reaches one CTA", "deadlock")
def _(p: Edged) -> Planted:
    line = p.one(LOAD)
    mask = re.findall(r"%rs\d+", p[line])[-1]
    defined = p.before(rf"\s{re.escape(mask)},", line)
    return p.insert(defined, f"and.b16 {mask}, {mask}, 1;", behind=True), all_waits(p)


@ds_dq("a stage is released before the product with it is done", "race")
def _(p: Edged) -> Planted:
    (line,) = p.all(r"wgmma\.wait_group\S*\s+1;")
    return p.drop(line), range(1, len(p.lines))


@ds_dq("the other CTA is not told that a stage is empty", "deadlock")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("k_empty", REMOTE_ARRIVE)[1::2]), all_waits(p)


@ds_dq("dS of a warpgroup's tile goes to the other", "race uninitialised value")
def _(p: Edged) -> Planted:
    line = p.one(COPY, nth=1)
    return p.changed_operand(line, re.findall(r"%r\d+", p[line])[0], "sub.s32", 8192), lines_of(
        p, COPY, WGMMA
    )


@ds_dq("rows of dQ in the order of dS", "value")
def _(p: Edged) -> Planted:
    line = p.one(r"st\.global\.v4")
    return p.swap(line, r"\[(%rd\d+)(\+\d+)?\]", r"[\1+512]"), [line]


BUGS = [*dq.bugs, *dkdv.bugs, *ds_dq.bugs]


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_the_kernel_is_clean(name: str) -> None:
    _, prepare = kernel(name)
    run = prepare(None)
    for schedule, seed in (*SEEDS, *MORE_SEEDS[::6]):
        done, right = run(schedule, seed)
        assert done.findings == [] and right, (schedule, seed)


@pytest.mark.slow
def test_a_cta_that_ends_too_early_is_found_on_some_schedule() -> None:
    """The cluster barrier at the end dropped: it takes a CTA that is much slower than the other."""
    p, prepare = kernel("dkdv")
    lines = [p.one(rf"barrier\.cluster\.{half}", nth=-1) for half in ("arrive", "wait")]
    run = prepare(p.drop(*lines).text)
    runs = (run(ADVERSARIAL, seed)[0] for seed in range(20))
    assert any(finding.check == "cluster" for done in runs for finding in done.findings)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_bug_is_found(bug: Bug) -> None:
    assert list(found_on(bug, kernel(bug.kernel), (*SEEDS, *MORE_SEEDS[::8]))) == []
