"""Stand-ins to compile against, for the arguments of the kernels that go token by token.

Sizes and strides are arguments, so that none of them recompiles; the compiled host code checks
that they agree with each other.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from ...common.dtypes import DTYPE
from .spec import VECTOR_BYTES, StepSpec


class Sizes:
    """Symbols that several tensors share."""

    def __init__(self) -> None:
        self.batch, self.tokens, self.heads, self.heads_v = (cute.sym_int() for _ in range(4))


def rows(dtype: str, *shape: Any) -> Any:
    """Any strides, but for the last dimension, which is contiguous."""
    element = DTYPE[dtype]
    strides = (*(cute.sym_int64() for _ in shape[:-1]), 1)
    return make_fake_tensor(element, shape, strides, assumed_align=element.width // 8)


def scattered(dtype: str, *shape: Any) -> Any:
    """Any strides."""
    element = DTYPE[dtype]
    strides = tuple(cute.sym_int64() for _ in shape)
    return make_fake_tensor(element, shape, strides, assumed_align=element.width // 8)


def contiguous(element: Any, *shape: Any) -> Any:
    stride: Any = 1
    strides = []
    for size in reversed(shape):
        strides.append(stride)
        stride = stride * size
    return make_fake_tensor(
        element, shape, tuple(reversed(strides)), assumed_align=element.width // 8
    )


def inputs(spec: StepSpec, sizes: Sizes, step: tuple[Any, ...]) -> tuple[Any, ...]:
    """q, k, v, g, beta, A_log, dt_bias; `step` is (B,) or (B, T)."""
    of_gate: list[Any] = [None, None]
    if spec.A_log_dtype != "none":
        of_gate[0] = contiguous(DTYPE[spec.A_log_dtype], sizes.heads_v)
    if spec.dt_bias_dims == 1:
        of_gate[1] = contiguous(DTYPE[spec.dt_bias_dtype], cute.sym_int())
    elif spec.dt_bias_dims == 2:
        of_gate[1] = contiguous(DTYPE[spec.dt_bias_dtype], sizes.heads_v, spec.head_dim_k)
    return (
        rows(spec.dtype, *step, sizes.heads, spec.head_dim_k),
        rows(spec.dtype, *step, sizes.heads, spec.head_dim_k),
        rows(spec.dtype, *step, sizes.heads_v, spec.head_dim_v),
        rows(spec.gate_dtype, *step, sizes.heads_v, spec.head_dim_k),
        scattered(spec.beta_dtype, *step, sizes.heads_v),
        *of_gate,
    )


def states(spec: StepSpec, sizes: Sizes, slots: Any) -> Any:
    """A head's matrix is contiguous, and starts on a 16-byte boundary."""
    matrix = (spec.head_dim_k, spec.head_dim_v)
    if spec.state_v_first:
        matrix = matrix[::-1]
    return make_fake_tensor(
        DTYPE[spec.state_dtype],
        (slots, sizes.heads_v, *matrix),
        (*(cute.sym_int64(divisibility=spec.vector) for _ in range(2)), matrix[1], 1),
        assumed_align=VECTOR_BYTES,
    )


def indices(*shape: Any) -> Any:
    return contiguous(cutlass.Int32, *shape)
