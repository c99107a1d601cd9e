"""Keys and values in pages give the same bits as in one piece, whatever else the pages hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import cute_attn
from cute_attn.kernels.attention.spec import GATHERED
from cute_attn.ops.attention import plan_attention

from .attention_cases import (
    CACHE,
    FULL,
    SM90_HEAD_DIMS,
    Case,
    Kind,
    Machine,
    Target,
    assert_agrees,
    on_target,
    run,
    same,
)

ARCH = "sm_90a"
PLAIN = Kind(seqused_k=True)
CAUSAL = Kind(seqused_k=True, window_right=True)
WINDOW = Kind(
    dtype=torch.float16, seqused_k=True, window_left=True, window_right=True, softcap=True
)
SPARE = 2  # pages of no sequence, and entries of the table behind a sequence's pages


def in_pages(args: dict[str, Any], page_size: int, seed: int) -> dict[str, Any]:
    """The call's arguments, with k and v in pages in random order. Unused rows hold NaN, and
    entries of the table without a used key hold no page's number."""
    generator = torch.Generator().manual_seed(seed)
    used = args["seqused_k"].clamp(0, args["k"].shape[1]).tolist()
    counts = [-(-n // page_size) for n in used]
    order = torch.randperm(sum(counts) + SPARE, generator=generator).tolist()
    table = torch.full((len(used), max(counts) + SPARE), -(2**20), dtype=torch.int32)
    paged = args | {"page_table": table}
    for name in ("k", "v"):
        rows = args[name]
        pages = torch.full((len(order), page_size, *rows.shape[2:]), math.nan, dtype=rows.dtype)
        free = iter(order)
        for sequence, (count, length) in enumerate(zip(counts, used, strict=True)):
            for j in range(count):
                page = table[sequence, j] = next(free)
                part = rows[sequence, j * page_size : min((j + 1) * page_size, length)]
                pages[page, : len(part)] = part
        paged[name] = pages
    return paged


def of_kind(kind: Kind, lengths: tuple[int, ...], queries: int, **more: Any) -> Case:
    most = max(lengths)
    return Case(
        kind,
        lengths_q=(queries,) * len(lengths),
        lengths_k=(most,) * len(lengths),
        unused_k=tuple(most - n for n in lengths),
        **{"group": kind.packed_heads} | more,
    )


def assert_same_in_pages(case: Case, page_size: int, on: Machine) -> None:
    args = case.arguments()
    whole = run(args, on=on)
    assert_agrees(args, *whole)
    assert same(args, whole, run(in_pages(args, page_size, case.seed), on=on))


@pytest.mark.parametrize(
    ("on", "page_size"),
    [
        pytest.param(Target(ARCH, 128), 16, marks=pytest.mark.slow),
        pytest.param(Target(ARCH, 256), 64, marks=pytest.mark.slow),
        (Target("sm_100a"), 16),
    ],
    ids=str,
)
def test_a_few_calls(on: Target, page_size: int):
    with on_target(on):
        assert_same_in_pages(of_kind(CAUSAL, (150, 0, 33), 20), page_size, Machine())


@pytest.mark.slow
@pytest.mark.parametrize(
    "on",
    [*(Target(ARCH, head_dim) for head_dim in SM90_HEAD_DIMS), Target("sm_100a")],
    ids=str,
)
@settings(max_examples=150 if FULL else 25)
@given(
    kind=st.sampled_from([PLAIN, CAUSAL, WINDOW, CACHE]),
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3).filter(any).map(tuple),
    queries=st.integers(1, 60),
    pages=st.sampled_from([1, 2, 3, 4, 5, 8, 16]),
    left=st.integers(0, 200),
    seed=st.integers(0, 2**31),
    schedule=st.sampled_from(["random", "adversarial"]),
)
def test_pages_change_no_bit(
    on: Target,
    kind: Kind,
    lengths: tuple[int, ...],
    queries: int,
    pages: int,
    left: int,
    seed: int,
    schedule: str,
):
    with on_target(on):
        case = of_kind(kind, lengths, queries, left=left, seed=seed)
        assert_same_in_pages(case, 16 * pages, Machine(num_sms=3, schedule=schedule, seed=seed))


# The dimensions of a pool in memory, of which K and V take one index of 2, and one layer of 3.
POOLS = {
    "K before V": "2 pages rows heads dim",
    "K beside V in a page": "pages 2 rows heads dim",
    "K beside V in a page, heads first": "pages 2 heads rows dim",
    "K beside V in a token": "pages rows heads 2 dim",
    "K beside V in a token, heads first": "pages heads rows 2 dim",
    "heads before pages": "heads pages rows 2 dim",
    "all layers in a page": "pages 3 2 rows heads dim",
}


def in_a_pool(paged: dict[str, Any], pool: str) -> dict[str, Any]:
    """The call's arguments, with K and V as views of one tensor, whose other elements are NaN."""
    sizes = dict(zip(("pages", "rows", "heads", "dim"), paged["k"].shape, strict=True))
    names = pool.split()
    memory = torch.full([sizes.get(n) or int(n) for n in names], math.nan, dtype=paged["k"].dtype)
    for name in ("k", "v"):
        taken = {"2": "kv".index(name), "3": 1}
        view = memory[tuple(taken.get(n, slice(None)) for n in names)]
        left = [n for n in names if n in sizes]
        paged = paged | {name: view.permute([left.index(n) for n in sizes]).copy_(paged[name])}
    return paged


KERNELS = pytest.mark.parametrize(
    "on", [Target("sm_100a"), pytest.param(Target(ARCH, 64), marks=pytest.mark.slow)], ids=str
)


@KERNELS
def test_a_pool_may_have_any_strides(on: Target):
    with on_target(on):
        args = in_pages(of_kind(CAUSAL, (150, 0, 33), 2, heads_k=2).arguments(), 48, 0)
        first = run(args)
        for pool in POOLS.values():
            other = in_a_pool(args, pool)
            assert torch.equal(other["v"].nan_to_num(), args["v"].nan_to_num())
            assert same(args, first, run(other)), pool


@KERNELS
def test_entries_without_a_used_key_may_hold_anything(on: Target):
    with on_target(on):
        args = in_pages(of_kind(CAUSAL, (150, 0, 33), 2).arguments(), 48, 0)
        first, table = run(args), args["page_table"]
        for no_page in (-1, 2**31 - 1, -(2**31)):
            other = args | {"page_table": torch.where(table < 0, no_page, table)}
            assert same(args, first, run(other)), no_page


@KERNELS
def test_a_table_may_be_a_part_of_a_larger_one(on: Target):
    with on_target(on):
        args = in_pages(of_kind(CAUSAL, (150, 0, 33), 2).arguments(), 48, 0)
        table = args["page_table"]
        larger = torch.full((table.shape[0], table.shape[1] + 3), -1, dtype=torch.int32)
        larger[:, 1:-2] = table
        assert same(args, run(args), run(args | {"page_table": larger[:, 1:-2]}))


def good() -> dict[str, Any]:
    return in_pages(of_kind(PLAIN, (5, 40), 3).arguments(), 16, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seqused_k": None}, ValueError, "page_table is given, it needs seqused_k"),
        ({"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)}, ValueError, "with cu_seqlens_k"),
        ({"page_table": torch.zeros(2, 3)}, TypeError, "page_table has dtype torch.float32"),
        (
            {"page_table": torch.zeros(3, 3, dtype=torch.int32)},
            ValueError,
            r"page_table has shape \[3, 3\], must be \[2, 3\]",
        ),
        ({"page_table": torch.zeros(6, dtype=torch.int32)}, ValueError, "must be \\[batch, max"),
        (
            {"page_table": torch.zeros(3, 2, dtype=torch.int32).T},
            ValueError,
            r"page_table has strides \(1, 2\), must have contiguous rows",
        ),
        (
            {name: torch.zeros(9, 0, 1, 256).bfloat16() for name in "kv"},
            ValueError,
            "k has pages of 0 rows, must have at least 1",
        ),
        (
            {name: torch.zeros(0, 16, 1, 256).bfloat16() for name in "kv"},
            ValueError,
            "k has 0 pages, must have at least 1",
        ),
        ({"v": torch.zeros(9, 16, 1, 256).bfloat16()}, ValueError, "v has shape"),
        (
            {"page_table": torch.zeros(1, dtype=torch.int32).expand(2, 2**26)},
            ValueError,
            "page_table has 67108864 pages of 16 rows, must be fewer than 1073741824 rows",
        ),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str):
    with cute_attn.emulated(ARCH), pytest.raises(error, match=message):
        cute_attn.flash_attn_varlen_func(**good() | change)


@pytest.mark.parametrize("page_size", [1, 8, 24])
def test_a_kernel_may_take_multiples_of_16_alone(page_size: int):
    args = in_pages(of_kind(PLAIN, (5, 40), 3).arguments(), page_size, 0)
    message = f"k has pages of {page_size} rows; on sm_100a the kernel takes multiples of 16"
    with (
        cute_attn.emulated("sm_100a") as emulator,
        pytest.raises(NotImplementedError, match=message),
    ):
        cute_attn.flash_attn_varlen_func(**args)
    assert not emulator.report.launches


class Passing(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_a_mode(**args: Any) -> Any:
    with Passing():
        return cute_attn.flash_attn_varlen_func(**args)


ROUTES: dict[str, Callable[..., Any]] = {
    "called": cute_attn.flash_attn_varlen_func,
    "under a mode": under_a_mode,
    "registered": lambda window_size, **args: torch.ops.cute_attn.flash_attn(**args),
    "compiled": torch.compile(
        cute_attn.flash_attn_varlen_func, fullgraph=True, backend="aot_eager"
    ),
}


@pytest.mark.parametrize("route", ROUTES)
def test_pages_take_no_gradient(route: str):
    """Before anything is launched. As many pages as sequences could be taken for rows of these."""
    args = good() | {"page_table": torch.tensor([[1], [0]], dtype=torch.int32)}
    args |= {name: args[name][:2] for name in "kv"} | {"return_lse": True}
    args["q"].requires_grad_()
    for arch in (ARCH, "sm_100a"):
        # What dynamo meets while it traces is a RuntimeError that names it.
        with (
            cute_attn.emulated(arch) as emulator,
            pytest.raises((NotImplementedError, RuntimeError), match="page_table has no backward"),
        ):
            ROUTES[route](**args)
        assert not emulator.report.launches


def test_the_plan_depends_on_what_divides_pages_and_tiles():
    def rows(page_size: int, arch: str, head_dim: int) -> set[int]:
        planned = plan_attention(arch, head_dim=head_dim, seqused_k=True, page_size=page_size)
        return {spec.page_rows for _, spec in planned}

    assert [rows(n, ARCH, 64) for n in (32, 96, 64, 256)] == [{32}, {32}, {64}, {128}]
    assert {r for n in (1, 2, 8, 16, 17, 48, 100) for r in rows(n, ARCH, 128)} == {GATHERED}
    assert [rows(n, ARCH, 128) for n in (32, 256)] == [{32}, {64}]
    assert [rows(n, ARCH, 256) for n in (64, 160)] == [{64}, {32}]
    assert [rows(n, "sm_100a", 256) for n in (16, 96, 256)] == [{16}, {32}, {64}]
