"""Tensors passed between the kernels of `chunk_kda` and of its gradient, and the passes over
chunks, whole or in segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.delta.chunk.heuristics import (
    chunks_per_segment,
    chunks_per_start,
    only_starts,
    pass_kind,
)
from ...kernels.delta.chunk.spec import CHUNK, HALVES, PassSpec, PoolPassSpec, record_elements

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
        length = segment_length("channel", rows, dim_k, cu_seqlens, self.num_sms)
        if length:
            carried = first, last
            launch_segments(self.split, length, given, rows, dim_k, written, carried, cu_seqlens)
        else:
            self.whole(*given, *written, first, last, cu_seqlens, None, None, 0, 1, None, None)


def segment_length(
    kind: str, rows: Tensor, dim_k: int, cu_seqlens: Tensor | None, num_sms: int, *,
    starts: bool = False,
) -> int:  # fmt: skip
    """Chunks of a segment, or 0 where sequences are not split. All chunks of a call are one
    segment if only starts from zero split sequences.

    Args:
        kind: as for `chunks_per_segment`.
        rows: v, or the gradient of o.
        num_sms: 0 if sequences may not be split.
        starts: whether segments may start from zero.
    """
    batch, tokens, heads, dim_v = rows.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if 2 * sequences * heads > num_sms:
        return 0
    sizes: dict[str, Any] = {
        "sequences": sequences,
        "tokens": tokens,
        "heads": heads,
        "head_dim_k": dim_k,
        "head_dim_v": dim_v,
        "packed": cu_seqlens is not None,
        "num_sms": num_sms,
    }
    length = chunks_per_segment(kind, **sizes)
    return only_starts(kind, **sizes) if starts and not length else length


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
        split: `prepare` for split sequences, then the kernels of the pass, see `launch_segments`.
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
        bounds = _new_empty(decay, (*decay.shape[:2], HALVES))
        starts = Starts(bounds, start_length(output_kernel(split, v, length)[1], v, inputs[-1]))
    prepare = launch.get_for(v.device, *request)
    prepare(*inputs, *records, *scalars, *(starts or (None, None)))
    given = v, tiles, decay
    launch_segments(
        tuple(kernels), length, given, v, decay.shape[-1], written, carried, inputs[-1], starts
    )


def output_kernel(split: tuple[launch.Request, ...], v: Tensor, length: int) -> launch.Request:
    """The kernel for the outputs of segments of `length` chunks. Without exact transitions it is
    the last one, because the other one's shared copies make a chain of all chunks slower."""
    return split[-1] if v.shape[1] <= CHUNK * length else split[3]


def start_length(spec: PassSpec, v: Tensor, cu_seqlens: Tensor | None) -> int:
    """Chunks of a segment that may start from zero; see `chunks_per_start`."""
    batch, tokens, heads, dim_v = v.shape
    return chunks_per_start(
        pass_kind(spec),
        sequences=batch if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        tokens=tokens,
        heads=heads,
        head_dim_v=dim_v,
        packed=cu_seqlens is not None,
        num_sms=launch.num_sms(v.device),
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
    transitions, combine, outputs, *alone = (launch.get_for(device, *x) for x in split)
    # `transitions` writes none of `written`; its o may be any tensor of this shape.
    rest = *carried, cu_seqlens
    nothing = (None,) * (len(written) - 1)
    short = starts or (None, None)
    # With one segment there are no transitions. In a pool, `transitions` copies initial states.
    if count > 1 or isinstance(split[0][1], PoolPassSpec):
        transitions(*given, rows, *nothing, *rest, states, moves, length, count, *short)
    if count > 1:
        combine(cu_seqlens, states, moves, tokens, length, *short)
    elif alone:
        outputs = alone[0]
    if starts is not None:
        count = max(count, -(-tokens // (CHUNK * starts.length)))
    outputs(*given, *written, *rest, states, None, length, count, *short)
