"""KDA within chunks: Aqk, the inverse Akk, and w, u, qg, kg. A stage of the modular path.

For every chunk of 64 tokens and value head (see `kda_chunk_intra_reference` in
`cute_attn.reference.kda`)

    Aqk_ij = scale q_i . (exp2(G_i - G_j) * k_j)           j <= i
    Akk    = (I + L)^-1, L_ij = beta_i k_i . (exp2(G_i - G_j) * k_j), j < i
    w      = Akk Diag(beta) (exp2(G) * k)                  u  = Akk Diag(beta) v
    qg     = exp2(G) * q                                   kg = exp2(G_e - G) * k

    CTA (value head, chunk), 8 warps
      load      q and k by cp.async; G, as sums within sub-chunks of 16 tokens, and beta
      norms     with l2norm, the norms of q and k; they multiply all later results
      scores    warps b and b + 4: rows of sub-chunk b, half of the channels each; also qg, kg,
                and beta exp2(G) * k to shared memory
      inverse   warps 0 to 3: L, and the inverses of its blocks on the diagonal
                warps 4 to 7: Aqk to global memory, beta v to shared memory
                all: the other blocks of the inverse, and Akk to global memory
      products  warps 0 to 3: w, 16 tokens each
                warps 4 to 7: u
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric

from ....common.arguments import fake_offsets, fake_rows, fake_strided
from ....common.carried import Carried
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.ptx.convert import pack_all, unpack_all
from ....common.ptx.matrices import load_matrices
from ....common.ptx.memory import (
    load_global,
    load_shared,
    shared_address,
    store_global,
    store_shared,
)
from ....common.ptx.mma import mma
from ....common.smem import Buffer, SharedMemory
from ....common.spec import WARP_SIZE
from ..chunks import Divisors, Rows, num_slots, place_of, row_offset, rows_of
from ..gate_sums import GateSums
from ..inverse import Inverse
from ..operands import Operands
from ..score_tiles import ScoreTiles
from ..scores import Scores
from ..spec import CHUNK, IntraSpec
from ..sub_chunks import (
    GROUP,
    NUM_THREADS,
    REGION,
    REGIONS,
    SUB_CHUNK,
    SUB_CHUNKS,
    ChunkMemory,
    row_and_part,
    tile_unit,
    warp_of_scores,
)
from ..tiles import LINE_BYTES, SUB_TILE_BYTES, UNIT_BYTES

HALF = SUB_CHUNKS * WARP_SIZE  # threads in half of the warps
MOST_COLUMNS = 128  # columns of a product


class Outputs(Carried):
    """A `scores.Outputs` that stores qg and kg to global memory, and decayed k to shared memory.

    Args:
        k_decayed: byte offset of beta exp2(G) * k in shared memory.
        length: rows of the chunk.
        qg, kg: rows to write; qg may be None.
    """

    def __init__(self, memory: ChunkMemory, k_decayed: int, length: Any, qg: Rows | None, kg: Rows):
        self.memory, self.k_decayed, self.length = memory, k_decayed, length
        self.qg, self.kg = qg, kg

    def decayed_k(
        self, smem: Int32, b: Int32, half: int, group: Any, k: list[Any], start: Any
    ) -> None:
        r, c = row_and_part()
        row = b * SUB_CHUNK + 8 * half + r
        factor = self.memory.row_factor(smem, row)
        k = [x * (y * factor) for x, y in zip(k, start, strict=True)]
        k = pack_all(self.memory.dtype, k)
        store_columns(smem + self.k_decayed, row, group, c, k)

    def decayed_q(
        self, smem: Int32, b: Int32, half: int, group: Any, q: list[Any], start: Any, scale: Any
    ) -> None:
        if self.qg is not None:
            r, c = row_and_part()
            q = pack_all(self.memory.dtype, [x * y for x, y in zip(q, start, strict=True)])
            put(self.qg, self.length, b * SUB_CHUNK + 8 * half + r, group * 4 + c, q)

    def k_to_end(self, smem: Int32, b: Int32, half: int, group: Any, k: list[Any]) -> None:
        r, c = row_and_part()
        row = b * SUB_CHUNK + 8 * half + r
        k = pack_all(self.memory.dtype, self.memory.as_column(smem, row, k))
        put(self.kg, self.length, row, group * 4 + c, k)


@cute.jit
def put(rows: Any, length: Int32, row: Int32, unit: Int32, x: Any) -> None:
    """Store 16 bytes of a row, unless the row is past the chunk's end."""
    if row < length:
        address = rows.start + row_offset(row, rows.pitch) + Int64(unit * UNIT_BYTES)
        store_global(Int32, address, x)


