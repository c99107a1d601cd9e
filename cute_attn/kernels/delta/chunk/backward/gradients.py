"""KDA's gradients of q, k, g and beta, from the states of all chunks and their gradients.

This is the last kernel of the backward. A chunk needs nothing from other chunks.

    CTA (half of K, head of q and k, chunk), 8 warps; warp 4 n + b: rows of sub-chunk b, the n-th 32
    channels. The CTAs of both halves are a cluster.
      load       q, k and their inverse norms, once
      for each value head of the group:
        gates      the sums of gates within sub-chunks
        for each 64 columns of V:
          state      do S^T, dr S^T, v' dS'^T; dAqk = do v'^T, dLhat = -dr v'^T; sum_V S dS'
        beta       dbeta, from the diagonal of dr v'^T; rows of dv whose beta is nearly 0, once
                   both CTAs have read them
        products   the products within the chunk (`decayed_products`)
        dG         q dq + k row - k col to shared memory
        gates      dg, and sums of the gradients of A_log and dt_bias; before the last head's, the
                   CTAs exchange q dq and k dk
      norms      dq and dk, summed over the group

Both CTAs compute dAqk and dLhat: exchanging these matrices would take longer. A CTA has all of K at
K = 64, and also at K = 128, with 16 warps, where the architecture has no clusters.

S is the state at the chunk's start, and dS' the gradient of the state after the chunk. The
corrections are v' = Akk Diag(beta) r. dr is the gradient of r, and also the gradient of v
(docs/kernels/kda_backward.md). v_new is v' without its factors m (see `prepare`), which multiply
the results of the products over V.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....common.arguments import fake_contiguous, fake_rows
from ....common.ptx.compiler import keep_branch
from ....common.ptx.convert import pack
from ....common.ptx.math import exp2
from ....common.ptx.memory import load_shared, store_shared
from ..spec import GradientsSpec
from ..sub_chunks import SUB_CHUNK, row_and_part
from ..tiles import LINE_BYTES, tile_offset
from .chunk_gradients import Arguments, ChunkGradients
from .decayed_products import DecayedProducts
from .gate_gradients import GateGradients
from .layout import PAIRS, SUMS, GradientMemory


class KdaGradients(ChunkGradients):
    """The kernel for one GradientsSpec; see the module's docstring."""

    memory: GradientMemory
    gates: GateGradients

    def __init__(self, spec: GradientsSpec):
        memory = GradientMemory(spec)
        of_channels = replace(spec, head_dim_k=memory.channels, cluster=1)
        super().__init__(spec, memory, GateGradients(of_channels, memory))
        self.products = DecayedProducts(memory, self.gates)

    def fake_gates(self, shape: tuple[Any, ...]) -> cute.Tensor:
        return fake_rows(self.gate_dtype, (*shape, self.spec.head_dim_k))

    def fake_bias(self, heads: Any) -> cute.Tensor:
        return fake_contiguous(Float32, (heads, self.spec.head_dim_k), 16)

    def fake_bias_parts(self, slots: Any, heads: Any) -> cute.Tensor:
        return fake_contiguous(Float32, (slots, heads, self.spec.head_dim_k), 16, small=True)

    def of_channels(self, a: Arguments, cta: Int32) -> Arguments:
        """The arguments, with dt_bias from the CTA's first channel on."""
        if a.dt_bias is None:
            return a
        return a._replace(dt_bias=cute.domain_offset((0, cta * self.channels), a.dt_bias))

    @cute.jit
    def value_head(
        self, a: Arguments, place: Any, slot: Int32, first_head: Int32, n: Int32, group: Int32,
        smem: Int32, barriers: Any, cta: Int32, dq_sum: cute.Tensor, dk_sum: cute.Tensor,
    ) -> None:  # fmt: skip
        """Store the gradients of the group's n-th value head, and add its gradients of q and k to
        the sums."""
        thread, _, _ = cute.arch.thread_idx()
        head = first_head + n
        own_beta = self.load_beta(a, place, head, smem, thread)
        self.gates.store_sums(
            smem,
            self.rows(a.g, place, head, cta),
            place.length,
            a.A_log,
            a.dt_bias,
            head,
            a.lower_bound,
        )
        acc_q = cute.make_rmem_tensor((SUMS,), Float32)
        acc_k = cute.make_rmem_tensor((SUMS,), Float32)
        acc = cute.make_rmem_tensor((SUMS,), Float32)
        self.state_products(
            own_beta, a, place, slot, first_head, n, group, smem, barriers, cta, acc_q, acc_k, acc
        )
        dG = cute.make_rmem_tensor((SUMS,), Float32)
        self.from_start(smem, acc_q, acc_k, a.scale)
        self.products.store_operands(smem)
        cute.arch.sync_threads()
        self.sum_into_state(smem, acc)

        b, _ = self.memory.warp_place()
        aside = smem + self.memory["aside"]
        self.memory.put_aside(aside, acc)
        self.products.add_rows(smem, acc_q, acc_k, dG)
        self.memory.take_back(aside, acc)
        self.memory.put_aside(aside, dG)
        self.products.add_columns(smem, acc)
        self.memory.take_back(aside, dG)
        self.products.finish_columns(smem, acc, dG)
        in_range = self.gates.rows_in_range(smem, b)
        self.products.add_own(smem, in_range, acc_q, acc_k, acc, dG)
        raw = self.gates.inputs.load(self.rows(a.g, place, head, cta), place.length)
        cute.arch.sync_threads()  # all warps have read P and the operands
        if cutlass.const_expr(self.spec.grouped):
            if n + 1 < group:
                if cutlass.const_expr(self.bulk):
                    cute.arch.fence_view_async_shared()  # the stage held operands
                    cute.arch.sync_threads()
                self.start_copy(smem, barriers, a, place, slot, head + 1, Int32(0), cta)
        self.finish(smem, acc_q, acc_k, acc, dG, dq_sum, dk_sum)
        if cutlass.const_expr(self.spec.l2norm):
            if n + 1 == group:
                self.sum_along(smem, barriers, cta, dq_sum, dk_sum)
        of_q = smem + self.memory["stage"]
        of_k = of_q + self.num_threads * SUMS * 4
        # With groups, the stage may be receiving the next head's tiles.
        if cutlass.const_expr(not self.spec.grouped):
            self.memory.put_aside(of_q, dq_sum)
            self.memory.put_aside(of_k, dk_sum)
        cute.arch.sync_warp()
        self.gates.store(
            smem, raw, self.rows(a.dg, place, head, cta), place.length, a.A_log, a.dt_bias, head,
            a.lower_bound,
        )  # fmt: skip
        if cutlass.const_expr(not self.spec.grouped):
            self.memory.take_back(of_q, dq_sum)
            self.memory.take_back(of_k, dk_sum)
        cute.arch.sync_threads()
        self.gates.store_partial_sums(smem, a.dA_log, a.ddt_bias, slot, head, cta)

    def finish_sums(self, smem: Int32) -> None:
        self.gates.finish_sums(smem)

    def store_all_scores(
        self, smem: Int32, daqk: cute.Tensor, dlower: cute.Tensor, scale: Float32
    ) -> None:
        self.store_scores(smem, "daqk", daqk, scale)
        self.store_scores(smem, "dlower", dlower, Float32(-1.0))

    @cute.jit
    def store_scores(self, smem: Int32, name: str, scores: cute.Tensor, factor: Float32) -> None:
        """Store dAqk or dLhat below its diagonal, with the factors m of its columns."""
        b, part = self.memory.warp_place()
        r, c = row_and_part()
        row = b * SUB_CHUNK + r
        for n in cutlass.range_constexpr(self.columns // 16):
            first = part * self.columns + 16 * n
            values = [scores[8 * n + i] for i in range(8)]
            if first == b * SUB_CHUNK:
                keep_branch()
                for i in cutlass.range_constexpr(8):
                    column, of_row = 8 * (i // 4) + 2 * c + i % 2, r + 8 * (i // 2 % 2)
                    values[i] = Float32(cutlass.select_(column < of_row, values[i], Float32(0.0)))
            if first <= b * SUB_CHUNK:
                for i in cutlass.range_constexpr(2):
                    column = first + 8 * i + 2 * c
                    m = load_shared(Float32, smem + self.memory["m"] + (column << 2), 2)
                    m = [x * factor for x in m]
                    at = smem + self.memory[name] + tile_offset(row, column)
                    for half in cutlass.range_constexpr(2):
                        e = 4 * i + 2 * half
                        x = pack(self.dtype, values[e] * m[0], values[e + 1] * m[1])
                        store_shared(Int32, at + half * 8 * LINE_BYTES, [x])

    @cute.jit
    def sum_into_state(self, smem: Int32, acc: cute.Tensor) -> None:
        """Multiply v' dS'^T by its factors m, and store the sum over the warp's rows of kg dkg,
        with k rounded as in operands."""
        b, _ = self.memory.warp_place()
        r, c = row_and_part()
        values = []
        for pair in cutlass.range_constexpr(PAIRS):
            for i in cutlass.range_constexpr(2):
                channel = self.memory.accumulator_channel(pair, i)
                total = [Float32(0.0), Float32(0.0)]
                for half in cutlass.range_constexpr(2):
                    row = self.memory.rows()[half]
                    k = self.products.load_operand(smem, "k_columns", row, channel)
                    m = self.memory.of_token(smem, "m", row)
                    for e in cutlass.range_constexpr(2):
                        n = 8 * pair + 4 * i + 2 * half + e
                        acc[n] = acc[n] * m
                        total[e] = cute.math.fma(k[e], acc[n], total[e])
                values += total
        # Lanes 4 apart have different rows. In each step, each of two lanes keeps half of the
        # channels.
        for bit in (4, 3, 2):
            upper = ((cute.arch.lane_idx() >> bit) & 1) == 1
            half = len(values) // 2
            given = [cutlass.select_(upper, values[n], values[n + half]) for n in range(half)]
            kept = [cutlass.select_(upper, values[n + half], values[n]) for n in range(half)]
            got = [cute.arch.shuffle_sync_bfly(x, offset=1 << bit) for x in given]
            values = [x + y for x, y in zip(kept, got, strict=True)]
        # r is now 4 pair + 2 i + e.
        channel = (self.memory.first_unit() << 3) + ((r >> 1) << 3) + 2 * c + (r & 1)
        (to_end,) = self.memory.load_sums(smem, "to_end", b, channel)
        (steps,) = self.memory.load_sums(smem, "steps", b, channel)
        whole = self.gates.rows_in_range(smem, b) == SUB_CHUNK
        reached = cutlass.select_(whole, Float32(-self.products.shift), steps)
        at = smem + self.memory["into_state"] + b * self.memory.p_row + (channel << 2)
        store_shared(Float32, at, [values[0] * exp2(to_end - reached)])

    @cute.jit
    def store_of_state(self, smem: Int32, of_state: cute.Tensor) -> None:
        """Store the warp's part of the sum over V of S dS'."""
        b, _ = self.memory.warp_place()
        _, c = row_and_part()
        for pair in cutlass.range_constexpr(PAIRS):
            for i in cutlass.range_constexpr(2):
                x = of_state[2 * pair + i]
                for bit in cutlass.range_constexpr(2):
                    x = x + cute.arch.shuffle_sync_bfly(x, offset=1 << bit)
                if c == 0:
                    at = self.memory.operand_channel(pair, i) << 2
                    at = smem + self.memory["of_state"] + b * self.memory.p_row + at
                    store_shared(Float32, at, [x])

    @cute.jit
    def from_start(
        self, smem: Int32, acc_q: cute.Tensor, acc_k: cute.Tensor, scale: Float32
    ) -> None:
        """Decay the products with the state to the chunk's first token, times 2^-shift, and
        multiply them by the scale and the sign."""
        for pair in cutlass.range_constexpr(PAIRS):
            for i in cutlass.range_constexpr(2):
                channel = self.memory.accumulator_channel(pair, i)
                first = self.memory.load_sums(smem, "first", 0, channel, 2)
                decay = [exp2(first[e] - self.products.shift) for e in range(2)]
                for n in cutlass.range_constexpr(4):
                    at = 8 * pair + 4 * i + n
                    acc_q[at] = (acc_q[at] * decay[n % 2]) * scale
                    acc_k[at] = acc_k[at] * -decay[n % 2]

    @cute.jit
    def finish(
        self, smem: Int32, acc_q: cute.Tensor, acc_k: cute.Tensor, acc: cute.Tensor,
        dG: cute.Tensor, dq: cute.Tensor, dk: cute.Tensor,
    ) -> None:  # fmt: skip
        """Store dG over P, and add a value head's dq and dk to the group's sums."""
        for half in cutlass.range_constexpr(2):
            row = self.memory.rows()[half]
            own = self.memory.of_token(smem, "own_score", row)
            of_q, of_k = own, own
            if cutlass.const_expr(self.spec.l2norm):
                of_q = own * self.memory.of_token(smem, "inverse_norm_q", row)
                of_k = own * self.memory.of_token(smem, "inverse_norm_k", row)
            for n in cutlass.range_constexpr(2 * PAIRS):
                channel = self.memory.accumulator_channel(n // 2, n % 2)
                q, k = (self.memory.load_raw(smem, name, row, channel) for name in ("q", "k"))
                at = 4 * n + 2 * half
                for e in cutlass.range_constexpr(2):
                    new_q = cute.math.fma(of_k, k[e], acc_q[at + e])
                    new_k = cute.math.fma(of_q, q[e], acc_k[at + e] + acc[at + e])
                    if cutlass.const_expr(self.spec.grouped):
                        new_q, new_k = dq[at + e] + new_q, dk[at + e] + new_k
                    dq[at + e], dk[at + e] = new_q, new_k
                place = smem + self.memory.p_place(row, channel)
                store_shared(Float32, place, [dG[at], dG[at + 1]])

    @cute.jit
    def norm_gradients(self, smem: Int32, barriers: Any, dq: cute.Tensor, dk: cute.Tensor) -> None:
        """Make the gradients of q and k from the gradients of normalised q and k."""
        along = self.sums_along(smem, barriers)
        for which, name, x in ((0, "q", dq), (1, "k", dk)):
            for half in cutlass.range_constexpr(2):
                row = self.memory.rows()[half]
                norm = self.memory.of_token(smem, f"inverse_norm_{name}", row)
                factor = -(along[2 * which + half] * norm) * norm
                for n in cutlass.range_constexpr(2 * PAIRS):
                    channel = self.memory.accumulator_channel(n // 2, n % 2)
                    for e, y in enumerate(self.memory.load_raw(smem, name, row, channel)):
                        at = 4 * n + 2 * half + e
                        x[at] = norm * cute.math.fma(y, factor, x[at])
