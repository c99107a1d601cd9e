"""How tests mark cases of a sweep, and whether a run draws all examples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"


def slow(*values: Any) -> Any:
    """A case that only `make test-full` runs, such as one that compiles a kernel of its own."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(
    cases: Iterable[Any], is_quick: Callable[[Any], bool], name_of: Callable[[Any], str]
) -> list[Any]:
    """Named cases of a sweep, of which `make test` runs the quick ones."""
    return [
        pytest.param(case, id=name_of(case), marks=() if is_quick(case) else pytest.mark.slow)
        for case in cases
    ]
