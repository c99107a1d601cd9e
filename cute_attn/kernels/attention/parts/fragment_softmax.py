"""The online softmax of rows of S in fragments. This softmax has all guarantees of `softmax` but
one: in the K/V tile in which a row's scores become large, the scaled scores are rounded to float32.

Exponents are relative to the row's reference, a number that was set HEADROOM above the row's
maximum. A K/V tile uses the reference from before the tile. Only an exponent that is not negative
shows that the row has outgrown its reference, so the loop needs the exponents' signs, but no
maximum.
"""

from __future__ import annotations

import copy
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...common.carried import Carried
from ...common.exp2 import exp2_on_fma
from ...common.numbers import INF
from ...common.ptx.compiler import keep_branch
from ...common.ptx.math import exp2
from .fragments import LANE_ROW_STEP, LANE_ROWS, across_lanes
from .softmax import Scaling, row_maximum

# log2 of how far a row's reference is above the maximum when it moves. P is at most 1, and a row's
# largest P at least 2^-HEADROOM. So float16, whose smallest positive number is 2^-24, holds every P
# down to 2^-22 of the row's largest.
HEADROOM = {"bfloat16": 8.0, "float16": 2.0}
LARGEST_FACTOR = 2.0**10  # bound of log2, above which exponents of finite scores may be infinite


