"""The base of the passes that carry a K by V matrix through the chunks of sequences.

`state_pass` carries the state forwards, and `adjoint_pass` carries the state's gradient backwards.
For each chunk both read the record that `prepare` has written, and 64 rows of V elements: v, or the
gradient of o.

All matrices are transposed. A warp owns 16 columns of V and all of K: the carried matrix, 16 by K,
is in the accumulators of its products. Packed to 16 bits, the accumulators are the left operand of
the next product without moving between threads. That product's results become a left operand in the
same way. So the recurrence never leaves a warp's registers, and warps share only the chunk's tiles
in shared memory.

    CTA (tile of V, value head, sequence)
      warp tile_v / 16     load    tiles, decay and rows of chunk after chunk
      the warps before it  compute, by the pass's method `chunk`

`products="wgmma"` (sm_90a) distributes fragments over threads as "mma" does.

One long sequence leaves most SMs idle, so it may be split into segments. A segment's effect on the
carried matrix is affine, S' = M S + B. A pass that starts from a matrix of 0 computes B; a pass
that starts from the identity, with rows of 0, computes M. So `segments="transitions"` passes
[B | M] through every segment but the last, and stores no results. The kernel of `segments` turns
B and M into the matrices at the segments' starts, from which `segments="outputs"` runs all
segments.

`segments="spans"` computes [B | M] of whole sequences, which may be spans of longer sequences. Each
span is cut into pieces. Piece 0 has the pass's last chunks, and the other pieces have equal parts
of the rest. A piece stores [B | M] and the squared norm of M. If the norms of the pieces of earlier
calls show that nothing of an earlier state is left, a piece stores B = 0 and M = I, and does no
more.

A pass numbers chunks and segments in its own direction, so chunk 0 of a backward pass is the last
chunk of its sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.arguments import fake_matrices, fake_offsets, fake_rows
from ...common.dtypes import DTYPE
from ...common.entry import entry, gathered, placeholders
from ...common.pipeline import BOTH_CTAS, Barriers, Edge, Kind, Pipeline, Reach, Role, report_names
from ...common.ptx import mbarrier
from ...common.ptx.async_copy import copies_arrive, copy_async, copy_bulk, copy_bulk_to_cluster
from ...common.ptx.cluster import cta_rank
from ...common.ptx.grids import start_dependents, wait_for_previous
from ...common.ptx.matrices import load_matrices
from ...common.ptx.memory import shared_address, store_global_where
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemory
from ...common.spec import MBARRIER_BYTES, WARP_SIZE
from .chunks import num_sequences, row_address, sequence_place
from .spec import CHUNK, PassSpec, record_elements
from .starts import fake_bounds, short_start
from .state import STEP, TransposedState
from .tiles import (
    SUB_TILE_BYTES,
    UNIT_BYTES,
    store_units,
)

KD_STEP = 2 * SUB_TILE_BYTES  # stride of the sub-tiles of kd, and of qg
NEGLIGIBLE_SQUARE = 2.0**-80  # of the Frobenius norm of M: a square of 2^-40, as in `starts`


class Results(NamedTuple):
    """The tensors to which a pass stores the results of each chunk; see `Arguments`."""

    o: cute.Tensor
    states: cute.Tensor | None
    v_new: cute.Tensor | None


class Slots(NamedTuple):
    """The slots of a pool that hold the sequences' matrices; see `fused.pool_pass`."""

    state_indices: Any
    checkpoint_indices: Any
    checkpoint_chunks: Any
    has_initial_state: Any


