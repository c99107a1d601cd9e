"""The public stages of chunked KDA agree with their references, and with each other.

Each test runs on the GPU, where there is one, and in the emulator under a random schedule. A stage
is given what its reference is given, so that only its own error counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cute_attn
from cute_attn.ops.kda import (
    kda_chunk_delta_h,
    kda_chunk_intra,
    kda_chunk_output,
    kda_gate_cumsum,
    kda_recompute_w_u,
)
from cute_attn.reference import kda

from .attention_cases import OTHER_ROUNDINGS
from .kda_cases import (
    DECAYS,
    FULL,
    PACKED,
    PLAIN,
    SMALL,
    WIDE_K,
    WIDE_V,
    Case,
    assert_no_worse,
    cases,
    chunk_count,
    examples,
    gates_of,
    poisoned_outputs,
    run,
    same,
    tokens_of,
    valid,
)

# Stages know no gates, norms and flags but their own: these have every K, V, dtype and packing.
OF = [PLAIN, DECAYS, SMALL, WIDE_V, WIDE_K] if FULL else [DECAYS, SMALL]


def inputs(args: dict[str, Any]) -> dict[str, Any]:
    """What the stages of a problem take: q, k and beta as they multiply, and G in float32."""
    names = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
    q, k, _, beta = kda.prepare(
        *(args[name] for name in ("q", "k", "g", "beta")),
        **{name: args[name] for name in names if name in args},
    )
    dtype = args["q"].dtype
    total = kda.kda_gate_cumsum_reference(gates_of(args), cu_seqlens=args.get("cu_seqlens"))
    return {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": args["v"],
        "g": total.float(),
        "beta": beta.to(args["beta"].dtype),
    }


def packing(args: dict[str, Any]) -> dict[str, Any]:
    return {"cu_seqlens": args["cu_seqlens"]} if "cu_seqlens" in args else {}


def call(function: Any, *arguments: Any, **named: Any) -> Any:
    with torch.no_grad(), poisoned_outputs():
        return function(*arguments, **named)


def check(
    function: Any, definition: Any, args: dict[str, Any], *arguments: Any, **named: Any
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(a stage's result, that of its definition in float32, that in float64), all of them."""
    dtype = args["q"].dtype
    named |= packing(args)
    ours = call(function, *arguments, **named)
    defined = {name: x for name, x in named.items() if not name.startswith("output_")}
    exact = definition(*arguments, **defined)
    theirs = definition(*arguments, **defined, dtype=torch.float32, stage_dtype=dtype)
    if isinstance(ours, torch.Tensor):
        ours, theirs, exact = (ours,), (theirs,), (exact,)
    return list(zip(ours, theirs, exact, strict=True))


# -- agreement


@pytest.mark.everywhere(quick=False)
@examples(3)
@given(data=st.data())
def test_gate_cumsum(device: str, data: st.DataObject):
    assert_cumsum(data.draw(cases(device)).arguments(device))


@pytest.mark.everywhere(quick=False)
def test_gates_near_zero_are_as_accurate(device: str):
    """softplus of what is far below 0, where 1 + exp(x) has lost what counts."""
    for length in (1, 64):
        assert_cumsum(Case(PLAIN, (length,), heads=32, group=1, gates="weak").arguments(device))


def assert_cumsum(args: dict[str, Any]) -> None:
    """The error rule for G."""
    names = ("A_log", "dt_bias", "lower_bound", "use_gate_in_kernel")
    given_ = {name: args[name] for name in names if name in args} | packing(args)
    total = call(kda_gate_cumsum, args["g"], **given_)
    assert total.dtype == torch.float32 and total.shape == args["g"].shape
    exact = kda.kda_gate_cumsum_reference(gates_of(args), **packing(args))
    plain = kda.kda_gate_cumsum_reference(
        gates_of(args, torch.float32), **packing(args), dtype=torch.float32
    )
    assert_no_worse(*(valid(args, x) for x in (total, plain, exact)), "G")


