"""Windows with a negative number: queries do not see the key at their own position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_attn
from cute_attn.compat.arguments import window_of
from cute_attn.ops.attention.arguments import Arguments, bounds
from cute_attn.reference.attention import visible

from .attention_cases import FULL, Case, Kind, Target, assert_agrees, on_target, run
from .attention_gradient_cases import Upstream, assert_gradients_agree, gradients

TARGETS = [
    Target("sm_90a", 64),
    *(pytest.param(Target("sm_90a", n), marks=pytest.mark.slow) for n in (128, 192, 256)),
    pytest.param(Target("sm_100a", 256), marks=pytest.mark.slow),
]
WIDE = [pytest.param(Target("sm_90a", n), marks=pytest.mark.slow) for n in (320, 512, 576)]


def case(left: int | None, right: int | None, packed: bool, seed: int = 0) -> Case:
    kind = Kind(
        window_left=left is not None, window_right=right is not None, varlen_q=packed,
        varlen_k=packed,
    )  # fmt: skip
    queries, keys = ((200, 3, 70), (150, 40, 300)) if packed else ((150,), (200,))
    return Case(kind, queries, keys, left=left or 0, right=right or 0, seed=seed)


@pytest.mark.parametrize("on", [*TARGETS, *WIDE])
def test_agrees_with_the_reference(on: Target):
    """Windows on one side, that hide K/V tiles at the beginning or at the end, or all keys."""
    with on_target(on):
        for left, right in ((-130, None), (-30, None), (-1000, None)):
            args = case(left, right, packed=True).arguments()
            assert_agrees(args, *run(args))


@pytest.mark.slow
@pytest.mark.parametrize("on", [*TARGETS, *WIDE])
def test_any_window(on: Target):
    with on_target(on):
        for left, right in ((None, -20), (None, -1000), (90, -17), (-10, 70), (-40, 40)):
            for packed in (False, True):
                args = case(left, right, packed).arguments()
                assert_agrees(args, *run(args))


@pytest.mark.slow
@pytest.mark.parametrize("on", TARGETS)
@pytest.mark.parametrize(
    ("left", "right", "packed"),
    [
        (-30, None, True),
        pytest.param(None, -20, False, marks=pytest.mark.slow),
        pytest.param(-10, 70, True, marks=pytest.mark.slow),
    ],
)
def test_gradients(on: Target, left: int | None, right: int | None, packed: bool):
    """The gradient of o holds NaN in rows that see no key: the last rows of a sequence with a
    negative left number, and the first rows with a negative right number."""
    with on_target(on):
        args = case(left, right, packed).arguments()
        do, dlse = Upstream().gradients(args)
        for deterministic in (True, False):
            found = gradients(args, do, dlse, deterministic=deterministic)
            assert_gradients_agree(args, found, do, dlse)


@settings(max_examples=500 if FULL else 100)
@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 8), st.integers(1, 8))
def test_the_reference_sees_what_the_docs_say(left: int, right: int, queries: int, keys: int):
    mask = visible(queries, keys, window_size=(left, right))
    for i in range(queries):
        for j in range(keys):
            distance = j - (i + keys - queries)
            seen = (left == -1 or distance >= -left) and (right == -1 or distance <= right)
            assert bool(mask[i, j]) == seen


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"window_left": -98}, (-98, None)),
        ({"window_left": -1, "window_right": -107}, (None, -107)),
        ({"window_left": 5, "window_right": -5}, (5, -5)),
        ({"window_left": -(2**40)}, (1 - 2**30, None)),
        ({"window_right": -3, "causal": True}, (None, 0)),
    ],
    ids=str,
)
def test_bounds(options: dict[str, Any], found: tuple[int | None, int | None]):
    """-1 is no bound, and causal is 0 to the right whatever the window says."""
    x = torch.zeros(1, 1, 1, 64)
    assert bounds(Arguments(x, x, x, **options)) == found


@pytest.mark.parametrize(
    ("window", "causal", "message"),
    [
        ((-5, 3), False, r"window_size is \(-5, 3\): no query sees a key"),
        ((2, -7), False, r"window_size is \(2, -7\): no query sees a key"),
        ((-2, None), True, r"window_size is \(-2, None\) with causal, whose right number is 0"),
    ],
)
def test_empty_windows_are_refused(window: tuple[int, int], causal: bool, message: str):
    x = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    with cute_attn.emulated("sm_90a"), pytest.raises(ValueError, match=message):
        cute_attn.flash_attn_func(x, x, x, window_size=window, causal=causal)


def test_negative_numbers_of_other_packages_are_no_bounds():
    assert window_of((-7, 3)) == (-1, 3)
    assert window_of([2, -1]) == (2, -1)
    assert window_of((None, 0)) == (None, 0)
    assert window_of(5) == 5
