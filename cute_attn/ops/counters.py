"""Counters in global memory, through which the CTAs of a launch share out or combine work."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_raw_stream = torch._C._cuda_getCurrentRawStream if torch.cuda.is_available() else None

SPARE = 2**20  # counters per device for launches in graphs: 4 MiB

# (device, stream, count) -> the counters of the stream's launches, which follow one another
_counters: dict[tuple[int, int, int], Tensor] = {}
# (device, address, count) -> the counters of a pool
_of_pools: dict[tuple[int, int, int], Tensor] = {}
# device -> counters not yet given to a launch in a graph
_spare: dict[int, list[Tensor]] = {}
_taking = threading.Lock()  # two threads may capture graphs at once


def counter_for(x: Tensor, device: int | None = None, count: int = 1) -> Tensor:
    """Counters, `[count]` int32, that are 0 for the next launch with x on the current stream.

    The kernel leaves the counters at 0 (see `kernels.common.scheduler.CounterScheduler`), so
    launches on one stream share counters. A CUDA graph may be replayed on any stream, so each
    launch in a graph keeps counters of its own. The first launch on any stream sets spare counters
    to 0, before the capture, because a node of the graph would take 2 us of each replay. `device`
    is the index of x's device, if the caller has it.
    """
    if device is None:
        device = x.get_device()
    if device < 0 or _raw_stream is None:
        return x.new_zeros(count, dtype=torch.int32)
    if _capturing():
        return _of_graph(x, device, count)
    key = device, _raw_stream(device), count
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = x.new_zeros(count, dtype=torch.int32)
        if device not in _spare:
            _spare[device] = [x.new_zeros(SPARE, dtype=torch.int32)]
            torch.cuda.synchronize(device)  # graphs may be replayed on other streams
    return found


def counters_of_pool(pool: Tensor, heads: int) -> Tensor:
    """Counters, `[slots * heads]` int32, one for each slot of a pool and each head, that are 0.

    The kernel leaves the counters at 0. No two launches that may overlap write one slot, so all
    launches on a pool share its counters, graphs included. Should the pool's memory become another
    pool's, the counters serve that pool as well.
    """
    count = pool.shape[0] * heads
    device = pool.get_device()
    if device < 0:
        return pool.new_zeros(count, dtype=torch.int32)
    key = device, pool.data_ptr(), count
    found = _of_pools.get(key)
    if found is None:
        found = pool.new_zeros(count, dtype=torch.int32)
        if _capturing():  # the graph sets these counters to 0
            return found
        _of_pools[key] = found  # for ever, because graphs hold the address
        torch.cuda.synchronize(device)  # other streams may use the pool
    return found


def _of_graph(x: Tensor, device: int, count: int) -> Tensor:
    """Counters for a captured launch. If too few spare counters are left, the graph sets new
    counters to 0."""
    spare = _spare.get(device)
    with _taking:
        if spare and len(spare[0]) >= count:
            found, spare[0] = spare[0][:count], spare[0][count:]
            return found
    return x.new_zeros(count, dtype=torch.int32)
