"""Costs of PTX instructions, from a listing that names the lines of PTX."""

from __future__ import annotations

import pytest

from cute_attn.emulator.machine import programs
from cute_attn.timing import costs as module
from cute_attn.timing.costs import UNITS, Cost, NoLines, costs

PTX = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry made() .reqntid 32, 1, 1 {
  .reg .b32 %r<4>;
  .reg .pred %p<2>;
  mov.u32 %r0, %tid.x;
loop:
  fma.rn.f32 %r1, %r0, %r0, %r0;
  ex2.approx.ftz.f32 %r2, %r1;
  mad.lo.s32 %r0, %r0, %r2, 1;
  setp.ne.s32 %p0, %r0, 0;
  @%p0 bra loop;
  ret;
}
"""
CLOCKS = {"fma": 1.0, "imad": 2.0, "alu": 2.0, "xu": 8.0, "mma": 6.0, "ISETP": 3.0,
          "dispatch": 1.0, "dispatch xu": 2.0}  # fmt: skip


def listing(lines: list[tuple[int, str, int]]) -> str:
    """A listing of nvdisasm: the line of PTX, text and stall of each instruction."""
    found = ['\t.section\t.text.made,"ax",@progbits']
    for number, (line, text, stall) in enumerate(lines):
        if line:
            found.append(f'\t//## File ".nv_debug_ptx_txt", line {line}')
        found.append(f"        /*{number * 16:04x}*/   {text} ;  /* 0x0000000000000000 */")
        found.append(f"     /* 0x{stall << 41:016x} */")
    return "\n".join(found)


ONE_COPY = [
    (7, "S2R R0, SR_TID.X", 1),
    (9, "FFMA R1, R0, R0, R0", 4),
    (10, "MUFU.EX2 R2, R1", 2),
    (11, "IMAD R0, R0, R2, R3", 4),
    (12, "ISETP.NE.AND P0, PT, R0, RZ, PT", 5),
    (13, "BRA `(.L_x_0)", 5),
]


def made(monkeypatch: pytest.MonkeyPatch, text: str) -> list[Cost]:
    monkeypatch.setattr(module, "cubins", lambda image: [image])
    monkeypatch.setattr(module, "find_nvdisasm", lambda: None)
    monkeypatch.setattr(module, "disassemble", lambda *_, **__: text)
    (program,) = programs(PTX).values()
    return costs(program, b"", CLOCKS)


def of(cost: Cost, unit: str) -> float:
    return cost.units[UNITS.index(unit)]


def test_each_instruction_has_the_cost_of_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = listing(ONE_COPY)
    found = made(monkeypatch, text.replace("        /*0010*/", ".L_x_0:\n        /*0010*/"))
    _, fma, ex2, mad, setp, _, _ = found
    assert (of(fma, "issue"), of(fma, "fma"), fma.stall) == (1, 1, 4)
    assert (of(ex2, "xu"), of(ex2, "fma"), ex2.stall) == (8, 0, 2)
    assert (of(mad, "imad"), of(mad, "fma")) == (2, 1)
    assert of(setp, "alu") == 3  # its own clocks, not those of the unit
    assert [of(cost, "dispatch") for cost in (fma, ex2, mad, setp)] == [1, 2, 1, 1]


def test_copies_of_a_loop_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    body = ONE_COPY[1:5]
    text = listing([ONE_COPY[0], *body, *body, *body, ONE_COPY[5]])
    found = made(monkeypatch, text.replace("        /*0010*/", ".L_x_0:\n        /*0010*/"))
    assert of(found[2], "xu") == pytest.approx(8)
    assert of(found[1], "fma") == pytest.approx(1)


def test_each_copy_has_its_lines_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    body = ONE_COPY[1:5] * 3  # 8 instructions a line of 128 bytes
    text = listing([ONE_COPY[0], *body, ONE_COPY[5]])
    found = made(monkeypatch, text.replace("        /*0010*/", ".L_x_0:\n        /*0010*/"))
    assert found[2].lines == ((0,), (0,), (1,))


def test_code_without_lines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = listing([(0, text, stall) for _, text, stall in ONE_COPY[:5]])
    with pytest.raises(NoLines, match="CUTE_DSL_LINEINFO=1"):
        made(monkeypatch, text)
