"""Small kernels, written in PTX, through the whole machine."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from cute_attn.emulator import build, coverage, library, machine
from cute_attn.emulator.machine import Run
from cute_attn.emulator.operands import PtxError
from cute_attn.emulator.runner import Buffer, run_ptx

REGISTERS = """
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<19>; .reg .b64 %rd<19>; .reg .f32 %f<9>;
"""


def module(body: str, *, parameters: str = ".param .u64 out", before: str = "") -> str:
    return f""".version 8.8
.target sm_90a
.address_size 64
.file 1 "kernel.py"
{before}
.visible .entry k({parameters})
{{
{REGISTERS}
{body}
    ret;
}}
"""


THREAD = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.s32 %r4, %r2, %r3, %r1;
"""


def store(value: str, kind: str = "u32") -> str:
    """Store a register at out[%r4]."""
    return f"""
    ld.param.u64 %rd1, [out];
    mul.wide.u32 %rd2, %r4, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.{kind} [%rd3], {value};
"""


def computed(body: str, threads: int = 32, blocks: int = 1, **options: Any) -> np.ndarray:
    """The value of %r10 in every thread."""
    out = np.zeros(threads * blocks, np.uint32)
    parts = {name: options.pop(name) for name in ("before",) if name in options}
    text = module(THREAD + body + store("%r10"), **parts)
    run = run_ptx(text, grid=blocks, block=threads, args=[Buffer(out, False)], **options)
    assert run.findings == []
    assert not run.stopped
    return out


def test_vector_add() -> None:
    body = (
        THREAD
        + """
    ld.param.u32 %r5, [n];
    setp.ge.s32 %p1, %r4, %r5;
    @%p1 bra DONE;
    mul.wide.s32 %rd4, %r4, 4;
    ld.param.u64 %rd5, [x];
    ld.param.u64 %rd6, [y];
    add.s64 %rd5, %rd5, %rd4;
    add.s64 %rd6, %rd6, %rd4;
    ld.global.f32 %f1, [%rd5];
    ld.global.f32 %f2, [%rd6];
    ld.param.f32 %f3, [scale];
    fma.rn.f32 %f4, %f1, %f3, %f2;
"""
        + store("%f4", "f32")
        + "DONE:"
    )
    parameters = ".param .u64 x, .param .u64 y, .param .u64 out, .param .u32 n, .param .f32 scale"
    x = np.arange(1000, dtype=np.float32)
    y = np.linspace(0, 1, 1000, dtype=np.float32)
    out = np.zeros_like(x)
    args = [Buffer(x, writable=False), y, Buffer(out, initialised=False), 1000, 0.5]
    run = run_ptx(module(body, parameters=parameters), grid=8, block=128, args=args)
    assert run.findings == []
    np.testing.assert_array_equal(out, x * np.float32(0.5) + y)
    assert run.counters["global_load_bytes"] == 8000
    assert run.counters["global_store_bytes"] == 4000
    assert run.by_opcode["fma.rn.f32"] == 32
    assert sum(run.by_instruction) == sum(run.by_opcode.values()) == sum(run.by_warp.values())


def test_divergence_and_reconvergence() -> None:
    out = computed(
        """
        and.b32 %r5, %r1, 3;
        mov.u32 %r10, 0;
        setp.eq.s32 %p1, %r5, 0;
        @%p1 bra A;
        setp.eq.s32 %p2, %r5, 1;
        @%p2 bra B;
        @!%p2 mov.u32 %r10, 30;
        bra END;
        A: mov.u32 %r10, 10;
        bra END;
        B: mov.u32 %r10, 20;
        END: add.s32 %r10, %r10, %r5;
        bar.warp.sync -1;
        """,
        threads=40,  # the last warp is not full
    )
    expected = [(10, 21, 32, 33)[i % 4] for i in range(40)]
    assert out.tolist() == expected


