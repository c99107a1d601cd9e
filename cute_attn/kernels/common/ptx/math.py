"""Functions of float32, one instruction each; most are approximate."""

from __future__ import annotations

from cutlass import Float32

from .asm import asm


def exp2(x: Float32) -> Float32:
    """Return 2 ** x, to 2 ulp; results below 2 ** -126 are 0."""
    return asm("ex2.approx.ftz.f32 $0, $1;", [Float32], [Float32(x)])


def log2(x: Float32) -> Float32:
    """Return the logarithm to an absolute error of 2 ** -22 near 1, and to about 1 ulp
    elsewhere."""
    return asm("lg2.approx.ftz.f32 $0, $1;", [Float32], [Float32(x)])


def reciprocal(x: Float32) -> Float32:
    return asm("rcp.approx.ftz.f32 $0, $1;", [Float32], [Float32(x)])


def reciprocal_sqrt(x: Float32) -> Float32:
    return asm("rsqrt.approx.ftz.f32 $0, $1;", [Float32], [Float32(x)])


def add_rounded_down(x: Float32, y: Float32) -> Float32:
    """Return the largest float32 that is at most x + y."""
    return asm("add.rm.f32 $0, $1, $2;", [Float32], [Float32(x), Float32(y)])


def subtract_towards_zero(x: Float32, y: Float32) -> Float32:
    """Return x - y, rounded towards zero."""
    return asm("sub.rz.f32 $0, $1, $2;", [Float32], [Float32(x), Float32(y)])
