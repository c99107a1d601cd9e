"""The gradients of the gate's inputs, from the gradients of its sums within chunks.

dG is the gradient of the sums in natural units. The gradient of a token's gate is the sum of dG
from this token to the chunk's end. Work is distributed over threads as in `gate_cumsum`. Each chunk
and head stores its parts of the gradients of A_log and dt_bias, and `sum_partials` adds them up.

    CTA (slot of a chunk, value head), 2 K threads
      load      8 tokens by 4 channels of dG and g for each thread
      sum       from the last of the 8 tokens to the first
      exchange  the groups' sums
      gate      `gates.accurate_log_decay_gradients`; store dg
      reduce    the chunk's parts of dA_log and ddt_bias
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ....common.arguments import fake_contiguous, fake_offsets, fake_rows
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.ptx.convert import pack_all
from ....common.ptx.memory import (
    load_global,
    load_shared,
    shared_address,
    store_global,
    store_shared,
)
from ....common.smem import Buffer, SharedMemory
from ....common.spec import WARP_SIZE
from ...gates import accurate_log_decay_gradients, rate_of
from ..chunks import chunk_place, num_slots, row_address, row_bytes, slot_and_head
from ..spec import GateSpec
from ..tiles import load_floats
from .gate_cumsum import CHANNELS, GROUPS, ROWS


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        dA_log: the chunks' parts, `[slots, 1, HV]`; 0 for a slot without a chunk.
        ddt_bias: the chunks' parts, `[slots, HV, K]`; 0 for a slot without a chunk.
    """

    dG: cute.Tensor
    g: cute.Tensor
    A_log: cute.Tensor | None
    dt_bias: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    dg: cute.Tensor
    dA_log: cute.Tensor | None
    ddt_bias: cute.Tensor | None
    lower_bound: Float32


