"""Reading a file that says which kernels a server needs, to build or to warm them up.

    [[operator]]
    plan = "cute_attn.ops.lightning:plan_decode"
    dtype = "bfloat16"
    head_dim_k = 128

`plan` names a function `plan(arch, **parameters)` that returns pairs of KernelDef and
specialisation; all other keys are its parameters. What they mean is the operator's business.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import CacheError
from .key import KernelDef

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def plan_file(path: str | os.PathLike[str], arch: str) -> list[tuple[KernelDef, Any]]:
    """The kernels that a file asks for, with their specialisations for `arch`.

    Raises CacheError, naming the file or the plan, if it cannot be read or planned.
    """
    return [(kernel, spec) for kernel, spec, _ in requests(read_plans(Path(path)), [arch])]


def read_plans(path: Path) -> list[dict[str, Any]]:
    """The `[[operator]]` tables of a file. Raises CacheError if it is not such a file."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CacheError(f"{path}: {error}") from error
    tables = document.get("operator")
    if not isinstance(tables, list) or not tables:
        raise CacheError(f"{path}: no [[operator]] table")
    for number, table in enumerate(tables, start=1):
        if ":" not in str(table.get("plan", "")):
            raise CacheError(f"{path}: operator {number} has no plan = 'package.module:function'")
    return tables


def requests(
    plans: list[dict[str, Any]], architectures: list[str]
) -> Iterator[tuple[KernelDef, Any, str]]:
    """What the plans ask for, for each architecture: (kernel, specialisation, arch).

    Raises CacheError naming the plan that cannot be imported, or that refuses its parameters.
    """
    for arch in architectures:
        for table in plans:
            parameters = {name: value for name, value in table.items() if name != "plan"}
            module, _, name = table["plan"].partition(":")
            try:
                planned = getattr(importlib.import_module(module), name)(arch, **parameters)
            except (ImportError, AttributeError, TypeError, ValueError) as error:
                shown = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
                raise CacheError(f"{table['plan']}({arch!r}, {shown}): {error}") from error
            for kernel, spec in planned:
                yield kernel, spec, arch
