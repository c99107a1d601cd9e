"""Reads spec files, which list the kernels that a server needs, to build or to warm them up.

    [[operator]]
    plan = "cute_attn.ops.lightning:plan_decode"
    dtype = "bfloat16"
    head_dim_k = 128

`plan` names a function `plan(arch, **parameters)` that is declared with `planner` and returns pairs
of KernelDef and specialisation. `arch` is an architecture or a list of them; a table without `arch`
is for all architectures. The other keys are the plan's parameters.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from .arch import check_arch
from .errors import CacheError
from .key import KernelDef
from .plans import Requests, is_planner

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def plan_file(path: str | os.PathLike[str], arch: str) -> list[tuple[KernelDef, Any]]:
    """The kernels that a spec file lists for `arch`, with their specialisations.

    Raises CacheError if the file cannot be read or a plan fails; the message names it.
    """
    plan = plan_for(read_plans(Path(path)), [arch])
    if plan.refusals:
        raise CacheError("\n".join(plan.refusals))
    return [(kernel, spec) for kernel, spec, _ in plan.requests]


def read_plans(path: Path) -> list[dict[str, Any]]:
    """The `[[operator]]` tables of a file. Raises CacheError if it is not a spec file."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CacheError(f"{path}: {error}") from error
    tables = document.get("operator")
    if not isinstance(tables, list) or not tables:
        raise CacheError(f"{path}: no [[operator]] table")
    for number, table in enumerate(tables, start=1):
        if not isinstance(table, dict) or ":" not in str(table.get("plan", "")):
            raise CacheError(f"{path}: operator {number} has no plan = 'package.module:function'")
        try:
            for arch in _architectures(table):
                check_arch(arch)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise CacheError(f"{path}: arch of operator {number}: {error}") from None
    return tables


def _architectures(table: dict[str, Any]) -> list[str]:
    """The architectures that a table names; empty if it is for all."""
    named = table.get("arch", [])
    return [named] if isinstance(named, str) else list(named)


class Plan(NamedTuple):
    """Requests as (kernel, specialisation, arch), and a message for each table without a kernel."""

    requests: list[tuple[KernelDef, Any, str]]
    refusals: list[str]


def plan_for(tables: list[dict[str, Any]], architectures: list[str]) -> Plan:
    """Call the plans of the tables for each architecture.

    Raises CacheError if a plan cannot be imported, is not declared with `planner`, or does not take
    the parameters; the message names it.
    """
    requests: list[tuple[KernelDef, Any, str]] = []
    refusals = []
    for arch in architectures:
        for table in tables:
            if arch not in (_architectures(table) or [arch]):
                continue
            parameters = {k: v for k, v in table.items() if k not in ("plan", "arch")}
            shown = "".join(f", {name}={value!r}" for name, value in parameters.items())
            try:
                planned = _call(table["plan"], arch, parameters)
            except (NotImplementedError, ValueError) as error:
                refusals.append(f"{table['plan']}({arch!r}{shown}): {error}")
            except Exception as error:
                what = "" if isinstance(error, CacheError | TypeError) else type(error).__name__
                message = f"{what}: {error}" if what else str(error)
                raise CacheError(f"{table['plan']}({arch!r}{shown}): {message}") from error
            else:
                requests += [(kernel, spec, arch) for kernel, spec in planned]
    return Plan(requests, refusals)


def _call(plan: str, arch: str, parameters: dict[str, Any]) -> Requests:
    module, _, name = plan.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not is_planner(function):
        raise CacheError(
            f"{name} is not declared as a plan: a spec file names only functions that are "
            "decorated with cute_attn.cache.planner"
        )
    planned: Requests = function(arch, **parameters)
    return planned
