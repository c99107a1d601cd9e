"""The gradient of chunk_kda as an operator: what is launched with what, and torch around it.

Kernels are stood in for; tests/ops/test_kda_gradients.py compares the kernels' own numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cute_attn
from cute_attn.cache.specfile import plan_file
from cute_attn.emulator import Emulator
from cute_attn.kernels.common.table import SUM_PARTIALS, ZERO_UNUSED
from cute_attn.kernels.delta import table
from cute_attn.ops.kda import chunk_passes, plan_chunk_kda_backward
from cute_attn.ops.kda.chunk_backward import BACKWARD
from cute_attn.reference.kda import kda_gradients

from .kda_cases import (
    BF16,
    DECAYS,
    PACKED,
    PLAIN,
    SMALL,
    WIDE_K,
    WIDE_V,
    Case,
    Kind,
    definition,
    poisoned_outputs,
    warm,
)
from .kda_stand_ins import StandIns, stand_ins

ARCH = "sm_100a"
TOKENS = ("q", "k", "v", "g", "beta")
INPUTS = (*TOKENS, "A_log", "dt_bias", "initial_state")
PREPARE, STATE_PASS = table.PREPARE.name, table.STATE_PASS.name
ADJOINT, GRADIENTS = table.ADJOINT_PASS.name, table.GRADIENTS.name
SUM, ZERO = SUM_PARTIALS.name, ZERO_UNUSED.name


@pytest.fixture(autouse=True)
def kernels() -> Iterator[StandIns]:
    # With so few SMs no sequence is split.
    with stand_ins() as found, cute_attn.emulated(ARCH, Emulator(num_sms=1)):
        yield found


CASES = {
    "dense": Case(PLAIN, (5, 5), negative=True),
    "packed": Case(PACKED, (70, 0, 5), lead=2, tail=3, group=1),
    "decays": Case(DECAYS, (3, 4), scale=0.3),
    "small": Case(SMALL, (6,), group=3),
    "no A_log": Case(WIDE_V, (0, 5), tail=1),
    "no final state": Case(WIDE_K, (3,), heads=2),
}


def call(args: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor | None]:
    with poisoned_outputs():
        o, final_state = cute_attn.chunk_kda(**args | more)
    return o, final_state


def arguments(case: Case, requires: tuple[str, ...] = INPUTS) -> dict[str, Any]:
    args = case.arguments("cpu")
    for name in requires:
        if name in args:
            args[name].requires_grad_()
    return args


def given(args: dict[str, Any]) -> list[str]:
    """The names of the arguments that require a gradient."""
    return [name for name in INPUTS if name in args and args[name].requires_grad]


def weights(*results: Tensor | None) -> list[Tensor | None]:
    """Random gradients of results."""
    generator = torch.Generator().manual_seed(7)
    return [
        None if x is None else torch.randn(x.shape, generator=generator).to(x.dtype)
        for x in results
    ]


def taken(args: dict[str, Any], results: Any, gradients: Any) -> dict[str, Tensor]:
    """The gradients by autograd of the results that have one."""
    pairs = [(x, dx) for x, dx in zip(results, gradients, strict=True) if dx is not None]
    names = given(args)
    with poisoned_outputs():
        found = torch.autograd.grad(
            [x for x, _ in pairs], [args[name] for name in names], [dx for _, dx in pairs]
        )
    return dict(zip(names, found, strict=True))


def assert_exact(args: dict[str, Any], found: dict[str, Tensor], *gradients: Any) -> None:
    """Up to a rounding to the argument's dtype."""
    exact = kda_gradients(
        **definition(args),
        do=gradients[0],
        dfinal_state=gradients[1],
    )
    for name, true in zip(INPUTS, exact, strict=True):
        if name not in found:
            continue
        x, of = found[name], args[name]
        assert x.dtype == of.dtype and x.shape == of.shape and true is not None
        true = true.view(x.shape)
        scale = true.abs().max().item()
        torch.testing.assert_close(x.double(), true, rtol=0.01, atol=1e-5 * scale + 1e-12)


# -- what is computed


