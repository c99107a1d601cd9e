"""A few cases of attention on sm_90a; `test_attention_sm90` has all, and takes long."""

from __future__ import annotations

import pytest
import torch

from cute_attn.kernels.common.numbers import LOG2_E
from cute_attn.reference.attention import attention_reference

from .attention_cases import (
    CACHE,
    VARLEN,
    WINDOW,
    Case,
    Machine,
    Target,
    assert_agrees,
    assert_no_worse,
    on_target,
    reference_arguments,
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


def test_scores_that_become_large_are_rounded_once():
    """In the K/V tile before the last, whose scores are small. Exact scores next to 2^20, that
    differ by halves, are then known as well as plain code in base 2 knows them."""
    case = Case(
        WINDOW, lengths_q=(70,), lengths_k=(300,), left=400, right=400, scale=1.0, seed=3
    )  # fmt: skip
    with on_target(Target("sm_90a", 64)):
        args = case.arguments()
        q, k, v = (args[name][0, :, 0] for name in ("q", "k", "v"))
        q.zero_()
        q[:, 0], q[:, 1] = 2.0**10, 1.0
        k.zero_()
        k[:200, 0] = 2.0**10
        k[:, 1] = -0.5 * (torch.arange(len(k)) % 5)
        o, lse = run(args)
        exact, exact_lse = attention_reference(**reference_arguments(args))
        scores = (q.float() @ k.float().T) * torch.tensor(LOG2_E, dtype=torch.float32)
        p = torch.exp2(scores - scores.amax(1, keepdim=True))
        p = (p / p.sum(1, keepdim=True)).to(v.dtype)
        plain = (p.float() @ v.float()).to(v.dtype)
        assert_no_worse(o[0, :, 0], plain, exact[0, :, 0], torch.finfo(o.dtype).eps / 2)
        assert lse is not None
        assert ((lse.double() - exact_lse).abs() <= 2.0**-23 * exact_lse.abs()).all()
