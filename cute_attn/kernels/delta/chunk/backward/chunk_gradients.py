"""The last kernel of a backward: what the kernels for both kinds of gates share.

A subclass adds the gates and the products within a chunk: `gradients` for a gate of each channel,
`head_gradients` for a gate of each head.
"""

from __future__ import annotations

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
from ....common.ptx.math import reciprocal
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
    SUB_TILE_BYTES,
    UNIT_BYTES,
    copy_rows,
    left_fragment,
    paired,
    paired_offset,
    right_fragments_of_rows,
)
from .layout import PAIRS, SUMS, TILE_V, ChunkGradientMemory

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
        dg: [B, T, HV, K], or [B, T, HV] for a gate of each head, as g is.
        dbeta: [B, T, HV], any strides.
        dA_log, ddt_bias: float32 [slots, cluster, HV] and [slots, HV, K]; the gradients of
            A_log and dt_bias are their sums over slots and cluster; or None. For a gate of each
            head, dt_bias is [HV, 1], and ddt_bias of dA_log's shape.
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


class ChunkGradients:
    """The base of the kernels for one GradientsSpec.

    Args:
        gates: the gates' sums and gradients, of the subclass.
    """

    prefetches = False  # whether the next head's tiles are loaded once the stage is read

    def __init__(self, spec: GradientsSpec, memory: ChunkGradientMemory, gates: Any):
        self.spec, self.memory, self.gates = spec, memory, gates
        self.smem_bytes = memory.nbytes
        self.channels, self.parts = memory.channels, memory.parts
        self.num_threads = memory.num_threads
        self.dtype = DTYPE[spec.dtype]
        self.gate_dtype, self.beta_dtype = DTYPE[spec.gate_dtype], DTYPE[spec.beta_dtype]
        self.tiles_v = spec.head_dim_v // TILE_V
        self.bulk = spec.copies == "bulk"
        # Columns of dAqk and dLhat that a warp computes, and its accumulators for them.
        self.columns = CHUNK // self.parts
        self.num_scores = SUB_CHUNK * self.columns // 32

    # -- what a subclass defines ----------------------------------------------------------------

    def fake_gates(self, shape: tuple[Any, ...]) -> cute.Tensor:
        """A placeholder for g or dg; `shape` is [B, T, HV]."""
        raise NotImplementedError

    def fake_bias(self, heads: Any) -> cute.Tensor:
        raise NotImplementedError

    def fake_bias_parts(self, slots: Any, heads: Any) -> cute.Tensor:
        raise NotImplementedError

    @property
    def meets(self) -> bool:
        """Whether a CTA stores to the shared memory of its cluster's other CTA."""
        return self.spec.exchanges

    def arm(self, barriers: Any) -> None:
        """Arm the subclass's mbarriers, by one thread before the first use."""

    def of_channels(self, a: Arguments, cta: Int32) -> Arguments:
        """The arguments of a CTA."""
        return a

    def finish_sums(self, smem: Int32) -> None:
        """Finish the gates' sums, after a barrier."""

    def store_all_scores(
        self, smem: Int32, daqk: cute.Tensor, dlower: cute.Tensor, scale: Float32
    ) -> None:
        """Store dAqk and dLhat as operands."""
        raise NotImplementedError

    def store_of_state(self, smem: Int32, of_state: cute.Tensor) -> None:
        """Store the warp's part of the sum over V of S dS'."""
        raise NotImplementedError

    def value_head(
        self, a: Arguments, place: Any, slot: Int32, first_head: Int32, n: Int32, group: Int32,
        smem: Int32, barriers: Any, cta: Int32, dq_sum: cute.Tensor, dk_sum: cute.Tensor,
    ) -> None:  # fmt: skip
        """Store the gradients of the group's n-th value head, and add its gradients of q and k to
        the sums."""
        raise NotImplementedError

    def take_sums(self, smem: Int32, dq: cute.Tensor, dk: cute.Tensor) -> None:
        """Load the sums over the group, if they are not in registers."""

    def norm_gradients(self, smem: Int32, barriers: Any, dq: cute.Tensor, dk: cute.Tensor) -> None:
        """Make the gradients of q and k from the gradients of normalised q and k."""
        raise NotImplementedError

    # -- the kernel -----------------------------------------------------------------------------

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

        parts = (slots, spec.cluster, heads)
        has_dt_bias = spec.has_dt_bias
        return placeholders(
            Arguments(
                q=of_qk(),
                k=of_qk(),
                g=self.fake_gates((batch, tokens, heads)),
                beta=fake_strided(self.beta_dtype, (batch, tokens, heads)),
                A_log=fake_contiguous(Float32, (heads,)) if spec.has_A_log else None,
                dt_bias=self.fake_bias(heads) if has_dt_bias else None,
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
                dg=self.fake_gates((batch, tokens, heads)),
                dbeta=fake_strided(self.beta_dtype, (batch, tokens, heads)),
                dA_log=fake_contiguous(Float32, parts, small=True) if spec.has_A_log else None,
                ddt_bias=self.fake_bias_parts(slots, heads) if has_dt_bias else None,
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
                self.arm(barriers)
                cute.arch.mbarrier_init_fence()
            if cutlass.const_expr(self.meets):
                cute.arch.cluster_arrive_relaxed()
            cute.arch.sync_threads()
        if not place.valid:
            for n in cutlass.range(group, unroll=1):
                self.gates.store_no_sums(a.dA_log, a.ddt_bias, slot, first_head + n, cta)
        else:
            own = self.of_channels(a, cta)
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
            if cutlass.const_expr(self.meets):
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
            self.take_sums(smem, dq_sum, dk_sum)
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
    def load_beta(self, a: Arguments, place: Any, head: Int32, smem: Int32, thread: Int32) -> Any:
        """Store beta as given and its factor m, and return beta as given of the thread's token."""
        own_beta = Float32(0.0)
        if thread < place.length:
            own_beta = Float32(a.beta[place.batch, place.start + thread, head])
        if thread < CHUNK:
            self.store_of_token(smem, "beta", thread, own_beta)
            value, _ = self.beta_and_slope(own_beta, a.beta_scale)
            m, _ = split_beta(self.dtype, nonzero_beta(self.dtype, value))
            self.store_of_token(smem, "m", thread, m)
        return own_beta

    @cute.jit
    def state_products(
        self, own_beta: Float32, a: Arguments, place: Any, slot: Int32, first_head: Int32,
        n: Int32, group: Int32, smem: Int32, barriers: Any, cta: Int32, acc_q: cute.Tensor,
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
                self.finish_sums(smem)
                if cutlass.const_expr(self.spec.cluster > 1):
                    some_beta_is_small = self.any_beta_is_small(smem, place, a.beta_scale)
            self.multiply(stage, acc_q, acc_k, acc, daqk, dlower, of_state)
            cute.arch.sync_threads()
            if t + 1 < self.tiles_v:
                self.start_copy(smem, barriers, a, place, slot, head, t + 1, cta)
        if cutlass.const_expr(self.prefetches and self.spec.grouped):
            if n + 1 < group:
                self.start_copy(smem, barriers, a, place, slot, head + 1, Int32(0), cta)
        self.store_all_scores(smem, daqk, dlower, a.scale)
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

    @cute.jit
    def start_copy(
        self, smem: Int32, barriers: Any, a: Arguments, place: Any, slot: Int32, head: Int32,
        tile: Int32, cta: Int32,
    ) -> None:  # fmt: skip
        """Start the copies of a head's 64 columns of V, as one cp.async group."""
        thread, _, _ = cute.arch.thread_idx()
        stage = smem + self.memory["stage"]
        parts = self.tiles_of(a, tile, cta)
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

    def tiles_of(self, a: Arguments, tile: Any, cta: Any) -> tuple[Any, ...]:
        """What a CTA reads of 64 columns of V: a tensor, its buffer in the stage, and the offset
        and the bytes in a head's part of the tensor."""
        of_channels = self.channels // 64 * SUB_TILE_BYTES
        of_state = (tile * self.spec.cluster + cta) * of_channels
        return (
            (a.states, "state", of_state, of_channels),
            (a.adjoints, "adjoint", of_state, of_channels),
            (a.v_new, "v_new", tile * SUB_TILE_BYTES, SUB_TILE_BYTES),
        )

    def slot_address(self, x: cute.Tensor, slot: Any, head: Int32) -> Any:
        return (x.iterator + (Int64(slot) * x.stride[0] + Int64(head) * x.stride[1])).toint()

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

    def sums_along(self, smem: Int32, barriers: Any) -> list[Any]:
        """The sums over all channels of q dq, then of k dk, for the thread's two rows."""
        if self.spec.exchanges:
            barriers.wait("along_full", 0)
        along = [Float32(0.0)] * 4
        for n in range(self.memory.all_parts):
            values = load_shared(Float32, self.along(smem) + n * ALONG_STEP, 4)
            along = [x + y for x, y in zip(along, values, strict=True)]
        return along

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
