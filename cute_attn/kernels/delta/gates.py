"""The gate, which maps a layer's projection g to the natural logarithm of a decay.

    -exp(A_log) softplus(g + dt_bias)                    "softplus"
    lower_bound sigmoid(exp(A_log) (g + dt_bias))        "lower_bound"
    g                                                    "none"

Without A_log, exp(A_log) is 1. "softplus" is Kimi Linear's gate (arXiv 2510.26692), "lower_bound"
the gate of its successors. `log2_decay` and `log_decay_gradients` are fast. `log_decay` and
`accurate_log_decay_gradients` are accurate.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Numeric

from ..common.numbers import LN_2, LOG2_E
from ..common.polynomial import polynomial
from ..common.ptx.math import exp2, log2, reciprocal

# A decay this small erases a state, and sums of such logarithms stay finite.
SMALLEST_LOG2_DECAY = -128.0 * LOG2_E
LARGEST_EXPONENT = 80.0  # bounds a sigmoid's exponent; the sigmoid is then 1e-35, as good as 0


# log2(1 + x) / x on [0, 1]: the polynomial of degree 7 with the smallest maximum relative error,
# 1.9e-7; found by Remez's algorithm. A polynomial of log2 would need 1 + x, which loses the small x
# of a weak gate.
LOG2_OF_1_PLUS = (
    1.4426947605, -0.72131008821, 0.48006369642, -0.35339482707,
    0.25600971776, -0.15535187281, 0.063607892814, -0.012319473757,
)  # fmt: skip


def log2_of_1_plus_exp2(y: Any, small: Any) -> Any:
    """log2(1 + 2^y), which is a softplus in base 2, from y and small = 2^-|y|; it does not
    overflow. The relative error is 2e-7, plus the relative error of `small`."""
    quotient = polynomial(small, LOG2_OF_1_PLUS)
    return cute.math.fma(quotient, small, cute.arch.fmax(y, Float32(0.0)))


def log2_decay(gate: str, g: Any, rate: Any, bias: Any, lower_bound: Any) -> Any:
    """The base-2 logarithm of a decay, at least SMALLEST_LOG2_DECAY, as one float32.

    Args:
        rate: exp(A_log), or 1.0 without A_log.
        bias: dt_bias, or 0.0 without dt_bias.
    """
    if gate == "none":
        result = g * Float32(LOG2_E)
    elif gate == "softplus":
        y = cute.math.fma(g, Float32(LOG2_E), bias * LOG2_E)  # g = -inf gives a gate of 0
        result = -rate * log2_of_1_plus_exp2(y, exp2(-cute.arch.fmax(y, -y)))
    else:
        # Rows past the end have g = -inf, and 0 * -inf would be NaN: the slope must not be 0.
        slope = cute.arch.fmin(-rate * LOG2_E, Float32(-1e-30))
        bound = Float32(lower_bound) * LOG2_E
        result = bound * reciprocal(1.0 + exp2(cute.math.fma(g, slope, bias * slope)))
    return cute.arch.fmax(result, Float32(SMALLEST_LOG2_DECAY))


def log_decay_gradients(
    gate: str, dg: Any, g: Any, rate: Any, bias: Any, lower_bound: Any
) -> tuple[Any, Any]:
    """Return the gradient of g (and of dt_bias) and the gradient of A_log, from dg, the gradient of
    the logarithm of the decay. Both gradients are 0 where `log2_decay` replaces the logarithm."""
    if gate == "none":
        kept = g * LOG2_E > Float32(SMALLEST_LOG2_DECAY)
        return Float32(cutlass.select_(kept, dg, Float32(0.0))), Float32(0.0)
    x = g + bias
    z = x * LOG2_E if gate == "softplus" else x * (rate * LOG2_E)
    # sigmoid(z) sigmoid(-z) = 2^-|z| / (1 + 2^-|z|)^2 involves no cancellation.
    small = exp2(-cute.arch.fmax(z, -z))
    inverse = reciprocal(1.0 + small)
    if gate == "softplus":
        log2_gate = -rate * log2_of_1_plus_exp2(z, small)
        kept = log2_gate > Float32(SMALLEST_LOG2_DECAY)
        kept_dg = Float32(cutlass.select_(kept, dg, Float32(0.0)))
        slope = cutlass.select_(z < Float32(0.0), small * inverse, inverse)
        return kept_dg * (-rate * slope), kept_dg * (log2_gate * LN_2)
    # The bound times sigmoid(z) is in range below this z.
    share = SMALLEST_LOG2_DECAY * reciprocal(Float32(lower_bound) * LOG2_E)
    most = log2(share * reciprocal(1.0 - share))
    most = cutlass.select_(share < Float32(1.0), most, Float32(math.inf))
    kept_dg = Float32(cutlass.select_(z < most, dg, Float32(0.0)))
    d = kept_dg * (Float32(lower_bound) * rate * (small * inverse * inverse))
    # Where g is infinite, x is infinite too, and d is 0.
    return d, Float32(cutlass.select_(d == Float32(0.0), Float32(0.0), d * x))


SMALLEST_BETA = {cutlass.BFloat16: 2.0**-40, cutlass.Float16: 2.0**-14}


def nonzero_beta(dtype: type[Numeric], beta: Any) -> Any:
    """beta, with a magnitude of at least SMALLEST_BETA, because the backward divides by it.
    SMALLEST_BETA is in the range of `dtype`, and its square in the range of float32."""
    smallest = Float32(SMALLEST_BETA[dtype])
    signed = cutlass.select_(beta < Float32(0.0), -smallest, smallest)
    is_small = cute.arch.fmax(beta, -beta) < smallest
    return Float32(cutlass.select_(is_small, signed, beta))


def split_beta(dtype: type[Numeric], beta: Any) -> tuple[Any, Any]:
    """Return (m, p), where beta = m p and p is a power of two, so that x and p x round alike.

    With bfloat16 p is 1. The exponents of float16 are few, so m and p share beta's exponent evenly.
    """
    if dtype is cutlass.BFloat16:
        return beta, Float32(1.0)
    exponent = (Float32(beta).bitcast(Int32) & Int32(0xFF << 23)) - Int32(127 << 23)
    half = (exponent >> 24) << 23
    p, inverse = ((Int32(127 << 23) + x).bitcast(Float32) for x in (half, -half))
    return beta * inverse, p


def sigmoid(x: Any) -> Any:
    # Where 2^-x overflows to inf, its reciprocal is 0, the correct result.
    return reciprocal(1.0 + exp2(-x * Float32(LOG2_E)))


def log_decay(gate: str, g: Any, rate: Any, bias: Any, lower_bound: Any) -> Any:
    """The natural logarithm of a decay to the accuracy of float32, for results stored in float32.
    `log2_decay` is less accurate, because it rounds the exponent of a gate's exponential."""
    if gate == "none":
        return g
    x = g + bias
    if gate == "lower_bound":
        return lower_bound * accurate_sigmoid(rate * x)
    # softplus(x) = max(x, 0) + log(1 + exp(-|x|)) does not overflow
    magnitude = cute.arch.fmax(x, -x)
    softplus = cute.arch.fmax(x, Float32(0.0)) + cute.math.log1p(cute.math.exp(-magnitude))
    return -rate * softplus


