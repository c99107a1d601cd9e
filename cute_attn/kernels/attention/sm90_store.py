"""The store of a warpgroup's rows on SM90: through shared memory, by TMA."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from ..common.tma import BOX, boxes, partition
from .sm90_mma import ROWS, WARPGROUP

GROUP_BARRIER = 1  # the first warpgroup's named barrier; 0 is that of all threads


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
        staged: boxes of `box_rows` rows: 64, when each warpgroup has boxes of its own, or those of
            all `groups` warpgroups.
    """
    of_group = ROWS * (head_dim if cutlass.const_expr(box_rows == ROWS) else BOX)
    smem = boxes(staged, ROWS, (head_dim // BOX, box_rows * BOX), (groups, of_group))
    to, source = partition(tma, cute.local_tile(rows, (ROWS, BOX), (0, None)), smem)
    for box in cutlass.range_constexpr(head_dim // BOX):
        cute.copy(tma, source[None, box, group], to[None, box])
