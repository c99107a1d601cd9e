"""Tile schedulers: which tile a cluster works on next.

All of them share one protocol, whose methods the scheduler warp of each CTA calls:

    initial_work_tile()               the number of the cluster's first tile
    prefetch_next_work(n)             ask for the next one; n counts the requests
    advance_to_next_work(tile, n)     its number, or NO_TILE
    producer_tail(n)                  leave nothing unfinished behind

A tile's number says nothing by itself: `TileMap` turns it into a place in the problem. Numbers may
come in any order, and more numbers than tiles are launched where the tiles cannot be counted on
the host (packed sequences).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from .carried import Carried
from .pipeline import HARDWARE, Barriers, Edge, Kind, Reach, Role
from .spec import WARP_SIZE

NO_TILE = -1
CLC_RESPONSE_BYTES = 16


def cluster_number() -> Any:
    return cute.arch.cluster_idx()[0]


class SingleTileScheduler(Carried):
    """A cluster for every tile."""

    @staticmethod
    def edges(scheduler: Role) -> tuple[Edge, ...]:
        """What the scheduler warp, of that role, waits for."""
        return ()

    def __init__(self, num_tiles: Any, barriers: Barriers, response: Any):
        pass

    @staticmethod
    def clusters(num_tiles: Any, num_clusters: Any) -> Any:
        """How many clusters to launch."""
        return num_tiles

    def initial_work_tile(self) -> Any:
        return cluster_number()

    def prefetch_next_work(self, n: Any) -> None:
        pass

    def advance_to_next_work(self, tile: Any, n: Any) -> Any:
        return Int32(NO_TILE)

    def producer_tail(self, n: Any) -> None:
        pass


class StaticPersistentScheduler(SingleTileScheduler):
    """As many clusters as fit at once; each takes every `num_clusters`-th tile."""

    def __init__(self, num_tiles: Any, barriers: Barriers, response: Any):
        self.num_tiles = num_tiles

    @staticmethod
    def clusters(num_tiles: Any, num_clusters: Any) -> Any:
        return cutlass.min(num_tiles, num_clusters)

    @cute.jit
    def advance_to_next_work(self, tile: Int32, n: Int32) -> Int32:
        following = tile + cute.arch.cluster_dim()[0]  # as many as there are clusters
        if following >= self.num_tiles:
            following = Int32(NO_TILE)
        return following


class ClcScheduler(SingleTileScheduler):
    """A cluster for every tile, but those that run take over the tiles of those that wait.

    The hardware cancels the launch of a waiting cluster and says which (cluster launch control,
    sm_100). Answers come in no order, and "none left" may come while clusters wait: those are then
    launched as any others, so that nothing is lost by believing it.
    """

    @staticmethod
    def edges(scheduler: Role) -> tuple[Edge, ...]:
        return (
            Edge("clc_answer", HARDWARE, scheduler, 1, Kind.BYTES, Reach.PAIR, "the next tile"),
            Edge("clc_read", scheduler, scheduler, 1, Kind.WARPS, Reach.LEADER, "ask again"),
        )

    def __init__(self, num_tiles: Any, barriers: Barriers, response: Any):
        self.barriers = barriers
        self.response = response

    @cute.jit
    def prefetch_next_work(self, n: Int32) -> None:
        with cute.arch.elect_one():
            self.barriers.expect("clc_answer", n, CLC_RESPONSE_BYTES)
        if cute.arch.block_idx_in_cluster() == 0:
            self.barriers.wait_previous("clc_read", n)
            with cute.arch.elect_one():
                cute.arch.issue_clc_query(self.barriers.pointer("clc_answer", n), self.response)

    @cute.jit
    def advance_to_next_work(self, tile: Int32, n: Int32) -> Int32:
        self.barriers.wait("clc_answer", n)
        first_cta, _, _, granted = cute.arch.clc_response(self.response)
        following = Int32(NO_TILE)
        if granted != 0:
            following = first_cta // cute.arch.cluster_size()
        # The next answer is written by the asynchronous proxy over what has been read here.
        cute.arch.fence_view_async_shared()
        self.barriers.warp_arrives("clc_read", n)
        return following


SCHEDULERS = {
    "single": SingleTileScheduler,
    "static": StaticPersistentScheduler,
    "clc": ClcScheduler,
}


@dataclass(frozen=True)
class TileMap(Carried):
    """Where a tile lies: its block of rows, its head, and its sequence.

    Within a sequence, or a group of heads whose K and V fit the L2 cache together, the blocks of
    rows are the slow index, from the last to the first where later rows see more keys: the
    longest tiles start first.

    Attributes:
        tile_rows: of a tile.
        rows_per_token: that a token of q has: the heads packed into a tile's rows.
        longest_last: later blocks of rows take longer.
        heads: of a sequence.
        batch: sequences.
        seqlen_q: tokens of each, if all have the same.
        heads_at_once: heads whose K and V share the L2 cache, counted across sequences.
        cu_seqlens_q, seqused_q: of packed sequences.
    """

    tile_rows: int
    rows_per_token: int
    longest_last: bool
    heads: Any
    batch: Any
    seqlen_q: Any
    heads_at_once: Any
    cu_seqlens_q: Any = None
    seqused_q: Any = None

    def count(self, total_q: Any) -> Any:
        """How many tiles there are: with packed sequences, an upper bound."""
        if self.cu_seqlens_q is None:
            return self._blocks(self.seqlen_q) * self.heads * self.batch
        return (total_q * self.rows_per_token // self.tile_rows + self.batch) * self.heads

    def _blocks(self, seqlen_q: Any) -> Any:
        return (seqlen_q * self.rows_per_token + (self.tile_rows - 1)) // self.tile_rows

    @cute.jit
    def locate(self, tile: Int32) -> tuple[Boolean, Int32, Int32, Int32]:
        """(whether there is such a tile, its block of rows, head and sequence). By a whole warp."""
        if cutlass.const_expr(self.cu_seqlens_q is None):
            return self._locate_dense(tile)
        else:
            return self._locate_packed(tile)

    @cute.jit
    def _locate_dense(self, tile: Int32) -> tuple[Boolean, Int32, Int32, Int32]:
        blocks = self._blocks(self.seqlen_q)
        group = tile // (blocks * self.heads_at_once)
        first = group * self.heads_at_once
        width = cutlass.min(self.heads * self.batch - first, self.heads_at_once)
        within = tile - blocks * first
        block = within // width
        head = first + within - block * width
        sequence = head // self.heads
        if cutlass.const_expr(self.longest_last):
            block = blocks - 1 - block
        return Boolean(True), block, head - sequence * self.heads, sequence

    @cute.jit
    def _locate_packed(self, tile: Int32) -> tuple[Boolean, Int32, Int32, Int32]:
        lane = cute.arch.lane_idx()
        first = Int32(0)  # sequence of lane 0
        before = Int32(0)  # tiles of the sequences before it
        sequence = Int32(-1)
        blocks = Int32(0)
        while first < self.batch and sequence < 0:
            lane_blocks = Int32(0)
            if first + lane < self.batch:
                lane_blocks = self._blocks(self.seqlen(first + lane))
            lane_tiles = lane_blocks * self.heads
            up_to = lane_tiles  # inclusive prefix sum
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(up_to, 1 << step, mask_and_clamp=0)
                if lane >= (1 << step):
                    up_to += other
            holds = cute.arch.vote_ballot_sync(tile < before + up_to)
            if holds != 0:
                owner = cute.arch.popc((holds & -holds) - 1)
                sequence = first + owner
                blocks = cute.arch.shuffle_sync(lane_blocks, owner)
                before += cute.arch.shuffle_sync(up_to - lane_tiles, owner)
            else:
                before += cute.arch.shuffle_sync(up_to, WARP_SIZE - 1)
            first += WARP_SIZE
        within = tile - before
        block = within // self.heads
        head = within - block * self.heads
        if cutlass.const_expr(self.longest_last):
            block = blocks - 1 - block
        return sequence >= 0, block, head, sequence

    def seqlen(self, sequence: Any) -> Any:
        """Tokens of q in a sequence: never more than it has rows, which others' would follow."""
        if self.cu_seqlens_q is None:
            return self.seqlen_q
        rows = self.cu_seqlens_q[sequence + 1] - self.cu_seqlens_q[sequence]
        if self.seqused_q is not None:
            rows = cutlass.max(0, cutlass.min(rows, self.seqused_q[sequence]))
        return rows
