"""Launches the kernels of the chunked Gated Delta Net's forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.delta import table
from ...kernels.delta.chunk.heuristics import heads_per_cta, in_one_kernel, pass_kind
from ...kernels.delta.chunk.spec import BOUNDS, FACTORS, SUB_TILE, record_elements
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
    """The kernels of `plan_chunk_gated_delta_rule`, loaded when a call first uses them.

    Attributes:
        whole: on sm_90a the whole forward in one kernel; then the kernel that prepares all chunks,
            and the pass over whole sequences.
        split: `prepare` for split sequences, then the kernels of the pass.
        num_sms: the number of SMs.
        per_head: whether these are the kernels of `kernels.delta.chunk.per_head`, not KDA's.
    """

    whole: tuple[launch.Request, ...]
    split: tuple[launch.Request, ...]
    num_sms: int
    per_head: bool

    @staticmethod
    def load(device: torch.device, requests: Sequence[launch.Request]) -> ChunkForward:
        per_head = requests[0][0] in (table.HEAD_FORWARD, table.HEAD_POOL_FORWARD)
        count = 3 if per_head else 2
        whole, split = tuple(requests[:count]), tuple(requests[count:])
        return ChunkForward(whole, split, launch.num_sms(device), per_head)

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
        heads, dim_k = v.shape[2], q.shape[-1]
        length = 0
        if self.split:
            kind = pass_kind(self.split[1][1])
            length = segment_length(
                kind, v, dim_k, cu_seqlens, self.num_sms, starts=self.split[0][1].bounds
            )
        slots = num_slots(v, cu_seqlens)
        inputs = q, k, g, beta, A_log, dt_bias, cu_seqlens
        device = v.device
        if self.per_head and not length and self._in_one_kernel(v, cu_seqlens):
            launch.get_for(device, *self.whole[0])(
                q, k, v, g, beta, A_log, dt_bias, *written, *carried, cu_seqlens, scale, beta_scale
            )
            return
        if self.per_head:
            request, *kernels = self.split if length else self.whole[1:]
            tiles, factors = prepare_heads(
                launch.get_for(device, *request), inputs, v, None, scale, beta_scale, self.num_sms
            )
            given: tuple[Tensor, ...] = q, k, v, tiles, factors
            if length:
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
            launch.get_for(device, *self.whole[0])(*inputs, *records, *scalars, None, None)
            given = v, *records[:2]
        state_pass = launch.get_for(device, *self.whole[-1])
        state_pass(*given, *written, *carried, cu_seqlens, None, None, 0, 1, None, None)

    def _in_one_kernel(self, v: Tensor, cu_seqlens: Tensor | None) -> bool:
        batch, tokens, heads, _ = v.shape
        return in_one_kernel(
            self.whole[0][1],
            sequences=batch if cu_seqlens is None else cu_seqlens.shape[0] - 1,
            tokens=tokens if cu_seqlens is not None else batch * tokens,
            heads=heads,
            num_sms=self.num_sms,
        )
