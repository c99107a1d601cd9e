"""The kernels that `chunk_kda` plans compile, for every architecture, within the shared memory that
a block may have there, and as models call them without spilling a register."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cute_attn import cache, launch
from cute_attn.kernels.common.spec import smem_bytes
from cute_attn.kernels.delta.chunk.spec import (
    ALLOWED,
    BETA_DTYPES,
    DTYPES,
    GATE_DTYPES,
)
from cute_attn.kernels.delta.spec import INDEX_DTYPES
from cute_attn.ops.kda import plan_chunk_kda, plan_chunk_kda_backward
from tests.kernels.machine_code import assert_sound

# Bytes, stored and loaded, that a few registers outside of loops may cost calls that few make (K of
# 64 on sm_100a, gates as they are without l2norm).
FEW = {"kda_prepare": 48, "kda_chunk_intra": 48}

# Of `gradients` with grouped heads on sm_100a, where registers have sums over the group.
SPILLED_IN_TRAINING = {"kda_gradients": 1408}

ARCHS = ("sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a")

FLAGS = (
    "initial_state",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "gradient",
    "return_intermediate_states",
    "state_v_first",
)

TYPICAL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "initial_state": True,
    "output_final_state": True,
    "index_dtype": "int64",
}


def some_call(generator: random.Random) -> dict[str, Any]:
    """The parameters of a call."""
    chosen: dict[str, Any] = {flag: generator.random() < 0.5 for flag in FLAGS}
    for name in ("head_dim_k", "head_dim_v"):
        chosen[name] = generator.choice(ALLOWED[name])
    gate = chosen["use_gate_in_kernel"]
    in_pool = not (chosen["gradient"] or chosen["return_intermediate_states"])
    in_pool = in_pool and generator.random() < 0.5
    bound = gate and generator.random() < 0.5
    return chosen | {
        "dtype": generator.choice(DTYPES),
        "gate_dtype": generator.choice(GATE_DTYPES),
        "beta_dtype": generator.choice(BETA_DTYPES),
        "index_dtype": generator.choice(INDEX_DTYPES),
        "lower_bound": bound,
        "A_log": not bound or generator.random() < 0.5,
        "dt_bias": generator.random() < 0.5,
        "state_indices": in_pool,
        "state_dtype": generator.choice(("float32", "bfloat16")),
        "checkpoint_indices": in_pool and generator.random() < 0.5,
        "split": not chosen["return_intermediate_states"] and generator.random() < 0.5,
    }


def check(requests: list[launch.Request], arch: str, spilled: dict[str, int]) -> None:
    assert requests
    for kernel, spec in requests:
        entry = cache.compile(kernel, spec, arch=arch)
        assert_sound(entry)
        for use in entry.kernels:
            allowed = spilled.get(kernel.name, 0)
            assert (use.spills or 0) <= allowed, f"{spec} spills {use.spills} bytes"
            shared = use.static_shared + (use.dynamic_shared or 0)
            assert shared <= smem_bytes(arch) + 1024, f"{spec}: {shared} bytes of shared memory"


@pytest.mark.parametrize(
    ("arch", "modular"),
    [
        ("sm_90a", False),
        ("sm_100a", False),
        # The operators' tests compile kernels of the modular path, without a look at spills.
        pytest.param("sm_90a", True, marks=pytest.mark.slow),
        pytest.param("sm_100a", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "changes",
    [
        {"index_dtype": "int32", "state_v_first": True},  # the operator's tests compile it, too
        pytest.param({}, marks=pytest.mark.slow),
    ],
    ids=["as tested", "as by default"],
)
def test_what_a_server_needs(arch: str, modular: bool, changes: dict[str, Any]) -> None:
    call = TYPICAL | changes | {"split": False, "return_intermediate_states": modular}
    check(plan_chunk_kda(arch, **call), arch, spilled={})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("sm_100a", {"index_dtype": "int32", "state_v_first": True, "grouped": True}),
        *((arch, {}) for arch in ("sm_80", "sm_90a", "sm_100a")),
    ],
    ids=str,
)
def test_what_a_trainer_needs(arch: str, changes: dict[str, Any]) -> None:
    call = TYPICAL | {"split": False} | changes
    grouped = call.pop("grouped", False)
    check(plan_chunk_kda(arch, **call, gradient=True), arch, spilled={})
    call = {name: x for name, x in call.items() if "l_state" not in name} | {
        "dfinal_state": True, "dinitial_state": True, "grouped": grouped,
    }  # fmt: skip
    check(plan_chunk_kda_backward(arch, **call), arch, spilled=SPILLED_IN_TRAINING)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_any_call(arch: str) -> None:
    """Both paths as servers and trainers call them, and ten calls drawn at random."""
    generator = random.Random(ARCHS.index(arch))
    calls = [TYPICAL | {"split": True}, TYPICAL | {"return_intermediate_states": True}]
    for call in calls + [some_call(generator) for _ in range(10)]:
        check(plan_chunk_kda(arch, **call), arch, spilled=FEW)
