"""Step 8 of the ladder, warpgroups: two consumer warpgroups share the K/V tiles.

With 128 rows in place of 64, a tile of K and V that has been loaded is used twice as often, and
while one warpgroup computes a softmax, the other one's products may have the tensor cores. Each
thread holds S, P and O of 64 rows by 128 columns: 160 registers, so that two warpgroups have not
enough of them if all threads of the CTA have as many. `setmaxnreg` gives those of the load warp,
which needs few, to the consumers. It works on warpgroups; three warps beside the load warp idle.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from ..attention.sm90.mma import WARPGROUP
from ..common.pipeline import Barriers
from ..common.smem import Pointers
from .step7_wgmma import FmhaStep7, Operands

# Registers of a thread of the (load warp's, consumers') warpgroups, by the number of the latter.
REGISTERS = {2: (24, 240), 3: (32, 160)}


class FmhaStep8(FmhaStep7):
    @property
    def num_threads(self) -> int:
        return (self.warpgroups + 1) * WARPGROUP

    @cute.jit
    def roles(self, x: Operands, storage: Pointers, barriers: Barriers, warp: Int32) -> None:
        load_registers, consumer_registers = REGISTERS[self.warpgroups]
        if warp >= self.load.warps[0]:
            cute.arch.setmaxregister_decrease(load_registers)
            if warp == self.load.warps[0]:
                self.load_warp(x, storage, barriers)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            self.consumer_warps(x, self.consumer(x, storage, barriers, warp), storage)
