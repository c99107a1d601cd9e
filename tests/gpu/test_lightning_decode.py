"""lightning_attn_decode on a GPU: agreement with the float64 reference, and exact properties.

The rule for errors: no more than twice the error of the same formula in plain PyTorch float32
arithmetic, whose results are rounded to the same dtypes as ours.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cute_attn
import cute_attn.cache
from cute_attn.ops.lightning import plan_decode
from cute_attn.reference.lightning import lightning_attn_decode_reference

DEVICE = "cuda"
HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Case:
    """What hypothesis draws."""

    batch: int = 3
    tokens: int | None = None
    heads: int = 2
    head_dim_k: int = 128
    head_dim_v: int = 128
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    layout: str = "vk"
    slots: int | None = None  # None: no state_indices
    padded: int = 0  # how many rows are padding
    records: int | None = None  # not None: speculative decoding
    packing: str = "separate"  # of q, k and v: "separate", "packed" or "misaligned"
    give_out: bool = True
    scale: float | None = None
    decay: float = 1.0
    seed: int = 0

    def inputs(self) -> dict[str, Any]:
        generator = torch.Generator(DEVICE).manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE)

        step = (self.batch,) if self.tokens is None else (self.batch, self.tokens)
        widths = (self.head_dim_k, self.head_dim_k, self.head_dim_v)
        if self.packing == "separate":
            q, k, v = (normal(*step, self.heads, width).to(self.dtype) for width in widths)
        else:
            # One fused projection, a row of every head's q, then k, then v, and a gate between.
            gap = 1 if self.packing == "misaligned" else 8
            sizes = [self.heads * width for width in widths]
            packed = normal(*step, sum(sizes) + 3 * gap).to(self.dtype)
            q, k, v = (
                part[..., gap:].unflatten(-1, (self.heads, width))
                for part, width in zip(
                    packed.split([size + gap for size in sizes], dim=-1), widths, strict=True
                )
            )
        slots = self.batch if self.slots is None else self.slots
        matrix = (self.head_dim_v, self.head_dim_k)
        if self.layout == "kv":
            matrix = matrix[::-1]
        args: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            "state": normal(slots, self.heads, *matrix).to(self.state_dtype),
            "decay": self.decay * torch.rand(self.heads, generator=generator, device=DEVICE),
            "softmax_scale": self.scale,
            "state_layout": self.layout,
        }
        if self.slots is not None:
            indices = torch.randperm(slots, generator=generator, device=DEVICE)[: self.batch]
            indices = indices.to(torch.int32)
            indices[: self.padded] = -1
            args["state_indices"] = indices[torch.randperm(self.batch, device=DEVICE)]
        if self.records is not None:
            args["num_accepted_tokens"] = torch.randint(
                0, self.records + 1, (self.batch,), generator=generator, device=DEVICE
            ).to(torch.int32)
            for name, width in (("draft_k", self.head_dim_k), ("draft_v", self.head_dim_v)):
                args[name] = normal(slots, self.records, self.heads, width).to(self.dtype)
        if self.give_out:
            args["out"] = torch.full((*step, self.heads, self.head_dim_v), torch.nan).to(
                DEVICE, self.dtype
            )
        return args


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES = (torch.float32, torch.bfloat16)

# What is compiled in: the full sweep draws from all of it, the usual one from every pair of K and V
# with the rest in turns, so that the kernels can be compiled beforehand, in parallel.
EVERYTHING = list(product(HEAD_DIMS, HEAD_DIMS, DTYPES, STATE_DTYPES, ("vk", "kv")))
SOME = [
    (k, v, DTYPES[(i + i // 3) % 3], STATE_DTYPES[i % 2], ("vk", "kv")[i // 2 % 2])
    for i, (k, v) in enumerate(product(HEAD_DIMS, HEAD_DIMS))
] + [
    (k, v, DTYPES[i % 3], STATE_DTYPES[(i + 1) % 2], ("kv", "vk")[i // 2 % 2])
    for i, (k, v) in enumerate(product(HEAD_DIMS, HEAD_DIMS))
]
FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"


@pytest.fixture(scope="module", autouse=True)
def compiled_beforehand() -> None:
    """Compile what the usual sweep can draw with all cores, rather than one at a time."""
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
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


@st.composite
def cases(draw: st.DrawFn) -> Case:
    k, v, dtype, state_dtype, layout = draw(st.sampled_from(EVERYTHING if FULL else SOME))
    batch = draw(st.integers(1, 9))
    tokens = draw(st.none() | st.integers(1, 5))
    slots = draw(st.none() | st.integers(batch, batch + 5))
    return Case(
        batch=batch,
        tokens=tokens,
        heads=draw(st.integers(1, 5)),
        head_dim_k=k,
        head_dim_v=v,
        dtype=dtype,
        state_dtype=state_dtype,
        layout=layout,
        slots=slots,
        padded=0 if slots is None else draw(st.integers(0, batch)),
        records=None if tokens is None else draw(st.none() | st.integers(1, 5)),
        packing=draw(st.sampled_from(["separate", "packed", "misaligned"])),
        give_out=draw(st.booleans()),
        scale=draw(st.none() | st.floats(0.01, 2.0)),
        decay=draw(st.sampled_from([0.0, 0.1, 1.0, 8.0])),
        seed=draw(st.integers(0, 2**31)),
    )


def run(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, new state), leaving the arguments as they are."""
    args = args | {"state": args["state"].clone()}
    if "out" in args:
        args["out"] = torch.full_like(args["out"], torch.nan)
    o = cute_attn.lightning_attn_decode(**args)
    if "out" in args:
        assert o is args["out"]
    return o, args["state"]


