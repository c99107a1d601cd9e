"""The whole forward for one decay a head in one kernel: `prepare` and `state_pass` side by side.

T and Aqk do not depend on the state. So while the state's warps work on a chunk, other warps of the
CTA prepare later chunks, and T and Aqk never leave shared memory.

    CTA (64 columns of V, value head, sequence), 16 warps
      warps 0 to 3     state    the pass's method `chunk`, chunk after chunk
      warps 4 to 11    prepare  scores, inverse and factors, as in `prepare`; the first warp, the
                                leader, signals for all of them
      warp 12          load     q, k and v for the state, by TMA
      warp 13          feed     q and k for prepare, by TMA
      warp 14          gates    sums of gates, and beta
      warp 15          expect   announces what the other CTA copies

The two CTAs of a value head form a cluster and share this work. CTA r prepares the chunks c with
c % 2 = r, and copies T, Aqk and the factors to the other CTA's shared memory. Each CTA loads half
of the state's q and k to both CTAs.

q and k are loaded twice. A chunk's q and k are needed for a short time while scores are computed,
and again when the state reaches the chunk. In between, only T, Aqk and the factors stay, 17 KiB
instead of 32 KiB, so that the warps of prepare can be several chunks ahead.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric
from cutlass.cute.nvgpu import cpasync

from ....common.arguments import (
    fake_contiguous,
    fake_strided,
)
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.pipeline import Barriers, Edge, Kind, Pipeline, Reach, Role
from ....common.ptx.async_copy import copy_bulk_to_peer
from ....common.ptx.cluster import cta_rank, remote_address
from ....common.ptx.memory import shared_address, store_shared
from ....common.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemory
from ....common.spec import MBARRIER_BYTES, SMEM_BYTES, WARP_SIZE
from ....common.tma import BOX, BoxedRows, load_boxes
from ..chunk_pass import Place, Results
from ..chunks import ChunkPlace, num_sequences, sequence_place, shared_head
from ..inverse import Inverse
from ..spec import (
    CHUNK,
    FACTORS,
    SUB_TILE,
    HeadForwardSpec,
    HeadPrepareSpec,
    InputsSpec,
)
from ..state import TransposedState
from ..sub_chunks import NUM_BLOCKS, NUM_WARPS, SUB_CHUNK, SUB_CHUNKS
from ..tiles import LINE_BYTES, SUB_TILE_BYTES
from .head_scores import HeadScores, Places
from .state_pass import HeadStatePass

TOKEN_STAGES = 2
GATE_STAGES = 2
EXCHANGES = 3  # blocks that warps exchange while they invert L

STATE = Role("state", range(4))
PREPARE = Role("prepare", range(4, 4 + NUM_WARPS))
LEADER = Role("leader", range(4, 5))  # the first warp of prepare
LOAD = Role("load", range(12, 13))
FEED = Role("feed", range(13, 14))
GATES = Role("gates", range(14, 15))
EXPECT = Role("expect", range(15, 16))
NUM_WARPS_OF_CTA = 16

# Registers of a thread. At the launch each thread has 128.
STATE_REGISTERS = 240
PREPARE_REGISTERS = 112
LOAD_REGISTERS = 40
assert STATE_REGISTERS + 2 * PREPARE_REGISTERS + LOAD_REGISTERS <= 512

PREPARE_BARRIER = 1  # a named barrier


class Arguments(NamedTuple):
    """The kernel's arguments; see `prepare.Arguments` and `chunk_pass.Arguments`.

    Attributes:
        rows: v.
    """

    q: cute.Tensor
    k: cute.Tensor
    rows: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    A_log: cute.Tensor | None
    dt_bias: cute.Tensor | None
    o: cute.Tensor
    states: cute.Tensor | None
    v_new: cute.Tensor | None
    start: cute.Tensor | None
    result: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    scale: Float32
    beta_scale: Float32


class ForwardOperands(NamedTuple):
    """The tensors and numbers that device code reads and writes. q, k and v are coordinates for
    TMA."""

    q_tma: cute.CopyAtom
    q: cute.Tensor
    k_tma: cute.CopyAtom
    k: cute.Tensor
    v_tma: cute.CopyAtom
    v: cute.Tensor
    own_q_tma: cute.CopyAtom  # copies to this CTA alone
    own_q: cute.Tensor
    own_k_tma: cute.CopyAtom
    own_k: cute.Tensor
    heads_qk: Int32
    rows: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    A_log: cute.Tensor | None
    dt_bias: cute.Tensor | None
    scale: Float32
    beta_scale: Float32
    results: Results
    start: cute.Tensor | None
    result: cute.Tensor | None
    slots: Any
    cu_seqlens: cute.Tensor | None


class Stage(NamedTuple):
    """Addresses of a chunk's stages in the rings that the state reads."""

    tokens: Any
    tiles: Any


