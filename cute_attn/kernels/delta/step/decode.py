"""Decode of KDA and the Gated Delta Net, with a tile of the recurrent state in a CTA's registers.

Per token and value head, with the state a K by V matrix S:

    S <- Diag(decay) S      u = beta (v - S^T k)      S <- S + k u^T      o = scale S^T q

The Gated Delta Net has one decay for the head (`head_gate`). With conv_dtype, q, k and v first go
through a causal convolution (`convolution`).

A call reads and writes the state once. All other tensors together have a fiftieth of the state's
bytes, so the kernel is bound by memory bandwidth, as Lightning decode is
(docs/kernels/kda_decode.md).

    CTA (tile of V, value head, sequence)
      fetch     the token's q, k, v, g and beta; with a convolution, the window and the weights
      load      the tile of the slot's state, 16 bytes an access
      prepare   norms, gate and sigmoid, once for the CTA, to shared memory; barrier
      advance   decay, both sums over K in one pass, rank-1 update
      store     the tile, in place; barrier; the output; with a convolution, the window

With several tokens, the next token is fetched and prepared while the current token is computed,
with one barrier for each token. With records, the accepted drafted tokens come first, and the state
is stored after them. With a slot for each position, and with a tensor for drafts, the state is
stored after every token. Sequences of different lengths are packed, with cu_seqlens.

Runs on sm_80 and newer. Shared memory: two stages of a token, 8 KiB at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...common.arguments import fake_contiguous, fake_offsets, fake_strided
from ...common.carried import Carried
from ...common.dtypes import DTYPE
from ...common.entry import entry, gathered, placeholders
from ...common.overlap import overlaps, row_of, windows_meet
from ..chunk.chunks import SequencePlace, num_sequences, sequence_place
from ..slots import fake_flags, fake_slots, is_slot
from . import arguments
from .convolution import Convolution, ConvPlace, Windows
from .spec import CONV_TAPS, DecodeSpec
from .tile import StateTile
from .tokens import (
    STAGES,
    Fetched,
    Gate,
    Token,
    TokenReader,
    Tokens,
    TokenStage,
    gates_at,
    stage_of,
)


class Arguments(NamedTuple):
    """The kernel's arguments.

    The kernel only reads record_k and record_g, because several CTAs share them: CTAs of one head,
    and of a group's value heads. `records` writes them afterwards. With cu_seqlens, B is 1 in the
    shapes of tokens, and the number of sequences otherwise.

    Attributes:
        q, k: `[B, HQK, K]` or `[B, T, HQK, K]`, with a contiguous last dimension.
        v, o: `[B, HV, V]` or `[B, T, HV, V]`.
        g: `[B, HV, K]` or `[B, T, HV, K]`; with head_gate without K.
        beta: `[B, HV]` or `[B, T, HV]`, with any strides.
        A_log: `[HV]`.
        dt_bias: `[HV * K]` or `[HV, K]`; with head_gate `[HV]`.
        state: `[N, HV, V, K]` or `[N, HV, K, V]`, with a contiguous matrix of each head.
        state_indices: `[B]` or `[B, 1 + S]`.
        num_accepted: `[B]`, int32.
        record_k: `[N, S, HQK, K]`, with a contiguous last dimension.
        record_g: `[N, S, HV, K]`; with head_gate `[N, S, HV]`.
        record_u: `[N, S, HV, V]`, float32.
        cu_seqlens: `[B + 1]`.
        has_initial_state: `[B]`, bytes.
        draft_states: `[M, S, ...]`, matrices as in state: the state after token t of a sequence.
        draft_indices: `[B]`, int32: the sequence's row of draft_states.
        conv_state: `[M, D, W]`, dtype of q: the pool of the convolution's windows, with any
            strides. D is 2 HQK K + HV V.
        conv_weight: `[D, 4]`.
        conv_bias: `[D]`.
        conv_counters: Int32 for each slot of conv_state and head of q; 0 before and after a call.
            None with draft_states, where conv_state is only read.
        draft_windows: `[M, S, D, 3]`, dtype of q, with any strides: the convolution's window after
            token t of a sequence. The windows of successive tokens may share inputs.
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
    cu_seqlens: cute.Tensor | None
    has_initial_state: cute.Tensor | None
    draft_states: cute.Tensor | None
    draft_indices: cute.Tensor | None
    conv_state: cute.Tensor | None
    conv_weight: cute.Tensor | None
    conv_bias: cute.Tensor | None
    conv_counters: cute.Tensor | None
    draft_windows: cute.Tensor | None
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
    """The source of a sequence's tokens: first the records, then the call. With a convolution, the
    sequence's place in its pool."""

    tokens: Tokens
    records: Records
    conv: ConvPlace | None


