"""What the checks of a family of operators are made of; `quickstart.py` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

HEAD_DIM, SLOTS = 128, 12
HOPPER, BLACKWELL = ("sm_90a",), ("sm_100a", "sm_103a")
EMULATED_ARCHS = ("sm_90a", "sm_100a")

Errors = dict[str, tuple[float, float]]  # of each result: the kernel's, plain PyTorch's


class Check(NamedTuple):
    """A function of device and heads that runs an operator, and the operator's architectures."""

    run: Callable[[str, int], Errors]
    gpus: tuple[str, ...] | None = None  # None: any
    emulated: tuple[str, ...] = EMULATED_ARCHS


def relative_errors(**results: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]) -> Errors:
    """Relative errors of (the kernel's, plain PyTorch's, the exact) result."""

    def error(actual: torch.Tensor | None, exact: torch.Tensor) -> float:
        assert actual is not None
        return float((actual.detach().double() - exact).norm() / exact.norm())

    return {
        name: (error(ours, exact), error(plain, exact))
        for name, (ours, plain, exact) in results.items()
    }
