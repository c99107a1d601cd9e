"""Branches on values that the program chooses by what nothing has written: which way they go is not
decided. The branch is a note; what comes of it in global memory, or for other threads, an error."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cute_attn.emulator.machine import Run
from cute_attn.emulator.runner import Buffer, run_ptx

from .test_instructions import CHOSEN, STORED, module


def lines(body: str) -> str:
    """Each label and each instruction on a line of its own."""
    parts = re.split(r"(?<=;)|(?<=\b[A-Z]:)|(?<=\b[A-Z]{2}:)|(?<=[A-Z]{3}:)", body)
    return "\n".join(part.strip() for part in parts)


def run(body: str) -> Run:
    """`body` behind CHOSEN: %r10 is 1 or 2 in lanes 0 to 7, and either in the others."""
    args = [np.zeros(32, np.uint32), Buffer(np.zeros(64, np.uint32), initialised=False)]
    return run_ptx(module(lines(CHOSEN + body)), args=args, dynamic_shared=1 << 12)


def opcode(text: str) -> str:
    return text.split()[text.startswith("@")].rstrip(";")


def found(body: str) -> set[tuple[str, str]]:
    """Severity and opcode of each finding."""
    findings = run(body).findings
    assert {f.check for f in findings} <= {"uninitialised"}
    return {(f.severity, opcode(f.ptx)) for f in findings}


NOTE, ERROR = ("note", "bra"), ("error", "st.global.u32")

# ---- what may differ is stored

LOOPS = {
    "bottom": """
        mov.u32 %r20, 0; mov.u32 %r14, 0;
    LOOP:
        add.s32 %r20, %r20, 7; add.s32 %r14, %r14, 1;
        setp.lt.s32 %p4, %r14, %r10;
        @%p4 bra LOOP;
    """,
    "top": """
        mov.u32 %r20, 0; mov.u32 %r14, 0;
    LOOP:
        setp.ge.s32 %p4, %r14, %r10;
        @%p4 bra END;
        add.s32 %r20, %r20, 7; add.s32 %r14, %r14, 1;
        bra LOOP;
    END:
    """,
    "never entered": """
        mov.u32 %r20, 0; sub.s32 %r14, %r10, 1;
        setp.eq.s32 %p4, %r14, 0;
        @%p4 bra END;
    LOOP:
        add.s32 %r20, %r20, 7; sub.s32 %r14, %r14, 1;
        setp.ne.s32 %p4, %r14, 0;
        @%p4 bra LOOP;
    END:
    """,
    "of loops": """
        mov.u32 %r20, 0; mov.u32 %r14, 0;
    LOOP:
        mov.u32 %r15, 0;
    INNER:
        add.s32 %r20, %r20, %r15; add.s32 %r15, %r15, 1;
        setp.lt.s32 %p4, %r15, 3;
        @%p4 bra INNER;
        add.s32 %r14, %r14, 1;
        setp.lt.s32 %p4, %r14, %r10;
        @%p4 bra LOOP;
    """,
    "of a branch": """
        mov.u32 %r20, 0; mov.u32 %r14, 0;
    LOOP:
        setp.gt.u32 %p5, %thread, 16;
        @%p5 bra NEXT;
        add.s32 %r20, %r20, 7;
    NEXT:
        add.s32 %r14, %r14, 1;
        setp.lt.s32 %p4, %r14, %r10;
        @%p4 bra LOOP;
    """,
    "its count": """
        mov.u32 %r20, 0;
    LOOP:
        add.s32 %r20, %r20, 1;
        setp.lt.s32 %p4, %r20, %r10;
        @%p4 bra LOOP;
    """,
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_what_a_loop_leaves_must_not_be_stored(loop: str) -> None:
    assert found(loop + STORED) == {NOTE, ERROR}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_it_may_be_in_lanes_that_store_nothing(loop: str) -> None:
    """As in FlashAttention-4's combination of splits: rows beyond the last one are not stored."""
    mask = "setp.gt.u32 %p6, %thread, 7; @%p6 bra OUT;"
    result = run(loop + mask + STORED + "OUT:")
    assert {f.severity for f in result.findings} == {"note"}


