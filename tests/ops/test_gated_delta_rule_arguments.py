"""Bad arguments to chunk_gated_delta_rule, without a GPU: each gives the documented exception.

What the function checks as chunk_kda does is in test_kda_arguments.py; here are one call of each
kind of check, and what differs.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_attn
from cute_attn.cache.specfile import plan_file
from cute_attn.ops.gated_delta_rule import plan_chunk_gated_delta_rule
from tests.gpu.small_calls import idle_kernels

from .test_kda_arguments import PACKED, bf16, f32, name_of, offsets
from .test_kda_arguments import call as call_of_kda

GATED: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": f32(4)}
POOL: dict[str, Any] = {
    "initial_state": f32(5, 4, 64, 128), "state_indices": torch.tensor([4, 0], dtype=torch.int32),
}  # fmt: skip


def call(**changes: Any) -> dict[str, Any]:
    given = call_of_kda(**changes)
    if "g" not in changes:
        given["g"] = given["g"][..., 0].clone()
    return given


GOOD: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float16, "g": f32(2, 5, 4)},
    {"heads": 1, "heads_v": 8},
    {**GATED, "dt_bias": f32(4)},
    {**PACKED, "cu_seqlens_cpu": offsets(0, 2, 2, 5), "chunk_indices": offsets(0, 0)},
    {"chunk_size": 16},
    {"chunk_size": 32, "output_final_state": True},
    POOL,
    {**POOL, "checkpoint_indices": torch.zeros(2, 1, dtype=torch.int32), "checkpoint_interval": 64},
]


@pytest.mark.parametrize("change", GOOD, ids=name_of)
def test_good_arguments_on_the_cpu_are_refused_for_the_device_alone(change: dict[str, Any]):
    with pytest.raises(ValueError, match="q is on cpu, must be on a CUDA device"):
        cute_attn.chunk_gated_delta_rule(**call(**change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"g": 0.5}, TypeError, "g must be a torch.Tensor, got float"),
        ({"dtype": torch.float32}, TypeError, "q has dtype torch.float32, must be one of"),
        ({"g": f32(2, 5, 4).double()}, TypeError, "g has dtype torch.float64, must be one of"),
        ({"g": f32(2, 5, 4, 64)}, ValueError, r"g has shape .*, here \[2, 5, 4\]"),
        ({"g": f32(2, 5, 2)}, ValueError, r"g has shape .*, here \[2, 5, 4\]"),
        ({"beta": bf16(2, 5, 4, 128)}, ValueError, r"beta has shape .*, here \[2, 5, 4\]"),
        ({"heads_v": 3}, ValueError, "head counts do not fit: 3 value heads .* multiple of the 2"),
        ({"dim_k": 256}, NotImplementedError, r"\(K\) is 256, there are kernels for: \(64, 128\)"),
        ({"dim_v": 96}, NotImplementedError, r"\(V\) is 96, there are kernels .* 128, 192, 256\)"),
        ({**GATED, "A_log": None}, ValueError, "A_log is None, must be given with use_gate_in_ke"),
        ({**GATED, "dt_bias": f32(256)}, ValueError, r"dt_bias has .* must have HV = 4 elements"),
        ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval is True, must be False without"),
        ({"initial_state": f32(3, 4, 64, 128)}, ValueError, r"here \[2, 4, 64, 128\]"),
        ({"initial_state": f32(2, 4, 64, 128).double()}, TypeError, "initial_state has dtype"),
        ({"cu_seqlens": offsets(0, 5)}, ValueError, r"there are 2 batches \(B\), must be 1 where"),
        ({"chunk_size": 48}, ValueError, r"chunk_size is 48, must be one of \(16, 32, 64\)"),
        ({"chunk_size": "64"}, ValueError, r"chunk_size is '64', must be one of \(16, 32, 64\)"),
        ({"cp_context": object()}, NotImplementedError, "cp_context is given, must be None"),
        ({"cp": object()}, TypeError, "cp is object, must be a plan of cute_attn.distributed"),
        ({"lower_bound": -5.0}, TypeError, "unexpected keyword argument 'lower_bound'"),
        ({"out": bf16(2, 5, 4, 128)}, ValueError, "out is given without state_indices"),
        (
            {**POOL, "checkpoint_indices": torch.zeros(2, 1, dtype=torch.int32),
             "checkpoint_interval": 32},
            ValueError,
            "checkpoint_interval is 32, must be a multiple of 64",
        ),
    ],
    ids=lambda x: name_of(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        cute_attn.chunk_gated_delta_rule(**call(**change))


def test_plans_without_a_kernel():
    for options, message in (
        ({"dtype": "float32"}, "dtype is 'float32', must be one of"),
        ({"head_dim_k": 256}, "head_dim_k is 256, must be one of"),
        ({"checkpoint_indices": True}, "checkpoint_indices is True, must be False without"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_chunk_gated_delta_rule("sm_90a", **options)


# flash-linear-attention's arguments, of release 0.6.0 and of its main in August 2026. The last ones
# are keywords that its **kwargs take.
THEIRS: dict[str, dict[str, Any]] = {
    "chunk_gated_delta_rule": {
        "q": ..., "k": ..., "v": ..., "g": ..., "beta": ..., "scale": None, "initial_state": None,
        "output_final_state": False, "use_qk_l2norm_in_kernel": False,
        "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False, "state_v_first": False,
        "cu_seqlens": None, "cu_seqlens_cpu": None, "chunk_indices": None, "cp_context": None,
        "use_gate_in_kernel": False, "A_log": None, "dt_bias": None, "chunk_size": 64,
    },
    "fused_recurrent_gated_delta_rule": {
        "q": ..., "k": ..., "v": ..., "g": None, "gk": None, "gv": None, "beta": None,
        "scale": None, "initial_state": None, "output_final_state": False,
        "use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False, "A_log": None,
        "dt_bias": None, "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False,
        "state_v_first": False, "cu_seqlens": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", THEIRS)
def test_names_order_and_defaults_are_flash_linear_attentions(name: str):
    ours = inspect.signature(getattr(cute_attn, name)).parameters.values()
    found = {p.name: ... if p.default is p.empty else p.default for p in ours}
    assert list(found.items())[: len(THEIRS[name])] == list(THEIRS[name].items())
    assert "transpose_state_layout" in found


@pytest.mark.parametrize("change", [{"batch": 1}, PACKED], ids=["dense", "packed"])
def test_models_name_the_kernels_of_a_training_step(change: dict[str, Any]):
    """The file also has the kernels that split long sequences."""
    given = call(dim_k=128, **{**GATED, "dt_bias": f32(4)}, **change)
    if "cu_seqlens" in given:
        given["cu_seqlens"] = given["cu_seqlens"].int()
    options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    leaves = {
        name: x.requires_grad_()
        for name, x in given.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    with cute_attn.emulated("sm_90a"), idle_kernels() as used:
        o, _ = cute_attn.chunk_gated_delta_rule(**given | leaves | options)
        torch.autograd.backward(o, torch.zeros_like(o))
    names = {kernel.name for kernel, _ in used}
    assert {"delta_head_state_pass", "delta_head_adjoint_pass", "gated_delta_gradients"} <= names
    models = Path(cute_attn.__file__).parent / "models" / "qwen_training.toml"
    assert set(used) <= set(plan_file(models, "sm_90a"))
