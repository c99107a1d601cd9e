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
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric

from ....common.arguments import (
    fake_contiguous,
    fake_matrices,
    fake_offsets,
    fake_rows,
    fake_strided,
)
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.pipeline import Barriers, report_names
from ....common.ptx.async_copy import copy_async, copy_bulk
from ....common.ptx.cluster import remote_address, store_async
from ....common.ptx.compiler import keep_branch, opaque
from ....common.ptx.convert import pack, pack_all, unpack_all
from ....common.ptx.math import exp2, reciprocal
from ....common.ptx.memory import (
    load_global,
    load_shared,
    shared_address,
    store_global,
    store_global_where,
    store_shared,
)
from ....common.ptx.mma import mma
from ...gates import SMALLEST_BETA, nonzero_beta, sigmoid, split_beta
from ..chunks import Rows, num_slots, place_of_slot, row_offset, rows_of
from ..spec import CHUNK, GradientsSpec
from ..sub_chunks import SUB_CHUNK, SUB_CHUNKS, row_and_part
from ..tiles import (
    LINE_BYTES,
    SUB_TILE_BYTES,
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
from .layout import PAIRS, SUMS, TILE_V, GradientMemory

STEPS = TILE_V // 16
ALONG_STEP = SUB_CHUNKS * 8 * 16  # stride between parts of the channels


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, lower_bound, beta_scale: as in
            `prepare`.
        inverse_norms: float32 [slots, HQK, 2 * 64], the inverse norms of a chunk's rows of q, then
            of k, as `prepare` writes these norms; only with l2norm.
        do: [B, T, HV, V], the gradient of o.
        states, adjoints: [slots, HV, V K], the state at the start of each chunk and the gradient of
            the state after the chunk, transposed: for each 64 rows of V, K / 64 sub-tiles.
        v_new: [slots, HV, 64 V], v' / m in sub-tiles of 64 columns; rows past the end are 0.
        dv: [B, T, HV, V], dr with `nonzero_beta`; becomes the gradient of v.
        dq, dk: [B, T, HQK, K], written, as are the arguments below.
        dg: [B, T, HV, K].
        dbeta: [B, T, HV], any strides.
        dA_log, ddt_bias: float32 [slots, cluster, HV] and [slots, HV, K]; the gradients of
            A_log and dt_bias are their sums over slots and cluster; or None.
    """

    q: cute.Tensor
    k: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    A_log: cute.Tensor | None
    dt_bias: cute.Tensor | None
    inverse_norms: cute.Tensor | None
    do: cute.Tensor
    states: cute.Tensor
    adjoints: cute.Tensor
    v_new: cute.Tensor
    dv: cute.Tensor
    dq: cute.Tensor
    dk: cute.Tensor
    dg: cute.Tensor
    dbeta: cute.Tensor
    dA_log: cute.Tensor | None
    ddt_bias: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    scale: Float32
    lower_bound: Float32
    beta_scale: Float32


class KdaGradients:
    """The kernel for one GradientsSpec; see the module's docstring."""

    def __init__(self, spec: GradientsSpec):
        self.spec = spec
        self.memory = GradientMemory(spec)
        self.smem_bytes = self.memory.nbytes
        self.channels, self.parts = self.memory.channels, self.memory.parts
        self.num_threads = self.memory.num_threads
        self.gates = GateGradients(replace(spec, head_dim_k=self.channels, cluster=1), self.memory)
        self.products = DecayedProducts(self.memory, self.gates)
        self.dtype = DTYPE[spec.dtype]
        self.gate_dtype, self.beta_dtype = DTYPE[spec.gate_dtype], DTYPE[spec.beta_dtype]
        self.tiles_v = spec.head_dim_v // TILE_V
        self.bulk = spec.copies == "bulk"
        # Columns of dAqk and dLhat that a warp computes, and its accumulators for them.
        self.columns = CHUNK // self.parts
        self.num_scores = SUB_CHUNK * self.columns // 32

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.memory, self.memory.pipeline, self.memory.roles, shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        batch, tokens, heads, heads_qk, slots = (cute.sym_int() for _ in range(5))

        def rows(dtype: type[Numeric], heads: Any, columns: int) -> Any:
            return fake_rows(dtype, (batch, tokens, heads, columns))

        def of_qk() -> Any:
            return rows(self.dtype, heads_qk, spec.head_dim_k)

        def of_v() -> Any:
            return rows(self.dtype, heads, spec.head_dim_v)

        def states() -> Any:
            elements = spec.head_dim_k * spec.head_dim_v
            return fake_matrices((slots,), (heads, elements), self.dtype)

        def partial(*shape: Any, align: int = 0) -> Any:
            return fake_contiguous(Float32, (slots, *shape), align, small=True)

        has_dt_bias = spec.has_dt_bias
        return placeholders(
            Arguments(
                q=of_qk(),
                k=of_qk(),
                g=rows(self.gate_dtype, heads, spec.head_dim_k),
                beta=fake_strided(self.beta_dtype, (batch, tokens, heads)),
                A_log=fake_contiguous(Float32, (heads,)) if spec.has_A_log else None,
                dt_bias=fake_contiguous(Float32, (heads, spec.head_dim_k), 16)
                if has_dt_bias
                else None,
                inverse_norms=fake_matrices((slots,), (heads_qk, 2 * CHUNK))
                if spec.l2norm
                else None,
                do=of_v(),
                states=states(),
                adjoints=states(),
                v_new=fake_matrices((slots,), (heads, CHUNK * spec.head_dim_v), self.dtype),
                dv=of_v(),
                dq=of_qk(),
                dk=of_qk(),
                dg=rows(self.gate_dtype, heads, spec.head_dim_k),
                dbeta=fake_strided(self.beta_dtype, (batch, tokens, heads)),
                dA_log=partial(spec.cluster, heads) if spec.has_A_log else None,
                ddt_bias=partial(heads, spec.head_dim_k, align=16) if has_dt_bias else None,
                cu_seqlens=fake_offsets(spec.index_dtype),
                scale=Float32(1.0),
                lower_bound=Float32(1.0),
                beta_scale=Float32(1.0),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Compute the gradients of all chunks."""
        a, stream = gathered(Arguments, args)
        slots = num_slots(a.g.shape[0], a.g.shape[1], a.cu_seqlens)
        self.kernel(
            a,
            a.g.shape[2] // a.q.shape[2] if self.spec.grouped else 1,
            cute.fast_divmod_create_divisor_v2(a.q.shape[2]),
            cute.fast_divmod_create_divisor_v2((a.g.shape[1] + (CHUNK - 1)) // CHUNK),
        ).launch(
            grid=[a.q.shape[2] * slots * self.spec.cluster, 1, 1],
            block=[self.num_threads, 1, 1],
            cluster=[self.spec.cluster, 1, 1],
            smem=self.smem_bytes,
            min_blocks_per_mp=512 // self.num_threads,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        a: Arguments,
        group: Int32 | int,
        by_heads: cute.FastDivmodDivisorV2,
        by_chunks: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cta = block & (self.spec.cluster - 1)  # the CTA's half of K
        slot, head_qk = divmod(block >> (self.spec.cluster - 1), by_heads)
        first_head = head_qk * group
        place = place_of_slot(slot, by_chunks, a.g.shape[1], a.cu_seqlens)
        storage = cutlass.memory.SmemAllocator().allocate(self.smem_bytes, 1024)
        smem = shared_address(storage)
        barriers = self.barriers(storage)
        if cutlass.const_expr(barriers is not None):
            if thread == 0:
                barriers.init()
                if cutlass.const_expr(self.spec.exchanges):
                    # Sums of q dq and k dk: for each part of the channels, all rows.
                    barriers.expect("along_full", 0, self.parts * 2 * CHUNK * 4)
                cute.arch.mbarrier_init_fence()
            if cutlass.const_expr(self.spec.exchanges):
                cute.arch.cluster_arrive_relaxed()
            cute.arch.sync_threads()
        if not place.valid:
            for n in cutlass.range(group, unroll=1):
                self.gates.store_no_sums(a.dA_log, a.ddt_bias, slot, first_head + n, cta)
        else:
            own = a  # dt_bias from the CTA's first channel on
            if cutlass.const_expr(a.dt_bias is not None):
                own = a._replace(dt_bias=cute.domain_offset((0, cta * self.channels), a.dt_bias))
            for x, name in ((a.q, "q"), (a.k, "k")):
                rows = self.rows(x, place, head_qk, cta)
                copy_rows(
                    smem + self.memory[name], rows.start, Int64(rows.pitch), place.length,
                    self.channels, self.num_threads,
                )  # fmt: skip
            if cutlass.const_expr(a.inverse_norms is not None):
                if thread < 2 * CHUNK * 4 // UNIT_BYTES:
                    start = Int64(slot) * a.inverse_norms.stride[0]
                    start = start + Int64(head_qk) * a.inverse_norms.stride[1]
                    copy_async(
                        smem + (self.memory["inverse_norm_q"] + thread * UNIT_BYTES),
                        (a.inverse_norms.iterator + start).toint() + Int64(thread * UNIT_BYTES),
                        True,
                    )
            self.start_copy(smem, barriers, a, place, slot, first_head, Int32(0), cta)
            if cutlass.const_expr(self.spec.exchanges):
                cute.arch.cluster_wait()  # the other CTA has initialised its mbarrier
            dq_sum = cute.make_rmem_tensor((SUMS,), Float32)
            dk_sum = cute.make_rmem_tensor((SUMS,), Float32)
            if cutlass.const_expr(self.spec.grouped):
                dq_sum.fill(0.0)
                dk_sum.fill(0.0)
                for n in cutlass.range(group, unroll=1):
                    self.value_head(
                        own, place, slot, first_head, n, group, smem, barriers, cta, dq_sum, dk_sum
                    )
            else:
                self.value_head(
                    own, place, slot, first_head, Int32(0), Int32(1), smem, barriers, cta, dq_sum,
                    dk_sum,
                )  # fmt: skip
            if cutlass.const_expr(self.spec.l2norm):
                self.norm_gradients(smem, barriers, dq_sum, dk_sum)
            self.store_rows(self.rows(a.dq, place, head_qk, cta), dq_sum, place)
            self.store_rows(self.rows(a.dk, place, head_qk, cta), dk_sum, place)

    def barriers(self, storage: cute.Pointer) -> Barriers | None:
        if not self.memory.pipeline.count:
            return None
        at = storage + self.memory["barriers"]
        return self.memory.pipeline.at(cute.recast_ptr(at, dtype=Int64))

    def rows(self, x: cute.Tensor, place: Any, head: Int32, cta: Any) -> Rows:
        """The chunk's rows of a tensor [B, T, heads, K], from the CTA's first channel on."""
        rows = rows_of(x, place, head)
        width = x.element_type.width // 8
        return Rows(rows.start + Int64(cta * (self.channels * width)), rows.pitch)

    @cute.jit
    def value_head(
        self, a: Arguments, place: Any, slot: Int32, first_head: Int32, n: Int32, group: Int32,
        smem: Int32, barriers: Any, cta: Int32, dq_sum: cute.Tensor, dk_sum: cute.Tensor,
    ) -> None:  # fmt: skip
        """Store the gradients of the group's n-th value head, and add its gradients of q and k to
        the sums."""
        thread, _, _ = cute.arch.thread_idx()
        head = first_head + n
        own_beta = Float32(0.0)
        if thread < place.length:
            own_beta = Float32(a.beta[place.batch, place.start + thread, head])
        if thread < CHUNK:
            self.store_of_token(smem, "beta", thread, own_beta)
            value, _ = self.beta_and_slope(own_beta, a.beta_scale)
            m, _ = split_beta(self.dtype, nonzero_beta(self.dtype, value))
            self.store_of_token(smem, "m", thread, m)
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
            own_beta, a, place, slot, first_head, n, smem, barriers, cta, acc_q, acc_k, acc
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

    @cute.jit
    def state_products(
        self, own_beta: Float32, a: Arguments, place: Any, slot: Int32, first_head: Int32,
        n: Int32, smem: Int32, barriers: Any, cta: Int32, acc_q: cute.Tensor,
        acc_k: cute.Tensor, acc: cute.Tensor,
    ) -> None:  # fmt: skip
        """Compute all products over V."""
        of_state = cute.make_rmem_tensor((2 * PAIRS,), Float32)
        daqk = cute.make_rmem_tensor((self.num_scores,), Float32)
        dlower = cute.make_rmem_tensor((self.num_scores,), Float32)
        for x in (acc_q, acc_k, acc, of_state, daqk, dlower):
            x.fill(0.0)
        stage = smem + self.memory["stage"]
        head = first_head + n
        some_beta_is_small = Boolean(False)
        for t in cutlass.range(self.tiles_v, unroll=1):
            cute.arch.cp_async_wait_group(0)
            if cutlass.const_expr(self.bulk):
                barriers.wait("stage_full", n * self.tiles_v + t)
            cute.arch.sync_threads()
            if t == 0:  # the barrier before also ended `store_sums`
                self.gates.finish_sums(smem)
                if cutlass.const_expr(self.spec.cluster > 1):
                    some_beta_is_small = self.any_beta_is_small(smem, place, a.beta_scale)
            self.multiply(stage, acc_q, acc_k, acc, daqk, dlower, of_state)
            cute.arch.sync_threads()
            if t + 1 < self.tiles_v:
                self.start_copy(smem, barriers, a, place, slot, head, t + 1, cta)
        self.store_scores(smem, "daqk", daqk, a.scale)
        self.store_scores(smem, "dlower", dlower, Float32(-1.0))
        self.store_diagonals(smem, daqk, dlower, a.dbeta, place, head, cta, a.scale, a.beta_scale)
        if cutlass.const_expr(self.spec.cluster > 1):
            # Both CTAs decide alike. CTA 0 must not write dv before CTA 1 has read it.
            if some_beta_is_small:
                keep_branch()
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
        if cta == 0:
            self.finish_dv(own_beta, a.dv, place, head, a.beta_scale)
        self.store_of_state(smem, of_state)

    # -- loads --------------------------------------------------------------------------------

    @cute.jit
    def start_copy(
        self, smem: Int32, barriers: Any, a: Arguments, place: Any, slot: Int32, head: Int32,
        tile: Int32, cta: Int32,
    ) -> None:  # fmt: skip
        """Start the copies of a head's 64 columns of V, as one cp.async group."""
        thread, _, _ = cute.arch.thread_idx()
        stage = smem + self.memory["stage"]
        of_channels = self.channels // 64 * SUB_TILE_BYTES
        of_state = (tile * self.spec.cluster + cta) * of_channels
        parts = (
            (a.states, "state", of_state, of_channels),
            (a.adjoints, "adjoint", of_state, of_channels),
            (a.v_new, "v_new", tile * SUB_TILE_BYTES, SUB_TILE_BYTES),
        )
        if cutlass.const_expr(self.bulk):
            if thread == 0:
                barriers.expect("stage_full", 0, sum(nbytes for *_, nbytes in parts))
                full = barriers.address("stage_full", 0)
                for x, name, offset, nbytes in parts:
                    start = self.slot_address(x, slot, head) + Int64(offset)
                    copy_bulk(stage + self.memory.stage[name], start, nbytes, full)
        else:
            for x, name, offset, nbytes in parts:
                start = self.slot_address(x, slot, head) + Int64(offset)
                for i in cutlass.range_constexpr(nbytes // (self.num_threads * UNIT_BYTES)):
                    at = (i * self.num_threads + thread) * UNIT_BYTES
                    copy_async(stage + self.memory.stage[name] + at, start + Int64(at), True)
        for x, name in ((a.do, "do"), (a.dv, "dr")):
            rows = rows_of(x, place, head)
            copy_rows(
                stage + self.memory.stage[name], rows.start + Int64(tile * (2 * TILE_V)),
                Int64(rows.pitch), place.length, TILE_V, self.num_threads,
            )  # fmt: skip
        cute.arch.cp_async_commit_group()

    def slot_address(self, x: cute.Tensor, slot: Any, head: Int32) -> Any:
        return (x.iterator + (Int64(slot) * x.stride[0] + Int64(head) * x.stride[1])).toint()

    # -- products with the state --------------------------------------------------------------

    @cute.jit
    def multiply(
        self, stage: Int32, acc_q: cute.Tensor, acc_k: cute.Tensor, acc: cute.Tensor,
        daqk: cute.Tensor, dlower: cute.Tensor, of_state: cute.Tensor,
    ) -> None:  # fmt: skip
        """Add the products of 64 columns of V: do S^T, dr S^T and v' dS'^T; the warp's part of
        do v'^T and dr v'^T; and for a quarter of the columns, sum_V S dS'."""
        b, part = self.memory.warp_place()
        places = {name: stage + at for name, at in self.memory.stage.offsets.items()}
        for step in cutlass.range(STEPS, unroll=1):
            do, dr, v_new = (
                left_fragment(places[name], b * SUB_CHUNK, step) for name in ("do", "dr", "v_new")
            )
            for pair in cutlass.range_constexpr(PAIRS):
                state = self.memory.operands(places["state"], step, pair)
                self.add_product(acc_q, 8 * pair, do, state)
                self.add_product(acc_k, 8 * pair, dr, state)
                adjoint = self.memory.operands(places["adjoint"], step, pair)
                self.add_product(acc, 8 * pair, v_new, adjoint)
                if b == step:
                    keep_branch()
                    self.add_of_state(of_state, pair, state, adjoint)
            for n in cutlass.range_constexpr(self.columns // 16):
                column = part * self.columns + 16 * n
                if column <= b * SUB_CHUNK:
                    keep_branch()
                    columns = right_fragments_of_rows(places["v_new"], column, step)
                    self.add_product(daqk, 8 * n, do, columns)
                    self.add_product(dlower, 8 * n, dr, columns)

    def add_of_state(self, of_state: cute.Tensor, pair: int, state: Any, adjoint: Any) -> None:
        """Add the products of the thread's elements of right operands to the sums over V of S
        dS'."""
        x, y = (unpack_all(self.dtype, z) for z in (state, adjoint))
        for n in range(8):
            i = 2 * pair + n // 4
            of_state[i] = cute.math.fma(x[n], y[n], of_state[i])

    def add_product(self, acc: cute.Tensor, first: int, left: Any, right: Any) -> None:
        """acc += left right, where the product is 16 by 16."""
        for i in range(2):
            at = first + 4 * i
            old = [acc[at + n] for n in range(4)]
            for n, x in enumerate(mma(self.dtype, old, left, right[2 * i : 2 * i + 2])):
                acc[at + n] = x

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
    def store_diagonals(
        self, smem: Int32, daqk: cute.Tensor, dlower: cute.Tensor, dbeta: cute.Tensor, place: Any,
        head: Int32, cta: Int32, scale: Float32, beta_scale: Float32,
    ) -> None:  # fmt: skip
        """Store the terms i == j of dAqk, and dbeta."""
        b, part = self.memory.warp_place()
        r, c = row_and_part()
        for n in cutlass.range_constexpr(self.columns // 16):
            if part * self.columns + 16 * n == b * SUB_CHUNK and c == r >> 1:
                odd = (r & 1) == 1
                for half in cutlass.range_constexpr(2):
                    row = b * SUB_CHUNK + r + 8 * half
                    at = 8 * n + 6 * half
                    m = self.memory.of_token(smem, "m", row)
                    own = cutlass.select_(odd, daqk[at + 1], daqk[at]) * (m * scale)
                    x = self.memory.of_token(smem, "beta", row)
                    self.store_of_token(smem, "own_score", row, own)
                    if row < place.length and cta == 0:
                        value, slope = self.beta_and_slope(x, beta_scale)
                        inverse = reciprocal(nonzero_beta(self.dtype, value))
                        dot = Float32(cutlass.select_(odd, dlower[at + 1], dlower[at]))
                        result = ((dot * inverse) * (m * inverse)) * slope
                        dbeta[place.batch, place.start + row, head] = result.to(self.beta_dtype)

    def store_of_token(self, smem: Int32, name: str, row: Any, x: Any) -> None:
        store_shared(Float32, smem + self.memory[name] + row * 4, [Float32(x)])

    def beta_and_slope(self, x: Any, beta_scale: Any) -> tuple[Any, Any]:
        """Return beta from its input, and its derivative."""
        if not self.spec.beta_sigmoid:
            return x, Float32(1.0)
        value = sigmoid(x)
        return beta_scale * value, beta_scale * (value * sigmoid(-x))

    def is_small(self, value: Any) -> Any:
        """Whether `nonzero_beta` replaces this beta."""
        return cute.arch.fmax(value, -value) < Float32(SMALLEST_BETA[self.dtype])

    @cute.jit
    def any_beta_is_small(self, smem: Int32, place: Any, beta_scale: Float32) -> Any:
        """Return whether `finish_dv` has a row to multiply; all warps get the same answer."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        found = Boolean(False)
        for i in cutlass.range_constexpr(CHUNK // 32):
            row = lane + 32 * i
            value, _ = self.beta_and_slope(self.memory.of_token(smem, "beta", row), beta_scale)
            found = found | ((row < place.length) & self.is_small(value))
        return cute.arch.vote_any_sync(found)

    @cute.jit
    def finish_dv(
        self, beta: Float32, dv: cute.Tensor, place: Any, head: Int32, beta_scale: Float32
    ) -> None:
        """Multiply the rows of dv whose beta `nonzero_beta` replaced; `beta` belongs to the
        thread's row."""
        thread, _, _ = cute.arch.thread_idx()
        if thread < place.length:
            value, _ = self.beta_and_slope(beta, beta_scale)
            if self.is_small(value):
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

    # -- results ------------------------------------------------------------------------------

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

    def along(self, smem: Int32) -> Any:
        """The address of the thread's rows' sums over the first part of the channels."""
        b, _ = self.memory.warp_place()
        r, _ = row_and_part()
        return smem + self.memory["along"] + (b * 8 + r) * 16

    @cute.jit
    def sum_along(
        self, smem: Int32, barriers: Any, cta: Int32, dq: cute.Tensor, dk: cute.Tensor
    ) -> None:
        """Store the sums over the warp's channels of q dq and k dk, with q and k as given, in both
        CTAs."""
        _, part = self.memory.warp_place()
        _, c = row_and_part()
        sums = []  # [q, k][row]
        for name, x in (("q", dq), ("k", dk)):
            for half in cutlass.range_constexpr(2):
                row = self.memory.rows()[half]
                total = Float32(0.0)
                for n in cutlass.range_constexpr(2 * PAIRS):
                    channel = self.memory.accumulator_channel(n // 2, n % 2)
                    for e, y in enumerate(self.memory.load_raw(smem, name, row, channel)):
                        total = cute.math.fma(y, x[4 * n + 2 * half + e], total)
                for bit in cutlass.range_constexpr(2):
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << bit)
                sums.append(total)
        if c == 0:
            at = self.along(smem) + (cta * self.parts + part) * ALONG_STEP
            store_shared(Float32, at, sums)
            if cutlass.const_expr(self.spec.exchanges):
                full = barriers.address("along_full", 0)
                store_async(
                    remote_address(at, cta ^ 1), [x.bitcast(Int32) for x in sums],
                    remote_address(full, cta ^ 1),
                )  # fmt: skip

    @cute.jit
    def norm_gradients(self, smem: Int32, barriers: Any, dq: cute.Tensor, dk: cute.Tensor) -> None:
        """Make the gradients of q and k from the gradients of normalised q and k."""
        if cutlass.const_expr(self.spec.exchanges):
            barriers.wait("along_full", 0)
        along = [Float32(0.0)] * 4
        for n in cutlass.range_constexpr(self.memory.all_parts):
            values = load_shared(Float32, self.along(smem) + n * ALONG_STEP, 4)
            along = [x + y for x, y in zip(along, values, strict=True)]
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

    @cute.jit
    def store_rows(self, rows: Any, values: cute.Tensor, place: Any) -> None:
        """Store the warp's rows and channels of dq or dk."""
        # Opaque, because the compiler would form the sum of all offsets anew for each store.
        unit = self.memory.first_unit()
        first = rows.start + Int64(opaque(unit * UNIT_BYTES + paired_offset()))
        for half in cutlass.range_constexpr(2):
            row = self.memory.rows()[half]
            start = first + row_offset(row, rows.pitch)
            present = cutlass.select_(row < place.length, Int32(1), Int32(0))
            for pair in cutlass.range_constexpr(PAIRS):
                registers = []
                for i in cutlass.range_constexpr(2):
                    n = 8 * pair + 4 * i + 2 * half
                    registers.append(pack(self.dtype, values[n], values[n + 1]))
                x = paired(*registers)
                store_global_where(present, start + pair * (2 * UNIT_BYTES), *x)
