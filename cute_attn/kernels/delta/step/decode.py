"""KDA decode, with a tile of the recurrent state in a CTA's registers.

Per token and value head, with the state a K by V matrix S:

    S <- Diag(decay) S      u = beta (v - S^T k)      S <- S + k u^T      o = scale S^T q

A call reads and writes the state once. All other tensors together have a fiftieth of the state's
bytes, so the kernel is bound by memory bandwidth, as Lightning decode is
(docs/kernels/kda_decode.md).

    CTA (tile of V, value head, sequence)
      fetch     the token's q, k, v, g and beta
      load      the tile of the slot's state, 16 bytes an access
      prepare   norms, gate and sigmoid, once for the CTA, to shared memory; barrier
      advance   decay, both sums over K in one pass, rank-1 update
      store     the tile, in place; barrier; the output

With several tokens, the next token is fetched and prepared while the current token is computed,
with one barrier for each token. With records, the accepted drafted tokens come first, and the state
is stored after them. With a slot for each position, the state is stored after every token.

Runs on sm_80 and newer. Shared memory: two stages of a token, 8 KiB at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...common.carried import Carried
from ...common.entry import entry, gathered, placeholders
from ...common.overlap import overlaps
from . import arguments
from .spec import DecodeSpec
from .tile import StateTile
from .tokens import (
    STAGES,
    Fetched,
    Gate,
    Token,
    TokenReader,
    Tokens,
    TokenStage,
    stage_of,
)


class Arguments(NamedTuple):
    """The kernel's arguments.

    The kernel only reads record_k and record_g, because several CTAs share them: CTAs of one head,
    and of a group's value heads. `records` writes them afterwards.

    Attributes:
        q, k: `[B, HQK, K]` or `[B, T, HQK, K]`, with a contiguous last dimension.
        v, o: `[B, HV, V]` or `[B, T, HV, V]`.
        g: `[B, HV, K]` or `[B, T, HV, K]`.
        beta: `[B, HV]` or `[B, T, HV]`, with any strides.
        A_log: `[HV]`.
        dt_bias: `[HV * K]` or `[HV, K]`.
        state: `[N, HV, V, K]` or `[N, HV, K, V]`, with a contiguous matrix of each head.
        state_indices: `[B]` or `[B, 1 + S]`, int32.
        num_accepted: `[B]`, int32.
        record_k: `[N, S, HQK, K]`, with a contiguous last dimension.
        record_g: `[N, S, HV, K]`.
        record_u: `[N, S, HV, V]`, float32.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    A_log: cute.Tensor | None
    dt_bias: cute.Tensor | None
    o: cute.Tensor
    state: cute.Tensor
    state_indices: cute.Tensor | None
    num_accepted: cute.Tensor | None
    record_k: cute.Tensor | None
    record_g: cute.Tensor | None
    record_u: cute.Tensor | None
    scale: Float32
    lower_bound: Float32
    beta_scale: Float32


@dataclass(frozen=True)
class Records(Carried):
    """The records of drafted tokens, with a sequence's slot in them and its `count` of accepted
    tokens."""

    k: cute.Tensor | None
    g: cute.Tensor | None
    u: cute.Tensor | None
    slot: Int32
    count: Int32


@dataclass(frozen=True)
class Source(Carried):
    """The source of a sequence's tokens: first the records, then the call."""

    tokens: Tokens
    records: Records


