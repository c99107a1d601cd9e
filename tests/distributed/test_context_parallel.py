"""Attention over ranks agrees with float64, as attention on one GPU does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ..ops.attention_cases import FULL, assert_agrees
from ..ops.attention_gradient_cases import assert_gradients_agree
from .ranks import INPUTS, Ranks, ranks

LISTED = [[(5, 40), (70, 71)], [(0, 5), (40, 70), (71, 90)]]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as found:
        yield found


def inputs(
    lengths: tuple[int, ...],
    *,
    heads: int = 2,
    heads_k: int = 1,
    dim: int = 64,
    batch: int | None = 1,
    sink: bool = False,
    seed: int = 0,
    **options: Any,
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """(arguments, do, dlse); packed sequences if batch is None."""
    g = torch.Generator().manual_seed(seed)
    rows = (sum(lengths),) if batch is None else (batch, *lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    args: dict[str, Any] = {
        "q": draw(*rows, heads, dim).bfloat16(),
        "k": draw(*rows, heads_k, dim).bfloat16(),
        "v": draw(*rows, heads_k, dim).bfloat16(),
        **options,
    }
    if sink:
        args["learnable_sink"] = draw(heads)
    do = draw(*rows, heads, dim).bfloat16()
    return args, do, draw(*rows[:-1], heads, rows[-1])


def check(
    group: Ranks,
    args: dict[str, Any],
    do: Tensor | None,
    dlse: Tensor | None,
    lengths: tuple[int, ...],
    **plan: Any,
) -> dict[str, Tensor]:
    """Every rank's whole results agree with float64 by the error rule. Returns them."""
    plan |= lengths_of(args["q"], lengths)
    results = group.call("attention", args=args, do=do, dlse=dlse, **plan)
    return check_results(results, args, do, dlse, lengths)


def lengths_of(q: Tensor, lengths: tuple[int, ...]) -> dict[str, Any]:
    if q.dim() == 3:
        return {"cu_seqlens": [0, *accumulate(lengths)]}
    return {"seqlen": lengths[0]}


def check_results(
    results: list[dict[str, Tensor]],
    args: dict[str, Any],
    do: Tensor | None,
    dlse: Tensor | None,
    lengths: tuple[int, ...],
) -> dict[str, Tensor]:
    """As `check`, of the results of all ranks."""
    whole = {name: x for name, x in args.items() if name != "deterministic"}
    if args["q"].dim() == 3:
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        whole["cu_seqlens_q"] = whole["cu_seqlens_k"] = bounds
    found: dict[str, Tensor] = results[0]
    assert_agrees(whole, found["o"], found["lse"])
    if do is not None:
        gradients = {name: found[name] for name in INPUTS if name in found}
        assert_gradients_agree(whole, gradients, do, dlse)
    for other in results[1:]:
        assert all(
            torch.equal(other[name].nan_to_num(), x.nan_to_num()) for name, x in found.items()
        )
    return found


CASES: dict[str, dict[str, Any]] = {
    "causal": {"lengths": (90,), "causal": True, "sink": True},
    "packed": {"lengths": (33, 0, 1, 50), "batch": None, "causal": True},
    "batch": {"lengths": (70,), "batch": 2, "causal": True},
    "dense": {"lengths": (70,), "batch": 2, "sink": True},
    "window": {"lengths": (90,), "window_size": (20, 0)},
    "both-sides": {"lengths": (50, 40), "batch": None, "window_size": (9, 7)},
    "right": {"lengths": (90,), "window_size": (None, 7)},
    "capped": {"lengths": (90,), "causal": True, "softcap": 3.0},
    "heads": {"lengths": (90,), "heads": 4, "heads_k": 2, "causal": True},
}
PACKED = {"lengths": (33, 0, 17, 40), "batch": None}
# Sequences that use some tokens: (queries, keys); one number is for both.
USED: dict[str, dict[str, Any]] = {
    "equal": {**PACKED, "causal": True, "used": (20, 0, 17, 31)},
    "equal-window": {**PACKED, "window_size": (9, 0), "used": (33, 5, 2, 40)},
    "more-queries": {**PACKED, "causal": True, "used": ((30, 0, 17, 33), (12, 3, 0, 40))},
    "more-keys": {**PACKED, "window_size": (20, 0), "used": ((3, 0, 99, 9), (33, 3, 2, 40))},
    "queries": {**PACKED, "causal": True, "used": ((5, 0, 17, 39), None), "sink": True},
    "keys": {**PACKED, "used": (None, (20, 0, 1, 25)), "sink": True},
}
EMULATED = {
    **CASES,
    "wide": {**CASES["heads"], "dim": 128, "deterministic": True},
    "widest": {**CASES["causal"], "dim": 256},
}


