"""Masks of scores, and of values computed from scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.numbers import INF
from ...common.ptx.asm import asm


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
def mask_row_by_bits(
    values: cute.Tensor, columns: cutlass.Constexpr[Sequence[int]], first: Int32, bits: Int64
) -> None:
    """Set a row's values to -inf in columns whose bit is not set. Bit j is column `first + j`.
    Columns before `first` keep their values. Another mask must hide columns after `first + 63`."""
    for j in cutlass.range_constexpr(len(columns)):
        column = columns[j] - first
        seen = Int32((bits >> Int64(column & 63)) & Int64(1)) != 0
        values[j] = values[j] if column < 0 or seen else Float32(-INF)


@cute.jit
def mask_words(words: cute.Tensor, low: Int32 | None, high: Int32) -> None:
    """Set the values of 16 bits whose columns are not in [low, high) to 0. Word j has column 2j in
    its lower half and column 2j + 1 in its upper half. The number of words is a multiple of 16. A
    `low` of None is no bound."""
    for first in cutlass.range_constexpr(0, 2 * cute.size(words), 32):
        visible = _bits_below(high - first)
        if cutlass.const_expr(low is not None):
            visible = visible & ~_bits_below(low - first)
        # A byte permutation copies a byte's highest bit to all of its bits, so each column's bit is
        # shifted to the top of a byte.
        shifted = [visible << n for n in range(8)]
        for column in cutlass.range_constexpr(0, 32, 2):
            kept = _halves(shifted[7 - column % 8], shifted[6 - column % 8], column // 8)
            words[(first + column) // 2] = words[(first + column) // 2] & kept


@cute.jit
def mask_fragment_words(
    words: cute.Tensor, lows: cutlass.Constexpr[Any], highs: cutlass.Constexpr[Any]
) -> None:
    """Mask rows in fragments (see `fragments`) as `mask_words` masks a row. Word 2 u + r has the
    lane's two columns among columns 8 u to 8 u + 7, in lane row r. The number of columns is a
    multiple of 32. The bounds count columns from the lane's first column."""
    for lane_row in cutlass.range_constexpr(len(highs)):
        for unit in cutlass.range_constexpr(0, cute.size(words) // len(highs), 4):
            visible = _bits_below(highs[lane_row] - 8 * unit)
            if cutlass.const_expr(lows is not None):
                visible = visible & ~_bits_below(lows[lane_row] - 8 * unit)
            # Bits 8 i and 8 i + 1 are the lane's columns: each moves to the top of its byte.
            even, odd = visible << 7, visible << 6
            for i in cutlass.range_constexpr(4):
                word = len(highs) * (unit + i) + lane_row
                words[word] = words[word] & _halves(even, odd, i)


def _bits_below(n: Any) -> Any:
    """The lowest n bits of a word; none if n <= 0, all if n >= 32."""
    return asm("bmsk.clamp.b32 $0, $1, $2;", [Int32], [Int32(0), cutlass.max(n, Int32(0))])


def _halves(low: Any, high: Any, byte: int) -> Any:
    """Two halves of 16 bits, each filled with the highest bit of a byte of `low` and of `high`."""
    selector = (8 + byte) * 0x11 + (12 + byte) * 0x1100
    return asm("prmt.b32 $0, $1, $2, $3;", [Int32], [low, high, Int32(selector)])
