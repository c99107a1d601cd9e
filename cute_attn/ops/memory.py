"""Checks that tensors that an operator writes overlap no other memory.

The kernels' host code checks for overlap at each launch, in `kernels/common/overlap.py`. When the
host code refuses tensors, `check_memory` names the tensors. So the host code and `check_memory`
must have the same rules.
"""

from __future__ import annotations

from torch import Tensor


def check_memory(
    written: dict[str, Tensor | None], read: dict[str, Tensor | None], pools: tuple[str, ...] = ()
) -> None:
    """Refuse a written tensor that overlaps itself or another argument: CTAs would read or
    overwrite other CTAs' results.

    Args:
        written: the tensors that the operator writes, by name; None for a tensor not given.
        read: the other tensors.
        pools: names of tensors whose first dimension counts slots. The slots of two pools may
            interleave; the address ranges of all other tensors must be disjoint.

    Raises:
        ValueError: two tensors overlap, or a tensor overlaps itself; the message names the tensors.
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


def _check_distinct(name: str, x: Tensor, given: Tensor | None = None) -> None:
    """Raise ValueError unless all elements of x have distinct addresses.

    Each stride must exceed the span of all smaller strides. This rule refuses some layouts without
    overlap.

    Args:
        given: the argument as it was given, where x is a view of it.
    """
    if x.numel() == 0:
        return
    spanned = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < spanned:
            shown = x if given is None else given
            raise ValueError(
                f"{name} has shape {list(shown.shape)} and strides {shown.stride()}: elements "
                "overlap in memory, and it is written, so they must be distinct"
            )
        spanned += (size - 1) * stride


def check_windows(name: str, x: Tensor) -> Tensor:
    """Refuse windows `[rows, steps, channels, taps]` whose elements overlap, except that the
    windows of successive steps may share inputs: then a window begins an input after the window
    before. Return the windows' memory as one row, for `check_memory`.

    Raises:
        ValueError: elements overlap.
    """
    rows, steps, channels, taps = x.shape
    shared = x
    if x.stride(1) == x.stride(3) and x.numel():
        shared = x.as_strided((rows, steps + taps - 1, channels), x.stride()[:3])
    _check_distinct(name, shared, x)
    start, end = extent(x)
    return x.as_strided(((end - start) // x.element_size(),), (1,))


def _interleaved(x: Tensor, y: Tensor) -> bool:
    """Whether x and y have equal slot strides, and no slot of x overlaps a slot of y. A page of a
    server may hold a slot of both."""
    pitches = {z.stride(0) * z.element_size() for z in (x, y) if z.shape[0] > 1}
    if len(pitches) != 1:
        return False
    (pitch,) = pitches
    start, end = extent(x[0])
    other_start, other_end = extent(y[0])
    between = (other_start - start) % pitch
    return end - start <= between and between + other_end - other_start <= pitch


def extent(x: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and the address one past its last byte."""
    if x.numel() == 0:
        return x.data_ptr(), x.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
