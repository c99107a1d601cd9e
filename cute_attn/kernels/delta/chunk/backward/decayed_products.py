"""The part of dq and dk within a chunk: products of dAqk and dLhat with decayed k and q.

    dq_i  =  scale exp2(G_i) (do S^T)_i    + sum_j<i  dAqk_ij k_j exp2(G_i - G_j)
    row_i = -exp2(G_i) (dr S^T)_i          + sum_j<i  dLhat_ij k_j exp2(G_i - G_j)
    col_j = exp2(G_e - G_j) (v' dS'^T)_j   + sum_i>j  (dAqk_ij q_i + dLhat_ij k_i) exp2(G_i - G_j)

where dAqk includes the scale. dk is row + col. `gradients` adds the terms i == j of dAqk.

Sums over sub-chunks follow Horner's method. The sum so far decays to the first token of the next
sub-chunk. Then the product with a sub-chunk's k, decayed to that token, is added. So each factor is
a decay from a token to a later token, at most 1, and no large gate cancels. For rows, the sum
starts with the state's part. For columns, which go backwards, the sum starts with the part of the
state's gradient.

Within a sub-chunk, decays are relative to a reference, as for the scores (see `..scores`). Rows in
range take one product, with a constant reference. Rows out of range are multiplied by halves, in
four products relative to the first of the later tokens.

Each term of dq_i times q_i is also a term of col_j times k_j. In dG, the gradient of G,

    dG = q dq + k row - k col

the two terms cancel wherever both tokens are before or after a gate. So that the terms cancel
despite rounding, dG multiplies each product by the operand of the product it cancels against,
rounded as in that product.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ....common.ptx.compiler import keep_branch
from ....common.ptx.convert import pack_all, unpack, unpack_all
from ....common.ptx.math import exp2
from ....common.ptx.memory import load_shared, store_shared
from ....common.ptx.mma import mma
from ..spec import CHUNK
from ..sub_chunks import SHIFT, SUB_CHUNK, SUB_CHUNKS, row_and_part
from ..tiles import left_fragment, left_fragment_of_columns, tile_offset
from .gate_gradients import GateGradients
from .layout import PAIRS, GradientMemory

LEVELS = 4  # levels of the products by halves
ONE_PRODUCT = LEVELS  # the index of the product of the rows in range


class DecayedProducts:
    """Adds the products to a warp's accumulators. All methods run on the device."""

    def __init__(self, memory: GradientMemory, sums: GateGradients):
        self.memory, self.sums, self.dtype = memory, sums, memory.dtype
        self.in_one_product = self.dtype is cutlass.BFloat16
        self.shift = SHIFT if self.in_one_product else 0.0

    # -- operands -----------------------------------------------------------------------------

    @cute.jit
    def store_operands(self, smem: Int32) -> None:
        """Store decayed q and k in the memory of the stage; 8 threads share a row. Rows are decayed
        from the sub-chunk's first token, times 2^shift. Columns are decayed to the next sub-chunk
        (or the chunk's end), or to the reference 2^-shift if all rows of the sub-chunk are in
        range."""
        thread, _, _ = cute.arch.thread_idx()
        rows_of_pass = self.memory.num_threads // 8
        for i in cutlass.range_constexpr(CHUNK // rows_of_pass):
            row = (thread >> 3) + i * rows_of_pass
            b = row >> 4
            whole = self.sums.rows_in_range(smem, b) == SUB_CHUNK
            for n in cutlass.range_constexpr(self.memory.channels // 64):
                channel = 64 * n + 8 * (thread & 7)
                at = tile_offset(row, channel)
                p = self.memory.load_p(smem, row, channel, 8)
                rows = [exp2(x + self.shift) for x in p]
                columns = self._columns_decays(smem, whole, p, b, channel)
                q, k = (self._load_row(smem, name, row, at) for name in ("q", "k"))
                for name, x, decay in (
                    ("q_rows", q, rows), ("k_rows", k, rows), ("k_columns", k, columns)
                ):  # fmt: skip
                    values = [y * z for y, z in zip(x, decay, strict=True)]
                    store_shared(Int32, smem + self.memory[name] + at, pack_all(self.dtype, values))

    @cute.jit
    def _columns_decays(
        self, smem: Int32, whole: cutlass.Boolean, p: Any, b: Int32, channel: Int32
    ) -> Any:
        decays = [exp2(-self.shift - x) for x in p]
        if not whole:
            keep_branch()
            steps = self.memory.load_sums(smem, "steps", b, channel, 8)
            decays = [exp2(y - x) for x, y in zip(p, steps, strict=True)]
        return decays

    def _load_row(self, smem: Int32, name: str, row: Any, at: Any) -> list[Any]:
        """Load 8 channels of normalised q or k."""
        values = unpack_all(self.dtype, load_shared(Int32, smem + self.memory[name] + at, 4))
        if self.memory.l2norm:
            norm = self.memory.of_token(smem, f"inverse_norm_{name}", row)
            values = [x * norm for x in values]
        return values

    def load_operand(self, smem: Int32, name: str, row: Any, channel: Int32) -> list[Any]:
        """Load two neighbouring channels of an operand."""
        at = smem + self.memory[name] + tile_offset(row, channel)
        return list(unpack(self.dtype, load_shared(Int32, at)[0]))

    # -- between sub-chunks -------------------------------------------------------------------

    @cute.jit
    def add_rows(
        self, smem: Int32, acc_q: cute.Tensor, acc_k: cute.Tensor, dG: cute.Tensor
    ) -> None:
        """Make dq and row, and add their part of dG. The inputs are the products with the state,
        relative to the chunk's first token and times 2^-shift. The product for q has the scale, and
        the product of dr its sign. Of the sub-chunk's own products, only the product of the rows in
        range is added here."""
        b, _ = self.memory.warp_place()
        for j in cutlass.range(b, unroll=1):
            whole = self.sums.rows_in_range(smem, j) == SUB_CHUNK
            rows_q = left_fragment(smem + self.memory["daqk"], b * SUB_CHUNK, j)
            rows_k = left_fragment(smem + self.memory["dlower"], b * SUB_CHUNK, j)
            for pair in cutlass.range_constexpr(PAIRS):
                gap = [exp2(x) for x in self._steps(smem, j, pair)]
                if not whole:
                    keep_branch()
                    for acc in (acc_q, acc_k):
                        self._scale(acc, pair, [x * 2.0**self.shift for x in gap])
                column = self.memory.operands(smem + self.memory["k_columns"], j, pair)
                after = [cutlass.select_(whole, x, Float32(2.0**-self.shift)) for x in gap]
                for acc, rows in ((acc_q, rows_q), (acc_k, rows_k)):
                    self._multiply(acc, pair, rows, column)
                    self._scale(acc, pair, after)
        in_range = self.sums.rows_in_range(smem, b)
        if cutlass.const_expr(self.in_one_product):
            rows_q = left_fragment(smem + self.memory["daqk"], b * SUB_CHUNK, b)
            rows_k = left_fragment(smem + self.memory["dlower"], b * SUB_CHUNK, b)
            if in_range < SUB_CHUNK:
                keep_branch()
                rows_q, rows_k = self._in_range(rows_q, in_range), self._in_range(rows_k, in_range)
                for pair in cutlass.range_constexpr(PAIRS):
                    cute.arch.sync_warp()
                    column = self._own_operand(
                        smem, "k", Int32(ONE_PRODUCT), in_range, pair, later=False
                    )
                    self._multiply(acc_q, pair, rows_q, column)
                    self._multiply(acc_k, pair, rows_k, column)
            else:
                for pair in cutlass.range_constexpr(PAIRS):
                    column = self.memory.operands(smem + self.memory["k_columns"], b, pair)
                    self._multiply(acc_q, pair, rows_q, column)
                    self._multiply(acc_k, pair, rows_k, column)
        for pair in cutlass.range_constexpr(PAIRS):
            for i in cutlass.range_constexpr(2):
                channel = self.memory.accumulator_channel(pair, i)
                for half in cutlass.range_constexpr(2):
                    row = self.memory.rows()[half]
                    p = self.memory.load_p(smem, row, channel, 2)
                    q = self.load_operand(smem, "q_rows", row, channel)
                    k = self.load_operand(smem, "k_rows", row, channel)
                    for e in cutlass.range_constexpr(2):
                        n = 8 * pair + 4 * i + 2 * half + e
                        dG[n] = q[e] * acc_q[n] + k[e] * acc_k[n]
                        decay = exp2(p[e] + self.shift)
                        acc_q[n] = acc_q[n] * decay
                        acc_k[n] = acc_k[n] * decay

    @cute.jit
    def add_columns(self, smem: Int32, acc: cute.Tensor) -> None:
        """Add the products of later sub-chunks to products relative to the chunk's end. If all rows
        of the sub-chunk are in range, their product is added too."""
        b, _ = self.memory.warp_place()
        if cutlass.const_expr(self.in_one_product):
            for pair in cutlass.range_constexpr(PAIRS):
                self._scale(acc, pair, [2.0**self.shift] * 4)
        for back in cutlass.range(SUB_CHUNKS - 1 - b, unroll=1):
            m = SUB_CHUNKS - 1 - back
            for pair in cutlass.range_constexpr(PAIRS):
                self._scale(acc, pair, [exp2(x) for x in self._steps(smem, m, pair)])
                self._multiply_columns(smem, acc, pair, b, m)
        whole = self.sums.rows_in_range(smem, b) == SUB_CHUNK
        if whole:
            for pair in cutlass.range_constexpr(PAIRS):
                self._scale(acc, pair, [exp2(x) for x in self._steps(smem, b, pair)])
                self._multiply_columns(smem, acc, pair, b, b)
        elif cutlass.const_expr(self.in_one_product):
            for pair in cutlass.range_constexpr(PAIRS):
                self._scale(acc, pair, [2.0**-self.shift] * 4)

    @cute.jit
    def finish_columns(self, smem: Int32, acc: cute.Tensor, dG: cute.Tensor) -> None:
        """Make col from the sums of `add_columns`, and add col's part of dG."""
        b, _ = self.memory.warp_place()
        whole = self.sums.rows_in_range(smem, b) == SUB_CHUNK
        for pair in cutlass.range_constexpr(PAIRS):
            steps = self._steps(smem, b, pair)
            reference = [cutlass.select_(whole, Float32(-self.shift), x) for x in steps]
            for i in cutlass.range_constexpr(2):
                channel = self.memory.accumulator_channel(pair, i)
                for half in cutlass.range_constexpr(2):
                    row = self.memory.rows()[half]
                    p = self.memory.load_p(smem, row, channel, 2)
                    k = self.load_operand(smem, "k_columns", row, channel)
                    for e in cutlass.range_constexpr(2):
                        n = 8 * pair + 4 * i + 2 * half + e
                        dG[n] = dG[n] - k[e] * acc[n]
                        acc[n] = acc[n] * exp2(reference[2 * i + e] - p[e])

    def _multiply_columns(self, smem: Int32, acc: cute.Tensor, pair: int, b: Int32, m: Any) -> None:
        """acc += the columns of sub-chunk b of dAqk and dLhat, times the rows of sub-chunk m."""
        for matrix, name in (("daqk", "q_rows"), ("dlower", "k_rows")):
            columns = left_fragment_of_columns(smem + self.memory[matrix], b * SUB_CHUNK, m)
            rows = self.memory.operands(smem + self.memory[name], m, pair)
            self._multiply(acc, pair, columns, rows)

    def _in_range(self, left: list[Any], in_range: Any) -> list[Any]:
        """Set the rows of a left operand that are out of range to 0."""
        r, _ = row_and_part()
        return [
            cutlass.select_(r + 8 * (n % 2) < in_range, x, Int32(0)) for n, x in enumerate(left)
        ]

    def _steps(self, smem: Int32, b: Int32, pair: int) -> list[Any]:
        """Load `steps` of a sub-chunk for the thread's accumulators: [8 channels][2]."""
        steps: list[Any] = []
        for i in range(2):
            channel = self.memory.accumulator_channel(pair, i)
            steps += self.memory.load_sums(smem, "steps", b, channel, 2)
        return steps

    def _scale(self, acc: cute.Tensor, pair: int, factors: list[Any]) -> None:
        for n in range(8):
            acc[8 * pair + n] = acc[8 * pair + n] * factors[n // 4 * 2 + n % 2]

    def _multiply(self, acc: cute.Tensor, pair: int, left: Any, right: Any) -> None:
        for i in range(2):
            at = 8 * pair + 4 * i
            old = [acc[at + n] for n in range(4)]
            for n, x in enumerate(mma(self.dtype, old, left, right[2 * i : 2 * i + 2])):
                acc[at + n] = x

    def _tokens(self, b: Int32) -> list[Any]:
        """Return the tokens of a thread's operands, in the order of its elements."""
        _, c = row_and_part()
        return [b * SUB_CHUNK + 8 * h + 2 * c + e for h in range(2) for e in range(2)]

    def _elements(self, smem: Int32, name: str, b: Int32, pair: int) -> list[Any]:
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

    def rounded(
        self, smem: Int32, name: str, row: Any, channel: Int32, decay: list[Any]
    ) -> list[Any]:
        """Return two neighbouring channels of decayed q or k, rounded as in operands."""
        values = self.memory.load_pair(smem, name, row, channel)
        values = [x * y for x, y in zip(values, decay, strict=True)]
        return unpack_all(self.dtype, pack_all(self.dtype, values))

    # -- within a sub-chunk -------------------------------------------------------------------

    @cute.jit
    def add_own(
        self, smem: Int32, in_range: Int32, acc_q: cute.Tensor, acc_k: cute.Tensor,
        acc: cute.Tensor, dG: cute.Tensor,
    ) -> None:  # fmt: skip
        """Add the other products of the sub-chunk with itself: the products by halves and, to col,
        the product of the rows in range.
        """
        if in_range < SUB_CHUNK:
            # The compiler would load P before the loops, or interleave the loops, and spill.
            for pair in cutlass.range_constexpr(PAIRS):
                for level in cutlass.range(LEVELS, unroll=1):
                    cute.arch.sync_warp()
                    self._own_rows(smem, level, in_range, pair, acc_q, acc_k, dG)
                count = LEVELS + 1 if self.in_one_product else LEVELS
                for level in cutlass.range(count, unroll=1):
                    cute.arch.sync_warp()
                    self._own_columns(smem, level, in_range, pair, acc, dG)

    def _own_rows(
        self, smem: Int32, level: Any, in_range: Any, pair: int, acc_q: cute.Tensor,
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
        self, smem: Int32, level: Any, in_range: Any, pair: int, acc: cute.Tensor, dG: cute.Tensor
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
        """Return the sum of the products of left and right operands. A left operand is 4
        registers."""
        result: list[Any] = []
        for i in range(2):
            product: Any = [Float32(0.0)] * 4
            for n, operand in enumerate(right):
                a = left[4 * n : 4 * n + 4]
                product = mma(self.dtype, product, a, operand[2 * i : 2 * i + 2])
            result += product
        return result

    def _add_own(
        self, smem: Int32, acc: cute.Tensor, dG: cute.Tensor, pair: int, product: list[Any],
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
        """Set a left operand's elements to 0 if their tokens are in different groups."""
        r, c = row_and_part()
        shift = self._shift(level)
        result = []
        for n, x in enumerate(left):
            same = ((r + 8 * (n % 2)) >> shift) == ((8 * (n // 2) + 2 * c) >> shift)
            result.append(cutlass.select_(same, x, Int32(0)))
        return result

    def _takes_part(self, level: Any, token: Int32, in_range: Any, later: bool) -> Any:
        """Return whether a token of the sub-chunk is in the later (or earlier) half of its
        group."""
        inside = token < in_range
        is_later = ((token >> (self._shift(level) - 1)) & 1) == 1
        of_level = (is_later & (token >= in_range)) if later else Boolean(~is_later)
        return cutlass.select_(level == ONE_PRODUCT, inside, of_level)

    def _own_decay(
        self, smem: Int32, level: Any, in_range: Any, token: Int32, channel: Int32, count: int,
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
            y = cutlass.select_(level == ONE_PRODUCT, Float32(-self.shift), y)
            decay = exp2(x - y if later else y - x)
            result.append(Float32(cutlass.select_(takes_part, decay, Float32(0.0))))
        return result

    def _own_operand(
        self, smem: Int32, name: str, level: Any, in_range: Any, pair: int, *, later: bool
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
        self, smem: Int32, level: Any, in_range: Any, pair: int, *, later: bool
    ) -> list[Any]:
        """Return the factors of the thread's accumulators:
        `[2 groups of 8 channels][2 rows][2 neighbouring channels]`."""
        r, _ = row_and_part()
        factors: list[Any] = []
        for i in range(2):
            channel = self.memory.accumulator_channel(pair, i)
            for half in range(2):
                token = r + 8 * half
                factors += self._own_decay(smem, level, in_range, token, channel, 2, later)
        return factors
