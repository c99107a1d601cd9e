"""Waits that an mbarrier may lap: the next phase ends without the waiting warp, which then finds
the parity changed twice. An early version of the latent decode hung on an H100 for this reason."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from cute_attn.emulator.machine import Run
from cute_attn.emulator.runner import Buffer, run_ptx

from . import mbarrier_init
from . import planted_kernels as small
from .mutations import STARVING, Ptx
from .test_planted_bugs import launch_small

RELEASE = "mbarrier.arrive{}.shared::cta.b64 _, [%r4+16];"


def observed(release: str) -> small.Small:
    """The pipeline with a third warp, which waits for every tile and then executes `release`."""
    observer = f"""OBSERVER:
    shl.b32 %r4, %r2, 3; add.s32 %r4, %bars, %r4;
    {small.wait("SEEN", "[%r4]", "%r3", "seen")}
    {release}
    add.s32 %r2, %r2, 1; setp.eq.u32 %p2, %r2, 2;
    @%p2 xor.b32 %r3, %r3, 1;
    @%p2 mov.u32 %r2, 0;
    add.s32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, {small.TILES};
    @%p3 bra OBSERVER;
    bra END;

    CONSUMER:
    shl"""
    text = small.PIPELINE.text.replace("CONSUMER:\n    shl", observer)
    start = "setp.eq.u32 %p1, %warp, 1;"
    text = text.replace(start, f"setp.eq.u32 %p4, %warp, 2; @%p4 bra OBSERVER; {start}")
    if release:
        text = re.sub(r"(\[%bars\+(16|24)\]), 32;", r"\1, 64;", text)
    return dataclasses.replace(small.PIPELINE, text=text, block=96)


def run(kernel: small.Small, schedule: int, seed: int = 0) -> tuple[Run, bool]:
    return launch_small(kernel)(None)(schedule, seed)


@pytest.mark.parametrize("schedule", range(4))
def test_the_next_phase_does_not_need_the_waiting_warp(schedule: int) -> None:
    kernel = observed("")
    lines = Ptx(kernel.text)
    done, _ = run(kernel, schedule)
    (found,) = [f for f in done.errors if f.check == "barrier"]
    assert (found.line, found.other_line) == (lines.mark("seen"), lines.mark("copy"))
    assert "waits for phase 0" in found.message and "but phase 1 ends without it" in found.message


@pytest.mark.parametrize("schedule", range(4))
@pytest.mark.parametrize("order", ["", ".relaxed.cta"])
def test_an_arrival_orders_the_wait(schedule: int, order: str) -> None:
    done, right = run(observed(RELEASE.format(order)), schedule)
    assert done.findings == [] and right


def test_a_starved_warp_is_lapped() -> None:
    """On some seeds the observer comes last, and waits for a phase that never ends."""
    runs = [run(observed(""), STARVING, seed)[0] for seed in range(6)]
    hung = [done for done in runs if done.stopped]
    assert 0 < len(hung) < len(runs)
    (deadlock,) = [f for f in hung[0].errors if f.check == "deadlock"]
    assert "warp 2" in deadlock.message


# Warp 0 reads with ldmatrix what warp 1 then stores over. A barrier between them is missing.
OVERLAID = """
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out];
    mov.u32 %bars, dynamic; and.b32 %r1, %thread, 31; shl.b32 %r2, %r1, 4; add.u32 %r2, %bars, %r2;
    setp.eq.u32 %p1, %warp, 1;
    @!%p1 st.shared.v4.b32 [%r2], {%r1, %r1, %r1, %r1};
    bar.sync 0;
    @%p1 bra WRITE;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3, %r4, %r5, %r6}, [%r2]; // @read
    mul.wide.u32 %rd3, %r1, 16; add.s64 %rd2, %rd2, %rd3;
    st.global.v4.b32 [%rd2], {%r3, %r4, %r5, %r6};
    bra END;
    WRITE:
    mov.u32 %r7, 999;
    st.shared.v4.b32 [%r2], {%r7, %r7, %r7, %r7}; // @write
    END:
"""


def test_a_starved_read_sees_what_is_stored_over_it() -> None:
    text = Ptx(small.module(OVERLAID))
    right, wrong = 0, 0
    expected = np.repeat(np.arange(32, dtype=np.uint32), 4).reshape(4, 8, 4)
    for seed in range(8):
        out = np.zeros(128, np.uint32)
        done = run_ptx(text.text, block=64, args=[small.ramp(4), Buffer(out, False)],
                       dynamic_shared=512, schedule=STARVING, seed=seed)  # fmt: skip
        (found,) = done.errors
        assert found.check == "race"
        assert {found.line, found.other_line} == {text.mark("read"), text.mark("write")}
        # Lane l has column l % 4 of row l / 4 in each of the four matrices.
        ordered = np.array_equal(out.reshape(8, 4, 4).transpose(2, 0, 1), expected)
        right, wrong = right + ordered, wrong + (not ordered)
    assert right and wrong


# What `mbarrier_init` runs on a GPU: without a fence behind the initialisation, or with it.
UNFENCED = {name: text for name, (text, _) in mbarrier_init.variants().items() if "none" in name}


@pytest.mark.parametrize("name", UNFENCED)
def test_a_missing_fence_behind_an_initialisation_is_a_note(name: str) -> None:
    """Threads that arrive need the fence only behind a relaxed barrier of the cluster."""
    fenced = mbarrier_init.variants()[name.replace("none", "mbarrier_init")][0]
    for text, expected in (
        (UNFENCED[name], "the peer's threads arrive, cluster barrier release" not in name),
        (fenced, False),
    ):
        arguments = [np.arange(0, 4 * 2048, 4, dtype=np.uint32), counts := np.zeros(3, np.uint32)]
        done = run_ptx(
            text, grid=2, block=128, args=[*arguments, 2], dynamic_shared=mbarrier_init.SHARED
        )
        assert done.errors == [] and counts.tolist() == [0, 0, 4]
        assert any("mbarrier_init" in f.message for f in done.findings) == expected
