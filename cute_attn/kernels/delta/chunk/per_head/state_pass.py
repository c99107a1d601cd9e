"""The pass of the state through the chunks for one decay a head, with the output.

`prepare` has computed T, Aqk and the factors of each token. With S the state at the chunk's start,
a K by V matrix, and the factors as diagonal matrices, a chunk computes

    r     = v - Diag(exp(G) / |k|) k S           residuals of the delta rule
    v_new = T r                                  corrections of the chunk's tokens, divided by beta
    o     = Diag(scale exp(G) / |q|) q S + Aqk v_new
    S    <- exp(G_e) S + k^T Diag(beta exp(G_e - G) / |k|) v_new

Every factor multiplies accumulators in float32, so q and k are the products' operands as they are
in memory.

    CTA (tile of V, value head, sequence)
      warps 0 to tile_v / 16 - 1    state, see `chunk_pass`
        remember  start k S and q S
        store     o of the previous chunk, and S
        correct   r, then v_new
        update    S; and o, in registers
      the next warp                 load: T, Aqk and the factors by bulk copies; q, k, v by TMA

Shared memory of a stage at K = 128: q and k 32 KiB, T and Aqk 16 KiB, v 8 KiB, factors 1 KiB. The
CTAs of a value head read the same q, k, T and Aqk. In a cluster of two, each CTA copies half of
these tiles to both CTAs, since the bandwidth from L2 would limit the pass otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ....common.arguments import fake_rows
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.pipeline import BOTH_CTAS, Barriers, Edge, Kind, Pipeline, Reach, Role
from ....common.ptx.async_copy import copy_bulk, copy_bulk_to_cluster
from ....common.ptx.cluster import cta_rank
from ....common.ptx.matrices import transpose_matrix
from ....common.ptx.memory import load_shared, shared_address, store_shared
from ....common.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemory
from ....common.spec import MBARRIER_BYTES, WARP_SIZE
from ....common.tma import BOX, BoxedRows, boxes, load_boxes
from ..chunk_pass import Place, Results
from ..chunks import shared_head
from ..fused.state_pass import KdaStatePass
from ..spec import CHUNK, FACTORS, SUB_TILE, HeadPassSpec
from ..state import TransposedState
from ..tiles import SUB_TILE_BYTES


class Arguments(NamedTuple):
    """The kernel's arguments; see `chunk_pass.Arguments` for the other arguments.

    Attributes:
        q, k: [B, T, HQK, K].
        tiles, factors: the results of `per_head.prepare`.
    """

    q: cute.Tensor
    k: cute.Tensor
    rows: cute.Tensor
    tiles: cute.Tensor
    factors: cute.Tensor
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


class HeadOperands(NamedTuple):
    """The tensors and numbers that device code reads and writes; see `chunk_pass.Operands`. q, k
    and v are coordinates for TMA."""

    q_tma: cute.CopyAtom
    q: cute.Tensor
    k_tma: cute.CopyAtom
    k: cute.Tensor
    v_tma: cute.CopyAtom
    v: cute.Tensor
    heads_qk: Int32
    rows: cute.Tensor
    tiles: cute.Tensor
    factors: cute.Tensor
    results: Results
    start: cute.Tensor | None
    result: cute.Tensor | None
    slots: Any
    cu_seqlens: cute.Tensor | None
    segment_states: cute.Tensor | None
    segment_transitions: cute.Tensor | None
    chunks_per_segment: Int32
    num_segments: Int32
    bounds: cute.Tensor | None
    chunks_per_start: Int32 | None


class Held(NamedTuple):
    """Registers that a warp keeps from one chunk to the next."""

    state: cute.Tensor  # S rounded to 16 bits, the left operand of products
    output: cute.Tensor  # o of the previous chunk, which is stored while products run


class HeadStatePass(KdaStatePass):
    """The kernel for one HeadPassSpec; see the module's docstring."""

    spec: HeadPassSpec

    def __init__(self, spec: HeadPassSpec):
        self.spec, self.dtype = spec, DTYPE[spec.dtype]
        self.outputs = not spec.of_transitions
        self.transitions, self.spans = not self.outputs, spec.segments == "spans"
        self.short_starts = spec.short_starts and spec.segments != "none"
        self.scores = self.outputs or self.backwards  # whether the pass reads q and Aqk
        self.starts, self.ends = spec.has_initial_state, spec.has_final_state
        self.has_states = self.has_v_new = spec.store_states
        self.scores_have_beta = spec.dtype == "bfloat16"
        self.state = TransposedState(self.dtype, spec.head_dim_k, spec.products)
        self.num_warps = spec.tile_v // 16
        self.cluster = spec.cluster
        self.bulk = True
        state = Role("state", range(self.num_warps))
        load = Role("load", range(self.num_warps, self.num_warps + 1))
        self.roles = (state, load)
        reach = Reach.EACH if self.cluster > 1 else Reach.CTA
        stages = spec.num_stages
        self.pipeline = Pipeline(
            Edge("chunk_full", load, state, stages, Kind.BYTES, payload="a chunk's tiles"),
            Edge("chunk_empty", state, load, stages, Kind.WARPS, reach, payload="its stage"),
        )
        self.qk_rows = BoxedRows(CHUNK, spec.head_dim_k, spec.varlen, True)
        self.v_rows = BoxedRows(CHUNK, spec.head_dim_v, spec.varlen, True)
        tile = CHUNK * spec.head_dim_k
        self.stage = SharedMemory(
            Buffer("k", self.dtype, tile, alignment=SWIZZLE_ALIGNMENT),
            Buffer("q", self.dtype, tile if self.scores else 0),
            Buffer("t", self.dtype, SUB_TILE, holds="T"),
            Buffer("aqk", self.dtype, SUB_TILE if self.scores else 0),
            Buffer("rows", self.dtype, CHUNK * spec.tile_v, holds="v"),
            Buffer("factors", Float32, FACTORS),
        )
        self.memory = SharedMemory(
            Buffer.ring("chunk", self.stage, spec.num_stages),
            Buffer("barriers", Int64, self.pipeline.count, alignment=MBARRIER_BYTES),
        )
        self.smem_bytes = self.memory.nbytes
        self.stage_bytes = self.memory.buffers["chunk"].stage_bytes
        self.line = min(spec.tile_v * 2, 128)
        self.rows_bytes = 2 * CHUNK * spec.tile_v
        self.tiles_bytes = (2 if self.scores else 1) * SUB_TILE_BYTES
        qk_bytes = (2 if self.scores else 1) * 2 * tile
        self.copied_bytes = qk_bytes + self.tiles_bytes + self.rows_bytes + 4 * FACTORS

    def fake_args(self) -> tuple[Any, ...]:
        heads, slots, sequences = (cute.sym_int() for _ in range(3))
        return placeholders(
            Arguments(
                **self.fake_inputs(heads, slots),
                **self.fake_states(heads, slots, sequences),
                **self.fake_workspace(sequences, heads),
                **self.fake_segments(heads, slots, sequences),
            )
        )

    def fake_inputs(self, heads: Any, slots: Any) -> dict[str, Any]:
        """Placeholders of the arguments from q to o."""
        return {
            **self.fake_tokens(cute.sym_int(), cute.sym_int(), heads),
            "tiles": fake_rows(self.dtype, (slots, heads, 2 * SUB_TILE)),
            "factors": fake_rows(Float32, (slots, heads, FACTORS)),
        }

    def fake_tokens(self, batch: Any, tokens: Any, heads: Any) -> dict[str, Any]:
        """Placeholders of q, k, v and o."""
        spec, heads_qk = self.spec, cute.sym_int()

        def rows(heads: Any, columns: int) -> Any:
            return fake_rows(self.dtype, (batch, tokens, heads, columns))

        return {
            "q": rows(heads_qk, spec.head_dim_k),
            "k": rows(heads_qk, spec.head_dim_k),
            "rows": rows(heads, spec.head_dim_v),
            "o": rows(heads, spec.head_dim_v),
        }

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Run the pass."""
        a, stream = gathered(Arguments, args)
        results = Results(a.o, a.states, a.v_new)
        x = self.operands(a, results, a.start, a.result, None)
        self.kernel(x).launch(**self.launch_config(a), stream=stream)

    def operands(
        self, a: Any, results: Results, start: Any, result: Any, slots: Any
    ) -> HeadOperands:
        """The operands of a call with the arguments a; for host code."""
        op = cpasync.CopyBulkTensorTileG2SOp()
        shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else op
        return HeadOperands(
            *self.qk_rows.atom(shared, a.q), *self.qk_rows.atom(shared, a.k),
            *self.v_rows.atom(op, a.rows), a.k.shape[2], a.rows, a.tiles, a.factors, results,
            start, result, slots, a.cu_seqlens, a.segment_states, a.segment_transitions,
            a.chunks_per_segment, a.num_segments, a.bounds, a.chunks_per_start,
        )  # fmt: skip

    def launch_config(self, a: Any) -> dict[str, Any]:
        # Two CTAs of transitions fit an SM, if all of its memory is shared memory.
        return super().launch_config(a) | {"preferred_smem_carveout": 100}

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
        head_qk = shared_head(head, x.rows.shape[2], x.heads_qk)
        has_rows = tile_start < spec.head_dim_v
        if cutlass.const_expr(self.transitions):
            if not has_rows:
                self.zero_rows(stages)
        across = spec.head_dim_k // BOX
        keys, queries = (self.boxes(stages, name, across) for name in ("k", "q"))
        values = self.boxes(stages, "rows", spec.tile_v // BOX)
        for n in cutlass.range(end - first, unroll=1):
            c = self.chunk_index(first + n, last)
            barriers.wait_previous("chunk_empty", n)
            nbytes = cutlass.select_(
                has_rows, Int32(self.copied_bytes), Int32(self.copied_bytes - self.rows_bytes)
            )
            with cute.arch.elect_one():
                barriers.expect("chunk_full", n, nbytes)
            of_sequence = place.batch, place.start, place.length
            shared = self.cluster > 1
            of_k = self.qk_rows.box(x.k, c, head_qk, *of_sequence)
            load_boxes(x.k_tma, of_k, keys, barriers, "chunk_full", n, shared)
            if cutlass.const_expr(self.scores):
                of_q = self.qk_rows.box(x.q, c, head_qk, *of_sequence)
                load_boxes(x.q_tma, of_q, queries, barriers, "chunk_full", n, shared)
            if has_rows:
                of_v = self.v_rows.box(x.v, c, head, *of_sequence)
                tile = tile_start // spec.tile_v
                of_v = cute.local_tile(of_v, (CHUNK, spec.tile_v), (0, tile))
                load_boxes(x.v_tma, of_v, values, barriers, "chunk_full", n)
            stage = stages + barriers.stage("chunk_full", n) * self.stage_bytes
            full = shared_address(barriers.pointer("chunk_full", n))
            slot = place.slot + c
            tiles, factors = (
                (y.iterator + (Int64(slot) * y.stride[0] + Int64(head) * y.stride[1])).toint()
                for y in (x.tiles, x.factors)
            )
            half = self.tiles_bytes // 2
            part = cta_rank() * half if self.cluster > 1 else Int32(0)
            with cute.arch.elect_one():
                copy_bulk(stage + self.stage["factors"], factors, 4 * FACTORS, full)
                at = stage + self.stage["t"]
                if cutlass.const_expr(self.cluster > 1):
                    copy_bulk_to_cluster(at + part, tiles + part, half, full, BOTH_CTAS)
                else:
                    copy_bulk(at, tiles, 2 * half, full)

    def boxes(self, stages: Int32, name: str, across: int) -> cute.Tensor:
        """The buffer `name` of all stages, as boxes (rows, columns, boxes, stages)."""
        at = stages + self.stage[name]
        return self.boxes_at(at, across, self.spec.num_stages, self.stage_bytes)

    def boxes_at(self, address: Int32, across: int, stages: int, step: int) -> cute.Tensor:
        """The boxes of a buffer at `address`, whose stages are `step` bytes apart."""
        at = cute.make_ptr(
            self.dtype, address, cute.AddressSpace.smem, assumed_align=SWIZZLE_ALIGNMENT
        )
        return boxes(at, CHUNK, (across, SUB_TILE), (stages, step // 2))

    @cute.jit
    def zero_rows(self, stages: Int32) -> None:
        """Store zeros to the rows of v of all stages, for columns that have no v."""
        lane = cute.arch.lane_idx()
        for stage in cutlass.range_constexpr(self.spec.num_stages):
            at = stages + stage * self.stage_bytes + self.stage["rows"] + lane * 16
            for i in cutlass.range(self.rows_bytes // (WARP_SIZE * 16), unroll=4):
                store_shared(Int32, at + i * (WARP_SIZE * 16), [Int32(0)] * 4)
        cute.arch.sync_warp()

    # -- the warps that carry the state -------------------------------------------------------

    def hold(self, state: cute.Tensor) -> Held:
        """Return S and o of the previous chunk, both rounded to 16 bits."""
        rounded = cute.make_rmem_tensor((cute.size(state) // 2,), Int32)
        self.state.assign(rounded, self.state.operand(self.state.values(state)))
        output = cute.make_rmem_tensor((CHUNK // 4,), Int32)
        output.fill(0)
        return Held(rounded, output)

    def at(self, stage: Any, name: str) -> Any:
        """Return the address of the buffer `name` of a chunk's stage."""
        return stage + self.stage[name]

    def chunk(
        self, state: cute.Tensor, held: Any, stage: Any, results: Results, place: Place,
        index: Any, later: Any,
    ) -> None:  # fmt: skip
        # Products run in the order in which they start. Another product runs between a product and
        # the product that needs its result, so q S is computed in two halves.
        product, done = self.state.times_rows, self.state.done

        # remember: (k S)^T and (q S)^T, 16 columns of V by 64 tokens
        s = self.state.values(held.state)
        half = len(s) // 2 if self.outputs and self.spec.head_dim_k > 64 else len(s)
        recalled = product(s, self.at(stage, "k"))
        remembered: list[Any] = []
        if self.outputs:
            remembered = product(s[:half], self.at(stage, "q"))
        self.store_o(held, results.o, place, index - 1, later)
        self.store_state(s, results, place, index)

        # correct
        v_t = self.load_v(self.at(stage, "rows"))
        seen = self.of_tokens(stage, 0)
        recalled = done(recalled, pending=1 if self.outputs else 0)
        r = self.state.operand([v - y * x for v, y, x in zip(v_t, seen, recalled, strict=True)])
        corrections = product(r, self.at(stage, "t"), triangular=True)
        if half < len(s):
            remembered = product(s[half:], self.at(stage, "q") + SUB_TILE_BYTES, c=remembered)
        decay = load_shared(Float32, self.at(stage, "factors") + 16 * CHUNK)[0]
        decayed = [x * decay for x in self.state.values(state)]
        written = self.of_tokens(stage, 2)
        v_new = done(corrections, pending=1 if half < len(s) else 0)

        # update
        update = self.state.operand([x * y for x, y in zip(v_new, written, strict=True)])
        updated = self.state.times_columns(update, self.at(stage, "k"), decayed)
        corrected = self.state.operand(v_new)
        self.store_v_new(corrected, results, place, index)
        result = None
        if self.outputs:
            if not self.scores_have_beta:
                beta = self.of_tokens(stage, 3)
                corrected = self.state.operand([x * y for x, y in zip(v_new, beta, strict=True)])
            remembered = done(remembered, pending=1)
            remembered = [x * y for x, y in zip(remembered, self.of_tokens(stage, 1), strict=True)]
            result = product(corrected, self.at(stage, "aqk"), triangular=True, c=remembered)
        self.state.assign(state, done(updated, pending=0 if result is None else 1))
        self.state.assign(held.state, self.state.operand(self.state.values(state)))
        if result is not None:
            self.state.assign(held.output, self.state.operand(done(result)))

    def store_o(self, held: Any, o: cute.Tensor, place: Place, index: Any, present: Any) -> None:
        if self.outputs:
            rows = [transpose_matrix(x) for x in self.state.values(held.output)]
            self.store_rows(rows, o, place, index, present)

    def of_tokens(self, stage: Any, n: int) -> list[Any]:
        """Load the n-th factor of tokens, for the accumulators of 16 columns of V by 64 tokens."""
        lane = cute.arch.lane_idx()
        at = self.at(stage, "factors") + 4 * n * CHUNK + ((lane & 3) << 3)
        values: list[Any] = []
        for j in range(CHUNK // 8):
            values += [*load_shared(Float32, at + 32 * j, 2)] * 2
        return values
