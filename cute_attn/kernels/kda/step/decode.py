"""KDA decode, with a tile of the recurrent state in a CTA's registers.

Per token and value head, with the state a K by V matrix S:

    S <- Diag(decay) S      u = beta (v - S^T k)      S <- S + k u^T      o = scale S^T q

A call reads and writes the state once. Everything else is a fiftieth of these bytes, so the kernel
is bound by memory bandwidth, as Lightning's is (docs/kernels/kda.md, "Decode").

    CTA (tile of V, value head, sequence)
      fetch     the token's q, k, v, g and beta
      load      the tile of the slot's state, 16 bytes an access
      prepare   norms, gate and sigmoid, once for the CTA, to shared memory; barrier
      advance   decay, both sums over K in one pass, rank-1 update
      store     the tile, in place; barrier; the output

With several tokens, the next one is fetched and prepared while the current one is computed, with
one barrier for each token. With records, the accepted drafted tokens come first, and the state is
stored after them. With a slot for each position, it is stored after every token.

Runs on sm_80 and newer. Shared memory: two stages of a token, 8 KiB at most.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from ...common.carried import Carried
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


class Records(Carried):
    """The records of drafted tokens, and a sequence's slot and accepted `count` in them."""

    def __init__(self, k: Any, g: Any, u: Any, slot: Any, count: Any):
        self.k, self.g, self.u, self.slot, self.count = k, g, u, slot, count


class Source(Carried):
    """Where the tokens of a sequence come from: first the records, then the call."""

    def __init__(self, tokens: Tokens, records: Records):
        self.tokens, self.records = tokens, records