def reference(args: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    args = {name: x for name, x in args.items() if name != "out"}
    o, state = lightning_attn_decode_reference(**args, dtype=dtype)
    return (o if dtype == torch.float64 else o.to(args["q"].dtype)), state


def assert_no_worse(actual: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """The error rule, on the norm over all elements."""
    assert not actual.isnan().any()
    ours = (actual.double() - exact).norm()
    theirs = (plain.double() - exact).norm()
    # A single rounding of every element is granted where plain arithmetic happens to be exact.
    floor = torch.finfo(torch.float32).eps * exact.norm()
    assert ours <= 2 * theirs + floor, f"error {ours:.3e}, plain float32 {theirs:.3e}"


def assert_agrees(args: dict[str, Any], o: torch.Tensor, state: torch.Tensor) -> None:
    exact_o, exact_state = reference(args, torch.float64)
    plain_o, plain_state = reference(args, torch.float32)
    assert o.dtype == args["q"].dtype
    assert o.shape == args["v"].shape
    assert_no_worse(o, plain_o, exact_o)
    assert_no_worse(state, plain_state, exact_state)


@given(cases())
def test_agrees_with_the_reference(case: Case):
    args = case.inputs()
    assert_agrees(args, *run(args))


@given(cases())
def test_only_named_slots_change_and_padded_rows_are_zero(case: Case):
    assume(case.slots is not None)
    args = case.inputs()
    o, state = run(args)
    indices = args["state_indices"]
    untouched = torch.ones(case.slots, dtype=torch.bool, device=DEVICE)
    untouched[indices[indices >= 0].long()] = False
    assert torch.equal(state[untouched], args["state"][untouched])
    assert not o[indices < 0].any()


@given(cases())
def test_repeated_runs_are_bitwise_equal(case: Case):
    args = case.inputs()
    first, second = run(args), run(args)
    assert all(map(torch.equal, first, second))


@given(cases(), st.randoms(use_true_random=False))
def test_permuting_the_batch_permutes_the_result_bitwise(case: Case, random: Any):
    case = replace(case, packing="separate")
    args = case.inputs()
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


@given(cases())
def test_tokens_at_once_are_calls_in_turn(case: Case):
    case = replace(case, tokens=case.tokens or 3, records=None, state_dtype=torch.float32)
    args = case.inputs()
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


@given(cases())
def test_drafts_that_are_accepted_are_tokens_decoded(case: Case):
    """Draft T tokens, accept some, decode on: the state is that of the accepted tokens."""
    case = replace(case, tokens=case.tokens or 2, records=4, padded=0, state_dtype=torch.float32)
    args = case.inputs()
    accepted = int(args["num_accepted_tokens"][0])
    args["num_accepted_tokens"].fill_(accepted)
    _, checkpoint = run(args)
    if accepted == 0:
        assert torch.equal(checkpoint, args["state"])
        return
    slots = args.get("state_indices", torch.arange(case.batch, device=DEVICE)).long()
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


@settings(max_examples=10)
@given(st.integers(-3, 12), st.integers(0, 3))
def test_accepted_counts_outside_the_records_are_clamped(count: int, seed: int):
    case = Case(tokens=2, records=4, slots=5, seed=seed)
    args = case.inputs()
    args["num_accepted_tokens"].fill_(count)
    o, state = run(args)
    args["num_accepted_tokens"].fill_(min(max(count, 0), 4))
    assert all(map(torch.equal, (o, state), run(args)))


def test_an_index_past_the_pool_is_a_padded_row():
    args = Case(batch=4, slots=6).inputs()
    args["state_indices"][1] = 6
    args["state_indices"][2] = 2**31 - 1
    o, state = run(args)
    assert not o[1:3].any()
    named = args["state_indices"][[0, 3]].long()
    others = [slot for slot in range(6) if slot not in named.tolist()]
    assert torch.equal(state[others], args["state"][others])
    assert o[0].any()


def test_special_values_propagate_like_the_reference():
    args = Case(batch=4, heads=2).inputs()
    args["v"][0, 0, 3] = torch.inf
    args["k"][1, 1, 5] = torch.nan
    args["state"][2, 0, 7, 7] = -torch.inf
    o, state = run(args)
    exact_o, exact_state = reference(args, torch.float64)
    for actual, exact in ((o, exact_o), (state, exact_state)):
        assert torch.equal(actual.isnan(), exact.isnan())
        assert torch.equal(actual.isinf(), exact.isinf())


def test_a_large_decay_forgets():
    args = Case().inputs()
    args["decay"].fill_(1e4)
    _, state = run(args)
    expected = args["v"].float().unsqueeze(-1) * args["k"].float().unsqueeze(-2)
    assert torch.equal(state, expected)


def test_an_empty_batch_is_no_work():
    args = Case(batch=1, slots=4).inputs()
    for name in ("q", "k", "v", "out", "state_indices"):
        args[name] = args[name][:0]
    o, state = run(args)
    assert o.shape == (0, 2, 128)
    assert torch.equal(state, args["state"])


def test_no_tokens_are_refused_on_the_warm_path_too():
    args = Case(tokens=2).inputs()
    run(args)
    with pytest.raises(ValueError, match="T is 0"):
        run(args | {name: args[name][:, :0] for name in ("q", "k", "v", "out")})


def test_too_many_sequences_are_refused_on_the_warm_path_too():
    args = Case(slots=3).inputs()
    run(args)
    for name in ("q", "k", "v", "out"):
        args[name] = args[name][:1].expand(70000, -1, -1).clone()
    args["state_indices"] = torch.full((70000,), -1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="70000 sequences, at most 65535"):
        run(args)


def test_a_refused_call_leaves_no_error_behind():
    args = Case().inputs()
    run(args)
    with pytest.raises(ValueError, match="out overlaps v"):
        cute_attn.lightning_attn_decode(**(args | {"out": args["v"]}))
    torch.cuda.synchronize()
    assert float(torch.ones(3, device=DEVICE).sum()) == 3
    assert_agrees(args, *run(args))


def test_a_pool_of_more_than_2_to_the_31_elements():
    slots, heads = 2100, 64
    need = slots * heads * 128 * 128 * 4
    if torch.cuda.mem_get_info()[0] < 1.2 * need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of GPU memory")
    args = Case(batch=3, heads=heads).inputs()
    small = args["state"]
    pool = torch.full((slots, heads, 128, 128), torch.nan, device=DEVICE)
    indices = torch.tensor([slots - 1, 0, slots - 2], dtype=torch.int32, device=DEVICE)
    pool[indices.long()] = small
    o = cute_attn.lightning_attn_decode(**(args | {"state": pool, "state_indices": indices}))
    expected_o, expected_state = run(args)
    assert torch.equal(o, expected_o)
    assert torch.equal(pool[indices.long()], expected_state)
    assert bool(pool[1 : slots - 2].isnan().all())


# -- how it is launched ------------------------------------------------------------------------


def test_runs_on_the_current_stream():
    args = Case(batch=8, heads=16).inputs()
    expected, _ = run(args)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the kernel must wait behind it
        started = torch.cuda.Event()
        o = cute_attn.lightning_attn_decode(**(args | {"state": args["state"].clone()}))
        started.record()
        assert not started.query()
    stream.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.parametrize("case", [Case(), Case(tokens=2, slots=5, records=3)], ids=str)
def test_is_captured_in_a_cuda_graph(case: Case):
    args = case.inputs()
    expected = run(args)
    static = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in args.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = cute_attn.lightning_attn_decode(**static)
    o.fill_(torch.nan)
    graph.replay()
    assert torch.equal(o, expected[0])
    assert torch.equal(static["state"], expected[1])
    once_more = run(args | {"state": expected[1]})
    graph.replay()
    assert torch.equal(o, once_more[0])
    assert torch.equal(static["state"], once_more[1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_with_a_full_graph(backend: str):
    if backend == "inductor":
        pytest.importorskip("triton")
    args = Case(batch=4).inputs()

    def step(q, k, v, state, decay):
        return cute_attn.lightning_attn_decode(q * 2, k, v, state, decay) + 1

    tensors = [args[name] for name in ("q", "k", "v", "state", "decay")]
    eager = [x.clone() for x in tensors]
    traced = [x.clone() for x in tensors]
    expected = step(*eager)
    with torch.no_grad():
        actual = torch.compile(step, fullgraph=True, backend=backend)(*traced)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert torch.equal(traced[3], eager[3])
    torch._dynamo.reset()


@pytest.mark.parametrize("case", [Case(), Case(tokens=2, slots=5, records=3)], ids=str)
def test_opcheck(case: Case):
    args = case.inputs()
    torch.library.opcheck(
        torch.ops.cute_attn.lightning_attn_decode.default,
        tuple(args.pop(name) for name in ("q", "k", "v", "state", "decay", "out")),
        args,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_mutation_is_visible_to_autograd():
    """An operator that saved the state for its backward must notice that it changed."""
    args = Case().inputs()
    weight = torch.ones(1, device=DEVICE, requires_grad=True)
    saved = (args["state"] * weight).sum()
    cute_attn.lightning_attn_decode(**args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_inference_mode():
    args = Case().inputs()
    expected = run(args)
    with torch.inference_mode():
        assert all(map(torch.equal, expected, run(args)))


def test_every_gpu_launches_on_its_own():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    args = Case(batch=4, slots=6).inputs()
    expected = run(args)
    elsewhere = {
        name: x.to("cuda:1") if isinstance(x, torch.Tensor) else x for name, x in args.items()
    }
    assert torch.cuda.current_device() == 0
    actual = run(elsewhere)
    assert torch.cuda.current_device() == 0
    assert actual[0].device == torch.device("cuda:1")
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a.to(DEVICE), e)


# -- arguments that only a device can tell -----------------------------------------------------


def bad(change: dict[str, Any], case: Case | None = None) -> dict[str, Any]:
    return (case or Case()).inputs() | change


def test_after_a_good_call_bad_ones_are_still_explained():
    """The warm path leaves the checks to the compiled host code; the words are the operator's."""
    run(Case().inputs())
    with pytest.raises(ValueError, match="k is on cpu, must be on the device of q, cuda"):
        run(bad({"k": torch.zeros(3, 2, 128).bfloat16()}))
    with pytest.raises(TypeError, match="k has dtype torch"):
        run(bad({"k": torch.zeros(3, 2, 128, device=DEVICE).half()}))
    with pytest.raises(ValueError, match=r"k has shape \[3, 1, 128\], must be \[3, 2, 128\]"):
        run(bad({"k": torch.zeros(3, 1, 128, device=DEVICE).bfloat16()}))
    with pytest.raises(ValueError, match=r"decay has shape \[3\], must be \[2\]"):
        run(bad({"decay": torch.zeros(3, device=DEVICE)}))
    strided = torch.zeros(3, 2, 128, 256, device=DEVICE)[..., :128]
    with pytest.raises(ValueError, match="state has strides"):
        cute_attn.lightning_attn_decode(**bad({"state": strided}))
    with pytest.raises(ValueError, match="must be contiguous"):
        run(bad({"q": torch.zeros(3, 2, 256, device=DEVICE).bfloat16()[..., ::2]}))
    with pytest.raises(TypeError, match="got str"):
        run(bad({"v": "v"}))
    with pytest.raises(TypeError, match="softmax_scale must be a float, got str"):
        run(bad({"softmax_scale": "0.5"}))
    with pytest.raises(ValueError, match="draft_k is given without num_accepted_tokens"):
        run(bad({"draft_k": torch.zeros(3, 1, 2, 128, device=DEVICE).bfloat16()}))


def test_a_state_off_its_alignment_is_refused():
    storage = torch.zeros(3 * 2 * 128 * 128 + 1, device=DEVICE)
    state = storage[1:].view(3, 2, 128, 128)
    args = bad({"state": state})
    with pytest.raises(ValueError, match=r"state starts at .* must be 16-byte aligned"):
        cute_attn.lightning_attn_decode(**args)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_out_that_overlaps_an_input_is_refused(name: str):
    args = Case().inputs()
    before = {key: x.clone() for key, x in args.items() if isinstance(x, torch.Tensor)}
    for _ in range(2):  # cold, then warm
        with pytest.raises(ValueError, match=f"out overlaps {name} in memory"):
            cute_attn.lightning_attn_decode(**(args | {"out": args[name]}))
        run(args)
    shifted = torch.zeros(2 * args["v"].numel(), device=DEVICE, dtype=torch.bfloat16)
    v = shifted[: args["v"].numel()].view_as(args["v"])
    out = shifted[128 : 128 + v.numel()].view_as(v)
    with pytest.raises(ValueError, match="out overlaps v in memory"):
        cute_attn.lightning_attn_decode(**(args | {"v": v, "out": out}))
    for key, x in before.items():
        if key != "out":
            assert torch.equal(args[key], x), f"{key} changed by a refused call"


def test_a_call_that_needs_gradients_is_refused():
    args = Case().inputs()
    run(args)
    args["k"].requires_grad_()
    with pytest.raises(NotImplementedError, match="no backward"):
        run(args)
    with torch.no_grad():
        run(args)
