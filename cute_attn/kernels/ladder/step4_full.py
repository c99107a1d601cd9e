"""Step 4 of the ladder, full: an occupancy target, approximate division, longest tiles first.

With `occupancy` CTAs on an SM, one CTA computes exponentials while another CTA's MMAs run. ptxas
limits a CTA's registers to its share of the SM, and the heuristics limit the stages of K and V to
its share of shared memory. A row of O is multiplied by one approximate reciprocal in place of
head_dim exact divisions. With a causal mask the last query tile of a head has the most keys and
starts first, so that the last CTAs to run are short.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.ptx.math import reciprocal
from .step3_memory import FmhaStep3


class FmhaStep4(FmhaStep3):
    def query_tile(self, block: Int32) -> Int32:
        if self.spec.causal:
            return cute.arch.grid_dim()[0] - 1 - block
        return block

    def divide(self, acc: cute.Tensor, row: int, total: Float32) -> None:
        inverse = reciprocal(total)
        for i in self.row_of_acc(row):
            acc[i] = acc[i] * inverse
