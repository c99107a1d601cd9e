"""The sum of partial outputs of one row of queries, each over a part of the keys.

    lse = log(sum_i exp(lse_i) + exp(sink))
    o   = sum_i exp(lse_i - lse) o_i         in float32

A part without visible keys has lse_i = -inf, and its o_i counts as 0 whatever it holds. If no part
has visible keys, the row is 0, and its lse is the sink, or -inf without a sink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.carried import Carried
from ...common.numbers import INF, LN_2, LOG2_E, NAN
from ...common.ptx.memory import load_global

VECTOR = 4  # float32 of a load
UNROLL = 4  # loads of a thread in flight


@dataclass(frozen=True)
class Parts(Carried):
    """A thread's columns of a row.

    Attributes:
        o, lse: addresses of the columns and of the log-sum-exp of part 0.
        o_step, lse_step: bytes to the next part.
        count: number of parts.
    """

    o: Int64
    lse: Int64
    o_step: Int64
    lse_step: Int64
    count: Int32

    @classmethod
    def of_row(cls, row: Int64, vector: Int32, lse_column: int, step: Int64, count: Int32) -> Parts:
        """VECTOR columns of a row of part 0 at address `row`, which holds o and, in column
        `lse_column`, the log-sum-exp. `step` is the number of bytes to the next part."""
        return cls(row + vector * (VECTOR * 4), row + lse_column * 4, step, step, count)

    def at(self, number: Int64) -> tuple[Int64, Int64]:
        """Addresses of the columns and of the log-sum-exp of a part."""
        return self.o + number * self.o_step, self.lse + number * self.lse_step


@cute.jit
def add_up(
    rows: list[Parts], first: Int32, step: cutlass.Constexpr[int], own: cute.Tensor,
    load: cutlass.Constexpr[Any] = load_global,
) -> tuple[list[Float32], list[Float32]]:  # fmt: skip
    """Add up a thread's columns of some rows, over every `step`-th part from `first` on. The loads
    of all rows are in flight together.

    Args:
        rows: the rows' parts, equally many of each.
        own: the sums, `[VECTOR, rows]`.
        load: loads float32 from the parts' addresses.

    Returns:
        For each row, the maximum of the parts' log-sum-exps, and the sum of their exponentials
        relative to the maximum.
    """
    maxima = [Float32(-INF) for _ in rows]
    totals = [Float32(0.0) for _ in rows]
    own.fill(0.0)
    count = rows[0].count
    last = count - 1
    for start in cutlass.range(first, count, step * UNROLL, unroll=1):
        numbers = [start + i * step for i in range(UNROLL)]
        # Past the last part, the last part is loaded again.
        found = [Int64(cutlass.min(number, last)) for number in numbers]
        places = [[parts.at(number) for number in found] for parts in rows]
        lses = [[load(Float32, lse)[0] for _, lse in row] for row in places]
        values = [[load(Float32, o, VECTOR) for o, _ in row] for row in places]
        for r in cutlass.range_constexpr(len(rows)):
            of_parts = [
                cutlass.select_(number > last, Float32(-INF), x)
                for number, x in zip(numbers, lses[r], strict=True)
            ]
            highest = maxima[r]
            for x in of_parts:
                highest = cute.arch.fmax(highest, x, nan=True)
            factor = weight_of(maxima[r], highest)
            total = totals[r] * factor
            for j in cutlass.range_constexpr(VECTOR):
                own[j, r] = own[j, r] * factor
            for i in cutlass.range_constexpr(UNROLL):
                weight = weight_of(of_parts[i], highest)
                total += weight
                for j in cutlass.range_constexpr(VECTOR):
                    value = cutlass.select_(weight == 0.0, Float32(0.0), values[r][i][j])
                    own[j, r] = cute.math.fma(value, weight, own[j, r])
            maxima[r], totals[r] = highest, total
    return maxima, totals


@cute.jit
def finish(
    sums: list[cute.Tensor],
    maxima: list[Float32],
    totals: list[Float32],
    sink: Float32 | None,
    own: cute.Tensor,
) -> Float32:
    """Add up `sums`, each with the maximum and total of a row from `add_up`, to the row's columns
    `own`. Return the log-sum-exp of the row."""
    highest = Float32(-INF)
    for x in maxima:
        highest = cute.arch.fmax(highest, x, nan=True)
    maximum, total, log_sum = highest, Float32(0.0), Float32(-INF)
    if cutlass.const_expr(sink is not None):
        maximum = cute.arch.fmax(highest, sink, nan=True)
        total = weight_of(sink, maximum)
        if not (sink < INF):
            total = Float32(NAN)
        log_sum = sink
    own.fill(0.0)
    for i in cutlass.range_constexpr(len(sums)):
        weight = weight_of(maxima[i], maximum)
        total = cute.math.fma(totals[i], weight, total)
        for j in cutlass.range_constexpr(VECTOR):
            own[j] = cute.math.fma(sums[i][j], weight, own[j])
    seen = total != 0.0
    if cutlass.const_expr(sink is not None):
        seen = highest != -INF  # a row without a visible key is 0, whatever the sink is
    if seen:
        inverse = 1.0 / total
        for j in cutlass.range_constexpr(VECTOR):
            own[j] = own[j] * inverse
        log_sum = maximum + cute.math.log2(total, fastmath=True) * LN_2
    return log_sum


def weight_of(x: Float32, maximum: Float32) -> Float32:
    """exp(x - maximum), also where both are infinite; 0 where x is -inf."""
    ratio = cute.math.exp2((x - maximum) * LOG2_E, fastmath=True)
    ratio = cutlass.select_(x == maximum, Float32(1.0), ratio)
    return cutlass.select_(x == -INF, Float32(0.0), ratio)


def store_rounded(columns: cute.Tensor, vector: Int32, values: cute.Tensor) -> None:
    """Round VECTOR values to the dtype of a row of o, and store the values there."""
    rounded = cute.make_rmem_tensor((VECTOR,), columns.element_type)
    rounded.store(values.load().to(columns.element_type))
    cute.autovec_copy(rounded, cute.local_tile(columns, (VECTOR,), (vector,)))