def test_the_finding_names_what_nothing_has_written() -> None:
    (error,) = run(LOOPS["bottom"] + STORED).errors
    assert error.ptx.startswith("st.global.u32")
    assert "lanes 0xffffff00" in error.message
    assert "ld.shared.u32" in str(error)


TWO_WAYS = {
    "one": "mov.u32 %r20, 5; setp.eq.s32 %p4, %r10, {}; @%p4 bra OUT; mov.u32 %r20, 6; OUT:",
    "two": "setp.eq.s32 %p4, %r10, {}; @%p4 bra A; mov.u32 %r20, 6; bra B; A: mov.u32 %r20, 5; B:",
}


@pytest.mark.parametrize("value", [1, 2])
@pytest.mark.parametrize("ways", TWO_WAYS.values(), ids=TWO_WAYS)
def test_what_two_ways_leave_must_not_be_stored(ways: str, value: int) -> None:
    assert found(ways.format(value) + STORED) == {NOTE, ERROR}


def test_a_guard_that_two_ways_leave() -> None:
    body = """
        mov.u32 %r20, 5; setp.eq.s32 %p5, %r20, 5; setp.eq.s32 %p4, %r10, 1;
        @%p4 bra OUT; setp.eq.s32 %p5, %r20, 6; OUT:
        @%p5 mov.u32 %r20, 7;
    """
    assert found(body + STORED) == {NOTE, ("error", "mov.u32")}


def test_other_values_may_be_stored() -> None:
    """Here %r21 differs, and %r20 does not."""
    body = "mov.u32 %r20, 5; setp.eq.s32 %p4, %r10, 1; @%p4 bra OUT; mov.u32 %r21, 6; OUT:"
    assert found(body + STORED) == {NOTE}


def test_what_is_skipped_either_way_may_be_stored() -> None:
    """No lane whose branch is undecided has ever added to %r20: one more iteration would not."""
    body = """
        mov.u32 %r20, 0; mov.u32 %r14, 0;
    LOOP:
        setp.gt.u32 %p5, %thread, 7;
        @%p5 bra NEXT;
        add.s32 %r20, %r20, 7;
    NEXT:
        add.s32 %r14, %r14, 1;
        setp.lt.s32 %p4, %r14, %r10;
        @%p4 bra LOOP;
    """
    assert found(body + STORED) == {NOTE}


def test_a_second_branch_on_the_same_predicate() -> None:
    body = """
        mov.u32 %r20, 5; setp.eq.s32 %p4, %r10, 1;
        @%p4 bra A; mov.u32 %r21, 6; A:
        @%p4 bra B; mov.u32 %r20, 6; B:
    """
    assert found(body + STORED) == {NOTE, ERROR}


def test_a_value_that_is_set_anew() -> None:
    assert found(LOOPS["bottom"] + "mov.u32 %r20, 9;" + STORED) == {NOTE}


# ---- memory that lanes have written behind the branch


@pytest.mark.parametrize("space", ["shared", "local"])
def test_memory_that_a_loop_leaves(space: str) -> None:
    where = "[%r2+512]" if space == "shared" else "[stack]"
    body = f"""
        st.{space}.u32 {where}, 0; mov.u32 %r14, 0;
    LOOP:
        setp.ge.s32 %p4, %r14, %r10;
        @%p4 bra END;
        ld.{space}.u32 %r20, {where}; add.s32 %r20, %r20, 7; st.{space}.u32 {where}, %r20;
        add.s32 %r14, %r14, 1;
        bra LOOP;
    END:
        ld.{space}.u32 %r21, {where}; mov.u32 %r20, %r21;
    """
    local = "" if space == "shared" else ".local .align 4 .b8 stack[16];\n"
    assert found(local + body + STORED) == {NOTE, ERROR}


