"""Masks of scores, and of what is computed from them."""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.numbers import INF

HALVES = (0x0000FFFF, -0x00010000)  # the lower and the upper 16 bits of an Int32


@cute.jit
def mask_row(
    values: cute.Tensor,
    columns: cutlass.Constexpr[Sequence[int]],
    low: Int32 | None,
    high: Int32,
) -> None:
    """Set the values of a row whose columns are not in [low, high) to -inf; a `low` of None is no
    bound."""
    for j in cutlass.range_constexpr(len(columns)):
        visible = columns[j] < high
        if cutlass.const_expr(low is not None):
            visible = visible and columns[j] >= low
        values[j] = values[j] if visible else Float32(-INF)


@cute.jit
def mask_words(
    words: cute.Tensor,
    columns: cutlass.Constexpr[Sequence[int]],
    low: Int32 | None,
    high: Int32,
) -> None:
    """Set the values of 16 bits whose columns are not in [low, high) to 0. A word holds two columns
    next to each other, the first in its lower half; a `low` of None is no bound."""
    for j in cutlass.range_constexpr(len(columns) // 2):
        kept = Int32(0)
        for half in cutlass.range_constexpr(2):
            column = columns[2 * j + half]
            visible = column < high
            if cutlass.const_expr(low is not None):
                visible = visible and column >= low
            kept = kept | (Int32(HALVES[half]) if visible else Int32(0))
        words[j] = words[j] & kept
