"""flash-linear-attention without its autotuner, which takes minutes and changes no result."""

from __future__ import annotations

from typing import Any

import pytest


def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Triton kernel takes the first of its configurations, and none is timed."""
    autotuner = pytest.importorskip("triton.runtime.autotuner", exc_type=ImportError).Autotuner
    run = autotuner.run

    def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        everything = self.configs
        self.configs = everything[:1]
        try:
            return run(self, *args, **kwargs)
        finally:
            self.configs = everything

    monkeypatch.setattr(autotuner, "run", run_first)
