"""Operators on GPUs other than sm_90 and sm_100, which the tests of each operator cover, emulated.

`make test` runs what differs most; the rest of the product of operators and architectures is slow.
"""

from __future__ import annotations

import pkgutil

import pytest
import torch

import cute_attn
from cute_attn.emulator import Emulator
from cute_attn.families import FAMILIES

from .attention_cases import is_known
from .calls import OTHER_ARCHS, ArchCall

CALLS: dict[str, ArchCall] = {
    name: call
    for family in FAMILIES
    for name, call in pkgutil.resolve_name(family.other_gpus).items()
}
CASES = [
    pytest.param(name, arch, marks=() if arch in call.quick else pytest.mark.slow)
    for name, call in CALLS.items()
    for arch in OTHER_ARCHS
    if arch not in call.refused
]


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_agrees_with_the_reference(name: str, arch: str):
    torch.manual_seed(0)
    emulator = Emulator(schedule="random", seed=1)
    with cute_attn.emulated(arch, emulator):
        CALLS[name].run()
    assert emulator.report.launches
    assert all(map(is_known, emulator.report.findings)), emulator.report
