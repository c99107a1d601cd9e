"""Specs of the softmax attention kernels. Importing this loads no compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..common.numbers import FLOAT32_MAX, LOG2_E
from ..common.spec import Spec
from .configs import (
    SM90,
    SM100,
    backward,
    find,
    forward,
    head_dims,
    head_dims_v,
    most_packed_heads,
)

DTYPES = ("bfloat16", "float16")
KERNEL_SCHEDULERS = ("single", "static", "clc")  # operators offer the last two
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
SINK_DTYPES = ("none", "bfloat16", "float16", "float32")
ORDERS = ("rising", "alternating", "by_head")
GATHERED = 1  # page_rows: K and V are gathered row by row, from pages of any size

HEAD_DIMS_V = head_dims_v("forward")
# The dK/dV kernel of SM100 swaps the sides: a cluster has 256 keys, and loops over 128 queries.
TILE_M, TILE_N, _ = forward("sm_100a", 256).tile
DKDV_TILE_M, DKDV_TILE_N, _ = backward("backward_dkdv", "sm_100a", 256).tile

SHARING_CTAS = 2  # CTAs of a cluster with `shared_keys`

# softmax_scale * log2(e) must be finite in float32.
LARGEST_SCALE = FLOAT32_MAX / LOG2_E * (1 - 2.0**-23)
# Scores divided by the softcap must not underflow before the tanh.
LARGEST_SOFTCAP = 2.0**64


@dataclass(frozen=True)
class ForwardSpec(Spec):
    """The compile-time parameters of every forward kernel.

    Attributes:
        dtype: dtype of q, k, v and o.
        scheduler: "single" (a cluster for each tile), "static" (persistent, every n-th tile),
            "clc" (persistent, with cluster launch control), "counter" (persistent, the next tile
            that nobody has taken) or "pieces" (persistent, with pieces of long sequences' keys).
        packed_heads: how many query heads of one K/V head share the rows of a tile; a power of two
            that divides the number of query heads for each K/V head. 1: rows are tokens.
        window_left, window_right: an argument bounds the keys that a query sees left or right of
            the diagonal. Causal is window_right with a bound of 0.
        softcap: scores become softcap * tanh(score / softcap).
        sink_dtype: dtype of the learnable sink, or "none".
        varlen_q, varlen_k: q (and o, lse), or k and v, are packed sequences, with cu_seqlens.
        seqused_q, seqused_k: an argument gives the number of used tokens of each sequence.
        lse: the kernel writes the log-sum-exp.
        page_rows: k and v are pages, loaded `page_rows` rows at a time; GATHERED: pages may have
            any size; 0: k and v are not pages.
        split: a tile's K/V tiles are split; the kernel writes each split's o and lse, in float32.
        split_key_tiles: K/V tiles of a split, counted from the sequence's first key. 0: the splits
            have equal shares of the K/V tiles that the query tile sees.

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: a field's value is not supported; the message names the field.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "dtype": DTYPES,
        "sink_dtype": SINK_DTYPES,
        "page_rows": tuple(range(0, 129, 16)),
    }

    dtype: str
    scheduler: str
    packed_heads: int
    window_left: bool
    window_right: bool
    softcap: bool
    sink_dtype: str
    varlen_q: bool
    varlen_k: bool
    seqused_q: bool
    seqused_k: bool
    lse: bool
    page_rows: int = 0
    split: bool = False
    split_key_tiles: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page_rows and (self.varlen_k or not self.seqused_k):
            raise ValueError(
                f"page_rows is {self.page_rows}, it needs seqused_k, and varlen_k must be False"
            )
        if self.split and (self.sink_dtype != "none" or not self.lse):
            raise ValueError("split is True, it needs lse, and the sink is the combination's")
        if self.split_key_tiles < 0 or (self.split_key_tiles and not self.split):
            raise ValueError(
                f"split_key_tiles is {self.split_key_tiles}, must be at least 0, and 0 if split is "
                "False"
            )

    @property
    def ragged_q(self) -> bool:
        """Whether rows past the end of a sequence of queries lie inside the tensor."""
        return self.varlen_q or self.seqused_q

    @property
    def ragged_k(self) -> bool:
        """Whether rows past the end of a sequence of keys lie inside the tensor."""
        return self.varlen_k or self.seqused_k


def _powers_of_two(most: int) -> tuple[int, ...]:
    return tuple(2**n for n in range(most.bit_length()))


@dataclass(frozen=True)
class Hd256ForwardSpec(ForwardSpec):
    """The compile-time parameters of the SM100 forward for head_dim 256; see `ForwardSpec`."""

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **ForwardSpec.ALLOWED,
        "scheduler": KERNEL_SCHEDULERS,
        "packed_heads": _powers_of_two(most_packed_heads(SM100)),
        "page_rows": (0, 16, 32, 64),
    }


