"""Keys and values in pages of any size on Hopper: rows that TMA cannot load together are gathered.

`test_attention_pages` has what holds for pages of every size. Here are the sizes that only the
gather serves, beside every option of the operator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_attn
from cute_attn import compat
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention import heuristics
from cute_attn.kernels.attention.spec import GATHERED
from cute_attn.ops.attention import plan_attention

from .attention_cases import (
    CACHE,
    FULL,
    SM90_HEAD_DIMS,
    Kind,
    Machine,
    Target,
    assert_agrees,
    on_target,
    run,
    same,
)
from .test_attention_pages import (
    CAUSAL,
    PLAIN,
    POOLS,
    WINDOW,
    assert_same_in_pages,
    in_a_pool,
    in_pages,
    of_kind,
)

ARCH = "sm_90a"
SINK = Kind(seqused_k=True, window_right=True, sink=torch.bfloat16, packed_heads=2)
LENGTHS = (150, 0, 33)

pytestmark = pytest.mark.usefixtures("short_pieces")


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one K/V tile, so that short sequences have pieces too."""
    monkeypatch.setattr(heuristics, "LEAST_PIECE", 1)


def test_a_decode_step_from_pages_of_one_token():
    """Pieces, a sink, a log-sum-exp, packed queries and sequences without keys: one launch."""
    with on_target(Target(ARCH, 128)):
        args = of_kind(CACHE, LENGTHS, 1, group=2).arguments()
        paged = in_pages(args, 1, 0)
        emulator = Emulator(num_sms=4, schedule="adversarial")
        with cute_attn.emulated(ARCH, emulator):
            first = cute_attn.flash_attn_varlen_func(**paged, num_splits=0)
        assert not emulator.report.findings
        assert len(emulator.report.launches) == 1
        assert_agrees(args, *first)


@pytest.mark.slow
def test_prefill_from_pages_of_five_tokens():
    """Tiles of three warpgroups, a causal mask, and entries without a page."""
    with on_target(Target(ARCH, 64)):
        args = of_kind(CAUSAL, LENGTHS, 130).arguments()
        assert_agrees(args, *run(in_pages(args, 5, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", SM90_HEAD_DIMS)
@pytest.mark.parametrize("kind", [CAUSAL, WINDOW], ids=["causal", "window"])
def test_prefill_of_two_and_three_warpgroups(head_dim: int, kind: Kind):
    """More than a warpgroup's rows: warpgroups trade registers with the gathering warps."""
    with on_target(Target(ARCH, head_dim)):
        assert_same_in_pages(of_kind(kind, (150, 70), 140, left=60), 7, Machine())


def test_all_sizes_of_small_pages_share_a_kernel():
    sizes = (1, 2, 3, 4, 8, 17, 40)
    for head_dim in SM90_HEAD_DIMS:
        plans = [
            plan_attention(
                ARCH, head_dim=head_dim, head_dim_v=Target(ARCH, head_dim).head_dim_v,
                seqused_k=True, page_size=size, num_splits=0,
            )
            for size in sizes
        ]  # fmt: skip
        assert all(plan == plans[0] for plan in plans)
        assert {getattr(spec, "page_rows", GATHERED) for _, spec in plans[0]} == {GATHERED}


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", SM90_HEAD_DIMS)
@settings(max_examples=150 if FULL else 20)
@given(
    kind=st.sampled_from([PLAIN, CAUSAL, WINDOW, CACHE, SINK]),
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3).filter(any).map(tuple),
    queries=st.integers(1, 60),
    page_size=st.integers(1, 80),
    left=st.integers(0, 200),
    seed=st.integers(0, 2**31),
    schedule=st.sampled_from(["random", "adversarial"]),
)
def test_any_size_changes_no_bit(
    head_dim: int,
    kind: Kind,
    lengths: tuple[int, ...],
    queries: int,
    page_size: int,
    left: int,
    seed: int,
    schedule: str,
):
    with on_target(Target(ARCH, head_dim)):
        case = of_kind(kind, lengths, queries, left=left, seed=seed)
        assert_same_in_pages(case, page_size, Machine(num_sms=3, schedule=schedule, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", SM90_HEAD_DIMS)
@settings(max_examples=60 if FULL else 8)
@given(
    kind=st.sampled_from([CACHE, replace(CACHE, sink=None), SINK]),
    lengths=st.lists(st.integers(0, 700), min_size=2, max_size=4).filter(any).map(tuple),
    page_size=st.integers(1, 80),
    num_splits=st.sampled_from([0, 0, 3]),
    heads_k=st.integers(1, 2),
    seed=st.integers(0, 2**31),
)
def test_parts_of_the_keys(
    head_dim: int,
    kind: Kind,
    lengths: tuple[int, ...],
    page_size: int,
    num_splits: int,
    heads_k: int,
    seed: int,
):
    """Pieces and splits give the bits that they give without pages."""
    with on_target(Target(ARCH, head_dim)):
        args = of_kind(kind, lengths, 1, heads_k=heads_k, seed=seed).arguments()
        on = Machine(num_sms=5, schedule="adversarial", seed=seed)
        whole = run(args, on=on, num_splits=num_splits)
        assert_agrees(args, *whole)
        paged = run(in_pages(args, page_size, seed), on=on, num_splits=num_splits)
        assert same(args, whole, paged)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 6])
def test_a_pool_may_have_any_strides(page_size: int):
    with on_target(Target(ARCH, 64)):
        args = in_pages(of_kind(CAUSAL, LENGTHS, 2, heads_k=2).arguments(), page_size, 0)
        first = run(args)
        for pool in POOLS.values():
            assert same(args, first, run(in_a_pool(args, pool))), pool


@pytest.mark.slow
def test_entries_without_a_used_key_may_hold_anything():
    with on_target(Target(ARCH, 128)):
        args = in_pages(of_kind(CAUSAL, LENGTHS, 2).arguments(), 7, 0)
        first, table = run(args), args["page_table"]
        for no_page in (-1, 2**31 - 1, -(2**31)):
            other = args | {"page_table": torch.where(table < 0, no_page, table)}
            assert same(args, first, run(other)), no_page


@pytest.mark.slow
@pytest.mark.parametrize("no_page", [-1, 2**31 - 1])
def test_keys_before_the_window_need_no_page(no_page: int):
    """A server frees the pages that no query sees any more; TMA reads them as zeros too."""
    kind = replace(CAUSAL, window_left=True)
    with on_target(Target(ARCH, 64)):
        args = of_kind(kind, (150, 70, 150), 1, left=20).arguments()
        paged = in_pages(args, 1, 0)
        first, table = run(paged), paged["page_table"].clone()
        for sequence, length in enumerate((150, 70, 150)):
            table[sequence, : length - 21] = no_page
        assert same(args, first, run(paged | {"page_table": table}))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 3])
