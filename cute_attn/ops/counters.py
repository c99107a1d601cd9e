"""Counters in global memory, through which the CTAs of a launch share out their tiles."""

from __future__ import annotations

import torch
from torch import Tensor

_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_raw_stream = torch._C._cuda_getCurrentRawStream if torch.cuda.is_available() else None

SPARE = 2**16  # counters per device for launches in graphs

# (device, stream) -> the counter of the stream's launches, which follow one another
_counters: dict[tuple[int, int], Tensor] = {}
# device -> counters not yet given to a launch in a graph
_spare: dict[int, list[Tensor]] = {}


def counter_for(x: Tensor, device: int | None = None) -> Tensor:
    """A counter, `[1]` int32, that is 0 for the next launch with x on the current stream.

    The kernel leaves the counter at 0 (see `kernels.common.scheduler.CounterScheduler`), so
    launches on one stream share a counter. A CUDA graph may be replayed on any stream, so each
    launch in a graph keeps a counter of its own. The first launch on any stream sets spare counters
    to 0, before the capture, because a node of the graph would take 2 us of each replay. `device`
    is the index of x's device, if the caller has it.
    """
    if device is None:
        device = x.get_device()
    if device < 0 or _raw_stream is None:
        return x.new_zeros(1, dtype=torch.int32)
    if _capturing():
        return _of_graph(x, device)
    key = device, _raw_stream(device)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = x.new_zeros(1, dtype=torch.int32)
        if device not in _spare:
            _spare[device] = [x.new_zeros(SPARE, dtype=torch.int32)]
            torch.cuda.synchronize(device)  # graphs may be replayed on other streams
    return found


def _of_graph(x: Tensor, device: int) -> Tensor:
    """A counter for a captured launch. If no spare counter is left, the graph sets a new
    counter to 0."""
    spare = _spare.get(device)
    if not spare or not len(spare[0]):
        return x.new_zeros(1, dtype=torch.int32)
    found, spare[0] = spare[0][:1], spare[0][1:]
    return found
