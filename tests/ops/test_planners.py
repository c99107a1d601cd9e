"""The plans of all operators: declared as such, and strict about the types of their arguments."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cute_attn.ops
from cute_attn.cache.plans import is_planner
from cute_attn.families import FAMILIES


def planners() -> Iterator[Callable[..., Any]]:
    found = {}
    for info in pkgutil.walk_packages(cute_attn.ops.__path__, "cute_attn.ops."):
        module = importlib.import_module(info.name)
        found |= {name: f for name, f in vars(module).items() if name.startswith("plan_")}
    return iter(found.values())


PLANNERS = list(planners())
ARCH = "sm_100a"
HOPPER = {"plan_mla_decode"}  # has kernels on Hopper alone

# For each annotation, values that would mean the same as one that is allowed.
WRONG = {
    "bool": (0, 1, 1023, "true", None),
    "bool | None": (0, 1),
    "int": (True, 128.0, "128", None),
    "int | None": (True, 128.0, "128"),
    "str": (None, 16, True),
    "str | None": (0, False),
}


def parameters() -> Iterator[Any]:
    for planner in PLANNERS:
        for name, parameter in inspect.signature(planner).parameters.items():
            if name != "arch":
                yield pytest.param(planner, name, parameter, id=f"{planner.__name__}-{name}")


def test_all_operators_have_one() -> None:
    listed = [pkgutil.resolve_name(row.plan) for family in FAMILIES for row in family.support]
    assert {*listed} <= {*PLANNERS}
    assert all(map(is_planner, PLANNERS))


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.__name__)
def test_its_defaults_and_architecture(planner: Callable[..., Any]) -> None:
    assert planner("sm_90a" if planner.__name__ in HOPPER else ARCH)
    with pytest.raises(TypeError, match="arch is 100, must be a str"):
        planner(100)
    with pytest.raises(ValueError, match="'sm_90' is not an architecture that a call looks for"):
        planner("sm_90")


@pytest.mark.parametrize(("planner", "name", "parameter"), list(parameters()))
def test_a_value_of_another_type_is_refused_by_name(
    planner: Callable[..., Any], name: str, parameter: inspect.Parameter
) -> None:
    for value in WRONG[parameter.annotation]:
        with pytest.raises(TypeError, match=rf"{name} is .*, must be an? "):
            planner(ARCH, **{name: value})
