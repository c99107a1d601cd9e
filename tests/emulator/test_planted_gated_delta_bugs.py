"""Bugs planted in the Gated Delta Net's chunked kernels: each must be found by a call of them.

As in `test_planted_kda_bugs`, a bug is an edit of the PTX text. What breaks a rule of the machine
must be reported; a wrong number must fail the comparison with float64.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

import cute_attn
from cute_attn import launch
from cute_attn.emulator import Emulator, FindingsError
from cute_attn.kernels.delta.chunk.backward.head_gradients import GatedDeltaGradients
from cute_attn.kernels.delta.chunk.heuristics import head_gradients_config
from cute_attn.kernels.delta.chunk.spec import HeadGradientsSpec
from cute_attn.ops.gated_delta_rule import chunk_forward
from tests.ops import kda_cases
from tests.ops.gated_delta_rule_cases import PACKED, PLAIN, Case
from tests.ops.test_kda_gradients import assert_agrees, differentiated, weights

from .mutations import ARRIVE, EXPECT, TRY, Edged, operand

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


def take_gradients() -> None:
    args, of = arguments()
    assert_agrees(args, of, differentiated(args, of))


def play(
    plant: Callable[[Edged], Edged] | None,
    kernel: str = KERNEL,
    arch: str = ARCH,
    call: Callable[[], None] = take_gradients,
    named: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[set[str], bool]:
    """Make the call with a changed kernel. Return the checks that found something, and whether the
    results agree with the reference.

    Args:
        named: the kernel's mbarriers.
    """
    named = mbarriers() if named is None else named
    emulator = Emulator(schedule="random", seed=1, on_findings="collect")
    load = Emulator.load_object
    edits = 0

    def changed(_: Emulator, image: bytes, ptx: str, function: str, names: Any) -> Any:
        nonlocal edits
        if kernel in ptx and plant is not None:
            ptx = plant(Edged(ptx, named)).text
            edits += 1
        return load(emulator, image, ptx, function, names)

    agrees = True
    with pytest.MonkeyPatch.context() as patch, cute_attn.emulated(arch, emulator):
        patch.setattr(Emulator, "load_object", changed)
        try:
            call()
        except (AssertionError, FindingsError):
            agrees = False
    assert edits == (plant is not None)
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


# -- the kernels for sm_90a

OF_HOPPER = Case(replace(PLAIN, dim_k=64, dim_v=64), (330,), heads=1, group=1)  # rings are reused
PASSES = "HeadStatePass", "HeadAdjointPass"
BARRIER = r"bar\.sync"
PRODUCTS = r"wgmma\.wait_group"


@functools.cache
def of_hopper() -> tuple[dict[str, Any], dict[str, Any]]:
    args = OF_HOPPER.arguments("cpu")
    return args, weights(args)


def run_forward() -> None:
    args, _ = of_hopper()
    kda_cases.assert_agrees(args, *kda_cases.run(args))


IN_ONE_KERNEL = Case(replace(PLAIN, dim_k=128, dim_v=128), (450,), heads=1, group=1)


@functools.cache
def of_one_kernel() -> dict[str, Any]:
    return IN_ONE_KERNEL.arguments("cpu")


def run_in_one_kernel() -> None:
    """The whole forward in one kernel."""
    args = of_one_kernel()
    with (
        mock.patch.object(chunk_forward, "segment_length", return_value=0),
        mock.patch.object(chunk_forward, "in_one_kernel", return_value=True),
    ):
        kda_cases.assert_agrees(args, *kda_cases.run(args))


def run_backward() -> None:
    args, of = of_hopper()
    assert_agrees(args, of, differentiated(args, of))


CALLS = {
    "HeadPrepare": run_forward, "HeadStatePass": run_forward, "HeadAdjointPass": run_backward,
    "HeadForward": run_in_one_kernel,
}  # fmt: skip


@functools.cache
def mbarriers_of(kernel: str) -> dict[str, tuple[int, int]]:
    """The mbarriers of the kernel that the call asks for."""
    if kernel == "HeadPrepare":
        return {}
    found: list[Any] = []
    get_for = launch.get_for

    def recorded(device: Any, definition: Any, spec: Any) -> Any:
        found.append((definition, spec))
        return get_for(device, definition, spec)

    with (
        mock.patch.object(launch, "get_for", recorded),
        cute_attn.emulated("sm_90a", Emulator(on_findings="collect")),
    ):
        CALLS[kernel]()
    spec, target = next((s, d.target) for d, s in found if d.target.endswith(f":{kernel}"))
    shared = pkgutil.resolve_name(target)(spec).names(0)["shared"]
    return {name: (at, size) for name, (at, size, *_) in shared.items()}


def _of_passes() -> dict[tuple[str, str], tuple[Callable[[Edged], Edged], set[str]]]:
    bugs: dict[str, tuple[Callable[[Edged], Edged], set[str]]] = {
        "wait for a chunk dropped": (
            lambda p: p.drop(*p.of("chunk_full", WAIT)), {"race", "uninitialised"}
        ),
        "wait for a free stage dropped": (lambda p: p.drop(p.one(TRY)), {"race"}),
        "release of a stage dropped": (
            lambda p: p.drop(*p.of("chunk_empty", ARRIVE)), {"deadlock"}
        ),
        "16 bytes too many expected": (
            lambda p: p.changed_operand(p.one(EXPECT), operand(p, p.one(EXPECT)), "add.s32", 16),
            {"deadlock"},
        ),
        "wait for products dropped": (
            lambda p: p.drop(p.one(PRODUCTS, nth=-1)), {"wgmma", "race"}
        ),
    }  # fmt: skip
    return {(kernel, name): bug for kernel in PASSES for name, bug in bugs.items()}


def _of_one_kernel() -> dict[tuple[str, str], tuple[Callable[[Edged], Edged], set[str]]]:
    bugs: dict[str, tuple[Callable[[Edged], Edged], set[str]]] = {
        f"wait for {edge} dropped": (
            lambda p, edge=edge: p.drop(*p.of(edge, WAIT)), {"race", "uninitialised", "barrier"}
        )
        for edge in ("tokens_full", "tiles_full", "scored_full", "gates_full")
    } | {
        f"release of {edge} dropped": (
            lambda p, edge=edge: p.drop(*p.of(edge, ARRIVE)), {"deadlock"}
        )
        for edge in ("tokens_empty", "tiles_empty", "scored_empty", "gates_empty")
    } | {
        f"barrier {n} of prepare dropped": (
            lambda p, n=n: p.drop(p.one(BARRIER, nth=n)), {"race", "uninitialised"}
        )
        for n in range(-4, 0)
    }  # fmt: skip
    return {("HeadForward", name): bug for name, bug in bugs.items()}


HOPPER_BUGS = _of_passes() | _of_one_kernel() | {
    ("HeadPrepare", f"barrier {n} dropped"): (
        lambda p, n=n: p.drop(p.one(BARRIER, nth=n)),
        {"race", "uninitialised"},
    )
    for n in (0, 1, 2, -1)
} | {
    ("HeadPrepare", "a step of the scan of gates too far"): (
        lambda p: p.swap(p.one(r"shfl\.sync\.up"), r", 1, ", ", 2, "), set()
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("call", ["HeadAdjointPass", "HeadForward"])
def test_the_kernels_for_hopper_are_right_and_have_no_finding(call: str) -> None:
    assert play(None, "", "sm_90a", CALLS[call], {}) == (set(), True)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "bug"), HOPPER_BUGS)
def test_a_bug_of_a_kernel_for_hopper_is_found(kernel: str, bug: str) -> None:
    plant, checks = HOPPER_BUGS[kernel, bug]
    found, agrees = play(plant, kernel, "sm_90a", CALLS[kernel], mbarriers_of(kernel))
    if checks:
        assert found & checks, found
    else:
        assert not agrees
