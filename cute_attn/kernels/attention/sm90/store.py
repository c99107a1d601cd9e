"""The store of a warpgroup's rows on SM90, by TMA through shared memory, or from registers."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Numeric

from ...common.ptx.convert import pack
from ...common.ptx.memory import store_global
from ...common.tma import BOX, boxes, partition
from ..parts import fragments
from .mma import ROWS, WARPGROUP

GROUP_BARRIER = 1  # the first warpgroup's named barrier; all threads share barrier 0


def group_barrier(group: Any) -> None:
    """Wait for the threads of consumer warpgroup `group`."""
    cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=WARPGROUP)


@cute.jit
def store_staged(
    tma: cute.CopyAtom,
    rows: cute.Tensor,
    staged: cute.Pointer,
    group: Any,
    groups: cutlass.Constexpr[int],
    box_rows: cutlass.Constexpr[int],
    head_dim: cutlass.Constexpr[int],
) -> None:
    """Start to store a warpgroup's staged rows by TMA, by one thread.

    Args:
        rows: the warpgroup's rows `[64, head_dim]` in global memory.
        staged: boxes of `box_rows` rows. A box has the 64 rows of one warpgroup, or the rows of all
            `groups` warpgroups.
    """
    of_group = ROWS * (head_dim if cutlass.const_expr(box_rows == ROWS) else BOX)
    smem = boxes(staged, ROWS, (head_dim // BOX, box_rows * BOX), (groups, of_group))
    to, source = partition(tma, cute.local_tile(rows, (ROWS, BOX), (0, None)), smem)
    for box in cutlass.range_constexpr(head_dim // BOX):
        cute.copy(tma, source[None, box, group], to[None, box])


def row_parts(pairs: list[Any], dtype: type[Numeric]) -> list[list[Any]]:
    """The values that a lane stores of a row, for each store, from pairs of neighbouring columns in
    the order of `fragments`. A store has unchanged float32 values, or 8 columns rounded to `dtype`.
    All lanes take part."""
    if dtype is Float32:
        return pairs
    return fragments.whole_units([pack(dtype, *pair) for pair in pairs])


def store_parts(to: cute.Tensor, parts: list[list[Any]], dtype: type[Numeric]) -> None:
    """Store `row_parts` to the row `to` in global memory."""
    kind = Float32 if dtype is Float32 else Int32
    nbytes = 4 * len(parts[0])
    at = to.iterator.toint() + cute.arch.lane_idx() % fragments.LANES * nbytes
    for i, part in enumerate(parts):
        store_global(kind, at + i * (fragments.LANES * nbytes), part)
