"""gated_delta_rule_decode, fused_recurrent_gated_delta_rule, and the convolution of both decodes:
agreement with the float64 reference, and exact properties.

Each test runs on the GPU, where there is one, and in the emulator under a random schedule. What
KDA's tests check of the shared kernels is not repeated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cute_attn
from cute_attn.reference.gated_delta_rule import (
    gated_delta_rule_chunk_reference,
    gated_delta_rule_decode_reference,
    gated_delta_rule_reference,
)

from .kda_decode_cases import (
    GATED_DELTA_RULE,
    Case,
    Kernel,
    assert_agrees,
    assert_equal,
    cases,
    repeated_heads,
    run,
)
from .lightning_cases import assert_no_worse, few

PLAIN, CONV, POSITIONS, RECORDED, *_ = GATED_DELTA_RULE
each_kernel = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, id=str(n), marks=() if n < 3 else pytest.mark.slow)
        for n, kernel in enumerate(GATED_DELTA_RULE)
    ],
)


def case_of(kernel: Kernel, seed: int = 0) -> Case:
    """Two sequences of two value heads for a head of q and k; one sequence is padding."""
    padded = int(kernel.slots in ("indexed", "positions", "records"))
    tokens = 3 if kernel.multi_token else 1
    return Case(kernel, batch=2 + padded, tokens=tokens, padded=padded, packing="packed", seed=seed)


# ---- agreement


@pytest.mark.everywhere
@each_kernel
def test_agrees_with_the_reference(device: str, kernel: Kernel):
    args = case_of(kernel).inputs(device)
    assert_agrees(args, run(args))


@pytest.mark.slow
@pytest.mark.everywhere
@few
@given(data=st.data())
def test_agrees_whatever_is_drawn(device: str, data: st.DataObject):
    args = data.draw(cases(device, GATED_DELTA_RULE)).inputs(device)
    result = run(args)
    assert_agrees(args, result)
    assert_equal(result, run(args))  # bitwise, in another order of CTAs


def of_kda(case: Case, args: dict[str, Any]) -> dict[str, Any]:
    """The call of kda_decode with the same gate in all channels of a head."""
    dim = case.kernel.head_dim_k
    same = {"g": args["g"].unsqueeze(-1).expand(*args["g"].shape, dim).contiguous()}
    if "dt_bias" in args:
        same["dt_bias"] = args["dt_bias"].repeat_interleave(dim)
    if "record_g" in args:
        same["record_g"] = args["record_g"].unsqueeze(-1).repeat(1, 1, 1, dim)
    return args | same


@pytest.mark.everywhere
@pytest.mark.parametrize(
    "kernel", [PLAIN, pytest.param(CONV, marks=pytest.mark.slow)], ids=["plain", "convolution"]
)
def test_is_kda_with_equal_gates_bitwise(device: str, kernel: Kernel):
    case = case_of(kernel)
    args = case.inputs(device)
    assert_equal(run(args), run(of_kda(case, args)))


@pytest.mark.slow
@pytest.mark.everywhere
def test_records_are_those_of_kda(device: str):
    case = case_of(RECORDED)
    args = case.inputs(device)
    ours, theirs = run(args), run(of_kda(case, args))
    assert torch.equal(ours.record_g, theirs.record_g[..., 0])
    assert_equal(ours._replace(record_g=None), theirs._replace(record_g=None))


# ---- exact properties


@pytest.mark.everywhere
@pytest.mark.parametrize(
    "kernel", [CONV, pytest.param(POSITIONS, marks=pytest.mark.slow)], ids=["slots", "positions"]
)
def test_only_named_slots_change_and_padding_is_zero(device: str, kernel: Kernel):
    case = case_of(kernel)
    args = case.inputs(device)
    result = run(args)
    indices = args["state_indices"].reshape(case.batch, -1).long()
    padded = indices[:, 0] < 0
    assert not result.o[padded].any() and padded.any()
    for name, named in (("state", indices[~padded]), ("conv_state", indices[~padded, 0])):
        untouched = torch.ones(case.slots, dtype=torch.bool, device=device)
        untouched[named.reshape(-1)] = False
        assert torch.equal(getattr(result, name)[untouched], args[name][untouched])
        assert not torch.equal(getattr(result, name)[named], args[name][named])


@pytest.mark.slow
@pytest.mark.everywhere
@each_kernel
def test_grouped_heads_equal_repeated_heads_bitwise(device: str, kernel: Kernel):
    case = replace(case_of(kernel), heads=2)
    args = case.inputs(device)
    grouped, single = run(args), run(repeated_heads(case, args))
    assert torch.equal(grouped.o, single.o)
    assert torch.equal(grouped.state, single.state)
    if grouped.conv_state is not None:
        assert torch.equal(
            repeated_heads(case, {"conv_state": grouped.conv_state})["conv_state"],
            single.conv_state,
        )


def of_tokens(args: dict[str, Any], tokens: Any) -> dict[str, Any]:
    of_steps = ("q", "k", "v", "g", "beta", "out")
    return {name: x[:, tokens] if name in of_steps else x for name, x in args.items()}


@pytest.mark.slow
@pytest.mark.everywhere
@pytest.mark.parametrize("decays", ["channel", "head"])
@pytest.mark.parametrize("v_first", [True, False])
def test_tokens_at_once_are_calls_in_turn_bitwise(device: str, decays: str, v_first: bool):
    kernel = replace(CONV, decays=decays, multi_token=True, state_v_first=v_first)
    args = replace(case_of(kernel), tokens=5).inputs(device)
    at_once, carried, outs = run(args), args, []
    for t in range(5):
        result = run(of_tokens(carried, t))
        carried = carried | {"state": result.state, "conv_state": result.conv_state}
        outs.append(result.o)
    assert torch.equal(at_once.o, torch.stack(outs, dim=1))
    assert torch.equal(at_once.state, carried["state"])
    assert torch.equal(at_once.conv_state, carried["conv_state"])


@pytest.mark.slow
@pytest.mark.everywhere
@pytest.mark.parametrize("seed", range(2))
def test_a_chain_with_a_slot_for_each_position_is_plain_decoding(device: str, seed: int):
    """Drafts of some calls, of which some are accepted, against the accepted tokens one by one."""
    case = Case(POSITIONS, batch=2, tokens=4, seed=seed, packing="separate")
    args = case.inputs(device)
    first = args["state_indices"][:, 0]
    plain = {"state": args["state"], "conv_state": args["conv_state"][..., :3].contiguous()}
    accepted = torch.ones(2, dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(seed)
    for i in range(3):
        new = replace(case, seed=seed + 10 + i).inputs(device)
        args |= {name: new[name] for name in ("q", "k", "v", "g", "beta")}
        args["num_accepted_tokens"] = accepted
        result = run(args)
        args |= {"state": result.state, "conv_state": result.conv_state}
        accepted = torch.randint(1, 5, (2,), generator=generator).to(device, torch.int32)
        for b in range(2):
            one = {
                name: x for name, x in args.items() if name not in ("num_accepted_tokens", "out")
            }
            one |= {name: args[name][b : b + 1] for name in ("q", "k", "v", "g", "beta")}
            one = of_tokens(one, slice(0, int(accepted[b])))
            one |= plain | {"state_indices": first[b : b + 1].clone()}
            found = run(one)
            plain = {"state": found.state, "conv_state": found.conv_state}
            assert torch.equal(found.o[0], result.o[b, : accepted[b]])


@pytest.mark.slow
@pytest.mark.everywhere
@pytest.mark.parametrize("count", [-(2**31), 0, 6, 2**31 - 1])
def test_accepted_counts_out_of_bounds_are_clamped(device: str, count: int):
    args = Case(POSITIONS, tokens=2).inputs(device)
    args["num_accepted_tokens"].fill_(count)
    result = run(args)
    args["num_accepted_tokens"].fill_(min(max(count, 1), 5))
    assert_equal(result, run(args))


@pytest.mark.everywhere
def test_a_sequence_without_a_state_starts_from_zero(device: str):
    """Its slot and its window may hold anything."""
    args = case_of(CONV).inputs(device)
    slots = args["state_indices"].long()
    used = (slots >= 0).nonzero().view(-1).tolist()
    flags = torch.ones(3, dtype=torch.bool, device=device)
    flags[used[0]] = False
    emptied = dict(args)
    for name in ("state", "conv_state"):
        emptied[name], args[name] = args[name].clone(), args[name].clone()
        emptied[name][slots[used[0]]] = 0
        args[name][slots[used[0]]] = torch.nan
    fresh, expected = run(args | {"has_initial_state": flags}), run(emptied)
    assert_equal(fresh, expected)


@pytest.mark.slow
@pytest.mark.everywhere
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_servers_call_it_without_a_gather(device: str, index: torch.dtype):
    """q, k and v of one projection, a column of a block table, slot 0 as padding, packed sequences
    of which one is empty, a window with its channels contiguous: as vLLM's verification."""
    case = Case(POSITIONS, batch=4, tokens=3, packing="packed")
    args = case.inputs(device)
    lengths = [3, 0, 1, 2]
    for name in ("q", "k", "v", "g", "beta", "out"):
        rows = [x[:n] for x, n in zip(args[name], lengths, strict=True)]
        args[name] = torch.cat(rows).unsqueeze(0)
    args["cu_seqlens"] = torch.tensor([0, 3, 3, 4, 6], dtype=index, device=device)
    table = torch.full((4, 9), 10**6, dtype=index, device=device)
    table[:, :5] = args["state_indices"] + 1
    table[3, :5] = 0
    args |= {"state_indices": table[:, :5], "pad_slot_id": 0}
    for name in ("state", "conv_state"):
        args[name] = torch.cat([args[name][:1], args[name]])
    assert_agrees(args, run(args))