def test_shared_memory_that_a_bulk_copy_reads() -> None:
    body = """
        st.shared.u32 [%r2+512], 5; mov.u32 %r14, 0; mov.u32 %r20, 0;
    LOOP:
        add.s32 %r14, %r14, 1;
        setp.ge.s32 %p4, %r14, %r10;
        @%p4 bra END;
        st.shared.u32 [%r2+512], 6;
        bra LOOP;
    END:
        fence.proxy.async.shared::cta;
        bar.warp.sync -1;
        setp.ne.u32 %p5, %thread, 0;
        @%p5 bra OUT;
        cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1+512], 128;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    OUT:
    """
    # In lanes 8 to 31 the loop ends at once; had it not, it would have stored.
    swapped = body.replace("setp.ge", "setp.gt")
    errors = [f for f in run(swapped).errors if f.check == "uninitialised"]
    assert len(errors) == 1 and errors[0].ptx.startswith("cp.async.bulk.global")


def test_what_other_lanes_get_by_shuffle() -> None:
    """All lanes shuffle, but 8 to 31 come there by a branch that might have gone elsewhere."""
    body = """
        mov.u32 %r20, 5; setp.gt.u32 %p5, %thread, 7;
        @!%p5 bra MEET;
        setp.eq.s32 %p4, %r10, 2;
        @%p4 bra AWAY;
    MEET:
        shfl.sync.idx.b32 %r21, %r20, 31, 31, -1;
        @%p5 bra AWAY;
        mov.u32 %r20, %r21;
        mul.wide.u32 %rd3, %thread, 4; add.s64 %rd3, %rd2, %rd3;
        st.global.u32 [%rd3], %r20;
    AWAY:
    """
    assert found(body) == {NOTE, ERROR}


# ---- effects behind the branch

EFFECTS = {
    "st.global.u32": "st.global.u32 [%rd2], 1;",
    "st.u32": "st.u32 [%rd2], 1;",
    "red.global.add.u32": "red.global.add.u32 [%rd1], 1;",
    "atom.shared.add.u32": "atom.shared.add.u32 %r21, [%r1+512], 1;",
    "mbarrier.arrive": "mbarrier.arrive.shared.b64 _, [%r1+1024];",
    "mbarrier.expect_tx": "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1+1024], 0;",
    "bar.arrive": "bar.arrive 1, 64;",
    "barrier.cta.sync": "barrier.cta.sync 1, 64;",
    "barrier.cluster.arrive": "barrier.cluster.arrive; barrier.cluster.wait;",
    "cp.async.bulk": "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1+1536], 16; "
    "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
    "cp.async.mbarrier": "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1+1024];",
    "tcgen05.alloc": "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+2048], 32;",
    "setmaxnreg": "setmaxnreg.dec.sync.aligned.u32 24;",
}
READY = """
    st.shared.u32 [%r1+512], 0; st.shared.v4.u32 [%r1+1536], {%r1, %r1, %r1, %r1};
    mbarrier.init.shared.b64 [%r1+1024], 1000; fence.proxy.async.shared::cta; bar.sync 0;
"""
# Where nothing is written in lane 31, all lanes choose the same.
ALONE = "shfl.sync.idx.b32 %r10, %r10, 31, 31, -1; setp.eq.s32 %p4, %r10, {};"


def errors_of(body: str) -> list[str]:
    return [opcode(f.ptx) for f in run(body).errors if f.check == "uninitialised"]


@pytest.mark.parametrize("effect", EFFECTS.values(), ids=EFFECTS)
def test_an_effect_behind_the_branch(effect: str) -> None:
    """Lanes go there."""
    body = READY + ALONE.format(2) + "@%p4 bra OUT;" + effect + "OUT:"
    assert errors_of(body)[0] == opcode(effect)


STATIC = {name: effect for name, effect in EFFECTS.items() if name != "st.u32"}


@pytest.mark.parametrize("effect", STATIC.values(), ids=STATIC)
def test_an_effect_on_the_other_way(effect: str) -> None:
    """Lanes do not go there, but nothing else keeps them from it."""
    body = READY + ALONE.format(1) + "@%p4 bra OUT;" + effect + "OUT:"
    assert errors_of(body)[0] == opcode(effect)


def test_an_effect_that_something_else_keeps_lanes_from() -> None:
    body = """
        mov.u32 %r20, 5; setp.eq.s32 %p4, %r10, 1;
        @%p4 bra OUT;
        setp.gt.u32 %p5, %thread, 7;
        @%p5 bra OUT;
    """
    assert found(body + STORED + "OUT:") == {NOTE}


