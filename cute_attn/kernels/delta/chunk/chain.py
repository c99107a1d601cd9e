"""States and transitions of spans, carried through the transitions of other spans.

A transition [B | M] is stored as rows of K, the V rows of B first. A row s of a matrix follows a
transition as s' = s M + b, where b is the row of B with the number of s, or 0 for rows from V on.
So a chain of transitions needs no other row, and one launch computes a whole chain. Products and
sums are float32, in a fixed order.

    CTA (tile of rows, value head, chain of a batch entry)
      share     the tile's rows in shared memory
      multiply  a thread has one column: its part of M from global memory, rows from shared memory

Runs on sm_80 and newer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.arguments import fake_contiguous, fake_matrices
from ...common.entry import entry, gathered, placeholders
from ...common.ptx.memory import load_global, load_shared, shared_address, store_shared
from ...common.smem import Buffer, SharedMemory
from .spec import ChainSpec

NUM_THREADS = 128
ROWS = 16  # of a thread
STEP = 16  # loads of M in flight


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        start: `[batch, starts, HV, rows, K]`, float32; None: all chains start from 0.
        moves: `[batch, moves, HV, V + K, K]`, float32.
        steps: int32 `[chains, steps, 2]`, pairs of a matrix to take and a place in `out` to write,
            -1 for none. Step 0 takes a matrix of `start`, later steps take one of `moves`.
        out: `[batch, places, HV, rows, K]`, float32.
    """

    start: cute.Tensor | None
    moves: cute.Tensor
    steps: cute.Tensor
    out: cute.Tensor


class TransitionChain:
    """The kernel for one ChainSpec; see the module's docstring."""

    def __init__(self, spec: ChainSpec):
        self.spec = spec
        self.groups = NUM_THREADS // spec.head_dim_k  # threads of a column
        self.rows = ROWS * self.groups  # of a CTA
        assert spec.head_dim_v % self.rows == 0 and spec.head_dim_k % self.rows == 0
        self.smem = SharedMemory(
            Buffer("rows", Float32, self.rows * spec.head_dim_k, holds="the tile's rows")
        )

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        batch, heads, rows = (cute.sym_int() for _ in range(3))

        def matrices(rows: Any) -> cute.Tensor:
            return fake_matrices((batch, cute.sym_int(), heads), (rows, spec.head_dim_k))

        return placeholders(
            Arguments(
                start=matrices(rows) if spec.has_start else None,
                moves=matrices(spec.head_dim_v + spec.head_dim_k),
                steps=fake_contiguous(Int32, (cute.sym_int(), cute.sym_int(), 2)),
                out=matrices(rows),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        a, stream = gathered(Arguments, args)
        self.kernel(a).launch(
            grid=[
                a.out.shape[3] // self.rows,
                a.out.shape[2],
                a.out.shape[0] * a.steps.shape[0],
            ],
            block=[NUM_THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        tile, head, at = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        dim_k, dim_v = self.spec.head_dim_k, self.spec.head_dim_v
        batch, chain = at // x.steps.shape[0], at % x.steps.shape[0]
        column = thread % dim_k
        row = tile * self.rows + thread // dim_k * ROWS  # the thread's first row
        smem = shared_address(self.smem.allocate().rows)
        own = smem + (thread // dim_k) * (ROWS * dim_k * 4)

        values = cute.make_rmem_tensor((ROWS,), Float32)
        values.fill(0.0)
        if cutlass.const_expr(self.spec.has_start):
            start = x.start[batch, x.steps[chain, 0, 0], head, None, None]
            for i in cutlass.range_constexpr(ROWS):
                values[i] = start[row + i, column]
        self.store(x, values, batch, chain, Int32(0), head, row, column)
        for step in cutlass.range(1, x.steps.shape[1], unroll=1):
            move = x.steps[chain, step, 0]
            if move >= 0:
                cute.arch.sync_threads()  # all threads have read the rows of the step before
                for i in cutlass.range_constexpr(ROWS):
                    store_shared(Float32, own + (i * dim_k + column) * 4, [values[i]])
                cute.arch.sync_threads()
                of = x.moves[batch, move, head, None, None]
                values.fill(0.0)
                if row < dim_v:
                    for i in cutlass.range_constexpr(ROWS):
                        values[i] = of[row + i, column]
                m = (of.iterator + (dim_v * dim_k + column)).toint()
                for k in cutlass.range(0, dim_k, STEP, unroll=1):
                    factors = [
                        load_global(Float32, m + Int64((k + j) * (dim_k * 4)))[0]
                        for j in range(STEP)
                    ]
                    for i in cutlass.range_constexpr(ROWS):
                        total = values[i]
                        for j in cutlass.range_constexpr(0, STEP, 4):
                            s = load_shared(Float32, own + (i * dim_k + k + j) * 4, 4)
                            for n in cutlass.range_constexpr(4):
                                total = cute.math.fma(s[n], factors[j + n], total)
                        values[i] = total
                self.store(x, values, batch, chain, step, head, row, column)

    @cute.jit
    def store(
        self, x: Arguments, values: cute.Tensor, batch: Int32, chain: Int32, step: Int32,
        head: Int32, row: Int32, column: Int32,
    ) -> None:  # fmt: skip
        """Write the thread's rows, if the step has a place in `out`."""
        place = x.steps[chain, step, 1]
        if place >= 0:
            out = x.out[batch, place, head, None, None]
            for i in cutlass.range_constexpr(ROWS):
                out[row + i, column] = values[i]
