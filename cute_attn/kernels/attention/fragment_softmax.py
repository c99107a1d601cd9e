"""The online softmax of rows of S in fragments, with all guarantees of `softmax`, for float16 and
bfloat16 P, and without a branch for large scores.

The offset of a row's exponents is its maximum times log2, rounded. P, sums, and the factors between
K/V tiles use the rounded one, so that O / sum is exact, and `finish_row` takes what was rounded off
from the log-sum-exp. Up to LARGE_OFFSET that is at most 8: the row's largest P is 2^-8 to 2^8.

Where it is not nearly 0, from EXACT_OFFSET on, the largest P is no longer 1, and would be rounded
in the product: so there the maximum always moves, and `finish` takes that rounding out of O.

From LARGE_OFFSET on scores that differ at all differ by a factor of 2^16 or more, so that only the
largest count. There a power of two takes the place of log2: its product with the maximum is exact,
and that with any other score far below.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.carried import Carried
from ..common.numbers import FLOAT32_MAX, INF
from ..common.ptx.math import exp2, multiply
from .fragments import LANE_ROWS, across_lanes
from .softmax import RESCALE_THRESHOLD, Scaling, finish_row, row_maximum

LARGE_OFFSET = 2.0**28  # of the `Scaling` of these rows
EXACT_OFFSET = 2.0**12
EXPONENT = 0x7F800000  # the bits of a float32's exponent


class FragmentSoftmax(Carried):
    """The online softmax of a lane's rows.

    Attributes:
        maximum: of each row so far, in units of S.
        total: the lane's part of the row's sum of P.
    """

    def __init__(self, scaling: Scaling):
        self.scaling = scaling
        self.maximum = cute.make_rmem_tensor((LANE_ROWS,), Float32)
        self.total = cute.make_rmem_tensor((LANE_ROWS,), Float32)

    def start(self) -> None:
        self.maximum.fill(-INF)
        self.total.fill(0.0)

    @cute.jit
    def update(self, s: cute.Tensor) -> Any:
        """Replace S by P, and return the factor of each lane row of O."""
        log2 = self.scaling.log2
        rows = [s[None, r, None] for r in range(LANE_ROWS)]
        previous = [self.maximum[r] for r in range(LANE_ROWS)]
        highest = [row_maximum(row, x) for row, x in zip(rows, previous, strict=True)]
        highest = across_lanes(lambda x, y: cute.arch.fmax(x, y, nan=True), highest)
        factors = []
        for r in cutlass.range_constexpr(LANE_ROWS):
            exact = abs(previous[r]) >= self.scaling.growth * (EXACT_OFFSET / RESCALE_THRESHOLD)
            growth = cutlass.select_(exact, Float32(0.0), self.scaling.growth)
            stays = highest[r] <= previous[r] + growth
            maximum = cutlass.select_(stays, previous[r], highest[r])
            used = cute.arch.fmax(maximum, -FLOAT32_MAX, nan=True)  # of a row without keys so far
            large = abs(used) >= self.scaling.large
            scale = cutlass.select_(large, power_of_two(used), log2)
            offset = multiply(used, scale)
            factor = exp2(multiply(previous[r], log2) - offset)
            large = large | (abs(previous[r]) >= self.scaling.large)
            factor = cutlass.select_(large, Float32(0.0), factor)
            factor = cutlass.select_(stays, Float32(1.0), factor)
            row = rows[r]
            sums = [Float32(0.0) for _ in range(4)]
            for j in cutlass.range_constexpr(cute.size(row)):
                row[j] = exp2(cute.math.fma(row[j], scale, -offset))
                sums[j % 4] = sums[j % 4] + row[j]
            self.maximum[r] = maximum
            total = (sums[0] + sums[1]) + (sums[2] + sums[3])
            self.total[r] = cute.math.fma(self.total[r], factor, total)
            factors.append(factor)
        return factors

    def totals(self) -> list[Any]:
        """The sum of each lane row's P."""
        return across_lanes(lambda x, y: x + y, [self.total[r] for r in range(LANE_ROWS)])

    def finish(self, lane_row: int, total: Any, sink: Any, dtype: Any) -> tuple[Any, Any]:
        """As `finish_row`, of a lane row whose P was rounded to `dtype`."""
        maximum = self.maximum[lane_row]
        inverse, log_sum = finish_row(total, maximum, self.scaling, sink)
        largest = exp2(self.scaling.rounded_off(maximum))
        return inverse * (largest / Float32(largest.to(dtype))), log_sum


def power_of_two(x: Any) -> Any:
    """The power of two whose product with x is from 2^31 to 2^32, for |x| from 2^-96 on; for a
    smaller x 2^127."""
    exponent = Int32(x.bitcast(Int32)) & EXPONENT
    bits = Int32(254 << 23) - cutlass.max(exponent - Int32(31 << 23), Int32(0))
    return bits.bitcast(Float32)
