"""Reads spec files, which list the kernels of a server to build or to warm up.

    [[operator]]
    plan = "cute_attn.ops.lightning:plan_decode"
    dtype = "bfloat16"
    head_dim_k = 128

`plan` names a function `plan(arch, **parameters)` that is declared with `planner` and returns pairs
of KernelDef and specialisation. `arch` is an architecture or a list of architectures; a table
without `arch` is for all architectures. The other keys are the plan's parameters.

    [[kernel]]
    name = "scale"
    target = "mypackage.scale:Scale"
    spec = "mypackage.scale_spec:ScaleSpec"
    arch = "sm_90a"
    fields = { dtype = "bfloat16" }

`record` writes such tables. Each table names one kernel: the values of its KernelDef, and the class
and the fields of its specialisation. `recorded_by` is the version of the kernel's package when the
table was recorded.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from .arch import check_arch
from .errors import CacheError
from .fingerprint import installed_version
from .key import KernelDef
from .plans import Requests, is_planner
from .wire import decode_request, encode_request

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def plan_file(path: str | os.PathLike[str], arch: str) -> list[tuple[KernelDef, Any]]:
    """The kernels that a spec file lists for an architecture, with their specialisations.

    Args:
        path: path of the TOML file.
        arch: such as `"sm_90a"`.

    Raises:
        CacheError: the file cannot be read or lists nothing for `arch`, a plan fails, or a kernel
            was recorded by another version; the message names the plan or kernel.
        TypeError: `arch` is not a string.
        ValueError: `arch` is not of the form `sm_90a`.
        NotImplementedError: `arch` is older than compute capability 8.0.
    """
    plan = read_plan(path, [check_arch(arch)])
    if plan.refusals:
        raise CacheError("\n".join(plan.refusals))
    return [(kernel, spec) for kernel, spec, _ in plan.requests]


def read_plans(path: Path) -> list[dict[str, Any]]:
    """The `[[operator]]` and `[[kernel]]` tables of a file. Raises CacheError for a file that is no
    spec file."""
    try:
        with path.open("rb") as file:
            text = decoded(file, path)
    except OSError as error:
        raise CacheError(f"{path}: {error}") from error
    tables = parse(text, path)
    if not tables:
        raise CacheError(f"{path}: no [[operator]] or [[kernel]] table")
    return tables


_LARGEST_FILE = 64 * 2**20


def decoded(file: BinaryIO, path: Path) -> str:
    """The text of a spec file. Raises CacheError if the text is too long (a device) or not
    UTF-8."""
    data = file.read(_LARGEST_FILE + 1)
    if len(data) > _LARGEST_FILE:
        raise CacheError(f"{path} is longer than {_LARGEST_FILE} bytes: it is no spec file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CacheError(f"{path}: {error}") from error


def request_of(table: dict[str, Any]) -> dict[str, Any]:
    """The request of a table: everything but the version that recorded the table."""
    return {key: value for key, value in table.items() if key != _RECORDED_BY}


def parse(text: str, path: Path) -> list[dict[str, Any]]:
    """The tables in the text of a spec file. Raises CacheError, naming `path`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CacheError(f"{path}: {error}") from error
    if unknown := document.keys() - _NEEDED:
        names = ", ".join(sorted(unknown))
        raise CacheError(f"{path}: {names}: there are only [[operator]] and [[kernel]] tables")
    found: list[dict[str, Any]] = []
    for kind, needed in _NEEDED.items():
        tables = document.get(kind, [])
        if not isinstance(tables, list):
            raise CacheError(f"{path}: {kind} is {tables!r}, must be [[{kind}]] tables")
        for number, table in enumerate(tables, start=1):
            for key, form in needed.items():
                given = table.get(key, "") if isinstance(table, dict) else ""
                if not isinstance(given, str) or (":" in form and ":" not in given) or not given:
                    raise CacheError(f"{path}: {kind} {number} has no {key} = '{form}'")
            try:
                for arch in _architectures(table):
                    check_arch(arch)
            except (TypeError, ValueError, NotImplementedError) as error:
                raise CacheError(f"{path}: arch of {kind} {number}: {error}") from None
        found += tables
    return found


