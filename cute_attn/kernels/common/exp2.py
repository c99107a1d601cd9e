"""2 ** x of float32 on the FMA units, which takes load off the special function unit.

With n = floor(x) and f = x - n: 2 ** x = 2 ** n * 2 ** f. Adding 1.5 * 2 ** 23, rounded down,
leaves n in the low bits of the sum. A cubic approximates 2 ** f, and n is added to its exponent as
an integer. FlashAttention-4 introduced this method to attention.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .polynomial import polynomial
from .ptx.math import add_rounded_down

ROUND_DOWN = 1.5 * 2.0**23

# 1 + c1 f + c2 f^2 + c3 f^3: of the cubics that are exact at 0, the one with the smallest maximum
# relative error to 2 ** f on [0, 1), 8.55e-5; found by linear programming.
CUBIC = (1.0, 0.695115093, 0.227651764, 0.0770610215)
MAX_RELATIVE_ERROR = 8.8e-5  # of the cubic and float32's rounding together

SMALLEST, LARGEST = -127.0, 128.0  # the result is 0 up to SMALLEST, and inf from LARGEST on


Pair = tuple[Float32, Float32]


def exp2_pairs(pairs: list[Pair], *, bounded: bool = False) -> list[Pair]:
    """2 ** x of each x in the pairs, relative error at most 8.8e-5.

    Results are exact at integers, 0 for x <= -127 (-inf included) and inf for x >= 128. Between
    -127 and -126, where float32 is subnormal, results lie somewhere from 0 to 2 ** -126. A NaN
    gives an arbitrary value, so the caller has to detect NaNs itself. Pairs are interleaved step by
    step, because one pair alone is a chain of eight dependent instructions.

    Args:
        bounded: the caller guarantees that every x is at most 128.
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


def exp2_on_fma(x: Float32) -> Float32:
    """Compute 2 ** x of one x, which is at most 128, as `exp2_pairs` does, without packed
    instructions."""
    x = cute.arch.fmax(x, Float32(SMALLEST))
    shifted = add_rounded_down(x, Float32(ROUND_DOWN))
    fraction = x - (shifted - ROUND_DOWN)
    return _add_exponent(polynomial(fraction, CUBIC), shifted)


def exp2_mixed(pairs: list[Pair], on_fma: range) -> list[Pair]:
    """2 ** x of each x in the pairs. Pairs whose index is in `on_fma` run on the FMA units and need
    x <= 128; all other pairs run on the special function unit."""
    emulated = exp2_pairs([pairs[j] for j in on_fma], bounded=True)
    results = dict(zip(on_fma, emulated, strict=True))
    for j in range(len(pairs)):
        if j not in results:
            x, y = pairs[j]
            results[j] = cute.math.exp2(x, fastmath=True), cute.math.exp2(y, fastmath=True)
    return [results[j] for j in range(len(pairs))]


def _add_exponent(power: Float32, shifted: Float32) -> Float32:
    """power * 2 ** n, where the low bits of `shifted` hold n."""
    bits = cutlass.Int32(power.bitcast(Int32)) + (cutlass.Int32(shifted.bitcast(Int32)) << 23)
    return bits.bitcast(Float32)
