"""Polynomials on the FMA units."""

from __future__ import annotations

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Float32


def polynomial(x: Float32, coefficients: Sequence[float]) -> Float32:
    """The sum of coefficients[n] * x ** n, by Horner's rule."""
    total = Float32(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = cute.math.fma(total, x, Float32(c))
    return total
