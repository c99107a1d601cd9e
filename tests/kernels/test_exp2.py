"""2 ** x on the FMA units, in the emulator: what the attention kernel relies on.

The emulator's packed arithmetic is compared bit for bit with fma, add and mul of an H100
(tests/emulator/test_silicon.py); the packed forms themselves need sm_100.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_attn import cache
from cute_attn.cache import KernelDef
from cute_attn.emulator import Emulator

sys.path.insert(0, str(Path(__file__).parent))
from exp2_kernel import PAIRS, THREADS, Exp2Spec

BLOCK = 2 * PAIRS * THREADS
EXP2 = KernelDef(name="exp2", target="exp2_kernel:Exp2")
MAX_RELATIVE_ERROR = 8.8e-5  # published for this polynomial degree, and ours

Exponential = Callable[[torch.Tensor], torch.Tensor]


SPECS = {
    "any": (Exp2Spec(False), "sm_100a"),
    "bounded": (Exp2Spec(True), "sm_100a"),
    "bounded-single": (Exp2Spec(True, single=True), "sm_90a"),
}


@pytest.fixture(scope="module", params=SPECS)
def exp2(request: pytest.FixtureRequest) -> Exponential:
    spec, arch = SPECS[request.param]
    entry = cache.compile(EXP2, spec, arch=arch)
    function = Emulator().load(entry)

    def run(x: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(-(-x.numel() // BLOCK) * BLOCK)
        padded[: x.numel()] = x
        y = torch.full_like(padded, math.nan)
        function(padded, y)
        return y[: x.numel()]

    return run


def relative_error(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    exact = x.double().exp2()
    return ((y.double() - exact) / exact).abs()


def test_the_relative_error_over_the_whole_range(exp2: Exponential) -> None:
    x = torch.cat([torch.linspace(-126, 127.99999, 100_001), torch.linspace(-2, 8, 100_001)])
    assert relative_error(exp2(x), x).max() <= MAX_RELATIVE_ERROR


@given(data=st.lists(st.floats(-126, 127.9921875, width=32), min_size=1, max_size=64))
def test_the_relative_error_anywhere(exp2: Exponential, data: list[float]) -> None:
    x = torch.tensor(data)
    assert relative_error(exp2(x), x).max() <= MAX_RELATIVE_ERROR


def test_in_bfloat16_within_a_unit_of_the_last_place(exp2: Exponential) -> None:
    """Within 1 ulp of the exact value for at least 99 % of inputs, as P is rounded."""
    x = torch.empty(200_000).uniform_(-20, 8, generator=torch.Generator().manual_seed(0))
    exact = x.double().exp2()
    ulp = torch.exp2(exact.log2().floor() - 7)
    difference = (exp2(x).bfloat16().double() - exact).abs() / ulp
    assert (difference <= 1).double().mean() >= 0.99
    assert difference.max() <= 1.02  # half a unit of rounding, and 8.8e-5 of 128 to 256 units


def test_exact_at_integers(exp2: Exponential) -> None:
    x = torch.arange(-126.0, 128.0)
    assert torch.equal(exp2(x).double(), x.double().exp2())


def test_underflow(exp2: Exponential) -> None:
    x = torch.tensor([-math.inf, -1e30, -200.0, -127.5, -127.0])
    assert torch.equal(exp2(x), torch.zeros(5))
    y = exp2(torch.linspace(-127, -126, 1001))
    assert (y >= 0).all() and (y <= 2.0**-126).all()


def test_overflow(exp2: Exponential, request: pytest.FixtureRequest) -> None:
    x = torch.tensor([128.0, 128.5, 1000.0, 3e38, math.inf])
    if "bounded" in request.node.callspec.id:
        x = x[:1]
    assert torch.equal(exp2(x), torch.full_like(x, math.inf))
