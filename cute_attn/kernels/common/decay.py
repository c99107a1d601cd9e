"""exp(x) and 2 ** x for factors that multiply a state at every step.

A state with a long memory has a factor close to 1, often equal at every step, so that rounding
errors add up over the steps. Near 1 the special function unit errs by up to 1.4 * 2 ** -24.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .numbers import LN_2
from .polynomial import polynomial
from .ptx.math import exp2

NEAR_0 = 2.0**-4
TAYLOR = tuple(1.0 / math.factorial(n) for n in range(6))  # error < 1e-10 where |x| < NEAR_0


def decay_exp(x: Any) -> Any:
    """exp(x) of a float32, to 0.6 * 2 ** -24 where |x| < NEAR_0, and to 1 ulp elsewhere."""
    return _near_0_or(x, cute.math.exp(x))


def decay_exp2(x: Any) -> Any:
    """2 ** x of a float32, to 0.7 * 2 ** -24 where |x| < NEAR_0 / ln 2, and as `exp2` elsewhere."""
    return _near_0_or(x * Float32(LN_2), exp2(x))


def _near_0_or(x: Any, elsewhere: Any) -> Any:
    power = polynomial(x, TAYLOR)
    is_near = cute.math.absf(x) < Float32(NEAR_0)
    return Float32(cutlass.select_(is_near, power, elsewhere))
