"""Checks that the tensors that an operator writes overlap nothing in memory.

The kernels' host code checks the same at each launch, in `kernels/common/overlap.py`, and
`check_memory` names the tensors when it refuses. So both must have the same rules.
"""

from __future__ import annotations

from torch import Tensor


def check_memory(
    written: dict[str, Tensor | None], read: dict[str, Tensor | None], pools: tuple[str, ...] = ()
) -> None:
    """Refuse a written tensor that overlaps itself or another argument: CTAs would read or
    overwrite what others have written.

    Args:
        written: the tensors that the operator writes, by name; None for those not given.
        read: the other tensors.
        pools: names of tensors whose first dimension counts slots. The slots of two pools may
            interleave; the address ranges of all other tensors must be disjoint.

    Raises:
        ValueError: two tensors overlap, or one overlaps itself; the message names them.
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

    Each stride must exceed the span of all smaller ones. This refuses some layouts without overlap.
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
    """Whether x and y have the same slot stride, and their slots do not overlap: a server's page
    may hold a slot of each."""
    pitches = {z.stride(0) * z.element_size() for z in (x, y) if z.shape[0] > 1}
    if len(pitches) != 1:
        return False
    (pitch,) = pitches
    start, end = extent(x[0])
    other_start, other_end = extent(y[0])
    between = (other_start - start) % pitch
    return end - start <= between and between + other_end - other_start <= pitch


def extent(x: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and one past that of its last."""
    if x.numel() == 0:
        return x.data_ptr(), x.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
