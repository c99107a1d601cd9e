"""Delta rules over ranks agree with float64, as on one GPU."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cute_attn
from cute_attn import launch
from cute_attn.distributed import causal_halo, context_parallel, delta, spans
from cute_attn.distributed.layout import Layout
from cute_attn.ops.gated_delta_rule import (
    plan_chunk_gated_delta_rule,
    plan_chunk_gated_delta_rule_backward,
)
from cute_attn.ops.kda import plan_chunk_kda, plan_chunk_kda_backward

from ..ops import gated_delta_rule_cases, kda_cases, test_kda_gradients
from ..ops.gated_delta_rule_cases import WIDE_V
from ..ops.kda_cases import DECAYS, PACKED, PLAIN, SMALL, Case, Kind, examples
from .ranks import Ranks, ranks

PACKED_LENGTHS = (70, 0, 3, 67)
LISTED = [[(5, 40), (70, 71)], [(0, 5), (40, 70), (71, 140)]]
COMPILATION = 900  # seconds for which a rank may wait for another rank's compilation
PIECES = (1, 3)  # spans of some chunks have several pieces

KDA, GATED = "chunk_kda", "chunk_gated_delta_rule"


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2, timeout=COMPILATION) as found:
        yield found


def check(
    group: Ranks, case: Case, layout: Any, *, backward: bool = True, **options: Any
) -> dict[str, Tensor]:
    """Every rank's whole results agree with float64 by the error rule. Returns them."""
    args = case.arguments("cpu")
    function = GATED if isinstance(case, gated_delta_rule_cases.Case) else KDA
    of = test_kda_gradients.weights(args) if backward else {}
    called = {name: x for name, x in args.items() if name != "cu_seqlens"}
    bounds = [0, *accumulate(case.lengths)]
    lengths = {"seqlen": case.lengths[0]} if case.kind.index is None else {"cu_seqlens": bounds}
    results = group.call(
        "delta_rule", args=called, do=of.get("do"), dfinal=of.get("dfinal_state"),
        function=function, layout=layout, **lengths, **options,
    )  # fmt: skip
    found: dict[str, Tensor] = results[0]
    for other in results[1:]:
        assert all(torch.equal(other[name], x) for name, x in found.items())
    kda_cases.assert_agrees(args, found["o"], found.get("final_state"))
    if backward:
        names = [name for name in test_kda_gradients.INPUTS if name in found]
        test_kda_gradients.assert_agrees(args, of, {name: found[name] for name in names})
    return found


def of_heads(case: Case) -> Case:
    return gated_delta_rule_cases.Case(**vars(case))


SMALL_BF16 = replace(SMALL, dtype=torch.bfloat16, gate="softplus", v_first=False)
CASES = {
    "whole sequences": Case(SMALL_BF16, (140,), gates="weak"),
    "batch": Case(SMALL_BF16, (129, 129), gates="weak", scale=0.3),
    "packed": Case(replace(SMALL_BF16, index=torch.int32), PACKED_LENGTHS, gates="weak"),
    "strong gates": Case(SMALL_BF16, (300,), gates="strong"),
    "raw gates": Case(DECAYS, (140,), gates="weak", group=1, layout="misaligned"),
    "float16": Case(replace(SMALL, gate="softplus"), (140,), gates="weak", negative=True),
    "no states": Case(replace(WIDE_V, initial=False, final=False), (140,), gates="weak", group=1),
}
OF_CHANNELS = CASES | {
    "lower bound": Case(SMALL, (140,), gates="weak"),
    "no A_log": Case(replace(kda_cases.WIDE_V, index=None), (140,), gates="weak", group=1),
}


@pytest.mark.slow
def test_packed_sequences_cross_ranks(two: Ranks) -> None:
    check(two, Case(PACKED, (70, 0, 3), gates="weak", group=1), "contiguous")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", LISTED], ids=["c", "z", "l"])
@pytest.mark.parametrize("name", OF_CHANNELS)
def test_kda(two: Ranks, name: str, layout: Any) -> None:
    case = OF_CHANNELS[name]
    if layout is LISTED and sum(case.lengths) != 140:
        pytest.skip("the listed ranges are of 140 tokens")
    check(two, case, layout, pieces=PIECES)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", LISTED], ids=["c", "z", "l"])
