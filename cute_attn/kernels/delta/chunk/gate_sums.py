"""Sums of gates within sub-chunks: P, or factors computed from it, and decays between sub-chunks.

`scores` explains how the sums are used, and which rows are in range.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.ptx.math import exp2, log2
from ...common.ptx.memory import load_shared, store_shared
from ...common.spec import WARP_SIZE
from .sub_chunks import SUB_CHUNK, SUB_CHUNKS, ChunkMemory, parity

LOWEST, HIGHEST = -120.0, 40.0  # bounds of P in range


def is_outside(sums: Any) -> Any:
    """Return whether P of a token, for two channels, is out of range."""
    center, reach = (HIGHEST + LOWEST) / 2, (HIGHEST - LOWEST) / 2
    distance = [cute.arch.fmax(x - center, center - x) for x in sums]
    return cute.arch.fmax(*distance) > reach


def first_outside(sums: Any, token: Int32) -> Any:
    """Return the first token of a sub-chunk for which P of a warp's channels is out of range, or
    16. `sums` is P of the tokens from `token` on, for two channels."""
    first = Int32(SUB_CHUNK)
    for t in reversed(range(len(sums))):
        first = Int32(cutlass.select_(is_outside(sums[t]), Int32(token + t), first))
    for distance in (1, 2, 4, 8, 16):
        first = cutlass.min(first, cute.arch.shuffle_sync_bfly(first, distance))
    return first


class GateSums:
    """Stores and reads sums of gates in shared memory. All methods run on the device."""

    def __init__(self, memory: ChunkMemory):
        self.memory, self.dtype = memory, memory.dtype

    def store_sums(
        self, smem: Int32, pair: Any, sub: Any, gates: list[Any], *, ascending: bool
    ) -> None:
        """Store P of a sub-chunk for two channels, and the input of `finish_tables`.

        Args:
            pair: the channels are 2 pair and 2 pair + 1.
            gates: gates of the 16 tokens, base 2; 0 past the chunk's end.
            ascending: gates may be positive.
        """
        total = [Float32(0.0), Float32(0.0)]
        sums = [total]
        for t in range(1, SUB_CHUNK):
            total = [x + y for x, y in zip(total, gates[t], strict=True)]
            sums.append(total)
        self.store_rows_of_sums(smem, pair, sub, sums, ascending=ascending)
        at = smem + sub * self.memory.p_row + (pair << 3)
        store_shared(Float32, at + self.memory["start"], gates[0])
        store_shared(Float32, at + self.memory["to_next"], total)

    def store_rows_of_sums(
        self, smem: Int32, pair: Any, sub: Any, sums: list[Any], *, ascending: bool
    ) -> None:
        """Store a sub-chunk's rows of P, or of the factors computed from P, for two channels."""
        if not self.memory.in_one_product:
            self._store_rows_of_p(smem, pair, sub, sums)
            return
        checked = range(1, SUB_CHUNK) if ascending else range(SUB_CHUNK - 1, SUB_CHUNK)
        found = is_outside(sums[checked[0]])
        for t in checked[1:]:
            found = found | is_outside(sums[t])
        self._store_factors(smem, pair, sub, sums, found)

    def _store_rows_of_p(self, smem: Int32, pair: Any, sub: Any, rows: list[Any]) -> None:
        unit, within = pair >> 1, (pair & 1) << 3
        row = smem + self.memory["p"] + sub * (SUB_CHUNK * self.memory.p_row) + within
        places = [row + (unit << 4), row + ((unit ^ 1) << 4)]
        for t in range(SUB_CHUNK):
            store_shared(Float32, places[parity(t)] + t * self.memory.p_row, rows[t])

    @cute.jit
    def _store_factors(
        self, smem: Int32, pair: Int32, sub: Int32, sums: Any, found: cutlass.Boolean
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        first = Int32(SUB_CHUNK)
        if cute.arch.vote_any_sync(found):
            first = first_outside(sums[1:], 1)  # P of token 0 is 0
            self._store_rows_of_p(smem, pair, sub, sums)
        else:
            self._store_rows_of_p(
                smem, pair, sub, [[exp2(-self.memory.shift - x) for x in row] for row in sums]
            )
        if (thread & (WARP_SIZE - 1)) == 0:
            store_shared(Int32, smem + self.memory["out_of_range"] + (thread >> 5) * 4, [first])

    def rows_in_range(self, smem: Int32, b: Int32) -> Any:
        """Return how many rows of sub-chunk b are in range, from the first on."""
        if not self.memory.in_one_product:
            return Int32(0)
        warps = self.memory.head_dim_k // 2 // WARP_SIZE
        at = smem + self.memory["out_of_range"] + b * (4 * warps)
        found = load_shared(Int32, at, warps)
        rows = found[0]
        for other in found[1:]:
            rows = cutlass.min(rows, other)
        return rows

    def rows_of_half(self, smem: Int32, b: Int32, half: Any) -> Any:
        """Return `rows_in_range` for half of the channels. If the result is 16, the buffer of P
        holds exp2(-shift - P)."""
        if not self.memory.in_one_product:
            return Int32(0)
        warps = self.memory.head_dim_k // 2 // WARP_SIZE
        at = b * (4 * warps) + (half * 4 if warps == 2 else 0)
        return load_shared(Int32, smem + self.memory["out_of_range"] + at)[0]

    def finish_tables(self, smem: Int32, channel: Int32) -> Any:
        """Fill `start`, `to_next` and `to_end` from the output of `store_sums`: each sub-chunk's
        first gate, and the sum of its other gates. Return G at the chunk's end."""
        at = smem + (channel << 2)
        first, total = (
            [load_shared(Float32, at + table + b * self.memory.p_row)[0] for b in range(SUB_CHUNKS)]
            for table in (self.memory["start"], self.memory["to_next"])
        )
        steps = [x + y for x, y in zip(total, [*first[1:], Float32(0.0)], strict=True)]
        to_end = Float32(0.0)
        for b in reversed(range(SUB_CHUNKS)):
            to_end = to_end + steps[b]
            store_shared(Float32, at + self.memory["to_end"] + b * self.memory.p_row, [to_end])
            store_shared(Float32, at + self.memory["to_next"] + b * self.memory.p_row, [steps[b]])
        start = first[0]
        for b in range(SUB_CHUNKS):
            self.store_start(at + b * self.memory.p_row, start)
            start = start + steps[b]
        return start

    def store_start(self, at: Any, start: Any) -> None:
        store_shared(Float32, at + self.memory["start"], [exp2(start - self.memory.shift)])

    def decays(self, p: list[Any], until: list[Any], in_range: bool) -> list[Any]:
        """Return the decays from a row's token to a later token, for some channels.

        `p` is P of the row. `until` is the sum of gates from the sub-chunk's first token to the
        later token, plus the shift. With `in_range`, `p` is exp2(-shift - P) and `until` is exp2 of
        the sum."""
        if in_range:
            return [x * y for x, y in zip(p, until, strict=True)]
        return [
            exp2((y - self.memory.shift if self.memory.shift else y) - x)
            for x, y in zip(p, until, strict=True)
        ]

    def sums_of(self, p: list[Any], row: Any, in_range: Any) -> list[Any]:
        """Return P from the stored values of a row. P of a row in range is computed from its factor
        even where P itself is stored, so that its bits do not depend on later rows."""
        if not self.memory.in_one_product:
            return p
        whole, inside = in_range == SUB_CHUNK, row < in_range
        result = []
        for x in p:
            factor = cutlass.select_(whole, x, exp2(-self.memory.shift - x))
            back = -self.memory.shift - log2(factor)
            result.append(Float32(cutlass.select_(inside, back, x)))
        return result
