"""Which tokens each rank holds, and which rows of keys a rank's queries see.

Tokens are numbered through all sequences. A range `(start, end)` of tokens may span several
sequences; a `Piece` lies in one sequence. A rank's rows are the tokens of its ranges, one range
after the other.

A call of a kernel takes rectangles: rows of queries, and the rows of keys that the queries see. A
window aligns a rectangle's last query with its last key, as for whole sequences. The rectangles of
one call share no row. This module is plain Python, so tests need neither a GPU nor other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

Range = tuple[int, int]
LAYOUTS = ("contiguous", "zigzag")


class Piece(NamedTuple):
    """A range of a rank's tokens in one sequence, and the rank's row of the first token."""

    sequence: int
    start: int
    end: int
    row: int


class Window(NamedTuple):
    """How many keys left and right of its position a query sees; None: all keys."""

    left: int | None
    right: int | None


class Rectangle(NamedTuple):
    """Rows [q, q_end) of queries see rows [k, k_end) of keys, or the part within a window."""

    q: int
    q_end: int
    k: int
    k_end: int


class Pass(NamedTuple):
    """The rectangles of one call of a kernel, in increasing order, and their window."""

    rectangles: tuple[Rectangle, ...]
    window: Window


class Needs(NamedTuple):
    """The keys that a rank's queries see.

    Attributes:
        ranges: the keys' tokens, in increasing order. The tokens' rows follow one another.
        passes: calls that together compute every query once. Their keys are rows of `ranges`.
    """

    ranges: tuple[Range, ...]
    passes: tuple[Pass, ...]


@dataclass(frozen=True)
class Layout:
    """Which tokens each rank holds.

    Attributes:
        lengths: the length of each sequence.
        ranges: each rank's ranges, in increasing order.

    Raises:
        ValueError: a token has no rank or two ranks, or a rank's ranges are not in order.
    """

    lengths: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        for rank, ranges in enumerate(self.ranges):
            end = 0
            for start, stop in ranges:
                if not end <= start <= stop:
                    raise ValueError(
                        f"layout gives rank {rank} the range {(start, stop)} after token {end}: a "
                        "rank's ranges must be in increasing order and share no token"
                    )
                end = stop
        held = sorted(r for ranges in self.ranges for r in ranges if r[0] < r[1])
        end = 0
        for start, stop in [*held, (self.total, self.total)]:
            if start != end:
                what = "no rank" if start > end else "two ranks"
                raise ValueError(f"layout gives token {min(start, end)} of {self.total} to {what}")
            end = stop

    @classmethod
    def of(
        cls, layout: str | Sequence[Sequence[Range]], lengths: Sequence[int], world: int
    ) -> Layout:
        """Make a layout from a name, or from each rank's list of ranges.

        contiguous: rank r holds the r-th part of all tokens.
        zigzag: each sequence is cut into 2 * world chunks. Rank r holds the chunks r and
            2 * world - 1 - r. So causal attention has about equal work on all ranks.
        """
        if not isinstance(layout, str):
            given = tuple(tuple((int(a), int(b)) for a, b in ranges) for ranges in layout)
            if len(given) != world:
                raise ValueError(f"layout lists the ranges of {len(given)} ranks, must be {world}")
            return cls(tuple(lengths), given)
        if layout == "contiguous":
            total = sum(lengths)
            cuts = [total * i // world for i in range(world + 1)]
            return cls(tuple(lengths), tuple((cut,) for cut in pairwise(cuts)))
        if layout != "zigzag":
            raise ValueError(f"layout is {layout!r}, must be one of {LAYOUTS} or a list of ranges")
        found: list[list[Range]] = [[] for _ in range(world)]
        first = 0
        for length in lengths:
            cuts = [first + length * i // (2 * world) for i in range(2 * world + 1)]
            chunks = list(pairwise(cuts))
            for rank in range(world):
                found[rank] += [chunks[rank], chunks[2 * world - 1 - rank]]
            first += length
        return cls(tuple(lengths), tuple(map(tuple, found)))

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def world(self) -> int:
        return len(self.ranges)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The first token of each sequence, and the number of tokens."""
        return (0, *accumulate(self.lengths))

    def tokens(self, rank: int) -> int:
        """How many tokens a rank holds."""
        return sum(end - start for start, end in self.ranges[rank])

    def part(self, parts: int) -> Layout:
        """The layout that splits each rank's rows between `parts` new ranks."""
        found = []
        for rank in range(self.world):
            rows = self.tokens(rank)
            cuts = [rows * i // parts for i in range(parts + 1)]
            found += [tuple(self.between(rank, *cut)) for cut in pairwise(cuts)]
        return Layout(self.lengths, tuple(found))

    def between(self, rank: int, first: int, end: int) -> Iterable[Range]:
        """The ranges of tokens in the rows `first` to `end - 1` of a rank."""
        row = 0
        for start, stop in self.ranges[rank]:
            low, high = max(first, row), min(end, row + stop - start)
            if low < high:
                yield start + low - row, start + high - row
            row += stop - start

    def pieces(self, rank: int) -> list[Piece]:
        """A rank's ranges, cut at ends of sequences. Adjacent ranges of a sequence are joined."""
        found: list[Piece] = []
        row = sequence = 0
        for start, end in self.ranges[rank]:
            while start < end:
                while self.bounds[sequence + 1] <= start:
                    sequence += 1
                stop = min(end, self.bounds[sequence + 1])
                if found and found[-1].sequence == sequence and found[-1].end == start:
                    found[-1] = found[-1]._replace(end=stop)
                else:
                    found.append(Piece(sequence, start, stop, row))
                row += stop - start
                start = stop
        return found

    def needs(self, rank: int, window: Window) -> Needs:
        """The keys that a rank's queries see, on any rank."""
        seen: list[tuple[Piece, Range]] = []
        for piece in self.pieces(rank):
            low, high = self.bounds[piece.sequence], self.bounds[piece.sequence + 1]
            if window.left is not None:
                low = max(low, piece.start - window.left)
            if window.right is not None:
                high = min(high, piece.end + window.right)
            seen.append((piece, (low, high)))
        ranges = joined(keys for _, keys in seen)
        found: list[tuple[Window, list[Rectangle]]] = []
        for piece, (low, high) in seen:
            row = row_of(ranges, low)
            end = piece.row + piece.end - piece.start
            rectangle = Rectangle(piece.row, end, row, row + high - low)
            # Kernels align the last query with the last key. Here `past` keys follow the position
            # of the last query, so the window shifts by `past` keys.
            past = high - piece.end
            shifted = Window(
                *(None if x is None else x + s * past for x, s in zip(window, (1, -1), strict=True))
            )
            for of, rectangles in found:
                last = rectangles[-1]
                if of == shifted == (None, None) and last[2:] == rectangle[2:]:
                    rectangles[-1] = last._replace(q_end=end)  # the rows are adjacent
                    break
                if of == shifted and last.k_end <= rectangle.k:
                    rectangles.append(rectangle)
                    break
            else:
                found.append((shifted, [rectangle]))
        return Needs(ranges, tuple(Pass(tuple(r), window) for window, r in found))

    def hop(self, rank: int, other: int, causal: bool) -> tuple[Pass, ...]:
        """The calls for the queries of `rank` and the keys of rank `other`, which may be the same
        rank. There is no window but the causal mask."""
        queries, keys = (_by_sequence(self.pieces(r)) for r in (rank, other))
        shared = [(q, keys[sequence]) for sequence, q in queries.items() if sequence in keys]
        if not causal or rank == other:
            found = [Rectangle(*_rows(q), *_rows(k)) for q, k in shared]
            window = Window(None, 0 if causal else None)
            return (Pass(tuple(found), window),) if found else ()
        # A piece sees all keys of the other rank before the piece. Later pieces see more keys. Each
        # call adds the keys that no earlier call had.
        calls: list[list[Rectangle]] = []
        for q, k in shared:
            first, end, number = k[0].row, _rows(q)[1], 0
            for piece in q:
                before = [p for p in k if p.end <= piece.start]
                stop = _rows(before)[1] if before else first
                if stop > first:
                    if number == len(calls):
                        calls.append([])
                    calls[number].append(Rectangle(piece.row, end, first, stop))
                    number += 1
                    first = stop
        return tuple(Pass(tuple(x), Window(None, None)) for x in calls)


def _by_sequence(pieces: Iterable[Piece]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.sequence, []).append(piece)
    return found


def _rows(pieces: list[Piece]) -> Range:
    """The rows of consecutive pieces."""
    last = pieces[-1]
    return pieces[0].row, last.row + last.end - last.start


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The union of ranges, in increasing order."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif start < end:
            found.append((start, end))
    return tuple(found)


def row_of(ranges: Sequence[Range], token: int) -> int:
    """The row of a token in the rows of `ranges`."""
    row = 0
    for start, end in ranges:
        if start <= token < end:
            return row + token - start
        row += end - start
    raise ValueError(f"token {token} is in none of the ranges {ranges}")


def shared_rows(
    held: Sequence[Range], wanted: Sequence[Range]
) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """The tokens in both lists of ranges, as rows of `held` and as rows of `wanted`. Rows that are
    adjacent in both lists form one range."""
    rows: list[tuple[Range, Range]] = []
    i = j = row_i = row_j = 0
    while i < len(held) and j < len(wanted):
        (a, a_end), (b, b_end) = held[i], wanted[j]
        low, high = max(a, b), min(a_end, b_end)
        if low < high:
            x, y = row_i + low - a, row_j + low - b
            n = high - low
            if rows and rows[-1][0][1] == x and rows[-1][1][1] == y:
                rows[-1] = (rows[-1][0][0], x + n), (rows[-1][1][0], y + n)
            else:
                rows.append(((x, x + n), (y, y + n)))
        if a_end <= b_end:
            row_i, i = row_i + a_end - a, i + 1
        else:
            row_j, j = row_j + b_end - b, j + 1
    return tuple(x for x, _ in rows), tuple(y for _, y in rows)