@pytest.mark.parametrize("name", CASES)
def test_gated_delta_rule(two: Ranks, name: str, layout: Any) -> None:
    case = of_heads(CASES[name])
    if layout is LISTED and sum(case.lengths) != 140:
        pytest.skip("the listed ranges are of 140 tokens")
    check(two, case, layout, pieces=PIECES)


@pytest.mark.slow
@pytest.mark.parametrize("of", [lambda case: case, of_heads], ids=["kda", "gdn"])
@pytest.mark.parametrize("name", ["whole sequences", "packed"])
def test_three_ranks(of: Any, name: str) -> None:
    with ranks(3, timeout=COMPILATION) as three:
        for layout in ("contiguous", "zigzag"):
            check(three, of(CASES[name]), layout, pieces=PIECES)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_other_architectures(two: Ranks, arch: str) -> None:
    for case in (CASES["packed"], of_heads(CASES["packed"])):
        check(two, case, "contiguous", arch=arch, pieces=PIECES)


@pytest.mark.slow
def test_calls_without_a_gradient(two: Ranks) -> None:
    for case in (CASES["packed"], of_heads(Case(PLAIN, (140,), gates="weak", group=1))):
        check(two, case, "zigzag", backward=False, pieces=PIECES)


@pytest.mark.slow
def test_calls_repeat(two: Ranks) -> None:
    one, other = (check(two, CASES["packed"], "zigzag", pieces=PIECES) for _ in range(2))
    assert all(torch.equal(other[name], x) for name, x in one.items())


@examples(30)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    layout=st.sampled_from(("contiguous", "zigzag")),
    world=st.integers(1, 4),
    batch=st.integers(1, 2),
    backwards=st.booleans(),
    from_states=st.booleans(),
)
def test_states_follow_from_transitions(
    lengths: list[int], layout: str, world: int, batch: int, backwards: bool, from_states: bool
) -> None:
    """Without processes and kernels: every rank finds the states at the starts of its spans."""
    heads, dim_v, dim_k = 2, 3, 4
    of = Layout.of(layout, lengths, world)
    routes = [spans.Route(of, rank, backwards=backwards) for rank in range(world)]
    moves = [torch.rand(batch, r.count, heads, dim_v + dim_k, dim_k) for r in routes]
    first = torch.rand(batch, len(lengths), heads, dim_v, dim_k)
    if not from_states:
        first.zero_()

    class Arrived:
        def wait(self) -> None:
            pass

    def send(rank: int, to: Any, into: Any) -> Arrived:
        needed = any(routes[rank].needed)
        assert set(to) == (set(routes[rank].sent) if needed else set())
        for other, (memory,) in into.items():
            memory.copy_(routes[other].sent[rank].take(moves[other]))
        return Arrived()

    def chain(start: Tensor | None, pool: Tensor, steps: Tensor, out: Tensor) -> None:
        for of_chain in steps.tolist():
            (taken, place), *rest = of_chain
            state = torch.zeros(batch, heads, dim_v, dim_k, dtype=torch.float64)
            if start is not None:
                state = start[:, taken].double()
            if place >= 0:
                out[:, place] = state
            for move, to in rest:
                if move >= 0:
                    state = after(state, pool[:, move].double())
                if to >= 0:
                    out[:, to] = state

    def after(state: Tensor, move: Tensor) -> Tensor:
        return move[..., :dim_v, :] + state @ move[..., dim_v:, :]

    expected = {}
    for sequence in range(len(lengths)):
        state = first[:, sequence].double()
        held = [(p, r, i) for r in range(world) for i, p in enumerate(of.pieces(r))]
        held = sorted((x for x in held if x[0].sequence == sequence), reverse=backwards)
        for at, (_, rank, i) in enumerate(held):
            expected[rank, i] = state
            last = at == len(held) - 1
            assert routes[rank].needed[i] == (not last)
            ends = zip(
                *(rows.index(first.device).tolist() for rows in routes[rank].ends), strict=True
            )
            assert ((i, sequence) in ends) == last
            state = after(state, moves[rank][:, i].double())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "send", send)
        patch.setattr(spans, "chain", chain)
        for rank, route in enumerate(routes):
            out = torch.full((batch, route.count, heads, dim_v, dim_k), torch.nan)
            given_first = first if from_states else None
            route.states(rank, moves[rank] if any(route.needed) else None, given_first, out)
            for i in range(route.count):
                torch.testing.assert_close(out[:, i], expected[rank, i].float())


