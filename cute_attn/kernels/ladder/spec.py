"""The spec of the ladder's kernels. Importing this loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.spec import MAX_SMEM_BYTES, VECTOR_BYTES, WARP_SIZE, Spec

DTYPES = ("float16", "bfloat16")
HEAD_DIMS = (64, 128)
ELEMENT_BYTES = 2
FRAGMENT_ROWS = 16  # rows of an mma.sync
FIRST_WITHOUT_TRANSPOSE, FIRST_WITH_TMA = 3, 6  # steps
SWIZZLE_KEYS = 64  # elements of the 128 bytes in which units are swizzled


ALLOWED: dict[str, tuple[object, ...]] = {
    "dtype": DTYPES,
    "head_dim": HEAD_DIMS,
    "tile_m": (16, 32, 64, 128, 192, 256),
    "tile_n": (16, 32, 64, 80, 96, 112, 128, 144, 160, 176, 256),
    "num_warps": (1, 2, 4, 8, 12, 16),
}


@dataclass(frozen=True)
class FmhaLadderSpec(Spec):
    """The compile-time parameters of a step.

    Attributes:
        step: the step's number in `table.STEPS`.
        dtype: of q, k, v and o.
        head_dim: of q, k, v and o.
        causal: query i sees keys 0 to i; otherwise all keys.
        tile_m: query rows of a CTA.
        tile_n: keys of a K/V tile.
        num_warps: warps that compute; a step may add producer warps.
        k_stages, v_stages: tiles of K and of V in shared memory at once; steps whose stage holds a
            tile of K and a tile of V need equal numbers.
        occupancy: CTAs per SM for which registers are allotted.
        swizzled: whether tiles are swizzled, for steps that copy by cp.async.

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: a combination of fields is not supported; the message names the field.
    """

    ALLOWED = ALLOWED

    step: int
    dtype: str
    head_dim: int
    causal: bool
    tile_m: int
    tile_n: int
    num_warps: int
    k_stages: int
    v_stages: int
    occupancy: int
    swizzled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("k_stages", "v_stages", "occupancy"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.tile_m % (self.num_warps * FRAGMENT_ROWS):
            raise ValueError(
                f"tile_m is {self.tile_m}, must be a multiple of {FRAGMENT_ROWS} rows for each of "
                f"{self.num_warps} warps"
            )
        copied = self.num_threads * VECTOR_BYTES // self.row_bytes
        if self.step < FIRST_WITH_TMA and self.tile_n % copied:
            raise ValueError(
                f"tile_n is {self.tile_n}, must be a multiple of the {copied} rows that "
                f"{self.num_warps} warps copy at once"
            )
        if self.swizzled and self.step < FIRST_WITHOUT_TRANSPOSE and self.tile_n % SWIZZLE_KEYS:
            raise ValueError(
                f"tile_n is {self.tile_n}, must be a multiple of {SWIZZLE_KEYS} to swizzle the "
                "transpose of a K tile"
            )
        if self.smem_bytes > MAX_SMEM_BYTES:
            raise ValueError(
                f"tiles of {self.tile_m} by {self.tile_n} with {self.k_stages} stages of K and "
                f"{self.v_stages} of V need {self.smem_bytes} bytes of shared memory, at most "
                f"{MAX_SMEM_BYTES}"
            )

    @property
    def num_threads(self) -> int:
        return self.num_warps * WARP_SIZE

    @property
    def row_bytes(self) -> int:
        return self.head_dim * ELEMENT_BYTES

    @property
    def smem_bytes(self) -> int:
        """Bytes of the tiles of q, K and V."""
        rows = self.tile_m + (self.k_stages + self.v_stages) * self.tile_n
        return rows * self.row_bytes
