"""The states at which the segments of split sequences start: see `recurrence`.

    S_1 = B_0                  the first segment started from the sequence's own state
    S_(p+1) = M_p S_p + B_p

With P - 1 products of K by K by V in a chain, all that counts is how soon one is done. So a block has
16 columns of V only, kept transposed, and each of its warps a quarter of K. Products are of tf32
pieces, three for each, which is nearly float32. S^T goes through shared memory from step to step: its
size is 16 rows of K + 4 floats, twice.

    block (16 columns of V, value head, sequence)
      operand   S_p^T, both pieces, from shared memory
      product   with M_p^T, read in place, added to B_p^T
      hand on   S_(p+1)^T, to shared memory, and to where B_p was
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..common import warp
from ..common.spec import WARP_SIZE
from .chunks import sequence_place
from .spec import CHUNK, SegmentsSpec

ROWS = 16  # columns of V of a block
NUM_WARPS = 4


class KdaSegments:
    """The kernel for one SegmentsSpec; see the module's docstring."""

    def __init__(self, spec: SegmentsSpec):
        self.spec = spec
        self.pitch = spec.head_dim_k + 4  # floats; rows lie 4 banks apart
        self.buffer_bytes = ROWS * self.pitch * 4
        self.columns = spec.head_dim_k // NUM_WARPS
        assert self.columns % 8 == 0

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        sequences, segments, heads = (cute.sym_int() for _ in range(3))

        def matrices(rows: int) -> Any:
            strides = (cute.sym_int64(divisibility=4) for _ in range(3))
            shape = (sequences, segments, heads, rows, spec.head_dim_k)
            return make_fake_tensor(
                Float32, shape, (*strides, spec.head_dim_k, 1), assumed_align=16
            )

        index = {"int32": Int32, "int64": Int64}.get(spec.index_dtype)
        return (
            make_fake_tensor(index, (cute.sym_int(),), (1,), assumed_align=index.width // 8)
            if index
            else None,
            matrices(spec.head_dim_v),
            matrices(spec.head_dim_k),
            Int32(1),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        cu_seqlens: cute.Tensor | None,
        segment_states: cute.Tensor,
        segment_transitions: cute.Tensor,
        tokens: Int32,
        chunks_per_segment: Int32,
        stream: Any,
    ) -> None:
        self.kernel(
            cu_seqlens, segment_states, segment_transitions, tokens, chunks_per_segment
        ).launch(
            grid=[self.spec.head_dim_v // ROWS, segment_states.shape[2], segment_states.shape[0]],
            block=[NUM_WARPS * WARP_SIZE, 1, 1],
            smem=2 * self.buffer_bytes,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        cu_seqlens: cute.Tensor | None,
        segment_states: cute.Tensor,
        segment_transitions: cute.Tensor,
        tokens: Int32,
        chunks_per_segment: Int32,
    ) -> None:
        tile, head, sequence = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        lane = cute.arch.lane_idx()
        row, pair = lane // 4, 2 * (lane % 4)
        place = sequence_place(sequence, tokens, cu_seqlens)
        num_chunks = (place.length + (CHUNK - 1)) // CHUNK
        # The sequence's segments, those with chunks.
        count = (num_chunks + (chunks_per_segment - 1)) // chunks_per_segment

        smem = cutlass.memory.SmemAllocator()
        buffers = warp.shared_address(smem.allocate(2 * self.buffer_bytes, 16))
        first_v = tile * ROWS
        mine = warp_index * self.columns
        states = segment_states[sequence, None, head, None, None]
        transitions = segment_transitions[sequence, None, head, None, None]
        if count > 2:
            start = self.loaded(states[0, None, None], first_v + row, mine + pair)
            self.hand_on(start, buffers, row, mine + pair)
        cute.arch.sync_threads()

        buffer = buffers
        other = buffers + self.buffer_bytes
        for p in cutlass.range(1, count - 1, unroll=1):
            gain = states[p, None, None]
            m = transitions[p, None, None]
            values = self.step(buffer, gain, m, first_v + row, row, mine, pair)
            self.hand_on(values, other, row, mine + pair)
            self.store(values, gain, first_v + row, mine + pair)
            cute.arch.sync_threads()
            buffer, other = other, buffer

    def loaded(self, x: cute.Tensor, v: Any, k: Any) -> list[Any]:
        """The warp's accumulators, of a matrix in memory."""
        count = self.columns // 2
        return [x[v + i % 4 // 2 * 8, k + i // 4 * 8 + i % 2] for i in range(count)]

    def store(self, values: list[Any], x: cute.Tensor, v: Any, k: Any) -> None:
        for i, value in enumerate(values):
            x[v + i % 4 // 2 * 8, k + i // 4 * 8 + i % 2] = value

    def hand_on(self, values: list[Any], buffer: Any, row: Any, k: Any) -> None:
        for i in range(0, len(values), 2):
            at = buffer + ((row + i % 4 // 2 * 8) * self.pitch + k + i // 4 * 8) * 4
            warp.store_shared(Float32, at, values[i : i + 2])

    def step(
        self, buffer: Any, gain: cute.Tensor, m: cute.Tensor, v: Any, row: Any, mine: Any, pair: Any
    ) -> list[Any]:
        """S^T M^T + B^T, the warp's columns. Of each 8 of the sum, the product's index t is element 2 t
        and its index t + 4 is element 2 t + 1, so that both operands are read in pairs."""
        tiles = self.columns // 8
        values = self.loaded(gain, v, mine + pair)
        for s in range(self.spec.head_dim_k // 8):
            at = buffer + (row * self.pitch + 8 * s + pair) * 4
            upper = warp.load_shared(Float32, at, 2)
            lower = warp.load_shared(Float32, at + 8 * self.pitch * 4, 2)
            a = [warp.split_tf32(x) for x in (upper[0], lower[0], upper[1], lower[1])]
            for j in range(tiles):
                b = [warp.split_tf32(m[mine + 8 * j + row, 8 * s + pair + i]) for i in range(2)]
                c = values[4 * j : 4 * j + 4]
                for piece_a, piece_b in ((1, 0), (0, 1), (0, 0)):
                    c = list(warp.mma_tf32(c, [x[piece_a] for x in a], [x[piece_b] for x in b]))
                values[4 * j : 4 * j + 4] = c
        return values
