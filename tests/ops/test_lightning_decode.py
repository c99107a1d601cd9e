"""lightning_attn_decode agrees with the float64 reference, and has exact properties.

Each test runs on the GPU, where there is one, and in the emulator under a random schedule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cute_attn
import cute_attn.cache
from cute_attn.ops.lightning import plan_decode

from .lightning_cases import (
    SOME,
    Case,
    assert_agrees,
    assert_no_worse,
    cases,
    few,
    reference,
    run,
)


@pytest.fixture(scope="module", autouse=True)
def compiled_beforehand() -> None:
    """Compile what the usual sweep on a GPU can draw with all cores, not one at a time."""
    if not torch.cuda.is_available():
        return
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    arch = cute_attn.cache.current_arch()
    cute_attn.warmup(
        request
        for k, v, dtype, state_dtype, layout in SOME
        for multi_token, replay in ((False, False), (True, False), (True, True))
        for indexed in (False, True)
        for aligned in (False, True)
        for request in plan_decode(
            arch,
            dtype=names[dtype],
            state_dtype=names[state_dtype],
            head_dim_k=k,
            head_dim_v=v,
            state_layout=layout,
            multi_token=multi_token,
            replay=replay,
            indexed=indexed,
            aligned=aligned,
            num_sms=sms,
        )
    )


@pytest.mark.everywhere
@few
@given(data=st.data())
def test_agrees_with_the_reference(device: str, data: st.DataObject):
    case = data.draw(cases(device, one_kernel=False))
    args = case.inputs(device)
    assert_agrees(args, *run(args))


@pytest.mark.everywhere(quick=False)
@few
@given(data=st.data())
def test_only_named_slots_change_and_padded_rows_are_zero(device: str, data: st.DataObject):
    case = data.draw(cases(device))
    assume(case.slots is not None)
    args = case.inputs(device)
    o, state = run(args)
    indices = args["state_indices"]
    untouched = torch.ones(case.slots, dtype=torch.bool, device=device)
    untouched[indices[indices >= 0].long()] = False
    assert torch.equal(state[untouched], args["state"][untouched])
    assert not o[indices < 0].any()


@pytest.mark.slow  # permuted batches have the same bits in a quick test
@pytest.mark.everywhere
@few
@given(data=st.data())
def test_repeated_runs_are_bitwise_equal(device: str, data: st.DataObject):
    case = data.draw(cases(device))
    args = case.inputs(device)
    first, second = run(args), run(args)
    assert all(map(torch.equal, first, second))


@pytest.mark.everywhere
@few
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_permuting_the_batch_permutes_the_result_bitwise(
    device: str, data: st.DataObject, random: Any
):
    case = replace(data.draw(cases(device)), packing="separate")
    args = case.inputs(device)
    order = list(range(case.batch))
    random.shuffle(order)
    permuted = dict(args)
    per_sequence = ["q", "k", "v", "out", "state_indices", "num_accepted_tokens"]
    if case.slots is None:
        per_sequence += ["state", "draft_k", "draft_v"]
    for name in per_sequence:
        if name in args:
            permuted[name] = args[name][order].clone()
    o, state = run(args)
    o_permuted, state_permuted = run(permuted)
    assert torch.equal(o[order], o_permuted)
    assert torch.equal(state if case.slots is not None else state[order], state_permuted)


@pytest.mark.everywhere
@few
@given(data=st.data())
def test_tokens_at_once_are_calls_in_turn(device: str, data: st.DataObject):
    case = data.draw(cases(device))
    case = replace(case, tokens=case.tokens or 3, records=None, state_dtype=torch.float32)
    args = case.inputs(device)
    o, state = run(args)
    carried = args
    outs = []
    for t in range(case.tokens):
        step = {name: x[:, t] for name, x in args.items() if name in ("q", "k", "v", "out")}
        o_t, new_state = run(carried | step)
        carried = carried | {"state": new_state}
        outs.append(o_t)
    assert torch.equal(state, carried["state"])
    in_turn = torch.stack(outs, dim=1)
    if case.layout == "vk":  # the same order of summation
        assert torch.equal(o, in_turn)
    else:
        assert_no_worse(in_turn, o, reference(args, torch.float64)[0])


@pytest.mark.everywhere
@few
@given(data=st.data())
def test_drafts_that_are_accepted_are_tokens_decoded(device: str, data: st.DataObject):
    """Draft T tokens, accept some, decode on: the state is that of the accepted tokens."""
    case = data.draw(cases(device))
    case = replace(case, tokens=case.tokens or 2, records=4, padded=0, state_dtype=torch.float32)
    args = case.inputs(device)
    accepted = int(args["num_accepted_tokens"][0])
    args["num_accepted_tokens"].fill_(accepted)
    _, checkpoint = run(args)
    if accepted == 0:
        assert torch.equal(checkpoint, args["state"])
        return
    slots = args.get("state_indices", torch.arange(case.batch, device=device)).long()
    plain = {
        name: x
        for name, x in args.items()
        if name not in ("num_accepted_tokens", "draft_k", "draft_v", "out")
    }
    plain["k"] = args["draft_k"][slots, :accepted].contiguous()
    plain["v"] = args["draft_v"][slots, :accepted].contiguous()
    plain["q"] = torch.randn_like(plain["k"])
    _, decoded = run(plain)
    assert torch.equal(checkpoint, decoded)


@pytest.mark.everywhere
@settings(max_examples=10)
@given(count=st.integers(-3, 12), seed=st.integers(0, 3))
def test_accepted_counts_outside_the_records_are_clamped(device: str, count: int, seed: int):
    case = Case(tokens=2, head_dim_k=64, records=4, slots=5, seed=seed)
    args = case.inputs(device)
    args["num_accepted_tokens"].fill_(count)
    o, state = run(args)
    args["num_accepted_tokens"].fill_(min(max(count, 0), 4))
    assert all(map(torch.equal, (o, state), run(args)))


@pytest.mark.everywhere
def test_an_index_past_the_pool_is_a_padded_row(device: str):
    args = Case(batch=4, head_dim_k=64, slots=6).inputs(device)
    args["state_indices"][1] = 6
    args["state_indices"][2] = 2**31 - 1
    o, state = run(args)
    assert not o[1:3].any()
    named = args["state_indices"][[0, 3]].long()
    others = [slot for slot in range(6) if slot not in named.tolist()]
    assert torch.equal(state[others], args["state"][others])
    assert o[0].any()


@pytest.mark.everywhere(each=True)
def test_special_values_propagate_like_the_reference(device: str):
    args = Case(batch=4, heads=2, head_dim_k=64).inputs(device)
    args["v"][0, 0, 3] = torch.inf
    args["k"][1, 1, 5] = torch.nan
    args["state"][2, 0, 7, 7] = -torch.inf
    o, state = run(args)
    exact_o, exact_state = reference(args, torch.float64)
    for actual, exact in ((o, exact_o), (state, exact_state)):
        assert torch.equal(actual.isnan(), exact.isnan())
        assert torch.equal(actual.isinf(), exact.isinf())


@pytest.mark.everywhere
def test_a_large_decay_forgets(device: str):
    args = Case(head_dim_k=64).inputs(device)
    args["decay"].fill_(1e4)
    _, state = run(args)
    expected = args["v"].float().unsqueeze(-1) * args["k"].float().unsqueeze(-2)
    assert torch.equal(state, expected)


@pytest.mark.everywhere
def test_a_long_memory_does_not_drift(device: str):
    """Decays that float32 holds nearly exactly. Roundings of the state's elements average out, but
    errors of a head's decay add up over the tokens."""
    args = Case(batch=1, tokens=24, heads=16, head_dim_k=64).inputs(device)
    args["decay"] = torch.arange(1.0, 17.0, device=device) * 2.0**-24
    args["k"].zero_()
    args["state"].abs_().add_(1.0)
    _, state = run(args)
    states = state, reference(args, torch.float32)[1], reference(args, torch.float64)[1]
    assert_no_worse(*(x.double().mean((-2, -1)) for x in states))


@pytest.mark.everywhere
def test_an_empty_batch_is_no_work(device: str):
    args = Case(batch=1, head_dim_k=64, slots=4).inputs(device)
    for name in ("q", "k", "v", "out", "state_indices"):
        args[name] = args[name][:0]
    o, state = run(args)
    assert o.shape == (0, 2, 128)
    assert torch.equal(state, args["state"])
