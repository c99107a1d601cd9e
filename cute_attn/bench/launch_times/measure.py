"""Times of the launches of a call, by the profiler of torch."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

OURS = ("kernel_cute_attn", "kernel_cutlass")  # how the names of the DSL's kernels begin
REPEATS = 9


def kernel_name(symbol: str) -> str:
    """The part of a kernel's symbol that names its module and class."""
    match = re.search(r"cute_attn(?:kernels|bench)(\w+?)_object_at", symbol)
    return match[1] if match else symbol[:60]


def launches(
    call: Callable[[], Any], before: Sequence[Callable[[], Any]]
) -> list[list[tuple[str, float]]]:
    """For each function of `before`, which runs before each call: name and median microseconds of
    each launch of the DSL's kernels, in order.

    Raises:
        RuntimeError: calls differ in their launches.
    """
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for prepare in before:
            for _ in range(REPEATS):
                prepare()
                torch.cuda.synchronize()
                call()
                torch.cuda.synchronize()
    events = [
        event
        for event in recorded.events()
        if event.device_type == DeviceType.CUDA and event.name.startswith(OURS)
    ]
    events.sort(key=lambda event: event.time_range.start)
    calls = REPEATS * len(before)
    if not events or len(events) % calls:
        raise RuntimeError(f"{len(events)} launches of {calls} calls: calls differ")
    count = len(events) // calls
    return [
        [_launch(events[w * REPEATS * count : (w + 1) * REPEATS * count][i::count])
         for i in range(count)]
        for w in range(len(before))
    ]  # fmt: skip


def _launch(same: Sequence[Any]) -> tuple[str, float]:
    if len({event.name for event in same}) > 1:
        raise RuntimeError("the launches of a call differ from call to call")
    return same[0].name, statistics.median(event.time_range.elapsed_us() for event in same)
