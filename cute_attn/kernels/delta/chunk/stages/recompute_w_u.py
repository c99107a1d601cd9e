"""w and u of a chunk from Akk, the inverse computed by `chunk_intra`; optionally qg and kg.

    w = Akk Diag(beta) (exp2(G) * k)        qg = exp2(G) * q
    u = Akk Diag(beta) v                    kg = exp2(G_e - G) * k

The kernel is bound by memory bandwidth: arithmetic overlaps the loads of the other CTAs of an SM.

    CTA (slot of a chunk, value head), 4 warps
      load      Akk and v by cp.async; k, q and G into registers, 4 rows of a thread at once
      scale     beta exp2(G) * k -> shared memory; qg and kg -> global memory
      w         16 rows for each warp; left operands are Akk's blocks up to the diagonal
      u         as w, from the rounded Akk Diag(beta), so that v needs no conversion
      store     through the shared memory of the warp's rows of Akk, which are in registers
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ....common.arguments import fake_offsets, fake_rows, fake_strided
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.ptx.convert import pack, pack_all, unpack, unpack_all
from ....common.ptx.math import exp2
from ....common.ptx.memory import load_global, load_shared, shared_address, store_shared
from ....common.smem import Buffer, SharedMemory
from ....common.spec import SMALLEST_SMEM_BYTES, WARP_SIZE
from ..chunks import chunk_place, num_slots, row_address, row_bytes, shared_head, slot_and_head
from ..spec import CHUNK, RecomputeSpec
from ..tiles import (
    FRAGMENT_ROWS,
    LINE_BYTES,
    SUB_TILE_BYTES,
    copy_rows,
    load_floats,
    lower_times,
    lower_triangle,
    right_offsets,
    store_fragments,
    store_if,
    thread_and_warp,
)

NUM_WARPS = CHUNK // FRAGMENT_ROWS
NUM_THREADS = NUM_WARPS * WARP_SIZE
CHANNELS = 8  # channels per thread in `scale`
ROWS = 4  # rows that a thread loads at once
COLUMNS = 64  # columns of w or u accumulated at once


class Arguments(NamedTuple):
    """The kernel's arguments."""

    q: cute.Tensor | None
    k: cute.Tensor
    v: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    Akk: cute.Tensor
    cu_seqlens: cute.Tensor | None
    w: cute.Tensor
    u: cute.Tensor
    qg: cute.Tensor | None
    kg: cute.Tensor | None


