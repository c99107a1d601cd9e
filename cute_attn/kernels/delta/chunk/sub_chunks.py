"""Sub-chunks of 16 tokens, and the shared memory of a CTA that works on a chunk."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import BaseDSL

from ...common.dtypes import DTYPE
from ...common.ptx.compiler import opaque
from ...common.ptx.convert import unpack_all
from ...common.ptx.memory import load_shared
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemory
from ...common.spec import SMALLEST_SMEM_BYTES, WARP_SIZE, smem_bytes
from .spec import CHUNK
from .tiles import LINE_BYTES

SUB_CHUNK = 16
SUB_CHUNKS = CHUNK // SUB_CHUNK
NUM_WARPS = 2 * SUB_CHUNKS
NUM_THREADS = NUM_WARPS * WARP_SIZE
GROUP = 32  # channels that a warp takes at a time, 8 a thread
BLOCK_BYTES = SUB_CHUNK * SUB_CHUNK * 4
NUM_BLOCKS = SUB_CHUNKS * (SUB_CHUNKS + 1) // 2
SHIFT = 60.0  # log2 of the factor of rows with bfloat16 (see `scores`)
RESERVED_BYTES = 1024  # shared memory that the hardware takes for each CTA

# A sub-chunk's region overwrites q, k and P once the scores are summed. A region has 16 rows of Aqk
# and of Akk as 16-bit tiles, and room to exchange a block between warps. Before, a region's first
# half has partial sums of q's scores, the second half of k's scores.
REGION = SharedMemory(
    Buffer("tile_qk", cutlass.Int16, SUB_CHUNK * CHUNK),
    Buffer("exchange", cutlass.Float32, 2 * SUB_CHUNK * SUB_CHUNK),
    Buffer("tile_kk", cutlass.Int16, SUB_CHUNK * CHUNK),
    Buffer("rest", cutlass.Float32, 2 * SUB_CHUNK * SUB_CHUNK),
)
REGIONS = Buffer("regions", cutlass.Int8, REGION.nbytes, SUB_CHUNKS)


def target_architecture() -> str:
    """Return the architecture of the current compilation, such as "sm_90a"."""
    return str(BaseDSL._get_dsl().get_arch_enum().name)


def block_offset(i: Any, j: Any) -> Any:
    """Byte offset of block (i, j), j <= i, of the 16 by 16 blocks of L."""
    return (((i * (i + 1)) >> 1) + j) * BLOCK_BYTES


def block_element(i: Any, j: Any) -> Any:
    """Byte offset of element (i, j) of a block of float32. Halves of rows are swapped in every
    other pair of rows, so that 4 rows of 32 bytes are in different banks."""
    return (i << 6) + ((j << 2) ^ ((i & 2) << 4))


def tile_unit(row: Any, unit: Any) -> Any:
    """Byte offset of a 16-byte unit (0 to 7) of a row of a sub-tile."""
    return row * LINE_BYTES + ((unit ^ (row & 7)) << 4)


def parity(row: Any) -> Any:
    """The bit by which rows of q, k and P are swizzled: 0, 1, 1, 0 in rows 0 to 3, and so on."""
    return (row ^ (row >> 1)) & 1


def groups_of_half(groups: int) -> Any:
    """Return how many groups of channels a warp iterates over. A count of 1 is hidden from the
    compiler, which would remove the loop and then spill."""
    if groups > 2:
        return groups // 2
    return opaque(Int32(groups // 2))


def warp_of_scores(thread: Any) -> tuple[Any, Any, Any]:
    """The number of the thread's warp, the warp's sub-chunk, and its half of the channels."""
    warp = cute.arch.make_warp_uniform(thread // WARP_SIZE)
    return warp, warp & (SUB_CHUNKS - 1), warp >> 2


def row_and_part() -> tuple[Any, Any]:
    """Return a lane's row of fragments, and the lane's quarter of the row's columns."""
    lane = cute.arch.lane_idx()
    return lane >> 2, lane & 3


def load_channels(address: Any, swap: Any) -> list[Any]:
    """Load 8 neighbouring float32 of a row; `swap` is 16 where the row's units are swapped, else
    0."""
    return [
        *load_shared(Float32, address + swap, 4),
        *load_shared(Float32, (address + 16) - swap, 4),
    ]


