"""Bugs planted in attention's forward on Blackwell where the keys are split: every schedule must find
each of them.

A bug is an edit of the PTX text, as in `test_planted_bugs`. What breaks no rule of the machine must
change the result. Of the splits one has no keys.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch

from cute_attn import cache
from cute_attn.kernels.attention.sm100.forward_hd256 import Sm100Hd256Forward
from cute_attn.kernels.attention.spec import Hd256ForwardSpec
from cute_attn.kernels.attention.table import HD256_FORWARD

from .mutations import (
    LOAD,
    MMA,
    MORE_SEEDS,
    SEEDS,
    SHARED,
    TMEM_LOAD,
    TMEM_STORE,
    WAIT,
    Bug,
    Edged,
    Planted,
    Planter,
    Prepared,
    all_waits,
    found_on,
    launch_recorded,
    lines_of,
    record,
)

QUERIES, KEYS, HEADS, SPLITS, HEAD_DIM = 20, 300, 2, 4, 256
SPEC = Hd256ForwardSpec(
    dtype="float16",
    scheduler="static",
    packed_heads=1,
    window_left=False,
    window_right=False,
    softcap=False,
    sink_dtype="none",
    varlen_q=False,
    varlen_k=False,
    seqused_q=False,
    seqused_k=False,
    lse=True,
    split=True,
)


@functools.cache
def kernel() -> tuple[Edged, Prepared]:
    """The PTX, and a launch of one cluster, which works on all parts of both heads."""
    entry = cache.compile(HD256_FORWARD, SPEC, arch="sm_100a")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, rows, HEADS, HEAD_DIM, generator=generator).half()
        for rows in (QUERIES, KEYS, KEYS)
    )
    o = torch.full((SPLITS, *q.shape), torch.nan)
    lse = torch.full((SPLITS, 1, HEADS, QUERIES), torch.nan)
    arguments = [q, k, v, o, lse, *[None] * 6, 1 / 16, 1.0, 0, 0, 1]
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
    (recorded,) = record(
        entry.read("kernel.o"), entry.read("kernel.ptx").decode(), arguments,
        [(x.data_ptr(), x.nbytes, name) for name, x in tensors.items()],
    )  # fmt: skip
    built = Sm100Hd256Forward(SPEC)
    shared = built.names(0)["shared"]
    edges = {edge.name: shared[edge.name][:2] for edge in built.pipeline}
    return Edged(recorded.text, edges), launch_recorded(recorded)


splits = Planter("splits")
RELEASE = r"mbarrier\.arrive\.shared"
STORE = r"st\.global\.v4"
TMEM = (TMEM_LOAD, TMEM_STORE, MMA)
OF_A_SPLIT = 4 * QUERIES * HEADS  # bytes of lse

# -- the work of a split, published to all warps


def work_reads(p: Edged) -> list[int]:
    """The reads of (split, splits), in the order of the text."""
    (published,) = p.all(r"st\.shared\.v2\.b32")
    at = re.findall(r"\+(\d+)\]", p[published])[0]
    return p.all(rf"ld\.shared\.\S+\s+.*\+{at}\]")


@splits("wait for work_full dropped", "race uninitialised deadlock")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("work_full", WAIT)), [*lines_of(p, SHARED), *all_waits(p)]


@splits("release of work_empty dropped", "deadlock")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("work_empty", RELEASE)), all_waits(p)


@splits("parts as long as those of two splits", "value")
def _(p: Edged) -> Planted:
    (line,) = p.all(r"st\.shared\.v2\.b32")
    parts = re.findall(r"%r\d+", p[line])[-1]
    return p.changed_operand(line, parts, "sub.s32", 2), [line]


def another_part(name: str, of: str, nth: int) -> None:
    """One role alone takes the split without keys in place of the first."""

    @splits(f"{name} take another split than the others", "value deadlock race barrier")
    def _(p: Edged) -> Planted:
        first = p.of(of, WAIT)[0]
        before = [line for line in work_reads(p) if line < first]
        split = re.findall(r"%r\d+", p[before[nth]])[0]
        changed = p.insert(before[nth], f"xor.b32 {split}, {split}, {SPLITS - 1};", behind=True)
        return changed, [*all_waits(p), *lines_of(p, LOAD, *TMEM)]


# The first split that a warp takes is read before its loop.
another_part("load warps", "q_empty", -1)
another_part("MMA warps", "q_full", -1)
another_part("softmax warps", "s_full", -1)
another_part("correction warps", "scale_full", -1)

# -- from the softmax to the correction


@splits("wait for sum_full dropped", "race uninitialised")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("sum_full", WAIT)), lines_of(p, SHARED)


@splits("wait for sum_read dropped", "race barrier")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("sum_read", WAIT)), lines_of(p, SHARED, RELEASE)


@splits("release of sum_read dropped", "deadlock")
def _(p: Edged) -> Planted:
    return p.drop(*p.of("sum_read", RELEASE)), all_waits(p)


@splits("wait for the last P V dropped", "race uninitialised")
def _(p: Edged) -> Planted:
    return p.drop(p.of("pv_done", WAIT)[-1]), lines_of(p, *TMEM)


@splits("O of a split without keys is not 0", "uninitialised value")
def _(p: Edged) -> Planted:
    changed = p
    lines = p.all(r"selp\.b64", p.of("pv_done", WAIT)[-1], p.one(STORE))
    assert len(lines) == 32
    for line in lines:
        target, _, loaded = re.findall(r"%rd\d+", p[line])
        changed = changed.with_line(line, f"mov.b64 {target}, {loaded};")
    return changed, [*lines, *p.all(STORE)]


# -- storing


@splits("O of another split", "value race out-of-bounds")
def _(p: Edged) -> Planted:
    lines, changed = p.all(STORE), p
    for line in lines:
        changed = changed.swap(line, r"\]", f"+{OF_A_SPLIT * HEAD_DIM}]")
    return changed, lines


@splits("columns of O are stored four further", "value race out-of-bounds")
def _(p: Edged) -> Planted:
    line = p.one(STORE, nth=3)
    return p.swap(line, r"\]", "+16]"), [line]


@splits("rows behind the last one are stored", "value race out-of-bounds")
def _(p: Edged) -> Planted:
    line = p.before(r"setp\.ge\.s32", p.one(STORE))
    outside = p[line].split(",")[0].split()[-1]
    return p.insert(line, f"mov.pred {outside}, 0;", behind=True), p.all(STORE)


@splits("lse of another split", "value race out-of-bounds")
def _(p: Edged) -> Planted:
    line = p.one(r"st\.global\.b32")
    return p.swap(line, r"\]", f"+{OF_A_SPLIT}]"), [line]


@splits("lse of another row", "value race out-of-bounds")
def _(p: Edged) -> Planted:
    line = p.one(r"st\.global\.b32")
    return p.swap(line, r"\]", "+4]"), [line]


@pytest.mark.slow
def test_the_kernel_is_clean() -> None:
    _, prepare = kernel()
    run = prepare(None)
    for schedule, seed in (*SEEDS, *MORE_SEEDS[::6]):
        done, right = run(schedule, seed)
        assert done.errors == [] and right, (schedule, seed)


@pytest.mark.slow
@pytest.mark.parametrize("bug", splits.bugs, ids=lambda bug: bug.name)
def test_the_bug_is_found(bug: Bug) -> None:
    assert list(found_on(bug, kernel(), (*SEEDS, *MORE_SEEDS[::6]))) == []
