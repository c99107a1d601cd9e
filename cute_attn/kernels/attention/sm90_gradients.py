"""What the SM90 kernels of the backward share: P and dS in fragments, and their output.

Rows of a warpgroup's tiles are queries in the dQ kernel and keys in the dK/dV kernel, whose tiles
are S^T and dP^T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute

from ..common.pipeline import Barriers
from ..common.ptx.convert import pack
from ..common.tma import BOX, boxes, load_boxes, partition
from . import fragments
from .gradient import probabilities, score_gradients
from .sm90_mma import ROWS, WARPGROUP
from .softmax import Scaling

STEP = 8  # columns of a lane row whose statistics are in registers at once
STAGED = 1  # the first warpgroup's named barrier; 0 is that of all threads

# Statistics of a range of a lane row's columns, for each lane row: as `gradient` takes them.
Statistics = Callable[[range], list[Any]]


def exponentiate(
    s: cute.Tensor,
    words: cute.Tensor | None,
    lse: Statistics,
    scaling: Scaling,
    dtype: Any,
    *,
    softcap: bool,
) -> None:
    """Round P of S to `words`, an operand if it is wanted, and replace S by P, times the slope of a
    softcap."""
    for columns in _steps(s):
        statistics = lse(columns)
        for lane_row in range(fragments.LANE_ROWS):
            row = s[None, lane_row, None]
            p, with_slope = probabilities(
                row, columns, statistics[lane_row], scaling, softcap=softcap, packed=False
            )
            if words is not None:
                _round(words, lane_row, columns, p, dtype)
            for j, (x, y) in zip(columns[::2], with_slope, strict=True):
                row[j], row[j + 1] = x, y


def differentiate(
    dp: cute.Tensor, p: cute.Tensor, words: cute.Tensor, delta: Statistics, dtype: Any
) -> None:
    """Round dS to `words`, an operand; `p` is as `exponentiate` leaves it in S."""
    for columns in _steps(dp):
        statistics = delta(columns)
        for lane_row in range(fragments.LANE_ROWS):
            p_row = p[None, lane_row, None]
            pairs = [(p_row[j], p_row[j + 1]) for j in columns[::2]]
            ds = score_gradients(
                pairs, dp[None, lane_row, None], columns, statistics[lane_row], packed=False
            )
            _round(words, lane_row, columns, ds, dtype)


def _steps(x: cute.Tensor) -> list[range]:
    """The columns of a lane row, STEP at a time."""
    count = cute.size(x) // fragments.LANE_ROWS
    return [range(first, first + STEP) for first in range(0, count, STEP)]


def _round(
    words: cute.Tensor, lane_row: int, columns: range, pairs: list[Any], dtype: Any
) -> None:
    for j, pair in zip(columns[::2], pairs, strict=True):
        words[j // 2 * fragments.LANE_ROWS + lane_row] = pack(dtype, *pair)


@cute.jit
def load_rows(
    name: cutlass.Constexpr[str],
    tma: cute.CopyAtom,
    rows: cute.Tensor,
    smem: cute.Tensor,
    barriers: Barriers,
    n: Any,
    more_bytes: cutlass.Constexpr[int] = 0,
) -> None:
    """Use n of a ring: wait until its stage is empty, and start to fill it. The caller copies
    `more_bytes` for the same use."""
    barriers.wait_previous(f"{name}_empty", n)
    with cute.arch.elect_one():
        barriers.expect(f"{name}_full", n, cute.size(rows) * 2 + more_bytes)
    load_boxes(tma, rows, smem, barriers, f"{name}_full", n)


def group_barrier(group: Any) -> None:
    """Of the threads of a warpgroup."""
    cute.arch.barrier(barrier_id=STAGED + group, number_of_threads=WARPGROUP)


@cute.jit
def store_staged(
    tma: cute.CopyAtom,
    rows: cute.Tensor,
    staged: cute.Pointer,
    group: Any,
    groups: cutlass.Constexpr[int],
    head_dim: cutlass.Constexpr[int],
) -> None:
    """Start to store a warpgroup's staged rows by TMA, by one thread. `staged` are boxes with the
    rows of all warpgroups."""
    across = (head_dim // BOX, groups * ROWS * BOX)
    smem = boxes(staged, ROWS, across, (groups, ROWS * BOX))
    to, source = partition(tma, cute.local_tile(rows, (ROWS, BOX), (0, None)), smem)
    for box in cutlass.range_constexpr(head_dim // BOX):
        cute.copy(tma, source[None, box, group], to[None, box])
