"""Combines the results of splits. A split is a part of the keys, and has its own attention output.

    lse = log(sum_i exp(lse_i) + exp(sink))
    o   = sum_i exp(lse_i - lse) o_i         in float32, rounded once

A split without visible keys has lse_i = -inf, and its o_i counts as 0 whatever it holds. If no
split has visible keys, the row is 0, and its lse is the sink, or -inf without a sink.

    CTA (COLUMNS columns of a row of a head), 4 warps
      outputs       SLICES threads share the sum of 4 columns: thread s has splits s, s + SLICES ...
      log-sum-exps  in each warp, a lane for each 32nd split; maximum and sum through shuffles
      reduce        the slices' sums, in order, through shared memory

The kernel is bound by latency, because its data, a few hundred KB, lie in L2. So a thread has
UNROLL loads in flight, and the loads do not wait for the log-sum-exps. The order of additions
depends on the number of splits alone. The kernel runs on sm_80 and newer.

With `dependent`, the CTAs start while the forward kernel is running, and wait for its end. This
hides the launch (sm_90 and newer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.arguments import fake_contiguous, fake_rows, fake_strided
from ...common.carried import Carried
from ...common.dtypes import DTYPE
from ...common.entry import entry, gathered, placeholders
from ...common.numbers import INF, LN_2, LOG2_E, NAN
from ...common.ptx.grids import wait_for_previous
from ...common.ptx.memory import load_global
from ...common.smem import Buffer, SharedMemory
from ..spec import CombineSpec

NUM_THREADS = 256
VECTOR = 4  # float32 of a load
COLUMNS = 64  # columns of a CTA
THREADS_OF_SLICE = COLUMNS // VECTOR
SLICES = NUM_THREADS // THREADS_OF_SLICE
UNROLL = 4  # loads of a thread in flight


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        o_splits: `[splits, batch, seqlen, heads, head_dim_v]`, float32.
        lse_splits: `[splits, batch, seqlen, heads]`, float32.
        o: `[batch, seqlen, heads, head_dim_v]`.
        lse: `[batch, seqlen, heads]`, float32, or None.
        sink: `[heads]`, or None.
    """

    o_splits: cute.Tensor
    lse_splits: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor | None
    sink: cute.Tensor | None


@dataclass(frozen=True)
class Splits(Carried):
    """A thread's columns of a row.

    Attributes:
        o, lse: addresses of the columns and of the log-sum-exp of split 0.
        o_step, lse_step: bytes to the next split.
        count: number of splits.
    """

    o: Int64
    lse: Int64
    o_step: Int64
    lse_step: Int64
    count: Int32


