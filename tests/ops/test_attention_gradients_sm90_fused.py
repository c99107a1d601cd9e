"""Gradients of attention on sm_90a by the kernel that adds up dQ too: what is not `deterministic`.

The properties are those of `test_attention_gradients` that hold without the same bits in every run.
Keys of at most two tiles have them all the same: a sum of two does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given

from cute_attn.kernels.attention.configs import ESTIMATED, SM90, head_dims
from cute_attn.kernels.attention.spec import ORDERS
from cute_attn.ops.attention import backward

from .attention_cases import CAUSAL, PLAIN, VARLEN, Case, Kind, Machine, Target, on_target
from .attention_gradient_cases import (
    UPSTREAMS,
    Upstream,
    assert_gradients_agree,
    fused_where_possible,
    gradient_cases,
    gradients,
    same,
    workspace,
)
from .test_attention_gradients import (
    sweep,
    test_a_nan_stays_in_its_head_and_sequence,  # noqa: F401
    test_agrees_with_float64,  # noqa: F401
    test_keys_hidden_from_every_query_have_gradient_0,  # noqa: F401
    test_large_and_small_scores,  # noqa: F401
    test_large_scores_without_a_mask,  # noqa: F401
    test_many_more_tiles_than_clusters,  # noqa: F401
    test_more_sequences_than_a_warp_has_lanes,  # noqa: F401
    test_probabilities_too_small_for_float16,  # noqa: F401
    test_rows_of_no_sequence_do_not_matter,  # noqa: F401
    test_rows_that_see_no_key,  # noqa: F401
    test_scores_that_saturate_the_softcap,  # noqa: F401
    test_sequences_without_a_used_key,  # noqa: F401
    test_slopes_of_the_softcap_too_small_for_float16,  # noqa: F401
    test_special_values_that_every_row_sees_propagate_like_the_definition,  # noqa: F401
    test_tensors_beyond_two_to_the_31_elements,  # noqa: F401
)


@pytest.fixture(
    scope="module",
    autouse=True,
    params=[
        pytest.param(Target("sm_90a", head_dim), id=str(head_dim), marks=pytest.mark.slow)
        for head_dim in head_dims("backward_fused", SM90)
    ],
)
def target_of_module(request: pytest.FixtureRequest) -> Iterator[None]:
    with on_target(request.param), fused_where_possible():
        yield


@pytest.mark.parametrize(
    "case",
    [
        Case(PLAIN, lengths_q=(140,), lengths_k=(300,), group=2, seed=1),
        Case(CAUSAL, lengths_q=(300,), lengths_k=(140,), seed=2),
        Case(VARLEN, lengths_q=(70, 0, 130), lengths_k=(50, 30, 140), tail=9, seed=3),
    ],
    ids=["dense", "causal", "varlen"],
)
def test_small_cases_agree_with_float64(case: Case):
    args = case.arguments()
    do, dlse = Upstream(of_lse=True).gradients(args)
    for machine in (Machine(num_sms=2, schedule="adversarial"), Machine(num_sms=5, seed=3)):
        assert_gradients_agree(args, gradients(args, do, dlse, "static", machine), do, dlse)


def test_partial_sums_of_splits_fit_the_workspace():
    """A group of 4, which is split as far as there is memory if the GPU is large enough."""
    case = Case(CAUSAL, lengths_q=(300,), lengths_k=(140,), group=4, seed=2)
    args = case.arguments()
    do, _ = Upstream().gradients(args)
    of_one = 2 * 4 * args["k"].numel()
    choose = backward.num_splits
    for limit, expected in ((2**30, 4), (4 * of_one, 4), (3 * of_one, 2), (of_one, 1), (0, 1)):
        splits = []

        def chosen(*, splits=splits, **known):
            splits.append(choose(**known | {"clusters": 1000, "costs": ESTIMATED}))
            return splits[-1]

        with workspace(limit), mock.patch.object(backward, "num_splits", chosen):
            found = gradients(args, do, None, "static", Machine(num_sms=4))
        assert set(splits) == {expected}
        assert_gradients_agree(args, found, do, None)


@sweep(40)
@given(case=gradient_cases(), upstream=UPSTREAMS)
def test_no_schedule_changes_a_bit_of_dk_and_dv(case: Case, upstream: Upstream):
    args = case.arguments()
    do, dlse = upstream.gradients(args)
    first = gradients(args, do, dlse, on=Machine(9, "fair"))
    for schedule in ("adversarial", "random"):
        again = gradients(args, do, dlse, on=Machine(9, schedule, seed=7))
        assert same(first, again, "k", "v")
        assert_gradients_agree(args, again, do, dlse)


USED = Kind(window_right=True, seqused_q=True, seqused_k=True)
ORDERED_CASES = {
    "more keys": Case(CAUSAL, lengths_q=(200,), lengths_k=(520,), group=2, seed=4),
    "more queries": Case(CAUSAL, lengths_q=(500,), lengths_k=(390,), group=2, seed=5),
    "packed": Case(VARLEN, lengths_q=(130, 0, 200), lengths_k=(300, 30, 260), group=2, seed=6),
    "used": Case(
        USED, lengths_q=(256, 256), lengths_k=(400, 400), unused_q=(0, 90), unused_k=(0, 170),
        group=2, seed=7,
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize("case", ORDERED_CASES.values(), ids=ORDERED_CASES)
def test_no_schedule_changes_a_bit_in_a_fixed_order(case: Case, order: str):
    """Of a causal call; the orders of `heuristics.fixed_order`. The grid of a small GPU has fewer
    CTAs than tiles of keys."""
    args = case.arguments()
    do, dlse = Upstream(of_lse=True).gradients(args)
    with (
        mock.patch.object(backward, "fixed_order", return_value=order),
        mock.patch.object(backward, "num_splits", return_value=1),
    ):
        for num_sms in (1, 2, 4):
            first = None
            for schedule in ("adversarial", "random", "fair"):
                machine = Machine(num_sms, schedule, seed=num_sms)
                found = gradients(args, do, dlse, "static", machine, deterministic=True)
                if first is None:
                    first = found
                    assert_gradients_agree(args, found, do, dlse)
                assert same(first, found)
