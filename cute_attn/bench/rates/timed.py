"""How a loop of PTX is timed. Needs no compiler.

A loop's operands are: $0 and $1 the clock at its start and at its end, $2 its nanoseconds, $3 a
value that depends on its results; then the inputs in the order of `INPUTS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INPUTS = ("count", "thread", "shared", "data", "size", "depth", "step", "mask")
COUNT, THREAD, SHARED, DATA, SIZE, DEPTH, STEP, MASK = (f"${i}" for i in range(4, 12))

BUFFER = 2048  # bytes from the start of shared memory to the data
UNROLL = 64  # operations of an iteration
CHAINS = 8  # independent chains of operations of a thread


@dataclass(frozen=True)
class TimedLoop:
    """A loop that is timed by clock64.

    Attributes:
        name: what one operation does.
        text: PTX, see the module's docstring.
        operations: operations of a warp in an iteration.
    """

    name: str
    text: str
    operations: int


def timed(
    body: Sequence[str],
    *,
    declare: Sequence[str] = (),
    before: Sequence[str] = (),
    after: Sequence[str] = (),
    result: str = "0",
) -> str:
    """PTX of `before`, then `count` times `body`, then `after`. `result` is kept alive."""
    return "\n".join(
        [
            "{",
            ".reg .pred more, first, lane0, done;",
            ".reg .b32 n, tid, lane, warp;",
            ".reg .b64 c0, c1, g0, g1;",
            *declare,
            f"mov.b32 tid, {THREAD};",
            "and.b32 lane, tid, 31;",
            "shr.u32 warp, tid, 5;",
            "setp.eq.s32 first, tid, 0;",
            "setp.eq.s32 lane0, lane, 0;",
            f"mov.b32 n, {COUNT};",
            *before,
            "bar.sync 0;",
            "mov.u64 g0, %globaltimer;",
            "mov.u64 c0, %clock64;",
            "again_${:uid}:",
            *body,
            "sub.s32 n, n, 1;",
            "setp.ne.s32 more, n, 0;",
            "@more bra again_${:uid};",
            "mov.u64 c1, %clock64;",
            "mov.u64 g1, %globaltimer;",
            *after,
            "mov.b64 $0, c0;",
            "mov.b64 $1, c1;",
            "sub.s64 $2, g1, g0;",
            f"mov.b32 $3, {result};",
            "bar.sync 0;",
            "}",
        ]
    )


def descriptors() -> list[str]:
    """PTX of the matrix descriptors `left` and `right`."""
    return [
        f"add.u32 s, {SHARED}, {BUFFER};",
        "shr.u32 s, s, 4;",
        "and.b32 s, s, 0x3FFF;",
        "cvt.u64.u32 s64, s;",
        # 128-byte swizzle, 1024 bytes from 8 rows to the next.
        f"or.b64 right, s64, {1 << 62 | 64 << 32 | 1 << 16};",
        "add.s64 left, right, 2048;",  # 32 KiB on
    ]
