"""Launches on several cores: the same results, findings and counts as on one core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cute_attn.emulator import Emulator, cores
from cute_attn.emulator.machine import Machine, Run, programs
from cute_attn.emulator.program import Program
from cute_attn.emulator.runner import pack_arguments

CTAS = 7
MODULE = """.version 8.8
.target sm_90a
.address_size 64
.extern .func (.param .b32 r) {called} (.param .b64 a, .param .b64 b);
.shared .align 8 .b8 buffer[256];
.visible .entry k(.param .u64 x)
{{
    .reg .pred %p<9>; .reg .b32 %r<19>; .reg .b64 %rd<19>;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.s32 %r4, %r2, %r3, %r1;
    ld.param.u64 %rd1, [x];
    mul.wide.u32 %rd2, %r4, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r5, [%rd3];
    mad.lo.s32 %r6, %r5, 3, %r2;
    st.global.u32 [%rd3], %r6;
{body}
    ret;
}}
"""
RACE_IN_CTA_5 = """
    setp.ne.u32 %p1, %r2, 5;
    @%p1 bra END;
    mov.u32 %r7, buffer;
    st.shared.u32 [%r7], %r1;
    st.global.u32 [%rd3], %r1;
END:
"""
TRAPS_IN_CTAS_4_AND_5 = """
    setp.lt.u32 %p1, %r2, 4;
    setp.gt.u32 %p2, %r2, 5;
    @%p1 bra END;
    @%p2 bra END;
    trap;
END:
"""
NEXT_CTAS_WORD = "    ld.global.u32 %r7, [%rd3+256];"


def text(body: str = "", called: str = "vprintf") -> str:
    return MODULE.format(body=body, called=called)


def numbers() -> np.ndarray:
    """Words for all CTAs and one more, aligned as in CUDA, which decides about sectors."""
    room = np.zeros(64 * (CTAS + 1) + 128, np.uint32)
    first = (-room.ctypes.data % 512) // 4
    x = room[first : first + 64 * (CTAS + 1)]
    x[:] = np.arange(len(x))
    return x


def launch(program: Program, machine: Machine, x: np.ndarray, **options: Any) -> Run:
    machine.clear_regions()
    keep: list[Any] = []
    params = pack_arguments(program, [x], machine, keep)
    return machine.launch(program, (CTAS,), (64,), params=params, **options)


def run(
    body: str, number: int, times: int = 1, **options: Any
) -> tuple[np.ndarray, Run, Machine, int]:
    """What launches on `number` cores write and give, their machine, and whether it gave the
    cores up. x changes in place."""
    x = numbers()
    program, machine = programs(text(body))["k"], Machine(cores=number, **options)
    for _ in range(times):
        result = launch(program, machine, x)
    return x, result, machine, program in machine._one_core


def told(result: Run) -> tuple[Any, ...]:
    findings = [(f.check, f.severity, f.message, f.line, f.count, f.cta) for f in result.findings]
    counts = result.by_instruction, result.by_opcode, result.by_warp, result.counters
    return findings, result.stopped, counts


@pytest.mark.parametrize("number", [2, 3, 9])
@pytest.mark.parametrize("checks", [(), None], ids=["none", "all"])
def test_a_clean_launch_is_the_same(number: int, checks: Any) -> None:
    options = {} if checks is None else {"checks": checks}
    x, one, *_ = run("", 1, **options)
    y, several, machine, one_core = run("", number, **options)
    assert (x == y).all()
    assert told(one) == told(several)
    assert len(machine._parts) == min(number, CTAS)  # and the machine did use its cores
    assert not one_core


@pytest.mark.parametrize("checks", [(), None], ids=["none", "all"])
@pytest.mark.parametrize("body", [RACE_IN_CTA_5, TRAPS_IN_CTAS_4_AND_5, NEXT_CTAS_WORD])
def test_errors_are_those_of_one_core(body: str, checks: Any) -> None:
    """A launch with a finding runs again, from the memory that it began with."""
    options = {} if checks is None else {"checks": checks}
    for times in (1, 2):
        x, one, *_ = run(body, 1, times, **options)
        y, several, _, one_core = run(body, 2, times, **options)
        assert told(one) == told(several)
        if checks is None or one.stopped:  # else the next CTA's word is old or new
            assert (x == y).all()
            assert one.findings
            assert one_core


def test_other_schedules_and_traces_have_one_core() -> None:
    for options in ({"schedule": 1}, {"tracing": True}, {"record_every": 1}):
        _, _, machine, _ = run("", 4, **options)
        assert machine._parts == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", None),
        ("    atom.shared.add.u32 %r7, [buffer], 1;", None),
        ("    ld.volatile.shared.u32 %r7, [buffer];", None),
        ("    fence.proxy.async;", None),
        ("    atom.global.add.u32 %r7, [%rd3], 1;", "atom.global.add.u32"),
        ("    red.relaxed.gpu.global.add.u32 [%rd3], 1;", "red.relaxed.gpu.global.add.u32"),
        ("    ld.acquire.gpu.u32 %r7, [%rd3];", "ld.acquire.gpu.u32"),
        ("    ld.volatile.global.u32 %r7, [%rd3];", "ld.volatile.global.u32"),
        ("    st.release.gpu.global.u32 [%rd3], %r1;", "st.release.gpu.global.u32"),
        ("    membar.gl;", "membar.gl"),
        ("    mov.u32 %r7, %smid;", "%smid"),
        ("    mov.u64 %rd7, %clock64;", "%clock64"),
        (
            "    .reg .b128 %q1;\n"
            "    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q1;",
            "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128",
        ),
    ],
)
def test_what_ties_clusters_together(body: str, reason: str | None) -> None:
    x = np.zeros(64 * CTAS, np.uint32)
    machine, program = Machine(cores=2, checks=()), programs(text(body))["k"]
    launch(program, machine, x)
    assert cores.reason_for_one_core(program) == reason
    assert len(machine._parts) == (2 if reason is None else 0)


def test_progress_counts_the_clusters_of_all_cores() -> None:
    loop = """
    mov.u32 %r8, 0;
AGAIN:
    add.u32 %r8, %r8, 1;
    setp.lt.u32 %p3, %r8, 100000;
    @%p3 bra AGAIN;
"""
    seen: list[tuple[int, int]] = []

    def interrupted(ended: int, total: int) -> None:
        seen.append((ended, total))
        if len(seen) == 3:
            raise KeyboardInterrupt

    x = np.zeros(64 * CTAS, np.uint32)
    machine = Machine(cores=2, checks=())
    program = programs(text(loop))["k"]
    with pytest.raises(KeyboardInterrupt):
        launch(program, machine, x, progress=interrupted)
    assert [total for _, total in seen] == [CTAS] * 3
    assert all(ended <= CTAS for ended, _ in seen)


def test_the_default_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_ATTN_EMULATOR_CORES", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert 1 <= cores.default_cores() <= cores.MOST_CORES
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert cores.default_cores() == 1
    monkeypatch.setenv("CUTE_ATTN_EMULATOR_CORES", "3")
    assert cores.default_cores() == 3
    monkeypatch.setenv("CUTE_ATTN_EMULATOR_CORES", "many")
    with pytest.raises(ValueError, match="CUTE_ATTN_EMULATOR_CORES is 'many'"):
        Emulator()
    with pytest.raises(ValueError, match="cores is 0"):
        Emulator(cores=0)
