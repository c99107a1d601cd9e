"""The backward of KDA's stages, put together as a training stack would, gives the gradients of
chunk_kda. The kernels' tests (tests/kernels/test_kda_stages_backward.py) look at each alone.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cute_attn.ops import kda

from .kda_cases import DECAYS, SMALL, WIDE_K, WIDE_V, Case, cases, examples, poisoned_outputs
from .test_kda_gradients import Gradients, assert_agrees, same, weights

# The stages know neither norms nor the sigmoid.
NO_NORMS = {"l2norm": False, "sigmoid": False}
FEW = replace(SMALL, **NO_NORMS)
OF = [replace(kind, **NO_NORMS) for kind in (DECAYS, SMALL, WIDE_V, WIDE_K)]


def put_together(args: dict[str, Any], of: dict[str, Tensor]) -> Gradients:
    """The gradients by the stages, forwards and backwards, in the dtypes of the arguments."""
    q, k, v, g, beta = (args[name] for name in ("q", "k", "v", "g", "beta"))
    names = ("A_log", "dt_bias", "lower_bound", "use_gate_in_kernel")
    gate = {name: args[name] for name in names if name in args}
    packed = {"cu_seqlens": args["cu_seqlens"]} if "cu_seqlens" in args else {}
    v_first = {"state_v_first": args["state_v_first"]} | packed
    scale = args.get("scale") or q.shape[-1] ** -0.5
    initial_state, dfinal_state = args.get("initial_state"), of.get("dfinal_state")
    with torch.no_grad(), poisoned_outputs():
        G = kda.kda_gate_cumsum(g, **gate, **packed)
        intra = kda.kda_chunk_intra(q, k, v, G, beta, scale, output_qg=True, **packed)
        states = kda.kda_chunk_delta_h(intra.kg, intra.w, intra.u, G, initial_state, **v_first)
        assert intra.qg is not None and states.v_new is not None

        do = of["do"]
        dAqk, dv = kda.kda_chunk_output_backward(states.v_new, intra.Aqk, do, scale, **packed)
        dh, dinitial_state, dv = kda.kda_chunk_delta_h_backward(
            intra.qg, intra.kg, intra.w, G, do, dv, dfinal_state, scale,
            output_dinitial_state=initial_state is not None, **v_first,
        )  # fmt: skip
        dq, dk, dv, dbeta, dg, dAkk = kda.kda_recompute_w_u_backward(
            q, k, v, states.v_new, G, beta, intra.Akk, states.h, do, dh, dv, scale, **v_first
        )
        dq, dk, dbeta, dg = kda.kda_chunk_intra_backward(
            q, k, G, beta, dAqk, dAkk, dq, dk, dbeta, dg, **packed
        )
        dg, dA_log, ddt_bias = kda.kda_gate_cumsum_backward(dg, g, **gate, **packed)
    found = {"q": dq.to(q.dtype), "k": dk.to(q.dtype), "v": dv, "g": dg}
    found |= {"beta": dbeta.to(beta.dtype)}
    if initial_state is not None:
        assert dinitial_state is not None
        found["initial_state"] = dinitial_state.to(initial_state.dtype)
    others = {"A_log": dA_log, "dt_bias": ddt_bias}
    return found | {name: x for name, x in others.items() if x is not None}


def blanked(args: dict[str, Any], found: Gradients) -> Gradients:
    """The gradients with 0 for tokens of no sequence, where those of the stages are undefined."""
    if "cu_seqlens" not in args:
        return found
    first, last = (int(args["cu_seqlens"][i]) for i in (0, -1))
    for name in ("q", "k", "v", "g", "beta"):
        found[name][:, :first] = 0
        found[name][:, last:] = 0
    return found


def check(case: Case, device: str) -> None:
    args = case.arguments(device)
    of = weights(args)
    assert_agrees(args, of, blanked(args, put_together(args, of)))


@pytest.mark.everywhere(quick=False)
def test_together_they_make_the_gradient(device: str) -> None:
    check(Case(FEW, (70,)), device)


@pytest.mark.everywhere
@pytest.mark.slow
@examples(4)
@given(data=st.data())
def test_together_they_make_the_gradient_of_any_call(device: str, data: st.DataObject) -> None:
    case = data.draw(cases(device, OF))
    check(replace(case, negative=False), device)


@pytest.mark.everywhere
@pytest.mark.slow
def test_every_run_gives_the_same_bits(device: str) -> None:
    args = Case(OF[0], (70, 0, 1, 64), group=3, tail=2).arguments(device)
    of = weights(args)
    one, other = (blanked(args, put_together(args, of)) for _ in range(2))
    assert same(one, other)


@pytest.mark.everywhere
@pytest.mark.slow
def test_packed_sequences_are_each_sequence_alone(device: str) -> None:
    args = Case(OF[0], (70, 64, 1), tail=1).arguments(device)
    of = weights(args)
    found = put_together(args, of)
    offsets = args["cu_seqlens"].tolist()
    names = ("q", "k", "v", "g", "beta")
    for n, (start, end) in enumerate(itertools.pairwise(offsets)):
        at = (slice(None), slice(start, end))
        alone = args | {name: args[name][at] for name in names}
        alone["cu_seqlens"] = args["cu_seqlens"].new_tensor([0, end - start])
        alone["initial_state"] = args["initial_state"][n : n + 1]
        weight = {"do": of["do"][at], "dfinal_state": of["dfinal_state"][n : n + 1]}
        got = put_together(alone, weight)
        assert same(got, {name: found[name][at] for name in names}, names)
        assert torch.equal(got["initial_state"][0], found["initial_state"][n])


@pytest.mark.everywhere
@pytest.mark.slow
def test_the_registered_operators_are_well_behaved(device: str) -> None:
    args = Case(replace(FEW, index=torch.int32, dt_bias=True), (5, 60)).arguments(device)
    q, k, v, beta, cu_seqlens = (args[name] for name in ("q", "k", "v", "beta", "cu_seqlens"))
    g, A_log, dt_bias = (args[name] for name in ("g", "A_log", "dt_bias"))
    G = kda.kda_gate_cumsum(
        g, A_log=A_log, lower_bound=-5.0, use_gate_in_kernel=True, cu_seqlens=cu_seqlens
    )
    named = {"cu_seqlens": cu_seqlens, "output_qg": True}
    Aqk, Akk, w, u, qg, kg = kda.kda_chunk_intra(q, k, v, G, beta, **named)
    h, v_new, _ = kda.kda_chunk_delta_h(kg, w, u, G, state_v_first=True, cu_seqlens=cu_seqlens)
    dA, dv = kda.kda_chunk_output_backward(v_new, Aqk, u, 0.5, cu_seqlens=cu_seqlens)
    dbeta = beta.float()
    operators = torch.ops.cute_attn
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (operators.kda_chunk_output_backward, (v_new, Aqk, u, 0.5, cu_seqlens)),
        (
            operators.kda_chunk_delta_h_backward,
            (qg, kg, w, G, u, dv, None, None, True, True, cu_seqlens, 2),
        ),
        (
            operators.kda_recompute_w_u_backward,
            (q, k, v, v_new, G, beta, Akk, h, u, h, dv, None, True, cu_seqlens),
        ),
        (
            operators.kda_chunk_intra_backward,
            (q, k, G, beta, dA, dA, G, G, dbeta, G, cu_seqlens),
        ),
        (
            operators.kda_gate_cumsum_backward,
            (G, g, A_log, dt_bias, -5.0, True, cu_seqlens),
        ),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator.default, arguments)
