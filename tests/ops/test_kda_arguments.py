"""Bad arguments to chunk_kda and its stages, without a GPU: each gives the documented exception.

The checks run in one order, the device last: CPU tensors reach every one of them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_attn
from cute_attn.cache import KernelDef
from cute_attn.cache.specfile import plan_file
from cute_attn.emulation import Emulation
from cute_attn.kernels.common.spec import smem_bytes
from cute_attn.kernels.delta.chunk.heuristics import chunks_per_segment, only_starts
from cute_attn.ops import kda
from cute_attn.ops.kda import plan_chunk_kda, plan_chunk_kda_backward

MODELS = Path(cute_attn.__file__).parent / "models" / "serving.toml"


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def f32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def offsets(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def call(
    batch: int = 2,
    tokens: int = 5,
    heads: int = 2,
    heads_v: int = 4,
    dim_k: int = 64,
    dim_v: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> dict[str, Any]:
    """Good arguments of chunk_kda."""
    return {
        "q": torch.zeros(batch, tokens, heads, dim_k, dtype=dtype),
        "k": torch.zeros(batch, tokens, heads, dim_k, dtype=dtype),
        "v": torch.zeros(batch, tokens, heads_v, dim_v, dtype=dtype),
        "g": torch.zeros(batch, tokens, heads_v, dim_k, dtype=dtype),
        "beta": torch.zeros(batch, tokens, heads_v, dtype=dtype),
        **more,
    }


GATED: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": f32(4)}
PACKED: dict[str, Any] = {"batch": 1, "cu_seqlens": offsets(0, 2, 2, 5)}

GOOD: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float16},
    {"g": f32(2, 5, 4, 64), "beta": f32(2, 5, 4)},
    {"heads_v": 2, "dim_k": 128, "dim_v": 64},
    {"scale": 2, "output_final_state": True},
    {"scale": -0.5},
    {"scale": 0.0},
    {"scale": -(2.0**-60)},
    {"dtype": torch.float16, "use_qk_l2norm_in_kernel": True, "scale": 2.0**-10},
    {"initial_state": f32(2, 4, 64, 128)},
    {"initial_state": bf16(2, 4, 128, 64), "state_v_first": True},
    {**GATED, "dt_bias": f32(256)},
    {**GATED, "A_log": bf16(1, 1, 4, 1), "dt_bias": bf16(4, 64)},
    {**GATED, "A_log": None, "lower_bound": -20.0},
    {**GATED, "safe_gate": True, "lower_bound": -5},
    {"safe_gate": True},
    {"A_log": f32(3), "dt_bias": f32(1), "lower_bound": 7.0},  # ignored without the gate
    {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    {"use_qk_l2norm_in_kernel": True, "disable_recompute": True},
    PACKED,
    {**PACKED, "cu_seqlens": offsets(0, 5, dtype=torch.int32)},
    {**PACKED, "cu_seqlens_cpu": offsets(0, 2, 2, 5), "initial_state": f32(3, 4, 64, 128)},
    {"q": bf16(2, 5, 2, 128)[..., ::2]},
    {"chunk_size": 64, "cp_context": None, "use_graph": True, "max_num_seqs": 7},
    {"tokens": 0},
    {"batch": 0},
    {"heads": 0, "heads_v": 0},
]


def name_of(change: dict[str, Any]) -> str:
    return "-".join(change) or "plain"


@pytest.mark.parametrize("change", [*GOOD, {"chunk_size": 32}], ids=name_of)
def test_good_arguments_on_the_cpu_are_refused_for_the_device_alone(change: dict[str, Any]):
    with pytest.raises(ValueError, match="q is on cpu, must be on a CUDA device"):
        cute_attn.chunk_kda(**call(**change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        # not tensors
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"k": None}, TypeError, "k must be a torch.Tensor, got NoneType"),
        ({"beta": 0.5}, TypeError, "beta must be a torch.Tensor, got float"),
        ({"initial_state": 0}, TypeError, "initial_state must be a torch.Tensor, got int"),
        ({"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens must be a torch.Tensor, got list"),
        ({"A_log": 1.0}, TypeError, "A_log must be a torch.Tensor, got float"),
        # devices
        ({"v": bf16(2, 5, 4, 128).to("meta")}, ValueError, "v is on meta, must be on the device"),
        ({"dt_bias": f32(256).to("meta")}, ValueError, "dt_bias is on meta, must be on the device"),
        ({**PACKED, "cu_seqlens": offsets(0, 5).to("meta")}, ValueError, "cu_seqlens is on meta"),
        # dtypes
        ({"dtype": torch.float32}, TypeError, r"q has dtype torch.float32, must be one of \('bf"),
        ({"k": bf16(2, 5, 2, 64).half()}, TypeError, "k has dtype torch.float16, must be torch.b"),
        ({"v": f32(2, 5, 4, 128)}, TypeError, "v has dtype torch.float32, must be torch.bfloat16"),
        ({"g": f32(2, 5, 4, 64).double()}, TypeError, "g has dtype torch.float64, must be one of"),
        ({"beta": f32(2, 5, 4).int()}, TypeError, "beta has dtype torch.int32, must be one of"),
        ({"initial_state": f32(2, 4, 64, 128).double()}, TypeError, "initial_state has dtype"),
        ({**PACKED, "cu_seqlens": f32(3)}, TypeError, "cu_seqlens has dtype torch.float32"),
        ({**GATED, "A_log": offsets(0, 0, 0, 0)}, TypeError, "A_log has dtype torch.int64"),
        ({**GATED, "dt_bias": f32(256).int()}, TypeError, "dt_bias has dtype torch.int32, must be"),
        # numbers
        ({"scale": "1"}, TypeError, "scale must be a float, got str"),
        ({"scale": torch.tensor(1.0)}, TypeError, "scale must be a float, got Tensor"),
        ({"scale": math.nan}, ValueError, "scale is nan, must be finite in float32"),
        ({"scale": 1e39}, ValueError, r"scale is 1e\+39, must be finite"),
        ({"scale": 8e-19}, ValueError, r"scale is 8e-19, must be 0, or from 2\*\*-60 to 2\*\*60"),
        ({"scale": -2e18}, ValueError, r"scale is -2e\+18, must be 0, or from 2\*\*-60 to 2\*\*60"),
        (
            {"dtype": torch.float16, "use_qk_l2norm_in_kernel": True, "scale": 9e-4},
            ValueError,
            r"scale is 0.0009, must be 0, or from 2\*\*-10 to 2\*\*15 in size with use_qk_l2",
        ),
        (
            {"dtype": torch.float16, "use_qk_l2norm_in_kernel": True, "scale": 4e4},
            ValueError,
            r"scale is 40000.0, must be 0, or from 2\*\*-10 to 2\*\*15 in size with use_qk_l2",
        ),
        ({"lower_bound": "-5"}, TypeError, "lower_bound must be a float, got str"),
        ({"lower_bound": -math.inf}, ValueError, "lower_bound is -inf, must be finite"),
        ({"state_v_first": "yes"}, TypeError, "state_v_first must be a bool, got str"),
        ({"output_final_state": None}, TypeError, "output_final_state must be a bool, got NoneT"),
        # flags that exclude or need each other
        ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval is True, must be False without"),
        ({**GATED, "A_log": None}, ValueError, "A_log is None, must be given with use_gate_in_ke"),
        ({**GATED, "safe_gate": True}, ValueError, r"lower_bound is None, must be in \[-5, 0\) wi"),
        ({**GATED, "safe_gate": True, "lower_bound": -5.1}, ValueError, "lower_bound is -5.1, mus"),
        ({**GATED, "safe_gate": True, "lower_bound": 0.0}, ValueError, "lower_bound is 0.0, must"),
        # head counts
        ({"heads_v": 3}, ValueError, "head counts do not fit: 3 value heads .* multiple of the 2"),
        ({"heads_v": 1}, ValueError, "head counts do not fit: 1 value heads .* multiple of the 2"),
        ({"heads": 0}, ValueError, "head counts do not fit: 4 value heads .* multiple of the 0"),
        # shapes
        ({"q": bf16(5, 2, 64)}, ValueError, r"q has shape \[5, 2, 64\], must be \[B, T, HQK, K\]"),
        ({"q": bf16(3, 5, 2, 64)}, ValueError, r"q has shape \[3, .*, here \[2, 5, 2, 64\]"),
        ({"q": bf16(2, 5, 2, 128)}, ValueError, r"q has shape .*, here \[2, 5, 2, 64\]"),
        ({"k": bf16(2, 5, 1, 64)}, ValueError, r"k has shape .*, here \[2, 5, 2, 64\]"),
        ({"k": bf16(2, 5, 2, 128)}, ValueError, r"k has shape .*, here \[2, 5, 2, 64\]"),
        ({"v": bf16(2, 6, 4, 128)}, ValueError, r"v has shape .*, here \[2, 5, HV, V\]"),
        ({"v": bf16(2, 5, 512)}, ValueError, r"v has shape .*, here \[2, 5, HV, V\]"),
        ({"g": bf16(2, 5, 2, 64)}, ValueError, r"g has shape .*, here \[2, 5, 4, 64\]"),
        ({"g": bf16(2, 5, 4, 128)}, ValueError, r"g has shape .*, here \[2, 5, 4, 64\]"),
        ({"beta": bf16(2, 5, 2)}, ValueError, r"beta has shape .*, here \[2, 5, 4\]"),
        ({"beta": bf16(2, 5, 4, 128)}, ValueError, r"beta has shape .*, here \[2, 5, 4\]"),
        ({"initial_state": f32(2, 4, 128, 64)}, ValueError, r"here \[2, 4, 64, 128\]"),
        (
            {"initial_state": f32(2, 4, 64, 128), "state_v_first": True},
            ValueError,
            r"initial_state has shape .*, must be \[N, HV, V, K\], here \[2, 4, 128, 64\]",
        ),
        ({"initial_state": f32(3, 4, 64, 128)}, ValueError, r"here \[2, 4, 64, 128\]"),
        ({**PACKED, "initial_state": f32(2, 4, 64, 128)}, ValueError, r"here \[3, 4, 64, 128\]"),
        ({**GATED, "A_log": f32(2)}, ValueError, r"A_log has shape \[2\], must have HV = 4 elem"),
        ({**GATED, "dt_bias": f32(64)}, ValueError, r"dt_bias has .* must have HV \* K = 256 elem"),
        ({"dim_k": 96}, NotImplementedError, r"and keys \(K\) is 96, there are kernels for: "),
        ({"dim_v": 32}, NotImplementedError, r"of values \(V\) is 32, there are kernels for"),
        # packed sequences
        ({"cu_seqlens": offsets(0, 5)}, ValueError, r"there are 2 batches \(B\), must be 1 where"),
        ({**PACKED, "cu_seqlens": offsets()}, ValueError, r"cu_seqlens has shape \[0\], must be"),
        ({**PACKED, "cu_seqlens": offsets(0, 5)[None]}, ValueError, r"cu_seqlens has shape \[1, 2"),
        ({"cu_seqlens_cpu": offsets(0, 5)}, ValueError, "cu_seqlens_cpu is given without cu_seql"),
        ({**PACKED, "cu_seqlens_cpu": [0, 5]}, TypeError, "cu_seqlens_cpu must be a torch.Tensor"),
        ({**PACKED, "cu_seqlens_cpu": f32(4)}, TypeError, "cu_seqlens_cpu has dtype torch.float"),
        (
            {**PACKED, "cu_seqlens_cpu": offsets(0, 2, 2, 5).to("meta")},
            ValueError,
            "cu_seqlens_cpu is on meta, must be on cpu",
        ),
        (
            {**PACKED, "cu_seqlens_cpu": offsets(0, 5)},
            ValueError,
            r"cu_seqlens_cpu has shape \[2\], must be that of cu_seqlens, \[4\]",
        ),
        (
            {**PACKED, "cu_seqlens_cpu": offsets(0, 3, 2, 5)},
            ValueError,
            r"cu_seqlens_cpu\[2\] is 2, must be at least the offset before it, 3",
        ),
        (
            {**PACKED, "cu_seqlens_cpu": offsets(-1, 2, 2, 5)},
            ValueError,
            r"cu_seqlens_cpu\[0\] is -1, must be at least 0",
        ),
        (
            {**PACKED, "cu_seqlens_cpu": offsets(0, 2, 2, 6)},
            ValueError,
            r"cu_seqlens_cpu\[3\] is 6, must be at most T, 5",
        ),
        ({"chunk_size": 16}, ValueError, r"chunk_size is 16, must be one of \(32, 64\)"),
        ({"chunk_size": None}, ValueError, "chunk_size is None"),
        (
            {"chunk_size": 32, "return_intermediate_states": True},
            NotImplementedError,
            "chunk_size is 32, must be 64 with return_intermediate_states",
        ),
        (
            {"return_intermediate_states": torch.ones(2)},
            TypeError,
            "return_intermediate_states must be a bool, got Tensor",
        ),
        ({"cp_context": object()}, NotImplementedError, "cp_context is given, must be None"),
        ({"no_such_name": None}, TypeError, "unexpected keyword argument 'no_such_name'"),
    ],
)  # fmt: skip
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        cute_attn.chunk_kda(**call(**change))


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_the_former_name_of_state_v_first(name: str):
    """transpose_state_layout counts as state_v_first, and warns as flash-linear-attention does."""
    function, given = getattr(cute_attn, name), call()
    for v_first, shape in ((True, r"\[N, HV, V, K\]"), (False, r"\[N, HV, K, V\]")):
        given["initial_state"] = f32(1)
        with (
            pytest.warns(DeprecationWarning, match="renamed to `state_v_first`") as warned,
            pytest.raises(ValueError, match=f"must be {shape}"),
        ):
            function(**given, transpose_state_layout=v_first)
        assert [x.filename for x in warned] == [__file__]
    with pytest.raises(ValueError, match="transpose_state_layout is given with state_v_first"):
        function(**given, transpose_state_layout=True, state_v_first=True)


def test_intermediate_states_are_for_inference_mode_and_not_for_training():
    args = call(return_intermediate_states=True)
    with pytest.raises(ValueError, match=r"must be False outside of torch\.inference_mode"):
        cute_attn.chunk_kda(**args)
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match="disable_recompute is True, must be False with return_int"),
    ):
        cute_attn.chunk_kda(**args, disable_recompute=True)


def test_sizes_that_a_kernel_cannot_count():
    one = bf16(1, 1, 1, 64)
    long = one.expand(2, 2**30, 1, 64)
    beta = long[..., 0]
    with pytest.raises(ValueError, match="there are 2147483648 tokens, must be at most 2147483584"):
        cute_attn.chunk_kda(long, long, long, long, beta)
    many = one.expand(65536, 1, 1, 64)
    with pytest.raises(ValueError, match="there are 65536 sequences, must be at most 65535"):
        cute_attn.chunk_kda(many, many, many, many, many[..., 0])
    many = one.expand(1, 1, 65536, 64)
    with pytest.raises(ValueError, match="there are 65536 value heads, must be at most 65535"):
        cute_attn.chunk_kda(many, many, many, many, many[..., 0])


# -- stages


def intra(**more: Any) -> dict[str, Any]:
    """Good arguments of kda_chunk_intra."""
    args = call()
    return args | {"g": f32(2, 5, 4, 64)} | more


def recompute(**more: Any) -> dict[str, Any]:
    return intra(Akk=bf16(2, 5, 4, 64)) | more


def delta_h(**more: Any) -> dict[str, Any]:
    tokens: dict[str, Any] = {"kg": bf16(2, 5, 4, 64), "w": bf16(2, 5, 4, 64)}
    return tokens | {"u": bf16(2, 5, 4, 128), "g": f32(2, 5, 4, 64)} | more


def output(**more: Any) -> dict[str, Any]:
    args: dict[str, Any] = {"q": bf16(2, 5, 2, 64), "v_new": bf16(2, 5, 4, 128)}
    args |= {"g": f32(2, 5, 4, 64), "Aqk": bf16(2, 5, 4, 64), "h": bf16(2, 1, 4, 64, 128)}
    return args | more


def gate(**more: Any) -> dict[str, Any]:
    return {"g": bf16(2, 5, 4, 64)} | more


def output_backward(**more: Any) -> dict[str, Any]:
    args: dict[str, Any] = {name: output()[name] for name in ("v_new", "Aqk")}
    return args | {"do": bf16(2, 5, 4, 128), "scale": 0.5} | more


def delta_h_backward(**more: Any) -> dict[str, Any]:
    args = {name: bf16(2, 5, 4, 64) for name in ("qg", "kg", "w")} | {"g": f32(2, 5, 4, 64)}
    return args | {name: bf16(2, 5, 4, 128) for name in ("do", "dv")} | more


def recompute_backward(**more: Any) -> dict[str, Any]:
    args = recompute() | {name: bf16(2, 5, 4, 128) for name in ("v_new", "do", "dv")}
    return args | {name: bf16(2, 1, 4, 64, 128) for name in ("h", "dh")} | more


def intra_backward(**more: Any) -> dict[str, Any]:
    args = {name: intra()[name] for name in ("q", "k", "g", "beta")}
    names = ("dAqk", "dAkk", "dq", "dk", "dg")
    return args | {name: f32(2, 5, 4, 64) for name in names} | {"dbeta": f32(2, 5, 4)} | more


def gate_backward(**more: Any) -> dict[str, Any]:
    return {"dg": f32(2, 5, 4, 64)} | gate() | more


FORWARD_STAGES: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "kda_gate_cumsum": (kda.kda_gate_cumsum, gate),
    "kda_chunk_intra": (kda.kda_chunk_intra, intra),
    "kda_recompute_w_u": (kda.kda_recompute_w_u, recompute),
    "kda_chunk_delta_h": (kda.kda_chunk_delta_h, delta_h),
    "kda_chunk_output": (kda.kda_chunk_output, output),
}
BACKWARD_STAGES = {
    "kda_chunk_output_backward": (kda.kda_chunk_output_backward, output_backward),
    "kda_chunk_delta_h_backward": (kda.kda_chunk_delta_h_backward, delta_h_backward),
    "kda_recompute_w_u_backward": (kda.kda_recompute_w_u_backward, recompute_backward),
    "kda_chunk_intra_backward": (kda.kda_chunk_intra_backward, intra_backward),
    "kda_gate_cumsum_backward": (kda.kda_gate_cumsum_backward, gate_backward),
}
STAGES = FORWARD_STAGES | BACKWARD_STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_good_arguments_of_stages_are_refused_for_the_device_alone(stage: str):
    function, arguments = STAGES[stage]
    with pytest.raises(ValueError, match="is on cpu, must be on a CUDA device"):
        function(**arguments())


@pytest.mark.parametrize(
    ("stage", "change", "error", "message"),
    [
        ("kda_gate_cumsum", {"g": 1}, TypeError, "g must be a torch.Tensor, got int"),
        ("kda_gate_cumsum", {"g": bf16(5, 4, 64)}, ValueError, r"must be \[B, T, HV, K\]"),
        ("kda_gate_cumsum", {"g": bf16(1, 5, 4, 32)}, NotImplementedError, r"\(K\) is 32"),
        ("kda_gate_cumsum", {"use_gate_in_kernel": True}, ValueError, "A_log is None, must be"),
        ("kda_gate_cumsum", {**GATED, "A_log": f32(5)}, ValueError, "A_log has shape"),
        ("kda_gate_cumsum", {"cu_seqlens": offsets(0, 5)}, ValueError, "there are 2 batches"),
        ("kda_chunk_intra", {"q": None}, TypeError, "q must be a torch.Tensor, got NoneType"),
        ("kda_chunk_intra", {"g": bf16(2, 5, 4, 64)}, TypeError, "g has dtype .*, must be float32"),
        ("kda_chunk_intra", {"v": bf16(2, 5, 3, 128)}, ValueError, "head counts do not fit"),
        ("kda_chunk_intra", {"beta": f32(2, 5, 2)}, ValueError, "beta has shape"),
        ("kda_chunk_intra", {"scale": math.inf}, ValueError, "scale is inf, must be finite"),
        ("kda_chunk_intra", {"output_qg": "no"}, TypeError, "output_qg must be a bool"),
        ("kda_recompute_w_u", {"Akk": None}, TypeError, "Akk must be a torch.Tensor"),
        ("kda_recompute_w_u", {"Akk": bf16(2, 5, 4, 32)}, ValueError, r"must be \[B, T, HV, 64\]"),
        ("kda_recompute_w_u", {"Akk": f32(2, 5, 4, 64)}, TypeError, "Akk has dtype torch.float32"),
        ("kda_recompute_w_u", {"q": bf16(2, 5, 4, 64)}, ValueError, "k has shape"),
        ("kda_chunk_delta_h", {"u": f32(2, 5, 4, 128)}, TypeError, "u has dtype torch.float32"),
        ("kda_chunk_delta_h", {"w": bf16(2, 5, 4, 128)}, ValueError, "w has shape"),
        ("kda_chunk_delta_h", {"initial_state": f32(1, 4, 64, 128)}, ValueError, "initial_state"),
        ("kda_chunk_delta_h", {"cu_seqlens_cpu": offsets(0)}, ValueError, "without cu_seqlens"),
        ("kda_chunk_output", {"h": bf16(2, 2, 4, 64, 128)}, ValueError, r"here \[2, 1, 4, 64, 12"),
        ("kda_chunk_output", {"h": bf16(2, 1, 4, 128, 64)}, ValueError, "h has shape"),
        ("kda_chunk_output", {"h": f32(2, 1, 4, 64, 128)}, TypeError, "h has dtype torch.float32"),
        ("kda_chunk_output", {"state_v_first": True}, ValueError, r"must be \[B, chunks, HV, V"),
        ("kda_chunk_output", {"Aqk": bf16(2, 5, 2, 64)}, ValueError, "Aqk has shape"),
        ("kda_chunk_output_backward", {"do": f32(2, 5, 4, 128)}, TypeError, "do has dtype"),
        ("kda_chunk_output_backward", {"do": bf16(2, 5, 4, 64)}, ValueError, "do has shape"),
        ("kda_chunk_output_backward", {"Aqk": bf16(2, 5, 4, 32)}, ValueError, "Aqk has shape"),
        ("kda_chunk_output_backward", {"scale": None}, TypeError, "scale must be a float, got Non"),
        ("kda_chunk_delta_h_backward", {"qg": bf16(2, 5, 2, 64)}, ValueError, "kg has shape"),
        ("kda_chunk_delta_h_backward", {"g": bf16(2, 5, 4, 64)}, TypeError, "g has dtype"),
        (
            "kda_chunk_delta_h_backward",
            {"dfinal_state": f32(1, 4, 64, 128)},
            ValueError,
            "dfinal_state has shape",
        ),
        ("kda_chunk_delta_h_backward", {"state_v_first": "no"}, TypeError, "must be a bool"),
        ("kda_recompute_w_u_backward", {"dh": bf16(2, 2, 4, 64, 128)}, ValueError, "dh has shape"),
        ("kda_recompute_w_u_backward", {"dh": f32(2, 1, 4, 64, 128)}, TypeError, "dh has dtype"),
        ("kda_recompute_w_u_backward", {"state_v_first": True}, ValueError, "h has shape"),
        ("kda_recompute_w_u_backward", {"v": bf16(2, 5, 3, 128)}, ValueError, "v_new has shape"),
        ("kda_chunk_intra_backward", {"dAqk": bf16(2, 5, 4, 64)}, TypeError, "dAqk has dtype"),
        ("kda_chunk_intra_backward", {"dq": f32(2, 5, 2, 64)}, ValueError, "dq has shape"),
        ("kda_chunk_intra_backward", {"dbeta": f32(2, 5, 2)}, ValueError, "dbeta has shape"),
        ("kda_chunk_intra_backward", {"g": f32(2, 5, 3, 64)}, ValueError, "head counts do not fit"),
        ("kda_gate_cumsum_backward", {"dg": bf16(2, 5, 4, 64)}, TypeError, "dg has dtype"),
        ("kda_gate_cumsum_backward", {"dg": f32(2, 5, 4, 128)}, ValueError, "dg has shape"),
        ("kda_gate_cumsum_backward", {**GATED, "A_log": f32(5)}, ValueError, "A_log has shape"),
        (
            "kda_gate_cumsum_backward",
            {"use_gate_in_kernel": torch.ones(2)},
            TypeError,
            "use_gate_in_kernel must be a bool, got Tensor",
        ),
    ],
)
def test_bad_arguments_of_stages(
    stage: str, change: dict[str, Any], error: type[Exception], message: str
):
    function, arguments = STAGES[stage]
    with pytest.raises(error, match=message):
        function(**arguments(**change))


@pytest.mark.parametrize("stage", STAGES)
def test_stages_refuse_autograd(stage: str):
    function, arguments = STAGES[stage]
    args = arguments()
    args["g" if "g" in args else "do"].requires_grad_()
    with (
        cute_attn.emulated("sm_90a") as emulator,
        pytest.raises(NotImplementedError, match=f"{stage} has no backward yet"),
    ):
        function(**args)
    assert not emulator.report.launches


# -- nothing to do


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(
    ("empty", "sequences"),
    [
        ({"tokens": 0}, 2),
        ({"batch": 0}, 0),
        ({"heads": 0, "heads_v": 0}, 2),
        ({**PACKED, "tokens": 0, "cu_seqlens": offsets(0, 0, 0, 0)}, 3),
        ({**PACKED, "cu_seqlens": offsets(0)}, 0),
    ],
    ids=["T", "B", "H", "empty-sequences", "no-sequences"],
)
@torch.inference_mode()
def test_no_tokens_leave_the_state_as_it_is(empty: dict[str, Any], sequences: int, state: bool):
    args = call(**empty)
    shape = (sequences, args["v"].shape[2], 64, 128)
    if state:
        args["initial_state"] = torch.randn(shape)
    with cute_attn.emulated("sm_90a") as emulator:
        o, final_state = cute_attn.chunk_kda(**args, output_final_state=True)
        none = cute_attn.chunk_kda(**args)[1]
        h = cute_attn.chunk_kda(**args, return_intermediate_states=True)[2]
    assert not emulator.report.launches
    assert o.shape == args["v"].shape and o.dtype == torch.bfloat16
    assert final_state.dtype == torch.float32
    assert torch.equal(final_state, args.get("initial_state", f32(*shape)))
    assert final_state is not args.get("initial_state")
    assert none is None
    assert h.shape[0] == args["q"].shape[0] and h.shape[2:] == shape[1:]


def test_stages_of_no_tokens():
    with cute_attn.emulated("sm_90a") as emulator:
        args = {name: x[:, :0] for name, x in delta_h().items()}
        state = torch.randn(2, 4, 64, 128)
        h, v_new, final_state = kda.kda_chunk_delta_h(**args, initial_state=state)
        assert h.shape == (2, 0, 4, 64, 128) and v_new is not None and final_state is None
        result = kda.kda_chunk_delta_h(**args, initial_state=state, output_final_state=True)
        assert torch.equal(result.final_state, state)
        args = {name: x[:, :0] for name, x in recompute().items()}
        assert kda.kda_recompute_w_u(**args).w.shape == (2, 0, 4, 64)
        args = {name: x[:, :0] for name, x in delta_h_backward().items()}
        result = kda.kda_chunk_delta_h_backward(
            **args, dfinal_state=state, output_dinitial_state=True
        )
        assert torch.equal(result.dinitial_state, state)
        args = {name: x[:, :0] for name, x in gate_backward().items()}
        found = kda.kda_gate_cumsum_backward(
            **args, A_log=f32(4), dt_bias=bf16(256), use_gate_in_kernel=True
        )
        assert torch.equal(found.dA_log, f32(4)) and torch.equal(found.ddt_bias, bf16(256))
    assert not emulator.report.launches


# -- under torch's machinery


def fake(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with fake CUDA tensors; for use inside a FakeTensorMode."""
    return {
        name: torch.empty_strided(
            x.shape,
            x.stride(),
            dtype=x.dtype,
            device="cpu" if name == "cu_seqlens_cpu" else "cuda",
        )
        if isinstance(x, torch.Tensor)
        else x
        for name, x in args.items()
    }