@pytest.mark.slow
@pytest.mark.everywhere
def test_a_window_past_the_pool_is_padding(device: str):
    args = case_of(CONV).inputs(device)
    args["state_indices"] = torch.tensor([0, 3, 1], dtype=torch.int32, device=device)
    result = run(args | {"conv_state": args["conv_state"][:3]})
    assert not result.o[1].any() and result.o[0].any() and result.o[2].any()
    assert torch.equal(result.state[3], args["state"][3])


@pytest.mark.slow
@pytest.mark.everywhere
def test_what_is_not_finite_stays_in_its_sequence(device: str):
    args = replace(case_of(CONV), batch=3, padded=0).inputs(device)
    slots = args["state_indices"].long()
    args["conv_state"][slots[0], 3] = torch.nan
    args["q"][1, 0, 5] = torch.inf
    o = run(args).o
    assert not o[0].isfinite().any() and o[2].isfinite().all()


# ---- the recurrent form


def sequences(device: str, decays_in_kernel: bool, tokens: int = 7) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    args: dict[str, Any] = {
        "q": normal(1, tokens, 1, 64).bfloat16(),
        "k": torch.nn.functional.normalize(normal(1, tokens, 1, 64), dim=-1).bfloat16(),
        "v": normal(1, tokens, 2, 64).bfloat16(),
        "g": -normal(1, tokens, 2).abs(),
        "beta": normal(1, tokens, 2).sigmoid(),
        "initial_state": normal(3, 2, 64, 64),
        "cu_seqlens": torch.tensor([0, 4, 4, 7], device=device),
    }
    if decays_in_kernel:
        args |= {
            "use_gate_in_kernel": True,
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "A_log": normal(2),
            "dt_bias": normal(1, 2).double(),  # copied
        }
    return args


