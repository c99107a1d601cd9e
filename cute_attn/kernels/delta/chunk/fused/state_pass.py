"""KDA's pass of the state through the chunks, with the output. This is the fused path's second
kernel.

`prepare` has computed kd, qg, kg, Akk, Aqk and the decay of every chunk; kg, Akk and Aqk have the
factors of beta = m p. With S the state at the chunk's start, a K by V matrix, a chunk computes

    r     = v - kd S                   residuals of the delta rule
    v_new = Akk r                      corrections of the chunk's tokens, divided by m
    o     = qg S + Aqk v_new
    S    <- Diag(decay) S + kg^T v_new

    warps of `state`, see `chunk_pass`
      remember  start kd S and qg S
      store     o of the previous chunk, and S
      correct   r, then v_new
      update    S; and o, in registers

For a backward pass, the kernel also stores S and v_new of each chunk.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from ....common.ptx.convert import unpack
from ....common.ptx.matrices import transpose_matrix
from ..chunk_pass import KD_STEP, ChunkPass, Place, Results
from ..spec import CHUNK, StatePassSpec
from ..tiles import SUB_TILE_BYTES, store_units


class KdaStatePass(ChunkPass):
    """The kernel for one StatePassSpec; see the module's docstring."""

    def __init__(self, spec: StatePassSpec):
        self.outputs = not spec.of_transitions
        super().__init__(
            spec,
            rows_step=KD_STEP,
            scores=False,
            starts=spec.has_initial_state,
            ends=spec.has_final_state,
            store_states=spec.store_states,
            store_v_new=spec.store_states,
        )

    def hold(self, state: cute.Tensor) -> Any:
        """Return o of the previous chunk, 16 tokens by 2 columns, which is stored while products
        run."""
        output = cute.make_rmem_tensor((CHUNK // 4,), Int32)
        output.fill(0)
        return output

    def chunk(
        self, state: cute.Tensor, held: Any, stage: Any, results: Results, place: Place,
        index: Any, later: Any,
    ) -> None:  # fmt: skip
        # remember: (kd S)^T and (qg S)^T, 16 columns of V by 64 tokens
        s = self.state.operand(self.state.values(state))
        recalled = self.state.times_rows(s, stage + self.stage["kd_qg"])
        remembered = (
            self.state.times_rows(s, stage + self.stage["kd_qg"] + SUB_TILE_BYTES)
            if self.outputs
            else []
        )
        self.store_o(held, results.o, place, index - 1, later)
        self.store_state(s, results, place, index)

        # correct
        v_t = self.load_v(stage + self.stage["rows"])
        recalled = self.state.done(recalled, pending=1 if self.outputs else 0)
        r = self.state.operand([x - y for x, y in zip(v_t, recalled, strict=True)])
        corrections = self.state.times_rows(r, stage + self.stage["akk"], triangular=True)
        decayed = self.state.decayed(state, stage + self.stage["decay"])
        if self.outputs:
            remembered = self.state.done(remembered, pending=1)
        v_new = self.state.operand(self.state.done(corrections))

        # update
        updated = self.state.times_columns(v_new, stage + self.stage["kg"], decayed)
        self.store_v_new(v_new, results, place, index)
        if not self.outputs:
            self.state.assign(state, self.state.done(updated))
            return
        result = self.state.times_rows(
            v_new, stage + self.stage["aqk"], triangular=True, c=remembered
        )
        self.state.assign(state, self.state.done(updated, pending=1))
        result = self.state.operand(self.state.done(result))
        self.state.assign(held, [transpose_matrix(x) for x in result])

    def finish(self, held: Any, results: Results, place: Place, end: Any, present: Any) -> None:
        self.store_o(held, results.o, place, end - 1, present)

    # -- v, o and v_new -----------------------------------------------------------------------

    def load_v(self, base: Int32) -> list[Any]:
        """Load v^T of the warp's 16 columns, as accumulators."""
        values: list[Any] = []
        for load in self.transposed_rows(base):
            for x in load():
                values += unpack(self.dtype, x)
        return values

    def store_o(self, output: Any, o: cute.Tensor, place: Place, index: Any, present: Any) -> None:
        if self.outputs:
            self.store_rows(output, o, place, index, present)

    def store_v_new(self, v_new: list[Any], results: Results, place: Place, index: Any) -> None:
        if self.transitions or not self.has_v_new:
            return
        base = self.of_chunk(results.v_new, place, index)
        base = base + Int64(place.column // 64 * SUB_TILE_BYTES)
        pair = place.column % 64 // 16
        for j in range(CHUNK // 8):
            x = [transpose_matrix(v_new[2 * j + half]) for half in range(2)]
            store_units(base, 8 * j, pair, x)
