"""FlashMLA's functions give the operator's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_attn
from cute_attn.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from tests.ops.mla_cases import ARCH, Case, assert_agrees


@pytest.mark.parametrize(
    ("queries", "page_size", "fp8"),
    [
        (1, 64, False),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((2, 64, False), (1, 1, False), (2, 3, False), (1, 64, True))
        ),
    ],
)
def test_the_calls_of_its_readme(queries: int, page_size: int, fp8: bool) -> None:
    args = Case(
        (70, 3), queries=queries, heads=4, page_size=page_size, head_axis=True, scale=576**-0.5,
        fp8=fp8,
    )  # fmt: skip
    given = args.arguments()
    q = torch.cat([given["q_nope"], given["q_rope"]], -1)
    with cute_attn.emulated(ARCH):
        plan, num_splits = get_mla_metadata(given["cache_seqlens"], queries * 4, 1)
        o, lse = flash_mla_with_kvcache(
            q, given["kv_cache"], given["block_table"], given["cache_seqlens"], 512, plan,
            num_splits, causal=True,
        )  # fmt: skip
    assert o.shape == (2, queries, 4, 512) and lse.shape == (2, 4, queries)
    assert_agrees(given, o, lse)


def test_a_cache_in_fp8_is_taken() -> None:
    """Here of no sequence, which needs no kernel."""
    given = Case((70,), heads=4, head_axis=True, fp8=True).arguments()
    q = torch.cat([given["q_nope"], given["q_rope"]], -1)[:0]
    table, lengths = given["block_table"][:0], given["cache_seqlens"][:0]
    with cute_attn.emulated(ARCH):
        o, lse = flash_mla_with_kvcache(q, given["kv_cache"], table, lengths, 512)
        assert o.shape == (0, 1, 4, 512) and lse.shape == (0, 4, 1)
        other = given["kv_cache"].float().to(torch.float8_e5m2)
        with pytest.raises(TypeError, match=r"k_cache has dtype torch.float8_e5m2, must be q's"):
            flash_mla_with_kvcache(q, other, table, lengths, 512)


def test_what_has_no_kernel_is_refused() -> None:
    given = Case((70,), head_axis=True).arguments()
    q = torch.cat([given["q_nope"], given["q_rope"]], -1)
    shared = q, given["kv_cache"], given["block_table"], given["cache_seqlens"], 512
    with cute_attn.emulated(ARCH):
        with pytest.raises(NotImplementedError, match="is_fp8_kvcache is True"):
            flash_mla_with_kvcache(*shared, is_fp8_kvcache=True)
        with pytest.raises(NotImplementedError, match="indices is given"):
            flash_mla_with_kvcache(*shared, indices=given["block_table"])
        for name in (
            "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length",
            "extra_topk_length",
        ):  # fmt: skip
            with pytest.raises(NotImplementedError, match=f"{name} is given, must be None"):
                flash_mla_with_kvcache(*shared, **{name: given["cache_seqlens"]})
        with pytest.raises(ValueError, match="q has shape"):
            flash_mla_with_kvcache(q[0], *shared[1:])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(1, 1, 4, 512).bfloat16()}, ValueError, r"q has shape .* k_cache, 576"),
        ({"q": torch.zeros(1, 1, 4, 576)}, TypeError, "q has dtype torch.float32"),
        ({"k_cache": None}, TypeError, "k_cache must be a torch.Tensor, got NoneType"),
        ({"k_cache": torch.zeros(2, 64, 1, 576)}, TypeError, "k_cache has dtype torch.float32"),
        ({"k_cache": torch.zeros(2, 64, 2, 576).bfloat16()}, ValueError, "k_cache has shape"),
        ({"k_cache": torch.zeros(0, 64, 1, 576).bfloat16()}, ValueError, "k_cache has 0 pages"),
        ({"head_dim_v": None}, TypeError, "head_dim_v must be an int, got NoneType"),
    ],
)
def test_messages_have_its_names(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = Case((70,), heads=4, head_axis=True).arguments()
    call = {
        "q": torch.cat([given["q_nope"], given["q_rope"]], -1), "k_cache": given["kv_cache"],
        "block_table": given["block_table"], "cache_seqlens": given["cache_seqlens"],
        "head_dim_v": 512,
    }  # fmt: skip
    with cute_attn.emulated(ARCH), pytest.raises(error, match=message):
        flash_mla_with_kvcache(**call | change)
