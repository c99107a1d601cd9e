"""Sums of dQ that CTAs add to in a fixed order, so that every run gives the same bits.

A consumer warp stages its part of dQ in shared memory. Warps of the load warp's warpgroup add a
consumer warpgroup's parts to the sums in global memory. A counter in global memory for each tile of
the sums and each warpgroup counts the tiles of keys that have been added.
The place of a tile of keys in the order is a matter of shapes alone; see `OrderedTileMap`.

    consumers    adding warp
    dQ staged
                 waits until the counter is the tile's place
                 adds the parts; the staging is free once the parts are read
                 counts the tile once the parts are added

The first tile of keys stores its parts, so the sums need no zeros. A sum that no tile of keys adds
to is not written. Its counter is 0, and the postprocess makes dQ 0.

    counters    Int32 [heads * padded rows / STATS_ROWS, ORDER_COUNTERS], zeros at first. The
                counters of a sum's two halves follow one another
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.carried import Carried
from ...common.pipeline import Barriers, Edge, Kind, Role
from ...common.ptx.async_copy import add_bulk, store_bulk
from ...common.ptx.memory import add_release, load_acquire
from ...common.scheduler import TileQueue
from ..parts.work import OrderedTileMap
from ..query_sums import QuerySums
from ..statistics import counters_of_tile
from .dq_sums import StagedSums
from .key_tiles import KeyTiles, group_anew
from .mma import WARPGROUP_WARPS
from .uses import GroupUse, OrderedUse, Use, Uses

WARPGROUPS = 2


def edges(consumers: Role, adders: Role) -> tuple[Edge, ...]:
    """The edges between a warpgroup and an adding warp. Use n of warpgroup g is use
    WARPGROUPS * n + g of the edges."""
    group, adder = (
        Role(role.name, role.warps[:count])
        for role, count in ((consumers, WARPGROUP_WARPS), (adders, 1))
    )
    # One warp waits for all uses of an mbarrier. A warp that left uses out would mistake the phase.
    stages = WARPGROUPS * len(adders)
    return (
        Edge("dq_full", group, adder, stages, Kind.WARPS, payload="a warpgroup's dQ"),
        Edge("dq_empty", adder, group, WARPGROUPS, Kind.WARPS, payload="its staging"),
    )


@dataclass(frozen=True)
class OrderedSums(StagedSums):
    """The staging of a consumer warp.

    Attributes:
        barriers: the kernel's mbarriers, with `edges`.
    """

    barriers: Barriers

    def wait_for_staging(self, warp: Int32, n: Int32) -> None:
        """Wait until the warp may stage use n."""
        self.barriers.wait_previous("dq_empty", WARPGROUPS * n + group_anew(warp))

    def publish(self, warp: Int32, n: Int32) -> None:
        """Hand use n, which has been staged, to the adding warp. Called long after `stage`, so that
        the fence does not wait."""
        cute.arch.fence_view_async_shared()
        self.barriers.warp_arrives("dq_full", WARPGROUPS * n + group_anew(warp))


@dataclass(frozen=True)
class OfWork(Carried):
    """The fields of a work that the place of its uses depends on."""

    block: Int32
    seqlen_q: Int32
    seqlen_k: Int32

    @classmethod
    def read(cls, queue: TileQueue, taken: Int32) -> OfWork:
        work = queue.read(taken)
        return cls(*(Int32(getattr(work, field.name)) for field in fields(cls)))


@dataclass(frozen=True)
class OrderedAdditions(Carried):
    """The work of an adding warp. The adding warps take turns: an addition may take longer than a
    warpgroup takes for a tile of queries.

    Attributes:
        sums: the order of the sums in memory.
        at: the sums' global address.
        counters: the counters' global address.
        staging: shared address of the parts of all consumer warps.
        adder, adders: the number of the warp, and the number of adding warps.
    """

    sums: QuerySums
    barriers: Barriers
    keys: KeyTiles
    uses: Uses
    at: Int64
    counters: Int64
    staging: Int32
    adder: Int32
    adders: int

    @cute.jit
    def run(self) -> None:
        """Add the warp's share of the uses of the CTA.

        A work's record is released before the work's uses are added: consumers hand over a work's
        last use only when they know the next works."""
        queue, n, taken = self.keys.queue, Int32(0), Int32(0)
        queue.wait(taken)
        goes_on = queue.read(taken).exists
        if goes_on:
            use = self.uses.first(self.keys, taken)
            of_work = OfWork.read(queue, taken)
            queue.release(taken)
            others = Int32(self.adder)  # additions that other warps do first
            while goes_on:
                for group in cutlass.range_constexpr(WARPGROUPS):
                    if others == 0:
                        self.add(use, of_work, n, group)
                        others = Int32(self.adders)
                    others -= 1
                goes_on, after = self.uses.after(self.keys, use)
                if use.left == 0:
                    taken = use.taken + 1
                    of_work = OfWork.read(queue, taken)
                    queue.release(taken)
                use = after
                n += 1
        else:
            queue.release(taken)

    @cute.jit
    def add(self, use: Use, of_work: OfWork, n: Int32, group: cutlass.Constexpr[int]) -> None:
        """Add a warpgroup's half of use n to its sum, in its place."""
        tile, index = use.sums, WARPGROUPS * n + group
        nbytes = WARPGROUP_WARPS * self.sums.part * Float32.width // 8
        counter = self.counters + group * (Int32.width // 8)
        counter += Int64(tile) * (counters_of_tile(self.sums.tile_m) * (Int32.width // 8))
        place = self.place(use, of_work)
        while load_acquire(counter) != place:
            pass
        # The fence orders the acquired sums before the async proxy's additions to them.
        cute.arch.fence_proxy("async.global")
        self.barriers.wait("dq_full", index)
        if cute.arch.lane_idx() == 0:
            target = self.at + group * nbytes
            target += Int64(tile) * (self.sums.tile * Float32.width // 8)
            if place == 0:
                store_bulk(target, self.staging + group * nbytes, nbytes)
            else:
                add_bulk(target, self.staging + group * nbytes, nbytes)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.barriers.arrive("dq_empty", index)
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            cute.arch.fence_proxy("async.global")
            add_release(counter, 1)
        cute.arch.sync_warp()

    def place(self, use: Use, work: OfWork) -> Int32:
        """How many tiles of keys add to the use's sum earlier."""
        keys = self.keys
        first, end = keys.visible.visitors(use.tile, work.seqlen_q, work.seqlen_k)
        assert isinstance(keys.tiles, OrderedTileMap) and isinstance(use, OrderedUse | GroupUse)
        falls = use.step < 0
        if keys.tiles.alternates:  # earlier keys add first, whichever way their CTA walks
            falls |= keys.tiles.group > 1
        return keys.tiles.place(work.block, first, end, falls)
