"""Scores within a chunk, by products on the tensor cores: for `prepare` and `chunk_intra`.

With G the sum of a channel's gates (base 2) from the start of the chunk, a chunk needs

    Aqk_ij = scale sum_d q_id k_jd exp2(G_id - G_jd)     j <= i
    L_ij   = beta_i sum_d k_id k_jd exp2(G_id - G_jd)    j < i

For the tensor cores, exp2 is split into a factor of row i and a factor of column j. Tokens are in
sub-chunks of 16. P is the sum of gates from the first token of the sub-chunk, whose P is 0. The
factor of row i is exp2(P_i). The factor of a column j of an earlier sub-chunk is the decay from j
to the first token of i's sub-chunk. Both factors are at most 1 if no gate is above 0.

The factor of a column j of i's own sub-chunk is exp2(-P_j). bfloat16 has float32's exponents, so
this factor is used directly, divided by 2^60, while rows are multiplied by 2^60. The direct use
needs P within -120 and 40. A row with a channel outside these bounds, and every later row of the
sub-chunk, is out of range. So a row's result depends on no later token, not even by rounding. Rows
out of range, and with float16 all rows, are scored by halves: 8 tokens against the 8 before, with
both factors relative to the first of the 8 later tokens; then 4, 2 and 1 (`halves`).

Where 64 channels of a sub-chunk are in range, exp2(-P - 60) is stored instead of P. All factors are
then products of this stored value, or of its reciprocal, and one exponential per channel.

Factors are multiplied in float32, and operands are rounded once. Scores of a token with itself have
no decay; `operands` computes them, and the norms of q and k. The norms multiply the results, so q
and k are never rounded again.

Warps b and b + 4 score the rows of sub-chunk b, each for half of the channels. Then warp b adds up
L, and warp b + 4 Aqk. In every product, channels are ordered so that a thread loads 8 neighbours at
a time: channels 8 (lane % 4) to 8 (lane % 4) + 7 of each 32, in row lane // 4.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Receives decayed q and k. A call has 8 channels of row 8 half + lane // 4 of sub-chunk b."""

    def decayed_k(
        self, smem: Int32, b: Int32, half: int, group: Any, k: list[Any], start: Any
    ) -> None:
        """Take exp2(P + shift) * k. Times `start` and the inverse norm, this is exp2(G) * k."""

    def decayed_q(
        self, smem: Int32, b: Int32, half: int, group: Any, q: list[Any], start: Any, scale: Any
    ) -> None:
        """Take exp2(P + shift) * q. Times `start` and the inverse norm, this is exp2(G) * q."""

    def k_to_end(self, smem: Int32, b: Int32, half: int, group: Any, k: list[Any]) -> None:
        """Take exp2(G_e - G) * k; times the inverse norm it is kg."""


class Scores:
    """The products of q and k with their decays. All methods run on the device."""

    def __init__(self, memory: ChunkMemory, sums: GateSums, *, few_registers: bool = False):
        """few_registers: whether the kernel's `Outputs` take many registers."""
        self.memory, self.sums, self.dtype = memory, sums, memory.dtype
        self.halves = ScoresByHalves(memory, sums)
        self.few_registers = few_registers

    @cute.jit
    def score(
        self, smem: Int32, b: Int32, half: Int32, scale: Float32, out: Outputs, acc: cute.Tensor
    ) -> None:
        """Run `score_rows`, and decay k to the end of the chunk. Nothing reads q, k and P
        afterwards, so their shared memory is free."""
        self.score_rows(smem, b, half, scale, out, acc)
        # Warps with fewer blocks of scores compute more of kg. The warps of sub-chunk 0 compute kg
        # of 0 and 1, the warps of 1 kg of 2, the warps of 2 kg of 3.
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
        the channels, without scale and beta. Hand decayed q and k to `out`.

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
        """Run `score_rows` for 32 channels."""
        r, c = row_and_part()
        at_qk = smem + ((g << 6) ^ ((parity(r) << 6) + c * 16))
        at_p = smem + (g << 7) + c * 32
        # Left operands, in the order [q, k][half of the rows][4 registers].
        rows = cute.make_rmem_tensor((16,), Int32)
        in_range = self.sums.rows_of_half(smem, b, half)
        if in_range < SUB_CHUNK:
            keep_branch()
            self._own_rows(smem, b, scale, out, g, at_qk, at_p, rows, acc, in_range)
        else:
            self._own_rows(smem, b, scale, out, g, at_qk, at_p, rows, acc, None)
        # The shift, to which `_columns` adds the sum of gates from sub-chunk j to this sub-chunk.
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
        self, smem: Int32, b: Int32, scale: Any, out: Outputs, g: Any, at_qk: Any, at_p: Any,
        rows: cute.Tensor, acc: cute.Tensor, in_range: Any,
    ) -> None:  # fmt: skip
        """Multiply the rows, as left operands, by the sub-chunk's own columns. `in_range` is None
        where all rows are in range; a row in range has bitwise the same factors in either case."""
        r, _ = row_and_part()
        own = []
        slow = in_range is not None
        # To save registers, loads are delayed, and some are repeated.
        frugal = slow or self.few_registers
        late = frugal or target_architecture().startswith(("sm_90", "sm_10"))
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
        """Multiply the rows by the columns of sub-chunk j, `back` sub-chunks earlier."""
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
        """Add the rows of q and of k times 8 columns, over 32 channels, to `acc`."""
        for which in range(2):
            first = which * 8
            n = ((which * SUB_CHUNKS + back) * 2 + half) * 4
            product: Sequence[Any] = [acc[n + i] for i in range(4)]
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

    def _group_to_end(self, smem: Int32, b: Int32, out: Outputs, g: Any, in_range: bool) -> None:
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
