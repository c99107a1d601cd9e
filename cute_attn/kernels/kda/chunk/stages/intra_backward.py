"""The gradients of q, k, beta and G through the products within a chunk.

With D_ij = exp2(G_i - G_j), and the gradients dA (`dAqk`) of the product of q and k, and dL
(`dAkk`) of L:

    row_q_i  = sum_j dA_ij D_ij * k_j     j < i        dq_i = dA_ii k_i + row_q_i
    row_k_i  = sum_j dL_ij D_ij * k_j     j < i        dbeta_i = row_k_i . k_i
    column_j = sum_i D_ij * (dA_ij q_i + beta_i dL_ij k_i)     i > j
                                          dk_i = dA_ii q_i + beta_i row_k_i + column_i
    dG_i = q_i * row_q_i + k_i * (beta_i row_k_i - column_i)

which are added to what the other stages gave; dq and dk are then summed over the value heads that
share q and k. A token's product with itself has no decay, so that dG has no part of it.

Sums run on the CUDA cores in float32, since this kernel moves so many bytes that they are nearly
free. A thread has one channel of the 16 tokens of a sub-chunk. Within it, D_ij is computed for
every pair; between sub-chunks it is split, as in the forward, at the first token of the later
sub-chunk for rows, or of the one after the earlier for columns. No factor exceeds 1.

    CTA (slot of a chunk, head of q and k), 8 warps: warps 2 b and 2 b + 1 have sub-chunk b
      for each value head
        load    dAqk, dAkk by cp.async; beta
        for each 64 channels, a warp has 32
          rows, columns  between sub-chunks: every warp has three blocks of 16 by 16 pairs
          own            within the sub-chunk
          store          dG, and dq and dk, or add these to the sums in shared memory
        reduce  dbeta
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream

from ....common.arguments import fake_offsets, fake_rows, fake_strided
from ....common.dtypes import DTYPE
from ....common.ptx.async_copy import copy_async
from ....common.ptx.math import exp2
from ....common.ptx.memory import load_shared, shared_address, store_shared
from ....common.smem import Buffer, SharedMemory
from ....common.spec import SMALLEST_SMEM_BYTES, WARP_SIZE
from ..chunks import chunk_place, num_slots, row_address, row_bytes, slot_and_head
from ..spec import CHUNK, IntraBackwardSpec
from ..sub_chunks import SUB_CHUNK, SUB_CHUNKS
from ..tiles import UNIT_BYTES, thread_and_warp

CHANNELS = 64  # at once
NUM_THREADS = CHANNELS * SUB_CHUNKS
VECTOR = 4  # elements of dA of a load
ROW_BYTES = CHUNK * 4  # of dA


class KdaIntraBackward:
    """The kernel for one IntraBackwardSpec; see the module's docstring."""

    def __init__(self, spec: IntraBackwardSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.beta_dtype = DTYPE[spec.beta_dtype]
        # Sums over a group: dq and dk of the thread's tokens and channels.
        sums = 2 * SUB_CHUNK * spec.head_dim_k // CHANNELS if spec.grouped else 0
        self.memory = SharedMemory(
            Buffer("aqk", Float32, CHUNK * CHUNK),
            Buffer("akk", Float32, CHUNK * CHUNK),
            Buffer("beta", Float32, CHUNK),
            Buffer("dbeta", Float32, CHUNK, stages=2),
            Buffer("sums", Float32, NUM_THREADS, stages=sums),
            limit=SMALLEST_SMEM_BYTES,
        )
        self.smem_bytes = self.memory.nbytes

    def fake_args(self) -> tuple[Any, ...]:
        spec, dtype = self.spec, self.dtype
        batch, tokens, heads_qk, heads = (cute.sym_int() for _ in range(4))

        def rows(heads: Any, columns: int, element: Any = Float32) -> Any:
            return fake_rows(element, (batch, tokens, heads, columns))

        def numbers(element: Any) -> Any:
            return fake_strided(element, (batch, tokens, heads))

        K = spec.head_dim_k
        return (
            rows(heads_qk, K, dtype),
            rows(heads_qk, K, dtype),
            rows(heads, K),
            numbers(self.beta_dtype),
            rows(heads, CHUNK),
            rows(heads, CHUNK),
            rows(heads, K),
            rows(heads, K),
            numbers(Float32),
            rows(heads, K),
            fake_offsets(spec.index_dtype),
            rows(heads_qk, K),
            rows(heads_qk, K),
            numbers(Float32),
            rows(heads, K),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        dAqk: cute.Tensor,
        dAkk: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dbeta: cute.Tensor,
        dg: cute.Tensor,
        cu_seqlens: cute.Tensor | None,
        dq_out: cute.Tensor,
        dk_out: cute.Tensor,
        dbeta_out: cute.Tensor,
        dg_out: cute.Tensor,
        stream: Any,
    ) -> None:
        """Launch the kernel; dq and dk are float32 `[B, T, HV, K]`, dq_out and dk_out with HQK."""
        slots = num_slots(q.shape[0], q.shape[1], cu_seqlens)
        self.kernel(
            q, k, g, beta, dAqk, dAkk, dq, dk, dbeta, dg, cu_seqlens, dq_out, dk_out, dbeta_out,
            dg_out,
        ).launch(
            grid=[slots * q.shape[2], 1, 1],
            block=[NUM_THREADS, 1, 1],
            smem=self.smem_bytes,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        dAqk: cute.Tensor,
        dAkk: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dbeta: cute.Tensor,
        dg: cute.Tensor,
        cu_seqlens: cute.Tensor | None,
        dq_out: cute.Tensor,
        dk_out: cute.Tensor,
        dbeta_out: cute.Tensor,
        dg_out: cute.Tensor,
    ) -> None:
        slot, head_qk = slot_and_head(q.shape[2])
        place = chunk_place(slot, q.shape[1], cu_seqlens)
        smem = cutlass.memory.SmemAllocator()
        base = shared_address(smem.allocate(self.smem_bytes, self.memory.alignment))
        if place.valid:
            if cutlass.const_expr(self.spec.grouped):
                self.clear_sums(base)
            group = Int32(Uint32(g.shape[2]) // Uint32(q.shape[2]))
            for n in cutlass.range(group, unroll=1):
                head = head_qk * group + n
                cute.arch.sync_threads()  # all warps have read those of the previous head
                self.load(dAqk, dAkk, beta, place, head, base)
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_threads()
                of_beta = cute.make_rmem_tensor((1,), Float32)  # of token `lane`
                of_beta.fill(0.0)
                for part in cutlass.range(self.spec.head_dim_k // CHANNELS, unroll=1):
                    self.channel(
                        (q, k, g, dq, dk, dg),
                        (dq_out, dk_out, dg_out),
                        of_beta,
                        place,
                        head_qk,
                        head,
                        part,
                        base,
                    )
                self.reduce(of_beta, dbeta, dbeta_out, place, head, base)
            if cutlass.const_expr(self.spec.grouped):
                self.store_sums(dq_out, dk_out, place, head_qk, base)

    @cute.jit
    def load(
        self,
        dAqk: cute.Tensor,
        dAkk: cute.Tensor,
        beta: cute.Tensor,
        place: Any,
        head: Int32,
        base: Int32,
    ) -> None:
        """Load a head's dA, and beta; rows past the chunk's end become 0."""
        thread, _, _ = cute.arch.thread_idx()
        units = ROW_BYTES // UNIT_BYTES
        first, unit = Int32(Uint32(thread) >> (units.bit_length() - 1)), thread & (units - 1)
        for x, name in ((dAqk, "aqk"), (dAkk, "akk")):
            source = row_address(x, place.batch, place.start, head) + Int64(unit * UNIT_BYTES)
            shared = base + self.memory[name] + thread * UNIT_BYTES
            for i in cutlass.range_constexpr(0, CHUNK, NUM_THREADS // units):
                at = source + Int64(first + i) * row_bytes(x)
                copy_async(shared + i * ROW_BYTES, at, first + i < place.length)
        cute.arch.cp_async_commit_group()
        if thread < CHUNK:
            token = place.start + cutlass.min(thread, place.length - 1)
            x = Float32(beta[place.batch, token, head])
            store_shared(Float32, base + self.memory["beta"] + thread * 4, [x])

    # -- a channel of a sub-chunk -------------------------------------------------------------

    def own_place(self, part: Any) -> tuple[Any, Any]:
        """Return the thread's sub-chunk, and its channel of the `part`-th 64."""
        _, warp_index = thread_and_warp()
        channel = part * CHANNELS + (warp_index & 1) * WARP_SIZE + cute.arch.lane_idx()
        return Int32(Uint32(warp_index) >> 1), channel

    def of_channel(self, x: cute.Tensor, place: Any, head: Any, channel: Any) -> cute.Tensor:
        """Return the chunk's elements of a channel."""
        offset = (
            Int64(place.batch) * x.stride[0]
            + Int64(place.start) * x.stride[1]
            + Int64(head) * x.stride[2]
            + channel
        )
        # Offsets of 32 bits save registers. The operator copies a tensor whose rows are too far.
        layout = cute.make_layout(CHUNK, stride=Int32(x.stride[1]))
        return cute.make_tensor(x.iterator + offset, layout)

    @cute.jit
    def channel(
        self,
        sources: Any,
        results: Any,
        of_beta: cute.Tensor,
        place: Any,
        head_qk: Int32,
        head: Int32,
        part: Int32,
        base: Int32,
    ) -> None:
        """Compute and store the gradients of the thread's channel and tokens."""
        b, channel = self.own_place(part)
        q, k = (self.of_channel(x, place, head_qk, channel) for x in sources[:2])
        g, dq, dk, dg = (self.of_channel(x, place, head, channel) for x in sources[2:])
        last = place.length - 1
        first = b * SUB_CHUNK

        row_q, row_k, column = (cute.make_rmem_tensor((SUB_CHUNK,), Float32) for _ in range(3))
        for x in (row_q, row_k, column):
            x.fill(0.0)
        # R: of the sub-chunk's first token, and of the next one's
        start = Float32(g[cutlass.min(first, last)])
        after = Float32(g[cutlass.min(first + SUB_CHUNK, last)])
        for other in cutlass.range(b, unroll=1):
            self.earlier(row_q, row_k, k, g, start, first, other * SUB_CHUNK, last, base)
        for other in cutlass.range(b + 1, SUB_CHUNKS, unroll=1):
            self.later(column, q, k, g, after, first, other * SUB_CHUNK, last, base)

        G, k_own, q_own = (cute.make_rmem_tensor((SUB_CHUNK,), Float32) for _ in range(3))
        for i in cutlass.range_constexpr(SUB_CHUNK):
            at = cutlass.min(first + i, last)
            G[i], k_own[i], q_own[i] = Float32(g[at]), Float32(k[at]), Float32(q[at])
        for i in cutlass.range_constexpr(SUB_CHUNK):
            from_start = exp2(G[i] - start)
            row_q[i] = row_q[i] * from_start
            row_k[i] = row_k[i] * from_start
            column[i] = column[i] * exp2(after - G[i])
        self.own(
            (row_q, row_k, column),
            (G, q_own, k_own),
            (dq, dk, dg),
            tuple(
                self.of_channel(x, place, y, channel)
                for x, y in zip(results, (head_qk, head_qk, head), strict=True)
            ),
            of_beta,
            first,
            last,
            part,
            base,
        )

    def vectors(self, name: str, row: Any, column: Any, count: int, base: Any) -> list[Any]:
        """Load `count` neighbouring elements of dA, and a few more if they are no multiple of 4."""
        at = base + self.memory[name] + row * ROW_BYTES + column * 4
        return [x for i in range(0, count, VECTOR) for x in load_shared(Float32, at + 4 * i, 4)]

    @cute.jit
    def earlier(
        self,
        row_q: cute.Tensor,
        row_k: cute.Tensor,
        k: cute.Tensor,
        g: cute.Tensor,
        start: Float32,
        first: Int32,
        other: Int32,
        last: Int32,
        base: Int32,
    ) -> None:
        """Add to the rows the pairs with an earlier sub-chunk."""
        for j in cutlass.range(other, other + SUB_CHUNK, VECTOR, unroll=1):
            decayed = []
            for n in cutlass.range_constexpr(VECTOR):
                # An earlier sub-chunk is whole, unless this one has no tokens.
                at = cutlass.min(j + n, last)
                decayed.append(Float32(k[at]) * exp2(start - Float32(g[at])))
            for i in cutlass.range_constexpr(SUB_CHUNK):
                for x, name in ((row_q, "aqk"), (row_k, "akk")):
                    dA = self.vectors(name, first + i, j, VECTOR, base)
                    total = x[i]
                    for n in cutlass.range_constexpr(VECTOR):
                        total = cute.math.fma(dA[n], decayed[n], total)
                    x[i] = total

    @cute.jit
    def later(
        self,
        column: cute.Tensor,
        q: cute.Tensor,
        k: cute.Tensor,
        g: cute.Tensor,
        after: Float32,
        first: Int32,
        other: Int32,
        last: Int32,
        base: Int32,
    ) -> None:
        """Add to the columns the pairs with a later sub-chunk."""
        for i in cutlass.range(other, other + SUB_CHUNK, unroll=2):
            at = cutlass.min(i, last)
            (beta,) = load_shared(Float32, base + self.memory["beta"] + i * 4)
            decay = exp2(Float32(g[at]) - after)
            decayed_q = Float32(q[at]) * decay
            decayed_k = Float32(k[at]) * decay * beta
            of_qk = self.vectors("aqk", i, first, SUB_CHUNK, base)
            of_kk = self.vectors("akk", i, first, SUB_CHUNK, base)
            for j in cutlass.range_constexpr(SUB_CHUNK):
                total = cute.math.fma(of_qk[j], decayed_q, column[j])
                column[j] = cute.math.fma(of_kk[j], decayed_k, total)

    @cute.jit
    def own(
        self,
        sums: Any,
        values: Any,
        given: Any,
        results: Any,
        of_beta: cute.Tensor,
        first: Int32,
        last: Int32,
        part: Int32,
        base: Int32,
    ) -> None:
        """Add the pairs within the sub-chunk, from its last token to its first. A token's sums are
        complete with those of its own row, and stored at once: this saves registers."""
        row_q, row_k, column = sums
        G, q, k = values
        dq, dk, dg = given
        dq_out, dk_out, dg_out = results
        lane = cute.arch.lane_idx()
        for n in cutlass.range_constexpr(SUB_CHUNK):
            i = SUB_CHUNK - 1 - n
            row = first + i
            of_qk = self.vectors("aqk", row, first, i + 1, base)
            of_kk = self.vectors("akk", row, first, i, base)
            (beta,) = load_shared(Float32, base + self.memory["beta"] + row * 4)
            scaled_k = beta * k[i]
            total_q, total_k = row_q[i], row_k[i]
            for j in cutlass.range_constexpr(i):
                decay = exp2(G[i] - G[j])
                decayed = decay * k[j]
                total_q = cute.math.fma(of_qk[j], decayed, total_q)
                total_k = cute.math.fma(of_kk[j], decayed, total_k)
                both = cute.math.fma(of_qk[j], q[i], of_kk[j] * scaled_k)
                column[j] = cute.math.fma(decay, both, column[j])

            of_token = k[i] * total_k
            for bit in cutlass.range_constexpr(5):
                of_token = of_token + cute.arch.shuffle_sync_bfly(of_token, offset=1 << bit)
            of_beta[0] = of_beta[0] + cutlass.select_(lane == i, of_token, Float32(0.0))
            if row <= last:
                of_row = beta * total_k
                of_gate = q[i] * total_q + k[i] * (of_row - column[i])
                dg_out[row] = Float32(dg[row]) + of_gate
                total_q = Float32(dq[row]) + (total_q + of_qk[i] * k[i])
                total_k = Float32(dk[row]) + (of_row + column[i] + of_qk[i] * q[i])
                if cutlass.const_expr(self.spec.grouped):
                    at = self.sums_at(part, i, base)
                    for x, to in ((total_q, at), (total_k, at + NUM_THREADS * 4)):
                        store_shared(Float32, to, [load_shared(Float32, to)[0] + x])
                else:
                    dq_out[row] = total_q
                    dk_out[row] = total_k

    # -- sums over a group --------------------------------------------------------------------

    def sums_at(self, part: Any, i: Any, base: Any) -> Any:
        """Return the address of the thread's sum of dq of a token; that of dk is a row further."""
        thread, _, _ = cute.arch.thread_idx()
        row = (part * SUB_CHUNK + i) * 2
        return base + self.memory["sums"] + row * (NUM_THREADS * 4) + thread * 4

    @cute.jit
    def clear_sums(self, base: Int32) -> None:
        for i in cutlass.range(SUB_CHUNK * (self.spec.head_dim_k // CHANNELS), unroll=4):
            at = self.sums_at(0, i, base)
            for n in cutlass.range_constexpr(2):
                store_shared(Float32, at + n * (NUM_THREADS * 4), [Float32(0.0)])

    @cute.jit
    def store_sums(
        self, dq: cute.Tensor, dk: cute.Tensor, place: Any, head: Int32, base: Int32
    ) -> None:
        for part in cutlass.range(self.spec.head_dim_k // CHANNELS, unroll=1):
            b, channel = self.own_place(part)
            first = b * SUB_CHUNK
            targets = [self.of_channel(x, place, head, channel) for x in (dq, dk)]
            for i in cutlass.range(SUB_CHUNK, unroll=4):
                if first + i < place.length:
                    at = self.sums_at(part, i, base)
                    targets[0][first + i] = load_shared(Float32, at)[0]
                    targets[1][first + i] = load_shared(Float32, at + NUM_THREADS * 4)[0]

    # -- beta ---------------------------------------------------------------------------------

    @cute.jit
    def reduce(
        self,
        of_beta: cute.Tensor,
        dbeta: cute.Tensor,
        dbeta_out: cute.Tensor,
        place: Any,
        head: Int32,
        base: Int32,
    ) -> None:
        """Store dbeta, the sum of the two warps' parts."""
        thread, warp_index = thread_and_warp()
        lane = cute.arch.lane_idx()
        if lane < SUB_CHUNK:
            at = (warp_index & 1) * CHUNK + Int32(Uint32(warp_index) >> 1) * SUB_CHUNK + lane
            store_shared(Float32, base + self.memory["dbeta"] + at * 4, [of_beta[0]])
        cute.arch.sync_threads()
        if thread < place.length:
            at = base + self.memory["dbeta"] + thread * 4
            token = place.start + thread
            total = load_shared(Float32, at)[0] + load_shared(Float32, at + 4 * CHUNK)[0]
            dbeta_out[place.batch, token, head] = total + dbeta[place.batch, token, head]