def store_columns(tile: Any, row: Any, group: Any, part: Any, packed: Any) -> None:
    """Store 8 neighbouring columns, number `part` of a group of 32, to an operand. Pair i goes to
    unit i of the group, so that a thread of the product gets all four pairs and stores 16 bytes at
    once.
    """
    base = tile + (group >> 1) * SUB_TILE_BYTES + 4 * part
    for i in range(4):
        at = base + tile_unit(row, ((group & 1) << 2) + i)
        store_shared(Int32, at, [packed[i]])


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        q, k: [B, T, HQK, K].
        v: [B, T, HV, V].
        g: float32 [B, T, HV, K]: G, the output of `gate_cumsum`.
        beta: [B, T, HV], any strides.
        cu_seqlens: [N + 1], or None.
        Aqk, Akk: [B, T, HV, 64], written; columns are tokens of the chunk, and 0 above the
            diagonal.
        w, qg, kg: [B, T, HV, K], written; qg is None without store_qg.
        u: [B, T, HV, V], written.
        scale: factor of Aqk; qg does not include it.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    cu_seqlens: cute.Tensor | None
    Aqk: cute.Tensor
    Akk: cute.Tensor
    w: cute.Tensor
    u: cute.Tensor
    qg: cute.Tensor | None
    kg: cute.Tensor
    scale: Float32