def check_case(
    group: Ranks, mode: str | None, case: dict[str, Any], layout: Any, *, emulated: bool
) -> None:
    options = dict(case)
    lengths = options.pop("lengths")
    if (used := options.pop("used", None)) is not None:
        options |= seqused(*(used if isinstance(used[0], tuple | None) else (used, used)))
    if layout is LISTED and sum(lengths) != 90:
        pytest.skip("the listed ranges are of 90 tokens")
    if mode == "heads":
        options["heads_k"] = 2
    if not emulated:
        options["dim"] = 256  # what stands in has no other
    args, do, dlse = inputs(lengths, **options)
    check(group, args, do, dlse, lengths, layout=layout, mode=mode, emulated=emulated)


def seqused(queries: Any, keys: Any) -> dict[str, Any]:
    """The arguments seqused_q and seqused_k, which are one tensor if the numbers are equal."""
    used_q, used_k = (
        None if x is None else torch.tensor(x, dtype=torch.int32) for x in (queries, keys)
    )
    return {"seqused_q": used_q, "seqused_k": used_q if queries == keys else used_k}


LAYOUTS = pytest.mark.parametrize("layout", ["contiguous", "zigzag", LISTED], ids=["c", "z", "l"])
MODES = pytest.mark.parametrize("mode", ["gather", "ring", "heads", None])


@pytest.mark.in_turn("layout")
@LAYOUTS
@pytest.mark.parametrize("case", CASES)
@MODES
def test_every_mode(two: Ranks, mode: str | None, case: str, layout: Any) -> None:
    """With float64 in place of the kernels."""
    check_case(two, mode, CASES[case], layout, emulated=False)


@pytest.mark.parametrize("mode", ["gather", "ring", "heads"])
@pytest.mark.parametrize("left", [60, None])
def test_transposed_tensors(two: Ranks, left: int | None, mode: str) -> None:
    """q, k and v that are `[batch, heads, seqlen, head_dim]` in memory."""
    args, do, dlse = inputs((90,), heads_k=2, dim=256, window_size=(left, 0))
    plan: dict[str, Any] = {"layout": "contiguous", "mode": mode, "emulated": False}
    check(two, args, do, dlse, (90,), heads_first=True, **plan)


def test_lse_of_several_heads_of_a_batch(two: Ranks) -> None:
    args, do, dlse = inputs((22,), batch=2, heads=4, heads_k=4, dim=256, causal=True)
    check(two, args, do, dlse, (22,), layout="zigzag", mode="heads", emulated=False)


@pytest.mark.in_turn("mode")
@LAYOUTS
@pytest.mark.parametrize("case", USED)
@MODES
def test_used_tokens(two: Ranks, mode: str | None, case: str, layout: Any) -> None:
    check_case(two, mode, USED[case], layout, emulated=False)


@pytest.mark.slow
@LAYOUTS
@pytest.mark.parametrize("case", USED)
@pytest.mark.parametrize("mode", ["gather", "heads"])
def test_used_tokens_emulated(two: Ranks, mode: str | None, case: str, layout: Any) -> None:
    check_case(two, mode, USED[case], layout, emulated=True)


@pytest.mark.slow
@LAYOUTS
@pytest.mark.parametrize("case", EMULATED)
@MODES
def test_every_mode_emulated(two: Ranks, mode: str | None, case: str, layout: Any) -> None:
    check_case(two, mode, EMULATED[case], layout, emulated=True)


