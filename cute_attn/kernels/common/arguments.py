"""Stand-ins for the arguments of a kernel, to compile against.

Sizes and strides are arguments of the compiled function, whose host code checks that they agree, so
that none of them recompiles. `align` is in bytes, of the first element and of each row or matrix.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from .spec import VECTOR_BYTES

_INDEX = {"int32": Int32, "int64": Int64}


def fake_rows(element: Any, shape: tuple[Any, ...], align: int = VECTOR_BYTES) -> Any:
    """Any strides, but for the last dimension, which is contiguous."""
    divisibility = 8 * align // element.width
    strides = (cute.sym_int64(divisibility=divisibility) for _ in shape[:-1])
    return make_fake_tensor(element, shape, (*strides, 1), assumed_align=align)


def fake_strided(element: Any, shape: tuple[Any, ...]) -> Any:
    """Any strides at all."""
    strides = tuple(cute.sym_int64() for _ in shape)
    return make_fake_tensor(element, shape, strides, assumed_align=element.width // 8)


def fake_contiguous(element: Any, shape: tuple[Any, ...], align: int = 0) -> Any:
    """A contiguous tensor; its elements' alignment, unless it is given."""
    stride: Any = 1
    strides = []
    for size in reversed(shape):
        strides.append(stride)
        stride = stride * size
    return make_fake_tensor(
        element, shape, tuple(reversed(strides)), assumed_align=align or element.width // 8
    )


def fake_matrices(leading: tuple[Any, ...], matrix: tuple[Any, Any], element: Any = Float32) -> Any:
    """Contiguous matrices on 16-byte boundaries, any strides between them."""
    divisibility = 8 * VECTOR_BYTES // element.width
    strides = (cute.sym_int64(divisibility=divisibility) for _ in leading)
    return make_fake_tensor(
        element, (*leading, *matrix), (*strides, matrix[1], 1), assumed_align=VECTOR_BYTES
    )


def fake_offsets(index_dtype: str) -> Any:
    """cu_seqlens, or None."""
    if index_dtype == "none":
        return None
    return fake_contiguous(_INDEX[index_dtype], (cute.sym_int(),))
