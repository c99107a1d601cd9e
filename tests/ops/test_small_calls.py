"""The small calls that compute-sanitizer looks at on a GPU use every kernel."""

from __future__ import annotations

import pytest

import cute_attn
from cute_attn.cache import KernelDef
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention import configs
from cute_attn.kernels.attention import table as attention
from cute_attn.kernels.common import table as common
from cute_attn.kernels.kda import table as kda
from cute_attn.kernels.lightning import table as lightning
from tests.gpu.small_calls import FAMILIES, idle_kernels, make_calls

NOT_CALLED = {lightning.DECODE_PIPELINED}  # only measured


def kernels(arch: str) -> set[KernelDef]:
    """The kernels of all operators on this architecture."""
    found = {
        x
        for module in (common, kda, lightning)
        for x in vars(module).values()
        if isinstance(x, KernelDef)
    }
    found |= {
        attention.KERNELS[row.kernel] for (_, of, *_), row in configs.ROWS.items() if of == arch
    }
    return (found | {attention.COMBINE}) - NOT_CALLED


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_small_calls_use_every_kernel(arch: str):
    with cute_attn.emulated(arch, Emulator(num_sms=132)), idle_kernels() as wanted:
        for family in FAMILIES:
            make_calls(family, "cpu")
    assert {kernel for kernel, _ in wanted} == kernels(arch)
