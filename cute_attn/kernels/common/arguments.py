"""Placeholder tensors that a kernel is compiled against.

Sizes and strides are symbolic. The compiled function takes sizes and strides as arguments, so a new
size compiles nothing. `align` is the alignment, in bytes, of the first element and of each row or
matrix.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric
from cutlass.cute.runtime import make_fake_tensor

from .spec import VECTOR_BYTES

_INDEX = {"int32": Int32, "int64": Int64}

Sizes = tuple[cute.SymInt | int, ...]


def fake_rows(element: type[Numeric], shape: Sizes, align: int = VECTOR_BYTES) -> cute.Tensor:
    """A tensor whose last dimension is contiguous; its other strides are free."""
    divisibility = 8 * align // element.width
    strides = (cute.sym_int64(divisibility=divisibility) for _ in shape[:-1])
    return make_fake_tensor(element, shape, (*strides, 1), assumed_align=align)


def fake_strided(element: type[Numeric], shape: Sizes) -> cute.Tensor:
    """A tensor with free strides in all dimensions."""
    strides = tuple(cute.sym_int64() for _ in shape)
    return make_fake_tensor(element, shape, strides, assumed_align=element.width // 8)


def fake_contiguous(
    element: type[Numeric], shape: Sizes, align: int = 0, *, small: bool = False
) -> cute.Tensor:
    """A contiguous tensor, aligned to `align` bytes, or to its element's size if `align` is 0. A
    `small` tensor has fewer than 2^31 elements: 32-bit strides take fewer registers."""
    stride: cute.SymInt | int = 1
    strides = []
    for size in reversed(shape):
        strides.append(stride)
        stride = stride * size
        if not (small or isinstance(stride, int)):
            stride = cute.sym_int64(divisibility=stride.divisibility)
    return make_fake_tensor(
        element, shape, tuple(reversed(strides)), assumed_align=align or element.width // 8
    )


def fake_matrices(
    leading: Sizes, matrix: tuple[int, int], element: type[Numeric] = Float32
) -> cute.Tensor:
    """Contiguous matrices on 16-byte boundaries, with free strides between them."""
    divisibility = 8 * VECTOR_BYTES // element.width
    strides = (cute.sym_int64(divisibility=divisibility) for _ in leading)
    return make_fake_tensor(
        element, (*leading, *matrix), (*strides, matrix[1], 1), assumed_align=VECTOR_BYTES
    )


def fake_offsets(index_dtype: str) -> cute.Tensor | None:
    """cu_seqlens of `index_dtype`, or None for "none"."""
    if index_dtype == "none":
        return None
    return fake_contiguous(_INDEX[index_dtype], (cute.sym_int(),))
