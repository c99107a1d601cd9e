"""Placeholder arguments that the token-by-token kernels share."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.arguments import fake_contiguous, fake_matrices, fake_rows, fake_strided
from ...common.dtypes import DTYPE
from .spec import RecordsSpec, StepSpec


class Sizes:
    """Symbolic sizes that several tensors share."""

    def __init__(self) -> None:
        self.batch, self.tokens, self.heads, self.heads_v = (cute.sym_int() for _ in range(4))


def rows(dtype: str, *shape: cute.SymInt | int) -> cute.Tensor:
    """A tensor with a contiguous last dimension and otherwise free strides."""
    element = DTYPE[dtype]
    return fake_rows(element, shape, align=element.width // 8)


def inputs(
    spec: StepSpec, sizes: Sizes, step: tuple[cute.SymInt, ...]
) -> dict[str, cute.Tensor | Float32 | None]:
    """Tensors of tokens, and scalars, by argument name; `step` is (B,) or (B, T)."""
    A_log = dt_bias = None
    if spec.A_log_dtype != "none":
        A_log = fake_contiguous(DTYPE[spec.A_log_dtype], (sizes.heads_v,))
    if spec.dt_bias_dims:
        shape: tuple[cute.SymInt | int, ...] = (sizes.heads_v, spec.head_dim_k)
        if spec.dt_bias_dims == 1:
            shape = (sizes.heads_v if spec.head_gate else cute.sym_int(),)
        dt_bias = fake_contiguous(DTYPE[spec.dt_bias_dtype], shape)
    return {
        "q": rows(spec.dtype, *step, sizes.heads, spec.head_dim_k),
        "k": rows(spec.dtype, *step, sizes.heads, spec.head_dim_k),
        "v": rows(spec.dtype, *step, sizes.heads_v, spec.head_dim_v),
        "g": gates(spec, *step, sizes.heads_v),
        "beta": fake_strided(
            DTYPE[spec.beta_dtype],
            (*step, sizes.heads_v, *((spec.head_dim_v,) if spec.beta_columns else ())),
        ),
        "A_log": A_log,
        "dt_bias": dt_bias,
        "o": rows(spec.dtype, *step, sizes.heads_v, spec.head_dim_v),
        **dict.fromkeys(("scale", "lower_bound", "beta_scale"), Float32(1.0)),
    }


def gates(spec: StepSpec | RecordsSpec, *shape: cute.SymInt) -> cute.Tensor:
    """Gates of heads, whose dimensions are `shape`: a row for each head, or one number."""
    if spec.head_gate:
        return fake_strided(DTYPE[spec.gate_dtype], shape)
    return rows(spec.gate_dtype, *shape, spec.head_dim_k)


def states(spec: StepSpec, sizes: Sizes, *slots: cute.SymInt) -> cute.Tensor:
    """States, whose first dimensions are `slots`: each head's matrix is contiguous, on a 16-byte
    boundary."""
    matrix = (spec.head_dim_k, spec.head_dim_v)
    if spec.state_v_first:
        matrix = matrix[::-1]
    return fake_matrices((*slots, sizes.heads_v), matrix, DTYPE[spec.state_dtype])


def indices(*shape: cute.SymInt) -> cute.Tensor:
    return fake_contiguous(Int32, shape)
