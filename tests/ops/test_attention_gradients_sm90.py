"""Gradients of attention on sm_90a: every property of `test_attention_gradients`, where slow tests
run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cute_attn.kernels.attention.configs import SM90, head_dims

from .attention_cases import Target, on_target
from .test_attention_gradients import *  # noqa: F403 (its tests)


@pytest.fixture(
    scope="module",
    autouse=True,
    params=[
        pytest.param(Target("sm_90a", head_dim), id=str(head_dim), marks=pytest.mark.slow)
        for head_dim in head_dims("backward_dkdv", SM90)
    ],
)
def target_of_module(request: pytest.FixtureRequest) -> Iterator[None]:
    with on_target(request.param):
        yield
