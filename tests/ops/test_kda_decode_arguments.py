"""Bad arguments to kda_decode and fused_recurrent_kda, without a GPU: each gives the documented
exception.

The checks run in one order, the device last: CPU tensors reach every one of them.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_attn
from cute_attn.cache.specfile import plan_file

BF16 = torch.bfloat16


def decode_arguments(
    batch: int = 2,
    tokens: int | None = None,
    heads: int = 2,
    heads_v: int = 4,
    k: int = 64,
    v: int = 128,
    slots: int | None = None,
    positions: int | None = None,
    records: int | None = None,
    drafts: int | None = None,
    state_v_first: bool = True,
    dtype: torch.dtype = BF16,
) -> dict[str, Any]:
    """A good call of kda_decode."""
    step = (batch,) if tokens is None else (batch, tokens)
    matrix = (v, k) if state_v_first else (k, v)
    args: dict[str, Any] = {
        "q": torch.randn(*step, heads, k).to(dtype),
        "k": torch.randn(*step, heads, k).to(dtype),
        "v": torch.randn(*step, heads_v, v).to(dtype),
        "g": torch.randn(*step, heads_v, k),
        "beta": torch.randn(*step, heads_v).to(dtype),
        "state": torch.randn(slots or batch, heads_v, *matrix),
        "A_log": torch.randn(heads_v),
        "dt_bias": torch.randn(heads_v * k),
        "state_v_first": state_v_first,
    }
    if slots is not None:
        args["state_indices"] = torch.arange(batch, dtype=torch.int32)
    if positions is not None:
        indices = torch.arange(batch * positions, dtype=torch.int32)
        args["state_indices"] = indices.view(batch, positions)
        args["num_accepted_tokens"] = torch.ones(batch, dtype=torch.int32)
    if records is not None:
        args["num_accepted_tokens"] = torch.ones(batch, dtype=torch.int32)
        args["record_k"] = torch.randn(slots or batch, records, heads, k).to(dtype)
        args["record_g"] = torch.randn(slots or batch, records, heads_v, k)
        args["record_u"] = torch.randn(slots or batch, records, heads_v, v)
    if drafts is not None:
        args["draft_states"] = torch.randn(batch, drafts, heads_v, *matrix)
        args["draft_indices"] = torch.arange(batch, dtype=torch.int32)
    return args


def recurrent_arguments(
    batch: int = 2,
    tokens: int = 5,
    heads: int = 2,
    heads_v: int = 4,
    k: int = 64,
    v: int = 128,
    offsets: list[int] | None = None,
    state: bool = True,
    dtype: torch.dtype = BF16,
) -> dict[str, Any]:
    """A good call of fused_recurrent_kda."""
    sequences = batch
    if offsets is not None:
        batch, sequences = 1, len(offsets) - 1
    args: dict[str, Any] = {
        "q": torch.randn(batch, tokens, heads, k).to(dtype),
        "k": torch.randn(batch, tokens, heads, k).to(dtype),
        "v": torch.randn(batch, tokens, heads_v, v).to(dtype),
        "g": torch.randn(batch, tokens, heads_v, k),
        "beta": torch.rand(batch, tokens, heads_v),
        "output_final_state": True,
    }
    if state:
        args["initial_state"] = torch.randn(sequences, heads_v, k, v)
    if offsets is not None:
        args["cu_seqlens"] = torch.tensor(offsets)
    return args


def decode(args: dict[str, Any]) -> torch.Tensor:
    return cute_attn.kda_decode(**args)


def recurrent(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    return cute_attn.fused_recurrent_kda(**args)


GOOD_DECODE = [
    {},
    {"tokens": 3},
    {"slots": 5},
    {"state_v_first": False},
    {"dtype": torch.float32},
    {"tokens": 2, "slots": 9, "positions": 4},
    {"tokens": 2, "slots": 5, "records": 4},
    {"records": 1},
    {"slots": 9, "positions": 1},
    {"tokens": 2, "drafts": 4},
    {"drafts": 1, "slots": 5},
]
GOOD_RECURRENT = [{}, {"offsets": [0, 0, 5]}, {"state": False}, {"tokens": 0}, {"batch": 0}]
GOOD = [
    *(pytest.param(decode, decode_arguments, shape, id=f"decode-{shape}") for shape in GOOD_DECODE),
    *(
        pytest.param(recurrent, recurrent_arguments, shape, id=f"recurrent-{shape}")
        for shape in GOOD_RECURRENT
    ),
]


@pytest.mark.parametrize(("call", "arguments", "shape"), GOOD)
def test_good_arguments_on_the_cpu_are_refused_for_the_device_alone(
    call: Callable[..., Any], arguments: Callable[..., Any], shape: dict[str, Any]
):
    with pytest.raises(ValueError, match="q is on cpu, must be on a CUDA device"):
        call(arguments(**shape))


INT32 = torch.int32


@pytest.mark.parametrize(
    ("shape", "change", "error", "message"),
    [
        # not tensors, not numbers, wrong dtypes
        ({}, {"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({}, {"state": None}, TypeError, "state must be a torch.Tensor, got NoneType"),
        ({}, {"A_log": 0.5}, TypeError, "A_log must be a torch.Tensor, got float"),
        ({}, {"scale": "1"}, TypeError, "scale must be a float, got str"),
        ({}, {"lower_bound": "1"}, TypeError, "lower_bound must be a float, got str"),
        ({}, {"lower_bound": -float("inf")}, ValueError, "lower_bound is -inf, must be finite"),
        ({}, {"state_v_first": "yes"}, TypeError, "state_v_first must be a bool, got str"),
        ({}, {"q": torch.zeros(2, 2, 64, dtype=torch.int8)}, TypeError, "q has dtype torch.int8"),
        ({}, {"k": torch.zeros(2, 2, 64)}, TypeError, "k has dtype torch.float32"),
        ({}, {"v": torch.zeros(2, 4, 128).half()}, TypeError, "v has dtype torch.float16"),
        ({}, {"g": torch.zeros(2, 4, 64).double()}, TypeError, "g has dtype torch.float64"),
        ({}, {"beta": torch.zeros(2, 4).long()}, TypeError, "beta has dtype torch.int64"),
        ({}, {"state": torch.zeros(2, 4, 128, 64).half()}, TypeError, "state has dtype"),
        ({}, {"A_log": torch.zeros(4).half()}, TypeError, "A_log has dtype torch.float16"),
        ({}, {"dt_bias": torch.zeros(256).double()}, TypeError, "dt_bias has dtype"),
        ({}, {"out": torch.zeros(2, 4, 128)}, TypeError, "out has dtype torch.float32"),
        (
            {"slots": 4},
            {"state_indices": torch.zeros(2)},
            TypeError,
            "state_indices has dtype torch.float32, must be int32 or int64",
        ),
        # devices
        ({}, {"k": torch.zeros(2, 2, 64, device="meta")}, ValueError, "k is on meta"),
        # head counts
        ({"heads": 3}, {}, ValueError, "head counts do not fit: 4 value heads .* 3 query and key"),
        ({"heads": 8}, {}, ValueError, "head counts do not fit: 4 value heads .* 8 query and key"),
        # shapes
        ({}, {"q": torch.zeros(2, 64, dtype=BF16)}, ValueError, r"q has shape \[2, 64\]"),
        ({}, {"q": torch.zeros(3, 2, 64, dtype=BF16)}, ValueError, r"q has shape \[3, 2, 64\]"),
        ({}, {"k": torch.zeros(2, 3, 64, dtype=BF16)}, ValueError, r"k has shape \[2, 3, 64\]"),
        ({}, {"v": torch.zeros(2, 1, 4, 128, dtype=BF16)}, ValueError, "v has shape"),
        ({}, {"v": torch.zeros(1, 4, 128, dtype=BF16)}, ValueError, r"v has shape \[1, 4, 128\]"),
        ({}, {"g": torch.zeros(2, 2, 64)}, ValueError, r"g has shape \[2, 2, 64\]"),
        ({}, {"beta": torch.zeros(2, 2, dtype=BF16)}, ValueError, r"beta has shape \[2, 2\]"),
        ({}, {"out": torch.zeros(2, 4, 64, dtype=BF16)}, ValueError, "out has shape"),
        ({}, {"state": torch.zeros(2, 4, 128)}, ValueError, "state has shape"),
        ({}, {"state": torch.zeros(3, 4, 128, 64)}, ValueError, r"here \[2, 4, 128, 64\]"),
        ({}, {"state": torch.zeros(2, 4, 64, 128)}, ValueError, r"must be \[N, HV, V, K\]"),
        ({"state_v_first": False}, {"state": torch.zeros(2, 4, 128, 64)}, ValueError, "HV, K, V"),
        ({}, {"A_log": torch.zeros(2)}, ValueError, r"A_log has shape \[2\], must be \[4\]"),
        ({}, {"dt_bias": torch.zeros(64)}, ValueError, r"must be \[256\] or \[4, 64\]"),
        ({"slots": 4}, {"state_indices": torch.zeros(3).int()}, ValueError, "state_indices has"),
        ({"slots": 4}, {"state_indices": torch.zeros(2, 0).int()}, ValueError, "state_indices has"),
        ({"tokens": 0}, {}, ValueError, "T is 0"),
        ({"k": 96}, {}, NotImplementedError, r"\(K\) is 96, there are kernels for: \(64, 128, 256"),
        ({"v": 32}, {}, NotImplementedError, r"head dimension of values \(V\) is 32"),
        # the gate and beta
        ({}, {"A_log": None}, ValueError, "A_log is None"),
        (
            {},
            {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False},
            ValueError,
            "allow_neg_eigval is True",
        ),
        # strides
        ({}, {"q": torch.zeros(2, 64, 2, dtype=BF16).mT}, ValueError, "q has strides"),
        ({}, {"g": torch.zeros(2, 64, 4).mT}, ValueError, "g has strides"),
        ({}, {"A_log": torch.zeros(8)[::2]}, ValueError, "A_log has strides"),
        ({}, {"dt_bias": torch.zeros(512)[::2]}, ValueError, "dt_bias has strides"),
        ({}, {"state": torch.zeros(2, 4, 64, 128).mT}, ValueError, "state has strides"),
        ({}, {"state": torch.zeros(2, 4, 128, 65)[..., :64]}, ValueError, "state has strides"),
        ({}, {"state": torch.zeros(1, 4, 128, 64).expand(2, -1, -1, -1)}, ValueError, "expanded"),
        ({}, {"out": torch.zeros(1, 4, 128).to(BF16).expand(2, -1, -1)}, ValueError, "expanded"),
        (
            {"slots": 4},
            {"state_indices": torch.zeros(2, 4, dtype=INT32)[:, ::2]},
            ValueError,
            "state_indices has strides",
        ),
        # sequences that start from 0, and padding
        (
            {},
            {"has_initial_state": torch.ones(2, dtype=torch.uint8)},
            TypeError,
            "has_initial_state has dtype torch.uint8, must be torch.bool",
        ),
        ({}, {"has_initial_state": torch.ones(3) > 0}, ValueError, "has_initial_state has shape"),
        ({}, {"has_initial_state": torch.ones(4)[::2] > 0}, ValueError, "q is on cpu"),
        (
            {},
            {"has_initial_state": torch.ones(4, dtype=torch.bool)[::2]},
            ValueError,
            "has_initial_state has strides",
        ),
        (
            {"slots": 4},
            {"state": torch.zeros(0, 4, 128, 64)},
            ValueError,
            "state has 0 slots, must",
        ),
        ({"slots": 4}, {"pad_slot_id": 1}, ValueError, "pad_slot_id is 1, must be 0, or negative"),
        ({"slots": 4}, {"pad_slot_id": False}, TypeError, "pad_slot_id must be an int, got bool"),
        # packed sequences
        ({}, {"cu_seqlens": torch.tensor([0, 2])}, ValueError, r"q has shape .* \[1, T, HQK, K\]"),
        (
            {"tokens": 3, "slots": 4},
            {"cu_seqlens": torch.tensor([0, 2, 3])},
            ValueError,
            r"there are 2 batches \(B\), must be 1",
        ),
        (
            {"batch": 1, "tokens": 3, "slots": 4},
            {"cu_seqlens": torch.tensor([0, 2, 3])},
            ValueError,
            r"state_indices has shape \[1\], must be \[2\]",
        ),
        (
            {"batch": 1, "tokens": 3},
            {"cu_seqlens": torch.tensor([0, 2, 3])},
            ValueError,
            r"state has shape .* \[2, 4, 128, 64\]",
        ),
        (
            {"batch": 1, "tokens": 3},
            {"cu_seqlens": torch.tensor([0.0, 3.0])},
            TypeError,
            "cu_seqlens has dtype",
        ),
        (
            {"batch": 1, "tokens": 2, "records": 4},
            {"cu_seqlens": torch.tensor([0, 2])},
            ValueError,
            "cu_seqlens is given, must be None with record_k",
        ),
        # a tensor for drafts
        (
            {"tokens": 2},
            {"draft_states": torch.zeros(2, 4, 4, 128, 64)},
            ValueError,
            "draft_states is given without draft_indices",
        ),
        (
            {"tokens": 2, "drafts": 4},
            {"draft_states": torch.zeros(2, 4, 4, 128, 64, dtype=BF16)},
            TypeError,
            "draft_states has dtype torch.bfloat16, must be that of state",
        ),
        (
            {"tokens": 2, "drafts": 4},
            {"draft_states": torch.zeros(2, 4, 4, 64, 128)},
            ValueError,
            "draft_states has shape",
        ),
        (
            {"tokens": 2, "drafts": 4},
            {"draft_indices": torch.zeros(2).long()},
            TypeError,
            "draft_indices has dtype",
        ),
        (
            {"tokens": 5, "drafts": 4},
            {},
            ValueError,
            r"q has 5 tokens \(T\), must be at most the 4 states \(S\) of draft_states",
        ),
        (
            {"tokens": 2, "drafts": 4, "slots": 9, "positions": 3},
            {},
            ValueError,
            "draft_states is given, must be None with records or with",
        ),
        # speculative decoding
        (
            {"slots": 4},
            {"num_accepted_tokens": torch.zeros(2, dtype=INT32)},
            ValueError,
            r"num_accepted_tokens needs state_indices \[B, 1 \+ S\], or record_k",
        ),
        (
            {"tokens": 3, "slots": 9, "positions": 2},
            {},
            ValueError,
            r"q has 3 tokens \(T\), must be at most the 2 positions",
        ),
        (
            {"tokens": 2, "slots": 9, "positions": 2},
            {"num_accepted_tokens": torch.zeros(3, dtype=INT32)},
            ValueError,
            "num_accepted_tokens has shape",
        ),
        (
            {"tokens": 2, "slots": 9, "positions": 2},
            {"num_accepted_tokens": torch.zeros(2).long()},
            TypeError,
            "num_accepted_tokens has dtype",
        ),
        (
            {"tokens": 2, "records": 4},
            {"record_u": None},
            ValueError,
            "record_k is given without record_u",
        ),
        (
            {"tokens": 2, "records": 4},
            {"num_accepted_tokens": None},
            ValueError,
            "num_accepted_tokens is missing",
        ),
        ({"tokens": 5, "records": 4}, {}, ValueError, r"q has 5 tokens \(T\), .* 4 records"),
        (
            {"tokens": 2, "slots": 8, "records": 4},
            {"state_indices": torch.zeros(2, 4, dtype=INT32)},
            ValueError,
            r"state_indices has shape \[2, 4\], must be \[2\] with records",
        ),
        (
            {"tokens": 2, "records": 4},
            {"record_k": torch.zeros(2, 4, 4, 64, dtype=BF16)},
            ValueError,
            "record_k has shape",
        ),
        (
            {"tokens": 2, "records": 4},
            {"record_u": torch.zeros(2, 5, 4, 128)},
            ValueError,
            "record_u has shape",
        ),
        (
            {"tokens": 2, "records": 4},
            {"record_g": torch.zeros(2, 4, 4, 64, dtype=BF16)},
            TypeError,
            "record_g has dtype torch.bfloat16, must be that of g",
        ),
        (
            {"tokens": 2, "records": 4},
            {"record_u": torch.zeros(2, 4, 4, 128, dtype=BF16)},
            TypeError,
            "record_u has dtype",
        ),
    ],
)
def test_bad_arguments_of_decode(
    shape: dict[str, Any], change: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        decode(decode_arguments(**shape) | change)


@pytest.mark.parametrize(
    ("shape", "change", "error", "message"),
    [
        ({}, {"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({}, {"initial_state": 0}, TypeError, "initial_state must be a torch.Tensor, got int"),
        ({}, {"output_final_state": None}, TypeError, "output_final_state must be a bool"),
        ({}, {"scale": float("nan")}, ValueError, "scale is nan, must be finite"),
        ({}, {"q": torch.zeros(2, 5, 2, 64).double()}, TypeError, "q has dtype torch.float64"),
        ({}, {"v": torch.zeros(2, 5, 4, 128).half()}, TypeError, "v has dtype torch.float16"),
        ({}, {"initial_state": torch.zeros(2, 4, 64, 128).double()}, TypeError, "initial_state"),
        ({}, {"beta": torch.zeros(2, 5, 4, device="meta")}, ValueError, "beta is on meta"),
        ({"heads": 3}, {}, ValueError, "head counts do not fit"),
        ({}, {"q": torch.zeros(2, 2, 64, dtype=BF16)}, ValueError, r"q has shape \[2, 2, 64\]"),
        ({}, {"beta": torch.zeros(2, 5, 4, 64)}, ValueError, r"beta has shape .* 5, 4, 128\]"),
        ({}, {"initial_state": torch.zeros(3, 4, 64, 128)}, ValueError, "initial_state has shape"),
        ({}, {"state_v_first": True}, ValueError, r"initial_state .* must be \[N, HV, V, K\]"),
        ({"v": 160}, {}, NotImplementedError, r"\(V\) is 160, there are kernels for"),
        ({}, {"use_gate_in_kernel": True}, ValueError, "A_log is None"),
        ({}, {"allow_neg_eigval": True}, ValueError, "allow_neg_eigval is True"),
        (
            {},
            {"use_gate_in_kernel": True, "A_log": torch.zeros(3)},
            ValueError,
            "A_log has shape",
        ),
        (
            {},
            {"use_gate_in_kernel": True, "lower_bound": -5.0, "dt_bias": torch.zeros(4)},
            ValueError,
            "dt_bias has shape",
        ),
        ({}, {"cu_seqlens": torch.tensor([0, 5])}, ValueError, r"there are 2 batches \(B\)"),
        ({"offsets": [0, 5]}, {"cu_seqlens": torch.zeros(2)}, TypeError, "cu_seqlens has dtype"),
        (
            {"offsets": [0, 5]},
            {"cu_seqlens": torch.tensor([0, 3, 5])},
            ValueError,
            "initial_state has shape",
        ),
    ],
)
def test_bad_arguments_of_the_recurrent_form(
    shape: dict[str, Any], change: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        recurrent(recurrent_arguments(**shape) | change)


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="ssm_state_indices"):
        recurrent(recurrent_arguments() | {"ssm_state_indices": torch.zeros(2, dtype=INT32)})


def test_what_belongs_to_the_gate_is_ignored_without_it():
    args = decode_arguments() | {"use_gate_in_kernel": False}
    args |= {"A_log": torch.zeros(7), "dt_bias": torch.zeros(1)}
    with pytest.raises(ValueError, match="q is on cpu"):
        decode(args)


def test_too_many_sequences_for_the_grid():
    args = decode_arguments(batch=1, slots=1)
    for name in ("q", "k", "v", "g", "beta"):
        args[name] = args[name].expand(70000, *args[name].shape[1:])
    args["state_indices"] = torch.zeros(70000, dtype=INT32)
    with pytest.raises(ValueError, match="70000 sequences, at most 65535"):
        decode(args)


@pytest.mark.parametrize("name", ["q", "g", "state", "A_log", "record_u"])
def test_autograd_is_refused_by_decode(name: str):
    args = decode_arguments(tokens=2, records=4)
    args[name].requires_grad_()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(NotImplementedError, match="kda_decode has no backward"),
    ):
        decode(args)


@pytest.mark.parametrize("name", ["v", "beta", "initial_state"])
def test_autograd_is_refused_by_the_recurrent_form(name: str):
    args = recurrent_arguments()
    args[name].requires_grad_()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(NotImplementedError, match="fused_recurrent_kda has no backward"),
    ):
        recurrent(args)


def faked(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments as fake CUDA tensors; to be used inside a FakeTensorMode."""
    return {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        if isinstance(x, torch.Tensor)
        else x
        for name, x in args.items()
    }


