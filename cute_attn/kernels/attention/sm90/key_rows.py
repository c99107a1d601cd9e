"""Stores of dK and dV from registers to global memory, warp by warp. The SM90 kernels of all
gradients run these stores beside products."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.dtypes import DTYPE
from ...common.ptx.memory import load_shared, store_global
from ...common.spec import WARP_SIZE
from ...common.tma import BOX
from ..parts import fragments
from ..parts.work import Work, head_and_split
from ..spec import Sm90BackwardSpec
from .key_tiles import lane_anew
from .mma import LINE_BYTES
from .store import store_parts

UNIT = 16  # bytes that a lane stores at once
UNITS = LINE_BYTES // UNIT


class KeyRows:
    """Rows of dK and dV, rounded, or partial sums of a split. All methods run on the device.

    `x` is the kernel's Operands, and `own` its Consumer."""

    def __init__(self, spec: Sm90BackwardSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]

    @cute.jit
    def store_zeros(self, x: Any, work: Work) -> None:
        """Store dK and dV of keys that no query sees, by one warp."""
        spec = self.spec
        at = cute.arch.lane_idx() * UNIT
        row_bytes = (4 if spec.partial else 2) * spec.head_dim
        first = work.block * spec.tile_n
        count = cutlass.min(work.seqlen_k - first, Int32(spec.tile_n))
        for i in cutlass.range(count, unroll=1):
            if at < row_bytes:
                for out in (x.dk, x.dv):
                    row = self.row_of(x, out, work, first + i)
                    store_global(Int32, row.iterator.toint() + at, [Int32(0)] * (UNIT // 4))

    @cute.jit
    def store(self, x: Any, own: Any, taken: Int32, n: Int32) -> None:
        """Store the warp's rows of dK and dV of a work, and release the work's record. Rounded rows
        pass through the stage for dS of use n, whose dS is not stored yet."""
        work = own.keys.queue.read(taken)
        own.barriers.wait_previous("ds_empty", n)
        fragments.scale_rows(own.dk, [x.softmax_scale] * fragments.LANE_ROWS)
        for acc, out in ((own.dk, x.dk), (own.dv, x.dv)):
            if cutlass.const_expr(self.spec.partial):
                self.store_partial(x, own, work, acc, out)
            else:
                self.store_rounded(x, own, work, acc, out, n)
        own.keys.queue.release(taken)

    @cute.jit
    def store_partial(
        self, x: Any, own: Any, work: Work, acc: cute.Tensor, out: cute.Tensor
    ) -> None:
        for lane_row in cutlass.range_constexpr(fragments.LANE_ROWS):
            key = own.keys.key(work, lane_row)
            row = acc[None, lane_row, None]
            pairs = [[row[j], row[j + 1]] for j in range(0, cute.size(row), 2)]
            if key < work.seqlen_k:
                store_parts(self.row_of(x, out, work, key), pairs, Float32)

    @cute.jit
    def store_rounded(
        self, x: Any, own: Any, work: Work, acc: cute.Tensor, out: cute.Tensor, n: Int32
    ) -> None:
        """Store one box of columns at a time. A lane stores 16 bytes of a row, and eight lanes
        store a line."""
        lane, boxes, warp = lane_anew(), self.spec.head_dim // BOX, own.keys.warp
        stage = own.ds.stage(n)
        words = fragments.operand(acc, self.dtype)
        count = len(words) // boxes
        unit, first = lane % UNITS, lane // UNITS
        for box in cutlass.range_constexpr(boxes):
            of_box = words[box * count : (box + 1) * count]
            fragments.stage_matrices(of_box, stage, warp, self.spec.tile_n, lane)
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(16 * UNITS // WARP_SIZE):
                row = first + i * (WARP_SIZE // UNITS)
                at = stage + (warp * 16 + row) * LINE_BYTES
                loaded = load_shared(Int32, at + ((unit ^ (row % UNITS)) * UNIT), UNIT // 4)
                key = work.block * self.spec.tile_n + warp * 16 + row
                if key < work.seqlen_k:
                    to = self.row_of(x, out, work, key).iterator.toint()
                    store_global(Int32, to + box * LINE_BYTES + unit * UNIT, loaded)
            cute.arch.sync_warp()

    def row_of(self, x: Any, out: cute.Tensor, work: Work, key: Int32) -> cute.Tensor:
        """The row of a key in dK or dV, or in a split's partial sums."""
        head, split = head_and_split(work, x.num_splits, self.spec.partial)
        part = (split,) if self.spec.partial else ()
        row = (work.k_start + key,) if self.spec.varlen_k else (work.sequence, key)
        at = (*part, *row, head, None)
        return out[at]