@pytest.mark.parametrize("change", GOOD, ids=name_of)
@torch.inference_mode()
def test_fake_tensors_get_the_shapes(change: dict[str, Any]):
    with FakeTensorMode():
        args = fake(call(**change))
        if args.pop("disable_recompute", False):
            o, final_state = cute_attn.chunk_kda(**args, disable_recompute=True)
            assert final_state is None and o.shape == args["v"].shape
        o, final_state, h = cute_attn.chunk_kda(
            **args | {"output_final_state": True}, return_intermediate_states=True
        )
    batch, tokens, heads, dim_v = args["v"].shape
    assert o.shape == args["v"].shape and o.dtype == args["q"].dtype
    assert o.device.type == final_state.device.type == h.device.type == "cuda"
    packed = "cu_seqlens" in args
    sequences = args["cu_seqlens"].shape[0] - 1 if packed else batch
    dim_k = args["q"].shape[-1]
    matrix = (dim_v, dim_k) if args.get("state_v_first") else (dim_k, dim_v)
    assert final_state.shape == (sequences, heads, *matrix)
    assert final_state.dtype == torch.float32
    chunks = tokens // 64 + sequences if packed else -(-tokens // 64)
    assert h.shape == (batch, chunks, heads, *matrix) and h.dtype == o.dtype


