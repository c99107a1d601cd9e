"""Decode with num_splits of 0 on Hopper: long sequences are cut into pieces."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_attn
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention import heuristics, table
from cute_attn.kernels.attention.spec import Sm90ForwardSpec
from cute_attn.ops.attention import call, forward, plan_attention

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
from .test_attention_pages import in_pages, of_kind

ARCH = "sm_90a"
LENGTHS = (700, 3, 0, 130)
PAGE = 16
WINDOWED = Kind(
    varlen_q=True, seqused_k=True, window_left=True, window_right=True, packed_heads=2, lse=False
)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one K/V tile, so that short sequences have pieces too."""
    monkeypatch.setattr(heuristics, "LEAST_PIECE", 1)


def launched(emulator: Emulator) -> list[str]:
    return [launch.kernel for launch in emulator.report.launches]


@pytest.mark.slow  # test_attention_wide has a quick one
@pytest.mark.parametrize("queries", [1, 50, 100])
def test_one_launch_agrees_with_the_reference_and_repeats(queries: int):
    """With a sink, a log-sum-exp, sequences without keys and without queries, in one warpgroup of
    rows, in two, and in two tiles. The bits depend on the lengths and the number of CTAs, not on
    the schedule."""
    with on_target(Target(ARCH, 64)):
        args = of_kind(replace(CACHE, packed_heads=2), LENGTHS, queries, group=2).arguments()
        args["max_seqlen_q"] = queries
        emulator = Emulator(num_sms=5, schedule="adversarial")
        with cute_attn.emulated(ARCH, emulator):
            first = cute_attn.flash_attn_varlen_func(**args, num_splits=0)
        (launch,) = emulator.report.launches
        assert launch.block[0] == (256 if queries == 1 else 384)
        assert not emulator.report.findings
        assert_agrees(args, *first)
        for seed in range(2):
            on = Machine(num_sms=5, seed=seed)
            assert same(args, first, run(args, on=on, num_splits=0))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", SM90_HEAD_DIMS)
@settings(max_examples=150 if FULL else 20)
@given(
    kind=st.sampled_from([CACHE, WINDOWED, replace(CACHE, sink=None, lse=False)]),
    lengths=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 1, 2, 40, 64, 100]), st.sampled_from([0, 1, 64, 300, 900])
        ),
        min_size=2,
        max_size=70,
    ),
    heads_k=st.integers(1, 2),
    left=st.sampled_from([10, 200]),
    num_sms=st.sampled_from([1, 2, 5, 20]),
    schedule=st.sampled_from(["random", "adversarial"]),
    seed=st.integers(0, 2**31),
)
def test_any_lengths(
    head_dim: int, kind: Kind, lengths: list[tuple[int, int]], heads_k: int, left: int,
    num_sms: int, schedule: str, seed: int,
):  # fmt: skip
    if len(lengths) > 8:  # keep the emulation short
        lengths = [(min(queries, 1), min(keys, 300)) for queries, keys in lengths]
    queries, keys = zip(*lengths, strict=True)
    most = max(1, *keys)
    with on_target(Target(ARCH, head_dim)):
        case = Case(
            kind, queries, (most,) * len(keys), (), tuple(most - n for n in keys), heads_k, 2,
            left=left, seed=seed,
        )  # fmt: skip
        args = case.arguments() | {"max_seqlen_q": max(queries)}
        on = Machine(num_sms=num_sms, schedule=schedule, seed=seed % 1000)
        if sum(queries):
            assert_agrees(args, *run(args, on=on, num_splits=0))


# -- lengths that change between launches, as under a captured graph


