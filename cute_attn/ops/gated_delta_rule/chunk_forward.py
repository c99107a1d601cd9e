"""Launches the kernels of the chunked Gated Delta Net's forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.delta import table
from ...kernels.delta.chunk.heuristics import heads_per_cta, in_one_kernel, pass_kind
from ...kernels.delta.chunk.spec import (
    BOUNDS,
    FACTORS,
    SUB_TILE,
    HeadForwardSpec,
    record_elements,
)
from ..kda.chunk_passes import (
    Starts,
    launch_segments,
    num_slots,
    output_kernel,
    run_in_segments,
    segment_length,
    start_length,
)

_new_empty = Tensor.new_empty


def prepare_heads(
    prepare: Callable[..., None],
    inputs: tuple[Any, ...],
    v: Tensor,
    inverse_norms: Tensor | None,
    scale: float,
    beta_scale: float,
    num_sms: int,
) -> tuple[Tensor, Tensor]:
    """Launch `per_head.prepare`, and return its tiles and factors.

    Args:
        inputs: q, k, g, beta, A_log, dt_bias and cu_seqlens.
    """
    q, heads, slots = inputs[0], v.shape[2], num_slots(v, inputs[-1])
    tiles = _new_empty(q, (slots, heads, 2 * SUB_TILE))
    factors = _new_empty(q, (slots, heads, FACTORS), dtype=torch.float32)
    count = heads_per_cta(chunks=slots, heads_qk=q.shape[2], heads=heads, num_sms=num_sms)
    prepare(*inputs, tiles, factors, inverse_norms, scale, beta_scale, count)
    return tiles, factors


class ChunkForward(NamedTuple):
    """The loaded kernels of `plan_chunk_gated_delta_rule`.

    Attributes:
        forward: the whole forward in one kernel, with its spec; None with KDA's kernels.
        prepare: the kernel that prepares all chunks.
        whole: the pass over whole sequences.
        split: `prepare` for split sequences, then the kernels of the pass; loaded when a call
            first splits sequences.
        num_sms: the number of SMs.
    """

    forward: tuple[Callable[..., None], HeadForwardSpec] | None
    prepare: Callable[..., None]
    whole: Callable[..., None]
    split: tuple[launch.Request, ...]
    num_sms: int

    @staticmethod
    def load(device: torch.device, requests: Sequence[launch.Request]) -> ChunkForward:
        first, *rest = requests
        forward = None
        if first[0] in (table.HEAD_FORWARD, table.HEAD_POOL_FORWARD):
            forward = launch.get_for(device, *first), first[1]
            first, *rest = rest
        whole, *split = rest
        prepare, passes = (launch.get_for(device, *request) for request in (first, whole))
        return ChunkForward(forward, prepare, passes, tuple(split), launch.num_sms(device))

    @property
    def per_head(self) -> bool:
        """Whether these are the kernels of `kernels.delta.chunk.per_head`, not KDA's."""
        return self.forward is not None

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        beta_scale: float,
        written: tuple[Tensor | None, ...],
        carried: tuple[Any, ...],
        records: tuple[Tensor, Tensor, Tensor | None] | None = None,
    ) -> None:
        """Launch the forward. Rows of q, k and v are 16-byte aligned, g and beta have any strides;
        A_log and dt_bias are float32 `[HV]`, None without the gate.

        Args:
            scale: factor of q.
            beta_scale: factor of the sigmoid of beta.
            written: o, and without a pool also states and v_new, which are None except for a
                gradient (see `chunk_pass.Arguments`).
            carried: initial_state and final_state; with a pool instead pool, state_indices,
                checkpoint_indices, chunks from one checkpoint to the next, has_initial_state.
            records: with a gradient, the memory for the records of KDA's kernels
                (`chunk_passes.empty_records`).
        """
        batch, tokens, heads, _ = v.shape
        dim_k = q.shape[-1]
        length = 0
        if self.split:
            kind = pass_kind(self.split[1][1])
            length = segment_length(
                kind, v, dim_k, cu_seqlens, self.num_sms, starts=self.split[0][1].bounds
            )
        slots = num_slots(v, cu_seqlens)
        inputs = q, k, g, beta, A_log, dt_bias, cu_seqlens
        if self.forward is not None:
            forward, spec = self.forward
            sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
            if not length and in_one_kernel(
                spec, sequences=sequences, tokens=batch * tokens, heads=heads, num_sms=self.num_sms
            ):
                forward(
                    q, k, v, g, beta, A_log, dt_bias, *written, *carried, cu_seqlens, scale,
                    beta_scale,
                )  # fmt: skip
                return
            prepare = launch.get_for(v.device, *self.split[0]) if length else self.prepare
            tiles, factors = prepare_heads(
                prepare, inputs, v, None, scale, beta_scale, self.num_sms
            )
            given: tuple[Tensor, ...] = q, k, v, tiles, factors
            if length:
                request, *kernels = self.split
                starts = None
                if request[1].bounds:
                    bounds = factors[:, :, BOUNDS]
                    of_outputs = output_kernel(self.split, v, length)[1]
                    starts = Starts(bounds, start_length(of_outputs, v, cu_seqlens))
                launch_segments(
                    tuple(kernels), length, given, v, dim_k, written, carried, cu_seqlens, starts
                )
                return
        else:
            if records is None:
                tiles = _new_empty(q, (slots, heads, record_elements(dim_k)))
                decay = _new_empty(q, (slots, heads, dim_k), dtype=torch.float32)
                records = tiles, decay, None
            scalars = scale, 0.0, beta_scale
            if length:
                run_in_segments(self.split, length, inputs, records, scalars, v, written, carried)
                return
            self.prepare(*inputs, *records, *scalars, None, None)
            given = v, *records[:2]
        self.whole(*given, *written, *carried, cu_seqlens, None, None, 0, 1, None, None)
