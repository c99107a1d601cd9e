"""`state_pass` for states in a pool, as in a server: initial states are read, and final states
written, in place.

    state_indices       [N]      a sequence's slot: it has the initial state, then the final state
    checkpoint_indices  [N, C]   slots for the states after every checkpoint_chunks chunks
    has_initial_state   [N]      whether the slot has an initial state

A sequence without an initial state starts from 0. A sequence without a slot does so too, and its
final state is stored nowhere. A warp reads and
writes the same part of a slot, so one kernel can do both in place. In a split sequence, however,
CTAs of the first segment read the slot, and CTAs of the last segment write it. So `transitions`
copies the initial state to segment_states, to the place of the call's last segment, which has no B.
`outputs` starts from this copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ....common.arguments import fake_contiguous, fake_matrices, fake_offsets, fake_rows
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.overlap import overlaps
from ...slots import fake_flags, fake_slots, is_slot
from ..chunk_pass import Operands, Place, Results, Slots
from ..spec import CHUNK, PoolPassSpec, record_elements
from .state_pass import KdaStatePass


class Arguments(NamedTuple):
    """The kernel's arguments; see `chunk_pass.Arguments` for the other arguments.

    Attributes:
        pool: [slots, HV, K, V], or with state_v_first [slots, HV, V, K], of state_dtype.
        state_indices, checkpoint_indices, checkpoint_chunks, has_initial_state: see the module's
            docstring.
    """

    rows: cute.Tensor
    tiles: cute.Tensor
    decay: cute.Tensor
    o: cute.Tensor
    pool: cute.Tensor
    state_indices: cute.Tensor
    checkpoint_indices: cute.Tensor | None
    checkpoint_chunks: Int32
    has_initial_state: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    segment_states: cute.Tensor | None
    segment_transitions: cute.Tensor | None
    chunks_per_segment: Int32
    num_segments: Int32
    bounds: cute.Tensor | None
    chunks_per_start: Int32 | None


class InPool(KdaStatePass):
    """What a pass of the state does otherwise for states in a pool. A kernel's class has this base
    before the class of the pass itself."""

    spec: PoolPassSpec

    def fake_pool(self, heads: Any, sequences: Any) -> dict[str, Any]:
        """Placeholders of the arguments about the pool."""
        spec = self.spec
        matrix = (spec.head_dim_k, spec.head_dim_v)
        if spec.state_v_first:
            matrix = matrix[::-1]
        return {
            "pool": fake_matrices((cute.sym_int(), heads), matrix, DTYPE[spec.state_dtype]),
            "state_indices": fake_slots(spec, sequences),
            "checkpoint_indices": (
                fake_contiguous(Int32, (sequences, cute.sym_int())) if spec.checkpoints else None
            ),
            "checkpoint_chunks": Int32(1),
            "has_initial_state": fake_flags(spec, sequences),
        }

    def config(self, a: Any, *read: cute.Tensor) -> dict[str, Any]:
        """The launch's configuration; the kernel reads `read` beside v."""
        config = self.launch_config(a)
        columns, heads, sequences = config["grid"]
        if self.outputs:
            inputs = (
                *read, a.rows, a.state_indices, a.checkpoint_indices, a.has_initial_state,
                a.cu_seqlens,
            )  # fmt: skip
            heads = self.heads_unless(overlaps((a.o, a.pool), inputs, (a.pool,)), heads)
        return config | {"grid": [columns, heads, sequences]}

    @cute.jit
    def heads_unless(self, bad: Boolean, heads: Int32) -> Any:
        """Return the grid's heads, 0 for bad arguments: the driver rejects an empty grid, and the
        operator raises the reason."""
        if bad:
            heads = 0
        return heads

    def slots(self, a: Any) -> Slots:
        return Slots(
            a.state_indices, a.checkpoint_indices, a.checkpoint_chunks, a.has_initial_state
        )

    @cute.jit
    def load_start(
        self, state: cute.Tensor, x: Any, sequence: Int32, head: Int32, column: Int32
    ) -> None:
        v_first = self.spec.state_v_first
        if cutlass.const_expr(self.spec.segments == "outputs"):
            copy = x.segment_states[None, x.segment_states.shape[1] - 1, None, None, None]
            self.state.load(state, copy, True, sequence, head, column)
        else:
            state.fill(0.0)
            slot = x.slots.state_indices[sequence]
            present = is_slot(slot, x.start, self.spec.null_slot)
            if cutlass.const_expr(self.spec.fresh):
                present = present and x.slots.has_initial_state[sequence] != 0
            if present:
                self.state.load(state, x.start, v_first, Int32(slot), head, column)
            if cutlass.const_expr(self.transitions):
                copy = x.segment_states[None, x.segment_states.shape[1] - 1, None, None, None]
                self.state.store(state, copy, True, sequence, head, column)

    @cute.jit
    def store_result(
        self, state: cute.Tensor, x: Any, sequence: Int32, head: Int32, column: Int32
    ) -> None:
        slot = x.slots.state_indices[sequence]
        if is_slot(slot, x.result, self.spec.null_slot):
            self.state.store(state, x.result, self.spec.state_v_first, Int32(slot), head, column)

    @cute.jit
    def checkpoint(
        self, state: cute.Tensor, x: Any, place: Place, sequence: Int32, count: Int32, begun: Any
    ) -> None:
        if cutlass.const_expr(self.spec.checkpoints and self.outputs):
            n = count // x.slots.checkpoint_chunks
            due = (
                n * x.slots.checkpoint_chunks == count and n <= x.slots.checkpoint_indices.shape[1]
            )
            # Checkpoints lie at multiples of CHUNK tokens. So the state after a partial last chunk
            # is not a checkpoint.
            if cutlass.const_expr(self.short_starts):
                due = due and begun
            if due and count * CHUNK <= place.sequence.length:
                slot = x.slots.checkpoint_indices[sequence, n - 1]
                if is_slot(slot, x.result, self.spec.null_slot):
                    v_first = self.spec.state_v_first
                    self.state.store(state, x.result, v_first, slot, place.head, place.column)


class KdaPoolPass(InPool):
    """The kernel for one PoolPassSpec; see the module's docstring."""

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        batch, tokens, heads, chunks, sequences = (cute.sym_int() for _ in range(5))

        def rows() -> Any:
            return fake_rows(self.dtype, (batch, tokens, heads, spec.head_dim_v))

        return placeholders(
            Arguments(
                rows=rows(),
                tiles=fake_rows(self.dtype, (chunks, heads, record_elements(spec.head_dim_k))),
                decay=fake_rows(cutlass.Float32, (chunks, heads, spec.head_dim_k)),
                o=rows(),
                **self.fake_pool(heads, sequences),
                cu_seqlens=fake_offsets(spec.index_dtype),
                **self.fake_workspace(sequences, heads),
                **self.fake_segments(heads, chunks),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Run the pass."""
        a, stream = gathered(Arguments, args)
        x = Operands(
            a.rows, a.tiles, a.decay, Results(a.o, None, None), a.pool, a.pool, self.slots(a),
            a.cu_seqlens, a.segment_states, a.segment_transitions, a.chunks_per_segment,
            a.num_segments, a.bounds, a.chunks_per_start,
        )  # fmt: skip
        self.kernel(x).launch(**self.config(a), stream=stream)
