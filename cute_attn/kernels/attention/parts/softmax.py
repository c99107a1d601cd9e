"""Online softmax of rows in base 2: P = 2^(S factor log2(e) - offset).

A row's maximum moves only when it has grown by more than RESCALE_THRESHOLD, so accumulators are
rarely rescaled. Sums and accumulators use the same maximum, so its value cancels from the result.

Functions take a thread's values of one row and the row's scalars. Where several threads share a
row, they have to combine their maxima (`row_maximum`) and their sums of exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from ...common.carried import Carried
from ...common.numbers import FLOAT32_MAX, INF, LN_2, LOG2_E, NAN
from ...common.ptx.compiler import keep_branch

RESCALE_THRESHOLD = 8.0  # log2 of the growth that leaves the maximum in place: P is at most 2^8
# Below this, rounding an offset m * scale costs at most 2^-13, a factor of 1 + 8.5e-5: as much as
# the error of the exponentials on the FMA units. See docs/kernels/hd256_forward.md.
LARGE_OFFSET = 2.0**12


@dataclass(frozen=True)
class Scaling(Carried):
    """Factors and bounds for values of S: scores, or with a softcap their tanh.

    Attributes:
        factor: turns S into scaled scores: the softmax scale, or the softcap.
        log2: factor times log2(e).
        before_tanh: factor of scores inside the tanh; 1 without a softcap.
        growth: RESCALE_THRESHOLD, or the kernel's own threshold, in units of S.
        large: LARGE_OFFSET in units of S; a maximum this large is subtracted from S before the
            multiplication by `log2`.
        lowest: a finite number below any maximum that is not large.
    """

    factor: Float32
    log2: Float32
    before_tanh: Float32
    growth: Float32
    large: Float32
    lowest: Float32

    @classmethod
    def of(
        cls, softmax_scale: Any, softcap: Any | None = None, growth: float = RESCALE_THRESHOLD
    ) -> Scaling:
        factor, before_tanh = softmax_scale, 1.0
        if softcap is not None:
            factor = softcap
            before_tanh = cutlass.min(softmax_scale / softcap, Float32(FLOAT32_MAX))
        log2 = factor * LOG2_E
        large = LARGE_OFFSET / log2
        lowest = cutlass.max(-2.0 * large, Float32(-FLOAT32_MAX))
        return cls(factor, log2, Float32(before_tanh), growth / log2, large, lowest)

    def multiply_add(self, x: Any, y: Any) -> Any:
        """Compute factor * x + y with one rounding."""
        return cute.math.fma(self.factor, x, y)

    def rounded_off(self, maximum: Any) -> Any:
        """The rounding error of the offset maximum * log2; sums are too large by 2 ** error."""
        rest = cute.math.fma(maximum, self.log2, -(maximum * self.log2))
        return cutlass.select_(abs(maximum) >= self.large, Float32(0.0), rest)


@cute.jit
def cap_row(values: cute.Tensor, scaling: Scaling) -> None:
    """Replace a row's values by the tanh of a softcap."""
    for j in cutlass.range_constexpr(cute.size(values)):
        values[j] = cute.math.tanh(values[j] * scaling.before_tanh, fastmath=True)


@cute.jit
def row_maximum(values: cute.Tensor, previous: Float32) -> Float32:
    """The maximum of the values and of `previous`; NaN if any of these is NaN."""
    chains = [values[j] for j in range(4)]
    for j in cutlass.range_constexpr(4, cute.size(values)):
        chains[j % 4] = cute.arch.fmax(chains[j % 4], values[j], nan=True)
    highest = cute.arch.fmax(
        cute.arch.fmax(chains[0], chains[1], nan=True),
        cute.arch.fmax(chains[2], chains[3], nan=True),
        nan=True,
    )
    return cute.arch.fmax(highest, previous, nan=True)


@cute.jit
def move_maximum(
    highest: Float32, previous: Float32, scaling: Scaling
) -> tuple[Float32, Float32, Boolean, Boolean]:
    """Return (the new maximum, the new maximum or a finite number if the maximum is -inf, whether
    the maximum stayed, whether the row's scores are large).
    """
    large = (abs(highest) >= scaling.large) & (highest != -INF)
    # The threshold is rounded down, because an ulp of a large maximum may exceed `growth`.
    passed, _ = cute.arch.add_packed_f32x2(
        (previous, previous), (scaling.growth, scaling.growth), rnd="rm"
    )
    stays = highest <= passed
    maximum = previous if stays else highest
    used = cute.arch.fmax(maximum, scaling.lowest, nan=True)
    return maximum, used, stays, large


@cute.jit
def subtract_maximum(values: cute.Tensor, maximum: Float32) -> Float32:
    """Subtract a large maximum from the values before they are scaled, and return the subtracted
    number."""
    keep_branch()
    for j in cutlass.range_constexpr(0, cute.size(values), 2):
        values[j], values[j + 1] = cute.arch.add_packed_f32x2(
            (values[j], values[j + 1]), (-maximum, -maximum)
        )
    return maximum


def exponents(values: cute.Tensor, columns: range, log2: Any, offset: Any) -> list[Any]:
    """Compute values * log2 + offset in pairs, for an even number of columns."""
    return [
        cute.arch.fma_packed_f32x2((values[j], values[j + 1]), (log2, log2), (offset, offset))
        for j in columns[::2]
    ]


@cute.jit
def finish_row(
    total: Float32, maximum: Float32, scaling: Scaling, sink: Float32 | None
) -> tuple[Float32, Float32]:
    """Return (factor of the row of O, log-sum-exp of the row). `total` is the sum of the row's
    exponentials relative to `maximum`. A row without visible keys gets the factor 0, and the
    log-sum-exp -inf or the sink."""
    if maximum == INF:  # inf - inf is NaN, and exp2 on the FMA units loses a NaN
        total = Float32(NAN)
    rest = scaling.rounded_off(maximum)
    inverse = Float32(0.0)
    log_sum = Float32(-INF)
    if cutlass.const_expr(sink is not None):
        log_sum = sink
        if total != 0.0:
            if not (sink < INF):
                total = Float32(NAN)
            # Compare in natural units, because the conversion to base 2 would round once more.
            above_sink = scaling.multiply_add(maximum, -sink)
            below, above = cutlass.min(above_sink, 0.0), cutlass.min(-above_sink, 0.0)
            ratio = cute.math.exp2(below * LOG2_E - rest, fastmath=True)
            own = cute.math.exp2(above * LOG2_E, fastmath=True)
            whole = total * ratio + own
            inverse = ratio / whole
            log_whole = cute.math.log2(whole, fastmath=True) * LN_2
            log_sum = sink + log_whole
            if above_sink > 0.0:
                log_sum = scaling.multiply_add(maximum, log_whole)
    else:
        if total != 0.0:
            inverse = Float32(1.0) / total
            log_total = (cute.math.log2(total, fastmath=True) - rest) * LN_2
            log_sum = scaling.multiply_add(maximum, log_total)
    return inverse, log_sum
