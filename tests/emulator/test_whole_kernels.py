"""Whole sm_90a kernels of peers: the emulator against results recorded on an H100."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_attn.emulator import Emulator

from . import whole_kernels
from .peer_captures import QUICK_REQUESTS, capture


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(case.name, marks=() if case.quick else pytest.mark.slow)
        for case in whole_kernels.CASES.values()
    ],
)
def test_agrees_with_the_gpu(name: str):
    case = whole_kernels.CASES[name]
    captured = capture(case.request, QUICK_REQUESTS)
    given = whole_kernels.inputs(case, captured)
    recorded = np.load(whole_kernels.RESULTS)
    assert whole_kernels.digest(given) == recorded[f"{name}|digest"], "other inputs than recorded"
    memory = captured.materialise(given)
    emulator = Emulator()
    for call in captured.calls:
        image = call.function.object_file.read_bytes()
        emulator.load_object(image, call.function.ptx)(*memory.arguments(call))
    assert memory.overwritten_guards() == []
    for buffer, ours in whole_kernels.outputs(captured, memory).items():
        theirs = recorded[f"{name}|{buffer}"]
        if buffer not in case.loose:
            assert np.array_equal(ours, theirs), buffer
            continue
        dtype = memory.tensors[buffer].dtype
        emulated, exact = (torch.from_numpy(x).view(dtype).double() for x in (ours, theirs))
        assert torch.equal(emulated.isfinite(), exact.isfinite())
        finite = exact.isfinite()
        difference = (emulated - exact)[finite].norm() / exact[finite].norm()
        assert difference <= torch.finfo(dtype).eps, f"{buffer}: {difference:.2e}"
