"""The gradients of q, k, v, beta, G and L through a chunk's products with the state.

With du the gradient of u, h the state before the chunk, and dh the gradient of the state after the
chunk:

    dy  = Akk^T du                          dv = Diag(beta) dy
    dq  = scale exp2(G) * (do h^T)
    dks = -exp2(G) * (dy h^T)
    dke = exp2(G_e - G) * (v_new dh^T)      dk = Diag(beta) dks + dke
    dL  = -dy v_new^T below the diagonal
    dbeta_i = dy_i . v_i + dks_i . k_i
    dG  = q * dq + Diag(beta) k * dks - k * dke; for the last token, plus
          sum_i k_i * dke_i + exp2(G_e) * (h * dh summed over V)

dL needs no product of 64 by 64 matrices: dL is -Akk^T dAkk Akk^T, and dAkk Akk^T = du v_new^T.

    CTA (slot of a chunk, value head), 8 warps: a warp has 16 rows, and half of the channels
      for each 64 columns of V
        load    do, du, v, v_new, h and dh by cp.async
        solve   dy -> shared memory; dv; its part of dbeta
        sum     do h^T, v_new dh^T, dy h^T, dy v_new^T, and h * dh
      store     dAkk
      decay     dq, dk, dG, with q, k and G from global memory
      reduce    dbeta; the last token's terms of dG
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ....common.arguments import fake_matrices, fake_offsets, fake_rows, fake_strided
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.ptx.convert import pack, unpack, unpack_all
from ....common.ptx.math import exp2
from ....common.ptx.memory import (
    load_global,
    load_shared,
    shared_address,
    store_global,
    store_shared,
)
from ....common.ptx.mma import mma
from ....common.smem import Buffer, SharedMemory
from ....common.spec import SMALLEST_SMEM_BYTES, WARP_SIZE
from ..chunks import (
    chunk_place,
    chunks_before,
    num_slots,
    row_address,
    row_bytes,
    shared_head,
    slot_and_head,
)
from ..spec import CHUNK, RecomputeBackwardSpec
from ..tiles import (
    FRAGMENT_ROWS,
    LINE_BYTES,
    SUB_TILE_BYTES,
    add_product,
    copy_rows,
    left_fragment,
    paired,
    paired_offset,
    right_fragments,
    right_fragments_of_rows,
    right_offsets,
    thread_and_warp,
    tile_offset,
    upper_triangle_of_columns,
)

BANDS = CHUNK // FRAGMENT_ROWS
NUM_WARPS = 2 * BANDS
NUM_THREADS = NUM_WARPS * WARP_SIZE
COLUMNS = 64  # columns of V loaded at once
HALF = COLUMNS // 2  # columns of a warp in `solve`
STEP = 16  # columns of V per product
ROWS_AND_COLUMNS = ("do", "du", "v", "v_new")


class Arguments(NamedTuple):
    """The kernel's arguments."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    v_new: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    Akk: cute.Tensor
    h: cute.Tensor
    do: cute.Tensor
    dh: cute.Tensor
    du: cute.Tensor
    cu_seqlens: cute.Tensor | None
    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    dbeta: cute.Tensor
    dg: cute.Tensor
    dAkk: cute.Tensor
    scale: Float32


