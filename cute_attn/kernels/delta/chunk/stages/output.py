"""The output of a chunk from the state at its start and the corrections of its tokens:

    o = scale (exp2(G) * q) h + Aqk v_new

The kernel is bound by memory bandwidth. A warp has 16 rows. It loads q and G directly as fragments
of a left operand. In each 16 channels a lane takes 4 neighbours of a row, so that loads are whole
sectors. This order permutes the channels, and the rows of h are read in the permuted order:

    position in the fragment    2 i, 2 i + 1, 2 i + 8, 2 i + 9        i = lane % 4
    channel                     4 i, 4 i + 1, 4 i + 2, 4 i + 3

    CTA (tile of V, value head, slot of a chunk), 4 warps
      load      h, Aqk and v_new by cp.async; q and G into registers, 64 channels at once; with
                l2norm, the norms of q
      state     scale (exp2(G) * q) h, times the inverse norms
      chunk     Aqk v_new, for Aqk's blocks up to the diagonal
      store     through the shared memory of the warp's rows of Aqk, which are in registers
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ....common.arguments import fake_matrices, fake_offsets, fake_rows
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.ptx.async_copy import copy_async
from ....common.ptx.convert import pack, unpack_all
from ....common.ptx.math import exp2, reciprocal_sqrt
from ....common.ptx.memory import load_global, load_shared, shared_address
from ....common.ptx.mma import mma
from ....common.smem import Buffer, SharedMemory
from ....common.spec import SMALLEST_SMEM_BYTES, WARP_SIZE
from ...spec import L2NORM_EPSILON
from ..chunks import (
    chunk_place,
    chunks_before,
    num_slots,
    row_address,
    row_bytes,
    shared_head,
    slot_and_head,
)
from ..spec import CHUNK, OutputSpec
from ..tiles import (
    FRAGMENT_ROWS,
    LINE_BYTES,
    UNIT_BYTES,
    copy_rows,
    lower_times,
    lower_triangle,
    right_fragments,
    right_offsets,
    store_fragments,
    thread_and_warp,
)

NUM_WARPS = CHUNK // FRAGMENT_ROWS
NUM_THREADS = NUM_WARPS * WARP_SIZE
COLUMNS = 64  # columns of o stored at once
STEP = 16  # channels per product
STEPS_AT_ONCE = 4  # products whose q and G are in registers at once


class Arguments(NamedTuple):
    """The kernel's arguments."""

    q: cute.Tensor
    v_new: cute.Tensor
    g: cute.Tensor
    Aqk: cute.Tensor
    h: cute.Tensor
    cu_seqlens: cute.Tensor | None
    o: cute.Tensor
    scale: Float32


