"""What the SM90 kernels of the backward share: P and dS in fragments.

Rows of a warpgroup's tiles are queries in the dQ kernel and keys in the dK/dV kernel, whose tiles
are S^T and dP^T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute

from ..common.ptx.convert import pack
from . import fragments
from .gradient import probabilities, score_gradients
from .softmax import Scaling

STEP = 8  # columns of a lane row whose statistics are in registers at once

# Statistics of a range of a lane row's columns, for each lane row: as `gradient` takes them.
Statistics = Callable[[range], list[Any]]
Store = Callable[[int, range, list[Any], list[Any]], None]
Load = Callable[[int, range], list[Any]]


def exponentiate(
    s: cute.Tensor,
    lse: Statistics,
    scaling: Scaling,
    store: Store,
    *,
    softcap: bool,
    unit: float = 1.0,
    small_lse: bool = False,
) -> None:
    """Call store(lane row, columns, P, P') with pairs of values, in units, where P' is P, with a
    softcap P times the slope of the cap; `small_lse` as of `gradient.probabilities`."""
    for columns in _steps(s):
        statistics = lse(columns)
        for lane_row in range(fragments.LANE_ROWS):
            row = s[None, lane_row, None]
            p, with_slope = probabilities(
                row, columns, statistics[lane_row], scaling, softcap=softcap, packed=False,
                unit=unit, small_lse=small_lse,
            )  # fmt: skip
            store(lane_row, columns, p, with_slope)


def differentiate(
    dp: cute.Tensor,
    p: Load,
    words: cute.Tensor,
    delta: Statistics,
    dtype: Any,
    unit: float = 1.0,
) -> None:
    """Round dS to `words`, an operand; p(lane row, columns) are pairs of P', in units."""
    for columns in _steps(dp):
        statistics = delta(columns)
        for lane_row in range(fragments.LANE_ROWS):
            ds = score_gradients(
                p(lane_row, columns), dp[None, lane_row, None], columns, statistics[lane_row],
                packed=False, unit=unit,
            )  # fmt: skip
            store_words(words, lane_row, columns, ds, dtype)


def keep_pairs(s: cute.Tensor, lane_row: int, columns: range, pairs: list[Any]) -> None:
    """Replace values of S, or another tile in registers, by pairs."""
    row = s[None, lane_row, None]
    for j, (x, y) in zip(columns[::2], pairs, strict=True):
        row[j], row[j + 1] = x, y


def kept_pairs(s: cute.Tensor, lane_row: int, columns: range) -> list[Any]:
    row = s[None, lane_row, None]
    return [(row[j], row[j + 1]) for j in columns[::2]]


def store_words(
    words: cute.Tensor, lane_row: int, columns: range, pairs: list[Any], dtype: Any
) -> None:
    """Round pairs of values to an operand."""
    for j, pair in zip(columns[::2], pairs, strict=True):
        words[word(lane_row, j)] = pack(dtype, *pair)


def word(lane_row: int, column: int) -> int:
    """The word of an operand with a lane row's columns `column`, an even one, and the next."""
    return column // 2 * fragments.LANE_ROWS + lane_row


def _steps(x: cute.Tensor) -> list[range]:
    """The columns of a lane row, STEP at a time."""
    count = cute.size(x) // fragments.LANE_ROWS
    return [range(first, first + STEP) for first in range(0, count, STEP)]
