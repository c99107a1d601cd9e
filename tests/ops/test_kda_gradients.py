"""The gradients of chunk_kda agree with those of the float64 reference, and have exact properties.

Each test runs on the GPU, where there is one, and in the emulator under a random schedule, where
the sweeps are smaller. The rule for errors is that of the forward (`kda_cases`): the plain code is
differentiated by autograd, and rounds the gradients of what it rounds.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cute_attn
from cute_attn import launch
from cute_attn.emulator import Emulator
from cute_attn.ops.kda import chunk, chunk_passes
from cute_attn.ops.kda.chunk_backward import BACKWARD
from cute_attn.reference.kda import (
    KdaGradients,
    kda_chunk_gradients,
    kda_chunk_reference,
    kda_gradients,
    kda_reference,
)

from .kda_cases import (
    DECAYS,
    FULL,
    GATES,
    ONE_BETA,
    PACKED,
    PLAIN,
    SMALL,
    SOME,
    WIDE_K,
    WIDE_V,
    Case,
    Kind,
    assert_no_worse,
    bounded,
    cases,
    definition,
    examples,
    function_of,
    give_one_beta,
    poisoned_outputs,
    spans,
    tokens_of,
)

TOKENS = ("q", "k", "v", "g", "beta")
INPUTS = (*TOKENS, "A_log", "dt_bias", "initial_state")
KEEP = {"disable_recompute": True}
OTHER_ROUNDINGS = 3  # of the plain implementation, beside the usual ones

Gradients = dict[str, Tensor]


def weights(args: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random gradients of o, NaN for tokens of no sequence, and of the final state."""
    generator = torch.Generator().manual_seed(seed)
    v = args["v"]
    values = torch.randn(v.shape, generator=generator).to(v)
    do = torch.full_like(values, math.nan)
    for at in spans(args):
        do[at] = values[at]
    found = {"do": do}
    if args["output_final_state"]:
        heads, dim_k, dim_v = v.shape[2], args["q"].shape[-1], v.shape[-1]
        matrix = (dim_v, dim_k) if args["state_v_first"] else (dim_k, dim_v)
        shape = (len(spans(args)), heads, *matrix)
        found["dfinal_state"] = torch.randn(shape, generator=generator).to(v.device)
    return found


def differentiated(args: dict[str, Any], of: dict[str, Tensor], **changes: Any) -> Gradients:
    """The gradients of the arguments, by name."""
    args = args | changes
    names = [name for name in INPUTS if isinstance(args.get(name), Tensor)]
    if not args.get("use_gate_in_kernel"):
        names = [name for name in names if name not in ("A_log", "dt_bias")]
    leaves = {name: args[name].detach().requires_grad_() for name in names}
    with poisoned_outputs():
        o, state = function_of(args)(**args | leaves)
        results, slopes = [o], [of["do"]]
        if "dfinal_state" in of:
            assert state is not None
            results, slopes = [o, state], [of["do"], of["dfinal_state"]]
        found = torch.autograd.grad(results, list(leaves.values()), slopes)
    return dict(zip(names, found, strict=True))


def assert_agrees(args: dict[str, Any], of: dict[str, Tensor], found: Gradients) -> None:
    """The error rule for each gradient. The plain error is the largest of a few roundings: one
    alone may happen to be exact, as where one element has most of the norm."""
    exact = exactly(args, of)
    plain = functools.cache(lambda seed: plainly(args, of, seed))

    for i, (name, true) in enumerate(zip(INPUTS, exact, strict=True)):
        assert (name in found) == (true is not None), name
        if true is None:
            continue
        x = found[name]
        assert x.dtype == args[name].dtype and x.shape == args[name].shape
        failures = []
        for seed in (None, *range(OTHER_ROUNDINGS)):
            theirs = plain(seed)
            try:
                if name == "A_log":
                    error = (x.double() - true.view(x.shape)).norm().item()
                    granted = 2 * _terms(args, theirs.dg.double() - exact.dg).norm().item()
                    assert error <= 2 * granted, f"error {error:.3e}, {granted:.3e}"
                elif name == "dt_bias" and args["g"].dim() == 3:  # a few numbers, too
                    error, granted = (
                        (y.double().view(x.shape) - true.view(x.shape)).norm().item()
                        for y in (x, theirs[i])
                    )
                    assert error <= 4 * granted, f"error {error:.3e}, {granted:.3e}"
                elif name == "g":
                    assert_gate_agrees(args, x, theirs.dg, exact)
                else:
                    what = f"gradient of {name}"
                    assert_no_worse(x, theirs[i].view(x.shape), true.view(x.shape), what)
                break
            except AssertionError as failure:
                failures.append(f"{name}: {failure}")
        else:
            raise AssertionError("\n".join(failures))


