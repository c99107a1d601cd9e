"""The gradients of Aqk and v_new through a chunk's own product, o = Aqk v_new + ...

    dAqk = scale do v_new^T  on and below the diagonal        dv_new = Aqk^T do

dAqk is the gradient of the unscaled product of q and k; Aqk is this product times the scale. The
kernel is bound by memory bandwidth.

    CTA (slot of a chunk, value head), 4 warps
      load      Aqk, do and v_new by cp.async
      scores    dAqk, 16 rows for each warp, and only blocks up to the diagonal
      values    dv_new, 16 rows for each warp; left operands are columns of Aqk
      store     through the shared memory of Aqk, which is in registers
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....common.arguments import fake_offsets, fake_rows
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.ptx.memory import shared_address, store_global
from ....common.ptx.mma import mma
from ....common.smem import Buffer, SharedMemory
from ....common.spec import SMALLEST_SMEM_BYTES, WARP_SIZE
from ..chunks import chunk_place, num_slots, row_address, row_bytes, slot_and_head
from ..spec import CHUNK, OutputBackwardSpec
from ..tiles import (
    FRAGMENT_ROWS,
    LINE_BYTES,
    SUB_TILE_BYTES,
    add_product,
    copy_rows,
    left_fragment,
    right_fragments_of_rows,
    right_offsets,
    store_fragments,
    thread_and_warp,
    upper_triangle_of_columns,
)

NUM_WARPS = CHUNK // FRAGMENT_ROWS
NUM_THREADS = NUM_WARPS * WARP_SIZE
COLUMNS = 64  # columns of dv_new accumulated at once
STEP = 16  # columns of V per product


class Arguments(NamedTuple):
    """The kernel's arguments."""

    v_new: cute.Tensor
    Aqk: cute.Tensor
    do: cute.Tensor
    cu_seqlens: cute.Tensor | None
    dAqk: cute.Tensor
    dv: cute.Tensor
    scale: Float32


class KdaOutputBackward:
    """The kernel for one OutputBackwardSpec; see the module's docstring."""

    def __init__(self, spec: OutputBackwardSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.memory = SharedMemory(
            Buffer("aqk", self.dtype, CHUNK * CHUNK, alignment=LINE_BYTES),
            Buffer("do", self.dtype, CHUNK * spec.head_dim_v),
            Buffer("v_new", self.dtype, CHUNK * spec.head_dim_v),
            limit=SMALLEST_SMEM_BYTES,
        )
        self.smem_bytes = self.memory.nbytes

    def fake_args(self) -> tuple[Any, ...]:
        spec, dtype = self.spec, self.dtype
        batch, tokens, heads = (cute.sym_int() for _ in range(3))

        def rows(columns: int, element: Any = dtype) -> Any:
            return fake_rows(element, (batch, tokens, heads, columns))

        return placeholders(
            Arguments(
                v_new=rows(spec.head_dim_v),
                Aqk=rows(CHUNK),
                do=rows(spec.head_dim_v),
                cu_seqlens=fake_offsets(spec.index_dtype),
                dAqk=rows(CHUNK, Float32),
                dv=rows(spec.head_dim_v),
                scale=Float32(1.0),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        a, stream = gathered(Arguments, args)
        slots = num_slots(a.do.shape[0], a.do.shape[1], a.cu_seqlens)
        self.kernel(a).launch(
            grid=[slots * a.do.shape[2], 1, 1],
            block=[NUM_THREADS, 1, 1],
            smem=self.smem_bytes,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, a: Arguments) -> None:
        slot, head = slot_and_head(a.do.shape[2])
        place = chunk_place(slot, a.do.shape[1], a.cu_seqlens)
        smem = cutlass.memory.SmemAllocator()
        base = shared_address(smem.allocate(self.smem_bytes, self.memory.alignment))
        if place.valid:
            for x, offset, columns in (
                (a.do, self.memory["do"], self.spec.head_dim_v),
                (a.v_new, self.memory["v_new"], self.spec.head_dim_v),
                (a.Aqk, self.memory["aqk"], CHUNK),
            ):
                copy_rows(
                    base + offset,
                    row_address(x, place.batch, place.start, head),
                    row_bytes(x),
                    place.length,
                    columns,
                    NUM_THREADS,
                )
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            self.scores(a.dAqk, a.scale, place, head, base)
            self.values(a.dv, place, head, base)

    @cute.jit
    def scores(
        self, dAqk: cute.Tensor, scale: Float32, place: Any, head: Int32, base: Int32
    ) -> None:
        """Store dAqk."""
        _, warp_index = thread_and_warp()
        first_row = warp_index * FRAGMENT_ROWS
        c = cute.make_rmem_tensor((FRAGMENT_ROWS * CHUNK // WARP_SIZE,), Float32)
        c.fill(0.0)
        for step in cutlass.range_constexpr(self.spec.head_dim_v // STEP):
            sub_tile = base + step // 4 * SUB_TILE_BYTES
            a = left_fragment(sub_tile + self.memory["do"], first_row, step % 4)
            for j in cutlass.range_constexpr(CHUNK // STEP):
                if j <= warp_index:
                    b = right_fragments_of_rows(sub_tile + self.memory["v_new"], 16 * j, step % 4)
                    for i in cutlass.range_constexpr(2):
                        at = 8 * j + 4 * i
                        old = [c[at + n] for n in range(4)]
                        new = mma(self.dtype, old, a, b[2 * i : 2 * i + 2])
                        for n in cutlass.range_constexpr(4):
                            c[at + n] = new[n]
        lane = cute.arch.lane_idx()
        for half in cutlass.range_constexpr(2):
            row = first_row + (lane >> 2) + 8 * half
            if row < place.length:
                target = row_address(dAqk, place.batch, place.start + row, head)
                for j in cutlass.range_constexpr(CHUNK // 8):
                    column = 8 * j + ((lane & 3) << 1)
                    x = [
                        cutlass.select_(column + n <= row, scale * c[4 * j + 2 * half + n], 0.0)
                        for n in range(2)
                    ]
                    store_global(Float32, target + Int64(column * 4), x)

    @cute.jit
    def values(self, dv: cute.Tensor, place: Any, head: Int32, base: Int32) -> None:
        """Store dv_new."""
        _, warp_index = thread_and_warp()
        first_row = warp_index * FRAGMENT_ROWS
        fragments = upper_triangle_of_columns(base + self.memory["aqk"], first_row)
        # All warps have read Aqk; the stores go through Aqk's memory.
        cute.arch.sync_threads()
        scratch = base + self.memory["aqk"] + first_row * LINE_BYTES
        target = row_address(dv, place.batch, place.start, head)
        target = target + Int64(first_row) * row_bytes(dv)
        offsets = right_offsets()
        for column in cutlass.range_constexpr(0, self.spec.head_dim_v, COLUMNS):
            c = cute.make_rmem_tensor((FRAGMENT_ROWS * COLUMNS // WARP_SIZE,), Float32)
            c.fill(0.0)
            for step in cutlass.range_constexpr(CHUNK // STEP):
                if step >= warp_index:
                    add_product(
                        c, self.dtype, fragments[step], base + self.memory["do"], offsets, step,
                        column,
                    )  # fmt: skip
            store_fragments(
                self.dtype,
                [c[i] for i in range(cute.size(c))],
                scratch,
                target + column * 2,
                row_bytes(dv),
                place.length - first_row,
            )
