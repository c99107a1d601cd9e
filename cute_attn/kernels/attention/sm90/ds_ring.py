"""dS of both warpgroups of an SM90 kernel in shared memory, and the product dQ = dS K, which reads
dS.

dQ = dS K        a warpgroup has 64 of 128 queries, or of 64 queries half of head_dim
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.carried import Carried
from ...common.dtypes import DTYPE
from ...common.pipeline import Barriers
from ...common.ptx.compiler import opaque
from ...common.tma import BOX
from ..parts import fragments
from ..query_sums import QuerySums
from ..spec import Sm90BackwardSpec
from .mma import ROWS, start_query_gradients


@dataclass(frozen=True)
class DsRing(Carried):
    """Stages of dS^T. A stage has a tile of queries; its rows are the CTA's keys.

    Attributes:
        at: shared address of the ring.
        sums: the order of dQ.
    """

    spec: Sm90BackwardSpec
    sums: QuerySums
    barriers: Barriers
    at: Int32

    def stage(self, n: Int32) -> Int32:
        """The shared address of use n."""
        nbytes = 2 * self.spec.tile_m * self.spec.tile_n
        return self.at + self.barriers.stage("ds_full", n) * nbytes

    def store(self, ds: cute.Tensor, warp: Int32, n: Int32, lane: Int32) -> None:
        """Store the warp's rows of dS^T of use n."""
        self.barriers.wait_previous("ds_empty", n)
        words = [ds[i] for i in range(cute.size(ds))]
        fragments.stage_matrices(words, self.stage(n), warp, self.spec.tile_n, lane)

    def publish(self, n: Int32) -> None:
        """Make the dS^T that `store` wrote visible to `wgmma`, and arrive at `ds_full`. Called long
        after `store`, so that the fence does not wait."""
        cute.arch.fence_view_async_shared()
        self.barriers.warp_arrives("ds_full", n)

    def start_dq(self, group: Int32, n: Int32, k: Int32, k_offset: Int32) -> list[Float32]:
        """Start a warpgroup's part of dQ = dS K, with use n of dS. K lies an offset in bytes behind
        the shared address `k`."""
        spec, ds = self.spec, self.stage(n)
        k += k_offset
        if spec.tile_m == ROWS:
            first = group * self.sums.columns
            k += first // BOX * (spec.tile_n * BOX * 2) + first % BOX * 2
        else:
            ds += group * (spec.tile_n * BOX * 2)
        return start_query_gradients(
            DTYPE[spec.dtype], ds, opaque(k), tile_n=spec.tile_n, columns=self.sums.columns
        )