class KdaGateCumsumBackward:
    """The kernel for one GateSpec; see the module's docstring."""

    def __init__(self, spec: GateSpec):
        self.spec = spec
        self.gate_dtype = DTYPE[spec.gate_dtype]
        self.threads_a_row = spec.head_dim_k // CHANNELS
        self.num_threads = GROUPS * self.threads_a_row
        self.num_warps = self.num_threads // WARP_SIZE
        self.memory = SharedMemory(
            Buffer("sums", Float32, spec.head_dim_k, stages=GROUPS, holds="sums of dG"),
            Buffer("of_dt_bias", Float32, spec.head_dim_k, stages=GROUPS),
            Buffer("of_A_log", Float32, self.num_warps),
        )
        self.smem_bytes = self.memory.nbytes

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        batch, tokens, heads, slots = (cute.sym_int() for _ in range(4))
        shape = (batch, tokens, heads, spec.head_dim_k)
        A_log = dt_bias = dA_log = ddt_bias = None
        if spec.has_A_log:
            A_log = fake_contiguous(Float32, (heads,))
            dA_log = fake_contiguous(Float32, (slots, 1, heads), small=True)
        if spec.has_dt_bias:
            dt_bias = fake_contiguous(Float32, (heads, spec.head_dim_k), 16)
            of_bias = (slots, heads, spec.head_dim_k)
            ddt_bias = fake_contiguous(Float32, of_bias, 16, small=True)
        return placeholders(
            Arguments(
                dG=fake_rows(Float32, shape),
                g=fake_rows(self.gate_dtype, shape),
                A_log=A_log,
                dt_bias=dt_bias,
                cu_seqlens=fake_offsets(spec.index_dtype),
                dg=fake_rows(self.gate_dtype, shape),
                dA_log=dA_log,
                ddt_bias=ddt_bias,
                lower_bound=Float32(0.0),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        slots = num_slots(a.g.shape[0], a.g.shape[1], a.cu_seqlens)
        self.kernel(a).launch(
            grid=[slots * a.g.shape[2], 1, 1],
            block=[self.num_threads, 1, 1],
            smem=self.smem_bytes,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        thread, _, _ = cute.arch.thread_idx()
        slot, head = slot_and_head(x.g.shape[2])
        place = chunk_place(slot, x.g.shape[1], x.cu_seqlens)
        smem = cutlass.memory.SmemAllocator()
        base = shared_address(smem.allocate(self.smem_bytes, self.memory.alignment))
        if place.valid:
            self.chunk(x.dG, x.g, x.A_log, x.dt_bias, x.dg, x.lower_bound, place, head, base)
            self.store_parts(x.dA_log, x.ddt_bias, slot, head, base)
        else:
            if cutlass.const_expr(x.ddt_bias is not None):
                if thread < self.spec.head_dim_k:
                    x.ddt_bias[slot, head, thread] = Float32(0.0)
            if cutlass.const_expr(x.dA_log is not None):
                if thread == 0:
                    x.dA_log[slot, 0, head] = Float32(0.0)

    @cute.jit
    def chunk(
        self,
        dG: cute.Tensor,
        g: cute.Tensor,
        A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        dg: cute.Tensor,
        lower_bound: Float32,
        place: Any,
        head: Int32,
        base: Int32,
    ) -> None:
        """Store dg, and the threads' parts of dA_log and ddt_bias in shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        row_of_sums = self.spec.head_dim_k * 4
        shift = self.threads_a_row.bit_length() - 1
        group = Int32(Uint32(thread) >> shift)
        channel = (thread & (self.threads_a_row - 1)) * CHANNELS
        first = group * ROWS

        # Past the end, the last token is read again, and its dG replaced by 0.
        sources = [row_address(x, place.batch, place.start, head, channel) for x in (dG, g)]
        sums, gates = [], []
        for i in cutlass.range_constexpr(ROWS):
            row = Int64(cutlass.min(first + i, place.length - 1))
            sums.append(load_floats(Float32, sources[0] + row * row_bytes(dG), CHANNELS))
            gates.append(load_floats(self.gate_dtype, sources[1] + row * row_bytes(g), CHANNELS))
        rate = rate_of(A_log, head)
        bias = [Float32(0.0)] * CHANNELS
        if cutlass.const_expr(dt_bias is not None):
            at = (dt_bias.iterator + (head * self.spec.head_dim_k + channel)).toint()
            bias = list(load_global(Float32, at, CHANNELS))

        total = [Float32(0.0)] * CHANNELS
        for n in cutlass.range_constexpr(ROWS):
            i = ROWS - 1 - n
            inside = first + i < place.length
            total = [
                x + cutlass.select_(inside, y, Float32(0.0))
                for x, y in zip(total, sums[i], strict=True)
            ]
            sums[i] = total
        at = base + channel * 4
        store_shared(Float32, at + self.memory["sums"] + group * row_of_sums, total)
        cute.arch.sync_threads()
        later = [Float32(0.0)] * CHANNELS
        for n in cutlass.range_constexpr(GROUPS - 1):
            i = GROUPS - 1 - n
            theirs = load_shared(Float32, at + self.memory["sums"] + i * row_of_sums, CHANNELS)
            later = [
                x + cutlass.select_(i > group, y, Float32(0.0))
                for x, y in zip(later, theirs, strict=True)
            ]

        target = row_address(dg, place.batch, place.start, head, channel)
        of_A_log = Float32(0.0)
        of_dt_bias = [Float32(0.0)] * CHANNELS
        for i in cutlass.range_constexpr(ROWS):
            found = [
                accurate_log_decay_gradients(self.spec.gate, x + y, z, rate, b, lower_bound)
                for x, y, z, b in zip(sums[i], later, gates[i], bias, strict=True)
            ]
            inside = first + i < place.length
            for j in cutlass.range_constexpr(CHANNELS):
                x, y = (cutlass.select_(inside, f, Float32(0.0)) for f in found[j])
                of_dt_bias[j] = of_dt_bias[j] + x
                of_A_log = of_A_log + y
            if first + i < place.length:
                at_row = target + Int64(first + i) * row_bytes(dg)
                values = [x for x, _ in found]
                if cutlass.const_expr(self.gate_dtype is Float32):
                    store_global(Float32, at_row, values)
                else:
                    store_global(Int32, at_row, pack_all(self.gate_dtype, values))
        if cutlass.const_expr(self.spec.has_dt_bias):
            store_shared(Float32, at + self.memory["of_dt_bias"] + group * row_of_sums, of_dt_bias)
        if cutlass.const_expr(self.spec.has_A_log):
            for bit in cutlass.range_constexpr(5):
                of_A_log = of_A_log + cute.arch.shuffle_sync_bfly(of_A_log, offset=1 << bit)
            if thread & (WARP_SIZE - 1) == 0:
                warp = Int32(Uint32(thread) >> 5)
                store_shared(Float32, base + self.memory["of_A_log"] + warp * 4, [of_A_log])

    @cute.jit
    def store_parts(
        self,
        dA_log: cute.Tensor | None,
        ddt_bias: cute.Tensor | None,
        slot: Int32,
        head: Int32,
        base: Int32,
    ) -> None:
        """Store the chunk's parts of dA_log and ddt_bias."""
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(self.spec.has_A_log or self.spec.has_dt_bias):
            cute.arch.sync_threads()
        if cutlass.const_expr(ddt_bias is not None):
            if thread < self.spec.head_dim_k:
                total = Float32(0.0)
                for i in cutlass.range_constexpr(GROUPS):
                    at = base + self.memory["of_dt_bias"] + i * (self.spec.head_dim_k * 4)
                    total = total + load_shared(Float32, at + thread * 4)[0]
                ddt_bias[slot, head, thread] = total
        if cutlass.const_expr(dA_log is not None):
            if thread == 0:
                total = Float32(0.0)
                for i in cutlass.range_constexpr(self.num_warps):
                    total = total + load_shared(Float32, base + self.memory["of_A_log"] + 4 * i)[0]
                dA_log[slot, 0, head] = total
