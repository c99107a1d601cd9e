"""Computes a chunk's gates and their gradients. A thread has 8 tokens of two channels.

Warp 4 n + b has sub-chunk b of the n-th 32 channels; the upper half of its lanes has the later 8
tokens.

dG is the gradient of G. The gradient of a token's gate is the sum of dG from this token to the
chunk's end. At the chunk's end dG has a further term, the gradient through the decay of the state
and kg.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....common.ptx.compiler import keep_branch
from ....common.ptx.convert import pack
from ....common.ptx.math import exp2
from ....common.ptx.memory import load_shared, store_global, store_shared
from ....common.spec import WARP_SIZE
from ...gates import log_decay_gradients
from ..chunks import row_offset
from ..gate_inputs import GateInputs
from ..gate_sums import first_outside, is_outside
from ..spec import CHUNK, GradientsSpec
from ..sub_chunks import SUB_CHUNK, SUB_CHUNKS
from .layout import PART, GradientMemory

HALF = SUB_CHUNK // 2  # tokens per thread
OTHER_HALF = WARP_SIZE // 2  # the distance of the lane that has the sub-chunk's other tokens


class WarpGateInputs(GateInputs):
    """GateInputs with the distribution over threads that the module's docstring describes."""

    tokens = HALF

    def __init__(self, spec: GradientsSpec, memory: GradientMemory):
        super().__init__(spec)
        self.memory = memory

    def place(self) -> tuple[Any, Any]:
        b, part = self.memory.warp_place()
        lane = cute.arch.lane_idx()
        pair = part * (PART // 2) + (lane & (OTHER_HALF - 1))
        return b * SUB_CHUNK + (lane >> 4) * HALF, pair


class GateGradients:
    """Computes P before the products, and dg after them. All methods run on the device.

    Args:
        spec: a spec whose `head_dim_k` is the channels of one CTA; rows and dt_bias begin at the
            CTA's channels.
    """

    def __init__(self, spec: GradientsSpec, memory: GradientMemory):
        self.spec, self.memory = spec, memory
        self.inputs = WarpGateInputs(spec, memory)

    def _sums(self, smem: Int32, name: str, channel: Int32) -> Any:
        """The address of an element of the warp's sub-chunk in a buffer of sums."""
        b, _ = self.memory.warp_place()
        return smem + self.memory[name] + b * self.memory.p_row + (channel << 2)

    def _is_later(self) -> Any:
        """Whether the lane has the later tokens."""
        return cute.arch.lane_idx() >= OTHER_HALF

    def _of_other_half(self, values: list[Any]) -> list[Any]:
        return [cute.arch.shuffle_sync_bfly(x, offset=OTHER_HALF) for x in values]

    # -- sums of gates ------------------------------------------------------------------------

    @cute.jit
    def store_sums(
        self, smem: Int32, rows: Any, length: Int32, A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None, head: Int32, lower_bound: Float32,
    ) -> None:  # fmt: skip
        """Store P and the input of `finish_sums`."""
        raw = self.inputs.load(rows, length)
        a, bias = self.inputs.load_parameters(A_log, dt_bias, head)
        self.inputs.blank(raw, length)
        token, pair = self.inputs.place()
        channel = 2 * pair
        gates = self.inputs.gates(raw, self.inputs.rate(a), bias, lower_bound)
        later = self._is_later()
        total = [Float32(cutlass.select_(later, x, Float32(0.0))) for x in gates[0]]
        sums = [total]
        for t in cutlass.range_constexpr(1, HALF):
            total = [total[0] + gates[t][0], total[1] + gates[t][1]]
            sums.append(total)
        before = [cutlass.select_(later, x, Float32(0.0)) for x in self._of_other_half(total)]
        sums = [[x + y for x, y in zip(row, before, strict=True)] for row in sums]
        for t in cutlass.range_constexpr(HALF):
            store_shared(Float32, smem + self.memory.p_place(token + t, channel), sums[t])
        first, steps = self._sums(smem, "first", channel), self._sums(smem, "steps", channel)
        values = [
            Float32(cutlass.select_(later, x, y)) for x, y in zip(sums[-1], gates[0], strict=True)
        ]
        store_shared(Float32, cutlass.select_(later, steps, first), values)
        if cutlass.const_expr(self.spec.dtype == "bfloat16"):
            # Sums of gates ascend only if gates above 0 are possible, that is with gate "none".
            found = is_outside(sums[-1])
            if cutlass.const_expr(self.spec.gate == "none"):
                for row in sums[:-1]:
                    found = found | is_outside(row)
            self._store_first_outside(smem, sums, token & (SUB_CHUNK - 1), found)

    @cute.jit
    def _store_first_outside(
        self, smem: Int32, sums: Any, token: Int32, found: cutlass.Boolean
    ) -> None:
        """Store the sub-chunk's first token whose P is out of range in the warp's channels, or 16
        if all are in range."""
        first = Int32(SUB_CHUNK)
        if cute.arch.vote_any_sync(found):
            keep_branch()
            first = first_outside(sums, token)
        if cute.arch.lane_idx() == 0:
            b, part = self.memory.warp_place()
            at = smem + self.memory["out_of_range"] + (b * self.memory.parts + part) * 4
            store_shared(Int32, at, [first])

    @cute.jit
    def finish_sums(self, smem: Int32) -> None:
        """Finish `steps` and `to_end`."""
        thread, _, _ = cute.arch.thread_idx()
        if thread < self.spec.head_dim_k:
            steps = []
            for b in cutlass.range_constexpr(SUB_CHUNKS):
                (step,) = self.memory.load_sums(smem, "steps", b, thread)
                if cutlass.const_expr(b + 1 < SUB_CHUNKS):
                    step = step + self.memory.load_sums(smem, "first", b + 1, thread)[0]
                steps.append(step)
            to_end = Float32(0.0)
            for n in cutlass.range_constexpr(SUB_CHUNKS):
                b = SUB_CHUNKS - 1 - n
                to_end = to_end + steps[b]
                for name, x in (("steps", steps[b]), ("to_end", to_end)):
                    at = smem + self.memory[name] + b * self.memory.p_row + (thread << 2)
                    store_shared(Float32, at, [x])

    def rows_in_range(self, smem: Int32, b: Int32) -> Any:
        """Return how many rows of sub-chunk b are in range, from the first on."""
        if self.spec.dtype != "bfloat16":
            return Int32(0)
        at = smem + self.memory["out_of_range"] + b * (4 * self.memory.parts)
        found = load_shared(Int32, at, self.memory.parts)
        rows = found[0]
        for other in found[1:]:
            rows = cutlass.min(rows, other)
        return rows

    # -- gradients ----------------------------------------------------------------------------

    @cute.jit
    def store(
        self, smem: Int32, raw: cute.Tensor, target: Any, length: Int32, A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None, head: Int32, lower_bound: Float32,
    ) -> None:  # fmt: skip
        """Store dg, and the sub-chunks' sums of the gradients of A_log and dt_bias, from the dG
        that the warp has stored; `raw` is g."""
        a, bias = self.inputs.load_parameters(A_log, dt_bias, head)
        token, pair = self.inputs.place()
        channel = 2 * pair
        later = self._is_later()
        dG = cute.make_rmem_tensor((2 * HALF,), Float32)
        own = [Float32(0.0), Float32(0.0)]
        for n in cutlass.range_constexpr(HALF):
            t = HALF - 1 - n
            x = self.memory.load_p(smem, token + t, channel, 2)
            for e in cutlass.range_constexpr(2):
                dG[2 * t + e] = x[e]
                own[e] = own[e] + x[e]
        others = self._of_other_half(own)
        total = [x + y for x, y in zip(own, others, strict=True)]
        # The two lanes that share a sub-chunk's channels store the same sum.
        store_shared(Float32, self._sums(smem, "later", channel), total)
        cute.arch.sync_threads()
        running = cute.make_rmem_tensor((2,), Float32)
        after = self._after(smem, channel)
        for e in cutlass.range_constexpr(2):
            running[e] = after[e] + cutlass.select_(later, Float32(0.0), others[e])
        rate = self.inputs.rate(a)
        sums = cute.make_rmem_tensor((4,), Float32)
        sums.fill(0.0)
        if length == CHUNK:
            self._store_rows(
                target, raw, dG, running, sums, token, channel, length, rate, bias, lower_bound,
                False,
            )  # fmt: skip
        else:
            keep_branch()
            self._store_rows(
                target, raw, dG, running, sums, token, channel, length, rate, bias, lower_bound,
                True,
            )  # fmt: skip
        for name, first in (("of_A_log", 0), ("of_dt_bias", 2)):
            if cutlass.const_expr(getattr(self.spec, "has" + name[2:])):
                halves = [sums[first], sums[first + 1]]
                others = self._of_other_half(halves)
                both = [x + y for x, y in zip(halves, others, strict=True)]
                store_shared(Float32, self._sums(smem, name, channel), both)

    def _store_rows(
        self, target: Any, raw: cute.Tensor, dG: cute.Tensor, running: cute.Tensor,
        sums: cute.Tensor, token: Int32, channel: Int32, length: Any, rate: Any, bias: Any,
        lower_bound: Any, masked: bool,
    ) -> None:  # fmt: skip
        registers = self.inputs.registers
        start = target.start + Int64(channel * (2 * registers))
        for t in reversed(range(HALF)):
            g = self.inputs.pair(raw, t)
            dg, of_rate = [], []
            for e in range(2):
                running[e] = running[e] + dG[2 * t + e]
                x, y = log_decay_gradients(
                    self.spec.gate, running[e], g[e], rate, bias[e], lower_bound
                )
                dg.append(x)
                of_rate.append(y)
            if masked:
                self._store_row(start, target, token + t, length, dg, of_rate, sums)
            else:
                self._store_values(start + row_offset(token + t, target.pitch), dg)
                self._add_to_sums(sums, dg, of_rate)

    @cute.jit
    def _store_row(
        self, start: Int64, target: Any, row: Int32, length: Int32, dg: Any, of_rate: Any,
        sums: cute.Tensor,
    ) -> None:  # fmt: skip
        if row < length:
            self._store_values(start + row_offset(row, target.pitch), dg)
            self._add_to_sums(sums, dg, of_rate)

    def _store_values(self, at: Any, dg: Any) -> None:
        if self.inputs.registers == 2:
            store_global(Float32, at, dg)
        else:
            store_global(Int32, at, [pack(self.inputs.dtype, *dg)])

    def _add_to_sums(self, sums: cute.Tensor, dg: Any, of_rate: Any) -> None:
        for e in range(2):
            if self.spec.has_A_log:
                sums[e] = sums[e] + of_rate[e]
            if self.spec.has_dt_bias:
                sums[2 + e] = sums[2 + e] + dg[e]

    @cute.jit
    def _after(self, smem: Int32, channel: Int32) -> Any:
        """The sum of dG over the tokens after the warp's sub-chunk, with the state's term."""
        sub, _ = self.memory.warp_place()
        first = self.memory.load_sums(smem, "first", 0, channel, 2)
        to_end = self.memory.load_sums(smem, "to_end", 0, channel, 2)
        of_state = [Float32(0.0), Float32(0.0)]
        into_state = [Float32(0.0), Float32(0.0)]
        later = [Float32(0.0), Float32(0.0)]
        for n in cutlass.range_constexpr(SUB_CHUNKS):
            b = SUB_CHUNKS - 1 - n
            x = self.memory.load_sums(smem, "of_state", b, channel, 2)
            y = self.memory.load_sums(smem, "into_state", b, channel, 2)
            z = self.memory.load_sums(smem, "later", b, channel, 2)
            for e in cutlass.range_constexpr(2):
                of_state[e] = of_state[e] + x[e]
                into_state[e] = into_state[e] + y[e]
                later[e] = later[e] + cutlass.select_(b > sub, z[e], Float32(0.0))
        return [
            later[e] + (into_state[e] + exp2(first[e] + to_end[e]) * of_state[e]) for e in range(2)
        ]

    @cute.jit
    def store_partial_sums(
        self, smem: Int32, dA_log: cute.Tensor | None, ddt_bias: cute.Tensor | None, slot: Int32,
        head: Int32, cta: Int32,
    ) -> None:  # fmt: skip
        """Store the chunk's parts of the gradients of A_log and dt_bias, from the CTA's
        channels."""
        thread, _, _ = cute.arch.thread_idx()
        channels = self.spec.head_dim_k
        if cutlass.const_expr(ddt_bias is not None):
            if thread < channels:
                at = cta * channels + thread
                ddt_bias[slot, head, at] = self._sum(smem, "of_dt_bias", thread)
        if cutlass.const_expr(dA_log is not None):
            if thread < WARP_SIZE:
                total = Float32(0.0)
                for n in cutlass.range_constexpr(channels // WARP_SIZE):
                    total = total + self._sum(smem, "of_A_log", n * WARP_SIZE + thread)
                for bit in cutlass.range_constexpr(5):
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << bit)
                if thread == 0:
                    dA_log[slot, cta, head] = total

    def _sum(self, smem: Int32, name: str, channel: Int32) -> Any:
        total = Float32(0.0)
        for b in range(SUB_CHUNKS):
            total = total + self.memory.load_sums(smem, name, b, channel)[0]
        return total

    @cute.jit
    def store_no_sums(
        self, dA_log: cute.Tensor | None, ddt_bias: cute.Tensor | None, slot: Int32, head: Int32,
        cta: Int32,
    ) -> None:  # fmt: skip
        """Store zeros in place of the sums, for a slot that has no chunk."""
        thread, _, _ = cute.arch.thread_idx()
        channels = self.spec.head_dim_k
        if cutlass.const_expr(ddt_bias is not None):
            if thread < channels:
                ddt_bias[slot, head, cta * channels + thread] = Float32(0.0)
        if cutlass.const_expr(dA_log is not None):
            if thread == 0:
                dA_log[slot, cta, head] = Float32(0.0)
