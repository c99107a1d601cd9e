"""The order in which a CTA of the SM90 backward uses Q and dO. The CTA's loop runs over all tiles
of queries of all its tiles of keys."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common.carried import Carried
from ..parts.work import Work, following
from ..statistics import padded_start
from .key_tiles import KeyTiles


@dataclass(frozen=True)
class QueryOrder:
    """Chooses the tile of queries with which a tile of keys begins.

    Attributes:
        starts: the number of tiles of queries among which the first is chosen, a power of two. If
            `starts` is more than 1, every tile of keys must see the same queries.
        step: the distance between these tiles of queries, in tiles.
    """

    starts: int = 1
    step: int = 0

    @property
    def lowest(self) -> int | None:
        """The argument `lowest` of `work.following`: 0 if a head may begin with a later tile of
        queries and wrap around, otherwise None."""
        return None if self.starts == 1 else 0

    def start(self, work: Work, first: Int32, end: Int32) -> Int32:
        """The tile of queries, among first to end - 1, with which each head begins."""
        if self.starts == 1:
            return first
        return cutlass.min((work.block & (self.starts - 1)) * self.step, end - 1)


@dataclass(frozen=True)
class Use(Carried):
    """A use of Q and dO: a tile of queries of a tile of keys.

    Attributes:
        taken: the tile of keys, by its number in the queue.
        tile: the tile of queries.
        head_sums: tile 0 of the head, among the tiles of the sums of dQ.
        first: the tile that each head begins with; see `QueryOrder`.
        end: behind the last tile of queries that sees some of the keys.
        whole_first, whole_end: the tiles of queries that need no mask.
        left: how many uses of the same work come after this use.
        adds: 0 for the first use of a work, when dK and dV hold nothing yet; otherwise 1.
    """

    taken: Int32
    tile: Int32
    head_sums: Int32
    first: Int32
    end: Int32
    whole_first: Int32
    whole_end: Int32
    left: Int32
    adds: Int32

    def __post_init__(self) -> None:
        # Constants too become run-time values, because a later use may have another value.
        for field in fields(self):
            value = Int32(Int32(getattr(self, field.name)).ir_value())
            object.__setattr__(self, field.name, value)

    @property
    def masked(self) -> Boolean:
        return (self.tile < self.whole_first) | (self.tile >= self.whole_end)

    @property
    def sums(self) -> Int32:
        """The use's tile of the sums."""
        return self.head_sums + self.tile

    def following(self, tiles_of_head: Int32, lowest: int | None) -> Use:
        """The next use of the same work; `lowest` as in `work.following`."""
        tile, head_sums = following(
            self.tile, self.head_sums, self.first, self.end, tiles_of_head, lowest
        )
        return replace(self, tile=tile, head_sums=head_sums, left=self.left - 1, adds=1)


@dataclass(frozen=True)
class Uses(Carried):
    """Finds the uses of a CTA one after the other.

    Attributes:
        tiles_of_head: tiles of a head in the sums of dQ.
    """

    order: QueryOrder
    tiles_of_head: Int32

    @cute.jit
    def first(self, keys: KeyTiles, taken: Int32) -> Use:
        """The first use of a work, which has been published."""
        work = keys.queue.read(taken)
        first, end = keys.query_tiles(work)
        whole_first, whole_end = keys.whole_query_tiles(work)
        start = self.order.start(work, first, end)
        rows = padded_start(keys.tiles.queries, work.sequence)
        head_sums = work.head * self.tiles_of_head + rows // keys.visible.tile_m
        return Use(
            taken=taken, tile=start, head_sums=head_sums, first=start, end=end,
            whole_first=whole_first, whole_end=whole_end,
            left=(end - first) * keys.tiles.group - 1, adds=0,
        )  # fmt: skip

    @cute.jit
    def after(self, keys: KeyTiles, use: Use) -> tuple[Boolean, Use]:
        """The use after a use. A work's last use is followed by the next work's first use. False if
        no use follows."""
        goes_on = Boolean(True)
        after = use
        if use.left == 0:
            keys.queue.wait(use.taken + 1)
            goes_on = keys.queue.read(use.taken + 1).exists
            if goes_on:
                after = self.first(keys, use.taken + 1)
        else:
            after = use.following(self.tiles_of_head, self.order.lowest)
        return goes_on, after
