"""`per_head.state_pass` for states in a pool; see `fused.pool_pass`."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ....common.arguments import fake_offsets
from ....common.entry import entry, gathered, placeholders
from ..chunk_pass import Results
from ..fused.pool_pass import InPool
from ..spec import HeadPoolPassSpec
from .state_pass import HeadStatePass


class Arguments(NamedTuple):
    """The kernel's arguments; see `per_head.state_pass.Arguments`, and for the pool
    `fused.pool_pass.Arguments`."""

    q: cute.Tensor
    k: cute.Tensor
    rows: cute.Tensor
    tiles: cute.Tensor
    factors: cute.Tensor
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


class HeadPoolPass(InPool, HeadStatePass):
    """The kernel for one HeadPoolPassSpec; see the module's docstring."""

    spec: HeadPoolPassSpec

    def fake_args(self) -> tuple[Any, ...]:
        heads, slots, sequences = (cute.sym_int() for _ in range(3))
        return placeholders(
            Arguments(
                **self.fake_inputs(heads, slots),
                **self.fake_pool(heads, sequences),
                cu_seqlens=fake_offsets(self.spec.index_dtype),
                **self.fake_workspace(sequences, heads),
                **self.fake_segments(heads, slots),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Run the pass."""
        a, stream = gathered(Arguments, args)
        x = self.operands(a, Results(a.o, None, None), a.pool, a.pool, self.slots(a))
        self.kernel(x).launch(**self.config(a, a.q, a.k), stream=stream)
