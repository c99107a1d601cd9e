"""Decode: copies k and g of drafted tokens to their slots' records.

This is a separate kernel after `decode`, because several CTAs of `decode` read the records that
this kernel overwrites: CTAs of one head, and of a group's value heads.

    CTA (row: a head of k, or of g; token; sequence)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common.entry import entry, gathered, placeholders
from ..slots import fake_slots, is_slot
from . import arguments
from .spec import RecordsSpec


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        k: `[B, T, HQK, K]`, with a contiguous last dimension.
        g: `[B, T, HV, K]`; with head_gate `[B, T, HV]`.
        state_indices: `[B]`.
        record_k: `[N, S, HQK, K]`, with a contiguous last dimension.
        record_g: `[N, S, HV, K]`; with head_gate `[N, S, HV]`.
    """

    k: cute.Tensor
    g: cute.Tensor
    state_indices: cute.Tensor | None
    record_k: cute.Tensor
    record_g: cute.Tensor


class KdaDecodeRecords:
    """The kernel for one RecordsSpec; see the module's docstring."""

    def __init__(self, spec: RecordsSpec):
        self.spec = spec

    def fake_args(self) -> tuple[Any, ...]:
        spec = self.spec
        sizes = arguments.Sizes()
        slots = cute.sym_int() if spec.indexed else sizes.batch
        step, records, dim = (sizes.batch, sizes.tokens), cute.sym_int(), spec.head_dim_k
        return placeholders(
            Arguments(
                k=arguments.rows(spec.dtype, *step, sizes.heads, dim),
                g=arguments.gates(spec, *step, sizes.heads_v),
                state_indices=fake_slots(spec, sizes.batch) if spec.indexed else None,
                record_k=arguments.rows(spec.dtype, slots, records, sizes.heads, dim),
                record_g=arguments.gates(spec, slots, records, sizes.heads_v),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        tokens = cutlass.min(a.k.shape[1], a.record_k.shape[1])
        self.kernel(a).launch(
            grid=[a.k.shape[2] + a.g.shape[2], tokens, a.k.shape[0]],
            block=[self.spec.head_dim_k, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        row, token, sequence = cute.arch.block_idx()
        channel, _, _ = cute.arch.thread_idx()
        slot = sequence
        valid = Boolean(True)
        if cutlass.const_expr(self.spec.indexed):
            index = x.state_indices[sequence]
            valid = is_slot(index, x.record_k, self.spec.null_slot)
            slot = Int32(index)
        heads = x.k.shape[2]
        if valid:
            if row < heads:
                x.record_k[slot, token, row, channel] = x.k[sequence, token, row, channel]
            else:
                head = row - heads
                if cutlass.const_expr(not self.spec.head_gate):
                    x.record_g[slot, token, head, channel] = x.g[sequence, token, head, channel]
                elif channel == 0:
                    x.record_g[slot, token, head] = x.g[sequence, token, head]
