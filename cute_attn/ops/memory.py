"""Which memory tensors span, and what may not share any.

Kernels' host code asks the same at each launch, in `kernels/common/overlap.py`; where it refuses,
`check_memory` says why. So both must have the same rules.
"""

from __future__ import annotations

from torch import Tensor


def check_memory(
    written: dict[str, Tensor | None], read: dict[str, Tensor | None], pools: tuple[str, ...] = ()
) -> None:
    """Refuse what is written where its memory is an argument's, or twice its own: blocks would
    read or overwrite what others have written.

    Args:
        pools: names of tensors whose first dimension is that of slots. Slots of one may lie between
            those of another; all other tensors must not meet in the memory that they span.

    Raises:
        ValueError: naming both.
    """
    results = {name: x for name, x in written.items() if x is not None}
    others = results | {name: x for name, x in read.items() if x is not None}
    seen: set[str] = set()
    for name, x in results.items():
        _check_distinct(name, x)
        seen.add(name)
        start, end = extent(x)
        for other, y in others.items():
            if other in seen:
                continue
            other_start, other_end = extent(y)
            if start >= other_end or other_start >= end:
                continue
            if name in pools and other in pools and _interleaved(x, y):
                continue
            raise ValueError(
                f"{name} overlaps {other} in memory, must be distinct: {name} spans "
                f"[{start:#x}, {end:#x}), {other} [{other_start:#x}, {other_end:#x})"
            )


def _check_distinct(name: str, x: Tensor) -> None:
    """Raise ValueError unless every element of x has an address of its own.

    Each stride must reach over all that smaller strides span. Layouts that interleave in other ways
    are refused too.
    """
    if x.numel() == 0:
        return
    spanned = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < spanned:
            raise ValueError(
                f"{name} has shape {list(x.shape)} and strides {x.stride()}: elements overlap in "
                "memory, and it is written, so they must be distinct"
            )
        spanned += (size - 1) * stride


def _interleaved(x: Tensor, y: Tensor) -> bool:
    """Whether slots of x and y lie apart in rows of one length, such as the pages of a server."""
    pitches = {z.stride(0) * z.element_size() for z in (x, y) if z.shape[0] > 1}
    if len(pitches) != 1:
        return False
    (pitch,) = pitches
    start, end = extent(x[0])
    other_start, other_end = extent(y[0])
    between = (other_start - start) % pitch
    return end - start <= between and between + other_end - other_start <= pitch


def extent(x: Tensor) -> tuple[int, int]:
    """First and one past the last byte that a tensor spans."""
    if x.numel() == 0:
        return x.data_ptr(), x.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
