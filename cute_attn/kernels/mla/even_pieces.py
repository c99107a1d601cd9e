"""Equal shares of the keys of all sequences, for the decode kernel.

All segments lie on one line, in the order of the sequences. A segment takes a unit for each tile of
keys, and OVERHEAD units at its end for what a CTA does once for a segment or a piece. CTA c has the
units from c * share to (c + 1) * share - 1. So a segment that crosses a share's end is cut there,
and each CTA has as much work as another. A CTA finds its segments from the lengths alone.

`PieceMap` cuts segments without regard to CTAs. Its pieces are better where each CTA takes at most
one piece and the pieces have nearly equal lengths, because then fewer segments are cut.
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
SLACK = 3  # tiles by which a piece of PieceMap may be longer than a CTA's even share
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
        before, cut_before: units, and segments that are cut, of the sequences before the window.
        segments, key_tiles: segments of the lane's sequence, and tiles of keys of each.
        up_to, cut_up_to: the window's units, and its segments that are cut, up to those of the
            lane's sequence.
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
        total, share: units of all CTAs, and of one.
        used: whether equal shares are better than the pieces.
        together: whether each CTA takes at most one of the pieces, so that a CTA may wait for
            another.
    """

    pieces: PieceMap
    total: Int32
    share: Int32
    used: Boolean
    together: Boolean

    @staticmethod
    def of(pieces: PieceMap, ctas: Int32, allowed: Boolean, together: bool) -> EvenPieces:
        """Equal shares for `ctas` CTAs, or pairs of CTAs; a whole warp calls this."""
        total, segments, count, longest = _sizes(pieces)
        even = (total - segments * OVERHEAD + (ctas - 1)) // ctas
        fits = (count <= ctas) & (longest <= even + SLACK)
        share = cutlass.max((total + (ctas - 1)) // ctas, 1)
        used = allowed & ~fits
        return EvenPieces(pieces, total, share, used, (count <= ctas) & ~used & together)

    def shares(self, start: Int32, key_tiles: Int32) -> tuple[Int32, Int32]:
        """The first and the last CTA of a segment that begins at unit `start`."""
        last = start + cutlass.max(key_tiles, 1) - 1
        return start // self.share, last // self.share

    def is_cut(self, start: Int32, key_tiles: Int32) -> Int32:
        """1 for a segment of several CTAs, otherwise 0."""
        first, last = self.shares(start, key_tiles)
        return Int32(cutlass.select_(last > first, 1, 0))

    @cute.jit
    def cut(self, start: Int32, key_tiles: Int32, segments: Int32) -> Int32:
        """How many of the first `segments` segments of a sequence are cut."""
        count = Int32(0)
        for i in cutlass.range(segments, unroll=1):
            count += self.is_cut(start + i * (key_tiles + OVERHEAD), key_tiles)
        return count

    def window(self, first: Int32, before: Int32, cut_before: Int32) -> EvenWindow:
        """The window whose first sequence is `first`."""
        segments, key_tiles, _ = map(Int32, self.pieces.sizes(first + cute.arch.lane_idx()))
        units = segments * (key_tiles + OVERHEAD)
        up_to = sums_up_to(units)
        cut = self.cut(before + up_to - units, key_tiles, segments)
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
        """The Work of CTA `cta` at a unit of the window, the unit after its segment, and whether
        the CTA has any of the segment's work."""
        holds = cute.arch.vote_ballot_sync(unit < window.before + window.up_to)
        owner = first_lane(holds)
        segments, key_tiles, up_to, cut_up_to = (
            cute.arch.shuffle_sync(x, owner)
            for x in (window.segments, window.key_tiles, window.up_to, window.cut_up_to)
        )
        size = key_tiles + OVERHEAD
        start = window.before + up_to - segments * size
        block = (unit - start) // size
        of_segment = start + block * size
        cut = window.cut_before + cut_up_to - self.cut(
            of_segment, key_tiles, segments - block
        )  # fmt: skip
        first_cta, last_cta = self.shares(of_segment, key_tiles)
        # Two cut segments that share a CTA follow each other among the cut segments.
        odd = cut & 1
        own = self.pieces.tiles.work(block, 0, window.first + owner)
        before = cta * self.share - of_segment
        first, _ = self.pieces.key_tiles(own)
        begin = cutlass.max(before, 0)
        end = cutlass.min(before + self.share, key_tiles)
        work = LatentWork(
            **vars(own),
            first=first + begin,
            end=first + end,
            pieces=last_cta - first_cta + 1,
            slot=APART * cta + odd,
            first_slot=APART * first_cta + odd,
            apart=Int32(APART),
            together=Int32(0),
        )
        has_work = (begin < end) | ((key_tiles == 0) & (before <= 0))
        return work, of_segment + size, has_work


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
