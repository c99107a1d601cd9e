"""The architecture to build for: of the current device, unless `CUTE_ATTN_ARCH` names one."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys

from .errors import CacheError

_COMPUTE_CAPABILITY_MAJOR = 75  # CUdevice_attribute
_COMPUTE_CAPABILITY_MINOR = 76


def arch_of_capability(major: int, minor: int) -> str:
    """`(9, 0)` -> `"sm_90a"`. Raises NotImplementedError below compute capability 8.0."""
    if major < 8:
        raise NotImplementedError(
            f"compute capability {major}.{minor} is not supported: 8.0 (Ampere) is the oldest"
        )
    # From Hopper on, the instructions that the kernels use are in the arch-specific feature set.
    suffix = "a" if major >= 9 else ""
    return f"sm_{major}{minor}{suffix}"


def check_arch(arch: str) -> str:
    """`arch` itself. Raises ValueError unless it is written like `sm_90a`."""
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise ValueError(f"{arch!r} is not an architecture: write for example sm_90a or sm_100a")
    return arch


def current_arch(device: int | None = None) -> str:
    """The architecture of CUDA device `device`, such as `"sm_90a"`.

    `CUTE_ATTN_ARCH`, read once, goes before any device. The default device is torch's current
    one if torch is loaded and has initialised CUDA, else device 0.

    Args:
        device: the device's number; None is the default device.

    Raises:
        CacheError: there is no driver or no device.
        NotImplementedError: the GPU is older than compute capability 8.0.
    """
    return _chosen_arch() or _device_arch(_current_device() if device is None else device)


@functools.cache
def _chosen_arch() -> str:
    chosen = os.environ.get("CUTE_ATTN_ARCH", "").strip()
    return check_arch(chosen) if chosen else ""


def _current_device() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    return 0


@functools.cache
def _device_arch(device: int) -> str:
    how_to_go_on = "pass arch=, for example arch='sm_90a', or set CUTE_ATTN_ARCH"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CacheError(f"no CUDA driver here ({error}): {how_to_go_on}") from None

    def call(function: str, *args: object) -> None:
        status = getattr(driver, function)(*args)
        if status != 0:
            raise CacheError(f"{function} failed with CUDA error {status}: {how_to_go_on}")

    call("cuInit", 0)
    handle = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(handle), device)
    capability = []
    for attribute in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR):
        value = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        capability.append(value.value)
    return arch_of_capability(*capability)


def forget() -> None:
    """Read `CUTE_ATTN_ARCH` and the devices again: for tests."""
    _chosen_arch.cache_clear()
    _device_arch.cache_clear()
