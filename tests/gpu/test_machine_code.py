"""Machine code from the compiler of a GPU machine, which may be another version."""

from __future__ import annotations

import cute_attn
from cute_attn.ops.kda import plan_chunk_kda
from tests.kernels.machine_code import assert_sound


def test_the_compiler_of_this_machine_leaves_no_register_unset():
    arch = cute_attn.cache.current_arch()
    gates = {"use_gate_in_kernel": True, "lower_bound": True, "use_qk_l2norm_in_kernel": True}
    for modular in (False, True):
        for kernel, spec in plan_chunk_kda(arch, **gates, return_intermediate_states=modular):
            assert_sound(cute_attn.cache.compile(kernel, spec, arch))
