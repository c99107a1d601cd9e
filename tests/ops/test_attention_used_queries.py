"""Queries in sequences of one length, of which `seqused_q` says how many are used."""

from __future__ import annotations

import math

import pytest
import torch

import cute_attn

from .attention_cases import Case, Kind, Machine, Target, assert_agrees, on_target, run, same
from .attention_gradient_cases import Upstream, assert_gradients_agree, gradients

TARGETS = [
    Target("sm_90a", 64),
    *(pytest.param(Target("sm_90a", n), marks=pytest.mark.slow) for n in (128, 192, 256)),
    pytest.param(Target("sm_100a", 256), marks=pytest.mark.slow),
]
WIDE = [pytest.param(Target("sm_90a", n), marks=pytest.mark.slow) for n in (320, 512, 576)]
CAUSAL = Kind(window_right=True, seqused_q=True, seqused_k=True)
DRAFTS = Kind(
    window_right=True, seqused_q=True, seqused_k=True, sink=torch.float32, packed_heads=4
)  # fmt: skip


@pytest.mark.parametrize("on", [*TARGETS, *WIDE])
def test_agrees_with_the_reference(on: Target):
    """Counts of used queries that are less than none, none, some, and more than all. Unused rows
    hold NaN."""
    with on_target(on):
        many = Case(
            CAUSAL, (200,) * 4, (210,) * 4, (203, 70, 0, -5), (0, 9, 30, 0), heads_k=1, group=2
        ).arguments()  # fmt: skip
        assert_agrees(many, *run(many, on=Machine(num_sms=3, schedule="adversarial")))


@pytest.mark.slow
@pytest.mark.parametrize("on", [*TARGETS, *WIDE])
def test_drafts_of_a_decode_step(on: Target):
    with on_target(on):
        few = Case(
            DRAFTS, (5,) * 4, (300,) * 4, (5, 1, 0, 4), (10, 0, 299, 100), heads_k=1, group=4
        ).arguments()  # fmt: skip
        first = run(few)
        assert_agrees(few, *first)
        pieces = run(few, on=Machine(num_sms=5), num_splits=0)
        assert_agrees(few, *pieces)
        padded = few | {name: few[name].clone() for name in ("q", "k", "v")}
        padded["q"][0].fill_(math.inf)
        assert same(few, first, run(padded))


@pytest.mark.slow
@pytest.mark.parametrize("on", [*TARGETS, *WIDE])
def test_more_rows_than_a_tile_has(on: Target):
    """Heads share the rows of a tile, so the used tokens of a sequence fill several tiles."""
    with on_target(on):
        args = Case(
            DRAFTS, (70,) * 4, (90,) * 4, (0, 7, 70, -5), (0, 9, 30, 0), heads_k=1, group=4
        ).arguments()  # fmt: skip
        assert_agrees(args, *run(args))


@pytest.mark.slow
@pytest.mark.parametrize("on", TARGETS)
def test_gradients(on: Target):
    """The gradients of unused queries are 0, whatever the gradient of o holds there."""
    with on_target(on):
        args = Case(
            CAUSAL, (140,) * 3, (150,) * 3, (150, 75, -5), (3, 60, 0), heads_k=1, group=2
        ).arguments()  # fmt: skip
        do, dlse = Upstream().gradients(args)
        for deterministic in (True, False):
            found = gradients(args, do, dlse, deterministic=deterministic)
            assert_gradients_agree(args, found, do, dlse)


@pytest.mark.slow
@pytest.mark.parametrize("on", TARGETS)
def test_gradients_of_sinks_and_log_sums(on: Target):
    kind = Kind(seqused_q=True, sink=torch.float32, window_left=True, softcap=True)
    with on_target(on):
        args = Case(kind, (140,) * 2, (150,) * 2, (139, 3), left=60, softcap=5.0).arguments()
        do, dlse = Upstream(of_lse=True).gradients(args)
        assert_gradients_agree(args, gradients(args, do, dlse), do, dlse)


def test_without_keys_the_sinks_gradient_is_that_of_used_queries():
    """No kernel runs: lse is the sink in each row that is used."""
    q = torch.zeros(2, 3, 1, 64, dtype=torch.bfloat16)
    k = torch.zeros(2, 0, 1, 64, dtype=torch.bfloat16)
    sink = torch.zeros(1, requires_grad=True)
    used = torch.tensor([2, -7], dtype=torch.int32)
    with cute_attn.emulated("sm_90a"):
        _, lse = cute_attn.flash_attn_varlen_func(
            q, k, k, seqused_q=used, learnable_sink=sink, return_lse=True
        )
        assert lse is not None
        lse.backward(torch.tensor([[[1.0, 10.0, math.nan]], [[math.nan] * 3]]))
    assert sink.grad is not None and sink.grad.tolist() == [11.0]