@pytest.fixture
def alone() -> Iterator[Any]:
    """A plan of one rank with 8 tokens."""
    if dist.is_initialized():
        pytest.skip("torch.distributed is in use")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield context_parallel(seqlen=8, layout="contiguous")
    dist.destroy_process_group()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("heads", [False, True], ids=["kda", "gdn"])
def test_plans_have_the_kernels_of_calls(
    alone: Any, monkeypatch: pytest.MonkeyPatch, arch: str, heads: bool
) -> None:
    case = Case(SMALL_BF16, (8,))
    if heads:
        case = of_heads(case)
    args = case.arguments("cpu")
    found = set()

    def get_for(_: Any, *request: Any) -> Any:
        found.add(request)
        return lambda *arguments: None

    ones = torch.ones(1)
    monkeypatch.setattr(launch, "get_for", get_for)
    monkeypatch.setattr(delta.Held, "needed", lambda *_: ones)
    args["q"].requires_grad_()
    with cute_attn.emulated(arch):
        o, _ = kda_cases.function_of(args)(**args, cp=alone)
        o.sum().backward()
    kind = replace(case.kind, initial=False, final=False)  # over_ranks gives both
    options = {"over_ranks": True, "split": True}
    if heads:
        forward, backward = plan_chunk_gated_delta_rule, plan_chunk_gated_delta_rule_backward
    else:
        forward, backward = plan_chunk_kda, plan_chunk_kda_backward
    shared = plan_parameters(kind, heads) | options
    planned = {
        *forward(arch, **shared, gradient=True),
        *backward(arch, **shared, grouped=True),
    }
    segments = {getattr(spec, "segments", None) for _, spec in found}
    assert found <= planned and segments == {None, "none", "spans"}


def plan_parameters(kind: Kind, heads: bool) -> dict[str, Any]:
    """The parameters that plans of both directions take."""
    found = {
        "dtype": kda_cases.NAMES[kind.dtype],
        "gate_dtype": kda_cases.NAMES[kind.gate_dtype],
        "beta_dtype": kda_cases.NAMES[kind.beta_dtype],
        "head_dim_k": kind.dim_k,
        "head_dim_v": kind.dim_v,
        "use_qk_l2norm_in_kernel": kind.l2norm,
        "use_gate_in_kernel": kind.gate != "none",
        "use_beta_sigmoid_in_kernel": kind.sigmoid,
        "dt_bias": kind.dt_bias,
    }
    return found if heads else found | {"A_log": kind.A_log}


def test_wrong_arguments_are_named(alone: Any) -> None:
    plan, args = alone, Case(SMALL_BF16, (8,)).arguments("cpu")
    for changes, error, message in (
        ({"q": args["q"][:, :3]}, ValueError, "q has shape [1, 3, 1, 64] on rank 0, must be"),
        ({"k": None}, TypeError, "k must be a torch.Tensor, got NoneType"),
        ({"A_log": 3}, TypeError, "A_log must be a torch.Tensor, got int"),
        ({"scale": [1.0]}, TypeError, "scale must be a float, got list"),
        ({"scale": True}, TypeError, "scale must be a float, got bool"),
        (
            {"initial_state": args["initial_state"].int()},
            TypeError,
            "initial_state has dtype torch.int32, must be one of",
        ),
        (
            {"initial_state": args["initial_state"].to("meta")},
            ValueError,
            "initial_state is on meta, must be on the device of q, cpu",
        ),
        ({"cp": 3}, TypeError, "cp is int, must be a plan"),
        ({"cu_seqlens": torch.tensor([0, 8])}, NotImplementedError, "cu_seqlens is given"),
        ({"state_indices": args["q"]}, NotImplementedError, "state_indices is given with cp"),
        ({"disable_recompute": True}, NotImplementedError, "disable_recompute is given"),
        ({"initial_state": args["initial_state"][:, :1]}, ValueError, "initial_state has"),
        ({"v": args["v"].float()}, TypeError, "v has dtype torch.float32"),
        ({"beta": args["beta"][:, :, :1]}, ValueError, "beta has shape [1, 8, 1], must be"),
    ):
        with cute_attn.emulated("sm_90a"), pytest.raises(error) as raised:
            cute_attn.chunk_kda(**{**args, "cp": plan, **changes})
        assert message in str(raised.value)


