"""KDA decode: copies k and g of drafted tokens to their slots' records.

This is a separate kernel after `decode`, because in `decode` several CTAs (of a head, and of the
value heads of a group) read the records that this one overwrites.

    CTA (row: a head of k, or of g; token; sequence)
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean
from cutlass.cute.runtime import make_fake_stream

from . import arguments
from .spec import RecordsSpec


class KdaDecodeRecords:
    """The kernel for one RecordsSpec.

    k              [B, T, HQK, K]       last dimension contiguous
    g              [B, T, HV, K]
    state_indices  [B]     int32
    record_k       [N, S, HQK, K]       last dimension contiguous
    record_g       [N, S, HV, K]
    """

    def __init__(self, spec: RecordsSpec):
        self.spec = spec

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        sizes = arguments.Sizes()
        slots = cute.sym_int() if spec.indexed else sizes.batch
        step, records, dim = (sizes.batch, sizes.tokens), cute.sym_int(), spec.head_dim_k
        return (
            arguments.rows(spec.dtype, *step, sizes.heads, dim),
            arguments.rows(spec.gate_dtype, *step, sizes.heads_v, dim),
            arguments.indices(sizes.batch) if spec.indexed else None,
            arguments.rows(spec.dtype, slots, records, sizes.heads, dim),
            arguments.rows(spec.gate_dtype, slots, records, sizes.heads_v, dim),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,
        g: cute.Tensor,
        state_indices: cute.Tensor | None,
        record_k: cute.Tensor,
        record_g: cute.Tensor,
        stream: Any,
    ) -> None:
        tokens = cutlass.min(k.shape[1], record_k.shape[1])
        self.kernel(k, g, state_indices, record_k, record_g).launch(
            grid=[k.shape[2] + g.shape[2], tokens, k.shape[0]],
            block=[self.spec.head_dim_k, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        k: cute.Tensor,
        g: cute.Tensor,
        state_indices: cute.Tensor | None,
        record_k: cute.Tensor,
        record_g: cute.Tensor,
    ) -> None:
        row, token, sequence = cute.arch.block_idx()
        channel, _, _ = cute.arch.thread_idx()
        slot = sequence
        valid = Boolean(True)
        if cutlass.const_expr(self.spec.indexed):
            slot = state_indices[sequence]
            valid = slot >= 0 and slot < record_k.shape[0]
        heads = k.shape[2]
        if valid:
            if row < heads:
                record_k[slot, token, row, channel] = k[sequence, token, row, channel]
            else:
                head = row - heads
                record_g[slot, token, head, channel] = g[sequence, token, head, channel]
