"""Objects that hold run-time values, for use inside run-time loops and branches."""

from __future__ import annotations

import copy
from typing import Any

import cutlass
from cutlass.cutlass_dsl import extract_mlir_attributes


def _values(x: Any) -> list[Any]:
    return list(cutlass.extract_mlir_values(x)) if _is_dynamic(x) else []


def _is_dynamic(x: Any) -> bool:
    return hasattr(x, "__extract_mlir_values__") and not isinstance(x, type)


class Carried:
    """Base of classes whose attributes may be run-time values.

    Wherever control flow joins, the DSL rebuilds an instance from its run-time values. All other
    attributes are compile-time constants and keep their values."""

    def __extract_mlir_values__(self) -> list[Any]:
        return [value for x in vars(self).values() for value in _values(x)]

    def __extract_mlir_attributes__(self) -> list[Any]:
        return [
            attribute
            for x in vars(self).values()
            if _is_dynamic(x)
            for attribute in extract_mlir_attributes(x)
        ]

    def __new_from_mlir_values__(self, values: list[Any]) -> Any:
        rebuilt = copy.copy(self)
        values = list(values)
        for name, x in vars(self).items():
            if count := len(_values(x)):
                taken, values = values[:count], values[count:]
                object.__setattr__(rebuilt, name, cutlass.new_from_mlir_values(x, taken))
        return rebuilt