class KdaRecomputeWUBackward:
    """The kernel for one RecomputeBackwardSpec; see the module's docstring."""

    def __init__(self, spec: RecomputeBackwardSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.beta_dtype = DTYPE[spec.beta_dtype]
        self.channels = spec.head_dim_k // 2  # channels per warp
        # Threads that share a channel's sum of h * dh, or with state_v_first two channels' sums.
        self.sharers = NUM_THREADS // (spec.head_dim_k // (2 if spec.state_v_first else 1))
        state = spec.head_dim_k * COLUMNS
        self.memory = SharedMemory(
            Buffer("akk", self.dtype, CHUNK * CHUNK, alignment=LINE_BYTES),
            *(Buffer(name, self.dtype, CHUNK * COLUMNS) for name in ROWS_AND_COLUMNS),
            Buffer("dy", self.dtype, CHUNK * COLUMNS),
            Buffer("h", self.dtype, state),
            Buffer("dh", self.dtype, state),
            Buffer("of_state", Float32, spec.head_dim_k, stages=self.sharers, holds="h * dh"),
            Buffer("of_end", Float32, spec.head_dim_k, stages=BANDS, holds="k * dke"),
            Buffer("dbeta", Float32, CHUNK, stages=2),
            limit=SMALLEST_SMEM_BYTES,
        )
        self.smem_bytes = self.memory.nbytes

    def fake_args(self) -> tuple[Any, ...]:
        spec, dtype = self.spec, self.dtype
        batch, tokens, heads_qk, heads, chunks = (cute.sym_int() for _ in range(5))

        def rows(heads: Any, columns: int, element: Any = dtype) -> Any:
            return fake_rows(element, (batch, tokens, heads, columns))

        K, V = spec.head_dim_k, spec.head_dim_v
        states = ((batch, chunks, heads), (V, K) if spec.state_v_first else (K, V), dtype)
        return placeholders(
            Arguments(
                q=rows(heads_qk, K),
                k=rows(heads_qk, K),
                v=rows(heads, V),
                v_new=rows(heads, V),
                g=rows(heads, K, Float32),
                beta=fake_strided(self.beta_dtype, (batch, tokens, heads)),
                Akk=rows(heads, CHUNK),
                h=fake_matrices(*states),
                do=rows(heads, V),
                dh=fake_matrices(*states),
                du=rows(heads, V),
                cu_seqlens=fake_offsets(spec.index_dtype),
                dq=rows(heads, K, Float32),
                dk=rows(heads, K, Float32),
                dv=rows(heads, V),
                dbeta=fake_strided(Float32, (batch, tokens, heads)),
                dg=rows(heads, K, Float32),
                dAkk=rows(heads, CHUNK, Float32),
                scale=Float32(1.0),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel; dq and dk are float32 `[B, T, HV, K]`, dAkk is the gradient of L."""
        a, stream = gathered(Arguments, args)
        slots = num_slots(a.v.shape[0], a.v.shape[1], a.cu_seqlens)
        self.kernel(a).launch(
            grid=[slots * a.v.shape[2], 1, 1],
            block=[NUM_THREADS, 1, 1],
            smem=self.smem_bytes,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        slot, head = slot_and_head(x.v.shape[2])
        place = chunk_place(slot, x.v.shape[1], x.cu_seqlens)
        smem = cutlass.memory.SmemAllocator()
        base = shared_address(smem.allocate(self.smem_bytes, self.memory.alignment))
        if place.valid:
            state = place.index + chunks_before(place.sequence, x.v.shape[1], x.cu_seqlens)
            # Stay in bounds for any cu_seqlens.
            state = cutlass.min(state, x.h.shape[1] - 1)
            self.chunk(
                (x.q, x.k, x.g, x.beta, x.Akk),
                (x.do, x.du, x.v, x.v_new, x.h, x.dh),
                (x.dq, x.dk, x.dv, x.dbeta, x.dg, x.dAkk),
                x.scale,
                place,
                state,
                head,
                base,
            )

    @cute.jit
    def chunk(
        self,
        of_channels: Any,
        of_columns: Any,
        results: Any,
        scale: Float32,
        place: Any,
        state: Int32,
        head: Int32,
        base: Int32,
    ) -> None:
        q, k, g, beta, Akk = of_channels
        dq, dk, dv, dbeta, dg, dAkk = results
        _, warp_index = thread_and_warp()
        band, half = warp_index & (BANDS - 1), Int32(Uint32(warp_index) >> 2)
        first_row = band * FRAGMENT_ROWS
        lane = cute.arch.lane_idx()
        betas = []
        for i in cutlass.range_constexpr(2):
            row = cutlass.min(first_row + (lane >> 2) + 8 * i, place.length - 1)
            betas.append(Float32(beta[place.batch, place.start + row, head]))

        count = FRAGMENT_ROWS * self.channels // WARP_SIZE
        sums = [cute.make_rmem_tensor((count,), Float32) for _ in range(3)]
        lower = cute.make_rmem_tensor((FRAGMENT_ROWS * HALF // WARP_SIZE,), Float32)
        of_beta = cute.make_rmem_tensor((2,), Float32)
        of_state = cute.make_rmem_tensor((2,), Float32)
        for x in (*sums, lower, of_beta, of_state):
            x.fill(0.0)
        copy_rows(
            base + self.memory["akk"],
            row_address(Akk, place.batch, place.start, head),
            row_bytes(Akk),
            place.length,
            CHUNK,
            NUM_THREADS,
        )
        for tile in cutlass.range(self.spec.head_dim_v // COLUMNS, unroll=1):
            cute.arch.sync_threads()  # all warps have read the previous tile
            self.load(of_columns, place, state, head, tile * COLUMNS, base)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            self.solve(dv, betas, of_beta, place, head, tile * COLUMNS, band, half, base)
            cute.arch.sync_threads()
            self.products(sums, lower, band, half, base)
            self.state_products(of_state, base)
        self.store_lower(lower, dAkk, place, head, band, half)
        self.store_state_sums(of_state, base)
        self.decay(q, k, g, dq, dk, dg, sums, betas, of_beta, scale, place, head, band, half, base)
        for i in cutlass.range_constexpr(2):
            total = of_beta[i]
            for distance in (1, 2):
                total = total + cute.arch.shuffle_sync_bfly(total, distance)
            if lane & 3 == 0:
                at = half * CHUNK + first_row + (lane >> 2) + 8 * i
                store_shared(Float32, base + self.memory["dbeta"] + at * 4, [total])
        cute.arch.sync_threads()
        self.finish(g, dg, dbeta, place, head, band, half, base)

    @cute.jit
    def load(
        self, of_columns: Any, place: Any, state: Int32, head: Int32, first: Int32, base: Int32
    ) -> None:
        """Load 64 columns of V."""
        spec = self.spec
        do, du, v, v_new, h, dh = of_columns
        for x, name in zip((do, du, v, v_new), ROWS_AND_COLUMNS, strict=True):
            copy_rows(
                base + self.memory[name],
                row_address(x, place.batch, place.start, head, first),
                row_bytes(x),
                place.length,
                COLUMNS,
                NUM_THREADS,
                few_registers=True,
            )
        for x, name in ((h, "h"), (dh, "dh")):
            source = (
                x.iterator
                + (
                    Int64(place.batch) * x.stride[0]
                    + Int64(state) * x.stride[1]
                    + Int64(head) * x.stride[2]
                    + first * (spec.head_dim_k if spec.state_v_first else 1)
                )
            ).toint()
            shared = base + self.memory[name]
            if cutlass.const_expr(spec.state_v_first):
                pitch = Int64(2 * spec.head_dim_k)
                copy_rows(shared, source, pitch, Int32(CHUNK), spec.head_dim_k, NUM_THREADS, True)
            else:
                pitch = Int64(2 * spec.head_dim_v)
                for row in cutlass.range_constexpr(0, spec.head_dim_k, CHUNK):
                    at = shared + row * LINE_BYTES
                    copy_rows(
                        at, source + row * pitch, pitch, Int32(CHUNK), COLUMNS, NUM_THREADS, True
                    )
        cute.arch.cp_async_commit_group()

    @cute.jit
    def solve(
        self,
        dv: cute.Tensor,
        betas: Any,
        of_beta: cute.Tensor,
        place: Any,
        head: Int32,
        first: Int32,
        band: Int32,
        half: Int32,
        base: Int32,
    ) -> None:
        """Compute dy of the warp's 16 rows and 32 columns; store dv, and dy in shared memory."""
        lane = cute.arch.lane_idx()
        first_row = band * FRAGMENT_ROWS
        c = cute.make_rmem_tensor((FRAGMENT_ROWS * HALF // WARP_SIZE,), Float32)
        c.fill(0.0)
        fragments = upper_triangle_of_columns(base + self.memory["akk"], first_row)
        offsets = [x ^ (half << 6) for x in right_offsets()]
        for step in cutlass.range_constexpr(BANDS):
            if step >= band:
                add_product(
                    c, self.dtype, fragments[step], base + self.memory["du"], offsets, step, 0
                )
        column = half * HALF + ((lane & 3) << 1)
        for i in cutlass.range_constexpr(2):
            row = first_row + (lane >> 2) + 8 * i
            packed = []
            for j in cutlass.range_constexpr(HALF // 8):
                x = [c[4 * j + 2 * i + n] for n in range(2)]
                at = base + tile_offset(row, column + 8 * j)
                values = unpack(self.dtype, load_shared(Int32, at + self.memory["v"])[0])
                of_beta[i] = of_beta[i] + (x[0] * values[0] + x[1] * values[1])
                store_shared(Int32, at + self.memory["dy"], [pack(self.dtype, *x)])
                packed.append(pack(self.dtype, betas[i] * x[0], betas[i] * x[1]))
            at_row = row_address(dv, place.batch, place.start + row, head, first + half * HALF)
            at_row = at_row + paired_offset()
            pairs = [paired(*packed[n : n + 2]) for n in range(0, HALF // 8, 2)]
            if row < place.length:
                for n in cutlass.range_constexpr(HALF // 16):
                    store_global(Int32, at_row + 32 * n, pairs[n])

    @cute.jit
    def products(
        self, sums: Any, lower: cute.Tensor, band: Int32, half: Int32, base: Int32
    ) -> None:
        """Add 64 columns of V to the sums."""
        first_row = band * FRAGMENT_ROWS
        names = ("do", "v_new", "dy")
        offsets = right_offsets()
        if cutlass.const_expr(self.spec.head_dim_k == 64):
            offsets = [x ^ (half << 6) for x in offsets]
        for step in cutlass.range_constexpr(COLUMNS // STEP):
            a = [left_fragment(base + self.memory[x], first_row, step) for x in names]
            for j in cutlass.range_constexpr(self.channels // 16):
                h, dh = (
                    self.state_fragments(base + self.memory[x], offsets, half, step, j)
                    for x in ("h", "dh")
                )
                for c, left, right in ((sums[0], a[0], h), (sums[1], a[1], dh), (sums[2], a[2], h)):
                    self.add(c, 8 * j, left, right)
            for j in cutlass.range_constexpr(HALF // 16):
                if half * 2 + j <= band:
                    rows = base + self.memory["v_new"] + half * (HALF * LINE_BYTES)
                    self.add(lower, 8 * j, a[2], right_fragments_of_rows(rows, 16 * j, step))

    def state_fragments(self, shared: Any, offsets: list[Any], half: Any, step: int, j: int) -> Any:
        """Load two right operands: columns 16 step to 16 step + 15 of V (k), for the warp's
        channels 16 j to 16 j + 15 (n)."""
        if not self.spec.state_v_first:
            rows = shared + half * (self.channels * LINE_BYTES)
            return right_fragments_of_rows(rows, 16 * j, step)
        if self.channels == COLUMNS:
            shared = shared + half * SUB_TILE_BYTES
        return right_fragments(shared, offsets, step, j)

    def add(self, c: cute.Tensor, at: int, left: Any, right: Any) -> None:
        """c += left right, for the 16 columns of c whose accumulators begin at `at`."""
        for i in range(2):
            old = [c[at + 4 * i + n] for n in range(4)]
            for n, x in enumerate(mma(self.dtype, old, left, right[2 * i : 2 * i + 2])):
                c[at + 4 * i + n] = x

    # -- the gradient of the decay of the state -----------------------------------------------

    @cute.jit
    def state_products(self, total: cute.Tensor, base: Int32) -> None:
        """Multiply h and dh element by element. Add the thread's share of the sum over 64 columns
        of V to `total`, for each channel."""
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(self.spec.state_v_first):
            # Two channels, some rows of V.
            pairs = self.spec.head_dim_k // 2
            sharer = Int32(Uint32(thread) >> (pairs.bit_length() - 1))
            column = 2 * (thread & (pairs - 1))
            rows = COLUMNS // self.sharers
            for i in cutlass.range_constexpr(rows):
                at = base + tile_offset(sharer * rows + i, column)
                x, y = (
                    unpack(self.dtype, load_shared(Int32, at + self.memory[name])[0])
                    for name in ("h", "dh")
                )
                for n in cutlass.range_constexpr(2):
                    total[n] = total[n] + x[n] * y[n]
        else:
            # One channel, some columns of V.
            channel = thread & (self.spec.head_dim_k - 1)
            sharer = Int32(Uint32(thread) >> (self.spec.head_dim_k.bit_length() - 1))
            units = COLUMNS // 8 // self.sharers
            for i in cutlass.range_constexpr(units):
                unit = (sharer * units + i) ^ (channel & 7)
                at = base + channel * LINE_BYTES + (unit << 4)
                h, dh = (
                    unpack_all(self.dtype, load_shared(Int32, at + self.memory[name], 4))
                    for name in ("h", "dh")
                )
                for n in cutlass.range_constexpr(8):
                    total[0] = total[0] + h[n] * dh[n]

    @cute.jit
    def store_state_sums(self, total: cute.Tensor, base: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        at = base + self.memory["of_state"]
        # A thread has two channels with state_v_first, and otherwise one.
        if cutlass.const_expr(self.spec.state_v_first):
            store_shared(Float32, at + thread * 8, [total[0], total[1]])
        else:
            store_shared(Float32, at + thread * 4, [total[0]])

    # -- results ------------------------------------------------------------------------------

    @cute.jit
    def store_lower(
        self,
        lower: cute.Tensor,
        dAkk: cute.Tensor,
        place: Any,
        head: Int32,
        band: Int32,
        half: Int32,
    ) -> None:
        lane = cute.arch.lane_idx()
        for i in cutlass.range_constexpr(2):
            row = band * FRAGMENT_ROWS + (lane >> 2) + 8 * i
            if row < place.length:
                target = row_address(dAkk, place.batch, place.start + row, head)
                for j in cutlass.range_constexpr(HALF // 8):
                    column = half * HALF + 8 * j + ((lane & 3) << 1)
                    x = [
                        cutlass.select_(column + n < row, -lower[4 * j + 2 * i + n], Float32(0.0))
                        for n in range(2)
                    ]
                    store_global(Float32, target + Int64(column * 4), x)

    @cute.jit
    def decay(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        g: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dg: cute.Tensor,
        sums: Any,
        betas: Any,
        of_beta: cute.Tensor,
        scale: Float32,
        place: Any,
        head: Int32,
        band: Int32,
        half: Int32,
        base: Int32,
    ) -> None:
        """Store dq, dk and dG, without the further terms of the last token's dG."""
        lane = cute.arch.lane_idx()
        head_qk = shared_head(head, g.shape[2], q.shape[2])
        first = half * self.channels + ((lane & 3) << 1)
        last = place.start + place.length - 1
        g_last = row_address(g, place.batch, last, head, first)
        rows, sources, targets = [], [], []
        for i in cutlass.range_constexpr(2):
            row = band * FRAGMENT_ROWS + (lane >> 2) + 8 * i
            inside = cutlass.min(place.start + row, last)
            rows.append(row)
            sources.append(
                [
                    row_address(x, place.batch, inside, y, first)
                    for x, y in ((q, head_qk), (k, head_qk), (g, head))
                ]
            )
            targets.append([row_address(x, place.batch, inside, head, first) for x in (dq, dk, dg)])
        for j in cutlass.range_constexpr(self.channels // 8):
            end = load_global(Float32, g_last + 32 * j, 2)
            of_end = [Float32(0.0), Float32(0.0)]
            for i in cutlass.range_constexpr(2):
                q_, k_ = (
                    unpack(self.dtype, load_global(Int32, at + 16 * j)[0]) for at in sources[i][:2]
                )
                total = load_global(Float32, sources[i][2] + 32 * j, 2)
                results: list[list[Any]] = [[], [], []]
                for n in cutlass.range_constexpr(2):
                    at = 4 * j + 2 * i + n
                    from_start = exp2(total[n])
                    dq_ = scale * (from_start * sums[0][at])
                    dke = exp2(end[n] - total[n]) * sums[1][at]
                    dks = -from_start * sums[2][at]
                    of_beta[i] = of_beta[i] + dks * k_[n]
                    of_end[n] = of_end[n] + k_[n] * dke
                    dks = betas[i] * dks
                    results[0].append(dq_)
                    results[1].append(dke + dks)
                    results[2].append(q_[n] * dq_ + k_[n] * (dks - dke))
                if rows[i] < place.length:
                    for target, values in zip(targets[i], results, strict=True):
                        store_global(Float32, target + 32 * j, values)
            for n in cutlass.range_constexpr(2):
                for distance in (4, 8, 16):
                    of_end[n] = of_end[n] + cute.arch.shuffle_sync_bfly(of_end[n], distance)
            if lane < 4:
                at = base + self.memory["of_end"] + (band * self.spec.head_dim_k + first) * 4
                store_shared(Float32, at + 32 * j, of_end)

    @cute.jit
    def finish(
        self,
        g: cute.Tensor,
        dg: cute.Tensor,
        dbeta: cute.Tensor,
        place: Any,
        head: Int32,
        band: Int32,
        half: Int32,
        base: Int32,
    ) -> None:
        """Store dbeta; the threads that stored dG of the last token add that token's further
        terms."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        row_of_sums = self.spec.head_dim_k * 4
        if thread < place.length:
            at = base + self.memory["dbeta"] + thread * 4
            total = load_shared(Float32, at)[0] + load_shared(Float32, at + 4 * CHUNK)[0]
            dbeta[place.batch, place.start + thread, head] = total
        last = place.length - 1
        if last >> 4 == band and (last & 7) == lane >> 2:
            first = half * self.channels + ((lane & 3) << 1)
            source = row_address(g, place.batch, place.start + last, head, first)
            target = row_address(dg, place.batch, place.start + last, head, first)
            for j in cutlass.range_constexpr(self.channels // 8):
                at = base + first * 4 + 32 * j
                ends = load_global(Float32, source + 32 * j, 2)
                total = list(load_global(Float32, target + 32 * j, 2))
                of_state = [Float32(0.0), Float32(0.0)]
                for n in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(BANDS):
                        x = load_shared(
                            Float32, at + self.memory["of_end"] + i * row_of_sums + 4 * n
                        )
                        total[n] = total[n] + x[0]
                    for i in cutlass.range_constexpr(self.sharers):
                        x = load_shared(
                            Float32, at + self.memory["of_state"] + i * row_of_sums + 4 * n
                        )
                        of_state[n] = of_state[n] + x[0]
                    total[n] = total[n] + exp2(ends[n]) * of_state[n]
                store_global(Float32, target + 32 * j, total)
