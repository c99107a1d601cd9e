"""Runs timed loops on the GPU, or once in the emulator."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from ... import launch
from .loops import LOOPS
from .spec import KERNEL, LoopsSpec
from .timed import BUFFER

MIB = 2**20
MEMORY_BYTES = 1024 * MIB  # many times any L2
L2_BYTES = 16 * MIB  # within the L2 of one half of any GPU here
SLACK_BYTES = 2 * MIB  # beyond the last address that a mask allows
REPEATS = 5


def spec_of(
    what: str, width: int = 0, warps: int = 1, shared_kib: int = 36, cluster: int = 1
) -> LoopsSpec:
    """The spec of loops; `shared_kib` is what they need beside the mbarriers."""
    return LoopsSpec(what, width, warps, BUFFER + shared_kib * 1024, cluster)


@dataclass(frozen=True)
class Times:
    """A loop's times: clocks and nanoseconds of an iteration, in the median CTA: from the start of
    the first warp to the end of the last."""

    clocks: float
    nanoseconds: float


class Machine:
    """The current GPU; without one, the CPU within `emulated()`."""

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES) -> None:
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cpu")
        if on_gpu:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.sms = launch.num_sms(self.device)
        self.memory = torch.zeros(
            (memory_bytes + SLACK_BYTES) // 4, dtype=torch.int32, device=self.device
        )

    def run(
        self,
        spec: LoopsSpec,
        count: int,
        *,
        ctas: int = 1,
        size: int = 16,
        depth: int = 1,
        step: int = 0,
        mask: int = 0,
    ) -> torch.Tensor:
        """Run a kernel once. Returns `[CTAs, warps, loops, 4]`, see `kernel.Arguments`."""
        loops = max(1, len(LOOPS[spec.what](spec.width)))
        times = torch.full((ctas, spec.warps, loops, 4), -1, dtype=torch.int64, device=self.device)
        function = launch.get_for(self.device, KERNEL, spec)
        function(times, self.memory, count, size, depth, step, mask)
        return times

    def times(
        self,
        spec: LoopsSpec,
        count: int,
        *,
        few: int = 8,
        ctas: int = 1,
        size: int = 16,
        depth: int = 1,
        step: int = 0,
        mask: int = 0,
        cold: bool = False,
    ) -> dict[str, Times]:
        """Times of an iteration of each loop, from runs of `few` and of `few` + `count`
        iterations. The difference has no start and no end of the loop. `cold` reads all of
        `memory` before each run, so that the L2 holds its end."""
        found: dict[str, list[Times]] = {}
        for _ in range(REPEATS):
            both = []
            for n in (few, few + count):
                if cold:
                    self.memory.sum(dtype=torch.int32)
                times = self.run(spec, n, ctas=ctas, size=size, depth=depth, step=step, mask=mask)
                clocks = times[..., 1].amax(dim=1) - times[..., 0].amin(dim=1)
                nanoseconds = times[..., 2].amax(dim=1)  # of the slowest warp
                slowest = torch.stack([clocks, nanoseconds], dim=-1).double().cpu()
                both.append(slowest.median(dim=0).values)
            each = (both[1] - both[0]) / count
            for loop, (of_clocks, of_time) in zip(
                LOOPS[spec.what](spec.width), each.tolist(), strict=True
            ):
                found.setdefault(loop.name, []).append(Times(of_clocks, of_time))
        return {
            name: Times(
                statistics.median(t.clocks for t in some),
                statistics.median(t.nanoseconds for t in some),
            )
            for name, some in found.items()
        }
