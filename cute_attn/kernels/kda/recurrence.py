"""KDA's recurrence from chunk to chunk, with the output: the second kernel of the fused path.

`prepare` has left for every chunk what does not depend on the state. With S the state at the
chunk's start, a K by V matrix, a chunk does

    r     = v - kd S                   what is left to learn
    v_new = Akk Diag(beta) r           the corrections of its tokens
    o     = qg S + Aqk v_new
    S    <- Diag(decay) S + kg^T v_new

Everything is kept transposed. A warp owns 16 columns of V and all of K: S^T, 16 by K, are the
accumulators of its products, and packed to 16 bits they are, where they lie, the left operand of the
next ones, as r^T and v_new^T are. So the chain from chunk to chunk never leaves a warp's registers,
and warps share nothing but the chunk's tiles in shared memory.

    block (tile of V, value head, sequence)
      load      tiles, decay and v of chunk c + num_stages - 1, by cp.async
      remember  kd S and qg S
      correct   r, then v_new
      output    o, through the shared memory that held v
      update    S

`products="wgmma"` (sm_90a) has the same fragments in the same threads.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..common import warp, warpgroup
from ..common.dtypes import DTYPE
from ..common.spec import WARP_SIZE
from .chunks import num_sequences, sequence_place
from .spec import CHUNK, RecurrenceSpec, record_elements

SUB_TILE_BYTES = CHUNK * 128
MBARRIER_BYTES = 8
UNIT_BYTES = 16  # of a copy, and of the swizzle


class KdaRecurrence:
    """The kernel for one RecurrenceSpec; see the module's docstring."""

    def __init__(self, spec: RecurrenceSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.num_warps = spec.tile_v // 16
        self.num_threads = self.num_warps * WARP_SIZE
        sub_tiles = spec.head_dim_k // 64
        # Byte offsets within a stage.
        self.kd = 0
        self.qg = self.kd + sub_tiles * SUB_TILE_BYTES
        self.kg = self.qg + sub_tiles * SUB_TILE_BYTES
        self.akk = self.kg + sub_tiles * SUB_TILE_BYTES
        self.aqk = self.akk + SUB_TILE_BYTES
        self.v = self.aqk + SUB_TILE_BYTES
        self.decay = self.v + CHUNK * spec.tile_v * 2
        self.stage_bytes = self.decay + max(1024, spec.head_dim_k * 4)
        assert self.v == record_elements(spec.head_dim_k) * 2
        self.smem_bytes = spec.num_stages * (self.stage_bytes + MBARRIER_BYTES)
        self.bulk = spec.copies == "bulk"
        self.wgmma = spec.products == "wgmma"
        # A row of v: whole lines of 128 bytes, or one shorter line.
        self.v_line = min(spec.tile_v * 2, 128)

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        batch, tokens, heads, slots, sequences = (cute.sym_int() for _ in range(5))
        vector = 8

        def rows(shape: tuple[Any, ...]) -> Any:
            strides = (cute.sym_int64(divisibility=vector) for _ in shape[:-1])
            return make_fake_tensor(self.dtype, shape, (*strides, 1), assumed_align=16)

        def states(present: bool) -> Any:
            if not present:
                return None
            matrix = (spec.head_dim_k, spec.head_dim_v)
            if spec.state_v_first:
                matrix = matrix[::-1]
            strides = (cute.sym_int64(divisibility=4) for _ in range(2))
            return make_fake_tensor(
                Float32, (sequences, heads, *matrix), (*strides, matrix[1], 1), assumed_align=16
            )

        elements = record_elements(spec.head_dim_k)
        index = {"int32": Int32, "int64": Int64}.get(spec.index_dtype)
        return (
            rows((batch, tokens, heads, spec.head_dim_v)),
            make_fake_tensor(
                self.dtype,
                (slots, heads, elements),
                (cute.sym_int64(divisibility=vector), elements, 1),
                assumed_align=16,
            ),
            make_fake_tensor(
                Float32,
                (slots, heads, spec.head_dim_k),
                (cute.sym_int64(divisibility=4), spec.head_dim_k, 1),
                assumed_align=16,
            ),
            rows((batch, tokens, heads, spec.head_dim_v)),
            states(spec.has_initial_state),
            states(spec.has_final_state),
            make_fake_tensor(index, (cute.sym_int(),), (1,), assumed_align=index.width // 8)
            if index
            else None,
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        v: cute.Tensor,
        tiles: cute.Tensor,
        decay: cute.Tensor,
        o: cute.Tensor,
        initial_state: cute.Tensor | None,
        final_state: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        stream: Any,
    ) -> None:
        self.kernel(v, tiles, decay, o, initial_state, final_state, cu_seqlens).launch(
            grid=[
                self.spec.head_dim_v // self.spec.tile_v,
                v.shape[2],
                num_sequences(v.shape[0], cu_seqlens),
            ],
            block=[self.num_threads, 1, 1],
            smem=self.smem_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        v: cute.Tensor,
        tiles: cute.Tensor,
        decay: cute.Tensor,
        o: cute.Tensor,
        initial_state: cute.Tensor | None,
        final_state: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
    ) -> None:
        tile, head, sequence = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        spec = self.spec
        place = sequence_place(sequence, v.shape[1], cu_seqlens)
        num_chunks = (place.length + (CHUNK - 1)) // CHUNK
        smem = cutlass.memory.SmemAllocator()
        stages = warp.shared_address(smem.allocate(spec.num_stages * self.stage_bytes, 1024))
        loaded = smem.allocate_array(Int64, spec.num_stages)  # mbarriers of bulk copies
        if cutlass.const_expr(self.bulk):
            if thread == 0:
                for i in cutlass.range_constexpr(spec.num_stages):
                    cute.arch.mbarrier_init(loaded + i, 1)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
        tile_start = tile * spec.tile_v

        state = cute.make_rmem_tensor((spec.head_dim_k // 2,), Float32)
        first_v = tile_start + warp_index * 16
        self.load_state(state, initial_state, sequence, head, first_v)

        for c in cutlass.range_constexpr(spec.num_stages - 1):
            self.load(
                c, num_chunks, stages + c * self.stage_bytes, loaded + c, v, tiles, decay, place,
                head, tile_start,
            )  # fmt: skip

        stage = Int32(0)
        phase = Int32(0)
        for c in cutlass.range(num_chunks, unroll=1):
            ahead = stage + (spec.num_stages - 1)
            ahead = ahead - spec.num_stages if ahead >= spec.num_stages else ahead
            if cutlass.const_expr(spec.num_stages == 1):
                self.load(c, num_chunks, stages, loaded, v, tiles, decay, place, head, tile_start)
                cute.arch.cp_async_wait_group(0)
            else:
                cute.arch.cp_async_wait_group(spec.num_stages - 2)
            # Everybody's copies of this chunk are here, and everybody is done with the last one.
            cute.arch.sync_threads()
            if cutlass.const_expr(spec.num_stages > 1):
                self.load(
                    c + spec.num_stages - 1, num_chunks, stages + ahead * self.stage_bytes,
                    loaded + ahead, v, tiles, decay, place, head, tile_start,
                )  # fmt: skip
            if cutlass.const_expr(self.bulk):
                cute.arch.mbarrier_wait(loaded + stage, phase)
            self.chunk(
                state, stages + stage * self.stage_bytes, o, place, head, first_v, warp_index, c
            )
            if cutlass.const_expr(spec.num_stages == 1):
                cute.arch.sync_threads()
            stage = stage + 1
            if stage == spec.num_stages:
                stage = Int32(0)
                phase = phase ^ 1

        self.store_state(state, final_state, sequence, head, first_v)

    # -- a chunk ------------------------------------------------------------------------------

    @cute.jit
    def load(
        self,
        c: Int32,
        num_chunks: Int32,
        stage: Int32,
        loaded: cute.Pointer,
        v: cute.Tensor,
        tiles: cute.Tensor,
        decay: cute.Tensor,
        place: Any,
        head: Int32,
        tile_start: Int32,
    ) -> None:
        """Start the copies of chunk c, if there is one, and commit them in any case."""
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        if c < num_chunks:
            slot = place.slot + c
            record = (
                tiles.iterator + (Int64(slot) * tiles.stride[0] + Int64(head) * tiles.stride[1])
            ).toint()
            decays = (
                decay.iterator + (Int64(slot) * decay.stride[0] + Int64(head) * decay.stride[1])
            ).toint()
            decay_bytes = spec.head_dim_k * 4
            if cutlass.const_expr(self.bulk):
                if thread == 0:
                    barrier = warp.shared_address(loaded)
                    cute.arch.mbarrier_arrive_and_expect_tx(loaded, self.v + decay_bytes)
                    warp.copy_bulk(stage, record, self.v, barrier)
                    warp.copy_bulk(stage + self.decay, decays, decay_bytes, barrier)
            else:
                units = self.v // UNIT_BYTES
                assert units % self.num_threads == 0
                for i in cutlass.range_constexpr(units // self.num_threads):
                    at = (thread + i * self.num_threads) * UNIT_BYTES
                    warp.copy_async(stage + at, record + at, True)
                if thread < decay_bytes // UNIT_BYTES:
                    at = thread * UNIT_BYTES
                    warp.copy_async(stage + self.decay + at, decays + at, True)
            line_units = spec.tile_v * 2 // UNIT_BYTES
            row = thread // line_units
            unit = thread % line_units
            rows = self.num_threads // line_units
            base = (
                v.iterator
                + (Int64(place.batch) * v.stride[0] + Int64(head) * v.stride[2])
                + (tile_start + unit * (UNIT_BYTES // 2))
            ).toint()
            for i in cutlass.range_constexpr(CHUNK // rows):
                at = c * CHUNK + row + i * rows
                present = at < place.length
                token = place.start + (at if present else Int32(0))
                warp.copy_async(
                    stage + self.v + self.v_offset(row + i * rows, unit),
                    base + Int64(token) * (v.stride[1] * 2),
                    present,
                )
        cute.arch.cp_async_commit_group()

    @cute.jit
    def chunk(
        self,
        state: cute.Tensor,
        stage: Int32,
        o: cute.Tensor,
        place: Any,
        head: Int32,
        first_v: Int32,
        warp_index: Int32,
        c: Int32,
    ) -> None:
        spec, dtype = self.spec, self.dtype

        # remember: (kd S)^T and (qg S)^T, 16 columns of V by 64 tokens
        s = self.operand(self.values(state))
        recalled = self.times_rows(s, stage + self.kd)
        output = self.times_rows(s, stage + self.qg)

        # correct
        v_t = self.load_v(stage + self.v, warp_index)
        recalled = self.done(recalled, pending=1)
        r = self.operand([x - y for x, y in zip(v_t, recalled, strict=True)])
        corrections = self.times_rows(r, stage + self.akk, triangular=True)

        # update
        updated = self.decayed(state, stage + self.decay)
        output = self.done(output, pending=1)
        v_new = self.operand(self.done(corrections))
        updated = self.times_columns(v_new, stage + self.kg, updated)

        # output
        output = self.times_rows(v_new, stage + self.aqk, triangular=True, c=output)
        self.assign(state, self.done(updated, pending=1))
        output = self.done(output)
        self.store_o(output, stage + self.v, o, place, head, first_v, warp_index, c)

    # -- products -----------------------------------------------------------------------------

    def values(self, x: cute.Tensor) -> list[Any]:
        return [x[i] for i in range(cute.size(x))]

    def assign(self, x: cute.Tensor, values: list[Any]) -> None:
        for i, value in enumerate(values):
            x[i] = value

    def decayed(self, state: cute.Tensor, decay: Any) -> list[Any]:
        """S^T Diag(decay), with decay at that address."""
        at = decay + 8 * (cute.arch.lane_idx() % 4)
        values = []
        for j in range(self.spec.head_dim_k // 8):
            d = warp.load_shared(Float32, at + j * 32, 2)
            values += [state[4 * j + i] * d[i % 2] for i in range(4)]
        return values

    def operand(self, x: list[Any]) -> list[Any]:
        """Accumulators of 16 by n as the left operand of the next product: 4 registers for each 16
        of n."""
        packed = [
            warp.pack(self.dtype, x[i], x[i + 1]) for i in range(0, len(x), 2)
        ]  # of each 8 of n: rows 0 to 7, rows 8 to 15
        return packed

    def done(self, c: list[Any], *, pending: int = 0) -> list[Any]:
        """The result of a product, once at most `pending` later ones are under way."""
        return warpgroup.wait(c, pending) if self.wgmma else c

    def times_rows(
        self, a: list[Any], base: Any, *, triangular: bool = False, c: list[Any] | None = None
    ) -> list[Any]:
        """Start c + a m^T, with m the 64 rows at `base`: 16 by 64. With `triangular`, what is above
        the diagonal of m is 0, and may be left out."""
        width = len(a) * 4
        if self.wgmma:
            first = warpgroup.rows_descriptor(base)
            steps = [s % 4 * 2 + s // 4 * (SUB_TILE_BYTES >> 4) for s in range(width // 16)]
            descriptors = [first + step for step in steps]
            return warpgroup.product(self.dtype, c, a, descriptors, CHUNK, columns=False)
        lane = cute.arch.lane_idx()
        matrix, r = lane // 8, lane % 8
        offset = base + (r * 128 + ((matrix ^ r) << 4))
        flipped = offset ^ 64
        result = [Float32(0.0)] * 32 if c is None else list(c)
        for s in range(0, width // 16, 2):
            for j in range(8):
                if triangular and 16 * s > 8 * j + 7:
                    continue
                at = (flipped if s % 4 else offset) + (s // 4) * SUB_TILE_BYTES + j * 1024
                b = warp.load_matrices(at)
                for i in range(2):
                    if triangular and 16 * (s + i) > 8 * j + 7:
                        continue
                    step = s + i
                    result[4 * j : 4 * j + 4] = warp.mma(
                        self.dtype,
                        result[4 * j : 4 * j + 4],
                        a[4 * step : 4 * step + 4],
                        b[2 * i : 2 * i + 2],
                    )
        return result

    def times_columns(self, a: list[Any], base: Any, c: list[Any]) -> list[Any]:
        """Start c + a m, with m the 64 rows, of K elements, at `base`: 16 by K."""
        if self.wgmma:
            first = warpgroup.columns_descriptor(base)
            descriptors = [first + s * (2048 >> 4) for s in range(CHUNK // 16)]
            width = self.spec.head_dim_k
            return warpgroup.product(self.dtype, c, a, descriptors, width, columns=True)
        lane = cute.arch.lane_idx()
        matrix, r = lane // 8, lane % 8
        offset = base + ((matrix % 2) * 1024 + r * 128 + (((matrix // 2) ^ r) << 4))
        offsets = [offset ^ (j << 4) for j in range(0, 8, 2)]
        result = list(c)
        for s in range(CHUNK // 16):
            for j in range(0, self.spec.head_dim_k // 8, 2):
                at = offsets[j % 8 // 2] + (j // 8) * SUB_TILE_BYTES + s * 2048
                b = warp.load_matrices(at, transposed=True)
                for i in range(2):
                    n = 4 * (j + i)
                    result[n : n + 4] = warp.mma(
                        self.dtype, result[n : n + 4], a[4 * s : 4 * s + 4], b[2 * i : 2 * i + 2]
                    )
        return result

    # -- v and o ------------------------------------------------------------------------------

    def v_offset(self, row: Any, unit: Any) -> Any:
        """Byte of the 16-byte unit of a row of v, swizzled so that 8 rows' units of one column, and
        a row's units, are in different banks."""
        units = self.v_line // UNIT_BYTES
        swizzle = row % 8 if units == 8 else (row // (8 // units)) % units
        within = row * self.v_line + (((unit % units) ^ swizzle) << 4)
        return within + (unit // units) * (CHUNK * self.v_line)

    def load_v(self, base: Any, warp_index: Any) -> list[Any]:
        """v^T of the warp's 16 columns, as accumulators."""
        lane = cute.arch.lane_idx()
        matrix, r = lane // 8, lane % 8
        values = []
        for j in range(0, CHUNK // 8, 2):
            row = 8 * (j + matrix // 2) + r
            at = base + self.v_offset(row, 2 * warp_index + matrix % 2)
            for x in warp.load_matrices(at, transposed=True):
                values += warp.unpack(self.dtype, x)
        return values

    @cute.jit
    def store_o(
        self,
        output: Any,
        base: Int32,
        o: cute.Tensor,
        place: Any,
        head: Int32,
        first_v: Int32,
        warp_index: Int32,
        c: Int32,
    ) -> None:
        """The warp's columns of o, through those of v, which nobody else reads."""
        lane = cute.arch.lane_idx()
        row, pair = lane // 4, lane % 4
        packed = self.operand(output)
        cute.arch.sync_warp()
        for j in cutlass.range_constexpr(CHUNK // 8):
            for half in cutlass.range_constexpr(2):
                x = warp.transpose_matrix(packed[2 * j + half])
                at = base + self.v_offset(8 * j + row, 2 * warp_index + half) + 4 * pair
                warp.store_shared(Int32, at, [x])
        cute.arch.sync_warp()
        unit = lane % 2
        start = (
            o.iterator
            + (Int64(place.batch) * o.stride[0] + Int64(head) * o.stride[2])
            + (first_v + unit * 8)
        ).toint()
        for i in cutlass.range_constexpr(CHUNK // 16):
            token = 16 * i + lane // 2
            x = warp.load_shared(Int32, base + self.v_offset(token, 2 * warp_index + unit), 4)
            at = c * CHUNK + token
            if at < place.length:
                warp.store_global(Int32, start + Int64(place.start + at) * (o.stride[1] * 2), x)

    # -- states -------------------------------------------------------------------------------

    @cute.jit
    def load_state(
        self,
        state: cute.Tensor,
        source: cute.Tensor | None,
        sequence: Int32,
        head: Int32,
        first_v: Int32,
    ) -> None:
        if cutlass.const_expr(source is None):
            state.fill(0.0)
        else:
            self.copy_state(state, source, sequence, head, first_v, store=False)

    @cute.jit
    def store_state(
        self,
        state: cute.Tensor,
        target: cute.Tensor | None,
        sequence: Int32,
        head: Int32,
        first_v: Int32,
    ) -> None:
        if cutlass.const_expr(target is not None):
            self.copy_state(state, target, sequence, head, first_v, store=True)

    def copy_state(
        self, state: cute.Tensor, memory: cute.Tensor, sequence: Any, head: Any, first_v: Any,
        *, store: bool,
    ) -> None:  # fmt: skip
        """Between the warp's part of S^T, as accumulators, and a head's matrix in memory."""
        lane = cute.arch.lane_idx()
        for i in range(cute.size(state)):
            k = i // 4 * 8 + 2 * (lane % 4) + i % 2
            v = first_v + lane // 4 + i % 4 // 2 * 8
            row, column = (v, k) if self.spec.state_v_first else (k, v)
            if store:
                memory[sequence, head, row, column] = state[i]
            else:
                state[i] = memory[sequence, head, row, column]
