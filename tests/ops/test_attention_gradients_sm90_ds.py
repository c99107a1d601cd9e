"""Gradients of attention on sm_90a at head_dim 192 and 256 with other limits of the workspace for
dS: of a part of the heads at once, and without one, where dQ's kernel computes dS itself. The usual
limit is that of `test_attention_gradients_sm90`."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from cute_attn.kernels.attention import ds_tiles
from cute_attn.kernels.attention.configs import SM90, head_dims
from cute_attn.kernels.attention.statistics import padded_rows
from cute_attn.ops.attention import backward

from .attention_cases import (
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
    target,
)
from .attention_gradient_cases import Upstream, assert_gradients_agree, gradients, same, workspace
from .test_attention_gradients import (
    test_agrees_with_float64,  # noqa: F401
    test_packed_sequences_are_sequences_alone,  # noqa: F401
    test_probabilities_too_small_for_float16,  # noqa: F401
    test_rows_that_see_no_key,  # noqa: F401
    test_sequences_without_a_used_key,  # noqa: F401
    test_splits_of_a_group_agree_with_float64,  # noqa: F401
)

SINK = Kind(window_right=True, sink=torch.float32)


@pytest.fixture(
    scope="module",
    autouse=True,
    params=[pytest.param(dim, marks=pytest.mark.slow) for dim in head_dims("backward_ds_dq", SM90)],
)
def target_of_module(request: pytest.FixtureRequest) -> Iterator[None]:
    with on_target(Target("sm_90a", request.param)), workspace(0):
        yield


def launches(
    case: Case, nbytes: int, machine: Machine
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The backward's kernels that keep and read dS, and the gradients."""
    args = case.arguments()
    do, dlse = Upstream(of_lse=True).gradients(args)
    names = []
    launch = backward.Backward.launch_by_heads

    def recorded(self, ready, *rest):
        def named(name, function):
            def call(*arguments):
                names.append(name)
                function(*arguments)

            return function and call  # None stays None

        changed = {name: named(name, getattr(ready, name)) for name in ("dkdv", "ds_dq")}
        return launch(self, ready._replace(**changed), *rest)

    with workspace(nbytes), mock.patch.object(backward.Backward, "launch_by_heads", recorded):
        found = gradients(args, do, dlse, "static", machine)
    assert_gradients_agree(args, found, do, dlse)
    return names, found


@pytest.mark.parametrize(
    "case",
    [
        Case(PLAIN, lengths_q=(140,), lengths_k=(90,), heads_k=3, seed=1),
        Case(VARLEN, lengths_q=(70, 0, 30), lengths_k=(50, 30, 40), tail=9, heads_k=3, seed=3),
    ],
    ids=["dense", "varlen"],
)
def test_the_parts_of_the_heads_change_no_bit(case: Case) -> None:
    """Two heads and one, one after the other, and all at once."""
    machine = Machine(num_sms=4, schedule="adversarial")
    varlen = case.kind == VARLEN
    rows = padded_rows(sum(case.lengths_q) + case.tail * varlen, len(case.lengths_q), varlen)
    keys = sum(case.lengths_k) + case.tail * varlen
    two_heads = ds_tiles.nbytes(2 * case.group, rows, keys)
    one, first = launches(case, two_heads, machine)
    assert one == ["dkdv", "ds_dq"] * 2
    all_at_once, second = launches(case, 2**30, machine)
    assert all_at_once == ["dkdv", "ds_dq"]
    assert same(first, second)
    assert launches(case, two_heads // 2 - 1, machine)[0] == ["dkdv"]


@pytest.mark.parametrize("kind", [CAUSAL, WINDOW, USED, SINK], ids=str)
def test_a_group_is_split_where_the_dS_of_a_KV_head_does_not_fit(kind: Kind) -> None:
    case = Case(kind, lengths_q=(150,), lengths_k=(200,), group=4, left=60)
    machine = Machine(num_sms=4)
    names, _ = launches(case, ds_tiles.nbytes(2, 512, 256), machine)
    assert names.count("dkdv") == names.count("ds_dq") > 0


LONG = {"lengths_q": (150,), "lengths_k": (900,)}
CACHE = Kind(window_right=True, varlen_q=True, seqused_k=True)


@pytest.mark.parametrize(
    "case",
    [
        Case(PLAIN, **LONG, heads_k=2, seed=1),
        Case(CAUSAL, lengths_q=(900,), lengths_k=(860,), seed=2),
        Case(WINDOW, **LONG, left=300, right=40, seed=3),
        Case(CACHE, (70, 0, 100, 30), (800,) * 4, unused_k=(0, 600, 310, 800), heads_k=2, seed=4),
        Case(CAUSAL, **LONG, group=2, seed=6),
    ],
    ids=["dense", "causal", "window", "cache", "group"],
)
def test_dS_of_a_part_of_the_keys_at_once(case: Case) -> None:
    """The bits are those of dS of all keys, where no group is split."""
    machine = Machine(num_sms=4, schedule="adversarial")
    args = case.arguments()
    keys = args["k"].shape[-3]
    rows = padded_rows(args["q"].shape[-3], case.batch, case.kind.varlen_q)
    at_once = 2 // case.batch or 1  # blocks of keys that keep two clusters busy
    limit = ds_tiles.nbytes(1, rows, at_once * ds_tiles.CLUSTER_KEYS)
    limit += 4 * rows * target().head_dim
    parts = -(-keys // (at_once * ds_tiles.CLUSTER_KEYS))
    names, found = launches(case, limit, machine)
    assert names == ["dkdv", "ds_dq"] * (parts * case.heads_k * case.group)
    names, expected = launches(case, 2**30, machine)
    assert names == ["dkdv", "ds_dq"]
    assert same(found, expected) or case.group > 1
