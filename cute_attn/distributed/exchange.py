"""Messages between ranks, beside the kernels of the current stream.

On a GPU, a side stream packs and sends messages. The side stream first waits for the work that the
current stream has queued. `Messages.wait` makes the current stream wait for the messages; the host
never waits. NCCL's kernels need free SMs, so messages start before the attention kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.operator import dispatch_mode_depth
from .layout import Range

MOST_SLICES = 4  # the most ranges that are copied one by one; more ranges take one index


class Rows:
    """Ranges of rows of a tensor `[batch, rows, ...]`, to read or to write together."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.ranges = tuple(ranges)
        self.count = sum(end - start for start, end in self.ranges)
        self._index: dict[torch.device, Tensor] = {}

    @cached_property
    def packed(self) -> Rows:
        """Rows that hold the ranges one after the other, from row 0 on."""
        ends = list(accumulate(end - start for start, end in self.ranges))
        return Rows(list(pairwise([0, *ends])))

    def take(self, x: Tensor) -> Tensor:
        """The rows as one contiguous tensor: a view of x where possible, otherwise a copy."""
        if len(self.ranges) == 1:
            start, end = self.ranges[0]
            return x[:, start:end].contiguous()
        if 0 < len(self.ranges) <= MOST_SLICES:
            return cat_rows([x[:, start:end] for start, end in self.ranges])
        return x.index_select(1, self.index(x.device))

    def in_pieces(self, batch: int) -> bool:
        """Whether each range is a message of its own; a range is contiguous if `batch` is 1."""
        return batch == 1 and len(self.ranges) <= MOST_SLICES

    def pieces(self, x: Tensor) -> list[Tensor]:
        """The rows as messages: views of x where possible."""
        if self.in_pieces(x.shape[0]):
            return [x[:, start:end].contiguous() for start, end in self.ranges]
        return [self.take(x)]

    def memory(self, x: Tensor, *, inside: bool, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Memory to receive messages of these rows. With `inside`, the memory is rows of x where
        possible. Otherwise the memory is new, with `dtype`, or x's dtype if `dtype` is None."""
        if not self.in_pieces(x.shape[0]):
            return [x.new_empty(x.shape[0], self.count, *x.shape[2:], dtype=dtype)]
        views = [x[:, start:end] for start, end in self.ranges]
        return views if inside else [torch.empty_like(view, dtype=dtype) for view in views]

    def fill(self, x: Tensor, received: Sequence[Tensor]) -> None:
        """Copy received messages to the rows of x, unless `memory` returned rows of x itself."""
        if not self.in_pieces(x.shape[0]):
            self.put(x, received[0])

    def cut(self, x: Tensor) -> list[Tensor]:
        """Cut x, a contiguous tensor of exactly these rows, into messages as `pieces` does."""
        if not self.in_pieces(x.shape[0]):
            return [x]
        return list(x.split([end - start for start, end in self.ranges], dim=1))

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write `values`, one row after the other, to the rows of x."""
        if len(self.ranges) > MOST_SLICES:
            if x.element_size() == 1:  # torch copies no rows of fp8 by index
                x, values = x.view(torch.uint8), values.view(torch.uint8)
            x.index_copy_(1, self.index(x.device), values)
            return
        row = 0
        for start, end in self.ranges:
            x[:, start:end].copy_(values[:, row : row + end - start])
            row += end - start

    def add(self, x: Tensor, pieces: Sequence[Tensor]) -> None:
        """Add messages to the rows of x. No row occurs twice, so sums do not depend on an order."""
        if self.in_pieces(x.shape[0]):
            for (start, end), piece in zip(self.ranges, pieces, strict=True):
                x[:, start:end].add_(piece)
            return
        index = self.index(x.device)
        x.index_copy_(1, index, x.index_select(1, index).add_(pieces[0]))

    def index(self, device: torch.device) -> Tensor:
        # Tensors of a trace or of a mode are not kept, because later calls cannot read them.
        if torch.compiler.is_compiling() or dispatch_mode_depth():
            return self._new_index(device)
        found = self._index.get(device)
        if found is None:
            with torch.inference_mode(False):  # later calls may save the index for a backward
                found = self._index[device] = self._new_index(device)
        return found

    def _new_index(self, device: torch.device) -> Tensor:
        rows = [torch.arange(start, end) for start, end in self.ranges]
        return torch.cat(rows or [torch.arange(0)]).to(device)


def cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """Rows of several tensors as one contiguous tensor, which `torch.cat` does not promise: tensors
    with 4 dimensions may be channels-last."""
    return torch.cat(list(parts), dim=1).contiguous()


def flat(messages: Mapping[int, Sequence[Sequence[Tensor]]]) -> dict[int, list[Tensor]]:
    """Rank -> the messages of all tensors, in one list."""
    return {rank: [x for parts in both for x in parts] for rank, both in messages.items()}


def copy_rows(to: Sequence[Tensor], rows: Rows, sources: Sequence[Tensor], of: Rows) -> None:
    """Copy rows `of` of each source to `rows` of a tensor of `to`. The i-th ranges of both have
    equal lengths. Few ranges take one launch for all tensors."""
    if len(rows.ranges) > MOST_SLICES:
        for x, source in zip(to, sources, strict=True):
            rows.put(x, of.take(source))
        return
    pairs = [
        (x[:, start:end], source[:, first:stop])
        for x, source in zip(to, sources, strict=True)
        for (start, end), (first, stop) in zip(rows.ranges, of.ranges, strict=True)
    ]
    if pairs:
        written, read = zip(*pairs, strict=True)
        torch._foreach_copy_(written, read)


@cache
def _side_stream(device: torch.device) -> Any:
    # High priority gives a waiting message the SMs that a finished CTA leaves.
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def beside(device: torch.device, after: Any = None) -> Iterator[None]:
    """Launch on the stream for messages, after the current stream's work or after an event."""
    if device.type != "cuda":
        yield
        return
    side = _side_stream(device)
    if after is None:
        side.wait_stream(torch.cuda.current_stream(device))
    else:
        side.wait_event(after)
    with torch.cuda.stream(side):
        yield


def event(device: torch.device) -> Any:
    """An event after the current stream's work; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_for(after: Any) -> None:
    """Make the current stream wait for an event; None is no event."""
    if after is not None:
        torch.cuda.current_stream().wait_event(after)


class Messages:
    """Messages that have started. The messages' tensors stay alive as long as this object."""

    def __init__(self, works: list[Any], kept: Any, *, on_host: bool = False) -> None:
        self._works, self._kept, self._on_host = works, kept, on_host

    def wait(self) -> None:
        """Make later work of the current stream wait for the messages. With NCCL, the host does not
        wait, and several streams may wait. With gloo, the host waits, once for each message."""
        for work in self._works:
            work.wait()
        if self._on_host:
            self._works = []


def send(
    group: Any, to: Mapping[int, Sequence[Tensor]], into: Mapping[int, Sequence[Tensor]]
) -> Messages:
    """Start to send tensors to ranks of the group, and to receive tensors from ranks.

    Args:
        to: rank in the group -> contiguous tensors to send.
        into: rank in the group -> contiguous tensors to receive into, in the sender's order.
    """
    ways = [
        (kind, rank, x)
        for kind, messages in enumerate((to, into))
        for rank, tensors in sorted(messages.items())
        for x in tensors
        if x.numel()
    ]
    if not ways:
        return Messages([], None)
    if ways[0][2].device.type == "cuda":
        return Messages(_send_by_nccl(group, ways), (to, into))
    works = []
    for kind, rank, x in ways:
        raw = x.view(-1).view(torch.uint8)  # gloo supports few dtypes
        peer = dist.get_global_rank(group, rank)
        works.append((dist.irecv if kind else dist.isend)(raw, peer, group))
    return Messages(works, (to, into), on_host=True)


def _send_by_nccl(group: Any, ways: list[tuple[int, int, Tensor]]) -> list[Any]:
    """One launch for all messages: (whether received, rank, tensor). `dist.batch_isend_irecv` does
    the same, with more time on the host for each message."""
    device = ways[0][2].device
    group._start_coalescing(device)
    for kind, rank, x in ways:
        (group.recv if kind else group.send)([x], rank, 0)
    return [group._end_coalescing(device)]