def test_arguments_that_are_no_tensors_are_named(alone: Any) -> None:
    with pytest.raises(TypeError, match="plan is int, must be a plan of context_parallel"):
        causal_halo(3, torch.zeros(1, 8, 3))  # type: ignore[arg-type]
    for function in (alone.shard, alone.unshard):
        with pytest.raises(TypeError, match="x must be a tensor, got list"):
            function([1])


def test_a_rank_without_tokens_checks_arguments(alone: Any) -> None:
    """Such a rank launches no kernel, and refuses what other ranks refuse."""
    plan = context_parallel(seqlen=0)
    args = Case(SMALL_BF16, (8,)).arguments("cpu")
    for name in ("q", "k", "v", "g", "beta"):
        args[name] = args[name][:, :0]
    with cute_attn.emulated("sm_90a"):
        o, _ = cute_attn.chunk_kda(**{**args, "cp": plan})
        assert o.shape == args["v"].shape
        for changes, error, message in (
            ({"v": args["v"].float()}, TypeError, "v has dtype torch.float32"),
            ({"beta": args["beta"][:, :, :1]}, ValueError, "beta has shape [1, 0, 1], must be"),
            ({"A_log": args["A_log"][:1]}, ValueError, "A_log has shape [1], must have HV = 2"),
            ({"scale": "1"}, TypeError, "scale must be a float, got str"),
        ):
            with pytest.raises(error) as raised:
                cute_attn.chunk_kda(**{**args, "cp": plan, **changes})
            assert message in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "listed"])
@pytest.mark.parametrize("lengths", [(20,), (1, 0, 13, 2, 9)], ids=str)
def test_a_convolution_over_ranks(two: Ranks, lengths: tuple[int, ...], layout: str) -> None:
    """y and all gradients are those of one process; spans may be shorter than the halo."""
    total, batch = sum(lengths), 2 if len(lengths) == 1 else 1
    of: Any = layout
    if layout == "listed":
        of = [[(0, 3), (4, 5), (6, 7), (9, total)], [(3, 4), (5, 6), (7, 9)]]
    x, dy = (torch.randn(batch, total, 3, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(3, 4, dtype=torch.float64)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    whole = [
        torch.nn.functional.conv1d(
            torch.nn.functional.pad(part.mT, (3, 0)), leaves[1][:, None], groups=3
        ).mT
        for part in leaves[0].split(lengths, 1)
        if part.shape[1]
    ]
    y = torch.cat(whole, 1)
    y.backward(dy)
    bounds: dict[str, Any] = {"cu_seqlens": [0, *accumulate(lengths)]}
    if len(lengths) == 1:
        bounds = {"seqlen": total}
    for found in two.call("convolved", x=x, weight=weight, dy=dy, layout=of, **bounds):
        for one, other in zip(found, (y, leaves[0].grad, leaves[1].grad), strict=True):
            torch.testing.assert_close(one, other)


def test_a_plan_is_shared_by_copies_and_not_pickled(alone: Any) -> None:
    """A copy of a model, as for averages of its weights, has the plan of the model."""
    assert copy.deepcopy({"plan": alone})["plan"] is alone and copy.copy(alone) is alone
    with pytest.raises(TypeError, match="call context_parallel in each process"):
        pickle.dumps(alone)
