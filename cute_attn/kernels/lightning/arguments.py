"""The arguments that every Lightning decode kernel takes, as stand-ins to compile against.

    q, k          [B, H, K] or [B, T, H, K]          any strides, last dimension contiguous
    v, o          [B, H, V] or [B, T, H, V]
    state         [N, H, V, K] or [N, H, K, V]       a head's matrix contiguous
    decay         [H]              float32
    state_indices [B]              int32             None unless the Spec is indexed
    draft_k       [N, S, H, K]                       None unless the Spec replays, like the next two
    draft_v       [N, S, H, V]
    num_accepted  [B]              int32
    softmax_scale float32
    num_blocks    int32                              only of a persistent kernel: blocks to launch
    (stream: the environment's)

Sizes and strides are arguments, so that none of them recompiles; the compiled host code checks
that they agree with each other.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..common.dtypes import DTYPE
from .spec import VECTOR_BYTES, DecodeSpec


def fake_args(spec: DecodeSpec) -> tuple[Any, ...]:
    """Stand-ins for the arguments of a kernel's `__call__`, in order."""
    dtype, state_dtype = DTYPE[spec.dtype], DTYPE[spec.state_dtype]
    element_bytes = dtype.width // 8
    batch, heads, tokens, records = (cute.sym_int() for _ in range(4))
    slots = cute.sym_int() if spec.indexed else batch
    token_modes = (tokens,) if spec.multi_token else ()

    def rows(shape: tuple[Any, ...], aligned: bool) -> Any:
        divisibility = VECTOR_BYTES // element_bytes if aligned else 1
        strides = (cute.sym_int64(divisibility=divisibility) for _ in shape[:-1])
        align = VECTOR_BYTES if aligned else element_bytes
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=align)

    def token_rows(dim: int, aligned: bool) -> Any:
        return rows((batch, *token_modes, heads, dim), aligned)

    def vector(element: Any, length: Any) -> Any:
        return make_fake_tensor(element, (length,), (1,), assumed_align=4)

    matrix = (spec.head_dim_v, spec.head_dim_k)
    if spec.state_layout == "kv":
        matrix = matrix[::-1]
    state = make_fake_tensor(
        state_dtype,
        (slots, heads, *matrix),
        (*(cute.sym_int64(divisibility=spec.vector) for _ in range(2)), matrix[1], 1),
        assumed_align=VECTOR_BYTES,
    )
    return (
        token_rows(spec.head_dim_k, spec.aligned),
        token_rows(spec.head_dim_k, spec.aligned),
        token_rows(spec.head_dim_v, spec.aligned),
        token_rows(spec.head_dim_v, False),
        state,
        vector(cutlass.Float32, heads),
        vector(cutlass.Int32, batch) if spec.indexed else None,
        rows((slots, records, heads, spec.head_dim_k), spec.aligned) if spec.replay else None,
        rows((slots, records, heads, spec.head_dim_v), spec.aligned) if spec.replay else None,
        vector(cutlass.Int32, batch) if spec.replay else None,
        cutlass.Float32(1.0),
        *((cutlass.Int32(1),) if spec.persistent else ()),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