@dataclass(frozen=True, kw_only=True)
class Sm90ForwardSpec(ForwardSpec):
    """The compile-time parameters of the SM90 forward; see `ForwardSpec` for all other parameters.

    Attributes:
        head_dim: head dimension of q and k.
        head_dim_v: head dimension of v and o.
        tile_m: query rows of a tile: 64 for each consumer warpgroup.
        tile_n: keys of a K/V tile, a multiple of 16.
        stages: tiles of K in shared memory at once, and as many of V.
        least_key_tiles: K/V tiles that a piece has at least, about; only with "pieces".
        fp8: dtype of k and v where they are fp8; "none": k and v have q's dtype.
        k_descale, v_descale: an argument has the factors of k or v; only with fp8.
        loaded: fp8 tiles of K in shared memory at once, and as many of V; 0 without fp8.
        k_warps: warps that convert K, an even number; half as many convert V; 0 without fp8.
        batch_invariant: a row's bits depend neither on other rows nor on `lse`.
        tree_mask: whether a tensor says which of its sequence's last keys each query sees; only
            with window_right.
        shared_keys: a cluster of two CTAs has two neighbouring tiles of query rows, and loads each
            K/V tile once for both; only where all rows of a head see the same keys.

    Raises:
        NotImplementedError: there is no kernel for the head dimensions.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **ForwardSpec.ALLOWED,
        "scheduler": ("single", "counter", "pieces"),
        "packed_heads": _powers_of_two(most_packed_heads(SM90)),
        "page_rows": (GATHERED, *ForwardSpec.ALLOWED["page_rows"]),
        "head_dim": head_dims("forward", SM90),
        "head_dim_v": head_dims_v("forward", SM90),
        "tile_m": (64, 128, 192),
        "tile_n": tuple(range(16, 257, 16)),
        "fp8": ("none", *FP8_DTYPES),
        "k_warps": (0, 2, 4),
    }

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    stages: int
    least_key_tiles: int = 0
    fp8: str = "none"
    k_descale: bool = False
    v_descale: bool = False
    loaded: int = 0
    k_warps: int = 0
    batch_invariant: bool = False
    tree_mask: bool = False
    shared_keys: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        row = find("forward", "sm_90a", self.head_dim, self.head_dim_v)
        if self.shared_keys and (
            self.window_left
            or self.window_right
            or self.ragged_q
            or self.ragged_k
            or self.split
            or self.scheduler != "counter"
            or self.fp8 != "none"
            or row.cluster > 1
        ):
            raise ValueError(
                "shared_keys is True, it needs the scheduler 'counter', a head_dim of one CTA, and "
                "no window, ragged sequences, splits or fp8"
            )
        pieces = self.scheduler == "pieces"
        if pieces and (self.tile_m > 128 or self.split):
            raise ValueError("scheduler is 'pieces', it needs tile_m of at most 128, and no split")
        if pieces != (self.least_key_tiles > 0):
            raise ValueError(
                f"least_key_tiles is {self.least_key_tiles}, must be positive if scheduler is "
                "'pieces', and otherwise 0"
            )
        if self.tree_mask and not self.window_right:
            raise ValueError("tree_mask is True, it needs window_right")
        if self.fp8 == "none" and (self.k_descale or self.v_descale):
            raise ValueError("k_descale or v_descale is True, they need fp8")
        if self.fp8 != "none" and self.page_rows == GATHERED:
            raise ValueError("page_rows is GATHERED, and fp8 k and v are loaded by TMA alone")
        for name in ("loaded", "k_warps"):
            if (self.fp8 != "none") != (getattr(self, name) > 0):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, must be positive with fp8, and otherwise 0"
                )

    @property
    def keys_dtype(self) -> str:
        """dtype of k and v."""
        return self.dtype if self.fp8 == "none" else self.fp8


@dataclass(frozen=True)
class CombineSpec(Spec):
    """The compile-time parameters of the kernel that combines splits.

    Attributes:
        dtype: dtype of o; each split's o is float32.
        head_dim_v: head dimension of o.
        sink_dtype: dtype of the learnable sink, or "none".
        lse: the kernel writes the log-sum-exp.
        dependent: the kernel starts before the end of the forward kernel whose results it combines,
            and waits for this end (programmatic dependent launch); for sm_90 and newer.

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: a field's value is not supported; the message names the field.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "dtype": (*DTYPES, "float32"),
        "head_dim_v": HEAD_DIMS_V,
        "sink_dtype": SINK_DTYPES,
    }

    dtype: str
    head_dim_v: int
    sink_dtype: str
    lse: bool
    dependent: bool = False


