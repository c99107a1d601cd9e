"""The sum of two CTAs' parts of S.

Both CTAs of a cluster have the same tile of query rows. Each CTA has a half of the columns of q, k
and v. So each CTA computes a part of every score. Warp w of a CTA sends its part to warp w of
the other CTA, and adds the part that arrives. Addition is commutative, so both CTAs have the same
bits of S, and compute the same softmax.

    scores_full     the other CTA's warp has stored its rows, by `st.async`
    scores_empty    the other CTA's warp has read the rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.carried import Carried
from ...common.pipeline import Barriers, Edge, Kind, Reach, Role
from ...common.ptx.cluster import cta_rank, remote_address, store_async
from ...common.ptx.memory import load_shared
from ...common.smem import Buffer
from ...common.spec import VECTOR_BYTES, WARP_SIZE

WORDS = VECTOR_BYTES // 4


@dataclass(frozen=True)
class ScoreSums(Carried):
    """A warp's exchange and sum of parts of S.

    Attributes:
        at: the shared address of the lane's first vector of the part that arrives.
        uses: a register with the number of earlier sums, `[1]`.
    """

    barriers: Barriers
    at: Int32
    uses: cute.Tensor

    @staticmethod
    def edges(warps: Role) -> tuple[Edge, ...]:
        full, empty = "its part of S", "the memory for it"
        return (
            Edge("scores_full", warps, warps, 1, Kind.BYTES, Reach.PEER, full, by_warp=True),
            Edge("scores_empty", warps, warps, 1, Kind.WARPS, Reach.PEER, empty, by_warp=True),
        )

    @staticmethod
    def buffer(rows: int, columns: int) -> Buffer:
        return Buffer("scores", Float32, rows * columns, holds="the other CTA's part of S")

    @classmethod
    def of_warp(cls, barriers: Barriers, buffer: Int32, warp: Int32, columns: int) -> ScoreSums:
        """The sums of warp `warp`, which has 16 rows of `columns` columns."""
        uses = cute.make_rmem_tensor((1,), Int32)
        uses[0] = Int32(0)
        at = buffer + warp * (16 * columns * 4) + cute.arch.lane_idx() * VECTOR_BYTES
        return cls(barriers, Int32(at), uses)

    @cute.jit
    def add(self, s: cute.Tensor) -> None:
        """Add the other CTA's part to the warp's registers of S. The warps of both CTAs call this
        function."""
        n, barriers = self.uses[0], self.barriers
        vectors = cute.size(s) // WORDS
        step = WARP_SIZE * VECTOR_BYTES
        peer = cta_rank() ^ 1
        barriers.wait_previous("scores_empty", n)
        full = remote_address(barriers.pointer("scores_full", n).toint(), peer)
        to = remote_address(self.at, peer)
        for i in cutlass.range_constexpr(vectors):
            words = [Float32(s[WORDS * i + j]).bitcast(Int32) for j in range(WORDS)]
            store_async(to + i * step, words, full)
        with cute.arch.elect_one():
            barriers.expect("scores_full", n, vectors * step)
        barriers.wait("scores_full", n)
        for i in cutlass.range_constexpr(vectors):
            found: Any = load_shared(Float32, self.at + i * step, WORDS)
            for j in cutlass.range_constexpr(WORDS):
                s[WORDS * i + j] = s[WORDS * i + j] + found[j]
        barriers.warp_arrives("scores_empty", n)
        self.uses[0] = n + 1
