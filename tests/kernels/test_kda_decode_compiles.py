"""The KDA kernels that go token by token compile for every architecture, without spilling a
register."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from cute_attn import cache
from cute_attn.kernels.delta import table
from cute_attn.kernels.delta.step import heuristics
from cute_attn.kernels.delta.step.spec import DecodeSpec, RecordsSpec, RecurrentSpec, StepSpec
from cute_attn.ops.gated_delta_rule import plan_fused_recurrent_gated_delta_rule
from cute_attn.ops.kda.decode import plan_kda_decode
from cute_attn.ops.kda.recurrent import plan_fused_recurrent_kda
from tests.kernels.machine_code import assert_sound
from tests.ops.kda_decode_cases import VALUES, Kernel, sample

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")

# What servers use, by itself, and a sample of everything.
USUAL = [
    Kernel(
        state_v_first=v_first,
        state_dtype=state_dtype,
        gate=gate,
        multi_token=slots != "indexed",
        slots=slots,
    )
    for v_first in (True, False)
    for state_dtype, gate, slots in zip(
        VALUES["state_dtype"] * 2,
        ("lower_bound", "softplus", "lower_bound"),
        ("indexed", "positions", "records"),
        strict=False,
    )
]
# The largest part of a state that a thread holds, and replayed tokens.
USUAL.append(
    Kernel(
        head_dim_k=256,
        state_v_first=False,
        state_dtype=torch.bfloat16,
        multi_token=True,
        slots="records",
    )
)
# The Gated Delta Net with a convolution.
USUAL += [
    Kernel(
        decays="head",
        multi_token=slots != "indexed",
        slots=slots,
        conv_dtype=torch.bfloat16,
        conv_bias=True,
        **of_state,
    )
    for of_state, slots in (
        ({}, "indexed"),
        ({}, "positions"),
        ({}, "drafts"),
        ({}, "records"),
        ({"state_v_first": False}, "drafts"),
        ({"state_v_first": False, "head_dim_k": 256, "state_dtype": torch.bfloat16}, "records"),
    )
]
# Everything, a kernel for one architecture each.
SAMPLE = list(zip(sample(12, seed=2), itertools.cycle(ARCHS), strict=False))
RECURRENT = [
    {
        "dtype": dtype,
        "head_dim_k": k,
        "head_dim_v": v,
        "state_v_first": v_first,
        "initial_state": True,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "index_dtype": index_dtype,
    }
    for dtype, k, v, v_first, index_dtype in (
        ("bfloat16", 128, 128, True, "none"),
        ("bfloat16", 128, 128, False, "int64"),
        ("float32", 256, 256, True, "int32"),
        ("float16", 256, 64, False, "none"),
        ("bfloat16", 128, 192, False, "int32"),
    )
]


def name_of(kernel: Kernel) -> str:
    values = (getattr(kernel, field.name) for field in fields(kernel))
    return "-".join(str(value).removeprefix("torch.") for value in values)


def assert_compiles(kernel: cache.KernelDef, spec: Any, arch: str) -> None:
    entry = cache.compile(kernel, spec, arch)
    (use,) = entry.kernels
    assert use.spill_stores == use.spill_loads == 0, (spec, arch, use)
    assert_sound(entry)
    if isinstance(spec, StepSpec):
        assert use.registers <= 65536 // (spec.num_threads * max(1, spec.blocks_per_sm)), use


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "kernel",
    [
        # One token, and several tokens with slots for positions.
        pytest.param(kernel, marks=() if n in (0, 4) else pytest.mark.slow)
        for n, kernel in enumerate(USUAL)
    ],
    ids=name_of,
)
def test_decode_compiles_without_spills(kernel: Kernel, arch: str):
    for request in kernel.plan(arch):
        assert_compiles(*request, arch)


@pytest.mark.parametrize(
    ("kernel", "arch"),
    [
        pytest.param(*case, marks=() if n == 0 else pytest.mark.slow)
        for n, case in enumerate(SAMPLE)
    ],
    ids=lambda x: x if isinstance(x, str) else name_of(x),
)
def test_a_sample_compiles_without_spills(kernel: Kernel, arch: str):
    for request in kernel.plan(arch):
        assert_compiles(*request, arch)


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "request_",
    [*RECURRENT[:1], *(pytest.param(r, marks=pytest.mark.slow) for r in RECURRENT[1:])],
    ids=lambda r: "-".join(map(str, r.values())),
)
def test_the_recurrent_form_compiles_without_spills(request_: dict[str, Any], arch: str):
    assert_compiles(*plan_fused_recurrent_kda(arch, **request_)[0], arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("request_", RECURRENT, ids=lambda r: "-".join(map(str, r.values())))
def test_gates_and_betas_of_columns_compile_without_spills(request_: dict[str, Any], arch: str):
    columns = {"gk_dtype": "float16", "gv_dtype": "float32", "beta_columns": True}
    ((kernel, spec),) = plan_fused_recurrent_gated_delta_rule(arch, **request_, **columns)
    assert_compiles(kernel, spec, arch)


def test_several_ctas_per_sm_compile_without_a_driver():
    ((kernel, spec),) = plan_fused_recurrent_kda("sm_90a", head_dim_k=64, head_dim_v=64)
    assert_compiles(kernel, replace(spec, blocks_per_sm=2), "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("arch", ARCHS)
def test_a_larger_sample_compiles_without_spills(arch: str, part: int):
    kernels = sample(400, seed=3)[part::4]
    requests = [request for kernel in kernels for request in kernel.plan(arch)]
    cache.warmup(requests, arch=arch)
    for request in requests:
        assert_compiles(*request, arch)


@pytest.mark.parametrize("config", heuristics.candidate_configs(), ids=str)
def test_candidates_are_legal(config: dict[str, Any]):
    DecodeSpec(**decode_fields(**config))


def test_the_heuristics_fill_the_tile():
    """The threads' elements together are the tile."""
    for kernel in sample(100, seed=4):
        (_, spec), *_ = kernel.plan("sm_90a")
        held = spec.values_of_k * spec.values_of_v
        assert held * spec.num_threads == spec.tile_v * spec.head_dim_k
        assert spec.num_threads <= 1024


