"""Timed loops of arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from .timed import COUNT, UNROLL, TimedLoop, timed

# x is the chain's register, y and z other registers.
ARITHMETIC = {
    "ex2": "ex2.approx.ftz.f32 {x}, {x};",
    "fma": "fma.rn.f32 {x}, {x}, {y}, {z};",
    "square": "fma.rn.f32 {x}, {x}, {x}, {z};",
    "add": "add.rn.f32 {x}, {x}, {y};",
    "mul": "mul.rn.f32 {x}, {x}, {y};",
    "max": "max.f32 {x}, {x}, {y};",
    "fma_bf16x2": "fma.rn.bf16x2 {x}, {x}, {y}, {z};",
    "pack_bf16x2": "cvt.rn.bf16x2.f32 {x}, {x}, {y};",
    "from_int": "cvt.rn.f32.s32 {x}, {x};",
    "int_mad": "mad.lo.s32 {x}, {x}, {y}, {z};",
    "int_add": "add.s32 {x}, {x}, {y};",
    "logic": "lop3.b32 {x}, {x}, {y}, {z}, 0xE8;",
    "permute": "prmt.b32 {x}, {x}, {y}, 0x5410;",
    "select": "selp.b32 {x}, {x}, {y}, odd;",
    "shuffle": "shfl.sync.bfly.b32 {x}, {x}, 1, 0x1f, -1;",
}
MIXES = {
    "fma and int_add": ("fma", "int_add"),
    "fma and logic": ("fma", "logic"),
    "fma and ex2": ("fma", "fma", "fma", "fma", "fma", "fma", "fma", "ex2"),
}


def _chain(names: Sequence[str], chains: int) -> str:
    registers = [f"x{i}" for i in range(chains + 2)]
    body = []
    for i in range(UNROLL):
        at = i % chains
        # A neighbour as the second source, so that the assembler cannot fold the chain.
        y, z = (registers[(at + 1) % chains], registers[-1]) if chains > 1 else registers[1:3]
        body.append(ARITHMETIC[names[i % len(names)]].format(x=registers[at], y=y, z=z))
    before = [f"mad.lo.s32 {x}, tid, {2 * i + 3}, 0x3f000001;" for i, x in enumerate(registers)]
    before += ["and.b32 n, tid, 1;", "setp.eq.s32 odd, n, 0;", f"mov.b32 n, {COUNT};"]
    sums = [f"xor.b32 x0, x0, {x};" for x in registers[1:]]
    return timed(
        body,
        declare=[f".reg .b32 {', '.join(registers)};", ".reg .pred odd;"],
        before=before,
        after=sums,
        result="x0",
    )


def arithmetic(chains: int) -> list[TimedLoop]:
    """Every operation, in `chains` chains of dependent operations a thread."""
    # The assembler adds two terms of a chain of sums at once.
    names = [name for name in ARITHMETIC if chains > 1 or name != "int_add"]
    loops = [TimedLoop(name, _chain([name], chains), UNROLL) for name in names]
    if chains > 1:
        loops += [TimedLoop(name, _chain(names, chains), UNROLL) for name, names in MIXES.items()]
    return loops
