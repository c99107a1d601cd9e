"""The gradients of q, k, beta and G through the products within a chunk.

With D_ij = exp2(G_i - G_j), and the gradients dA (`dAqk`) of the product of q and k, and dL
(`dAkk`) of L:

    row_q_i  = sum_j dA_ij D_ij * k_j     j < i        dq_i = dA_ii k_i + row_q_i
    row_k_i  = sum_j dL_ij D_ij * k_j     j < i        dbeta_i = row_k_i . k_i
    column_j = sum_i D_ij * (dA_ij q_i + beta_i dL_ij k_i)     i > j
                                          dk_i = dA_ii q_i + beta_i row_k_i + column_i
    dG_i = q_i * row_q_i + k_i * (beta_i row_k_i - column_i)

The gradients are added to the other stages' results. Then dq and dk are summed over the value heads
that share q and k. A token's product with itself has no decay, so the product contributes nothing
to dG.

Sums run on the CUDA cores in float32, since this kernel moves many bytes. A thread has two channels
of 8 tokens, so that an element of dA in shared memory serves two channels. Between blocks of 8
tokens D_ij is split in two factors at a token between i and j, as in the forward. For rows, this
token is the first of the later block; for columns, the first after the earlier block. Within a
block D_ij is computed for every pair. No factor exceeds 1.

    CTA (slot of a chunk, head of q and k), 8 warps with 8 tokens each
      for each value head
        load    dAqk, dAkk by cp.async; beta
        for each 64 channels
          earlier, later  the pairs with the other 7 blocks of tokens
          own             the pairs within the block; store dG, and dq and dk, or add dq and dk
                          to the sums in shared memory
        reduce  dbeta
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ....common.arguments import fake_offsets, fake_rows, fake_strided
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.ptx.async_copy import copy_async
from ....common.ptx.convert import unpack
from ....common.ptx.math import exp2
from ....common.ptx.memory import (
    load_global,
    load_shared,
    shared_address,
    store_global,
    store_shared,
)
from ....common.smem import Buffer, SharedMemory
from ....common.spec import SMALLEST_SMEM_BYTES, WARP_SIZE
from ..chunks import Rows, chunk_place, num_slots, row_address, row_bytes, row_offset, slot_and_head
from ..spec import CHUNK, IntraBackwardSpec
from ..tiles import UNIT_BYTES, thread_and_warp

TOKENS = 8  # tokens per warp
BLOCKS = CHUNK // TOKENS
CHANNELS = 2  # channels per thread
PART = CHANNELS * WARP_SIZE  # channels of a warp at once
NUM_THREADS = WARP_SIZE * BLOCKS
VECTOR = 4  # elements of dA per load
ROW_BYTES = CHUNK * 4  # bytes of a row of dA


class Arguments(NamedTuple):
    """The kernel's arguments."""

    q: cute.Tensor
    k: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    dAqk: cute.Tensor
    dAkk: cute.Tensor
    dq: cute.Tensor
    dk: cute.Tensor
    dbeta: cute.Tensor
    dg: cute.Tensor
    cu_seqlens: cute.Tensor | None
    dq_out: cute.Tensor
    dk_out: cute.Tensor
    dbeta_out: cute.Tensor
    dg_out: cute.Tensor