def decode_fields(**changes: Any) -> dict[str, Any]:
    ((_, spec),) = plan_kda_decode("sm_90a")
    return {field.name: getattr(spec, field.name) for field in fields(spec)} | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": "float64"}, ValueError, "dtype is 'float64'"),
        ({"gate_dtype": "int8"}, ValueError, "gate_dtype is 'int8'"),
        ({"head_dim_k": 96}, ValueError, "head_dim_k is 96, must be one of"),
        ({"gate": "tanh"}, ValueError, "gate is 'tanh'"),
        ({"gate": "none"}, ValueError, "must be 'none' where gate is 'none'"),
        ({"A_log_dtype": "none"}, ValueError, "A_log_dtype is 'none', which gate='softplus'"),
        ({"dt_bias_dims": 0}, ValueError, "dt_bias_dims is 0 with dt_bias_dtype='float32'"),
        ({"dt_bias_dims": 2, "decays": "head"}, ValueError, "dt_bias_dims is 2, must be 0 or 1"),
        ({"decays": "row"}, ValueError, "decays is 'row'"),
        ({"conv_dtype": "int8"}, ValueError, "conv_dtype is 'int8'"),
        ({"conv_bias": True}, ValueError, "conv_bias is True, must be False where conv_dtype"),
        (
            {"gv_dtype": "float16"},
            ValueError,
            "gk_dtype, gv_dtype and beta_columns are for RecurrentSpec only",
        ),
        ({"tile_v": 48}, ValueError, "tile_v is 48, must divide head_dim_v=128"),
        ({"lanes_per_row": 12}, ValueError, "lanes_per_row is 12, must be a power of two"),
        ({"lanes_per_row": 1}, ValueError, "leaves at least 2 lanes along K"),
        ({"num_warps": 5}, ValueError, "does not divide over 5 warps"),
        ({"num_warps": 1, "tile_v": 128}, ValueError, "registers a thread for the state"),
        ({"slots": "records"}, ValueError, "needs multi_token"),
        ({"slots": "batch"}, ValueError, "indexed is True with slots='batch'"),
        ({"tile_v": 32.0}, TypeError, "DecodeSpec.tile_v must be an int"),
    ],
)
def test_a_spec_without_a_kernel_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        DecodeSpec(**decode_fields(**changes))


def test_plans_name_what_does_not_exist():
    with pytest.raises(ValueError, match=r"head_dim_k is 192, must be one of \(64, 128, 256\)"):
        plan_kda_decode("sm_90a", head_dim_k=192)
    with pytest.raises(ValueError, match=r"head_dim_v is 96, must be one of \(64, 128, 192, 256\)"):
        plan_kda_decode("sm_90a", head_dim_v=96)
    with pytest.raises(ValueError, match="slots is 'pages'"):
        plan_kda_decode("sm_90a", slots="pages")
    with pytest.raises(ValueError, match="index_dtype is 'int16'"):
        plan_fused_recurrent_kda("sm_90a", index_dtype="int16")


def test_records_have_a_kernel_of_their_own():
    (decode, spec), (records, records_spec) = plan_kda_decode(
        "sm_90a", multi_token=True, slots="records"
    )
    assert (decode, records) == (table.DECODE, table.DECODE_RECORDS)
    assert isinstance(spec, DecodeSpec)
    assert isinstance(records_spec, RecordsSpec)
    ((kernel, spec),) = plan_fused_recurrent_kda("sm_90a")
    assert kernel is table.RECURRENT
    assert isinstance(spec, RecurrentSpec)
