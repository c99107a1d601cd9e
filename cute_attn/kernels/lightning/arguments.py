"""The arguments of every Lightning decode kernel, and placeholders to compile against.

Sizes and strides are symbolic, so no new size recompiles a kernel; the compiled host code checks
that the tensors' sizes agree.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.arguments import Sizes, fake_contiguous, fake_matrices, fake_rows
from ..common.dtypes import DTYPE
from ..common.spec import VECTOR_BYTES
from .spec import DecodeSpec


class Arguments(NamedTuple):
    """The kernels' arguments.

    q, k, v and the drafts have a contiguous last dimension and otherwise any strides. In the state,
    each head's matrix is contiguous.

    Attributes:
        q, k: `[B, H, K]`, or `[B, T, H, K]` for several tokens.
        v, o: `[B, H, V]`, or `[B, T, H, V]` for several tokens.
        state: `[N, H, V, K]` or `[N, H, K, V]`.
        decay: `[H]`, float32.
        state_indices: `[B]`, int32, or None: sequence i has slot i.
        draft_k, draft_v: `[N, S, H, K]` and `[N, S, H, V]`, or None without a replay.
        num_accepted: `[B]`, int32, or None without a replay.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    state: cute.Tensor
    decay: cute.Tensor
    state_indices: cute.Tensor | None
    draft_k: cute.Tensor | None
    draft_v: cute.Tensor | None
    num_accepted: cute.Tensor | None
    softmax_scale: Float32


def fake_arguments(spec: DecodeSpec) -> Arguments:
    """Placeholders for the arguments of a kernel."""
    dtype, state_dtype = DTYPE[spec.dtype], DTYPE[spec.state_dtype]
    batch, heads, tokens, records = (cute.sym_int() for _ in range(4))
    slots = cute.sym_int() if spec.indexed else batch
    token_modes = (tokens,) if spec.multi_token else ()

    def rows(shape: Sizes, aligned: bool) -> cute.Tensor:
        return fake_rows(dtype, shape, VECTOR_BYTES if aligned else dtype.width // 8)

    def token_rows(dim: int, aligned: bool) -> cute.Tensor:
        return rows((batch, *token_modes, heads, dim), aligned)

    matrix = (spec.head_dim_v, spec.head_dim_k)
    if spec.state_layout == "kv":
        matrix = matrix[::-1]
    draft_k = draft_v = num_accepted = None
    if spec.replay:
        draft_k = rows((slots, records, heads, spec.head_dim_k), spec.aligned)
        draft_v = rows((slots, records, heads, spec.head_dim_v), spec.aligned)
        num_accepted = fake_contiguous(Int32, (batch,))
    return Arguments(
        q=token_rows(spec.head_dim_k, spec.aligned),
        k=token_rows(spec.head_dim_k, spec.aligned),
        v=token_rows(spec.head_dim_v, spec.aligned),
        o=token_rows(spec.head_dim_v, False),
        state=fake_matrices((slots, heads), matrix, state_dtype),
        decay=fake_contiguous(Float32, (heads,)),
        state_indices=fake_contiguous(Int32, (batch,)) if spec.indexed else None,
        draft_k=draft_k,
        draft_v=draft_v,
        num_accepted=num_accepted,
        softmax_scale=Float32(1.0),
    )
