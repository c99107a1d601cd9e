"""How tests mark cases of a sweep, and whether a run draws all examples."""

from __future__ import annotations

import os
from typing import Any

import pytest

FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"


def slow(*values: Any) -> Any:
    """A case that only `make test-full` runs, such as one that compiles a kernel of its own."""
    return pytest.param(*values, marks=pytest.mark.slow)