class Arguments(NamedTuple):
    """The arguments of a pass. A tensor is None unless the spec has it.

    Attributes:
        rows: [B, T, HV, V], v or the gradient of o.
        tiles: [slots, HV, elements], the records of chunks, as `prepare` writes them.
        decay: float32 [slots, HV, K], the decay of each chunk, from `prepare`.
        o: [B, T, HV, V], written: the output, or the gradient of v.
        states: [slots, HV, V * K], written: the carried matrix at the start of each chunk (the
            end, if the pass runs backwards) rounded and transposed, V rows of K. For each 64 rows
            the matrix has K / 64 sub-tiles, swizzled like a record's sub-tiles.
        v_new: [slots, HV, 64 * V], written: 64 rows of V as V / 64 such sub-tiles, with zeros
            past the end of a short chunk.
        start, result: float32 [N, HV, K, V], or with state_v_first [N, HV, V, K]: the carried
            matrix before the first chunk of the pass, which is read, and after the last chunk,
            which is written.
        cu_seqlens: [N + 1].
        segment_states, segment_transitions: see `fake_workspace`.
        chunks_per_segment: chunks of a segment with exact transitions.
        num_segments: the most segments of a sequence. With segments="outputs", this number covers
            segments with exact transitions and segments that start from zero.
        bounds, chunks_per_start: see `starts.short_start`; only with `spec.short_starts`.

    With segments="spans", the call has pieces `chunks_per_start` to `chunks_per_start +
    num_segments - 1` of each span, and `chunks_per_segment` is the length of piece 0. `bounds` are
    the squared norms `[N, 1 + P, HV, K / 16]`, a number for 16 columns of M. Row 0 is given: 0
    marks a span whose transition is not needed. Row 1 + p is piece p's.
    """

    rows: cute.Tensor
    tiles: cute.Tensor
    decay: cute.Tensor
    o: cute.Tensor
    states: cute.Tensor | None
    v_new: cute.Tensor | None
    start: cute.Tensor | None
    result: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    segment_states: cute.Tensor | None
    segment_transitions: cute.Tensor | None
    chunks_per_segment: Int32
    num_segments: Int32
    bounds: cute.Tensor | None
    chunks_per_start: Int32 | None


class Operands(NamedTuple):
    """The tensors and numbers that a pass's device code reads and writes. The carried matrices may
    lie in a pool of states.

    Attributes:
        start, result: the carried matrices, one for each sequence or for each slot of the pool.
        slots: the pool's slots that hold the sequences' matrices; None without a pool.
    """

    rows: cute.Tensor
    tiles: cute.Tensor
    decay: cute.Tensor
    results: Results
    start: cute.Tensor | None
    result: cute.Tensor | None
    slots: Slots | None
    cu_seqlens: cute.Tensor | None
    segment_states: cute.Tensor | None
    segment_transitions: cute.Tensor | None
    chunks_per_segment: Int32
    num_segments: Int32
    bounds: cute.Tensor | None
    chunks_per_start: Int32 | None


class Place(NamedTuple):
    """The sequence, head and columns of V that a warp of a pass works on."""

    sequence: Any  # a SequencePlace
    head: Any
    column: Any  # the warp's first column of V


