"""Bad arguments to lightning_attn_decode, without a GPU: each gives the documented exception.

The checks run in one order, the device last: CPU tensors reach every one of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_attn


def arguments(
    batch: int = 2,
    tokens: int | None = None,
    heads: int = 3,
    k: int = 64,
    v: int = 128,
    slots: int | None = None,
    layout: str = "vk",
    dtype: torch.dtype = torch.bfloat16,
    records: int | None = None,
) -> dict[str, Any]:
    """Arguments of a valid call."""
    step = (batch,) if tokens is None else (batch, tokens)
    matrix = (v, k) if layout == "vk" else (k, v)
    args: dict[str, Any] = {
        "q": torch.randn(*step, heads, k).to(dtype),
        "k": torch.randn(*step, heads, k).to(dtype),
        "v": torch.randn(*step, heads, v).to(dtype),
        "state": torch.randn(slots or batch, heads, *matrix),
        "decay": torch.rand(heads),
        "state_layout": layout,
    }
    if slots is not None:
        args["state_indices"] = torch.arange(batch, dtype=torch.int32)
    if records is not None:
        args["num_accepted_tokens"] = torch.ones(batch, dtype=torch.int32)
        args["draft_k"] = torch.randn(slots or batch, records, heads, k).to(dtype)
        args["draft_v"] = torch.randn(slots or batch, records, heads, v).to(dtype)
    return args


def call(args: dict[str, Any]) -> torch.Tensor:
    return cute_attn.lightning_attn_decode(**args)


GOOD = [
    {},
    {"tokens": 3},
    {"slots": 5},
    {"layout": "kv"},
    {"dtype": torch.float32},
    {"tokens": 2, "slots": 5, "records": 4},
]


@pytest.mark.parametrize("shape", GOOD, ids=str)
def test_good_arguments_on_the_cpu_are_refused_for_the_device_alone(shape: dict[str, Any]):
    with pytest.raises(ValueError, match="q is on cpu, must be on a CUDA device"):
        call(arguments(**shape))


@pytest.mark.parametrize(
    ("shape", "change", "error", "message"),
    [
        # not tensors, wrong dtypes
        ({}, {"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({}, {"v": None}, TypeError, "v must be a torch.Tensor, got NoneType"),
        ({}, {"state": 3}, TypeError, "state must be a torch.Tensor, got int"),
        ({}, {"decay": 0.5}, TypeError, "decay must be a torch.Tensor, got float"),
        ({}, {"softmax_scale": "1"}, TypeError, "softmax_scale must be a float, got str"),
        ({}, {"q": torch.zeros(2, 3, 64, dtype=torch.int8)}, TypeError, "q has dtype torch.int8"),
        ({}, {"k": torch.zeros(2, 3, 64)}, TypeError, "k has dtype torch.float32"),
        ({}, {"v": torch.zeros(2, 3, 128).half()}, TypeError, "v has dtype torch.float16"),
        ({}, {"state": torch.zeros(2, 3, 128, 64).half()}, TypeError, "state has dtype"),
        ({}, {"decay": torch.zeros(3).double()}, TypeError, "decay has dtype torch.float64"),
        ({}, {"out": torch.zeros(2, 3, 128)}, TypeError, "out has dtype torch.float32"),
        ({"slots": 4}, {"state_indices": torch.zeros(2).long()}, TypeError, "state_indices has"),
        # devices
        ({}, {"k": torch.zeros(2, 3, 64, device="meta")}, ValueError, "k is on meta"),
        # shapes
        ({}, {"q": torch.zeros(2, 64).bfloat16()}, ValueError, r"q has shape \[2, 64\]"),
        ({}, {"q": torch.zeros(2, 4, 64).bfloat16()}, ValueError, r"q has shape \[2, 4, 64\]"),
        ({}, {"k": torch.zeros(2, 4, 64).bfloat16()}, ValueError, r"k has shape \[2, 4, 64\]"),
        ({}, {"v": torch.zeros(2, 1, 3, 128).bfloat16()}, ValueError, "v has 4 dimensions"),
        ({}, {"v": torch.zeros(1, 3, 128).bfloat16()}, ValueError, r"v has shape \[1, 3, 128\]"),
        ({}, {"out": torch.zeros(2, 3, 64).bfloat16()}, ValueError, "out has shape"),
        ({}, {"state": torch.zeros(2, 3, 128)}, ValueError, "must have 4 dimensions"),
        ({}, {"state": torch.zeros(3, 3, 128, 64)}, ValueError, r"must be \[2, 3, 128, 64\]"),
        ({}, {"state": torch.zeros(2, 3, 64, 128)}, ValueError, r": \[B, H, V, K\]"),
        ({}, {"decay": torch.zeros(4)}, ValueError, r"decay has shape \[4\], must be \[3\]"),
        ({"slots": 4}, {"state_indices": torch.zeros(3).int()}, ValueError, "state_indices has"),
        (
            {"slots": 4},
            {"state": torch.zeros(0, 3, 128, 64)},
            ValueError,
            "state has 0 slots, must",
        ),
        ({"tokens": 0}, {}, ValueError, "T is 0"),
        ({}, {"state_layout": "vv"}, ValueError, "state_layout is 'vv'"),
        ({"k": 96}, {}, NotImplementedError, r"head dimension of q is 96, supported: \(64, 128"),
        ({"v": 32}, {}, NotImplementedError, "head dimension of v is 32"),
        # strides
        ({}, {"q": torch.zeros(2, 64, 3).bfloat16().mT}, ValueError, "q has strides"),
        ({}, {"decay": torch.zeros(6)[::2]}, ValueError, "decay has strides"),
        ({}, {"state": torch.zeros(2, 3, 64, 128).mT}, ValueError, "state has strides"),
        ({}, {"state": torch.zeros(2, 3, 128, 65)[..., :64]}, ValueError, "state has strides"),
        ({}, {"state": torch.zeros(1, 3, 128, 64).expand(2, 3, 128, 64)}, ValueError, "expanded"),
        ({}, {"out": torch.zeros(1, 3, 128).bfloat16().expand(2, 3, 128)}, ValueError, "expanded"),
        # speculative decoding
        ({}, {"draft_k": torch.zeros(2, 4, 3, 64).bfloat16()}, ValueError, "draft_k is given"),
        (
            {"slots": 4},
            {"num_accepted_tokens": torch.zeros(2).int()},
            ValueError,
            r"num_accepted_tokens needs \[B, T, H, K\]",
        ),
        ({"tokens": 2, "records": 4}, {"draft_v": None}, ValueError, "draft_v is missing"),
        (
            {"tokens": 2, "records": 4},
            {"draft_k": torch.zeros(2, 4, 3, 128).bfloat16()},
            ValueError,
            "draft_k has shape",
        ),
        (
            {"tokens": 2, "records": 4},
            {"draft_v": torch.zeros(2, 5, 3, 128).bfloat16()},
            ValueError,
            "draft_k holds 4 records and draft_v 5",
        ),
        (
            {"tokens": 2, "records": 4},
            {"num_accepted_tokens": torch.zeros(2).long()},
            TypeError,
            "num_accepted_tokens has dtype",
        ),
    ],
)
def test_bad_arguments(
    shape: dict[str, Any], change: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        call(arguments(**shape) | change)


def test_too_many_sequences_for_the_grid():
    q = torch.zeros(1, 1, 64).bfloat16().expand(70000, 1, 64)
    state = torch.zeros(1, 1, 64, 64)
    indices = torch.zeros(70000, dtype=torch.int32)
    with pytest.raises(ValueError, match="70000 sequences, at most 65535"):
        cute_attn.lightning_attn_decode(q, q, q, state, torch.zeros(1), state_indices=indices)


def test_autograd_is_refused_before_anything_else_happens():
    args = arguments()
    args["q"].requires_grad_()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(NotImplementedError, match="no backward"),
    ):
        call(args)


def fake_arguments(**shape: Any) -> dict[str, Any]:
    """A good call with fake CUDA tensors; to be used inside a FakeTensorMode."""
    return {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        if isinstance(x, torch.Tensor)
        else x
        for name, x in arguments(**shape).items()
    }


@pytest.mark.parametrize("shape", GOOD, ids=str)
def test_fake_tensors_get_the_output_shape(shape: dict[str, Any]):
    with FakeTensorMode():
        args = fake_arguments(**shape)
        o = call(args)
    assert o.shape == args["v"].shape
    assert o.dtype == args["q"].dtype
    assert o.device.type == "cuda"


def test_fake_tensors_are_checked():
    with FakeTensorMode():
        args = fake_arguments()
        args["k"] = torch.empty(1, 3, 64, dtype=torch.bfloat16, device="cuda")
        with pytest.raises(ValueError, match="k has shape"):
            call(args)


def test_compiles_as_one_graph_that_mutates_state_and_out():
    graphs = []

    def capture(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, state, decay):
        return cute_attn.lightning_attn_decode(q, k, v, state, decay) * 2

    compiled = torch.compile(step, fullgraph=True, backend=capture)
    args = arguments()
    with pytest.raises(ValueError, match="q is on cpu"):  # traced, then run on what it is given
        compiled(*(args[name] for name in ("q", "k", "v", "state", "decay")))
    (graph,) = graphs
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert any("cute_attn.lightning_attn_decode" in str(target) for target in calls), calls


def test_schema_names_what_is_written():
    schema = torch.ops.cute_attn.lightning_attn_decode.default._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["state", "out"]
