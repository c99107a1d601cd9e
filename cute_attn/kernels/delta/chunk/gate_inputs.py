"""Computes a chunk's gates from their inputs. A thread has two channels of some neighbouring
tokens."""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.dtypes import DTYPE
from ...common.numbers import LOG2_E
from ...common.ptx.compiler import keep_branch
from ...common.ptx.convert import unpack
from ...common.ptx.math import exp2
from ...common.ptx.memory import load_global
from ..gates import log2_decay
from .chunks import row_offset, rows_of
from .spec import CHUNK, InputsSpec
from .sub_chunks import SUB_CHUNK

# The bits of -inf in a register of 32 bits, which holds a 16-bit -inf twice.
MINUS_INFINITY = {"float32": -0x800000, "bfloat16": -0x7F0080, "float16": -0x3FF0400}


class GateInputs:
    """Loads g, A_log and dt_bias. Threads 0 to 2 K - 1 have gates: thread t has channel
    2 (t % (K / 2)) and the next channel of sub-chunk t // (K / 2). All methods run on the device.
    """

    tokens = SUB_CHUNK  # tokens per thread

    def __init__(self, spec: InputsSpec):
        self.spec, self.dtype = spec, DTYPE[spec.gate_dtype]
        self.pairs = spec.head_dim_k // 2
        self.num_threads = self.pairs * (CHUNK // self.tokens)
        self.registers = self.dtype.width // 16  # registers for a token's two channels

    def place(self) -> tuple[Any, Any]:
        """Return the thread's first token and pair of channels."""
        thread, _, _ = cute.arch.thread_idx()
        return thread // self.pairs * SUB_CHUNK, thread % self.pairs

    @cute.jit
    def load_parameters(
        self, A_log: cute.Tensor | None, dt_bias: cute.Tensor | None, head: Int32
    ) -> Any:
        """Load A_log, and dt_bias for the thread's two channels."""
        _, pair = self.place()
        a = Float32(0.0)
        bias = (Float32(0.0), Float32(0.0))
        if cutlass.const_expr(A_log is not None):
            a = A_log[head]
        if cutlass.const_expr(dt_bias is not None):
            bias = (dt_bias[head, 2 * pair], dt_bias[head, 2 * pair + 1])
        return a, bias

    def load_gates(self, g: cute.Tensor, place: Any, head: Int32) -> Any:
        """Load a thread's part of a value head's gates of a chunk."""
        return self.load(rows_of(g, place, head), place.length)

    @cute.jit
    def load(self, rows: Any, length: Int32) -> Any:
        """Load a thread's part of g, in g's dtype. Rows past the chunk's end repeat the last
        row."""
        thread, _, _ = cute.arch.thread_idx()
        registers = self.dtype.width // 16
        raw = cute.make_rmem_tensor((self.tokens * registers,), Int32)
        if thread < self.num_threads:
            first, pair = self.place()
            source = rows.start + Int64(pair * (4 * registers))
            for t in cutlass.range_constexpr(self.tokens):
                at = cutlass.min(first + t, length - 1)
                x = load_global(Int32, source + row_offset(at, rows.pitch), registers)
                for n in cutlass.range_constexpr(registers):
                    raw[t * registers + n] = x[n]
        return raw

    @cute.jit
    def blank(self, raw: cute.Tensor, length: Int32) -> None:
        """Overwrite rows past the chunk's end with values whose gate is 0."""
        first, _ = self.place()
        blank = Int32(0 if self.spec.gate == "none" else MINUS_INFINITY[self.spec.gate_dtype])
        registers = self.dtype.width // 16
        if length < CHUNK:
            keep_branch()
            for t in cutlass.range_constexpr(self.tokens):
                for n in cutlass.range_constexpr(registers):
                    if first + t >= length:
                        raw[t * registers + n] = blank

    def rate(self, a: Any) -> Any:
        """Return exp(A_log)."""
        return exp2(a * LOG2_E) if self.spec.has_A_log else Float32(1.0)

    def gates(self, raw: cute.Tensor, rate: Any, bias: Any, lower_bound: Any) -> list[list[Any]]:
        """Return the gates of the thread's tokens, base 2."""
        return [
            [
                log2_decay(self.spec.gate, x, rate, y, lower_bound)
                for x, y in zip(self.pair(raw, t), bias, strict=True)
            ]
            for t in range(self.tokens)
        ]

    def pair(self, raw: cute.Tensor, t: int) -> tuple[Any, Any]:
        """Return g of a token, as float32."""
        if self.dtype is Float32:
            return tuple(Int32(raw[2 * t + n]).bitcast(Float32) for n in range(2))
        return unpack(self.dtype, raw[t])


class HeadGateInputs(GateInputs):
    """`GateInputs` for one gate of each value head, which both of a thread's channels get."""

    @cute.jit
    def load_parameters(
        self, A_log: cute.Tensor | None, dt_bias: cute.Tensor | None, head: Int32
    ) -> Any:
        """Load A_log and dt_bias."""
        a = Float32(0.0)
        bias = Float32(0.0)
        if cutlass.const_expr(A_log is not None):
            a = A_log[head]
        if cutlass.const_expr(dt_bias is not None):
            bias = dt_bias[head]
        return a, bias

    @cute.jit
    def load_gates(self, g: cute.Tensor, place: Any, head: Int32) -> Any:
        """Load g of a thread's tokens, as float32. Tokens past the chunk's end repeat the last
        token."""
        thread, _, _ = cute.arch.thread_idx()
        raw = cute.make_rmem_tensor((self.tokens,), Float32)
        if thread < self.num_threads:
            first, _ = self.place()
            for t in cutlass.range_constexpr(self.tokens):
                at = cutlass.min(first + t, place.length - 1)
                raw[t] = Float32(g[place.batch, place.start + at, head])
        return raw

    @cute.jit
    def blank(self, raw: cute.Tensor, length: Int32) -> None:
        """Overwrite tokens past the chunk's end with values whose gate is 0."""
        first, _ = self.place()
        if length < CHUNK:
            for t in cutlass.range_constexpr(self.tokens):
                if first + t >= length:
                    raw[t] = Float32(0.0 if self.spec.gate == "none" else -math.inf)

    def gates(self, raw: cute.Tensor, rate: Any, bias: Any, lower_bound: Any) -> list[list[Any]]:
        """Return the gates of the thread's tokens, base 2."""
        gates = (
            log2_decay(self.spec.gate, raw[t], rate, bias, lower_bound) for t in range(self.tokens)
        )
        return [[x, x] for x in gates]
