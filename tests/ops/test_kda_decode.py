"""kda_decode agrees with the float64 reference, and has exact properties.

Each test runs on the GPU, where there is one, and in the emulator under a random schedule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_attn
import cute_attn.cache

from .kda_decode_cases import (
    FULL,
    NO_GATE,
    POSITIONS,
    RECORDS,
    SOME,
    WITH_RECORDS,
    Case,
    Kernel,
    assert_agrees,
    assert_equal,
    cases,
    repeated_heads,
    run,
)
from .lightning_cases import few

OTHER_SIZES = [
    Kernel(dim_k, dim_v, state_v_first=v_first, multi_token=True, slots="batch")
    for dim_k, dim_v in ((256, 64), (64, 256), (64, 192))
    for v_first in (True, False)
]


@pytest.fixture(scope="module", autouse=True)
def compiled_beforehand() -> None:
    """Compile what the usual sweep on a GPU can draw with all cores, not one at a time."""
    if torch.cuda.is_available():
        arch = cute_attn.cache.current_arch()
        in_turn = [replace(kernel, multi_token=False) for kernel in OTHER_SIZES]
        kernels = SOME + OTHER_SIZES + in_turn
        cute_attn.warmup(request for kernel in kernels for request in kernel.plan(arch))


@pytest.mark.everywhere
@few
@given(data=st.data())
def test_agrees_with_the_reference(device: str, data: st.DataObject):
    args = data.draw(cases(device)).inputs(device)
    assert_agrees(args, run(args))


@pytest.mark.everywhere
@few
@given(data=st.data())
def test_only_named_slots_change_and_padding_is_zero(device: str, data: st.DataObject):
    slots = data.draw(st.sampled_from(["indexed", "positions", "records"]))
    case = data.draw(cases(device, slots=slots))
    args = case.inputs(device)
    result = run(args)
    indices = args["state_indices"].reshape(case.batch, -1)
    named = indices[indices >= 0].long()
    untouched = torch.ones(case.slots, dtype=torch.bool, device=device)
    untouched[named] = False
    for name in ("state", *RECORDS):
        if name in args:
            after = getattr(result, name)
            assert torch.equal(after[untouched], args[name][untouched])
    assert not result.o[indices[:, 0] < 0].any()


@pytest.mark.everywhere
@few
@given(data=st.data())
def test_repeated_runs_are_bitwise_equal(device: str, data: st.DataObject):
    args = data.draw(cases(device)).inputs(device)
    assert_equal(run(args), run(args))


@pytest.mark.everywhere(quick=False)
@few
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_permuting_the_batch_permutes_the_result_bitwise(
    device: str, data: st.DataObject, random: Any
):
    case = replace(data.draw(cases(device)), packing="separate", strided_state=False)
    args = case.inputs(device)
    order = list(range(case.batch))
    random.shuffle(order)
    permuted = dict(args)
    of_slots = ["state", *RECORDS]
    for name in ["q", "k", "v", "g", "beta", "out", "state_indices", "num_accepted_tokens"] + (
        [] if "state_indices" in args else of_slots
    ):
        if name in args:
            permuted[name] = args[name][order].clone()
    result, other = run(args), run(permuted)
    assert torch.equal(result.o[order], other.o)
    for name in of_slots:
        if name in args:
            one = getattr(result, name)
            one = one if "state_indices" in args else one[order]
            assert torch.equal(one, getattr(other, name))


@pytest.mark.everywhere
@few
@given(data=st.data())
def test_grouped_heads_equal_repeated_heads_bitwise(device: str, data: st.DataObject):
    case = data.draw(cases(device))
    args = case.inputs(device)
    grouped, single = run(args), run(repeated_heads(case, args))
    assert torch.equal(grouped.o, single.o)
    assert torch.equal(grouped.state, single.state)
    if grouped.record_u is not None:
        assert torch.equal(grouped.record_u, single.record_u)
        assert torch.equal(grouped.record_k, single.record_k[..., :: case.group, :])


def of_tokens(args: dict[str, Any], tokens: Any) -> dict[str, Any]:
    """The arguments of a call with some of the tokens (an index or a slice)."""
    return {
        name: x[:, tokens] if name in ("q", "k", "v", "g", "beta", "out") else x
        for name, x in args.items()
    }


@pytest.mark.everywhere(quick=False)
@few
@given(data=st.data())
def test_tokens_at_once_are_calls_in_turn_bitwise(device: str, data: st.DataObject):
    slots = data.draw(st.sampled_from(["batch", "indexed"]))
    case = data.draw(cases(device, multi_token=True, slots=slots))
    check_in_turn(replace(case, kernel=replace(case.kernel, state_dtype=torch.float32)), device)


@pytest.mark.everywhere(quick=False)
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, id=str(kernel), marks=pytest.mark.slow if n else ())
        for n, kernel in enumerate(OTHER_SIZES)
    ],
)
def test_so_they_are_whatever_the_size(device: str, kernel: Kernel):
    """A call with one token has more threads, among which K is shared in another way."""
    check_in_turn(Case(kernel, batch=2, tokens=3, seed=1), device)


def check_in_turn(case: Case, device: str) -> None:
    args = case.inputs(device)
    at_once = run(args)
    carried, outs = args, []
    for t in range(case.tokens):
        result = run(of_tokens(carried, t))
        carried = carried | {"state": result.state}
        outs.append(result.o)
    assert torch.equal(at_once.state, carried["state"])
    assert torch.equal(at_once.o, torch.stack(outs, dim=1))


@pytest.mark.everywhere
@few
@given(data=st.data())
def test_decode_is_the_recurrent_form_bitwise(device: str, data: st.DataObject):
    case = data.draw(cases(device, multi_token=True, slots="batch", state_dtype=torch.float32))
    args = case.inputs(device)
    result = run(args)
    del args["state"]
    args.pop("out", None)
    o, final_state = cute_attn.fused_recurrent_kda(
        **args, initial_state=case.inputs(device)["state"], output_final_state=True
    )
    assert torch.equal(result.o, o)
    assert torch.equal(result.state, final_state)


def plain_call(args: dict[str, Any], state: torch.Tensor) -> dict[str, Any]:
    """Arguments for a call of one sequence without speculation, whose state is the whole pool."""
    speculative = ("state_indices", "num_accepted_tokens", "out", *RECORDS)
    kept = {name: x for name, x in args.items() if name not in speculative}
    return kept | {"state": state.contiguous()}


def of_sequence(args: dict[str, Any], b: int) -> dict[str, Any]:
    return {
        name: x[b : b + 1] if name in ("q", "k", "v", "g", "beta") else x
        for name, x in args.items()
    }


def drafts(data: st.DataObject, case: Case) -> list[tuple[int, list[int]]]:
    """Some calls' numbers of tokens, and how many of each sequence's are then accepted."""
    calls = []
    for _ in range(data.draw(st.integers(2, 3))):
        tokens = data.draw(st.integers(1, case.speculated))
        accepted = [data.draw(st.integers(1, tokens)) for _ in range(case.batch)]
        calls.append((tokens, accepted))
    return calls


def assert_chain_is_plain_decoding(device: str, data: st.DataObject, case: Case) -> None:
    """In every call some tokens are accepted. Outputs and the last state equal plain decoding of
    the accepted tokens, one after another."""
    indexed = case.kernel.slots in ("positions", "records")
    args = case.inputs(device)
    indices = args["state_indices"] if indexed else torch.arange(case.batch)
    first = indices.reshape(case.batch, -1)[:, 0].long()
    plain_states = [args["state"][slot : slot + 1].clone() for slot in first.tolist()]
    # Before the first call nothing was drafted: its state is in the first slot, as it is.
    records = "records" in case.kernel.slots
    accepted = [0 if records else 1] * case.batch
    for i, (tokens, accepted_next) in enumerate(drafts(data, case)):
        new = replace(case, tokens=tokens, seed=case.seed + 1 + i).inputs(device)
        step = {name: new[name] for name in ("q", "k", "v", "g", "beta")}
        args = args | step
        args.pop("out", None)
        args["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32, device=device)
        result = run(args)
        args = args | {name: getattr(result, name) for name in ("state", *RECORDS) if name in args}
        for b in range(case.batch):
            if records:  # the checkpoint is what the call has started from
                assert torch.equal(result.state[first[b]], plain_states[b][0])
            kept = of_tokens(of_sequence(args, b), slice(0, accepted_next[b]))
            plain = run(plain_call(kept, plain_states[b]))
            assert torch.equal(result.o[b, : accepted_next[b]], plain.o[0])
            plain_states[b] = plain.state
            if not records:
                written = int(indices[b, accepted_next[b] - 1])
                assert torch.equal(result.state[written], plain.state[0])
        accepted = accepted_next


# Another layout of the state is another kernel.
LAYOUTS = st.booleans() if FULL else st.just(POSITIONS.state_v_first)


@pytest.mark.everywhere
@settings(max_examples=40 if FULL else 3)
@given(data=st.data(), seed=st.integers(0, 2**31), v_first=LAYOUTS)
def test_a_chain_with_a_slot_for_each_position_is_plain_decoding(
    device: str, data: st.DataObject, seed: int, v_first: bool
):
    kernel = replace(POSITIONS, state_v_first=v_first)
    assert_chain_is_plain_decoding(device, data, Case(kernel, batch=2, seed=seed))


@pytest.mark.everywhere
@settings(max_examples=40 if FULL else 3)
@given(data=st.data(), seed=st.integers(0, 2**31), v_first=LAYOUTS)
def test_a_chain_with_records_is_plain_decoding(
    device: str, data: st.DataObject, seed: int, v_first: bool
):
    kernel = replace(WITH_RECORDS, state_v_first=v_first)
    assert_chain_is_plain_decoding(device, data, Case(kernel, batch=2, seed=seed))


@pytest.mark.everywhere
@settings(max_examples=10)
@given(count=st.integers(-3, 12) | st.sampled_from([-(2**31), 2**31 - 1]), seed=st.integers(0, 3))
@pytest.mark.parametrize("kernel", [POSITIONS, WITH_RECORDS], ids=lambda kernel: kernel.slots)
def test_accepted_counts_out_of_bounds_are_clamped(
    device: str, kernel: Kernel, count: int, seed: int
):
    args = Case(kernel, tokens=2, seed=seed).inputs(device)
    args["num_accepted_tokens"].fill_(count)
    result = run(args)
    low, high = (1, 5) if kernel is POSITIONS else (0, 4)
    args["num_accepted_tokens"].fill_(min(max(count, low), high))
    assert_equal(result, run(args))


@pytest.mark.everywhere
@pytest.mark.parametrize("kernel", [Kernel(64, 64), WITH_RECORDS], ids=lambda kernel: kernel.slots)
def test_an_index_past_the_pool_is_padding(device: str, kernel: Kernel):
    case = Case(kernel, batch=4, tokens=2)
    args = case.inputs(device)
    args["state_indices"][1] = case.slots
    args["state_indices"][2] = 2**31 - 1
    result = run(args)
    assert not result.o[1:3].any()
    assert result.o[0].any()
    named = args["state_indices"][[0, 3]].tolist()
    others = [slot for slot in range(case.slots) if slot not in named]
    for name in ("state", *RECORDS):
        if name in args:
            assert torch.equal(getattr(result, name)[others], args[name][others])


@pytest.mark.everywhere
def test_a_position_without_a_slot_is_not_kept(device: str):
    case = Case(POSITIONS, batch=2, tokens=3)
    args = case.inputs(device)
    args["state_indices"][0, 1] = -1
    args["state_indices"][1, 2] = case.slots
    args["num_accepted_tokens"].fill_(1)
    assert_agrees(args, run(args))


@pytest.mark.everywhere
def test_one_token_without_its_dimension_may_be_speculated(device: str):
    """[B, H, K] with positions or records is [B, 1, H, K] with them."""
    for kernel in (POSITIONS, WITH_RECORDS):
        args = Case(kernel, batch=2, tokens=1).inputs(device)
        result = run(args)
        without = run(of_tokens(args, 0))
        assert torch.equal(result.o[:, 0], without.o)
        assert torch.equal(result.state, without.state)


@pytest.mark.everywhere
def test_one_position_for_each_sequence_is_no_speculation(device: str):
    args = Case(NO_GATE, tokens=3).inputs(device)
    result = run(args)
    args["state_indices"] = args["state_indices"].unsqueeze(1)
    assert_equal(result, run(args))
    args["num_accepted_tokens"] = torch.ones(3, dtype=torch.int32, device=device)
    assert_equal(result, run(args))


@pytest.mark.everywhere
@pytest.mark.parametrize("dims", [1, 4])
def test_A_log_may_have_more_dimensions(device: str, dims: int):
    args = Case(Kernel(64, 64)).inputs(device)
    result = run(args)
    shape = (1,) * (dims - 2) + (-1, 1) if dims > 1 else (-1,)
    for _ in range(2):
        assert_equal(result, run(args | {"A_log": args["A_log"].view(shape)}))


@pytest.mark.everywhere
def test_a_gate_of_minus_infinity_forgets(device: str):
    args = Case(replace(NO_GATE, multi_token=False)).inputs(device)
    args["g"][:, :, 5] = -torch.inf
    assert_agrees(args, run(args))
    args["g"].fill_(-torch.inf)
    emptied = run(args | {"state": torch.zeros_like(args["state"])})
    named = args["state_indices"].long()
    assert torch.equal(run(args).state[named], emptied.state[named])


@pytest.mark.everywhere(each=True)
def test_gates_above_zero_grow(device: str):
    args = Case(replace(NO_GATE, multi_token=False)).inputs(device)
    args["g"].copy_(args["g"].abs())
    assert_agrees(args, run(args))


@pytest.mark.everywhere
def test_what_is_not_finite_stays_so_and_stays_where_it_is(device: str):
    args = Case(Kernel(64, 64), batch=4).inputs(device)
    args["v"][0, 0, 3] = torch.inf
    args["k"][1, 0, 5] = torch.nan
    slots = args["state_indices"].tolist()
    args["state"][slots[2], 1, 7, 7] = -torch.inf
    o, state, *_ = run(args)
    finite_o, finite_state = torch.isfinite(o), torch.isfinite(state)
    expected = torch.ones_like(finite_o)
    expected[0, 0, 3] = False
    expected[1] = False
    expected[2, 1, 7] = False
    assert torch.equal(finite_o, expected)
    expected = torch.ones_like(finite_state)
    expected[slots[0], 0, 3] = False
    expected[slots[1]] = False
    expected[slots[2], 1, 7] = False
    assert torch.equal(finite_state, expected)


@pytest.mark.everywhere
def test_an_empty_batch_is_no_work(device: str):
    args = Case(Kernel(64, 64), batch=1).inputs(device)
    for name in ("q", "k", "v", "g", "beta", "out", "state_indices"):
        args[name] = args[name][:0]
    result = run(args)
    assert result.o.shape == (0, 2, 64)
    assert torch.equal(result.state, args["state"])


@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["v", "state"])
def test_an_output_in_an_input_is_refused(device: str, name: str):
    args = Case(Kernel(64, 64, torch.float32)).inputs(device)
    before = args["state"].clone()
    args["out"] = args["v"] if name == "v" else args["state"][0, 0, :6].view(3, 2, 64)
    with pytest.raises(ValueError, match=f"out overlaps {name} in memory"):
        cute_attn.kda_decode(**args)
    assert torch.equal(before, args["state"])


@pytest.mark.everywhere
def test_a_state_off_its_alignment_is_refused(device: str):
    args = Case(Kernel(64, 64)).inputs(device)
    state = args["state"]
    storage = torch.zeros(state.numel() + 1, device=device)[1:]
    args["state"] = storage.view(state.shape)
    with pytest.raises(ValueError, match="must be 16-byte aligned"):
        cute_attn.kda_decode(**args)
