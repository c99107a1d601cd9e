"""Whether attention kernels take tensors, for callers that can fall back on other kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import launch
from ...kernels.attention import configs, table
from ...kernels.attention.configs import SM90, SM100, has_fp8
from ...kernels.attention.spec import DTYPES
from ..checks import DTYPE_NAMES


def has_kernels(q: Tensor, v: Tensor) -> bool:
    """Whether there are a forward and a backward for the dtype, the head dimensions and the device
    of q `[..., head_dim]` and v `[..., head_dim_v]`."""
    if DTYPE_NAMES.get(q.dtype) not in DTYPES:
        return False
    try:
        arch = launch.arch_for(q.device)
    except NotImplementedError:  # a GPU that is too old
        return False
    dims = q.shape[-1], v.shape[-1]
    return table.has("forward", arch, *dims) and table.has("backward_dq", arch, *dims)


def forward_head_dims(device: torch.device, *, fp8: bool = False) -> tuple[tuple[int, int], ...]:
    """The pairs (head_dim, head_dim_v) of which the device has a forward, or with `fp8` a forward
    over fp8 k and v."""
    arch = launch.arch_for(device)
    found = tuple(dims for dims in table.shapes("forward") if table.has("forward", arch, *dims))
    return tuple(dims for dims in found if has_fp8(arch, *dims)) if fp8 else found


def page_step(device: torch.device) -> int:
    """The number of rows of which the page sizes of the device's forward are multiples."""
    arch = launch.arch_for(device)
    return max(row.page_step for key, row in configs.FORWARD.items() if key[1] == arch)


def head_dims_by_major() -> dict[int, tuple[tuple[int, int], ...]]:
    """Major compute capability -> the pairs (head_dim, head_dim_v) that have a forward kernel."""
    return {major: table.shapes("forward", archs) for major, archs in ((9, SM90), (10, SM100))}


def equal_head_dims(*, fp8: bool = False) -> dict[int, tuple[int, ...]]:
    """Major compute capability -> the head_dims that have a forward with v of equal head_dim. With
    `fp8`, the head_dims that have such a forward over fp8 k and v."""
    of_fp8 = {dim for _, arch, dim, dim_v in configs.FORWARD if has_fp8(arch, dim, dim_v)}
    return {
        major: tuple(dim for dim, dim_v in pairs if dim == dim_v and (not fp8 or dim in of_fp8))
        for major, pairs in head_dims_by_major().items()
    }
