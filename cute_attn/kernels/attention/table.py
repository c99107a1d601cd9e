"""The attention kernels by name, and by their rows; importing this loads no compiler."""

from __future__ import annotations

from typing import NamedTuple

from ...cache import KernelDef
from . import configs
from .configs import Row, has, head_dims, shapes

__all__ = [
    "AttentionKernel",
    "KERNELS",
    "called",
    "find",
    "has",
    "head_dims",
    "shapes",
    "smallest_tile",
]

_HERE = __name__.rpartition(".")[0]


class AttentionKernel(NamedTuple):
    """A kernel, and its row for an architecture and head dimensions."""

    kernel: KernelDef
    row: Row

    @property
    def tile(self) -> tuple[int, int]:
        """Query rows and keys of one cluster's tile; 0 keys where the kernel reads none."""
        return self.row.tile[:2]

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.row.cluster


def _kernel(name: str, target: str) -> KernelDef:
    return KernelDef(name=name, target=f"{_HERE}.{target}")


HD256_FORWARD = _kernel("hd256_forward", "sm100.forward_hd256:Sm100Hd256Forward")
SM90_FORWARD = _kernel("sm90_forward", "sm90.forward:Sm90Forward")
COMBINE = _kernel("combine", "any.combine:Combine")
BACKWARD_PREPROCESS = _kernel(
    "attention_backward_preprocess", "any.backward_preprocess:BackwardPreprocess"
)
HD256_BACKWARD_DQ = _kernel("hd256_backward_dq", "sm100.backward_hd256_dq:Sm100Hd256Dq")
HD256_BACKWARD_DKDV = _kernel("hd256_backward_dkdv", "sm100.backward_hd256_dkdv:Sm100Hd256DkDv")
SM90_BACKWARD_DQ = _kernel("sm90_backward_dq", "sm90.backward_dq:Sm90Dq")
SM90_BACKWARD_DKDV = _kernel("sm90_backward_dkdv", "sm90.backward_dkdv:Sm90DkDv")
SM90_WIDE_BACKWARD_DKDV = _kernel("sm90_wide_backward_dkdv", "sm90.backward_wide_dkdv:Sm90WideDkDv")
SM90_BACKWARD_DS_DQ = _kernel("sm90_backward_ds_dq", "sm90.backward_ds_dq:Sm90DsDq")
SM90_BACKWARD = _kernel("sm90_backward", "sm90.backward_hd64:Sm90Hd64Backward")
SM90_HD128_BACKWARD = _kernel("sm90_hd128_backward", "sm90.backward_hd128:Sm90Hd128Backward")
BACKWARD_POSTPROCESS = _kernel(
    "attention_backward_postprocess", "any.backward_postprocess:BackwardPostprocess"
)

KERNELS = {
    kernel.name: kernel
    for kernel in (
        HD256_FORWARD,
        SM90_FORWARD,
        COMBINE,
        BACKWARD_PREPROCESS,
        HD256_BACKWARD_DQ,
        HD256_BACKWARD_DKDV,
        SM90_BACKWARD_DQ,
        SM90_BACKWARD_DKDV,
        SM90_WIDE_BACKWARD_DKDV,
        SM90_BACKWARD_DS_DQ,
        SM90_BACKWARD,
        SM90_HD128_BACKWARD,
        BACKWARD_POSTPROCESS,
    )
}


def called(arch: str) -> set[KernelDef]:
    """The kernels that operators call on an architecture."""
    rows = {row.kernel for (_, of, *_), row in configs.ROWS.items() if of == arch}
    return {KERNELS[name] for name in rows} | {COMBINE}


def find(way: str, arch: str, head_dim: int, head_dim_v: int | None = None) -> AttentionKernel:
    """The kernel of a pass, such as ("forward", "sm_100a", 256); head_dim_v is head_dim if None.

    Raises:
        NotImplementedError: there is no such kernel; the message lists the existing kernels.
    """
    row = configs.find(way, arch, head_dim, head_dim_v)
    return AttentionKernel(KERNELS[row.kernel], row)


def smallest_tile(way: str, head_dim: int, head_dim_v: int) -> int:
    """Query rows of the smallest tile among all architectures' kernels."""
    found = [
        row
        for (at, _, *dims), row in configs.ROWS.items()
        if (at, *dims) == (way, head_dim, head_dim_v)
    ]
    return min(row.tile.m for row in found)