class ForwardMemory(SharedMemory):
    """The shared memory of a CTA.

    Attributes:
        dtype: dtype of q, k and v.
        tokens, tiles: a stage of the ring "tokens", and of the ring "tiles", which is one copy to
            the other CTA.
    """

    def __init__(
        self, dtype: type[Numeric], head_dim_k: int, tile_v: int, token_stages: int,
        tile_stages: int, pipeline: Pipeline,
    ):  # fmt: skip
        self.dtype = dtype
        tile = CHUNK * head_dim_k
        self.tokens = SharedMemory(
            Buffer("k", dtype, tile, alignment=SWIZZLE_ALIGNMENT),
            Buffer("q", dtype, tile),
            Buffer("rows", dtype, CHUNK * tile_v, holds="v"),
        )
        self.tiles = SharedMemory(
            Buffer("t", dtype, SUB_TILE, alignment=SWIZZLE_ALIGNMENT, holds="T"),
            Buffer("aqk", dtype, SUB_TILE),
            Buffer("factors", Float32, FACTORS),
        )

        def numbers(name: str, holds: str, count: int = GATE_STAGES) -> Buffer:
            return Buffer(name, Float32, count * CHUNK, holds=holds)

        super().__init__(
            Buffer.ring("tokens", self.tokens, token_stages),
            Buffer.ring("tiles", self.tiles, tile_stages),
            Buffer("scored", dtype, 2 * tile, alignment=SWIZZLE_ALIGNMENT, holds="k, then q"),
            Buffer("blocks", Float32, SUB_CHUNK * SUB_CHUNK, NUM_BLOCKS, holds="L"),
            Buffer("exchange", Float32, SUB_CHUNK * SUB_CHUNK, EXCHANGES),
            numbers("inverse_norm_q", "1 without l2norm", 1),
            numbers("inverse_norm_k", "1 without l2norm", 1),
            numbers("coarse", "see head_gates"),
            numbers("fine", "see head_gates"),
            numbers("beta", "0 past the chunk's end"),
            numbers("earlier", "see head_gates", (SUB_CHUNKS - 1) * GATE_STAGES),
            Buffer("barriers", Int64, pipeline.count, alignment=MBARRIER_BYTES),
            limit=SMEM_BYTES["sm_90"],
        )


