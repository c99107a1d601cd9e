"""Masks of scores, and of their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.numbers import INF


@cute.jit
def mask_row(
    values: cute.Tensor,
    columns: cutlass.Constexpr[Sequence[int]],
    low: Int32 | None,
    high: Int32,
    hidden: cutlass.Constexpr[float] = -INF,
) -> None:
    """Set the values of a row whose columns are not in [low, high) to `hidden`; a `low` of None is
    no bound."""
    for j in cutlass.range_constexpr(len(columns)):
        visible = columns[j] < high
        if cutlass.const_expr(low is not None):
            visible = visible and columns[j] >= low
        values[j] = values[j] if visible else Float32(hidden)
