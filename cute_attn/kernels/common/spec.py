"""What a kernel's Spec may hold."""

from __future__ import annotations

import dataclasses
from typing import Any

WARP_SIZE = 32
MBARRIER_BYTES = 8
MAX_SMEM_BYTES = 227 * 1024  # of a CTA on sm_90 and sm_100

_SCALARS = (bool, int, str)
_SCALAR_NAMES = {kind.__name__ for kind in _SCALARS}  # as annotations have them


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(_is_plain(item) for item in value)
    return type(value) in _SCALARS


@dataclasses.dataclass(frozen=True)
class Spec:
    """Base of every kernel's Spec: the frozen, hashable record of all that is compiled in.

    A Spec is a cache key, so its fields are ints, bools, strings and tuples of them. Anything
    else would compare by identity and never match again, a tensor above all. True and 1 are two
    keys, so a field holds what its annotation says.

    Raises:
        TypeError: a field holds anything else; the message names the field.
    """

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
