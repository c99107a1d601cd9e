"""The attention kernels by direction, architecture and head_dim; importing it loads no compiler."""

from __future__ import annotations

from typing import NamedTuple

from ...cache import KernelDef
from .spec import (
    DKDV_TILE_M,
    DKDV_TILE_N,
    SM90_DKDV_TILES,
    SM90_DQ_TILES,
    SM90_DS_DQ_TILES,
    SM90_FUSED_TILES,
    SM90_TILES,
    TILE_M,
    TILE_N,
)
from .statistics import STATS_ROWS


class AttentionKernel(NamedTuple):
    """A kernel, with its tile and cluster sizes."""

    kernel: KernelDef
    tile: tuple[int, int]  # query rows and keys of one cluster's tile; 0 keys where it reads none
    cluster: int  # CTAs of a cluster


HD256_FORWARD = AttentionKernel(
    KernelDef(
        name="hd256_forward", target="cute_attn.kernels.attention.sm100_fwd_hd256:Sm100Hd256Forward"
    ),
    tile=(TILE_M, TILE_N),
    cluster=2,
)

SM90_FORWARD = KernelDef(
    name="sm90_forward", target="cute_attn.kernels.attention.sm90_fwd:Sm90Forward"
)

COMBINE = KernelDef(name="combine", target="cute_attn.kernels.attention.combine:Combine")

BACKWARD_PREPROCESS = AttentionKernel(
    KernelDef(
        name="attention_backward_preprocess",
        target="cute_attn.kernels.attention.backward_preprocess:BackwardPreprocess",
    ),
    tile=(STATS_ROWS, 0),
    cluster=1,
)

HD256_BACKWARD_DQ = AttentionKernel(
    KernelDef(
        name="hd256_backward_dq",
        target="cute_attn.kernels.attention.sm100_bwd_hd256_dq:Sm100Hd256Dq",
    ),
    tile=(TILE_M, TILE_N),
    cluster=2,
)

HD256_BACKWARD_DKDV = AttentionKernel(
    KernelDef(
        name="hd256_backward_dkdv",
        target="cute_attn.kernels.attention.sm100_bwd_hd256_dkdv:Sm100Hd256DkDv",
    ),
    tile=(DKDV_TILE_M, DKDV_TILE_N),
    cluster=4,
)

SM90_BACKWARD_DQ = KernelDef(
    name="sm90_backward_dq", target="cute_attn.kernels.attention.sm90_bwd_dq:Sm90Dq"
)

SM90_BACKWARD_DKDV = KernelDef(
    name="sm90_backward_dkdv", target="cute_attn.kernels.attention.sm90_bwd_dkdv:Sm90DkDv"
)

SM90_HD256_BACKWARD_DKDV = AttentionKernel(
    KernelDef(
        name="sm90_hd256_backward_dkdv",
        target="cute_attn.kernels.attention.sm90_bwd_hd256_dkdv:Sm90Hd256DkDv",
    ),
    tile=SM90_DKDV_TILES[256],
    cluster=2,
)

# dQ from the dS that the dK/dV kernel has stored.
SM90_BACKWARD_DS_DQ = AttentionKernel(
    KernelDef(
        name="sm90_backward_ds_dq",
        target="cute_attn.kernels.attention.sm90_bwd_ds_dq:Sm90DsDq",
    ),
    tile=SM90_DS_DQ_TILES[256],
    cluster=2,
)

# dK, dV and sums of dQ in one kernel, and dQ from its sums.
SM90_BACKWARD = KernelDef(
    name="sm90_backward", target="cute_attn.kernels.attention.sm90_bwd:Sm90Backward"
)

SM90_HD128_BACKWARD = AttentionKernel(
    KernelDef(
        name="sm90_hd128_backward",
        target="cute_attn.kernels.attention.sm90_bwd_hd128:Sm90Hd128Backward",
    ),
    tile=SM90_FUSED_TILES[128],
    cluster=1,
)

BACKWARD_POSTPROCESS = KernelDef(
    name="attention_backward_postprocess",
    target="cute_attn.kernels.attention.backward_postprocess:BackwardPostprocess",
)

SM90_PREPROCESS_TILES = {head_dim: BACKWARD_PREPROCESS.tile for head_dim in SM90_DKDV_TILES}
SM90_POSTPROCESS_TILES = {head_dim: BACKWARD_PREPROCESS.tile for head_dim in SM90_FUSED_TILES}

KERNELS: dict[tuple[str, str, int], AttentionKernel] = {
    (direction, arch, 256): kernel
    for direction, kernel in (
        ("forward", HD256_FORWARD),
        ("backward_preprocess", BACKWARD_PREPROCESS),
        ("backward_dq", HD256_BACKWARD_DQ),
        ("backward_dkdv", HD256_BACKWARD_DKDV),
    )
    for arch in ("sm_100a", "sm_103a")
} | {
    (direction, "sm_90a", head_dim): AttentionKernel(kernel, tile[:2], cluster=1)
    for direction, kernel, tiles in (
        ("forward", SM90_FORWARD, SM90_TILES),
        ("backward_preprocess", BACKWARD_PREPROCESS.kernel, SM90_PREPROCESS_TILES),
        ("backward_dq", SM90_BACKWARD_DQ, SM90_DQ_TILES),
        ("backward_dkdv", SM90_BACKWARD_DKDV, SM90_DKDV_TILES),
        ("backward_fused", SM90_BACKWARD, SM90_FUSED_TILES),
        ("backward_postprocess", BACKWARD_POSTPROCESS, SM90_POSTPROCESS_TILES),
    )
    for head_dim, tile in tiles.items()
}
KERNELS["backward_dkdv", "sm_90a", 256] = SM90_HD256_BACKWARD_DKDV
KERNELS["backward_fused", "sm_90a", 128] = SM90_HD128_BACKWARD
KERNELS["backward_ds_dq", "sm_90a", 256] = SM90_BACKWARD_DS_DQ


def has(direction: str, arch: str, head_dim: int) -> bool:
    """Whether there is such a kernel."""
    return (direction, arch, head_dim) in KERNELS


def find(direction: str, arch: str, head_dim: int) -> AttentionKernel:
    """The kernel for a direction, an architecture and a head_dim, such as ("forward", "sm_100a",
    256).

    Raises:
        NotImplementedError: there is no such kernel; the message lists the existing ones.
    """
    found = KERNELS.get((direction, arch, head_dim))
    if found is None:
        archs = {
            dim: [a for way, a, d in KERNELS if way == direction and d == dim]
            for dim in head_dims(direction)
        }
        there_is = "; ".join(f"head_dim {dim} on {', '.join(of)}" for dim, of in archs.items())
        way = direction.partition("_")[0]
        raise NotImplementedError(
            f"there is no attention {way} for head_dim {head_dim} on {arch}; there is: {there_is}"
        )
    return found


def head_dims(direction: str) -> tuple[int, ...]:
    """The head dimensions that some architecture has a kernel for."""
    return tuple(sorted({dim for way, _, dim in KERNELS if way == direction}))


def smallest_tile(direction: str, head_dim: int) -> int:
    """Query rows of the smallest tile among all architectures' kernels."""
    return min(
        kernel.tile[0]
        for (way, _, dim), kernel in KERNELS.items()
        if way == direction and dim == head_dim
    )
