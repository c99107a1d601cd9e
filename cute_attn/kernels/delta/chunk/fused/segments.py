"""The states at the start of the segments of split sequences: see `state_pass`.

    S_1 = B_0                  segment 0 starts from the sequence's initial state
    S_(p+1) = M_p S_p + B_p

The products, of K by K by V, form a chain, so latency is all that counts. A CTA has few columns of
V, transposed, and each warp has a quarter of K. A warp loads its rows of M_(p+1) while it
multiplies by its rows of M_p. Each product is computed as three tf32 products, nearly as accurate
as float32. S^T passes through shared memory between steps.

    CTA (tile of V, value head, sequence)
      load      M_p by cp.async, each warp its own rows
      operand   S_p^T from shared memory, as two tf32 pieces
      product   B_p^T + S_p^T M_p^T
      hand on   S_(p+1)^T to shared memory, and to global memory in the place of B_p
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....common.arguments import fake_matrices, fake_offsets
from ....common.entry import entry, gathered, placeholders
from ....common.ptx.async_copy import copy_async
from ....common.ptx.convert import split_tf32
from ....common.ptx.grids import start_dependents, wait_for_previous
from ....common.ptx.memory import load_shared, shared_address, store_shared
from ....common.ptx.mma import mma_tf32
from ....common.smem import Buffer, SharedMemory
from ....common.spec import WARP_SIZE
from ..chunks import sequence_place
from ..spec import CHUNK, SegmentsSpec
from ..starts import fake_bounds, short_start

NUM_WARPS = 4
UNIT = 4  # floats per copy


class Arguments(NamedTuple):
    """The kernel's arguments."""

    cu_seqlens: cute.Tensor | None
    segment_states: cute.Tensor
    segment_transitions: cute.Tensor
    tokens: Int32
    chunks_per_segment: Int32
    bounds: cute.Tensor | None
    chunks_per_start: Int32 | None


