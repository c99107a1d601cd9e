"""Zeros for the sums of dQ, written by a warp of the kernel that adds to them.

A head of a sequence has zeros once each of its tiles of STATS_ROWS rows has zeros. The zeros warps
of all CTAs take tiles from a counter in global memory, in the order in which the tiles of keys need
the zeros. The zeros warps stay a few tiles ahead of the products, so that most zeros are still in
L2 when a product adds to them. The load warp waits until the heads of a tile of keys have zeros;
until then the CTA's zeros warp takes further tiles. The zeros warp waits only for tiles that a
running warp has taken, so that CTAs need not all be resident at once.

    zeroed    Int32 [1 + heads * padded rows / STATS_ROWS], zeros at first: element 0 counts the
              tiles that are taken. Then each head has a counter of its tiles that have zeros, at
              the sequence's first padded row / STATS_ROWS
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...common.pipeline import Barriers
from ...common.ptx.compiler import opaque
from ...common.ptx.memory import (
    NEVER,
    add_release,
    increment_global,
    load_acquire,
    sleep,
    store_global,
)
from ...common.scheduler import TileQueue
from ...common.sequences import Sequences
from ...common.spec import VECTOR_BYTES, WARP_SIZE
from ..parts.work import TileMap, Work
from ..statistics import STATS_ROWS, padded_start, round_up

PAUSE_NS = 100
STEP = WARP_SIZE * VECTOR_BYTES  # bytes that a warp stores at once
UNROLL = 4


def unshared(queries: Sequences) -> Sequences:
    """The sequences, made opaque. Then no register holds values computed from the sequences across
    the zeros warp's loop, or for consumers that compute the same values."""
    return replace(queries, tokens=opaque(queries.tokens))


class QueryZeros:
    """The zeros warp of a kernel.

    Attributes:
        tile_bytes: bytes of STATS_ROWS rows of the sums.
        ahead: how many tiles beyond its need a CTA takes for each head of a tile of keys.
    """

    ahead = 1

    def __init__(self, head_dim: int):
        self.tile_bytes = STATS_ROWS * head_dim * 4

    @cute.jit
    def run(
        self,
        sums: cute.Tensor,
        zeroed: cute.Tensor,
        keys: TileMap,
        queue: TileQueue,
        barriers: Barriers,
    ) -> None:
        """For each work of the queue, signal "zeros_full" once the work's heads have zeros. `keys`
        are the kernel's tiles of keys."""
        left = Boolean(True)
        taken = Int32(0)
        queue.wait(taken)
        while queue.read(taken).exists:
            # First the heads of the work, then `ahead` more tiles for each head.
            i = Int32(0)
            while i < opaque(keys.group) or (left and i < opaque(keys.group) * (1 + self.ahead)):
                needed = i < opaque(keys.group)  # the work needs this head
                missing = Boolean(True)
                if needed:
                    missing = not self.has_zeros(sums, zeroed, keys, queue.read(taken), i)
                if missing:
                    if left:
                        left = self.write_next(sums, zeroed, keys)
                    else:
                        sleep(PAUSE_NS)
                if not (needed and missing):
                    i += 1
                    if i == opaque(keys.group):
                        # The fence orders the acquired zeros before the async proxy's additions to
                        # them.
                        cute.arch.fence_proxy("async.global")
                        barriers.warp_arrives("zeros_full", taken)
            taken += 1
            queue.wait(taken)
        while left:  # heads that no work needs: the postprocess reads all heads
            left = self.write_next(sums, zeroed, keys)

    @cute.jit
    def has_zeros(
        self, sums: cute.Tensor, zeroed: cute.Tensor, keys: TileMap, work: Work, i: Int32
    ) -> Boolean:
        """Whether all rows of head i of a work have zeros."""
        tiles = round_up(work.seqlen_q) // STATS_ROWS
        at = self.count_of(sums, zeroed, unshared(keys.queries), work.head + i, work.sequence)
        return load_acquire(at) >= tiles

    @cute.jit
    def write_next(self, sums: cute.Tensor, zeroed: cute.Tensor, keys: TileMap) -> Boolean:
        """Write the zeros of the next tile; False if there is none."""
        heads, queries = opaque(sums.shape[0]), unshared(keys.queries)
        tiles = TileMap(
            STATS_ROWS, 1, False, queries, queries, heads, 1, keys.batch,
            keys.heads_at_once * opaque(keys.group),
        )  # fmt: skip
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            number = increment_global(zeroed.iterator.toint(), NEVER)
        number = cute.arch.shuffle_sync(number, 0)
        left = number < tiles.count()
        if left:
            exists, block, head, sequence = tiles.locate(number)
            if exists:
                row = padded_start(tiles.queries, sequence) + block * STATS_ROWS
                tile = Int64(head) * (opaque(sums.shape[1]) // STATS_ROWS) + row // STATS_ROWS
                at = sums.iterator.toint() + tile * self.tile_bytes
                at += opaque(cute.arch.lane_idx()) * VECTOR_BYTES
                for _ in cutlass.range(self.tile_bytes // (STEP * UNROLL), unroll=1):
                    for i in cutlass.range_constexpr(UNROLL):
                        zeros = [Float32(0.0)] * (VECTOR_BYTES // 4)
                        store_global(Float32, at + i * STEP, zeros)
                    at += STEP * UNROLL
                cute.arch.fence_proxy("async.global")
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    add_release(self.count_of(sums, zeroed, tiles.queries, head, sequence), 1)
        return left

    def count_of(
        self,
        sums: cute.Tensor,
        zeroed: cute.Tensor,
        queries: Sequences,
        head: Int32,
        sequence: Int32,
    ) -> Int64:
        """The address of a head's number of tiles that have zeros."""
        tile = head * (opaque(sums.shape[1]) // STATS_ROWS)
        tile += padded_start(queries, sequence) // STATS_ROWS
        return zeroed.iterator.toint() + (1 + Int64(tile)) * 4