@pytest.mark.everywhere(quick=False)
def test_a_long_memory_does_not_drift(device: str):
    """The state without tokens that add to it, as in `test_kda_chunk`."""
    args = Case(DECAYS, (6 * 64,), group=1).arguments(device)
    kg, w, u = (torch.zeros_like(args[name]) for name in ("k", "k", "v"))
    g = -(torch.arange(1.0, 129.0, device=device) * 2.0**-30).expand(args["g"].shape)
    total = kda.kda_gate_cumsum_reference(g, cu_seqlens=args["cu_seqlens"]).float()
    state = args["initial_state"].abs() + 1.0
    _, _, states = check(
        kda_chunk_delta_h, kda.kda_chunk_delta_h_reference, args, kg, w, u, total, state,
        output_final_state=True,
    )  # fmt: skip
    assert_no_worse(*(x.double().mean(-1) for x in states), "mean of columns")


def assert_scores_agree(
    args: dict[str, Any], *arguments: Any, results: Iterable[Any], **scale: Any
) -> None:
    """The error rule for Aqk and Akk. Short sequences have few scores, of which a single plain
    rounding may be nearly exact: where the rule fails, other roundings of its size count too."""
    options = scale | packing(args) | {"dtype": torch.float32, "stage_dtype": args["q"].dtype}
    for which, result in enumerate(results):
        ours, theirs, exact = (valid(args, x) for x in result)
        try:
            assert_no_worse(ours, theirs, exact)
        except AssertionError:
            plain = [
                kda.kda_chunk_intra_reference(
                    *arguments, **options, jitter=torch.Generator().manual_seed(seed)
                )[which]
                for seed in range(OTHER_ROUNDINGS)
            ]
            errors = [(valid(args, x).to(ours.dtype).double() - exact).norm() for x in plain]
            largest = plain[max(range(OTHER_ROUNDINGS), key=errors.__getitem__)]
            assert_no_worse(ours, valid(args, largest), exact, kda.KdaIntra._fields[which])


@pytest.mark.everywhere(quick=False)
@examples(3)
@given(data=st.data())
def test_intra(device: str, data: st.DataObject):
    case = data.draw(cases(device, OF))
    args = case.arguments(device)
    given_ = inputs(args)
    scale = {} if case.scale is None else {"scale": case.scale}
    results = check(
        kda_chunk_intra, kda.kda_chunk_intra_reference, args, *given_.values(), **scale,
        output_qg=True,
    )  # fmt: skip
    assert {ours.dtype for ours, _, _ in results} == {args["q"].dtype}
    assert_scores_agree(args, *given_.values(), results=results[:2], **scale)
    for name, result in zip(kda.KdaIntra._fields[2:], results[2:], strict=True):
        assert_no_worse(*(valid(args, x) for x in result), name)
    for ours, _, exact in results[:2]:  # Aqk and Akk, above the diagonal
        assert not valid(args, ours)[valid(args, exact) == 0].any()
    intra = call(kda_chunk_intra, *given_.values(), **scale, **packing(args))
    assert intra.qg is None
    for one, (other, _, _) in zip(intra, results, strict=True):
        if one is not None:
            assert torch.equal(valid(args, one), valid(args, other))


@pytest.mark.everywhere(quick=False)
def test_scores_of_two_tokens(device: str):
    """Each of 16 heads has one score that a decay enters, and a plain rounding of it is nearly
    exact."""
    args = Case(SMALL, (2,), heads=8, group=2, seed=7).arguments(device)
    given_ = inputs(args)
    results = check(kda_chunk_intra, kda.kda_chunk_intra_reference, args, *given_.values())
    assert_scores_agree(args, *given_.values(), results=results[:2])