@pytest.mark.parametrize("emulated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_decoding_over_a_split_cache(two: Ranks, emulated: bool) -> None:
    shape: dict[str, Any] = {"heads_k": 2, "batch": 2, "dim": 64 if emulated else 256}
    args, _, _ = inputs((1,), heads=4, sink=True, **shape)
    cache, _, _ = inputs((90,), seed=1, **shape)
    args |= {"k": cache["k"], "v": cache["v"]}
    used = torch.tensor([40, 40], dtype=torch.int32), torch.tensor([50, 0], dtype=torch.int32)
    own = (slice(0, 40), slice(40, 90))
    shared: dict[str, Any] = {"args": args, "own": own, "emulated": emulated}
    results = two.call("decoded", {"used": used[0]}, {"used": used[1]}, **shared)
    for o, lse in results:
        whole = {**args, "seqused_k": used[0] + used[1]}
        assert_agrees(whole, o, lse)
        assert torch.equal(o, results[0][0])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", LISTED], ids=["c", "z", "listed"])
def test_shards_are_all_tokens(two: Ranks, layout: Any) -> None:
    x = torch.randn(2, 90, 3)
    results = two.call("sharded", x=x, layout=layout, seqlen=90)
    for own, whole, positions, tokens in results:
        assert torch.equal(whole, x) and own.shape[1] == tokens
        assert torch.equal(x[:, positions], own)
    lengths = (0, 31, 59)
    results = two.call("sharded", x=x[0], layout=layout, cu_seqlens=[0, *accumulate(lengths)])
    of_sequences = torch.cat([torch.arange(n) for n in lengths])
    assert torch.equal(torch.cat([r[2] for r in results]).sort()[0], of_sequences.sort()[0])
    assert all(torch.equal(whole, x[0]) for _, whole, _, _ in results)


def test_ranks_that_disagree_are_named(two: Ranks) -> None:
    for of_rank, message in (
        (({"seqlen": 8}, {"seqlen": 9}), r"rank 1 plans with lengths (9,), and rank 0 with (8,)"),
        (
            ({"seqlen": 8, "layout": "contiguous"}, {"seqlen": 8}),
            "rank 1 plans with layout zigzag, and rank 0 with contiguous",
        ),
        (({"seqlen": 8, "mode": "ring"}, {"seqlen": 8}), "rank 1 plans with mode None"),
    ):
        for said in two.call("raised", *of_rank):
            assert said.startswith("ValueError: ") and message in said
    one, _, _ = inputs((4,), heads=2)
    other, _, _ = inputs((4,), heads=4)
    for said in two.call("refused", {"args": one}, {"args": other}, seqlen=8):
        assert "rank 1 calls flash attention with heads, heads_k, head_dim" in said
        assert "(4, 64, 1, 64), and rank 0 with (2, 64, 1, 64)" in said
    other = one | {name: one[name].to(torch.float8_e4m3fn) for name in ("k", "v")}
    for said in two.call("refused", {"args": one}, {"args": other}, seqlen=8):
        assert "rank 1 calls flash attention with dtype of k and v torch.float8_e4m3fn" in said


def test_wrong_arguments_are_named(two: Ranks) -> None:
    for of_plan, message in (
        ({}, "seqlen and cu_seqlens are both given or both None"),
        ({"seqlen": -1}, "seqlen is -1"),
        ({"cu_seqlens": [1, 2]}, "cu_seqlens is .1, 2., must begin with 0"),
        ({"cu_seqlens": "abc"}, "TypeError: cu_seqlens is 'abc', must hold ints"),
        ({"seqlen": 8, "layout": 5}, "TypeError: layout is 5, must be one of"),
        ({"seqlen": 8, "mode": "star"}, "mode is 'star'"),
        ({"cu_seqlens": 8}, "TypeError: cu_seqlens is 8, must hold ints"),
        ({"cu_seqlens": [0, 2.5, 8]}, "TypeError: cu_seqlens is [0, 2.5, 8], must hold ints"),
        ({"seqlen": 8, "layout": None}, "TypeError: layout is None, must be one of"),
        ({"seqlen": 8, "layout": [(0, 4), (4, 8)]}, "TypeError: layout is [(0, 4), (4, 8)], must"),
        ({"seqlen": 2, "layout": [[(0, 1.5)], [(1, 2)]]}, "TypeError: layout is [[(0, 1.5)], ["),
    ):
        (said, _) = two.call("raised", **of_plan)
        assert message.replace(".1, 2.", "[1, 2]") in said
    args, _, _ = inputs((4,))
    for changes, message in (
        ({"q": args["q"][:, :3]}, "q has shape [1, 3, 2, 64] on rank 0, must have 4 dimensions"),
        ({"num_splits": 2}, "NotImplementedError: num_splits is given with cp"),
        ({"out": args["q"]}, "NotImplementedError: out is given with cp"),
        ({"window_size": (-3, None)}, "NotImplementedError: window_size is (-3, None) with cp"),
        ({"causal": 2.0}, "TypeError: causal must be a bool"),
        ({"window_size": ("3", 0)}, "TypeError: window_size holds a str, must be ints"),
        ({"q": args["q"].float()}, "TypeError: q has dtype torch.float32, must be one of"),
        ({"k": args["k"].half()}, "TypeError: k has dtype torch.float16, must be torch.bfloat16"),
        ({"v": args["v"].expand(1, 4, 2, 64)}, "ValueError: v has shape [1, 4, 2, 64], must be"),
        ({"learnable_sink": torch.zeros(3)}, "ValueError: learnable_sink has shape [3], must be"),
        ({"softmax_scale": math.nan}, "ValueError: softmax_scale is nan, must be positive"),
    ):
        (said, _) = two.call("refused", args=args | changes, seqlen=8)
        assert message in said
    (said, _) = two.call("refused", args=args, cu_seqlens=[0, 8])
    assert "q has shape" in said
    for changes, message in (
        ({"q": None}, "TypeError: q must be a torch.Tensor, got NoneType"),
        ({"group": 3}, "TypeError: group is int, must be a ProcessGroup"),
        ({"seqused_k": [4]}, "TypeError: seqused_k must be a torch.Tensor, got list"),
        ({"learnable_sink": torch.zeros(3)}, "ValueError: learnable_sink has shape [3], must be"),
        ({"num_splits": -1}, "ValueError: num_splits is -1, must be at least 0"),
    ):
        assert all(message in said for said in two.call("refused_decode", args=args | changes))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gather", "ring"])
def test_a_mesh_of_tokens_and_heads(mode: str) -> None:
    with ranks(4, timeout=600) as four:
        args, do, dlse = inputs((90,), heads=4, heads_k=2, causal=True, sink=True)
        check(four, args, do, dlse, (90,), layout="zigzag", mode=mode, mesh=(2, 2))
        packed = (33, 0, 1, 50)
        args, do, dlse = inputs(packed, heads=4, heads_k=2, batch=None, causal=True)
        check(four, args, do, dlse, packed, layout="zigzag", mode=mode, mesh=(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4, 8])
def test_more_ranks(world: int) -> None:
    """With a backward on three ranks, whose modes have it in common with more ranks."""
    with ranks(world, timeout=900) as group:  # ranks compile different kernels meanwhile
        for mode in ("gather", "ring"):
            args, do, dlse = inputs((5 * world + 3,), causal=True)
            upstream = (do, dlse) if world == 3 else (None, None)
            check(group, args, *upstream, (5 * world + 3,), layout="zigzag", mode=mode)
        lengths = (2, 4 * world, 0, 9)
        args, do, dlse = inputs(lengths, batch=None, window_size=(11, 0))
        check(group, args, None, None, lengths, layout="contiguous", mode=None)


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 8])
def test_gradients_on_more_ranks(world: int) -> None:
    """With float64 in place of the kernels."""
    with ranks(world, timeout=300) as group:
        for mode, layout, lengths in (
            ("gather", "zigzag", (75,)),
            ("ring", "zigzag", (75,)),
            ("heads", "contiguous", (75,)),
            ("gather", "documents", (2, 40, 0, 31)),
        ):
            packed = len(lengths) > 1
            args, do, dlse = inputs(
                lengths, batch=None if packed else 1, causal=True, dim=256, heads=8, heads_k=8
            )
            check(group, args, do, dlse, lengths, layout=layout, mode=mode, emulated=False)


