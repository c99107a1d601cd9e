"""Bugs planted in the kernels of the latent decode: every schedule must find each of them.

A bug is an edit of the PTX text, as in `test_planted_bugs`. What breaks no rule of the machine must
change the result. Each sequence is cut into two pieces, of which one may have no keys.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

from cute_attn import cache
from cute_attn.kernels.mla.sm90.latent_decode import OUTPUT_GROUPS, Sm90LatentDecode
from cute_attn.kernels.mla.sm90.latent_decode_turns import Sm90LatentDecodeTurns
from cute_attn.kernels.mla.spec import PART_COLUMNS, LatentDecodeSpec, LatentTurnsSpec
from cute_attn.ops.mla import plan_mla_decode
from tests.ops.mla_cases import ARCH, Case

from .mutations import (
    ARRIVE,
    EXPECT,
    LOAD,
    SEEDS,
    SHARED,
    WAIT,
    WGMMA,
    Bug,
    Edged,
    Planted,
    Planter,
    Prepared,
    Ptx,
    all_waits,
    found_on,
    launch_recorded,
    lines_of,
    operand,
    record,
)

SMS, SPLITS, COUNTERS = 2, 2, 64
# One tile of 64 rows of a sequence, and two; pages that TMA loads, and gathered rows.
CASES = {
    "scores apart": Case((200, 300, 30), queries=2, heads=20, page_size=16),
    "turns": Case((200, 330, 30), queries=2, heads=34, page_size=16),
    "gathered": Case((200, 300, 30), queries=2, heads=20, page_size=3),
    "gathered in turns": Case((200, 330, 30), queries=2, heads=34, page_size=3),
    "fp8": Case((200, 300, 30), queries=2, heads=20, page_size=3, fp8=True),
}
CP_ASYNC = r"cp\.async\.cg"


@functools.cache
def kernel(name: str) -> tuple[Edged, Prepared]:
    """The PTX, and a launch of two CTAs."""
    case = CASES[name]
    (found, spec), *_ = plan_mla_decode(
        ARCH, queries=2, heads=case.heads, page_size=case.page_size, return_lse=True,
        kv_dtype="float8_e4m3fn" if case.fp8 else None,
    )  # fmt: skip
    entry = cache.compile(found, spec, arch=ARCH)
    given = case.arguments()
    q = given["q_nope"].contiguous(), given["q_rope"].contiguous()
    shape = q[0].shape
    slots = len(case.lengths) * SPLITS * -(-shape[1] * shape[2] // 64)
    tensors = {
        "q": q[0],
        "q_rope": q[1],
        "cache": given["kv_cache"],
        "o": torch.full(shape, torch.nan, dtype=torch.bfloat16),
        "lse": torch.full((shape[0], shape[2], shape[1]), torch.nan),
        "table": given["block_table"],
        "lengths": given["cache_seqlens"],
        "counter": torch.zeros(COUNTERS, dtype=torch.int32),
        "parts": torch.full((slots, 64, 512 + PART_COLUMNS), torch.nan),
    }
    arguments = [*tensors.values(), given["softmax_scale"], SPLITS, SMS, None]
    (recorded,) = record(
        entry.read("kernel.o"), entry.read("kernel.ptx").decode(), arguments,
        [(x.data_ptr(), x.nbytes, name) for name, x in tensors.items()], num_sms=SMS,
    )  # fmt: skip
    built: Any = None
    if isinstance(spec, LatentTurnsSpec):
        built = Sm90LatentDecodeTurns(spec)
    elif isinstance(spec, LatentDecodeSpec):
        built = Sm90LatentDecode(spec)
    shared = built.names(0)["shared"]
    edges = {edge.name: shared[edge.name][:2] for edge in built.pipeline}
    return Edged(recorded.text, edges), launch_recorded(recorded)


PLANTERS = {name: Planter(name) for name in CASES}
TOUCHED = (SHARED, LOAD, WGMMA, CP_ASYNC, EXPECT, ARRIVE, r"^\s*stmatrix")


def wait_dropped(planted: Planter, edge: str) -> None:
    @planted(f"wait for {edge} dropped", "race uninitialised deadlock barrier")
    def _(p: Edged) -> Planted:
        return p.drop(*p.of(edge, WAIT)), [*lines_of(p, *TOUCHED), *all_waits(p)]


def release_dropped(planted: Planter, edge: str) -> None:
    @planted(f"release of {edge} dropped", "deadlock")
    def _(p: Edged) -> Planted:
        return p.drop(*p.of(edge, ARRIVE)), all_waits(p)


def other_bugs(planted: Planter) -> None:
    @planted("P is published without a fence", "proxy-fence")
    def _(p: Edged) -> Planted:
        """Before tensor cores read what threads have written."""
        line = p.before(r"fence\.proxy\.async", p.of("p_full", ARRIVE)[0])
        return p.drop(line), range(1, len(p.lines))

    @planted("Q is published before it has arrived", "race uninitialised")
    def _(p: Edged) -> Planted:
        return p.drop(p.one(r"cp\.async\.wait_group")), range(1, len(p.lines))

    @planted("the last scores are used before they are there", "wgmma race")
    def _(p: Edged) -> Planted:
        return p.drop(p.one(r"wgmma\.wait_group", nth=-1)), range(1, len(p.lines))

    @planted("the cache is released before P V is done", "wgmma race")
    def _(p: Edged) -> Planted:
        line = p.before(r"wgmma\.wait_group", p.of("cache_empty", ARRIVE)[0])
        return p.drop(line), range(1, len(p.lines))

    @planted("a piece does not count its arrival", "value")
    def _(p: Edged) -> Planted:
        _, *lines = p.all(r"atom\.acq_rel\.gpu\.global\.inc")  # the first is the load warp's
        changed: Ptx = p
        for line in lines:
            target = re.findall(r"%r\d+", p[line])[0]
            changed = changed.with_line(line, f"mov.b32 {target}, 0;")
        return changed, lines


EDGES = ("work_empty", "q_full", "q_empty", "cache_empty", "p_full", "p_empty")
BY_TMA = (PLANTERS["scores apart"], EDGES), (PLANTERS["turns"], (*EDGES, "last_empty"))
for _planted, _edges in BY_TMA:
    for _edge in ("work_full", *_edges):
        wait_dropped(_planted, _edge)
    for _edge in _edges:
        release_dropped(_planted, _edge)
    other_bugs(_planted)


# -- gathered rows: the warps that load Q and the cache copy them

LANDED = r"cp\.async\.mbarrier"
GATHERED = (*TOUCHED, LANDED)


def bugs_of_gathered_rows(planted: Planter, full: str) -> None:
    """`full` are the checks that see a chunk of the cache that has not arrived."""

    @planted("wait for cache_full dropped", full)
    def _(p: Edged) -> Planted:
        return p.drop(*p.of("cache_full", WAIT)), [*lines_of(p, *GATHERED), *all_waits(p)]

    @planted("wait for cache_empty dropped", "race barrier deadlock")
    def _(p: Edged) -> Planted:
        return p.drop(*p.of("cache_empty", WAIT)), [*lines_of(p, *GATHERED), *all_waits(p)]

    @planted("release of cache_empty dropped", "deadlock")
    def _(p: Edged) -> Planted:
        return p.drop(*p.of("cache_empty", ARRIVE)), all_waits(p)

    @planted("wait for q_full dropped", f"{full} deadlock barrier")
    def _(p: Edged) -> Planted:
        return p.drop(*p.of("q_full", WAIT)), [*lines_of(p, *GATHERED), *all_waits(p)]

    @planted("count of q_full a warp too few", f"{full} deadlock barrier")
    def _(p: Edged) -> Planted:
        line = p.of("q_full", r"mbarrier\.init")[0]
        changed = p.changed_operand(line, operand(p, line), "sub.s32", 32)
        return changed, range(1, len(p.lines))


for _name in ("gathered", "gathered in turns", "fp8"):
    bugs_of_gathered_rows(PLANTERS[_name], "race uninitialised proxy-fence")

    @PLANTERS[_name]("a proxy fence of a chunk dropped", "proxy-fence", "note")
    def _(p: Edged) -> Planted:
        fences = [p.after(r"fence\.proxy\.async", line) for line in p.of("cache_full", WAIT)]
        return p.drop(*sorted(set(fences))), range(1, len(p.lines))


fp8 = PLANTERS["fp8"]


@fp8("rows are converted before they have arrived", "race uninitialised")
def _(p: Edged) -> Planted:
    return p.drop(*p.all(r"cp\.async\.wait_group")), range(1, len(p.lines))


@fp8("numbers are converted as e5m2", "value")
def _(p: Edged) -> Planted:
    lines, changed = p.all(r"cvt\.rn\.f16x2\.e4m3x2"), Ptx(p.text)
    for line in lines:
        changed = changed.swap(line, "e4m3x2", "e5m2x2")
    return changed, lines


@PLANTERS["scores apart"]("outputs also wait for the other warpgroup's columns", "barrier")
def _(p: Edged) -> Planted:
    """As the first version of early releases, which hung an H100: chunks are loaded again once one
    warpgroup has released them, so that the wait may come a whole phase late."""
    line, (first, _) = p.of("cache_full", WAIT)[0], p.mbarriers["cache_full"]
    chunk, parity = re.findall(r"%r\d+", p[line])
    half = 4 * 8 // OUTPUT_GROUPS  # bytes of the mbarriers of a warpgroup's chunks
    other = f"sub.u32 o, {chunk}, {first}; xor.b32 o, o, {half}; add.u32 o, o, {first};"
    wait = f"OTHERS: mbarrier.try_wait.parity.shared.b64 q, [o], {parity}; @!q bra OTHERS;"
    at = p.before(r"^\s*\{\s*$", line)
    return p.insert(at, f"{{ .reg .b32 o; .reg .pred q; {other} {wait} }}"), [at]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_clean(name: str) -> None:
    _, prepare = kernel(name)
    run = prepare(None)
    for schedule, seed in SEEDS:
        done, right = run(schedule, seed)
        assert done.errors == [] and right, (schedule, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bug"),
    [(name, bug) for name, planted in PLANTERS.items() for bug in planted.bugs],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_the_bug_is_found(name: str, bug: Bug) -> None:
    assert list(found_on(bug, kernel(name), SEEDS)) == []
