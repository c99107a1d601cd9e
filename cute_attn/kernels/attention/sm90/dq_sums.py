"""Two ways to add a warp's part of dQ to the sums in global memory. `QuerySums` is the order of the
sums."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.carried import Carried
from ...common.ptx.async_copy import add_bulk
from ...common.ptx.compiler import opaque
from ...common.ptx.memory import add_global, store_shared
from ..query_sums import VECTOR, VECTORS, QuerySums
from .key_tiles import lane_anew


@dataclass(frozen=True)
class RegisterSums(Carried):
    """Every thread adds values from its registers.

    Attributes:
        sums: the order of the sums.
        at: the sums' global address.
    """

    sums: QuerySums
    at: Int64

    def add_quarter(self, warp: Int32, dq: list[Float32], tile: Int32, quarter: int) -> None:
        """Add a quarter of the columns of the warp's part to a tile of the sums."""
        lane = lane_anew() * (4 * VECTOR)
        part = opaque(warp) * (4 * self.sums.part)
        at = self.at + Int64(tile) * (4 * self.sums.tile) + Int64(part + lane)
        count = self.sums.columns // 8 // 4
        for i in range(quarter * count, (quarter + 1) * count):
            vector = dq[VECTOR * i : VECTOR * (i + 1)]
            add_global(at + i * (VECTORS * 4 * VECTOR), vector)


@dataclass(frozen=True)
class StagedSums(Carried):
    """Each warp stages its part in its own shared memory, and a bulk reduction adds the part.

    Attributes:
        sums: the order of the sums.
        at: the sums' global address.
        staging: shared address of the warps' parts.
    """

    sums: QuerySums
    at: Int64
    staging: Int32

    @property
    def vectors(self) -> int:
        """The number of vectors in a lane's part of dQ."""
        return self.sums.columns // 8

    def stage(self, warp: Int32, dq: list[Float32], vectors: range) -> None:
        """Store these vectors of the warp's part to its staging."""
        at = self.staging + opaque(warp) * (4 * self.sums.part) + lane_anew() * (4 * VECTOR)
        for i in vectors:
            vector = dq[VECTOR * i : VECTOR * (i + 1)]
            store_shared(Float32, at + i * (VECTORS * 4 * VECTOR), vector)

    @cute.jit
    def reduce(self, warp: Int32, tile: Int32) -> None:
        """Add the staged part to a tile of the sums. Called long after `stage`, so that the fence
        does not wait."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if lane_anew() == 0:
            part = opaque(warp) * (4 * self.sums.part)
            at = self.at + Int64(tile) * (4 * self.sums.tile) + part
            add_bulk(at, self.staging + part, 4 * self.sums.part)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def wait(self) -> None:
        """Wait until the warp's reduction has read the warp's staging."""
        if lane_anew() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
