"""The small calls that compute-sanitizer looks at on a GPU use every kernel."""

from __future__ import annotations

import importlib

import pytest

import cute_attn
from cute_attn.cache import KernelDef
from cute_attn.emulator import Emulator
from cute_attn.families import FAMILIES
from tests.gpu.small_calls import GROUPS, idle_kernels, make_calls

TABLES = ["cute_attn.kernels.common.table", *(family.table for family in FAMILIES)]


def kernels(arch: str) -> set[KernelDef]:
    """The kernels of all operators on this architecture."""
    found: set[KernelDef] = set()
    for table in map(importlib.import_module, TABLES):
        if hasattr(table, "called"):
            found |= table.called(arch)
        else:
            found |= {x for x in vars(table).values() if isinstance(x, KernelDef)}
    return found


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_small_calls_use_every_kernel(arch: str):
    with cute_attn.emulated(arch, Emulator(num_sms=132)), idle_kernels() as wanted:
        for group in GROUPS:
            make_calls(group, "cpu")
    assert {kernel for kernel, _ in wanted} == kernels(arch)
