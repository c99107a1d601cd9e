"""Calls of the CUDA driver through cuda.bindings (of cuda-python).

The first call imports cuda.bindings. In most processes tvm_ffi has imported cuda.bindings already.
"""

from __future__ import annotations

import importlib
from typing import Any

from .errors import CacheError


class DriverError(CacheError):
    """No CUDA driver or no cuda-python is installed, or a driver call failed."""


def binding() -> Any:
    """The module `cuda.bindings.driver`; importing it needs no driver.

    Raises DriverError if cuda-python is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverError(
            f"the CUDA driver is asked through cuda-python, which cannot be imported ({error}): "
            "pip install 'cuda-python>=12.8'"
        ) from None


def ask(function: str, *arguments: Any, through: Any = None) -> Any:
    """Call a driver function, such as "cuDeviceGet"; return its result, or its results as a tuple.

    `through` replaces `binding()`.

    Raises DriverError naming the function and the driver's status.
    """
    call = getattr(through or binding(), function)
    try:
        status, *results = call(*arguments)
    except RuntimeError as error:  # the library is missing, or too old to have the function
        raise DriverError(f"no CUDA driver here that has {function} ({error})") from None
    if int(status) != 0:
        raise DriverError(f"{function} failed: {getattr(status, 'name', status)}")
    return results[0] if len(results) == 1 else tuple(results)
