"""A few gradients of attention on sm_90a; `test_attention_gradients_sm90` has all of them."""

from __future__ import annotations

import pytest

from .attention_cases import (
    CAPPED,
    CAUSAL,
    PLAIN,
    USED,
    VARLEN,
    WINDOW,
    Case,
    Kind,
    Machine,
    Target,
    on_target,
)
from .attention_gradient_cases import (
    Upstream,
    assert_gradients_agree,
    fused_where_possible,
    gradients,
    same,
)

USED_CASE = Case(
    USED, lengths_q=(150, 70), lengths_k=(200, 90), unused_q=(30, 0), unused_k=(0, 41), left=60,
    softcap=5.0, tail=20,
)  # fmt: skip
# One sequence has no query, and one has no key.
PACKED = Case(VARLEN, lengths_q=(70, 0, 130, 5), lengths_k=(50, 30, 140, 0), tail=9)
FEW = [
    pytest.param(128, PACKED, marks=pytest.mark.slow),
    pytest.param(
        64,
        Case(WINDOW, lengths_q=(300,), lengths_k=(430,), left=150, right=10, heads_k=2),
        marks=pytest.mark.slow,
    ),
    pytest.param(64, USED_CASE, marks=pytest.mark.slow),
    pytest.param(256, Case(CAUSAL, lengths_q=(150,), lengths_k=(200,)), marks=pytest.mark.slow),
    pytest.param(256, USED_CASE, marks=pytest.mark.slow),
    pytest.param(
        256,
        Case(CAPPED, lengths_q=(200,), lengths_k=(270,), group=3, left=100, softcap=0.5),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        128,
        Case(CAPPED, lengths_q=(200,), lengths_k=(270,), group=3, left=100, softcap=0.5),
        marks=pytest.mark.slow,
    ),
]


# A scheduler has kernels of its own: the quick case takes one for both runs.
@pytest.mark.parametrize(
    ("head_dim", "case", "other"),
    [(128, PACKED, "static"), *(pytest.param(*few.values, "clc", marks=few.marks) for few in FEW)],
)
def test_agrees_with_float64(head_dim: int, case: Case, other: str):
    """And is the same bit for bit in another schedule."""
    with on_target(Target("sm_90a", head_dim)):
        args = case.arguments()
        do, dlse = Upstream(of_lse=True).gradients(args)
        first = gradients(args, do, dlse, "static", Machine(num_sms=2, schedule="adversarial"))
        assert_gradients_agree(args, first, do, dlse)
        assert same(first, gradients(args, do, dlse, other, Machine(num_sms=5)))


@pytest.mark.slow  # four kernels more; one of `PACKED` has no key at all
def test_a_sequence_without_a_used_key():
    """`test_attention_gradients` has more."""
    with on_target(Target("sm_90a", 64)):
        args = Case(Kind(seqused_k=True), (20,), (70,), unused_k=(70,)).arguments()
        do, _ = Upstream().gradients(args)
        assert_gradients_agree(args, gradients(args, do), do)


@pytest.mark.slow
def test_of_one_kernel():
    """One kernel adds up dq too; `test_attention_gradients_sm90_fused` has more cases."""
    with on_target(Target("sm_90a", 128)), fused_where_possible():
        args = PACKED.arguments()
        do, dlse = Upstream(of_lse=True).gradients(args)
        on = Machine(num_sms=2, schedule="adversarial")
        assert_gradients_agree(args, gradients(args, do, dlse, on=on), do, dlse)


@pytest.mark.slow
def test_of_keys_at_head_dim_256():
    """The kernel of its own, with more tiles of queries than stages."""
    with on_target(Target("sm_90a", 256)):
        args = Case(PLAIN, lengths_q=(260,), lengths_k=(70,)).arguments()
        do, _ = Upstream().gradients(args)
        found = gradients(args, do, on=Machine(num_sms=2), wanted=("k", "v"))
        assert_gradients_agree(args, found, do)
