"""Long dense calls on sm_90a, in which a cluster of two CTAs loads K and V once for two tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from cute_attn.kernels.attention.heuristics import LONG_SEQLEN_Q
from cute_attn.kernels.attention.spec import Sm90ForwardSpec
from cute_attn.ops.attention import forward, plan_attention
from cute_attn.ops.attention.call import PLANS
from cute_attn.ops.attention.forward import FORWARD

from .attention_cases import PLAIN, Case, Machine, Target, assert_agrees, on_target, run

ARCH = "sm_90a"


@pytest.fixture(
    params=[
        64,
        pytest.param(256, marks=pytest.mark.slow),
    ]
)
def head_dim(request: pytest.FixtureRequest) -> Iterator[int]:
    with on_target(Target(ARCH, request.param)):
        yield request.param


@pytest.fixture(autouse=True)
def no_remembered_calls() -> Iterator[None]:
    """No call finds a kernel that another minimum of queries has chosen."""
    yield
    PLANS.clear()
    FORWARD.ready.clear()


def long_from(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    monkeypatch.setattr(forward, "LONG_SEQLEN_Q", queries)
    PLANS.clear()
    FORWARD.ready.clear()


CASES = [
    # The last CTA has no rows: 140 rows are one tile, or two of three warpgroups of a second.
    Case(replace(PLAIN, lse=False), lengths_q=(140,), lengths_k=(300,), seed=1),
    pytest.param(
        Case(replace(PLAIN, lse=True), lengths_q=(500, 500), lengths_k=(200, 200), group=2, seed=2),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        Case(replace(PLAIN, softcap=True), lengths_q=(700,), lengths_k=(150,), seed=3),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_clusters_give_the_bits_of_single_ctas(
    case: Case, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = case.arguments()
    long_from(monkeypatch, 129)
    o, lse = run(args, on=Machine(num_sms=4, schedule="adversarial"))
    assert_agrees(args, o, lse)
    long_from(monkeypatch, 10**6)
    alone, lse_alone = run(args, on=Machine(num_sms=3))
    assert torch.equal(o, alone)
    assert lse is lse_alone is None or torch.equal(lse, lse_alone)


@pytest.mark.slow
@pytest.mark.parametrize("num_sms", [2, 3, 6])
@pytest.mark.parametrize("schedule", ["fair", "random", "adversarial"])
def test_any_number_of_clusters_under_any_schedule(
    num_sms: int, schedule: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_from(monkeypatch, 129)
    args = Case(PLAIN, lengths_q=(420,) * 3, lengths_k=(140,) * 3, heads_k=2, seed=4).arguments()
    assert_agrees(args, *run(args, on=Machine(num_sms, schedule, seed=num_sms)))


def shares(**changes: object) -> set[bool]:
    specs = (spec for _, spec in plan_attention(ARCH, **{"head_dim": 64, "short": False} | changes))
    return {spec.shared_keys for spec in specs if isinstance(spec, Sm90ForwardSpec)}


def test_which_calls_share_keys() -> None:
    assert shares() == {False, True}
    assert shares(long=True) == shares(long=True, head_dim=256) == {True}
    assert shares(long=False) == shares(long=True, head_dim=128) == {False}
    for change in (
        {"causal": True}, {"window_left": True}, {"seqused_q": True}, {"num_splits": 2},
        {"varlen_q": True, "varlen_k": True}, {"seqused_k": True, "page_size": 64},
        {"kv_dtype": "float8_e4m3fn"},
    ):  # fmt: skip
        assert shares(long=True, **change) == {False}, change
    assert shares(short=True) == {False}


def test_long_calls() -> None:
    shape = 1, LONG_SEQLEN_Q, 2, 64
    assert forward.is_long(shape, None)
    assert not forward.is_long((1, LONG_SEQLEN_Q - 1, 2, 64), None)
    assert not forward.is_long(shape[1:], torch.tensor([0, LONG_SEQLEN_Q]))


def test_a_spec_that_cannot_share_keys_is_refused() -> None:
    ((_, spec),) = plan_attention(ARCH, head_dim=64, short=False, long=True)
    assert isinstance(spec, Sm90ForwardSpec)
    for change in ({"window_right": True}, {"seqused_k": True}, {"scheduler": "single"}):
        with pytest.raises(ValueError, match="shared_keys is True, it needs"):
            replace(spec, **change)
    with pytest.raises(ValueError, match="shared_keys is True, it needs"):
        replace(spec, head_dim=512, head_dim_v=512)