class KdaIntraBackward:
    """The kernel for one IntraBackwardSpec; see the module's docstring."""

    def __init__(self, spec: IntraBackwardSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.beta_dtype = DTYPE[spec.beta_dtype]
        # Sums over a group: dq and dk of the thread's tokens and channels.
        sums = 2 * TOKENS * (spec.head_dim_k // PART) if spec.grouped else 0
        self.memory = SharedMemory(
            Buffer("aqk", Float32, CHUNK * CHUNK),
            Buffer("akk", Float32, CHUNK * CHUNK),
            Buffer("beta", Float32, CHUNK),
            Buffer("sums", Float32, NUM_THREADS * CHANNELS, stages=sums),
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
        return placeholders(
            Arguments(
                q=rows(heads_qk, K, dtype),
                k=rows(heads_qk, K, dtype),
                g=rows(heads, K),
                beta=numbers(self.beta_dtype),
                dAqk=rows(heads, CHUNK),
                dAkk=rows(heads, CHUNK),
                dq=rows(heads, K),
                dk=rows(heads, K),
                dbeta=numbers(Float32),
                dg=rows(heads, K),
                cu_seqlens=fake_offsets(spec.index_dtype),
                dq_out=rows(heads_qk, K),
                dk_out=rows(heads_qk, K),
                dbeta_out=numbers(Float32),
                dg_out=rows(heads, K),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel; dq and dk are float32 `[B, T, HV, K]`, dq_out and dk_out with HQK."""
        a, stream = gathered(Arguments, args)
        slots = num_slots(a.q.shape[0], a.q.shape[1], a.cu_seqlens)
        self.kernel(a).launch(
            grid=[slots * a.q.shape[2], 1, 1],
            block=[NUM_THREADS, 1, 1],
            smem=self.smem_bytes,
            min_blocks_per_mp=2,
            preferred_smem_carveout=100 if self.spec.grouped else 50,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        slot, head_qk = slot_and_head(x.q.shape[2])
        place = chunk_place(slot, x.q.shape[1], x.cu_seqlens)
        smem = cutlass.memory.SmemAllocator()
        base = shared_address(smem.allocate(self.smem_bytes, self.memory.alignment))
        if place.valid:
            if cutlass.const_expr(self.spec.grouped):
                self.clear_sums(base)
            group = Int32(Uint32(x.g.shape[2]) // Uint32(x.q.shape[2]))
            for n in cutlass.range(group, unroll=1):
                head = head_qk * group + n
                cute.arch.sync_threads()  # all warps are done with the previous head
                self.load(x.dAqk, x.dAkk, x.beta, place, head, base)
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_threads()
                of_beta = cute.make_rmem_tensor((1,), Float32)  # dbeta of the warp's token `lane`
                of_beta.fill(0.0)
                for part in cutlass.range(self.spec.head_dim_k // PART, unroll=1):
                    self.channels(
                        (x.q, x.k, x.g, x.dq, x.dk, x.dg),
                        (x.dq_out, x.dk_out, x.dg_out),
                        of_beta,
                        place,
                        head_qk,
                        head,
                        part,
                        base,
                    )
                self.store_dbeta(of_beta, x.dbeta, x.dbeta_out, place, head)
            if cutlass.const_expr(self.spec.grouped):
                self.store_sums(x.dq_out, x.dk_out, place, head_qk, base)

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

    # -- two channels of a block of tokens ----------------------------------------------------

    def own_place(self, part: Any) -> tuple[Any, Any]:
        """Return the warp's first token, and the thread's first channel of the `part`-th 64."""
        _, warp_index = thread_and_warp()
        return warp_index * TOKENS, part * PART + cute.arch.lane_idx() * CHANNELS

    def of_channels(self, x: cute.Tensor, place: Any, head: Int32, channel: Int32) -> Rows:
        """Return the chunk's rows of x, from a channel on."""
        start = row_address(x, place.batch, place.start, head, channel)
        return Rows(start, Uint32(x.stride[1] * (x.element_type.width // 8)))

    def load_pair(self, rows: Rows, row: Any) -> Any:
        """Load two channels of q or k."""
        (x,) = load_global(Int32, rows.start + row_offset(row, rows.pitch))
        return unpack(self.dtype, x)

    def load_floats(self, rows: Rows, row: Any) -> Any:
        return load_global(Float32, rows.start + row_offset(row, rows.pitch), CHANNELS)

    def store_floats(self, rows: Rows, row: Any, values: Sequence[Any]) -> None:
        store_global(Float32, rows.start + row_offset(row, rows.pitch), values)

    @cute.jit
    def channels(
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
        """Compute and store the gradients of the thread's channels and tokens."""
        first, channel = self.own_place(part)
        q, k = (self.of_channels(x, place, head_qk, channel) for x in sources[:2])
        g, dq, dk, dg = (self.of_channels(x, place, head, channel) for x in sources[2:])
        last = place.length - 1

        count = TOKENS * CHANNELS
        row_q, row_k, column = (cute.make_rmem_tensor((count,), Float32) for _ in range(3))
        for x in (row_q, row_k, column):
            x.fill(0.0)
        start = self.load_floats(g, cutlass.min(first, last))
        after = self.load_floats(g, cutlass.min(first + TOKENS, last))
        for other in cutlass.range(0, first, TOKENS, unroll=1):
            self.earlier(row_q, row_k, k, g, start, first, other, last, base)
        for other in cutlass.range(first + TOKENS, CHUNK, TOKENS, unroll=1):
            self.later(column, q, k, g, after, first, other, last, base)

        G, k_own = (cute.make_rmem_tensor((count,), Float32) for _ in range(2))
        for i in cutlass.range_constexpr(TOKENS):
            row = cutlass.min(first + i, last)
            totals, keys = self.load_floats(g, row), self.load_pair(k, row)
            for n in cutlass.range_constexpr(CHANNELS):
                at = CHANNELS * i + n
                G[at], k_own[at] = totals[n], keys[n]
                from_start = exp2(totals[n] - start[n])
                row_q[at] = row_q[at] * from_start
                row_k[at] = row_k[at] * from_start
                column[at] = column[at] * exp2(after[n] - totals[n])
        self.own(
            (row_q, row_k, column),
            (G, k_own),
            (q, dq, dk, dg),
            tuple(
                self.of_channels(x, place, y, channel)
                for x, y in zip(results, (head_qk, head_qk, head), strict=True)
            ),
            of_beta,
            first,
            last,
            part,
            base,
        )

    def vectors(self, name: str, row: Any, column: Any, count: int, base: Int32) -> list[Any]:
        """Load `count` neighbouring elements of dA, and a few more if they are no multiple of 4."""
        at = base + self.memory[name] + row * ROW_BYTES + column * 4
        return [x for i in range(0, count, VECTOR) for x in load_shared(Float32, at + 4 * i, 4)]

    @cute.jit
    def earlier(
        self,
        row_q: cute.Tensor,
        row_k: cute.Tensor,
        k: Any,
        g: Any,
        start: Any,
        first: Int32,
        other: Int32,
        last: Int32,
        base: Int32,
    ) -> None:
        """Add to row_q and row_k the terms of the tokens j in the earlier block `other`, without
        the row's factor exp2(G_i - start)."""
        for j in cutlass.range(other, other + TOKENS, VECTOR, unroll=1):
            decayed = []
            for m in cutlass.range_constexpr(VECTOR):
                # An earlier block is full, unless this block has no tokens.
                row = cutlass.min(j + m, last)
                totals, keys = self.load_floats(g, row), self.load_pair(k, row)
                decayed.append([keys[n] * exp2(start[n] - totals[n]) for n in range(CHANNELS)])
            for i in cutlass.range_constexpr(TOKENS):
                for x, name in ((row_q, "aqk"), (row_k, "akk")):
                    dA = self.vectors(name, first + i, j, VECTOR, base)
                    for n in cutlass.range_constexpr(CHANNELS):
                        total = x[CHANNELS * i + n]
                        for m in cutlass.range_constexpr(VECTOR):
                            total = cute.math.fma(dA[m], decayed[m][n], total)
                        x[CHANNELS * i + n] = total

    @cute.jit
    def later(
        self,
        column: cute.Tensor,
        q: Any,
        k: Any,
        g: Any,
        after: Any,
        first: Int32,
        other: Int32,
        last: Int32,
        base: Int32,
    ) -> None:
        """Add to `column` the terms of the tokens i in the later block `other`, without the
        column's factor exp2(after - G_j)."""
        for i in cutlass.range(other, other + TOKENS, unroll=4):
            row = cutlass.min(i, last)
            (beta,) = load_shared(Float32, base + self.memory["beta"] + i * 4)
            totals = self.load_floats(g, row)
            queries, keys = self.load_pair(q, row), self.load_pair(k, row)
            of_qk = self.vectors("aqk", i, first, TOKENS, base)
            of_kk = self.vectors("akk", i, first, TOKENS, base)
            for n in cutlass.range_constexpr(CHANNELS):
                decay = exp2(totals[n] - after[n])
                decayed_q, decayed_k = queries[n] * decay, keys[n] * decay * beta
                for j in cutlass.range_constexpr(TOKENS):
                    total = cute.math.fma(of_qk[j], decayed_q, column[CHANNELS * j + n])
                    column[CHANNELS * j + n] = cute.math.fma(of_kk[j], decayed_k, total)

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
        """Add the pairs within the block, from its last token to its first. Once its own row is
        added, a token's sums are complete and are stored at once, which saves registers."""
        row_q, row_k, column = sums
        G, k = values
        q, dq, dk, dg = given
        dq_out, dk_out, dg_out = results
        lane = cute.arch.lane_idx()
        for down in cutlass.range_constexpr(TOKENS):
            i = TOKENS - 1 - down
            row = first + i
            of_qk = self.vectors("aqk", row, first, i + 1, base)
            of_kk = self.vectors("akk", row, first, i, base)
            (beta,) = load_shared(Float32, base + self.memory["beta"] + row * 4)
            queries = self.load_pair(q, cutlass.min(row, last))
            of_q, of_k, of_row, of_gate = [], [], [], []
            of_token = Float32(0.0)
            for n in cutlass.range_constexpr(CHANNELS):
                at = CHANNELS * i + n
                scaled_k = beta * k[at]
                total_q, total_k = row_q[at], row_k[at]
                for j in cutlass.range_constexpr(i):
                    earlier = CHANNELS * j + n
                    decay = exp2(G[at] - G[earlier])
                    decayed = decay * k[earlier]
                    total_q = cute.math.fma(of_qk[j], decayed, total_q)
                    total_k = cute.math.fma(of_kk[j], decayed, total_k)
                    both = cute.math.fma(of_qk[j], queries[n], of_kk[j] * scaled_k)
                    column[earlier] = cute.math.fma(decay, both, column[earlier])
                of_token = of_token + k[at] * total_k
                of_row = beta * total_k
                of_gate.append(queries[n] * total_q + k[at] * (of_row - column[at]))
                of_q.append(total_q + of_qk[i] * k[at])
                of_k.append(of_row + column[at] + of_qk[i] * queries[n])
            for bit in cutlass.range_constexpr(5):
                of_token = of_token + cute.arch.shuffle_sync_bfly(of_token, offset=1 << bit)
            of_beta[0] = of_beta[0] + cutlass.select_(lane == i, of_token, Float32(0.0))
            if row <= last:
                for x, rows in ((of_q, dq), (of_k, dk), (of_gate, dg)):
                    others = self.load_floats(rows, row)
                    for n in cutlass.range_constexpr(CHANNELS):
                        x[n] = x[n] + others[n]
                self.store_floats(dg_out, row, of_gate)
                if cutlass.const_expr(self.spec.grouped):
                    at_sums = self.sums_at(part, i, base)
                    for x, to in ((of_q, at_sums), (of_k, at_sums + NUM_THREADS * 8)):
                        others = load_shared(Float32, to, CHANNELS)
                        store_shared(Float32, to, [others[n] + x[n] for n in range(CHANNELS)])
                else:
                    self.store_floats(dq_out, row, of_q)
                    self.store_floats(dk_out, row, of_k)

    # -- sums over a group --------------------------------------------------------------------

    def sums_at(self, part: Any, i: Any, base: Int32) -> Any:
        """Return the address of the thread's sums of dq of a token. The sums of dk lie one row
        behind the sums of dq."""
        thread, _, _ = cute.arch.thread_idx()
        row = (part * TOKENS + i) * 2
        return base + self.memory["sums"] + (row * NUM_THREADS + thread) * (4 * CHANNELS)

    @cute.jit
    def clear_sums(self, base: Int32) -> None:
        for i in cutlass.range(TOKENS * (self.spec.head_dim_k // PART), unroll=4):
            at = self.sums_at(0, i, base)
            for n in cutlass.range_constexpr(2):
                store_shared(Float32, at + n * (NUM_THREADS * 8), [Float32(0.0)] * CHANNELS)

    @cute.jit
    def store_sums(
        self, dq: cute.Tensor, dk: cute.Tensor, place: Any, head: Int32, base: Int32
    ) -> None:
        for part in cutlass.range(self.spec.head_dim_k // PART, unroll=1):
            first, channel = self.own_place(part)
            targets = [self.of_channels(x, place, head, channel) for x in (dq, dk)]
            for i in cutlass.range(TOKENS, unroll=4):
                if first + i < place.length:
                    at = self.sums_at(part, i, base)
                    for n in cutlass.range_constexpr(2):
                        x = load_shared(Float32, at + n * (NUM_THREADS * 8), CHANNELS)
                        self.store_floats(targets[n], first + i, x)

    # -- beta ---------------------------------------------------------------------------------

    @cute.jit
    def store_dbeta(
        self,
        of_beta: cute.Tensor,
        dbeta: cute.Tensor,
        dbeta_out: cute.Tensor,
        place: Any,
        head: Int32,
    ) -> None:
        lane = cute.arch.lane_idx()
        first, _ = self.own_place(0)
        if lane < TOKENS and first + lane < place.length:
            token = place.start + first + lane
            dbeta_out[place.batch, token, head] = of_beta[0] + dbeta[place.batch, token, head]
