"""The pass of the state through the chunks, from w, u and kg: the states h at the chunks' starts
and the corrections v_new.

    h = S        v_new = u - w S        S <- Diag(exp2(G_e)) S + kg^T v_new

All matrices are transposed, as in `state_pass`. A warp owns 16 columns of V and all of K. S^T, 16
by K, is in the accumulators of its products. Rounded accumulators are h and, without moving between
threads, the left operand of the next product. v_new^T is a left operand in the same way. So the
recurrence never leaves a warp's registers, and warps share only the chunk's rows in shared memory.

`products="wgmma"` (sm_90a) distributes fragments over threads as "mma" does, and reads the rows
once rather than once per warp. wgmmas overlap the start of copies and the stores of results.

    CTA (tile of V, value head, sequence), tile_v / 16 warps
      load      w, kg and u of chunk c + num_stages - 1, by cp.async; G_e of chunk c + 1
      keep      store h
      correct   v_new
      update    S
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....common.arguments import fake_matrices, fake_offsets, fake_rows
from ....common.decay import decay_exp2
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.ptx.matrices import transpose_matrix
from ....common.ptx.memory import (
    load_global,
    shared_address,
    store_global,
    store_global_where,
    store_shared,
)
from ....common.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemory
from ....common.spec import WARP_SIZE
from ..chunks import (
    CHUNK_SHIFT,
    SequencePlace,
    chunks_before,
    num_sequences,
    row_address,
    row_bytes,
    sequence_place,
)
from ..spec import CHUNK, DeltaHBackwardSpec, DeltaHSpec
from ..state import STEP, TransposedState
from ..tiles import (
    FRAGMENT_ROWS,
    copy_rows,
    paired,
    paired_offset,
    thread_and_warp,
    transposed_accumulators,
)

TILE_V = 64  # columns of V per CTA; with 32, or 128 on sm_90, the kernel would spill


class Placeholders(NamedTuple):
    """Placeholders of arguments that `delta_h` and its backward share, from
    `ChunkStates.placeholders`."""

    of_k: Callable[[], Any]
    of_v: Callable[[], Any]
    g: Any
    start: Any  # initial_state, or the gradient of initial_state
    end: Any  # final_state, or the gradient of final_state
    cu_seqlens: Any
    h: Any  # h, or the gradient of h


class ChunkStates:
    """The common parts of `delta_h` and its backward: the state's registers, the decays of chunks,
    and the stores of h and v_new."""

    def __init__(self, spec: DeltaHSpec | DeltaHBackwardSpec, stage: SharedMemory):
        """stage: the buffers of one stage of the ring, which holds one chunk."""
        self.spec, self.dtype = spec, DTYPE[spec.dtype]
        self.state = TransposedState(self.dtype, spec.head_dim_k, spec.products)
        if spec.tile_v != TILE_V:
            raise ValueError(f"tile_v is {spec.tile_v}, must be {TILE_V}")
        if spec.num_stages < 1:
            raise ValueError(f"num_stages is {spec.num_stages}, must be at least 1")
        self.num_warps = spec.tile_v // FRAGMENT_ROWS
        self.num_threads = self.num_warps * WARP_SIZE
        self.decays = -(-spec.head_dim_k // self.num_threads)  # channels of a thread
        self.stage = stage
        self.memory = SharedMemory(
            Buffer.ring("chunk", self.stage, spec.num_stages),
            Buffer("decay", Float32, spec.head_dim_k, stages=2, holds="exp2(G_e)"),
        )
        self.smem_bytes = self.memory.nbytes
        self.stage_bytes = self.memory.buffers["chunk"].stage_bytes
        self.decay_bytes = self.memory.buffers["decay"].stage_bytes

    def placeholders(self) -> Placeholders:
        """Tensors to compile against, in which sizes other than K and V are symbols."""
        spec = self.spec
        batch, tokens, heads, chunks = (cute.sym_int() for _ in range(4))
        sequences = cute.sym_int() if spec.varlen else batch

        def rows(columns: int, element: Any = self.dtype) -> Any:
            return fake_rows(element, (batch, tokens, heads, columns))

        K, V = spec.head_dim_k, spec.head_dim_v
        matrix = (V, K) if spec.state_v_first else (K, V)
        leading = (sequences, heads)
        return Placeholders(
            of_k=lambda: rows(K),
            of_v=lambda: rows(V),
            g=rows(K, Float32),
            start=fake_matrices(leading, matrix) if spec.has_initial_state else None,
            end=fake_matrices(leading, matrix) if spec.has_final_state else None,
            cu_seqlens=fake_offsets(spec.index_dtype),
            h=fake_matrices((batch, chunks, heads), matrix, self.dtype),
        )

    def launch_config(self, rows: Any, cu_seqlens: Any) -> dict[str, Any]:
        """The launch for rows of V, `[B, T, HV, V]`; for host code."""
        tiles, sequences = self.spec.head_dim_v // self.spec.tile_v, rows.shape[0]
        return {
            "grid": [tiles, rows.shape[2], num_sequences(sequences, cu_seqlens)],
            "block": [self.num_threads, 1, 1],
            "smem": self.smem_bytes,
            "min_blocks_per_mp": 1,
        }

    def chunks_of(self, sequence: Int32, tokens: Any, cu_seqlens: Any, h: cute.Tensor) -> Any:
        """Return (place of a sequence, its first chunk in h, the number of its chunks)."""
        # Loaded values are uniform, which the compiler cannot know; this saves registers.
        place = SequencePlace(
            *map(cute.arch.make_warp_uniform, sequence_place(sequence, tokens, cu_seqlens))
        )
        first = cute.arch.make_warp_uniform(chunks_before(sequence, tokens, cu_seqlens))
        num_chunks = (place.length + (CHUNK - 1)) >> CHUNK_SHIFT
        # The chunks stay within h for any cu_seqlens.
        return place, first, cutlass.min(num_chunks, h.shape[1] - first)

    # -- decays -------------------------------------------------------------------------------

    @cute.jit
    def load_decay(
        self,
        logs: cute.Tensor,
        c: Int32,
        num_chunks: Int32,
        g: cute.Tensor,
        place: Any,
        head: Int32,
    ) -> None:
        """Load G_e of chunk c, if there is one."""
        thread, _, _ = cute.arch.thread_idx()
        if c < num_chunks and thread < self.spec.head_dim_k:
            last = cutlass.min((c + 1) * CHUNK, place.length) - 1
            address = row_address(g, place.batch, place.start + last, head, thread)
            for i in cutlass.range_constexpr(self.decays):
                logs[i] = load_global(Float32, address + i * self.num_threads * 4)[0]

    @cute.jit
    def keep_decay(self, logs: cute.Tensor, c: Int32, base: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        if thread < self.spec.head_dim_k:
            at = base + self.memory["decay"] + (c & 1) * self.decay_bytes + thread * 4
            for i in cutlass.range_constexpr(self.decays):
                store_shared(Float32, at + i * self.num_threads * 4, [decay_exp2(logs[i])])

    # -- h and v_new --------------------------------------------------------------------------

    def store_h(
        self, s: list[Any], h: cute.Tensor, batch: Int32, index: Any, head: Int32, first_v: Int32
    ) -> None:
        """Store the warp's 16 columns of V of h, in whole sectors."""
        spec = self.spec
        row = cute.arch.lane_idx() >> 2
        start = h.iterator + (
            Int64(batch) * h.stride[0] + Int64(index) * h.stride[1] + Int64(head) * h.stride[2]
        )
        if spec.state_v_first:
            start = start + (first_v + row) * spec.head_dim_k
        else:
            start = start + (row * spec.head_dim_v + first_v)
        start = start.toint() + paired_offset()
        for step in range(spec.head_dim_k // STEP):
            part = s[4 * step : 4 * step + 4]
            for i in range(2):
                if spec.state_v_first:
                    at = start + (8 * i * spec.head_dim_k + STEP * step) * 2
                    x = paired(part[i], part[2 + i])
                else:
                    at = start + (STEP * step + 8 * i) * spec.head_dim_v * 2
                    x = paired(*(transpose_matrix(y) for y in part[2 * i : 2 * i + 2]))
                store_global(Int32, at, x)

    def store_v_new(
        self,
        corrections: list[Any],
        v_new: cute.Tensor,
        place: Any,
        head: Int32,
        first_v: Int32,
        c: Any,
    ) -> None:
        row = c * CHUNK + (cute.arch.lane_idx() >> 2)
        start = row_address(v_new, place.batch, place.start + row, head, first_v)
        start = start + paired_offset()
        for j in range(CHUNK // 8):
            x = paired(*(transpose_matrix(corrections[2 * j + half]) for half in range(2)))
            at = start + Int64(8 * j) * row_bytes(v_new)
            store_global_where(row + 8 * j < place.length, at, *x)


class Arguments(NamedTuple):
    """The kernel's arguments."""

    kg: cute.Tensor
    w: cute.Tensor
    u: cute.Tensor
    g: cute.Tensor
    initial_state: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    h: cute.Tensor
    v_new: cute.Tensor | None
    final_state: cute.Tensor | None


class KdaDeltaH(ChunkStates):
    """The kernel for one DeltaHSpec; see the module's docstring."""

    def __init__(self, spec: DeltaHSpec):
        dtype, rows = DTYPE[spec.dtype], CHUNK * spec.head_dim_k
        stage = SharedMemory(
            Buffer("w", dtype, rows, alignment=SWIZZLE_ALIGNMENT),
            Buffer("kg", dtype, rows),
            Buffer("u", dtype, CHUNK * spec.tile_v),
        )
        super().__init__(spec, stage)

    def fake_args(self) -> tuple[Any, ...]:
        x = self.placeholders()
        return placeholders(
            Arguments(
                kg=x.of_k(),
                w=x.of_k(),
                u=x.of_v(),
                g=x.g,
                initial_state=x.start,
                cu_seqlens=x.cu_seqlens,
                h=x.h,
                v_new=x.of_v() if self.spec.store_v_new else None,
                final_state=x.end,
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        a, stream = gathered(Arguments, args)
        self.kernel(a).launch(**self.launch_config(a.u, a.cu_seqlens), stream=stream)

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        spec = self.spec
        tile, head, sequence = cute.arch.block_idx()
        _, warp_index = thread_and_warp()
        place, first_chunk, num_chunks = self.chunks_of(sequence, x.u.shape[1], x.cu_seqlens, x.h)
        smem = cutlass.memory.SmemAllocator()
        base = shared_address(smem.allocate(self.smem_bytes, self.memory.alignment))
        tile_start = tile * spec.tile_v
        first_v = tile_start + warp_index * FRAGMENT_ROWS

        for c in cutlass.range_constexpr(spec.num_stages - 1):
            self.load(c, base + c * self.stage_bytes, x.kg, x.w, x.u, place, head, tile_start)
        logs = cute.make_rmem_tensor((self.decays,), Float32)  # G_e of the thread's channels
        logs.fill(0.0)
        self.load_decay(logs, 0, num_chunks, x.g, place, head)
        state = self.state.empty()
        self.state.load(state, x.initial_state, spec.state_v_first, sequence, head, first_v)
        self.keep_decay(logs, 0, base)

        stage = Int32(0)
        for c in cutlass.range(num_chunks, unroll=1):
            ahead = stage + (spec.num_stages - 1)
            ahead = ahead - spec.num_stages if ahead >= spec.num_stages else ahead
            if cutlass.const_expr(spec.num_stages == 1):
                # All warps have read the previous chunk.
                cute.arch.sync_threads()
                self.load(c, base, x.kg, x.w, x.u, place, head, tile_start)
                cute.arch.cp_async_wait_group(0)
            else:
                cute.arch.cp_async_wait_group(spec.num_stages - 2)
            if cutlass.const_expr(self.state.wgmma):
                cute.arch.fence_proxy("async.shared", space="cta")
            # All threads' copies of this chunk have finished, and all warps have read the previous
            # chunk.
            cute.arch.sync_threads()
            copies = (c + spec.num_stages - 1, base + ahead * self.stage_bytes, x.kg, x.w, x.u)
            self.load_decay(logs, c + 1, num_chunks, x.g, place, head)
            self.chunk(
                state,
                base + stage * self.stage_bytes,
                base + self.memory["decay"] + (c & 1) * self.decay_bytes,
                x.h,
                x.v_new,
                place,
                head,
                tile_start,
                warp_index,
                c,
                first_chunk + c,
                copies,
            )
            self.keep_decay(logs, c + 1, base)
            stage = stage + 1
            stage = Int32(0) if stage == spec.num_stages else stage

        cute.arch.cp_async_wait_group(0)
        self.state.store(state, x.final_state, spec.state_v_first, sequence, head, first_v)

    # -- loads --------------------------------------------------------------------------------

    def load(
        self,
        c: Any,
        stage: Any,
        kg: cute.Tensor,
        w: cute.Tensor,
        u: cute.Tensor,
        place: Any,
        head: Int32,
        tile_start: Int32,
    ) -> None:
        """Start the copies of chunk c. Past the last chunk, fill the stage with zeros."""
        start = place.start + c * CHUNK
        length = place.length - c * CHUNK
        for x, offset, columns, first in (
            (w, self.stage["w"], self.spec.head_dim_k, 0),
            (u, self.stage["u"], self.spec.tile_v, tile_start),
            (kg, self.stage["kg"], self.spec.head_dim_k, 0),
        ):
            copy_rows(
                stage + offset,
                row_address(x, place.batch, start, head, first),
                row_bytes(x),
                length,
                columns,
                self.num_threads,
            )
        cute.arch.cp_async_commit_group()

    # -- a chunk ------------------------------------------------------------------------------

    def chunk(
        self,
        state: cute.Tensor,
        stage: Any,
        decay: Any,
        h: cute.Tensor,
        v_new: cute.Tensor | None,
        place: Any,
        head: Int32,
        tile_start: Int32,
        warp_index: Any,
        c: Any,
        index: Any,
        copies: tuple[Any, Any, Any, Any, Any],
    ) -> None:
        """Update the state, and start the loads given by `copies`. A branch between the start and
        the wait of a `wgmma` would make the compiler serialise the wgmmas."""
        spec, dtype = self.spec, self.dtype
        first_v = tile_start + warp_index * FRAGMENT_ROWS

        # keep and correct: `s` is S^T rounded, 4 registers for each 16 of K
        s = self.state.operand(self.state.values(state))
        ahead = spec.num_stages > 1
        # With wgmma, copies start while the product runs.
        if ahead and not self.state.wgmma:
            self.load(*copies, place, head, tile_start)
        recalled = self.state.times_rows(s, stage + self.stage["w"])
        if ahead and self.state.wgmma:
            self.load(*copies, place, head, tile_start)
        self.store_h(s, h, place.batch, index, head, first_v)
        u_t = []
        for j in range(0, CHUNK // 8, 2):
            u_t += transposed_accumulators(
                dtype, stage + self.stage["u"], 8 * j, warp_index * FRAGMENT_ROWS
            )
        decayed = self.state.decayed(state, decay)
        recalled = self.state.done(recalled)
        corrections = self.state.operand([x - y for x, y in zip(u_t, recalled, strict=True)])

        # update
        updated = self.state.times_columns(corrections, stage + self.stage["kg"], decayed)
        if spec.store_v_new:
            self.store_v_new(corrections, v_new, place, head, first_v, c)
        self.state.assign(state, self.state.done(updated))
