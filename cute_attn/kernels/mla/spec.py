"""Specs of the kernels of multi-head latent attention. Importing this loads no compiler."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..common.spec import Spec

DTYPES = ("bfloat16", "float16")
FP8_DTYPES = ("float8_e4m3fn",)
# (head_dim, head_dim_v): columns of a cached token, and how many of them are its value.
SHAPES = ((576, 512), (512, 512), (320, 256))
ARCHS = ("sm_90a",)
TILE_M, TILE_N = 64, 64
BOX = 64  # columns that TMA loads at a time
GATHERED = 1  # page_rows: rows are gathered one by one, from pages of any size
PAGE_ROWS = (GATHERED, 16, 32, 64)
MOST_QUERIES, MOST_HEADS = 16, 128
PART_COLUMNS = 4  # of a row of a piece's result, beside o: the log-sum-exp, and padding


@dataclass(frozen=True)
class LatentSpec(Spec):
    """The compile-time parameters that all kernels over a latent cache have.

    Attributes:
        dtype: dtype of q, the cache and o.
        head_dim: columns of a token in the cache.
        head_dim_v: the first columns of a token, which are its value too.
        causal: queries see no later keys; needed only with several queries of a sequence.
        page_rows: pages are loaded `page_rows` rows at a time; GATHERED: pages may have any size.
        lse: the kernel writes the log-sum-exp.
        chunks: a tile of the cache arrives in so many groups of columns, whose scores start when
            the group is there.
        least_key_tiles: tiles of the cache that a piece has at least, about.

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: a field's value is not supported; the message names the field.
        NotImplementedError: there is no kernel for head_dim and head_dim_v.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "dtype": DTYPES,
        "page_rows": PAGE_ROWS,
        "fp8": ("none", *FP8_DTYPES),
        "stages": (1, 2, 3, 4, 5),
        "chunks": (1, 2, 4, 8),
    }

    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    page_rows: int
    lse: bool
    chunks: int
    least_key_tiles: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shape(self.head_dim, self.head_dim_v)
        if self.least_key_tiles < 1:
            raise ValueError(f"least_key_tiles is {self.least_key_tiles}, must be positive")

    @property
    def chunk_columns(self) -> tuple[range, ...]:
        """The columns of each chunk, in boxes of 64; the last chunks are the widest."""
        boxes = self.head_dim // BOX
        ends = [BOX * (boxes * i // self.chunks) for i in range(self.chunks + 1)]
        return tuple(range(*pair) for pair in itertools.pairwise(ends))

    @property
    def rope(self) -> int:
        """The last columns of a token, which are no value."""
        return self.head_dim - self.head_dim_v


@dataclass(frozen=True)
class LatentDecodeSpec(LatentSpec):
    """The parameters of the decode kernel with warps of their own for the scores.

    Attributes:
        stages: tiles of the cache in shared memory at once.
        early: a chunk is released once its columns have been multiplied, not with the whole tile.
        halves: P V of the first 32 keys of a tile runs beside the exponentials of the others.
        fp8: dtype of the cache where it is fp8; "none": the cache has q's dtype.
        descale: an argument has the factor of an fp8 cache.
        loaded: tiles of fp8 in shared memory at once; 0 without fp8.
    """

    stages: int
    early: bool
    halves: bool
    fp8: str = "none"
    descale: bool = False
    loaded: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp8 == "none" and self.descale:
            raise ValueError("descale is True, only an fp8 cache has a factor")
        if self.fp8 != "none" and self.page_rows != GATHERED:
            raise ValueError(f"page_rows is {self.page_rows}, rows of fp8 are GATHERED")
        if (self.fp8 != "none") != (self.loaded > 0):
            raise ValueError(f"loaded is {self.loaded}, must be positive with fp8, otherwise 0")


@dataclass(frozen=True)
class LatentTurnsSpec(LatentSpec):
    """The parameters of the decode kernel whose two warpgroups take turns at the scores."""


def check_shape(head_dim: int, head_dim_v: int) -> None:
    """Raise NotImplementedError unless there is a kernel for the shape of a cached token."""
    if (head_dim, head_dim_v) not in SHAPES:
        there_is = ", ".join(f"{d} with head_dim_v {v}" for d, v in SHAPES)
        raise NotImplementedError(
            f"kv_cache has {head_dim} columns and head_dim_v is {head_dim_v}, there are kernels "
            f"for: {there_is}"
        )