class HeadForward(HeadStatePass):
    """The kernel for one HeadForwardSpec; see the module's docstring."""

    spec: HeadForwardSpec
    token_stages = TOKEN_STAGES

    def __init__(self, spec: HeadForwardSpec):
        self.spec, self.dtype = spec, DTYPE[spec.dtype]
        self.outputs = self.scores = True
        self.transitions = self.spans = self.short_starts = False
        self.starts, self.ends = spec.has_initial_state, spec.has_final_state
        self.has_states = self.has_v_new = spec.store_states
        self.scores_have_beta = spec.dtype == "bfloat16"
        self.state = TransposedState(self.dtype, spec.head_dim_k, spec.products)
        self.num_warps = len(STATE)
        self.cluster = spec.cluster
        self.roles = (STATE, PREPARE, LOAD, FEED, GATES, EXPECT)
        reach = Reach.EACH if self.cluster > 1 else Reach.CTA
        token_stages, stages = self.token_stages, spec.num_stages
        self.pipeline = Pipeline(
            Edge("tokens_full", LOAD, STATE, token_stages, Kind.BYTES, payload="q, k and v"),
            Edge("tokens_empty", STATE, LOAD, token_stages, Kind.WARPS, reach, "its stage"),
            Edge("scored_full", FEED, PREPARE, 1, Kind.BYTES, payload="q and k"),
            Edge("scored_empty", PREPARE, FEED, 1, Kind.WARPS, payload="their memory"),
            # The warp expect arrives for the other CTA's leader.
            Edge("tiles_full", LEADER, STATE, stages, Kind.WARPS, payload="T, Aqk and factors"),
            Edge("tiles_empty", STATE, PREPARE, stages, Kind.WARPS, reach, "its stage"),
            Edge("gates_full", GATES, PREPARE, GATE_STAGES, Kind.WARPS, payload="gates and beta"),
            Edge("gates_empty", LEADER, GATES, GATE_STAGES, Kind.WARPS, payload="its stage"),
        )
        self.qk_rows = BoxedRows(CHUNK, spec.head_dim_k, spec.varlen, True)
        self.v_rows = BoxedRows(CHUNK, spec.head_dim_v, spec.varlen, True)
        self.memory = ForwardMemory(
            self.dtype, spec.head_dim_k, spec.tile_v, token_stages, stages, self.pipeline
        )
        self.tokens, self.tiles = self.memory.tokens, self.memory.tiles
        self.smem_bytes = self.memory.nbytes
        self.tokens_bytes, self.tiles_bytes = (
            self.memory.buffers[name].stage_bytes for name in ("tokens", "tiles")
        )
        self.line = min(spec.tile_v * 2, 128)
        of_prepare = HeadPrepareSpec(**{x.name: getattr(spec, x.name) for x in fields(InputsSpec)})
        step = SUB_CHUNK * LINE_BYTES
        self.head_scores = HeadScores(
            of_prepare,
            self.memory,
            Places(2 * CHUNK * spec.head_dim_k, 0, (0, step)),
            compact=True,
        )
        self.inverse = Inverse(
            self.memory, exact=spec.dtype != "bfloat16", rows=(0, step),
            exchange=(self.memory["exchange"], 4 * SUB_CHUNK * SUB_CHUNK),
            diagonal_warps=2, meet=self.meet, end=self.meet_with_tiles,
        )  # fmt: skip

    # -- arguments ----------------------------------------------------------------------------

    def fake_args(self) -> tuple[Any, ...]:
        heads, slots, sequences = (cute.sym_int() for _ in range(3))
        return placeholders(
            Arguments(
                **self.fake_inputs(heads),
                **self.fake_states(heads, slots, sequences),
                scale=Float32(1.0),
                beta_scale=Float32(1.0),
            )
        )

    def fake_inputs(self, heads: Any) -> dict[str, Any]:  # type: ignore[override]
        """Placeholders of the arguments from q to o."""
        spec = self.spec
        batch, tokens = cute.sym_int(), cute.sym_int()

        def of_heads(present: bool) -> Any:
            return fake_contiguous(Float32, (heads,)) if present else None

        return {
            **self.fake_tokens(batch, tokens, heads),
            "g": fake_strided(DTYPE[spec.gate_dtype], (batch, tokens, heads)),
            "beta": fake_strided(DTYPE[spec.beta_dtype], (batch, tokens, heads)),
            "A_log": of_heads(spec.has_A_log),
            "dt_bias": of_heads(spec.has_dt_bias),
        }

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Run the forward."""
        a, stream = gathered(Arguments, args)
        results = Results(a.o, a.states, a.v_new)
        x = self.forward_operands(a, results, a.start, a.result, None)
        self.kernel(x).launch(**self.launch_config(a), stream=stream)

    def forward_operands(
        self, a: Any, results: Results, start: Any, result: Any, slots: Any
    ) -> ForwardOperands:
        """The operands of a call with the arguments a; for host code."""
        op = cpasync.CopyBulkTensorTileG2SOp()
        shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else op
        return ForwardOperands(
            *self.qk_rows.atom(shared, a.q), *self.qk_rows.atom(shared, a.k),
            *self.v_rows.atom(op, a.rows), *self.qk_rows.atom(op, a.q),
            *self.qk_rows.atom(op, a.k), a.k.shape[2], a.rows, a.g, a.beta, a.A_log, a.dt_bias,
            a.scale, a.beta_scale, results, start, result, slots, a.cu_seqlens,
        )  # fmt: skip

    def launch_config(self, a: Any) -> dict[str, Any]:
        sequences = num_sequences(a.rows.shape[0], a.cu_seqlens)
        config = {
            "grid": [self.spec.head_dim_v // self.spec.tile_v, a.rows.shape[2], sequences],
            "block": [NUM_WARPS_OF_CTA * WARP_SIZE, 1, 1],
            "smem": self.smem_bytes,
            "min_blocks_per_mp": 1,
        }
        if self.cluster > 1:
            config["cluster"] = [self.cluster, 1, 1]
        return config

    # -- set-up -------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, x: ForwardOperands) -> None:
        tile, head, sequence = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        place = sequence_place(sequence, x.rows.shape[1], x.cu_seqlens)
        chunks = (place.length + (CHUNK - 1)) // CHUNK
        tile_start = tile * self.spec.tile_v
        pointers = self.memory.allocate()
        smem = shared_address(pointers.tokens)
        barriers = self.pipeline.at(pointers.barriers)
        if thread == 0:
            barriers.init()
            cute.arch.mbarrier_init_fence()
        if thread < self.spec.num_stages:
            # The copy to the other CTA has a few bytes after the chunk's decay.
            last = self.tiles["factors"] + 16 * CHUNK
            at = smem + self.memory["tiles"] + thread * self.tiles_bytes + last
            store_shared(Float32, at, [Float32(0.0)] * (FACTORS - 4 * CHUNK))
            cute.arch.fence_view_async_shared()
        self.meet_cluster()
        if warp >= LOAD.warps[0]:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == LOAD.warps[0]:
                self.load_tokens(x, place, head, tile_start, smem, barriers, chunks)
            if warp == FEED.warps[0]:
                self.feed_warp(x, place, head, smem, barriers, chunks)
            if warp == GATES.warps[0]:
                self.gates_warp(x, place, head, smem, barriers, chunks)
            if cutlass.const_expr(self.cluster > 1):
                if warp == EXPECT.warps[0]:
                    self.expect_warp(barriers, chunks)
        elif warp >= PREPARE.warps[0]:
            cute.arch.setmaxregister_decrease(PREPARE_REGISTERS)
            self.prepare_warps(x, smem, barriers, chunks)
        else:
            cute.arch.setmaxregister_increase(STATE_REGISTERS)
            at = Place(place, head, tile_start + warp * 16)
            self.carry(x, at, sequence, smem, barriers, chunks)
        if cutlass.const_expr(self.cluster > 1):
            # No CTA may end while the other CTA signals it or copies to it.
            self.meet_cluster()

    def meet_cluster(self) -> None:
        if self.cluster > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def rank(self) -> Any:
        """The CTA prepares the chunks of this rank, modulo the CTAs of a cluster."""
        return cta_rank() if self.cluster > 1 else Int32(0)

    # -- the warps that copy ------------------------------------------------------------------

    @cute.jit
    def load_tokens(
        self, x: Any, place: Any, head: Int32, tile_start: Int32, smem: Int32, barriers: Barriers,
        chunks: Int32,
    ) -> None:  # fmt: skip
        spec = self.spec
        head_qk = shared_head(head, x.rows.shape[2], x.heads_qk)
        across = spec.head_dim_k // BOX
        keys, queries = (self.token_boxes(smem, name, across) for name in ("k", "q"))
        values = self.token_boxes(smem, "rows", spec.tile_v // BOX)
        of_sequence = place.batch, place.start, place.length
        shared = self.cluster > 1
        for c in cutlass.range(chunks, unroll=1):
            barriers.wait_previous("tokens_empty", c)
            with cute.arch.elect_one():
                barriers.expect("tokens_full", c, self.tokens.nbytes)
            of_k = self.qk_rows.box(x.k, c, head_qk, *of_sequence)
            load_boxes(x.k_tma, of_k, keys, barriers, "tokens_full", c, shared)
            of_q = self.qk_rows.box(x.q, c, head_qk, *of_sequence)
            load_boxes(x.q_tma, of_q, queries, barriers, "tokens_full", c, shared)
            of_v = self.v_rows.box(x.v, c, head, *of_sequence)
            of_v = cute.local_tile(of_v, (CHUNK, spec.tile_v), (0, tile_start // spec.tile_v))
            load_boxes(x.v_tma, of_v, values, barriers, "tokens_full", c)

    def token_boxes(self, smem: Int32, name: str, across: int) -> cute.Tensor:
        """A buffer of all stages of "tokens", as boxes (rows, columns, boxes, stages)."""
        at = smem + self.memory["tokens"] + self.tokens[name]
        return self.boxes_at(at, across, self.token_stages, self.tokens_bytes)

    @cute.jit
    def feed_warp(
        self, x: Any, place: Any, head: Int32, smem: Int32, barriers: Barriers, chunks: Int32
    ) -> None:
        head_qk = shared_head(head, x.rows.shape[2], x.heads_qk)
        across = self.spec.head_dim_k // BOX
        nbytes = 2 * CHUNK * self.spec.head_dim_k
        at = smem + self.memory["scored"]
        keys, queries = (self.boxes_at(at + y * nbytes, across, 1, nbytes) for y in range(2))
        of_sequence = place.batch, place.start, place.length
        use = Int32(0)
        for c in cutlass.range(self.rank(), chunks, self.cluster, unroll=1):
            barriers.wait_previous("scored_empty", use)
            with cute.arch.elect_one():
                barriers.expect("scored_full", use, 2 * nbytes)
            of_k = self.qk_rows.box(x.own_k, c, head_qk, *of_sequence)
            load_boxes(x.own_k_tma, of_k, keys, barriers, "scored_full", use)
            of_q = self.qk_rows.box(x.own_q, c, head_qk, *of_sequence)
            load_boxes(x.own_q_tma, of_q, queries, barriers, "scored_full", use)
            use += 1

    @cute.jit
    def expect_warp(self, barriers: Barriers, chunks: Int32) -> None:
        """Expect the bytes of T, Aqk and the factors of the chunks that the other CTA prepares."""
        for c in cutlass.range(self.rank() ^ 1, chunks, self.cluster, unroll=1):
            barriers.wait_previous("tiles_empty", c)
            with cute.arch.elect_one():
                barriers.expect("tiles_full", c, self.tiles.nbytes)

    # -- the warp of gates --------------------------------------------------------------------

    @cute.jit
    def gates_warp(
        self, x: Any, place: Any, head: Int32, smem: Int32, barriers: Barriers, chunks: Int32
    ) -> None:
        use = Int32(0)
        for c in cutlass.range(self.rank(), chunks, self.cluster, unroll=1):
            barriers.wait_previous("gates_empty", use)
            length = cutlass.min(place.length - c * CHUNK, Int32(CHUNK))
            start = place.start + c * CHUNK
            chunk = ChunkPlace(Boolean(True), place.batch, Int32(0), c, start, length)
            stage = barriers.stage("gates_full", use)
            self.head_scores.gates.store(smem, stage, x, chunk, head)
            barriers.warp_arrives("gates_full", use)
            use += 1

    # -- the warps that prepare chunks --------------------------------------------------------

    @cute.jit
    def prepare_warps(self, x: Any, smem: Int32, barriers: Barriers, chunks: Int32) -> None:
        thread = cute.arch.thread_idx()[0] - PREPARE.warps[0] * WARP_SIZE
        warp = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        b = warp & (SUB_CHUNKS - 1)
        of_k = warp < SUB_CHUNKS
        rows = smem + self.memory["scored"]
        use = Int32(0)
        for c in cutlass.range(self.rank(), chunks, self.cluster, unroll=1):
            stage = barriers.stage("tiles_full", c)
            tiles = smem + self.memory["tiles"] + stage * self.tiles_bytes
            n = barriers.stage("gates_full", use)
            products = cute.make_rmem_tensor((SUB_CHUNK * CHUNK // WARP_SIZE,), Float32)
            barriers.wait("scored_full", use)
            self.head_scores.multiply_by_wgmma(smem, rows, b, of_k, products)
            barriers.warp_arrives("scored_empty", use)
            self.meet()
            self.head_scores.normalise(smem, b, of_k, x.scale, products)
            barriers.wait("gates_full", use)
            barriers.wait_previous("tiles_empty", c)
            if of_k:
                self.head_scores.store_lower(smem, n, b, products)
                self.inverse.invert_diagonal(smem, b)
            else:
                self.head_scores.store_scores(smem, tiles + self.tiles["aqk"], n, b, products)
            factors = cute.make_tensor(
                cute.make_ptr(
                    Float32, tiles + self.tiles["factors"], cute.AddressSpace.smem, assumed_align=16
                ),
                cute.make_layout(FACTORS),
            )
            # Warps of q k^T are done before warps of k k^T, which invert blocks.
            token = (thread + CHUNK * 2) & (len(PREPARE) * WARP_SIZE - 1)
            self.head_scores.store_factors(smem, n, token, x.scale, factors)
            self.meet()
            self.inverse.invert(smem, warp, tiles + self.tiles["t"])
            if warp == 0:
                barriers.warp_arrives("gates_empty", use)
                if cutlass.const_expr(self.cluster > 1):
                    full = shared_address(barriers.pointer("tiles_full", c))
                    target, signal = (remote_address(y, cta_rank() ^ 1) for y in (tiles, full))
                    with cute.arch.elect_one():
                        copy_bulk_to_peer(target, tiles, self.tiles.nbytes, signal)
                barriers.warp_arrives("tiles_full", c)
            use += 1

    def meet(self) -> None:
        """The barrier of the warps that prepare chunks."""
        cute.arch.barrier(barrier_id=PREPARE_BARRIER, number_of_threads=len(PREPARE) * WARP_SIZE)

    def meet_with_tiles(self) -> None:
        """Let copies and `wgmma` see what the warps have stored, once they meet."""
        cute.arch.fence_view_async_shared()
        self.meet()

    # -- the warps that carry the state -------------------------------------------------------

    @cute.jit
    def carry(
        self, x: Any, place: Place, sequence: Int32, smem: Int32, barriers: Barriers, chunks: Int32
    ) -> None:
        state = self.state.empty()
        self.load_start(state, x, sequence, place.head, place.column)
        held = self.hold(state)
        tokens = stage = Int32(0)
        tokens_phase = phase = Int32(0)
        for c in cutlass.range(chunks, unroll=1):
            at = Stage(
                smem + self.memory["tokens"] + tokens * self.tokens_bytes,
                smem + self.memory["tiles"] + stage * self.tiles_bytes,
            )
            cute.arch.mbarrier_wait(barriers.stage_pointer("tokens_full", tokens), tokens_phase)
            cute.arch.mbarrier_wait(barriers.stage_pointer("tiles_full", stage), phase)
            self.chunk(state, held, at, x.results, place, c, c > 0)
            self.checkpoint(state, x, place, sequence, c + 1, True)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() < self.cluster:
                self.release_to(barriers, tokens, "tokens_empty")
                self.release_to(barriers, stage, "tiles_empty")
            tokens = tokens + 1
            if tokens == self.token_stages:
                tokens = Int32(0)
                tokens_phase = tokens_phase ^ 1
            stage = stage + 1
            if stage == self.spec.num_stages:
                stage = Int32(0)
                phase = phase ^ 1
        self.finish(held, x.results, place, chunks, chunks > 0)
        if cutlass.const_expr(self.ends):
            self.store_result(state, x, sequence, place.head, place.column)

    def release_to(self, barriers: Barriers, stage: Int32, edge: str) -> None:
        """Tell the producers of the CTA of the lane's rank that this warp has read a stage."""
        pointer = barriers.stage_pointer(edge, stage)
        owner = cute.arch.lane_idx() if self.cluster > 1 else None
        cute.arch.mbarrier_arrive(pointer, owner)

    def at(self, stage: Any, name: str) -> Any:
        if name in self.tokens.offsets:
            return stage.tokens + self.tokens[name]
        return stage.tiles + self.tiles[name]


assert SUB_TILE * 2 == SUB_TILE_BYTES
