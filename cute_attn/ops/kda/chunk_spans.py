"""Chunked KDA on spans, whose states at their ends come from elsewhere.

A span is a part of a longer sequence. Other ranks of a group may hold the sequence's other spans. A
span's effect on the state is affine, S' = M S + B. So the forward has these steps:

    prepare      the records of the chunks
    spans        [B | M] of each span that another span needs, in pieces
    chain        multiplies the pieces
    the caller   finds the state at each span's start, by `chain` from all earlier spans' [B | M]
    state_pass   the outputs

The backward has the same steps with `adjoint_pass`, and runs from the last chunk to the first. It
needs the gradient of the state at each span's end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.delta.chunk.spec import CHUNK
from ...settings import settings
from ..operator import Operator
from .arguments import launch_scalars, sequence_plan
from .chunk import _chunk
from .chunk_arguments import ChunkArguments
from .chunk_backward import BACKWARD, Backward, BackwardArguments
from .chunk_passes import Pass, empty_records, empty_states, empty_v_new
from .chunk_plan import BackwardRequests, chain_request, plan_chunk_kda, spans_request

_empty = torch.empty

# Chunks of a span's last piece. With usual gates nothing of an earlier state is left after 80
# chunks, so the other pieces take no time.
FIRST_PIECE = 96
MOST_PIECES = 4  # of a longer span; few heads have more pieces, which run in parallel

Carry = Callable[[Tensor | None, Tensor], None]


class Spans(NamedTuple):
    """The spans of a call, which the call's kernels treat as sequences.

    Attributes:
        cu_seqlens: int32 [N + 1]; None if the spans are the rows of a batch.
        number: N.
        longest: the most tokens of a span.
    """

    cu_seqlens: Tensor | None
    number: int
    longest: int


def transitions(
    request: launch.Request, given: tuple[Tensor, ...], rows: Tensor, dim_k: int, spans: Spans,
    needed: Tensor,
) -> Tensor:  # fmt: skip
    """[B | M] of each span, transposed: float32 [N, HV, V + K, K].

    Args:
        request: the kernel, from `spans_request`.
        given: the pass's arguments up to `o`.
        rows: v, or the gradient of o.
        needed: float32 [N, 1, 1], 0 for a span whose transition is not needed, otherwise 1.
    """
    heads, dim_v = rows.shape[2:]
    device = rows.device
    pieces = 1
    if spans.longest > FIRST_PIECE * CHUNK:
        ctas = spans.number * heads * ((dim_v + dim_k) // 64)
        pieces += max(1, min(MOST_PIECES - 1, launch.num_sms(device) // ctas))
    memory: dict[str, Any] = {"dtype": torch.float32, "device": device}
    moves = _empty((spans.number, pieces, heads, dim_v + dim_k, dim_k), **memory)
    norms = _empty((spans.number, 1 + pieces, heads, dim_k // 16), **memory)
    norms[:, 0] = needed
    kernel = launch.get_for(device, *request)
    for first, count in ((0, 1), (1, pieces - 1)):
        if count:
            kernel(
                *given, rows, None, None, None, None, spans.cu_seqlens, moves, None, FIRST_PIECE,
                count, norms, first,
            )  # fmt: skip
    if pieces == 1:
        return moves[:, 0]
    total = _empty((spans.number, 1, heads, dim_v + dim_k, dim_k), **memory)
    chain(moves, moves, _pieces_in_turn(pieces, device), total)
    return total[:, 0]


@lru_cache(maxsize=64)
def _pieces_in_turn(pieces: int, device: torch.device) -> Tensor:
    """The steps of `chain` that multiply a span's pieces, the last of which comes first."""
    steps = [(piece, -1) for piece in reversed(range(pieces))]
    steps[-1] = 0, 0
    return torch.tensor([steps], dtype=torch.int32).to(device)


def chain(start: Tensor | None, moves: Tensor, steps: Tensor, out: Tensor) -> None:
    """Carry matrices of `start` through transitions, and write them to `out`. The arguments are
    the arguments of `kernels/delta/chunk/chain.py`."""
    rows, dim_k = moves.shape[-2:]
    request = chain_request(dim_k, rows - dim_k, start is not None)
    launch.get_for(out.device, *request)(start, moves, steps, out)