@dataclass(frozen=True)
class PreprocessSpec(Spec):
    """The compile-time parameters of the backward's first kernel, on every architecture.

    Attributes:
        dtype: dtype of o and its gradient.
        varlen_q: o and lse are packed sequences, with cu_seqlens.
        seqused_q: an argument gives the number of used tokens of each sequence.
        sink_dtype: dtype of the learnable sink whose gradient is computed, or "none".
        dlse: the log-sum-exp has a gradient.
        head_dim_v: head dimension of o and its gradient.
        sums: the kernel clears the numbers of `query_zeros`, or with `ordered` of `ordered_sums`.
        rows_without_keys: the kernel also copies the gradient of o, with zeros in rows that see no
            key: queries see keys up to a bound to the right, or with `negative_left`.
        varlen_k, seqused_k: with `rows_without_keys`, how the lengths of keys are given.
        negative_left: with `rows_without_keys`, queries see keys from a bound to the right on: the
            last queries of a sequence may see no key.
        ordered: see `sums`.

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: a field's value is not supported; the message names the field.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "dtype": DTYPES,
        "sink_dtype": SINK_DTYPES,
        "head_dim_v": HEAD_DIMS_V,
    }

    dtype: str
    varlen_q: bool
    seqused_q: bool
    sink_dtype: str
    dlse: bool
    head_dim_v: int = 256
    sums: bool = False
    rows_without_keys: bool = False
    varlen_k: bool = False
    seqused_k: bool = False
    negative_left: bool = False
    ordered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ordered and not self.sums:
            raise ValueError("ordered is True, it needs sums")
        if (self.varlen_k or self.seqused_k or self.negative_left) and not self.rows_without_keys:
            raise ValueError(
                "varlen_k, seqused_k or negative_left is True, they need rows_without_keys"
            )


@dataclass(frozen=True)
class PostprocessSpec(Spec):
    """The compile-time parameters of the SM90 backward's last kernel, which rounds dq.

    Attributes:
        dtype: dtype of dq; float32 for a part of dq, which is not rounded.
        varlen_q: dq is packed sequences, with cu_seqlens.
        seqused_q: an argument gives the number of used tokens of each sequence.
        head_dim: head dimension of dq.
        tile_m, columns: the order of the sums, see `query_sums`.
        ordered: sums that nothing was added to are not written, and have a counter of 0; see
            `ordered_sums`.

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: a field's value is not supported; the message names the field.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "dtype": (*DTYPES, "float32"),
        "head_dim": head_dims("backward_fused", SM90),
    }

    dtype: str
    varlen_q: bool
    seqused_q: bool
    head_dim: int
    tile_m: int
    columns: int
    ordered: bool = False


@dataclass(frozen=True)
class BackwardSpec(Spec):
    """The compile-time parameters of every dQ and dK/dV kernel.

    Attributes:
        dtype: dtype of q, k, v, the gradient of o, and dq.
        scheduler: as for `ForwardSpec`.
        window_left, window_right: an argument bounds the keys that a query sees left or right of
            the diagonal. Causal is window_right with a bound of 0.
        softcap: scores become softcap * tanh(score / softcap).
        varlen_q, varlen_k: q (and o, dq), or k, v, dk and dv, are packed, with cu_seqlens.
        seqused_q, seqused_k: an argument gives the number of used tokens of each sequence.
        partial: dk and dv are float32 partial sums, one for each split of a group of query heads.
            For the dQ kernel that reads dS: the kernel adds up dq in float32 over parts of the
            keys, with a launch for each part. All other dQ kernels take only False.

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: a field's value is not supported; the message names the field.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {"dtype": DTYPES}

    dtype: str
    scheduler: str
    window_left: bool
    window_right: bool
    softcap: bool
    varlen_q: bool
    varlen_k: bool
    seqused_q: bool
    seqused_k: bool
    partial: bool

    @property
    def ragged_q(self) -> bool:
        """Whether rows past the end of a sequence of queries lie inside the tensor."""
        return self.varlen_q or self.seqused_q

    @property
    def ragged_k(self) -> bool:
        """Whether rows past the end of a sequence of keys lie inside the tensor."""
        return self.varlen_k or self.seqused_k


@dataclass(frozen=True)
class Hd256BackwardSpec(BackwardSpec):
    """The compile-time parameters of the SM100 dQ and dK/dV kernels for head_dim 256; see
    `BackwardSpec`."""

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **BackwardSpec.ALLOWED,
        "scheduler": KERNEL_SCHEDULERS,
    }

    partial: bool = False


@dataclass(frozen=True)
class Sm90BackwardSpec(BackwardSpec):
    """The compile-time parameters of the SM90 dQ and dK/dV kernels; see `BackwardSpec` for all
    other parameters.

    Attributes:
        scheduler: "single" at head_dim 256 for the dK/dV kernel and the dQ kernel that reads dS,
            else "counter".
        head_dim: head dimension of q and k.
        head_dim_v: head dimension of v and o.
        tile_m: query rows of a tile.
        tile_n: keys of a K/V tile; with clusters of two CTAs, the keys of both.
        stores_ds: the dK/dV kernel at head_dim 192 and 256 also stores dS, see `ds_tiles`.
        order: the order in which the kernel of all gradients adds to the sums of dQ: "any", or an
            order of `OrderedTileMap`.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **BackwardSpec.ALLOWED,
        "scheduler": ("single", "counter"),
        "head_dim": head_dims("backward_dkdv", SM90),
        "head_dim_v": head_dims_v("backward_dkdv", SM90),
        "order": ("any", *ORDERS),
    }

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    stores_ds: bool = False
    order: str = "any"

    @property
    def ordered(self) -> bool:
        """Whether the order of additions is the same in every run."""
        return self.order != "any"