@pytest.mark.parametrize("mode", ["gather", pytest.param("heads", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way", [pytest.param("compile", marks=pytest.mark.slow), "checkpoint", "buffer"]
)
def test_layers_that_torch_wraps(two: Ranks, way: str, mode: str) -> None:
    """torch.compile breaks its graph at the call, activation checkpointing calls twice, and hooks
    may keep saved tensors in a buffer."""
    args, do, _ = inputs((22,), dim=256, heads_k=2)
    shared: dict[str, Any] = {"args": args, "do": do, "mode": mode, "seqlen": 22}
    for (plain, _), (other, graphs) in zip(
        *(two.call("wrapped", way=x, **shared) for x in ("", way)), strict=True
    ):
        assert all(torch.equal(x, y) for x, y in zip(plain, other, strict=True))
        # The layer's operations before and after the call are compiled.
        assert graphs == ([["mul", "sin"], ["cos", "mul"]] if way == "compile" else [])


@pytest.mark.slow
def test_nothing_grows(two: Ranks) -> None:
    args, do, _ = inputs((10,), heads_k=2)
    modes = ("gather", "ring", "heads")
    assert two.call("growth", args=args, do=do, modes=modes, steps=8) == ["", ""]


@settings(max_examples=100 if FULL else 12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    layout=st.sampled_from(("contiguous", "zigzag", "documents")),
    mode=st.sampled_from(("gather", "ring")),
    left=st.none() | st.integers(0, 40),
    causal=st.booleans(),
    group=st.sampled_from((1, 2, 4)),
    seed=st.integers(0, 2**31),
)
def test_any_lengths(
    two: Ranks, lengths: list[int], layout: str, mode: str, left: int | None, causal: bool,
    group: int, seed: int,
) -> None:  # fmt: skip
    """Packed sequences of any lengths, masks and head ratios."""
    options: dict[str, Any] = {"causal": causal, "window_size": (left, None), "seed": seed}
    args, do, dlse = inputs(tuple(lengths), heads=group, batch=None, dim=256, **options)
    check(two, args, do, dlse, tuple(lengths), layout=layout, mode=mode, emulated=False)


WINDOWS = st.one_of(
    st.just((None, None)),
    st.just((None, 0)),
    st.tuples(st.none() | st.integers(0, 40), st.none() | st.integers(0, 9)),
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[tuple[int, ...], bool, Any, str | None]:
    """(lengths, whether sequences are packed, layout, mode) of a plan of two ranks."""
    packed = draw(st.booleans())
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3 if packed else 1))
    layout: Any = draw(st.sampled_from(("contiguous", "zigzag", "documents", "ranges")))
    if layout == "ranges":
        total = sum(lengths)
        cuts = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=9))})
        layout = [[], []]
        for part in itertools.pairwise(cuts):
            layout[draw(st.integers(0, 1))].append(part)
    return tuple(lengths), packed, layout, draw(st.sampled_from((None, "gather", "ring", "heads")))