def exactly(args: dict[str, Any], of: dict[str, Tensor]) -> KdaGradients:
    """The gradients in float64."""
    return _of_gates(args, kda_gradients(**definition(args), **of))


def plainly(args: dict[str, Any], of: dict[str, Tensor], seed: int | None = None) -> KdaGradients:
    """The gradients in plain code, which a seed gives other roundings."""
    jitter = None if seed is None else torch.Generator().manual_seed(seed)
    found = kda_chunk_gradients(
        **definition(bounded(args)), **of, dtype=torch.float32, stage_dtype=args["q"].dtype,
        jitter=jitter,
    )  # fmt: skip
    return _of_gates(args, found)


def _of_gates(args: dict[str, Any], found: KdaGradients) -> KdaGradients:
    return found._replace(dg=found.dg.view(args["g"].shape))


def assert_gate_agrees(
    args: dict[str, Any], actual: Tensor, theirs: Tensor, exact: KdaGradients
) -> None:
    """The error rule for the gradient of g. It is a difference of sums of k dk, which are not small
    where gates are so large that nothing is left of it: their rounding in float32 is granted."""
    error, granted = (
        (x.to(actual.dtype).double() - exact.dg).norm().item() for x in (actual, theirs)
    )
    of_k = torch.cat([(args["k"].double() * exact.dk)[at] for at in spans(args)]).norm().item()
    size = exact.dg.norm().item() + of_k
    assert error <= 2 * granted + torch.finfo(torch.float32).eps * size, (
        f"gradient of g: error {error:.3e}, plain {granted:.3e}, of {size:.3e}"
    )


def _terms(args: dict[str, Any], dg: Tensor) -> Tensor:
    """The terms whose sum over channels is the gradient of A_log, from the gradient of g. The error
    of a few numbers says little; errors of channels, which are independent, add up to their norm,
    or twice that."""
    x = args["g"].double()
    if args.get("dt_bias") is not None:
        x = x + args["dt_bias"].double().view(x.shape[2:])
    if args.get("lower_bound") is None:
        x = torch.where(x < -30.0, 1.0, torch.nn.functional.softplus(x) / torch.sigmoid(x))
    return torch.cat([(dg * x)[at] for at in spans(args)]).sum(0)


def same(one: Gradients, other: Gradients, names: tuple[str, ...] = INPUTS) -> bool:
    """Whether both are the same bit for bit."""
    pairs = [(one[name], other[name]) for name in names if name in one]
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


# -- agreement


@pytest.mark.everywhere(quick=False)
@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
@examples(4)
@given(data=st.data())
def test_agrees_with_the_reference(device: str, keep: bool, data: st.DataObject):
    args = data.draw(cases(device, SOME)).arguments(device)
    of = weights(args)
    assert_agrees(args, of, differentiated(args, of, disable_recompute=keep))


@pytest.mark.everywhere(quick=False)
@pytest.mark.parametrize(
    "case",
    [
        Case(PACKED, (70,), group=2, tail=3),
        pytest.param(Case(WIDE_K, (66,), group=1), marks=pytest.mark.slow),
        pytest.param(Case(WIDE_V, (64, 0, 3)), marks=pytest.mark.slow),
        pytest.param(Case(replace(WIDE_V, dim_v=192), (64, 0, 3)), marks=pytest.mark.slow),
        pytest.param(Case(SMALL, (130,), negative=True), marks=pytest.mark.slow),
        pytest.param(Case(DECAYS, (65, 3), scale=0.3), marks=pytest.mark.slow),
    ],
    ids=["packed", "wide K", "wide V", "V of 192", "small", "decays"],
)
def test_kept_results_change_no_bit(device: str, case: Case):
    args = case.arguments(device)
    of = weights(args)
    found = differentiated(args, of)
    assert_agrees(args, of, found)
    assert same(found, differentiated(args, of, **KEEP))