@pytest.mark.everywhere(quick=False)
@examples(3)
@given(data=st.data())
def test_recompute_w_u(device: str, data: st.DataObject):
    case = data.draw(cases(device, OF))
    args = case.arguments(device)
    given_ = inputs(args)
    plain = kda.kda_chunk_intra_reference(
        *given_.values(), **packing(args), dtype=torch.float32, stage_dtype=args["q"].dtype
    )
    Akk = plain.Akk.to(args["q"].dtype)
    results = check(kda_recompute_w_u, kda.kda_recompute_w_u_reference, args, *given_.values(), Akk)
    for name, result in zip(("w", "u", "qg", "kg"), results, strict=True):
        assert_no_worse(*(valid(args, x) for x in result), name)
    if not (FULL or case.kind == DECAYS):
        return
    _, *rest = given_.values()
    less = call(kda_recompute_w_u, None, *rest, Akk, output_kg=False, **packing(args))
    assert less.qg is None and less.kg is None
    for one, (other, _, _) in zip(less[:2], results[:2], strict=True):
        assert torch.equal(valid(args, one), valid(args, other))


@pytest.mark.everywhere(quick=False)
@examples(3)
@given(data=st.data())
def test_delta_h(device: str, data: st.DataObject):
    case = data.draw(cases(device, OF))
    args = case.arguments(device)
    given_ = inputs(args)
    intra = kda.kda_chunk_intra_reference(
        *given_.values(), **packing(args), dtype=torch.float32, stage_dtype=args["q"].dtype
    )
    kg, w, u = (x.to(args["q"].dtype) for x in (intra.kg, intra.w, intra.u))
    state = args.get("initial_state")
    v_first = {"state_v_first": args["state_v_first"]}
    results = check(
        kda_chunk_delta_h, kda.kda_chunk_delta_h_reference, args, kg, w, u, given_["g"], state,
        **v_first, output_final_state=True,
    )  # fmt: skip
    (h, *other_h), v_new, final_state = results
    count = chunk_count(args)
    assert h.dtype == u.dtype and final_state[0].dtype == torch.float32
    assert_no_worse(h[:, :count], *other_h, "h")
    assert_no_worse(*(valid(args, x) for x in v_new), "v_new")
    assert_no_worse(*final_state, "final state")
    if not (FULL or case.kind == DECAYS):
        return
    less = call(
        kda_chunk_delta_h, kg, w, u, given_["g"], state, **v_first, output_v_new=False,
        **packing(args),
    )  # fmt: skip
    assert less.v_new is None and less.final_state is None
    assert torch.equal(less.h[:, :count], h[:, :count])


@pytest.mark.everywhere(quick=False)
@examples(3)
@given(data=st.data())
def test_output(device: str, data: st.DataObject):
    case = data.draw(cases(device, OF))
    args = case.arguments(device)
    given_ = inputs(args)
    scale = {} if case.scale is None else {"scale": case.scale}
    dtype = args["q"].dtype
    plain = {"dtype": torch.float32, "stage_dtype": dtype}
    intra = kda.kda_chunk_intra_reference(*given_.values(), **scale, **packing(args), **plain)
    v_first = {"state_v_first": args["state_v_first"]}
    states = kda.kda_chunk_delta_h_reference(
        intra.kg, intra.w, intra.u, given_["g"], args.get("initial_state"), **v_first,
        **packing(args), **plain,
    )  # fmt: skip
    v_new, Aqk, h = (x.to(dtype) for x in (states.v_new, intra.Aqk, states.h))
    (result,) = check(
        kda_chunk_output, kda.kda_chunk_output_reference, args, given_["q"], v_new, given_["g"],
        Aqk, h, **scale, **v_first,
    )  # fmt: skip
    assert result[0].dtype == dtype and result[0].is_contiguous()
    assert_no_worse(*(valid(args, x) for x in result), "o")


# -- exact properties


@pytest.mark.everywhere(quick=False)
@examples(2)
@given(data=st.data())
def test_recomputing_gives_what_intra_gave(device: str, data: st.DataObject):
    """By the rule, not by bits: Akk was rounded in between."""
    args = data.draw(cases(device, OF)).arguments(device)
    given_ = inputs(args)
    first = call(kda_chunk_intra, *given_.values(), **packing(args), output_qg=True)
    again = call(kda_recompute_w_u, *given_.values(), first.Akk, **packing(args))
    exact = kda.kda_recompute_w_u_reference(*given_.values(), first.Akk, **packing(args))
    for name, reference in zip(("w", "u", "qg", "kg"), exact, strict=True):
        one, other = getattr(first, name), getattr(again, name)
        assert_no_worse(*(valid(args, x) for x in (one, other, reference)), name)


