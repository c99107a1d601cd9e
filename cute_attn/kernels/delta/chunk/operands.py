"""q and k of a chunk in shared memory, and their norms."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.ptx.async_copy import copy_async
from ...common.ptx.compiler import keep_branch
from ...common.ptx.convert import pack_all
from ...common.ptx.math import reciprocal_sqrt
from ...common.ptx.memory import load_shared, store_shared
from ...common.ptx.mma import mma
from ..spec import L2NORM_EPSILON
from .chunks import row_offset, rows_of
from .spec import CHUNK
from .sub_chunks import NUM_THREADS, ChunkMemory, parity, row_and_part
from .tiles import UNIT_BYTES

# With l2norm, rows longer than LONG are first multiplied by SHORTENED. The shifted product of two
# rows that are not LONG stays below 2^120. For shortened rows the bound holds up to a length of
# 2^64.
LONG, SHORTENED = 2.0**30, 2.0**-34


class Operands:
    """Copies q and k, and computes their norms. All methods run on the device."""

    def __init__(self, memory: ChunkMemory):
        self.memory, self.dtype = memory, memory.dtype

    def start_copies(self, q: Any, k: Any, place: Any, head: Any, smem: Any) -> None:
        """Start the cp.async of the chunk's rows of q and k, as one group."""
        for name, x in (("q", q), ("k", k)):
            self.start_copy(rows_of(x, place, head), smem + self.memory[name], place.length)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def start_copy(self, rows: Any, shared: Int32, length: Int32) -> None:
        """Start the cp.async of the chunk's rows of q or k; rows past the chunk's end become 0."""
        thread, _, _ = cute.arch.thread_idx()
        units = self.memory.qk_row // UNIT_BYTES
        step = NUM_THREADS // units
        assert step % 4 == 0, "a thread's rows have the same parity"
        row, unit = thread // units, thread % units
        place = shared + row * self.memory.qk_row + ((unit ^ (parity(row) << 2)) << 4)
        source = rows.start + Int64(unit * UNIT_BYTES)
        for i in cutlass.range_constexpr(CHUNK // step):
            at = row + i * step
            present = at < length
            copy_async(
                place + i * (step * self.memory.qk_row),
                source + row_offset(cutlass.select_(present, at, Int32(0)), rows.pitch),
                present,
            )

    @cute.jit
    def norms(
        self,
        smem: Int32,
        scale: Float32,
        results: cute.Tensor | None = None,
        is_stored: cutlass.Boolean | bool = True,
    ) -> None:
        """Store scale q . k for 8 rows of each warp, and with l2norm the inverse norms of q and k.
        With `scales_keys`, the buffer `of_columns` must have these rows' factors m, which multiply
        q . k. With l2norm, the inverse norms of k then multiply the factors, in place.

        The left operand has q in rows 0 to 7 and k in rows 8 to 15; the right operand is k, then q.
        Only the diagonals of the results are used.

        Args:
            results: float32 [2 * 64] in global memory, which gets the inverse norms of the rows of
                q as given, then of k, if `is_stored`. Rows past the chunk's end are 0 here.
        """
        thread, _, _ = cute.arch.thread_idx()
        r, c = row_and_part()
        row = (thread >> 5) * 8 + r
        at = smem + self.memory["q"] + row * self.memory.qk_row + c * 16
        by_k, by_q = self._products_of_rows(at, parity(row) << 6)
        # Factors from a shortened row's length to the original row's length.
        longer_q, longer_k = Float32(1.0), Float32(1.0)
        if cutlass.const_expr(self.memory.l2norm and self.memory.in_one_product):
            q_square, k_square = (
                Float32(cutlass.select_((r & 1) == 1, x[1], x[0])) for x in (by_q, by_k[2:])
            )
            is_long = cute.arch.fmax(q_square, k_square) > LONG * LONG
            if cute.arch.vote_any_sync((c == r >> 1) & is_long):
                keep_branch()
                longer_q = self._shorten(at, parity(row) << 6, q_square)
                longer_k = self._shorten(
                    at + (self.memory["k"] - self.memory["q"]), parity(row) << 6, k_square
                )
        if c == r >> 1:
            odd = (r & 1) == 1
            dot = Float32(cutlass.select_(odd, by_k[1], by_k[0]))
            place = smem + row * 4
            m = Float32(1.0)
            if cutlass.const_expr(self.memory.scales_keys):
                m = self.memory.of_token(smem, "of_columns", row)
                dot = dot * m
            if cutlass.const_expr(self.memory.l2norm):
                of_q = self._inverse_norm(cutlass.select_(odd, by_q[1], by_q[0]))
                of_k = self._inverse_norm(cutlass.select_(odd, by_k[3], by_k[2]))
                dot = (dot * of_q) * of_k
                if cutlass.const_expr(results is not None):
                    if is_stored:
                        results[row], results[CHUNK + row] = of_q, of_k
                if cutlass.const_expr(self.memory.in_one_product):
                    of_q, of_k = of_q * longer_q, of_k * longer_k
                store_shared(Float32, place + self.memory["inverse_norm_q"], [of_q * scale])
                store_shared(Float32, place + self.memory["inverse_norm_k"], [of_k])
                if cutlass.const_expr(self.memory.scales_keys):
                    store_shared(Float32, place + self.memory["of_columns"], [m * of_k])
            store_shared(Float32, place + self.memory["own_score"], [dot * scale])

    def _shorten(self, at: Any, swap: Any, square: Any) -> Any:
        """Multiply the thread's row in shared memory by SHORTENED if the row is long, and return
        the inverse of the factor. Of the row's four lanes, lane r // 2 has the sum of squares in
        `square`.
        """
        lane = cute.arch.lane_idx()
        is_long = cute.arch.shuffle_sync(square, (lane & ~3) + (lane >> 3)) > LONG * LONG
        factor = cutlass.select_(is_long, Float32(SHORTENED), Float32(1.0))
        for g in range(self.memory.groups):
            address = at + ((g << 6) ^ swap)
            x = self.memory.load_elements(address)
            store_shared(Int32, address, pack_all(self.dtype, [y * factor for y in x]))
        return Float32(cutlass.select_(is_long, Float32(1.0 / SHORTENED), Float32(1.0)))

    def _products_of_rows(self, at: Any, swap: Any) -> tuple[list[Any], list[Any]]:
        by_k, by_q = [Float32(0.0)] * 4, [Float32(0.0)] * 4
        for g in range(self.memory.groups):
            address = at + ((g << 6) ^ swap)
            q = load_shared(Int32, address, 4)
            k = load_shared(Int32, address + (self.memory["k"] - self.memory["q"]), 4)
            for t in (0, 2):
                a = (q[t], k[t], q[t + 1], k[t + 1])
                by_k = list(mma(self.dtype, by_k, a, k[t : t + 2]))
                if self.memory.l2norm:
                    by_q = list(mma(self.dtype, by_q, a, q[t : t + 2]))
        return by_k, by_q

    def _inverse_norm(self, square: Any) -> Any:
        return reciprocal_sqrt(Float32(square) + L2NORM_EPSILON)
