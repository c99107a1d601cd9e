"""Kimi Delta Attention on a GPU: problems too large for the emulator, and how calls are launched.

Large problems are compared on a few of their heads, by the checks of the benchmarks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn.bench.kda import problem
from cute_attn.bench.kda.cases import Case, DecodeCase
from cute_attn.ops.kda import (
    kda_chunk_delta_h,
    kda_chunk_intra,
    kda_chunk_output,
    kda_gate_cumsum,
    kda_recompute_w_u,
    plan_chunk_kda,
)
from cute_attn.ops.kda.decode import plan_kda_decode

pytestmark = pytest.mark.usefixtures("no_gradients")

DEVICE = "cuda"


@pytest.fixture(scope="module", autouse=True)
def compiled_beforehand() -> None:
    """Compile most of what is used here with all cores, not one kernel at a time."""
    if not torch.cuda.is_available():
        return
    arch = cute_attn.cache.current_arch()
    whole = {
        "initial_state": True,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    kinds = itertools.product((False, True), ("none", "int64"), (False, True))
    requests = [
        request
        for lower_bound, index_dtype, modular in kinds
        for request in plan_chunk_kda(
            arch,
            **whole,
            lower_bound=lower_bound,
            index_dtype=index_dtype,
            return_intermediate_states=modular,
        )
    ]
    requests += plan_chunk_kda(arch, **whole, lower_bound=True, state_v_first=True)
    for slots in ("batch", "indexed"):
        requests += plan_kda_decode(arch, lower_bound=True, slots=slots)
    cute_attn.warmup(requests)


# -- large problems ----------------------------------------------------------------------------

LARGE = [
    Case(12, 12, 8192),
    Case(32, 64, 5001),
    Case(8, 8, 2048, gate="softplus-strong"),
    Case(32, 64, 8192, sequences=20, lengths="random"),
]
MORE = [
    Case(64, 64, 4096),
    Case(96, 96, 777, batch=2),
    Case(8, 32, 4096, gate="softplus"),
    Case(8, 8, 2048, gate="lower_bound-strong"),
    Case(12, 12, 16384, sequences=8, lengths="skewed"),
]


@pytest.mark.parametrize("path", ["fused", "modular"])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_chunk_kda_on_large_problems(case: Case, path: str):
    check_large(case, path)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["fused", "modular"])
@pytest.mark.parametrize("case", MORE, ids=str)
def test_chunk_kda_on_more_of_them(case: Case, path: str):
    check_large(case, path)


def check_large(case: Case, path: str) -> None:
    arguments = problem.chunk_arguments(case, 11)
    calls = problem.chunk_calls(arguments, with_peer=False, paths=(path,))
    problem.check_chunk(case, arguments, calls)
    (call,) = calls.values()
    first, again = call(), call()
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("stage", ["intra", "recompute"])
@pytest.mark.parametrize("heads_v", [64, 128])
def test_stages_on_large_problems(stage: str, heads_v: int):
    case = Case(64, heads_v, 1000, batch=2)
    arguments = problem.stage_arguments(case, 11)
    make = {"intra": problem.intra_calls, "recompute": problem.recompute_calls}[stage]
    problem.check_stage(stage, case, arguments, make(arguments, with_peer=False))


@pytest.mark.parametrize(
    "case", [DecodeCase(64, 64, 64), DecodeCase(5, 32, 128), DecodeCase(256, 8, 64)], ids=str
)
def test_decode_on_large_problems(case: DecodeCase):
    arguments = problem.decode_arguments(case, 11)
    problem.check_decode(case, arguments, problem.decode_calls(arguments, with_peer=False))


def test_grouped_heads_are_repeated_heads_bitwise():
    arguments = problem.chunk_arguments(Case(8, 32, 3000), 3)
    repeated = arguments | {
        name: arguments[name].repeat_interleave(4, dim=2) for name in ("q", "k")
    }
    grouped = cute_attn.chunk_kda(**arguments)
    assert all(map(torch.equal, grouped, cute_attn.chunk_kda(**repeated)))


@pytest.mark.parametrize("split", [2048, 1001])
def test_two_runs_chained_through_the_state_are_one(split: int):
    """By the error rule: what a chunk is differs where the split is none of 64."""
    case = Case(4, 8, 4096)
    arguments = problem.chunk_arguments(case, 3)

    def chained() -> tuple[torch.Tensor, torch.Tensor]:
        outs, state = [], arguments["initial_state"]
        for rows in (slice(0, split), slice(split, None)):
            part = {name: arguments[name][:, rows] for name in ("q", "k", "v", "g", "beta")}
            o, state = cute_attn.chunk_kda(**arguments | part | {"initial_state": state})
            outs.append(o)
        return torch.cat(outs, dim=1), state

    problem.check_chunk(case, arguments, {"ours": chained})


def test_decode_goes_on_from_a_prefill():
    """A prompt by chunks, then tokens one by one, is the whole by chunks."""
    case = Case(4, 8, 1000)
    arguments = problem.chunk_arguments(case, 3) | {"state_v_first": True}
    arguments["initial_state"] = arguments["initial_state"].transpose(-1, -2).contiguous()
    tokens = ("q", "k", "v", "g", "beta")

    def prefill_and_decode() -> tuple[torch.Tensor, torch.Tensor]:
        prompt = {name: arguments[name][:, :990] for name in tokens}
        o, state = cute_attn.chunk_kda(**arguments | prompt)
        parameters = {name: arguments[name] for name in ("A_log", "dt_bias", "lower_bound")}
        outs = [o]
        for t in range(990, 1000):
            step = (arguments[name][:, t] for name in tokens)
            outs.append(cute_attn.kda_decode(*step, state, **parameters)[:, None])
        return torch.cat(outs, dim=1), state

    problem.check_chunk(case, arguments, {"ours": prefill_and_decode})


# -- how it is launched ------------------------------------------------------------------------


def chunk_call(**changes: Any) -> tuple[dict[str, Any], Callable[[], Any]]:
    arguments = problem.chunk_arguments(Case(4, 8, 500), 5) | changes
    return arguments, lambda: cute_attn.chunk_kda(**arguments)


def modular_call() -> tuple[dict[str, Any], Callable[[], Any]]:
    arguments, run = chunk_call(return_intermediate_states=True)
    return arguments, torch.inference_mode()(run)


def training_call(**changes: Any) -> tuple[dict[str, Any], Callable[[], Any]]:
    """The gradients of a loss, half of the sum of squares of o and final_state."""
    arguments, _ = chunk_call(**changes)

    def call() -> tuple[torch.Tensor, ...]:
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
        leaves = {name: arguments[name].detach().requires_grad_() for name in names}
        with torch.enable_grad():
            o, state = cute_attn.chunk_kda(**arguments | leaves)
        return torch.autograd.grad((o, state), [*leaves.values()], (o.detach(), state.detach()))

    return arguments, call


def packed_call(**changes: Any) -> tuple[dict[str, Any], Callable[[], Any]]:
    case = Case(4, 8, 500, sequences=5, lengths="random")
    arguments = problem.chunk_arguments(case, 5) | changes
    return arguments, lambda: cute_attn.chunk_kda(**arguments)


def decode_call() -> tuple[dict[str, Any], Callable[[], Any]]:
    arguments = problem.decode_arguments(DecodeCase(8, 16, 32), 5)
    return arguments, lambda: (cute_attn.kda_decode(**arguments), arguments["state"])


def recurrent_call() -> tuple[dict[str, Any], Callable[[], Any]]:
    arguments = problem.chunk_arguments(Case(4, 8, 30), 5)
    arguments.pop("safe_gate")
    return arguments, lambda: cute_attn.fused_recurrent_kda(**arguments)


def stages_call() -> tuple[dict[str, Any], Callable[[], Any]]:
    arguments = problem.stage_arguments(Case(4, 8, 500), 5)

    def call() -> tuple[torch.Tensor, ...]:
        q, k, v, beta = (arguments[name] for name in ("q", "k", "v", "beta"))
        G = kda_gate_cumsum(arguments["g"])
        intra = kda_chunk_intra(q, k, v, G, beta)
        w, u, _, kg = kda_recompute_w_u(None, k, v, G, beta, intra.Akk)
        h, v_new, state = kda_chunk_delta_h(kg, w, u, G, output_final_state=True)
        return kda_chunk_output(q, v_new, G, intra.Aqk, h), state

    return arguments, call


CALLS = {
    "chunk": chunk_call,
    "modular": modular_call,
    "training": training_call,
    "training, records kept": lambda: training_call(disable_recompute=True),
    "packed": packed_call,
    "packed, no copy on the host": lambda: packed_call(cu_seqlens_cpu=None),
    "decode": decode_call,
    "recurrent": recurrent_call,
    "stages": stages_call,
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Callable[[], Any]]:
    """(the tensors, of which decode changes its state; a call with them)"""
    made: tuple[dict[str, Any], Callable[[], Any]] = CALLS[request.param]()
    return made


def restored(arguments: dict[str, Any], state: torch.Tensor | None) -> None:
    if state is not None:
        arguments["state"].copy_(state)


def copies(results: Any) -> list[torch.Tensor]:
    return [x.clone() for x in results]


def test_no_call_waits_for_the_device(call: tuple[dict[str, Any], Callable[[], Any]]):
    """No call synchronises, neither the first nor later ones: torch would raise."""
    _, run = call
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_runs_on_the_current_stream(call: tuple[dict[str, Any], Callable[[], Any]]):
    arguments, run = call
    state = arguments["state"].clone() if "state" in arguments else None
    expected = copies(run())
    restored(arguments, state)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # the kernels must wait behind it
        results = run()
        done = torch.cuda.Event()
        done.record()
        assert not done.query()
    stream.synchronize()
    assert all(map(torch.equal, results, expected))


def test_is_captured_in_a_cuda_graph(call: tuple[dict[str, Any], Callable[[], Any]]):
    arguments, run = call
    state = arguments["state"].clone() if "state" in arguments else None
    expected = copies(run())
    restored(arguments, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    restored(arguments, state)
    for x in results:
        if x is not arguments.get("state"):
            with torch.inference_mode(x.is_inference()):
                x.fill_(torch.nan)
    graph.replay()
    assert all(map(torch.equal, results, expected))

    restored(arguments, state)
    arguments["v"].mul_(2.0)
    fresh = copies(run())
    restored(arguments, state)
    graph.replay()
    assert all(map(torch.equal, results, fresh))
    assert not torch.equal(fresh[0], expected[0])


def test_a_captured_call_follows_the_lengths():
    """The packed lengths are only on the device, and a replay reads them there."""
    arguments, run = packed_call(cu_seqlens_cpu=None)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = run()
    for lengths in ([500, 0, 0, 0, 0], [1, 2, 3, 4, 490], [64, 128, 64, 0, 244]):
        offsets = torch.tensor([0, *itertools.accumulate(lengths)])
        arguments["cu_seqlens"].copy_(offsets)
        graph.replay()
        expected_o, expected_state = run()
        assert torch.equal(o, expected_o)
        assert torch.equal(state, expected_state)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_chunk_kda_compiles_as_one_graph(backend: str, packed: bool):
    if backend == "inductor":
        pytest.importorskip("triton")
    arguments, _ = packed_call(cu_seqlens_cpu=None) if packed else chunk_call()
    names = [name for name, x in arguments.items() if isinstance(x, torch.Tensor)]
    options = {name: x for name, x in arguments.items() if name not in names}

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = dict(zip(names, tensors, strict=True))
        o, state = cute_attn.chunk_kda(**given | options | {"v": given["v"] * 2})
        return o + 1, state

    tensors = [arguments[name] for name in names]
    expected = step(*tensors)
    actual = torch.compile(step, fullgraph=True, backend=backend)(*tensors)
    torch._dynamo.reset()
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_kda_decode_compiles_as_one_graph(backend: str):
    if backend == "inductor":
        pytest.importorskip("triton")
    arguments, _ = decode_call()
    arguments.pop("out")
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    state = tensors.pop("state")

    def step(given: dict[str, torch.Tensor], state: torch.Tensor) -> torch.Tensor:
        o: torch.Tensor = cute_attn.kda_decode(
            **given | {"v": given["v"] * 2}, state=state, lower_bound=-5.0
        )
        return o + 1

    eager, traced = state.clone(), state.clone()
    expected = step(tensors, eager)
    actual = torch.compile(step, fullgraph=True, backend=backend)(tensors, traced)
    torch._dynamo.reset()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert torch.equal(traced, eager)
    assert not torch.equal(eager, state)


def test_every_gpu_launches_on_its_own():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments, run = chunk_call()
    expected = run()
    elsewhere = {
        name: x.to("cuda:1") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()
    }
    actual = cute_attn.chunk_kda(**elsewhere)
    assert torch.cuda.current_device() == 0
    for a, e in zip(actual, expected, strict=True):
        assert a.device == torch.device("cuda:1")
        assert torch.equal(a.to(DEVICE), e)