@pytest.mark.parametrize("shape", GOOD_DECODE, ids=str)
def test_fake_tensors_get_the_output_of_decode(shape: dict[str, Any]):
    with FakeTensorMode():
        args = faked(decode_arguments(**shape))
        o = decode(args)
    assert o.shape == args["v"].shape
    assert o.dtype == args["q"].dtype
    assert o.device.type == "cuda"


@pytest.mark.parametrize("shape", GOOD_RECURRENT, ids=str)
def test_fake_tensors_get_the_results_of_the_recurrent_form(shape: dict[str, Any]):
    with FakeTensorMode():
        args = faked(recurrent_arguments(**shape))
        o, final_state = recurrent(args)
        _, none = recurrent(args | {"output_final_state": False})
    assert o.shape == args["v"].shape
    assert o.dtype == args["q"].dtype
    assert none is None
    assert final_state is not None
    sequences = 2 if "offsets" in shape else shape.get("batch", 2)
    assert final_state.shape == (sequences, 4, 64, 128)
    assert final_state.dtype == torch.float32


def test_fake_tensors_are_checked():
    with FakeTensorMode():
        args = faked(decode_arguments())
        args["k"] = torch.empty(1, 2, 64, dtype=BF16, device="cuda")
        with pytest.raises(ValueError, match="k has shape"):
            decode(args)


