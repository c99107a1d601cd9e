"""lightning_attn_decode on a GPU: how it is launched, and what it refuses on the warm path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_attn
from tests.ops.lightning_cases import Case, assert_agrees, run

DEVICE = "cuda"


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
    """The warm path leaves the checks to the compiled host code; the operator words the error."""
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