@pytest.mark.everywhere(quick=False)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "gates"),
    [(PLAIN, "weak"), (PLAIN, "mixed"), (DECAYS, "weak"), (WIDE_V, "weak"), (WIDE_V, "mixed")],
)
def test_no_worse_than_autocast(device: str, kind: Kind, gates: str):
    """Beside a baseline that knows nothing of the kernels: PyTorch differentiates the chunked
    definition, and autocast rounds the operands and results of products."""
    args = Case(kind, (130,), gates=gates, seed=4).arguments(device)
    of = weights(args)
    found = differentiated(args, of)
    leaves = {name: args[name].detach().requires_grad_() for name in found}
    with torch.autocast(torch.device(device).type, args["q"].dtype):
        stages = kda_chunk_reference(**definition(bounded(args)) | leaves, dtype=torch.float32)
    results = {"do": stages.o, "dfinal_state": stages.states.final_state}
    plain = torch.autograd.grad(
        [results[name] for name in of],
        list(leaves.values()),
        [x.to(results[name].dtype) for name, x in of.items()],
    )
    exact = kda_gradients(**definition(args), **of)._asdict()
    for name, theirs in zip(leaves, plain, strict=True):
        if name != "A_log":  # a few numbers, see `_terms`
            true = exact[f"d{name}"].view(theirs.shape)
            assert_no_worse(found[name], theirs, true, f"gradient of {name}")


@pytest.mark.everywhere(quick=False)
@pytest.mark.parametrize("gates", [pytest.param(x, marks=pytest.mark.slow) for x in GATES])
def test_gates_of_any_kind(device: str, gates: str):
    for kind, lengths in ((PLAIN, (130,)), (DECAYS, (64, 0, 70)), (WIDE_V, (129, 1))):
        args = Case(kind, lengths, gates=gates, alike=gates == "weak", seed=3).arguments(device)
        of = weights(args)
        assert_agrees(args, of, differentiated(args, of))


@pytest.mark.everywhere(quick=False)
@pytest.mark.parametrize(
    "gate",
    [pytest.param(x, marks=pytest.mark.slow) for x in ("a few", 0.0, -1e-6, -5.0, -20.0, -1000.0)],
)
def test_gates_of_any_size(device: str, gate: float | str):
    """Each token has the gate, or a few tokens have it among small gates."""
    args = Case(DECAYS, (66,), seed=6).arguments(device)
    if gate == "a few":
        args["g"].fill_(-0.01)
        args["g"][:, [5, 17, 50]] = -1000.0
    else:
        args["g"].fill_(gate)
    of = weights(args)
    found = differentiated(args, of)
    if gate == -1000.0:  # nothing is left of the past: these gradients are 0 in float32
        assert found["g"].abs().max() < 1e-30
    assert_agrees(args, of, found)


@pytest.mark.everywhere(quick=False)
@pytest.mark.parametrize(
    "bias", [-16.0, *(pytest.param(b, marks=pytest.mark.slow) for b in (-13.0, -60.0))]
)
def test_gates_of_nearly_0(device: str, bias: float):
    """exp of such a bias is lost beside 1, but it is the gradient of A_log that is left."""
    args = Case(PACKED, (70,), group=2, tail=3).arguments(device)
    args["dt_bias"].fill_(bias)
    of = weights(args)
    assert_agrees(args, of, differentiated(args, of))


@pytest.mark.everywhere(quick=False)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scale", "size"),
    [(PACKED, 2.0**-60, 1e8), (PACKED, -(2.0**60), 1e-3), (SMALL, 2.0**-10, 1.0)],
    ids=["small", "large", "small, float16"],
)
def test_scales_up_to_the_limits(device: str, kind: Kind, scale: float, size: float):
    args = Case(kind, (100,), scale=scale, seed=9).arguments(device)
    args["q"] *= size
    of = weights(args)
    assert_agrees(args, of, differentiated(args, of))


@pytest.mark.everywhere(quick=False)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_over_many_draws(device: str, dtype: torch.dtype):
    """The error rule for all draws together. Few elements have most of the error of a gradient of
    beta, so that in one draw it may be several times that of a plain implementation, or a part."""
    kind = replace(PLAIN, dtype=dtype, dim_k=64, dim_v=64)
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    for seed in range(16):
        gates = ("usual", "weak", "strong", "mixed")[seed % 4]
        case = Case(kind, (200,), gates=gates, negative=seed % 8 > 3, seed=seed)
        args = case.arguments(device)
        of = weights(args, seed)
        found = differentiated(args, of)
        exact = kda_gradients(**definition(args), **of)
        plain = kda_chunk_gradients(
            **definition(bounded(args)), **of, dtype=torch.float32, stage_dtype=dtype
        )
        for i, (name, true) in enumerate(zip(INPUTS, exact, strict=True)):
            if name in found and name != "A_log":  # a few numbers, see `_terms`
                size = true.norm().item() ** 2
                x, y = found[name].view(true.shape), plain[i].to(found[name].dtype)
                for sums, z in ((ours, x), (theirs, y)):
                    error = (z.double().view(true.shape) - true).norm().item() ** 2
                    sums[name] = sums.get(name, 0.0) + error / size
    for name in ours:
        assert ours[name] <= 4 * theirs[name], f"{name}: {(ours[name] / theirs[name]) ** 0.5:.2f}"