class KdaOutput:
    """The kernel for one OutputSpec; see the module's docstring."""

    def __init__(self, spec: OutputSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        if spec.tile_v % COLUMNS or spec.head_dim_v % spec.tile_v:
            raise ValueError(
                f"tile_v is {spec.tile_v}, must be a multiple of {COLUMNS} that divides "
                f"head_dim_v={spec.head_dim_v}"
            )
        self.tiles = spec.head_dim_v // spec.tile_v
        # h in shared memory: lines of 64 elements along V, or along K with state_v_first.
        self.h_rows, self.h_columns = spec.head_dim_k, spec.tile_v
        if spec.state_v_first:
            self.h_rows, self.h_columns = self.h_columns, self.h_rows
        self.memory = SharedMemory(
            Buffer("aqk", self.dtype, CHUNK * CHUNK, alignment=LINE_BYTES),
            Buffer("v_new", self.dtype, CHUNK * spec.tile_v),
            Buffer("h", self.dtype, spec.head_dim_k * spec.tile_v),
            limit=SMALLEST_SMEM_BYTES,
        )
        self.smem_bytes = self.memory.nbytes

    def fake_args(self) -> tuple[Any, ...]:
        spec, dtype = self.spec, self.dtype
        batch, tokens, heads_qk, heads = (cute.sym_int() for _ in range(4))

        def rows(heads: Any, columns: int, element: Any = dtype) -> Any:
            return fake_rows(element, (batch, tokens, heads, columns))

        K, V = spec.head_dim_k, spec.head_dim_v
        matrix = (V, K) if spec.state_v_first else (K, V)
        return placeholders(
            Arguments(
                q=rows(heads_qk, K),
                v_new=rows(heads, V),
                g=rows(heads, K, Float32),
                Aqk=rows(heads, CHUNK),
                h=fake_matrices((batch, cute.sym_int(), heads), matrix, dtype),
                cu_seqlens=fake_offsets(spec.index_dtype),
                o=rows(heads, V),
                scale=Float32(1.0),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        a, stream = gathered(Arguments, args)
        slots = num_slots(a.q.shape[0], a.q.shape[1], a.cu_seqlens)
        self.kernel(a).launch(
            grid=[slots * a.v_new.shape[2] * self.tiles, 1, 1],
            block=[NUM_THREADS, 1, 1],
            smem=self.smem_bytes,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        slot, head = slot_and_head(x.v_new.shape[2] * self.tiles)
        head, tile = self.head_and_tile(head)
        place = chunk_place(slot, x.q.shape[1], x.cu_seqlens)
        smem = cutlass.memory.SmemAllocator()
        base = shared_address(smem.allocate(self.smem_bytes, self.memory.alignment))
        if place.valid:
            state = place.index + chunks_before(place.sequence, x.q.shape[1], x.cu_seqlens)
            self.load(x.v_new, x.Aqk, x.h, place, state, head, tile, base)
            fragments, factors = self.queries(x.q, x.g, place, head, x.scale)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            self.products(fragments, factors, x.o, place, head, tile, base)

    def head_and_tile(self, index: Int32) -> tuple[Int32, Int32]:
        """Return the value head, and the tile of V, of a CTA's index among a chunk's CTAs."""
        if self.tiles & (self.tiles - 1):
            return index // self.tiles, index % self.tiles
        tile = index & (self.tiles - 1)
        return index >> (self.tiles.bit_length() - 1), tile

    # -- loads --------------------------------------------------------------------------------

    @cute.jit
    def load(
        self,
        v_new: cute.Tensor,
        Aqk: cute.Tensor,
        h: cute.Tensor,
        place: Any,
        state: Int32,
        head: Int32,
        tile: Int32,
        base: Int32,
    ) -> None:
        """Start the copies of h, Aqk and v_new."""
        spec = self.spec
        first_v = tile * spec.tile_v
        state = cutlass.min(state, h.shape[1] - 1)  # stay in bounds for any cu_seqlens
        source = (
            h.iterator
            + (
                Int64(place.batch) * h.stride[0]
                + Int64(state) * h.stride[1]
                + Int64(head) * h.stride[2]
                + first_v * (spec.head_dim_k if spec.state_v_first else 1)
            )
        ).toint()
        self.copy_state(source, base + self.memory["h"])
        at = (place.batch, place.start, head)
        for x, offset, columns, first in (
            (Aqk, self.memory["aqk"], CHUNK, 0),
            (v_new, self.memory["v_new"], spec.tile_v, first_v),
        ):
            copy_rows(
                base + offset,
                row_address(x, *at, first),
                row_bytes(x),
                place.length,
                columns,
                NUM_THREADS,
            )
        cute.arch.cp_async_commit_group()

    def copy_state(self, source: Any, shared: Any) -> None:
        """Copy h in lines of 64 elements. The swizzle avoids bank conflicts between the rows that
        one load of a fragment reads: rows 4 i + (0, 1), or with state_v_first four neighbours."""
        thread, _, _ = cute.arch.thread_idx()
        units = self.h_columns * 2 // UNIT_BYTES
        step = NUM_THREADS // units
        row, unit = Int32(Uint32(thread) >> (units.bit_length() - 1)), thread & (units - 1)
        pitch = 2 * (self.spec.head_dim_k if self.spec.state_v_first else self.spec.head_dim_v)
        source = source + Int64(row * pitch + unit * UNIT_BYTES)
        shared = shared + row * LINE_BYTES + (unit >> 3) * (self.h_rows * LINE_BYTES)
        swizzle = (row & 3) << 1
        if not self.spec.state_v_first:
            swizzle = (row & 1) | ((row >> 1) & 6)
        line = ((unit & 7) ^ swizzle) << 4
        for i in range(self.h_rows // step):
            flip = 0 if self.spec.state_v_first else (i * step & 8) << 3
            copy_async(
                shared + i * step * LINE_BYTES + (line ^ flip), source + i * step * pitch, True
            )

    @cute.jit
    def queries(
        self, q: cute.Tensor, g: cute.Tensor, place: Any, head: Int32, scale: Float32
    ) -> Any:
        """Return exp2(G) * q of the warp's rows as left operands, 4 registers for each 16 channels,
        and the factors of the thread's two rows: scale, with l2norm times the inverse norm."""
        _, warp_index = thread_and_warp()
        lane = cute.arch.lane_idx()
        row, channel = warp_index * FRAGMENT_ROWS + (lane >> 2), (lane & 3) << 2
        head_qk = shared_head(head, g.shape[2], q.shape[2])
        q_rows, g_rows = [], []
        for i in cutlass.range_constexpr(2):
            inside = place.start + cutlass.min(row + 8 * i, place.length - 1)
            q_rows.append(row_address(q, place.batch, inside, head_qk, channel))
            g_rows.append(row_address(g, place.batch, inside, head, channel))
        fragments = []
        squares = [Float32(0.0), Float32(0.0)]
        for first in cutlass.range_constexpr(0, self.spec.head_dim_k // STEP, STEPS_AT_ONCE):
            loaded = []
            for step in cutlass.range_constexpr(first, first + STEPS_AT_ONCE):
                for i in cutlass.range_constexpr(2):
                    loaded.append(
                        (
                            load_global(Int32, q_rows[i] + step * STEP * 2, 2),
                            load_global(Float32, g_rows[i] + step * STEP * 4, 4),
                        )
                    )
            for step in cutlass.range_constexpr(STEPS_AT_ONCE):
                fragment = []
                for pair in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(2):
                        x, decay = loaded[2 * step + i]
                        x = unpack_all(self.dtype, x)
                        low, high = (exp2(decay[n]) * x[n] for n in (2 * pair, 2 * pair + 1))
                        fragment.append(pack(self.dtype, low, high))
                        if cutlass.const_expr(self.spec.l2norm):
                            for n in (2 * pair, 2 * pair + 1):
                                squares[i] = cute.math.fma(x[n], x[n], squares[i])
                fragments.append(fragment)
        factors = [scale, scale]
        if cutlass.const_expr(self.spec.l2norm):
            for i in cutlass.range_constexpr(2):
                total = squares[i]
                for distance in (1, 2):
                    total = total + cute.arch.shuffle_sync_bfly(total, distance)
                factors[i] = scale * reciprocal_sqrt(total + L2NORM_EPSILON)
        return fragments, factors

    # -- products -----------------------------------------------------------------------------

    @cute.jit
    def products(
        self,
        fragments: Any,
        factors: Any,
        o: cute.Tensor,
        place: Any,
        head: Int32,
        tile: Int32,
        base: Int32,
    ) -> None:
        spec = self.spec
        _, warp_index = thread_and_warp()
        first_row = warp_index * FRAGMENT_ROWS
        values = [Float32(0.0)] * (FRAGMENT_ROWS * spec.tile_v // WARP_SIZE)
        offsets = self.state_offsets(base + self.memory["h"])
        for step in cutlass.range_constexpr(spec.head_dim_k // STEP):
            for j in cutlass.range_constexpr(spec.tile_v // 16):
                b = self.state_fragments(offsets, step, j)
                for i in cutlass.range_constexpr(2):
                    at = 8 * j + 4 * i
                    values[at : at + 4] = mma(
                        self.dtype, values[at : at + 4], fragments[step], b[2 * i : 2 * i + 2]
                    )

        scores = lower_triangle(base + self.memory["aqk"], first_row)
        scratch = base + self.memory["aqk"] + first_row * LINE_BYTES
        target = row_address(o, place.batch, place.start, head, tile * spec.tile_v)
        target = target + Int64(first_row) * row_bytes(o)
        offsets = right_offsets()
        for column in cutlass.range_constexpr(0, spec.tile_v, COLUMNS):
            count = FRAGMENT_ROWS * COLUMNS // WARP_SIZE
            c = cute.make_rmem_tensor((count,), Float32)
            for i in cutlass.range_constexpr(count):
                c[i] = factors[i >> 1 & 1] * values[column // COLUMNS * count + i]
            lower_times(
                c, self.dtype, scores, base + self.memory["v_new"], offsets, column, warp_index
            )
            store_fragments(
                self.dtype,
                [c[i] for i in range(count)],
                scratch,
                target + column * 2,
                row_bytes(o),
                place.length - first_row,
            )

    def state_offsets(self, shared: Any) -> list[Any]:
        """Return the lane's addresses of h for `state_fragments`, one for each 16 columns of a
        line."""
        lane = cute.arch.lane_idx()
        if self.spec.state_v_first:
            row, i = lane >> 2, lane & 3
            offset = row * LINE_BYTES + ((((i >> 1) ^ ((row & 3) << 1)) << 4) | ((i & 1) << 3))
        else:
            matrix, r = lane >> 3, lane & 7
            row = ((r >> 1) << 2) + (r & 1) + ((matrix & 1) << 1)
            offset = row * LINE_BYTES + (((matrix >> 1) ^ r) << 4)
        return [shared + (offset ^ (unit << 4)) for unit in range(0, 8, 2)]

    def state_fragments(self, offsets: list[Any], step: int, j: int) -> Any:
        """Load h as right operands: channels 16 step to 16 step + 15, in the fragment's order, by
        columns 16 j to 16 j + 7 of V, then by the next 8."""
        sub_tile_bytes = self.h_rows * LINE_BYTES
        if not self.spec.state_v_first:
            return right_fragments(0, offsets, step, j, sub_tile_bytes)
        at = offsets[step % 4] + step // 4 * sub_tile_bytes + j * 16 * LINE_BYTES
        return [x for i in range(2) for x in load_shared(Int32, at + i * 8 * LINE_BYTES, 2)]
