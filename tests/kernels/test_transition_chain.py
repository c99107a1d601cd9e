"""Chains of transitions of spans, beside float64."""

from __future__ import annotations

import math

import pytest
import torch

from cute_attn.kernels.delta.chunk.spec import ChainSpec
from cute_attn.kernels.delta.table import CHAIN

from .test_backward_preprocess import launch


@pytest.mark.parametrize(
    ("dims", "rows", "has_start"),
    [
        pytest.param((64, 64), 128, True, id="transitions", marks=pytest.mark.slow),
        pytest.param((128, 64), 64, True, id="states"),
        pytest.param((64, 256), 256, False, id="from zero", marks=pytest.mark.slow),
    ],
)
def test_chains(dims: tuple[int, int], rows: int, has_start: bool) -> None:
    """Chains of several lengths, which write after some of their steps and leave other places."""
    dim_k, dim_v = dims
    batch, heads = 2, 2
    torch.manual_seed(0)
    start = torch.randn(batch, 3, heads, rows, dim_k)
    moves = torch.randn(batch, 3, heads, dim_v + dim_k, dim_k)
    moves[..., dim_v:, :] *= dim_k**-0.5
    steps = [[(2, 0), (1, -1), (0, 3)], [(0, -1), (2, 1), (-1, -1)]]
    out = torch.full((batch, 5, heads, rows, dim_k), math.nan)
    table = torch.tensor(steps, dtype=torch.int32)
    launch(
        CHAIN, ChainSpec(dim_k, dim_v, has_start), start if has_start else None, moves, table, out
    )
    expected = torch.full_like(out, math.nan, dtype=torch.float64)
    for (first, place), *rest in steps:
        state = start[:, first].double() if has_start else torch.zeros_like(expected[:, 0])
        if place >= 0:
            expected[:, place] = state
        for move, to in rest:
            if move >= 0:
                b, m = moves[:, move].double().split((dim_v, dim_k), -2)
                state = state @ m
                state[..., :dim_v, :] += b[..., :rows, :]
            if to >= 0:
                expected[:, to] = state
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
