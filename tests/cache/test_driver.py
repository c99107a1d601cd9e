"""The cache's calls of the CUDA driver, with a toy driver and without any."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any

import pytest

from cute_attn import cache
from cute_attn.cache import arch, driver, toolchain


class ToyDriver:
    """The part of cuda.bindings.driver that the cache uses."""

    class CUdevice_attribute(IntEnum):
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76

    class Status(IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_NO_DEVICE = 100

    def __init__(self, devices: int = 2, missing: bool = False) -> None:
        self._devices, self._missing = devices, missing

    def cuInit(self, flags: int) -> tuple[Any]:
        if self._missing:
            raise RuntimeError("no libcuda")
        return ((self.Status.CUDA_SUCCESS if self._devices else self.Status.CUDA_ERROR_NO_DEVICE),)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, str]:
        return self.Status.CUDA_SUCCESS, f"device {ordinal}"

    def cuDeviceGetAttribute(self, attribute: int, device: str) -> tuple[Any, int]:
        capability = {"device 0": (9, 0), "device 1": (10, 3)}[device]
        return self.Status.CUDA_SUCCESS, capability[attribute - 75]

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        return self.Status.CUDA_SUCCESS, 13020


def test_current_arch_without_a_driver_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_ATTN_ARCH", raising=False)
    monkeypatch.setattr(driver, "binding", lambda: ToyDriver(missing=True))
    with pytest.raises(cache.CacheError, match=r"no libcuda.*pass arch=.*CUTE_ATTN_ARCH"):
        cache.current_arch()


def test_current_arch_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_ATTN_ARCH", raising=False)
    monkeypatch.setattr(driver, "binding", ToyDriver)
    assert [cache.current_arch(0), cache.current_arch(1)] == ["sm_90a", "sm_103a"]
    arch.forget()
    monkeypatch.setattr(driver, "binding", lambda: ToyDriver(devices=0))
    with pytest.raises(cache.CacheError, match="cuInit failed: CUDA_ERROR_NO_DEVICE: pass arch="):
        cache.current_arch(0)


def test_the_drivers_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "binding", ToyDriver)
    assert toolchain._driver_cuda_major() == 13
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    assert toolchain._driver_cuda_major() is None


def test_the_driver_is_asked_through_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real module has what is used, and where it is missing that is said."""
    real = driver.binding()
    for name in ("cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDriverGetVersion"):
        assert callable(getattr(real, name))
    for which in ToyDriver.CUdevice_attribute:
        assert getattr(real.CUdevice_attribute, which.name) == which
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(cache.CacheError, match=r"pip install 'cuda-python>=12\.8'"):
        driver.ask("cuInit", 0)
