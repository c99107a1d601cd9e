"""The caches of machine code of an SM."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Lines of 128 bytes. Passes of more code than a cache holds take longer in `bench rates --only
# code`: from 32 KiB on, and from 128 KiB on. A kernel's first 64 KiB come when it starts.
FIRST_LINES, HELD_LINES, STARTED_LINES = 256, 1024, 512

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Fetch:
    """Clocks of fetching code into the cache that the quarters read.

    Attributes:
        line: of a line behind the one before, by where it comes from: "SM", "L2" or "memory".
        jump: of a line elsewhere, in addition.
        beyond: where lines come from that are not in the SM.
    """

    line: Mapping[str, float]
    jump: Mapping[str, float]
    beyond: str


class CodeCache:
    """What an SM holds of a kernel's code.

    Args:
        code: the lines of each copy of each PTX instruction.
        fetch: what fetching takes.
        held: whether the SM holds all code when the kernel starts.
    """

    def __init__(
        self, code: Sequence[tuple[tuple[int, ...], ...]], fetch: Fetch, held: bool
    ) -> None:
        self._code = code
        self._fetch = fetch
        self._first: OrderedDict[int, None] = OrderedDict()
        started = HELD_LINES if held else STARTED_LINES
        self._held: OrderedDict[int, None] = OrderedDict((n, None) for n in range(started))
        self._executions: Counter[tuple[int, Runs]] = Counter()
        self._lines: dict[tuple[Runs, int], tuple[int, ...]] = {}
        self._fetched = 0  # lines so far
        self._latest: dict[tuple[Runs, int], int] = {}  # `_fetched` after an execution's own lines

    def clocks(self, runs: Runs, warp: int = 0) -> tuple[float, tuple[Runs, int]]:
        """Clocks of fetching what a warp's execution of these runs needs, and a key of the
        execution. Warps that execute the same code go along with the first of them, which fetches,
        unless the cache has been filled anew since."""
        turn = self._executions[warp, runs]
        self._executions[warp, runs] += 1
        latest = self._latest.get((runs, turn))
        if latest is not None and self._fetched - latest <= FIRST_LINES:
            return 0.0, (runs, turn)
        total = 0.0
        last = None
        for line in self._lines_of(runs, turn):
            if line in self._first:
                self._first.move_to_end(line)
            else:
                level = "SM" if line in self._held else self._fetch.beyond
                total += self._fetch.line[level]
                if last is None or not 0 <= line - last <= 1:
                    total += self._fetch.jump[level]
                self._first[line] = None
                self._fetched += 1
                if len(self._first) > FIRST_LINES:
                    self._first.popitem(last=False)
            self._held[line] = None
            self._held.move_to_end(line)
            if len(self._held) > HELD_LINES:
                self._held.popitem(last=False)
            last = line
        self._latest[runs, turn] = self._fetched
        return total, (runs, turn)

    def _lines_of(self, runs: Runs, turn: int) -> tuple[int, ...]:
        """The lines of an execution, in order. Copies of a loop take turns."""
        most = max((len(self._code[i]) for f, n in runs for i in range(f, f + n)), default=1)
        key = runs, turn % max(1, most)
        found = self._lines.get(key)
        if found is None:
            lines: list[int] = []
            for first, count in runs:
                some: set[int] = set()
                for number in range(first, first + count):
                    copies = self._code[number]
                    if copies:
                        some.update(copies[turn % len(copies)])
                lines += sorted(some)
            found = self._lines[key] = tuple(lines)
        return found
