"""Equal shares of the keys of all sequences, for the decode kernel.

All sequences lie on one line. A sequence takes a unit for each tile of keys, and OVERHEAD units at
its end for what a CTA does once for a segment or a piece. A group of CTAs has one CTA for each tile
of rows of a sequence. Group g has the units from g * share to (g + 1) * share - 1. So a sequence
that crosses a share's end is cut there, and each CTA has as much work as another. A CTA finds its
segments from the lengths alone. The CTAs of a group read the same keys at about the same time, so
that memory sends the keys once.

`PieceMap` cuts segments without regard to CTAs. Its pieces are better where all CTAs take equally
many pieces of nearly equal lengths, because then fewer segments are cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..attention.parts.pieces import READS, PieceMap, PieceWork
from ..attention.parts.work import first_lane, sums_up_to
from ..common.carried import Carried
from ..common.spec import WARP_SIZE

OVERHEAD = 2  # units of a segment beside its tiles of keys
LONG = 16  # tiles of the longest piece, from which on a CTA may take several pieces of PieceMap
# Tiles by which the longest CTA of the pieces may have more than an even share, with one tile of
# rows, whose rows are few, and with several. A cut costs about so many tiles: a float32 result is
# written and read again.
SLACK, SLACK_OF_MANY = 3, 12
APART = 2  # the difference between the slots of a segment's consecutive pieces


@dataclass(frozen=True)
class LatentWork(PieceWork):
    """A piece of a segment, or a whole segment.

    Attributes:
        together: not 0 if the CTAs of the segment's pieces wait for one another, and each adds up a
            part of the sums.
    """

    together: Int32


@dataclass(frozen=True)
class EvenWindow(Carried):
    """32 consecutive sequences, one for each lane.

    Attributes:
        first: the sequence of lane 0.
        before, cut_before: units, and sequences that are cut, before the window.
        segments, key_tiles: 1 if the lane's sequence has segments, and its tiles of keys.
        up_to, cut_up_to: the window's units, and its sequences that are cut, up to the lane's
            sequence.
    """

    first: Int32
    before: Int32
    cut_before: Int32
    segments: Int32
    key_tiles: Int32
    up_to: Int32
    cut_up_to: Int32

    @property
    def end(self) -> Int32:
        """The units up to the window's last; all lanes take part."""
        return self.before + cute.arch.shuffle_sync(self.up_to, WARP_SIZE - 1)