class Combine:
    """The kernel for one CombineSpec; see the module's docstring."""

    def __init__(self, spec: CombineSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.blocks = spec.head_dim_v // COLUMNS  # CTAs of a row
        self.smem = SharedMemory(
            Buffer("sums", Float32, NUM_THREADS * VECTOR, holds="sums of the slices"),
            Buffer("maxima", Float32, SLICES, holds="the log-sum-exps that they are relative to"),
            Buffer("totals", Float32, SLICES, holds="sums of the slices' exponentials"),
        )

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        spec = self.spec
        rows = (cute.sym_int(), cute.sym_int(), cute.sym_int())
        splits = cute.sym_int()
        sink = None
        if spec.sink_dtype != "none":
            sink = fake_contiguous(DTYPE[spec.sink_dtype], (rows[-1],))
        return placeholders(
            Arguments(
                o_splits=fake_rows(Float32, (splits, *rows, spec.head_dim_v)),
                lse_splits=fake_strided(Float32, (splits, *rows)),
                o=fake_rows(self.dtype, (*rows, spec.head_dim_v)),
                lse=fake_strided(Float32, rows) if spec.lse else None,
                sink=sink,
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        _, seqlen, heads, _ = a.o.shape
        rows = Int64(a.o.shape[0]) * seqlen * heads
        by_seqlen, by_heads = (cute.fast_divmod_create_divisor_v2(x) for x in (seqlen, heads))
        self.kernel(a, by_seqlen, by_heads).launch(
            grid=[Int32(rows * self.blocks), 1, 1],
            block=[NUM_THREADS, 1, 1],
            stream=stream,
            use_pdl=self.spec.dependent,
        )

    @cute.kernel
    def kernel(
        self, x: Arguments, by_seqlen: cute.FastDivmodDivisor, by_heads: cute.FastDivmodDivisor
    ) -> None:
        number, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        row, block = number // self.blocks, number % self.blocks
        row, head = divmod(row, by_heads)
        sequence, token = divmod(row, by_seqlen)
        slice_, vector = thread // THREADS_OF_SLICE, thread % THREADS_OF_SLICE
        storage = self.smem.allocate()
        shape = VECTOR, THREADS_OF_SLICE, SLICES
        sums = cute.make_tensor(storage.sums, cute.make_layout(shape))
        maxima, totals = (
            cute.make_tensor(x, cute.make_layout(SLICES)) for x in (storage.maxima, storage.totals)
        )
        rows = x.o_splits[None, sequence, token, head, None]
        at = rows.iterator.toint() + (block * COLUMNS + vector * VECTOR) * 4
        of_rows = x.lse_splits[None, sequence, token, head]
        at_lse = of_rows.iterator.toint()
        if cutlass.const_expr(self.spec.dependent):
            wait_for_previous(at | at_lse)
        splits = Splits(
            o=at, lse=at_lse, o_step=rows.stride[0] * 4, lse_step=of_rows.stride[0] * 4,
            count=of_rows.shape[0],
        )  # fmt: skip
        own = cute.make_rmem_tensor((VECTOR,), Float32)
        maximum, total = self.sum_splits(splits, slice_, own)
        cute.autovec_copy(own, sums[None, vector, slice_])
        if vector == 0:
            maxima[slice_] = maximum
            totals[slice_] = total
        cute.arch.sync_threads()
        if slice_ == 0:
            own_sink = None
            if cutlass.const_expr(x.sink is not None):
                own_sink = Float32(x.sink[head])
            log_sum = self.reduce(sums[None, vector, None], maxima, totals, own_sink, own)
            if cutlass.const_expr(x.lse is not None):
                if block == 0 and vector == 0:
                    x.lse[sequence, token, head] = log_sum
            rounded = cute.make_rmem_tensor((VECTOR,), self.dtype)
            rounded.store(own.load().to(self.dtype))
            columns = cute.local_tile(x.o[sequence, token, head, None], (COLUMNS,), (block,))
            cute.autovec_copy(rounded, cute.local_tile(columns, (VECTOR,), (vector,)))

    @cute.jit
    def sum_splits(
        self, splits: Splits, slice_: Int32, own: cute.Tensor
    ) -> tuple[Float32, Float32]:
        """Add up a thread's columns over the splits of its slice. Return the maximum of the
        log-sum-exps, and the sum of their exponentials relative to the maximum."""
        maximum, total = Float32(-INF), Float32(0.0)
        own.fill(0.0)
        last = splits.count - 1
        for first in cutlass.range(slice_, splits.count, SLICES * UNROLL, unroll=1):
            numbers = [first + i * SLICES for i in range(UNROLL)]
            # Past the last split, the last split is loaded again.
            found = [Int64(cutlass.min(number, last)) for number in numbers]
            loaded = [load_global(Float32, splits.lse + i * splits.lse_step)[0] for i in found]
            values = [load_global(Float32, splits.o + i * splits.o_step, VECTOR) for i in found]
            of_splits = [
                cutlass.select_(number > last, Float32(-INF), x)
                for number, x in zip(numbers, loaded, strict=True)
            ]
            highest = maximum
            for x in of_splits:
                highest = cute.arch.fmax(highest, x, nan=True)
            factor = weight_of(maximum, highest)
            total = total * factor
            for j in cutlass.range_constexpr(VECTOR):
                own[j] = own[j] * factor
            for i in cutlass.range_constexpr(UNROLL):
                weight = weight_of(of_splits[i], highest)
                total += weight
                for j in cutlass.range_constexpr(VECTOR):
                    value = cutlass.select_(weight == 0.0, Float32(0.0), values[i][j])
                    own[j] = cute.math.fma(value, weight, own[j])
            maximum = highest
        return maximum, total

    @cute.jit
    def reduce(
        self,
        sums: cute.Tensor,
        maxima: cute.Tensor,
        totals: cute.Tensor,
        sink: Float32 | None,
        own: cute.Tensor,
    ) -> Float32:
        """Add up the slices' sums, and return the log-sum-exp of the row."""
        highest = Float32(-INF)
        for i in cutlass.range_constexpr(SLICES):
            highest = cute.arch.fmax(highest, maxima[i], nan=True)
        maximum, total, log_sum = highest, Float32(0.0), Float32(-INF)
        if cutlass.const_expr(sink is not None):
            maximum = cute.arch.fmax(highest, sink, nan=True)
            total = weight_of(sink, maximum)
            if not (sink < INF):
                total = Float32(NAN)
            log_sum = sink
        own.fill(0.0)
        for i in cutlass.range_constexpr(SLICES):
            weight = weight_of(maxima[i], maximum)
            total = cute.math.fma(totals[i], weight, total)
            for j in cutlass.range_constexpr(VECTOR):
                own[j] = cute.math.fma(sums[j, i], weight, own[j])
        seen = total != 0.0
        if cutlass.const_expr(sink is not None):
            seen = highest != -INF  # a row without a visible key is 0, whatever the sink is
        if seen:
            inverse = 1.0 / total
            for j in cutlass.range_constexpr(VECTOR):
                own[j] = own[j] * inverse
            log_sum = maximum + cute.math.log2(total, fastmath=True) * LN_2
        return log_sum


def weight_of(x: Float32, maximum: Float32) -> Float32:
    """exp(x - maximum), also where both are infinite; 0 where x is -inf."""
    ratio = cute.math.exp2((x - maximum) * LOG2_E, fastmath=True)
    ratio = cutlass.select_(x == maximum, Float32(1.0), ratio)
    return cutlass.select_(x == -INF, Float32(0.0), ratio)
