"""Tiles of rows of head_dim elements: from global to shared memory, as fragments, and back.

A row in shared memory is `row_bytes` bytes of 16-byte units. Offsets are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric

from ..common.carried import Carried
from ..common.ptx.async_copy import copy_async
from ..common.ptx.convert import pack
from ..common.ptx.matrices import load_matrices
from ..common.ptx.memory import load_shared, store_global_where, store_shared
from ..common.spec import WARP_SIZE

UNIT_BYTES = 16


@dataclass(frozen=True)
class Rows(Carried):
    """The rows of a head in global memory: address of the first row, bytes from row to row, number
    of rows."""

    address: Int64
    pitch: Int64
    length: Int32

    @classmethod
    def of(cls, x: cute.Tensor, batch: Int32, head: Int32) -> Rows:
        """The rows of a head of x, `[B, S, H, D]`."""
        offset = Int64(batch) * x.stride[0] + Int64(head) * x.stride[2]
        return cls((x.iterator + offset).toint(), Int64(x.stride[1]) * 2, x.shape[1])


@dataclass(frozen=True)
class TileLayout:
    """The layout of tiles of rows in shared memory.

    Attributes:
        row_bytes: bytes of a row, a multiple of 128.
        swizzled: unit u of row r lies at unit u ^ (r & 7), so that the same unit of 8 rows lies
            in different banks; otherwise at unit u.
    """

    row_bytes: int
    swizzled: bool

    @property
    def pitch(self) -> int:
        """Bytes from a row to the next."""
        return self.row_bytes

    def offset(self, row: Int32, unit: Int32) -> Int32:
        """Offset of a unit."""
        if self.swizzled:
            unit = unit ^ (row & 7)
        return row * self.row_bytes + unit * UNIT_BYTES

    def moved(self, offset: Int32, rows: int, units: int) -> Int32:
        """Offset of the unit that lies `rows` rows, a multiple of 8, and `units` units further. If
        swizzled, `units` and the offset's unit must have no bit in common, so that their sum does
        not carry."""
        within, beyond = units * UNIT_BYTES % 128, units * UNIT_BYTES // 128 * 128
        if self.swizzled and within:
            offset = offset ^ within
            within = 0
        return offset + (rows * self.row_bytes + beyond + within)

    # -- global memory ------------------------------------------------------------------------

    def copy(self, shared: Int32, source: Rows, first: Int32, rows: int, num_threads: int) -> None:
        """Start the cp.async of rows first to first + rows - 1, by all threads of the CTA. Rows
        that do not exist become 0."""
        thread, _, _ = cute.arch.thread_idx()
        units = self.row_bytes // UNIT_BYTES
        row, unit = thread // units, thread % units
        offset = self.offset(row, unit)
        at = source.address + Int64(first + row) * source.pitch + Int64(unit * UNIT_BYTES)
        step = num_threads // units
        for i in range(0, rows, step):
            present = first + row + i < source.length
            # i and row have no bit in common, so that i flips bits of the swizzle.
            flip = (i & 7) * UNIT_BYTES if self.swizzled else 0
            target = (offset ^ flip) + i * self.row_bytes
            copy_async(shared + target, at + i * source.pitch, present)

    def store(
        self,
        dtype: type[Numeric],
        values: list[Float32],
        shared: Int32,
        target: Rows,
        first: Int32,
    ) -> None:
        """Store a warp's accumulators of 16 rows to global memory, 16 bytes of a row at a time,
        through 16 rows of `shared` that are this warp's own."""
        lane = cute.arch.lane_idx()
        row, pair = lane >> 2, lane & 3
        for n in range(len(values) // 4):
            for half in range(2):
                x = pack(dtype, values[4 * n + 2 * half], values[4 * n + 2 * half + 1])
                at = self.moved(self.offset(row, 0), 8 * half, n)
                store_shared(Int32, shared + at + pair * 4, [x])
        cute.arch.sync_warp()
        units = self.row_bytes // UNIT_BYTES
        step = WARP_SIZE // units
        row, unit = lane // units, lane % units
        at = target.address + Int64(first + row) * target.pitch + Int64(unit * UNIT_BYTES)
        for i in range(0, 16, step):
            x = load_shared(Int32, shared + self.offset(row + i, unit), 4)
            store_global_where(first + row + i < target.length, at + i * target.pitch, *x)

    # -- fragments ----------------------------------------------------------------------------

    def left(self, shared: Int32, step: int) -> Sequence[Int32]:
        """The left operand of 16 rows from `shared` on and columns 16 step to 16 step + 15."""
        lane = cute.arch.lane_idx()
        offset = self.offset(lane & 15, lane >> 4)
        return load_matrices(shared + self.moved(offset, 0, 2 * step))

    def right_of_rows(self, shared: Int32, n: int, step: int, count: int) -> Sequence[Int32]:
        """`count` (1 or 2) right operands: columns 16 step to 16 step + 15 (k) of rows 8 n to
        8 n + 7 (n), and of the next 8 rows."""
        lane = cute.arch.lane_idx()
        offset = self.offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)
        return load_matrices(shared + self.moved(offset, 8 * n, 2 * step), 2 * count)

    def right(self, shared: Int32, n: int, step: int, count: int) -> Sequence[Int32]:
        """`count` (1 or 2) right operands: rows 16 step to 16 step + 15 (k) of columns 8 n to
        8 n + 7 (n), and of the next 8 columns."""
        lane = cute.arch.lane_idx()
        offset = self.offset(lane & 15, lane >> 4)
        at = shared + self.moved(offset, 16 * step, n)
        return load_matrices(at, 2 * count, transposed=True)