@pytest.mark.everywhere(quick=False)
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "beta"), ONE_BETA)
def test_one_beta_for_tokens_with_similar_keys(device: str, dtype: torch.dtype, beta: float):
    args = Case(replace(DECAYS, dtype=dtype), (256,), group=1).arguments(device)
    give_one_beta(args, beta)
    of = weights(args)
    assert_agrees(args, of, differentiated(args, of))


@pytest.mark.everywhere(quick=False)
@pytest.mark.slow
def test_beta_of_0_counts_as_the_smallest_where_a_gradient_is_needed(device: str):
    """With float16 that is 2**-14, and the state moves as far as the definition says."""
    args = Case(SMALL, (66,), group=1, gates="weak", seed=5).arguments(device)
    args["beta"].fill_(-math.inf)  # before its sigmoid
    leaf = args["v"].detach().requires_grad_()
    _, without = cute_attn.chunk_kda(**args)
    _, state = cute_attn.chunk_kda(**args | {"v": leaf})
    smallest = torch.full_like(args["beta"], 2.0**-14, dtype=torch.float64).logit()
    exact = kda_reference(**definition(args)).final_state
    moved = kda_reference(**definition(args) | {"beta": smallest}).final_state - exact
    found = (state - without).double()
    assert (without - exact).norm() < 1e-5 * exact.norm()
    assert (found - moved).norm() < 2 * torch.finfo(torch.float16).eps * moved.norm()


@pytest.mark.everywhere(quick=False)
@pytest.mark.slow
@examples(3)
@given(data=st.data())
def test_sequences_in_segments(device: str, data: st.DataObject):
    of_kinds = [PLAIN, DECAYS, SMALL, WIDE_V] if FULL else [PACKED, SMALL]
    args = data.draw(cases(device, of_kinds)).arguments(device)
    of = weights(args)
    length = data.draw(st.integers(1, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_passes, "chunks_per_segment", lambda *_, **__: length)
        patch.setattr(launch, "num_sms", lambda _: 10**6)
        for one in (chunk._chunk, BACKWARD):
            patch.setattr(one, "ready", {})
        assert_agrees(args, of, differentiated(args, of))


# -- exact properties


@pytest.mark.slow
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=pytest.mark.slow), "sm_100a"])
def test_no_schedule_changes_a_bit(arch: str):
    """The gradients are the same under any schedule of warps and CTAs, and with any number of
    SMs; tokens of no sequence have none. A few gates are large, the others small."""
    args = Case(PACKED, (66, 0, 3), lead=2, tail=3, group=2, gates="mixed").arguments("cpu")
    of = weights(args)
    results = []
    for num_sms, schedule, seed in ((4, "fair", 0), (3, "random", 3)):
        emulator = Emulator(num_sms=num_sms, schedule=schedule, seed=seed)
        with cute_attn.emulated(arch, emulator):
            results.append(differentiated(args, of))
        assert not emulator.report.findings, emulator.report
    assert same(*results)
    assert_agrees(args, of, results[0])
    for name in TOKENS:
        x = results[0][name]
        assert not x[:, :2].any() and not x[:, -3:].any()


@pytest.mark.everywhere(quick=False)
@pytest.mark.slow
@examples(3)
@given(data=st.data())
def test_repeated_runs_are_bitwise_equal(device: str, data: st.DataObject):
    args = data.draw(cases(device)).arguments(device)
    of = weights(args)
    assert same(differentiated(args, of), differentiated(args, of))


@pytest.mark.everywhere(quick=False)
@pytest.mark.slow
@examples(2)
@given(data=st.data())
def test_layouts_do_not_matter(device: str, data: st.DataObject):
    case = replace(data.draw(cases(device)), layout="contiguous")
    args = case.arguments(device)
    of = weights(args)
    first = differentiated(args, of)
    for layout in ("heads_first", "projection", "misaligned"):
        assert same(first, differentiated(replace(case, layout=layout).arguments(device), of))


