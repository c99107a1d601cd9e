"""The online softmax of rows of S in fragments, with all guarantees of `softmax`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.carried import Carried
from ..common.numbers import INF
from ..common.ptx.compiler import keep_branch
from ..common.ptx.math import exp2
from .fragments import LANE_ROW_STEP, LANE_ROWS, across_lanes, assign
from .softmax import Scaling, move_maximum, row_maximum


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
    def update_used(self, s: cute.Tensor, used: Int32) -> Any:
        """As `update`, where only the first `used` of the warp's 16 rows exist: the others keep S,
        and take no time where no lane has one."""
        factors = cute.make_rmem_tensor((LANE_ROWS,), Float32)
        factors.fill(1.0)
        if used > LANE_ROW_STEP:
            assign(factors, self.update(s))
        elif used > 0:
            factors[0] = self.update(s, 1)[0]
        return [factors[r] for r in range(LANE_ROWS)]

    @cute.jit
    def update(self, s: cute.Tensor, lane_rows: cutlass.Constexpr[int] = LANE_ROWS) -> Any:
        """Replace S by P, of the first `lane_rows`, and return the factor of each lane row of O."""
        log2 = self.scaling.log2
        rows = [s[None, r, None] for r in range(lane_rows)]
        previous = [self.maximum[r] for r in range(lane_rows)]
        highest = [row_maximum(row, x) for row, x in zip(rows, previous, strict=True)]
        highest = across_lanes(lambda x, y: cute.arch.fmax(x, y, nan=True), highest)
        moved = [
            move_maximum(h, p, self.scaling, False) for h, p in zip(highest, previous, strict=True)
        ]
        large = moved[0][3] if lane_rows == 1 else moved[0][3] | moved[1][3]
        if cute.arch.vote_any_sync(large):
            keep_branch()  # scores this large are rare
            for r in cutlass.range_constexpr(lane_rows):
                shift = cutlass.select_(moved[r][3], -moved[r][0], Float32(0.0))
                for j in cutlass.range_constexpr(cute.size(rows[r])):
                    rows[r][j] = rows[r][j] + shift
        factors = []
        for r in cutlass.range_constexpr(lane_rows):
            maximum, used, stays, large = moved[r]
            used = cutlass.select_(large, maximum, used)
            factor = exp2((previous[r] - used) * log2)
            factor = cutlass.select_(stays, Float32(1.0), factor)
            offset = cutlass.select_(large, Float32(0.0), -used * log2)
            row = rows[r]
            sums = [Float32(0.0) for _ in range(4)]
            for j in cutlass.range_constexpr(cute.size(row)):
                row[j] = exp2(cute.math.fma(row[j], log2, offset))
                sums[j % 4] = sums[j % 4] + row[j]
            self.maximum[r] = maximum
            total = (sums[0] + sums[1]) + (sums[2] + sums[3])
            self.total[r] = cute.math.fma(self.total[r], factor, total)
            factors.append(factor)
        return factors

    def totals(self) -> list[Any]:
        """The sum of each lane row's P."""
        return across_lanes(lambda x, y: x + y, [self.total[r] for r in range(LANE_ROWS)])