@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_loops(schedule: int) -> None:
    out = computed(
        """
        mov.u32 %r10, 0; mov.u32 %r6, 0;
        LOOP: add.s32 %r10, %r10, %r6;
        add.s32 %r6, %r6, 1;
        setp.le.s32 %p1, %r6, %r1;
        @%p1 bra LOOP;
        """,
        threads=64,
        blocks=3,
        schedule=schedule,
        seed=7,
    )
    assert out.tolist() == [i * (i + 1) // 2 for i in range(64)] * 3


def test_shared_memory_static_and_dynamic() -> None:
    body = """
        mov.u32 %r5, tile;
        shl.b32 %r6, %r1, 2;
        add.s32 %r7, %r5, %r6;
        st.shared.u32 [%r7], %r4;
        mov.u32 %r8, dynamic;
        add.s32 %r8, %r8, %r6;
        st.shared.u32 [%r8+16], %r1;
        bar.sync 0;
        xor.b32 %r9, %r1, 127;
        shl.b32 %r9, %r9, 2;
        add.s32 %r7, %r5, %r9;
        ld.shared.u32 %r10, [%r7];
        ld.shared.u32 %r11, [%r8+16];
        mad.lo.u32 %r10, %r11, 1000, %r10;
    """
    before = ".shared .align 4 .b8 tile[512]; .extern .shared .align 16 .b8 dynamic[];"
    out = computed(body, threads=128, blocks=2, before=before, dynamic_shared=16 + 512)
    expected = [1000 * t + 128 * c + (t ^ 127) for c in range(2) for t in range(128)]
    assert out.tolist() == expected


def test_local_memory_and_variables() -> None:
    out = computed(
        """
        { .local .align 8 .b8 depot[16]; .reg .b64 %SPL;
          mov.b64 %SPL, depot;
          st.local.u32 [%SPL+4], %r1;
          ld.local.u32 %r10, [%SPL+4]; }
        mov.u64 %rd4, table;
        ld.global.u32 %r11, [%rd4+4];
        ld.const.u32 %r12, [offset];
        add.s32 %r10, %r10, %r11;
        add.s32 %r10, %r10, %r12;
        """,
        before=".global .u32 table[3] = {5, 600, 7}; .const .u32 offset = 0x1000;",
    )
    assert out.tolist() == [i + 600 + 4096 for i in range(32)]


def test_indirect_branch() -> None:
    out = computed(
        """
        and.b32 %r5, %r1, 1;
        list: .branchtargets EVEN, ODD;
        brx.idx %r5, list;
        EVEN: mov.u32 %r10, 100; bra END;
        ODD: mov.u32 %r10, 200;
        END:
        """
    )
    assert out.tolist() == [100, 200] * 16


def test_device_function() -> None:
    out = computed(
        """
        { .param .b32 a; .param .b32 b; st.param.b32 [a], %r1;
          call.uni (b), twice, (a); ld.param.b32 %r10, [b]; }
        """,
        before=""".func (.param .b32 result) twice(.param .b32 x)
        { .reg .b32 %r<3>; .reg .pred %p<2>;
          ld.param.b32 %r1, [x];
          setp.lt.u32 %p1, %r1, 4;
          add.s32 %r2, %r1, %r1;
          st.param.b32 [result], %r2;
          @%p1 ret;
          add.s32 %r2, %r2, 1;
          st.param.b32 [result], %r2;
          ret; }""",
    )
    assert out.tolist() == [2 * i + (i >= 4) for i in range(32)]


def test_printf() -> None:
    text = module(
        """
        mov.u32 %r1, %tid.x;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra END;
        { .local .align 8 .b8 arguments[8];
        mov.u32 %r2, 42;
        st.local.u32 [arguments], %r2;
        mov.b64 %rd1, arguments;
        cvta.local.u64 %rd2, %rd1;
        mov.b64 %rd3, format;
        cvta.global.u64 %rd4, %rd3;
        .param .b64 param0; .param .b64 param1; .param .b32 retval0;
        st.param.b64 [param0], %rd4;
        st.param.b64 [param1], %rd2;
        call.uni (retval0), vprintf, (param0, param1);
        ld.param.b32 %r3, [retval0]; }
        END:
        """,
        parameters="",
        before="""
        .extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
        .global .align 1 .b8 format[] = "answer %d\\n";""",
    )
    run = run_ptx(text)
    assert run.findings == []
    assert run.output == "answer 42\n"


# ---- findings


def one_finding(run: Run, check: str) -> Any:
    assert [finding.check for finding in run.findings] == [check], run.findings
    return run.findings[0]


def test_a_finding_names_line_and_source() -> None:
    out = np.zeros(32, np.uint32)
    text = module(THREAD + ".loc 1 17 3\nadd.s32 %r10, %r11, 1;" + store("%r10"))
    found = one_finding(run_ptx(text, args=[out]), "uninitialised")
    assert found.ptx.startswith("st.global.u32")  # what depends on it
    assert found.other_ptx == "add.s32 %r10, %r11, 1;"  # where it comes from
    assert found.other_source == "kernel.py:17"
    assert found.other_line is not None
    assert text.splitlines()[found.other_line - 1] == "add.s32 %r10, %r11, 1;"
    assert "register %r10" in found.message
    assert (found.cta, found.warp, found.kernel) == (0, 0, "k")


EXCHANGE = """
    shl.b32 %r5, %r1, 2; mov.u32 %r6, tile; add.s32 %r6, %r6, %r5;
    xor.b32 %r7, %r1, 1; shl.b32 %r7, %r7, 2; mov.u32 %r8, tile; add.s32 %r7, %r8, %r7;
    st.shared.u32 [%r6], %r1;
    {after_write}
    ld.shared.u32 %r10, [%r7];
    {after_read}
    st.shared.u32 [%r6], 0;
"""


@pytest.mark.parametrize(
    ("after_write", "after_read", "kinds"),
    [
        ("bar.warp.sync -1;", "bar.warp.sync -1;", []),
        ("bar.sync 0;", "bar.sync 0;", []),
        ("", "bar.warp.sync -1;", ["read after write"]),
        ("bar.warp.sync -1;", "", ["write after read"]),
        # They wait for each other, and order nothing.
        ("bar.warp.sync -1;", "shfl.sync.bfly.b32 %r11, %r10, 1, 31, -1;", ["write after read"]),
        ("vote.sync.any.pred %p1, 1, -1;", "bar.warp.sync -1;", ["read after write"]),
    ],
)
def test_races_between_lanes_of_a_warp(after_write: str, after_read: str, kinds: list[str]) -> None:
    body = THREAD + EXCHANGE.format(after_write=after_write, after_read=after_read)
    before = ".shared .align 4 .b8 tile[128];"
    out = np.zeros(32, np.uint32)
    run = run_ptx(module(body + store("%r10"), before=before), args=[Buffer(out, False)], block=32)
    assert out.tolist() == [lane ^ 1 for lane in range(32)]  # lanes run in step here
    assert [(found.check, found.severity) for found in run.findings] == [("race", "note")] * len(
        kinds
    )
    for found, kind in zip(run.findings, kinds, strict=True):
        assert found.message.startswith(f"{kind} on shared memory at 0x"), found.message
        assert "bar.warp.sync" in found.message


STAGED = """
    ld.param.u64 %rd1, [out];
    shl.b32 %r5, %r1, 2; mov.u32 %r6, tile; add.s32 %r7, %r6, %r5;
    st.shared.u32 [%r7], %r1;
    fence.proxy.async.shared::cta;
    {after_write}
    setp.eq.u32 %p1, %r1, 0;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r6], 128;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group.read 0;
    {after_read}
    st.shared.u32 [%r7], 0;
    @%p1 cp.async.bulk.wait_group 0;
"""


@pytest.mark.parametrize(
    ("after_write", "after_read", "kinds"),
    [
        ("bar.warp.sync -1;", "bar.warp.sync -1;", []),
        ("", "bar.warp.sync -1;", ["read after write"]),
        ("bar.warp.sync -1;", "", ["write after read"]),
    ],
)
def test_a_lane_copies_what_the_others_have_written(
    after_write: str, after_read: str, kinds: list[str]
) -> None:
    """And they overwrite it: a copy that a lane starts and awaits is like a read of that lane."""
    body = THREAD + STAGED.format(after_write=after_write, after_read=after_read)
    out = np.zeros(32, np.uint32)
    before = ".shared .align 128 .b8 tile[128];"
    run = run_ptx(module(body, before=before), args=[Buffer(out, False)], block=32)
    assert out.tolist() == list(range(32))  # lanes run in step here
    assert [found.message.split(" on ")[0] for found in run.findings] == kinds
    for found in run.findings:
        assert (found.check, found.severity) == ("race", "note")
        assert "bar.warp.sync" in found.message


COPIED = """
    ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [in];
    mov.u32 %r6, tile; mov.u32 %r8, landed; setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r8], 32;
    bar.warp.sync -1;
    shl.b32 %r5, %r1, 4; add.s32 %r7, %r6, %r5; cvt.u64.u32 %rd3, %r5; add.s64 %rd2, %rd2, %rd3;
    cp.async.cg.shared.global [%r7], [%rd2], 16;
    {wait}
    {fence}
    bar.warp.sync -1;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r6], 512;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
"""
LANDED = """
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r8];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r8], 0;
    @!%p2 bra WAIT;
"""


@pytest.mark.parametrize("wait", ["cp.async.wait_all;", LANDED], ids=["wait_all", "mbarrier"])
@pytest.mark.parametrize("fence", ["fence.proxy.async.shared::cta;", ""])
def test_what_cp_async_writes_needs_a_proxy_fence(wait: str, fence: str) -> None:
    """Before a bulk copy reads it: cp.async writes through the generic proxy."""
    body = THREAD + COPIED.format(wait=wait, fence=fence)
    before = ".shared .align 128 .b8 tile[512];\n.shared .align 8 .b8 landed[8];"
    out, given = np.zeros(128, np.uint32), np.arange(128, dtype=np.uint32)
    run = run_ptx(
        module(body, parameters=".param .u64 out, .param .u64 in", before=before),
        args=[Buffer(out, False), given], block=32,
    )  # fmt: skip
    assert out.tolist() == given.tolist()
    assert {(found.check, found.severity) for found in run.findings} == (
        set() if fence else {("proxy-fence", "note")}
    )


def test_a_lane_by_itself_and_parts_of_a_word_do_not_race() -> None:
    body = """
        shl.b32 %r5, %r1, 1; mov.u32 %r6, tile; add.s32 %r6, %r6, %r5;
        st.shared.u16 [%r6], %r1;
        ld.shared.u16 %r10, [%r6];
        st.shared.u16 [%r6], %r10;
    """
    assert computed(body, before=".shared .align 4 .b8 tile[64];").tolist() == list(range(32))


@pytest.mark.parametrize("synchronise", ["bar.warp.sync -1;", ""])
def test_ldmatrix_behind_what_a_lane_has_written(synchronise: str) -> None:
    body = f"""
        shl.b32 %r5, %r1, 2; mov.u32 %r6, tile; add.s32 %r6, %r6, %r5;
        st.shared.u32 [%r6], %r1;
        {synchronise}
        shl.b32 %r7, %r1, 4; and.b32 %r7, %r7, 112; mov.u32 %r8, tile; add.s32 %r7, %r8, %r7;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r10}}, [%r7];
        st.shared.u32 [%r6], 0;  // behind what the whole warp has read
    """
    before = ".shared .align 16 .b8 tile[128];"
    out = np.zeros(32, np.uint32)
    run = run_ptx(
        module(THREAD + body + store("%r10"), before=before), args=[Buffer(out, False)], block=32
    )
    assert out.tolist() == list(range(32))
    assert [found.severity for found in run.findings] == ([] if synchronise else ["note"])


def test_checks_can_be_switched_off() -> None:
    out = np.zeros(32, np.uint32)
    text = module(THREAD + "add.s32 %r10, %r11, 1;" + store("%r10"))
    assert run_ptx(text, args=[out], checks=["race"]).findings == []


def test_bounds() -> None:
    out = np.zeros(16, np.uint32)
    run = run_ptx(module(THREAD + store("%r4")), args=[Buffer(out, name="the result")])
    found = one_finding(run, "out-of-bounds")
    assert "the result" in found.message
    assert out.tolist() == list(range(16))


def test_read_only_memory() -> None:
    out = np.zeros(32, np.uint32)
    run = run_ptx(module(THREAD + store("%r4")), args=[Buffer(out, writable=False)])
    assert run.errors
    assert not out.any()


def test_uninitialised_memory() -> None:
    out = np.zeros(32, np.uint32)
    text = module(
        "ld.param.u64 %rd1, [out]; ld.global.u32 %r1, [%rd1]; st.global.u32 [%rd1+4], %r1;"
    )
    run = run_ptx(text, args=[Buffer(out, initialised=False)], block=1)
    assert {finding.check for finding in run.findings} == {"uninitialised"}


def test_a_bad_launch() -> None:
    run = run_ptx(module("", parameters=""), block=2000)
    assert run.stopped
    assert run.errors


def test_required_sizes() -> None:
    text = module("", parameters="").replace("k()", "k() .reqntid 64, 1, 1")
    assert not run_ptx(text, block=64).stopped
    with pytest.raises(ValueError, match="reqntid"):
        run_ptx(text, block=(32, 2))


def test_deadlock() -> None:
    run = run_ptx(module("bar.sync 1, 96;", parameters=""), block=64)
    assert run.stopped
    assert "deadlock" in {finding.check for finding in run.errors}


@pytest.mark.parametrize("checks", [None, ()])
def test_a_loop_that_ends_by_a_made_up_value_is_given_up(checks: tuple[str, ...] | None) -> None:
    """The kernel makes progress all the time, so that this is no livelock."""
    text = module("""
        ld.param.u64 %rd1, [out];
        mov.u32 %r1, 0;
        LOOP:
        ld.global.u32 %r2, [%rd1+4096];
        add.s32 %r1, %r1, 1;
        st.global.u32 [%rd1], %r1;
        setp.ne.u32 %p1, %r2, 12345;
        @%p1 bra LOOP;
    """)
    options = {} if checks is None else {"checks": checks}
    run = run_ptx(text, block=1, args=[Buffer(np.zeros(1, np.uint32), False)], **options)
    assert run.stopped
    (given_up,) = (finding for finding in run.errors if finding.check == "deadlock")
    assert "no end in sight" in given_up.message
    if checks is None:
        assert "out-of-bounds" in {finding.check for finding in run.errors}


def test_errors_that_make_up_values_end_no_launch_that_gets_on() -> None:
    """Each CTA reads out of bounds and then counts: together they take longer than one may."""
    text = module(
        THREAD
        + """
        ld.param.u64 %rd1, [out];
        ld.global.u32 %r5, [%rd1+4096];
        mov.u32 %r6, 0;
        LOOP:
        add.s32 %r6, %r6, 1;
        setp.ne.u32 %p1, %r6, 200000;
        @%p1 bra LOOP;
        """
        + store("%r6")
    )
    out = np.zeros(8, np.uint32)
    run = run_ptx(text, grid=8, block=1, args=[Buffer(out, False)], num_sms=1)
    assert not run.stopped and {finding.check for finding in run.errors} == {"out-of-bounds"}
    assert (out == 200000).all() and sum(run.by_opcode.values()) > 4_000_000


def test_a_cooperative_launch_that_is_too_large_is_refused() -> None:
    run = run_ptx(module("", parameters=""), grid=3000, block=1024, cooperative=True)
    (error,) = run.errors
    assert run.stopped and "a cooperative launch of 3000 clusters" in error.message


def initialised_by_all(count: str = "128", between: str = "bar.sync 0;", second: str = "") -> Run:
    """All threads of four warps initialise two mbarriers, arrive at one, and wait for it."""
    text = module(
        f"""
        .shared .align 8 .b64 bars[2];
        mov.u32 %r1, %tid.x; mov.u32 %r8, bars;
        mbarrier.init.shared::cta.b64 [%r8], {count};
        mbarrier.init.shared::cta.b64 [%r8+8], 1;
        {between}
        {second}
        mbarrier.arrive.shared::cta.b64 %rd4, [%r8];
        WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r8], 0;
        @!%p1 bra WAIT;
        """,
        parameters="",
    )
    return run_ptx(text, block=128, schedule=1, seed=3)


def test_all_threads_may_initialise_an_mbarrier_to_one_count() -> None:
    (note,) = initialised_by_all().findings
    assert note.severity == "note"
    assert note.message.startswith("several threads initialise shared memory at ")


def test_a_barrier_orders_all_initialisations_before_a_use() -> None:
    run = initialised_by_all(between="")
    assert any("is not ordered before" in finding.message for finding in run.errors)


def test_threads_that_initialise_an_mbarrier_to_different_counts_race() -> None:
    run = initialised_by_all("%r1")
    assert {"barrier", "race"} & {finding.check for finding in run.errors}


def test_an_mbarrier_in_use_is_not_initialised_again() -> None:
    again = """
        setp.ge.u32 %p2, %r1, 32;
        @!%p2 mbarrier.arrive.shared::cta.b64 %rd5, [%r8];
        @%p2 mbarrier.init.shared::cta.b64 [%r8], 128;
    """
    run = initialised_by_all("128", second=again)
    assert {"barrier", "race"} & {finding.check for finding in run.errors}


# ---- the interface


def test_arguments() -> None:
    text = module(
        """
        ld.param.u64 %rd1, [out];
        ld.param.u8 %rs1, [small];
        ld.param.f64 %rd2, [wide];
        ld.param.u32 %r1, [block+8];
        cvt.u32.u16 %r2, %rs1;
        st.global.u32 [%rd1], %r2;
        st.global.b64 [%rd1+8], %rd2;
        st.global.u32 [%rd1+16], %r1;
        """,
        parameters=".param .u64 out, .param .u8 small, .param .f64 wide, "
        ".param .align 16 .b8 block[12]",
    )
    out = bytearray(24)
    run = run_ptx(text, args=[out, -1, 2.5, struct.pack("<3I", 1, 2, 3)], block=1)
    assert run.findings == []
    assert struct.unpack("<I4xdI4x", out) == (255, 2.5, 3)
    with pytest.raises(ValueError, match="takes 4 parameters"):
        run_ptx(text, args=[out])
    with pytest.raises(ValueError, match="12"):
        run_ptx(text, args=[out, 0, 0.0, b"short"])


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    out = torch.zeros(64, dtype=torch.int32)[::2]
    body = THREAD + "shl.b32 %r4, %r4, 1;" + store("%r1")
    assert run_ptx(module(body), args=[out]).findings == []
    assert out.tolist() == list(range(32))


def test_progress_can_end_a_launch() -> None:
    program = machine.programs(module("mov.u32 %r1, 1;", parameters=""))["k"]
    calls: list[tuple[int, int]] = []
    runner = machine.Machine(num_sms=1)
    runner.launch(program, (5000,), (32,), progress=lambda done, total: calls.append((done, total)))
    assert all(total == 5000 for _, total in calls)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    if calls:
        with pytest.raises(KeyboardInterrupt):
            runner.launch(program, (5000,), (32,), progress=stop)


def test_a_machine_runs_many_launches() -> None:
    text = module(
        "mov.u64 %rd1, counter; ld.global.u32 %r1, [%rd1]; add.s32 %r1, %r1, 1;"
        "st.global.u32 [%rd1], %r1; ld.param.u64 %rd2, [out]; st.global.u32 [%rd2], %r1;",
        before=".global .u32 counter = 40;",
    )
    out = np.zeros(1, np.uint32)
    program = machine.programs(text)["k"]
    runner = machine.Machine()
    runner.add_region(out.ctypes.data, 4, "out")
    for _ in range(2):
        run = runner.launch(program, block=(1,), params=struct.pack("<Q", out.ctypes.data))
        assert run.findings == []
        assert run.by_opcode["add.s32"] == 1
    assert out[0] == 42


def test_unknown_instructions() -> None:
    with pytest.raises(PtxError, match=r"unsupported instruction: 'add.foo.f32'.*PTX line \d+"):
        run_ptx(module("add.foo.f32 %f1, %f2, %f3;", parameters=""))


def test_vectors_of_eight_registers_are_refused() -> None:
    """PTX declares .v2 and .v4; .v8 is for loads and stores alone."""
    with pytest.raises(PtxError, match=r"registers of type \.v8 are not emulated"):
        run_ptx(module(".reg .v8 .b32 %v;", parameters=""))


def test_the_engine_agrees_on_the_enumerations() -> None:
    found = library.engine()  # asserts on names of checks and special registers
    assert len(set(found.counters)) == len(found.counters) > 0
    families = {form.family for form in found.forms.forms}
    assert families == coverage._TITLES.keys()
    assert all((build.ENGINE / f"{family}.c").is_file() for family in families)