class KdaRecomputeWU:
    """The kernel for one RecomputeSpec; see the module's docstring."""

    def __init__(self, spec: RecomputeSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.beta_dtype = DTYPE[spec.beta_dtype]
        self.memory = SharedMemory(
            Buffer("akk", self.dtype, CHUNK * CHUNK, alignment=LINE_BYTES),
            Buffer("v", self.dtype, CHUNK * spec.head_dim_v),
            Buffer("kd", self.dtype, CHUNK * spec.head_dim_k, holds="beta exp2(G) * k"),
            Buffer("beta", Float32, CHUNK),
            limit=SMALLEST_SMEM_BYTES,
        )
        self.smem_bytes = self.memory.nbytes

    def fake_args(self) -> tuple[Any, ...]:
        spec, dtype = self.spec, self.dtype
        batch, tokens, heads_qk, heads = (cute.sym_int() for _ in range(4))

        def rows(heads: Any, columns: int, present: bool = True, element: Any = dtype) -> Any:
            return fake_rows(element, (batch, tokens, heads, columns)) if present else None

        K, V = spec.head_dim_k, spec.head_dim_v
        return placeholders(
            Arguments(
                q=rows(heads_qk, K, spec.store_qg),
                k=rows(heads_qk, K),
                v=rows(heads, V),
                g=rows(heads, K, element=Float32),
                beta=fake_strided(self.beta_dtype, (batch, tokens, heads)),
                Akk=rows(heads, CHUNK),
                cu_seqlens=fake_offsets(spec.index_dtype),
                w=rows(heads, K),
                u=rows(heads, V),
                qg=rows(heads, K, spec.store_qg),
                kg=rows(heads, K, spec.store_kg),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        a, stream = gathered(Arguments, args)
        slots = num_slots(a.v.shape[0], a.v.shape[1], a.cu_seqlens)
        self.kernel(a).launch(
            grid=[slots * a.v.shape[2], 1, 1],
            block=[NUM_THREADS, 1, 1],
            smem=self.smem_bytes,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        slot, head = slot_and_head(x.v.shape[2])
        place = chunk_place(slot, x.v.shape[1], x.cu_seqlens)
        smem = cutlass.memory.SmemAllocator()
        base = shared_address(smem.allocate(self.smem_bytes, self.memory.alignment))
        if place.valid:
            self.load(x.v, x.beta, x.Akk, place, head, base)
            self.scale(x.q, x.k, x.g, x.beta, x.qg, x.kg, place, head, base)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            self.products(x.w, x.u, place, head, base)

    @cute.jit
    def load(
        self,
        v: cute.Tensor,
        beta: cute.Tensor,
        Akk: cute.Tensor,
        place: Any,
        head: Int32,
        base: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        at = (place.batch, place.start, head)
        for x, offset, columns in (
            (Akk, self.memory["akk"], CHUNK),
            (v, self.memory["v"], self.spec.head_dim_v),
        ):
            copy_rows(
                base + offset, row_address(x, *at), row_bytes(x), place.length, columns, NUM_THREADS
            )
        cute.arch.cp_async_commit_group()
        if thread < CHUNK:
            factor = self.beta_of(beta, place, head, thread)
            store_shared(Float32, base + self.memory["beta"] + thread * 4, [factor])

    def beta_of(self, beta: cute.Tensor, place: Any, head: Int32, row: Any) -> Any:
        """Load beta of a row of the chunk; 0 past the chunk's end."""
        token = place.start + cutlass.min(row, place.length - 1)
        factor = Float32(beta[place.batch, token, head])
        return cutlass.select_(row < place.length, factor, Float32(0.0))

    @cute.jit
    def scale(
        self,
        q: cute.Tensor | None,
        k: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        qg: cute.Tensor | None,
        kg: cute.Tensor | None,
        place: Any,
        head: Int32,
        base: Int32,
    ) -> None:
        """Store beta exp2(G) * k to shared memory, with zeros past the chunk's end, and qg and kg
        to global memory."""
        spec, dtype = self.spec, self.dtype
        thread, _, _ = cute.arch.thread_idx()
        threads_a_row = spec.head_dim_k // CHANNELS
        step = NUM_THREADS // threads_a_row
        first = Int32(Uint32(thread) >> (threads_a_row.bit_length() - 1))
        unit = thread & (threads_a_row - 1)
        head_qk = shared_head(head, g.shape[2], k.shape[2])
        column = unit * CHANNELS
        last = place.length - 1

        g_rows = row_address(g, place.batch, place.start, head, column)
        k_rows = row_address(k, place.batch, place.start, head_qk, column)
        if cutlass.const_expr(spec.store_qg):
            q_rows = row_address(q, place.batch, place.start, head_qk, column)
            qg_rows = row_address(qg, place.batch, place.start, head, column)
        if cutlass.const_expr(spec.store_kg):
            kg_rows = row_address(kg, place.batch, place.start, head, column)
            g_last = load_floats(Float32, g_rows + Int64(last) * row_bytes(g), CHANNELS)
        target = base + self.memory["kd"] + first * LINE_BYTES + (unit >> 3) * SUB_TILE_BYTES
        target = target + (((unit & 7) ^ (first & 7)) << 4)

        for start in cutlass.range_constexpr(0, CHUNK // step, ROWS):
            loaded = []
            for i in cutlass.range_constexpr(start, start + ROWS):
                row = first + i * step
                inside = Int64(cutlass.min(row, last))
                q_row = None
                if cutlass.const_expr(spec.store_qg):
                    q_row = load_global(Int32, q_rows + inside * row_bytes(q), CHANNELS // 2)
                loaded.append(
                    (
                        load_floats(Float32, g_rows + inside * row_bytes(g), CHANNELS),
                        load_global(Int32, k_rows + inside * row_bytes(k), CHANNELS // 2),
                        self.beta_of(beta, place, head, row),
                        q_row,
                    )
                )
            for i in cutlass.range_constexpr(start, start + ROWS):
                row = first + i * step
                g_row, k_row, factor, q_row = loaded[i - start]
                k_row = unpack_all(dtype, k_row)
                decay = [exp2(x) for x in g_row]
                kd = pack_all(dtype, [factor * d * x for d, x in zip(decay, k_row, strict=True)])
                store_shared(Int32, target + i * step * LINE_BYTES, kd)
                if cutlass.const_expr(spec.store_kg):
                    x = pack_all(
                        dtype,
                        [exp2(e - y) * x for e, y, x in zip(g_last, g_row, k_row, strict=True)],
                    )
                    store_if(row < place.length, kg_rows + Int64(row) * row_bytes(kg), x)
                if cutlass.const_expr(spec.store_qg):
                    q_row = unpack_all(dtype, q_row)
                    x = pack_all(dtype, [d * x for d, x in zip(decay, q_row, strict=True)])
                    store_if(row < place.length, qg_rows + Int64(row) * row_bytes(qg), x)

    @cute.jit
    def products(
        self, w: cute.Tensor, u: cute.Tensor, place: Any, head: Int32, base: Int32
    ) -> None:
        _, warp_index = thread_and_warp()
        first_row = warp_index * FRAGMENT_ROWS
        fragments = lower_triangle(base + self.memory["akk"], first_row)
        self.product(fragments, base + self.memory["kd"], w, place, head, base, warp_index)
        fragments = self.times_beta(fragments, base)
        self.product(fragments, base + self.memory["v"], u, place, head, base, warp_index)

    def times_beta(self, fragments: list[list[Any]], base: Int32) -> list[list[Any]]:
        """Return left operands with each column multiplied by beta of its token."""
        lane = cute.arch.lane_idx()
        at = base + self.memory["beta"] + ((lane & 3) << 3)
        scaled = []
        for step, fragment in enumerate(fragments):
            registers = []
            for i, x in enumerate(fragment):
                if i % 2 == 0:
                    factors = load_shared(Float32, at + (16 * step + 4 * i) * 4, 2)
                low, high = unpack(self.dtype, x)
                registers.append(pack(self.dtype, low * factors[0], high * factors[1]))
            scaled.append(registers)
        return scaled

    @cute.jit
    def product(
        self,
        fragments: Any,
        shared: Int32,
        out: cute.Tensor,
        place: Any,
        head: Int32,
        base: Int32,
        warp_index: Int32,
    ) -> None:
        """Store the warp's rows of a triangular matrix times 64 rows in shared memory to `out`."""
        first_row = warp_index * FRAGMENT_ROWS
        scratch = base + self.memory["akk"] + first_row * LINE_BYTES
        offsets = right_offsets()
        target = row_address(out, place.batch, place.start, head)
        target = target + Int64(first_row) * row_bytes(out)
        for column in cutlass.range_constexpr(0, out.shape[3], COLUMNS):
            c = cute.make_rmem_tensor((FRAGMENT_ROWS * COLUMNS // WARP_SIZE,), Float32)
            c.fill(0.0)
            lower_times(c, self.dtype, fragments, shared, offsets, column, warp_index)
            store_fragments(
                self.dtype,
                [c[i] for i in range(cute.size(c))],
                scratch,
                target + column * 2,
                row_bytes(out),
                place.length - first_row,
            )
