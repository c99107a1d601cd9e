"""The devices that operators run on."""

from __future__ import annotations

import torch

from ..emulation import current_emulation


def runs_on(device: torch.device) -> bool:
    """Whether operators take tensors on the device: an NVIDIA GPU, or the CPU within `emulated`."""
    if device.type == "cpu":
        return current_emulation() is not None
    return device.type == "cuda" and torch.version.cuda is not None
