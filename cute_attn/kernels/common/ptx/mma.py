"""`mma.sync` of a warp, with operands and results in registers (sm_80 and newer).

A fragment of 16-bit elements is a tuple of Int32, each of two elements with the lower index in the
lower half. With `row = lane // 4` and `col = 2 * (lane % 4)`, the fragments of A times B, 16 by 8
by 16, are

    A (16 by 16)    (row, col), (row + 8, col), (row, col + 8), (row + 8, col + 8), and each col + 1
    B (16 by 8)     (k = col, n = row), (col + 8, row), and each k + 1
    C (16 by 8)     (row, col), (row, col + 1), (row + 8, col), (row + 8, col + 1)

as in the PTX ISA, "Matrix Fragments for mma.m16n8k16". A product of tf32 elements is 16 by 8 by 8,
with (row, lane % 4), (row + 8, lane % 4), (row, lane % 4 + 4), (row + 8, lane % 4 + 4) in A and
(lane % 4, row), (lane % 4 + 4, row) in B.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Int32, Numeric

from .asm import TYPE_NAMES, asm, operands


def mma(
    dtype: type[Numeric], c: Sequence[Float32], a: Sequence[Int32], b: Sequence[Int32]
) -> tuple[Float32, ...]:
    """Return c + a b of 16 by 8 by 16; a and b are of `dtype`, bfloat16 or float16, c is
    float32."""
    return _mma("m16n8k16", TYPE_NAMES[dtype], c, a, b)


def mma_tf32(c: Sequence[Float32], a: Sequence[Int32], b: Sequence[Int32]) -> tuple[Float32, ...]:
    """Return c + a b of 16 by 8 by 8, with a and b as `convert.to_tf32` or `split_tf32` give
    them."""
    return _mma("m16n8k8", "tf32", c, a, b)


def _mma(
    shape: str, name: str, c: Sequence[Float32], a: Sequence[Int32], b: Sequence[Int32]
) -> tuple[Float32, ...]:
    text = (
        f"mma.sync.aligned.{shape}.row.col.f32.{name}.{name}.f32 "
        f"{{{operands(0, 4)}}}, {{{operands(4, 4)}}}, {{{operands(8, 2)}}}, "
        f"{{{operands(10, 4)}}};"
    )
    return tuple(asm(text, [Float32] * 4, [*map(Int32, a), *map(Int32, b), *map(Float32, c)]))
