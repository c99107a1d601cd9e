"""flash-linear-attention with this package as a backend."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cute_attn.integrations import fla as integration
from cute_attn.ops import gated_delta_rule, kda
from tests.untuned import untuned

OPERATORS = {
    "chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kda": kda,
    "fused_recurrent_kda": kda,
    "kda_chunk_intra": kda,
    "kda_decode": kda,
    "kda_gate_cumsum": kda,
    "kda_recompute_w_u": kda,
}


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

    for name, module in OPERATORS.items():
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return calls