class KdaChunkIntra:
    """The kernel for one IntraSpec; see the module's docstring."""

    def __init__(self, spec: IntraSpec):
        self.spec = spec
        self.dtype, self.beta_dtype = DTYPE[spec.dtype], DTYPE[spec.beta_dtype]
        # v is loaded, and u computed, in parts that fit in registers. A part of the loads has some
        # rows, or where threads do not divide over a row, a sub-tile's columns of all rows.
        self.units = spec.head_dim_v // 8  # 16-byte units of a part's row of v
        self.parts = max(1, spec.head_dim_v // MOST_COLUMNS)
        self.of_columns = HALF % self.units != 0
        if self.of_columns:
            self.units = LINE_BYTES // UNIT_BYTES
            self.parts = spec.head_dim_v * 2 // LINE_BYTES
        self.loads = CHUNK * self.units // HALF
        if not self.of_columns:
            self.loads //= self.parts
        # beta exp2(G) * k and beta v are operands: sub-tiles whose columns are in the order of
        # `store_columns`. beta v overwrites P if it fits.
        k_decayed = Buffer("k_decayed", self.dtype, CHUNK * spec.head_dim_k)
        v = Buffer("v", self.dtype, CHUNK * spec.head_dim_v)
        later = SharedMemory(REGIONS, v)
        before = ChunkMemory(spec.dtype, spec.head_dim_k, l2norm=spec.l2norm)
        in_place = later.nbytes <= before["blocks"]
        more = (k_decayed,) if in_place else (k_decayed, v)
        self.memory = ChunkMemory(spec.dtype, spec.head_dim_k, *more, l2norm=spec.l2norm)
        self.smem_bytes = self.memory.nbytes
        self.k_decayed = self.memory["k_decayed"]
        self.v = later["v"] if in_place else self.memory["v"]
        self.operands = Operands(self.memory)
        self.sums = GateSums(self.memory)
        self.scores = Scores(self.memory, self.sums, few_registers=spec.store_qg)
        self.score_tiles = ScoreTiles(self.memory, self.sums)
        self.inverse = Inverse(self.memory)

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        batch, tokens, heads, heads_qk = (cute.sym_int() for _ in range(4))

        def rows(dtype: type[Numeric], heads: Any, columns: int) -> Any:
            return fake_rows(dtype, (batch, tokens, heads, columns))

        return placeholders(
            Arguments(
                q=rows(self.dtype, heads_qk, spec.head_dim_k),
                k=rows(self.dtype, heads_qk, spec.head_dim_k),
                v=rows(self.dtype, heads, spec.head_dim_v),
                g=rows(Float32, heads, spec.head_dim_k),
                beta=fake_strided(self.beta_dtype, (batch, tokens, heads)),
                cu_seqlens=fake_offsets(spec.index_dtype),
                Aqk=rows(self.dtype, heads, CHUNK),
                Akk=rows(self.dtype, heads, CHUNK),
                w=rows(self.dtype, heads, spec.head_dim_k),
                u=rows(self.dtype, heads, spec.head_dim_v),
                qg=rows(self.dtype, heads, spec.head_dim_k) if spec.store_qg else None,
                kg=rows(self.dtype, heads, spec.head_dim_k),
                scale=Float32(1.0),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Process all chunks. Unless stated otherwise, the strides of tensors are multiples of 16
        bytes, and the last one is 1.
        """
        a, stream = gathered(Arguments, args)
        slots = num_slots(a.g.shape[0], a.g.shape[1], a.cu_seqlens)
        self.kernel(a, Divisors.of(a.g, a.q)).launch(
            grid=[a.g.shape[2] * slots, 1, 1],
            block=[NUM_THREADS, 1, 1],
            smem=self.smem_bytes,
            min_blocks_per_mp=self.memory.blocks_per_sm(),
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments, by: Divisors) -> None:
        thread, _, _ = cute.arch.thread_idx()
        _, head, head_qk, place = place_of(by, x.g.shape[1], x.cu_seqlens)
        smem = shared_address(cutlass.memory.SmemAllocator().allocate(self.smem_bytes, 1024))
        if place.valid:
            raw = self.load_sums(rows_of(x.g, place, head), place.length)
            self.operands.start_copies(x.q, x.k, place, head_qk, smem)
            self.load_beta(x.beta, smem, place, head)
            self.shift_sums(raw, smem)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()

            self.operands.norms(smem, x.scale)
            if thread < self.spec.head_dim_k:
                self.finish_sums(smem, thread)
            cute.arch.sync_threads()

            out = Outputs(
                self.memory,
                self.k_decayed,
                place.length,
                rows_of(x.qg, place, head),
                rows_of(x.kg, place, head),
            )
            warp, b, half = warp_of_scores(thread)
            acc = cute.make_rmem_tensor((16 * SUB_CHUNKS,), Float32)
            self.scores.score(smem, b, half, x.scale, out, acc)
            self.score_tiles.swap_sums(smem, b, half, acc)
            if half == 0:
                self.score_tiles.finish_lower(smem, b, acc)
                self.inverse.invert_diagonal(smem, b)
            else:
                rows_v = rows_of(x.v, place, head)
                values = self.load_values(rows_v, b, 0, place.length)
                self.score_tiles.finish_scores(smem, b, x.scale, acc)
                to = rows_of(x.Aqk, place, head)
                self.copy_rows(smem + REGION["tile_qk"], to, b, Int32(0), SUB_CHUNK, place.length)
                self.store_values(smem, b, 0, values)
                for n in cutlass.range_constexpr(1, self.parts):
                    more = self.load_values(rows_v, b, n, place.length)
                    self.store_values(smem, b, n, more)
            cute.arch.sync_threads()
            self.inverse.invert(smem, warp, smem)
            rows = SUB_CHUNK // 2
            to = rows_of(x.Akk, place, head)
            self.copy_rows(smem + REGION["tile_kk"], to, b, half * rows, rows, place.length)
            if half == 0:
                self.multiply(
                    smem, b, smem + self.k_decayed, self.spec.head_dim_k,
                    rows_of(x.w, place, head), place.length,
                )  # fmt: skip
            else:
                to_u = rows_of(x.u, place, head)
                width = self.spec.head_dim_v // self.parts
                for n in cutlass.range_constexpr(self.parts):
                    self.multiply(
                        smem, b, smem + self.v + n * width // 64 * SUB_TILE_BYTES, width,
                        Rows(to_u.start + Int64(n * width * 2), to_u.pitch), place.length,
                    )  # fmt: skip

    # -- gates and beta -----------------------------------------------------------------------

    @cute.jit
    def load_beta(self, beta: cute.Tensor, smem: Int32, place: Any, head: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        if thread < CHUNK:
            x = Float32(0.0)
            if thread < place.length:
                x = Float32(beta[place.batch, place.start + thread, head])
            store_shared(Float32, smem + self.memory["of_rows"] + thread * 4, [x])

    @cute.jit
    def load_sums(self, rows: Any, length: Int32) -> Any:
        """Load a thread's part of G: two channels of a sub-chunk's rows. Rows past the chunk's end
        repeat its last row."""
        thread, _, _ = cute.arch.thread_idx()
        pairs = self.spec.head_dim_k // 2
        raw = cute.make_rmem_tensor((2 * SUB_CHUNK,), Float32)
        if cutlass.const_expr(pairs * SUB_CHUNKS < NUM_THREADS):
            raw.fill(0.0)  # the other threads' values are unused, but must not be undefined
        if thread < pairs * SUB_CHUNKS:
            first, pair = thread // pairs * SUB_CHUNK, thread % pairs
            source = rows.start + Int64(pair * 8)
            for t in cutlass.range_constexpr(SUB_CHUNK):
                at = cutlass.min(first + t, length - 1)
                x = load_global(Float32, source + row_offset(at, rows.pitch), 2)
                raw[2 * t], raw[2 * t + 1] = x[0], x[1]
        return raw

    @cute.jit
    def shift_sums(self, raw: cute.Tensor, smem: Int32) -> None:
        """Store P, and G of each sub-chunk's first token to `start`."""
        thread, _, _ = cute.arch.thread_idx()
        pairs = self.spec.head_dim_k // 2
        if thread < pairs * SUB_CHUNKS:
            sub, pair = thread // pairs, thread % pairs
            sums = [[raw[2 * t + n] - raw[n] for n in range(2)] for t in range(SUB_CHUNK)]
            self.sums.store_rows_of_sums(smem, pair, sub, sums, ascending=True)
            at = smem + sub * self.memory.p_row + (pair << 3)
            store_shared(Float32, at + self.memory["start"], [raw[0], raw[1]])
            store_shared(Float32, at + self.memory["to_next"], sums[SUB_CHUNK - 1])

    def finish_sums(self, smem: Int32, channel: Int32) -> None:
        """Fill `start`, `to_next` and `to_end` from G of the sub-chunks' first tokens."""
        at = smem + (channel << 2)
        count = range(SUB_CHUNKS)
        first = [
            load_shared(Float32, at + self.memory["start"] + b * self.memory.p_row)[0]
            for b in count
        ]
        last = SUB_CHUNKS - 1
        rest = load_shared(Float32, at + self.memory["to_next"] + last * self.memory.p_row)[0]
        steps = [*(first[b + 1] - first[b] for b in range(last)), rest]
        end = first[last] + rest
        for b in count:
            row = at + b * self.memory.p_row
            self.sums.store_start(row, first[b])
            store_shared(Float32, row + self.memory["to_next"], [steps[b]])
            store_shared(Float32, row + self.memory["to_end"], [end - first[b]])

    # -- w and u ------------------------------------------------------------------------------

    @cute.jit
    def load_values(self, v: Any, b: Int32, part: cutlass.Constexpr, length: Int32) -> Any:
        """Load 8 neighbours of some rows of a part of v, by 128 threads."""
        thread = b * WARP_SIZE + cute.arch.lane_idx()
        values = cute.make_rmem_tensor((4 * self.loads,), Int32)
        values.fill(0)
        start = v.start + Int64((thread % self.units) * UNIT_BYTES)
        if cutlass.const_expr(self.of_columns):
            start = start + Int64(part * LINE_BYTES)
        for i in cutlass.range_constexpr(self.loads):
            at = self.row_of_load(thread, part, i)
            if at < length:
                x = load_global(Int32, start + row_offset(at, v.pitch), 4)
                for n in cutlass.range_constexpr(4):
                    values[4 * i + n] = x[n]
        return values

    def row_of_load(self, thread: Any, part: int, i: int) -> Any:
        before = 0 if self.of_columns else part * self.loads
        return thread // self.units + (before + i) * (HALF // self.units)

    def store_values(self, smem: Int32, b: Int32, part: int, values: cute.Tensor) -> None:
        thread = b * WARP_SIZE + cute.arch.lane_idx()
        unit = thread % self.units
        for i in range(self.loads):
            x = unpack_all(self.dtype, [values[4 * i + n] for n in range(4)])
            at = self.row_of_load(thread, part, i)
            beta = self.memory.of_token(smem, "of_rows", at)
            x = pack_all(self.dtype, [y * beta for y in x])
            target = smem + self.v
            if self.of_columns:
                target = target + part * SUB_TILE_BYTES
            store_columns(target, at, unit >> 2, unit & 3, x)

    @cute.jit
    def multiply(
        self, smem: Int32, b: Int32, right: Int32, width: cutlass.Constexpr, target: Any,
        length: Int32,
    ) -> None:  # fmt: skip
        """Multiply the 16 rows of sub-chunk b of Akk by an operand of `width` columns."""
        r, c = row_and_part()
        acc = cute.make_rmem_tensor((width // 2,), Float32)
        acc.fill(0.0)
        for j in cutlass.range(b + 1, unroll=1):
            self._multiply_block(smem, b, j, right, width, acc)
        for group in cutlass.range_constexpr(width // GROUP):
            for half in cutlass.range_constexpr(2):
                row = b * SUB_CHUNK + half * 8 + r
                if row < length:
                    start = group * 16 + 2 * half
                    values = [acc[start + 4 * n + e] for n in range(4) for e in range(2)]
                    address = target.start + row_offset(row, target.pitch)
                    store_global(
                        Int32,
                        address + Int64(c * UNIT_BYTES) + group * 64,
                        pack_all(self.dtype, values),
                    )

    def _multiply_block(
        self, smem: Int32, b: Int32, j: Any, right: Any, width: int, acc: cute.Tensor
    ) -> None:
        lane = cute.arch.lane_idx()
        row, side = lane & 15, lane >> 4
        a = load_matrices(
            smem + REGION["tile_kk"] + b * REGION.nbytes + tile_unit(row, 2 * j + side)
        )
        for n in range(0, width // 8, 2):
            at = right + n // 8 * SUB_TILE_BYTES + tile_unit(j * SUB_CHUNK + row, n % 8 + side)
            x = load_matrices(at, transposed=True)
            for i in range(2):
                m = (n + i) * 4
                product: Sequence[Any] = [acc[m + e] for e in range(4)]
                product = mma(self.dtype, product, a, x[2 * i : 2 * i + 2])
                for e in range(4):
                    acc[m + e] = product[e]

    # -- results -------------------------------------------------------------------------------

    @cute.jit
    def copy_rows(
        self,
        tile: Int32,
        target: Any,
        b: Int32,
        first: Int32,
        rows: cutlass.Constexpr,
        length: Int32,
    ) -> None:
        """Store rows of sub-chunk b of a tile."""
        lane = cute.arch.lane_idx()
        units = LINE_BYTES // UNIT_BYTES
        for i in cutlass.range_constexpr(rows * units // WARP_SIZE):
            row = first + i * (WARP_SIZE // units) + (lane >> 3)
            x = load_shared(Int32, tile + b * REGION.nbytes + tile_unit(row, lane & 7), 4)
            put(target, length, b * SUB_CHUNK + row, lane & 7, x)
