"""Two warpgroups that share out the keys of each K/V tile, and the merge of their results.

Each has O, the sums and the references of the same 64 rows, of its half of the keys. At the end of
a tile of queries the second hands over its own through shared memory, in the order of registers,
and the first adds them up. Warps without a row skip this.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.numbers import INF
from ..common.ptx.math import exp2
from ..common.ptx.memory import load_shared, store_shared
from ..common.spec import WARP_SIZE
from .fragments import LANE_ROWS
from .sm90_mma import WARPGROUP

HANDED, FREE = 6, 7  # named barriers: results are in shared memory, and have been read
VECTOR = 4  # registers of a load


class KeyGroups:
    """The exchange of `columns` accumulated columns. The consumers have `key_group` (0 or 1), the
    address `other`, `acc`, `softmax` and `warp`."""

    def __init__(self, columns: int):
        self.values = columns // 2  # registers of a lane
        self.vectors = -(-(self.values + 2 * LANE_ROWS) // VECTOR)

    @property
    def size(self) -> int:
        """Float32 values in shared memory."""
        return self.vectors * VECTOR * WARPGROUP

    @cute.jit
    def begin(self, own: Any) -> None:
        if own.key_group == 0:
            self.arrive(FREE)

    @cute.jit
    def end(self, own: Any) -> None:
        """Take the arrival that is left over."""
        if own.key_group != 0:
            self.wait(FREE)

    def arrive(self, barrier: int) -> None:
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP)

    def wait(self, barrier: int) -> None:
        cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def exchange(self, own: Any, used: Int32) -> None:
        """Add what warpgroup 1 has to O, sums and references of warpgroup 0, of whose warp's rows
        `used` exist."""
        lane = cute.arch.lane_idx()
        at = own.other + (own.warp * (WARP_SIZE * self.vectors) + lane) * (4 * VECTOR)
        if own.key_group != 0:
            self.wait(FREE)
            if used > 0:
                state = [x[r] for x in (own.softmax.maximum, own.softmax.total) for r in range(2)]
                given = [*state, *(own.acc[i] for i in range(self.values))]
                given += [Float32(0.0)] * (-len(given) % VECTOR)
                for i in cutlass.range_constexpr(self.vectors):
                    store_shared(
                        Float32, at + i * (4 * VECTOR * WARP_SIZE), given[4 * i : 4 * i + 4]
                    )
            self.arrive(HANDED)
        else:
            self.wait(HANDED)
            if used > 0:
                taken = []
                for i in cutlass.range_constexpr(self.vectors):
                    taken += load_shared(Float32, at + i * (4 * VECTOR * WARP_SIZE), VECTOR)
                self.add(own, taken)
            self.arrive(FREE)

    def add(self, own: Any, taken: list[Any]) -> None:
        softmax = own.softmax
        for r in range(LANE_ROWS):
            theirs, total = taken[r], taken[LANE_ROWS + r]
            mine = softmax.maximum[r]
            highest = cute.arch.fmax(mine, theirs, nan=True)
            factors = [factor_of(x, highest, softmax.scaling.log2) for x in (mine, theirs)]
            softmax.maximum[r] = highest
            softmax.total[r] = softmax.total[r] * factors[0] + total * factors[1]
            mine_of = own.acc[None, r, None]
            theirs_of = cute.make_rmem_tensor(own.acc.layout, Float32)
            for i in range(self.values):
                theirs_of[i] = taken[2 * LANE_ROWS + i]
            theirs_of = theirs_of[None, r, None]
            for j in range(cute.size(mine_of)):
                mine_of[j] = cute.math.fma(theirs_of[j], factors[1], mine_of[j] * factors[0])


def factor_of(reference: Any, highest: Any, log2: Any) -> Any:
    """What to multiply sums relative to `reference` with; 0 where it is -inf, without a key."""
    factor = exp2((reference - highest) * log2)
    factor = cutlass.select_(reference == highest, Float32(1.0), factor)
    return cutlass.select_(reference == -INF, Float32(0.0), factor)