class ChunkMemory(SharedMemory):
    """The shared memory of a CTA that works on one chunk of one value head.

    Rows of q and k have 2 K bytes; where `parity` is 1, the two 64-byte halves of each 128 bytes
    are swapped. Rows of P, or of exp2(-shift - P) where 64 channels of a sub-chunk are all in
    range, have 4 K bytes; the 16-byte units 2 u and 2 u + 1 are swapped where `parity` is 1. So two
    rows that a quarter of a warp reads together are in different banks.

    Once the scores are summed, the REGIONS overwrite q, k and P.

    Attributes:
        dtype: dtype of q and k.
        groups: number of groups of 32 channels.
        qk_row, p_row: bytes of a row of q or k, and of P.
        scales_keys: whether kg, and k as a column of scores, have the factor m of beta = m p, and
            rows of L have p (see `prepare`); otherwise rows of L have beta.
        of_columns: the buffer with the factors of kg and of columns, or None.
        of_rows: the buffer with the factors of rows of L, without norms, or None.
        in_one_product: whether one product scores the rows in range (see `scores`).
        shift: log2 of the factor of rows in that product, otherwise 0.
    """

    def __init__(
        self, dtype: str, head_dim_k: int, *more: Buffer, l2norm: bool, scales_keys: bool = False
    ):
        self.dtype = DTYPE[dtype]
        self.l2norm = l2norm
        self.scales_keys = scales_keys
        self.of_columns = "of_columns" if scales_keys else "inverse_norm_k" if l2norm else None
        self.of_rows = None if scales_keys and dtype == "bfloat16" else "of_rows"
        self.head_dim_k = head_dim_k
        self.groups = head_dim_k // GROUP
        self.qk_row, self.p_row = 2 * head_dim_k, 4 * head_dim_k
        self.in_one_product = dtype == "bfloat16"
        self.shift = SHIFT if self.in_one_product else 0.0

        def sums(name: str, holds: str) -> Buffer:
            return Buffer(name, Float32, SUB_CHUNKS * head_dim_k, holds=holds)

        def tokens(name: str, holds: str) -> Buffer:
            return Buffer(name, Float32, CHUNK, holds=holds)

        super().__init__(
            Buffer("q", self.dtype, CHUNK * head_dim_k, alignment=SWIZZLE_ALIGNMENT),
            Buffer("k", self.dtype, CHUNK * head_dim_k),
            Buffer("p", Float32, CHUNK * head_dim_k),
            # In diagonal blocks, the inverse overwrites L below the diagonal; the transposed Aqk of
            # rows out of range is above the diagonal.
            Buffer("blocks", Float32, SUB_CHUNK * SUB_CHUNK, NUM_BLOCKS, holds="L"),
            sums("start", "exp2(G - shift) at the first token of a sub-chunk"),
            sums("to_next", "G from there to the first token of the next sub-chunk"),
            sums("to_end", "G from there to the end of the chunk"),
            *([tokens("of_rows", "beta, with scales_keys p")] if self.of_rows else []),
            tokens("own_score", "scale q . k"),
            tokens("inverse_norm_q", "times scale"),
            tokens("inverse_norm_k", ""),
            Buffer("out_of_range", Int32, NUM_WARPS, holds="a warp's first such row, 16 for none"),
            *([tokens("of_columns", "m, with l2norm times the inverse norm of k")] * scales_keys),
            *more,
            limit=SMALLEST_SMEM_BYTES,
        )
        assert REGIONS.nbytes <= self["blocks"]

    def blocks_per_sm(self) -> int:
        """Return how many CTAs fit an SM of the target architecture, at most two. With two, a
        thread has 128 registers."""
        available = smem_bytes(target_architecture()) + RESERVED_BYTES
        return min(2, available // (self.nbytes + RESERVED_BYTES))

    def load_elements(self, address: Any) -> list[Any]:
        """Load 8 neighbouring elements of a row of q or k, as float32."""
        return unpack_all(self.dtype, load_shared(Int32, address, 4))

    def of_token(self, smem: Int32, name: str, row: Any) -> Any:
        """Load a token's element of the buffer `name`."""
        return load_shared(Float32, smem + self[name] + row * 4)[0]

    def row_factor(self, smem: Int32, row: Any) -> Any:
        """Return the factor of a row of L: its value in `of_rows`, times the inverse norm of k."""
        factor = Float32(1.0)
        if self.of_rows is not None:
            factor = self.of_token(smem, self.of_rows, row)
        if self.l2norm:
            factor = factor * self.of_token(smem, "inverse_norm_k", row)
        return factor

    def column_factor(self, smem: Int32, row: Any) -> Any:
        """Return the factor of a token's column of L and Aqk."""
        if self.of_columns is None:
            return Float32(1.0)
        return self.of_token(smem, self.of_columns, row)

    def as_column(self, smem: Int32, row: Any, k: list[Any]) -> list[Any]:
        """Return channels of a row of k, or of a multiple of k, times the row's factor."""
        if self.of_columns is None:
            return k
        factor = self.column_factor(smem, row)
        return [x * factor for x in k]

    def column_factors(self, smem: Int32, j: Any) -> Any:
        """Load the factors of the thread's columns of sub-chunk j: [half of its tokens][2]."""
        if self.of_columns is None:
            return (None, None)
        _, c = row_and_part()
        at = smem + self[self.of_columns] + (j * SUB_CHUNK + 2 * c) * 4
        return tuple(load_shared(Float32, at + 32 * half, 2) for half in range(2))
