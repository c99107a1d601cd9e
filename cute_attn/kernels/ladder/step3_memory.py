"""Step 3 of the ladder, memory: loads ahead of their use, and no transpose of K.

`mma.sync` takes its right operand by columns, which are the rows of K: a plain ldmatrix of the K
tile loads this operand, so K needs neither a transpose nor a buffer for one. V still needs
ldmatrix's transpose.

K and V have rings of stages. A tile's copy starts as soon as its stage is free:

    K of tile + k_stages        once all warps have the scores of `tile`
    V of tile + v_stages - 1    once all warps have added the values of `tile` - 1

So even one stage of K and one of V hide the copy of V behind Q K^T, and the copy of K behind the
softmax and P V. Every copy commits a group, past the last tile an empty group. So a wait always
leaves the same number of younger groups unfinished.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common.smem import Buffer, Pointers
from .step1_basic import CopyingWork
from .step2_math import FmhaStep2
from .tiles import Rows


class FmhaStep3(FmhaStep2):
    def buffers(self) -> list[Buffer]:
        return super().buffers()[:3]  # without the buffer of the transpose

    def transposed(self, smem: Pointers) -> Int32 | None:
        return None

    @cute.jit
    def key_tiles(
        self, work: CopyingWork, acc: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor
    ) -> None:
        k_stages, v_stages = self.spec.k_stages, self.spec.v_stages
        for i in cutlass.range_constexpr(-max(k_stages, v_stages - 1), 0):
            self.load(work.smem_v, work.v, Int32(i + v_stages - 1), v_stages, work.end)
            self.load(work.smem_k, work.k, Int32(i + k_stages), k_stages, work.end)
        for tile in cutlass.range(work.end, unroll=1):
            self.copies_done(pending=2 * (k_stages - 1))
            self.load(work.smem_v, work.v, tile + v_stages - 1, v_stages, work.end)
            scores = self.scores(work, self.stage(work.smem_k, tile, k_stages))
            self.copies_done(pending=2 * (v_stages - 1))
            self.load(work.smem_k, work.k, tile + k_stages, k_stages, work.end)
            p = self.softmax(work, scores, tile, acc, maximum, total)
            self.add_values(self.stage(work.smem_v, tile, v_stages), p, acc)

    def stage(self, ring: Int32, tile: Int32, stages: int) -> Int32:
        """The address of a tile in its ring."""
        return ring + tile % stages * (self.spec.tile_n * self.spec.row_bytes)

    @cute.jit
    def load(
        self, ring: Int32, source: Rows, tile: Int32, stages: cutlass.Constexpr, end: Int32
    ) -> None:
        """Start the copy of a tile, if there is one, and commit its group."""
        if tile >= 0 and tile < end:
            shared, first = self.stage(ring, tile, stages), tile * self.spec.tile_n
            self.layout.copy(shared, source, first, self.spec.tile_n, self.spec.num_threads)
        cute.arch.cp_async_commit_group()

    def keys(self, smem_k: Int32, n: int, step: int) -> Sequence[Int32]:
        return self.layout.right_of_rows(smem_k, n, step, self.operands_per_load)
