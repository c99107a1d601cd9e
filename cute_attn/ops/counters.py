"""Counters in global memory, through which the CTAs of a launch share out their tiles."""

from __future__ import annotations

import torch
from torch import Tensor

_capturing = torch.cuda.is_current_stream_capturing
_raw_stream = torch._C._cuda_getCurrentRawStream if torch.cuda.is_available() else None

# (device, stream) -> the counter of launches on it, which follow one another
_counters: dict[tuple[int, int], Tensor] = {}


def counter_for(x: Tensor) -> Tensor:
    """A counter, `[1]` int32, that is 0 for the next launch with x on the current stream.

    The kernel leaves it at 0 (see `kernels.common.scheduler.CounterScheduler`), so launches on one
    stream share one. A CUDA graph, which may be replayed on any stream, gets its own.
    """
    device = x.get_device()
    if device < 0 or _raw_stream is None or _capturing():
        return x.new_zeros(1, dtype=torch.int32)
    key = device, _raw_stream(device)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = x.new_zeros(1, dtype=torch.int32)
    return found
