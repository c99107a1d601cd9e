"""The sum of partial outputs of one row of queries, each over a part of the keys.

    lse = log(sum_i exp(lse_i) + exp(sink))
    o   = sum_i exp(lse_i - lse) o_i         in float32

A part without visible keys has lse_i = -inf, and its o_i counts as 0 whatever it holds. If no part
has visible keys, the row is 0, and its lse is the sink, or -inf without a sink.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def at(self, number: Int64) -> tuple[Int64, Int64]:
        """Addresses of the columns and of the log-sum-exp of a part."""
        return self.o + number * self.o_step, self.lse + number * self.lse_step


@cute.jit
def add_up(
    parts: Parts, first: Int32, step: cutlass.Constexpr[int], own: cute.Tensor
) -> tuple[Float32, Float32]:
    """Add up a thread's columns over every `step`-th part from `first` on. Return the maximum of
    these parts' log-sum-exps, and the sum of their exponentials relative to the maximum."""
    maximum, total = Float32(-INF), Float32(0.0)
    own.fill(0.0)
    last = parts.count - 1
    for start in cutlass.range(first, parts.count, step * UNROLL, unroll=1):
        numbers = [start + i * step for i in range(UNROLL)]
        # Past the last part, the last part is loaded again.
        found = [parts.at(Int64(cutlass.min(number, last))) for number in numbers]
        loaded = [load_global(Float32, lse)[0] for _, lse in found]
        values = [load_global(Float32, o, VECTOR) for o, _ in found]
        of_parts = [
            cutlass.select_(number > last, Float32(-INF), x)
            for number, x in zip(numbers, loaded, strict=True)
        ]
        highest = maximum
        for x in of_parts:
            highest = cute.arch.fmax(highest, x, nan=True)
        factor = weight_of(maximum, highest)
        total = total * factor
        for j in cutlass.range_constexpr(VECTOR):
            own[j] = own[j] * factor
        for i in cutlass.range_constexpr(UNROLL):
            weight = weight_of(of_parts[i], highest)
            total += weight
            for j in cutlass.range_constexpr(VECTOR):
                value = cutlass.select_(weight == 0.0, Float32(0.0), values[i][j])
                own[j] = cute.math.fma(value, weight, own[j])
        maximum = highest
    return maximum, total


@cute.jit
def finish(
    sums: cute.Tensor,
    maxima: cute.Tensor,
    totals: cute.Tensor,
    sink: Float32 | None,
    own: cute.Tensor,
) -> Float32:
    """Add up `sums`, which several calls of `add_up` made, to the row's columns `own`. Return the
    log-sum-exp of the row.

    Args:
        sums: `[VECTOR, calls]`, the columns.
        maxima, totals: `[calls]`, the results of `add_up`.
    """
    calls = cute.size(maxima)
    highest = Float32(-INF)
    for i in cutlass.range_constexpr(calls):
        highest = cute.arch.fmax(highest, maxima[i], nan=True)
    maximum, total, log_sum = highest, Float32(0.0), Float32(-INF)
    if cutlass.const_expr(sink is not None):
        maximum = cute.arch.fmax(highest, sink, nan=True)
        total = weight_of(sink, maximum)
        if not (sink < INF):
            total = Float32(NAN)
        log_sum = sink
    own.fill(0.0)
    for i in cutlass.range_constexpr(calls):
        weight = weight_of(maxima[i], maximum)
        total = cute.math.fma(totals[i], weight, total)
        for j in cutlass.range_constexpr(VECTOR):
            own[j] = cute.math.fma(sums[j, i], weight, own[j])
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
