"""KDA's gates, their gradients, and the factors of states, one by one against float64.

The emulator reproduces the approximate instructions of an H100 bit by bit
(tests/emulator/test_silicon.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cute_attn import cache as kernels
from cute_attn.cache import KernelDef
from cute_attn.emulator import Emulator

sys.path.insert(0, str(Path(__file__).parent))
from gates_kernel import THREADS, GatesSpec

GATES = KernelDef(name="gates", target="gates_kernel:Gates")
RATE, LOWER_BOUND = 1.5, -5.0
ULP = 2.0**-23
SMALLEST = 1e-31  # where intermediate results underflow, or exponents are bounded
LARGEST_INPUT = 100.0
SMALLEST_GATE = -127.9  # from -128 on, gates and gradients are replaced


@cache
def function(gate: str) -> Callable[..., None]:
    return Emulator().load(kernels.compile(GATES, GatesSpec(gate), arch="sm_90a"))


def run(gate: str, g: Tensor, bias: Tensor | None = None) -> Tensor:
    """The columns of the results, in float64."""
    size = -(-g.numel() // THREADS) * THREADS
    padded = torch.zeros(2, size)
    padded[0, : g.numel()] = g
    padded[1, : g.numel()] = 0.0 if bias is None else bias
    results = torch.full((size, 6), math.nan)
    function(gate)(*padded, results, RATE, LOWER_BOUND)
    return results[: g.numel()].double().T


def exact(gate: str, g: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The logarithm of the decay, and the gradients of g and of A_log."""
    x = g.double() + bias.double()
    if gate == "softplus":
        log = -RATE * torch.logaddexp(x, torch.zeros_like(x))
        return log, -RATE * torch.sigmoid(x), log
    both = torch.sigmoid(RATE * x) * torch.sigmoid(-RATE * x)
    of_g = LOWER_BOUND * RATE * both
    return LOWER_BOUND * torch.sigmoid(RATE * x), of_g, of_g * x


def assert_close(actual: Tensor, true: Tensor, ulps: Tensor | float) -> None:
    error = (actual - true).abs()
    allowed = ulps * ULP * true.abs() + SMALLEST
    worst = (error / allowed).argmax()
    assert (error <= allowed).all(), f"[{worst}]: {actual[worst]}, exact {true[worst]}"


@pytest.mark.parametrize("bias", [0.0, -16.0, 40.0])
@pytest.mark.parametrize("gate", ["softplus", "lower_bound"])
def test_gates_of_any_size(gate: str, bias: float) -> None:
    """An exponential multiplies the relative error of its input by the input. The input is rounded
    up to three times: g + bias, times the rate, times log2(e)."""
    g = torch.linspace(-LARGEST_INPUT - bias, LARGEST_INPUT - bias, 16 * THREADS)
    biases = torch.full_like(g, bias)
    log, of_g, of_A_log = exact(gate, g, biases)
    found = run(gate, g, biases)
    kept = log > SMALLEST_GATE
    size = RATE * (g.abs() + abs(bias)).double()
    is_rounded = gate == "lower_bound" or bias != 0
    fast, accurate = 6 + 1.5 * size, 4 + (size if is_rounded else 0 * size)
    for column, true, ulps in (
        (found[0] * math.log(2), log, fast),
        (found[2], of_g, fast),
        (found[3], of_A_log, fast),
        (found[1], log, accurate),
        (found[4], of_g, accurate),
        (found[5], of_A_log, accurate),
    ):
        assert_close(column[kept], true[kept], ulps[kept])


def test_softplus_beyond_the_threshold_of_pytorch() -> None:
    """`torch.nn.functional.softplus` is the identity above 20, and so it is in float32."""
    g = torch.tensor([19.0, 20.0, 21.0, 80.0])
    plain = -RATE * torch.nn.functional.softplus(g).double()
    assert_close(run("softplus", g)[1], plain, 2)
    assert_close(run("softplus", g)[0] * math.log(2), plain, 2)


def test_gates_of_infinite_inputs() -> None:
    g = torch.tensor([-math.inf, math.inf])
    smallest = pytest.approx(-128.0)
    log2, log = run("softplus", g)[:2]
    assert log2[0] == 0 and log[0] == 0 and log2[1] * math.log(2) == smallest
    log2, log = run("lower_bound", g)[:2]
    assert abs(log2[0]) < 1e-30 and abs(log[0]) < 1e-30
    assert log2[1] * math.log(2) == pytest.approx(LOWER_BOUND) == log[1]


@pytest.mark.parametrize(
    ("column", "definition"), [(0, torch.exp), (1, torch.exp2)], ids=["exp", "exp2"]
)
def test_factors_near_1_are_rounded_once(
    column: int, definition: Callable[[Tensor], Tensor]
) -> None:
    """A state is multiplied by the same factor again and again, so its error is not averaged."""
    x = -torch.logspace(-9, math.log10(0.0624), 16 * THREADS)
    half = 2.0**-25  # half a unit of the last place of numbers below 1
    for sign, most in ((1, 1.05 * half), (-1, 2.1 * half)):
        error = (run("decay", sign * x)[column] - definition(sign * x.double())).abs()
        assert error.max() <= most


@pytest.mark.parametrize(
    ("column", "definition"), [(0, torch.exp), (1, torch.exp2)], ids=["exp", "exp2"]
)
def test_factors_of_any_size(column: int, definition: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(-87.0, 87.0, 16 * THREADS)
    assert_close(run("decay", x)[column], definition(x.double()), 2)
    x = torch.tensor([-math.inf, -1000.0, 0.0, -0.0, 1000.0, math.inf, math.nan])
    found = run("decay", x)[column].float()
    torch.testing.assert_close(found, definition(x), rtol=0, atol=0, equal_nan=True)
