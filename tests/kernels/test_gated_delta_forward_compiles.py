"""The kernels that `plan_chunk_gated_delta_rule` gives compile within an SM's shared memory, and
spill no register."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cute_attn import cache
from cute_attn.kernels.common.spec import smem_bytes
from cute_attn.kernels.delta.chunk.spec import ALLOWED, BETA_DTYPES, DTYPES, GATE_DTYPES
from cute_attn.kernels.delta.spec import INDEX_DTYPES
from cute_attn.ops.gated_delta_rule.chunk_plan import plan_chunk_gated_delta_rule
from tests.kernels.machine_code import assert_sound

FLAGS = (
    "initial_state",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "state_v_first",
    "dt_bias",
)

# Layers of Qwen3-Next, as a server calls them.
SERVER = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_indices": True,
    "has_initial_state": True,
    "state_v_first": True,
    "index_dtype": "int32",
}


# Bytes, stored and loaded, that a few registers outside of loops may cost KDA's kernels.
FEW = {"kda_prepare": 48}


def some_call(generator: random.Random) -> dict[str, Any]:
    """The parameters of a call."""
    chosen: dict[str, Any] = {flag: generator.random() < 0.5 for flag in FLAGS}
    pool = generator.random() < 0.5
    return chosen | {
        "dtype": generator.choice(DTYPES),
        "head_dim_k": generator.choice(ALLOWED["head_dim_k"]),
        "head_dim_v": generator.choice(ALLOWED["head_dim_v"]),
        "gate_dtype": generator.choice(GATE_DTYPES),
        "beta_dtype": generator.choice(BETA_DTYPES),
        "index_dtype": generator.choice(INDEX_DTYPES),
        "state_indices": pool,
        "checkpoint_indices": pool and generator.random() < 0.5,
        "gradient": not pool and generator.random() < 0.5,
    }


def check(arch: str, **call: Any) -> None:
    for kernel, spec in plan_chunk_gated_delta_rule(arch, **call):
        entry = cache.compile(kernel, spec, arch=arch)
        assert_sound(entry)
        for use in entry.kernels:
            allowed = FEW.get(kernel.name, 0)
            assert (use.spills or 0) <= allowed, f"{spec} spills {use.spills} bytes"
            shared = use.static_shared + (use.dynamic_shared or 0)
            assert shared <= smem_bytes(arch) + 1024, f"{spec}: {shared} bytes of shared memory"


def test_what_a_server_needs() -> None:
    check("sm_90a", **SERVER, split=False)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a"])
def test_what_a_server_needs_elsewhere(arch: str) -> None:
    check(arch, **SERVER, split=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_any_call(seed: int) -> None:
    check("sm_90a", **some_call(random.Random(seed)), split=True)


def test_a_pool_excludes_a_gradient_and_a_checkpoint_needs_a_pool() -> None:
    with pytest.raises(ValueError, match="gradient is True, must be False with state_indices"):
        plan_chunk_gated_delta_rule("sm_90a", state_indices=True, gradient=True)
    with pytest.raises(ValueError, match="checkpoint_indices is True, must be False without"):
        plan_chunk_gated_delta_rule("sm_90a", checkpoint_indices=True)