@st.composite
def steps_of_lengths(draw: st.DrawFn, batch: int, most: int) -> list[list[int]]:
    """Lengths of `batch` sequences for some steps, also none, and all keys in one sequence."""
    lengths = st.sampled_from([0, 0, 1, 1, PAGE, PAGE + 1, most // 3, most])
    one = st.integers(0, batch - 1).map(lambda i: [most * (i == j) for j in range(batch)])
    any_lengths = st.lists(lengths, min_size=batch, max_size=batch)
    drawn = draw(st.lists(any_lengths | one | st.just([0] * batch), min_size=2, max_size=4))
    return [list(step) for step in drawn]


def in_one_size(args: dict[str, Any], pages: int, columns: int) -> dict[str, Any]:
    """A call's arguments with `pages` pages and `columns` columns of the page table."""
    args = dict(args)
    for name, count in (("k", pages), ("v", pages)):
        more = count - len(args[name])
        args[name] = torch.nn.functional.pad(args[name], (0,) * 7 + (more,), value=math.nan)
    more = columns - args["page_table"].shape[1]
    args["page_table"] = torch.nn.functional.pad(args["page_table"], (0, more), value=-7)
    return args


Arguments = dict[str, Any]


def of_steps(
    steps: list[list[int]], heads_k: int, seed: int
) -> tuple[list[Arguments], list[Arguments]]:
    """The arguments of each step, without pages; and in pages, as tensors of the same shapes, with
    other pages in each step."""
    kind = Kind(window_right=True, seqused_k=True, packed_heads=2)
    whole = [
        of_kind(kind, tuple(step), 1, heads_k=heads_k, seed=seed + i).arguments()
        for i, step in enumerate(steps)
    ]
    calls = [in_pages(args, PAGE, seed=i) for i, args in enumerate(whole)]
    pages = max(len(args["k"]) for args in calls)
    columns = max(args["page_table"].shape[1] for args in calls)
    return whole, [in_one_size(args, pages, columns) for args in calls]


def assert_follows_lengths(steps: list[list[int]], heads_k: int, on: Machine, seed: int) -> None:
    """Launches of one kernel that share their buffers and counters, as a graph's replays do."""
    whole, calls = of_steps(steps, heads_k, seed)
    buffers = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in calls[0].items()}
    counters: list[torch.Tensor] = []

    def kept(x: torch.Tensor, device: int | None = None, count: int = 1) -> torch.Tensor:
        if not counters:
            counters.append(x.new_zeros(count, dtype=torch.int32))
        assert len(counters[0]) == count
        return counters[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "counter_for", kept)
        patch.setattr(call, "counter_for", kept)
        for exact, args in zip(whole, calls, strict=True):
            for name, x in args.items():
                if isinstance(x, torch.Tensor):
                    buffers[name].copy_(x)
            assert_agrees(exact, *run(buffers, on=on, num_splits=0))
            assert counters and not counters[0].any()


def test_lengths_change_between_launches():
    with on_target(Target(ARCH, 64)):
        steps = [[0, 1, 400, 17], [0, 0, 0, 0], [0, 400, 0, 0], [40, 1, 0, 399]]
        assert_follows_lengths(steps, 1, Machine(num_sms=3, schedule="adversarial"), 0)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", SM90_HEAD_DIMS)
@settings(max_examples=100 if FULL else 10)
@given(
    data=st.data(),
    batch=st.sampled_from([2, 5, 33, 70]),
    heads_k=st.integers(1, 2),
    num_sms=st.sampled_from([1, 2, 5, 20]),
    schedule=st.sampled_from(["random", "adversarial"]),
    seed=st.integers(0, 2**20),
)
def test_any_lengths_between_launches(
    head_dim: int, data: st.DataObject, batch: int, heads_k: int, num_sms: int, schedule: str,
    seed: int,
):  # fmt: skip
    """Also with more sequences than CTAs."""
    steps = data.draw(steps_of_lengths(batch, 600 if batch < 10 else 60))
    on = Machine(num_sms=num_sms, schedule=schedule, seed=seed % 1000)
    with on_target(Target(ARCH, head_dim)):
        assert_follows_lengths(steps, heads_k, on, seed)


@pytest.mark.slow
def test_pages_change_no_bit():
    with on_target(Target(ARCH, 64)):
        kind = Kind(varlen_q=True, seqused_k=True, window_right=True, packed_heads=2)
        args = of_kind(kind, LENGTHS, 1, group=2).arguments()
        on = Machine(num_sms=3)
        whole = run(args, on=on, num_splits=0)
        assert_agrees(args, *whole)
        assert same(args, whole, run(in_pages(args, 16, 0), on=on, num_splits=0))


def decode(batch: int, num_splits: int) -> list[str]:
    """The kernels of a decode step of sequences of 900 keys."""
    q, k, v = (torch.randn(batch, rows, 2, 64).bfloat16() for rows in (1, 900, 900))
    emulator = Emulator(num_sms=4, checks=())
    with cute_attn.emulated(ARCH, emulator):
        cute_attn.flash_attn_func(q, k, v, num_splits=num_splits)
    return launched(emulator)


@pytest.mark.slow
def test_one_sequence_has_splits():
    assert [len(decode(batch, 0)) for batch in (1, 2)] == [2, 1]


def spec_of(**changed: Any) -> Sm90ForwardSpec:
    ((_, spec),) = plan_attention(
        ARCH, head_dim=64, heads=2, seqused_k=True, short=True, few=True, pieces=True, num_splits=0
    )
    assert isinstance(spec, Sm90ForwardSpec)
    return replace(spec, **changed)


def test_a_piece_is_never_short(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    for head_dim, head_dim_v in table.shapes("forward", (ARCH,)):
        ((_, spec),) = plan_attention(
            ARCH, head_dim=head_dim, head_dim_v=head_dim_v, short=True, few=True, pieces=True,
            num_splits=0,
        )  # fmt: skip
        assert isinstance(spec, Sm90ForwardSpec)
        nbytes = spec.least_key_tiles * spec.tile_n * 2 * (head_dim + head_dim_v)
        assert heuristics.LEAST_PIECE // 2 < nbytes <= heuristics.LEAST_PIECE


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tile_m": 192}, "scheduler is 'pieces', it needs tile_m of at most 128"),
        ({"split": True, "lse": True}, "no split"),
        ({"least_key_tiles": 0}, "least_key_tiles is 0, must be positive"),
        ({"scheduler": "counter"}, "least_key_tiles is 1, .* otherwise 0"),
    ],
    ids=str,
)
def test_specs_without_a_kernel(changed: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        spec_of(**changed)
