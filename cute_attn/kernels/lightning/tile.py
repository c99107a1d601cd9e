"""A tile of the Lightning state in the registers of one or more warps, and its arithmetic.

Rows of a tile are contiguous in memory. A tile is V by K in layout "vk", and K by V in "kv". Each
warp owns a contiguous band of rows. One access of a warp covers `32 / lanes_per_row` rows; every
lane has `vector` neighbouring columns. The output's reduction over K runs along a row in "vk" (by
shuffles), and along a column in "kv" (by shuffles, then between warps through shared memory).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from ..common.dtypes import DTYPE
from ..common.spec import VECTOR_BYTES, WARP_SIZE
from .arguments import Arguments
from .spec import DecodeSpec

MAX_REGISTERS = 200  # registers of a thread for the tile; 55 are left for addresses and temporaries


class StateTile:
    """A tile's distribution over threads, and its arithmetic. All methods run on the device."""

    def __init__(self, spec: DecodeSpec):
        self.dtype = DTYPE[spec.dtype]
        self.state_dtype = DTYPE[spec.state_dtype]
        self.state_is_vk = spec.state_layout == "vk"
        self.head_dim_k, self.head_dim_v = spec.head_dim_k, spec.head_dim_v
        self.tile_v = spec.tile_v
        self.multi_token = spec.multi_token
        self.num_warps = spec.warps_per_tile
        self.lanes_per_row = spec.lanes_per_row
        self.rows_per_step = spec.rows_per_step
        self.vector, self.rows, self.vectors = spec.thread_shape
        self.rows_per_warp = self.rows * self.rows_per_step

        # A thread's registers hold the tile, two vectors along its columns, and two values for each
        # row.
        held = self.vector * self.rows * self.vectors
        self.registers = held + 2 * self.vector * self.vectors + 2 * self.rows
        if self.registers > MAX_REGISTERS:
            raise ValueError(
                f"tile_v={spec.tile_v} over {self.num_warps} warps needs about {self.registers} "
                f"registers a thread, more than {MAX_REGISTERS}: use more warps or a smaller tile"
            )

    # -- distribution -----------------------------------------------------------------------

    def warp_and_lane(self) -> tuple[cutlass.Int32, cutlass.Int32]:
        """This thread's lane, and its warp's number among the warps that share the tile."""
        thread, _, _ = cute.arch.thread_idx()
        return (thread // WARP_SIZE) % self.num_warps, thread % WARP_SIZE

    def first_row_and_column(self) -> tuple[cutlass.Int32, cutlass.Int32]:
        """This thread's first row and first column in the tile."""
        warp, lane = self.warp_and_lane()
        row = warp * self.rows_per_warp + lane // self.lanes_per_row
        column = (lane % self.lanes_per_row) * self.vector
        return row, column

    @cute.jit
    def thread_part(self, state: cute.Tensor, tile_index: cutlass.Int32) -> cute.Tensor:
        """This thread's part of a tile of one head's state, with the modes (vector, rows,
        vectors)."""
        row, column = self.first_row_and_column()
        pitch = self.head_dim_k if self.state_is_vk else self.head_dim_v
        if cutlass.const_expr(self.state_is_vk):
            row += tile_index * self.tile_v
        else:
            column += tile_index * self.tile_v
        start = (state.iterator + row * pitch + column).align(VECTOR_BYTES)
        return cute.make_tensor(
            start,
            cute.make_layout(
                (self.vector, self.rows, self.vectors),
                stride=(1, self.rows_per_step * pitch, self.lanes_per_row * self.vector),
            ),
        )

    @cute.jit
    def along_columns(self, x: cute.Tensor, offset: cutlass.Int32) -> cute.Tensor:
        """The elements of x at this thread's columns: (vector, vectors), float32."""
        _, column = self.first_row_and_column()
        return self.gather(
            x,
            offset + column,
            cute.make_layout(
                (self.vector, self.vectors), stride=(1, self.lanes_per_row * self.vector)
            ),
        )

    @cute.jit
    def along_rows(self, x: cute.Tensor, offset: cutlass.Int32) -> cute.Tensor:
        """The elements of x at this thread's rows: (rows,), float32."""
        row, _ = self.first_row_and_column()
        return self.gather(
            x, offset + row, cute.make_layout((self.rows,), stride=(self.rows_per_step,))
        )

    @cute.jit
    def gather(self, x: cute.Tensor, start: cutlass.Int32, layout: cute.Layout) -> cute.Tensor:
        source = cute.make_tensor(x.iterator + start, layout)
        loaded = cute.make_rmem_tensor(source.shape, self.dtype)
        cute.autovec_copy(source, loaded)
        result = cute.make_rmem_tensor(source.shape, cutlass.Float32)
        result.store(loaded.load().to(cutlass.Float32))
        return result

    @cute.jit
    def along_k(self, x: cute.Tensor) -> cute.Tensor:
        """The elements of a token's q or k that this thread needs."""
        if cutlass.const_expr(self.state_is_vk):
            return self.along_columns(x, cutlass.Int32(0))
        return self.along_rows(x, cutlass.Int32(0))

    @cute.jit
    def along_v(self, x: cute.Tensor, tile_index: cutlass.Int32) -> cute.Tensor:
        """The elements of a token's v that this thread needs."""
        offset = tile_index * self.tile_v
        if cutlass.const_expr(self.state_is_vk):
            return self.along_rows(x, offset)
        return self.along_columns(x, offset)

    # -- arithmetic ---------------------------------------------------------------------------

    @cute.jit
    def update(
        self, s: cute.Tensor, factor: cutlass.Float32, k_frag: cute.Tensor, v_frag: cute.Tensor
    ) -> None:
        """s <- factor * s + v k^T. The rounding is fixed (a product, then one fused multiply-add),
        so that T tokens in one call and T calls agree bitwise."""
        by_column, by_row = (k_frag, v_frag) if self.state_is_vk else (v_frag, k_frag)
        for r in cutlass.range_constexpr(self.rows):
            for j in cutlass.range_constexpr(self.vectors):
                for i in cutlass.range_constexpr(self.vector):
                    s[i, r, j] = cute.math.fma(s[i, r, j], factor, by_row[r] * by_column[i, j])

    @cute.jit
    def output(
        self,
        s: cute.Tensor,
        q_frag: cute.Tensor,
        o: cute.Tensor,
        softmax_scale: cutlass.Float32,
        tile_index: cutlass.Int32,
    ) -> None:
        """o <- softmax_scale * s q for the tile's columns of V."""
        if cutlass.const_expr(self.state_is_vk):
            self.output_vk(s, q_frag, o, softmax_scale, tile_index)
        else:
            self.output_kv(s, q_frag, o, softmax_scale, tile_index)

    @cute.jit
    def output_vk(
        self,
        s: cute.Tensor,
        q_frag: cute.Tensor,
        o: cute.Tensor,
        softmax_scale: cutlass.Float32,
        tile_index: cutlass.Int32,
    ) -> None:
        """Reduce each row over the lanes that share it. Each step exchanges half of a lane's rows
        with another lane, so that lane i ends with the sum of row i."""
        warp, lane = self.warp_and_lane()
        sums = []
        for r in cutlass.range_constexpr(self.rows):
            total = cutlass.Float32(0.0)
            for j in cutlass.range_constexpr(self.vectors):
                for i in cutlass.range_constexpr(self.vector):
                    total = cute.math.fma(s[i, r, j], q_frag[i, j], total)
            sums.append(total)

        step = self.lanes_per_row // 2
        while cutlass.const_expr(step > 0):
            if cutlass.const_expr(len(sums) > 1):
                half = len(sums) // 2
                upper = (lane & step) != 0
                kept = []
                for r in cutlass.range_constexpr(half):
                    mine = sums[half + r] if upper else sums[r]
                    yours = sums[r] if upper else sums[half + r]
                    kept.append(mine + cute.arch.shuffle_sync_bfly(yours, offset=step))
                sums = kept
            else:
                sums = [sums[0] + cute.arch.shuffle_sync_bfly(sums[0], offset=step)]
            step = step // 2

        # Now a lane has `len(sums)` rows, or `sharing` lanes share one row.
        sharing = max(1, self.lanes_per_row // self.rows)
        lane_in_row = lane % self.lanes_per_row
        first = (lane_in_row // sharing) * len(sums)
        base = warp * self.rows_per_warp + lane // self.lanes_per_row
        start = tile_index * self.tile_v
        if cutlass.const_expr(self.num_warps == 1):
            if lane_in_row % sharing == 0:
                for r in cutlass.range_constexpr(len(sums)):
                    row = start + base + (first + r) * self.rows_per_step
                    o[row] = (sums[r] * softmax_scale).to(self.dtype)
        else:
            # Stage in shared memory: direct stores of a warp would be partial sectors.
            collected = self.allocate(self.tile_v)
            if lane_in_row % sharing == 0:
                for r in cutlass.range_constexpr(len(sums)):
                    collected[base + (first + r) * self.rows_per_step] = sums[r]
            cute.arch.sync_threads()
            thread = warp * WARP_SIZE + lane
            if thread < self.tile_v:
                o[start + thread] = (collected[thread] * softmax_scale).to(self.dtype)
            if cutlass.const_expr(self.multi_token):
                cute.arch.sync_threads()  # the next token reuses `collected`

    @cute.jit
    def output_kv(
        self,
        s: cute.Tensor,
        q_frag: cute.Tensor,
        o: cute.Tensor,
        softmax_scale: cutlass.Float32,
        tile_index: cutlass.Int32,
    ) -> None:
        """Reduce each column over the rows of a thread, the lanes of a warp, then the warps."""
        warp, lane = self.warp_and_lane()
        thread = warp * WARP_SIZE + lane
        _, column = self.first_row_and_column()
        partial = self.allocate((self.tile_v, self.num_warps))
        for j in cutlass.range_constexpr(self.vectors):
            for i in cutlass.range_constexpr(self.vector):
                total = cutlass.Float32(0.0)
                for r in cutlass.range_constexpr(self.rows):
                    total = cute.math.fma(s[i, r, j], q_frag[r], total)
                step = self.lanes_per_row
                while cutlass.const_expr(step < WARP_SIZE):
                    total += cute.arch.shuffle_sync_bfly(total, offset=step)
                    step = step * 2
                if lane < self.lanes_per_row:
                    partial[column + j * self.lanes_per_row * self.vector + i, warp] = total
        cute.arch.sync_threads()
        if thread < self.tile_v:
            total = cutlass.Float32(0.0)
            for w in cutlass.range_constexpr(self.num_warps):
                total += partial[thread, w]
            o[tile_index * self.tile_v + thread] = (total * softmax_scale).to(self.dtype)
        if cutlass.const_expr(self.multi_token):
            cute.arch.sync_threads()  # the next token reuses `partial`

    def allocate(self, shape: cute.Shape) -> cute.Tensor:
        """Shared memory for sums that cross warps."""
        return cutlass.memory.SmemAllocator().allocate_tensor(
            cutlass.Float32, cute.make_layout(shape), 16
        )

    @cute.jit
    def replay(
        self,
        s: cute.Tensor,
        factor: cutlass.Float32,
        x: Arguments,
        sequence: cutlass.Int32,
        slot: cutlass.Int32,
        head: cutlass.Int32,
        tile_index: cutlass.Int32,
    ) -> None:
        """Advance s by the accepted tokens of the slot's draft records."""
        # The count is untrusted data: never read past the records.
        accepted = cutlass.min(x.num_accepted[sequence], x.draft_k.shape[1])
        for i in cutlass.range(accepted, unroll=1):
            k_frag = self.along_k(x.draft_k[slot, i, head, None])
            v_frag = self.along_v(x.draft_v[slot, i, head, None], tile_index)
            self.update(s, factor, k_frag, v_frag)

    @cute.jit
    def tokens(
        self,
        s: cute.Tensor,
        factor: cutlass.Float32,
        x: Arguments,
        sequence: cutlass.Int32,
        head: cutlass.Int32,
        tile_index: cutlass.Int32,
    ) -> None:
        """Advance s by the call's T tokens, and write the output of each."""
        last = x.q.shape[1] - 1
        q_frag = self.along_k(x.q[sequence, 0, head, None])
        k_frag = self.along_k(x.k[sequence, 0, head, None])
        v_frag = self.along_v(x.v[sequence, 0, head, None], tile_index)
        for t in cutlass.range(last + 1, unroll=1):
            # Load the next token while this one is computed.
            following = cutlass.min(t + 1, last)
            q_next = self.along_k(x.q[sequence, following, head, None])
            k_next = self.along_k(x.k[sequence, following, head, None])
            v_next = self.along_v(x.v[sequence, following, head, None], tile_index)
            self.update(s, factor, k_frag, v_frag)
            row = x.o[sequence, t, head, None]
            self.output(s, q_frag, row, x.softmax_scale, tile_index)
            q_frag.store(q_next.load())
            k_frag.store(k_next.load())
            v_frag.store(v_next.load())

    @cute.jit
    def zeros(
        self,
        o: cute.Tensor,
        sequence: cutlass.Int32,
        head: cutlass.Int32,
        tile_index: cutlass.Int32,
    ) -> None:
        """Write zeros, the output of a padded sequence."""
        if cutlass.const_expr(self.multi_token):
            for t in cutlass.range(o.shape[1], unroll=1):
                self.store_zeros(o[sequence, t, head, None], tile_index)
        else:
            self.store_zeros(o[sequence, head, None], tile_index)

    @cute.jit
    def store_zeros(self, o: cute.Tensor, tile_index: cutlass.Int32) -> None:
        warp, lane = self.warp_and_lane()
        thread = warp * WARP_SIZE + lane
        for start in cutlass.range_constexpr(0, self.tile_v, self.num_warps * WARP_SIZE):
            if start + thread < self.tile_v:
                o[tile_index * self.tile_v + start + thread] = self.dtype(0.0)