def test_fake_tensors_are_checked():
    with FakeTensorMode():
        args = fake(call(heads_v=3))
        with pytest.raises(ValueError, match="head counts do not fit"):
            cute_attn.chunk_kda(**args)
        args = fake(intra(beta=f32(2, 5, 3)))
        with pytest.raises(ValueError, match="beta has shape"):
            kda.kda_chunk_intra(**args)


@pytest.mark.parametrize("stage", STAGES)
def test_stages_give_fake_tensors_the_shapes_that_real_ones_get(stage: str):
    function, arguments = STAGES[stage]
    empty = {
        name: x[:, :0] if isinstance(x, torch.Tensor) else x for name, x in arguments().items()
    }
    with cute_attn.emulated("sm_90a"):
        real = function(**empty)
    with FakeTensorMode():
        faked = function(**fake(empty))
    pairs = zip(real, faked, strict=True) if isinstance(real, tuple) else [(real, faked)]
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape and one.dtype == other.dtype


def captured(function: Callable[..., Any], *args: Any) -> list[str]:
    """The operators that torch.compile finds in it, as one graph."""
    graphs = []

    def capture(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(function, fullgraph=True, backend=capture, dynamic=True)
    # traced, then run on what it is given
    with torch.no_grad(), pytest.raises(ValueError, match="is on cpu"):
        compiled(*args)
    (graph,) = graphs
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_compiles_as_one_graph():
    args = call(**PACKED)

    def layer(q, k, v, g, beta, cu_seqlens, cu_seqlens_cpu):
        o, state = cute_attn.chunk_kda(
            q, k, v, g, beta, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
            output_final_state=True,
        )  # fmt: skip
        return o * 2, state

    calls = captured(layer, *args.values(), args["cu_seqlens"])
    assert any("cute_attn.chunk_kda" in target for target in calls), calls


def test_intermediate_states_compile_as_one_graph():
    args = call()

    def layer(*tensors):
        return cute_attn.chunk_kda(*tensors, return_intermediate_states=True)

    with torch.inference_mode():
        calls = captured(layer, *args.values())
    assert any("cute_attn.chunk_kda" in target for target in calls), calls
    with pytest.raises(RuntimeError, match=r"must be False outside of torch\.inference_mode"):
        torch.compile(layer, fullgraph=True, backend="eager")(*args.values())


def test_stages_compile_as_one_graph():
    args = intra()

    def layer(q, k, v, g, beta):
        total = kda.kda_gate_cumsum(g)
        Aqk, _, w, u, _, kg = kda.kda_chunk_intra(q, k, v, total, beta)
        h, v_new, _ = kda.kda_chunk_delta_h(kg, w, u, total)
        return kda.kda_chunk_output(q, v_new, total, Aqk, h)

    calls = captured(layer, *args.values())
    for name in FORWARD_STAGES:
        if name != "kda_recompute_w_u":
            assert any(f"cute_attn.{name}" in target for target in calls), calls


def test_the_backward_of_stages_compiles_as_one_graph():
    args = recompute_backward()
    names = ("q", "k", "v", "v_new", "g", "beta", "Akk", "h", "do")

    def layer(q, k, v, v_new, g, beta, Akk, h, do):
        dAqk, dv = kda.kda_chunk_output_backward(v_new, Akk, do, 0.5)
        w = q.repeat_interleave(2, 2)
        dh, _, dv = kda.kda_chunk_delta_h_backward(w, w, w, g, do, dv)
        dq, dk, dv, dbeta, dg, dAkk = kda.kda_recompute_w_u_backward(
            q, k, v, v_new, g, beta, Akk, h, do, dh, dv
        )
        dq, dk, dbeta, dg = kda.kda_chunk_intra_backward(
            q, k, g, beta, dAqk, dAkk, dq, dk, dbeta, dg
        )
        return dq, dk, dv, dbeta, kda.kda_gate_cumsum_backward(dg, g).dg

    calls = captured(layer, *(args[name] for name in names))
    for name in BACKWARD_STAGES:
        assert any(f"cute_attn.{name}" in target for target in calls), calls


def test_schemas_write_nothing():
    for name in ("chunk_kda", *STAGES):
        schema = getattr(torch.ops.cute_attn, name).default._schema
        assert not any(a.alias_info and a.alias_info.is_write for a in schema.arguments)


# -- what a kernel is chosen by


def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that calls in the emulator load, which then do nothing, and what they get."""
    seen: list[Any] = []

    def function(_self: Emulation, kernel: Any, spec: Any) -> Any:
        seen.append((kernel, spec))
        return lambda *arguments: seen.append(arguments)

    monkeypatch.setattr(Emulation, "function", function)
    return seen


OPTIONS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float16, "g": f32(2, 5, 4, 64), "beta": f32(2, 5, 4)},
    {"initial_state": f32(2, 4, 64, 128), "output_final_state": True},
    {"initial_state": f32(2, 4, 128, 64), "state_v_first": True},
    {**GATED, "dt_bias": f32(256), "use_qk_l2norm_in_kernel": True},
    {**GATED, "A_log": None, "lower_bound": -4.0, "use_beta_sigmoid_in_kernel": True},
    {"A_log": f32(4), "dt_bias": f32(256), "lower_bound": -4.0},
    {**PACKED, "output_final_state": True},
    {**PACKED, "cu_seqlens": offsets(0, 5, dtype=torch.int32)},
]


@pytest.mark.parametrize("path", ["fused", "modular"])
@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_the_plan_names_the_kernels_that_a_call_loads(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], path: str
):
    seen = planned(monkeypatch)
    args = call(**options, return_intermediate_states=path == "modular")
    with cute_attn.emulated("sm_90a"), torch.inference_mode():
        cute_attn.chunk_kda(**args)
    names = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
    packed = args.get("cu_seqlens")
    requests = plan_chunk_kda(
        "sm_90a",
        dtype=names[args["q"].dtype],
        gate_dtype=names[args["g"].dtype],
        beta_dtype=names[args["beta"].dtype],
        head_dim_k=64,
        head_dim_v=128,
        index_dtype="none" if packed is None else str(packed.dtype).removeprefix("torch."),
        split=False,
        **{
            name: args.get(name) is not None
            for name in ("initial_state", "lower_bound", "A_log", "dt_bias")
        },
        **{
            name: args[name]
            for name in (
                "output_final_state",
                "use_qk_l2norm_in_kernel",
                "use_gate_in_kernel",
                "use_beta_sigmoid_in_kernel",
                "return_intermediate_states",
                "state_v_first",
            )
            if name in args
        },
    )
    loaded = [item for item in seen if isinstance(item[0], KernelDef)]
    assert loaded == requests
    assert [kernel.name for kernel, _ in requests][-1] == (
        "kda_state_pass" if path == "fused" else "kda_output"
    )


def test_what_the_fused_kernels_are_given(monkeypatch: pytest.MonkeyPatch):
    seen = planned(monkeypatch)
    args = call(
        **GATED,
        tokens=130,
        dt_bias=torch.randn(256),
        lower_bound=-3.0,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        initial_state=f32(2, 4, 64, 128),
        output_final_state=True,
        scale=0.25,
    )
    with cute_attn.emulated("sm_90a"):
        o, final_state = cute_attn.chunk_kda(**args)
    _, _, first, second = seen
    q, k, g, beta, A_log, dt_bias, cu_seqlens, tiles, decay, inverse_norms, *numbers = first
    assert q is args["q"] and k is args["k"] and g is args["g"] and beta is args["beta"]
    assert A_log is args["A_log"] and torch.equal(dt_bias, args["dt_bias"].view(4, 64))
    assert cu_seqlens is None and inverse_norms is None and numbers == [0.25, -3.0, 2.0, None, None]
    assert tiles.shape == (6, 4, 5 * 64 * 64) and tiles.dtype == torch.bfloat16
    assert decay.shape == (6, 4, 64) and decay.dtype == torch.float32
    assert second[0] is args["v"] and second[1] is tiles and second[2] is decay
    assert second[3] is o and second[4:6] == (None, None)
    assert second[6] is args["initial_state"] and second[7] is final_state
    assert second[8:] == (None, None, None, 0, 1, None, None)
    assert final_state.shape == (2, 4, 64, 128)


def test_packed_sequences_have_a_slot_each_besides_those_of_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
):
    seen = planned(monkeypatch)
    args = call(tokens=130, **PACKED, output_final_state=True)
    with cute_attn.emulated("sm_90a"):
        _, final_state = cute_attn.chunk_kda(**args)
    tiles = seen[2][7]
    assert tiles.shape[0] == 130 // 64 + 3
    assert seen[2][6] is args["cu_seqlens"] and seen[3][8] is args["cu_seqlens"]
    assert final_state.shape[0] == 3


@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("q", bf16(2, 5, 2, 128)[..., ::2]),
        ("k", bf16(2, 5, 2, 68)[..., :64]),
        ("v", bf16(2 * 5 * 4 * 128 + 1)[1:].view(2, 5, 4, 128)),
        ("g", f32(2, 64, 4, 5).transpose(1, 3)),
        ("initial_state", f32(2, 4, 128, 64).mT),
        ("initial_state", bf16(2, 4, 64, 128)),
        ("initial_state", bf16(2, 4, 64, 128).half()),
        ("A_log", bf16(1, 4, 1)),
        ("dt_bias", f32(512)[::2]),
    ],
    ids=[
        "step",
        "pitch",
        "address",
        "transposed",
        "state",
        "bfloat16-state",
        "float16-state",
        "A_log",
        "dt_bias",
    ],
)
def test_what_a_kernel_cannot_read_is_copied(
    monkeypatch: pytest.MonkeyPatch, name: str, x: torch.Tensor
):
    seen = planned(monkeypatch)
    x.copy_(torch.randn(x.shape))
    with cute_attn.emulated("sm_90a"):
        cute_attn.chunk_kda(**call(**GATED) | {name: x})
    _, _, first, second = seen
    position = {"q": 0, "k": 1, "g": 2, "A_log": 4, "dt_bias": 5}
    got = second[0 if name == "v" else 6] if name not in position else first[position[name]]
    assert got is not x and got.is_contiguous() and got.data_ptr() % 16 == 0
    assert torch.equal(got.flatten(), x.flatten().to(got.dtype))


def test_views_of_a_packed_projection_are_read_in_place(monkeypatch: pytest.MonkeyPatch):
    seen = planned(monkeypatch)
    packed = bf16(2, 5, 2 * 2 * 64 + 4 * 128 + 4 * 64 + 4)
    q, k, v, g, beta = packed.split([128, 128, 512, 256, 4], dim=-1)
    args = call() | {
        "q": q.unflatten(-1, (2, 64)),
        "k": k.unflatten(-1, (2, 64)),
        "v": v.unflatten(-1, (4, 128)),
        "g": g.unflatten(-1, (4, 64)),
        "beta": beta,
    }
    packed_wide = bf16(2, 5, packed.shape[-1] + 4)  # rows of a multiple of 16 bytes
    for name, x in args.items():
        assert x.stride(1) == packed.shape[-1] and packed_wide.shape[-1] % 8 == 0
        args[name] = packed_wide.as_strided(
            x.shape, (5 * packed_wide.shape[-1], packed_wide.shape[-1], *x.stride()[2:]),
            x.storage_offset(),
        )  # fmt: skip
    with cute_attn.emulated("sm_90a"):
        cute_attn.chunk_kda(**args)
    _, _, first, second = seen
    assert all(
        got is args[name] for got, name in zip(first[:4], ("q", "k", "g", "beta"), strict=True)
    )
    assert second[0] is args["v"]


@pytest.mark.parametrize(
    ("sizes", "segments"),
    [
        ({}, 1),  # too many heads
        ({"heads": 12}, 3),
        ({"heads": 12, "tokens": 1025}, 2),  # no segment but the last has less than 16 chunks
        ({"heads": 12, "tokens": 1024}, 1),
        ({"heads": 1}, 8),
        ({"heads": 1, "tokens": 2**17}, 16),
        ({"heads": 19}, 2),
        ({"heads": 20}, 1),
        ({"heads": 4, "sequences": 4}, 2),
        ({"heads": 4, "sequences": 4, "packed": True}, 8),  # of all sequences together
        ({"heads": 12, "head_dim_v": 64}, 6),
        ({"heads": 19, "num_sms": 128}, 1),
        ({"heads": 1, "sequences": 19, "packed": True, "tokens": 2**20}, 16),
        # With shared copies, there is a CTA on each SM.
        ({"kind": "shared"}, 1),
        ({"kind": "shared", "heads": 12}, 4),
        ({"kind": "shared", "heads": 12, "tokens": 2**15}, 4),
        ({"kind": "shared", "heads": 12, "tokens": 512}, 1),
        ({"kind": "shared", "heads": 16}, 3),
        ({"kind": "shared", "heads": 23}, 1),
        ({"kind": "shared", "heads": 12, "tokens": 2048}, 1),
        ({"kind": "shared", "heads": 8}, 5),
        ({"kind": "head", "heads": 8}, 5),
        ({"kind": "head", "heads": 32}, 1),
    ],
    ids=str,
)
def test_long_sequences_are_split_where_sms_would_be_idle(sizes: dict[str, Any], segments: int):
    usual = {
        "sequences": 1, "tokens": 8192, "heads": 64, "head_dim_k": 128, "head_dim_v": 128,
        "packed": False, "num_sms": 132, "kind": "channel",
    }  # fmt: skip
    given = usual | sizes
    length = chunks_per_segment(given.pop("kind"), **given)
    chunks = -(-given["tokens"] // 64)
    assert segments == (-(-chunks // length) if length else 1)


@pytest.mark.parametrize(
    ("sizes", "split"),
    [
        ({}, True),
        ({"tokens": 1024}, True),
        ({"tokens": 512}, False),  # two segments of at least 4 chunks
        ({"heads": 24}, False),
        ({"heads": 16, "kind": "head"}, True),
        ({"heads": 32, "kind": "head"}, False),
        ({"sequences": 4}, False),
        ({"sequences": 4, "packed": True}, False),  # the sequences are about as long as segments
        ({"sequences": 4, "heads": 1, "packed": True, "tokens": 4096}, True),
    ],
    ids=str,
)
def test_where_segments_may_only_start_from_zero(sizes: dict[str, Any], split: bool):
    usual = {
        "sequences": 1, "tokens": 2048, "heads": 12, "head_dim_k": 128, "head_dim_v": 128,
        "packed": False, "num_sms": 132, "kind": "shared",
    }  # fmt: skip
    given = usual | sizes
    kind = given.pop("kind")
    assert only_starts(kind, **given) == (-(-given["tokens"] // 64) if split else 0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100a", "sm_103a", "sm_120a"])
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64), (128, 128)], ids=str)
def test_planned_kernels_fit_in_shared_memory(arch: str, dims: tuple[int, int]):
    sized = set()
    options = {
        "head_dim_k": dims[0], "head_dim_v": dims[1], "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    requests = [
        *plan_chunk_kda(arch, **options),
        *plan_chunk_kda(arch, **options, return_intermediate_states=True),
        *plan_chunk_kda(arch, **options, state_indices=True, checkpoint_indices=True),
    ]
    small = arch == "sm_86" and dims[0] == 128  # sm_120 has as little, but clusters
    if small:
        with pytest.raises(NotImplementedError, match=f"head_dim_k={dims[0]} does not fit {arch}"):
            plan_chunk_kda_backward(arch, **options)
    else:
        for grouped in (False, True):
            requests += plan_chunk_kda_backward(arch, **options, grouped=grouped)
    for kernel, spec in requests:
        module, _, name = kernel.target.partition(":")
        built = getattr(importlib.import_module(module), name)(spec)
        nbytes = getattr(built, "smem_bytes", 0)
        assert nbytes <= smem_bytes(arch), kernel.name
        sized |= {kernel.name} if nbytes else set()
    assert {"kda_prepare", "kda_state_pass", "kda_segments", "kda_delta_h"} <= sized
    assert ({"kda_adjoint_pass", "kda_gradients"} <= sized) != small


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "dtype is 'float32', must be one of"),
        ({"head_dim_k": 96}, "head_dim_k is 96, must be one of"),
        ({"gate_dtype": "int8"}, "gate_dtype is 'int8'"),
        ({"index_dtype": "int8"}, "index_dtype is 'int8'"),
        ({"use_gate_in_kernel": True, "A_log": False}, "A_log is False, must be True"),
        ({"state_indices": True, "state_dtype": "float16"}, "state_dtype is 'float16', must be"),
        ({"state_indices": True, "gradient": True}, "gradient is True, must be False with"),
        (
            {"state_indices": True, "return_intermediate_states": True},
            "return_intermediate_states is True, must be False with state_indices",
        ),
        ({"checkpoint_indices": True}, "checkpoint_indices is True, must be False without"),
    ],
    ids=str,
)
def test_plans_without_a_kernel(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        plan_chunk_kda("sm_90a", **options)


def test_a_setting_leaves_out_the_kernels_that_split(monkeypatch: pytest.MonkeyPatch):
    try:
        for value, count in (("", 6), ("0", 2), ("1", 6)):
            monkeypatch.setenv("CUTE_ATTN_KDA_SPLIT", value)
            assert cute_attn.reload_settings().kda_split == (count == 6)
            assert len(plan_chunk_kda("sm_90a")) == count
            assert len(plan_chunk_kda("sm_90a", split=False)) == 2
            assert len(plan_chunk_kda("sm_90a", split=True)) == 6
        monkeypatch.setenv("CUTE_ATTN_KDA_SPLIT", "no")
        with pytest.raises(ValueError, match="CUTE_ATTN_KDA_SPLIT is 'no', must be 0 or 1"):
            cute_attn.reload_settings()
    finally:
        monkeypatch.delenv("CUTE_ATTN_KDA_SPLIT")
        cute_attn.reload_settings()


def test_models_are_planned():
    names = [kernel.name for kernel, _ in plan_file(MODELS, "sm_90a")]
    assert {"kda_prepare", "kda_state_pass"} <= set(names)


def test_signature_is_flash_linear_attentions():
    """Names, order and defaults of its arguments. Read from its source: importing needs Triton."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs flash-linear-attention, which is not installed")
    source = Path(package.submodule_search_locations[0]) / "ops" / "kda" / "chunk.py"
    (theirs,) = (
        node.args
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "chunk_kda"
    )
    ours = inspect.signature(cute_attn.chunk_kda).parameters
    positional = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    shared = [argument.arg for argument in theirs.args if argument.arg in ours]
    assert positional == shared
    of_pools = {
        "state_indices", "checkpoint_indices", "checkpoint_interval", "has_initial_state",
        "pad_slot_id", "out",
    }  # fmt: skip
    of_their_kwargs = {"A_log", "dt_bias", "chunk_size", "transpose_state_layout"}
    assert set(ours) - set(positional) == of_their_kwargs | of_pools | {"cp"}
    assert shared == [argument.arg for argument in theirs.args]
    required = len(theirs.args) - len(theirs.defaults)
    for argument, default in zip(theirs.args[required:], theirs.defaults, strict=True):
        if argument.arg in ours:
            assert ours[argument.arg].default == ast.literal_eval(default)
