"""What a recording says that warps do, in small kernels of PTX."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from cute_attn.emulator.recording import KINDS, Recording
from cute_attn.timing.costs import UNITS, Cost
from cute_attn.timing.steps import (
    Arrive,
    Await,
    Commit,
    Copy,
    Latencies,
    Memory,
    Product,
    TensorMemory,
    Wait,
    WarpItems,
    Work,
    launch_items,
)

LATENCIES = Latencies(4.0, 20.0, 24.0, 33.0, 30.0, 33.0, 270.0, 700.0)


def recorded(text: str, threads: int, dynamic_shared: int = 0, arguments: bytes = b"") -> Recording:
    """The recording of a launch of one CTA."""
    from cute_attn.emulator.machine import Machine, programs

    ((name, program),) = programs(text).items()
    machine = Machine(checks=("counters",), record_every=1)
    run = machine.launch(
        program, block=(threads, 1, 1), dynamic_shared=dynamic_shared, params=arguments
    )
    assert not run.findings
    return Recording(
        name, program, b"", (1, 1, 1), (threads, 1, 1), (1, 1, 1), 0, 32, 1, run.stream
    )


def items(recording: Recording, loop: int | None = None, copies: int = 1) -> list[WarpItems]:
    """The warps' items. A second block begins at the instruction `loop`, and has `copies`."""
    first = loop or len(recording.program.instructions)
    one = Cost((1.0,) + (0.0,) * (len(UNITS) - 1), 1.0)
    costs = [
        replace(one, block=1, copies=copies) if i >= first else one
        for i in range(len(recording.program.instructions))
    ]
    return launch_items(recording, costs, LATENCIES, Memory()).warps


HEADER = ".version 8.0\n.target sm_90a\n.address_size 64\n"
HAND_OVER = (
    HEADER
    + """
.visible .entry hand_over() .reqntid 64, 1, 1 {
  .shared .align 8 .b8 bar[8];
  .reg .b32 %r<4>; .reg .pred %p<3>; .reg .b64 %rd<2>;
  mov.u32 %r0, %tid.x;
  setp.ne.s32 %p0, %r0, 0;
  @%p0 bra ready;
  mbarrier.init.shared.b64 [bar], 1;
ready:
  bar.sync 0;
  setp.lt.u32 %p1, %r0, 32;
  @%p1 bra wait;
  and.b32 %r1, %r0, 31;
  setp.ne.s32 %p0, %r1, 0;
  @%p0 bra done;
  mbarrier.arrive.shared.b64 %rd0, [bar];
  bra done;
wait:
  mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0;
  @!%p2 bra wait;
done:
  ret;
}
"""
)


def test_a_wait_names_the_arrival_and_forgets_its_polls() -> None:
    waiting, arriving = (w.items for w in items(recorded(HAND_OVER, 64)))
    (arrival,) = (i for i in arriving if isinstance(i, Arrive) and i.object >> 56 == 0)
    (wait,) = (i for i in waiting if isinstance(i, Wait) and i.object >> 56 == 0)
    assert (wait.object, wait.phase) == (arrival.object, arrival.phase)
    # Both warps meet once at the named barrier, whatever the waiting warp has polled.
    kinds = Counter(type(i).__name__ for i in waiting)
    assert kinds["Wait"] == 2
    assert sum(i.units[0] for i in waiting if isinstance(i, Work)) < 14


SHARED = (
    HEADER
    + """
.visible .entry conflicts() .reqntid 32, 1, 1 {
  .shared .align 16 .b8 data[4096];
  .reg .b32 %r<4>;
  mov.u32 %r0, %tid.x;
  shl.b32 %r1, %r0, 4;
  mov.u32 %r2, data;
  add.s32 %r2, %r2, %r1;
  st.shared.b32 [%r2], %r0;
  ret;
}
"""
)


def test_bank_conflicts_are_wavefronts() -> None:
    ((one,),) = ([i for i in w.items if isinstance(i, Work)] for w in items(recorded(SHARED, 32)))
    assert one.wavefronts == 4
    assert one.units[0] == 6