class ChunkPass:
    """A pass for one PassSpec; see the module's docstring.

    Args:
        rows_step: stride of the sub-tiles that `TransposedState.times_rows` reads.
        scores: whether transitions also read qg and Aqk, in CTAs whose columns have rows.
        starts, ends: whether the call has `Arguments.start`, and `Arguments.result`.
        store_states, store_v_new: whether the call has `Arguments.states`, and `Arguments.v_new`.
    """

    backwards = False

    def __init__(
        self, spec: PassSpec, *, rows_step: int, scores: bool, starts: bool, ends: bool,
        store_states: bool, store_v_new: bool,
    ):  # fmt: skip
        self.spec, self.dtype = spec, DTYPE[spec.dtype]
        self.starts, self.ends = starts, ends
        self.has_states, self.has_v_new = store_states, store_v_new
        self.state = TransposedState(self.dtype, spec.head_dim_k, spec.products, rows_step)
        self.num_warps = spec.tile_v // 16
        self.bulk = spec.copies == "bulk"
        self.cluster = spec.cluster
        self.transitions, self.spans = spec.of_transitions, spec.segments == "spans"
        self.short_starts = spec.short_starts and spec.segments != "none"
        state = Role("state", range(self.num_warps))
        load = Role("load", range(self.num_warps, self.num_warps + 1))
        self.roles: tuple[Role, ...] = (state, load)
        # Every lane copies part of the rows; without bulk copies, every lane also copies part of
        # the tiles.
        copied = Kind.THREADS | (Kind.BYTES if self.bulk else Kind.THREADS)
        stages, reach = spec.num_stages, Reach.EACH if self.cluster > 1 else Reach.CTA
        self.pipeline = Pipeline(
            Edge("chunk_full", load, state, stages, copied, payload="a chunk's tiles"),
            Edge("chunk_empty", state, load, stages, Kind.WARPS, reach, payload="its stage"),
        )
        tile = CHUNK * spec.head_dim_k
        self.stage = SharedMemory(
            # The record of `prepare`; sub-tiles of kd and qg alternate.
            Buffer("kd_qg", self.dtype, 2 * tile, alignment=SWIZZLE_ALIGNMENT),
            Buffer("kg", self.dtype, tile),
            Buffer("akk", self.dtype, CHUNK * CHUNK, holds="Akk, with factors of beta"),
            Buffer("aqk", self.dtype, CHUNK * CHUNK),
            Buffer("rows", self.dtype, CHUNK * spec.tile_v, holds="v, or the gradient of o"),
            Buffer("decay", Float32, spec.head_dim_k),
        )
        record_bytes = self.stage["rows"]
        assert record_bytes == record_elements(spec.head_dim_k) * 2
        self.memory = SharedMemory(
            Buffer.ring("chunk", self.stage, spec.num_stages),
            Buffer("barriers", Int64, self.pipeline.count, alignment=MBARRIER_BYTES),
        )
        self.smem_bytes = self.memory.nbytes
        self.stage_bytes = self.memory.buffers["chunk"].stage_bytes
        # Parts of a chunk's record that all CTAs read, and parts that only CTAs with rows read:
        # (offset, bytes).
        self.parts, self.parts_of_rows = [(0, record_bytes)], []
        if self.transitions:
            steps = [i * KD_STEP for i in range(spec.head_dim_k // 64)]
            self.parts = [(step, SUB_TILE_BYTES) for step in steps]
            self.parts.append((self.stage["kg"], self.stage["aqk"] - self.stage["kg"]))
            if scores:
                offsets = [step + SUB_TILE_BYTES for step in steps] + [self.stage["aqk"]]
                self.parts_of_rows = [(offset, SUB_TILE_BYTES) for offset in offsets]
        # Bytes of a line. A row consists of lines of 128 bytes, or of one shorter line.
        self.line = min(spec.tile_v * 2, 128)

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.memory, self.pipeline, self.roles, shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        batch, tokens, heads, slots, sequences = (cute.sym_int() for _ in range(5))

        def rows() -> Any:
            return fake_rows(self.dtype, (batch, tokens, heads, spec.head_dim_v))

        return placeholders(
            Arguments(
                rows=rows(),
                tiles=fake_rows(self.dtype, (slots, heads, record_elements(spec.head_dim_k))),
                decay=fake_rows(Float32, (slots, heads, spec.head_dim_k)),
                o=rows(),
                **self.fake_states(heads, slots, sequences),
                **self.fake_workspace(sequences, heads),
                **self.fake_segments(heads, slots, sequences),
            )
        )

    def fake_states(self, heads: Any, slots: Any, sequences: Any) -> dict[str, Any]:
        """Placeholders for the states of sequences and of chunks, and for cu_seqlens."""
        spec = self.spec

        def of_chunks(present: bool, elements: int) -> Any:
            return fake_rows(self.dtype, (slots, heads, elements)) if present else None

        def matrices(present: bool) -> Any:
            matrix = (spec.head_dim_k, spec.head_dim_v)
            if spec.state_v_first:
                matrix = matrix[::-1]
            return fake_matrices((sequences, heads), matrix) if present else None

        return {
            "states": of_chunks(self.has_states, spec.head_dim_v * spec.head_dim_k),
            "v_new": of_chunks(self.has_v_new, CHUNK * spec.head_dim_v),
            "start": matrices(self.starts),
            "result": matrices(self.ends),
            "cu_seqlens": fake_offsets(spec.index_dtype),
        }

    def fake_workspace(self, sequences: Any, heads: Any) -> dict[str, Any]:
        """Placeholders for segment_states `[N, P, HV, V, K]` and segment_transitions
        `[N, P, HV, K, K]`. For every segment but the last, segment_states holds B, and later the
        matrix at the start of the next segment; segment_transitions holds M. With segments="spans",
        segment_states `[N, P, HV, V + K, K]` holds [B | M] of every piece, transposed."""
        spec, leading = self.spec, (sequences, cute.sym_int(), heads)
        if self.spans:
            both = (spec.head_dim_v + spec.head_dim_k, spec.head_dim_k)
            return {"segment_states": fake_matrices(leading, both), "segment_transitions": None}
        states = fake_matrices(leading, (spec.head_dim_v, spec.head_dim_k))
        transitions = fake_matrices(leading, (spec.head_dim_k, spec.head_dim_k))
        return {
            "segment_states": None if spec.segments == "none" else states,
            "segment_transitions": transitions if self.transitions else None,
        }

    def fake_segments(self, heads: Any, slots: Any, sequences: Any = None) -> dict[str, Any]:
        """Placeholders of the last arguments."""
        bounds = None
        if self.spans:
            norms = (sequences, cute.sym_int(), heads, self.spec.head_dim_k // 16)
            bounds = fake_rows(Float32, norms)
        elif self.short_starts:
            bounds = fake_bounds(slots, heads)
        return {
            "chunks_per_segment": Int32(1),
            "num_segments": Int32(1),
            "bounds": bounds,
            "chunks_per_start": None if bounds is None else Int32(1),
        }

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Run the pass."""
        a, stream = gathered(Arguments, args)
        x = Operands(
            a.rows, a.tiles, a.decay, Results(a.o, a.states, a.v_new), a.start, a.result, None,
            a.cu_seqlens, a.segment_states, a.segment_transitions, a.chunks_per_segment,
            a.num_segments, a.bounds, a.chunks_per_start,
        )  # fmt: skip
        self.kernel(x).launch(**self.launch_config(a), stream=stream)

    def launch_config(self, a: Any) -> dict[str, Any]:
        columns = self.spec.head_dim_v + (self.spec.head_dim_k if self.transitions else 0)
        sequences = num_sequences(a.rows.shape[0], a.cu_seqlens)
        config = {
            "grid": [columns // self.spec.tile_v, a.rows.shape[2], sequences * a.num_segments],
            "block": [sum(map(len, self.roles)) * WARP_SIZE, 1, 1],
            "smem": self.smem_bytes,
            "min_blocks_per_mp": 1,
        }
        if self.cluster > 1:
            config["cluster"] = [self.cluster, 1, 1]
        if self.spec.dependent:
            config["use_pdl"] = True
        return config

    @cute.kernel
    def kernel(self, x: Any) -> None:
        tile, head, sequence = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        spec = self.spec
        segment = Int32(0)
        if cutlass.const_expr(spec.segments != "none"):
            segment = sequence % x.num_segments
            sequence = sequence // x.num_segments
        place = sequence_place(sequence, x.rows.shape[1], x.cu_seqlens)
        tile_start = tile * spec.tile_v
        column = tile_start + warp_index * 16  # the warp's first column
        first = Int32(0)
        end = (place.length + (CHUNK - 1)) // CHUNK
        last = end
        begin = first
        if cutlass.const_expr(spec.dependent):
            if cutlass.const_expr(self.transitions):
                start_dependents()
            stages, barriers = self.start(thread)
            wait_for_previous(Int64(stages))
        if cutlass.const_expr(self.spans):
            segment = segment + x.chunks_per_start
            begin, end = self.piece(x, segment, last)
            first = end if self.negligible(x, sequence, head) else begin
        elif cutlass.const_expr(spec.segments != "none"):
            length = x.chunks_per_segment
            short, warm_up = False, Int32(0)
            if cutlass.const_expr(self.short_starts):
                short, warm_up = short_start(
                    x.bounds, place.slot, last, head, segment, x.chunks_per_start
                )
                length = x.chunks_per_start if short else length
                warm_up = warm_up if short else Int32(0)
            begin = segment * length
            end = cutlass.min(begin + length, end)
            first = begin
            if cutlass.const_expr(self.transitions):
                # The last segment's result is not needed. Nor is M of the first segment, because
                # its start is known.
                needed = end < last and (segment > 0 or tile_start < spec.head_dim_v)
                if cutlass.const_expr(self.short_starts):
                    needed = needed and not short
                end = end if needed else first
            elif cutlass.const_expr(self.short_starts):
                first = begin - warm_up

        if cutlass.const_expr(not spec.dependent):
            stages, barriers = self.start(thread)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp_index == self.num_warps:
            self.load_warp(x, place, head, tile_start, stages, barriers, first, end, last)
        else:
            at = Place(place, head, column)
            self.state_warp(x, at, sequence, segment, stages, barriers, first, begin, end, last)
        if cutlass.const_expr(self.cluster > 1):
            # No CTA may end while the other CTA signals it or copies to it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def start(self, thread: Int32) -> Any:
        """Initialise the mbarriers. Return the address of the stages, and the mbarriers."""
        smem = self.memory.allocate()
        stages = shared_address(smem.chunk)
        barriers = self.pipeline.at(smem.barriers)
        if thread == 0:
            for stage in cutlass.range_constexpr(self.spec.num_stages):
                for edge in self.pipeline:
                    at = barriers.stage_pointer(edge.name, stage)
                    cute.arch.mbarrier_init(at, edge.arrivals)
            if cutlass.const_expr(self.bulk):
                cute.arch.mbarrier_init_fence()
        return stages, barriers

    @cute.jit
    def piece(self, x: Any, segment: Int32, last: Int32) -> tuple[Any, Any]:
        """Return the first chunk of a piece of a span, and the first chunk after the piece."""
        rest = cutlass.max(last - x.chunks_per_segment, 0)
        others = cutlass.max(x.segment_states.shape[1] - 1, 1)
        length = (rest + (others - 1)) // others
        end = cutlass.max(rest - (segment - 1) * length, 0)
        of_first = segment == 0
        begin = cutlass.select_(of_first, Int32(rest), Int32(cutlass.max(end - length, 0)))
        return begin, cutlass.select_(of_first, last, Int32(end))

    @cute.jit
    def negligible(self, x: Any, sequence: Int32, head: Int32) -> Any:
        """Return whether the pieces of earlier calls leave nothing of the state before them. Norms
        are submultiplicative, so their product bounds the norm of the product."""
        product = Float32(1.0)
        for row in cutlass.range(x.chunks_per_start + 1, unroll=1):
            square = Float32(0.0)
            for i in cutlass.range_constexpr(self.spec.head_dim_k // 16):
                square = square + x.bounds[sequence, row, head, i]
            product = Float32(product * square)
        return product <= NEGLIGIBLE_SQUARE

    def chunk_index(self, c: Any, last: Any) -> Any:
        """Return the index of the pass's chunk c in its sequence, of `last` chunks."""
        return last - 1 - c if self.backwards else c

    # -- the warp that copies -----------------------------------------------------------------

    @cute.jit
    def load_warp(
        self,
        x: Any,
        place: Any,
        head: Int32,
        tile_start: Int32,
        stages: Int32,
        barriers: Barriers,
        first: Int32,
        end: Int32,
        last: Int32,
    ) -> None:
        spec = self.spec
        lane = cute.arch.lane_idx()
        line_units = spec.tile_v * 2 // UNIT_BYTES
        row = lane // line_units
        unit = lane % line_units
        column = tile_start + unit * (UNIT_BYTES // 2)
        start = row_address(x.rows, place.batch, place.start, head, column)
        # An offset is a constant; a second address would take a register.
        offsets = self.pipeline.offsets
        full_to_empty = (offsets["chunk_empty"] - offsets["chunk_full"]) * MBARRIER_BYTES
        stage = Int32(0)
        phase = Int32(0)
        rank = cta_rank() if self.cluster > 1 else 0
        for c in cutlass.range(first, end, unroll=1):
            index = self.chunk_index(c, last)
            full = barriers.address("chunk_full", stage)
            at = stages + stage * self.stage_bytes
            # At the first use of a stage, the wait for the other parity returns at once.
            mbarrier.wait(full + full_to_empty, phase ^ 1)
            slot = place.slot + index
            record, decays = (
                (y.iterator + (Int64(slot) * y.stride[0] + Int64(head) * y.stride[1])).toint()
                for y in (x.tiles, x.decay)
            )
            decay_bytes = spec.head_dim_k * 4
            has_rows = tile_start < spec.head_dim_v
            if cutlass.const_expr(self.bulk):
                if lane == 0:
                    nbytes = sum(size for _, size in self.parts) + decay_bytes
                    if cutlass.const_expr(self.parts_of_rows):
                        more = sum(size for _, size in self.parts_of_rows)
                        nbytes = cutlass.select_(has_rows, Int32(nbytes + more), Int32(nbytes))
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        barriers.stage_pointer("chunk_full", stage), nbytes
                    )
                    for offset, size in self.parts:
                        self.copy_shared(at, record, offset, size, full, rank)
                    copy_bulk(at + self.stage["decay"], decays, decay_bytes, full)
                    if cutlass.const_expr(self.parts_of_rows):
                        if has_rows:
                            for offset, size in self.parts_of_rows:
                                self.copy_shared(at, record, offset, size, full, rank)
            else:
                for offset, size in self.parts:
                    self.copy_part(at, record, offset, size, lane)
                if lane < decay_bytes // UNIT_BYTES:
                    offset = lane * UNIT_BYTES
                    copy_async(at + self.stage["decay"] + offset, decays + offset, True)
                if cutlass.const_expr(self.parts_of_rows):
                    if has_rows:
                        for offset, size in self.parts_of_rows:
                            self.copy_part(at, record, offset, size, lane)
            step = WARP_SIZE // line_units
            for i in cutlass.range_constexpr(CHUNK // step):
                token = index * CHUNK + row + i * step
                present = token < place.length and tile_start < spec.head_dim_v
                token = token if present else Int32(0)
                copy_async(
                    at + self.stage["rows"] + self.row_offset(row + i * step, unit),
                    start + Int64(token) * (x.rows.stride[1] * 2),
                    present,
                )
            copies_arrive(full)
            stage = stage + 1
            if stage == spec.num_stages:
                stage = Int32(0)
                phase = phase ^ 1

    def copy_shared(
        self, target: Any, record: Any, offset: int, size: int, full: Any, rank: Any
    ) -> None:
        """Start the copy of a part of a record, by one thread. In a cluster, the CTA of `rank`
        copies its share to all CTAs."""
        if self.cluster == 1:
            copy_bulk(target + offset, record + offset, size, full)
            return
        share = size // self.cluster
        own = offset + rank * share
        copy_bulk_to_cluster(target + own, record + Int64(own), share, full, BOTH_CTAS)

    @cute.jit
    def copy_part(
        self,
        target: Int32,
        record: Int64,
        offset: cutlass.Constexpr,
        size: cutlass.Constexpr,
        lane: Int32,
    ) -> None:
        """Start the copy of a part of a record, by a warp."""
        for i in cutlass.range(size // (WARP_SIZE * UNIT_BYTES), unroll=8):
            x = offset + (i * WARP_SIZE + lane) * UNIT_BYTES
            copy_async(target + x, record + x, True)

    # -- the warps that carry the matrix ------------------------------------------------------

    @cute.jit
    def state_warp(
        self,
        x: Any,
        place: Place,
        sequence: Int32,
        segment: Int32,
        stages: Int32,
        barriers: Barriers,
        first: Int32,
        begin: Int32,
        end: Int32,
        last: Int32,
    ) -> None:
        spec = self.spec
        head = place.head
        column = place.column
        state = self.state.empty()
        if cutlass.const_expr(spec.segments == "none"):
            self.load_start(state, x, sequence, head, column)
        elif cutlass.const_expr(self.spans):
            if column >= spec.head_dim_v:
                self.identity(state, column - spec.head_dim_v)
            else:
                state.fill(0.0)
        elif cutlass.const_expr(self.transitions):
            if column >= spec.head_dim_v:
                self.identity(state, column - spec.head_dim_v)
            elif segment == 0:
                self.load_start(state, x, sequence, head, column)
            else:
                state.fill(0.0)
        elif segment == 0:
            self.load_start(state, x, sequence, head, column)
        else:
            starts = x.segment_states[None, segment - 1, None, None, None]
            loaded = first < end
            if cutlass.const_expr(self.short_starts):
                state.fill(0.0)
                loaded = loaded and first == begin
            if loaded:
                self.state.load(state, starts, True, sequence, head, column)

        held = self.hold(state)
        stage = Int32(0)
        phase = Int32(0)
        for c in cutlass.range(first, end, unroll=1):
            at = stages + stage * self.stage_bytes
            mbarrier.wait(barriers.address("chunk_full", stage), phase)
            self.chunk(state, held, at, x.results, place, self.chunk_index(c, last), c > begin)
            self.checkpoint(state, x, place, sequence, c + 1, c >= begin)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                self.release(barriers, stage)
            stage = stage + 1
            if stage == spec.num_stages:
                stage = Int32(0)
                phase = phase ^ 1
        self.finish(held, x.results, place, end, first < end)

        if cutlass.const_expr(self.spans):
            self.store_span(state, x, sequence, segment, head, column)
        elif cutlass.const_expr(self.transitions):
            if first < end:
                if column < spec.head_dim_v:
                    target = x.segment_states[None, segment, None, None, None]
                    self.state.store(state, target, True, sequence, head, column)
                else:
                    target = x.segment_transitions[None, segment, None, None, None]
                    at = column - spec.head_dim_v
                    self.state.store(state, target, False, sequence, head, at)
        elif cutlass.const_expr(spec.segments == "none"):
            self.store_result(state, x, sequence, head, column)
        elif cutlass.const_expr(self.ends):
            # The segment with the last chunk stores the result; for an empty sequence, the first
            # segment stores it.
            if (first < end and end == last) or (last == 0 and segment == 0):
                self.store_result(state, x, sequence, head, column)

    @cute.jit
    def store_span(
        self, state: cute.Tensor, x: Any, sequence: Int32, segment: Int32, head: Int32, column: Any
    ) -> None:
        """Store columns of [B | M] of a piece, and the squared norm of columns of M."""
        target = x.segment_states[None, segment, None, None, None]
        self.state.store(state, target, True, sequence, head, column)
        if column >= self.spec.head_dim_v:
            square = Float32(0.0)
            for i in cutlass.range_constexpr(cute.size(state)):
                square = square + state[i] * state[i]
            for bit in cutlass.range_constexpr(5):
                square = square + cute.arch.shuffle_sync_bfly(square, offset=1 << bit)
            if cute.arch.lane_idx() == 0:
                at = (column - self.spec.head_dim_v) // 16
                x.bounds[sequence, segment + 1, head, at] = square

    def identity(self, state: cute.Tensor, first_v: Int32) -> None:
        lane = cute.arch.lane_idx()
        for i in range(cute.size(state)):
            k, v = self.state.element(i, first_v, lane)
            state[i] = Float32(k == v)

    # -- methods of a pass --------------------------------------------------------------------

    def load_start(
        self, state: cute.Tensor, x: Any, sequence: Int32, head: Int32, column: Any
    ) -> None:
        """Load the carried matrix before the first chunk of a sequence."""
        self.state.load(state, x.start, self.spec.state_v_first, sequence, head, column)

    def store_result(
        self, state: cute.Tensor, x: Any, sequence: Int32, head: Int32, column: Any
    ) -> None:
        """Store the carried matrix after the last chunk of a sequence."""
        self.state.store(state, x.result, self.spec.state_v_first, sequence, head, column)

    def checkpoint(
        self, state: cute.Tensor, x: Any, place: Place, sequence: Int32, count: Any, begun: Any
    ) -> None:
        """Store the carried matrix after `count` chunks of a sequence, if the call asks for this
        matrix. `begun` is false for the chunks of a warm-up."""

    def release(self, barriers: Barriers, stage: Int32) -> None:
        """Tell the load warp that this warp has read a stage."""
        if self.cluster == 1:
            mbarrier.arrive(barriers.address("chunk_empty", stage))
            return
        for owner in range(self.cluster):
            cute.arch.mbarrier_arrive(barriers.stage_pointer("chunk_empty", stage), owner)

    def hold(self, state: cute.Tensor) -> Any:
        """Return registers that `chunk` keeps from one chunk to the next. `state` is the matrix
        before the first chunk."""
        return None

    def chunk(
        self, state: cute.Tensor, held: Any, stage: Any, results: Results, place: Place,
        index: Any, later: Any,
    ) -> None:  # fmt: skip
        """Update the carried matrix by chunk `index`, whose tiles are at `stage`, and store the
        chunk's results. `later` is false if the pass stores no results of the previous chunk. A
        branch between the start and the wait of a `wgmma` would make the compiler serialise the
        wgmmas."""
        raise NotImplementedError

    def finish(self, held: Any, results: Results, place: Place, end: Any, present: Any) -> None:
        """Store the values that `hold` has of the last chunk before `end`, if `present`."""

    # -- rows of V ----------------------------------------------------------------------------

    def row_offset(self, row: Any, unit: Any) -> Any:
        """Byte offset of a 16-byte unit of a row, swizzled so that neither a row of units nor a
        column of 8 units has bank conflicts."""
        units = self.line // UNIT_BYTES
        swizzle = row % 8 if units == 8 else (row // (8 // units)) % units
        within = row * self.line + (((unit % units) ^ swizzle) << 4)
        return within + (unit // units) * (CHUNK * self.line)

    def transposed_rows(self, base: Int32) -> list[Any]:
        """Return loaders for the warp's 16 columns of the rows, transposed: left operands of 16
        tokens each."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        matrix, r = lane // 8, lane % 8

        def load(j: int) -> Any:
            row = 8 * (j + matrix // 2) + r
            at = base + self.row_offset(row, 2 * warp_index + matrix % 2)
            return load_matrices(at, transposed=True)

        return [lambda j=j: load(j) for j in range(0, CHUNK // 8, 2)]

    def store_rows(self, rows: Any, o: cute.Tensor, place: Place, index: Any, present: Any) -> None:
        """Store a chunk's rows of the warp's 16 columns to o, `[B, T, HV, V]`. Each store of a warp
        covers 16 bytes of each of 8 rows; L2 merges the two halves of a sector. `rows` are
        fragments of the untransposed rows, 2 for each 8 rows."""
        sequence = place.sequence
        lane = cute.arch.lane_idx()
        row = index * CHUNK + lane // 4
        end = sequence.length
        if present is not True:
            end = cutlass.select_(present, end, Int32(-CHUNK))  # no row is before end
        step = o.stride[1] * 2
        column = place.column + 2 * (lane % 4)
        at = row_address(o, sequence.batch, sequence.start, place.head, column)
        at = at + Int64(row) * step
        for j in range(CHUNK // 8):
            for half in range(2):
                store_global_where(row < end, at + 16 * half, rows[2 * j + half])
            row, at = row + 8, at + 8 * step

    # -- states -------------------------------------------------------------------------------

    def store_state(self, s: list[Any], results: Results, place: Place, index: Any) -> None:
        """Store a chunk's carried matrix. The operand s is the matrix rounded to 16 bits."""
        if self.transitions or not self.has_states:
            return
        steps = self.spec.head_dim_k // STEP
        base = self.of_chunk(results.states, place, index)
        base = base + Int64(place.column // 64 * (self.spec.head_dim_k // 64) * SUB_TILE_BYTES)
        for step in range(steps):
            sub_tile = base + step // 4 * SUB_TILE_BYTES
            for half in range(2):
                row = place.column % 64 + 8 * half
                x = s[4 * step + half], s[4 * step + 2 + half]
                store_units(sub_tile, row, step % 4, x)

    def of_chunk(self, x: cute.Tensor, place: Place, index: Any) -> Any:
        """Return the address of a chunk and head's elements of x, `[slots, HV, elements]`."""
        slot = place.sequence.slot + index
        offset = Int64(slot) * x.stride[0] + Int64(place.head) * x.stride[1]
        return (x.iterator + offset).toint()