class ChunkSpans:
    """`chunk_kda` on spans. All states are `[N, HV, V, K]`, in float32.

    A `carry` writes the matrix at one end of each span: the state at the start, or in the backward
    the gradient of the state at the end. Its arguments are the spans' [B | M], or None if no span's
    is needed, and the memory `[N, HV, V, K]`.
    """

    name = "chunk_kda"
    operator: Operator[Any] = _chunk
    backward: Backward = BACKWARD
    arguments: type[Any] = ChunkArguments

    def __init__(self) -> None:
        self._backward_requests: dict[Any, BackwardRequests] = {}

    def forward_requests(self, a: Any) -> tuple[launch.Request, ...]:
        """The kernels, in the order of `chunk_plan.forward_over_ranks`."""
        plan = self.plan(a) | {
            "gradient": bool(a.keep_states), "split": settings().kda_split, "over_ranks": True
        }  # fmt: skip
        return _forward_requests(self, launch.arch_for(a.q.device), tuple(plan.items()))

    def plan(self, a: Any) -> dict[str, Any]:
        """The parameters of `requests` from a call's arguments."""
        return sequence_plan(a)

    def requests(self, arch: str, **plan: Any) -> list[launch.Request]:
        """The kernels of the forward for whole sequences."""
        found: list[launch.Request] = plan_chunk_kda(arch, **plan)
        return found

    def parameters(self, a: Any) -> tuple[Tensor | None, Tensor | None]:
        """The kernels' arguments A_log and dt_bias."""
        if not a.use_gate_in_kernel:
            return None, None
        A, bias = a.A_log, a.dt_bias
        return (
            None if A is None else A.view(-1),
            None if bias is None else bias.view(-1, a.q.shape[-1]),
        )

    def prepared(self, request: launch.Request, a: Any) -> tuple[Tensor, ...]:
        """Launch `prepare`. Return the pass's arguments up to `o`."""
        prepare = launch.get_for(a.q.device, *request)
        inputs = a.q, a.k, a.g, a.beta, *self.parameters(a), a.cu_seqlens
        records = empty_records(a.q, a.v, a.cu_seqlens, request[1].store_norms)
        prepare(*inputs, *records, *launch_scalars(a), None, None)
        return a.v, *records[:2]

    def run(
        self, a: Any, spans: Spans, needed: Tensor | None, carry: Carry
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The forward.

        Args:
            a: checked arguments that kernels can read, with state_v_first.
            needed: see `transitions`; None if no span's transition is needed.

        Returns:
            (o, final states, states, v_new); the last two are None without `a.keep_states`.
        """
        v, dim_k, device = a.v, a.q.shape[-1], a.q.device
        prepare, whole, of_spans, _, _, *split = self.forward_requests(a)
        given = self.prepared(prepare, a)
        start, final = (
            _empty((spans.number, *v.shape[2:], dim_k), dtype=torch.float32, device=device)
            for _ in range(2)
        )
        moves = None
        if needed is not None:
            moves = transitions(of_spans, given, v, dim_k, spans, needed)
        carry(moves, start)
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        states = v_new = None
        if a.keep_states:
            states, v_new = (make(a.q, v, a.cu_seqlens) for make in (empty_states, empty_v_new))
        Pass.load(device, [whole, *split]).run_on(
            given, v, dim_k, (o, states, v_new), start, final, a.cu_seqlens
        )
        return o, final, states, v_new

    def gradients(
        self, a: BackwardArguments, spans: Spans, needed: Tensor | None, carry: Carry
    ) -> tuple[Tensor | None, ...]:
        """The backward: the results of `Backward.launch`.

        Args:
            a: arguments that kernels can read, with state_v_first and need_dinitial_state.
        """
        dim_k = a.q.shape[-1]
        end = a.do.new_empty((spans.number, *a.v.shape[2:], dim_k), dtype=torch.float32)
        a = a._replace(dfinal_state=end)
        key = launch.arch_for(a.q.device), settings().kda_split, *self.backward.key(a)
        requests = self._backward_requests.get(key)
        if requests is None:
            requests = self._backward_requests[key] = self.backward.requests_of(a)
        ready = self.backward.load(requests, a)
        given, norms = self.backward.prepared(ready, a)
        moves = None
        if needed is not None:
            of_spans = spans_request(requests.adjoint_pass[0])
            moves = transitions(of_spans, given, a.do, dim_k, spans, needed)
        carry(moves, end)
        adjoints = self.backward.run_adjoints(ready, a, given, norms)
        del given, moves
        return self.backward.run_gradients(ready, a, *adjoints)


@lru_cache(maxsize=1024)
def _forward_requests(
    rule: ChunkSpans, arch: str, plan: tuple[tuple[str, Any], ...]
) -> tuple[launch.Request, ...]:
    return tuple(rule.requests(arch, **dict(plan)))


KDA_SPANS = ChunkSpans()
