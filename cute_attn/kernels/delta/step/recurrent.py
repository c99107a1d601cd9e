"""KDA and the Gated Delta Net token by token, with a tile of the state in a CTA's registers.

The arithmetic is `decode`'s. The initial state, if given, is read before a sequence's first token;
the final state is written to a separate tensor after the last token.

    CTA (tile of V, value head, sequence)
      load      the tile of the initial state, or zeros
      token     fetch, prepare, advance and output as in `decode`, with one barrier for each token
      store     the tile to the final state

Runs on sm_80 and newer. Shared memory: two stages of a token, 7 KiB at most.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.arguments import fake_offsets
from ...common.entry import entry, gathered, placeholders
from ..chunk.chunks import num_sequences, sequence_place
from . import arguments
from .spec import RecurrentSpec
from .tile import StateTile
from .tokens import STAGES, Fetched, TokenReader, Tokens, TokenStage, stage_of


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        q, k: `[B, T, HQK, K]`, with a contiguous last dimension.
        v, o: `[B, T, HV, V]`.
        g: `[B, T, HV, K]`; with head_gate `[B, T, HV]`.
        beta: `[B, T, HV]`, or `[B, T, HV, V]` with beta_columns, with any strides.
        A_log: `[HV]`.
        dt_bias: `[HV * K]` or `[HV, K]`; with head_gate `[HV]`.
        initial_state, final_state: `[N, HV, V, K]` or `[N, HV, K, V]`, with a contiguous matrix of
            each head.
        cu_seqlens: `[N + 1]`.
        gk: `[B, T, HV, K]`, with a contiguous last dimension.
        gv: `[B, T, HV, V]`, as gk.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    A_log: cute.Tensor | None
    dt_bias: cute.Tensor | None
    o: cute.Tensor
    initial_state: cute.Tensor | None
    final_state: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    gk: cute.Tensor | None
    gv: cute.Tensor | None
    scale: Float32
    lower_bound: Float32
    beta_scale: Float32


class KdaRecurrent:
    """The kernel for one RecurrentSpec; see the module's docstring."""

    def __init__(self, spec: RecurrentSpec):
        self.spec = spec
        self.reader = TokenReader(spec)
        self.tile = StateTile(spec, self.reader)

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        sizes = arguments.Sizes()
        sequences = sizes.batch if spec.index_dtype == "none" else cute.sym_int()
        of_heads = (sizes.batch, sizes.tokens, sizes.heads_v)
        gk = gv = None
        if spec.gk_dtype != "none":
            gk = arguments.rows(spec.gk_dtype, *of_heads, spec.head_dim_k)
        if spec.gv_dtype != "none":
            gv = arguments.rows(spec.gv_dtype, *of_heads, spec.head_dim_v)
        initial_state = final_state = None
        if spec.has_initial_state:
            initial_state = arguments.states(spec, sizes, sequences)
        if spec.has_final_state:
            final_state = arguments.states(spec, sizes, sequences)
        return placeholders(
            Arguments(
                **arguments.inputs(spec, sizes, (sizes.batch, sizes.tokens)),
                initial_state=initial_state,
                final_state=final_state,
                cu_seqlens=fake_offsets(spec.index_dtype),
                gk=gk,
                gv=gv,
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        spec = self.spec
        heads, heads_v = a.q.shape[2], a.v.shape[2]
        sequences = num_sequences(a.q.shape[0], a.cu_seqlens)
        # Bad arguments launch no CTAs; the driver rejects an empty grid, and the operator raises
        # the reason.
        ctas = heads_v
        if heads_v % cutlass.max(heads, 1) != 0:
            ctas = 0
        if cutlass.const_expr(spec.dt_bias_dims == 1):
            if a.dt_bias.shape[0] != heads_v * spec.gates_of_head:
                ctas = 0
        for state in (a.initial_state, a.final_state):
            if cutlass.const_expr(state is not None):
                if state.shape[0] != sequences:
                    ctas = 0
        if cutlass.const_expr(a.cu_seqlens is not None):
            if a.q.shape[0] != 1:
                ctas = 0
        group = heads_v // cutlass.max(heads, 1)
        self.kernel(a, group).launch(
            grid=[spec.head_dim_v // spec.tile_v, ctas, sequences],
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
        memory = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((STAGES * TokenStage.elements(spec),)), 16
        )
        s = cute.make_rmem_tensor(self.tile.shape, Float32)
        if cutlass.const_expr(x.initial_state is not None):
            s.store(self.tile.load(x.initial_state[sequence, head, None, None], tile_index).load())
        else:
            s.fill(0.0)
        place = sequence_place(sequence, x.q.shape[1], x.cu_seqlens)
        total = place.length
        tokens = Tokens(
            x.q, x.k, x.v, x.g, x.beta, place.batch, place.start, head, head_qk, x.gk, x.gv
        )
        gate = self.reader.gate(x.A_log, x.dt_bias, x.lower_bound, head)
        fetched = Fetched(spec)
        if total > 0:
            self.reader.fetch(fetched, tokens.at(0), tile_index)
            stage = stage_of(spec, memory, Int32(0), record=False)
            self.reader.prepare(stage, fetched, gate, x.beta_scale)
        if total > 1:
            self.reader.fetch(fetched, tokens.at(1), tile_index)
        cute.arch.sync_threads()
        for i in cutlass.range(total, unroll=1):
            # Prepare the next token, and fetch the token after it.
            if i + 1 < total:
                stage = stage_of(spec, memory, i + 1, record=False)
                self.reader.prepare(stage, fetched, gate, x.beta_scale)
            if i + 2 < total:
                self.reader.fetch(fetched, tokens.at(i + 2), tile_index)
            stage = stage_of(spec, memory, i, record=False)
            self.tile.advance(s, stage, x.scale)
            cute.arch.sync_threads()
            row = x.o[place.batch, place.start + i, head, None]
            self.reader.write(stage.o, row, tile_index)
        if cutlass.const_expr(x.final_state is not None):
            self.tile.store(s, x.final_state[sequence, head, None, None], tile_index)
