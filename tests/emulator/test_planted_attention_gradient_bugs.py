"""Bugs planted in attention's backward on SM90 at head_dim 64 and 128: every schedule must find
each of them.

A bug is an edit of the PTX text, as in `test_planted_bugs`. What breaks no rule of the machine must
change the result. The kernels: "dq", "dkdv", and "fused", which adds up dQ too, at head_dim 64, and
"hd128", that of head_dim 128 that adds up dQ, which has one tile of queries in "short", and two CTAs
in "two". With at most two tiles of keys, sums of dQ have the same bits in any order. "ordered"
and "by_head" are kernels of head_dim 128 that add in a fixed order, see ORDER.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from cute_attn import cache
from cute_attn.kernels.attention import table
from cute_attn.kernels.attention.heuristics import backward_spec
from cute_attn.kernels.attention.spec import Sm90BackwardSpec
from cute_attn.kernels.attention.statistics import DELTA, LSE, num_query_zeros, padded_rows
from cute_attn.reference.attention import attention_in_low_precision

from .mutations import (
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
    bugs_of_an_edge,
    found_on,
    launch_recorded,
    lines_of,
    name_of,
    operand,
    record,
)

ARCH = "sm_90a"
ORDER = {"ordered": "alternating", "by_head": "by_head"}
HEAD_DIM = {
    "dq": 64, "dkdv": 64, "fused": 64, "hd128": 128, "short": 128, "two": 128,
    **dict.fromkeys(ORDER, 128),
}  # fmt: skip  # by kernel
KERNELS = tuple(HEAD_DIM)
ADD_UP_DQ = ("fused", "hd128", "short", "two", *ORDER)
# With one, the ring of K goes round.
CTAS = dict.fromkeys(ADD_UP_DQ, 1) | {"dq": 2, "dkdv": 2, "two": 2} | dict.fromkeys(ORDER, 2)
HEADS_K = 2
# Kernels of a fixed order have more tiles of keys than CTAs, and one query head to a K/V head: both
# CTAs add to a sum on every schedule.
QUERIES_AND_HEADS = dict.fromkeys(HEAD_DIM, (200, 4)) | {"short": (60, 2)}
QUERIES_AND_HEADS |= dict.fromkeys(ORDER, (200, 2))
KEYS = dict.fromkeys(HEAD_DIM, 200) | {"dq": 700} | dict.fromkeys(ORDER, 400)
PLAIN = {
    "dtype": "bfloat16",
    "scheduler": "static",
    "window_left": False,
    "window_right": True,
    "softcap": False,
    "varlen_q": False,
    "varlen_k": False,
    "seqused_q": False,
    "seqused_k": False,
    "partial": False,
}
BULK_LOAD = r"cp\.async\.bulk\.shared"
ADD = r"red\S*\.add\.(v4\.)?f32"
COUNTED = r"red\.release\.gpu\.global\.add"
TURN = r"^\s*bar\.arrive"


def early_release(p: Edged, release: int) -> str:
    """An arrival of one thread of the warp, as `release` has it."""
    at = re.findall(r"\[(%\w+)(\+\d+)?\]", p[release])[0]
    assert not at[1] or at
    return (
        "{ .reg .pred one; elect.sync _|one, -1; "
        f"@one mbarrier.arrive.shared.b64 _, [{''.join(at)}]; }}"
    )


def spec_of(name: str) -> Sm90BackwardSpec:
    spec = backward_spec(
        ARCH, HEAD_DIM[name], of_keys=name != "dq", fused=name in ADD_UP_DQ, **PLAIN,
        order=ORDER.get(name, "any"),
    )  # fmt: skip
    assert isinstance(spec, Sm90BackwardSpec)
    return replace(spec, tile_m=64) if name == "fused" else spec


@functools.cache
def kernel(name: str, num_sms: int | None = None) -> tuple[Edged, Prepared]:
    """The PTX, and a launch; by default each CTA has an SM."""
    direction = f"backward_{'fused' if name in ADD_UP_DQ else name}"
    spec, head_dim = spec_of(name), HEAD_DIM[name]
    definition = table.find(direction, ARCH, head_dim).kernel
    entry = cache.compile(definition, spec, arch=ARCH)
    generator = torch.Generator().manual_seed(0)
    queries, heads = QUERIES_AND_HEADS[name]

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, head_dim, generator=generator).bfloat16()

    q, do = (normal(queries, heads) for _ in range(2))
    k, v = (normal(KEYS[name], HEADS_K) for _ in range(2))
    o, lse = attention_in_low_precision(q, k, v, causal=True)
    rows = padded_rows(queries, 1, varlen=False)
    stats = torch.zeros(2, heads, rows)
    stats[LSE].fill_(torch.inf)
    stats[LSE, :, :queries] = lse[0]
    stats[DELTA, :, :queries] = (o.float() * do.float()).sum(-1)[0].T
    written = {"dq": q} if name == "dq" else {"dk": k, "dv": v}
    tensors = {"q": q, "k": k, "v": v, "do": do, "stats": stats}
    tensors |= {at: torch.full_like(x, torch.nan) for at, x in written.items()}
    last = {"counter": torch.zeros(1, dtype=torch.int32)}
    if name in ADD_UP_DQ:
        last["sums"] = torch.full((heads, rows, head_dim), torch.nan)
        size = num_query_zeros(heads, rows, ordered=spec.ordered)
        last["zeroed"] = torch.zeros(size, dtype=torch.int32)
    splits = [] if name == "dq" else [1]
    arguments = [
        *tensors.values(), *[None] * 4, head_dim**-0.5, 1.0, 0, 0, *splits, CTAS[name],
        *last.values(),
    ]  # fmt: skip
    tensors |= last
    spans = [(x.data_ptr(), x.nbytes, at) for at, x in tensors.items()]
    (recorded,) = record(
        entry.read("kernel.o"), entry.read("kernel.ptx").decode(), arguments, spans,
        num_sms=num_sms or CTAS[name],
    )  # fmt: skip
    module, _, made = definition.target.partition(":")
    built = getattr(importlib.import_module(module), made)(spec)
    shared = built.names(0)["shared"]
    edges = {edge.name: shared[edge.name][:2] for edge in built.pipeline}
    return Edged(recorded.text, edges), launch_recorded(recorded)


dq, dkdv, fused, hd128, short, two, *in_order = (Planter(name) for name in KERNELS)
ordered = in_order[0]
of_keys = (dkdv, fused, hd128)
add_up_dq = (fused, hd128)

# -- edges of the pipeline: statistics of queries come with Q and dO, and are read as data

STATISTICS = (BULK_LOAD, SHARED)
for edge in ("q", "do", "k", "v", "work"):
    bugs_of_an_edge(dq, edge, SHARED)
# The wait for Q's buffer, which has dQ at the end, is longer than that for dO's.
for edge in ("q", "k", "v"):
    bug_of_a_stage(dq, edge, SHARED)
for planted in of_keys:
    for edge in ("q", "do", "k", "v", "work"):
        # With dQ the first waits for V and for work are not reached with more uses than one.
        bugs_of_an_edge(planted, edge, *STATISTICS, nth=0 if planted is dkdv else -1)
    bug_of_a_stage(planted, "q", *STATISTICS)
# With dQ, more uses than two of a K need no wait for its stage; at head_dim 64, where K has more
# stages than the queue of works, none do.
for planted in (dkdv, short):
    bug_of_a_stage(planted, "k", *STATISTICS)
for planted in add_up_dq:  # dK/dV releases V with K, which is waited for before
    bug_of_a_stage(planted, "v", *STATISTICS)
bug_of_a_stage(dkdv, "do", *STATISTICS)  # the others release Q's stages later, and have as many
for planted in add_up_dq:
    # In "hd128" the turns order dS of one warpgroup and dQ of the other, and at the end the wait for
    # the stage through which dK and dV are stored.
    bugs_of_an_edge(planted, "ds", SHARED, implied=planted is hd128)
    bug_of_a_stage(planted, "ds", SHARED)


def bugs_of_the_load(planted: Planter, first: str, other: str) -> None:
    @planted(f"expect_tx of {first} 16 too many", "deadlock")
    def _(p: Edged) -> Planted:
        line = p.of(f"{first}_full", EXPECT)[0]
        return p.changed_operand(line, operand(p, line), "add.s32", 16), all_waits(p)

    @planted(f"expect_tx of {first} 16 too few", "barrier race")
    def _(p: Edged) -> Planted:
        line = p.of(f"{first}_full", EXPECT)[0]
        changed = p.changed_operand(line, operand(p, line), "sub.s32", 16)
        return changed, lines_of(p, LOAD, BULK_LOAD, EXPECT, WGMMA, SHARED)

    @planted("barrier after the initialisation dropped", "barrier race")
    def _(p: Edged) -> Planted:
        return p.drop(p.one(r"bar\.sync\s+0")), lines_of(p, r"mbarrier\.", LOAD, BULK_LOAD)

    @planted(f"a release of {other}_empty doubled", "barrier deadlock race")
    def _(p: Edged) -> Planted:
        line = p.of(f"{other}_empty", ARRIVE)[0]
        return p.double(line), [line, *all_waits(p), *lines_of(p, LOAD, *STATISTICS)]


bugs_of_the_load(dq, "k", "v")
bugs_of_the_load(dkdv, "do", "q")
bugs_of_the_load(fused, "do", "q")
bugs_of_the_load(hd128, "do", "q")

# -- products, whose waits are, in the order of the text, those of the first tile, of the loop and
#    of the end. Of two waits in a row the first alone does not matter.


def bug_of_waits(planted: Planter, which: Iterable[int], names: str) -> None:
    @planted(f"waits for {names} dropped", "wgmma race")
    def _(p: Edged) -> Planted:
        lines = p.all(r"wgmma\.wait_group")
        return p.drop(*(lines[nth] for nth in which)), range(1, len(p.lines))


WAITS = {
    dq: ("the first S", "the first dP", "S", "dP and dQ", "the last dQ"),
    dkdv: (
        "the first S", "the first dP", "the first dV", "S", "dP and dK", "dV", "the last dK",
    ),
}  # fmt: skip
for planted, waits in WAITS.items():
    nth = 0
    for names in waits:
        count = 1 + names.count(" and ")
        bug_of_waits(planted, range(nth, nth + count), names)
        nth += count

# In the kernels that add up dQ each S and dP has a wait in the code with a mask, and one in that
# without. Left out are those for the last dV and dK, for which the last dQ's stands too.
WAITS_OF_BOTH = {
    fused: {
        "the first S": (0, 2), "the first dP": (1, 3), "the second dV": (4,),
        "the second dK and S": (5, 6, 8), "the second dP": (7, 9), "dQ": (10,), "dV": (11,),
        "dK and S": (12, 13, 15), "dP": (14, 16), "the last dQ but one": (19,),
        "the last dQ": (20,),
    },
    hd128: {
        "the first S": (0, 2), "the first dP": (1, 3), "the second dV and dK and S": (4, 5, 6, 8),
        "the second dP": (7, 9), "dQ": (10,), "dV and dK and S": (11, 12, 13, 15), "dP": (14, 16),
        "the last dQ but one": (17,), "the last dQ": (-1,),
    },
}  # fmt: skip
for planted, by_names in WAITS_OF_BOTH.items():
    for names, which in by_names.items():
        bug_of_waits(planted, which, names)


def bugs_of_a_product(planted: Planter, last: str, accumulating: int) -> None:
    """`accumulating` numbers a product that adds to something, and is the first of a burst."""

    @planted(f"a step of {last} left out", "value")
    def _(p: Edged) -> Planted:
        line = p.after(WGMMA, p.all(r"wgmma\.commit")[-2])
        return p.drop(line), [line]

    @planted("fence of a product dropped", "wgmma", "note")
    def _(p: Edged) -> Planted:
        return p.drop(p.one(r"wgmma\.fence", nth=accumulating)), lines_of(p, WGMMA)


bugs_of_a_product(dq, "the last dQ", -1)
bugs_of_a_product(dkdv, "the last dK", -1)
bugs_of_a_product(fused, "the last dQ", -4)
bugs_of_a_product(hd128, "the last dQ", 2)

# -- P and dS


def bugs_of_scores(planted: Planter) -> None:
    @planted("the mask is one too wide", "value")
    def _(p: Edged) -> Planted:
        # The bounds of P's mask, or of that of dS, in the loop.
        lines = p.all(r"min\.s32")
        changed = p
        for line in lines:
            result = p[line].split()[1].rstrip(",")
            changed = changed.insert(line, f"add.s32 {result}, {result}, 1;", behind=True)
        return changed, lines

    @planted("an exponential left out", "value")
    def _(p: Edged) -> Planted:
        line = p.one(r"ex2\.approx", nth=-1)
        target, source = re.findall(r"%[fr]\d+", p[line])
        return p.with_line(line, f"mov.b32 {target}, {source};"), [line]


for planted in (dq, *of_keys):
    bugs_of_scores(planted)


@dq("lse of the next row", "value uninitialised out-of-bounds")
def _(p: Edged) -> Planted:
    line = p.one(r"^\s*ld\.global")
    return p.swap(line, r"\]", "+4]"), [line]


def statistics_of_other_queries(planted: Planter) -> None:
    @planted("statistics of other queries", "value")
    def _(p: Edged) -> Planted:
        line = p.before(r"ld\.shared\.v2\.f32", p.one(r"ex2\.approx", nth=-1))
        at = re.findall(r"\[(%\w+)", p[line])[0]
        return p.changed_operand(line, at, "xor.b32", 16), [line]


for planted in of_keys:
    statistics_of_other_queries(planted)

# -- dS in shared memory, and dQ


def bugs_of_ds(planted: Planter) -> None:
    @planted("proxy fence behind dS dropped", "proxy-fence")
    def _(p: Edged) -> Planted:
        lines = [p.before(r"fence\.proxy\.async", line) for line in p.of("ds_full", ARRIVE)]
        return p.drop(*lines), lines_of(p, WGMMA, SHARED)

    # Without the bar.warp.sync before it the arrival says the same: a warp that has not diverged runs in
    # step, and the emulator orders what one lane releases like all that its warp has done.
    @planted("dS arrives before its last word is stored", "race")
    def _(p: Edged) -> Planted:
        changed = p
        for line in p.of("ds_full", ARRIVE):
            store = p.before(r"stmatrix", line)
            behind = p.after(r"^\$L", line)
            changed = changed.drop(store).insert(behind, p[store].strip(), behind=True)
        return changed, lines_of(p, WGMMA, r"^\$L")

    @planted("dS of the other stage", "value race uninitialised")
    def _(p: Edged) -> Planted:
        line = p.of("ds_full", WAIT)[0]
        store = p.before(r"stmatrix", p.of("ds_full", ARRIVE)[1])
        return p.swap(store, r"\]", "+16]") if "+" not in p[store] else p.drop(store), [store, line]


for planted in add_up_dq:
    bugs_of_ds(planted)


@fused("dS is released before its product is waited for", "race")
def _(p: Edged) -> Planted:
    release = p.of("ds_empty", ARRIVE)[0]
    wait = p.before(r"wgmma\.wait_group\S*\s+1", release)
    early = early_release(p, release)
    return p.drop(release).insert(wait, early), lines_of(p, WGMMA, SHARED)


def adds(p: Edged) -> list[int]:
    return p.all(ADD)


def bugs_of_additions(planted: Planter) -> None:
    @planted("a reduction left out", "value")
    def _(p: Edged) -> Planted:
        return p.drop(adds(p)[-1]), adds(p)

    @planted("dQ replaces the sum", "value")
    def _(p: Edged) -> Planted:
        line = adds(p)[0]
        if "bulk" in p[line]:
            copy = "cp.async.bulk.global.shared::cta.bulk_group"
            return p.swap(line, r"cp\.reduce\S*", copy), [line]
        return p.swap(line, r"red\S*", "st.global.v4.f32"), [line]

    @planted("a turn is not given", "deadlock")
    def _(p: Edged) -> Planted:
        # The one of the loop.
        line = p.before(TURN, adds(p)[0]) if planted is hd128 else p.all(TURN)[2]
        return p.drop(line), [*p.all(r"bar\.sync"), *all_waits(p)]

    @planted("dQ is added to the next tile", "value out-of-bounds")
    def _(p: Edged) -> Planted:
        line, nbytes = adds(p)[0], 4 * 64 * HEAD_DIM[planted.kernel]
        return p.swap(line, r"\[(%rd\d+)\]", rf"[\1+{nbytes}]"), [line]

    @planted("keys past the end are not masked", "value")
    def _(p: Edged) -> Planted:
        lines = p.all(r"selp\.b32\s+%r\d+, %r\d+, 0, %p")
        changed = p
        for line in lines:
            target, source = re.findall(r"%r\d+", p[line])
            changed = changed.with_line(line, f"mov.b32 {target}, {source};")
        return changed, lines


for planted in add_up_dq:
    bugs_of_additions(planted)

# -- the staging of dQ, of which the first is that of the loop

STAGE = r"^\s*st\.shared\.v4\.f32"


@hd128("proxy fence behind the staged dQ dropped", "proxy-fence")
def _(p: Edged) -> Planted:
    line = p.before(r"fence\.proxy\.async", adds(p)[0])
    return p.drop(line), [*adds(p), *p.all(STAGE)]


@hd128("dQ is staged before the reduction has read the one before", "race")
def _(p: Edged) -> Planted:
    return p.drop(*p.all(r"bulk\.wait_group\.read")), [*adds(p), *p.all(STAGE)]


@hd128("a part of dQ is staged twice", "value race uninitialised")
def _(p: Edged) -> Planted:
    line = p.before(STAGE, adds(p)[0])
    to = re.findall(r"\[(%\w+)", p[line])[0]
    return p.changed_operand(line, to, "sub.s32", 512), [line, *adds(p)]


# -- additions in a fixed order

bugs_of_an_edge(ordered, "dq", SHARED, ADD)
bug_of_a_stage(ordered, "dq", SHARED, ADD)


def bugs_of_an_order(planted: Planter) -> None:
    @planted("the staging is free before the addition has read it", "race")
    def _(p: Edged) -> Planted:
        return p.drop(*p.all(r"bulk\.wait_group\.read")), [*adds(p), *p.all(STAGE)]

    @planted("an addition is not counted", "deadlock")
    def _(p: Edged) -> Planted:
        return p.drop(*p.all(COUNTED)[-1:]), all_waits(p)

    @planted("an addition is counted twice", "deadlock")
    def _(p: Edged) -> Planted:
        line = p.all(COUNTED)[-1]
        return p.swap(line, r", (%r\d+|1);", ", 2;"), all_waits(p)

    @planted("an addition counts without a release", "race")
    def _(p: Edged) -> Planted:
        line = p.all(COUNTED)[0]
        return p.swap(line, "release", "relaxed"), [*adds(p), *p.all(STAGE)]

    @planted("a count is read without an acquire", "race")
    def _(p: Edged) -> Planted:
        line = p.all(r"ld\.acquire")[0]
        return p.swap(line, "acquire", "relaxed"), [*adds(p), *p.all(STAGE)]


for planted in in_order:
    bugs_of_an_order(planted)

# -- storing


def staged(p: Edged) -> int:
    return p.before(r"fence\.proxy\.async", p.one(STORE))


def bugs_of_the_store(planted: Planter) -> None:
    @planted("a warp stages a word 16 rows further", "value race")
    def _(p: Edged) -> Planted:
        line = p.before(r"st\.shared\.b32", staged(p))
        return p.swap(line, r"\]", f"+{16 * 128}]"), lines_of(p, SHARED)

    @planted("proxy fence before the store dropped", "proxy-fence")
    def _(p: Edged) -> Planted:
        return p.drop(staged(p)), lines_of(p, STORE, SHARED)

    @planted("barrier behind the staging dropped", "race proxy-fence")
    def _(p: Edged) -> Planted:
        line = p.after(r"bar\.sync", staged(p))
        return p.drop(line), lines_of(p, STORE, SHARED)

    @planted("buffers are released before the store has read them", "race")
    def _(p: Edged) -> Planted:
        wait = p.after(r"bulk\.wait_group", p.all(STORE)[-1])
        return p.drop(wait), lines_of(p, STORE, LOAD, SHARED)

    @planted("the rows of a warpgroup are stored twice", "value race")
    def _(p: Edged) -> Planted:
        line = p.one(STORE)
        row = re.findall(r"\{(.*?)\}", p[line])[0].split(",")[1].strip()
        return p.changed_operand(line, row, "and.b32", ~64), [line]


for planted in (dq, dkdv):
    bugs_of_the_store(planted)

# -- works that follow one another, and rows that are stored from registers

ROW_STORE = r"^\s*st\.global\.v4\.b32"


def bugs_of_works(planted: Planter) -> None:
    @planted("dK and dV begin with what the work before has left", "value")
    def _(p: Edged) -> Planted:
        lines = p.all(r"setp\.ne\.b32 adds")
        changed = p
        for line in lines:
            changed = changed.swap(line, r"setp\.ne\.b32 adds, \S+ 0", "setp.eq.b32 adds, 0, 0")
        return changed, lines

    @planted("a part of a row is stored elsewhere", "value out-of-bounds")
    def _(p: Edged) -> Planted:
        line = rows_stored_in_the_loop(p)[-1]
        return p.swap(line, r"\]", "+256]"), [line]

    @planted("rows past the end are stored", "value out-of-bounds race")
    def _(p: Edged) -> Planted:
        lines = rows_stored_in_the_loop(p)
        return p.drop(p.before(r"^\s*@%p\d+ bra", lines[-1])), lines


def rows_stored_in_the_loop(p: Edged) -> list[int]:
    end = p.before(WGMMA, p.all(ROW_STORE)[-1])  # behind it are the stores of the last work
    return [line for line in p.all(ROW_STORE) if line < end]


for planted in add_up_dq:
    bugs_of_works(planted)


def k_of_the_other_stage(name: str, nth: int) -> None:
    @hd128(f"{name} takes K of the other stage", "value race uninitialised")
    def _(p: Edged) -> Planted:
        line = p.all(r"and\.b32\s+%r\d+, %r\d+, 32768")[nth]
        at = p[line].split()[1].rstrip(",")
        return p.insert(line, f"xor.b32 {at}, {at}, 32768;", behind=True), lines_of(p, WGMMA, LOAD)


# In the loop; the two behind it are of the end.
k_of_the_other_stage("dQ", -4)
k_of_the_other_stage("S", -3)


# The other warpgroup's dQ needs the K whose stage the next one takes.
@short("the turn is not shared", "deadlock")
def _(p: Edged) -> Planted:
    give = p.before(TURN, p.before(TURN, adds(p)[0]))
    take = p.after(r"bar\.sync", give)
    return p.drop(give, take), [*p.all(r"bar\.sync"), *all_waits(p)]


# -- zeros of the sums, by a warp of their own

ZERO = r"^\s*st\.global\.v4\.f32"


def bugs_of_zeros(planted: Planter) -> None:
    @planted("wait for zeros_full dropped", "value race")
    def _(p: Edged) -> Planted:
        return p.drop(*p.of("zeros_full", WAIT)), [*adds(p), *p.all(ZERO)]

    @planted("zeros_full is not signalled", "deadlock")
    def _(p: Edged) -> Planted:
        return p.drop(*p.of("zeros_full", ARRIVE)), all_waits(p)

    @planted("zeros are signalled before they are there", "value race")
    def _(p: Edged) -> Planted:
        line = p.one(r"ld\.acquire")
        return p.with_line(line, f"mov.b32 {p[line].split()[1]} 1000;"), [*adds(p), *p.all(ZERO)]

    @planted("a row of zeros left out", "value")
    def _(p: Edged) -> Planted:
        return p.drop(*p.all(ZERO)[::4]), [*adds(p), *p.all(ZERO)]

    @planted("zeros of the next tile", "value race out-of-bounds")
    def _(p: Edged) -> Planted:
        nbytes = 4 * 128 * HEAD_DIM[planted.kernel]
        lines = p.all(ZERO)
        changed = p
        for line in lines:
            changed = changed.swap(line, r"\]", f"+{nbytes}]")
        return changed, [*adds(p), *lines]


for planted in add_up_dq:
    bugs_of_zeros(planted)


# Zeros that the other CTA has written.
@two("a tile of zeros counts without a release", "race")
def _(p: Edged) -> Planted:
    changed = p
    for line in p.all(r"red\.release"):
        changed = changed.swap(line, "release", "relaxed")
    return changed, [*adds(p), *p.all(ZERO)]


@two("the count of zeros is read without an acquire", "race")
def _(p: Edged) -> Planted:
    return p.swap(p.one(r"ld\.acquire"), "acquire", "relaxed"), [*adds(p), *p.all(ZERO)]


# -- tiles

COUNTER = r"atom\.\S*inc"  # the zeros warp has another one, behind that of the tiles of keys


def bugs_of_tiles(planted: Planter) -> None:
    @planted("a tile left out", "value")
    def _(p: Edged) -> Planted:
        line = p.all(COUNTER)[0]
        taken = p[line].split(",")[0].split()[-1]
        return p.insert(line, f"add.s32 {taken}, {taken}, 1;", behind=True), [line]

    @planted("the counter does not return to 0", "value")
    def _(p: Edged) -> Planted:
        line = p.all(COUNTER)[0]
        return p.changed_operand(line, p[line].split()[-1].rstrip(";"), "add.s32", 1), [line]


for planted in (dq, *of_keys):
    bugs_of_tiles(planted)


BUGS = [bug for planter in (dq, *of_keys, short, two, *in_order) for bug in planter.bugs]


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_is_clean(name: str) -> None:
    _, prepare = kernel(name)
    run = prepare(None)
    for schedule, seed in SEEDS:
        done, right = run(schedule, seed)
        assert done.findings == [] and right, (schedule, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", *ORDER])
def test_no_cta_waits_for_one_that_has_not_started(name: str) -> None:
    """On one SM, the second begins when the first has ended."""
    _, prepare = kernel(name, num_sms=1)
    run = prepare(None)
    for schedule, seed in SEEDS:
        done, right = run(schedule, seed)
        assert done.findings == [] and right, (schedule, seed)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_bug_is_found(bug: Bug) -> None:
    assert list(found_on(bug, kernel(bug.kernel), SEEDS)) == []


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_bug_is_found_on_more_seeds(bug: Bug) -> None:
    assert list(found_on(bug, kernel(bug.kernel), MORE_SEEDS[::10])) == []
