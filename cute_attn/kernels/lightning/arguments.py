"""The arguments of every Lightning decode kernel, and placeholders to compile against.

    q, k          [B, H, K] or [B, T, H, K]          any strides, last dimension contiguous
    v, o          [B, H, V] or [B, T, H, V]
    state         [N, H, V, K] or [N, H, K, V]       a head's matrix contiguous
    decay         [H]              float32
    state_indices [B]              int32             None unless the Spec is indexed
    draft_k       [N, S, H, K]                       None unless the Spec replays, like the next two
    draft_v       [N, S, H, V]
    num_accepted  [B]              int32
    softmax_scale float32
    num_blocks    int32                              CTAs to launch, for a persistent kernel only
    stream                                           the stream of the TVM FFI environment

Sizes and strides are symbolic, so no new size recompiles a kernel; the compiled host code checks
that they agree with each other.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from ..common.arguments import fake_contiguous, fake_matrices, fake_rows
from ..common.dtypes import DTYPE
from ..common.spec import VECTOR_BYTES
from .spec import DecodeSpec


def fake_args(spec: DecodeSpec) -> tuple[Any, ...]:
    """Placeholders for the arguments of a kernel's `__call__`, in order."""
    dtype, state_dtype = DTYPE[spec.dtype], DTYPE[spec.state_dtype]
    batch, heads, tokens, records = (cute.sym_int() for _ in range(4))
    slots = cute.sym_int() if spec.indexed else batch
    token_modes = (tokens,) if spec.multi_token else ()

    def rows(shape: tuple[Any, ...], aligned: bool) -> Any:
        return fake_rows(dtype, shape, VECTOR_BYTES if aligned else dtype.width // 8)

    def token_rows(dim: int, aligned: bool) -> Any:
        return rows((batch, *token_modes, heads, dim), aligned)

    matrix = (spec.head_dim_v, spec.head_dim_k)
    if spec.state_layout == "kv":
        matrix = matrix[::-1]
    return (
        token_rows(spec.head_dim_k, spec.aligned),
        token_rows(spec.head_dim_k, spec.aligned),
        token_rows(spec.head_dim_v, spec.aligned),
        token_rows(spec.head_dim_v, False),
        fake_matrices((slots, heads), matrix, state_dtype),
        fake_contiguous(cutlass.Float32, (heads,)),
        fake_contiguous(cutlass.Int32, (batch,)) if spec.indexed else None,
        rows((slots, records, heads, spec.head_dim_k), spec.aligned) if spec.replay else None,
        rows((slots, records, heads, spec.head_dim_v), spec.aligned) if spec.replay else None,
        fake_contiguous(cutlass.Int32, (batch,)) if spec.replay else None,
        cutlass.Float32(1.0),
        *((cutlass.Int32(1),) if spec.persistent else ()),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
