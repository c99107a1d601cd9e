"""The preparation of chunks for one decay a head, which is the first kernel of this fused path.

A head's decay multiplies the products of keys and queries, so these products are computed once for
all value heads that share a head of q and k. With the decay D_ij = exp(G_i - G_j), the norms in the
products and m = beta, the kernel computes for each chunk of 64 tokens and each value head

    L_ij   = D_ij m_j (k_i . k_j)          j < i
    T      = (I + L)^-1
    Aqk_ij = scale D_ij m_j (q_i . k_j)    j <= i

and the factors of each token, with which `state_pass` multiplies its products in float32.
`state_pass` reads q, k and v themselves. With float16, whose exponents are few, Aqk has no m.

    CTA (part of the value heads of a head of q and k, chunk), 8 warps
      load      q and k by cp.async; a warp has the gates and beta of one value head
      products  warps b: rows of sub-chunk b of k with k; warps b + 4: of q with k
      then, for one value head after the other:
      scores    warps 0 to 3: L, and the inverses of its blocks on the diagonal
                warps 4 to 7: Aqk to global memory
      inverse   all: the other blocks of the inverse, to global memory
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric

from ....common.arguments import (
    fake_contiguous,
    fake_matrices,
    fake_offsets,
    fake_rows,
    fake_strided,
)
from ....common.dtypes import DTYPE
from ....common.entry import entry, gathered, placeholders
from ....common.ptx.compiler import opaque
from ....common.ptx.grids import start_dependents
from ....common.ptx.memory import load_shared, shared_address, store_global
from ....common.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemory
from ....common.spec import SMEM_BYTES, WARP_SIZE
from ..chunks import num_slots, place_of_slot, rows_of
from ..inverse import Inverse
from ..spec import CHUNK, FACTORS, MOST_HEADS_PER_CTA, SUB_TILE, HeadPrepareSpec
from ..sub_chunks import (
    NUM_BLOCKS,
    NUM_THREADS,
    NUM_WARPS,
    REGION,
    REGIONS,
    RESERVED_BYTES,
    SUB_CHUNK,
    SUB_CHUNKS,
)
from ..tiles import LINE_BYTES, SUB_TILE_BYTES, copy_rows
from .head_scores import HeadScores, Places

assert MOST_HEADS_PER_CTA == NUM_WARPS


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        q, k: [B, T, HQK, K]; strides are multiples of 16 bytes, the last one is 1.
        g, beta: [B, T, HV], any strides.
        A_log, dt_bias: float32 [HV], or None.
        cu_seqlens: [N + 1], or None.
        tiles: [slots, HV, 2 * 64 * 64], written: T, then Aqk (see `chunks` for slots), swizzled
            sub-tiles of 64 rows. Rows and columns past the chunk's end are 0, except that T has
            its diagonal.
        factors: float32 [slots, HV, FACTORS], written: for each token 1. exp(G) / |k|,
            2. scale exp(G) / |q|, 3. beta exp(G_e - G) / |k|, 4. beta, where e is the chunk's last
            token, and |k| is 1 without l2norm; then exp(G_e); then, with `spec.bounds`, the two
            bounds of `starts`.
        inverse_norms: float32 [slots, HQK, 2 * 64], written: 1 / |q| of the chunk's tokens, then
            1 / |k|. None without `spec.store_norms`.
        heads_per_cta: value heads of a CTA, at most MOST_HEADS_PER_CTA.
        beta_scale: factor of the sigmoid of beta.
    """

    q: cute.Tensor
    k: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    A_log: cute.Tensor | None
    dt_bias: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    tiles: cute.Tensor
    factors: cute.Tensor
    inverse_norms: cute.Tensor | None
    scale: Float32
    beta_scale: Float32
    heads_per_cta: Int32


class Divisors(NamedTuple):
    """The divisors that find a CTA's place."""

    parts: cute.FastDivmodDivisorV2  # CTAs of a head of q and k
    heads_qk: cute.FastDivmodDivisorV2
    chunks: cute.FastDivmodDivisorV2  # of a sequence that is not packed


