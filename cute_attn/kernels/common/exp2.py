"""2 ** x on the FMA units, for pairs of float32 that the special function unit has no time for.

With x = n + f, n the floor of x and 0 <= f < 1: 2 ** x = 2 ** n * 2 ** f. Adding 1.5 * 2 ** 23
rounding down leaves n in the low bits of the sum; a cubic gives 2 ** f; and n is added to the
exponent of that as an integer. (The split is the classic one; its use in attention is
FlashAttention-4's.)
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

ROUND_DOWN = 1.5 * 2.0**23

# 1 + c1 f + c2 f^2 + c3 f^3: the smallest maximum of the relative error to 2 ** f on [0, 1) among
# the cubics that are exact at 0, found by linear programming; 8.55e-5.
CUBIC = (1.0, 0.695115093, 0.227651764, 0.0770610215)
MAX_RELATIVE_ERROR = 8.8e-5  # with the rounding of float32

SMALLEST, LARGEST = -127.0, 128.0  # below, the result is 0; from there on, inf


Pair = tuple[Any, Any]


def exp2_pairs(pairs: list[Pair], *, bounded: bool = False) -> list[Pair]:
    """2 ** x of each x in the pairs, relative error at most 8.8e-5.

    Exact at integers; 0 at -inf and up to -127, inf from 128 on; between -127 and -126, where
    float32 is subnormal, somewhere from 0 to 2 ** -126. A NaN gives any value, and a caller that
    may meet one has to detect it elsewhere. Each step is done for all pairs before the next step,
    because a pair by itself is a chain of eight dependent instructions.

    Args:
        bounded: the caller knows that every x is at most 128.
    """
    add, sub = cute.arch.add_packed_f32x2, cute.arch.sub_packed_f32x2
    shift = (ROUND_DOWN, ROUND_DOWN)
    if not bounded:
        pairs = [(cute.arch.fmin(x, LARGEST), cute.arch.fmin(y, LARGEST)) for x, y in pairs]
    pairs = [(cute.arch.fmax(x, SMALLEST), cute.arch.fmax(y, SMALLEST)) for x, y in pairs]
    shifted = [add(pair, shift, rnd="rm") for pair in pairs]
    floors = [sub(pair, shift) for pair in shifted]
    fractions = [sub(pair, floor) for pair, floor in zip(pairs, floors, strict=True)]
    powers: list[Pair] = [(Float32(CUBIC[3]), Float32(CUBIC[3]))] * len(pairs)
    for c in (CUBIC[2], CUBIC[1], CUBIC[0]):
        powers = [
            cute.arch.fma_packed_f32x2(power, fraction, (c, c))
            for power, fraction in zip(powers, fractions, strict=True)
        ]
    return [
        (_add_exponent(p[0], n[0]), _add_exponent(p[1], n[1]))
        for p, n in zip(powers, shifted, strict=True)
    ]


def exp2_mixed(pairs: list[Pair], on_fma: range) -> list[Pair]:
    """2 ** x of each x in the pairs: of those whose index is in `on_fma` on the FMA units (each x
    at most 128), of the others on the special function unit."""
    emulated = exp2_pairs([pairs[j] for j in on_fma], bounded=True)
    results = dict(zip(on_fma, emulated, strict=True))
    for j in range(len(pairs)):
        if j not in results:
            x, y = pairs[j]
            results[j] = cute.math.exp2(x, fastmath=True), cute.math.exp2(y, fastmath=True)
    return [results[j] for j in range(len(pairs))]


def _add_exponent(power: Any, shifted: Any) -> Any:
    """power * 2 ** n, where n stands in the low bits of `shifted`."""
    bits = cutlass.Int32(power.bitcast(Int32)) + (cutlass.Int32(shifted.bitcast(Int32)) << 23)
    return bits.bitcast(Float32)
