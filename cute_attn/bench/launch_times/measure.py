"""Times of the launches of a call, by the profiler of torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

OURS = ("kernel_cute_attn", "kernel_cutlass")  # how the names of the DSL's kernels begin
REPEATS = 9


def launches(call: Callable[[], Any], flush: Callable[[], Any]) -> list[tuple[str, float]]:
    """Name and median microseconds of each launch of the DSL's kernels, in order. `flush` runs
    before each call."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(REPEATS):
            flush()
            torch.cuda.synchronize()
            call()
            torch.cuda.synchronize()
    events = [
        event
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name.startswith(OURS)
    ]
    events.sort(key=lambda event: event.time_range.start)
    if not events or len(events) % REPEATS:
        raise RuntimeError(f"{len(events)} launches of {REPEATS} calls: calls differ")
    count = len(events) // REPEATS
    found = []
    for i in range(count):
        same = events[i::count]
        if len({event.name for event in same}) > 1:
            raise RuntimeError("the launches of a call differ from call to call")
        found.append((same[0].name, statistics.median(e.time_range.elapsed_us() for e in same)))
    return found
