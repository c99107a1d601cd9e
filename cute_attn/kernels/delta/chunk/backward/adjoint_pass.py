"""KDA's pass of the state's gradient backwards through the chunks.

`prepare` has computed kd, qg, kg, Akk, Aqk and the decay of every chunk, with the factors of beta
that `state_pass` takes. do is the gradient of o, and dS, a K by V matrix, the gradient of the state
after a chunk. The chunk computes

    dv_new = Aqk^T do + kg dS
    dr     = Akk^T dv_new
    dS    <- Diag(decay) dS + qg^T do - kd^T dr

This is the adjoint of `state_pass`, step by step. As in `state_pass`, each of the three products
depends on the product before. The pass starts from the gradient of the final state, or from 0, and
ends with the gradient of the initial state. The pass stores dS before each update, and dr, which is
also the gradient of v.

    warps of `state`, see `chunk_pass`
      see     start Aqk^T do
      recall  add kg dS, start Diag(decay) dS + qg^T do; store dS
      solve   dr
      update  dS; store dr
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from ....common.ptx.matrices import transpose_matrix
from ..chunk_pass import KD_STEP, ChunkPass, Place, Results
from ..spec import CHUNK, AdjointPassSpec
from ..tiles import SUB_TILE_BYTES


class KdaAdjointPass(ChunkPass):
    """The kernel for one AdjointPassSpec; see the module's docstring."""

    backwards = True

    def __init__(self, spec: AdjointPassSpec):
        super().__init__(
            spec,
            rows_step=SUB_TILE_BYTES,
            scores=True,
            starts=spec.has_final_state,
            ends=spec.has_initial_state,
            store_states=not spec.of_transitions,
            store_v_new=False,
        )

    def chunk(
        self, state: cute.Tensor, held: Any, stage: Any, results: Results, place: Place,
        index: Any, later: Any,
    ) -> None:  # fmt: skip
        if self.transitions:
            self.transition(state, stage, place.column)
        else:
            self.update(state, stage, True, results, place, index)

    @cute.jit
    def transition(self, state: cute.Tensor, stage: Int32, column: Int32) -> None:
        """Update columns of [B | M]; the columns of M have no rows of do."""
        if column < self.spec.head_dim_v:
            self.update(state, stage, True)
        else:
            self.update(state, stage, False)

    def update(
        self, state: cute.Tensor, stage: Any, has_rows: bool, results: Results | None = None,
        place: Place | None = None, index: Any = None,
    ) -> None:  # fmt: skip
        """Update dS, and store results if there are any."""
        product, kd = self.state.times_columns, stage + self.stage["kd_qg"]
        do: list[Any] = []
        seen = None
        if has_rows:
            # see: (Aqk^T do)^T, 16 columns of V by 64 tokens
            do = [x for load in self.transposed_rows(stage + self.stage["rows"]) for x in load()]
            seen = product(do, stage + self.stage["aqk"], columns=CHUNK, triangular=True)

        # recall
        s = self.state.operand(self.state.values(state))
        if seen is not None:
            seen = self.state.done(seen)
        dv_new = self.state.times_rows(s, stage + self.stage["kg"], c=seen)
        updated = self.state.decayed(state, stage + self.stage["decay"])
        if has_rows:
            updated = product(do, kd + SUB_TILE_BYTES, updated, sub_tile_step=KD_STEP)
        if results is not None and place is not None:
            self.store_state(s, results, place, index)

        # solve
        dv_new = self.state.operand(self.state.done(dv_new, pending=1 if has_rows else 0))
        dr = product(dv_new, stage + self.stage["akk"], columns=CHUNK, triangular=True)
        if has_rows:
            updated = self.state.done(updated, pending=1)
        dr = self.state.operand(self.state.done(dr))

        # update
        updated = product(self.state.negated(dr), kd, updated, sub_tile_step=KD_STEP)
        if results is not None and place is not None:
            self.store_rows([transpose_matrix(x) for x in dr], results.o, place, index, True)
        self.state.assign(state, self.state.done(updated))
