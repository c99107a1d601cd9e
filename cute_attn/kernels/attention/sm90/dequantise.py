"""fp8 K and V: warps between TMA and the products convert tiles to the operand type of `wgmma`.

The load warp brings tiles of fp8 to shared memory. The tiles have boxes of 64 columns, as the tiles
that products read, but a row of a box is 64 bytes, without a swizzle. So a warp reads 8 rows of a
box, 512 consecutive bytes, by one load of 16 bytes a lane. Each lane then holds 16 columns of a
row, and stores two units of 16 bytes. Four lanes share a row. Neither loads nor stores have bank
conflicts: the 8 lanes whose accesses are served together write the even units of a row and, with
the swizzle, the odd units of the next row.

The conversion is exact, because every fp8 number is a bfloat16 and a float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Numeric

from ...common.carried import Carried
from ...common.pipeline import Barriers
from ...common.ptx.convert import from_fp8
from ...common.ptx.memory import load_shared, store_shared
from ...common.spec import WARP_SIZE

ROWS = 8  # rows of a box that a warp converts at a time
READ = 16  # bytes that a lane reads at a time
GROUP = READ * WARP_SIZE  # bytes of fp8 that a warp converts at a time
AT_ONCE = 4  # groups whose loads are in flight together, at most


@dataclass(frozen=True)
class Dequantiser(Carried):
    """What a warp that converts the tiles of K, or of V, keeps.

    Attributes:
        name: "k" or "v". The edges are `{name}_fp8_full`, `{name}_fp8_empty`, `{name}_full` and
            `{name}_empty`.
        fp8, dtype: the element types before and after the conversion.
        nbytes: bytes of a stage of fp8.
        halves: how many stages of fp8 hold one tile, 1 or 2.
        warps: how many warps share a tile.
        warp: the warp's number among these warps.
        source, to: shared addresses of the rings of both sorts of tiles.
    """

    name: str
    fp8: type[Numeric]
    dtype: type[Numeric]
    nbytes: int
    halves: int
    warps: int
    warp: Int32
    source: Int32
    to: Int32
    barriers: Barriers

    @property
    def at_once(self) -> int:
        """Groups of a warp whose loads are in flight together."""
        groups = self.nbytes // (self.warps * GROUP)
        return max(n for n in range(1, AT_ONCE + 1) if groups % n == 0)

    @cute.jit
    def convert(self, n: Int32) -> None:
        """Convert the tile of use n: wait for it, and for a free stage, and hand it over."""
        barriers, name = self.barriers, self.name
        lane = cute.arch.lane_idx()
        row, unit = lane // 4, lane % 4 * 2
        uses = [n * self.halves + half for half in range(self.halves)] if self.halves > 1 else [n]
        sources = [barriers.stage(f"{name}_fp8_full", use) * self.nbytes for use in uses]
        within = self.source + self.warp * GROUP + lane * READ
        sources = [source + within for source in sources]
        to = barriers.stage(f"{name}_full", n) * (2 * self.nbytes * self.halves)
        to += self.to + self.warp * (2 * GROUP) + row * (2 * READ * 4) + (unit ^ row) * READ
        for half in cutlass.range_constexpr(self.halves):
            barriers.wait(f"{name}_fp8_full", uses[half])
            if cutlass.const_expr(half == 0):
                barriers.wait_previous(f"{name}_empty", n)
            self.convert_stage(sources[half], to + half * (2 * self.nbytes))
            barriers.warp_arrives(f"{name}_fp8_empty", uses[half])
        # The products read the tile through the async proxy.
        cute.arch.fence_view_async_shared()
        barriers.warp_arrives(f"{name}_full", n)

    @cute.jit
    def convert_stage(self, source: Int32, to: Int32) -> None:
        """Convert the warp's part of a stage of fp8."""
        step = self.warps * GROUP
        for first in cutlass.range(0, self.nbytes, step * self.at_once, unroll=1):
            self.convert_groups(source + first, to + 2 * first, step)

    def convert_groups(self, source: Int32, to: Int32, step: int) -> None:
        """Convert `at_once` groups, `step` bytes of fp8 apart."""
        loaded = [load_shared(Int32, source + i * step, 4) for i in range(self.at_once)]
        for i, words in enumerate(loaded):
            units = [from_fp8(self.fp8, self.dtype, word) for word in words]
            store_shared(Int32, to + 2 * i * step, [*units[0], *units[1]])
            store_shared(Int32, (to ^ READ) + 2 * i * step, [*units[2], *units[3]])
