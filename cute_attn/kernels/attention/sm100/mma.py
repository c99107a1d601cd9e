"""The MMAs of attention on SM100, over a pair of CTAs (cta_group::2).

The kernel itself makes the MMAs. As arguments, the MMAs' flags would be run-time values, which take
registers and instructions.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Boolean, Float32, Int32, Numeric
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from ...common.tma import swizzled
from ...common.tmem import shifted
from ..spec import TILE_M, TILE_N


def over_head_dim(head_dim: int) -> tuple[int, int, int]:
    """The shape of S and dP: rows, columns and contraction."""
    return TILE_M, TILE_N, head_dim


def over_tile(head_dim: int) -> tuple[int, int, int]:
    """The shape of O and the gradients: rows, columns and contraction."""
    return TILE_M, head_dim, TILE_N


def mma_over_head_dim(dtype: type[Numeric]) -> cute.TiledMma:
    """The MMA of 256 rows by 128 rows, contracted over head_dim. Both operands are row-major in
    shared memory."""
    return sm100.make_trivial_tiled_mma(
        dtype, dtype, OperandMajorMode.K, OperandMajorMode.K, Float32,
        tcgen05.CtaGroup.TWO, (TILE_M, TILE_N),
    )  # fmt: skip


def mma_over_tile(dtype: type[Numeric], head_dim: int) -> cute.TiledMma:
    """The MMA of 256 rows by head_dim, contracted over the 128 rows of a tile. The first operand is
    in tensor memory, and the second operand is row-major in shared memory."""
    return sm100.make_trivial_tiled_mma(
        dtype, dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32,
        tcgen05.CtaGroup.TWO, (TILE_M, head_dim), tcgen05.OperandSource.TMEM,
    )  # fmt: skip


def accumulator(mma: cute.TiledMma, columns: int, pointer: cute.Pointer) -> cute.Tensor:
    """The accumulator as a CTA sees it: (rows, columns)."""
    shape = mma.get_slice(0).partition_shape_C((TILE_M, columns))
    return cute.make_tensor(pointer, mma.make_fragment_C(shape).layout)


def shared_a(
    mma: cute.TiledMma, shape: tuple[int, int, int], dtype: type[Numeric], buffer: cute.Pointer
) -> cute.Tensor:
    """The first operand in shared memory."""
    return mma.make_fragment_A(swizzled(buffer, sm100.make_smem_layout_a(mma, shape, dtype, 1)))


def shared_b(
    mma: cute.TiledMma,
    shape: tuple[int, int, int],
    dtype: type[Numeric],
    buffer: cute.Pointer,
    stages: int,
) -> cute.Tensor:
    """The second operand in a ring of shared memory."""
    layout = sm100.make_smem_layout_b(mma, shape, dtype, stages)
    return mma.make_fragment_B(swizzled(buffer, layout))


def tensor_a(
    mma: cute.TiledMma, shape: tuple[int, int, int], dtype: type[Numeric], column: int
) -> cute.Tensor:
    """The first operand, in contiguous columns of tensor memory from `column` on."""
    layout = sm100.make_smem_layout_a(mma, shape, dtype, 1)
    start = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
    # The fragment begins at column 0, wherever its source tensor begins.
    fragment = mma.get_slice(0).make_fragment_A(cute.make_tensor(start, layout.outer))
    return shifted(fragment, column * (32 // dtype.width))


def halves_apart(a: cute.Tensor, columns: int) -> cute.Tensor:
    """The first operand in tensor memory, with the second half of its contraction `columns` behind
    the first half. Each half overwrites the first columns of its own float32 source."""
    m, k, (steps, halves), stage = a.layout.shape
    m_stride, k_stride, (step, _), stage_stride = a.layout.stride
    words = 32 // a.element_type.width
    stride = (m_stride, k_stride, (step, words * columns), stage_stride)
    return cute.make_tensor(
        a.iterator, cute.make_layout((m, k, (steps, halves), stage), stride=stride)
    )


@cute.jit
def issue_mma(
    mma: cute.TiledMma,
    to: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    stage: Int32,
    accumulate: Boolean,
) -> None:
    """Multiply `a`, which has one stage, by a stage of `b`."""
    # The MMA is copied, because a flag set here would otherwise outlive the branch of the call.
    mma = cutlass.new_from_mlir_values(mma, cutlass.extract_mlir_values(mma))
    mma.set(tcgen05.Field.ACCUMULATE, accumulate)
    for step in cutlass.range_constexpr(cute.size(b, mode=[2])):
        cute.gemm(mma, to, a[None, None, step, 0], b[None, None, step, stage], to)
        mma.set(tcgen05.Field.ACCUMULATE, True)
