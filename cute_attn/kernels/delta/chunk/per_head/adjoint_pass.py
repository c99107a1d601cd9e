"""The pass of the state's gradient backwards through the chunks, for one decay a head.

`prepare` has computed T, Aqk and the factors of each token, as for `state_pass`. do is the gradient
of o, and dS, a K by V matrix, the gradient of the state after a chunk. With the factors as diagonal
matrices, the chunk computes

    dv_new = Aqk^T do + Diag(beta exp(G_e - G) / |k|) k dS
    dr     = T^T dv_new
    dS    <- exp(G_e) dS + q^T Diag(scale exp(G) / |q|) do - k^T Diag(exp(G) / |k|) dr

This is the adjoint of `state_pass`, step by step. As there, q and k are operands as they are in
memory. The factors multiply accumulators, or rows of do and dr before they are rounded to operands.

    warps of `state`, see `chunk_pass`
      recall  start k dS
      see     start Aqk^T do, then exp(G_e) dS + q^T do; store dS
      solve   dr
      update  dS; store dr
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from ....common.ptx.convert import unpack
from ....common.ptx.matrices import transpose_matrix
from ....common.ptx.memory import load_shared
from ..chunk_pass import ChunkPass, Place, Results
from ..spec import CHUNK, HeadAdjointSpec
from .state_pass import HeadStatePass


class HeadAdjointPass(HeadStatePass):
    """The kernel for one HeadAdjointSpec; see the module's docstring."""

    backwards = True

    def __init__(self, spec: HeadAdjointSpec):
        super().__init__(spec)
        # The pass starts from the gradient of the final state, and ends with that of the initial.
        self.starts, self.ends = spec.has_final_state, spec.has_initial_state
        self.has_v_new = False

    def hold(self, state: cute.Tensor) -> Any:
        """Return None: nothing is kept from one chunk to the next."""
        return None

    def finish(self, held: Any, results: Results, place: Place, end: Any, present: Any) -> None:
        ChunkPass.finish(self, held, results, place, end, present)

    def chunk(
        self, state: cute.Tensor, held: Any, stage: Any, results: Results, place: Place,
        index: Any, later: Any,
    ) -> None:  # fmt: skip
        product, done = self.state.times_columns, self.state.done
        q, k, t, aqk = (stage + self.stage[name] for name in ("q", "k", "t", "aqk"))

        # recall: (k dS)^T, 16 columns of V by 64 tokens
        s = self.state.operand(self.state.values(state))
        recalled = self.state.times_rows(s, k)

        # see
        loaders = self.transposed_rows(stage + self.stage["rows"])
        do = [x for load in loaders for x in load()]
        seen = product(do, aqk, columns=CHUNK, triangular=True)
        decay = load_shared(Float32, stage + self.stage["factors"] + 16 * CHUNK)[0]
        decayed = [x * decay for x in self.state.values(state)]
        values = [y for x in do for y in unpack(self.dtype, x)]
        sent = zip(values, self.of_tokens(stage, 1), strict=True)
        updated = product(self.state.operand([x * y for x, y in sent]), q, decayed)
        self.store_state(s, results, place, index)
        written = self.of_tokens(stage, 2)
        recalled = done(recalled, pending=2)
        seen = done(seen, pending=1)

        # solve
        both = zip(seen, written, recalled, strict=True)
        dr = product(
            self.state.operand([x + y * z for x, y, z in both]), t, columns=CHUNK, triangular=True
        )
        updated = done(updated, pending=1)
        dr = done(dr)

        # update
        taken = zip(dr, self.of_tokens(stage, 0), strict=True)
        updated = product(self.state.operand([-(x * y) for x, y in taken]), k, updated)
        if not self.transitions:
            rows = [transpose_matrix(x) for x in self.state.operand(dr)]
            self.store_rows(rows, results.o, place, index, True)
        self.state.assign(state, done(updated))