@pytest.mark.everywhere
@pytest.mark.parametrize("in_kernel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_recurrent_form_agrees_with_the_reference(device: str, in_kernel: bool):
    assert_recurrent_agrees(device, in_kernel)


def assert_recurrent_agrees(device: str, in_kernel: bool) -> None:
    args = sequences(device, in_kernel)
    o, state = cute_attn.fused_recurrent_gated_delta_rule(**args, output_final_state=True)
    exact = gated_delta_rule_reference(**args)
    plain = gated_delta_rule_reference(**args, dtype=torch.float32)
    assert_no_worse(o, plain.o.to(o.dtype), exact.o)
    assert state is not None
    assert_no_worse(state, plain.final_state, exact.final_state)


@pytest.mark.slow
@pytest.mark.everywhere
def test_no_gate_is_no_decay_and_no_beta_is_one(device: str):
    args = sequences(device, False)
    given = args | {"g": torch.zeros_like(args["g"]), "beta": torch.ones_like(args["beta"])}
    expected = cute_attn.fused_recurrent_gated_delta_rule(**given)[0]
    without = args | {"g": None, "beta": None}
    assert torch.equal(cute_attn.fused_recurrent_gated_delta_rule(**without)[0], expected)


@pytest.mark.everywhere(quick=False)
@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_decays_of_channels_are_kdas(device: str, both: bool):
    """With g too, the decays are multiplied."""
    args = sequences(device, False) | {"output_final_state": True}
    g, beta = args.pop("g"), args.pop("beta")
    gk = -torch.rand(*g.shape, args["q"].shape[-1], device=device)
    gates = gk + g.float().unsqueeze(-1) if both else gk
    found = cute_attn.fused_recurrent_gated_delta_rule(
        **args, g=g if both else None, gk=gk, beta=beta
    )
    expected = cute_attn.fused_recurrent_kda(**args, g=gates, beta=beta)
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
@pytest.mark.everywhere
def test_a_prompt_by_chunks_and_then_a_token_is_the_sequence(device: str):
    """The error is at most twice that of plain PyTorch in the same two steps."""
    args = sequences(device, True, tokens=71)
    del args["cu_seqlens"], args["initial_state"]
    tokens = ("q", "k", "v", "g", "beta")
    prompt = args | {name: args[name][:, :70] for name in tokens}
    last = {name: args[name][:, 70].contiguous() for name in tokens}
    last |= {name: args[name].flatten().float() for name in ("A_log", "dt_bias")}
    exact = gated_delta_rule_reference(**args)

    _, state = cute_attn.chunk_gated_delta_rule(
        **prompt, state_v_first=True, output_final_state=True
    )
    assert state is not None
    o = cute_attn.gated_delta_rule_decode(**last, state=state)
    stages = gated_delta_rule_chunk_reference(
        **prompt, state_v_first=True, dtype=torch.float32, stage_dtype=torch.bfloat16
    )
    plain = gated_delta_rule_decode_reference(
        **last, state=stages.states.final_state, dtype=torch.float32
    )
    assert_no_worse(o, plain.o.to(o.dtype), exact.o[:, 70])
    assert_no_worse(state.mT, plain.state.mT, exact.final_state)


@pytest.mark.slow
@pytest.mark.everywhere
def test_decode_is_the_recurrent_form_bitwise(device: str):
    kernel = replace(PLAIN, multi_token=True, slots="batch")
    args = Case(kernel, batch=2, tokens=4).inputs(device)
    result = run(args)
    state = args.pop("state")
    args.pop("out")
    o, final_state = cute_attn.fused_recurrent_gated_delta_rule(
        **args, initial_state=state, output_final_state=True
    )
    assert torch.equal(result.o, o)
    assert torch.equal(result.state, final_state)
