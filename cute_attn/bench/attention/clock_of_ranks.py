"""Times and memory of calls that all ranks of a process group make together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROUNDS = 3  # a time is the median of so many rounds


class Clock:
    """Times and memory of calls that all ranks make."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, call: Callable[[], Any], count: int) -> float:
        """Milliseconds of a call: the slowest rank's time, a mean of `count` calls."""
        import torch
        import torch.distributed as dist

        if self.device.type == "cpu":
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            took = (time.perf_counter() - begin) * 1e3
        else:
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            for _ in range(count):
                call()
            events[1].record()
            torch.cuda.synchronize()
            took = events[0].elapsed_time(events[1])
        slowest = torch.tensor([took / count], device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    def times(self, calls: dict[str, Callable[[], Any]], seconds: float = 0.1) -> dict[str, float]:
        """The time of each call, the median of rounds in which all calls take turns."""
        counts = {}
        for name, call in calls.items():
            call()
            once = max(self.run(call, 1), 1e-3)
            counts[name] = max(1, min(50, int(seconds * 1000 / once)))
        if self.device.type == "cpu":
            counts = dict.fromkeys(calls, 1)
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                found[name].append(self.run(call, counts[name]))
        return {name: statistics.median(times) for name, times in found.items()}

    def peak_mib(self, call: Callable[[], None]) -> float | None:
        """The most memory that a call allocates beside its inputs; None without a GPU."""
        import torch

        if self.device.type == "cpu":
            return None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
