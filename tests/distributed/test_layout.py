"""Which tokens ranks hold, and whether calls together compute what every query sees, once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_attn.distributed.exchange import Rows
from cute_attn.distributed.gather import Route
from cute_attn.distributed.layout import LAYOUTS, Layout, Pass, Rectangle, Window
from cute_attn.distributed.used import Used
from cute_attn.reference.attention import visible


def whole(layout: Layout, window: Window) -> Tensor:
    """Which tokens see which, `[total, total]`."""
    found = torch.zeros(layout.total, layout.total, dtype=torch.int32)
    for first, length in zip(layout.bounds, layout.lengths, strict=False):
        rows = slice(first, first + length)
        found[rows, rows] = visible(length, length, False, tuple(window)).int()
    return found


def tokens(ranges: Any) -> Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(*r) for r in ranges)])


def add(found: Tensor, of: Pass, queries: Tensor, keys: Tensor) -> None:
    """Count the pairs that a call computes."""
    end_q = end_k = 0
    for q, q_end, k, k_end in of.rectangles:
        assert end_q <= q < q_end and end_k <= k < k_end
        end_q, end_k = q_end, k_end
        mask = visible(q_end - q, k_end - k, False, tuple(of.window)).int()
        found[queries[q:q_end, None], keys[None, k:k_end]] += mask


LENGTHS = st.lists(st.integers(0, 23), min_size=1, max_size=4)
WINDOWS = st.builds(
    Window, st.none() | st.integers(0, 12), st.none() | st.just(0) | st.integers(0, 9)
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    world = draw(st.integers(1, 5))
    lengths = draw(LENGTHS)
    kind = draw(st.sampled_from((*LAYOUTS, "ranges")))
    if kind != "ranges":
        return Layout.of(kind, lengths, world)
    total = sum(lengths)
    cuts = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=9))})
    found: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for a, b in itertools.pairwise(cuts):
        found[draw(st.integers(0, world - 1))].append((a, b))
    return Layout.of(found, lengths, world)


@given(layouts(), WINDOWS)
def test_calls_of_all_stages_are_what_queries_see(layout: Layout, window: Window) -> None:
    expected = whole(layout, window)
    of_forward, of_backward = torch.zeros_like(expected), torch.zeros_like(expected)
    for rank in range(layout.world):
        needs = layout.needs(rank, window)
        queries = tokens(layout.ranges[rank])
        for stage, keys in ((needs.local, queries), (needs.remote, tokens(needs.ranges))):
            for of in stage.forward:
                assert len({r.q for r in of.rectangles}) == len(of.rectangles)
                for rectangle in of.rectangles:  # their keys may overlap
                    add(of_forward, Pass((rectangle,), of.window), queries, keys)
            for of in stage.backward:
                add(of_backward, of, queries, keys)
    assert torch.equal(of_forward, expected) and torch.equal(of_backward, expected)


@given(layouts(), WINDOWS)
def test_messages_bring_all_keys(layout: Layout, window: Window) -> None:
    routes = [Route(layout, rank, window) for rank in range(layout.world)]
    for rank, route in enumerate(routes):
        keys = tokens(route.needs.ranges)
        found = torch.full_like(keys, -1)
        if route.own is not None:
            held, rows = (tokens(x.ranges) for x in route.own)
            found[rows] = tokens(layout.ranges[rank])[held]
        for other, received in route.received.items():
            sent = routes[other].sent[rank]
            found[tokens(received.ranges)] = tokens(layout.ranges[other])[tokens(sent.ranges)]
        assert torch.equal(found, keys)
        assert all(rank in routes[other].received for other in route.sent)


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
def test_rows_serve_a_gradient_after_a_first_call_in_a_mode(mode: Any) -> None:
    rows = Rows([(2 * i, 2 * i + 1) for i in range(9)])
    with mode():
        rows.take(torch.randn(1, 18, 3))
    x = torch.randn(1, 18, 3, requires_grad=True)
    rows.take(x).sum().backward()
    assert x.grad is not None and x.grad[0, :, 0].tolist() == [1.0, 0.0] * 9


@pytest.mark.parametrize("count", [1, 2, 9])
def test_messages_are_contiguous(count: int) -> None:
    """lse `[batch, rows, heads, 1]` is channels-last, which operations of torch preserve."""
    x = torch.randn(3, 4, 18).transpose(1, 2)[..., None]
    found = Rows([(2 * i, 2 * i + 1) for i in range(count)]).take(x)
    assert found.is_contiguous() and torch.equal(found, x[:, : 2 * count : 2])


@given(layouts(), st.booleans())
def test_hops_are_what_queries_see(layout: Layout, causal: bool) -> None:
    found = torch.zeros(layout.total, layout.total, dtype=torch.int32)
    for rank in range(layout.world):
        for other in range(layout.world):
            for of in layout.hop(rank, other, causal):
                add(found, of, tokens(layout.ranges[rank]), tokens(layout.ranges[other]))
    assert torch.equal(found, whole(layout, Window(None, 0 if causal else None)))


@given(layouts(), st.booleans(), st.booleans(), st.booleans(), st.data())
def test_used_rows_are_what_queries_see(
    layout: Layout, causal: bool, equal: bool, backward: bool, data: st.DataObject
) -> None:
    """Used queries see used keys, with the last query of a sequence aligned to its last key."""
    window = Window(None, 0 if causal else None)
    numbers = st.lists(
        st.integers(-1, 40), min_size=len(layout.lengths), max_size=len(layout.lengths)
    )
    used_q = torch.tensor(data.draw(numbers), dtype=torch.int32)
    used = Used(used_q, used_q if equal else torch.tensor(data.draw(numbers), dtype=torch.int32))
    expected, found = (torch.zeros(layout.total, layout.total, dtype=torch.int32) for _ in "ab")
    for start, length, of_q, of_k in zip(layout.bounds, layout.lengths, *used, strict=False):
        q, k = (min(max(int(x), 0), length) for x in (of_q, of_k))
        queries, keys = torch.arange(q)[:, None], torch.arange(k)[None]
        seen = keys <= queries + k - q if causal else torch.ones(q, k, dtype=torch.bool)
        expected[start : start + q, start : start + k] = seen.int()
    for rank in range(layout.world):
        route = Route(layout, rank, window, whole=not equal)
        held = tokens(layout.ranges[rank])
        for stage, local in ((route.needs.local, True), (route.needs.remote, False)):
            keys = held if local else tokens(route.needs.ranges)
            for of in stage.backward if backward else stage.forward:
                counts = route.counts(of, used, keys, local=local)
                assert counts is not None and counts[0][-1] == counts[1][-1] == 0
                for r, q, k in zip(of.rectangles, *(x.tolist() for x in counts), strict=False):
                    if q and k:
                        part = Pass((Rectangle(r.q, r.q + q, r.k, r.k + k),), of.window)
                        add(found, part, held, keys)
    assert torch.equal(found, expected)


@given(layouts(), st.integers(1, 3))
def test_a_layout_of_parts_holds_the_same_rows(layout: Layout, parts: int) -> None:
    cut = layout.part(parts)
    for rank in range(layout.world):
        own = torch.cat([tokens(cut.ranges[rank * parts + i]) for i in range(parts)])
        assert torch.equal(own, tokens(layout.ranges[rank]))


def test_zigzag_takes_one_call_a_hop() -> None:
    layout = Layout.of("zigzag", (64, 1, 37), 4)
    for rank in range(4):
        assert all(len(layout.hop(rank, other, causal=True)) <= 1 for other in range(4))
        needs = layout.needs(rank, Window(None, 0))
        assert len(needs.local.forward) <= 1 and len(needs.remote.forward) <= 1


def test_zigzag_balances_causal_work() -> None:
    layout = Layout.of("zigzag", (160,), 4)
    mask = whole(layout, Window(None, 0))
    work = {int(mask[tokens(ranges)].sum()) for ranges in layout.ranges}
    assert max(work) - min(work) <= 20 * 2


def test_documents_stay_whole() -> None:
    """Ranks have equal numbers of tokens, and about equal work, and exchange few keys."""
    lengths = (16, 900, 120, 300, 700, 88, 412, 1003, 61, 500)
    for world, most in ((2, 2), (4, 15)):  # over 4 ranks, two sequences are cut into 8 chunks
        layout = Layout.of("documents", lengths, world)
        mask = whole(layout, Window(None, 0))
        work = [int(mask[tokens(ranges)].sum()) for ranges in layout.ranges]
        assert {layout.tokens(rank) for rank in range(world)} == {sum(lengths) // world}
        assert max(work) * world < 1.1 * sum(work)
        cut = sum(len(layout.pieces(rank)) for rank in range(world)) - len(lengths)
        assert cut <= most


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("spiral", "layout is 'spiral', must be one of"),
        ([[(0, 4)]], "layout lists the ranges of 1 ranks, must be 2"),
        ([[(0, 4)], [(5, 8)]], "gives token 4 of 8 to no rank"),
        ([[(0, 5)], [(4, 8)]], "gives token 4 of 8 to two ranks"),
        ([[(0, 4)], [(4, 7)]], "gives token 7 of 8 to no rank"),
        ([[(4, 8), (0, 2)], [(2, 4)]], "gives rank 0 the range .0, 2. after token 8"),
    ],
)
def test_wrong_layouts_are_refused(layout: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.of(layout, (8,), 2)
