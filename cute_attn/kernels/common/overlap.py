"""Whether tensors share memory, asked by compiled host code, where it costs nanoseconds."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute


def overlaps(o: cute.Tensor, *inputs: cute.Tensor) -> Any:
    """Whether the memory that o spans meets that of an input."""
    start, end = _span(o)
    found = cutlass.Boolean(False)
    for x in inputs:
        other_start, other_end = _span(x)
        found = found | ((start < other_end) & (other_start < end))
    return found


def _span(x: cute.Tensor) -> tuple[Any, Any]:
    """Address of the first byte of x, and of the first past its last."""
    start = x.iterator.toint()
    last = cutlass.Int64(0)
    for mode in range(cute.rank(x)):
        last += cutlass.Int64(x.shape[mode] - 1) * x.stride[mode]
    return start, start + (last + 1) * (x.element_type.width // 8)
