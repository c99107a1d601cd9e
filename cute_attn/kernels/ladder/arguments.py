"""The arguments of every step's kernel, and placeholders to compile against.

    q, k, v, o     [B, S, H, D]      any strides, last dimension contiguous, rows on 16 bytes
    softmax_scale  float32
    stream                           the stream of the TVM FFI environment

B, S and H are symbolic; the compiled host code checks that all tensors agree on them.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream

from ..common.arguments import fake_rows
from ..common.dtypes import DTYPE
from .spec import FmhaLadderSpec


def fake_args(spec: FmhaLadderSpec) -> tuple[Any, ...]:
    """Placeholders for the arguments of a step's `__call__`, in order."""
    shape = (cute.sym_int(), cute.sym_int(), cute.sym_int(), spec.head_dim)
    tensors = [fake_rows(DTYPE[spec.dtype], shape) for _ in range(4)]
    return (*tensors, Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True))
