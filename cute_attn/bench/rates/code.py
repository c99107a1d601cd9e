"""Timed loops of much machine code, to see what it takes until code has come."""

from __future__ import annotations

from .arithmetic import ARITHMETIC
from .timed import CHAINS, COUNT, TimedLoop, timed

INSTRUCTIONS_PER_KIB = 64  # of 16 bytes
BLOCK = 16  # instructions up to a jump, 256 bytes
JUMP = 37  # blocks, to another line than those that follow

_REGISTERS = [f"x{i}" for i in range(CHAINS + 2)]


def straight_code(kib: int) -> list[TimedLoop]:
    """`kib` KiB of machine code without a branch."""
    return [_loop("straight", [_fma(i) for i in range(kib * INSTRUCTIONS_PER_KIB)])]


def jumping_code(kib: int) -> list[TimedLoop]:
    """`kib` KiB of machine code in blocks, each of which jumps to a block far away."""
    blocks = kib * INSTRUCTIONS_PER_KIB // BLOCK
    order = [JUMP * i % blocks for i in range(blocks)]
    assert sorted(order) == list(range(blocks)), "the jumps must visit every block"
    after = dict(zip(order, [f"block_{b}_${{:uid}}" for b in order[1:]], strict=False))
    after[order[-1]] = "end_${:uid}"
    body = []
    for block in range(blocks):
        body.append(f"block_{block}_${{:uid}}:")
        body += [_fma(block * BLOCK + i) for i in range(BLOCK - 1)]
        # Always taken, but the assembler cannot know, and keeps the blocks in their order.
        body.append(f"@go bra {after[block]};")
    return [_loop("jumping", [*body, "end_${:uid}:"])]


def _fma(number: int) -> str:
    # A square, since two registers might be of one bank, from which one is read in a clock.
    x = _REGISTERS[number % CHAINS]
    return ARITHMETIC["fma"].format(x=x, y=x, z=_REGISTERS[-1])


def _loop(name: str, body: list[str]) -> TimedLoop:
    before = [f"mad.lo.u32 {x}, tid, {2 * i + 3}, 7;" for i, x in enumerate(_REGISTERS)]
    text = timed(
        body,
        declare=[f".reg .b32 {', '.join(_REGISTERS)};", ".reg .pred go;"],
        before=[*before, f"setp.gt.s32 go, {COUNT}, 0;"],
        after=[f"xor.b32 x0, x0, {x};" for x in _REGISTERS[1:]],
        result="x0",
    )
    return TimedLoop(name, text, sum("fma" in line for line in body))
