"""The epilogue of a tile: scale and round its rows, and stage them in shared memory for TMA."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32


@cute.jit
def scale_row(values: cute.Tensor, factor: Float32) -> None:
    """Multiply a row's values in registers; their number must be even."""
    for j in cutlass.range_constexpr(0, cute.size(values), 2):
        values[j], values[j + 1] = cute.arch.mul_packed_f32x2(
            (values[j], values[j + 1]), (factor, factor)
        )


def round_row(values: cute.Tensor, dtype: Any) -> cute.Tensor:
    """Round a row's values to `dtype`."""
    size = cute.size(values)
    rounded = cute.make_rmem_tensor((size,), dtype)
    rounded.store(values.load().to(dtype).reshape((size,)))
    return rounded


@cute.jit
def stage_row(rounded: cute.Tensor, smem_row: cute.Tensor) -> None:
    """Store a row of a box to shared memory, 16 bytes at once."""
    width = 128 // rounded.element_type.width
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyUniversalOp(), rounded.element_type, num_bits_per_copy=128
    )
    chunks = cute.logical_divide(smem_row, cute.make_layout(width))
    source = cute.logical_divide(rounded, cute.make_layout(width))
    for c in cutlass.range_constexpr(cute.size(rounded) // width):
        cute.copy(atom, source[None, c], chunks[None, c])
