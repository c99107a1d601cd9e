"""The roundings of plain low-precision code."""

from __future__ import annotations

import torch


def rounded(
    x: torch.Tensor, dtype: torch.dtype, jitter: torch.Generator | None = None
) -> torch.Tensor:
    """x rounded to `dtype`, and back. With `jitter`, x is multiplied by random factors while it is
    rounded, which changes the rounding errors but not their size."""
    if jitter is None:
        return x.to(dtype).to(x.dtype)
    factor = 1 + torch.rand(x.shape, generator=jitter, dtype=x.dtype, device=jitter.device)
    factor = factor.to(x.device)
    return (x * factor).to(dtype).to(x.dtype) / factor