class KdaDecode:
    """The kernel for one DecodeSpec; see the module's docstring."""

    def __init__(self, spec: DecodeSpec):
        self.spec = spec
        self.reader = TokenReader(spec)
        self.tile = StateTile(spec, self.reader)
        self.stages = STAGES if spec.multi_token else 1
        self.replays = spec.slots == "records"
        self.positions = spec.slots == "positions"
        self.drafts = spec.slots == "drafts"
        self.packed = spec.index_dtype != "none"
        self.convolves = spec.conv_dtype != "none"
        self.convolution = Convolution(spec, self.reader)

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        sizes = arguments.Sizes()
        step = (sizes.batch, sizes.tokens) if spec.multi_token else (sizes.batch,)
        sequences = cute.sym_int() if self.packed else sizes.batch
        slots = cute.sym_int() if spec.indexed else sequences
        positions = (cute.sym_int(),) if self.positions else ()
        records = cute.sym_int()
        drafts = (cute.sym_int(), cute.sym_int())
        record_k = record_g = record_u = None
        if self.replays:
            of_slots = (slots, records)
            record_k = arguments.rows(spec.dtype, *of_slots, sizes.heads, spec.head_dim_k)
            record_g = arguments.gates(spec, *of_slots, sizes.heads_v)
            record_u = arguments.rows("float32", *of_slots, sizes.heads_v, spec.head_dim_v)
        return placeholders(
            Arguments(
                **arguments.inputs(spec, sizes, step),
                state=arguments.states(spec, sizes, slots),
                state_indices=fake_slots(spec, sequences, *positions) if spec.indexed else None,
                num_accepted=arguments.indices(sequences) if spec.accepted else None,
                record_k=record_k,
                record_g=record_g,
                record_u=record_u,
                cu_seqlens=fake_offsets(spec.index_dtype),
                has_initial_state=fake_flags(spec, sequences),
                draft_states=arguments.states(spec, sizes, *drafts) if self.drafts else None,
                draft_indices=arguments.indices(sequences) if self.drafts else None,
                **self.fake_convolution(drafts),
            )
        )

    def fake_convolution(self, drafts: tuple[cute.SymInt, ...]) -> dict[str, cute.Tensor | None]:
        names = ("conv_state", "conv_weight", "conv_bias", "conv_counters", "draft_windows")
        if not self.convolves:
            return dict.fromkeys(names)
        channels, dtype = cute.sym_int(), DTYPE[self.spec.conv_dtype]
        window = (cute.sym_int(), channels, cute.sym_int())
        row = CONV_TAPS * dtype.width // 8
        tensors = (
            fake_strided(DTYPE[self.spec.dtype], window),
            fake_contiguous(dtype, (channels, CONV_TAPS), align=row),
            fake_contiguous(dtype, (channels,)) if self.spec.conv_bias else None,
            None if self.drafts else arguments.indices(cute.sym_int()),
            fake_strided(DTYPE[self.spec.dtype], (*drafts, channels, CONV_TAPS - 1))
            if self.drafts
            else None,
        )
        return dict(zip(names, tensors, strict=True))

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        spec = self.spec
        batch = num_sequences(a.q.shape[0], a.cu_seqlens)
        heads = cute.size(a.q, mode=[cute.rank(a.q) - 2])
        heads_v = a.state.shape[1]
        # Bad arguments launch no CTAs; the driver rejects an empty grid, and the operator raises
        # the reason.
        ctas = heads_v
        pools = (a.state, a.record_k, a.record_g, a.record_u, a.draft_states, a.conv_state)
        inputs = (
            a.q, a.k, a.v, a.g, a.beta, a.A_log, a.dt_bias, a.state_indices, a.num_accepted,
            a.cu_seqlens, a.has_initial_state, a.draft_indices, a.conv_weight, a.conv_bias,
        )  # fmt: skip
        windows = None
        if cutlass.const_expr(a.draft_windows is not None):
            windows = row_of(a.draft_windows)
            if windows_meet(a.draft_windows):
                ctas = 0
        if overlaps((a.o, *pools, windows), inputs, pools) or heads_v % cutlass.max(heads, 1) != 0:
            ctas = 0
        if cutlass.const_expr(spec.multi_token):
            if a.q.shape[1] == 0:
                ctas = 0
        if cutlass.const_expr(spec.dt_bias_dims == 1):
            if a.dt_bias.shape[0] != heads_v * spec.gates_of_head:
                ctas = 0
        if cutlass.const_expr(self.packed):
            # The sequences' lengths are known on the device only.
            if a.q.shape[0] != 1:
                ctas = 0
            for x in (a.state_indices, a.num_accepted, a.has_initial_state, a.draft_indices):
                if cutlass.const_expr(x is not None):
                    if x.shape[0] != batch:
                        ctas = 0
            if cutlass.const_expr(not spec.indexed):
                if a.state.shape[0] != batch:
                    ctas = 0
        if cutlass.const_expr(self.positions and not self.packed):
            if a.q.shape[1] > a.state_indices.shape[1]:
                ctas = 0
        if cutlass.const_expr(self.drafts and not self.packed):
            if a.q.shape[1] > a.draft_states.shape[1]:
                ctas = 0
        if cutlass.const_expr(self.replays):
            if a.q.shape[1] > a.record_u.shape[1]:
                ctas = 0
        if cutlass.const_expr(self.convolves):
            longest = CONV_TAPS - 1
            if cutlass.const_expr(self.positions):
                longest = a.state_indices.shape[1] + CONV_TAPS - 2
            if cutlass.const_expr(self.replays):
                longest = a.record_u.shape[1] + CONV_TAPS - 1
            channels = 2 * heads * spec.head_dim_k + heads_v * spec.head_dim_v
            if a.conv_state.shape[1] != channels or a.conv_state.shape[2] < longest:
                ctas = 0
            if cutlass.const_expr(a.conv_counters is not None):
                if a.conv_counters.shape[0] < a.conv_state.shape[0] * heads:
                    ctas = 0
            if cutlass.const_expr(not spec.indexed):
                if a.conv_state.shape[0] != batch:
                    ctas = 0
        group = heads_v // cutlass.max(heads, 1)
        self.kernel(a, group).launch(
            grid=[spec.head_dim_v // spec.tile_v, ctas, batch],
            block=[spec.num_threads, 1, 1],
            min_blocks_per_mp=spec.blocks_per_sm,
            preferred_smem_carveout=spec.carveout,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments, group: Int32) -> None:
        spec = self.spec
        tile_index, head, sequence = cute.arch.block_idx()
        head_qk = Int32(cutlass.Uint32(head) // cutlass.Uint32(group))
        allocator = cutlass.memory.SmemAllocator()
        memory = allocator.allocate_tensor(
            Float32, cute.make_layout((self.stages * TokenStage.elements(spec),)), 16
        )
        slot = sequence
        valid = Boolean(True)
        if cutlass.const_expr(spec.indexed):
            if cutlass.const_expr(self.positions):
                index = x.state_indices[sequence, self.accepted_position(x, sequence)]
            else:
                index = x.state_indices[sequence]
            valid = is_slot(index, x.state, spec.null_slot)
            slot = Int32(index)
        conv = None
        if cutlass.const_expr(self.convolves):
            conv_slot = sequence
            if cutlass.const_expr(self.positions):
                conv_slot = x.state_indices[sequence, 0]
            elif cutlass.const_expr(spec.indexed):
                conv_slot = x.state_indices[sequence]
            valid = valid and is_slot(conv_slot, x.conv_state, spec.null_slot)
            conv = self.conv_place(
                x, allocator, sequence, Int32(conv_slot), head, head_qk, group, tile_index
            )

        gate = self.reader.gate(x.A_log, x.dt_bias, x.lower_bound, head)
        if cutlass.const_expr(not spec.multi_token):
            fetched = Fetched(spec)
            token = Token(
                x.q[sequence, head_qk, None],
                x.k[sequence, head_qk, None],
                x.v[sequence, head, None],
                gates_at(x.g, sequence, head),
                cute.domain_offset((sequence, head), x.beta),
            )
            self.reader.fetch(fetched, token, tile_index)
            if valid:
                stage = TokenStage(spec, memory, record=False)
                loaded = self.tile.load(x.state[slot, head, None, None], tile_index)
                if cutlass.const_expr(self.convolves):
                    tokens = Tokens(x.q, x.k, x.v, x.g, x.beta, sequence, 0, head, head_qk)
                    windows = self.convolution.load(conv, tokens, tile_index)
                    convolved = self.convolution.apply(windows, fetched)
                    self.reader.prepare(stage, convolved, gate, x.beta_scale)
                    self.convolution.park(windows, conv, tokens, tile_index)
                else:
                    self.reader.prepare(stage, fetched, gate, x.beta_scale)
                cute.arch.sync_threads()
                if cutlass.const_expr(self.convolves):
                    self.convolution.arrive(conv)
                s = self.started(loaded, x, sequence)
                self.tile.advance(s, stage, x.scale)
                self.tile.store(s, x.state[slot, head, None, None], tile_index)
                cute.arch.sync_threads()
                self.reader.write(stage.o, x.o[sequence, head, None], tile_index)
                if cutlass.const_expr(self.convolves):
                    self.convolution.store_parked(conv, tokens, tile_index)
            else:
                self.reader.write_zeros(x.o[sequence, head, None], tile_index)
        else:
            place = sequence_place(sequence, x.q.shape[1], x.cu_seqlens)
            tokens = Tokens(x.q, x.k, x.v, x.g, x.beta, place.batch, place.start, head, head_qk)
            self.sequence(x, place, sequence, slot, valid, tokens, conv, gate, memory, tile_index)

    @cute.jit
    def conv_place(
        self,
        x: Arguments,
        allocator: Any,
        sequence: Int32,
        slot: Int32,
        head: Int32,
        head_qk: Int32,
        group: Int32,
        tile_index: Int32,
    ) -> ConvPlace:
        """Find the sequence's window, and allocate its shared memory; see `ConvPlace`."""
        dtype, layout = self.convolution.memory()
        heads_qk = cute.size(x.q, mode=[cute.rank(x.q) - 2])
        first = Int32(0)
        if cutlass.const_expr(self.positions):
            first = self.accepted_position(x, sequence)
        if cutlass.const_expr(self.replays):
            first = self.accepted_records(x, sequence)
        counter = draft = writes_qk = None
        if cutlass.const_expr(self.drafts):
            draft = x.draft_indices[sequence]
            writes_qk = (tile_index == 0) & (head == head_qk * group)
        else:
            counter = x.conv_counters.iterator + (slot * heads_qk + head_qk)
        kept = Boolean(True)
        if cutlass.const_expr(self.spec.fresh):
            kept = x.has_initial_state[sequence] != 0
        return ConvPlace(
            x.conv_state,
            x.conv_weight,
            x.conv_bias,
            counter,
            group * (self.spec.head_dim_v // self.spec.tile_v),
            slot,
            first,
            kept,
            heads_qk,
            allocator.allocate_tensor(Int32, cute.make_layout((1,))),
            allocator.allocate_tensor(dtype, layout, 16),
            x.draft_windows,
            draft,
            writes_qk,
        )

    @cute.jit
    def sequence(
        self,
        x: Arguments,
        place: SequencePlace,
        sequence: Int32,
        slot: Int32,
        valid: Boolean,
        tokens: Tokens,
        conv: ConvPlace | None,
        gate: Gate,
        memory: cute.Tensor,
        tile_index: Int32,
    ) -> None:
        """Process a sequence of several tokens."""
        if valid:
            count = Int32(0)
            if cutlass.const_expr(self.replays):
                count = self.accepted_records(x, sequence)
            records = Records(x.record_k, x.record_g, x.record_u, slot, count)
            source = Source(tokens, records, conv)
            positions = x.state_indices[sequence, None] if self.positions else None
            if cutlass.const_expr(self.packed):
                if place.length > 0:
                    self.many_tokens(
                        x, source, sequence, place.length, gate, memory, positions, tile_index
                    )
            else:
                self.many_tokens(
                    x, source, sequence, place.length, gate, memory, positions, tile_index
                )
        else:
            for t in cutlass.range(place.length, unroll=1):
                row = x.o[place.batch, place.start + t, tokens.head, None]
                self.reader.write_zeros(row, tile_index)

    @cute.jit
    def started(self, loaded: cute.Tensor, x: Arguments, sequence: Int32) -> cute.Tensor:
        """The state that a sequence starts from, in float32: what is loaded from its slot, or 0."""
        s = cute.make_rmem_tensor(loaded.shape, Float32)
        s.store(loaded.load().to(Float32))
        if cutlass.const_expr(self.spec.fresh):
            if x.has_initial_state[sequence] == 0:
                s.fill(0.0)
        return s

    @cute.jit
    def many_tokens(
        self,
        x: Arguments,
        source: Source,
        sequence: Int32,
        length: Int32,
        gate: Gate,
        memory: cute.Tensor,
        positions: cute.Tensor | None,
        tile_index: Int32,
    ) -> None:
        """Advance the state by the records' accepted tokens, then by this call's tokens."""
        spec = self.spec
        records, tokens = source.records, source.tokens
        head = tokens.head
        in_place = x.state[records.slot, head, None, None]
        loaded = self.tile.load(in_place, tile_index)
        fetched = Fetched(spec)
        total = records.count + length
        self.fetch(fetched, source, Int32(0), tile_index)
        windows = None
        if cutlass.const_expr(self.convolves):
            windows = self.convolution.load(source.conv, tokens, tile_index)
        self.prepare(memory, source, Int32(0), fetched, windows, gate, x.beta_scale, tile_index)
        if total > 1:
            self.fetch(fetched, source, Int32(1), tile_index)
        s = self.started(loaded, x, sequence)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.convolves and not self.drafts):
            self.convolution.arrive(source.conv)
        for i in cutlass.range(total, unroll=1):
            # Prepare the next token, and fetch the token after it.
            if i + 1 < total:
                self.prepare(
                    memory, source, i + 1, fetched, windows, gate, x.beta_scale, tile_index
                )
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
                if cutlass.const_expr(not self.packed) or i < x.state_indices.shape[1]:
                    place = positions[i]
                    if is_slot(place, x.state, spec.null_slot):
                        target = x.state[Int32(place), head, None, None]
                        self.tile.store(s, target, tile_index)
            if cutlass.const_expr(self.drafts):
                draft = x.draft_indices[sequence]
                if is_slot(draft, x.draft_states, False) and i < x.draft_states.shape[1]:
                    self.tile.store(s, x.draft_states[draft, i, head, None, None], tile_index)
            cute.arch.sync_threads()
            if i >= records.count:
                t = i - records.count
                o = x.o[tokens.batch, tokens.start + t, head, None]
                self.reader.write(stage.o, o, tile_index)
                if cutlass.const_expr(self.replays):
                    self.reader.write(stage.u, records.u[records.slot, t, head, None], tile_index)
        if cutlass.const_expr(not self.replays and not self.positions and not self.drafts):
            self.tile.store(s, in_place, tile_index)
        if cutlass.const_expr(self.convolves and not self.drafts):
            self.convolution.store(source.conv, windows, tokens, length, tile_index)

    def accepted_records(self, x: Arguments, sequence: Int32) -> Int32:
        """Return how many records to replay. The count is untrusted data: never read past the
        records."""
        count = cutlass.max(x.num_accepted[sequence], 0)
        return cutlass.min(count, x.record_u.shape[1])

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
                    gates_at(records.g, records.slot, i, tokens.head),
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
        windows: Windows | None,
        gate: Gate,
        beta_scale: Float32,
        tile_index: Int32,
    ) -> None:
        """Prepare the i-th token, which `fetch` has fetched."""
        stage = stage_of(self.spec, memory, i, record=self.replays)
        if cutlass.const_expr(self.replays):
            if i < source.records.count:
                if cutlass.const_expr(self.convolves):
                    record = self.convolution.apply_recorded(windows, fetched)
                    self.reader.prepare_recorded(stage, record, gate)
                else:
                    self.reader.prepare_recorded(stage, fetched, gate)
            else:
                self.prepare_new(stage, fetched, windows, gate, beta_scale)
        else:
            self.prepare_new(stage, fetched, windows, gate, beta_scale)
            if cutlass.const_expr(self.convolves and self.drafts):
                self.convolution.store_draft(source.conv, windows, source.tokens, i, tile_index)

    @cute.jit
    def prepare_new(
        self,
        stage: TokenStage,
        fetched: Fetched,
        windows: Windows | None,
        gate: Gate,
        beta_scale: Float32,
    ) -> None:
        """Prepare a token of the call."""
        if cutlass.const_expr(self.convolves):
            convolved = self.convolution.apply(windows, fetched)
            self.reader.prepare(stage, convolved, gate, beta_scale)
        else:
            self.reader.prepare(stage, fetched, gate, beta_scale)
