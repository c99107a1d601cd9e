"""The gates of a chunk and their gradients, a sub-chunk of two channels for each thread.

With dG the gradient of G, the gradient of a token's gate is the sum of dG over the tokens from it
to the chunk's end. There dG has a further term, the gradient through the decay of the state and kg.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....common.ptx.convert import pack
from ....common.ptx.math import exp2
from ....common.ptx.memory import load_shared, store_global, store_shared
from ....common.spec import WARP_SIZE
from ...gates import log_decay_gradients
from ..chunks import row_offset
from ..gate_inputs import GateInputs
from ..gate_sums import first_outside
from ..spec import GradientsSpec
from ..sub_chunks import SUB_CHUNK, SUB_CHUNKS
from .layout import GradientMemory


class GateGradients:
    """Computes P before the products, and dg after them. All methods run on the device.

    Args:
        spec: with the channels of one CTA as `head_dim_k`; rows and dt_bias begin there.
    """

    def __init__(self, spec: GradientsSpec, memory: GradientMemory):
        self.spec, self.memory = spec, memory
        self.inputs = GateInputs(spec)

    def _place(self) -> tuple[Any, Any]:
        """Return the thread's sub-chunk and its first channel."""
        thread, _, _ = cute.arch.thread_idx()
        pairs = self.inputs.pairs
        return thread // pairs, thread % pairs * 2

    def _put(self, smem: Any, name: str, sub: Any, channel: Any, values: list[Any]) -> None:
        at = smem + self.memory[name] + sub * self.memory.p_row + (channel << 2)
        store_shared(Float32, at, values)

    # -- sums of gates ------------------------------------------------------------------------

    @cute.jit
    def store_sums(
        self, smem: Int32, rows: Any, length: Int32, A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None, head: Int32, lower_bound: Float32,
    ) -> None:  # fmt: skip
        """Store P and the input of `finish_sums`."""
        thread, _, _ = cute.arch.thread_idx()
        raw = self.inputs.load(rows, length)
        a, bias = self.inputs.load_parameters(A_log, dt_bias, head)
        self.inputs.blank(raw, length)
        if thread < self.inputs.num_threads:
            sub, channel = self._place()
            gates = self.inputs.gates(raw, self.inputs.rate(a), bias, lower_bound)
            total = [Float32(0.0), Float32(0.0)]
            sums = [total]
            for t in cutlass.range_constexpr(1, SUB_CHUNK):
                total = [total[0] + gates[t][0], total[1] + gates[t][1]]
                sums.append(total)
            for t in cutlass.range_constexpr(SUB_CHUNK):
                place = self.memory.p_place(sub * SUB_CHUNK + t, channel)
                store_shared(Float32, smem + place, sums[t])
            self._put(smem, "first", sub, channel, gates[0])
            self._put(smem, "steps", sub, channel, total)
            if cutlass.const_expr(self.spec.dtype == "bfloat16"):
                first = first_outside(sums)
                if (thread & (WARP_SIZE - 1)) == 0:
                    at = smem + self.memory["out_of_range"] + (thread >> 5) * 4
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
                self._put(smem, "steps", b, thread, [steps[b]])
                self._put(smem, "to_end", b, thread, [to_end])

    def rows_in_range(self, smem: Any, b: Any) -> Any:
        """Return how many rows of sub-chunk b are in range, from the first on."""
        if self.spec.dtype != "bfloat16":
            return Int32(0)
        warps = self.inputs.pairs // WARP_SIZE
        found = load_shared(Int32, smem + self.memory["out_of_range"] + b * (4 * warps), warps)
        rows = found[0]
        for other in found[1:]:
            rows = cutlass.min(rows, other)
        return rows

    # -- gradients ----------------------------------------------------------------------------

    @cute.jit
    def store(
        self, smem: Int32, rows: Any, target: Any, length: Int32, A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None, head: Int32, lower_bound: Float32,
    ) -> None:  # fmt: skip
        """Store dg, and the sub-chunks' sums of the gradients of A_log and dt_bias."""
        thread, _, _ = cute.arch.thread_idx()
        raw = self.inputs.load(rows, length)
        a, bias = self.inputs.load_parameters(A_log, dt_bias, head)
        dG = cute.make_rmem_tensor((2 * SUB_CHUNK,), Float32)
        if thread < self.inputs.num_threads:
            sub, channel = self._place()
            total = [Float32(0.0), Float32(0.0)]
            for n in cutlass.range_constexpr(SUB_CHUNK):
                t = SUB_CHUNK - 1 - n
                x = self.memory.load_p(smem, sub * SUB_CHUNK + t, channel, 2)
                for e in cutlass.range_constexpr(2):
                    dG[2 * t + e] = x[e]
                    total[e] = total[e] + x[e]
            self._put(smem, "later", sub, channel, total)
        cute.arch.sync_threads()
        if thread < self.inputs.num_threads:
            sub, channel = self._place()
            running = self._after(smem, sub, channel)
            rate = self.inputs.rate(a)
            of_A_log = [Float32(0.0), Float32(0.0)]
            of_dt_bias = [Float32(0.0), Float32(0.0)]
            registers = self.inputs.registers
            start = target.start + Int64(channel * (2 * registers))
            for n in cutlass.range_constexpr(SUB_CHUNK):
                t = SUB_CHUNK - 1 - n
                row = sub * SUB_CHUNK + t
                running = [running[e] + dG[2 * t + e] for e in range(2)]
                g = self.inputs.pair(raw, t)
                found = [
                    log_decay_gradients(
                        self.spec.gate, running[e], g[e], rate, bias[e], lower_bound
                    )
                    for e in range(2)
                ]
                if row < length:
                    at = start + row_offset(row, target.pitch)
                    dg = [found[e][0] for e in range(2)]
                    if cutlass.const_expr(registers == 2):
                        store_global(Float32, at, dg)
                    else:
                        store_global(Int32, at, [pack(self.inputs.dtype, *dg)])
                    of_dt_bias = [of_dt_bias[e] + found[e][0] for e in range(2)]
                    of_A_log = [of_A_log[e] + found[e][1] for e in range(2)]
            if cutlass.const_expr(self.spec.has_A_log):
                self._put(smem, "of_A_log", sub, channel, of_A_log)
            if cutlass.const_expr(self.spec.has_dt_bias):
                self._put(smem, "of_dt_bias", sub, channel, of_dt_bias)

    @cute.jit
    def _after(self, smem: Int32, sub: Int32, channel: Int32) -> Any:
        """The sum of dG over the tokens after a sub-chunk, with the state's term."""
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
        """Store the parts of the gradients of A_log and dt_bias that the chunk has in the CTA's
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

    def _sum(self, smem: Any, name: str, channel: Any) -> Any:
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
