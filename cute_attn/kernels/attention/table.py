"""The attention kernels by direction, architecture and head_dim; no compiler is imported."""

from __future__ import annotations

from typing import NamedTuple

from ...cache import KernelDef
from .spec import TILE_M, TILE_N


class AttentionKernel(NamedTuple):
    """A kernel, and what a caller has to know of it beside its spec."""

    kernel: KernelDef
    tile: tuple[int, int]  # query rows and keys of one cluster's tile
    cluster: int  # CTAs


HD256_FORWARD = AttentionKernel(
    KernelDef(
        name="hd256_forward", target="cute_attn.kernels.attention.sm100_fwd_hd256:Sm100Hd256Forward"
    ),
    tile=(TILE_M, TILE_N),
    cluster=2,
)

KERNELS: dict[tuple[str, str, int], AttentionKernel] = {
    ("forward", "sm_100a", 256): HD256_FORWARD,
    ("forward", "sm_103a", 256): HD256_FORWARD,
}


def find(direction: str, arch: str, head_dim: int) -> AttentionKernel:
    """The kernel for these.

    Raises:
        NotImplementedError: there is none; the message lists those that there are.
    """
    found = KERNELS.get((direction, arch, head_dim))
    if found is None:
        archs = {
            dim: [a for way, a, d in KERNELS if way == direction and d == dim]
            for dim in head_dims(direction)
        }
        there_is = "; ".join(f"head_dim {dim} on {', '.join(of)}" for dim, of in archs.items())
        raise NotImplementedError(
            f"there is no attention kernel for head_dim {head_dim} on {arch}; there is: {there_is}"
        )
    return found


def head_dims(direction: str) -> tuple[int, ...]:
    """Those that there are kernels for, on any architecture."""
    return tuple(dict.fromkeys(dim for way, _, dim in KERNELS if way == direction))


def smallest_tile(direction: str, head_dim: int) -> int:
    """Query rows of the smallest tile among the architectures' kernels."""
    return min(
        kernel.tile[0]
        for (way, _, dim), kernel in KERNELS.items()
        if way == direction and dim == head_dim
    )