@st.composite
def calls(draw: st.DrawFn, lengths: tuple[int, ...], packed: bool) -> dict[str, Any]:
    """A call with the plan's lengths."""
    heads_k = 2 * draw(st.integers(1, 2))
    args, do, dlse = inputs(
        lengths, heads=heads_k * draw(st.integers(1, 2)), heads_k=heads_k, dim=256,
        batch=None if packed else draw(st.integers(1, 3)), sink=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)), window_size=draw(WINDOWS),
        softcap=draw(st.sampled_from((0.0, 0.0, 9.0))), deterministic=draw(st.booleans()),
    )  # fmt: skip
    dtype = draw(st.sampled_from((torch.bfloat16, torch.float16)))
    args |= {name: args[name].to(dtype) for name in ("q", "k", "v")}
    leaves = draw(st.lists(st.sampled_from(("q", "k", "v")), max_size=3, unique=True))
    upstream = (do.to(dtype), dlse if draw(st.booleans()) else None) if leaves else (None, None)
    return {
        "args": args,
        **dict(zip(("do", "dlse"), upstream, strict=True)),
        "heads_first": draw(st.booleans()),
        "leaves": leaves,
    }


@pytest.mark.slow
@settings(max_examples=400 if FULL else 40, deadline=None)
@given(st.data())
def test_any_calls_that_share_a_plan(two: Ranks, data: st.DataObject) -> None:
    """Calls of any shapes, dtypes and strides, with and without gradients."""
    lengths, packed, layout, mode = data.draw(plans())
    found = data.draw(st.lists(calls(lengths, packed), min_size=1, max_size=3))
    found += found[:1]  # which the plan has kept
    of_plan = lengths_of(found[0]["args"]["q"], lengths)
    results = two.call("in_turn", calls=found, layout=layout, mode=mode, **of_plan)
    for call, *of_ranks in zip(found, *results, strict=True):
        check_results(of_ranks, call["args"], call["do"], call["dlse"], lengths)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mode", ["gather", "ring", "heads"])
def test_fp8_keys(two: Ranks, mode: str, layout: str) -> None:
    lengths = (33, 9, 1, 50)
    args, _, _ = inputs(lengths, batch=None, dim=128, heads_k=2, causal=True)
    args |= {name: args[name].to(torch.float8_e4m3fn) for name in ("k", "v")}
    check(two, args, None, None, lengths, layout=layout, mode=mode)


@pytest.mark.slow
def test_deterministic_calls_repeat(two: Ranks) -> None:
    args, do, dlse = inputs((130,), dim=128, heads=4, causal=True, deterministic=True, sink=True)
    runs = [
        check(two, args, do, dlse, (130,), layout="zigzag", mode=mode)
        for mode in ("gather", "gather", "ring", "ring")
    ]
    for one, other in (runs[:2], runs[2:]):
        assert all(torch.equal(other[name], x) for name, x in one.items())


@pytest.mark.slow
def test_a_rank_with_a_wrong_shape_ends_the_others() -> None:
    """The rank that is wrong raises at once, and the other when the group's time is over."""
    with ranks(2, timeout=5) as group:
        args, _, _ = inputs((4,))
        wrong = args | {"q": args["q"][:, :3]}
        ours, theirs = group.outcomes("refused", {"args": args}, {"args": wrong}, seqlen=8)
        assert "q has shape [1, 3, 2, 64] on rank 1" in theirs
        assert "rank 1" in str(ours) or "imed out" in str(ours)
