"""Tile schedulers, and the queue through which a CTA's scheduler warp publishes tiles.

The scheduler warp of each CTA calls four methods:

    initial_work_tile()               the number of the cluster's first tile
    prefetch_next_work(n)             request the next tile; n counts the requests
    advance_to_next_work(tile, n)     the number of that tile, or NO_TILE
    producer_tail(n)                  complete what is outstanding

The kernel's tile map turns a tile's number into a block, head and sequence. Numbers come in any
order. For packed sequences the host knows only an upper bound of the number of tiles, so some
numbers have no tile.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .carried import Carried
from .pipeline import HARDWARE, Barriers, Edge, Kind, Reach, Role
from .ptx.memory import count_arrival, increment_global, store_global
from .smem import Buffer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NO_TILE = -1
CLC_RESPONSE_BYTES = 16


class SingleTileScheduler(Carried):
    """One cluster for each tile."""

    @staticmethod
    def edges(scheduler: Role) -> tuple[Edge, ...]:
        """The edges that the scheduler adds to the kernel's edges; `scheduler` is the scheduler
        warp's role."""
        return ()

    def __init__(self, num_tiles: Int32, barriers: Barriers, response: cute.Pointer | None):
        pass

    @staticmethod
    def clusters(num_tiles: Int32, num_clusters: Int32) -> Int32:
        """How many clusters to launch."""
        return num_tiles

    def initial_work_tile(self) -> Int32:
        return cute.arch.cluster_idx()[0]

    def prefetch_next_work(self, n: Int32) -> None:
        pass

    def advance_to_next_work(self, tile: Int32, n: Int32) -> Int32:
        return Int32(NO_TILE)

    def producer_tail(self, n: Int32) -> None:
        pass


class StaticPersistentScheduler(SingleTileScheduler):
    """Persistent clusters, as many as are resident at once; each takes every `num_clusters`-th
    tile."""

    def __init__(self, num_tiles: Int32, barriers: Barriers, response: cute.Pointer | None):
        self.num_tiles = num_tiles

    @staticmethod
    def clusters(num_tiles: Int32, num_clusters: Int32) -> Int32:
        return cutlass.min(num_tiles, num_clusters)

    @cute.jit
    def advance_to_next_work(self, tile: Int32, n: Int32) -> Int32:
        following = tile + cute.arch.cluster_dim()[0]  # plus the number of clusters
        if following >= self.num_tiles:
            following = Int32(NO_TILE)
        return following


class CounterScheduler(StaticPersistentScheduler):
    """Persistent clusters; each takes the next tile that no cluster has taken.

    `counter` is an Int32 in global memory. The counter must be 0, and is 0 again after the launch,
    because the counter wraps after `num_tiles` requests. The clusters make exactly `num_tiles`
    requests, since each cluster's last request fails. Launches that may overlap need separate
    counters.
    """

    def __init__(self, num_tiles: Int32, barriers: Barriers, counter: cute.Pointer):
        self.num_tiles = num_tiles
        self.counter = counter

    @cute.jit
    def advance_to_next_work(self, tile: Int32, n: Int32) -> Int32:
        taken = Int32(0)
        if cute.arch.lane_idx() == 0:
            taken = increment_global(self.counter.toint(), self.num_tiles - 1)
        following = cute.arch.shuffle_sync(taken, 0) + cute.arch.cluster_dim()[0]
        if following >= self.num_tiles:
            following = Int32(NO_TILE)
        return following