@pytest.mark.parametrize("value", [1, 2])
def test_an_early_exit(value: int) -> None:
    """Ways meet only at the end: whether lanes store is open."""
    body = f"mov.u32 %r20, 5; setp.eq.s32 %p4, %r10, {value}; @%p4 bra GO; ret; GO:"
    assert found(body + STORED) == {NOTE, ERROR}


def test_an_effect_where_ways_have_met() -> None:
    body = "mov.u32 %r20, 5; setp.eq.s32 %p4, %r10, 1; @%p4 bra OUT; mov.u32 %r21, 6; OUT:"
    assert found(body + "bar.sync 0;" + STORED + "red.global.add.u32 [%rd1], 1;") == {NOTE}


def test_an_assertion_behind_the_branch_does_not_hide_where_ways_meet() -> None:
    body = """
        mov.u32 %r20, 5; setp.eq.s32 %p4, %r10, 1;
        @%p4 bra OUT;
        setp.gt.u32 %p5, %thread, 99;
        @!%p5 bra OUT;
        trap;
    OUT:
    """
    assert found(body + STORED) == {NOTE}


# ---- other uses of such a value

USES = {
    "brx": "targets: .branchtargets A, B; sub.s32 %r11, %r10, 1; brx.idx %r11, targets; A: B:",
    "exit": "setp.eq.s32 %p4, %r10, 1; @%p4 exit;",
    "vote": "setp.eq.s32 %p4, %r10, 1; vote.sync.any.pred %p5, %p4, -1;",
    "redux": "redux.sync.add.u32 %r11, %r10, -1;",
    "red": "red.global.add.u32 [%rd1], %r10;",
    "atom": "atom.shared.add.u32 %r11, [%r1+512], %r10;",
    "arrive": "mbarrier.arrive.shared.b64 _, [%r1+1024], %r10;",
    "expect_tx": "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1+1024], %r10;",
    "barrier": "barrier.cta.arrive %r10, 64;",
    "bytes of a copy": "shl.b32 %r11, %r10, 4; "
    "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1+1536], %r11; "
    "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
    "parameter": "cvt.u64.u32 %rd3, %r10; mov.u64 %rd4, x; sub.s64 %rd3, %rd3, %rd3; "
    "add.s64 %rd4, %rd4, %rd3; ld.param.u64 %rd5, [%rd4];",
    "generic store": "st.u32 [%rd2], %r10;",
    "predicated reduction": "setp.eq.s32 %p4, %r10, 1; @%p4 red.global.add.u32 [%rd1], 1;",
    "predicated arrival": "setp.eq.s32 %p4, %r10, 1; "
    "@%p4 mbarrier.arrive.shared.b64 _, [%r1+1024];",
    "predicated copy": "setp.eq.s32 %p4, %r10, 1; "
    "@%p4 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1+1536], 16; "
    "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_other_use_is_an_error(use: str) -> None:
    assert errors_of(READY + use)


def test_rows_that_stmatrix_stores_over_a_chosen_value() -> None:
    """What it stores counts, and that is not a choice among values that are known."""
    body = """
        st.shared.u32 [%r2+512], %r10;
        shl.b32 %r11, %lane, 4; add.s32 %r11, %r11, %r1;
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r11+512], {%r3};
        bar.warp.sync -1;
        ld.shared.u32 %r12, [%r2+512]; setp.gt.s32 %p4, %r12, 0;
        @%p4 bra OUT; OUT:
    """
    assert found(body) == {("error", "bra")}


def test_a_branch_by_an_index_between_them() -> None:
    """All targets of the branch lie on ways from the branch to where the ways meet."""
    body = """
        mov.u32 %r20, 5; and.b32 %r11, %thread, 1; setp.eq.s32 %p4, %r10, 1;
        @%p4 bra OUT;
        targets: .branchtargets A, B;
        brx.idx %r11, targets;
    A:  mov.u32 %r20, 6; bra OUT;
    B:  mov.u32 %r20, 7;
    OUT:
    """
    assert found(body + STORED) == {NOTE, ERROR}
    assert found(body.replace("%r20, 6", "%r21, 6").replace("%r20, 7", "%r21, 7") + STORED) == {
        NOTE
    }
