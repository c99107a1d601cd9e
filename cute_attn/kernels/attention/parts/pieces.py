"""Pieces of the keys of long sequences, so that ragged batches keep all CTAs busy.

A segment is a query tile of one (pack of) heads with all K/V tiles that its sequence sees. A long
segment is cut into pieces of about `length` K/V tiles, a little more than a CTA's even share of all
K/V tiles. CTAs take pieces and whole segments one after the other, in classes of length: first the
pieces, then segments with more than half of `length` K/V tiles, then segments with more than a
quarter, then all others. Where there are many segments, all whole segments are one class. Last
come the sums of segments with many rows: the pieces are added up in at most as many parts of rows
as there are pieces. Otherwise the CTA of a segment's last piece adds the pieces up.

Pieces, segments and sums are numbered in this order, and CTAs take the numbers one after the other
from a counter. So a CTA that waits with a sum for the segment's pieces waits for running CTAs only.
Each CTA's load warp reads the lengths from memory, 32 sequences at a time, one sequence in each
lane, and goes over all sequences once for each class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common.carried import Carried
from ...common.spec import WARP_SIZE
from .visibility import Visibility
from .work import TileMap, Work, first_lane, sums_up_to

ORDERS = 4  # classes of length, at most
# With more segments than this times the CTAs, whole segments are short beside a CTA's share.
FEW_SEGMENTS = 8
TRIALS = 3  # lengths that `PieceMap.fitting` tries
READS = 4  # lengths of a lane in flight


@dataclass(frozen=True)
class PieceWork(Work):
    """A piece of a segment, a whole segment, or the sum of a part of a segment's rows.

    Attributes:
        first, end: K/V tiles first to end - 1; none for a sum.
        pieces: the number of the segment's pieces; 1 for a whole segment.
        slot: the number of the piece, and so the place of its result; -1 - n for part n of the
            segment's rows in a sum.
        first_slot: the number of the segment's first piece.
        apart: the difference between the numbers of a segment's consecutive pieces.
    """

    first: Int32
    end: Int32
    pieces: Int32
    slot: Int32
    first_slot: Int32
    apart: Int32

    @property
    def is_sum(self) -> Boolean:
        """Whether the work is a sum of pieces."""
        return self.slot < 0

    def part(self, first: Int32, end: Int32) -> tuple[Int32, Int32]:
        """The piece's K/V tiles among first to end - 1, the K/V tiles that the query tile sees."""
        first = cutlass.max(first, self.first)
        return first, cutlass.max(first, cutlass.min(end, self.end))


