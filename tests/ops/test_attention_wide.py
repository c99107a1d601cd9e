"""Heads of 512 columns, and the latent cache's widths, on Hopper: a pair of CTAs has a tile.

The sweeps over head dimensions have these widths too: `test_attention_sm90`, pages, pieces, splits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention import heuristics, table
from cute_attn.kernels.attention.configs import forward
from cute_attn.kernels.attention.sm90.forward import Sm90Forward
from cute_attn.ops.attention import plan_attention
from cute_attn.reference.attention import attention_in_low_precision, attention_reference

from .attention_cases import (
    CACHE,
    CAUSAL,
    Case,
    Machine,
    Target,
    assert_agrees,
    on_target,
    run,
    same,
)
from .test_attention_pages import in_pages, of_kind

ARCH = "sm_90a"
PAIRS = (512, 576)  # head_dims whose columns a pair of CTAs shares
WIDE = (320, *PAIRS)


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one K/V tile, so that short sequences have pieces too."""
    monkeypatch.setattr(heuristics, "LEAST_PIECE", 1)


@pytest.mark.parametrize(
    "head_dim", [512, *(pytest.param(n, marks=pytest.mark.slow) for n in WIDE if n != 512)]
)
def test_a_causal_call_agrees_with_the_reference(head_dim: int):
    """More than a tile of queries and of keys, and two query heads of a K/V head."""
    with on_target(Target(ARCH, head_dim)):
        args = Case(CAUSAL, (140,), (150,), heads_k=1, group=2).arguments()
        assert_agrees(args, *run(args, on=Machine(num_sms=4, schedule="adversarial")))


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(
    "head_dim", [512, *(pytest.param(n, marks=pytest.mark.slow) for n in WIDE if n != 512)]
)
def test_a_decode_step_in_pages_is_one_launch(head_dim: int):
    """Pieces, a sink, a log-sum-exp, packed queries, and sequences without keys. Unused rows of
    pages hold NaN."""
    with on_target(Target(ARCH, head_dim)):
        args = of_kind(replace(CACHE, packed_heads=2), (300, 3, 0, 130), 1, group=2).arguments()
        args["max_seqlen_q"] = 1
        emulator = Emulator(num_sms=6, schedule="adversarial")
        with cute_attn.emulated(ARCH, emulator):
            found = cute_attn.flash_attn_varlen_func(**in_pages(args, 64, 0), num_splits=0)
        (launch,) = emulator.report.launches
        assert launch.grid[0] == 6
        assert not emulator.report.findings
        assert_agrees(args, *found)


@pytest.mark.slow
@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("head_dim", WIDE)
@pytest.mark.parametrize("queries", [1, 40])
def test_sums_of_pieces_by_any_schedule(head_dim: int, queries: int):
    """One tile of 64 rows or two, whose sums several CTAs share."""
    with on_target(Target(ARCH, head_dim)):
        args = of_kind(replace(CACHE, packed_heads=2), (700, 64), queries, group=2).arguments()
        args["max_seqlen_q"] = queries
        first = run(args, on=Machine(num_sms=10), num_splits=0)
        assert_agrees(args, *first)
        for seed in range(3):
            on = Machine(num_sms=10, seed=seed, schedule="random")
            assert same(args, first, run(args, on=on, num_splits=0))


def latent(head_dim: int, tokens: int, heads: int) -> dict[str, Any]:
    """Queries of all heads over one K/V head, whose v is a view of k."""
    columns_v = Target(ARCH, head_dim).head_dim_v
    generator = torch.Generator().manual_seed(head_dim)
    q = torch.randn(1, tokens, heads, head_dim, generator=generator).bfloat16()
    k = torch.randn(1, tokens, 1, head_dim, generator=generator).bfloat16()
    return {"q": q, "k": k, "v": k[..., :columns_v], "softmax_scale": 192**-0.5}


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", WIDE)
def test_v_may_be_a_view_of_k(head_dim: int):
    args = latent(head_dim, 150, 2)
    with cute_attn.emulated(ARCH, Emulator(num_sms=4)) as emulator:
        o, _ = cute_attn.flash_attn_func(**args, causal=True)
        assert not emulator.report.findings
    exact, _ = attention_reference(**args, causal=True)
    plain, _ = attention_in_low_precision(**args, causal=True)
    assert (o - exact).norm() <= 2 * (plain - exact).norm()


@pytest.mark.parametrize("head_dim", PAIRS)
def test_a_training_step_is_refused_by_name(head_dim: int):
    """Before the forward is launched."""
    args = latent(head_dim, 5, 1)
    args["q"].requires_grad_()
    message = rf"no attention backward for head_dim {head_dim}.* there is: head_dim 64 on sm_90a"
    with cute_attn.emulated(ARCH, Emulator()) as emulator:
        with pytest.raises(NotImplementedError, match=message):
            cute_attn.flash_attn_func(**args)
        assert not emulator.report.launches


@pytest.mark.parametrize("head_dim", WIDE)
def test_fp8_is_refused_by_name(head_dim: int):
    args = latent(head_dim, 5, 1)
    k, v = (args[name].to(torch.float8_e4m3fn) for name in "kv")
    with (
        cute_attn.emulated(ARCH, Emulator()),
        pytest.raises(NotImplementedError, match=f"head_dim {head_dim} and head_dim_v"),
    ):
        cute_attn.flash_attn_func(args["q"], k, v)


def test_blackwell_refuses_512_by_name():
    args = latent(512, 5, 1)
    message = "no attention forward for head_dim 512 on sm_100a"
    with (
        cute_attn.emulated("sm_100a", Emulator()),
        pytest.raises(NotImplementedError, match=message),
    ):
        cute_attn.flash_attn_func(args["q"], args["k"], args["v"])


def test_both_ctas_of_a_pair_have_all_columns_between_them():
    """CTA 1 has the last columns; columns that both have are zeros in its Q."""
    for head_dim, head_dim_v in table.shapes("forward", (ARCH,)):
        row = forward(ARCH, head_dim, head_dim_v)
        assert row.columns % 64 == row.columns_v % 64 == 0
        assert row.columns_v * row.cluster == head_dim_v
        (_, spec), *_ = plan_attention(ARCH, head_dim=head_dim, head_dim_v=head_dim_v)
        kernel = Sm90Forward(spec)  # type: ignore[arg-type]
        assert kernel.zeros == row.cluster * row.columns - head_dim
        assert kernel.zeros in ({0, 64} if row.cluster > 1 else {0})