# The keys that each kind of table must have, and the form of their values.
_NEEDED = {
    "operator": {"plan": "package.module:function"},
    "kernel": {
        "name": "name",
        "target": "package.module:Class",
        "spec": "package.module:Class",
        "arch": "sm_90a",
    },
}


def _architectures(table: dict[str, Any]) -> list[str]:
    """The architectures that a table names; empty for a table for all architectures."""
    named = table.get("arch", [])
    return [named] if isinstance(named, str) else list(named)


class Plan(NamedTuple):
    """Requests as (kernel, specialisation, arch), and a message for each table without a kernel and
    for each architecture without a table."""

    requests: list[tuple[KernelDef, Any, str]]
    refusals: list[str]


def read_plan(path: str | os.PathLike[str], architectures: list[str]) -> Plan:
    """`plan_for` the tables of a file. Also raises CacheError for a file that is no spec file."""
    return plan_for(read_plans(Path(path)), architectures, str(path))


def plan_for(
    tables: list[dict[str, Any]], architectures: list[str], where: str = "the file"
) -> Plan:
    """Call the plans of the tables for each architecture. `where` is the file's name for messages.

    Raises CacheError if a plan cannot be imported, is not declared with `planner`, or does not take
    the parameters; the message names the plan.
    """
    requests: list[tuple[KernelDef, Any, str]] = []
    refusals: list[str] = []
    for arch in architectures:
        before = len(requests) + len(refusals)
        for table in tables:
            if arch not in (_architectures(table) or [arch]):
                continue
            if "plan" not in table:
                try:
                    requests.append((*_kernel(table), arch))
                except CacheError as error:
                    refusals.append(f"{where}: {error}")
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
        if len(requests) + len(refusals) == before:
            refusals.append(f"{where} has no kernel for {arch}{_others(tables)}")
    return Plan(requests, refusals)


def _others(tables: list[dict[str, Any]]) -> str:
    """A clause that says what else a file is for."""
    named = sorted({arch for table in tables for arch in _architectures(table)})
    return f", only for {', '.join(named)}: record or list what it needs" if named else ""


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


# -- [[kernel]] tables

_RECORDED_BY = "recorded_by"


def kernel_table(kernel: KernelDef, spec: Any, arch: str) -> str:
    """The text of the `[[kernel]]` table of a kernel.

    Raises NotPortable if another process cannot import the kernel or its specialisation's class.
    """
    request = encode_request(kernel, spec)
    values = {name: x for name, x in request["kernel"].items() if x}
    values |= {"spec": request["class"], "arch": arch}
    version = installed_version(kernel.source_package)
    values |= {_RECORDED_BY: version} if version else {}
    lines = ["[[kernel]]", *(f"{name} = {_to_toml(x)}" for name, x in values.items())]
    lines += ["[kernel.fields]"]
    lines += [f"{name} = {_to_toml(x)}" for name, x in request["fields"].items()]
    return "\n".join(lines) + "\n"


def _to_toml(value: Any) -> str:
    """A value of a request as TOML. TOML has no None; ["none"] stands for it."""
    if value is None:
        return '["none"]'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_to_toml, value))}]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _from_toml(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return None if value == ["none"] else [_from_toml(x) for x in value]


def _kernel(table: dict[str, Any]) -> tuple[KernelDef, Any]:
    """The kernel and the specialisation of a `[[kernel]]` table."""
    others = ("spec", "arch", "fields", _RECORDED_BY)
    values = {name: table[name] for name in table if name not in others}
    try:
        fields = {name: _from_toml(x) for name, x in table.get("fields", {}).items()}
        return decode_request({"kernel": values, "class": table["spec"], "fields": fields})
    except Exception as error:
        package = table.get("package") or table["target"].partition(":")[0].partition(".")[0]
        here = installed_version(package) or "this version"
        raise CacheError(
            f"the kernel {table['name']} for {table['arch']} is not one of {here} "
            f"({type(error).__name__}: {error}): it was recorded by "
            f"{table.get(_RECORDED_BY, 'another version')}. Delete its table and record it again"
        ) from error