class HeadPrepareMemory(SharedMemory):
    """The shared memory of a CTA. Once the products are in registers, REGIONS overwrite q and k."""

    def __init__(self, dtype: type[Numeric], head_dim_k: int, ctas_per_sm: int):
        self.dtype = dtype
        tile = CHUNK * head_dim_k
        rest = max(0, REGIONS.nbytes - 4 * tile)

        def tokens(name: str, holds: str, heads: int = 1) -> Buffer:
            return Buffer(name, Float32, heads * CHUNK, holds=holds)

        super().__init__(
            Buffer("q", dtype, tile, alignment=SWIZZLE_ALIGNMENT),
            Buffer("k", dtype, tile),
            *([Buffer("rest", cutlass.Int8, rest)] if rest else []),
            Buffer("blocks", Float32, SUB_CHUNK * SUB_CHUNK, NUM_BLOCKS, holds="L"),
            tokens("inverse_norm_q", "1 without l2norm"),
            tokens("inverse_norm_k", "1 without l2norm"),
            tokens("coarse", "see head_gates", MOST_HEADS_PER_CTA),
            tokens("fine", "see head_gates", MOST_HEADS_PER_CTA),
            tokens("beta", "0 past the chunk's end", MOST_HEADS_PER_CTA),
            tokens("earlier", "see head_gates", (SUB_CHUNKS - 1) * MOST_HEADS_PER_CTA),
            limit=SMEM_BYTES["sm_90"] // ctas_per_sm - RESERVED_BYTES,
        )
        assert REGIONS.nbytes <= self["blocks"]


