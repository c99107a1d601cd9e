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
LAYOUTS = ("contiguous", "zigzag", "documents")


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
    """The rectangles of one call of a kernel, and their window."""

    rectangles: tuple[Rectangle, ...]
    window: Window


class Stage(NamedTuple):
    """Calls that can start together. The calls of all stages compute every query once.

    Attributes:
        forward: calls of the forward, one for each window. Rectangles may share keys. Rectangles
            with more keys come first, so that a call ends with short tiles.
        backward: calls of the backward, in which no two rectangles share a key.
    """

    forward: tuple[Pass, ...]
    backward: tuple[Pass, ...]


class Needs(NamedTuple):
    """The keys that a rank's queries see.

    Attributes:
        ranges: the tokens of the gathered keys, in increasing order. The tokens' rows follow one
            another.
        local: queries that see only keys of their own piece. Keys are rows of the rank.
        remote: all other queries. Keys are rows of `ranges`.
    """

    ranges: tuple[Range, ...]
    local: Stage
    remote: Stage


class _Part(NamedTuple):
    """Queries of a piece, their first row, and the tokens of the keys that they see."""

    queries: Range
    row: int
    keys: Range


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
        documents: most sequences are whole on a rank. All ranks have equal numbers of tokens, and
            about equal work of causal attention. See `_documents`.
        """
        if not isinstance(layout, str):
            given = tuple(tuple((a, b) for a, b in ranges) for ranges in layout)
            if len(given) != world:
                raise ValueError(f"layout lists the ranges of {len(given)} ranks, must be {world}")
            return cls(tuple(lengths), given)
        if layout == "contiguous":
            total = sum(lengths)
            cuts = [total * i // world for i in range(world + 1)]
            return cls(tuple(lengths), tuple((cut,) for cut in pairwise(cuts)))
        if layout == "documents":
            return cls(tuple(lengths), _documents(lengths, world))
        if layout != "zigzag":
            raise ValueError(f"layout is {layout!r}, must be one of {LAYOUTS} or a list of ranges")
        found: list[list[Range]] = [[] for _ in range(world)]
        for first, length in zip(accumulate((0, *lengths)), lengths, strict=False):
            for rank, chunks in enumerate(_zigzag(first, length, world)):
                found[rank] += chunks
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

    def needs(self, rank: int, window: Window, *, whole: bool = False) -> Needs:
        """The keys that a rank's queries see, on any rank. With `whole`, the keys are whole
        sequences, and the window is for each query as `window` says."""
        local: list[_Part] = []
        remote: list[_Part] = []
        for piece in self.pieces(rank):
            low, high = self.bounds[piece.sequence], self.bounds[piece.sequence + 1]
            for start, end in _cuts(piece, (low, high), window):
                keys = (
                    low if whole or window.left is None else max(low, start - window.left),
                    high if whole or window.right is None else min(high, end + window.right),
                )
                part = _Part((start, end), piece.row + start - piece.start, keys)
                inside = piece.start <= keys[0] and keys[1] <= piece.end
                (local if inside else remote).append(part)
        ranges = joined(part.keys for part in remote)
        return Needs(
            ranges,
            _stage(local, self.ranges[rank], window, shifted=not whole),
            _stage(remote, ranges, window, shifted=not whole),
        )

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


def _zigzag(first: int, length: int, world: int) -> list[list[Range]]:
    """For each rank, its two chunks of a sequence that begins at token `first`."""
    cuts = [first + length * i // (2 * world) for i in range(2 * world + 1)]
    chunks = list(pairwise(cuts))
    return [[chunks[rank], chunks[2 * world - 1 - rank]] for rank in range(world)]


def _documents(lengths: Sequence[int], world: int) -> tuple[tuple[Range, ...], ...]:
    """The ranges of each rank in the layout "documents".

    Sequences are placed in order of their length, the longest first. A sequence with more than a
    rank's share of all work is cut as in the layout "zigzag". Any other sequence goes to the rank
    with the least work among the ranks that have room. If no rank has room, which happens to the
    shortest sequences, ranks take parts of the sequence until they are full.
    """
    total, firsts = sum(lengths), [0, *accumulate(lengths)]
    room = [total * (rank + 1) // world - total * rank // world for rank in range(world)]
    share = sum(n * n for n in lengths) / world
    work = [0.0] * world
    found: list[list[Range]] = [[] for _ in range(world)]

    def give(rank: int, start: int, end: int) -> None:
        found[rank].append((start, end))
        room[rank] -= end - start

    for sequence in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        first, length = firsts[sequence], lengths[sequence]
        if length * length > share:
            for rank, chunks in enumerate(_zigzag(first, length, world)):
                for chunk in chunks:
                    give(rank, *chunk)
                work[rank] += length * length / world
            continue
        fitting = [rank for rank in range(world) if room[rank] >= length]
        if fitting:
            rank = min(fitting, key=work.__getitem__)
            give(rank, first, first + length)
            work[rank] += length * length
            continue
        end = first + length
        for rank in sorted(range(world), key=room.__getitem__, reverse=True):
            stop = min(end, first + max(room[rank], 0))
            if first < stop:
                work[rank] += (stop - first) * (stop + first - 2 * firsts[sequence])
                give(rank, first, stop)
                first = stop
    return tuple(tuple(joined(ranges)) for ranges in found)


def _cuts(piece: Piece, sequence: Range, window: Window) -> list[Range]:
    """A piece's queries, cut where queries begin and cease to see only keys of the piece. A piece
    with few such queries stays whole, as do pieces without a window."""
    first, end = piece.start, piece.end
    if window.left is not None and first > sequence[0]:
        first += window.left
    if window.right is not None and end < sequence[1]:
        end -= window.right
    if window.left is None or 2 * (end - first) < piece.end - piece.start:
        return [(piece.start, piece.end)]
    cuts = piece.start, first, end, piece.end
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def _stage(
    parts: Sequence[_Part], ranges: Sequence[Range], window: Window, *, shifted: bool
) -> Stage:
    """The calls of some queries, whose keys are rows of `ranges`. With `shifted`, calls have the
    window between positions, and otherwise `window` itself."""
    forward: dict[Window, list[Rectangle]] = {}
    backward: list[tuple[Window, list[Rectangle]]] = []
    for (start, end), row, (low, high) in parts:
        first = row_of(ranges, low)
        rectangle = Rectangle(row, row + end - start, first, first + high - low)
        # Kernels align the last query with the last key. Here `past` keys follow the position of
        # the last query, so the window shifts by `past` keys.
        past = high - end if shifted else 0
        of_call = Window(
            *(None if x is None else x + s * past for x, s in zip(window, (1, -1), strict=True))
        )
        in_forward = forward.setdefault(of_call, [])
        if of_call == (None, None) and in_forward and in_forward[-1][2:] == rectangle[2:]:
            in_forward[-1] = in_forward[-1]._replace(q_end=rectangle.q_end)  # adjacent rows
        else:
            in_forward.append(rectangle)
        for of, rectangles in backward:
            last = rectangles[-1]
            if of == of_call == (None, None) and last[2:] == rectangle[2:]:
                rectangles[-1] = last._replace(q_end=rectangle.q_end)
                break
            if of == of_call and last.k_end <= rectangle.k:
                rectangles.append(rectangle)
                break
        else:
            backward.append((of_call, [rectangle]))
    return Stage(
        tuple(Pass(tuple(sorted(r, key=_fewest)), w) for w, r in forward.items()),
        tuple(Pass(tuple(r), w) for w, r in backward),
    )


def _fewest(of: Rectangle) -> int:
    return of.k - of.k_end


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


def token_of(ranges: Sequence[Range], row: int) -> int:
    """The token in a row of the rows of `ranges`."""
    for start, end in ranges:
        if row < end - start:
            return start + row
        row -= end - start
    raise ValueError(f"the ranges {ranges} have {row} rows too few")


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
