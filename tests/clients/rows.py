"""Tests of other directories as rows of the table of clients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

Test = Callable[..., Any]


def shows(feature: str, test: Test, *fixtures: str) -> Test:
    """The test as one of a feature's."""

    @functools.wraps(test)
    def own(*args: Any, **named: Any) -> Any:
        return test(*args, **named)

    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name != "slow"]
    more = [pytest.mark.clients(feature), pytest.mark.slow]
    if fixtures:  # pytest warns of a mark that names none
        more.append(pytest.mark.usefixtures(*fixtures))
    own.pytestmark = [*marks, *(mark.mark for mark in more)]  # type: ignore[attr-defined]
    return own
