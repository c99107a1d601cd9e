"""KDA's preparation of chunks, which is the first kernel of the fused path.

The kernel computes everything that does not depend on the state, for every chunk of 64 tokens and
value head. Its results are tiles in the layout of `state_pass`'s shared memory (see `__call__`).

    CTA (value head, chunk), 8 warps
      load      q and k by cp.async; gates and beta to registers
      gates     the gate, and its sums within sub-chunks of 16 tokens
      norms     with l2norm, the norms of q and k; they multiply all later results
      scores    warps b and b + 4: rows of sub-chunk b, half of the channels each; also kd, qg
                and kg
      inverse   warps 0 to 3: L, and the inverses of its blocks on the diagonal
                warps 4 to 7: Aqk to global memory
                all: the other blocks of the inverse, and Akk to global memory

Gates are summed within sub-chunks only, and decays between sub-chunks are multiplied, so a large
gate costs later tokens no accuracy.

The correction of a token is beta (v - S^T k). Where similar keys follow one another, corrections
cancel in the state, but an error common to all corrections does not cancel. So beta is not part of
the inverse, because its rounding error in the diagonal would be equal for all tokens of equal beta.
Instead beta = m p (see `gates.split_beta`), and the state takes

    S <- Diag(exp(g)) S + (m k) (p (v - S^T k))^T

as if each key were written times m; the rounding of m k differs from channel to channel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric, Uint32, Uint64

from ....common.arguments import (
    fake_contiguous,
    fake_matrices,
    fake_offsets,
    fake_rows,
    fake_strided,
)
from ....common.carried import Carried
from ....common.decay import decay_exp2
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.ptx.convert import pack_all
from ....common.ptx.grids import start_dependents
from ....common.ptx.memory import (
    load_shared,
    shared_address,
    store_global,
    store_shared,
)
from ....common.smem import Buffer
from ....common.spec import WARP_SIZE
from ...gates import nonzero_beta, sigmoid, split_beta
from ..chunks import Divisors, num_sequences, num_slots, place_of
from ..gate_inputs import GateInputs, HeadGateInputs
from ..gate_sums import GateSums
from ..inverse import Inverse
from ..operands import Operands
from ..score_tiles import ScoreTiles
from ..scores import Scores
from ..spec import CHUNK, PrepareSpec
from ..starts import chunk_before_start, chunks_before_starts, fake_bounds, half_bound
from ..sub_chunks import (
    NUM_THREADS,
    REGION,
    SUB_CHUNK,
    SUB_CHUNKS,
    ChunkMemory,
    row_and_part,
    tile_unit,
    warp_of_scores,
)
from ..tiles import LINE_BYTES, SUB_TILE_BYTES, UNIT_BYTES


class Record(Carried):
    """The tiles of a chunk and head in global memory; a `scores.Outputs` for decayed q and k.

    Args:
        base: address of the tensor of all records.
        unit: index of the record's first 16-byte unit. A Uint32 covers 64 GB.
    """

    def __init__(self, memory: ChunkMemory, base: Int32, unit: Any):
        self.memory, self.base, self.unit = memory, base, unit
        # Byte offsets of the matrices. Sub-tiles of kd and qg alternate.
        matrix = memory.head_dim_k // 64 * SUB_TILE_BYTES
        self.kd, self.qg, self.kg = 0, SUB_TILE_BYTES, 2 * matrix
        self.akk, self.aqk = 3 * matrix, 3 * matrix + SUB_TILE_BYTES

    def at(self, offset: Any) -> Any:
        """Return the address of a byte offset that is a multiple of 16."""
        return self.base + Int64(Uint64(self.unit + Uint32(offset >> 4)) * Uint64(UNIT_BYTES))

    def decayed_k(
        self, smem: Int32, b: Int32, half: int, group: Any, k: list[Any], start: Any
    ) -> None:
        if self.memory.l2norm:
            row = b * SUB_CHUNK + 8 * half + row_and_part()[0]
            norm = self.memory.of_token(smem, "inverse_norm_k", row)
            start = [x * norm for x in start]
        k = [x * y for x, y in zip(k, start, strict=True)]
        self.put(self.kd, b, half, group, k, 2 * SUB_TILE_BYTES)

    def decayed_q(
        self, smem: Int32, b: Int32, half: int, group: Any, q: list[Any], start: Any, scale: Any
    ) -> None:
        norm = scale
        if self.memory.l2norm:
            row = b * SUB_CHUNK + 8 * half + row_and_part()[0]
            norm = self.memory.of_token(smem, "inverse_norm_q", row)
        # `start` has the factor 2^-shift, q has 2^shift (ChunkMemory.shift). Their product comes
        # first, because `start` times a small scale would underflow.
        q = [(x * y) * norm for x, y in zip(q, start, strict=True)]
        self.put(self.qg, b, half, group, q, 2 * SUB_TILE_BYTES)

    def k_to_end(self, smem: Int32, b: Int32, half: int, group: Any, k: list[Any]) -> None:
        k = self.memory.as_column(smem, b * SUB_CHUNK + 8 * half + row_and_part()[0], k)
        self.put(self.kg, b, half, group, k, SUB_TILE_BYTES)

    def put(
        self, matrix: int, b: Int32, half: int, group: Any, values: list[Any], step: int
    ) -> None:
        """Store 8 channels of a row to a matrix of K / 64 sub-tiles, `step` bytes apart."""
        r, c = row_and_part()
        at = (group >> 1) * step + tile_unit(r, ((group & 1) << 2) + c)
        at = self.at(at + b * (SUB_CHUNK * LINE_BYTES))
        at = at + (matrix + half * 8 * LINE_BYTES)
        store_global(Int32, at, pack_all(self.memory.dtype, values))

    def copy_rows(self, tile: Any, matrix: int, b: Int32, first: Any, rows: int) -> None:
        """Store rows of sub-chunk b of a tile in shared memory."""
        lane = cute.arch.lane_idx()
        for i in range(rows * LINE_BYTES // (WARP_SIZE * 16)):
            at = first * LINE_BYTES + (i * WARP_SIZE + lane) * 16
            x = load_shared(Int32, tile + b * REGION.nbytes + at, 4)
            store_global(Int32, self.at(b * (SUB_CHUNK * LINE_BYTES) + at) + matrix, x)


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        q, k: [B, T, HQK, K]; strides are multiples of 16 bytes, the last one is 1.
        g: [B, T, HV, K], with the same alignment; with a decay a head, [B, T, HV], any strides.
        beta: [B, T, HV], any strides.
        A_log: float32 [HV], or None.
        dt_bias: float32 [HV, K], with a decay a head [HV]; or None.
        cu_seqlens: [N + 1], or None.
        tiles: [slots, HV, elements], written (see `chunks` for slots).
        decay: float32 [slots, HV, K], written: exp2(G_e).
        inverse_norms: float32 [slots, HQK, 2 * 64], written: the inverse norms of the chunk's
            rows of q, without the scale, then of k; any finite numbers for rows past its end.
            None without `spec.store_norms`.
        lower_bound: the lower bound of the gate "lower_bound"; other gates ignore it.
        beta_scale: factor of the sigmoid of beta.
        bounds: float32 [slots, HV, 2], written for chunks before boundaries (see `starts`); None
            without `spec.bounds`.
        chunks_per_start: chunks from one boundary to the next; None without `spec.bounds`.
    """

    q: cute.Tensor
    k: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    A_log: cute.Tensor | None
    dt_bias: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    tiles: cute.Tensor
    decay: cute.Tensor
    inverse_norms: cute.Tensor | None
    scale: Float32
    lower_bound: Float32
    beta_scale: Float32
    bounds: cute.Tensor | None
    chunks_per_start: Int32 | None


