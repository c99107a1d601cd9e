"""Conversions between float32, fp8 and the operand types of MMAs."""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
from cutlass import Float32, Int32, Numeric

from .asm import TYPE_NAMES, asm


def pack(dtype: type[Numeric], low: Float32, high: Float32) -> Int32:
    """Round two float32 to `dtype` and pack them into one register."""
    text = f"cvt.rn.{TYPE_NAMES[dtype]}x2.f32 $0, $1, $2;"
    return asm(text, [Int32], [Float32(high), Float32(low)])


def unpack(dtype: type[Numeric], x: Int32) -> tuple[Float32, Float32]:
    """Return the two elements of a register, as float32."""
    if dtype is cutlass.BFloat16:
        bits = (asm("shl.b32 $0, $1, 16;", [Int32], [x]), x & Int32(-65536))
        low, high = (asm("mov.b32 $0, $1;", [Float32], [b]) for b in bits)
        return low, high
    text = (
        "{\n.reg .b16 low, high;\nmov.b32 {low, high}, $2;\n"
        "cvt.f32.f16 $0, low;\ncvt.f32.f16 $1, high;\n}"
    )
    low, high = asm(text, [Float32, Float32], [x])
    return low, high


def pack_all(dtype: type[Numeric], values: Sequence[Float32]) -> list[Int32]:
    """Pack pairs of neighbouring float32."""
    return [pack(dtype, values[i], values[i + 1]) for i in range(0, len(values), 2)]


def unpack_all(dtype: type[Numeric], registers: Sequence[Int32]) -> list[Float32]:
    """Return all elements of packed registers, as float32."""
    return [element for x in registers for element in unpack(dtype, x)]


def halves_of_fp8(dtype: type[Numeric], x: Int32) -> tuple[Int32, Int32]:
    """Return the four fp8 numbers of a register as float16 in two registers; exact, NaN too."""
    if dtype is cutlass.Float8E5M2:  # the upper byte of a float16
        low, high = (asm(f"prmt.b32 $0, $1, 0, {s};", [Int32], [x]) for s in (0x1404, 0x3424))
        return low, high
    text = (
        "{\n.reg .b16 low, high;\nmov.b32 {low, high}, $2;\n"
        "cvt.rn.f16x2.e4m3x2 $0, low;\ncvt.rn.f16x2.e4m3x2 $1, high;\n}"
    )
    low, high = asm(text, [Int32, Int32], [x])
    return low, high


def from_fp8(fp8: type[Numeric], dtype: type[Numeric], x: Int32) -> tuple[Int32, Int32]:
    """Return the four fp8 numbers of a register in `dtype`, bfloat16 or float16; exact, NaN
    too."""
    low, high = halves_of_fp8(fp8, x)
    if dtype is cutlass.Float16:
        return low, high
    return tuple(pack(dtype, *unpack(cutlass.Float16, half)) for half in (low, high))


def to_tf32(x: Float32) -> Int32:
    """Round a float32 to a tf32 operand."""
    return asm("cvt.rna.tf32.f32 $0, $1;", [Int32], [Float32(x)])


def split_tf32(x: Float32) -> tuple[Int32, Int32]:
    """Return two tf32 operands, high and low, whose sum is x to 22 bits. The product of two such
    sums, without low times low, is nearly as accurate as a float32 product.
    """
    high = to_tf32(x)
    low = Float32(x) - asm("mov.b32 $0, $1;", [Float32], [high])
    return high, to_tf32(low)
