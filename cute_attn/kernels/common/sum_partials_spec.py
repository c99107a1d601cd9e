"""The Spec of `sum_partials`. Importing this loads no compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .spec import Spec


@dataclass(frozen=True)
class SumPartialsSpec(Spec):
    """The compile-time parameters of the kernel that sums partial results.

    Attributes:
        dtype: dtype of the sums; the partial results are float32.
        vector: consecutive elements that a thread loads at once; it divides a row's columns.
        slices: threads that share an element's sum; more than 1 is faster for many partials of few
            elements.

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: a field's value is not supported; the message names the field.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "dtype": ("bfloat16", "float16", "float32"),
        "vector": (1, 2, 4),
        "slices": (1, 2, 4, 8, 16, 32),
    }

    dtype: str
    vector: int
    slices: int
