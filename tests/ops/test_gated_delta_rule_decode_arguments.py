"""Bad arguments to gated_delta_rule_decode and fused_recurrent_gated_delta_rule, and to the
convolution of both decodes, without a GPU: each gives the documented exception.

What both decodes check alike is in test_kda_decode_arguments.py.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_attn
from cute_attn.cache.specfile import plan_file

from .test_kda_decode_arguments import decode_arguments, faked, recurrent_arguments

BF16, INT32 = torch.bfloat16, torch.int32
CHANNELS = 2 * 2 * 64 + 4 * 128


def arguments(convolution: bool = True, **shape: Any) -> dict[str, Any]:
    """A good call of gated_delta_rule_decode."""
    args = decode_arguments(**shape)
    args["g"] = args["g"][..., 0].clone()
    args["dt_bias"] = torch.randn(4)
    return args | (convolution_of(args) if convolution else {})


def convolution_of(args: dict[str, Any]) -> dict[str, Any]:
    indices = args.get("state_indices")
    width = 3 if indices is None or indices.dim() == 1 else 2 + indices.shape[1]
    if "record_k" in args:
        width += args["record_k"].shape[1]
    found = {
        "conv_state": torch.randn(args["state"].shape[0], CHANNELS, width).to(args["q"].dtype),
        "conv_weight": torch.randn(CHANNELS, 4).to(BF16),
        "conv_bias": torch.randn(CHANNELS).to(BF16),
    }
    if "draft_states" in args:
        rows = args["draft_states"].shape[:2]
        found["draft_windows"] = torch.zeros(*rows, CHANNELS, 3, dtype=args["q"].dtype)
    return found


def recurrent_call(**shape: Any) -> dict[str, Any]:
    args = recurrent_arguments(**shape)
    args["g"] = args["g"][..., 0].clone()
    return args


GOOD: list[dict[str, Any]] = [
    {},
    {"tokens": 3},
    {"slots": 5},
    {"tokens": 2, "slots": 9, "positions": 4},
    {"dtype": torch.float32},
    {"tokens": 2, "records": 4, "convolution": False},
    {"tokens": 2, "drafts": 4, "convolution": False},
    {"tokens": 2, "records": 4},
    {"tokens": 2, "drafts": 4},
]


@pytest.mark.parametrize("shape", GOOD, ids=str)
def test_good_arguments_on_the_cpu_are_refused_for_the_device_alone(shape: dict[str, Any]):
    args = arguments(**shape)
    if "records" in shape:
        args["record_g"] = args["record_g"][..., 0]  # of any strides
    with pytest.raises(ValueError, match="q is on cpu, must be on a CUDA device"):
        cute_attn.gated_delta_rule_decode(**args)


@pytest.mark.parametrize("shape", [*GOOD[:5], *GOOD[7:]], ids=str)
def test_kda_takes_a_convolution_too(shape: dict[str, Any]):
    args = decode_arguments(**shape)
    with pytest.raises(ValueError, match="q is on cpu, must be on a CUDA device"):
        cute_attn.kda_decode(**args, **convolution_of(args))


WINDOWS = {"conv_state": torch.zeros(2, CHANNELS, 3, dtype=BF16)}


@pytest.mark.parametrize(
    ("shape", "change", "error", "message"),
    [
        # one gate a head
        ({}, {"g": torch.zeros(2, 4, 64)}, ValueError, r"g has shape \[2, 4, 64\]"),
        ({}, {"dt_bias": torch.zeros(256)}, ValueError, r"dt_bias has shape .* must be \[4\]"),
        ({}, {"dt_bias": torch.zeros(8)[::2]}, ValueError, "dt_bias has strides"),
        (
            {"tokens": 2, "records": 4, "convolution": False},
            {"record_g": torch.zeros(2, 4, 4, 64)},
            ValueError,
            "record_g has shape",
        ),
        # the convolution
        ({}, {"conv_weight": None}, ValueError, "conv_state is given without conv_weight"),
        ({}, {"conv_state": None}, ValueError, "conv_weight is given without conv_state"),
        (
            {"convolution": False},
            {"conv_bias": torch.zeros(CHANNELS)},
            ValueError,
            "conv_bias is given without conv_state",
        ),
        ({}, {"conv_state": [0]}, TypeError, "conv_state must be a torch.Tensor, got list"),
        (
            {},
            {"conv_state": torch.zeros(2, CHANNELS, 3)},
            TypeError,
            "conv_state has dtype torch.float32, must be torch.bfloat16",
        ),
        (
            {},
            {"conv_weight": torch.zeros(CHANNELS, 4, dtype=torch.float64)},
            TypeError,
            "conv_weight has dtype torch.float64",
        ),
        (
            {},
            {"conv_bias": torch.zeros(CHANNELS)},
            TypeError,
            "conv_bias has dtype torch.float32, must be torch.bfloat16",
        ),
        (
            {},
            {"conv_state": torch.zeros(2, 3, CHANNELS, dtype=BF16)},
            ValueError,
            rf"conv_state has shape .* here \[2, {CHANNELS}, W\]",
        ),
        (
            {},
            {"conv_state": torch.zeros(3, CHANNELS, 3, dtype=BF16)},
            ValueError,
            "conv_state has shape",
        ),
        (
            {"slots": 5},
            {"conv_state": torch.zeros(5, CHANNELS, 2, dtype=BF16)},
            ValueError,
            r"conv_state has shape .* must hold at least 3 inputs \(W\)",
        ),
        (
            {"tokens": 2, "slots": 9, "positions": 4},
            {"conv_state": torch.zeros(9, CHANNELS, 5, dtype=BF16)},
            ValueError,
            r"must hold at least 6 inputs \(W\) for so many positions",
        ),
        (
            {},
            {"conv_weight": torch.zeros(CHANNELS, 3, dtype=BF16)},
            ValueError,
            r"conv_weight has shape",
        ),
        (
            {},
            {"conv_weight": torch.zeros(4, CHANNELS, dtype=BF16).T},
            ValueError,
            "conv_weight has strides",
        ),
        ({}, {"conv_bias": torch.zeros(4, dtype=BF16)}, ValueError, "conv_bias has shape"),
        (
            {},
            {"conv_state": torch.zeros(1, CHANNELS, 3, dtype=BF16).expand(2, -1, -1)},
            ValueError,
            "conv_state is expanded",
        ),
        (
            {"tokens": 2, "records": 4},
            {
                "record_g": torch.zeros(2, 4, 4),
                "conv_state": torch.zeros(2, CHANNELS, 6, dtype=BF16),
            },
            ValueError,
            r"must hold at least 7 inputs \(W\) for so many records",
        ),
        # windows of drafts
        (
            {"tokens": 2, "drafts": 4},
            {"draft_windows": None},
            ValueError,
            "conv_state is given with draft_states, but without draft_windows",
        ),
        (
            {"convolution": False, "tokens": 2, "drafts": 4},
            {"draft_windows": torch.zeros(3, 4, CHANNELS, 3, dtype=BF16)},
            ValueError,
            "draft_windows is given without conv_state",
        ),
        (
            {"tokens": 2},
            {"draft_windows": torch.zeros(3, 4, CHANNELS, 3, dtype=BF16)},
            ValueError,
            "draft_windows is given without draft_states",
        ),
        (
            {"tokens": 2, "drafts": 4},
            {"draft_windows": torch.zeros(1, 4, CHANNELS, 3, dtype=BF16)},
            ValueError,
            r"draft_windows has shape .* must be \[M, S, D, 3\]",
        ),
        (
            {"tokens": 2, "drafts": 4},
            {"draft_windows": torch.zeros(3, 4, CHANNELS, 3)},
            TypeError,
            "draft_windows has dtype torch.float32, must be torch.bfloat16",
        ),
        (
            {"tokens": 2, "drafts": 4},
            {"draft_windows": [0]},
            TypeError,
            "draft_windows must be a torch.Tensor, got list",
        ),
    ],
)
def test_bad_arguments_of_decode(
    shape: dict[str, Any], change: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        cute_attn.gated_delta_rule_decode(**arguments(**shape) | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"g": torch.zeros(2, 5, 4, 64)}, ValueError, "g has shape"),
        ({"gk": torch.zeros(2, 5, 4, 128)}, ValueError, r"gk has shape .* \[2, 5, 4, 64\]"),
        ({"gk": torch.zeros(2, 5, 4, 64).int()}, TypeError, "gk has dtype torch.int32"),
        ({"gk": 0.5}, TypeError, "gk must be a torch.Tensor, got float"),
        ({"g": None, "gk": torch.zeros(2, 5, 4, 128)}, ValueError, r"gk has shape .* 4, 64\]"),
        ({"g": None, "gk": torch.zeros(2, 5, 4, 64).int()}, TypeError, "gk has dtype torch.int32"),
        ({"g": None, "gk": 0.5}, TypeError, "gk must be a torch.Tensor, got float"),
        (
            {"gk": torch.zeros(2, 5, 4, 64), "g": torch.zeros(2, 5, 2)},
            ValueError,
            r"g has shape .* \[2, 5, 4\]",
        ),
        ({"gv": torch.zeros(2, 5, 4, 64)}, ValueError, r"gv has shape .* \[2, 5, 4, 128\]"),
        ({"gv": torch.zeros(2, 5, 4, 128).int()}, TypeError, "gv has dtype torch.int32"),
        ({"gv": 0.5}, TypeError, "gv must be a torch.Tensor, got float"),
        ({"beta": torch.zeros(2, 5, 4, 64)}, ValueError, r"beta has shape .* \[2, 5, 4, 128\]"),
        ({"use_gate_in_kernel": True}, ValueError, "A_log is None, must be given"),
        (
            {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(256)},
            ValueError,
            r"dt_bias has shape \[256\], must have HV = 4 elements",
        ),
        (
            {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "g": None},
            ValueError,
            "g is None, must be given with use_gate_in_kernel",
        ),
        (
            {"use_beta_sigmoid_in_kernel": True, "beta": None},
            ValueError,
            "beta is None, must be given with use_beta_sigmoid_in_kernel",
        ),
        ({"g": None, "v": [1.0]}, TypeError, "v must be a torch.Tensor, got list"),
        (
            {"state_v_first": True, "transpose_state_layout": True},
            ValueError,
            "transpose_state_layout is given with state_v_first",
        ),
    ],
)
def test_bad_arguments_of_the_recurrent_form(
    change: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        cute_attn.fused_recurrent_gated_delta_rule(**recurrent_call() | change)


@pytest.mark.parametrize("name", ["q", "g", "state", "conv_state", "conv_weight", "conv_bias"])
def test_autograd_is_refused(name: str):
    args = arguments()
    args[name].requires_grad_()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(NotImplementedError, match="gated_delta_rule_decode has no backward"),
    ):
        cute_attn.gated_delta_rule_decode(**args)


def test_both_decodes_take_the_same_arguments():
    names = ("kda_decode", "gated_delta_rule_decode")
    ours, kdas = (inspect.signature(getattr(cute_attn, name)) for name in names)
    assert ours == kdas


def test_fake_tensors_get_the_results():
    with FakeTensorMode():
        args = faked(arguments(tokens=3, slots=5))
        o = cute_attn.gated_delta_rule_decode(**args)
        recurrent = faked(recurrent_call())
        other, state = cute_attn.fused_recurrent_gated_delta_rule(**recurrent)
    assert o.shape == args["v"].shape and other.shape == recurrent["v"].shape
    assert state is not None and state.shape == (2, 4, 64, 128)


def test_schemas_name_what_is_written():
    schema = torch.ops.cute_attn.gated_delta_rule_decode.default._schema
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == {
        "state", "out", "record_k", "record_g", "record_u", "draft_states", "conv_state",
        "draft_windows",
    }  # fmt: skip


def test_models_name_kernels():
    models = Path(cute_attn.__file__).parent / "models" / "serving.toml"
    found = [spec for _, spec in plan_file(models, "sm_90a") if hasattr(spec, "conv_dtype")]
    assert {(spec.decays, spec.conv_dtype) for spec in found} >= {
        ("channel", "none"),
        ("head", "none"),
        ("head", "bfloat16"),
    }


def test_the_recurrent_form_has_flash_linear_attentions_signature():
    """Names, order and defaults of its arguments. Read from its source: importing needs Triton."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs flash-linear-attention, which is not installed")
    folder = Path(package.submodule_search_locations[0]) / "ops" / "gated_delta_rule"
    (theirs,) = (
        node.args
        for node in ast.parse((folder / "fused_recurrent.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "fused_recurrent_gated_delta_rule"
    )
    ours = inspect.signature(cute_attn.fused_recurrent_gated_delta_rule).parameters
    names = [argument.arg for argument in theirs.args]
    assert list(ours) == [*names, "transpose_state_layout"]
    defaults = [ast.literal_eval(default) for default in theirs.defaults]
    found = {n: p.default for n, p in ours.items() if p.default is not inspect.Parameter.empty}
    expected = dict(zip(names[-len(defaults) :], defaults, strict=True))
    assert found == expected | {"transpose_state_layout": None}
