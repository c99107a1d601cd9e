"""KDA's pass of the state through the chunks, with the output: second kernel of the fused path.

`prepare` has computed kd, qg, kg, Akk, Aqk and the decay of every chunk. With S the state at the
chunk's start, a K by V matrix, a chunk computes

    r     = v - kd S                   residuals of the delta rule
    v_new = Akk Diag(beta) r           corrections of the chunk's tokens
    o     = qg S + Aqk v_new
    S    <- Diag(decay) S + kg^T v_new

All matrices are transposed. A warp owns 16 columns of V and all of K: S^T, 16 by K, are the
accumulators of its products. Packed to 16 bits, in the same registers, they are the left operand of
the next products, and so are r^T and v_new^T. So the recurrence never leaves a warp's registers,
and warps share only the chunk's tiles in shared memory.

    CTA (tile of V, value head, sequence)
      warp tile_v / 16     load      tiles, decay and v of chunk after chunk
      the warps before it  remember  start kd S and qg S
                           store     o of the previous chunk
                           correct   r, then v_new
                           update    S; and o, in registers

`products="wgmma"` (sm_90a) has the same fragments in the same threads.

One long sequence leaves most SMs idle, so it may be split in segments. A segment's effect on the
state is affine, S' = M S + B. This kernel computes B from a state of 0, and M from the identity
with values of 0. So `segments="transitions"` passes [B | M] through every segment but the last,
without outputs. The kernel of `segments` turns these into the states at the segments' starts, from
which `segments="outputs"` runs all segments.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from ....common.arguments import fake_matrices, fake_offsets, fake_rows
from ....common.dtypes import DTYPE
from ....common.pipeline import Barriers, Edge, Kind, Pipeline, Role, report_names
from ....common.ptx import mbarrier
from ....common.ptx.async_copy import copies_arrive, copy_async, copy_bulk
from ....common.ptx.convert import unpack
from ....common.ptx.matrices import load_matrices, transpose_matrix
from ....common.ptx.memory import shared_address, store_global_where
from ....common.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemory
from ....common.spec import MBARRIER_BYTES, WARP_SIZE
from ..chunks import num_sequences, row_address, sequence_place
from ..spec import CHUNK, StatePassSpec, record_elements
from ..state import TransposedState
from ..tiles import (
    SUB_TILE_BYTES,
    UNIT_BYTES,
)

KD_STEP = 2 * SUB_TILE_BYTES  # stride of the sub-tiles of kd, and of qg


class KdaStatePass:
    """The kernel for one StatePassSpec; see the module's docstring."""

    def __init__(self, spec: StatePassSpec):
        self.spec, self.dtype = spec, DTYPE[spec.dtype]
        self.state = TransposedState(self.dtype, spec.head_dim_k, spec.products, KD_STEP)
        self.num_warps = spec.tile_v // 16
        self.bulk = spec.copies == "bulk"
        self.transitions = spec.segments == "transitions"
        state = Role("state", range(self.num_warps))
        load = Role("load", range(self.num_warps, self.num_warps + 1))
        self.roles = (state, load)
        # Every lane copies part of v; without bulk copies, part of the tiles too.
        copied = Kind.THREADS | (Kind.BYTES if self.bulk else Kind.THREADS)
        self.pipeline = Pipeline(
            Edge("chunk_full", load, state, spec.num_stages, copied, payload="a chunk's tiles"),
            Edge("chunk_empty", state, load, spec.num_stages, Kind.WARPS, payload="its stage"),
        )
        rows = CHUNK * spec.head_dim_k
        self.stage = SharedMemory(
            # The record of `prepare`; sub-tiles of kd and qg alternate.
            Buffer("kd_qg", self.dtype, 2 * rows, alignment=SWIZZLE_ALIGNMENT),
            Buffer("kg", self.dtype, rows),
            Buffer("akk", self.dtype, CHUNK * CHUNK, holds="Akk Diag(beta)"),
            Buffer("aqk", self.dtype, CHUNK * CHUNK),
            Buffer("v", self.dtype, CHUNK * spec.tile_v),
            Buffer("decay", Float32, spec.head_dim_k),
        )
        record_bytes = self.stage["v"]
        assert record_bytes == record_elements(spec.head_dim_k) * 2
        self.memory = SharedMemory(
            Buffer.ring("chunk", self.stage, spec.num_stages),
            Buffer("barriers", Int64, self.pipeline.count, alignment=MBARRIER_BYTES),
        )
        self.smem_bytes = self.memory.nbytes
        self.stage_bytes = self.memory.buffers["chunk"].stage_bytes
        # The parts of a chunk's record that this kernel reads: (offset, bytes).
        self.parts = [(0, record_bytes)]
        if self.transitions:
            sub_tiles = spec.head_dim_k // 64
            self.parts = [(i * KD_STEP, SUB_TILE_BYTES) for i in range(sub_tiles)]
            self.parts.append((self.stage["kg"], self.stage["aqk"] - self.stage["kg"]))
        # Bytes of a line of v: a row is lines of 128 bytes, or one shorter line.
        self.v_line = min(spec.tile_v * 2, 128)

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.memory, self.pipeline, self.roles, shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        batch, tokens, heads, slots, sequences = (cute.sym_int() for _ in range(5))

        def states(present: bool) -> Any:
            matrix = (spec.head_dim_k, spec.head_dim_v)
            if spec.state_v_first:
                matrix = matrix[::-1]
            return fake_matrices((sequences, heads), matrix) if present else None

        return (
            fake_rows(self.dtype, (batch, tokens, heads, spec.head_dim_v)),
            fake_rows(self.dtype, (slots, heads, record_elements(spec.head_dim_k))),
            fake_rows(Float32, (slots, heads, spec.head_dim_k)),
            fake_rows(self.dtype, (batch, tokens, heads, spec.head_dim_v)),
            states(spec.has_initial_state),
            states(spec.has_final_state),
            fake_offsets(spec.index_dtype),
            *self.fake_workspace(sequences, heads),
            Int32(1),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    def fake_workspace(self, sequences: Any, heads: Any) -> tuple[Any, Any]:
        """Placeholders for segment_states `[N, P, HV, V, K]` and segment_transitions
        `[N, P, HV, K, K]`. For every segment but the last, the first holds B, and later the state
        at the start of the next segment; the second holds M."""
        spec, leading = self.spec, (sequences, cute.sym_int(), heads)
        states = fake_matrices(leading, (spec.head_dim_v, spec.head_dim_k))
        transitions = fake_matrices(leading, (spec.head_dim_k, spec.head_dim_k))
        return (
            None if spec.segments == "none" else states,
            transitions if self.transitions else None,
        )

    @cute.jit
    def __call__(
        self,
        v: cute.Tensor,
        tiles: cute.Tensor,
        decay: cute.Tensor,
        o: cute.Tensor,
        initial_state: cute.Tensor | None,
        final_state: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        segment_states: cute.Tensor | None,
        segment_transitions: cute.Tensor | None,
        chunks_per_segment: Int32,
        num_segments: Int32,
        stream: Any,
    ) -> None:
        columns = self.spec.head_dim_v + (self.spec.head_dim_k if self.transitions else 0)
        sequences = num_sequences(v.shape[0], cu_seqlens)
        self.kernel(
            v,
            tiles,
            decay,
            o,
            initial_state,
            final_state,
            cu_seqlens,
            segment_states,
            segment_transitions,
            chunks_per_segment,
            num_segments,
        ).launch(
            grid=[columns // self.spec.tile_v, v.shape[2], sequences * num_segments],
            block=[(self.num_warps + 1) * WARP_SIZE, 1, 1],
            smem=self.smem_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        v: cute.Tensor,
        tiles: cute.Tensor,
        decay: cute.Tensor,
        o: cute.Tensor,
        initial_state: cute.Tensor | None,
        final_state: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        segment_states: cute.Tensor | None,
        segment_transitions: cute.Tensor | None,
        chunks_per_segment: Int32,
        num_segments: Int32,
    ) -> None:
        tile, head, sequence = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        spec = self.spec
        segment = Int32(0)
        if cutlass.const_expr(spec.segments != "none"):
            segment = sequence % num_segments
            sequence = sequence // num_segments
        place = sequence_place(sequence, v.shape[1], cu_seqlens)
        tile_start = tile * spec.tile_v
        column = tile_start + warp_index * 16  # the warp's first
        first = Int32(0)
        end = (place.length + (CHUNK - 1)) // CHUNK
        last = end
        if cutlass.const_expr(spec.segments != "none"):
            first = segment * chunks_per_segment
            end = cutlass.min(first + chunks_per_segment, end)
            if cutlass.const_expr(self.transitions):
                # The last segment's result is not needed, nor is M of the first segment, whose
                # start is known.
                needed = end < last and (segment > 0 or tile_start < spec.head_dim_v)
                end = end if needed else first

        smem = self.memory.allocate()
        stages = shared_address(smem.chunk)
        barriers = self.pipeline.at(smem.barriers)
        if thread == 0:
            for stage in cutlass.range_constexpr(spec.num_stages):
                for edge in self.pipeline:
                    at = barriers.stage_pointer(edge.name, stage)
                    cute.arch.mbarrier_init(at, edge.arrivals)
            if cutlass.const_expr(self.bulk):
                cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp_index == self.num_warps:
            self.load_warp(v, tiles, decay, place, head, tile_start, stages, barriers, first, end)
        else:
            self.state_warp(
                o,
                initial_state,
                final_state,
                segment_states,
                segment_transitions,
                place,
                sequence,
                segment,
                head,
                column,
                stages,
                barriers,
                first,
                end,
                last,
            )

    # -- the warp that copies -----------------------------------------------------------------

    @cute.jit
    def load_warp(
        self,
        v: cute.Tensor,
        tiles: cute.Tensor,
        decay: cute.Tensor,
        place: Any,
        head: Int32,
        tile_start: Int32,
        stages: Int32,
        barriers: Barriers,
        first: Int32,
        end: Int32,
    ) -> None:
        spec = self.spec
        lane = cute.arch.lane_idx()
        line_units = spec.tile_v * 2 // UNIT_BYTES
        row = lane // line_units
        unit = lane % line_units
        v_column = tile_start + unit * (UNIT_BYTES // 2)
        v_start = row_address(v, place.batch, place.start, head, v_column)
        # An offset is a constant; a second address would take a register.
        offsets = self.pipeline.offsets
        full_to_empty = (offsets["chunk_empty"] - offsets["chunk_full"]) * MBARRIER_BYTES
        stage = Int32(0)
        phase = Int32(0)
        for c in cutlass.range(first, end, unroll=1):
            full = barriers.address("chunk_full", stage)
            at = stages + stage * self.stage_bytes
            # Waiting for the other parity returns at once in the first use of a stage.
            mbarrier.wait(full + full_to_empty, phase ^ 1)
            slot = place.slot + c
            record = (
                tiles.iterator + (Int64(slot) * tiles.stride[0] + Int64(head) * tiles.stride[1])
            ).toint()
            decays = (
                decay.iterator + (Int64(slot) * decay.stride[0] + Int64(head) * decay.stride[1])
            ).toint()
            decay_bytes = spec.head_dim_k * 4
            if cutlass.const_expr(self.bulk):
                if lane == 0:
                    nbytes = sum(size for _, size in self.parts) + decay_bytes
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        barriers.stage_pointer("chunk_full", stage), nbytes
                    )
                    for offset, size in self.parts:
                        copy_bulk(at + offset, record + offset, size, full)
                    copy_bulk(at + self.stage["decay"], decays, decay_bytes, full)
            else:
                for offset, size in self.parts:
                    for i in cutlass.range(size // (WARP_SIZE * UNIT_BYTES), unroll=8):
                        x = offset + (i * WARP_SIZE + lane) * UNIT_BYTES
                        copy_async(at + x, record + x, True)
                if lane < decay_bytes // UNIT_BYTES:
                    x = lane * UNIT_BYTES
                    copy_async(at + self.stage["decay"] + x, decays + x, True)
            rows = WARP_SIZE // line_units
            for i in cutlass.range_constexpr(CHUNK // rows):
                token = c * CHUNK + row + i * rows
                present = token < place.length and tile_start < spec.head_dim_v
                token = token if present else Int32(0)
                copy_async(
                    at + self.stage["v"] + self.v_offset(row + i * rows, unit),
                    v_start + Int64(token) * (v.stride[1] * 2),
                    present,
                )
            copies_arrive(full)
            stage = stage + 1
            if stage == spec.num_stages:
                stage = Int32(0)
                phase = phase ^ 1

    # -- the warps that have the state --------------------------------------------------------

    @cute.jit
    def state_warp(
        self,
        o: cute.Tensor,
        initial_state: cute.Tensor | None,
        final_state: cute.Tensor | None,
        segment_states: cute.Tensor | None,
        segment_transitions: cute.Tensor | None,
        place: Any,
        sequence: Int32,
        segment: Int32,
        head: Int32,
        column: Int32,
        stages: Int32,
        barriers: Barriers,
        first: Int32,
        end: Int32,
        last: Int32,
    ) -> None:
        spec = self.spec
        v_first = spec.state_v_first
        state = self.state.empty()
        if cutlass.const_expr(spec.segments == "none"):
            self.state.load(state, initial_state, v_first, sequence, head, column)
        elif cutlass.const_expr(self.transitions):
            if column >= spec.head_dim_v:
                self.identity(state, column - spec.head_dim_v)
            elif segment == 0:
                self.state.load(state, initial_state, v_first, sequence, head, column)
            else:
                state.fill(0.0)
        elif segment == 0:
            self.state.load(state, initial_state, v_first, sequence, head, column)
        else:
            starts = segment_states[None, segment - 1, None, None, None]
            if first < end:
                self.state.load(state, starts, True, sequence, head, column)

        # o of the previous chunk, 16 tokens by 2 columns; it is stored while products run.
        output = cute.make_rmem_tensor((CHUNK // 4,), Int32)
        output.fill(0)
        stage = Int32(0)
        phase = Int32(0)
        for c in cutlass.range(first, end, unroll=1):
            at = stages + stage * self.stage_bytes
            mbarrier.wait(barriers.address("chunk_full", stage), phase)
            self.chunk(state, output, at, o, place, head, column, c, c > first)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                mbarrier.arrive(barriers.address("chunk_empty", stage))
            stage = stage + 1
            if stage == spec.num_stages:
                stage = Int32(0)
                phase = phase ^ 1
        self.store_o(output, o, place, head, column, end - 1, first < end)

        if cutlass.const_expr(self.transitions):
            if first < end:
                if column < spec.head_dim_v:
                    target = segment_states[None, segment, None, None, None]
                    self.state.store(state, target, True, sequence, head, column)
                else:
                    target = segment_transitions[None, segment, None, None, None]
                    at = column - spec.head_dim_v
                    self.state.store(state, target, False, sequence, head, at)
        elif cutlass.const_expr(spec.segments == "none"):
            self.state.store(state, final_state, v_first, sequence, head, column)
        elif cutlass.const_expr(spec.has_final_state):
            # Stored by the segment with the last token, or the first of an empty sequence.
            if (first < end and end == last) or (last == 0 and segment == 0):
                self.state.store(state, final_state, v_first, sequence, head, column)

    def chunk(
        self, state: cute.Tensor, output: cute.Tensor, stage: Any, o: cute.Tensor, place: Any,
        head: Any, column: Any, c: Any, has_output: Any,
    ) -> None:  # fmt: skip
        """Update the state, store the previous chunk's output and compute this one's. A branch
        between the start and the wait of a `wgmma` would make the compiler serialise them."""
        # remember: (kd S)^T and (qg S)^T, 16 columns of V by 64 tokens
        s = self.state.operand(self.state.values(state))
        recalled = self.state.times_rows(s, stage + self.stage["kd_qg"])
        remembered = (
            []
            if self.transitions
            else self.state.times_rows(s, stage + self.stage["kd_qg"] + SUB_TILE_BYTES)
        )
        self.store_o(output, o, place, head, column, c - 1, has_output)

        # correct
        v_t = self.load_v(stage + self.stage["v"])
        recalled = self.state.done(recalled, pending=0 if self.transitions else 1)
        r = self.state.operand([x - y for x, y in zip(v_t, recalled, strict=True)])
        corrections = self.state.times_rows(r, stage + self.stage["akk"], triangular=True)
        decayed = self.state.decayed(state, stage + self.stage["decay"])
        if not self.transitions:
            remembered = self.state.done(remembered, pending=1)
        v_new = self.state.operand(self.state.done(corrections))

        # update
        updated = self.state.times_columns(v_new, stage + self.stage["kg"], decayed)
        if self.transitions:
            self.state.assign(state, self.state.done(updated))
            return
        result = self.state.times_rows(
            v_new, stage + self.stage["aqk"], triangular=True, c=remembered
        )
        self.state.assign(state, self.state.done(updated, pending=1))
        result = self.state.operand(self.state.done(result))
        self.state.assign(output, [transpose_matrix(x) for x in result])

    # -- v and o ------------------------------------------------------------------------------

    def v_offset(self, row: Any, unit: Any) -> Any:
        """Byte offset of a 16-byte unit of a row of v, swizzled so that neither a row of units nor
        a column of 8 units has bank conflicts."""
        units = self.v_line // UNIT_BYTES
        swizzle = row % 8 if units == 8 else (row // (8 // units)) % units
        within = row * self.v_line + (((unit % units) ^ swizzle) << 4)
        return within + (unit // units) * (CHUNK * self.v_line)

    def load_v(self, base: Any) -> list[Any]:
        """Load v^T of the warp's 16 columns, as accumulators."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        matrix, r = lane // 8, lane % 8
        values = []
        for j in range(0, CHUNK // 8, 2):
            row = 8 * (j + matrix // 2) + r
            at = base + self.v_offset(row, 2 * warp_index + matrix % 2)
            for x in load_matrices(at, transposed=True):
                values += unpack(self.dtype, x)
        return values

    def store_o(
        self, output: cute.Tensor, o: cute.Tensor, place: Any, head: Any, column: Any, c: Any,
        present: Any,
    ) -> None:  # fmt: skip
        """Store o of chunk c, 16 bytes of each of 8 rows for each store of a warp; L2 merges the
        two halves of a sector."""
        if self.transitions:
            return
        lane = cute.arch.lane_idx()
        row = c * CHUNK + lane // 4
        end = cutlass.select_(present, place.length, Int32(-CHUNK))  # no row is before that
        step = o.stride[1] * 2
        at = row_address(o, place.batch, place.start, head, column + 2 * (lane % 4))
        at = at + Int64(row) * step
        for j in range(CHUNK // 8):
            for half in range(2):
                store_global_where(row < end, at + 16 * half, output[2 * j + half])
            row, at = row + 8, at + 8 * step

    # -- segments -----------------------------------------------------------------------------

    def identity(self, state: cute.Tensor, first_v: Any) -> None:
        lane = cute.arch.lane_idx()
        for i in range(cute.size(state)):
            k, v = self.state.element(i, first_v, lane)
            state[i] = Float32(k == v)
