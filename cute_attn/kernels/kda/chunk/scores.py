"""Scores within a chunk, by products on the tensor cores: for `prepare` and `chunk_intra`.

With G the sum of a channel's gates (base 2) from the start of the chunk, a chunk needs

    Aqk_ij = scale sum_d q_id k_jd exp2(G_id - G_jd)     j <= i
    L_ij   = beta_i sum_d k_id k_jd exp2(G_id - G_jd)    j < i

by products on the tensor cores, so that exp2 has to be split into a factor of row i and one of
column j. Tokens are in sub-chunks of 16, and P is the sum of gates from the first token of its
sub-chunk (0 there). The factor of row i is exp2(P_i), and that of a column of an earlier sub-chunk
the decay from j to the first token of i's: both are at most 1 for gates that are at most 0.

The factor of a column j of i's own sub-chunk is exp2(-P_j). With bfloat16, whose exponents are
those of float32, this is taken as it is, divided by 2^60, and rows are multiplied by 2^60, as long
as P stays within -120 and 40. A row i where it does not, by any channel, is said to be out of
range, and so are those after it: a row's result depends on no token after it, not even by rounding.
Such rows, and with float16 all of them, have their scores by halves: 8 tokens against the 8 before
them, with the first of the later ones as the reference of both factors; then 4, 2 and 1 (`halves`).

Exponentials are few: where 64 channels of a sub-chunk are in range, exp2(-P - 60) is stored instead
of P, and all factors are products of that, or of its reciprocal, and one exponential a channel.

Factors are multiplied in float32, and the products rounded once, as operands. Scores of a token
with itself have no decay, and come from `operands`, which also finds the lengths of q and k: these
are factors of the scores, and of all else that is made of q and k, which are never rounded again.

All 8 warps work on scores: warps b and b + 4 have the rows of sub-chunk b, each for half of the
channels. Then warp b adds up and keeps L, warp b + 4 Aqk. In every product the order of channels is
the one that lets a thread load 8 neighbours at a time: with row = lane // 4, a thread has channels
8 (lane % 4) to + 7 of each 32.
"""

from __future__ import annotations

from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.ptx.compiler import keep_branch
from ...common.ptx.convert import pack_all, unpack_all
from ...common.ptx.math import exp2, reciprocal
from ...common.ptx.memory import load_shared
from ...common.ptx.mma import mma
from .gate_sums import GateSums
from .halves import ScoresByHalves
from .sub_chunks import (
    SUB_CHUNK,
    SUB_CHUNKS,
    ChunkMemory,
    groups_of_half,
    load_channels,
    parity,
    row_and_part,
    target_architecture,
)


class Outputs(Protocol):
    """Takes q and k, decayed: 8 channels of a row, 8 half + lane // 4 of sub-chunk b, at a time."""

    def decayed_k(self, smem: Any, b: Any, half: int, group: Any, k: list[Any], start: Any) -> None:
        """Take k. Times `start` and the norm it is decayed from the start of the chunk."""

    def decayed_q(
        self, smem: Any, b: Any, half: int, group: Any, q: list[Any], start: Any, scale: Any
    ) -> None:
        """Take the same of q."""

    def k_to_end(self, smem: Any, b: Any, half: int, group: Any, k: list[Any]) -> None:
        """Take k, which is decayed to the end of the chunk but for the norm."""


