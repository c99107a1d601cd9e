"""A few cases of attention on sm_90a; `test_attention_sm90` has all, and takes long."""

from __future__ import annotations

import pytest

from .attention_cases import (
    CACHE,
    VARLEN,
    WINDOW,
    Case,
    Machine,
    Target,
    assert_agrees,
    on_target,
    run,
    same,
)

FEW = {
    64: Case(WINDOW, lengths_q=(300,), lengths_k=(430,), left=150, right=10, heads_k=2),
    128: Case(VARLEN, lengths_q=(0, 130, 1, 70), lengths_k=(5, 300, 0, 128), group=3, tail=7),
    256: Case(CACHE, lengths_q=(1, 0, 5), lengths_k=(200,) * 3, unused_k=(0, 9, 199), group=2),
}


@pytest.mark.parametrize("head_dim", [64, 128, pytest.param(256, marks=pytest.mark.slow)])
def test_agrees_with_the_reference(head_dim: int):
    case = FEW[head_dim]
    with on_target(Target("sm_90a", head_dim)):
        args = case.arguments()
        first = run(args, on=Machine(num_sms=2, schedule="adversarial"))
        assert_agrees(args, *first)
        assert same(args, first, run(args, "clc", Machine(num_sms=5)))