class KdaPrepare:
    """The kernel for one PrepareSpec; see the module's docstring."""

    def __init__(self, spec: PrepareSpec):
        self.spec = spec
        largest = Buffer("largest", Float32, 2 * CHUNK, holds="largest gates of 64 channels")
        more = [largest] if spec.bounds else []
        self.memory = ChunkMemory(
            spec.dtype, spec.head_dim_k, *more, l2norm=spec.l2norm, scales_keys=True
        )
        self.smem_bytes = self.memory.nbytes
        self.per_head = spec.decays == "head"
        self.inputs = HeadGateInputs(spec) if self.per_head else GateInputs(spec)
        self.operands = Operands(self.memory)
        self.sums = GateSums(self.memory)
        self.scores = Scores(self.memory, self.sums)
        self.score_tiles = ScoreTiles(self.memory, self.sums)
        self.inverse = Inverse(self.memory, columns=self.memory.of_rows)
        self.dtype = self.memory.dtype
        self.gate_dtype, self.beta_dtype = DTYPE[spec.gate_dtype], DTYPE[spec.beta_dtype]

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        batch, tokens, heads, heads_qk, slots = (cute.sym_int() for _ in range(5))

        def rows(dtype: type[Numeric], heads: Any) -> Any:
            return fake_rows(dtype, (batch, tokens, heads, spec.head_dim_k))

        return placeholders(
            Arguments(
                q=rows(self.dtype, heads_qk),
                k=rows(self.dtype, heads_qk),
                g=fake_strided(self.gate_dtype, (batch, tokens, heads))
                if self.per_head
                else rows(self.gate_dtype, heads),
                beta=fake_strided(self.beta_dtype, (batch, tokens, heads)),
                A_log=fake_contiguous(Float32, (heads,)) if spec.has_A_log else None,
                dt_bias=self.fake_bias(heads) if spec.has_dt_bias else None,
                cu_seqlens=fake_offsets(spec.index_dtype),
                tiles=fake_matrices((slots,), (heads, spec.elements), self.dtype),
                decay=fake_matrices((slots,), (heads, spec.head_dim_k)),
                inverse_norms=fake_matrices((slots,), (heads_qk, 2 * CHUNK))
                if spec.store_norms
                else None,
                scale=Float32(1.0),
                lower_bound=Float32(1.0),
                beta_scale=Float32(1.0),
                bounds=fake_bounds(slots, heads) if spec.bounds else None,
                chunks_per_start=Int32(1) if spec.bounds else None,
            )
        )

    def fake_bias(self, heads: Any) -> Any:
        if self.per_head:
            return fake_contiguous(Float32, (heads,))
        return fake_contiguous(Float32, (heads, self.spec.head_dim_k), 16)

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Prepare all chunks. The record of a chunk and value head in `tiles` is, in this order,

            kd = exp2(G) * k         K / 64 sub-tiles
            qg = scale exp2(G) * q   K / 64
            kg = m exp2(G_e - G) * k K / 64
            (I + L)^-1 Diag(p)       1
            Aqk Diag(m)              1

        except that sub-tiles of kd and qg alternate. G is the sum of gates (base 2) in the chunk,
        and e its last token. Row i of L has the factor p_i, column j m_j. A sub-tile is 64 rows of
        64 columns; unit u of 8 elements of row r lies at unit u ^ (r & 7). Rows past the chunk's
        end are 0.
        """
        a, stream = gathered(Arguments, args)
        slots = num_slots(a.g.shape[0], a.g.shape[1], a.cu_seqlens)
        if cutlass.const_expr(self.spec.bounds):
            sequences = num_sequences(a.g.shape[0], a.cu_seqlens)
            slots = slots + sequences * chunks_before_starts(a.g.shape[1], a.chunks_per_start)
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
        if cutlass.const_expr(self.spec.starts_next):
            start_dependents()
        if cutlass.const_expr(self.spec.bounds):
            self.chunk_or_bound(x, by, thread)
        else:
            slot, head, head_qk, place = place_of(by, x.g.shape[1], x.cu_seqlens)
            smem = shared_address(cutlass.memory.SmemAllocator().allocate(self.smem_bytes, 1024))
            if place.valid:
                self.prepare_chunk(x, by, slot, head, head_qk, place, smem, thread)

    @cute.jit
    def prepare_chunk(
        self, x: Arguments, by: Divisors, slot: Int32, head: Int32, head_qk: Int32, place: Any,
        smem: Int32,
        thread: Int32,
    ) -> None:  # fmt: skip
        """Prepare a chunk of a value head."""
        # All loads are issued before the first wait.
        raw = self.inputs.load_gates(x.g, place, head)
        a, bias = self.inputs.load_parameters(x.A_log, x.dt_bias, head)
        own_beta = self.load_beta(x.beta, place, head)
        self.operands.start_copies(x.q, x.k, place, head_qk, smem)
        self.inputs.blank(raw, place.length)
        self.sum_gates(raw, a, bias, smem, x.lower_bound)
        self.store_beta(own_beta, smem, place.length, x.beta_scale)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        norms, first_of_group = None, True
        if cutlass.const_expr(x.inverse_norms is not None):
            norms = x.inverse_norms[slot, head_qk, None]
            first_of_group = divmod(head, by.group)[1] == 0
        self.operands.norms(smem, x.scale, norms, first_of_group)
        if thread < self.spec.head_dim_k:
            x.decay[slot, head, thread] = decay_exp2(self.sums.finish_tables(smem, thread))
        cute.arch.sync_threads()

        first = Int64(slot) * x.tiles.stride[0] + Int64(head) * x.tiles.stride[1]
        record = Record(self.memory, x.tiles.iterator.toint(), Uint32(first // 8))
        warp, b, half = warp_of_scores(thread)
        acc = cute.make_rmem_tensor((16 * SUB_CHUNKS,), Float32)
        self.scores.score(smem, b, half, x.scale, record, acc)
        self.score_tiles.swap_sums(smem, b, half, acc)
        if half == 0:
            self.score_tiles.finish_lower(smem, b, acc)
            self.inverse.invert_diagonal(smem, b)
        else:
            self.score_tiles.finish_scores(smem, b, x.scale, acc)
            record.copy_rows(smem + REGION["tile_qk"], record.aqk, b, 0, SUB_CHUNK)
        cute.arch.sync_threads()
        self.inverse.invert(smem, warp, smem)
        rows = SUB_CHUNK // 2
        record.copy_rows(smem + REGION["tile_kk"], record.akk, b, half * rows, rows)

    # -- gates and beta -----------------------------------------------------------------------

    @cute.jit
    def load_beta(self, beta: cute.Tensor, place: Any, head: Int32) -> Any:
        """Load beta, one token for each thread."""
        thread, _, _ = cute.arch.thread_idx()
        x = Float32(0.0)
        if thread < place.length:
            x = Float32(beta[place.batch, place.start + thread, head])
        return x

    @cute.jit
    def store_beta(self, x: Float32, smem: Int32, length: Int32, beta_scale: Float32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        if thread < CHUNK:
            if cutlass.const_expr(self.spec.beta_sigmoid):
                x = cutlass.select_(thread < length, beta_scale * sigmoid(x), Float32(0.0))
            if cutlass.const_expr(self.spec.for_backward):
                x = cutlass.select_(thread < length, nonzero_beta(self.dtype, x), Float32(0.0))
            m, p = split_beta(self.dtype, Float32(x))
            store_shared(Float32, smem + self.memory["of_columns"] + thread * 4, [m])
            if cutlass.const_expr(self.memory.of_rows is not None):
                store_shared(Float32, smem + self.memory["of_rows"] + thread * 4, [p])

    @cute.jit
    def sum_gates(
        self,
        raw: cute.Tensor,
        a: Float32,
        bias: Any,
        smem: Int32,
        lower_bound: Float32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        pairs = self.spec.head_dim_k // 2
        if thread < pairs * SUB_CHUNKS:
            sub, pair = thread // pairs, thread % pairs
            gates = self.inputs.gates(raw, self.inputs.rate(a), bias, lower_bound)
            self.sums.store_sums(smem, pair, sub, gates, ascending=self.spec.gate == "none")

    # -- bounds: CTAs of their own, since they would take registers of the other CTAs ---------

    @cute.jit
    def chunk_or_bound(self, x: Arguments, by: Divisors, thread: Int32) -> None:
        """Prepare a chunk, or in the grid's last CTAs bound the transition of a chunk before a
        boundary."""
        block, _, _ = cute.arch.block_idx()
        smem = shared_address(cutlass.memory.SmemAllocator().allocate(self.smem_bytes, 1024))
        heads = x.g.shape[2]
        blocks = heads * num_slots(x.g.shape[0], x.g.shape[1], x.cu_seqlens)
        if block < blocks:
            slot, head, head_qk, place = place_of(by, x.g.shape[1], x.cu_seqlens)
            if place.valid:
                self.prepare_chunk(x, by, slot, head, head_qk, place, smem, thread)
        else:
            number = (block - blocks) // heads
            head = (block - blocks) % heads
            slot, place = chunk_before_start(number, x.g.shape[1], x.cu_seqlens, x.chunks_per_start)
            if place.valid:
                self.bound_chunk(x, slot, head, place, smem)

    @cute.jit
    def bound_chunk(self, x: Arguments, slot: Int32, head: Int32, place: Any, smem: Int32) -> None:
        """Store the bounds of a whole chunk of a value head."""
        thread, _, _ = cute.arch.thread_idx()
        raw = self.inputs.load_gates(x.g, place, head)
        a, bias = self.inputs.load_parameters(x.A_log, x.dt_bias, head)
        beta = self.load_beta(x.beta, place, head)
        pairs = self.spec.head_dim_k // 2
        if thread < pairs * SUB_CHUNKS:
            sub, pair = thread // pairs, thread % pairs
            gates = self.inputs.gates(raw, self.inputs.rate(a), bias, x.lower_bound)
            self.store_largest(smem, sub, pair // WARP_SIZE, gates)
        cute.arch.sync_threads()
        if thread < CHUNK:
            if cutlass.const_expr(self.spec.beta_sigmoid):
                beta = x.beta_scale * sigmoid(beta)
            self.store_bound(smem, beta, x.bounds[slot, head, None])

    @cute.jit
    def store_largest(self, smem: Int32, sub: Int32, part: Int32, gates: Any) -> None:
        """Store, for each token of a sub-chunk, the largest gate of the warp's 64 channels. Each
        exchange halves a lane's number of tokens. At the end, a lane has token lane // 2."""
        lane = cute.arch.lane_idx()
        values = [cute.arch.fmax(*pair) for pair in gates]
        for distance in (16, 8, 4, 2):
            half = len(values) // 2
            upper = (lane & distance) != 0
            halves = list(zip(values[:half], values[half:], strict=True))
            sent = [Float32(cutlass.select_(upper, x, y)) for x, y in halves]
            kept = [Float32(cutlass.select_(upper, y, x)) for x, y in halves]
            got = [cute.arch.shuffle_sync_bfly(x, distance) for x in sent]
            values = [cute.arch.fmax(x, y) for x, y in zip(kept, got, strict=True)]
        largest = cute.arch.fmax(values[0], cute.arch.shuffle_sync_bfly(values[0], 1))
        if (lane & 1) == 0:
            token = sub * SUB_CHUNK + (lane >> 1)
            at = smem + self.memory["largest"] + (part * CHUNK + token) * 4
            store_shared(Float32, at, [largest])

    @cute.jit
    def store_bound(self, smem: Int32, beta: Float32, bounds: cute.Tensor) -> None:
        """Store the bound of a warp's 32 tokens. Each lane has one token."""
        thread, _, _ = cute.arch.thread_idx()
        largest = load_shared(Float32, smem + self.memory["largest"] + thread * 4)[0]
        if cutlass.const_expr(self.spec.head_dim_k > 64):
            at = smem + self.memory["largest"] + (CHUNK + thread) * 4
            largest = cute.arch.fmax(largest, load_shared(Float32, at)[0])
        for bit in cutlass.range_constexpr(5):
            largest = largest + cute.arch.shuffle_sync_bfly(largest, offset=1 << bit)
        bound = half_bound(largest, beta)
        if (thread & (WARP_SIZE - 1)) == 0:
            bounds[thread // WARP_SIZE] = bound