@dataclass(frozen=True)
class EvenPieces(Carried):
    """The pieces of a launch in equal shares, for a warp.

    Attributes:
        pieces: the segments; their pieces are not used.
        blocks: tiles of rows of a sequence, and CTAs of a group.
        total, share: units of all sequences, and of a group of CTAs.
        used: whether equal shares are better than the pieces.
        together: whether each CTA takes at most one of the pieces, so that a CTA may wait for
            another.
    """

    pieces: PieceMap
    blocks: Int32
    total: Int32
    share: Int32
    used: Boolean
    together: Boolean

    @staticmethod
    def of(pieces: PieceMap, ctas: Int32, allowed: Boolean) -> EvenPieces:
        """Equal shares for `ctas` CTAs; a whole warp calls this."""
        blocks = pieces.tiles.blocks(pieces.tiles.queries.tokens)
        total, segments, count, longest = _sizes(pieces)
        even = (total - segments * OVERHEAD + (ctas - 1)) // ctas
        rounds = (count + (ctas - 1)) // ctas
        slack = cutlass.select_(blocks > 1, Int32(SLACK_OF_MANY), Int32(SLACK))
        fits = rounds * longest <= even + slack
        fits = fits & ((rounds <= 1) | (longest >= LONG))
        groups = cutlass.max(ctas // blocks, 1)
        total = total // blocks
        share = cutlass.max((total + (groups - 1)) // groups, 1)
        used = allowed & ~fits & (blocks <= ctas)
        return EvenPieces(pieces, Int32(blocks), total, share, used, (count <= ctas) & ~used)

    def shares(self, start: Int32, key_tiles: Int32) -> tuple[Int32, Int32]:
        """The first and the last group of a sequence that begins at unit `start`."""
        last = start + cutlass.max(key_tiles, 1) - 1
        return start // self.share, last // self.share

    def is_cut(self, start: Int32, key_tiles: Int32) -> Int32:
        """1 for a sequence of several groups, otherwise 0."""
        first, last = self.shares(start, key_tiles)
        return Int32(cutlass.select_(last > first, 1, 0))

    def window(self, first: Int32, before: Int32, cut_before: Int32) -> EvenWindow:
        """The window whose first sequence is `first`."""
        segments, key_tiles, _ = map(Int32, self.pieces.sizes(first + cute.arch.lane_idx()))
        segments = Int32(cutlass.min(segments, 1))
        units = segments * (key_tiles + OVERHEAD)
        up_to = sums_up_to(units)
        cut = segments * self.is_cut(before + up_to - units, key_tiles)
        return EvenWindow(first, before, cut_before, segments, key_tiles, up_to, sums_up_to(cut))

    def start(self) -> EvenWindow:
        """The empty window before all sequences."""
        zero = Int32(0)
        return EvenWindow(Int32(-WARP_SIZE), zero, zero, zero, zero, zero, zero)

    @cute.jit
    def window_of(self, unit: Int32, window: EvenWindow) -> EvenWindow:
        """The window that holds an existing unit, from an earlier window."""
        end = window.end
        while unit >= end:
            cut = window.cut_before + cute.arch.shuffle_sync(window.cut_up_to, WARP_SIZE - 1)
            window = self.window(window.first + WARP_SIZE, end, cut)
            end = window.end
        return window

    def work(self, cta: Int32, unit: Int32, window: EvenWindow) -> tuple[LatentWork, Int32, Any]:
        """The Work of CTA `cta` at a unit of the window, the unit after its sequence, and whether
        the CTA has any of the sequence's work."""
        group, block = cta // self.blocks, cta % self.blocks
        holds = cute.arch.vote_ballot_sync(unit < window.before + window.up_to)
        owner = first_lane(holds)
        key_tiles, up_to, cut_up_to = (
            cute.arch.shuffle_sync(x, owner)
            for x in (window.key_tiles, window.up_to, window.cut_up_to)
        )
        size = key_tiles + OVERHEAD
        start = window.before + up_to - size
        first_group, last_group = self.shares(start, key_tiles)
        # Two cut sequences that share a group follow each other among the cut sequences.
        odd = (window.cut_before + cut_up_to - self.is_cut(start, key_tiles)) & 1
        own = self.pieces.tiles.work(block, 0, window.first + owner)
        before = group * self.share - start
        first, _ = self.pieces.key_tiles(own)
        begin = cutlass.max(before, 0)
        end = cutlass.min(before + self.share, key_tiles)
        work = LatentWork(
            **vars(own),
            first=first + begin,
            end=first + end,
            pieces=last_group - first_group + 1,
            slot=(APART * group + odd) * self.blocks + block,
            first_slot=(APART * first_group + odd) * self.blocks + block,
            apart=APART * self.blocks,
            together=Int32(0),
        )
        has_work = (begin < end) | ((key_tiles == 0) & (before <= 0))
        return work, start + size, has_work


@cute.jit
def _sizes(pieces: PieceMap) -> tuple[Int32, Int32, Int32, Int32]:
    """Of all sequences together: units, segments, pieces, and the tiles of keys of the longest
    piece."""
    total, segments, count, longest = Int32(0), Int32(0), Int32(0), Int32(0)
    for first in cutlass.range(0, pieces.tiles.batch, WARP_SIZE, unroll=READS):
        of_lane, key_tiles, _ = pieces.sizes(first + cute.arch.lane_idx())
        cut_into = pieces.pieces(key_tiles)
        total += of_lane * (key_tiles + OVERHEAD)
        segments += of_lane
        count += of_lane * cut_into
        length = (key_tiles + (cut_into - 1)) // cut_into
        longest = cutlass.max(longest, cutlass.select_(of_lane > 0, length, 0))
    add = [cute.arch.warp_redux_sync(x, "add") for x in (total, segments, count)]
    return add[0], add[1], add[2], cute.arch.warp_redux_sync(longest, "max")
