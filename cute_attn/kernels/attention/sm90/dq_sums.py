"""Two ways to add a warp's part of dQ to the sums in global memory, whose order is `QuerySums`."""

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
    """Every thread adds what it has in registers.

    Attributes:
        sums: the order of the sums.
        at: their global address.
    """

    sums: QuerySums
    at: Int64

    def add_quarter(self, warp: Int32, dq: list[Float32], tile: Int32, quarter: int) -> None:
        """Add a quarter of the columns of the warp's part to that tile of the sums."""
        lane = lane_anew() * (4 * VECTOR)
        part = opaque(warp) * (4 * self.sums.part)
        at = self.at + Int64(tile) * (4 * self.sums.tile) + Int64(part + lane)
        count = self.sums.columns // 8 // 4
        for i in range(quarter * count, (quarter + 1) * count):
            vector = dq[VECTOR * i : VECTOR * (i + 1)]
            add_global(at + i * (VECTORS * 4 * VECTOR), vector)


@dataclass(frozen=True)
class StagedSums(Carried):
    """Each warp stages its part in shared memory of its own, from where a bulk reduction adds it.

    Attributes:
        sums: the order of the sums.
        at: their global address.
        staging: shared address of the warps' parts.
    """

    sums: QuerySums
    at: Int64
    staging: Int32

    @property
    def vectors(self) -> int:
        """Vectors of a lane's part of dQ."""
        return self.sums.columns // 8

    def stage(self, warp: Int32, dq: list[Float32], vectors: range) -> None:
        """Store these vectors of the warp's part to its staging."""
        at = self.staging + opaque(warp) * (4 * self.sums.part) + lane_anew() * (4 * VECTOR)
        for i in vectors:
            vector = dq[VECTOR * i : VECTOR * (i + 1)]
            store_shared(Float32, at + i * (VECTORS * 4 * VECTOR), vector)

    @cute.jit
    def reduce(self, warp: Int32, tile: Int32) -> None:
        """Add what is staged to that tile of the sums, so much later that the fence does not
        wait."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if lane_anew() == 0:
            part = opaque(warp) * (4 * self.sums.part)
            at = self.at + Int64(tile) * (4 * self.sums.tile) + part
            add_bulk(at, self.staging + part, 4 * self.sums.part)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def wait(self) -> None:
        """Until the warp's reduction has read its staging."""
        if lane_anew() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
