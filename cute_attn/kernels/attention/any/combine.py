"""Combines the results of splits. A split is a part of the keys, and has its own attention output.

The formula is that of `parts.merge`; o is rounded once.

    CTA (COLUMNS columns of a row of a head), 4 warps
      outputs       SLICES threads share the sum of 4 columns: thread s has splits s, s + SLICES ...
      log-sum-exps  in each warp, a lane for each 32nd split; maximum and sum through shuffles
      reduce        the slices' sums, in order, through shared memory

The kernel is bound by latency, because its data, a few hundred KB, lie in L2. So a thread has
several loads in flight, and the loads do not wait for the log-sum-exps. The order of additions
depends on the number of splits alone. The kernel runs on sm_80 and newer.

With `dependent`, the CTAs start while the forward kernel is running, and wait for its end. This
hides the launch (sm_90 and newer).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.arguments import fake_contiguous, fake_rows, fake_strided
from ...common.dtypes import DTYPE
from ...common.entry import entry, gathered, placeholders
from ...common.ptx.grids import wait_for_previous
from ...common.smem import Buffer, SharedMemory
from ..parts.merge import VECTOR, Parts, add_up, finish
from ..spec import CombineSpec

NUM_THREADS = 256
COLUMNS = 64  # columns of a CTA
THREADS_OF_SLICE = COLUMNS // VECTOR
SLICES = NUM_THREADS // THREADS_OF_SLICE


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
        splits = Parts(
            o=at, lse=at_lse, o_step=rows.stride[0] * 4, lse_step=of_rows.stride[0] * 4,
            count=of_rows.shape[0],
        )  # fmt: skip
        own = cute.make_rmem_tensor((VECTOR, 1), Float32)
        (maximum,), (total,) = add_up([splits], slice_, SLICES, own)
        cute.autovec_copy(own[None, 0], sums[None, vector, slice_])
        if vector == 0:
            maxima[slice_] = maximum
            totals[slice_] = total
        cute.arch.sync_threads()
        if slice_ == 0:
            own_sink = None
            if cutlass.const_expr(x.sink is not None):
                own_sink = Float32(x.sink[head])
            of_slices = [sums[None, vector, i] for i in range(SLICES)]
            log_sum = finish(
                of_slices, [maxima[i] for i in range(SLICES)], [totals[i] for i in range(SLICES)],
                own_sink, own[None, 0],
            )  # fmt: skip
            if cutlass.const_expr(x.lse is not None):
                if block == 0 and vector == 0:
                    x.lse[sequence, token, head] = log_sum
            rounded = cute.make_rmem_tensor((VECTOR,), self.dtype)
            rounded.store(own.load().to(self.dtype))
            columns = cute.local_tile(x.o[sequence, token, head, None], (COLUMNS,), (block,))
            cute.autovec_copy(rounded, cute.local_tile(columns, (VECTOR,), (vector,)))