@pytest.mark.parametrize("disable_recompute", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_definition(case: str, disable_recompute: bool):
    args = arguments(CASES[case])
    results = call(args, disable_recompute=disable_recompute)
    for gradients in (weights(*results), [None, weights(*results)[1]], weights(results[0], None)):
        if any(dx is not None for dx in gradients):
            results = call(args, disable_recompute=disable_recompute)
            found = taken(args, results, gradients)
            assert set(found) == {name for name in INPUTS if name in args}
            assert_exact(args, found, *gradients)


@pytest.mark.parametrize("disable_recompute", [False, True])
@pytest.mark.parametrize(
    ("requires", "launched"),
    [
        (("q",), [PREPARE, ADJOINT, GRADIENTS]),
        (("v", "initial_state"), [PREPARE, ADJOINT, GRADIENTS]),
        (("A_log",), [PREPARE, ADJOINT, GRADIENTS, SUM]),
        (("dt_bias",), [PREPARE, ADJOINT, GRADIENTS, SUM]),
        (("initial_state",), [PREPARE, ADJOINT]),
        (INPUTS, [PREPARE, ADJOINT, GRADIENTS, SUM, SUM]),
    ],
    ids=lambda x: "-".join(x) if x and x[0] in INPUTS else "",
)
def test_only_what_is_needed_is_computed(
    kernels: StandIns, requires: tuple[str, ...], launched: list[str], disable_recompute: bool
):
    args = arguments(CASES["dense"], requires)
    results = call(args, disable_recompute=disable_recompute)
    assert kernels.names == [PREPARE, STATE_PASS]
    kernels.launched.clear()
    gradients = weights(*results)
    found = taken(args, results, gradients)
    if disable_recompute:
        launched = launched[1:]
    # Partial sums of a parameter that needs none are not added up.
    assert kernels.names == launched
    assert_exact(args, found, *gradients)


def test_only_a_gradient_makes_a_forward_keep_anything(kernels: StandIns):
    args = arguments(CASES["dense"], ())
    for disable_recompute in (False, True):
        call(args, disable_recompute=disable_recompute)
    args["q"].requires_grad_()
    for disable_recompute in (False, True):
        with torch.no_grad():
            call(args, disable_recompute=disable_recompute)
    for disable_recompute in (False, True):
        call(args, disable_recompute=disable_recompute)
    for kernel, field in ((PREPARE, "for_backward"), (STATE_PASS, "store_states")):
        specs = [spec for name, spec, _ in kernels.launched if name == kernel]
        assert [getattr(spec, field) for spec in specs] == 4 * [False] + 2 * [True]


def test_a_parameter_that_is_ignored_has_no_gradient():
    args = arguments(CASES["decays"])
    heads, dim_k = args["g"].shape[2:]
    parameter = torch.zeros(heads).requires_grad_()
    o, _ = call(args | {"A_log": parameter, "dt_bias": torch.zeros(heads, dim_k)})
    o.sum().backward()
    assert parameter.grad is None and args["q"].grad is not None
    o, _ = call(args | {name: args[name].detach() for name in given(args)} | {"A_log": parameter})
    o.sum().backward()
    assert parameter.grad is None


def test_parameters_and_states_of_any_dtype_and_shape():
    args = arguments(CASES["dense"], ())
    args["A_log"] = args["A_log"].double().view(1, -1, 1).requires_grad_()
    args["dt_bias"] = args["dt_bias"].to(BF16).view(-1, 128).requires_grad_()
    args["initial_state"] = args["initial_state"].to(BF16).requires_grad_()
    for disable_recompute in (False, True):
        results = call(args, disable_recompute=disable_recompute)
        gradients = weights(*results)
        assert_exact(args, taken(args, results, gradients), *gradients)


@pytest.mark.parametrize(
    "layout",
    {
        "expanded": lambda x: torch.ones(1).to(x.dtype).expand(x.shape),
        "heads first": lambda x: torch.randn(2, 2, 5, 128).to(x.dtype).transpose(1, 2),
        "last dimension strided": lambda x: torch.randn(2, 5, 128, 2).to(x.dtype).transpose(2, 3),
        "misaligned": lambda x: torch.randn(x.numel() + 1).to(x.dtype)[1:].view(x.shape),
        "negated": lambda x: torch._neg_view(torch.randn(x.shape).to(x.dtype)),
        "sparse": lambda x: torch.randn(x.shape).relu().to(x.dtype).to_sparse(),
        "zero without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    }.items(),
    ids=lambda x: x[0],
)
def test_the_gradient_of_o_may_have_any_layout(kernels: StandIns, layout: Any):
    """On a call that loads kernels, and on one that finds them loaded. What kernels can read is not
    copied."""
    args = arguments(CASES["dense"])
    with warm():
        for _ in range(2):
            results = call(args)
            gradients = weights(*results)
            assert_exact(args, taken(args, results, gradients), *gradients)
            results = call(args)
            gradients = layout[1](results[0]), gradients[1].mT.contiguous().mT
            found = taken(args, results, gradients)
            assert_exact(args, found, *(x.to_dense() for x in gradients))
            passes = [of for name, _, of in kernels.launched if name == ADJOINT]
            in_place = any(gradients[0] is x for x in passes[-1])
            assert in_place == (layout[0] == "heads first")
        assert len(BACKWARD.ready) == 1


def test_later_calls_only_launch(monkeypatch: pytest.MonkeyPatch):
    """With other lengths and numbers of sequences; never with what is refused."""
    case = Case(replace(PACKED, index=None), (70,))
    with warm():
        args = arguments(case)
        results = call(args)
        taken(args, results, weights(*results))
        monkeypatch.setattr(BACKWARD, "_first_call", None)
        args = arguments(replace(case, lengths=(3, 3)))
        results = call(args)
        gradients = weights(*results)
        assert_exact(args, taken(args, results, gradients), *gradients)


@pytest.mark.parametrize("disable_recompute", [False, True])
@pytest.mark.parametrize(
    ("kind", "lengths"), [(SMALL, (0, 0)), (SMALL, ()), (PACKED, (0, 0)), (PACKED, ())], ids=str
)
def test_calls_without_tokens_have_gradients(
    kernels: StandIns, kind: Kind, lengths: tuple[int, ...], disable_recompute: bool
):
    args = arguments(Case(kind, lengths or (0,)))
    if not lengths:
        for name in (*TOKENS, "initial_state"):
            x = args[name].detach()
            args[name] = (x if kind.index and name in TOKENS else x[:0]).requires_grad_()
        if kind.index:
            args["cu_seqlens"] = args["cu_seqlens"][:1]
    results = call(args, disable_recompute=disable_recompute)
    gradients = weights(*results)
    found = taken(args, results, gradients)
    assert not kernels.launched
    for name, x in found.items():
        assert x.shape == args[name].shape and (name == "initial_state" or not x.any())
    assert torch.equal(found["initial_state"], gradients[1])


def test_no_packed_sequences_among_tokens(kernels: StandIns):
    args = arguments(Case(PACKED, (3,), tail=2))
    args["cu_seqlens"] = args["cu_seqlens"][:1]
    args["initial_state"] = args["initial_state"].detach()[:0].requires_grad_()
    results = call(args)
    found = taken(args, results, weights(results[0], None))
    assert not kernels.launched and not any(x.any() for x in found.values())


def test_inputs_may_be_views():
    """q, k and v are views of one projection, whose gradient is one tensor."""
    args = arguments(CASES["decays"], ())
    heads, dim = args["v"].shape[2:]
    qkv = torch.randn(1, 7, 4, dim).to(BF16).requires_grad_()
    q, k, v = qkv.split([1, 1, heads], dim=2)
    results = call(args | {"q": q, "k": k, "v": v})
    gradients = weights(*results)
    torch.autograd.backward(results, gradients)
    exact = kda_gradients(
        **definition(args) | {"q": q, "k": k, "v": v}, do=gradients[0], dfinal_state=gradients[1]
    )
    assert qkv.grad is not None
    torch.testing.assert_close(qkv.grad.double(), torch.cat(exact[:3], dim=2), rtol=0.01, atol=1e-4)


# -- torch's machinery


def test_gradients_of_some_tensors_and_two_backwards():
    for disable_recompute in (False, True):
        args = arguments(CASES["dense"])
        o, _ = call(args, disable_recompute=disable_recompute)
        do = torch.randn_like(o)
        dk, dA = torch.autograd.grad(o, [args["k"], args["A_log"]], do, retain_graph=True)
        again = torch.autograd.grad(o, [args[name] for name in given(args)], do)
        assert torch.equal(again[1], dk) and torch.equal(again[5], dA)
        with pytest.raises(RuntimeError, match="second time"):
            o.backward(do)


def test_what_a_gradient_needs_must_not_be_changed():
    args = arguments(CASES["dense"])
    o, _ = call(args)
    with torch.no_grad():
        args["k"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("disable_recompute", [False, True])
@pytest.mark.parametrize("case", ["dense", "packed"])
def test_a_compiled_step(case: str, disable_recompute: bool):
    """The whole graph of forward and backward, once with dynamic shapes."""
    for dynamic in (False, True):
        args = arguments(CASES[case])
        tensors = {name: x for name, x in args.items() if isinstance(x, Tensor)}
        rest = {name: x for name, x in args.items() if name not in tensors}
        rest["disable_recompute"] = disable_recompute
        torch._dynamo.reset()

        def layer(rest: dict[str, Any] = rest, **tensors: Tensor) -> Any:
            o, state = cute_attn.chunk_kda(**tensors, **rest)
            return o * 1, state

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        results = compiled(**tensors)
        gradients = weights(*results)
        names = given(args)
        found = torch.autograd.grad(results, [args[name] for name in names], gradients)
        assert_exact(args, dict(zip(names, found, strict=True)), *gradients)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_compiled_step_that_packs():
    """The number of tokens is in a tensor, so that no size of theirs is known to the graph."""
    torch._dynamo.reset()
    args = arguments(CASES["packed"])
    real = torch.ones(args["q"].shape[1], dtype=torch.bool)
    tensors = {name: x for name, x in args.items() if isinstance(x, Tensor)}
    rest = {name: x for name, x in args.items() if name not in tensors}

    def layer(**tensors: Tensor) -> Any:
        kept = {name: tensors[name][:, real] for name in TOKENS}
        return cute_attn.chunk_kda(**tensors | kept, **rest)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    results = compiled(**tensors)
    gradients = weights(*results)
    assert_exact(args, taken(args, results, gradients), *gradients)


def test_activation_checkpointing(kernels: StandIns):
    """The forward runs again in the backward, and the gradients are the same."""
    args = arguments(CASES["dense"])
    names = given(args)
    rest = {name: x for name, x in args.items() if name not in names}

    def layer(*tensors: Tensor) -> Tensor:
        return cute_attn.chunk_kda(**dict(zip(names, tensors, strict=True)), **rest)[0]

    inputs = [args[name] for name in names]
    do = torch.randn_like(args["v"])
    plain = torch.autograd.grad(layer(*inputs), inputs, do)
    for reentrant in (False, True):
        for disable_recompute in (False, True):
            rest["disable_recompute"] = disable_recompute
            kernels.launched.clear()
            for x in inputs:
                x.grad = None
            o = checkpoint(layer, *inputs, use_reentrant=reentrant)
            o.backward(do)
            assert kernels.names.count(PREPARE) == (2 if disable_recompute else 3)
            assert kernels.names.count(STATE_PASS) == 2
            for x, gradient in zip(inputs, plain, strict=True):
                assert torch.equal(x.grad, gradient)


def test_a_second_derivative_is_refused():
    args = arguments(CASES["dense"])
    o, _ = call(args)
    (dq,) = torch.autograd.grad(o, args["q"], torch.ones_like(o), create_graph=True)
    with pytest.raises(NotImplementedError, match="chunk_kda has no second derivative"):
        dq.sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_the_registered_operators_are_sound(kernels: StandIns):
    kernels.copied = True
    args = arguments(Case(PACKED, (3, 4), group=1))
    forward = torch.ops.cute_attn.chunk_kda.default
    rest = {name: x for name, x in args.items() if name not in TOKENS} | {"keep_states": True}
    torch.library.opcheck(forward, tuple(args[name] for name in TOKENS), rest)
    states, v_new = forward(*(args[name] for name in TOKENS), **rest)[3:5]
    args = {name: x.detach() if isinstance(x, Tensor) else x for name, x in args.items()}
    op = torch.ops.cute_attn.chunk_kda_backward.default
    do = torch.randn_like(args["v"])
    rest = {name: x for name, x in args.items() if name not in (*TOKENS, "output_final_state")}
    rest.pop("allow_neg_eigval")
    tensors = (*(args[name] for name in TOKENS), do, states.detach(), v_new.detach())
    torch.library.opcheck(op, tensors, rest)
    needs = {"need_dA_log": True, "need_ddt_bias": True, "need_dinitial_state": True}
    rest["dfinal_state"] = torch.randn_like(args["initial_state"])
    torch.library.opcheck(op, tensors, rest | needs)
    torch.library.opcheck(op, tensors, rest | needs | {"need_inputs": False})


# -- what is refused


def test_arguments_of_the_backward_are_checked():
    args = arguments(Case(PLAIN, (5, 5)), ())
    results = torch.ops.cute_attn.chunk_kda(
        **{name: args[name] for name in TOKENS}, disable_recompute=True, keep_states=True
    )
    names = ("states", "v_new", "tiles", "decay", "inverse_norms")
    kept = dict(zip(names, results[3:], strict=True))
    norms = kept.pop("inverse_norms")
    assert not norms.numel()
    good = {name: args[name] for name in TOKENS} | kept | {"do": results[0]}
    torch.ops.cute_attn.chunk_kda_backward(**good)

    def refused(kind: type[Exception], match: str, **changed: Any) -> None:
        with pytest.raises(kind, match=match):
            torch.ops.cute_attn.chunk_kda_backward(**good | changed)

    o = results[0]
    refused(ValueError, r"do has shape \[2, 4, 2, 128\], must be", do=o[:, :4])
    refused(TypeError, "do has dtype torch.float16, must be torch.bfloat16", do=o.half())
    state = args["initial_state"]
    refused(ValueError, "dfinal_state has shape", dfinal_state=state[:1])
    refused(TypeError, "dfinal_state has dtype torch.bfloat16", dfinal_state=state.to(BF16))
    refused(ValueError, "one must be True", need_inputs=False)
    refused(ValueError, "need_dA_log is True, it needs A_log", need_dA_log=True)
    refused(
        ValueError, "need_ddt_bias is True, it needs use_gate_in_kernel", need_ddt_bias=True,
        dt_bias=args["dt_bias"],
    )  # fmt: skip
    refused(ValueError, "need_dinitial_state is True", need_dinitial_state=True)
    refused(ValueError, "tiles are given, must be all of tiles, decay, or none", decay=None)
    norms = torch.ones(2, 1, 128)
    refused(ValueError, "tiles, decay, inverse_norms are given, must be", inverse_norms=norms)
    refused(ValueError, "all of tiles, decay, inverse_norms, or", use_qk_l2norm_in_kernel=True)
    refused(
        ValueError, r"inverse_norms has shape \[1, 1, 128\], must be \[2, 1, 128\]",
        inverse_norms=norms[:1], use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    refused(ValueError, "states has shape", states=kept["states"][:1])
    refused(ValueError, "k has shape", k=args["k"][:1])


# -- plans


def test_models_name_the_kernels_of_a_step(kernels: StandIns):
    models = Path(cute_attn.__file__).parent / "models" / "kimi_training.toml"
    planned = {
        (kernel.name, spec)
        for kernel, spec in plan_file(models, ARCH)
        if not kernel.target.startswith("cute_attn.kernels.attention")
    }
    for index in (None, torch.int32):
        args = arguments(Case(Kind(index=index, initial=False, final=False), (66,), group=1))
        results = call(args)
        taken(args, results, weights(*results))
    used = {(name, spec) for name, spec, _ in kernels.launched}
    assert used <= planned
    split = table.SEGMENTS.name
    assert all(name == split or spec.segments != "none" for name, spec in planned - used)


def test_a_plan_holds_only_what_is_needed():
    def names(**options: Any) -> list[str]:
        return [kernel.name for kernel, _ in plan_chunk_kda_backward(ARCH, split=False, **options)]

    assert sorted(names()) == sorted([PREPARE, ADJOINT, GRADIENTS])
    assert sorted(names(disable_recompute=True)) == sorted([ADJOINT, GRADIENTS])
    assert sorted(names(inputs=False)) == sorted([PREPARE, ADJOINT])
    gated = names(use_gate_in_kernel=True, index_dtype="int32")
    assert gated.count(SUM) == 2 and gated.count(ZERO) == 1
    split = plan_chunk_kda_backward(ARCH, split=True)
    assert [kernel.name for kernel, _ in split].count(table.SEGMENTS.name) == 1
    with pytest.raises(ValueError, match="A_log is False, must be True"):
        plan_chunk_kda_backward(ARCH, use_gate_in_kernel=True, A_log=False)


def test_few_long_sequences_are_split(monkeypatch: pytest.MonkeyPatch):
    """In both directions, each with a workspace of its own."""
    asked: list[int] = []
    monkeypatch.setattr(
        chunk_passes, "chunks_per_segment", lambda _, *, tokens, **__: asked.append(tokens) or 0
    )
    args = arguments(CASES["dense"])
    with cute_attn.emulated(ARCH, Emulator(num_sms=16)):
        results = call(args)
        assert asked == [5]
        taken(args, results, weights(*results))
    assert asked == [5, 5]
