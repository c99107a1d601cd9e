"""`per_head.forward` for states in a pool; see `fused.pool_pass`."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from ....common.arguments import fake_offsets
from ....common.entry import entry, gathered, placeholders
from ..chunk_pass import Results
from ..fused.pool_pass import InPool
from ..spec import HeadPoolForwardSpec
from .forward import HeadForward


class Arguments(NamedTuple):
    """The kernel's arguments; see `per_head.forward.Arguments`, and for the pool
    `fused.pool_pass.Arguments`."""

    q: cute.Tensor
    k: cute.Tensor
    rows: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    A_log: cute.Tensor | None
    dt_bias: cute.Tensor | None
    o: cute.Tensor
    pool: cute.Tensor
    state_indices: cute.Tensor
    checkpoint_indices: cute.Tensor | None
    checkpoint_chunks: Int32
    has_initial_state: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    scale: Float32
    beta_scale: Float32


class HeadPoolForward(InPool, HeadForward):
    """The kernel for one HeadPoolForwardSpec; see the module's docstring."""

    spec: HeadPoolForwardSpec

    def fake_args(self) -> tuple[Any, ...]:
        heads, sequences = cute.sym_int(), cute.sym_int()
        return placeholders(
            Arguments(
                **self.fake_inputs(heads),
                **self.fake_pool(heads, sequences),
                cu_seqlens=fake_offsets(self.spec.index_dtype),
                scale=Float32(1.0),
                beta_scale=Float32(1.0),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Run the forward."""
        a, stream = gathered(Arguments, args)
        x = self.forward_operands(a, Results(a.o, None, None), a.pool, a.pool, self.slots(a))
        self.kernel(x).launch(**self.config(a, a.q, a.k), stream=stream)
