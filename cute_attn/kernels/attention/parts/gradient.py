"""The elementwise part of the backward: P from S and the log-sum-exp, dS from P and dP.

    P  = exp(S factor - lse)               S factor are the scaled scores
    dS = P (dP - delta)                    the gradient of scores, before the softmax scale
    dS = P (1 - tanh^2) (dP - delta)       with a softcap, where P = exp(tanh factor - lse)

Functions work on pairs of a thread's values. If the thread has a row of S, `lse` and `delta` are
the row's scalars. If the thread has a column of S, or a row of S^T, `lse` and `delta` are indexed
like the values. Hidden values may have any P and dS: the caller replaces the hidden P and dS by 0
(`mask.mask_words`).
"""

from __future__ import annotations

import math
from typing import Any

import cutlass.cute as cute
from cutlass import Float16, Float32

from ...common.exp2 import Pair, exp2_pairs
from ...common.numbers import LOG2_E
from ...common.ptx.math import exp2, subtract_towards_zero
from .softmax import Scaling

# The unit of P where dS is computed from rounded P. In float16, P would underflow in a row with
# 2^14 keys, or under a cap that saturates. P is at most 1.
PROBABILITY_UNIT = {Float16: 2.0**-14}


def probabilities(
    values: Any,
    columns: range,
    lse: Any,
    scaling: Scaling,
    *,
    softcap: bool,
    packed: bool = True,
    unit: float = 1.0,
    small_lse: bool = False,
) -> tuple[list[Pair], list[Pair]]:
    """Return (P, P times the slope of the softcap), in units, of an even number of columns of S.
    Without a softcap both are the same list. `packed` says that the GPU has packed instructions
    (sm_100). `small_lse` says that no lse is large (`statistics.LARGE`), so that an exponent may be
    one multiply-add.

    P uses the same approximate tanh as the forward. The log-sum-exp contains this tanh's error, so
    the errors largely cancel in P. The slope has the form e (1 + |tanh|)^2 with e = exp(-2 |x|),
    whose relative error is 2^-11 everywhere. The form 1 - tanh^2 would keep the tanh's error where
    the tanh saturates.
    """
    pairs = [(values[j], values[j + 1]) for j in columns[::2]]
    inside: list[Pair] = []
    if softcap:
        inside = [_times(pair, _both(scaling.before_tanh), packed) for pair in pairs]
        pairs = [
            (cute.math.tanh(x, fastmath=True), cute.math.tanh(y, fastmath=True)) for x, y in inside
        ]
    # The product is rounded first, as in lse. Fused with the subtraction, a large score and its own
    # lse would differ by lse's rounding. The subtraction rounds towards zero: ptxas fuses a
    # subtraction that rounds as the product does.
    p = []
    for pair, j in zip(pairs, columns[::2], strict=True):
        if small_lse:
            factor = _both(scaling.factor * Float32(LOG2_E))
            offset = _times_plus(_pair(lse, j), _both(Float32(-LOG2_E)), -math.log2(unit), packed)
            x, y = _fma(pair, factor, offset, packed)
        else:
            scores = _times(pair, _both(scaling.factor), packed)
            above_lse = _minus(scores, _pair(lse, j), packed, rnd="rz")
            x, y = _times_plus(above_lse, _both(Float32(LOG2_E)), -math.log2(unit), packed)
        p.append((cute.math.exp2(x, fastmath=True), cute.math.exp2(y, fastmath=True)))
    if not softcap:
        return p, p
    exponents = [
        _times((_abs(x), _abs(y)), _both(Float32(-2.0 * LOG2_E)), packed) for x, y in inside
    ]
    if packed:
        exponentials = exp2_pairs(exponents, bounded=True)
    else:
        exponentials = [(exp2(x), exp2(y)) for x, y in exponents]
    above = [(1.0 + _abs(x), 1.0 + _abs(y)) for x, y in pairs]
    slopes = [
        _times(e, _times(a, a, packed), packed) for e, a in zip(exponentials, above, strict=True)
    ]
    return p, [_times(x, slope, packed) for x, slope in zip(p, slopes, strict=True)]


def score_gradients(
    p: list[Pair],
    dp: Any,
    columns: range,
    delta: Any,
    *,
    packed: bool = True,
    unit: float = 1.0,
) -> list[Pair]:
    """dS of the columns whose P, times the slope of a softcap, are the pairs `p`, in units."""
    factor = _both(Float32(unit))
    gradients = []
    for pair, j in zip(p, columns[::2], strict=True):
        values, subtracted = (dp[j], dp[j + 1]), _pair(delta, j)
        if unit == 1.0:
            difference = _minus(values, subtracted, packed)
        else:
            subtracted = _times(subtracted, _both(Float32(-unit)), packed)
            difference = _fma(values, factor, subtracted, packed)
        gradients.append(_times(pair, difference, packed))
    return gradients


def _times(x: Pair, y: Pair, packed: bool) -> Pair:
    if packed:
        return cute.arch.mul_packed_f32x2(x, y)
    return x[0] * y[0], x[1] * y[1]


def _times_plus(x: Pair, y: Pair, z: float, packed: bool) -> Pair:
    return _times(x, y, packed) if z == 0.0 else _fma(x, y, _both(Float32(z)), packed)


def _fma(x: Pair, y: Pair, z: Pair, packed: bool) -> Pair:
    if packed:
        return cute.arch.fma_packed_f32x2(x, y, z)
    return cute.math.fma(x[0], y[0], z[0]), cute.math.fma(x[1], y[1], z[1])


def _minus(x: Pair, y: Pair, packed: bool, rnd: str = "rn") -> Pair:
    if packed:
        return cute.arch.sub_packed_f32x2(x, y, **({} if rnd == "rn" else {"rnd": rnd}))
    if rnd == "rz":
        return subtract_towards_zero(x[0], y[0]), subtract_towards_zero(x[1], y[1])
    return x[0] - y[0], x[1] - y[1]


def _abs(x: Any) -> Any:
    return cute.math.absf(x)


def _both(x: Any) -> Pair:
    return x, x


def _pair(x: Any, j: int) -> Pair:
    """The values of columns j and j + 1; a scalar is returned twice."""
    return (x, x) if isinstance(x, Float32) else (x[j], x[j + 1])
