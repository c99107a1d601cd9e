"""The architecture to compile for: `CUTE_ATTN_ARCH`, or the current device's."""

from __future__ import annotations

import functools
import os
import re
import sys

from . import driver
from .errors import CacheError


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
    """Return `arch` if it is the name that `current_arch` gives to a supported architecture.

    Other names, such as `sm_90` and `sm_100f`, would make kernels that no call looks for.

    Raises:
        TypeError: `arch` is not a string.
        ValueError: `arch` is not the name of an architecture; the message suggests a name.
        NotImplementedError: `arch` is older than compute capability 8.0.
    """
    if not isinstance(arch, str):
        raise TypeError(f"arch must be a str such as 'sm_90a', got {type(arch).__name__}")
    match = re.fullmatch(r"(?:sm)?[ _-]?([0-9]{1,2})\.?([0-9])[af]?", arch, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{arch!r} is not an architecture: write for example sm_90a or sm_100a")
    known = arch_of_capability(int(match[1]), int(match[2]))
    if arch != known:
        raise ValueError(
            f"{arch!r} is not an architecture that a call looks for: did you mean {known!r}?"
        )
    return arch


def current_arch(device: int | None = None) -> str:
    """The architecture of CUDA device `device`, such as `"sm_90a"`.

    `CUTE_ATTN_ARCH`, read once, overrides every device. The default device is torch's current
    device if torch is loaded and has initialised CUDA, else device 0.

    Args:
        device: the device's number; None is the default device.

    Raises:
        CacheError: no driver, or no device.
        NotImplementedError: the GPU is older than compute capability 8.0.
    """
    return _chosen_arch() or _device_arch(_current_device() if device is None else device)


@functools.cache
def _chosen_arch() -> str:
    return arch_of_environment()


def arch_of_environment() -> str:
    """`CUTE_ATTN_ARCH`, or "". Raises as `check_arch`, with the variable's name in the message."""
    chosen = os.environ.get("CUTE_ATTN_ARCH", "").strip()
    try:
        return check_arch(chosen) if chosen else ""
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"CUTE_ATTN_ARCH is {chosen!r}: {error}") from None


def _current_device() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    return 0


@functools.cache
def _device_arch(device: int) -> str:
    try:
        driver.ask("cuInit", 0)
        handle = driver.ask("cuDeviceGet", device)
        attribute = driver.binding().CUdevice_attribute
        major, minor = (
            driver.ask("cuDeviceGetAttribute", which, handle)
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
    except driver.DriverError as error:
        raise CacheError(
            f"{error}: pass arch=, for example arch='sm_90a', or set CUTE_ATTN_ARCH"
        ) from None
    return arch_of_capability(major, minor)


def forget() -> None:
    """Read `CUTE_ATTN_ARCH` and the devices again: for tests."""
    _chosen_arch.cache_clear()
    _device_arch.cache_clear()
