"""The order in which a CTA of the SM90 backward uses Q and dO. The CTA's loop runs over all tiles
of queries of all its tiles of keys."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common.carried import Carried
from ..parts.work import OrderedTileMap, TileMap, Work, following
from ..spec import Sm90BackwardSpec
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

    def walk(self, tiles: TileMap, work: Work, first: Int32, end: Int32) -> Walk:
        """How a tile of keys walks over the tiles of queries first to end - 1."""
        return Walk(self.start(work, first, end), end, self.lowest, work.head)

    def use(self, walk: Walk, tiles_of_head: Int32, **of_use: Any) -> Use:
        """A use at the start of a walk."""
        return Use(tile=walk.start, first=walk.start, end=walk.end, **of_use)


@dataclass(frozen=True)
class Walk(Carried):
    """The tiles of queries of a tile of keys, in their order.

    Attributes:
        start: the tile that each head begins with.
        end: behind the last tile.
        lowest: as in `work.following`.
        head: the head that the walk begins with.
    """

    start: Int32
    end: Int32
    lowest: int | None
    head: Int32

    def following(self, tile: Int32, head: Int32) -> tuple[Int32, Int32]:
        """The next tile of queries, and its head."""
        return following(tile, head, self.start, self.end, lowest=self.lowest)


class FixedOrder(QueryOrder):
    """The order of queries for tiles of keys in an `OrderedTileMap`."""

    def walk(self, tiles: TileMap, work: Work, first: Int32, end: Int32) -> Walk:
        assert isinstance(tiles, OrderedTileMap)
        falls = tiles.falls_of(work)
        if tiles.alternates:
            # All tiles of keys begin with the same head: a CTA comes to a sum soon after the CTA of
            # the smaller number.
            upper = 2 * work.block >= tiles.blocks(work.seqlen_k)
            falls &= Int32(cutlass.select_((tiles.group > 1) & upper, 0, 1))
            return HeadsInside().down_or_up(tiles, work, first, end, falls, work.head)
        start = Int32(cutlass.select_(falls != 0, end - 1, first))
        end = Int32(cutlass.select_(falls != 0, first - 1, end))
        return OrderedWalk(start, end, None, work.head, 1 - 2 * falls)

    def use(self, walk: Walk, tiles_of_head: Int32, **of_use: Any) -> Use:
        if isinstance(walk, GroupWalk):
            return walk.first_use(tiles_of_head, **of_use)
        assert isinstance(walk, OrderedWalk)
        return OrderedUse(tile=walk.start, first=walk.start, end=walk.end, step=walk.step, **of_use)


@dataclass(frozen=True)
class OrderedWalk(Walk):
    """A Walk in either direction.

    Attributes:
        step: 1, or -1 from later tiles of queries to earlier tiles.
    """

    step: Int32

    def following(self, tile: Int32, head: Int32) -> tuple[Int32, Int32]:
        return following_by(self.step, tile, head, self.start, self.end, Int32(1))


class HeadsInside(QueryOrder):
    """All heads of a group take a tile of queries, before the walk goes to the next tile.

    A tile of keys of the first half walks down from the last tile of queries, which all keys see. A
    tile of the second half walks up, from the first tile of queries that sees its keys. A CTA takes
    a tile of keys of each half, and a longer tile is followed by a shorter tile. So the CTAs of a
    K/V head are at about the same tile of queries at the same time, and read Q and dO from L2:
    first all of them on the way down, then more and more of them on the way up.

    Tiles of keys begin with different heads, so that fewer CTAs add to the same sums at the same
    time. A group of one head has no halves: all tiles walk up."""

    def walk(self, tiles: TileMap, work: Work, first: Int32, end: Int32) -> Walk:
        blocks = tiles.blocks(work.seqlen_k)
        falls = (tiles.group > 1) & (2 * work.block < blocks)
        head = work.head + work.block % tiles.group
        return self.down_or_up(tiles, work, first, end, Int32(cutlass.select_(falls, 1, 0)), head)

    def down_or_up(
        self, tiles: TileMap, work: Work, first: Int32, end: Int32, falls: Int32, head: Int32
    ) -> Walk:
        """A walk that begins with `head`, down if `falls` is 1, up if `falls` is 0."""
        start = Int32(cutlass.select_(falls != 0, end - 1, first))
        return GroupWalk(start, work.head + tiles.group, None, head, 1 - 2 * falls, tiles.group)

    def use(self, walk: Walk, tiles_of_head: Int32, **of_use: Any) -> Use:
        assert isinstance(walk, GroupWalk)
        return walk.first_use(tiles_of_head, **of_use)


@dataclass(frozen=True)
class GroupWalk(Walk):
    """A walk of `HeadsInside`.

    Attributes:
        end: behind the group's last head.
        step: from a tile of queries to the next tile: 1 or -1.
        group: the number of heads.
    """

    step: Int32
    group: Int32

    def first_use(self, tiles_of_head: Int32, **of_use: Any) -> GroupUse:
        """The use at the start of the walk; for `QueryOrder.use`."""
        first = of_use["head_sums"]
        end = first + (self.end - self.head) * tiles_of_head
        return GroupUse(tile=self.start, first=first, end=end, step=self.step, **of_use)

    def following(self, tile: Int32, head: Int32) -> tuple[Int32, Int32]:
        return following_head(tile, head, self.head, self.end, self.step, self.group, Int32(1))


def following_head(
    tile: Int32, head: Int32, start: Int32, end: Int32, step: Int32, group: Int32, head_step: Int32
) -> tuple[Int32, Int32]:
    """The next tile of queries, and its head. After the last of `group` heads, which is before
    `end`, comes the first head. The head `start` takes the next tile. Heads are numbers that grow
    by `head_step`."""
    head += head_step
    head = Int32(cutlass.select_(head == end, end - group * head_step, head))
    return Int32(cutlass.select_(head == start, tile + step, tile)), head


def following_by(
    step: Int32, tile: Int32, head: Int32, first: Int32, end: Int32, head_step: Int32
) -> tuple[Int32, Int32]:
    """As `work.following`, with a step from tile to tile."""
    last = tile + step == end
    return (
        Int32(cutlass.select_(last, first, tile + step)),
        Int32(cutlass.select_(last, head + head_step, head)),
    )


def query_order(spec: Sm90BackwardSpec, starts: int = 1, step: int = 0) -> QueryOrder:
    """The order of a kernel of all gradients. `starts` and `step` are a QueryOrder's, for calls
    whose tiles of keys all see the same queries."""
    if spec.ordered:
        return FixedOrder()
    if spec.window_right and not spec.window_left:
        return HeadsInside()
    return QueryOrder() if spec.window_left else QueryOrder(starts, step)


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

    def following(self, tiles_of_head: Int32, lowest: int | None, group: Int32) -> Use:
        """The next use of the same work; `lowest` as in `work.following`, `group` heads."""
        tile, head_sums = following(
            self.tile, self.head_sums, self.first, self.end, tiles_of_head, lowest
        )
        return replace(self, tile=tile, head_sums=head_sums, left=self.left - 1, adds=1)


@dataclass(frozen=True)
class OrderedUse(Use):
    """A use of a FixedOrder.

    Attributes:
        step: as in `OrderedWalk`.
    """

    step: Int32

    def following(self, tiles_of_head: Int32, lowest: int | None, group: Int32) -> Use:
        tile, head_sums = following_by(
            self.step, self.tile, self.head_sums, self.first, self.end, tiles_of_head
        )
        return replace(self, tile=tile, head_sums=head_sums, left=self.left - 1, adds=1)


@dataclass(frozen=True)
class GroupUse(Use):
    """A use of `HeadsInside`.

    Attributes:
        first, end: the first head of the walk, and behind the group's last head, as `head_sums`.
        step: as in `GroupWalk`.
    """

    step: Int32

    def following(self, tiles_of_head: Int32, lowest: int | None, group: Int32) -> Use:
        tile, head_sums = following_head(
            self.tile, self.head_sums, self.first, self.end, self.step, group, tiles_of_head
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
        walk = self.order.walk(keys.tiles, work, first, end)
        rows = padded_start(keys.tiles.queries, work.sequence)
        head_sums = walk.head * self.tiles_of_head + rows // keys.visible.tile_m
        return self.order.use(
            walk, tiles_of_head=self.tiles_of_head, taken=taken, head_sums=head_sums,
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
            after = use.following(self.tiles_of_head, self.order.lowest, keys.tiles.group)
        return goes_on, after
