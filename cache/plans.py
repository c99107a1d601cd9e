"""Plans: functions from an operator's parameters to the kernels that its calls need.

Plans are declared, because a spec file may call only plans. Plans are strict about types, because
an equal value of another type (1 for True) would make a key that no call looks for.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec

from .arch import check_arch
from .key import KernelDef

Requests = list[tuple[KernelDef, Any]]
_P = ParamSpec("_P")


def planner(function: Callable[_P, Requests]) -> Callable[_P, Requests]:
    """Declare that a function is a plan, which spec files may name.

        @cache.planner
        def plan_scale(arch: str, *, dtype: str = "bfloat16", vector: int = 8):
            return [(SCALE, ScaleSpec(dtype, vector))]

    Arguments must have exactly the annotated types: `1` is no `bool` and no `float`.

    Args:
        function: a function of the architecture, and of keyword parameters of TOML's types (bool,
            int, float, str, lists of them) or None. The function returns pairs of KernelDef and
            specialisation, and raises NotImplementedError or ValueError for parameters that have no
            kernel.

    Raises:
        TypeError: raised by a call of the plan if an argument has a wrong type, which the message
            names, or if the function does not return pairs of KernelDef and specialisation.
        ValueError: raised by a call of the plan if `arch` is not the name of an architecture.
        NotImplementedError: raised by a call of the plan if `arch` is older than compute capability
            8.0.
    """
    signature = inspect.signature(function)
    expected = functools.cache(lambda: _parameter_types(function))

    @functools.wraps(function)
    def plan(*args: _P.args, **kwargs: _P.kwargs) -> Requests:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if not _is_a(value, expected()[name]):
                raise TypeError(f"{name} is {value!r}, must be {_described(expected()[name])}")
            if name == "arch":
                check_arch(value)
        planned: Any = function(*args, **kwargs)
        items = list(planned) if isinstance(planned, Iterable) else [planned]
        return checked_requests(items, f"{function.__qualname__} returned {{}}, must return")

    plan.is_planner = True  # type: ignore[attr-defined]
    return plan


def is_planner(function: object) -> bool:
    """Whether a function was declared with `planner`."""
    return getattr(function, "is_planner", False) is True


def _parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    annotations = {k: v for k, v in function.__annotations__.items() if k != "return"}
    parameters = types.SimpleNamespace(__annotations__=annotations)
    hints = typing.get_type_hints(parameters, function.__globals__)
    return {name: hints.get(name, Any) for name in inspect.signature(function).parameters}


def _is_a(value: object, expected: Any) -> bool:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_is_a(value, item) for item in arguments)
    if origin is list:
        return type(value) is list and all(_is_a(item, arguments[0]) for item in value)
    return type(value) is expected


def _described(expected: Any) -> str:
    if typing.get_origin(expected) in (typing.Union, types.UnionType):
        return " or ".join(map(_described, typing.get_args(expected)))
    if expected is type(None):
        return "None"
    return f"a {expected if typing.get_origin(expected) else expected.__name__}".replace(
        "a int", "an int"
    )


def checked_requests(pairs: list[Any], complaint: str) -> Requests:
    """Return `pairs` if each is a tuple of a KernelDef and a specialisation.

    Raises TypeError for anything else, which `complaint` formats.
    """
    for pair in pairs:
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], KernelDef)
            and dataclasses.is_dataclass(pair[1])
        ):
            shown = complaint.format(repr(pair))
            raise TypeError(f"{shown} pairs of KernelDef and specialisation")
    return pairs
