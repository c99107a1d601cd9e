"""The gate, and its sum from the start of each chunk: G, in base 2 and float32.

The kernel is bound by memory bandwidth. A thread holds 4 channels of 8 tokens, and issues all loads
before the first use. The chunk's 8 groups of 8 tokens exchange their sums through shared memory. A
token's sum depends on no later token. The groups' sums are added in double-float arithmetic,
because these sums grow as large as G, and a rounding error would stay in all later tokens.

    CTA (slot of a chunk, value head), 2 K threads
      load      8 tokens by 4 channels for each thread
      gate      `gates.log_decay`, and the sum within the group
      exchange  the groups' sums
      store     G
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ....common.arguments import fake_contiguous, fake_offsets, fake_rows
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.numbers import LOG2_E
from ....common.ptx.memory import (
    load_global,
    load_shared,
    shared_address,
    store_global,
    store_shared,
)
from ....common.smem import Buffer, SharedMemory
from ...gates import SMALLEST_LOG2_DECAY, log_decay, rate_of
from ..chunks import chunk_place, num_slots, row_address, row_bytes, slot_and_head
from ..spec import CHUNK, GateSpec
from ..tiles import (
    load_floats,
)

CHANNELS = 4  # channels per thread
ROWS = 8  # tokens per thread
GROUPS = CHUNK // ROWS


class Arguments(NamedTuple):
    """The kernel's arguments."""

    g: cute.Tensor
    A_log: cute.Tensor | None
    dt_bias: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    out: cute.Tensor
    lower_bound: Float32


class KdaGateCumsum:
    """The kernel for one GateSpec; see the module's docstring."""

    def __init__(self, spec: GateSpec):
        self.spec = spec
        self.gate_dtype = DTYPE[spec.gate_dtype]
        self.threads_a_row = spec.head_dim_k // CHANNELS
        self.num_threads = GROUPS * self.threads_a_row
        self.memory = SharedMemory(Buffer("sums", Float32, spec.head_dim_k, stages=GROUPS))
        self.smem_bytes = self.memory.nbytes

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        batch, tokens, heads = (cute.sym_int() for _ in range(3))
        shape = (batch, tokens, heads, spec.head_dim_k)
        A_log = dt_bias = None
        if spec.has_A_log:
            A_log = fake_contiguous(Float32, (heads,))
        if spec.has_dt_bias:
            dt_bias = fake_contiguous(Float32, (heads, spec.head_dim_k), 16)
        return placeholders(
            Arguments(
                g=fake_rows(self.gate_dtype, shape),
                A_log=A_log,
                dt_bias=dt_bias,
                cu_seqlens=fake_offsets(spec.index_dtype),
                out=fake_rows(Float32, shape),
                lower_bound=Float32(0.0),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
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
        slot, head = slot_and_head(x.g.shape[2])
        place = chunk_place(slot, x.g.shape[1], x.cu_seqlens)
        sums = shared_address(self.memory.allocate().sums)
        if place.valid:
            self.chunk(x.g, x.A_log, x.dt_bias, x.out, x.lower_bound, place, head, sums)

    @cute.jit
    def chunk(
        self,
        g: cute.Tensor,
        A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        out: cute.Tensor,
        lower_bound: Float32,
        place: Any,
        head: Int32,
        sums: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        shift = self.threads_a_row.bit_length() - 1
        group = Int32(Uint32(thread) >> shift)
        channel = (thread & (self.threads_a_row - 1)) * CHANNELS
        first = group * ROWS

        # Past the end, the last token is read again; this token enters only sums that are not
        # stored.
        source = row_address(g, place.batch, place.start, head, channel)
        pitch = row_bytes(g)
        rows = []
        for i in cutlass.range_constexpr(ROWS):
            row = cutlass.min(first + i, place.length - 1)
            rows.append(load_floats(self.gate_dtype, source + Int64(row) * pitch, CHANNELS))
        rate = rate_of(A_log, head)
        bias = [Float32(0.0)] * CHANNELS
        if cutlass.const_expr(dt_bias is not None):
            at = (dt_bias.iterator + (head * self.spec.head_dim_k + channel)).toint()
            bias = list(load_global(Float32, at, CHANNELS))

        total = [Float32(0.0)] * CHANNELS
        for i in cutlass.range_constexpr(ROWS):
            for j in cutlass.range_constexpr(CHANNELS):
                gate = log_decay(self.spec.gate, rows[i][j], rate, bias[j], lower_bound)
                gate = cute.arch.fmax(gate * Float32(LOG2_E), Float32(SMALLEST_LOG2_DECAY))
                total[j] = total[j] + gate
            rows[i] = list(total)

        at = sums + channel * 4
        store_shared(Float32, at + group * (self.spec.head_dim_k * 4), total)
        cute.arch.sync_threads()
        before = [(Float32(0.0), Float32(0.0))] * CHANNELS
        for i in cutlass.range_constexpr(GROUPS - 1):
            theirs = load_shared(Float32, at + i * self.spec.head_dim_k * 4, CHANNELS)
            for j in cutlass.range_constexpr(CHANNELS):
                counted = cutlass.select_(i < group, theirs[j], Float32(0.0))
                before[j] = add_exactly(before[j], counted)

        target = row_address(out, place.batch, place.start, head, channel)
        pitch = row_bytes(out)
        for i in cutlass.range_constexpr(ROWS):
            if first + i < place.length:
                store_global(
                    Float32,
                    target + Int64(first + i) * pitch,
                    [high + (low + x) for (high, low), x in zip(before, rows[i], strict=True)],
                )


def add_exactly(total: tuple[Any, Any], x: Any) -> tuple[Any, Any]:
    """total + x by Knuth's two-sum; `total` and the result are (float32, its rounding error)."""
    high, low = total
    result = high + x
    of_x = result - high
    return result, low + ((high - (result - of_x)) + (x - of_x))
