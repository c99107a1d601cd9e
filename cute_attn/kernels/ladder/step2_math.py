"""Step 2 of the ladder, math: exponentials in base 2.

exp(scale s - m) costs a range reduction for each exponential. 2 ** (scale log2(e) s - m) costs one
fma, which includes the scale, and one instruction of the special function unit, which flushes
subnormal numbers to 0. The maximum is taken over unscaled scores, so softmax_scale must not be
negative.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

from ..common.numbers import LOG2_E
from ..common.ptx.math import exp2
from .step1_basic import FmhaStep1, Work


class FmhaStep2(FmhaStep1):
    def scale(self, softmax_scale: Float32) -> Float32:
        return softmax_scale * LOG2_E

    def softmax_row(
        self, work: Work, s: cute.Tensor, row: int, acc: cute.Tensor, maximum: cute.Tensor,
        total: cute.Tensor,
    ) -> None:  # fmt: skip
        values = [s[c] for c in range(cute.size(s))]
        highest = self.row_maximum(values, maximum[row])
        offset = -(highest * work.scale)
        values = [exp2(cute.math.fma(x, work.scale, offset)) for x in values]
        factor = exp2((maximum[row] - highest) * work.scale)
        maximum[row] = highest
        self.rescale(values, row, factor, acc, total)
        for c, x in enumerate(values):
            s[c] = x
