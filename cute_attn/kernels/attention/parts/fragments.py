"""Rows of S, P and O in registers, as the accumulators of `mma` and `wgmma`.

A warp has 16 rows of a tile. A lane has parts of two rows, lane // 4 and lane // 4 + 8. In each 8
columns, the lane's columns are 2 * (lane % 4) and the next. Tensors here have the shape (2 columns,
2 rows, columns / 8), in the order of the accumulators; a `lane_row` is 0 or 1. Four lanes share a
row.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Numeric

from ...common.carried import Carried
from ...common.numbers import INF
from ...common.ptx.convert import pack
from ...common.ptx.math import exp2, reciprocal
from ...common.ptx.matrices import store_matrices
from ...common.ptx.memory import store_shared
from .mask import mask_fragment_words, mask_row, mask_row_by_bits
from .softmax import RESCALE_THRESHOLD, row_maximum

LANE_ROWS = 2
LANE_ROW_STEP = 8  # rows from a lane's first row to its second row
LANES = 4  # lanes that share a row
BOX_COLUMNS = 64  # 16-bit columns, as wide as TMA's swizzle
LOWEST = -(2.0**100)  # a finite number below any maximum of products of 16-bit values


def accumulators(columns: int) -> cute.Tensor:
    """Registers for a lane's part of 16 rows."""
    return cute.make_rmem_tensor((2, LANE_ROWS, columns // 8), Float32)


def columns(x: cute.Tensor) -> int:
    """The number of columns of `accumulators`."""
    return 8 * cute.size(x, mode=[2])


def values(x: cute.Tensor) -> list[Any]:
    """The registers, in the order in which products take them."""
    return [x[i] for i in range(cute.size(x))]


def assign(x: cute.Tensor, new: list[Any]) -> None:
    for i, value in enumerate(new):
        x[i] = value


def first_row(warp: Int32) -> Any:
    """The lane's first row, of a tile's rows; `warp` counts its warps."""
    return warp * 16 + cute.arch.lane_idx() // LANES


def mask_rows(s: cute.Tensor, highs: list[Any], lows: list[Any] | None = None) -> None:
    """Set the columns before `lows` and from `highs` on to -inf. Each lane row has one bound; None
    is no bound."""
    count = cute.size(s) // LANE_ROWS
    columns = [8 * (j // 2) + j % 2 for j in range(count)]
    shift = cute.arch.lane_idx() % LANES * 2
    for lane_row, high in enumerate(highs):
        low = None if lows is None else lows[lane_row] - shift
        mask_row(s[None, lane_row, None], columns, low, high - shift)


def mask_rows_by_bits(s: cute.Tensor, first: Int32, bits: list[Any]) -> None:
    """Mask each lane row by its own bits; see `mask_row_by_bits`."""
    count = cute.size(s) // LANE_ROWS
    columns = [8 * (j // 2) + j % 2 for j in range(count)]
    shift = cute.arch.lane_idx() % LANES * 2
    for lane_row, of_row in enumerate(bits):
        mask_row_by_bits(s[None, lane_row, None], columns, first - shift, of_row)


def mask_operand(words: cute.Tensor, highs: list[Any], lows: list[Any] | None = None) -> None:
    """Mask rounded values, in the order of `operand`, as `mask_rows` masks rows. Hidden values
    become 0. The number of columns is a multiple of 32."""
    shift = cute.arch.lane_idx() % LANES * 2
    if lows is not None:
        lows = [low - shift for low in lows]
    mask_fragment_words(words, lows, [high - shift for high in highs])


class OnlineSoftmax(Carried):
    """The online softmax of a lane's rows.

    Attributes:
        maximum: the maximum of each row so far, in units of S.
        total: the lane's part of the row's sum of P.
        log2: turns S into exponents of 2.
    """

    def __init__(self, log2: Any):
        self.log2 = log2
        self.growth = RESCALE_THRESHOLD / log2
        self.maximum = cute.make_rmem_tensor((LANE_ROWS,), Float32)
        self.total = cute.make_rmem_tensor((LANE_ROWS,), Float32)

    def start(self) -> None:
        self.maximum.fill(-INF)
        self.total.fill(0.0)

    def update(self, s: cute.Tensor) -> list[Any]:
        """Replace S by P, and return the factor of each lane row of O."""
        rows = [s[None, r, None] for r in range(LANE_ROWS)]
        previous = [self.maximum[r] for r in range(LANE_ROWS)]
        highest = [row_maximum(row, x) for row, x in zip(rows, previous, strict=True)]
        highest = across_lanes(lambda x, y: cute.arch.fmax(x, y, nan=True), highest)
        factors = []
        for r, row in enumerate(rows):
            stays = highest[r] <= previous[r] + self.growth
            self.maximum[r] = cutlass.select_(stays, previous[r], highest[r])
            used = cute.arch.fmax(self.maximum[r], LOWEST, nan=True)  # a row without keys
            factor = exp2((previous[r] - used) * self.log2)
            factors.append(cutlass.select_(stays, Float32(1.0), factor))
            offset = -used * self.log2
            for j in range(cute.size(row)):
                row[j] = exp2(cute.math.fma(row[j], self.log2, offset))
            self.total[r] = cute.math.fma(self.total[r], factors[r], _sum(row))
        return factors

    def inverse_totals(self) -> list[Any]:
        """The factor by which each lane row of O is multiplied at the end."""
        totals = [self.total[r] for r in range(LANE_ROWS)]
        return [reciprocal(x) for x in across_lanes(lambda x, y: x + y, totals)]


def _sum(row: cute.Tensor) -> Any:
    sums = [row[j] for j in range(4)]
    for j in range(4, cute.size(row)):
        sums[j % 4] = sums[j % 4] + row[j]
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


def across_lanes(combine: Any, rows: list[Any]) -> list[Any]:
    """Combine the values of the four lanes that share a row, of each lane row."""
    for step in (1, 2):
        others = [cute.arch.shuffle_sync_bfly(x, step) for x in rows]
        rows = [combine(x, y) for x, y in zip(rows, others, strict=True)]
    return rows


def scale_rows(o: cute.Tensor, factors: list[Any]) -> None:
    for r, factor in enumerate(factors):
        row = o[None, r, None]
        for j in range(cute.size(row)):
            row[j] = row[j] * factor


def operand(x: cute.Tensor, dtype: type[Numeric]) -> list[Any]:
    """Round accumulators to the left operand of a product over their columns: 4 registers for each
    16 columns."""
    return [pack(dtype, x[i], x[i + 1]) for i in range(0, cute.size(x), 2)]


def whole_units(words: list[Any]) -> list[list[Any]]:
    """Exchange the words of a rounded row, in the order of `operand`, among the row's four lanes. A
    lane gives one word of every 8 columns. Of each 32 columns, lane i of the four gets all 4 words
    of the i-th 8 columns."""
    lane = cute.arch.lane_idx()
    odd, high = (lane & 1) != 0, (lane & 2) != 0
    found = []
    for i in range(0, len(words), LANES):
        # Neighbouring lanes exchange words of two units. Then pairs of lanes exchange halves of
        # units.
        halves = []
        for x, y in (words[i : i + 2], words[i + 2 : i + 4]):
            kept, given = cutlass.select_(odd, y, x), cutlass.select_(odd, x, y)
            taken = cute.arch.shuffle_sync_bfly(given, 1)
            halves.append((cutlass.select_(odd, taken, kept), cutlass.select_(odd, kept, taken)))
        lower, upper = [], []
        for x, y in zip(*halves, strict=True):
            kept, given = cutlass.select_(high, y, x), cutlass.select_(high, x, y)
            taken = cute.arch.shuffle_sync_bfly(given, 2)
            lower.append(cutlass.select_(high, taken, kept))
            upper.append(cutlass.select_(high, kept, taken))
        found.append([*lower, *upper])
    return found


def stage_rows(words: list[Any], base: Int32, warp: Int32, rows: int, lane: Int32 = None) -> None:
    """Store rounded rows, as `operand` gives them, to the boxes of `rows` rows at shared address
    `base`, with TMA's swizzle; `warp` counts the boxes' warps. `lane` is the thread's lane: an
    opaque value keeps the compiler from holding addresses in registers across loops."""
    lane = cute.arch.lane_idx() if lane is None else lane
    row = lane // LANES  # 0 to 7, the swizzle of the row's 16-byte units
    at = base + (warp * 16 + row) * (BOX_COLUMNS * 2) + lane % LANES * 4
    for i, word in enumerate(words):
        unit, lane_row = i // LANE_ROWS, i % LANE_ROWS
        box = unit // 8 * (rows * BOX_COLUMNS * 2)
        swizzled = ((unit % 8) ^ row) << 4
        store_shared(
            Int32, at + box + lane_row * LANE_ROW_STEP * BOX_COLUMNS * 2 + swizzled, [word]
        )


def stage_matrices(
    words: list[Any], base: Int32, warp: Int32, rows: int, lane: Int32, first: int = 0
) -> None:
    """Store rounded rows as `stage_rows` does, with one instruction for each 16 columns. Lanes 0 to
    15 have the rows' addresses in the first 8 columns, lanes 16 to 31 the rows' addresses in the
    next 8 columns. The words are of the columns from `first` on."""
    row, half = lane % 16, lane // 16
    at = base + (warp * 16 + row) * (BOX_COLUMNS * 2)
    unit_of_lane = half ^ (row % 8)
    for i in range(0, len(words), 2 * LANE_ROWS):
        unit = first // 8 + i // LANE_ROWS
        box = unit // 8 * (rows * BOX_COLUMNS * 2)
        store_matrices(at + box + ((unit_of_lane ^ (unit % 8)) << 4), words[i : i + 2 * LANE_ROWS])
