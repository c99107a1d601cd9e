"""Specs of the Lightning Attention decode kernels. Importing this loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.spec import (
    MAX_SMEM_BYTES,
    MBARRIER_BYTES,
    VECTOR_BYTES,
    WARP_SIZE,
    Spec,
    check_allowed,
)

DTYPES = ("bfloat16", "float16", "float32")
STATE_DTYPES = ("float32", "bfloat16")
STATE_LAYOUTS = ("vk", "kv")
HINTS = ("none", "streaming", "hold")
HEAD_DIMS = (64, 128, 256)

ALLOWED: dict[str, tuple[object, ...]] = {
    "dtype": DTYPES,
    "state_dtype": STATE_DTYPES,
    "head_dim_k": HEAD_DIMS,
    "head_dim_v": HEAD_DIMS,
    "state_layout": STATE_LAYOUTS,
    "hints": HINTS,
}

PIPELINES = (("bulk", "bulk"), ("bulk", "vector"), ("cp_async", "vector"))  # load, write-back


def check_operator(**fields: object) -> None:
    """Raise ValueError, naming the field, if a field's value is not supported."""
    check_allowed(ALLOWED, fields)


@dataclass(frozen=True)
class DecodeSpec(Spec):
    """The compile-time parameters of the register kernel (`decode`).

    The first group of fields describes the caller's tensors. The second group is the tuning that
    `heuristics` picks; any legal choice computes the same function.

    Attributes:
        dtype: dtype of q, k, v and o.
        state_dtype: dtype of the recurrent state in memory; arithmetic is always float32.
        head_dim_k, head_dim_v: K and V.
        state_layout: "vk" (K contiguous) or "kv" (V contiguous).
        multi_token: tensors are [B, T, H, D] and T is an argument; otherwise [B, H, D].
        indexed: a state_indices argument picks each sequence's slot.
        replay: draft records and accepted counts are arguments (see the operator).
        aligned: rows of q, k and v start on 16-byte boundaries, and are read in vectors.
        tile_v: columns of V in a tile.
        num_warps: warps of a CTA.
        lanes_per_row: lanes of a warp across one row of the tile.
        hints: cache hints of the state's loads and stores. "hold": L2 keeps a line from its load
            (evict_last) to its store (evict_normal); "streaming": evict-first for both.

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: a combination of fields is not supported; the message names the field.
    """

    ALLOWED = ALLOWED

    dtype: str
    state_dtype: str
    head_dim_k: int
    head_dim_v: int
    state_layout: str
    multi_token: bool
    indexed: bool
    replay: bool
    aligned: bool

    tile_v: int
    num_warps: int
    lanes_per_row: int
    hints: str

    persistent = False  # one CTA for each tile

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replay and not self.multi_token:
            raise ValueError("replay needs multi_token: drafts come as [B, T, H, D]")
        if self.head_dim_v % self.tile_v:
            raise ValueError(f"tile_v is {self.tile_v}, must divide head_dim_v={self.head_dim_v}")
        if WARP_SIZE % self.lanes_per_row:
            raise ValueError(f"lanes_per_row is {self.lanes_per_row}, must divide {WARP_SIZE}")
        rows, columns = self.tile_shape
        if columns % (self.vector * self.lanes_per_row):
            raise ValueError(
                f"lanes_per_row is {self.lanes_per_row}: rows of {columns} {self.state_dtype} do "
                f"not divide into {VECTOR_BYTES}-byte vectors over so many lanes"
            )
        if rows % (self.warps_per_tile * self.rows_per_step):
            raise ValueError(
                f"{rows} rows do not divide over {self.warps_per_tile} warps in steps of "
                f"{self.rows_per_step}"
            )

    @property
    def vector(self) -> int:
        """State elements of a 16-byte access."""
        return VECTOR_BYTES // (4 if self.state_dtype == "float32" else 2)

    @property
    def warps_per_tile(self) -> int:
        return self.num_warps

    @property
    def tile_shape(self) -> tuple[int, int]:
        """The tile's shape (rows, columns); columns are contiguous in memory."""
        if self.state_layout == "vk":
            return self.tile_v, self.head_dim_k
        return self.head_dim_k, self.tile_v

    @property
    def rows_per_step(self) -> int:
        """Rows that a warp covers with one access."""
        return WARP_SIZE // self.lanes_per_row

    @property
    def thread_shape(self) -> tuple[int, int, int]:
        """The shape (vector, rows, vectors per row) of the part of the tile that one thread
        holds."""
        rows, columns = self.tile_shape
        return (
            self.vector,
            rows // (self.warps_per_tile * self.rows_per_step),
            columns // (self.vector * self.lanes_per_row),
        )

    @property
    def num_threads(self) -> int:
        return self.num_warps * WARP_SIZE


@dataclass(frozen=True)
class PipelinedDecodeSpec(DecodeSpec):
    """The compile-time parameters of the pipelined kernel (`decode_pipelined`).

    A tile belongs to one warp, and must be contiguous in memory, so the layout is "vk". A call has
    one token.

    Attributes:
        num_stages: stages of a warp's ring in shared memory; a stage holds one tile.
        load: "bulk" (cp.async.bulk, sm_90 and newer) or "cp_async" (16 bytes a lane).
        write_back: "bulk" from shared memory, or "vector" from registers.
    """

    num_stages: int
    load: str
    write_back: str

    persistent = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state_layout != "vk":
            raise ValueError(f"state_layout is {self.state_layout!r}, a pipeline needs 'vk'")
        if self.multi_token:
            raise ValueError("multi_token is True, a pipeline takes one token a call")
        if (self.load, self.write_back) not in PIPELINES:
            raise ValueError(
                f"load={self.load!r} with write_back={self.write_back!r}, allowed: {PIPELINES}"
            )
        if self.num_stages < 2:
            raise ValueError(f"num_stages is {self.num_stages}, must be at least 2")
        if self.smem_bytes > MAX_SMEM_BYTES:
            raise ValueError(
                f"{self.num_warps} warps of {self.num_stages} stages of {self.tile_bytes} bytes "
                f"need {self.smem_bytes} bytes of shared memory, at most {MAX_SMEM_BYTES}"
            )

    @property
    def warps_per_tile(self) -> int:
        return 1

    @property
    def tile_bytes(self) -> int:
        rows, columns = self.tile_shape
        return rows * columns * VECTOR_BYTES // self.vector

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: bytes of the tiles and their mbarriers."""
        return self.num_warps * self.num_stages * (self.tile_bytes + MBARRIER_BYTES)
