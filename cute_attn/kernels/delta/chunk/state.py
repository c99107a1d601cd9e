"""A transposed state in registers, and its products.

A warp has 16 columns of V and all of K: S^T, 16 by K, as accumulators in the layout of m16n8k16
(see `common.ptx.mma`). Rounded to 16 bits, the accumulators are the left operand of the next
product without moving between threads. That product's results become a left operand in the same
way. Right operands are a chunk's 64 rows in shared memory, in sub-tiles of 64 columns with TMA's
swizzle.

Products run on `mma.sync`, or on `wgmma` (sm_90a), which distributes fragments over threads as
`mma.sync` does. `times_rows` and `times_columns` start a wgmma, and `done` waits for the wgmma. All
methods run on the device.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Numeric

from ...common.ptx import wgmma
from ...common.ptx.convert import pack
from ...common.ptx.memory import load_shared
from ...common.ptx.mma import mma
from ...common.spec import WARP_SIZE
from .spec import CHUNK
from .tiles import (
    FRAGMENT_ROWS,
    LINE_BYTES,
    SUB_TILE_BYTES,
    right_fragments,
    right_fragments_of_rows,
    right_offsets,
)

STEP = 16  # extent of k in one MMA
SIGNS = -0x7FFF8000  # the sign bits of a register's two elements


class TransposedState:
    """The operations on a state that is carried from chunk to chunk.

    Attributes:
        dtype: dtype of operands.
        head_dim_k: K.
        wgmma: whether products run on `wgmma`.
        sub_tile_step: stride, in bytes, of the sub-tiles that `times_rows` reads.
    """

    def __init__(
        self,
        dtype: type[Numeric],
        head_dim_k: int,
        products: str,
        sub_tile_step: int = SUB_TILE_BYTES,
    ):
        self.dtype = dtype
        self.head_dim_k = head_dim_k
        self.wgmma = products == "wgmma"
        self.sub_tile_step = sub_tile_step

    # -- registers ----------------------------------------------------------------------------

    def empty(self) -> cute.Tensor:
        return cute.make_rmem_tensor((FRAGMENT_ROWS * self.head_dim_k // WARP_SIZE,), Float32)

    def values(self, x: cute.Tensor) -> list[Any]:
        return [x[i] for i in range(cute.size(x))]

    def assign(self, x: cute.Tensor, values: list[Any]) -> None:
        for i, value in enumerate(values):
            x[i] = value

    def operand(self, x: list[Any]) -> list[Any]:
        """Round accumulators of 16 by n to the left operand of the next product: 4 registers for
        each 16 of n; for each 8 of n, first rows 0 to 7, then rows 8 to 15."""
        return [pack(self.dtype, x[i], x[i + 1]) for i in range(0, len(x), 2)]

    def negated(self, a: list[Any]) -> list[Any]:
        """Negate an operand."""
        return [x ^ Int32(SIGNS) for x in a]

    def decayed(self, state: cute.Tensor, decay: Any) -> list[Any]:
        """Return S^T Diag(decay); `decay` is an address in shared memory."""
        at = decay + ((cute.arch.lane_idx() & 3) << 3)
        values = []
        for j in range(self.head_dim_k // 8):
            d = load_shared(Float32, at + j * 32, 2)
            values += [state[4 * j + i] * d[i % 2] for i in range(4)]
        return values

    # -- products -----------------------------------------------------------------------------

    def times_rows(
        self, a: list[Any], base: Int32, *, triangular: bool = False, c: list[Any] | None = None
    ) -> list[Any]:
        """Start c + a m^T, 16 by 64, with m the 64 rows at `base`. With `triangular`, m must be
        lower triangular, and blocks above its diagonal may be skipped."""
        steps = range(len(a) // 4)
        if self.wgmma:
            first = wgmma.rows_descriptor(base)
            offsets = [s % 4 * 2 * STEP + s // 4 * self.sub_tile_step for s in steps]
            descriptors = [first + (offset >> 4) for offset in offsets]
            return wgmma.product(self.dtype, c, a, descriptors, CHUNK, columns=False)
        count = FRAGMENT_ROWS * CHUNK // WARP_SIZE
        result = [Float32(0.0)] * count if c is None else list(c)
        for s in steps:
            for j in range(s if triangular else 0, CHUNK // 16):
                b = right_fragments_of_rows(base, 16 * j, s, self.sub_tile_step)
                self._add(result, 8 * j, a[4 * s : 4 * s + 4], b)
        return result

    def times_columns(
        self, a: list[Any], base: Int32, c: list[Any] | None = None, *, columns: int = 0,
        sub_tile_step: int = SUB_TILE_BYTES, triangular: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Start c + a m. m is the 64 rows at `base`, of `columns` elements (0 stands for K), in
        sub-tiles `sub_tile_step` bytes apart; `triangular` as in `times_rows`."""
        columns = columns or self.head_dim_k
        steps = range(CHUNK // STEP)
        if self.wgmma:
            first = wgmma.columns_descriptor(base, sub_tile_step)
            descriptors = [first + (s * STEP * LINE_BYTES >> 4) for s in steps]
            return wgmma.product(self.dtype, c, a, descriptors, columns, columns=True)
        count = FRAGMENT_ROWS * columns // WARP_SIZE
        result = [Float32(0.0)] * count if c is None else list(c)
        offsets = right_offsets()
        for s in steps:
            for j in range(s + 1 if triangular else columns // 16):
                b = right_fragments(base, offsets, s, j, sub_tile_step)
                self._add(result, 8 * j, a[4 * s : 4 * s + 4], b)
        return result

    def done(self, c: list[Any], *, pending: int = 0) -> list[Any]:
        """Return the result of a product, once at most `pending` later products are unfinished."""
        return wgmma.wait(c, pending) if self.wgmma else c

    def _add(self, c: list[Any], at: int, a: list[Any], b: Int32) -> None:
        """c += a b, for the 16 columns of c whose accumulators begin at `at`."""
        for i in range(2):
            n = at + 4 * i
            c[n : n + 4] = mma(self.dtype, c[n : n + 4], a, b[2 * i : 2 * i + 2])

    # -- memory -------------------------------------------------------------------------------

    def load(
        self, state: cute.Tensor, source: cute.Tensor | None, v_first: bool, sequence: Int32,
        head: Int32, first_v: Int32,
    ) -> None:  # fmt: skip
        """Load a head's matrix of `source`, `[N, HV, K, V]` or with v_first `[N, HV, V, K]`; zeros
        if `source` is None. first_v is the warp's first column of V."""
        if source is None:
            state.fill(0.0)
            return
        lane = cute.arch.lane_idx()
        for i in range(cute.size(state)):
            k, v = self.element(i, first_v, lane)
            row, column = (v, k) if v_first else (k, v)
            state[i] = Float32(source[sequence, head, row, column])

    def store(
        self, state: cute.Tensor, target: cute.Tensor | None, v_first: bool, sequence: Int32,
        head: Int32, first_v: Int32,
    ) -> None:  # fmt: skip
        """Store to `target`, unless it is None, in the layout of `load`."""
        if target is None:
            return
        thread, _, _ = cute.arch.thread_idx()
        lane = thread & (WARP_SIZE - 1)  # computed again to free `load`'s addresses
        for i in range(cute.size(state)):
            k, v = self.element(i, first_v, lane)
            row, column = (v, k) if v_first else (k, v)
            target[sequence, head, row, column] = state[i].to(target.element_type)

    def element(self, i: int, first_v: Int32, lane: Int32) -> tuple[Any, Any]:
        """Return (k, v) of a lane's i-th accumulator of S^T."""
        k = i // 4 * 8 + ((lane & 3) << 1) + i % 2
        return k, first_v + (lane >> 2) + i % 4 // 2 * 8