class HeadPrepare:
    """The kernel for one HeadPrepareSpec; see the module's docstring."""

    def __init__(self, spec: HeadPrepareSpec):
        assert spec.decays == "head"
        self.spec, self.dtype = spec, DTYPE[spec.dtype]
        self.memory = HeadPrepareMemory(self.dtype, spec.head_dim_k, spec.ctas_per_sm)
        self.smem_bytes = self.memory.nbytes
        places = Places(self.memory["q"], self.memory["k"], (REGION["tile_qk"], REGION.nbytes))
        self.scores = HeadScores(spec, self.memory, places)
        # T is rounded to bfloat16, so products of tf32 are accurate enough.
        self.inverse = Inverse(self.memory, exact=spec.dtype != "bfloat16")

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        batch, tokens, heads, heads_qk, slots = (cute.sym_int() for _ in range(5))
        rows = (batch, tokens, heads_qk, spec.head_dim_k)

        def of_heads(present: bool) -> Any:
            return fake_contiguous(Float32, (heads,)) if present else None

        return placeholders(
            Arguments(
                q=fake_rows(self.dtype, rows),
                k=fake_rows(self.dtype, rows),
                g=fake_strided(DTYPE[spec.gate_dtype], (batch, tokens, heads)),
                beta=fake_strided(DTYPE[spec.beta_dtype], (batch, tokens, heads)),
                A_log=of_heads(spec.has_A_log),
                dt_bias=of_heads(spec.has_dt_bias),
                cu_seqlens=fake_offsets(spec.index_dtype),
                tiles=fake_matrices((slots,), (heads, spec.elements), self.dtype),
                factors=fake_matrices((slots,), (heads, FACTORS)),
                inverse_norms=fake_matrices((slots,), (heads_qk, 2 * CHUNK))
                if spec.store_norms
                else None,
                scale=Float32(1.0),
                beta_scale=Float32(1.0),
                heads_per_cta=Int32(1),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Prepare all chunks."""
        a, stream = gathered(Arguments, args)
        heads_qk = a.q.shape[2]
        parts = (a.g.shape[2] // heads_qk + (a.heads_per_cta - 1)) // a.heads_per_cta
        sizes = (parts, heads_qk, (a.g.shape[1] + (CHUNK - 1)) // CHUNK)
        slots = num_slots(a.g.shape[0], a.g.shape[1], a.cu_seqlens)
        self.kernel(a, Divisors(*map(cute.fast_divmod_create_divisor_v2, sizes))).launch(
            grid=[parts * heads_qk * slots, 1, 1],
            block=[NUM_THREADS, 1, 1],
            smem=self.smem_bytes,
            min_blocks_per_mp=self.spec.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments, by: Divisors) -> None:
        if cutlass.const_expr(self.spec.starts_next):
            start_dependents()
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        rest, part = divmod(self.in_order(block), by.parts)
        slot, head_qk = divmod(rest, by.heads_qk)
        place = place_of_slot(slot, by.chunks, x.g.shape[1], x.cu_seqlens)
        smem = shared_address(
            cutlass.memory.SmemAllocator().allocate(self.smem_bytes, SWIZZLE_ALIGNMENT)
        )
        if place.valid:
            group = x.g.shape[2] // x.q.shape[2]
            first = part * x.heads_per_cta
            count = cutlass.min(group - first, x.heads_per_cta)
            first = head_qk * group + first
            for name, tensor in (("q", x.q), ("k", x.k)):
                rows = rows_of(tensor, place, head_qk)
                copy_rows(
                    smem + self.memory[name], rows.start, Int64(rows.pitch), place.length,
                    self.spec.head_dim_k, NUM_THREADS,
                )  # fmt: skip
            cute.arch.cp_async_commit_group()
            if warp < count:
                self.scores.gates.store(smem, warp, x, place, first + warp)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()

            b = warp & (SUB_CHUNKS - 1)
            of_k = warp < SUB_CHUNKS
            products = cute.make_rmem_tensor((SUB_CHUNK * CHUNK // WARP_SIZE,), Float32)
            self.scores.multiply(smem, smem, b, of_k, products)
            cute.arch.sync_threads()
            self.scores.normalise(smem, b, of_k, x.scale, products)
            for n in cutlass.range(count, unroll=1):
                head = first + n
                tiles = x.tiles.iterator + (
                    Int64(slot) * x.tiles.stride[0] + Int64(head) * x.tiles.stride[1]
                )
                at = tiles.toint()
                if of_k:
                    self.scores.store_lower(smem, n, b, products)
                    self.inverse.invert_diagonal(smem, b)
                else:
                    self.scores.store_scores(smem, smem, n, b, products)
                    self.copy_tile(smem + REGION["tile_qk"], at + SUB_TILE_BYTES, b, 0, SUB_CHUNK)
                self.scores.store_factors(smem, n, thread, x.scale, x.factors[slot, head, None])
                cute.arch.sync_threads()
                self.inverse.invert(smem, warp, smem)
                half = SUB_CHUNK // 2
                self.copy_tile(smem + REGION["tile_kk"], at, b, (warp >> 2) * half, half)
            if cutlass.const_expr(x.inverse_norms is not None):
                # The place is computed again: kept in registers over the loop, it would spill.
                block, _, _ = cute.arch.block_idx()
                rest, part = divmod(self.in_order(Int32(opaque(block))), by.parts)
                if part == 0 and thread < 2 * CHUNK:
                    slot, head_qk = divmod(rest, by.heads_qk)
                    norms = smem + self.memory["inverse_norm_q"]  # those of k follow
                    (norm,) = load_shared(Float32, norms + thread * 4)
                    x.inverse_norms[slot, head_qk, thread] = norm

    def in_order(self, block: Any) -> Any:
        """The CTA's number in the order of the chunks."""
        return cute.arch.grid_dim()[0] - 1 - block if self.spec.last_first else block

    def copy_tile(self, tile: Any, target: Any, b: Int32, first: Any, rows: int) -> None:
        """Store rows of sub-chunk b of a tile in shared memory to a sub-tile in global memory."""
        lane = cute.arch.lane_idx()
        for i in range(rows * LINE_BYTES // (WARP_SIZE * 16)):
            at = first * LINE_BYTES + (i * WARP_SIZE + lane) * 16
            x = load_shared(Int32, tile + b * REGION.nbytes + at, 4)
            store_global(Int32, target + Int64(b * (SUB_CHUNK * LINE_BYTES) + at), x)


assert SUB_TILE * 2 == SUB_TILE_BYTES
