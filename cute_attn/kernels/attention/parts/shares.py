"""Equal shares of all K/V tiles, one for each CTA, whatever the sequences' lengths are.

Segments lie on a line: the (pack of) heads and query tiles of one sequence, then those of the next
sequence. A segment has a unit for each K/V tile that its sequence sees, after OVERHEAD units for
the work beside the K/V tiles. The line is cut into shares of equal length, and CTA c computes share
c. So a long segment is cut into pieces, which consecutive CTAs compute. A CTA has at most one piece
of a segment that began in an earlier share, and at most one first piece of a segment that goes on
in a later share.

Each CTA's load warp reads the lengths from memory, 32 sequences at a time, a lane for each. All
CTAs find the same cuts.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common.carried import Carried
from ...common.spec import WARP_SIZE
from .visibility import Visibility
from .work import TileMap, Work, sums_up_to

OVERHEAD = 1  # units of a segment beside its K/V tiles
LEAST = 2  # units of a share
READS = 4  # lengths of a lane in flight


@dataclass(frozen=True)
class ShareWork(Work):
    """A piece of a segment.

    Attributes:
        first, end: the piece's K/V tiles are first to end - 1.
        owner: the CTA of the segment's first piece.
        pieces: the number of pieces, computed by CTAs `owner` to `owner + pieces - 1`.
    """

    first: Int32
    end: Int32
    owner: Int32
    pieces: Int32

    def part(self, first: Int32, end: Int32) -> tuple[Int32, Int32]:
        """The piece's K/V tiles among first to end - 1, the K/V tiles that the query tile sees."""
        first = cutlass.max(first, self.first)
        return first, cutlass.max(first, cutlass.min(end, self.end))


@dataclass(frozen=True)
class Window(Carried):
    """32 consecutive sequences, one for each lane.

    Attributes:
        first: the sequence of lane 0.
        before: units of all earlier sequences.
        segments: of the lane's sequence.
        length: units of a segment of the lane's sequence.
        up_to: units of the window's sequences up to the lane's own.
    """

    first: Int32
    before: Int32
    segments: Int32
    length: Int32
    up_to: Int32

    @property
    def end(self) -> Int32:
        """Units up to the window's last sequence; all lanes take part."""
        return self.before + cute.arch.shuffle_sync(self.up_to, WARP_SIZE - 1)


@dataclass(frozen=True)
class Shares(Carried):
    """The line of segments, for a warp.

    Attributes:
        tiles: the query tiles.
        visible: the keys that a query sees.
        ctas: the number of shares.
    """

    tiles: TileMap
    visible: Visibility
    ctas: Int32

    def sizes(self, sequence: Int32) -> tuple[Int32, Int32]:
        """The number of a sequence's segments, and the units of each."""
        exists = sequence < self.tiles.batch
        sequence = cutlass.min(sequence, self.tiles.batch - 1)
        work = self.tiles.work(0, 0, sequence)
        blocks = self.tiles.blocks(work.seqlen_q)
        first, end = self.key_tiles(work)
        segments = cutlass.select_(exists, blocks * self.tiles.heads, 0)
        return segments, end - first + OVERHEAD

    def key_tiles(self, work: Work) -> tuple[Int32, Int32]:
        """[first, end) of the K/V tiles that at least one query tile of the sequence sees."""
        if self.visible.left is None and self.visible.right is None:
            return self.visible.key_tiles(0, work.seqlen_q, work.seqlen_k)
        first, end = self.visible.key_tiles(0, work.seqlen_q, work.seqlen_k)
        last = cutlass.max(self.tiles.blocks(work.seqlen_q) - 1, 0)
        _, of_last = self.visible.key_tiles(last, work.seqlen_q, work.seqlen_k)
        # Where the first query tile sees no key, `first` may be above all tiles of later blocks.
        return cutlass.min(first, of_last), cutlass.max(end, of_last)

    def window(self, first: Int32, before: Int32) -> Window:
        """The window whose first sequence is `first`; `before` as in `Window`."""
        segments, length = self.sizes(first + cute.arch.lane_idx())
        return Window(first, before, segments, length, sums_up_to(segments * length))

    @cute.jit
    def share(self, window: Window) -> Int32:
        """Units of a share; `window` is the first window."""
        own = window.segments * window.length
        for first in cutlass.range(WARP_SIZE, self.tiles.batch, WARP_SIZE, unroll=READS):
            segments, length = self.sizes(first + cute.arch.lane_idx())
            own += segments * length
        total = cute.arch.shuffle_sync(sums_up_to(own), WARP_SIZE - 1)
        return cutlass.max((total + (self.ctas - 1)) // self.ctas, LEAST)

    @cute.jit
    def window_of(self, at: Int32, window: Window) -> Window:
        """The window that holds unit `at`, from an earlier window. Past the line's end, the window
        has no sequence."""
        end = window.end
        while at >= end and window.first < self.tiles.batch:
            window = self.window(window.first + WARP_SIZE, end)
            end = window.end
        return window

    @cute.jit
    def piece(
        self, at: Int32, share: Int32, window: Window
    ) -> tuple[Boolean, tuple[Int32, ...], Int32]:
        """The piece that starts at unit `at` of a share, which lies in the window.

        Returns:
            Whether the piece exists: units beside K/V tiles count as a piece only in a segment
            without K/V tiles. Then (block, head, sequence, first, end, owner, pieces), the
            arguments of `work`. Then the unit after the segment.
        """
        holds = cute.arch.vote_ballot_sync(at < window.before + window.up_to)
        owner = cute.arch.popc((holds & -holds) - 1)
        sequence = window.first + owner
        length = cute.arch.shuffle_sync(window.length, owner)
        own = window.segments * window.length
        start = window.before + cute.arch.shuffle_sync(window.up_to - own, owner)
        number = (at - start) // length
        start += number * length
        block = number // self.tiles.heads
        head = number - block * self.tiles.heads
        keys = start + OVERHEAD  # the first K/V tile's unit
        following = start + length
        cta = at // share
        first = cutlass.max(at - keys, 0)
        end = cutlass.min(cutlass.min((cta + 1) * share, following) - keys, length - OVERHEAD)
        exists = cutlass.select_(length == OVERHEAD, at == start, end > first)
        first_cta, last_cta = keys // share, (following - 1) // share
        pieces = last_cta - first_cta + 1
        if length == OVERHEAD:
            first_cta, pieces, end = cta, Int32(1), first
        return exists, (block, head, sequence, first, end, first_cta, pieces), following

    def work(
        self,
        block: Int32,
        head: Int32,
        sequence: Int32,
        first: Int32,
        end: Int32,
        owner: Int32,
        pieces: Int32,
    ) -> ShareWork:
        """The Work of a piece; `first` and `end` count from the sequence's first visible tile."""
        own = self.tiles.work(block, head, sequence)
        offset, _ = self.key_tiles(own)
        return ShareWork(
            **vars(own), first=offset + first, end=offset + end, owner=owner, pieces=pieces
        )
