"""Arguments that a kernel lists once: their order and names, and structs of them on the device."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn import cache
from cute_attn.cache import KernelDef
from cute_attn.emulator import Emulator

sys.path.insert(0, str(Path(__file__).parent))
from entry_kernel import THREADS, ScaleSpec


def load(name: str, *, bias: bool) -> Callable[..., Any]:
    kernel = KernelDef(name=name, target=f"entry_kernel:{name}")
    return Emulator().load(cache.compile(kernel, ScaleSpec(bias), arch="sm_90a"))


@pytest.mark.parametrize("bias", [False, True])
def test_structs_with_tensors_scalars_and_none_reach_the_device(bias: bool) -> None:
    x, b = torch.randn(2, 4 * THREADS)
    y = torch.zeros_like(x)
    load("Scale", bias=bias)(x, b if bias else None, 3.0, y)
    torch.testing.assert_close(y, 3.0 * (x + b if bias else x))


def test_more_arguments_come_behind_those_that_are_listed() -> None:
    x, y = torch.randn(2 * THREADS), torch.zeros(2 * THREADS)
    load("TwoMore", bias=False)(x, None, 3.0, y, 2.0, THREADS)
    torch.testing.assert_close(y, torch.cat([6.0 * x[:THREADS], torch.zeros(THREADS)]))


def test_the_message_of_a_refused_call_has_the_names_of_all_arguments() -> None:
    x = torch.zeros(THREADS)
    with pytest.raises(ValueError, match="argument #3") as error:
        load("TwoMore", bias=False)(x, None, 1.0, x.view(1, -1), 1.0, THREADS)
    listed = re.search(r"__call__\((.*)\)`", str(error.value))
    assert listed is not None
    names = [part.partition(":")[0] for part in re.split(r", (?=\w+: )", listed[1])]
    assert names == ["x", "bias", "factor", "y", "second", "count"]
