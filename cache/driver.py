"""Questions to the CUDA driver, asked through cuda.bindings (of cuda-python).

It is imported at the first question. In most processes that costs nothing: tvm_ffi, through which
every kernel is called, has imported it already.
"""

from __future__ import annotations

import importlib
from typing import Any

from .errors import CacheError


class DriverError(CacheError):
    """There is no CUDA driver, no cuda-python to ask it with, or it refused a call."""


def binding() -> Any:
    """The module `cuda.bindings.driver`, which can be imported where there is no driver.

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
    """The result of a driver function, such as "cuDeviceGet", or a tuple where it has several.

    `through` stands in for `binding()`.

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
