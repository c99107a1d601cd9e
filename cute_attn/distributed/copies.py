"""K and V of other ranks by copy engines, from memory that all GPUs of a group can read.

Each rank packs its K and V into its part of the symmetric memory of torch.distributed. After a
barrier, each rank copies the rows that its queries see. Copy engines need no SM, unlike NCCL's
kernels. So K and V of some heads travel while attention kernels run for other heads. A second
barrier lets the next call write to the memory.

Packing, barriers and copies are on the side stream, in this order on every rank. So one memory
serves all calls, in CUDA graphs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Rows, beside, event, wait_for

# In how many parts of the heads K and V travel: the first number that divides the heads of k, and
# leaves each part at least so many bytes.
PARTS = (4, 2)
PART_BYTES = 2**24
ALIGNMENT = 256


class SharedMemory:
    """Memory of each rank that all ranks of a group can read. It grows with the calls, on all ranks
    alike."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.memory: Tensor | None = None
        self.handle: Any = None
        self._views: dict[Any, Tensor] = {}

    def at_least(self, size: int, device: torch.device) -> Tensor:
        """The rank's own bytes."""
        if self.memory is None or self.memory.numel() < size:
            self.memory = self.handle = None
            self._views.clear()
            self.memory, self.handle = shared(size, device, self.group)
        return self.memory

    def view(self, rank: int, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A rank's memory from byte `at` on, as a contiguous tensor."""
        key = rank, at, shape, dtype
        if key not in self._views:
            self._views[key] = self.handle.get_buffer(rank, shape, dtype, at // dtype.itemsize)
        return self._views[key]

    def barrier(self) -> None:
        """Make later work of the current stream wait for this point on all ranks."""
        self.handle.barrier(channel=0, timeout_ms=self.timeout_ms)

    @cached_property
    def timeout_ms(self) -> int:
        """The group's timeout, after which a barrier ends the process."""
        assert self.memory is not None
        backend = self.group._get_backend(torch.device(self.memory.device.type))
        return int(backend.options._timeout.total_seconds() * 1000)


@cache
def memory_of(group: Any) -> SharedMemory:
    """The memory of a group, which all of its plans share."""
    return SharedMemory(group)


def shared(size: int, device: torch.device, group: Any) -> tuple[Tensor, Any]:
    """Allocate bytes that all ranks of the group can read. Every rank calls this function."""
    if device.type != "cuda":
        raise NotImplementedError(f"copies is True with tensors on {device}, and needs GPUs")
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    return memory, symmetric.rendezvous(memory, group)


class Copies:
    """The gathered K and V. The constructor starts the copies.

    Attributes:
        parts: the heads of k of each part.
    """

    def __init__(
        self, route: Any, memory: SharedMemory, own: tuple[Tensor, Tensor], *, parts: int | None
    ) -> None:
        """
        Args:
            route: the `gather.Route` of the call.
            own: K and V of the rank's tokens.
            parts: in how many parts of the heads K and V travel; None chooses.
        """
        k, v = own
        device, (batch, _, heads, _) = k.device, k.shape
        world, rank = route.layout.world, dist.get_rank(memory.group)
        held = [route.layout.tokens(rank) for rank in range(world)]
        if parts is None:
            row = batch * heads * (k.shape[3] + v.shape[3]) * k.itemsize
            parts = parts_of(heads, row * route.most_received)
        per = heads // parts
        self.parts = [slice(i * per, (i + 1) * per) for i in range(parts)]
        # The memory has K and V of the first part, then K and V of the next part, and so on.
        most = batch * max(held) * per
        sizes = [-(-most * x.shape[3] * x.itemsize // ALIGNMENT) * ALIGNMENT for x in own]
        offsets = [0, *accumulate(sizes * parts)]
        memory.at_least(offsets.pop(), device)
        others = sorted(route.read, key=lambda r: (r - rank) % world)
        self.rows = [
            [x.new_empty(batch, route.rows, per, x.shape[3]) for x in own] for _ in self.parts
        ]
        self.ready: list[Any] = []
        with beside(device):
            for i, part in enumerate(self.parts):
                for x, at in zip(own, offsets[2 * i :], strict=False):
                    packed = memory.view(rank, at, (batch, held[rank], per, x.shape[3]), x.dtype)
                    for start, end in route.shown:
                        packed[:, start:end].copy_(x[:, start:end, part])
                # The rank's own rows too: later such a copy would wait for SMs.
                for x, to in zip(own, self.rows[i], strict=True):
                    if route.own is not None:
                        copy(to, route.own[1], x[:, :, part], route.own[0])
            memory.barrier()
            for i, found in enumerate(self.rows):
                for x, to, at in zip(own, found, offsets[2 * i :], strict=False):
                    for other in others:
                        shape = batch, held[other], per, x.shape[3]
                        theirs = memory.view(other, at, shape, x.dtype)
                        copy(to, route.received[other], theirs, route.read[other])
                self.ready.append(event(device))
            memory.barrier()
            self.end = event(device)

    def wait(self, part: int = 0) -> list[Tensor]:
        """K and V of a part, for later work of the current stream."""
        wait_for(self.ready[part])
        return self.rows[part]

    def finish(self) -> None:
        """Make later work of the current stream wait for the second barrier, as a CUDA graph needs.
        The barrier itself may wait for SMs, so a call finishes after its kernels."""
        wait_for(self.end)


def parts_of(heads: int, size: int) -> int:
    """In how many parts the heads of K and V travel, which have `size` bytes."""
    return next((x for x in PARTS if not heads % x and size >= x * PART_BYTES), 1)


def copy(to: Tensor, rows: Rows, source: Tensor, of: Rows) -> None:
    """Copy rows `of` of `source` to `rows` of `to`. Each copy has contiguous bytes in both, as copy
    engines need, if `source` is contiguous."""
    ranges: Sequence[Any] = list(zip(rows.ranges, of.ranges, strict=True))
    for entry in range(len(to)):
        for (start, end), (first, stop) in ranges:
            to[entry, start:end].copy_(source[entry, first:stop], non_blocking=True)
