"""The Gated Delta Net's last kernel of the backward: where it fits, and its machine code."""

from __future__ import annotations

from typing import Any

import pytest

from cute_attn import cache
from cute_attn.kernels.common.spec import smem_bytes
from cute_attn.kernels.delta.chunk.backward.head_gradients import GatedDeltaGradients
from cute_attn.kernels.delta.chunk.heuristics import head_gradients_config
from cute_attn.kernels.delta.chunk.spec import HeadGradientsSpec
from cute_attn.ops.gated_delta_rule import plan_chunk_gated_delta_rule_backward
from tests.kernels.machine_code import assert_sound

ARCHS = ("sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a")
IN_KERNEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


def gradients(arch: str, **options: Any) -> tuple[Any, HeadGradientsSpec]:
    """The request of this kernel."""
    found = plan_chunk_gated_delta_rule_backward(arch, **options)
    (request,) = (x for x in found if isinstance(x[1], HeadGradientsSpec))
    return request


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("head_dim_k", [64, 128])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_heuristic_knows_the_shared_memory(arch: str, head_dim_k: int, grouped: bool) -> None:
    options = {"head_dim_k": head_dim_k, "grouped": grouped, **IN_KERNEL}
    if (arch, head_dim_k) == ("sm_86", 128):
        with pytest.raises(NotImplementedError, match="head_dim_k=128 does not fit sm_86"):
            gradients(arch, **options)
        return
    _, spec = gradients(arch, **options)
    used = GatedDeltaGradients(spec).smem_bytes
    assert used <= smem_bytes(arch)
    if grouped and not spec.keeps_sums:
        assert used + 512 * (head_dim_k // spec.cluster) > smem_bytes(arch)


def test_two_ctas_fit_an_sm() -> None:
    _, spec = gradients("sm_90a", grouped=True, **IN_KERNEL)
    assert spec.keeps_sums and spec.cluster == 2
    assert 2 * (GatedDeltaGradients(spec).smem_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decays": "channel"}, "decays is channel, must be head"),
        ({"grouped": False, "keeps_sums": True}, "keeps_sums is True, must be False"),
        ({"head_dim_k": 64, "cluster": 2}, "cluster is 2, must be 1 at head_dim_k=64"),
    ],
)
def test_specs_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    _, spec = gradients("sm_90a", grouped=True)
    fields = vars(spec) | {"keeps_sums": False} | change
    with pytest.raises(ValueError, match=named):
        HeadGradientsSpec(**fields)


def test_the_config_of_one_head_keeps_no_sums() -> None:
    config = head_gradients_config(arch="sm_90a", head_dim_k=128, head_dim_v=128, grouped=False)
    assert config == {"cluster": 2, "copies": "bulk", "keeps_sums": False}


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_machine_code(arch: str, grouped: bool) -> None:
    """The kernel fits, reads no register that was never set, and on sm_90a spills nothing."""
    kernel, spec = gradients(arch, grouped=grouped, **IN_KERNEL)
    entry = cache.compile(kernel, spec, arch=arch)
    assert_sound(entry)
    (use,) = entry.kernels
    if arch == "sm_90a":
        assert not use.spills
    assert use.static_shared + (use.dynamic_shared or 0) <= smem_bytes(arch) + 1024