def test_a_cache_is_appended_to_in_any_pages(page_size: int):
    """FlashAttention 2's function, against a cache in one piece."""
    lengths = torch.tensor([70, 5], dtype=torch.int32)
    q, k, v = (randn(2, 1, 2, 64, seed=seed) for seed in range(3))
    caches = [randn(2, 90, 2, 64, seed=seed) for seed in (3, 4)]
    table = torch.randperm(2 * 90 // page_size).view(2, -1).int()
    pages = [torch.empty(2 * 90 // page_size, page_size, 2, 64).bfloat16() for _ in caches]
    for pool, cache in zip(pages, caches, strict=True):
        pool[table.long()] = cache.unflatten(1, (-1, page_size))
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
    with cute_attn.emulated(ARCH):
        whole = compat.flash_attn_with_kvcache(q, *caches, k, v, **options)
        paged = compat.flash_attn_with_kvcache(q, *pages, k, v, block_table=table, **options)
    assert torch.equal(whole, paged)
    for pool, cache in zip(pages, caches, strict=True):
        assert torch.equal(pool[table.long()].flatten(1, 2), cache)


@pytest.mark.slow
def test_a_cache_of_any_length_takes_indices_of_sequences():
    """Each sequence of the cache is a page: here of 75 rows."""
    cache = [randn(3, 75, 2, 64, seed=seed) for seed in (3, 4)]
    q, lengths = randn(2, 1, 2, 64), torch.tensor([70, 5], dtype=torch.int32)
    index = torch.tensor([2, 0], dtype=torch.int32)
    with cute_attn.emulated(ARCH):
        o = compat.flash_attn_with_kvcache(
            q, *cache, cache_seqlens=lengths, cache_batch_idx=index, causal=True
        )
        taken = [x[index.long()] for x in cache]
        whole = compat.flash_attn_with_kvcache(q, *taken, cache_seqlens=lengths, causal=True)
    assert torch.equal(o, whole)