class KdaDecode:
    """The kernel for one DecodeSpec; see the module's docstring.

        q, k           [B, HQK, K] or [B, T, HQK, K]     last dimension contiguous
        v, o           [B, HV, V] or [B, T, HV, V]
        g              [B, HV, K] or [B, T, HV, K]
        beta           [B, HV] or [B, T, HV]             any strides
        A_log          [HV]
        dt_bias        [HV * K] or [HV, K]
        state          [N, HV, V, K] or [N, HV, K, V]    a head's matrix contiguous
        state_indices  [B] or [B, 1 + S]     int32
        num_accepted   [B]                   int32
        record_k       [N, S, HQK, K]                    last dimension contiguous
        record_g       [N, S, HV, K]
        record_u       [N, S, HV, V]         float32

    This kernel only reads record_k and record_g, which several CTAs share (of a head, and of the
    value heads of a group). `records` writes them afterwards.
    """

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
        of_records: tuple[Any, ...] = (None,) * 3
        if self.replays:
            of_records = (
                arguments.rows(spec.dtype, slots, records, sizes.heads, spec.head_dim_k),
                arguments.rows(spec.gate_dtype, slots, records, sizes.heads_v, spec.head_dim_k),
                arguments.rows("float32", slots, records, sizes.heads_v, spec.head_dim_v),
            )
        return (
            *arguments.inputs(spec, sizes, step),
            arguments.rows(spec.dtype, *step, sizes.heads_v, spec.head_dim_v),
            arguments.states(spec, sizes, slots),
            arguments.indices(sizes.batch, *positions) if spec.indexed else None,
            arguments.indices(sizes.batch) if spec.accepted else None,
            *of_records,
            Float32(1.0),
            Float32(1.0),
            Float32(1.0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        o: cute.Tensor,
        state: cute.Tensor,
        state_indices: cute.Tensor | None,
        num_accepted: cute.Tensor | None,
        record_k: cute.Tensor | None,
        record_g: cute.Tensor | None,
        record_u: cute.Tensor | None,
        scale: Float32,
        lower_bound: Float32,
        beta_scale: Float32,
        stream: Any,
    ) -> None:
        spec = self.spec
        batch, heads = q.shape[0], cute.size(q, mode=[cute.rank(q) - 2])
        heads_v = state.shape[1]
        # Bad arguments launch no CTAs; the driver rejects that, and the operator raises the reason.
        ctas = heads_v
        pools = (state, record_k, record_g, record_u)
        inputs = (q, k, v, g, beta, A_log, dt_bias, state_indices, num_accepted)
        if overlaps((o, *pools), inputs, pools) or heads_v % cutlass.max(heads, 1) != 0:
            ctas = 0
        if cutlass.const_expr(spec.multi_token):
            if q.shape[1] == 0:
                ctas = 0
        if cutlass.const_expr(spec.dt_bias_dims == 1):
            if dt_bias.shape[0] != heads_v * spec.head_dim_k:
                ctas = 0
        if cutlass.const_expr(self.positions):
            if q.shape[1] > state_indices.shape[1]:
                ctas = 0
        if cutlass.const_expr(self.replays):
            if q.shape[1] > record_u.shape[1]:
                ctas = 0
        group = heads_v // cutlass.max(heads, 1)
        self.kernel(
            q, k, v, g, beta, A_log, dt_bias, o, state, state_indices, num_accepted,
            record_k, record_g, record_u, scale, lower_bound, beta_scale, group,
        ).launch(
            grid=[spec.head_dim_v // spec.tile_v, ctas, batch],
            block=[spec.num_threads, 1, 1],
            min_blocks_per_mp=spec.blocks_per_sm,
            preferred_smem_carveout=25 if spec.blocks_per_sm > 1 else None,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        o: cute.Tensor,
        state: cute.Tensor,
        state_indices: cute.Tensor | None,
        num_accepted: cute.Tensor | None,
        record_k: cute.Tensor | None,
        record_g: cute.Tensor | None,
        record_u: cute.Tensor | None,
        scale: Float32,
        lower_bound: Float32,
        beta_scale: Float32,
        group: Int32,
    ) -> None:
        spec = self.spec
        tile_index, head, sequence = cute.arch.block_idx()
        head_qk = Int32(cutlass.Uint32(head) // cutlass.Uint32(group))
        memory = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((self.stages * TokenStage.elements(spec),)), 16
        )
        slot = sequence
        valid = Boolean(True)
        if cutlass.const_expr(self.positions):
            slot = state_indices[
                sequence, self.accepted_position(sequence, state_indices, num_accepted)
            ]
        elif cutlass.const_expr(spec.indexed):
            slot = state_indices[sequence]
        if cutlass.const_expr(spec.indexed):
            # A negative index is padding. An index past the pool is a caller's bug; it is treated
            # as padding, so that no access is out of bounds.
            valid = slot >= 0 and slot < state.shape[0]

        gate = self.reader.gate(A_log, dt_bias, lower_bound, head)
        if cutlass.const_expr(not spec.multi_token):
            fetched = Fetched(spec)
            token = Token(
                q[sequence, head_qk, None],
                k[sequence, head_qk, None],
                v[sequence, head, None],
                g[sequence, head, None],
                cute.domain_offset((sequence, head), beta),
            )
            self.reader.fetch(fetched, token, tile_index)
            if valid:
                stage = TokenStage(spec, memory, record=False)
                loaded = self.tile.load(state[slot, head, None, None], tile_index)
                self.reader.prepare(stage, fetched, gate, beta_scale)
                cute.arch.sync_threads()
                s = cute.make_rmem_tensor(loaded.shape, Float32)
                s.store(loaded.load().to(Float32))
                self.tile.advance(s, stage, scale)
                self.tile.store(s, state[slot, head, None, None], tile_index)
                cute.arch.sync_threads()
                self.reader.write(stage.o, o[sequence, head, None], tile_index)
            else:
                self.reader.write_zeros(o[sequence, head, None], tile_index)
        elif valid:
            count = Int32(0)
            if cutlass.const_expr(self.replays):
                # The count is untrusted data: never read past the records.
                count = cutlass.min(cutlass.max(num_accepted[sequence], 0), record_u.shape[1])
            source = Source(
                Tokens(q, k, v, g, beta, sequence, Int32(0), head, head_qk),
                Records(record_k, record_g, record_u, slot, count),
            )
            positions = state_indices[sequence, None] if self.positions else None
            self.many_tokens(
                source, q.shape[1], gate, scale, beta_scale, memory, state, positions, o,
                tile_index,
            )  # fmt: skip
        else:
            for t in cutlass.range(q.shape[1], unroll=1):
                self.reader.write_zeros(o[sequence, t, head, None], tile_index)

    @cute.jit
    def many_tokens(
        self,
        source: Source,
        tokens: Int32,
        gate: Gate,
        scale: Float32,
        beta_scale: Float32,
        memory: cute.Tensor,
        state: cute.Tensor,
        positions: cute.Tensor | None,
        o: cute.Tensor,
        tile_index: Int32,
    ) -> None:
        """Advance by the accepted tokens of the records, then by this call's tokens."""
        spec = self.spec
        records, head, sequence = source.records, source.tokens.head, source.tokens.batch
        in_place = state[records.slot, head, None, None]
        loaded = self.tile.load(in_place, tile_index)
        fetched = Fetched(spec)
        total = records.count + tokens
        self.fetch(fetched, source, Int32(0), tile_index)
        self.prepare(memory, source, Int32(0), fetched, gate, beta_scale)
        if total > 1:
            self.fetch(fetched, source, Int32(1), tile_index)
        s = cute.make_rmem_tensor(loaded.shape, Float32)
        s.store(loaded.load().to(Float32))
        cute.arch.sync_threads()
        for i in cutlass.range(total, unroll=1):
            # Prepare the next token, and fetch the one after it.
            if i + 1 < total:
                self.prepare(memory, source, i + 1, fetched, gate, beta_scale)
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
                    self.tile.advance(s, stage, scale)
            else:
                self.tile.advance(s, stage, scale)
            if cutlass.const_expr(self.positions):
                place = positions[i]
                if place >= 0 and place < state.shape[0]:
                    self.tile.store(s, state[place, head, None, None], tile_index)
            cute.arch.sync_threads()
            if i >= records.count:
                t = i - records.count
                self.reader.write(stage.o, o[sequence, t, head, None], tile_index)
                if cutlass.const_expr(self.replays):
                    self.reader.write(stage.u, records.u[records.slot, t, head, None], tile_index)
        if cutlass.const_expr(not self.replays and not self.positions):
            self.tile.store(s, in_place, tile_index)

    @cute.jit
    def accepted_position(
        self, sequence: Int32, state_indices: cute.Tensor, num_accepted: cute.Tensor | None
    ) -> Int32:
        """Return which of a sequence's slots to start from, within bounds for any count."""
        position = Int32(0)
        if cutlass.const_expr(num_accepted is not None):
            accepted = cutlass.min(cutlass.max(num_accepted[sequence], 1), state_indices.shape[1])
            position = accepted - 1
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
