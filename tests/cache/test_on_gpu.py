"""Kernels that the cache has loaded, called on a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import forget_everything
from toy_specs import REVERSE, SCALE, ScaleSpec

from cute_attn import cache
from cute_attn.cache import linker

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["linked", "object"])
def linkage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a linker, and without."""
    if request.param == "object":
        monkeypatch.setattr(linker, "_commands", list)
    elif not any(map(shutil.which, ("cc", "gcc", "clang", "ld"))):
        pytest.skip("needs a linker")


@pytest.mark.usefixtures("linkage")
@pytest.mark.parametrize("times", [1, 2], ids=["compiled", "loaded"])
def test_a_kernel_computes(root: Path, times: int) -> None:
    for _ in range(times):
        forget_everything()
        scale = cache.get(SCALE, ScaleSpec(3.0))  # for the current device
        reverse = cache.get(REVERSE, ScaleSpec())
    assert cache.stats().disk_hits == (2 if times == 2 else 0)
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    scale(x, y)
    assert torch.equal(y, 3.0 * x)
    reverse(x, y)
    whole = x[:896].view(-1, 128).flip(1).reshape(-1)
    assert torch.equal(y, torch.cat([whole, x[896:]]))


def test_the_current_arch_is_that_of_the_current_device() -> None:
    major, minor = torch.cuda.get_device_capability()
    assert cache.current_arch().removesuffix("a") == f"sm_{major}{minor}"
    for device in range(torch.cuda.device_count()):
        with torch.cuda.device(device):
            assert cache.current_arch() == cache.current_arch(device)


def test_a_kernel_loaded_after_its_entry_was_removed_still_computes(root: Path) -> None:
    cache.compile(SCALE, ScaleSpec(2.0)).close()  # type: ignore[union-attr]
    scale = cache.get(SCALE, ScaleSpec(2.0))
    shutil.rmtree(root)
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    scale(x, y)
    assert torch.equal(y, 2.0 * x)
