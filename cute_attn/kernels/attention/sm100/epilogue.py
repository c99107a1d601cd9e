"""The epilogue of a tile: scale and round its rows, and stage them in shared memory for TMA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Numeric

from ...common.pipeline import Barriers
from ...common.tmem import first_columns, row_load, shifted


@cute.jit
def scale_row(values: cute.Tensor, factor: Float32) -> None:
    """Multiply a row's values in registers; their number must be even."""
    for j in cutlass.range_constexpr(0, cute.size(values), 2):
        values[j], values[j + 1] = cute.arch.mul_packed_f32x2(
            (values[j], values[j + 1]), (factor, factor)
        )


def round_row(values: cute.Tensor, dtype: type[Numeric]) -> cute.Tensor:
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


@cute.jit
def stage_accumulator(
    accumulator: cute.Tensor,
    columns: cutlass.Constexpr[int],
    factor: Float32 | None,
    computed: Boolean,
    kept: Boolean | None,
    row: Int32,
    half: Int32,
    smem: cute.Tensor,
    barriers: Barriers,
    edges: cutlass.Constexpr[tuple[str, str]],
    staged: Int32,
) -> Int32:
    """Stage an accumulator's rows, times `factor`, box by box for TMA; two warpgroups share a row.

    Args:
        columns: the number of columns of the accumulator.
        computed: whether the accumulator holds a result; otherwise all rows are 0.
        kept: whether the thread's row keeps its values rather than becoming 0; None keeps every
            row.
        row, half: the thread's row of each box, and its half of the row.
        smem: (rows, columns of a box, stages).
        edges: the edge to the store warp, which tells that a box is staged, and the edge back,
            which tells that the box is stored.
        staged: the number of boxes staged so far.

    Returns:
        The number of boxes staged so far.
    """
    box_columns = cute.size(smem, mode=[1])
    width = box_columns // 2
    load, source, shape = row_load(first_columns(accumulator, width), row, width)
    source = shifted(source, half * width)
    for box in cutlass.range(columns // box_columns, unroll=1):
        values = cute.make_rmem_tensor(shape, Float32)
        if computed:
            cute.copy(load, shifted(source, box * box_columns), values)
            cute.arch.fence_view_async_tmem_load()
        else:
            values.fill(0.0)
        if cutlass.const_expr(kept is not None):
            if not kept:
                values.fill(0.0)
        if cutlass.const_expr(factor is not None):
            scale_row(values, factor)
        rounded = round_row(values, smem.element_type)
        barriers.wait_previous(edges[1], staged)
        smem_row = smem[row, None, barriers.stage(edges[0], staged)]
        stage_row(rounded, cute.logical_divide(smem_row, cute.make_layout(width))[None, half])
        cute.arch.fence_view_async_shared()
        barriers.warp_arrives(edges[0], staged)
        staged += 1
    return staged