class KdaSegments:
    """The kernel for one SegmentsSpec; see the module's docstring."""

    def __init__(self, spec: SegmentsSpec):
        self.spec = spec
        self.columns = spec.head_dim_k // NUM_WARPS  # a warp's columns of S^T
        # Row strides in floats, padded against bank conflicts: rows of S^T are 4 banks apart, rows
        # of M 8 banks.
        self.state_row, self.transition_row = spec.head_dim_k + 4, spec.head_dim_k + 8
        self.memory = SharedMemory(
            Buffer("state", Float32, spec.tile_v * self.state_row, stages=2, alignment=128),
            Buffer("transition", Float32, spec.head_dim_k * self.transition_row, spec.num_stages),
        )
        self.smem_bytes = self.memory.nbytes
        self.transition_bytes = self.memory.buffers["transition"].stage_bytes
        assert self.columns % 8 == 0

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        leading = tuple(cute.sym_int() for _ in range(3))  # sequences, segments, value heads
        return placeholders(
            Arguments(
                cu_seqlens=fake_offsets(spec.index_dtype),
                segment_states=fake_matrices(leading, (spec.head_dim_v, spec.head_dim_k)),
                segment_transitions=fake_matrices(leading, (spec.head_dim_k, spec.head_dim_k)),
                tokens=Int32(1),
                chunks_per_segment=Int32(1),
                bounds=fake_bounds(cute.sym_int(), leading[-1]) if spec.short_starts else None,
                chunks_per_start=Int32(1) if spec.short_starts else None,
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        a, stream = gathered(Arguments, args)
        self.kernel(a).launch(
            grid=[
                self.spec.head_dim_v // self.spec.tile_v,
                a.segment_states.shape[2],
                a.segment_states.shape[0],
            ],
            block=[NUM_WARPS * WARP_SIZE, 1, 1],
            smem=self.smem_bytes,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.spec.dependent,
        )

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        if cutlass.const_expr(self.spec.dependent):
            start_dependents()
            wait_for_previous(x.segment_states.iterator.toint())
        tile, head, sequence = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        lane = cute.arch.lane_idx()
        row, pair = lane // 4, 2 * (lane % 4)
        place = sequence_place(sequence, x.tokens, x.cu_seqlens)
        num_chunks = (place.length + (CHUNK - 1)) // CHUNK
        # The number of segments with chunks. All segments but the first and the last make a step.
        count = (num_chunks + (x.chunks_per_segment - 1)) // x.chunks_per_segment
        if cutlass.const_expr(self.spec.short_starts):
            short, _ = short_start(
                x.bounds, place.slot, num_chunks, head, Int32(0), x.chunks_per_start
            )
            count = Int32(0) if short else count

        smem = shared_address(
            cutlass.memory.SmemAllocator().allocate(self.smem_bytes, self.memory.alignment)
        )
        ring = smem + self.memory["transition"]
        v = tile * self.spec.tile_v + row
        mine = warp_index * self.columns
        states = x.segment_states[sequence, None, head, None, None]
        transitions = x.segment_transitions[sequence, None, head, None, None]
        for i in cutlass.range_constexpr(self.spec.num_stages - 1):
            self.load(transitions, 1 + i, count, ring + i * self.transition_bytes, mine)
        if count > 2:
            start = self.loaded(states[0, None, None], v, mine + pair)
            self.hand_on(start, smem, row, mine + pair)
        cute.arch.sync_threads()

        buffer = smem
        other = smem + self.memory.buffers["state"].stage_bytes
        stage = Int32(0)
        for p in cutlass.range(1, count - 1, unroll=1):
            last = self.spec.num_stages - 1
            ahead = stage + last
            ahead = ahead - self.spec.num_stages if ahead >= self.spec.num_stages else ahead
            self.load(transitions, p + last, count, ring + ahead * self.transition_bytes, mine)
            gain = states[p, None, None]
            values = self.loaded(gain, v, mine + pair)
            cute.arch.cp_async_wait_group(last)
            cute.arch.sync_warp()
            m = ring + stage * self.transition_bytes + (mine + row) * (self.transition_row * 4)
            values = self.step(values, buffer, m, row, pair)
            self.hand_on(values, other, row, mine + pair)
            self.store(values, gain, v, mine + pair)
            cute.arch.sync_threads()
            buffer, other = other, buffer
            stage = stage + 1
            stage = Int32(0) if stage == self.spec.num_stages else stage

    @cute.jit
    def load(
        self, transitions: cute.Tensor, p: Int32, count: Int32, target: Int32, mine: Int32
    ) -> None:
        """Start the copy of the warp's rows of M_p, if M_p is needed. Commit a group in any
        case."""
        lane = cute.arch.lane_idx()
        if p < count - 1:
            units = self.spec.head_dim_k // UNIT
            rows = WARP_SIZE // units
            at = mine + lane // units
            unit = lane % units
            m = transitions[p, None, None]
            source = (m.iterator + (at * self.spec.head_dim_k + unit * UNIT)).toint()
            start = target + (at * self.transition_row + unit * UNIT) * 4
            for i in cutlass.range_constexpr(self.columns // rows):
                copy_async(
                    start + i * (rows * self.transition_row * 4),
                    source + i * (rows * self.spec.head_dim_k * 4),
                    True,
                )
        cute.arch.cp_async_commit_group()

    # Accumulators, in the order [tiles of 16 of V][tiles of 8 of K][halves of the 16][2 neighbours
    # of K].

    def places(self, v: Any, k: Any) -> list[tuple[Any, Any]]:
        return [
            (v + 16 * t + 8 * half, k + 8 * j + i)
            for t in range(self.spec.tile_v // 16)
            for j in range(self.columns // 8)
            for half in range(2)
            for i in range(2)
        ]

    def loaded(self, x: cute.Tensor, v: Any, k: Any) -> list[Any]:
        """Load the warp's accumulators of a matrix in memory."""
        return [x[at] for at in self.places(v, k)]

    def store(self, values: list[Any], x: cute.Tensor, v: Any, k: Any) -> None:
        for value, at in zip(values, self.places(v, k), strict=True):
            x[at] = value

    def hand_on(self, values: list[Any], buffer: Any, row: Any, k: Any) -> None:
        places = self.places(row, k)
        for i in range(0, len(values), 2):
            v, column = places[i]
            at = buffer + (v * self.state_row + column) * 4
            store_shared(Float32, at, values[i : i + 2])

    def step(self, values: list[Any], buffer: Any, m: Any, row: Any, pair: Any) -> list[Any]:
        """Return values + S^T M^T for the warp's columns; S^T is at `buffer`, the lane's first row
        of M at `m`. In each 8 of k, index t of the MMA is element 2 t, and index t + 4 is element
        2 t + 1, so that both operands are loaded in pairs."""
        values = list(values)
        tiles = self.columns // 8
        for s in range(self.spec.head_dim_k // 8):
            left = []
            for t in range(self.spec.tile_v // 16):
                at = buffer + ((row + 16 * t) * self.state_row + 8 * s + pair) * 4
                upper = load_shared(Float32, at, 2)
                lower = load_shared(Float32, at + 8 * self.state_row * 4, 2)
                a = [split_tf32(x) for x in (upper[0], lower[0], upper[1], lower[1])]
                left.append([[x[piece] for x in a] for piece in range(2)])
            for j in range(tiles):
                at = m + (8 * j * self.transition_row + 8 * s + pair) * 4
                b = [split_tf32(x) for x in load_shared(Float32, at, 2)]
                right = [[x[piece] for x in b] for piece in range(2)]
                for t, pieces in enumerate(left):
                    n = 4 * (t * tiles + j)
                    c = values[n : n + 4]
                    for piece_a, piece_b in ((1, 0), (0, 1), (0, 0)):
                        c = list(mma_tf32(c, pieces[piece_a], right[piece_b]))
                    values[n : n + 4] = c
        return values
