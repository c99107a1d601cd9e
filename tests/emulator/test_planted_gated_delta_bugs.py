"""Bugs planted in the Gated Delta Net's gradients: each must be found where the gradients are taken.

As in `test_planted_kda_bugs`, a bug is an edit of the PTX text. What breaks a rule of the machine
must be reported; a wrong number must fail the comparison with float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import cute_attn
from cute_attn.emulator import Emulator, FindingsError
from cute_attn.kernels.delta.chunk.backward.head_gradients import GatedDeltaGradients
from cute_attn.kernels.delta.chunk.heuristics import head_gradients_config
from cute_attn.kernels.delta.chunk.spec import HeadGradientsSpec
from tests.ops.gated_delta_rule_cases import PACKED, Case
from tests.ops.test_kda_gradients import assert_agrees, differentiated, weights

from .mutations import Edged

ARCH = "sm_100a"
KERNEL = "GatedDeltaGradients"
CASE = Case(PACKED, (66, 3), group=3)  # a cluster of two CTAs, three value heads

WAIT = r"mbarrier\.(test|try)_wait"
SHUFFLE = r"shfl\.sync\.down"
STORE = r"st\.async"


@functools.cache
def arguments() -> tuple[dict[str, Any], dict[str, Any]]:
    args = CASE.arguments("cpu")
    return args, weights(args)


def play(plant: Callable[[Edged], Edged] | None) -> tuple[set[str], bool]:
    """Take the gradients with a changed kernel. Return the checks that found something, and whether
    the gradients agree with the reference."""
    emulator = Emulator(schedule="random", seed=1, on_findings="collect")
    load = Emulator.load_object

    def changed(_: Emulator, image: bytes, ptx: str, function: str, names: Any) -> Any:
        if KERNEL in ptx and plant is not None:
            ptx = plant(Edged(ptx, mbarriers())).text
        return load(emulator, image, ptx, function, names)

    args, of = arguments()
    agrees = True
    with pytest.MonkeyPatch.context() as patch, cute_attn.emulated(ARCH, emulator):
        patch.setattr(Emulator, "load_object", changed)
        try:
            assert_agrees(args, of, differentiated(args, of))
        except (AssertionError, FindingsError):
            agrees = False
    return {found.check for found in emulator.report.findings}, agrees


def mbarriers() -> dict[str, tuple[int, int]]:
    kind = CASE.kind
    spec = HeadGradientsSpec(
        dtype="bfloat16",
        head_dim_k=kind.dim_k,
        head_dim_v=kind.dim_v,
        index_dtype="int32",
        gate_dtype="bfloat16",
        beta_dtype="bfloat16",
        gate="softplus",
        has_A_log=True,
        has_dt_bias=True,
        l2norm=True,
        beta_sigmoid=True,
        decays="head",
        grouped=True,
        **head_gradients_config(arch=ARCH, head_dim_k=128, head_dim_v=128, grouped=True),
    )
    shared = GatedDeltaGradients(spec).names(0)["shared"]
    return {name: (at, size) for name, (at, size, *_) in shared.items()}


BUGS: dict[str, tuple[Callable[[Edged], Edged], set[str]]] = {
    "part of dg not sent": (lambda p: p.drop(*p.all(STORE)), {"deadlock"}),
    "wait for the other part dropped": (
        lambda p: p.drop(*p.of("gates_full", WAIT)),
        {"race", "uninitialised", "barrier"},
    ),
    "a step of the scan of dg too far": (
        lambda p: p.swap(p.one(SHUFFLE), r", 1, ", ", 2, "),
        set(),
    ),
    "a step of the scan of gates too far": (
        lambda p: p.swap(p.one(r"shfl\.sync\.up"), r", 1, ", ", 2, "),
        set(),
    ),
}


@pytest.mark.slow
def test_the_kernel_is_right_and_has_no_finding() -> None:
    assert play(None) == (set(), True)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    plant, checks = BUGS[bug]
    found, agrees = play(plant)
    if checks:
        assert found & checks, found
    else:
        assert not agrees
