"""Which memory tensors span."""

from __future__ import annotations

from torch import Tensor


def check_overlap(name: str, written: Tensor, **inputs: Tensor) -> None:
    """Refuse a result whose memory an input shares: blocks would read what others have written."""
    start, end = extent(written)
    for other, x in inputs.items():
        other_start, other_end = extent(x)
        if start < other_end and other_start < end:
            raise ValueError(
                f"{name} overlaps {other} in memory, must be distinct: {name} spans "
                f"[{start:#x}, {end:#x}), {other} [{other_start:#x}, {other_end:#x})"
            )


def extent(x: Tensor) -> tuple[int, int]:
    """First and one past the last byte that a tensor spans."""
    if x.numel() == 0:
        return x.data_ptr(), x.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