class FragmentSoftmax(Carried):
    """The online softmax of a lane's rows.

    Attributes:
        scaling: the Scaling, with HEADROOM as its growth.
        maximum: the reference of each row, in units of S: P is 1 there. The reference is -inf until
            a key of the row has been seen.
        offset: the offset of the exponents, -maximum * log2 rounded; finite.
        total: the lane's part of the row's sum of P.
        factor: the factor of each row of O, after an `update` that returns True.
        exact: not 0 if the warp's next tile needs S itself, because scores are large or a row has
            no reference.
        sums: whether `total` is computed. With columns of ones in V, `total` is not computed.
        on_fma: the lane's columns of a row whose exponentials run on the FMA units.
        alone: whether a row's bits depend on the row's own scores only. Otherwise a row's reference
            is also rounded by whether another row of the warp needs `exact`.
    """

    def __init__(
        self, scaling: Scaling, sums: bool = True, on_fma: range = range(0), alone: bool = False
    ):
        self.sums = sums
        self.on_fma = on_fma
        self.alone = alone
        self.scaling = scaling
        self.maximum = cute.make_rmem_tensor((LANE_ROWS,), Float32)
        self.offset = cute.make_rmem_tensor((LANE_ROWS,), Float32)
        self.total = cute.make_rmem_tensor((LANE_ROWS,), Float32)
        self.factor = cute.make_rmem_tensor((LANE_ROWS,), Float32)
        self.exact = cute.make_rmem_tensor((1,), Int32)

    def scaled(self, scaling: Scaling) -> FragmentSoftmax:
        """This softmax, with its registers, and another scaling."""
        found = copy.copy(self)
        found.scaling = scaling
        return found

    def start(self) -> None:
        self.maximum.fill(-INF)
        self.total.fill(0.0)
        self.factor.fill(1.0)

    @cute.jit
    def update_used(
        self, s: cute.Tensor, used: Int32, first: cutlass.Constexpr[bool] = False
    ) -> Boolean:
        """Run `update` where only the first `used` of the warp's 16 rows exist. A lane row that
        holds none of the used rows keeps S, and takes no time."""
        moved = Boolean(False)
        if used > LANE_ROW_STEP:
            moved = self.update(s, first)
        elif used > 0:
            moved = self.update(s, first, 1)
        return moved

    @cute.jit
    def start_used(self, s: cute.Tensor, used: Int32) -> Boolean:
        """Run `start_update` where only the first `used` of the warp's 16 rows exist, as
        `update_used` does. `finish_used` follows, for all columns."""
        moved = Boolean(False)
        if used > LANE_ROW_STEP:
            moved = self.start_update(s, False, LANE_ROWS)
        elif used > 0:
            moved = self.start_update(s, False, 1)
        return moved

    @cute.jit
    def finish_used(self, s: cute.Tensor, used: Int32, columns: cutlass.Constexpr[range]) -> None:
        """Run `finish_update` for some of the lane's columns; see `start_used`."""
        if used > LANE_ROW_STEP:
            self.finish_update(s, LANE_ROWS, columns)
        elif used > 0:
            self.finish_update(s, 1, columns)

    @cute.jit
    def update(
        self,
        s: cute.Tensor,
        first: cutlass.Constexpr[bool] = False,
        lane_rows: cutlass.Constexpr[int] = LANE_ROWS,
    ) -> Boolean:
        """Replace S by P in the first `lane_rows`. Return whether rows of O are to be multiplied by
        `factor`. `first` says that no tile comes before this tile."""
        moved = self.start_update(s, first, lane_rows)
        self.finish_update(s, lane_rows, range(cute.size(s) // LANE_ROWS))
        return moved

    @cute.jit
    def start_update(
        self, s: cute.Tensor, first: cutlass.Constexpr[bool], lane_rows: cutlass.Constexpr[int]
    ) -> Boolean:
        """Replace S by exponents; see `update`."""
        rows = [s[None, r, None] for r in range(lane_rows)]
        moved = Boolean(True)
        if cutlass.const_expr(first):
            self.move(rows)
        else:
            moved = self.exact[0] != 0
            if moved:
                keep_branch()
                self.move(rows)
            else:
                signs = Int32(-1)
                for r in cutlass.range_constexpr(len(rows)):
                    for j in cutlass.range_constexpr(cute.size(rows[r])):
                        x = cute.math.fma(rows[r][j], self.scaling.log2, self.offset[r])
                        signs = signs & x.bitcast(Int32)
                        rows[r][j] = x
                moved = cute.arch.vote_any_sync(signs >= 0)
                if moved:
                    keep_branch()
                    self.move_exponents(rows)
        return moved

    @cute.jit
    def finish_update(
        self,
        s: cute.Tensor,
        lane_rows: cutlass.Constexpr[int],
        columns: cutlass.Constexpr[range],
    ) -> None:
        """Replace exponents by P, in some of the lane's columns."""
        for r in cutlass.range_constexpr(lane_rows):
            row = s[None, r, None]
            sums = [self.total[r], *(Float32(0.0) for _ in range(3))]
            for j in cutlass.range_constexpr(columns.start, columns.stop):
                if cutlass.const_expr(j in self.on_fma):
                    row[j] = exp2_on_fma(row[j])
                else:
                    row[j] = exp2(row[j])
                if cutlass.const_expr(self.sums):
                    sums[j % 4] = sums[j % 4] + row[j]
            self.total[r] = (sums[0] + sums[1]) + (sums[2] + sums[3])

    @cute.jit
    def move(self, rows: cutlass.Constexpr[Any]) -> None:
        """Move references that rows of S have outgrown, and replace S by exponents."""
        scaling = self.scaling
        previous = [self.maximum[r] for r in range(len(rows))]
        highest = highest_of(rows)
        exact = Boolean(scaling.log2 > LARGEST_FACTOR)
        for r in cutlass.range_constexpr(len(rows)):
            stays = highest[r] <= previous[r]
            maximum = cutlass.select_(stays, previous[r], self.above(highest[r]))
            used = cute.arch.fmax(maximum, scaling.lowest, nan=True)
            large = (abs(maximum) >= scaling.large) & (maximum != -INF)
            used = cutlass.select_(large, maximum, used)
            factor = exp2((previous[r] - used) * scaling.log2)
            factor = cutlass.select_(stays, Float32(1.0), factor)
            offset = -used * scaling.log2
            # A large reference is subtracted before the multiplication.
            shift = cutlass.select_(large, -used, Float32(0.0))
            rest = cutlass.select_(large, Float32(0.0), offset)
            change = None
            if cutlass.const_expr(self.alone):
                # A row that does not need `exact` gets the bits of `move_exponents`.
                needs = (scaling.log2 > LARGEST_FACTOR) | (abs(previous[r]) >= scaling.large)
                x = cute.math.fma(highest[r], scaling.log2, self.offset[r])
                moved = self.moved(r, x)
                shift = cutlass.select_(needs, shift, Float32(0.0))
                rest = cutlass.select_(needs, rest, self.offset[r])
                change = cutlass.select_(needs, Float32(0.0), moved[1] - self.offset[r])
                maximum = cutlass.select_(needs, maximum, moved[0])
                offset = cutlass.select_(needs, offset, moved[1])
                factor = cutlass.select_(needs, factor, exp2(change))
                large = (abs(maximum) >= scaling.large) & (maximum != -INF)
            for j in cutlass.range_constexpr(cute.size(rows[r])):
                rows[r][j] = cute.math.fma(rows[r][j] + shift, scaling.log2, rest)
                if cutlass.const_expr(self.alone):
                    rows[r][j] = rows[r][j] + change
            self.use(r, maximum, offset, factor)
            exact = exact | large | (maximum == -INF)
        self.exact[0] = Int32(cute.arch.vote_any_sync(exact))

    @cute.jit
    def move_exponents(self, rows: cutlass.Constexpr[Any]) -> None:
        """Do what `move` does, for rows that hold exponents already."""
        scaling = self.scaling
        highest = highest_of(rows)
        large = Boolean(False)
        for r in cutlass.range_constexpr(len(rows)):
            maximum, offset = self.moved(r, highest[r])
            change = offset - self.offset[r]
            for j in cutlass.range_constexpr(cute.size(rows[r])):
                rows[r][j] = rows[r][j] + change
            self.use(r, maximum, offset, exp2(change))
            large = large | (abs(maximum) >= scaling.large)
        self.exact[0] = Int32(cute.arch.vote_any_sync(large))

    def moved(self, r: int, highest: Any) -> tuple[Any, Any]:
        """A row's reference and offset after a tile whose exponents are at most `highest`."""
        stays = highest <= 0.0
        found = self.above((highest - self.offset[r]) / self.scaling.log2)
        maximum = cutlass.select_(stays, self.maximum[r], found)
        return maximum, cutlass.select_(stays, self.offset[r], -maximum * self.scaling.log2)

    def above(self, highest: Any) -> Any:
        """The reference for a maximum. A large maximum is the reference itself, so that its P is
        1."""
        reference = highest + self.scaling.growth
        return cutlass.select_(abs(reference) < self.scaling.large, reference, highest)

    def use(self, r: int, maximum: Any, offset: Any, factor: Any) -> None:
        """Set a row's reference."""
        self.maximum[r], self.offset[r], self.factor[r] = maximum, offset, factor
        self.total[r] = self.total[r] * factor

    def totals(self) -> list[Any]:
        """The sum of each lane row's P."""
        return across_lanes(lambda x, y: x + y, [self.total[r] for r in range(LANE_ROWS)])


def highest_of(rows: list[cute.Tensor]) -> list[Any]:
    """The maximum of each lane row; NaN if a value is."""
    highest = [row_maximum(row, Float32(-INF)) for row in rows]
    return across_lanes(lambda x, y: cute.arch.fmax(x, y, nan=True), highest)
