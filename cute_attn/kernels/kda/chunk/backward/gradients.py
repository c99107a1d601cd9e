"""KDA's gradients of q, k, g and beta, from the states of all chunks and their gradients.

The last kernel of the backward. It needs nothing from another chunk.

    CTA (head of q and k, chunk), 16 warps; warp 4 n + b: rows of sub-chunk b, a quarter n of the
    channels, or of dAqk's columns
      load       q and k, once; norms
      for each value head of the group:
        gates      the sums of gates within sub-chunks (warps 0 to 7)
        for each 64 columns of V:
          state      do S^T, dr S^T, v' dS'^T; dAqk = do v'^T, dLhat = -dr v'^T; sum_V S dS'
        beta       dbeta, from the diagonal of dr v'^T; rows of dv whose beta is nearly 0
        products   the products within the chunk (`decayed_products`)
        dG         q dq + k row - k col to shared memory
        gates      dg, and sums of the gradients of A_log and dt_bias (warps 0 to 7)
      norms      dq and dk, summed over the group

With S the state at the chunk's start, dS' the gradient of the state after it, v' = Akk Diag(beta) r
the corrections and dr the gradient of r, which is also that of v (docs/kernels/kda.md).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from ....common.arguments import (
    fake_contiguous,
    fake_matrices,
    fake_offsets,
    fake_rows,
    fake_strided,
)
from ....common.dtypes import DTYPE
from ....common.ptx.async_copy import copy_async
from ....common.ptx.compiler import keep_branch
from ....common.ptx.convert import pack, pack_all, unpack_all
from ....common.ptx.math import exp2, reciprocal, reciprocal_sqrt
from ....common.ptx.memory import (
    load_global,
    load_shared,
    shared_address,
    store_global,
    store_shared,
)
from ....common.ptx.mma import mma
from ...gates import SMALLEST_BETA, nonzero_beta, sigmoid
from ...spec import L2NORM_EPSILON
from ..chunks import chunk_place, num_slots, row_offset, rows_of
from ..spec import CHUNK, GradientsSpec
from ..sub_chunks import SHIFT, SUB_CHUNK, row_and_part
from ..tiles import (
    UNIT_BYTES,
    copy_rows,
    left_fragment,
    paired,
    paired_offset,
    right_fragments_of_rows,
    tile_offset,
)
from .decayed_products import DecayedProducts
from .gate_gradients import GateGradients
from .layout import NUM_THREADS, QUARTERS, TILE_V, GradientMemory

STEPS = TILE_V // 16


class KdaGradients:
    """The kernel for one GradientsSpec; see the module's docstring."""

    def __init__(self, spec: GradientsSpec):
        self.spec = spec
        self.memory = GradientMemory(spec)
        self.smem_bytes = self.memory.nbytes
        self.stage_bytes = self.memory.buffers["stage"].stage_bytes
        self.gates = GateGradients(spec, self.memory)
        self.products = DecayedProducts(self.memory, self.gates)
        self.dtype = DTYPE[spec.dtype]
        self.gate_dtype, self.beta_dtype = DTYPE[spec.gate_dtype], DTYPE[spec.beta_dtype]
        self.pairs = self.memory.pairs
        self.tiles_v = spec.head_dim_v // TILE_V

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        batch, tokens, heads, heads_qk, slots = (cute.sym_int() for _ in range(5))

        def rows(dtype: Any, heads: Any, columns: int) -> Any:
            return fake_rows(dtype, (batch, tokens, heads, columns))

        def of_qk() -> Any:
            return rows(self.dtype, heads_qk, spec.head_dim_k)

        def of_v() -> Any:
            return rows(self.dtype, heads, spec.head_dim_v)

        def states() -> Any:
            elements = spec.head_dim_k * spec.head_dim_v
            return fake_matrices((slots,), (heads, elements), self.dtype)

        has_dt_bias = spec.has_dt_bias
        return (
            of_qk(),
            of_qk(),
            rows(self.gate_dtype, heads, spec.head_dim_k),
            fake_strided(self.beta_dtype, (batch, tokens, heads)),
            fake_contiguous(Float32, (heads,)) if spec.has_A_log else None,
            fake_contiguous(Float32, (heads, spec.head_dim_k), 16) if has_dt_bias else None,
            of_v(),
            states(),
            states(),
            fake_matrices((slots,), (heads, CHUNK * spec.head_dim_v), self.dtype),
            of_v(),
            of_qk(),
            of_qk(),
            rows(self.gate_dtype, heads, spec.head_dim_k),
            fake_strided(self.beta_dtype, (batch, tokens, heads)),
            fake_contiguous(Float32, (slots, 1, heads)) if spec.has_A_log else None,
            fake_contiguous(Float32, (slots, heads, spec.head_dim_k), 16) if has_dt_bias else None,
            fake_offsets(spec.index_dtype),
            Float32(1.0),
            Float32(1.0),
            Float32(1.0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        do: cute.Tensor,
        states: cute.Tensor,
        adjoints: cute.Tensor,
        v_new: cute.Tensor,
        dv: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dg: cute.Tensor,
        dbeta: cute.Tensor,
        dA_log: cute.Tensor | None,
        ddt_bias: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        scale: Float32,
        lower_bound: Float32,
        beta_scale: Float32,
        stream: Any,
    ) -> None:
        """Compute the gradients of all chunks.

        Args:
            q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, lower_bound, beta_scale: as in
                `prepare`.
            do: [B, T, HV, V], the gradient of o.
            states, adjoints: [slots, HV, V K], the state at the start of each chunk and the
                gradient of the state after it, transposed: for each 64 rows of V, K / 64 sub-tiles.
            v_new: [slots, HV, 64 V], v' in sub-tiles of 64 columns; rows past the end are 0.
            dv: [B, T, HV, V], dr with `nonzero_beta`; becomes the gradient of v.
            dq, dk: [B, T, HQK, K], written, and so are the following.
            dg: [B, T, HV, K].
            dbeta: [B, T, HV], any strides.
            dA_log, ddt_bias: float32 [slots, 1, HV] and [slots, HV, K], the gradients of A_log and
                dt_bias are their sums over slots; or None.
        """
        slots = num_slots(g.shape[0], g.shape[1], cu_seqlens)
        self.kernel(
            q,
            k,
            g,
            beta,
            A_log,
            dt_bias,
            do,
            states,
            adjoints,
            v_new,
            dv,
            dq,
            dk,
            dg,
            dbeta,
            dA_log,
            ddt_bias,
            cu_seqlens,
            scale,
            lower_bound,
            beta_scale,
            cute.fast_divmod_create_divisor_v2(q.shape[2]),
        ).launch(
            grid=[q.shape[2] * slots, 1, 1],
            block=[NUM_THREADS, 1, 1],
            smem=self.smem_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        do: cute.Tensor,
        states: cute.Tensor,
        adjoints: cute.Tensor,
        v_new: cute.Tensor,
        dv: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dg: cute.Tensor,
        dbeta: cute.Tensor,
        dA_log: cute.Tensor | None,
        ddt_bias: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        scale: Float32,
        lower_bound: Float32,
        beta_scale: Float32,
        by_heads: cute.FastDivmodDivisorV2,
    ) -> None:
        block, _, _ = cute.arch.block_idx()
        slot, head_qk = divmod(block, by_heads)
        group = g.shape[2] // q.shape[2]
        first_head = head_qk * group
        place = chunk_place(slot, g.shape[1], cu_seqlens)
        smem = shared_address(cutlass.memory.SmemAllocator().allocate(self.smem_bytes, 1024))
        if not place.valid:
            for n in cutlass.range(group, unroll=1):
                self.gates.store_no_sums(dA_log, ddt_bias, slot, first_head + n)
        else:
            for x, name in ((q, "q"), (k, "k")):
                rows = rows_of(x, place, head_qk)
                copy_rows(
                    smem + self.memory[name], rows.start, Int64(rows.pitch), place.length,
                    self.spec.head_dim_k, NUM_THREADS,
                )  # fmt: skip
            total = group * self.tiles_v
            for n in cutlass.range_constexpr(self.spec.num_stages):
                self.start_copy(
                    smem, states, adjoints, do, dv, v_new, place, slot, first_head, Int32(n),
                    Int32(self.tiles_v),
                )  # fmt: skip
            # The last groups of copies may still be under way: all but the first.
            cute.arch.cp_async_wait_group(self.spec.num_stages - 1)
            cute.arch.sync_threads()
            if cutlass.const_expr(self.spec.l2norm):
                self.norms(smem)

            count = 8 * self.pairs
            dq_sum = cute.make_rmem_tensor((count,), Float32)
            dk_sum = cute.make_rmem_tensor((count,), Float32)
            if cutlass.const_expr(self.spec.grouped):
                shared = cutlass.const_expr(self.spec.shared_sums)
                if cutlass.const_expr(shared):
                    self.zero_sums(smem)
                else:
                    dq_sum.fill(0.0)
                    dk_sum.fill(0.0)
                for n in cutlass.range(group, unroll=1):
                    self.value_head(
                        g, beta, A_log, dt_bias, do, states, adjoints, v_new, dv, dg, dbeta,
                        dA_log, ddt_bias, place, slot, first_head, n, total, smem, scale,
                        lower_bound, beta_scale, None if shared else dq_sum,
                        None if shared else dk_sum,
                    )  # fmt: skip
                if cutlass.const_expr(shared):
                    self.load_sums(smem, dq_sum, dk_sum)
            else:
                self.value_head(
                    g, beta, A_log, dt_bias, do, states, adjoints, v_new, dv, dg, dbeta, dA_log,
                    ddt_bias, place, slot, first_head, Int32(0), total, smem, scale, lower_bound,
                    beta_scale, dq_sum, dk_sum,
                )  # fmt: skip
            if cutlass.const_expr(self.spec.l2norm):
                self.norm_gradients(smem, dq_sum, dk_sum)
            self.store_rows(dq, dq_sum, place, head_qk)
            self.store_rows(dk, dk_sum, place, head_qk)

    @cute.jit
    def value_head(
        self, g: cute.Tensor, beta: cute.Tensor, A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None, do: cute.Tensor, states: cute.Tensor, adjoints: cute.Tensor,
        v_new: cute.Tensor, dv: cute.Tensor, dg: cute.Tensor, dbeta: cute.Tensor,
        dA_log: cute.Tensor | None, ddt_bias: cute.Tensor | None, place: Any, slot: Int32,
        first_head: Int32, n: Int32, total: Int32, smem: Int32, scale: Float32,
        lower_bound: Float32, beta_scale: Float32, dq_sum: cute.Tensor | None,
        dk_sum: cute.Tensor | None,
    ) -> None:  # fmt: skip
        """Store the gradients of the group's n-th value head, and add those of q and k."""
        head = first_head + n
        self.gates.store_sums(
            smem, rows_of(g, place, head), place.length, A_log, dt_bias, head, lower_bound
        )
        cute.arch.sync_threads()
        self.gates.finish_sums(smem)

        count = 8 * self.pairs
        acc_q = cute.make_rmem_tensor((count,), Float32)
        acc_k = cute.make_rmem_tensor((count,), Float32)
        acc = cute.make_rmem_tensor((count,), Float32)
        self.state_products(
            beta, do, states, adjoints, v_new, dv, dbeta, place, slot, first_head, n, total, smem,
            scale, beta_scale, acc_q, acc_k, acc,
        )  # fmt: skip
        dG = cute.make_rmem_tensor((count,), Float32)
        self.from_start(smem, acc_q, acc_k, scale)
        self.products.store_operands(smem)
        cute.arch.sync_threads()
        self.sum_into_state(smem, acc)

        b, _ = self.memory.warp_place()
        self.products.add_rows(smem, acc_q, acc_k, dG)
        self.products.add_columns(smem, acc, dG)
        in_range = self.gates.rows_in_range(smem, b)
        self.products.add_own(smem, in_range, acc_q, acc_k, acc, dG)
        cute.arch.sync_threads()  # P and the operands have been read
        for stage in cutlass.range_constexpr(self.spec.num_stages):
            self.start_copy(
                smem, states, adjoints, do, dv, v_new, place, slot, first_head,
                (n + 1) * self.tiles_v + stage, cutlass.min((n + 2) * self.tiles_v, total),
            )  # fmt: skip
        self.finish(smem, acc_q, acc_k, acc, dG, dq_sum, dk_sum)
        cute.arch.sync_threads()
        self.gates.sum_rows(smem)
        cute.arch.sync_threads()
        self.gates.store(
            smem, rows_of(g, place, head), rows_of(dg, place, head), place.length, A_log, dt_bias,
            head, lower_bound,
        )  # fmt: skip
        cute.arch.sync_threads()
        self.gates.store_partial_sums(smem, dA_log, ddt_bias, slot, head)

    @cute.jit
    def state_products(
        self, beta: cute.Tensor, do: cute.Tensor, states: cute.Tensor, adjoints: cute.Tensor,
        v_new: cute.Tensor, dv: cute.Tensor, dbeta: cute.Tensor, place: Any, slot: Int32,
        first_head: Int32, n: Int32, total: Int32, smem: Int32, scale: Float32,
        beta_scale: Float32, acc_q: cute.Tensor, acc_k: cute.Tensor, acc: cute.Tensor,
    ) -> None:  # fmt: skip
        """Compute all products over V."""
        of_state = cute.make_rmem_tensor((2 * self.pairs,), Float32)
        scores = cute.make_rmem_tensor((16,), Float32)
        for x in (acc_q, acc_k, acc, of_state, scores):
            x.fill(0.0)
        for t in cutlass.range(self.tiles_v, unroll=1):
            index = n * self.tiles_v + t
            stage = smem + index % self.spec.num_stages * self.stage_bytes
            cute.arch.cp_async_wait_group(self.spec.num_stages - 1)
            cute.arch.sync_threads()
            self.multiply(stage, acc_q, acc_k, acc, of_state, scores)
            cute.arch.sync_threads()
            self.start_copy(
                smem, states, adjoints, do, dv, v_new, place, slot, first_head,
                index + self.spec.num_stages, (n + 1) * self.tiles_v,
            )  # fmt: skip
        head = first_head + n
        self.store_scores(smem, scores, beta, dbeta, place, head, scale, beta_scale)
        self.finish_dv(dv, beta, place, head, beta_scale)
        self.store_of_state(smem, of_state)

    # -- loads --------------------------------------------------------------------------------

    @cute.jit
    def start_copy(
        self, smem: Int32, states: cute.Tensor, adjoints: cute.Tensor, do: cute.Tensor,
        dv: cute.Tensor, v_new: cute.Tensor, place: Any, slot: Int32, first_head: Int32,
        index: Int32, total: Int32,
    ) -> None:  # fmt: skip
        """Start the copies of 64 columns of V, the index-th of the group's; one cp.async group."""
        thread, _, _ = cute.arch.thread_idx()
        stage = smem + index % self.spec.num_stages * self.stage_bytes
        if index < total:
            head, tile = first_head + index // self.tiles_v, index % self.tiles_v
            for x, name in ((states, "state"), (adjoints, "adjoint"), (v_new, "v_new")):
                nbytes = self.memory.stage.buffers[name].nbytes
                start = Int64(slot) * x.stride[0] + Int64(head) * x.stride[1]
                start = (x.iterator + start).toint() + Int64(tile * nbytes)
                for i in cutlass.range_constexpr(nbytes // (NUM_THREADS * UNIT_BYTES)):
                    at = (i * NUM_THREADS + thread) * UNIT_BYTES
                    copy_async(stage + self.memory.stage[name] + at, start + Int64(at), True)
            for x, name in ((do, "do"), (dv, "dr")):
                rows = rows_of(x, place, head)
                copy_rows(
                    stage + self.memory.stage[name], rows.start + Int64(tile * (2 * TILE_V)),
                    Int64(rows.pitch), place.length, TILE_V, NUM_THREADS,
                )  # fmt: skip
        cute.arch.cp_async_commit_group()

    @cute.jit
    def norms(self, smem: Int32) -> None:
        """Store the inverse norms of q and k, of each row by 4 lanes."""
        thread, _, _ = cute.arch.thread_idx()
        row, part = (thread >> 2) & (CHUNK - 1), thread & 3
        is_k = thread >= 4 * CHUNK
        matrix = smem + cutlass.select_(is_k, Int32(self.memory["k"]), Int32(self.memory["q"]))
        total = Float32(0.0)
        for n in cutlass.range_constexpr(self.spec.head_dim_k // 32):
            at = matrix + tile_offset(row, 8 * (4 * n + part))
            for x in unpack_all(self.dtype, load_shared(Int32, at, 4)):
                total = cute.math.fma(x, x, total)
        for bit in cutlass.range_constexpr(2):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << bit)
        if part == 0:
            at = cutlass.select_(
                is_k, Int32(self.memory["inverse_norm_k"]), Int32(self.memory["inverse_norm_q"])
            )
            store_shared(Float32, smem + at + row * 4, [reciprocal_sqrt(total + L2NORM_EPSILON)])

    # -- products with the state --------------------------------------------------------------

    @cute.jit
    def multiply(
        self, stage: Int32, acc_q: cute.Tensor, acc_k: cute.Tensor, acc: cute.Tensor,
        of_state: cute.Tensor, scores: cute.Tensor,
    ) -> None:  # fmt: skip
        """Add the products of 64 columns of V: do S^T, dr S^T and v' dS'^T; the warp's block of
        do v'^T and dr v'^T, if it has one; and for a quarter of the columns, sum_V S dS'."""
        b, quarter = self.memory.warp_place()
        for step in cutlass.range(STEPS, unroll=1):
            do, dr, v_new = (
                left_fragment(stage + self.memory.stage[name], b * SUB_CHUNK, step)
                for name in ("do", "dr", "v_new")
            )
            for pair in cutlass.range_constexpr(self.pairs):
                state = self.memory.operands(stage + self.memory.stage["state"], step, pair)
                self.add_product(acc_q, 8 * pair, do, state)
                self.add_product(acc_k, 8 * pair, dr, state)
                adjoint = self.memory.operands(stage + self.memory.stage["adjoint"], step, pair)
                self.add_product(acc, 8 * pair, v_new, adjoint)
                if b == step:
                    x, y = (unpack_all(self.dtype, z) for z in (state, adjoint))
                    for n in cutlass.range_constexpr(8):
                        i = 2 * pair + n // 4
                        of_state[i] = cute.math.fma(x[n], y[n], of_state[i])
            if quarter <= b:
                columns = right_fragments_of_rows(
                    stage + self.memory.stage["v_new"], quarter * SUB_CHUNK, step
                )
                self.add_product(scores, 0, do, columns)
                self.add_product(scores, 8, dr, columns)

    def add_product(self, acc: cute.Tensor, first: int, left: Any, right: Any) -> None:
        """acc += left right, of 16 by 16."""
        for i in range(2):
            at = first + 4 * i
            old = [acc[at + n] for n in range(4)]
            for n, x in enumerate(mma(self.dtype, old, left, right[2 * i : 2 * i + 2])):
                acc[at + n] = x

    @cute.jit
    def store_scores(
        self, smem: Int32, scores: cute.Tensor, beta: cute.Tensor, dbeta: cute.Tensor, place: Any,
        head: Int32, scale: Float32, beta_scale: Float32,
    ) -> None:  # fmt: skip
        """Store dAqk and dLhat below their diagonals, and from the diagonals the terms i == j of
        dAqk, and dbeta."""
        b, quarter = self.memory.warp_place()
        r, c = row_and_part()
        if quarter <= b:
            for name, factor, first in (("daqk", scale, 0), ("dlower", Float32(-1.0), 8)):
                for i in cutlass.range_constexpr(2):
                    for half in cutlass.range_constexpr(2):
                        row = b * SUB_CHUNK + r + 8 * half
                        column = quarter * SUB_CHUNK + 8 * i + 2 * c
                        pair = []
                        for e in cutlass.range_constexpr(2):
                            x = scores[first + 4 * i + 2 * half + e] * factor
                            pair.append(cutlass.select_(column + e < row, x, Float32(0.0)))
                        at = smem + self.memory[name] + tile_offset(row, column)
                        store_shared(Int32, at, [pack(self.dtype, *pair)])
        if quarter == b and c == r >> 1:
            odd = (r & 1) == 1
            for half in cutlass.range_constexpr(2):
                row = b * SUB_CHUNK + r + 8 * half
                n = 4 * half + 2 * half
                own = cutlass.select_(odd, scores[n + 1], scores[n]) * scale
                store_shared(Float32, smem + self.memory["own_score"] + row * 4, [Float32(own)])
                if row < place.length:
                    token = place.start + row
                    value, slope = self.beta_and_slope(
                        Float32(beta[place.batch, token, head]), beta_scale
                    )
                    inverse = reciprocal(nonzero_beta(self.dtype, value))
                    dot = Float32(cutlass.select_(odd, scores[8 + n + 1], scores[8 + n]))
                    result = ((dot * inverse) * inverse) * slope
                    dbeta[place.batch, token, head] = result.to(self.beta_dtype)

    def beta_and_slope(self, x: Any, beta_scale: Any) -> tuple[Any, Any]:
        """Return beta from its input, and its derivative."""
        if not self.spec.beta_sigmoid:
            return x, Float32(1.0)
        value = sigmoid(x)
        return beta_scale * value, beta_scale * (value * sigmoid(-x))

    @cute.jit
    def finish_dv(
        self, dv: cute.Tensor, beta: cute.Tensor, place: Any, head: Int32, beta_scale: Float32
    ) -> None:
        """Multiply the rows of dv whose beta `nonzero_beta` replaced."""
        thread, _, _ = cute.arch.thread_idx()
        if thread < place.length:
            x = Float32(beta[place.batch, place.start + thread, head])
            value, _ = self.beta_and_slope(x, beta_scale)
            smallest = Float32(SMALLEST_BETA[self.dtype])
            if cute.arch.fmax(value, -value) < smallest:
                keep_branch()
                factor = value * reciprocal(nonzero_beta(self.dtype, value))
                rows = rows_of(dv, place, head)
                start = rows.start + row_offset(thread, rows.pitch)
                for i in cutlass.range(self.spec.head_dim_v // 8, unroll=1):
                    at = start + Int64(i * UNIT_BYTES)
                    values = unpack_all(self.dtype, load_global(Int32, at, 4))
                    store_global(Int32, at, pack_all(self.dtype, [y * factor for y in values]))

    @cute.jit
    def sum_into_state(self, smem: Int32, acc: cute.Tensor) -> None:
        """Store the sum over the warp's rows of kg dkg, with k as rounded in operands."""
        b, _ = self.memory.warp_place()
        r, _ = row_and_part()
        whole = self.gates.rows_in_range(smem, b) == SUB_CHUNK
        for pair in cutlass.range_constexpr(self.pairs):
            for i in cutlass.range_constexpr(2):
                channel = self.memory.accumulator_channel(pair, i)
                total = [Float32(0.0), Float32(0.0)]
                for half in cutlass.range_constexpr(2):
                    row = self.memory.rows()[half]
                    k = self.products.load_operand(smem, "k_columns", row, channel)
                    for e in cutlass.range_constexpr(2):
                        x = acc[8 * pair + 4 * i + 2 * half + e]
                        total[e] = cute.math.fma(k[e], x, total[e])
                for e in cutlass.range_constexpr(2):
                    for bit in cutlass.range_constexpr(2, 5):
                        total[e] = total[e] + cute.arch.shuffle_sync_bfly(total[e], offset=1 << bit)
                if r == 0:
                    to_end = self.memory.load_sums(smem, "to_end", b, channel, 2)
                    steps = self.memory.load_sums(smem, "steps", b, channel, 2)
                    for e in cutlass.range_constexpr(2):
                        reached = cutlass.select_(whole, Float32(-SHIFT), steps[e])
                        total[e] = total[e] * exp2(to_end[e] - reached)
                    at = smem + self.memory["into_state"] + b * self.memory.p_row + (channel << 2)
                    store_shared(Float32, at, total)

    @cute.jit
    def store_of_state(self, smem: Int32, of_state: cute.Tensor) -> None:
        """Store the warp's part of the sum over V of S dS'."""
        b, _ = self.memory.warp_place()
        _, c = row_and_part()
        for pair in cutlass.range_constexpr(self.pairs):
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
        """Decay the products with the state to the chunk's first token, and scale them."""
        for pair in cutlass.range_constexpr(self.pairs):
            for i in cutlass.range_constexpr(2):
                channel = self.memory.accumulator_channel(pair, i)
                first = self.memory.load_sums(smem, "first", 0, channel, 2)
                decay = [exp2(first[e]) for e in range(2)]
                for n in cutlass.range_constexpr(4):
                    at = 8 * pair + 4 * i + n
                    acc_q[at] = acc_q[at] * (decay[n % 2] * scale)
                    acc_k[at] = acc_k[at] * -decay[n % 2]

    # -- results ------------------------------------------------------------------------------

    @cute.jit
    def finish(
        self, smem: Int32, acc_q: cute.Tensor, acc_k: cute.Tensor, acc: cute.Tensor,
        dG: cute.Tensor, dq_sum: cute.Tensor | None, dk_sum: cute.Tensor | None,
    ) -> None:  # fmt: skip
        """Store dG in the place of P, and add dq and dk of a value head to the group's."""
        for half in cutlass.range_constexpr(2):
            row = self.memory.rows()[half]
            own = self.memory.of_token(smem, "own_score", row)
            for pair in cutlass.range_constexpr(self.pairs):
                for i in cutlass.range_constexpr(2):
                    channel = self.memory.accumulator_channel(pair, i)
                    q = self.memory.load_pair(smem, "q", row, channel)
                    k = self.memory.load_pair(smem, "k", row, channel)
                    for e in cutlass.range_constexpr(2):
                        at = 8 * pair + 4 * i + 2 * half + e
                        of_q = acc_q[at] + own * k[e]
                        of_k = acc_k[at] + acc[at] + own * q[e]
                        if cutlass.const_expr(self.spec.shared_sums):
                            self.add_shared(smem, "dq", row, channel + e, of_q)
                            self.add_shared(smem, "dk", row, channel + e, of_k)
                        else:
                            if cutlass.const_expr(self.spec.grouped):
                                of_q, of_k = dq_sum[at] + of_q, dk_sum[at] + of_k
                            dq_sum[at], dk_sum[at] = of_q, of_k
                    at = 8 * pair + 4 * i + 2 * half
                    place = smem + self.memory.p_place(row, channel)
                    store_shared(Float32, place, [dG[at], dG[at + 1]])

    def add_shared(self, smem: Any, name: str, row: Any, channel: Any, x: Any) -> None:
        """Add to an element of the group's sums, which only this thread uses."""
        at = smem + self.memory.p_place(row, channel, name)
        store_shared(Float32, at, [load_shared(Float32, at)[0] + x])

    def zero_sums(self, smem: Any) -> None:
        for name in ("dq", "dk"):
            for _, at in self.pairs_of_sums(smem, name):
                store_shared(Float32, at, [Float32(0.0)] * 2)

    def load_sums(self, smem: Any, dq_sum: cute.Tensor, dk_sum: cute.Tensor) -> None:
        for name, x in (("dq", dq_sum), ("dk", dk_sum)):
            for n, at in self.pairs_of_sums(smem, name):
                x[n], x[n + 1] = load_shared(Float32, at, 2)

    def pairs_of_sums(self, smem: Any, name: str) -> list[tuple[int, Any]]:
        """Return the first of each two neighbouring accumulators, and its address."""
        places = []
        for n in range(0, 8 * self.pairs, 2):
            channel = self.memory.accumulator_channel(n // 8, n // 4 % 2)
            row = self.memory.rows()[n // 2 % 2]
            places.append((n, smem + self.memory.p_place(row, channel, name)))
        return places

    @cute.jit
    def norm_gradients(self, smem: Int32, dq: cute.Tensor, dk: cute.Tensor) -> None:
        """From the gradients of normalised q and k, make those of q and k."""
        _, quarter = self.memory.warp_place()
        _, c = row_and_part()
        for which, name, x in ((0, "q", dq), (1, "k", dk)):
            for half in cutlass.range_constexpr(2):
                row = self.memory.rows()[half]
                along = Float32(0.0)
                for pair in cutlass.range_constexpr(self.pairs):
                    for i in cutlass.range_constexpr(2):
                        channel = self.memory.accumulator_channel(pair, i)
                        y = self.memory.load_pair(smem, name, row, channel)
                        for e in cutlass.range_constexpr(2):
                            along = cute.math.fma(y[e], x[8 * pair + 4 * i + 2 * half + e], along)
                for bit in cutlass.range_constexpr(2):
                    along = along + cute.arch.shuffle_sync_bfly(along, offset=1 << bit)
                if c == 0:
                    at = (
                        smem
                        + self.memory["along"]
                        + ((which * QUARTERS + quarter) * CHUNK + row) * 4
                    )
                    store_shared(Float32, at, [along])
        cute.arch.sync_threads()
        for which, name, x in ((0, "q", dq), (1, "k", dk)):
            for half in cutlass.range_constexpr(2):
                row = self.memory.rows()[half]
                along = Float32(0.0)
                for n in cutlass.range_constexpr(QUARTERS):
                    at = smem + self.memory["along"] + ((which * QUARTERS + n) * CHUNK + row) * 4
                    along = along + load_shared(Float32, at)[0]
                norm = self.memory.of_token(smem, f"inverse_norm_{name}", row)
                for pair in cutlass.range_constexpr(self.pairs):
                    for i in cutlass.range_constexpr(2):
                        channel = self.memory.accumulator_channel(pair, i)
                        y = self.memory.load_pair(smem, name, row, channel)
                        for e in cutlass.range_constexpr(2):
                            at = 8 * pair + 4 * i + 2 * half + e
                            x[at] = norm * (x[at] - y[e] * along)

    @cute.jit
    def store_rows(self, target: cute.Tensor, values: cute.Tensor, place: Any, head: Int32) -> None:
        """Store the warp's rows and channels of dq or dk."""
        rows = rows_of(target, place, head)
        unit = self.memory.first_unit()
        for half in cutlass.range_constexpr(2):
            row = self.memory.rows()[half]
            start = rows.start + row_offset(row, rows.pitch)
            for pair in cutlass.range_constexpr(self.pairs):
                registers = []
                for i in cutlass.range_constexpr(2):
                    n = 8 * pair + 4 * i + 2 * half
                    registers.append(pack(self.dtype, values[n], values[n + 1]))
                x = paired(*registers)
                if row < place.length:
                    offset = (unit + 2 * pair) * UNIT_BYTES + paired_offset()
                    store_global(Int32, start + Int64(offset), x)
