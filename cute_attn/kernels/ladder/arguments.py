"""The arguments of every step's kernel, and placeholders to compile against.

B, S and H are symbolic; the compiled host code checks that all tensors agree on these sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from ..common.arguments import fake_rows
from ..common.dtypes import DTYPE
from .spec import FmhaLadderSpec


class Arguments(NamedTuple):
    """The kernels' arguments.

    Attributes:
        q, k, v, o: `[B, S, H, D]`. The last dimension is contiguous, rows start on 16-byte
            boundaries, other strides are free.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    softmax_scale: Float32


def fake_arguments(spec: FmhaLadderSpec) -> Arguments:
    """Placeholders for the arguments of a step's kernel."""
    shape = (cute.sym_int(), cute.sym_int(), cute.sym_int(), spec.head_dim)
    q, k, v, o = (fake_rows(DTYPE[spec.dtype], shape) for _ in range(4))
    return Arguments(q, k, v, o, softmax_scale=Float32(1.0))