def test_the_longest_chain_is_the_latency() -> None:
    text = SHARED.replace(
        "st.shared.b32 [%r2], %r0;", "ld.shared.b32 %r3, [%r2];\n  add.s32 %r0, %r3, 1;"
    )
    recording = recorded(
        text.replace("mov.u32 %r2, data;", "mov.u32 %r2, data;\n  st.shared.b32 [%r2], %r0;"), 32
    )
    ((one,),) = ([i for i in w.items if isinstance(i, Work)] for w in items(recording))
    # shl, add, load, add; moves are free
    assert one.latency == pytest.approx(4 + 4 + 30 + 4)


@pytest.mark.parametrize(("copies", "clocks"), [(1, 8 + 30 + 30 + 4), (2, 8 + 30 + 4)])
def test_loads_overlap_within_a_block_and_its_copies(copies: int, clocks: int) -> None:
    """A loop of two iterations, each of which loads and uses the value."""
    text = SHARED.replace(
        "st.shared.b32 [%r2], %r0;",
        """st.shared.b32 [%r2], %r0;
  mov.u32 %r1, 2;
again:
  ld.shared.b32 %r3, [%r2];
  add.s32 %r0, %r3, 1;
  sub.s32 %r1, %r1, 1;
  setp.ne.s32 %p0, %r1, 0;
  @%p0 bra again;""",
    ).replace(".reg .b32 %r<4>;", ".reg .b32 %r<4>; .reg .pred %p<1>;")
    recording = recorded(text, 32)
    opcodes = [i.opcode for i in recording.program.instructions]
    loop = opcodes.index("ld.shared.b32")
    ((one,),) = (
        [i for i in w.items if isinstance(i, Work)] for w in items(recording, loop, copies)
    )
    assert one.latency == pytest.approx(clocks)


def test_the_first_touch_of_a_line_misses_until_the_launch_ends() -> None:
    memory = Memory()
    assert memory.missed(0, 128, 0) and memory.missed(0, 128, 1)
    assert not memory.missed(64, 32, 0)
    assert memory.shared == pytest.approx(0.5)  # memory is read once for both CTAs
    memory.end_launch()
    assert not memory.missed(0, 128, 2)
    assert memory.missed(4096, 128, 2)
    assert memory.shared == pytest.approx(1.0)


def test_kinds_of_steps_are_in_the_order_of_the_engine() -> None:
    recording = recorded(HAND_OVER, 64)
    kinds = np.frombuffer(recording.steps, "i4").reshape(-1, 10)[:, 0]
    seen = {KINDS[kind] for kind in kinds}
    assert {"run", "arrive", "wait"} <= seen <= {"run", "arrive", "wait", "poll"}
    assert not any(isinstance(i, Copy) for w in items(recording) for i in w.items)


def test_steps_of_tcgen05() -> None:
    """A product with its shape, the commit that signals it, and a load with its bytes."""
    from cute_attn.emulator.machine import Machine, programs
    from cute_attn.emulator.runner import run_ptx
    from tests.emulator.test_instructions import product

    text = product(128, 16)
    run = run_ptx(
        text,
        block=128,
        args=[np.zeros(1, np.uint32), np.zeros((128, 16), np.float32)],
        dynamic_shared=1 << 13,
        machine=Machine(checks=("counters",), record_every=1),
    )
    one = (1, 1, 1)
    program = programs(text)["k"]
    first, *_ = items(Recording("k", program, b"", one, (128, 1, 1), one, 0, 32, 1, run.stream))
    (multiply,) = (i for i in first.items if isinstance(i, Product))
    assert (multiply.m, multiply.n, multiply.k, multiply.kind) == (128, 16, 16, 1)
    assert not multiply.from_tensor_memory and multiply.pair is None
    (commit,) = (i for i in first.items if isinstance(i, Commit))
    assert commit.number > multiply.number
    (load,) = (i for i in first.items if isinstance(i, TensorMemory))
    assert load == TensorMemory("tcgen05.ld", 16 * 32 * 4)
    waits = [i.kind for i in first.items if isinstance(i, Await)]
    assert waits == ["tcgen05.ld"]
