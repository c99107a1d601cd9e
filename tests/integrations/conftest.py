"""flash-linear-attention with this package as a backend."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import cute_attn.ops.kda as operators
from cute_attn.integrations import fla as integration
from tests.untuned import untuned

OPERATORS = (
    "chunk_kda",
    "fused_recurrent_kda",
    "kda_chunk_intra",
    "kda_decode",
    "kda_gate_cumsum",
    "kda_recompute_w_u",
)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Any:
    """flash-linear-attention, with the backend registered."""
    package = pytest.importorskip(
        "fla.ops.kda", reason="needs flash-linear-attention and triton", exc_type=ImportError
    )
    untuned(monkeypatch)
    integration.register()
    return package


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each of our operators was called."""
    calls: Counter[str] = Counter()

    def counted(name: str, operator: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return operator(*args, **kwargs)

        return call

    for name in OPERATORS:
        monkeypatch.setattr(operators, name, counted(name, getattr(operators, name)))
    return calls
