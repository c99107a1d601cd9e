"""The part of dq and dk within a chunk: products of dAqk and dLhat with decayed k and q.

    dq_i  =  scale exp2(G_i) (do S^T)_i    + sum_j<i  dAqk_ij k_j exp2(G_i - G_j)
    row_i = -exp2(G_i) (dr S^T)_i          + sum_j<i  dLhat_ij k_j exp2(G_i - G_j)
    col_j = exp2(G_e - G_j) (v' dS'^T)_j   + sum_i>j  (dAqk_ij q_i + dLhat_ij k_i) exp2(G_i - G_j)

where dAqk includes the scale. dk is row + col. Terms i == j of dAqk are not here.

Sub-chunks follow one another as in Horner's method: the sum so far decays to the first token of
the next sub-chunk, and the product of a sub-chunk whose k has decayed to there is added. So each
factor is a decay from a token to a later one, at most 1, and no large gate cancels. The state's
part is the sum before the first sub-chunk; for columns, which go backwards, its gradient's part.

Within a sub-chunk, decays are relative to a reference, as for the scores (see `..scores`): rows in
range take one product, with a constant reference; the others are multiplied by halves, in four
products relative to the first of the later tokens.

A term of dq_i times q_i is one of col_j times k_j, and in dG, the gradient of G,

    dG = q dq + k row - k col

they cancel wherever both tokens are before or after a gate. So that rounding does not hinder that,
dG multiplies each product by the operand of its counterpart, as rounded there.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ....common.ptx.convert import pack_all, unpack_all
from ....common.ptx.math import exp2
from ....common.ptx.memory import load_shared
from ....common.ptx.mma import mma
from ..sub_chunks import SHIFT, SUB_CHUNK, SUB_CHUNKS, row_and_part
from ..tiles import left_fragment, left_fragment_of_columns
from .layout import GradientMemory

LEVELS = 4  # of the products by halves
ONE_PRODUCT = LEVELS  # the index of the product of the rows in range


class DecayedProducts:
    """Adds the products to a warp's accumulators. All methods run on the device."""

    def __init__(self, memory: GradientMemory):
        self.memory, self.dtype = memory, memory.dtype
        self.pairs = memory.pairs
        self.in_one_product = self.dtype is cutlass.BFloat16

    # -- between sub-chunks -------------------------------------------------------------------

    @cute.jit
    def add_rows(
        self, smem: Int32, acc_q: cute.Tensor, acc_k: cute.Tensor, dG: cute.Tensor
    ) -> None:
        """From products relative to the chunk's start (of q with the scale, of dr with its sign),
        make dq and row, without the sub-chunk's own products, and add their part of dG."""
        b, _ = self.memory.warp_place()
        for j in cutlass.range(b, unroll=1):
            rows_q = left_fragment(smem + self.memory["daqk"], b * SUB_CHUNK, j)
            rows_k = left_fragment(smem + self.memory["dlower"], b * SUB_CHUNK, j)
            for pair in cutlass.range_constexpr(self.pairs):
                gap = self._gap(smem, j, pair)
                self._scale(acc_q, pair, gap)
                self._scale(acc_k, pair, gap)
                column = self._decayed(smem, "k", j, pair, to_next=True)
                self._multiply(acc_q, pair, rows_q, column)
                self._multiply(acc_k, pair, rows_k, column)
        for pair in cutlass.range_constexpr(self.pairs):
            for i in cutlass.range_constexpr(2):
                channel = self.memory.accumulator_channel(pair, i)
                for half in cutlass.range_constexpr(2):
                    row = self.memory.rows()[half]
                    decay = [exp2(x) for x in self.memory.load_p(smem, row, channel, 2)]
                    q = self.rounded(smem, "q", row, channel, decay)
                    k = self.rounded(smem, "k", row, channel, decay)
                    for e in cutlass.range_constexpr(2):
                        n = 8 * pair + 4 * i + 2 * half + e
                        dG[n] = dG[n] + (q[e] * acc_q[n] + k[e] * acc_k[n])
                        acc_q[n] = acc_q[n] * decay[e]
                        acc_k[n] = acc_k[n] * decay[e]

    @cute.jit
    def add_columns(self, smem: Int32, acc: cute.Tensor, dG: cute.Tensor) -> None:
        """From products relative to the chunk's end, make col, without the sub-chunk's own
        products, and add its part of dG."""
        b, _ = self.memory.warp_place()
        for back in cutlass.range(SUB_CHUNKS - 1 - b, unroll=1):
            m = SUB_CHUNKS - 1 - back
            columns_q = left_fragment_of_columns(smem + self.memory["daqk"], b * SUB_CHUNK, m)
            columns_k = left_fragment_of_columns(smem + self.memory["dlower"], b * SUB_CHUNK, m)
            for pair in cutlass.range_constexpr(self.pairs):
                self._scale(acc, pair, self._gap(smem, m, pair))
                q = self._decayed(smem, "q", m, pair, to_next=False)
                self._multiply(acc, pair, columns_q, q)
                k = self._decayed(smem, "k", m, pair, to_next=False)
                self._multiply(acc, pair, columns_k, k)
        for pair in cutlass.range_constexpr(self.pairs):
            gap = self._gap_logs(smem, b, pair)
            for i in cutlass.range_constexpr(2):
                channel = self.memory.accumulator_channel(pair, i)
                for half in cutlass.range_constexpr(2):
                    row = self.memory.rows()[half]
                    p = self.memory.load_p(smem, row, channel, 2)
                    decay = [exp2(gap[2 * i + e] - p[e]) for e in range(2)]
                    k = self.rounded(smem, "k", row, channel, decay)
                    for e in cutlass.range_constexpr(2):
                        n = 8 * pair + 4 * i + 2 * half + e
                        dG[n] = dG[n] - k[e] * acc[n]
                        acc[n] = acc[n] * decay[e]

    def rounded(self, smem: Any, name: str, row: Any, channel: Any, decay: list[Any]) -> list[Any]:
        """Return two neighbouring channels of decayed q or k, as they are rounded in operands."""
        values = self.memory.load_pair(smem, name, row, channel)
        values = [x * y for x, y in zip(values, decay, strict=True)]
        return unpack_all(self.dtype, pack_all(self.dtype, values))

    def _gap_logs(self, smem: Any, b: Any, pair: int) -> list[Any]:
        """Load `steps` of a sub-chunk for the thread's accumulators: [8 channels][2]."""
        steps: list[Any] = []
        for i in range(2):
            channel = self.memory.accumulator_channel(pair, i)
            steps += self.memory.load_sums(smem, "steps", b, channel, 2)
        return steps

    def _gap(self, smem: Any, b: Any, pair: int) -> list[Any]:
        return [exp2(x) for x in self._gap_logs(smem, b, pair)]

    def _scale(self, acc: cute.Tensor, pair: int, factors: list[Any]) -> None:
        for n in range(8):
            acc[8 * pair + n] = acc[8 * pair + n] * factors[n // 4 * 2 + n % 2]

    def _multiply(self, acc: cute.Tensor, pair: int, left: Any, right: Any) -> None:
        for i in range(2):
            at = 8 * pair + 4 * i
            old = [acc[at + n] for n in range(4)]
            for n, x in enumerate(mma(self.dtype, old, left, right[2 * i : 2 * i + 2])):
                acc[at + n] = x

    def _tokens(self, b: Any) -> list[Any]:
        """Return the tokens of a thread's operands, in the order of its elements."""
        _, c = row_and_part()
        return [b * SUB_CHUNK + 8 * h + 2 * c + e for h in range(2) for e in range(2)]

    def _elements(self, smem: Any, name: str, b: Any, pair: int) -> list[Any]:
        """Load normalised q or k of a sub-chunk, as operands: [8 channels][token]."""
        raw = self.memory.operands(smem + self.memory[name], b, pair)
        values = unpack_all(self.dtype, raw)
        if self.memory.l2norm:
            norms: list[Any] = []
            at = smem + self.memory[f"inverse_norm_{name}"] + self._tokens(b)[0] * 4
            for h in range(2):
                norms += load_shared(Float32, at + 32 * h, 2)
            values = [x * norms[n % 4] for n, x in enumerate(values)]
        return values

    def _decayed(self, smem: Any, name: str, b: Any, pair: int, *, to_next: bool) -> list[Any]:
        """Return q or k of a sub-chunk, decayed from its first token, or else from the token to the
        next sub-chunk (or the chunk's end), as an operand."""
        values = self._elements(smem, name, b, pair)
        for i in range(2):
            channel = self.memory.operand_channel(pair, i)
            if to_next:
                (gap,) = self.memory.load_sums(smem, "steps", b, channel)
            for n, token in enumerate(self._tokens(b)):
                (p,) = self.memory.load_p(smem, token, channel, 1)
                values[4 * i + n] = values[4 * i + n] * exp2(gap - p if to_next else p)
        return pack_all(self.dtype, values)

    # -- within a sub-chunk -------------------------------------------------------------------

    @cute.jit
    def add_own(
        self, smem: Int32, in_range: Int32, acc_q: cute.Tensor, acc_k: cute.Tensor,
        acc: cute.Tensor, dG: cute.Tensor,
    ) -> None:  # fmt: skip
        """Add the products of the sub-chunk with itself to dq, row, col and dG. The first
        `in_range` rows take one product."""
        first = Int32(0)
        end = Int32(LEVELS)
        if cutlass.const_expr(self.in_one_product):
            first = Int32(LEVELS) if in_range == SUB_CHUNK else Int32(0)
            end = Int32(LEVELS + 1)
        # The compiler would load P before the loops, or mix these, and spill.
        for pair in cutlass.range_constexpr(self.pairs):
            for level in cutlass.range(first, end, unroll=1):
                cute.arch.sync_warp()
                self._own_rows(smem, level, in_range, pair, acc_q, acc_k, dG)
            for level in cutlass.range(first, end, unroll=1):
                cute.arch.sync_warp()
                self._own_columns(smem, level, in_range, pair, acc, dG)

    def _own_rows(
        self, smem: Any, level: Any, in_range: Any, pair: int, acc_q: cute.Tensor,
        acc_k: cute.Tensor, dG: cute.Tensor,
    ) -> None:  # fmt: skip
        b, _ = self.memory.warp_place()
        column = self._own_operand(smem, "k", level, in_range, pair, later=False)
        factors = self._own_factors(smem, level, in_range, pair, later=True)
        for matrix, name, target in (("daqk", "q", acc_q), ("dlower", "k", acc_k)):
            left = left_fragment(smem + self.memory[matrix], b * SUB_CHUNK, b)
            product = self._own_product(self._in_groups(left, level), [column])
            self._add_own(smem, target, dG, pair, product, factors, name)

    def _own_columns(
        self, smem: Any, level: Any, in_range: Any, pair: int, acc: cute.Tensor, dG: cute.Tensor
    ) -> None:
        b, _ = self.memory.warp_place()
        q, k = (
            self._own_operand(smem, name, level, in_range, pair, later=True) for name in ("q", "k")
        )
        left: list[Any] = []
        for name in ("daqk", "dlower"):
            at = smem + self.memory[name]
            left += self._in_groups(left_fragment_of_columns(at, b * SUB_CHUNK, b), level)
        product = self._own_product(left, [q, k])
        cute.arch.sync_warp()
        factors = self._own_factors(smem, level, in_range, pair, later=False)
        self._add_own(smem, acc, dG, pair, product, factors, "k", sign=-1.0)

    def _own_product(self, left: list[Any], right: list[Any]) -> list[Any]:
        """Return a sum of products; 4 registers of `left` for each of `right`."""
        result: list[Any] = []
        for i in range(2):
            product: Any = [Float32(0.0)] * 4
            for n, operand in enumerate(right):
                a = left[4 * n : 4 * n + 4]
                product = mma(self.dtype, product, a, operand[2 * i : 2 * i + 2])
            result += product
        return result

    def _add_own(
        self, smem: Any, acc: cute.Tensor, dG: cute.Tensor, pair: int, product: list[Any],
        factors: list[Any], name: str, sign: float = 1.0,
    ) -> None:  # fmt: skip
        """Add a product to acc, and to dG."""
        rows = self.memory.rows()
        for n in range(0, 8, 2):
            channel = self.memory.accumulator_channel(pair, n // 4)
            x = self.rounded(smem, name, rows[n // 2 % 2], channel, factors[n : n + 2])
            for e in range(2):
                at = 8 * pair + n + e
                acc[at] = acc[at] + product[n + e] * factors[n + e]
                dG[at] = dG[at] + product[n + e] * (x[e] * sign)

    def _shift(self, level: Any) -> Any:
        """Return log2 of the tokens of a group; a level pairs its halves."""
        return cutlass.select_(level == ONE_PRODUCT, Int32(LEVELS), LEVELS - level)

    def _in_groups(self, left: list[Any], level: Any) -> list[Any]:
        """Set elements of a left operand to 0 whose tokens are in different groups."""
        r, c = row_and_part()
        shift = self._shift(level)
        result = []
        for n, x in enumerate(left):
            same = ((r + 8 * (n % 2)) >> shift) == ((8 * (n // 2) + 2 * c) >> shift)
            result.append(cutlass.select_(same, x, Int32(0)))
        return result

    def _takes_part(self, level: Any, token: Any, in_range: Any, later: bool) -> Any:
        """Return whether a token of the sub-chunk is one of the later (or earlier) ones."""
        inside = token < in_range
        is_later = ((token >> (self._shift(level) - 1)) & 1) == 1
        of_level = (is_later & (token >= in_range)) if later else Boolean(~is_later)
        return cutlass.select_(level == ONE_PRODUCT, inside, of_level)

    def _own_decay(
        self, smem: Any, level: Any, in_range: Any, token: Any, channel: Any, count: int,
        later: bool,
    ) -> list[Any]:  # fmt: skip
        """Return the decays between a token of the sub-chunk and the reference; 0 for tokens that
        take no part."""
        b, _ = self.memory.warp_place()
        shift = self._shift(level)
        start = (token >> shift) << shift
        reference = start + (1 << (shift - 1))
        p = self.memory.load_p(smem, b * SUB_CHUNK + token, channel, count)
        at_reference = self.memory.load_p(smem, b * SUB_CHUNK + reference, channel, count)
        takes_part = self._takes_part(level, token, in_range, later)
        result = []
        for x, y in zip(p, at_reference, strict=True):
            y = cutlass.select_(level == ONE_PRODUCT, Float32(-SHIFT), y)
            decay = exp2(x - y if later else y - x)
            result.append(Float32(cutlass.select_(takes_part, decay, Float32(0.0))))
        return result

    def _own_operand(
        self, smem: Any, name: str, level: Any, in_range: Any, pair: int, *, later: bool
    ) -> list[Any]:
        b, _ = self.memory.warp_place()
        values = self._elements(smem, name, b, pair)
        for i in range(2):
            channel = self.memory.operand_channel(pair, i)
            for n, token in enumerate(self._tokens(0)):
                (decay,) = self._own_decay(smem, level, in_range, token, channel, 1, later)
                values[4 * i + n] = values[4 * i + n] * decay
        return pack_all(self.dtype, values)

    def _own_factors(
        self, smem: Any, level: Any, in_range: Any, pair: int, *, later: bool
    ) -> list[Any]:
        """Return the factors of the thread's accumulators: [8 channels][row][2]."""
        r, _ = row_and_part()
        factors: list[Any] = []
        for i in range(2):
            channel = self.memory.accumulator_channel(pair, i)
            for half in range(2):
                token = r + 8 * half
                factors += self._own_decay(smem, level, in_range, token, channel, 2, later)
        return factors
