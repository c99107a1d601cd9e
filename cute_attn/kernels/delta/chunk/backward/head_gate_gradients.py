"""Computes a chunk's gates and their gradients, with one gate for each head and token.

The first warp does this. Lane t has tokens 2 t and 2 t + 1.

With a gate of each head, a gradient of G is a sum over channels. A gate's gradient is the sum of
these from its token to the chunk's end. The chunk's end also has the gradient through the decay of
the state, and the gradient through kg, whose terms are those of `of_end`. In the sum from a token
on, they cancel against the same terms of that token and later ones. So what is left of `of_end` is
the sum over earlier tokens, and nothing cancels.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....common.numbers import LOG2_E
from ....common.ptx.cluster import remote_address, store_async
from ....common.ptx.math import exp2
from ....common.ptx.memory import load_shared, store_shared
from ....common.spec import WARP_SIZE
from ...gates import log2_decay, log_decay_gradients
from ..per_head.head_gates import split_gate, sum_of_earlier_lanes, sums_up_to
from ..spec import CHUNK, HeadGradientsSpec
from .layout import HeadGradientMemory

OWN = CHUNK // WARP_SIZE  # tokens of a lane
STEPS = WARP_SIZE.bit_length() - 1
HALF = CHUNK // 2  # tokens whose dg one CTA of a cluster stores


class HeadGateGradients:
    """Computes G before the products, and dg after them. All methods run on the device, and all
    but `store_no_sums` in the first warp."""

    def __init__(self, spec: HeadGradientsSpec, memory: HeadGradientMemory):
        self.spec, self.memory = spec, memory

    def _at(self, smem: Int32, name: str) -> Any:
        return smem + self.memory[name] + cute.arch.lane_idx() * (OWN * 4)

    @cute.jit
    def _parameters(
        self, A_log: cute.Tensor | None, dt_bias: cute.Tensor | None, head: Int32
    ) -> Any:
        rate, bias = Float32(1.0), Float32(0.0)
        if cutlass.const_expr(A_log is not None):
            rate = exp2(A_log[head] * LOG2_E)
        if cutlass.const_expr(dt_bias is not None):
            bias = dt_bias[head]
        return rate, bias

    @cute.jit
    def store_sums(self, smem: Int32, a: Any, place: Any, head: Int32) -> None:
        """Store G and g."""
        rate, bias = self._parameters(a.A_log, a.dt_bias, head)
        first = cute.arch.lane_idx() * OWN
        # Tokens past the end have a gate of 0.
        past = Float32(0.0 if self.spec.gate == "none" else -math.inf)
        raw = cute.make_rmem_tensor((OWN,), Float32)
        for t in cutlass.range_constexpr(OWN):
            raw[t] = past
            if first + t < place.length:
                raw[t] = Float32(a.g[place.batch, place.start + first + t, head])
        gates = [log2_decay(self.spec.gate, raw[t], rate, bias, a.lower_bound) for t in range(OWN)]
        parts = [split_gate(gate) for gate in gates]
        sums = [sums_up_to(list(part)) for part in zip(*parts, strict=True)]
        cute.arch.sync_warp()  # all lanes have read the last head's
        for name, values in zip(("coarse", "fine"), sums, strict=True):
            store_shared(Float32, self._at(smem, name), values)
        store_shared(Float32, self._at(smem, "gate_input"), [raw[t] for t in range(OWN)])

    def _sums_after(self, values: list[Any]) -> list[Any]:
        """The sum of the tokens' values from each token on."""
        lane = cute.arch.lane_idx()
        running = values[0] + values[1]
        for step in range(STEPS):
            other = cute.arch.shuffle_sync_down(running, 1 << step)
            take = lane + (1 << step) < WARP_SIZE
            running = running + Float32(cutlass.select_(take, other, Float32(0.0)))
        after = cute.arch.shuffle_sync_down(running, 1)
        after = Float32(cutlass.select_(lane + 1 < WARP_SIZE, after, Float32(0.0)))
        return [after + values[1] + values[0], after + values[1]]

    def _of_rows(self, smem: Int32, name: str) -> list[Any]:
        """Load a buffer of rows, summed over the parts of the channels."""
        total = [Float32(0.0)] * OWN
        for part in range(self.memory.parts):
            values = load_shared(Float32, self._at(smem, name) + part * (CHUNK * 4), OWN)
            total = [x + y for x, y in zip(total, values, strict=True)]
        return total

    @cute.jit
    def store(
        self, smem: Int32, barriers: Any, a: Any, place: Any, slot: Int32, head: Int32, n: Int32,
        group: Int32, cta: Int32,
    ) -> None:  # fmt: skip
        """Store dg, and the sums over the chunk of the gradients of A_log and dt_bias. The head is
        the n-th of its group. With a cluster, each CTA stores half of the tokens' dg."""
        lane = cute.arch.lane_idx()
        after = self._sums_after(self._of_rows(smem, "of_tokens"))
        of_end = self._of_rows(smem, "of_end")
        earlier = Float32(sum_of_earlier_lanes(of_end[0] + of_end[1]))
        before = [earlier, earlier + of_end[0]]
        warps = self.memory.num_threads // WARP_SIZE
        of_state = Float32(0.0)
        for w in cutlass.range_constexpr(0, warps, 4):
            for x in load_shared(Float32, smem + self.memory["of_state"] + 4 * w, 4):
                of_state = of_state + x
        coarse, fine = self.memory.gate(smem, CHUNK - 1)
        of_state = of_state * exp2(coarse + fine)
        gradients = [x + (y + of_state) for x, y in zip(after, before, strict=True)]
        is_own = lane >= 0
        if cutlass.const_expr(self.spec.cluster > 1):
            is_own = (lane >> 4) == cta
            gradients = self._with_other_part(smem, barriers, gradients, n, group, cta)
        rate, bias = self._parameters(a.A_log, a.dt_bias, head)
        raw = load_shared(Float32, self._at(smem, "gate_input"), OWN)
        of_rate, of_bias = Float32(0.0), Float32(0.0)
        for t in cutlass.range_constexpr(OWN):
            token = lane * OWN + t
            if is_own & (token < place.length):
                dg, d_rate = log_decay_gradients(
                    self.spec.gate, gradients[t], raw[t], rate, bias, a.lower_bound
                )
                a.dg[place.batch, place.start + token, head] = dg.to(a.dg.element_type)
                of_rate = of_rate + d_rate
                of_bias = of_bias + dg
        for target, x in ((a.dA_log, of_rate), (a.ddt_bias, of_bias)):
            if cutlass.const_expr(target is not None):
                for bit in cutlass.range_constexpr(STEPS):
                    x = x + cute.arch.shuffle_sync_bfly(x, offset=1 << bit)
                if lane == 0:
                    target[slot, cta, head] = x

    @cute.jit
    def _with_other_part(
        self, smem: Int32, barriers: Any, gradients: Any, n: Int32, group: Int32, cta: Int32
    ) -> Any:
        """Exchange parts of dg with the other CTA: the sums over the channels of both, for the half
        of the tokens that this CTA stores.

        A buffer is free for head n + 2: before the other CTA sends it, it has got what this CTA
        sends for head n + 1, once it has read head n."""
        lane = cute.arch.lane_idx()
        stage = n & 1
        buffer = smem + self.memory["gates_received"] + stage * (HALF * 4)
        pair = [cute.arch.shuffle_sync_down(x, 1) for x in gradients]
        if ((lane >> 4) != cta) & ((lane & 1) == 0):
            at = buffer + (lane & (WARP_SIZE // 2 - 1)) * (OWN * 4)
            values = [x.bitcast(Int32) for x in (*gradients, *pair)]
            full = barriers.address("gates_full", stage)
            store_async(remote_address(at, cta ^ 1), values, remote_address(full, cta ^ 1))
        barriers.wait("gates_full", n)
        at = buffer + (lane & (WARP_SIZE // 2 - 1)) * (OWN * 4)
        others = load_shared(Float32, at, OWN)
        total = [x + y for x, y in zip(gradients, others, strict=True)]
        cute.arch.sync_warp()
        if n + 2 < group:
            if lane == 0:
                barriers.expect("gates_full", stage, HALF * 4)
        return total

    @cute.jit
    def store_no_sums(
        self, dA_log: cute.Tensor | None, ddt_bias: cute.Tensor | None, slot: Int32, head: Int32,
        cta: Int32,
    ) -> None:  # fmt: skip
        """Store zeros in place of the sums, for a slot that has no chunk."""
        thread, _, _ = cute.arch.thread_idx()
        for target in (dA_log, ddt_bias):
            if cutlass.const_expr(target is not None):
                if thread == 0:
                    target[slot, cta, head] = Float32(0.0)