@pytest.mark.everywhere(quick=False)
@examples(2)
@given(data=st.data())
def test_stages_in_turn_are_the_modular_path(device: str, data: st.DataObject):
    plain = replace(PLAIN, l2norm=False, sigmoid=False)
    case = data.draw(cases(device, [DECAYS, plain] if FULL else [DECAYS]))
    args = case.arguments(device)
    if case.kind.index is None:
        args["beta"] = args["beta"].sigmoid()
    q, k, v, g, beta = (args[name] for name in ("q", "k", "v", "g", "beta"))
    named = packing(args)
    scale = args.get("scale")
    gate = {n: args[n] for n in ("A_log", "dt_bias", "use_gate_in_kernel") if n in args}
    total = call(kda_gate_cumsum, g, **gate, **named)
    intra = call(kda_chunk_intra, q, k, v, total, beta, scale, **named)
    states = call(
        kda_chunk_delta_h, intra.kg, intra.w, intra.u, total, args["initial_state"],
        output_final_state=True, **named,
    )  # fmt: skip
    o = call(kda_chunk_output, q, states.v_new, total, intra.Aqk, states.h, scale, **named)
    assert same(args, (o, states.final_state), run(args, return_intermediate_states=True))


@pytest.mark.everywhere(quick=False)
@examples(2)
@given(data=st.data())
def test_grouped_heads_are_repeated_heads_in_every_stage(device: str, data: st.DataObject):
    case = data.draw(cases(device, OF))
    case = replace(case, heads=1, group=2)
    args = case.arguments(device)
    given_ = inputs(args)
    repeated = given_ | {
        name: given_[name].repeat_interleave(case.group, dim=2) for name in ("q", "k")
    }
    one, other = (
        call(kda_chunk_intra, *x.values(), **packing(args), output_qg=True)
        for x in (given_, repeated)
    )
    for a, b in zip(one, other, strict=True):
        assert torch.equal(valid(args, a), valid(args, b))
    grouped, alone = (
        call(kda_recompute_w_u, *x.values(), one.Akk, **packing(args)) for x in (given_, repeated)
    )
    for a, b in zip(grouped, alone, strict=True):
        assert torch.equal(valid(args, a), valid(args, b))
    named = packing(args) | {"state_v_first": case.kind.v_first}
    states = call(
        kda_chunk_delta_h, one.kg, one.w, one.u, given_["g"], args["initial_state"], **named,
        output_final_state=True,
    )  # fmt: skip
    o, o_repeated = (
        call(kda_chunk_output, x["q"], states.v_new, x["g"], one.Aqk, states.h, **named)
        for x in (given_, repeated)
    )
    assert torch.equal(valid(args, o), valid(args, o_repeated))


@pytest.mark.everywhere(quick=False)
@examples(2)
@given(data=st.data())
def test_stages_of_later_tokens_do_not_matter(device: str, data: st.DataObject):
    """To the last bit, for all but kg, which is relative to a chunk's last token."""
    case = data.draw(cases(device, [PLAIN, SMALL] if FULL else [SMALL]))
    args = case.arguments(device)
    given_ = inputs(args)
    cut = data.draw(st.integers(1, case.lengths[0]))
    head = tokens_of(given_, slice(0, cut))
    whole, part = (call(kda_chunk_intra, *x.values(), output_qg=True) for x in (given_, head))
    for name in ("Aqk", "Akk", "w", "u", "qg"):
        assert torch.equal(getattr(whole, name)[:, :cut], getattr(part, name)), name
    totals = (call(kda_gate_cumsum, x) for x in (args["g"], args["g"][:, :cut]))
    assert torch.equal(*(x[:, :cut] for x in totals))


