"""Sums of partial results in a fixed order: of dK and dV over splits, of dsink over tiles, and of
dA_log and ddt_bias over chunks.

    out[row, column] = sum_i partials[i, row, column]        in float32, rounded once

`slices` threads share an element's sum: thread s adds partials s, s + slices, ... in order, and
then the threads' sums are added in order. So the bits depend only on the number of partials. The
kernel reads each partial once, and is bound by memory bandwidth.

    CTA (THREADS / slices vectors of consecutive elements), 8 warps
      sum     a thread's partials of its vector
      reduce (with slices) the threads' sums, through shared memory

Runs on sm_80 and newer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .arguments import fake_contiguous
from .dtypes import DTYPE
from .entry import entry, gathered, placeholders
from .ptx.memory import load_global
from .smem import Buffer, SharedMemory
from .sum_partials_spec import SumPartialsSpec

NUM_THREADS = 256
UNROLL = 4  # loads in flight per thread


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        partials: `[n, rows, columns]`, float32.
        out: `[rows, columns]`.
    """

    partials: cute.Tensor
    out: cute.Tensor


class SumPartials:
    """The kernel for one SumPartialsSpec; see the module's docstring."""

    def __init__(self, spec: SumPartialsSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.vectors = NUM_THREADS // spec.slices  # vectors that a CTA sums
        self.smem = SharedMemory(
            Buffer("sums", Float32, NUM_THREADS, spec.vector, holds="sums of the slices")
        )

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        rows, vector = cute.sym_int(), self.spec.vector
        columns = cute.sym_int(divisibility=vector)
        size = vector * self.dtype.width // 8
        return placeholders(
            Arguments(
                partials=fake_contiguous(Float32, (cute.sym_int(), rows, columns), 4 * vector),
                out=fake_contiguous(self.dtype, (rows, columns), size),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        elements = Int64(a.out.shape[0]) * a.out.shape[1]
        of_cta = self.vectors * self.spec.vector
        self.kernel(a, elements).launch(
            grid=[Int32((elements + (of_cta - 1)) // of_cta), 1, 1],
            block=[NUM_THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments, elements: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        vector = self.spec.vector
        slice_, within = thread // self.vectors, thread % self.vectors
        first = (Int64(cta) * self.vectors + within) * vector
        total = cute.make_rmem_tensor((vector,), Float32)
        total.fill(0.0)
        if first < elements:
            for i in cutlass.range(slice_, x.partials.shape[0], self.spec.slices, unroll=UNROLL):
                at = (x.partials.iterator + (Int64(i) * elements + first)).toint()
                values = load_global(Float32, at, vector)
                for j in cutlass.range_constexpr(vector):
                    total[j] += values[j]
        if cutlass.const_expr(self.spec.slices > 1):
            sums = cute.make_tensor(
                self.smem.allocate().sums,
                cute.make_layout((vector, self.vectors, self.spec.slices)),
            )
            cute.autovec_copy(total, sums[None, within, slice_])
            cute.arch.sync_threads()
            for other in cutlass.range_constexpr(1, self.spec.slices):
                for j in cutlass.range_constexpr(vector):
                    total[j] += sums[j, within, other]
        if slice_ == 0 and first < elements:
            rounded = cute.make_rmem_tensor((vector,), self.dtype)
            rounded.store(total.load().to(self.dtype))
            target = cute.make_tensor(x.out.iterator + first, cute.make_layout(vector))
            cute.autovec_copy(rounded, target)
