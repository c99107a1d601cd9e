"""Properties of the devices that a program may see."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ..host import Launch

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """A GPU as a program sees it.

    Attributes:
        arch: the architecture to compile for, such as "sm_90a".
        name: the product's name.
        num_sms: streaming multiprocessors.
        shared_per_block: most bytes of shared memory of a CTA.
        shared_per_sm: bytes of shared memory of an SM.
        l2: bytes of the L2 cache.
        memory: bytes of device memory.
    """

    arch: str
    name: str
    num_sms: int
    shared_per_block: int
    shared_per_sm: int
    l2: int
    memory: int

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        digits = re.sub(r"\D", "", self.arch)
        return int(digits[:-1]), int(digits[-1])

    def resident(self, launch: Launch) -> int:
        """The number of a launch's CTAs that the device holds at a time, by threads and shared
        memory."""
        warps = -(-math.prod(launch.block) // 32)
        shared = launch.dynamic_shared + 1024  # what the system takes of each CTA's share
        return self.num_sms * min(64 // warps, 32, self.shared_per_sm // shared)


_HOPPER = 232448, 233472

DEVICES = {
    device.arch: device
    for device in (
        Device("sm_80", "NVIDIA A100-SXM4-80GB", 108, 166912, 167936, 40 << 20, 80 * GIB),
        Device("sm_86", "NVIDIA A10", 72, 101376, 102400, 6 << 20, 24 * GIB),
        Device("sm_89", "NVIDIA L40S", 142, 101376, 102400, 96 << 20, 48 * GIB),
        Device("sm_90a", "NVIDIA H100 80GB HBM3", 132, *_HOPPER, 50 << 20, 80 * GIB),
        Device("sm_100a", "NVIDIA B200", 148, *_HOPPER, 126 << 20, 180 * GIB),
        Device("sm_103a", "NVIDIA B300", 148, *_HOPPER, 126 << 20, 270 * GIB),
        Device("sm_110a", "NVIDIA Thor", 20, *_HOPPER, 32 << 20, 128 * GIB),
        Device("sm_120a", "NVIDIA GeForce RTX 5090", 170, 101376, 102400, 96 << 20, 32 * GIB),
        Device("sm_121a", "NVIDIA GB10", 48, 101376, 102400, 24 << 20, 128 * GIB),
    )
}
"""The devices, by architecture."""