def parts_of_sum(pieces: Int32, rows: Int32, tile_m: int, at_once: int) -> Int32:
    """Into how many parts of rows the sum of a segment's pieces is cut: no more than there are
    pieces, and none of fewer than `at_once` rows. `rows` are the sequence's."""
    rows = cutlass.min(rows, tile_m)
    return cutlass.min(pieces, (rows + (at_once - 1)) // at_once)


class Sizes(NamedTuple):
    """Sizes of all sequences together.

    Attributes:
        segments: the number of segments.
        key_tiles: K/V tiles of all segments together.
        longest: K/V tiles of the longest segment.
    """

    segments: Int32
    key_tiles: Int32
    longest: Int32


@dataclass(frozen=True)
class Window(Carried):
    """32 consecutive sequences, one for each lane, of which one class counts.

    Attributes:
        order: the class, from 0 for pieces; `PieceMap.end` is the end.
        first: the sequence of lane 0.
        before: the numbers that come before the window's.
        slots_before: the pieces of sequences before the window's.
        segments: segments of the lane's sequence; 0 if the sequence does not count.
        pieces: of each of these segments.
        items: the numbers of each of these segments: its pieces, 1, or the parts of its sum.
        up_to: the window's numbers up to those of the lane's sequence.
        slots: the window's pieces up to those of the lane's sequence.
    """

    order: Int32
    first: Int32
    before: Int32
    slots_before: Int32
    segments: Int32
    pieces: Int32
    items: Int32
    up_to: Int32
    slots: Int32

    @property
    def end(self) -> Int32:
        """The numbers up to the window's last; all lanes take part."""
        return self.before + cute.arch.shuffle_sync(self.up_to, WARP_SIZE - 1)

    @property
    def slots_end(self) -> Int32:
        """The pieces up to the window's last; all lanes take part."""
        return self.slots_before + cute.arch.shuffle_sync(self.slots, WARP_SIZE - 1)


@dataclass(frozen=True)
class PieceMap(Carried):
    """The numbers of pieces and whole segments, for a warp.

    Attributes:
        tiles: the query tiles.
        visible: the keys that a query sees.
        length: K/V tiles of a piece, on average.
        first, orders: the classes of length are `first` to `orders - 1`. Class `orders` has the
            sums, if class 0 has pieces.
        fixed: into how many pieces every segment is cut; 0: into pieces of about `length` K/V
            tiles, as with None.
        rows_at_once: rows that a CTA adds up at once; 0: sums are not numbered.
    """

    tiles: TileMap
    visible: Visibility
    length: Int32
    first: Int32
    orders: Int32
    fixed: Int32 | None = None
    rows_at_once: int = 0

    @classmethod
    def of(
        cls,
        tiles: TileMap,
        visible: Visibility,
        ctas: Int32,
        least: int,
        fixed: Int32 | None = None,
        fits: bool = False,
        rows_at_once: int = 0,
    ) -> PieceMap:
        """The map for `ctas` CTAs, with pieces of at least about `least` K/V tiles; a whole warp
        calls this. With `fits`, pieces are shorter where each CTA still takes at most one."""
        unknown = cls(tiles, visible, Int32(1), Int32(0), Int32(0))
        segments, key_tiles, longest = unknown.totals()
        # Pieces have 3/4 to 3/2 of this length, so there are fewer than 2 * ctas.
        share = (key_tiles + key_tiles // 8 + (ctas - 1)) // ctas
        if fits:
            even = (key_tiles + (ctas - 1)) // ctas
            # More segments than CTAs never fit.
            even = cutlass.select_(segments <= ctas, even, share)
            share = unknown.fitting(share, even, ctas)
        length = cutlass.max(share, least)
        orders = cutlass.select_(segments > ctas * FEW_SEGMENTS, Int32(2), Int32(ORDERS))
        if fixed is not None:
            orders = cutlass.select_(fixed > 0, Int32(1), orders)
        found = cls(tiles, visible, Int32(length), Int32(0), Int32(orders), fixed, rows_at_once)
        return replace(found, first=Int32(found.order(longest) != 0))

    @property
    def end(self) -> Int32:
        """The class after the last one."""
        if not self.rows_at_once:
            return self.orders
        return self.orders + cutlass.select_(self.first == 0, Int32(1), Int32(0))

    def sizes(self, sequence: Int32) -> tuple[Int32, Int32, Int32]:
        """The number of a sequence's segments, the K/V tiles of each, and the sequence's queries.
        The sequence need not exist."""
        exists = sequence < self.tiles.batch
        work = self.tiles.work(0, 0, cutlass.min(sequence, self.tiles.batch - 1))
        first, end = self.key_tiles(work)
        segments = self.tiles.blocks(work.seqlen_q) * self.tiles.heads
        return cutlass.select_(exists, segments, 0), end - first, work.seqlen_q

    def key_tiles(self, work: Work) -> tuple[Int32, Int32]:
        """[first, end) of the K/V tiles that at least one query tile of the sequence sees."""
        first, end = self.visible.key_tiles(0, work.seqlen_q, work.seqlen_k)
        if self.visible.left is None and self.visible.right is None:
            return first, end
        last = cutlass.max(self.tiles.blocks(work.seqlen_q) - 1, 0)
        _, of_last = self.visible.key_tiles(last, work.seqlen_q, work.seqlen_k)
        return cutlass.min(first, of_last), cutlass.max(end, of_last)

    def pieces(self, key_tiles: Int32) -> Int32:
        """Into how many pieces a segment is cut."""
        pieces = cutlass.max((2 * key_tiles + self.length) // (2 * self.length), 1)
        if self.fixed is None:
            return pieces
        return cutlass.select_(self.fixed > 0, self.fixed, pieces)

    def order(self, key_tiles: Int32) -> Int32:
        """The class of a segment's length, from 0 for segments with pieces."""
        order = Int32(cutlass.select_(2 * key_tiles < 3 * self.length, Int32(1), Int32(0)))
        for i in range(1, ORDERS - 1):
            order += cutlass.select_((key_tiles << i) <= self.length, Int32(1), Int32(0))
        return cutlass.min(order, self.orders - 1)  # 0 where all segments have `fixed` pieces

    @cute.jit
    def totals(self) -> Sizes:
        """The sizes of all sequences together."""
        count, total, longest = Int32(0), Int32(0), Int32(0)
        for first in cutlass.range(0, self.tiles.batch, WARP_SIZE, unroll=READS):
            segments, key_tiles, _ = self.sizes(first + cute.arch.lane_idx())
            count += segments
            total += segments * key_tiles
            longest = cutlass.max(longest, cutlass.select_(segments > 0, key_tiles, 0))
        return Sizes(
            cute.arch.warp_redux_sync(count, "add"),
            cute.arch.warp_redux_sync(total, "add"),
            cute.arch.warp_redux_sync(longest, "max"),
        )

    @cute.jit
    def fitting(self, share: Int32, least: Int32, ctas: Int32) -> Int32:
        """The shortest of some lengths from `least` on with which all segments together have at
        most `ctas` pieces; `share` if each length gives more."""
        found, tried = Int32(share), Int32(least)
        step = cutlass.max((share - least) // TRIALS, 1)
        while tried < found:
            if replace(self, length=tried).count() <= ctas:
                found = Int32(tried)
            tried += step
        return found

    @cute.jit
    def count(self) -> Int32:
        """The number of pieces of all sequences together."""
        count = Int32(0)
        for first in cutlass.range(0, self.tiles.batch, WARP_SIZE, unroll=READS):
            segments, key_tiles, _ = self.sizes(first + cute.arch.lane_idx())
            count += segments * self.pieces(key_tiles)
        return cute.arch.warp_redux_sync(count, "add")

    def start(self) -> Window:
        """The empty window before all sequences."""
        zero = Int32(0)
        return Window(self.first, Int32(-WARP_SIZE), zero, zero, zero, Int32(1), zero, zero, zero)

    def window(self, order: Int32, first: Int32, before: Int32, slots_before: Int32) -> Window:
        """The window whose first sequence is `first`; `before` and `slots_before` as in
        `Window`."""
        segments, key_tiles, seqlen_q = self.sizes(first + cute.arch.lane_idx())
        counted = order
        if self.rows_at_once:
            counted = cutlass.select_(order == self.orders, Int32(0), order)
        counts = self.order(key_tiles) == counted
        segments = Int32(cutlass.select_(counts, segments, 0))  # a loop carries only such numbers
        items = pieces = Int32(self.pieces(key_tiles))
        if self.rows_at_once:
            rows = seqlen_q * self.tiles.packed_heads
            parts = parts_of_sum(pieces, rows, self.tiles.tile_size, self.rows_at_once)
            parts = cutlass.select_(parts > 1, parts, 0)
            items = Int32(cutlass.select_(order == self.orders, parts, pieces))
        up_to = slots = sums_up_to(segments * items)
        if self.rows_at_once:
            slots = sums_up_to(segments * pieces)
        return Window(order, first, before, slots_before, segments, pieces, items, up_to, slots)

    @cute.jit
    def window_of(self, number: Int32, window: Window) -> Window:
        """The window that holds a number, from an earlier window; or the end."""
        end = window.end
        while number >= end and window.order < self.end:
            order, first = window.order, window.first + WARP_SIZE
            slots = window.slots_end
            if first >= self.tiles.batch:
                order += 1
                first = Int32(0)
                slots = Int32(0)
            window = self.window(order, first, end, slots)
            end = window.end
        return window

    def work(self, number: Int32, window: Window) -> PieceWork:
        """The Work of a number in the window."""
        holds = cute.arch.vote_ballot_sync(number < window.before + window.up_to)
        owner = first_lane(holds)
        segments, pieces, items, up_to, slots = (
            cute.arch.shuffle_sync(x, owner)
            for x in (window.segments, window.pieces, window.items, window.up_to, window.slots)
        )
        within = number - (window.before + up_to - segments * items)
        # Heads are the fast index: CTAs that run at once read the same pages.
        item = within // segments
        segment = within - item * segments
        block = segment // self.tiles.heads
        own = self.tiles.work(block, segment - block * self.tiles.heads, window.first + owner)
        first, end = self.key_tiles(own)
        of_sums = window.order == self.orders
        count = cutlass.select_(of_sums, Int32(0), end - first)
        first_slot = window.slots_before + slots - segments * pieces + segment
        return PieceWork(
            **vars(own),
            first=first + item * count // pieces,
            end=first + (item + 1) * count // pieces,
            pieces=pieces,
            slot=cutlass.select_(of_sums, -1 - item, first_slot + item * segments),
            first_slot=first_slot,
            apart=segments,
        )