def graphs_of(step: Callable[..., Any], args: tuple[Any, ...]) -> list[torch.fx.GraphModule]:
    """What torch.compile traces, as one graph each; its execution stops at the CPU tensors."""
    graphs = []

    def capture(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    with pytest.raises(ValueError, match="q is on cpu"):  # traced, then run on what it is given
        torch.compile(step, fullgraph=True, backend=capture)(*args)
    return graphs


def test_decode_compiles_as_one_graph():
    def step(q, k, v, g, beta, state, A_log, dt_bias):
        return cute_attn.kda_decode(q, k, v, g, beta, state, A_log=A_log, dt_bias=dt_bias) * 2

    args = decode_arguments()
    del args["state_v_first"]
    (graph,) = graphs_of(step, tuple(args.values()))
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert any("cute_attn.kda_decode" in target for target in calls), calls


def test_the_recurrent_form_compiles_as_one_graph():
    def step(q, k, v, g, beta):
        return cute_attn.fused_recurrent_kda(q, k, v, g, beta, output_final_state=True)

    args = recurrent_arguments(state=False)
    (graph,) = graphs_of(step, tuple(args[name] for name in ("q", "k", "v", "g", "beta")))
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert any("cute_attn.fused_recurrent_kda" in target for target in calls), calls


def test_schemas_name_what_is_written():
    schema = torch.ops.cute_attn.kda_decode.default._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    pools = ["record_k", "record_g", "record_u", "draft_states", "conv_state", "draft_windows"]
    assert written == ["state", "out", *pools]
    schema = torch.ops.cute_attn.fused_recurrent_kda.default._schema
    assert not any(a.alias_info for a in schema.arguments)


def test_models_name_kernels():
    models = Path(cute_attn.__file__).parent / "models" / "serving.toml"
    names = {kernel.name for kernel, _ in plan_file(models, "sm_90a")}
    assert {"kda_decode", "kda_decode_records"} <= names


def test_the_recurrent_form_has_flash_linear_attentions_signature():
    """Names, order and defaults of its arguments. Read from its source: importing needs Triton."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs flash-linear-attention, which is not installed")
    source = Path(package.submodule_search_locations[0]) / "ops" / "kda" / "fused_recurrent.py"
    (theirs,) = (
        node.args
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "fused_recurrent_kda"
    )
    ours = inspect.signature(cute_attn.fused_recurrent_kda).parameters
    of_their_kwargs = ["transpose_state_layout"]
    assert list(ours) == [argument.arg for argument in theirs.args] + of_their_kwargs
    defaults = dict(
        zip(
            [argument.arg for argument in theirs.args][-len(theirs.defaults) :],
            [ast.literal_eval(default) for default in theirs.defaults],
            strict=True,
        )
    )
    assert defaults | dict.fromkeys(of_their_kwargs) == {
        name: p.default for name, p in ours.items() if p.default is not inspect.Parameter.empty
    }