class Scores:
    """The products of q and k with their decays. All methods run on the device."""

    def __init__(self, memory: ChunkMemory, sums: GateSums, *, few_registers: bool = False):
        """few_registers: whether `Outputs` leave few registers to the scores."""
        self.memory, self.sums, self.dtype = memory, sums, memory.dtype
        self.halves = ScoresByHalves(memory, sums)
        self.few_registers = few_registers

    @cute.jit
    def score(
        self, smem: Int32, b: Int32, half: Int32, scale: Float32, out: Outputs, acc: cute.Tensor
    ) -> None:
        """Run `score_rows`, and decay k to the end of the chunk. Nothing reads q, k and P
        afterwards, so that their place is free."""
        self.score_rows(smem, b, half, scale, out, acc)
        # Those with few blocks of scores have more of kg: sub-chunks 0 and 1, 2, 3, none.
        first = Int32(0) if b == 0 else b + 1
        last = cutlass.min(b + 2, Int32(SUB_CHUNKS))
        for sub in cutlass.range(first, last, unroll=1):
            self.decay_to_end(smem, sub, half, out)
        cute.arch.sync_threads()

    @cute.jit
    def score_rows(
        self, smem: Int32, b: Int32, half: Int32, scale: Float32, out: Outputs, acc: cute.Tensor
    ) -> None:
        """Score the rows of sub-chunk b against itself and the sub-chunks before it, over half of
        the channels, without scale and beta. On the way q and k, decayed, go to `out`.

        Args:
            acc: 64 float32 in registers: [q, k][sub-chunks back][half of its tokens][accumulators].
        """
        acc.fill(0.0)
        first = half * (self.memory.groups // 2)
        for g in cutlass.range(first, first + groups_of_half(self.memory.groups), unroll=1):
            self._row_group(smem, b, half, scale, out, g, acc)
        rows = self.sums.rows_in_range(smem, b)
        if rows < SUB_CHUNK:
            self.halves.levels(smem, b, half, scale)

    @cute.jit
    def _row_group(
        self,
        smem: Int32,
        b: Int32,
        half: Int32,
        scale: Float32,
        out: Outputs,
        g: Int32,
        acc: cute.Tensor,
    ) -> None:
        """Do `score_rows` for 32 channels."""
        r, c = row_and_part()
        at_qk = smem + ((g << 6) ^ ((parity(r) << 6) + c * 16))
        at_p = smem + (g << 7) + c * 32
        # Left operands: [q, k][half of the rows][4].
        rows = cute.make_rmem_tensor((16,), Int32)
        in_range = self.sums.rows_of_half(smem, b, half)
        if in_range < SUB_CHUNK:
            keep_branch()
            self._own_rows(smem, b, scale, out, g, at_qk, at_p, rows, acc, in_range)
        else:
            self._own_rows(smem, b, scale, out, g, at_qk, at_p, rows, acc, None)
        # G from the columns' next sub-chunk to this one, plus the shift.
        gap = cute.make_rmem_tensor((8,), Float32)
        gap.fill(self.memory.shift)
        for back in cutlass.range_constexpr(1, SUB_CHUNKS):
            if b >= back:
                keep_branch()
                j = b - back
                if self.sums.rows_of_half(smem, j, half) < SUB_CHUNK:
                    keep_branch()
                    self._columns(back, False, j, at_qk, at_p, rows, gap, acc)
                else:
                    self._columns(back, True, j, at_qk, at_p, rows, gap, acc)

    def _own_rows(
        self, smem: Any, b: Any, scale: Any, out: Outputs, g: Any, at_qk: Any, at_p: Any,
        rows: cute.Tensor, acc: cute.Tensor, in_range: Any,
    ) -> None:  # fmt: skip
        """Multiply the rows, as left operands, by the sub-chunk's own columns. `in_range` is None
        where all rows are; a row that is has the same factors in either case, bit by bit."""
        r, _ = row_and_part()
        own = []
        slow = in_range is not None
        # Registers are short here: loads are held back, and some are repeated.
        frugal = slow or self.few_registers
        late = frugal or target_architecture().startswith("sm_10")
        for half in range(2):
            if half and self.memory.in_one_product:
                cute.arch.sync_warp()
            row = b * SUB_CHUNK + half * 8 + r
            place = at_qk + row * self.memory.qk_row
            if not late:
                q = self.memory.load_elements(place + self.memory["q"])
            if not slow:
                k = self.memory.load_elements(place + self.memory["k"])
            p = load_channels(at_p + self.memory["p"] + row * self.memory.p_row, parity(r) << 4)
            if not self.memory.in_one_product:
                decay = [exp2(x) for x in p]
            else:
                inverse = [exp2(-self.memory.shift - x) for x in p] if slow else p
                if not slow:
                    own.append(
                        pack_all(self.dtype, [x * y for x, y in zip(k, inverse, strict=True)])
                    )
                decay = [reciprocal(x) for x in inverse]
                if slow:
                    inside = r + half * 8 < in_range
                    for n, y in enumerate(p):
                        x = cutlass.select_(inside, -self.memory.shift - y, y + self.memory.shift)
                        x = exp2(x)
                        decay[n] = Float32(cutlass.select_(inside, reciprocal(x), x))
            if slow:
                cute.arch.sync_warp()
                k = self.memory.load_elements(place + self.memory["k"])
            k = [x * y for x, y in zip(k, decay, strict=True)]
            for n, x in enumerate(pack_all(self.dtype, k)):
                rows[8 + half * 4 + n] = x
            if slow:
                cute.arch.sync_warp()
            start = load_channels(at_p + self.memory["start"] + b * self.memory.p_row, 0)
            out.decayed_k(smem, b, half, g, k, start)
            if frugal:
                cute.arch.sync_warp()
            if late:
                q = self.memory.load_elements(place + self.memory["q"])
            q = [x * y for x, y in zip(q, decay, strict=True)]
            for n, x in enumerate(pack_all(self.dtype, q)):
                rows[half * 4 + n] = x
            if frugal:
                start = load_channels(at_p + self.memory["start"] + b * self.memory.p_row, 0)
            out.decayed_q(smem, b, half, g, q, start, scale)
        if self.memory.in_one_product and slow:
            for half in range(2):
                cute.arch.sync_warp()
                row = b * SUB_CHUNK + half * 8 + r
                k = unpack_all(
                    self.dtype,
                    load_shared(Int32, at_qk + self.memory["k"] + row * self.memory.qk_row, 4),
                )
                p = load_channels(at_p + self.memory["p"] + row * self.memory.p_row, parity(r) << 4)
                inverse = [exp2(-self.memory.shift - x) for x in p]
                own.append(pack_all(self.dtype, [x * y for x, y in zip(k, inverse, strict=True)]))
        for half, column in enumerate(own):
            self._accumulate(acc, 0, half, rows, column)

    def _columns(
        self, back: int, in_range: bool, j: Any, at_qk: Any, at_p: Any, rows: cute.Tensor,
        gap: cute.Tensor, acc: cute.Tensor,
    ) -> None:  # fmt: skip
        """Multiply the rows by the columns of sub-chunk j, `back` before."""
        r, _ = row_and_part()
        step = load_channels(at_p + self.memory["to_next"] + j * self.memory.p_row, 0)
        for i in range(8):
            gap[i] = gap[i] + step[i]
        to_rows = [exp2(gap[i]) if in_range else gap[i] for i in range(8)]
        for half in range(2):
            row = j * SUB_CHUNK + half * 8 + r
            k = unpack_all(
                self.dtype,
                load_shared(Int32, at_qk + self.memory["k"] + row * self.memory.qk_row, 4),
            )
            p = load_channels(at_p + self.memory["p"] + row * self.memory.p_row, parity(r) << 4)
            factors = self.sums.decays(p, to_rows, in_range)
            column = pack_all(self.dtype, [x * y for x, y in zip(k, factors, strict=True)])
            self._accumulate(acc, back, half, rows, column)

    def _accumulate(
        self, acc: cute.Tensor, back: int, half: int, rows: cute.Tensor, column: Any
    ) -> None:
        """Add both matrices' rows times 8 columns, over 32 channels, to `acc`."""
        for which in range(2):
            first = which * 8
            n = ((which * SUB_CHUNKS + back) * 2 + half) * 4
            product = [acc[n + i] for i in range(4)]
            for t in (0, 2):
                a = [rows[first + m] for m in (t, 4 + t, t + 1, 4 + t + 1)]
                product = mma(self.dtype, product, a, column[t : t + 2])
            for i in range(4):
                acc[n + i] = product[i]

    @cute.jit
    def decay_to_end(self, smem: Int32, b: Int32, half: Int32, out: Outputs) -> None:
        """Hand exp2(G_e - G) * k of sub-chunk b, for half of the channels, to `out`."""
        first = half * (self.memory.groups // 2)
        in_range = self.sums.rows_of_half(smem, b, half)
        for g in cutlass.range(first, first + groups_of_half(self.memory.groups), unroll=1):
            if in_range < SUB_CHUNK:
                keep_branch()
                self._group_to_end(smem, b, out, g, False)
            else:
                self._group_to_end(smem, b, out, g, True)

    def _group_to_end(self, smem: Any, b: Any, out: Outputs, g: Any, in_range: bool) -> None:
        r, c = row_and_part()
        at_qk = smem + self.memory["k"] + ((g << 6) ^ ((parity(r) << 6) + c * 16))
        at_p = smem + (g << 7) + c * 32
        end = load_channels(at_p + self.memory["to_end"] + b * self.memory.p_row, 0)
        end = [x + self.memory.shift if self.memory.shift else x for x in end]
        end = [exp2(x) if in_range else x for x in end]
        for half in range(2):
            row = b * SUB_CHUNK + half * 8 + r
            k = self.memory.load_elements(at_qk + row * self.memory.qk_row)
            p = load_channels(at_p + self.memory["p"] + row * self.memory.p_row, parity(r) << 4)
            k = [x * y for x, y in zip(k, self.sums.decays(p, end, in_range), strict=True)]
            out.k_to_end(smem, b, half, g, k)
