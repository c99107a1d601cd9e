"""Checks that a contender computes the operator, before it is timed."""

from __future__ import annotations

import torch

ROWS = 32  # at a time, since float64 takes two or four times the memory


class Disagreement(AssertionError):
    """The contender `who` does not compute the operator."""

    def __init__(self, who: str, message: str) -> None:
        super().__init__(message)
        self.who = who


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64."""
    difference = torch.zeros((), dtype=torch.float64, device=expected.device)
    norm = torch.zeros_like(difference)
    for a, e in zip(actual.split(ROWS), expected.split(ROWS), strict=True):
        difference += (a.double() - e.double()).square().sum()
        norm += e.double().square().sum()
    return float((difference / norm).sqrt())


def poison(*like: torch.Tensor) -> None:
    """Leave NaN in memory that the allocator is likely to reuse for tensors of these sizes."""
    held = [torch.full_like(x, torch.nan) for x in like]
    del held