@pytest.mark.everywhere(quick=False)
@pytest.mark.slow
@examples(3)
@given(data=st.data())
def test_grouped_heads_are_repeated_heads(device: str, data: st.DataObject):
    """To the last bit for what each value head has of its own; q and k get the sum over a group,
    which is rounded once."""
    case = data.draw(cases(device))
    args = case.arguments(device)
    of = weights(args)
    repeated = {name: args[name].repeat_interleave(case.group, dim=2) for name in ("q", "k")}
    grouped, single = differentiated(args, of), differentiated(args, of, **repeated)
    assert same(grouped, single, ("v", "g", "beta", "A_log", "dt_bias", "initial_state"))
    if case.group == 1:
        assert same(grouped, single)
    for name in ("q", "k"):
        parts = single[name].double().unflatten(2, (case.heads, case.group))
        rounding = torch.finfo(args[name].dtype).eps * parts.abs().sum(3) + 1e-6
        assert ((grouped[name].double() - parts.sum(3)).abs() <= rounding).all()


@pytest.mark.everywhere(quick=False)
@pytest.mark.slow
@examples(3)
@given(data=st.data())
def test_packed_sequences_are_sequences_alone(device: str, data: st.DataObject):
    """Packed with others, packed alone, and as a batch of one."""
    case = data.draw(cases(device, [DECAYS, PACKED, WIDE_V]))
    args = case.arguments(device)
    of = weights(args)
    together = differentiated(args, of)
    names = (*TOKENS, "initial_state")
    for n, (_, rows) in enumerate(spans(args)):
        one = tokens_of(args, rows)
        if case.kind.initial:
            one["initial_state"] = args["initial_state"][n : n + 1]
        length = one["q"].shape[1]
        one["cu_seqlens"] = torch.tensor([0, length]).to(args["cu_seqlens"])
        alone = {name: x[:, rows] for name, x in together.items() if name in TOKENS}
        if case.kind.initial:
            alone["initial_state"] = together["initial_state"][n : n + 1]
        of_one = {"do": of["do"][:, rows], "dfinal_state": of["dfinal_state"][n : n + 1]}
        assert same(alone, differentiated(one, of_one), names)
        del one["cu_seqlens"]
        assert same(alone, differentiated(one, of_one), names)


@pytest.mark.everywhere(quick=False)
@pytest.mark.slow
@examples(3)
@given(data=st.data())
def test_what_has_no_effect_has_no_gradient_and_changes_none(device: str, data: st.DataObject):
    """Tokens behind the last one whose output counts."""
    case = data.draw(cases(device, [PLAIN, SMALL]))
    case = replace(case, layout="contiguous")
    args = case.arguments(device) | {"output_final_state": False}
    cut = data.draw(st.integers(1, case.lengths[0]))
    of = weights(args)
    of["do"][:, cut:] = 0.0
    found = differentiated(args, of)
    assert not any(found[name][:, cut:].any() for name in TOKENS)
    other = replace(case, seed=case.seed + 1).arguments(device)
    mixed = args | {
        name: torch.cat([args[name][:, :cut], other[name][:, cut:]], dim=1) for name in TOKENS
    }
    assert same(found, differentiated(mixed, of), (*TOKENS, "initial_state"))
    head = tokens_of(args, slice(0, cut))
    alone = {name: x[:, :cut] for name, x in found.items() if name in TOKENS}
    assert same(alone, differentiated(head, {"do": of["do"][:, :cut]}), TOKENS)


@pytest.mark.everywhere(quick=False)
@pytest.mark.slow
@examples(3)
@given(data=st.data())
def test_two_calls_chained_through_the_state_are_one(device: str, data: st.DataObject):
    """To the last bit where a chunk ends at the cut, but for sums over all tokens."""
    case = data.draw(cases(device, [PLAIN, SMALL]))
    case = replace(case, layout="contiguous")
    args = case.arguments(device)
    tokens = case.lengths[0]
    of = weights(args)
    cut = data.draw(
        st.integers(0, tokens) | st.sampled_from((0, 64, 128)).map(lambda n: min(n, tokens))
    )
    names = [name for name in INPUTS if name in args]
    leaves = {name: args[name].detach().requires_grad_() for name in names}
    whole = args | leaves
    o_first, state = cute_attn.chunk_kda(**tokens_of(whole, slice(0, cut)))
    o_rest, state = cute_attn.chunk_kda(
        **tokens_of(whole, slice(cut, None)) | {"initial_state": state}
    )
    found = torch.autograd.grad(
        [torch.cat([o_first, o_rest], dim=1), state],
        list(leaves.values()),
        [of["do"], of["dfinal_state"]],
    )
    chained = dict(zip(names, found, strict=True))
    if cut % 64 == 0:
        assert same(differentiated(args, of), chained, (*TOKENS, "initial_state"))
    assert_agrees(args, of, chained)