class KdaDecode:
    """The kernel for one DecodeSpec; see the module's docstring."""

    def __init__(self, spec: DecodeSpec):
        self.spec = spec
        self.reader = TokenReader(spec)
        self.tile = StateTile(spec, self.reader)
        self.stages = STAGES if spec.multi_token else 1
        self.replays = spec.slots == "records"
        self.positions = spec.slots == "positions"

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        sizes = arguments.Sizes()
        step = (sizes.batch, sizes.tokens) if spec.multi_token else (sizes.batch,)
        slots = cute.sym_int() if spec.indexed else sizes.batch
        positions = (cute.sym_int(),) if self.positions else ()
        records = cute.sym_int()
        record_k = record_g = record_u = None
        if self.replays:
            of_slots = (slots, records)
            record_k = arguments.rows(spec.dtype, *of_slots, sizes.heads, spec.head_dim_k)
            record_g = arguments.rows(spec.gate_dtype, *of_slots, sizes.heads_v, spec.head_dim_k)
            record_u = arguments.rows("float32", *of_slots, sizes.heads_v, spec.head_dim_v)
        return placeholders(
            Arguments(
                **arguments.inputs(spec, sizes, step),
                state=arguments.states(spec, sizes, slots),
                state_indices=arguments.indices(sizes.batch, *positions) if spec.indexed else None,
                num_accepted=arguments.indices(sizes.batch) if spec.accepted else None,
                record_k=record_k,
                record_g=record_g,
                record_u=record_u,
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        spec = self.spec
        batch, heads = a.q.shape[0], cute.size(a.q, mode=[cute.rank(a.q) - 2])
        heads_v = a.state.shape[1]
        # Bad arguments launch no CTAs; the driver rejects an empty grid, and the operator raises
        # the reason.
        ctas = heads_v
        pools = (a.state, a.record_k, a.record_g, a.record_u)
        inputs = (a.q, a.k, a.v, a.g, a.beta, a.A_log, a.dt_bias, a.state_indices, a.num_accepted)
        if overlaps((a.o, *pools), inputs, pools) or heads_v % cutlass.max(heads, 1) != 0:
            ctas = 0
        if cutlass.const_expr(spec.multi_token):
            if a.q.shape[1] == 0:
                ctas = 0
        if cutlass.const_expr(spec.dt_bias_dims == 1):
            if a.dt_bias.shape[0] != heads_v * spec.head_dim_k:
                ctas = 0
        if cutlass.const_expr(self.positions):
            if a.q.shape[1] > a.state_indices.shape[1]:
                ctas = 0
        if cutlass.const_expr(self.replays):
            if a.q.shape[1] > a.record_u.shape[1]:
                ctas = 0
        group = heads_v // cutlass.max(heads, 1)
        self.kernel(a, group).launch(
            grid=[spec.head_dim_v // spec.tile_v, ctas, batch],
            block=[spec.num_threads, 1, 1],
            min_blocks_per_mp=spec.blocks_per_sm,
            preferred_smem_carveout=25 if spec.blocks_per_sm > 1 else None,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments, group: Int32) -> None:
        spec = self.spec
        tile_index, head, sequence = cute.arch.block_idx()
        head_qk = Int32(cutlass.Uint32(head) // cutlass.Uint32(group))
        memory = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((self.stages * TokenStage.elements(spec),)), 16
        )
        slot = sequence
        valid = Boolean(True)
        if cutlass.const_expr(self.positions):
            slot = x.state_indices[sequence, self.accepted_position(x, sequence)]
        elif cutlass.const_expr(spec.indexed):
            slot = x.state_indices[sequence]
        if cutlass.const_expr(spec.indexed):
            # A negative index is padding. An index past the pool is a caller's bug; treating it as
            # padding keeps every access in bounds.
            valid = slot >= 0 and slot < x.state.shape[0]

        gate = self.reader.gate(x.A_log, x.dt_bias, x.lower_bound, head)
        if cutlass.const_expr(not spec.multi_token):
            fetched = Fetched(spec)
            token = Token(
                x.q[sequence, head_qk, None],
                x.k[sequence, head_qk, None],
                x.v[sequence, head, None],
                x.g[sequence, head, None],
                cute.domain_offset((sequence, head), x.beta),
            )
            self.reader.fetch(fetched, token, tile_index)
            if valid:
                stage = TokenStage(spec, memory, record=False)
                loaded = self.tile.load(x.state[slot, head, None, None], tile_index)
                self.reader.prepare(stage, fetched, gate, x.beta_scale)
                cute.arch.sync_threads()
                s = cute.make_rmem_tensor(loaded.shape, Float32)
                s.store(loaded.load().to(Float32))
                self.tile.advance(s, stage, x.scale)
                self.tile.store(s, x.state[slot, head, None, None], tile_index)
                cute.arch.sync_threads()
                self.reader.write(stage.o, x.o[sequence, head, None], tile_index)
            else:
                self.reader.write_zeros(x.o[sequence, head, None], tile_index)
        elif valid:
            count = Int32(0)
            if cutlass.const_expr(self.replays):
                # The count is untrusted data: never read past the records.
                count = cutlass.max(x.num_accepted[sequence], 0)
                count = cutlass.min(count, x.record_u.shape[1])
            source = Source(
                Tokens(x.q, x.k, x.v, x.g, x.beta, sequence, Int32(0), head, head_qk),
                Records(x.record_k, x.record_g, x.record_u, slot, count),
            )
            positions = x.state_indices[sequence, None] if self.positions else None
            self.many_tokens(x, source, gate, memory, positions, tile_index)
        else:
            for t in cutlass.range(x.q.shape[1], unroll=1):
                self.reader.write_zeros(x.o[sequence, t, head, None], tile_index)

    @cute.jit
    def many_tokens(
        self,
        x: Arguments,
        source: Source,
        gate: Gate,
        memory: cute.Tensor,
        positions: cute.Tensor | None,
        tile_index: Int32,
    ) -> None:
        """Advance the state by the records' accepted tokens, then by this call's tokens."""
        spec = self.spec
        records, head, sequence = source.records, source.tokens.head, source.tokens.batch
        in_place = x.state[records.slot, head, None, None]
        loaded = self.tile.load(in_place, tile_index)
        fetched = Fetched(spec)
        total = records.count + x.q.shape[1]
        self.fetch(fetched, source, Int32(0), tile_index)
        self.prepare(memory, source, Int32(0), fetched, gate, x.beta_scale)
        if total > 1:
            self.fetch(fetched, source, Int32(1), tile_index)
        s = cute.make_rmem_tensor(loaded.shape, Float32)
        s.store(loaded.load().to(Float32))
        cute.arch.sync_threads()
        for i in cutlass.range(total, unroll=1):
            # Prepare the next token, and fetch the token after it.
            if i + 1 < total:
                self.prepare(memory, source, i + 1, fetched, gate, x.beta_scale)
            if i + 2 < total:
                self.fetch(fetched, source, i + 2, tile_index)
            stage = stage_of(spec, memory, i, record=self.replays)
            if cutlass.const_expr(self.replays):
                if i == records.count:
                    # The stored state has the accepted tokens only; later ones are drafts.
                    self.tile.store(s, in_place, tile_index)
                if i < records.count:
                    self.tile.replay(s, stage)
                else:
                    self.tile.advance(s, stage, x.scale)
            else:
                self.tile.advance(s, stage, x.scale)
            if cutlass.const_expr(self.positions):
                place = positions[i]
                if place >= 0 and place < x.state.shape[0]:
                    self.tile.store(s, x.state[place, head, None, None], tile_index)
            cute.arch.sync_threads()
            if i >= records.count:
                t = i - records.count
                self.reader.write(stage.o, x.o[sequence, t, head, None], tile_index)
                if cutlass.const_expr(self.replays):
                    self.reader.write(stage.u, records.u[records.slot, t, head, None], tile_index)
        if cutlass.const_expr(not self.replays and not self.positions):
            self.tile.store(s, in_place, tile_index)

    @cute.jit
    def accepted_position(self, x: Arguments, sequence: Int32) -> Int32:
        """Return the index of the sequence's slot to start from, within bounds for any count."""
        position = Int32(0)
        if cutlass.const_expr(x.num_accepted is not None):
            accepted = cutlass.max(x.num_accepted[sequence], 1)
            position = cutlass.min(accepted, x.state_indices.shape[1]) - 1
        return position

    @cute.jit
    def fetch(self, fetched: Fetched, source: Source, i: Int32, tile_index: Int32) -> None:
        """Fetch the i-th token, from the records first, then from the call."""
        tokens, records = source.tokens, source.records
        if cutlass.const_expr(self.replays):
            if i < records.count:
                self.reader.fetch_recorded(
                    fetched,
                    records.k[records.slot, i, tokens.head_qk, None],
                    records.g[records.slot, i, tokens.head, None],
                    records.u[records.slot, i, tokens.head, None],
                    tile_index,
                )
            else:
                self.reader.fetch(fetched, tokens.at(i - records.count), tile_index)
        else:
            self.reader.fetch(fetched, tokens.at(i), tile_index)

    @cute.jit
    def prepare(
        self,
        memory: cute.Tensor,
        source: Source,
        i: Int32,
        fetched: Fetched,
        gate: Gate,
        beta_scale: Float32,
    ) -> None:
        """Prepare the i-th token, which `fetch` has fetched."""
        stage = stage_of(self.spec, memory, i, record=self.replays)
        if cutlass.const_expr(self.replays):
            if i < source.records.count:
                self.reader.prepare_recorded(stage, fetched, gate)
            else:
                self.reader.prepare(stage, fetched, gate, beta_scale)
        else:
            self.reader.prepare(stage, fetched, gate, beta_scale)
