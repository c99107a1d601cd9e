"""Kernel requests as JSON, for worker processes and spec files. Plain values only: no pickle.

A specialisation is sent as the name of its class and its fields. Numbers, which Python's JSON keeps
exactly, strings and None are sent as they are. Other values are sent as a list that begins with
their kind: `["tuple", ...]`, `["dtype", "bfloat16"]`, `["enum", class, name]`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
from typing import Any

from .key import KernelDef

END = "\n"
"""The line that ends a worker. Stdin may stay open, held by a fork of the worker's parent."""


class NotPortable(Exception):
    """A class that another process cannot import, because `__main__` or a function defines it."""


def encode_request(kernel: KernelDef, spec: Any) -> dict[str, Any]:
    """The request as JSON values.

    Raises NotPortable if another process cannot import the kernel or its specialisation's class.
    """
    if kernel.module == "__main__":
        raise NotPortable(kernel.target)
    return {
        "kernel": dataclasses.asdict(kernel),
        "class": _class_name(type(spec)),
        "fields": {f.name: _encode(getattr(spec, f.name)) for f in dataclasses.fields(spec)},
    }


def decode_request(request: dict[str, Any]) -> tuple[KernelDef, Any]:
    """The inverse of `encode_request`; imports the module of the specialisation.

    Raises TypeError if the class is no dataclass, lacks a field of the request, or has further
    fields without default.
    """
    cls = _find_class(request["class"])
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise TypeError(f"{request['class']} is no dataclass")
    given = {f.name: f.init for f in dataclasses.fields(cls)}
    if unknown := request["fields"].keys() - given:
        raise TypeError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
    fields = {name: _decode(v) for name, v in request["fields"].items() if given[name]}
    unset = dataclasses.MISSING
    needed = {
        f.name
        for f in dataclasses.fields(cls)
        if f.init and f.default is unset and f.default_factory is unset
    }
    if missing := needed - fields.keys():
        raise TypeError(f"{cls.__name__} also has the field {', '.join(sorted(missing))}")
    return KernelDef(**request["kernel"]), cls(**fields)


def _encode(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return ["enum", _class_name(type(value)), value.name]
    if type(value) is tuple:
        return ["tuple", *map(_encode, value)]
    if type(value) in (bool, int, float, str) or value is None:
        return value
    return ["dtype", str(value).removeprefix("torch.")]  # key.canonical_text admits no other type


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "tuple":
        return tuple(map(_decode, rest))
    if kind == "enum":
        return _find_class(rest[0])[rest[1]]
    return getattr(importlib.import_module("torch"), rest[0])


def _class_name(cls: type) -> str:
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise NotPortable(f"{cls.__module__}.{cls.__qualname__}")
    return f"{cls.__module__}:{cls.__qualname__}"


def _find_class(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