@pytest.mark.everywhere(quick=False)
def test_layouts_do_not_matter_to_stages(device: str):
    case = Case(DECAYS, (70, 3))
    given_ = inputs(case.arguments(device))
    named = packing(case.arguments(device))
    strided = {
        name: torch.stack([x, x], dim=3)[:, :, :, 1] if x.dim() == 4 else x.mT.contiguous().mT
        for name, x in given_.items()
    }
    assert not any(strided[name].is_contiguous() for name in given_)
    one, other = (call(kda_chunk_intra, *x.values(), **named) for x in (given_, strided))
    assert all(a is b or torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.everywhere(quick=False)
def test_a_chunk_count_that_is_too_small_writes_nothing_past_the_states(device: str):
    """cu_seqlens_cpu says so, and cu_seqlens another thing."""
    args = Case(DECAYS, (100, 70), group=1).arguments(device)
    given_ = inputs(args)
    intra = call(kda_chunk_intra, *given_.values(), **packing(args))
    named = packing(args) | {"cu_seqlens_cpu": torch.tensor([0, 64, 64])}
    arguments = (intra.kg, intra.w, intra.u, given_["g"], args["initial_state"])
    states, right = (
        call(kda_chunk_delta_h, *arguments, **lengths, output_final_state=True)
        for lengths in (named, packing(args))
    )
    assert states.h.shape[1] == 1
    assert torch.equal(states.h, right.h[:, :1])
    assert torch.equal(states.v_new[:, :64], right.v_new[:, :64])


# -- the operators


@pytest.mark.everywhere(quick=False)
def test_the_registered_operators_are_well_behaved(device: str):
    args = Case(DECAYS, (5, 60)).arguments(device)
    given_ = inputs(args)
    cu_seqlens = args["cu_seqlens"]
    q, k, v, g, beta = given_.values()
    total = call(kda_gate_cumsum, g, cu_seqlens=cu_seqlens)
    intra = call(kda_chunk_intra, *given_.values(), cu_seqlens=cu_seqlens)
    states = call(
        kda_chunk_delta_h, intra.kg, intra.w, intra.u, total, args["initial_state"],
        output_final_state=True, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens.cpu(),
    )  # fmt: skip
    operators = torch.ops.cute_attn
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (operators.kda_gate_cumsum, (g, None, None, None, False, cu_seqlens)),
        (operators.kda_chunk_intra, (q, k, v, g, beta, None, cu_seqlens, True)),
        (operators.kda_chunk_intra, (q, k, v, g, beta, 0.5, cu_seqlens, False)),
        (operators.kda_recompute_w_u, (None, k, v, g, beta, intra.Akk, cu_seqlens, True)),
        (
            operators.kda_chunk_delta_h,
            (
                *(intra.kg, intra.w, intra.u, g, args["initial_state"]),
                *(True, True, False, cu_seqlens, 2),
            ),
        ),
        (
            operators.kda_chunk_output,
            (q, states.v_new, g, intra.Aqk, states.h, None, False, cu_seqlens),
        ),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator.default, arguments)


@pytest.mark.everywhere(quick=False)
def test_compiled_code_calls_the_stages(device: str):
    args = Case(SMALL, (70,)).arguments(device)
    given_ = inputs(args)

    def layer(q: Any, k: Any, v: Any, g: Any, beta: Any) -> torch.Tensor:
        intra = kda_chunk_intra(q, k, v, g, beta, output_qg=True)
        states = kda_chunk_delta_h(intra.kg, intra.w, intra.u, g, state_v_first=True)
        return kda_chunk_output(q, states.v_new, g, intra.Aqk, states.h, state_v_first=True)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*given_.values()), layer(*given_.values()))


@pytest.mark.gpu
def test_a_cuda_graph_of_the_modular_path():
    args = Case(PACKED, (100, 0, 70)).arguments("cuda") | {"return_intermediate_states": True}
    expected = run(args)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        captured = cute_attn.chunk_kda(**args)[:2]
    graph.replay()
    assert same(args, expected, captured)
