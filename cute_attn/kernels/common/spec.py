"""The base class of kernel Specs, and the hardware limits that Specs are checked against."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

WARP_SIZE = 32
VECTOR_BYTES = 16  # widest access of one thread
MBARRIER_BYTES = 8
BOX = 64  # columns of 16 bits that TMA loads at a time: 128 bytes, the width of the swizzle

# Bytes of shared memory that a CTA may have.
SMEM_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "sm_103": 232_448}
SMALLEST_SMEM_BYTES = 101_376  # sm_86, sm_89, sm_120
MAX_SMEM_BYTES = max(SMEM_BYTES.values())

_SCALARS = (bool, int, str)
_SCALAR_NAMES = {kind.__name__ for kind in _SCALARS}  # annotations are strings


def smem_bytes(arch: str) -> int:
    """Most bytes of shared memory that a CTA may have on `arch`, such as "sm_90a"."""
    return SMEM_BYTES.get(arch.rstrip("af"), SMALLEST_SMEM_BYTES)


def check_allowed(allowed: Mapping[str, tuple[object, ...]], fields: Mapping[str, object]) -> None:
    """Raise ValueError, naming the field, if a field's value is not in `allowed`."""
    for name, value in fields.items():
        if name in allowed and value not in allowed[name]:
            raise ValueError(f"{name} is {value!r}, must be one of {allowed[name]}")


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(_is_plain(item) for item in value)
    return type(value) in _SCALARS


@dataclasses.dataclass(frozen=True)
class Spec:
    """Base of every kernel's Spec: the frozen, hashable record of the compile-time parameters.

    A Spec is a cache key, so its fields are ints, bools, strings and tuples of these. Other
    objects, such as tensors, compare by identity and would never match again. True and 1 are
    different keys, so a field's type must be exactly the annotated type.

    Attributes:
        ALLOWED: the supported values of fields; a field that is not listed is not checked.

    Raises:
        TypeError: a field has another type; the message names the field.
        ValueError: a field's value is not in ALLOWED.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _is_plain(value):
                raise TypeError(
                    f"{type(self).__name__}.{field.name} must be an int, bool, str or a tuple of "
                    f"them, got {type(value).__module__}.{type(value).__qualname__}"
                )
            if field.type in _SCALAR_NAMES and type(value).__name__ != field.type:
                raise TypeError(f"{field.name} is {value!r}, must be of type {field.type}")
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        check_allowed(self.ALLOWED, fields)
