"""Combines the results of splits: of parts of the keys, each with an attention output of its own.

    lse = log(sum_i exp(lse_i) + exp(sink))
    o   = sum_i exp(lse_i - lse) o_i         in float32, in the order of the splits, rounded once

A split without visible keys has lse_i = -inf, and its o_i is not read. If no split has any, the row
is 0, and its lse is the sink, or -inf without one.

    warp (row of a head)
      log-sum-exps  a lane for each 32nd split; the maximum and the sum through shuffles
      outputs       each lane has head_dim / 32 columns of all splits

The kernel is bound by memory bandwidth, and reads each o_i once. It runs on sm_80 and newer.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.runtime import make_fake_stream

from ..common.arguments import fake_contiguous, fake_rows, fake_strided
from ..common.dtypes import DTYPE
from ..common.numbers import INF, LN_2, LOG2_E
from ..common.ptx.memory import load_global
from ..common.spec import WARP_SIZE
from .spec import CombineSpec

NUM_WARPS = 4
VECTOR = 4  # float32 of a load
UNROLL = 4  # loads of a lane in flight


class Combine:
    """The kernel for one CombineSpec; see the module's docstring."""

    def __init__(self, spec: CombineSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.columns = spec.head_dim // WARP_SIZE  # of a lane

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        spec = self.spec
        rows = (cute.sym_int(), cute.sym_int(), cute.sym_int())
        splits = cute.sym_int()
        return (
            fake_rows(Float32, (splits, *rows, spec.head_dim)),
            fake_strided(Float32, (splits, *rows)),
            fake_rows(self.dtype, (*rows, spec.head_dim)),
            fake_strided(Float32, rows) if spec.lse else None,
            None
            if spec.sink_dtype == "none"
            else fake_contiguous(DTYPE[spec.sink_dtype], (rows[-1],)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        o_splits: cute.Tensor,
        lse_splits: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        sink: cute.Tensor | None,
        stream: Any,
    ) -> None:
        """Launch the kernel.

        Args:
            o_splits: `[splits, batch, seqlen, heads, head_dim]`, float32.
            lse_splits: `[splits, batch, seqlen, heads]`, float32.
            o: `[batch, seqlen, heads, head_dim]`.
            lse: `[batch, seqlen, heads]`, float32, or None.
            sink: `[heads]`, or None.
        """
        rows = Int64(o.shape[0]) * o.shape[1] * o.shape[2]
        self.kernel(o_splits, lse_splits, o, lse, sink, rows).launch(
            grid=[cutlass.Int32((rows + (NUM_WARPS - 1)) // NUM_WARPS), 1, 1],
            block=[NUM_WARPS * WARP_SIZE, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        o_splits: cute.Tensor,
        lse_splits: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor | None,
        sink: cute.Tensor | None,
        rows: Int64,
    ) -> None:
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        index = Int64(block) * NUM_WARPS + warp
        if index < rows:
            _, seqlen, heads, _ = o.shape
            row = index // heads
            head = cutlass.Int32(index - row * heads)
            sequence = cutlass.Int32(row // seqlen)
            token = cutlass.Int32(row - Int64(sequence) * seqlen)
            of_row = lse_splits[None, sequence, token, head]
            own_sink = None
            if cutlass.const_expr(sink is not None):
                own_sink = Float32(sink[head])
            maximum, scale, log_sum = self.log_sum(of_row, own_sink)
            if cutlass.const_expr(lse is not None):
                if lane == 0:
                    lse[sequence, token, head] = log_sum
            total = self.sum_outputs(
                o_splits[None, sequence, token, head, None], of_row, maximum, scale
            )
            rounded = cute.make_rmem_tensor((self.columns,), self.dtype)
            rounded.store(total.load().to(self.dtype))
            own = cute.local_tile(o[sequence, token, head, None], (self.columns,), (lane,))
            cute.autovec_copy(rounded, own)

    @cute.jit
    def log_sum(self, lse: cute.Tensor, sink: Float32 | None) -> tuple[Float32, Float32, Float32]:
        """(the splits' largest log-sum-exp, the factor of outputs relative to it, that of all)."""
        lane = cute.arch.lane_idx()
        maximum = Float32(-INF)
        for i in cutlass.range(lane, lse.shape[0], WARP_SIZE, unroll=1):
            maximum = cute.arch.fmax(maximum, lse[i], nan=True)
        for step in (1, 2, 4, 8, 16):
            other = cute.arch.shuffle_sync_bfly(maximum, step)
            maximum = cute.arch.fmax(maximum, other, nan=True)
        total = Float32(0.0)
        for i in cutlass.range(lane, lse.shape[0], WARP_SIZE, unroll=1):
            if lse[i] != -INF:
                total += relative(lse[i], maximum)
        for step in (1, 2, 4, 8, 16):
            total += cute.arch.shuffle_sync_bfly(total, step)
        scale, log_sum = Float32(0.0), Float32(-INF)
        if cutlass.const_expr(sink is not None):
            log_sum = sink
        if maximum != -INF:
            highest, whole, own = maximum, total, Float32(1.0)
            if cutlass.const_expr(sink is not None):
                highest = cute.arch.fmax(maximum, sink, nan=True)
                own = relative(maximum, highest)
                whole = total * own + cute.math.exp2((sink - highest) * LOG2_E, fastmath=True)
            scale = own / whole
            log_sum = highest + cute.math.log2(whole, fastmath=True) * LN_2
        return maximum, scale, log_sum

    @cute.jit
    def sum_outputs(
        self, o: cute.Tensor, lse: cute.Tensor, maximum: Float32, scale: Float32
    ) -> cute.Tensor:
        """The lane's columns of the splits' outputs, added up."""
        first = cute.arch.lane_idx() * self.columns
        total = cute.make_rmem_tensor((self.columns,), Float32)
        total.fill(0.0)
        for i in cutlass.range(lse.shape[0], unroll=UNROLL):
            weight = Float32(0.0)
            if lse[i] != -INF:
                weight = relative(lse[i], maximum) * scale
            if weight != 0.0:
                at = (o.iterator + (Int64(i) * o.stride[0] + first)).toint()
                for j in cutlass.range_constexpr(0, self.columns, VECTOR):
                    count = min(VECTOR, self.columns - j)
                    values = load_global(Float32, at + 4 * j, count)
                    for c in cutlass.range_constexpr(count):
                        total[j + c] = cute.math.fma(values[c], weight, total[j + c])
        return total


def relative(x: Any, maximum: Any) -> Any:
    """exp(x - maximum), also where both are infinity."""
    ratio = cute.math.exp2((x - maximum) * LOG2_E, fastmath=True)
    return cutlass.select_(x == maximum, Float32(1.0), ratio)
