"""Specs of the kernels that study copies of tiles. Importing this loads no compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..common.spec import MAX_SMEM_BYTES, MBARRIER_BYTES, VECTOR_BYTES, WARP_SIZE, Spec

ELEMENT_BYTES = 2
SWIZZLED_COLUMNS = 64  # 128 bytes, the width of the swizzle
LONGEST_BOX = 256  # elements per dimension of a TMA box
VECTOR_WORDS = 4
READ_THREADS = 256  # threads of a CTA of `plain_read`

COPIES = (
    "none", "vector", "cp_async", "cp_async_l1", "bulk", "tensor", "tensor_swizzled", "multicast",
)  # fmt: skip
BY_TENSOR_MAP = ("tensor", "tensor_swizzled", "multicast")
BY_ONE_WARP = ("bulk", *BY_TENSOR_MAP)  # through the async proxy, sm_90 and newer
CLUSTER = 2  # CTAs that a multicast reaches


@dataclass(frozen=True)
class AsyncCopySpec(Spec):
    """The compile-time parameters of a kernel that copies tiles to shared memory and uses them.

    Attributes:
        copy: "vector" loads to registers; "cp_async" of 16 bytes a thread, through L2 only, or
            "cp_async_l1" through L1 too; "bulk" is cp.async.bulk; "tensor" is cp.async.bulk.tensor,
            without and with the 128-byte swizzle; "multicast" is the swizzled copy to both CTAs of
            a cluster, each of which loads half of the boxes; "none" fills each stage once and uses
            its tile again and again, with the same signals.
        tile_rows, tile_columns: a tile, of 16-bit elements.
        heads: tiles side by side in a row of the source. With one head, tiles are contiguous.
        box_rows, box_columns: what an instruction of one thread copies.
        num_stages: tiles in shared memory.
        consumer_warps: warps that use each tile together.
        producer_warps: warps that only copy; with 0, the warps that use the tiles copy the tiles.
        products: MMAs for each 16 by 8 elements of a tile; 0 computes a checksum of the tile's
            words instead.
        whole_tile: the checksum covers whole tiles; otherwise one vector per thread and tile, in
            each tile the next vector.
        latency: measure the clocks from the first instruction of a copy until the tile may be used.
        try_wait: waits suspend the thread (sm_90 and newer).

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: a combination of fields is not supported; the message names the field.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "copy": COPIES,
        "tile_columns": (64, 128, 256),
        "consumer_warps": (1, 2, 4, 8),
        "producer_warps": (0, 1, 2, 4),
        "products": (0, 1, 2, 4, 8, 16),
    }

    copy: str
    tile_rows: int
    tile_columns: int
    heads: int
    box_rows: int
    box_columns: int
    num_stages: int
    consumer_warps: int
    producer_warps: int
    products: int
    whole_tile: bool
    latency: bool
    try_wait: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads < 1 or self.num_stages < 1:
            raise ValueError(
                f"heads is {self.heads}, num_stages {self.num_stages}, must be at least 1"
            )
        self._check_box()
        for name, threads in (
            ("consumer_warps", self.consumer_threads),
            ("producer_warps", self.copying_threads),
        ):
            per_pass = threads * VECTOR_BYTES
            if self.tile_bytes % per_pass or per_pass % self.row_bytes:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: {threads} threads copy and read "
                    f"{per_pass} bytes at once, must be whole rows and divide the tile of "
                    f"{self.tile_bytes}"
                )
        if not self.producer_warps:
            if self.copy == "multicast":
                raise ValueError("producer_warps is 0, a multicast needs a warp of its own")
            if self.copy == "vector" and self.num_stages > 1:
                raise ValueError(
                    f"num_stages is {self.num_stages}: without producer warps, vector loads fill 1"
                )
        if self.copy in BY_ONE_WARP and self.producer_warps > self.num_stages:
            # A warp would not know which of two phases of a stage is the latest.
            raise ValueError(
                f"producer_warps is {self.producer_warps}, that take turns: must be at most "
                f"num_stages={self.num_stages}"
            )
        if self.latency and (self.producer_warps or self.num_stages > 1):
            raise ValueError("latency needs one stage and no producer_warps")
        if self.products and not self.whole_tile:
            raise ValueError("products use the whole tile, whole_tile is False")
        if self.smem_bytes > MAX_SMEM_BYTES:
            raise ValueError(
                f"num_stages is {self.num_stages}: {self.smem_bytes} bytes of shared memory, "
                f"at most {MAX_SMEM_BYTES}"
            )

    def _check_box(self) -> None:
        if self.copy in ("tensor_swizzled", "multicast"):
            columns: tuple[int, ...] = (SWIZZLED_COLUMNS,)
        elif self.copy == "tensor":
            columns = tuple(n for n in (8, 16, 32, 64, 128, 256) if n <= self.tile_columns)
        else:
            columns = (self.tile_columns,)
        if self.box_columns not in columns:
            raise ValueError(f"box_columns is {self.box_columns}, must be one of {columns}")
        ctas = CLUSTER if self.copy == "multicast" else 1
        if self.tile_rows % (self.box_rows * ctas) or self.box_rows > LONGEST_BOX:
            raise ValueError(
                f"box_rows is {self.box_rows}, must divide the {self.tile_rows // ctas} rows that "
                f"a CTA copies, and be at most {LONGEST_BOX}"
            )
        if self.copy in ("tensor_swizzled", "multicast") and self.box_rows % 8:
            raise ValueError(f"box_rows is {self.box_rows}, must be whole periods of 8 rows")
        if self.copy == "bulk" and self.heads > 1 and self.box_rows > 1:
            raise ValueError(f"box_rows is {self.box_rows}: rows of several heads are not adjacent")

    @property
    def tile_bytes(self) -> int:
        return self.tile_rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return self.tile_columns * ELEMENT_BYTES

    @property
    def consumer_threads(self) -> int:
        return self.consumer_warps * WARP_SIZE

    @property
    def copying_threads(self) -> int:
        return (self.producer_warps or self.consumer_warps) * WARP_SIZE

    @property
    def num_threads(self) -> int:
        return (self.consumer_warps + self.producer_warps) * WARP_SIZE

    @property
    def vectors(self) -> int:
        """16-byte vectors of a tile that a consumer thread reads."""
        return self.tile_bytes // (self.consumer_threads * VECTOR_BYTES)

    @property
    def turns(self) -> int:
        """Warps that take turns at copying tiles."""
        return max(1, self.producer_warps) if self.copy in BY_ONE_WARP else 1

    @property
    def cluster(self) -> int:
        return CLUSTER if self.copy == "multicast" else 1

    @property
    def bytes_in_flight(self) -> int:
        """Largest number of bytes in flight to an SM. Vector loads hold these bytes in registers.
        Warps that both copy and use tiles start the next copies before they use a tile.
        """
        if self.copy == "vector" or self.num_stages == 1:
            return self.tile_bytes
        return self.tile_bytes * (self.num_stages - (self.producer_warps == 0))

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: the tiles, and at most three mbarriers per tile."""
        return self.num_stages * (self.tile_bytes + 3 * MBARRIER_BYTES)


@dataclass(frozen=True)
class PlainReadSpec(Spec):
    """The compile-time parameters of the kernel that only reads.

    Attributes:
        unroll: 16-byte loads in flight per thread.
    """

    unroll: int
