"""Overlap checks of tensors in compiled host code, where they cost nanoseconds."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int64


def overlaps(
    written: tuple[cute.Tensor | None, ...],
    read: tuple[cute.Tensor | None, ...],
    pools: tuple[cute.Tensor | None, ...] = (),
) -> Boolean:
    """Whether a written tensor overlaps itself or another tensor; a None is skipped.

    The rules are in `cute_attn.ops.memory.check_memory`, which raises the error and says why. The
    first mode of `pools` counts slots; the slots of two pools may be interleaved.
    """
    found = Boolean(False)
    results = [x for x in written if x is not None]
    for i, x in enumerate(results):
        found = found | _meets_itself(x)
        for y in (*results[i + 1 :], *read):
            if y is None:
                continue
            meet = _spans_meet(x, y)
            if any(x is z for z in pools) and any(y is z for z in pools):
                meet = meet & ~_slots_are_apart(x, y)
            found = found | meet
    return found


def row_of(x: cute.Tensor) -> cute.Tensor:
    """The memory from x's first element to x's last, as one row: stands for a tensor whose elements
    may share memory."""
    start, end = _span(x)
    return cute.make_tensor(
        x.iterator, cute.make_layout(((end - start) // (x.element_type.width // 8),))
    )


def windows_meet(x: cute.Tensor) -> Boolean:
    """Whether elements of windows `[rows, steps, channels, taps]` overlap, except that the windows
    of successive steps may share inputs; see `cute_attn.ops.memory.check_windows`."""
    shape = (x.shape[0], x.shape[1] + x.shape[3] - 1, x.shape[2])
    shared = cute.make_tensor(x.iterator, cute.make_layout(shape, stride=x.stride[:3]))
    shares = x.stride[1] == x.stride[3]
    return (shares & _meets_itself(shared)) | (~shares & _meets_itself(x))


def _spans_meet(x: cute.Tensor, y: cute.Tensor) -> Boolean:
    start, end = _span(x)
    other_start, other_end = _span(y)
    return (start < other_end) & (other_start < end)


def _slots_are_apart(x: cute.Tensor, y: cute.Tensor) -> Boolean:
    """Whether two pools of equally many slots have equal slot strides in bytes, and no slot of one
    pool overlaps a slot of the other."""
    pitch = x.stride[0] * (x.element_type.width // 8)
    start, end = _span(x, first=1)
    other_start, other_end = _span(y, first=1)
    divisor = cutlass.max(pitch, 1)  # a pitch of 0 is rejected below, but divides here
    between = ((other_start - start) % divisor + divisor) % divisor
    return (
        (x.shape[0] > 1)
        & (pitch == y.stride[0] * (y.element_type.width // 8))
        & (end - start <= between)
        & (between + other_end - other_start <= pitch)
    )


def _meets_itself(x: cute.Tensor) -> Boolean:
    """Whether a mode's stride is less than the span of all modes with smaller strides."""
    found = Boolean(False)
    modes = range(cute.rank(x))
    for mode in modes:
        spanned = Int64(1)
        for other in modes:
            if other == mode:
                continue
            smaller = x.stride[other] < x.stride[mode]
            if other < mode:  # of modes with equal strides, the first counts as the smaller
                smaller = smaller | (x.stride[other] == x.stride[mode])
            part = Int64(x.shape[other] - 1) * x.stride[other]
            spanned += Int64(smaller) * part
        found = found | ((x.shape[mode] > 1) & (x.stride[mode] < spanned))
    return found


def _span(x: cute.Tensor, first: int = 0) -> tuple[Int64, Int64]:
    """Addresses of x's first byte and of the first byte past x. With `first` = 1, x is a pool and
    the addresses are slot 0's."""
    start = x.iterator.toint()
    last = Int64(0)
    for mode in range(first, cute.rank(x)):
        last += Int64(x.shape[mode] - 1) * x.stride[mode]
    return start, start + (last + 1) * (x.element_type.width // 8)
