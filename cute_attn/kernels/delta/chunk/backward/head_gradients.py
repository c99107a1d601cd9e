"""The Gated Delta Net's gradients of q, k, g and beta, from the states of all chunks and their
gradients.

This is the last kernel of the backward, as `gradients` is KDA's, and has its CTAs, warps and
products over V. With one decay for all channels of a head, the decays multiply the 64 by 64
matrices dAqk and dLhat, and q and k are operands as they are:

    load       q, k and their inverse norms, once
    for each value head of the group:
      gates      G, by the first warp (`head_gate_gradients`)
      for each 64 columns of V:
        state      do S^T, dr S^T, v' dS'^T; dAqk = do v'^T, dLhat = -dr v'^T; sum_V S dS'
      load       the next head's first columns of V
      beta       dbeta, from the diagonal of dr v'^T; rows of dv whose beta is nearly 0
      scores     dAqk and dLhat below the diagonal times exp2(G_i - G_j) and the norms, in 16 bits
      products   dq_i  =  scale exp2(G_i) (do S^T)_i    + sum_j<i  dAqk_ij k_j
                 row_i = -exp2(G_i) (dr S^T)_i          + sum_j<i  dLhat_ij k_j
                 col_j = exp2(G_e - G_j) (v' dS'^T)_j   + sum_i>j  (dAqk_ij q_i + dLhat_ij k_i)
      rows       q dq, k row and k col, summed over the channels of a warp
      gates      dg, by the first warp; the CTAs of a cluster exchange parts of dg
    norms      dq and dk, summed over the group

dq, and row and col of dk, have the factor of their row's inverse norm, which the norms' gradients
need anyway. With norms in the kernel, rows of q and k are first multiplied by a power of two, so
that the inverse norms are in [1, 2) and their products stay in range of 16 bits.

In dG = q dq + k row - k col a term i, j cancels between row i and column j wherever both tokens are
before or after a gate. Both products have the same rounded dAqk_ij, q_i and k_j, so the terms
cancel but for rounding in float32. No sum of gates overflows, because only differences are
exponents, and a large gate costs later tokens no digits (`per_head.head_gates`).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....common.arguments import fake_contiguous, fake_strided
from ....common.ptx.async_copy import prefetch_bulk
from ....common.ptx.compiler import keep_branch
from ....common.ptx.convert import pack, pack_all, unpack, unpack_all
from ....common.ptx.math import exp2
from ....common.ptx.memory import load_shared, prefetch_line, store_shared
from ..chunks import row_offset, rows_of
from ..per_head.head_gates import decay_between
from ..spec import CHUNK, HeadGradientsSpec
from ..sub_chunks import SUB_CHUNK, SUB_CHUNKS, row_and_part
from ..tiles import (
    LINE_BYTES,
    left_fragment,
    left_fragment_of_columns,
    thread_and_warp,
    tile_offset,
)
from .chunk_gradients import Arguments, ChunkGradients
from .head_gate_gradients import HALF, HeadGateGradients
from .layout import PAIRS, SUMS, TILE_V, HeadGradientMemory

EXPONENT = 0xFF << 23  # of a float32


class GatedDeltaGradients(ChunkGradients):
    """The kernel for one HeadGradientsSpec; see the module's docstring."""

    memory: HeadGradientMemory
    gates: HeadGateGradients
    prefetches = True

    spec: HeadGradientsSpec

    def __init__(self, spec: HeadGradientsSpec):
        memory = HeadGradientMemory(spec)
        super().__init__(spec, memory, HeadGateGradients(spec, memory))

    def fake_gates(self, shape: tuple[Any, ...]) -> cute.Tensor:
        return fake_strided(self.gate_dtype, shape)

    def fake_bias(self, heads: Any) -> cute.Tensor:
        return fake_contiguous(Float32, (heads,))

    def fake_bias_parts(self, slots: Any, heads: Any) -> cute.Tensor:
        return fake_contiguous(Float32, (slots, self.spec.cluster, heads), small=True)

    @property
    def meets(self) -> bool:
        return self.spec.cluster > 1

    def arm(self, barriers: Any) -> None:
        if self.meets:
            for stage in range(2):
                barriers.expect("gates_full", stage, HALF * 4)

    # -- a value head -------------------------------------------------------------------------

    @cute.jit
    def value_head(
        self, a: Arguments, place: Any, slot: Int32, first_head: Int32, n: Int32, group: Int32,
        smem: Int32, barriers: Any, cta: Int32, dq_sum: cute.Tensor, dk_sum: cute.Tensor,
    ) -> None:  # fmt: skip
        """Store the gradients of the group's n-th value head, and add its gradients of q and k to
        the sums."""
        thread, warp = thread_and_warp()
        head = first_head + n
        own_beta = self.load_beta(a, place, head, smem, thread)
        if warp == 0:
            self.gates.store_sums(smem, a, place, head)
        if cutlass.const_expr(not self.spec.grouped):
            dq_sum.fill(0.0)
            dk_sum.fill(0.0)
        acc_q = cute.make_rmem_tensor((SUMS,), Float32)
        acc_k = cute.make_rmem_tensor((SUMS,), Float32)
        acc = cute.make_rmem_tensor((SUMS,), Float32)
        if cutlass.const_expr(self.spec.l2norm):
            if n == 0:
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_threads()
                self.normalise_exponents(smem)
        self.state_products(
            own_beta, a, place, slot, first_head, n, group, smem, barriers, cta, acc_q, acc_k, acc
        )
        self.decay_products(smem, acc_q, acc_k, acc, a.scale)
        k = self.own_rows(smem, "k")
        self.sum_rows(smem, "of_end", self.products_of_rows([(k, acc, 1.0)]))
        of_scores = cute.make_rmem_tensor((SUMS,), Float32)
        of_scores.fill(0.0)
        cute.arch.sync_threads()  # dAqk and dLhat are stored
        self.add_scores(smem, acc_q, acc_k, of_scores)
        q = self.own_rows(smem, "q")
        terms = [(q, acc_q, 1.0), (k, acc_k, 1.0), (k, of_scores, -1.0)]
        self.sum_rows(smem, "of_tokens", self.products_of_rows(terms))
        self.add_own_scores(smem, q, k, acc_q, acc_k)
        for i in cutlass.range_constexpr(SUMS):
            acc_k[i] = acc_k[i] + (acc[i] + of_scores[i])
        self.add_to_sum(smem, "dq", n, dq_sum, acc_q)
        self.add_to_sum(smem, "dk", n, dk_sum, acc_k)
        if cutlass.const_expr(self.spec.l2norm):
            if n + 1 == group:
                self.take_sums(smem, dq_sum, dk_sum)
                self.sum_along(smem, barriers, cta, dq_sum, dk_sum)
        cute.arch.sync_threads()
        if warp == 0:
            self.gates.store(smem, barriers, a, place, slot, head, n, group, cta)

    # -- loads ------------------------------------------------------------------------------

    @cute.jit
    def start_copy(
        self, smem: Int32, barriers: Any, a: Arguments, place: Any, slot: Int32, head: Int32,
        tile: Int32, cta: Int32,
    ) -> None:  # fmt: skip
        """Start the copies of a head's 64 columns of V, and bring to L2 what is copied next."""
        ChunkGradients.start_copy(self, smem, barriers, a, place, slot, head, tile, cta)
        if cutlass.const_expr(self.bulk):
            if tile + 1 < self.tiles_v:
                self.prefetch(a, place, slot, head, tile + 1, cta)
            elif cutlass.const_expr(self.spec.grouped):
                if head + 1 < a.do.shape[2]:
                    self.prefetch(a, place, slot, head + 1, Int32(0), cta)

    @cute.jit
    def prefetch(
        self, a: Arguments, place: Any, slot: Int32, head: Int32, tile: Int32, cta: Int32
    ) -> None:
        """Bring what `start_copy` copies to L2. The CTAs of a cluster share the rows."""
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            for x, _, offset, nbytes in self.tiles_of(a, tile, cta):
                prefetch_bulk(self.slot_address(x, slot, head) + Int64(offset), nbytes)
        row = thread & (CHUNK - 1)
        part = thread >> 6
        for n, x in ((1, a.do), (2, a.dv)):
            own = True if self.spec.cluster == 1 else cta == n - 1
            rows = rows_of(x, place, head)
            if own & (part == n) & (row < place.length):
                at = rows.start + row_offset(row, rows.pitch)
                prefetch_line(at + Int64(tile * (2 * TILE_V)))

    # -- norms --------------------------------------------------------------------------------

    @cute.jit
    def normalise_exponents(self, smem: Int32) -> None:
        """Multiply rows of q and k by the power of two that brings their inverse norm to [1, 2).
        The inverse norms stay as they are: `norm_parts` gives the factor again."""
        thread, _, _ = cute.arch.thread_idx()
        rows_of_pass = self.memory.num_threads // 8
        for i in cutlass.range_constexpr(CHUNK // rows_of_pass):
            row = (thread >> 3) + i * rows_of_pass
            for name in ("q", "k"):
                power, _ = self.norm_parts(smem, name, row)
                for n in cutlass.range_constexpr(self.memory.channels // 64):
                    at = smem + self.memory[name] + tile_offset(row, 64 * n + 8 * (thread & 7))
                    values = unpack_all(self.dtype, load_shared(Int32, at, 4))
                    store_shared(Int32, at, pack_all(self.dtype, [x * power for x in values]))

    def norm_parts(self, smem: Int32, name: str, row: Any) -> tuple[Any, Any]:
        """A row's inverse norm as a power of two and a factor in [1, 2)."""
        if not self.spec.l2norm:
            return Float32(1.0), Float32(1.0)
        bits = self.memory.of_token(smem, f"inverse_norm_{name}", row).bitcast(Int32)
        one = Int32(127 << 23)
        power = (bits & Int32(EXPONENT)).bitcast(Float32)
        return power, ((bits & Int32(~EXPONENT)) | one).bitcast(Float32)

    def row_norm(self, smem: Int32, name: str, row: Any) -> Any:
        return self.norm_parts(smem, name, row)[1]

    @cute.jit
    def norm_gradients(self, smem: Int32, barriers: Any, dq: cute.Tensor, dk: cute.Tensor) -> None:
        along = self.sums_along(smem, barriers)
        for which, name, x in ((0, "q", dq), (1, "k", dk)):
            for half in cutlass.range_constexpr(2):
                row = self.memory.rows()[half]
                power, norm = self.norm_parts(smem, name, row)
                factor = -(along[2 * which + half] * norm) * norm
                for n in cutlass.range_constexpr(2 * PAIRS):
                    channel = self.memory.accumulator_channel(n // 2, n % 2)
                    for e, y in enumerate(self.memory.load_raw(smem, name, row, channel)):
                        at = 4 * n + 2 * half + e
                        x[at] = power * cute.math.fma(y, factor, x[at])

    # -- scores -------------------------------------------------------------------------------

    @cute.jit
    def store_all_scores(
        self, smem: Int32, daqk: cute.Tensor, dlower: cute.Tensor, scale: Float32
    ) -> None:
        """Store dAqk and dLhat below their diagonals, with decays, norms and the factors m."""
        b, part = self.memory.warp_place()
        r, c = row_and_part()
        gates, of_q, of_k = [], [], []
        for row in self.memory.rows():
            gates.append(self.memory.gate(smem, row))
            of_q.append(self.row_norm(smem, "q", row) * scale)
            of_k.append(-self.row_norm(smem, "k", row))
        for n in cutlass.range_constexpr(self.columns // 16):
            first = part * self.columns + 16 * n
            if first <= b * SUB_CHUNK:
                for i in cutlass.range_constexpr(2):
                    column = first + 8 * i + 2 * c
                    m = load_shared(Float32, smem + self.memory["m"] + (column << 2), 2)
                    if cutlass.const_expr(self.spec.l2norm):
                        m = [x * self.row_norm(smem, "k", column + e) for e, x in enumerate(m)]
                    both = [
                        load_shared(Float32, smem + self.memory[name] + (column << 2), 2)
                        for name in ("coarse", "fine")
                    ]
                    earlier = list(zip(*both, strict=True))
                    at = tile_offset(b * SUB_CHUNK + r, column)
                    for half in cutlass.range_constexpr(2):
                        row = b * SUB_CHUNK + r + 8 * half
                        e = 8 * n + 4 * i + 2 * half
                        values: list[list[Any]] = [[], []]
                        for x in cutlass.range_constexpr(2):
                            decay = decay_between(gates[half], earlier[x]) * m[x]
                            below = column + x < row
                            pair = (daqk[e + x] * of_q[half], dlower[e + x] * of_k[half])
                            for k, y in enumerate(pair):
                                values[k].append(
                                    Float32(cutlass.select_(below, y * decay, Float32(0.0)))
                                )
                        for name, row_values in zip(("daqk", "dlower"), values, strict=True):
                            address = smem + self.memory[name] + at + half * 8 * LINE_BYTES
                            store_shared(Int32, address, [pack(self.dtype, *row_values)])

    @cute.jit
    def decay_products(
        self, smem: Int32, acc_q: cute.Tensor, acc_k: cute.Tensor, acc: cute.Tensor, scale: Float32
    ) -> None:
        """Multiply the products with the state by the decays from the chunk's start, and the
        products with the state's gradient by the decays to its end; and by their other factors."""
        end = self.memory.gate(smem, CHUNK - 1)
        for half in cutlass.range_constexpr(2):
            row = self.memory.rows()[half]
            gate = self.memory.gate(smem, row)
            decay = exp2(gate[0] + gate[1])
            m = self.memory.of_token(smem, "m", row)
            of_q, of_k = (self.row_norm(smem, name, row) for name in ("q", "k"))
            factors = (
                (acc_q, decay * of_q), (acc_k, decay * -of_k),
                (acc, decay_between(end, gate) * (of_k * m)),
            )  # fmt: skip
            for x, factor in factors:
                for n in cutlass.range_constexpr(2 * PAIRS):
                    for e in cutlass.range_constexpr(2):
                        at = 4 * n + 2 * half + e
                        x[at] = x[at] * factor
                        if cutlass.const_expr(x is acc_q):
                            x[at] = x[at] * scale

    @cute.jit
    def add_scores(
        self, smem: Int32, acc_q: cute.Tensor, acc_k: cute.Tensor, acc: cute.Tensor
    ) -> None:
        """Add the products of dAqk and dLhat with k, and of their transposes with q and k."""
        b, _ = self.memory.warp_place()
        daqk, dlower = (smem + self.memory[name] for name in ("daqk", "dlower"))
        q, k = (smem + self.memory[name] for name in ("q", "k"))
        for j in cutlass.range(b + 1, unroll=1):
            of_q, of_k = (left_fragment(x, b * SUB_CHUNK, j) for x in (daqk, dlower))
            for pair in cutlass.range_constexpr(PAIRS):
                columns = self.memory.operands(k, j, pair)
                self.add_product(acc_q, 8 * pair, of_q, columns)
                self.add_product(acc_k, 8 * pair, of_k, columns)
        for i in cutlass.range(b, SUB_CHUNKS, unroll=1):
            for matrix, rows in ((daqk, q), (dlower, k)):
                columns = left_fragment_of_columns(matrix, b * SUB_CHUNK, i)
                for pair in cutlass.range_constexpr(PAIRS):
                    operand = self.memory.operands(rows, i, pair)
                    self.add_product(acc, 8 * pair, columns, operand)

    @cute.jit
    def add_own_scores(
        self, smem: Int32, q: Any, k: Any, acc_q: cute.Tensor, acc_k: cute.Tensor
    ) -> None:
        """Add the terms i == j of dAqk."""
        for half in cutlass.range_constexpr(2):
            row = self.memory.rows()[half]
            own = self.memory.of_token(smem, "own_score", row)
            own = own * (self.row_norm(smem, "q", row) * self.row_norm(smem, "k", row))
            for n in cutlass.range_constexpr(2 * PAIRS):
                of_q, of_k = (unpack(self.dtype, x[half][n]) for x in (q, k))
                for e in cutlass.range_constexpr(2):
                    at = 4 * n + 2 * half + e
                    acc_q[at] = cute.math.fma(own, of_k[e], acc_q[at])
                    acc_k[at] = cute.math.fma(own, of_q[e], acc_k[at])

    # -- sums over channels -------------------------------------------------------------------

    def own_rows(self, smem: Int32, name: str) -> list[list[Any]]:
        """Load the thread's channels of its two rows of q or k, two neighbours in a register."""
        channels = [self.memory.accumulator_channel(n // 2, n % 2) for n in range(2 * PAIRS)]
        start = smem + self.memory[name]
        return [
            [load_shared(Int32, start + tile_offset(row, channel))[0] for channel in channels]
            for row in self.memory.rows()
        ]

    def products_of_rows(self, terms: list[tuple[Any, cute.Tensor, float]]) -> list[Any]:
        """For each of the thread's two rows, the sum over its channels of products of `own_rows`
        with accumulators, each with a sign."""
        sums = []
        for half in range(2):
            total = Float32(0.0)
            for rows, x, sign in terms:
                for n in range(2 * PAIRS):
                    for e, y in enumerate(unpack(self.dtype, rows[half][n])):
                        value = x[4 * n + 2 * half + e]
                        total = cute.math.fma(y, value if sign > 0 else -value, total)
            sums.append(total)
        return sums

    @cute.jit
    def sum_rows(self, smem: Int32, name: str, sums: Any) -> None:
        """Store two rows' sums over the warp's channels."""
        _, part = self.memory.warp_place()
        _, c = row_and_part()
        for half in cutlass.range_constexpr(2):
            total = sums[half]
            for bit in cutlass.range_constexpr(2):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << bit)
            if c == 0:
                row = self.memory.rows()[half]
                self.store_of_token(smem, name, part * CHUNK + row, total)

    @cute.jit
    def store_of_state(self, smem: Int32, of_state: cute.Tensor) -> None:
        """Store the warp's sum of S dS'."""
        _, warp = thread_and_warp()
        total = Float32(0.0)
        for n in cutlass.range_constexpr(2 * PAIRS):
            total = total + of_state[n]
        for bit in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << bit)
        if cute.arch.lane_idx() == 0:
            self.store_of_token(smem, "of_state", warp, total)

    # -- sums over the group ------------------------------------------------------------------

    def _sums_at(self, smem: Int32, name: str) -> list[tuple[Any, int]]:
        """The addresses of a thread's sums in shared memory, four by four."""
        thread, _, _ = cute.arch.thread_idx()
        threads = self.num_threads
        first = smem + self.memory["sums"] + (SUMS * threads * 4 if name == "dk" else 0)
        return [(first + (n * threads + thread * 4) * 4, n) for n in range(0, SUMS, 4)]

    @cute.jit
    def add_to_sum(
        self, smem: Int32, name: str, n: Int32, total: cute.Tensor, values: cute.Tensor
    ) -> None:
        """Add values to a sum. With `n` 0 in shared memory, the sum starts."""
        if cutlass.const_expr(not self.spec.keeps_sums):
            for i in cutlass.range_constexpr(SUMS):
                total[i] = total[i] + values[i]
        else:
            for at, i in self._sums_at(smem, name):
                new = [values[i + e] for e in range(4)]
                if n > 0:
                    keep_branch()
                    old = load_shared(Float32, at, 4)
                    new = [x + y for x, y in zip(old, new, strict=True)]
                store_shared(Float32, at, new)

    def take_sums(self, smem: Int32, dq: cute.Tensor, dk: cute.Tensor) -> None:
        if not self.spec.keeps_sums:
            return
        for name, total in (("dq", dq), ("dk", dk)):
            for at, i in self._sums_at(smem, name):
                for e, x in enumerate(load_shared(Float32, at, 4)):
                    total[i + e] = x