def accurate_log_decay_gradients(
    gate: str, dg: Any, g: Any, rate: Any, bias: Any, lower_bound: Any
) -> tuple[Any, Any]:
    """`log_decay_gradients` to the accuracy of float32, for results stored in float32."""
    decay = log_decay(gate, g, rate, bias, lower_bound)
    zero = Float32(0.0)
    if gate == "none":
        d, of_rate = dg, zero
    elif gate == "softplus":
        d, of_rate = dg * (-rate * accurate_sigmoid(g + bias)), dg * decay
    else:
        x = g + bias
        z = rate * x
        # sigmoid(-z) rather than 1 - sigmoid(z), which loses digits by cancellation.
        d = dg * (lower_bound * rate * (accurate_sigmoid(z) * accurate_sigmoid(-z)))
        of_rate = cutlass.select_(d == zero, zero, d * x)
    kept = decay * Float32(LOG2_E) > Float32(SMALLEST_LOG2_DECAY)
    return Float32(cutlass.select_(kept, d, zero)), Float32(cutlass.select_(kept, of_rate, zero))


def accurate_sigmoid(x: Any) -> Any:
    # The bound avoids overflow, because the refinement of the reciprocal would multiply 0 by inf.
    divisor = 1.0 + cute.math.exp(cute.arch.fmin(-x, Float32(LARGEST_EXPONENT)))
    inverse = reciprocal(divisor)
    return cute.math.fma(inverse, cute.math.fma(-divisor, inverse, Float32(1.0)), inverse)


@cute.jit
def rate_of(A_log: cute.Tensor | None, head: cutlass.Int32) -> Any:
    """exp(A_log) of a head, or 1, for `log_decay`."""
    rate = Float32(1.0)
    if cutlass.const_expr(A_log is not None):
        rate = cute.math.exp(Float32(A_log[head]))
    return rate
