"""Tensors passed between the kernels of `chunk_kda` and of its gradient, and the passes over
chunks, whole or in segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.delta.chunk.heuristics import chunks_per_segment, chunks_per_start
from ...kernels.delta.chunk.spec import CHUNK, HALVES, record_elements

_empty = torch.empty
_new_empty = Tensor.new_empty


def num_slots(v: Tensor, cu_seqlens: Tensor | None) -> int:
    """See `kernels/delta/chunk/chunks.py`."""
    batch, tokens = v.shape[:2]
    if cu_seqlens is None:
        return batch * ((tokens + CHUNK - 1) // CHUNK)
    return tokens // CHUNK + cu_seqlens.shape[0] - 1


def empty_records(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, l2norm: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Memory for the results of `prepare` in a backward: tiles `[slots, HV, elements]`, float32
    decay `[slots, HV, K]` and, with l2norm, float32 inverse_norms `[slots, HQK, 2 * 64]`."""
    slots, heads_qk, dim_k = num_slots(v, cu_seqlens), *q.shape[2:]
    heads = v.shape[2]
    tiles = _new_empty(q, (slots, heads, record_elements(dim_k)))
    decay = _new_empty(q, (slots, heads, dim_k), dtype=torch.float32)
    if not l2norm:
        return tiles, decay, None
    return tiles, decay, _new_empty(q, (slots, heads_qk, 2 * CHUNK), dtype=torch.float32)


def empty_states(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Memory for a matrix of each chunk, `[slots, HV, V * K]`."""
    return _new_empty(q, (num_slots(v, cu_seqlens), v.shape[2], v.shape[3] * q.shape[-1]))


def matrix_of_state(q: Tensor, v: Tensor, state_v_first: bool) -> tuple[int, int]:
    """The dimensions of a head's state."""
    dim_k, dim_v = q.shape[-1], v.shape[-1]
    return (dim_v, dim_k) if state_v_first else (dim_k, dim_v)


def empty_final_state(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, state_v_first: bool
) -> Tensor:
    """Memory for the states after the sequences, float32."""
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (sequences, v.shape[2], *matrix_of_state(q, v, state_v_first))
    return _empty(shape, dtype=torch.float32, device=v.device)


def empty_v_new(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Memory for the corrections of each chunk, `[slots, HV, 64 * V]`."""
    return _new_empty(q, (num_slots(v, cu_seqlens), v.shape[2], CHUNK * v.shape[3]))


class Pass(NamedTuple):
    """The kernels of a pass.

    Attributes:
        whole: the kernel for whole sequences.
        split: the kernels transitions, segments, outputs; loaded when a call first splits
            sequences.
        num_sms: 0 if sequences may not be split.
    """

    whole: Callable[..., None]
    split: tuple[launch.Request, ...]
    num_sms: int

    @staticmethod
    def load(device: torch.device, requests: Sequence[launch.Request]) -> Pass:
        whole, *split = requests
        num_sms = launch.num_sms(device) if split else 0
        return Pass(launch.get_for(device, *whole), tuple(split), num_sms)

    def run_on(
        self,
        given: tuple[Tensor, ...],
        rows: Tensor,
        dim_k: int,
        written: tuple[Tensor, Tensor | None, Tensor | None],
        first: Tensor | None,
        last: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        """Launch any kernel of a pass. `given` are the kernel's arguments up to `o`, and `rows` is
        v or the gradient of o."""
        batch, tokens, heads, dim_v = rows.shape
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        length = 0
        if 2 * sequences * heads <= self.num_sms:
            length = chunks_per_segment(
                sequences=sequences,
                tokens=tokens,
                heads=heads,
                head_dim_v=dim_v,
                packed=cu_seqlens is not None,
                num_sms=self.num_sms,
            )
        if length:
            carried = first, last
            launch_segments(self.split, length, given, rows, dim_k, written, carried, cu_seqlens)
        else:
            self.whole(*given, *written, first, last, cu_seqlens, None, None, 0, 1, None, None)


class Starts(NamedTuple):
    """The arguments of segments that may start from zero; see `kernels/delta/chunk/starts.py`.

    Attributes:
        bounds: float32 [slots, HV, 2].
        length: chunks of a segment.
    """

    bounds: Tensor
    length: int


def run_in_segments(
    split: tuple[launch.Request, ...],
    length: int,
    inputs: tuple[Tensor | None, ...],
    records: tuple[Tensor, Tensor, Tensor | None],
    scalars: tuple[float, ...],
    v: Tensor,
    written: tuple[Tensor | None, ...],
    carried: tuple[Any, ...],
) -> None:
    """Launch KDA's `prepare`, and the pass in segments of `length` chunks.

    Args:
        split: `prepare` for split sequences, then the kernels of the pass.
        inputs: the arguments of `prepare` from q to cu_seqlens.
        records: the next arguments, which `prepare` writes.
        scalars: the arguments of `prepare` after `records`.
        written: the pass's arguments from `o` up to the carried matrices.
        carried: the pass's next arguments, up to cu_seqlens: the tensors with the carried
            matrices.
    """
    request, *kernels = split
    tiles, decay, _ = records
    starts = None
    if request[1].bounds:
        starts = Starts(
            _new_empty(decay, (*decay.shape[:2], HALVES)), start_length(v, inputs[-1], False)
        )
    prepare = launch.get_for(v.device, *request)
    prepare(*inputs, *records, *scalars, *(starts or (None, None)))
    given = v, tiles, decay
    launch_segments(
        tuple(kernels), length, given, v, decay.shape[-1], written, carried, inputs[-1], starts
    )


def start_length(v: Tensor, cu_seqlens: Tensor | None, per_head: bool) -> int:
    """Chunks of a segment that may start from zero; see `chunks_per_start`."""
    batch, tokens, heads, dim_v = v.shape
    return chunks_per_start(
        sequences=batch if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        tokens=tokens,
        heads=heads,
        head_dim_v=dim_v,
        packed=cu_seqlens is not None,
        num_sms=launch.num_sms(v.device),
        per_head=per_head,
    )


def launch_segments(
    split: tuple[launch.Request, ...],
    length: int,
    given: tuple[Tensor, ...],
    rows: Tensor,
    dim_k: int,
    written: tuple[Tensor | None, ...],
    carried: tuple[Any, ...],
    cu_seqlens: Tensor | None,
    starts: Starts | None = None,
) -> None:
    """Launch any kernel of a pass in segments of `length` chunks; see `run_in_segments`. `given`
    are the kernel's arguments up to `o`, and `rows` is v."""
    batch, tokens, heads, dim_v = rows.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    device = rows.device
    count = -(-tokens // (CHUNK * length))
    states, moves = (
        _empty((sequences, count, heads, size, dim_k), dtype=torch.float32, device=device)
        for size in (dim_v, dim_k)
    )
    transitions, combine, outputs = (launch.get_for(device, *request) for request in split)
    # `transitions` writes none of `written`; its o may be any tensor of this shape.
    rest = *carried, cu_seqlens
    nothing = (None,) * (len(written) - 1)
    short = starts or (None, None)
    transitions(*given, rows, *nothing, *rest, states, moves, length, count, *short)
    combine(cu_seqlens, states, moves, tokens, length, *short)
    if starts is not None:
        count = max(count, -(-tokens // (CHUNK * starts.length)))
    outputs(*given, *written, *rest, states, None, length, count, *short)
