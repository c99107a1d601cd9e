"""A scheduler for clusters of two CTAs whose tiles come from a counter in global memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64

from .carried import Carried
from .pipeline import Barriers, Edge, Kind, Reach, Role
from .ptx.cluster import cta_rank, remote_address, store_async
from .ptx.memory import increment_global, load_shared, shared_address
from .scheduler import NO_TILE, StaticPersistentScheduler
from .smem import Buffer, Pointers

MAILBOX_BYTES = 16  # the bytes that one `store_async` stores


@dataclass(frozen=True)
class PairNumbers(Carried):
    """The numbers of tiles that a cluster of two CTAs takes. CTA 0 increments a counter in global
    memory, and stores each number to CTA 1's shared memory. One warp of each CTA, in the role
    `scheduler`, calls `take`.

    Attributes:
        mailbox: the shared address of the buffer that receives a number.
        counter: the global address of the counter.
    """

    barriers: Barriers
    mailbox: Int32
    counter: Int64

    @staticmethod
    def of(barriers: Barriers, storage: Pointers, counter: cute.Tensor) -> PairNumbers:
        """`storage` has the buffer "number", and `counter` is in global memory."""
        return PairNumbers(barriers, shared_address(storage.number), counter.iterator.toint())

    @staticmethod
    def edges(scheduler: Role) -> tuple[Edge, ...]:
        return (
            Edge("number_full", scheduler, scheduler, 1, Kind.BYTES, Reach.PEER, "a number"),
            Edge("number_empty", scheduler, scheduler, 1, Kind.WARPS, Reach.PEER, "its place"),
        )

    @staticmethod
    def buffer() -> Buffer:
        return Buffer("number", Int32, MAILBOX_BYTES // 4, holds="a number of the other CTA")

    @cute.jit
    def take(self, last: Int32, n: Int32) -> Int32:
        """Take the cluster's n-th number, and return it in all lanes. The counter wraps to 0 after
        `last`."""
        number = Int32(0)
        if cta_rank() == 0:
            if cute.arch.lane_idx() == 0:
                number = increment_global(self.counter, last)
            number = cute.arch.shuffle_sync(number, 0)
            self.barriers.wait_previous("number_empty", n)
            with cute.arch.elect_one():
                full = self.barriers.address("number_full", 0)
                to, full = remote_address(self.mailbox, 1), remote_address(full, 1)
                store_async(to, [number] * (MAILBOX_BYTES // 4), full)
        else:
            with cute.arch.elect_one():
                self.barriers.expect("number_full", n, MAILBOX_BYTES)
            self.barriers.wait("number_full", n)
            number = load_shared(Int32, self.mailbox)[0]
            self.barriers.warp_arrives("number_empty", n)
        return cute.arch.make_warp_uniform(number)


class PairCounterScheduler(StaticPersistentScheduler):
    """A CounterScheduler for clusters of two CTAs. The load warps of both CTAs get each number."""

    def __init__(self, num_tiles: Int32, numbers: PairNumbers):
        self.num_tiles = num_tiles
        self.numbers = numbers

    @cute.jit
    def advance_to_next_work(self, tile: Int32, n: Int32) -> Int32:
        following = self.numbers.take(self.num_tiles - 1, n) + cute.arch.cluster_dim()[0]
        if following >= self.num_tiles:
            following = Int32(NO_TILE)
        return following
