"""gated_delta_rule_decode, fused_recurrent_gated_delta_rule, and the convolution of both decodes:
agreement with the float64 reference, and exact properties.

Each test runs on the GPU, where there is one, and in the emulator under a random schedule. What
KDA's tests check of the shared kernels is not repeated.
"""

from __future__ import annotations

import itertools
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
    TAPS,
    Case,
    Kernel,
    assert_agrees,
    assert_equal,
    cases,
    function_of,
    repeated_heads,
    run,
    same,
)
from .lightning_cases import assert_no_worse, few

PLAIN, CONV, POSITIONS, RECORDED, *_ = GATED_DELTA_RULE
DRAFTS, CONV_RECORDED = 8, 9  # with a convolution
V_OF_192 = 10
# Quick tests run 0 against KDA, and the tests of planted bugs run 1 against the reference.
QUICK = (2, DRAFTS, CONV_RECORDED, V_OF_192)
each_kernel = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, id=str(n), marks=() if n in QUICK else pytest.mark.slow)
        for n, kernel in enumerate(GATED_DELTA_RULE)
    ],
)


def case_of(kernel: Kernel, seed: int = 0) -> Case:
    """Two sequences of two value heads for a head of q and k; one sequence is padding."""
    padded = int(kernel.named_slots)
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
    for name in ("conv_state", "draft_windows"):
        x = getattr(grouped, name)
        if x is not None:
            assert same(repeated_heads(case, {name: x})[name], getattr(single, name))


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
@pytest.mark.parametrize("decays", ["channel", "head"])
@pytest.mark.parametrize("kernel", [DRAFTS, CONV_RECORDED], ids=["drafts", "records"])
def test_a_chain_of_drafts_with_a_convolution_is_plain_decoding(
    device: str, kernel: int, decays: str
):
    """Drafts of some calls, of which some are accepted, against the accepted tokens one by one."""
    case = Case(
        replace(GATED_DELTA_RULE[kernel], decays=decays), batch=2, tokens=4, packing="separate"
    )
    args = case.inputs(device)
    names = ("q", "k", "v", "g", "beta")
    slots = args["state_indices"].long()
    start = args["conv_state"][..., : TAPS - 1].contiguous()
    plain = {"state": args["state"], "conv_state": start}
    if "record_k" in args:
        args["num_accepted_tokens"] = torch.zeros(2, dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(5)
    for i in range(3):
        new = replace(case, seed=10 + i).inputs(device)
        args |= {name: new[name] for name in names}
        result = run(args)
        counts = torch.randint(1, 5, (2,), generator=generator).tolist()
        args |= {name: x for name, x in result._asdict().items() if name != "o" and x is not None}
        if "record_k" in args:
            args["num_accepted_tokens"] = torch.tensor(counts, dtype=torch.int32, device=device)
        for b, count in enumerate(counts):
            one = {name: x for name, x in args.items() if "record" not in name}
            one = {name: x for name, x in one.items() if "draft" not in name and name != "out"}
            one.pop("num_accepted_tokens", None)
            one |= {name: args[name][b : b + 1, :count] for name in names}
            found = run(one | plain | {"state_indices": args["state_indices"][b : b + 1].clone()})
            plain = {"state": found.state, "conv_state": found.conv_state}
            assert torch.equal(found.o[0], result.o[b, :count])
            if "draft_states" in args:  # the caller commits what is accepted
                row = int(args["draft_indices"][b])
                assert torch.equal(args["conv_state"][slots[b]], start[slots[b]]) or i
                args["state"][slots[b]] = result.draft_states[row, count - 1]
                args["conv_state"][slots[b]] = result.draft_windows[row, count - 1]
    if "draft_states" in args:
        assert torch.equal(args["state"], plain["state"])
        assert torch.equal(args["conv_state"], plain["conv_state"])


@pytest.mark.slow
@pytest.mark.everywhere
@pytest.mark.parametrize("kernel", [DRAFTS, len(GATED_DELTA_RULE) - 1])
def test_windows_of_drafts_may_share_inputs(device: str, kernel: int):
    """As in SGLang: the window of a token begins an input after the window before."""
    case = case_of(GATED_DELTA_RULE[kernel])
    args = case.inputs(device)
    rows, steps, channels, taps = args["draft_windows"].shape
    memory = torch.full((rows, channels, steps + taps - 1), torch.nan).to(device, case.kernel.dtype)
    shared = memory.as_strided(
        args["draft_windows"].shape, (memory.stride(0), 1, memory.stride(1), 1)
    )
    expected = run(args)
    o = function_of(args)(**args | {"draft_windows": shared})
    assert torch.equal(o, expected.o)
    assert same(shared[:, : case.tokens], expected.draft_windows[:, : case.tokens])


@pytest.mark.slow
@pytest.mark.everywhere
def test_drafts_without_a_row_or_a_state_are_written_nowhere(device: str):
    """SGLang's verification: packed sequences, one of which has more tokens than drafts."""
    args = replace(case_of(GATED_DELTA_RULE[DRAFTS]), padded=0, batch=3, tokens=4).inputs(device)
    for name in ("q", "k", "v", "g", "beta", "out"):
        rows = [x[:n] for x, n in zip(args[name], (4, 0, 2), strict=True)]
        args[name] = torch.cat(rows).unsqueeze(0)
    args["cu_seqlens"] = torch.tensor([0, 4, 4, 6], dtype=torch.int32, device=device)
    for name in ("draft_states", "draft_windows"):
        args[name] = args[name][:, :3].contiguous()
    assert_agrees(args, run(args))
    for row in (-1, 4):
        args["draft_indices"][0] = row
        found = run(args)
        assert_agrees(args, found)
        assert found.draft_windows[:, 2].isnan().all()


@pytest.mark.slow
@pytest.mark.everywhere
@pytest.mark.parametrize("count", [-3, 0, 4, 9])
@pytest.mark.parametrize("flags", [None, [False, True, False]])
def test_counts_and_fresh_sequences_of_records(device: str, count: int, flags: Any):
    args = replace(case_of(GATED_DELTA_RULE[CONV_RECORDED]), padded=0, batch=3).inputs(device)
    args["num_accepted_tokens"].fill_(count)
    if flags is not None:
        args["has_initial_state"] = torch.tensor(flags, device=device)
    assert_agrees(args, run(args))


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


def with_columns(
    device: str, *, g: bool, gk: bool, gv: bool, beta: bool, gate: bool, **change: Any
) -> dict[str, Any]:
    """A call with some of the gates, and beta, for channels and columns."""
    args = sequences(device, gate)
    generator = torch.Generator(device).manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    rows = args["v"].shape[:-1]
    if not g:
        args["g"] = None
    if gk:
        args["gk"] = -normal(*rows, 64).abs().bfloat16()
    if gv:
        args["gv"] = -normal(*rows, 64).abs().half()
    if beta:
        x = normal(*rows, 64)
        args["beta"] = x if gate else x.sigmoid()
    args |= change
    if args.get("state_v_first"):
        args["initial_state"] = args["initial_state"].mT.contiguous()
    return args


def assert_columns_agree(args: dict[str, Any]) -> None:
    o, state = cute_attn.fused_recurrent_gated_delta_rule(**args, output_final_state=True)
    g = torch.zeros_like(args["v"][..., 0]) if args["g"] is None else args["g"]
    exact, plain = (
        gated_delta_rule_reference(**args | {"g": g}, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    assert_no_worse(o, plain.o.to(o.dtype), exact.o)
    assert state is not None
    assert_no_worse(state, plain.final_state, exact.final_state)


@pytest.mark.everywhere
def test_gates_and_betas_of_columns_agree_with_the_reference(device: str):
    args = with_columns(device, g=True, gk=True, gv=True, beta=True, gate=True)
    assert_columns_agree(args)


@pytest.mark.slow
@pytest.mark.everywhere
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(
    ("g", "gk", "gv", "beta"), [x for x in itertools.product((False, True), repeat=4) if any(x)]
)
def test_every_combination_of_gates_and_betas(
    device: str, g: bool, gk: bool, gv: bool, beta: bool, gate: bool, v_first: bool
):
    if gate and not g:
        pytest.skip("the gate is of g")
    change = {"state_v_first": v_first, "allow_neg_eigval": gate}
    assert_columns_agree(with_columns(device, g=g, gk=gk, gv=gv, beta=beta, gate=gate, **change))


@pytest.mark.slow
@pytest.mark.everywhere
@pytest.mark.parametrize("dims", [(128, 64), (64, 256), (256, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_columns_of_other_sizes(device: str, dims: tuple[int, int], dtype: torch.dtype):
    generator = torch.Generator(device).manual_seed(11)
    dim_k, dim_v = dims

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    assert_columns_agree(
        {
            "q": normal(2, 3, 1, dim_k).to(dtype),
            "k": torch.nn.functional.normalize(normal(2, 3, 1, dim_k), dim=-1).to(dtype),
            "v": normal(2, 3, 2, dim_v).to(dtype),
            "g": -normal(2, 3, 2).abs(),
            "gk": -normal(2, 3, 2, dim_k).abs().to(dtype),
            "gv": -normal(2, 2, 3, dim_v).abs().to(dtype).transpose(1, 2),
            "beta": normal(2, 3, dim_v, 2).sigmoid().to(dtype).transpose(2, 3),
        }
    )


@pytest.mark.slow
@pytest.mark.everywhere
def test_equal_columns_are_a_head_bitwise(device: str):
    """A gate, and a beta, that all columns share."""
    args = with_columns(device, g=True, gk=False, gv=False, beta=False, gate=False)
    args["output_final_state"] = True
    expected = cute_attn.fused_recurrent_gated_delta_rule(**args)
    columns = args["v"].shape
    g, beta = (args[name].unsqueeze(-1).expand(columns) for name in ("g", "beta"))
    for change in ({"beta": beta}, {"beta": beta, "g": None, "gv": g.contiguous()}):
        found = cute_attn.fused_recurrent_gated_delta_rule(**args | change)
        assert all(map(torch.equal, found, expected))


@pytest.mark.slow
@pytest.mark.everywhere
def test_a_column_that_forgets_everything(device: str):
    """A gate of -inf gives a decay of 0, and no NaN; other columns keep their bits."""
    args = with_columns(device, g=True, gk=False, gv=True, beta=False, gate=False)
    before = cute_attn.fused_recurrent_gated_delta_rule(**args)[0]
    args["gv"] = args["gv"].clone()
    args["gv"][:, 1, :, 3] = -torch.inf
    after = cute_attn.fused_recurrent_gated_delta_rule(**args)[0]
    assert after.isfinite().all()
    others = torch.arange(64, device=device) != 3
    assert torch.equal(before[..., others], after[..., others])
    assert not torch.equal(before[:, 1, :, 3], after[:, 1, :, 3])
    assert_columns_agree(args)


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
