"""Attention on sm_90a: every property of `test_attention`, where slow tests run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cute_attn.kernels.attention.configs import shapes

from .attention_cases import Target, on_target
from .test_attention import *  # noqa: F403 (its tests)

ARCH = "sm_90a"


@pytest.fixture(
    scope="module",
    autouse=True,
    params=[
        pytest.param(Target(ARCH, head_dim), id=str(head_dim), marks=pytest.mark.slow)
        for head_dim, _ in shapes("forward", (ARCH,))
    ],
)
def target_of_module(request: pytest.FixtureRequest) -> Iterator[None]:
    with on_target(request.param):
        yield
