"""How the backward splits the query heads of a K/V head among clusters."""

from __future__ import annotations

from typing import Any

import pytest

from cute_attn.kernels.attention import configs
from cute_attn.kernels.attention.heuristics import fixed_order, fixed_orders, num_splits

CLUSTERS = 37  # of four CTAs, on 148 SMs


def of_row(way: str, arch: str, head_dim: int) -> dict[str, Any]:
    row = configs.backward(way, arch, head_dim)
    return {"tile": row.tile[:2], "costs": row.costs}


SM100 = of_row("backward_dkdv", "sm_100a", 256)
FUSED = {head_dim: of_row("backward_fused", "sm_90a", head_dim) for head_dim in (64, 128)}


def splits(seqlen: int, heads: int = 32, heads_k: int = 2, batch: int = 1, **more: Any) -> int:
    options = {"window_left": None, "window_right": None, "clusters": CLUSTERS, **SM100} | more
    return num_splits(
        seqlen_q=seqlen, seqlen_k=seqlen, batch=batch, heads=heads, heads_k=heads_k, **options
    )


@pytest.mark.parametrize("right", [None, 0])
@pytest.mark.parametrize("seqlen", [700, 2048, 8192])
def test_few_heads_of_keys_fill_the_gpu(seqlen: int, right: int | None) -> None:
    found = splits(seqlen, window_right=right)
    assert 16 % found == 0
    blocks = -(-seqlen // 256) * 2
    waves = -(-blocks * found // CLUSTERS)
    assert blocks * found / (waves * CLUSTERS) >= 0.6  # of the clusters have work


def test_what_fills_the_gpu_is_not_split() -> None:
    assert splits(32768) == 1
    assert splits(2048, batch=32) == 1
    assert splits(8192, heads=4, heads_k=4, batch=8) == 1


def test_a_group_is_split_evenly_or_not_at_all() -> None:
    assert splits(300, heads=7, heads_k=1) in (1, 7)
    assert splits(300, heads=3, heads_k=3) == 1


def test_a_short_window_is_not_worth_partial_sums() -> None:
    assert splits(8192, heads=4, heads_k=2, window_left=0, window_right=0) == 1


@pytest.mark.parametrize("empty", ["seqlen", "batch", "heads", "clusters"])
def test_nothing_to_do(empty: str) -> None:
    given = {"seqlen": 300, "batch": 2, "heads": 4} | {empty: 0}
    assert splits(**given, heads_k=2) == 1


def test_windows_that_hide_everything() -> None:
    """Rows before the first key: no block is seen."""
    assert num_splits(
        seqlen_q=5000, seqlen_k=10, batch=1, heads=4, heads_k=1, window_left=0, window_right=0,
        clusters=CLUSTERS, **SM100,
    ) in (1, 2, 4)  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "heads", "heads_k", "seqlen", "in_any_order", "in_order"),
    [
        (128, 32, 4, 1024, 1, 1), (128, 32, 4, 4096, 1, 1), (128, 32, 4, 16384, 1, 8),
        (128, 16, 2, 4096, 1, 1), (128, 16, 4, 16384, 1, 4), (128, 8, 1, 16384, 4, 8),
    ],
)  # fmt: skip
def test_fused_causal_groups_are_split_where_it_was_the_fastest(
    head_dim: int, heads: int, heads_k: int, seqlen: int, in_any_order: int, in_order: int
) -> None:
    """16k tokens on an H100, see docs/log/sm90_backward.md. Splits made no
    dense call faster by more than noise."""
    for order, expected in (("any", in_any_order), ("alternating", in_order)):
        assert expected == splits(
            seqlen, heads=heads, heads_k=heads_k, batch=16384 // seqlen, window_right=0,
            clusters=132, order=order, **FUSED[head_dim],
        )  # fmt: skip


@pytest.mark.parametrize("order", ["any", "rising"])
@pytest.mark.parametrize("seqlen", [512, 4096, 16384])
def test_fused_dense_groups_that_fill_the_gpu_are_not_split(seqlen: int, order: str) -> None:
    found = splits(
        seqlen, heads=16, heads_k=4, batch=16384 // seqlen, clusters=132, order=order,
        **FUSED[128],
    )  # fmt: skip
    assert found == 1


@pytest.mark.parametrize(("most", "expected"), [(None, 8), (8, 8), (7, 4), (4, 4), (1, 1), (0, 1)])
def test_splits_have_memory_for_their_partial_sums(most: int | None, expected: int) -> None:
    assert expected == splits(
        2048, heads=8, heads_k=1, clusters=132, **FUSED[128], most_splits=most,
    )  # fmt: skip


def test_fused_groups_fill_an_idle_gpu() -> None:
    """One K/V head with 16 tiles of keys: 132 SMs."""
    options = {"clusters": 132, **FUSED[128]}
    assert splits(2048, heads=8, heads_k=1, **options) == 8
    assert splits(2048, heads=8, heads_k=1, window_left=256, window_right=0, **options) == 8


@pytest.mark.parametrize("row", configs.FORWARD.values(), ids=lambda row: f"{row.head_dim}")
def test_tiles_of_few_rows_have_as_many_keys(row: configs.ForwardRow):
    """A row's bits would depend on the tile otherwise."""
    assert row.few is None or row.few.n == row.tile.n


def order(head_dim: int, seqlen_q: int, group: int, **more: bool) -> str:
    window = {"window_left": False, "window_right": True, "batch_invariant": False} | more
    packed = window.pop("packed", False)
    found = fixed_order(head_dim, packed=packed, seqlen_q=seqlen_q, group=group, **window)
    assert found in fixed_orders(head_dim, **window)  # of which plans name the kernels
    return found


def test_orders_of_additions_are_those_that_were_the_fastest() -> None:
    """See docs/log/sm90_backward.md."""
    assert [order(64, length, 8) for length in (2048, 4096, 8192, 16384)] == [
        "alternating", "by_head", "by_head", "alternating",
    ]  # fmt: skip
    assert order(64, 4096, 1) == order(64, 4096, 8, packed=True) == "alternating"
    assert order(128, 4096, 8) == order(128, 16384, 4) == "alternating"


@pytest.mark.parametrize("change", ["window_left", "batch_invariant", "window_right"])
def test_only_causal_calls_have_other_orders_than_rising(change: str) -> None:
    assert order(64, 4096, 8, **{change: change != "window_right"}) == "rising"
