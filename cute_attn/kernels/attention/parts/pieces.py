"""Pieces of the keys of long sequences, so that ragged batches keep all CTAs busy.

A segment is a query tile of one (pack of) heads with all K/V tiles that its sequence sees. A
segment with more than `limit` K/V tiles is cut into pieces of about equal length; `limit` is a
little more than a CTA's even share of all K/V tiles. CTAs take pieces and whole segments one after
the other. Pieces come first, since they take longest.

The numbers of pieces and segments lie on a line. The line has a place for each sequence with
pieces, padded to a multiple of 32 sequences, then a place for each sequence without. Each CTA's
load warp reads the lengths from memory, 32 sequences at a time, a lane for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...common.carried import Carried
from ...common.spec import WARP_SIZE
from .visibility import Visibility
from .work import TileMap, Work, sums_up_to

# A CTA alone reads more than twice as fast as when all CTAs read, so pieces may be longer than an
# even share: in quarters of the share.
LIMIT_QUARTERS = 6
LEAST = 2  # K/V tiles of a piece
READS = 4  # lengths of a lane in flight


@dataclass(frozen=True)
class PieceWork(Work):
    """A piece of a segment, or a whole segment.

    Attributes:
        first, end: K/V tiles first to end - 1.
        pieces: the number of the segment's pieces; 1 for a whole segment.
        slot: the number of the piece, and so the place of its result.
        first_slot: the number of the segment's first piece.
        apart: from each piece's number to the segment's next piece.
    """

    first: Int32
    end: Int32
    pieces: Int32
    slot: Int32
    first_slot: Int32
    apart: Int32

    def part(self, first: Int32, end: Int32) -> tuple[Int32, Int32]:
        """The piece's K/V tiles among first to end - 1, the K/V tiles that the query tile sees."""
        first = cutlass.max(first, self.first)
        return first, cutlass.max(first, cutlass.min(end, self.end))


class Sizes(NamedTuple):
    """Sizes of a sequence.

    Attributes:
        segments: the number of segments.
        key_tiles: K/V tiles of each segment.
    """

    segments: Int32
    key_tiles: Int32


@dataclass(frozen=True)
class Window(Carried):
    """32 consecutive places of the line, one for each lane.

    Attributes:
        first: the place of lane 0.
        before: the pieces and segments of all earlier places.
        segments: segments of the lane's sequence.
        pieces: of each of these segments.
        up_to: the pieces and segments of the window's places up to the lane's own.
    """

    first: Int32
    before: Int32
    segments: Int32
    pieces: Int32
    up_to: Int32

    @property
    def end(self) -> Int32:
        """The pieces and segments up to the window's last place; all lanes take part."""
        return self.before + cute.arch.shuffle_sync(self.up_to, WARP_SIZE - 1)


@dataclass(frozen=True)
class PieceMap(Carried):
    """The line of pieces and segments, for a warp.

    Attributes:
        tiles: the query tiles.
        visible: the keys that a query sees.
        limit: the most K/V tiles of a piece.
    """

    tiles: TileMap
    visible: Visibility
    limit: Int32

    @classmethod
    def of(cls, tiles: TileMap, visible: Visibility, ctas: Int32) -> PieceMap:
        """The map for `ctas` CTAs; a whole warp calls this."""
        uncut = cls(tiles, visible, Int32(LEAST))
        share = (uncut.sum_of(lambda own: own.segments * own.key_tiles) + (ctas - 1)) // ctas
        # At least the share, so that there are at most 2 * ctas pieces.
        limit = (share * LIMIT_QUARTERS + 3) // 4
        return cls(tiles, visible, cutlass.max(limit, LEAST))

    @property
    def padded(self) -> Int32:
        """The number of places before those of sequences without pieces."""
        return (self.tiles.batch + (WARP_SIZE - 1)) // WARP_SIZE * WARP_SIZE

    def sizes(self, sequence: Int32) -> Sizes:
        """The sizes of a sequence, which need not exist."""
        exists = sequence < self.tiles.batch
        work = self.tiles.work(0, 0, cutlass.min(sequence, self.tiles.batch - 1))
        first, end = self.key_tiles(work)
        segments = self.tiles.blocks(work.seqlen_q) * self.tiles.heads
        return Sizes(cutlass.select_(exists, segments, 0), end - first)

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
        return cutlass.max((key_tiles + (self.limit - 1)) // self.limit, 1)

    def count(self) -> Int32:
        """The number of pieces and whole segments; a whole warp calls this."""
        return self.sum_of(lambda own: own.segments * self.pieces(own.key_tiles))

    @cute.jit
    def sum_of(self, number: cutlass.Constexpr) -> Int32:
        """The sum of `number(sizes)` over all sequences."""
        total = Int32(0)
        for first in cutlass.range(0, self.tiles.batch, WARP_SIZE, unroll=READS):
            total += number(self.sizes(first + cute.arch.lane_idx()))
        return cute.arch.shuffle_sync(sums_up_to(total), WARP_SIZE - 1)

    def window(self, first: Int32, before: Int32) -> Window:
        """The window whose first place is `first`; `before` as in `Window`."""
        of_pieces = first < self.padded
        sequence = cutlass.select_(of_pieces, first, first - self.padded) + cute.arch.lane_idx()
        segments, key_tiles = self.sizes(sequence)
        pieces = Int32(self.pieces(key_tiles))
        here = cutlass.select_(of_pieces, pieces > 1, pieces <= 1)
        segments = Int32(cutlass.select_(here, segments, 0))  # a loop carries only such numbers
        return Window(first, before, segments, pieces, sums_up_to(segments * pieces))

    @cute.jit
    def window_of(self, number: Int32, window: Window) -> Window:
        """The window that holds an existing piece or segment, from an earlier window."""
        end = window.end
        while number >= end:
            window = self.window(window.first + WARP_SIZE, end)
            end = window.end
        return window

    def work(self, number: Int32, window: Window) -> PieceWork:
        """The Work of a piece or segment in the window."""
        holds = cute.arch.vote_ballot_sync(number < window.before + window.up_to)
        owner = cute.arch.popc((holds & -holds) - 1)
        segments, pieces = (
            cute.arch.shuffle_sync(x, owner) for x in (window.segments, window.pieces)
        )
        up_to = cute.arch.shuffle_sync(window.up_to, owner)
        within = number - (window.before + up_to - segments * pieces)
        # Heads are the fast index: CTAs that run at once read the same pages.
        piece = within // segments
        segment = within - piece * segments
        block = segment // self.tiles.heads
        place = window.first + owner
        sequence = cutlass.select_(place < self.padded, place, place - self.padded)
        own = self.tiles.work(block, segment - block * self.tiles.heads, sequence)
        first, end = self.key_tiles(own)
        count = end - first
        return PieceWork(
            **vars(own),
            first=first + piece * count // pieces,
            end=first + (piece + 1) * count // pieces,
            pieces=pieces,
            slot=number,
            first_slot=number - piece * segments,
            apart=segments,
        )