class TicketScheduler(CounterScheduler):
    """A CounterScheduler in which the first tiles come from the counter too. So whoever waits for a
    tile of a smaller number waits for a running cluster.

    The counter is 0 again after the launch: the clusters make `num_tiles` requests that succeed,
    and each cluster one that fails.
    """

    def initial_work_tile(self) -> Int32:
        return self.take()

    def advance_to_next_work(self, tile: Int32, n: Int32) -> Int32:
        return self.take()

    @cute.jit
    def take(self) -> Int32:
        """The next number, or NO_TILE."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            clusters = cute.arch.cluster_dim()[0]
            number = increment_global(self.counter.toint(), self.num_tiles + clusters - 1)
        number = cute.arch.shuffle_sync(number, 0)
        if number >= self.num_tiles:
            number = Int32(NO_TILE)
        return number


class ClcScheduler(SingleTileScheduler):
    """One cluster for each tile, where running clusters take over tiles of pending clusters.

    With cluster launch control (sm_100) the hardware cancels the launch of a pending cluster and
    returns its index. Answers come in no order. "None left" may come while clusters are pending;
    the hardware then launches the pending clusters, so that no tile is lost.
    """

    @staticmethod
    def edges(scheduler: Role) -> tuple[Edge, ...]:
        return (
            Edge("clc_answer", HARDWARE, scheduler, 1, Kind.BYTES, Reach.CLUSTER, "the next tile"),
            Edge("clc_read", scheduler, scheduler, 1, Kind.WARPS, Reach.FIRST, "ask again"),
        )

    def __init__(self, num_tiles: Int32, barriers: Barriers, response: cute.Pointer | None):
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
        # The async proxy writes the next answer over the answer read here.
        cute.arch.fence_view_async_shared()
        self.barriers.warp_arrives("clc_read", n)
        return following


SCHEDULER_CLASSES = {
    "single": SingleTileScheduler,
    "static": StaticPersistentScheduler,
    "clc": ClcScheduler,
}


Work = TypeVar("Work", bound="DataclassInstance")


class TileQueue(Carried, Generic[Work]):
    """The ring in shared memory through which a CTA's scheduler warp publishes tiles.

    `work` is a dataclass of Int32 fields; a negative first field ends the queue.
    """

    STAGES = 2

    @staticmethod
    def edges(scheduler: Role, workers: Role) -> tuple[Edge, ...]:
        stages = TileQueue.STAGES
        return (
            Edge("work_full", scheduler, workers, stages, Kind.WARPS, payload="the next tile"),
            Edge("work_empty", workers, scheduler, stages, Kind.WARPS, payload="its stage"),
        )

    @staticmethod
    def buffer(work: type) -> Buffer:
        count = len(fields(work))
        words = 1 << (count - 1).bit_length()  # a stage is read by 16-byte loads
        return Buffer("work", Int32, words, TileQueue.STAGES, holds="the tiles to work on")

    def __init__(self, work: type[Work], words: cute.Pointer, barriers: Barriers):
        self.work = work
        self.ring = cute.make_tensor(
            words, cute.make_layout((self.buffer(work).count, self.STAGES))
        )
        self.barriers = barriers

    # -- the scheduler warp

    @cute.jit
    def fill(self, scheduler: SingleTileScheduler, tiles: Any, load: Any = None) -> None:
        """Publish the cluster's tiles, then the end of the queue.

        Args:
            tiles: the kernel's tile map: `locate` finds a tile by its number, and `work` makes the
                record to publish.
            load: of a warp that loads too, called in place of `publish_work`:
                `load(where, published, loaded)` gets what `locate` has found, the number of tiles
                published so far, and a count of its own. `load` returns both counts after the tile.
        """
        published = Int32(0)
        loaded = Int32(0)
        requests = Int32(0)
        tile = scheduler.initial_work_tile()
        while tile >= 0:
            exists, *where = tiles.locate(tile)
            if exists:
                if cutlass.const_expr(load is not None):
                    published, loaded = load(where, published, loaded)
                else:
                    self.publish_work(published, tiles.work(*where))
                    published += 1
            scheduler.prefetch_next_work(requests)
            tile = scheduler.advance_to_next_work(tile, requests)
            requests += 1
        self.publish_end(published)
        scheduler.producer_tail(requests)

    @cute.jit
    def fill_with_one(self, tiles: Any, load: Any) -> None:
        """Let `load(where)` publish and load the cluster's only tile, or end the queue if there is
        none."""
        exists, *where = tiles.locate(cute.arch.cluster_idx()[0])
        if exists:
            load(where)
        else:
            self.publish_end(0)

    def publish_work(self, n: Int32, work: Work) -> None:
        """Publish a tile as work n."""
        self.publish(n, _words(work))

    def publish_end(self, n: Int32) -> None:
        """End the queue, after n tiles."""
        self.publish(n, (Int32(NO_TILE),))

    @cute.jit
    def publish(self, n: Int32, words: tuple[Int32, ...]) -> None:
        self.barriers.wait_previous("work_empty", n)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(words)):
                self.ring[i, n & (self.STAGES - 1)] = words[i]
            self.barriers.arrive("work_full", n)

    # -- all other warps

    def take(self, n: Int32) -> Work:
        """Wait for work n, read it, and release its stage."""
        self.wait(n)
        work = self.read(n)
        self.release(n)
        return work

    def wait(self, n: Int32) -> None:
        self.barriers.wait("work_full", n)

    def read(self, n: Int32) -> Work:
        """Read work n after `wait`; the values are warp-uniform."""
        words = cute.make_rmem_tensor((self.buffer(self.work).count,), Int32)
        cute.autovec_copy(self.ring[None, n & (self.STAGES - 1)], words)
        count = len(fields(self.work))
        return self.work(*(cute.arch.make_warp_uniform(words[i]) for i in range(count)))

    def release(self, n: Int32) -> None:
        """Release the stage of work n, once this warp has read it."""
        self.barriers.warp_arrives("work_empty", n)


@cute.jit
def restore_counter(address: Int64) -> None:
    """Set the Int32 at a 64-bit address in global memory to 0 in the last CTA that comes here. The
    Int32 behind it counts the CTAs, and is 0 before and after the launch. One thread of each CTA
    calls this, when the CTA takes no more work."""
    ctas = cute.arch.grid_dim()[0]
    if count_arrival(address + 4, ctas) == ctas - 1:
        store_global(Int32, address, [Int32(0)])


def _words(work: Any) -> tuple[Int32, ...]:
    return tuple(getattr(work, field.name) for field in fields(work))
