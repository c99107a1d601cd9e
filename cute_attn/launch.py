"""The bridge between operators and compiled kernels: (kernel, Spec, arch) -> callable.

Each family lists its kernels in its `table.py`. A KernelDef in the table holds the import path of a
kernel class, so that the class, and with it the compiler, is imported only to compile. Device code
does not depend on the cache, nor the cache on kernels.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from . import cache
from .cache import KernelDef, driver
from .cache.driver import DriverError
from .cache.plans import planner as planner
from .emulation import current_emulation

if TYPE_CHECKING:
    import torch

    from .cache import WarmupReport

Request = tuple[KernelDef, Any]  # a kernel and its Spec


def get(kernel: KernelDef, spec: Any, arch: str) -> Callable[..., Any]:
    """The TVM-FFI function of `kernel` for `spec` and `arch`, loaded or compiled.

    Raises:
        cute_attn.cache.CacheError: the cache is frozen and does not have the kernel.
        cute_attn.cache.CompileError: the compiler failed.
    """
    return cache.get(kernel, spec, arch)


def get_for(device: torch.device, kernel: KernelDef, spec: Any) -> Callable[..., Any]:
    """The function of `kernel` for tensors on `device`; on the CPU, it runs in the emulator."""
    if device.type != "cpu":
        return get(kernel, spec, arch_of(device.index))
    emulation = current_emulation()
    assert emulation is not None, "checked by check_device"
    return emulation.function(kernel, spec)


def arch_of(device_index: int) -> str:
    """The architecture to compile for on a CUDA device, such as "sm_90a".

    Raises:
        NotImplementedError: a device older than sm_80.
    """
    return cache.current_arch(device_index)


def arch_for(device: torch.device) -> str:
    """The architecture of the kernels for tensors on `device`."""
    emulation = current_emulation() if device.type == "cpu" else None
    return emulation.arch if emulation else arch_of(device.index)


def num_sms(device: torch.device) -> int:
    """The number of SMs of the device, or of the emulator for CPU tensors."""
    emulation = current_emulation() if device.type == "cpu" else None
    if emulation:
        return emulation.emulator.num_sms
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def num_clusters(device: torch.device, size: int) -> int:
    """The number of clusters that run at once on the device, or in the emulator for CPU tensors; at
    least 1. A cluster has `size` CTAs, each of which fills an SM.

    A GPU may run fewer clusters than its SMs could hold, since a cluster lies in one GPC.
    """
    at_most = max(1, num_sms(device) // size)
    if device.type == "cpu" or size == 1:
        return at_most
    try:
        return max(1, min(at_most, _resident_clusters(device.index, size)))
    except DriverError:
        return at_most


_PROBE = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry probe() { ret; }\0"


@functools.cache
def _resident_clusters(device_index: int, size: int) -> int:
    """The CUDA driver's count of clusters, for a kernel that takes all of an SM's shared memory."""

    binding = driver.binding()
    optin = binding.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    device = driver.ask("cuDeviceGet", device_index)
    memory = driver.ask("cuDeviceGetAttribute", optin, device)
    config, attribute = binding.CUlaunchConfig(), binding.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = size, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 128, 1, 1
    config.sharedMemBytes = memory
    attribute.id = binding.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    shape = attribute.value.clusterDim
    shape.x, shape.y, shape.z = size, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    # torch makes its CUDA context current only at its first own call that needs the context.
    driver.ask("cuCtxPushCurrent", driver.ask("cuDevicePrimaryCtxRetain", device))
    try:
        module = driver.ask("cuModuleLoadData", _PROBE)
        try:
            function = driver.ask("cuModuleGetFunction", module, b"probe")
            limit = binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.ask("cuFuncSetAttribute", function, limit, memory)
            return int(driver.ask("cuOccupancyMaxActiveClusters", function, config))
        finally:
            driver.ask("cuModuleUnload", module)
    finally:
        driver.ask("cuCtxPopCurrent")
        driver.ask("cuDevicePrimaryCtxRelease", device)


def check_device(name: str, device: torch.device) -> None:
    """Raise ValueError unless `device` is a CUDA device, or the CPU within an emulation."""
    if device.type != "cuda" and not (device.type == "cpu" and current_emulation()):
        hint = (
            ", or on the CPU with CUTE_ATTN_EMULATE=1, or in a thread within cute_attn.emulated()"
        )
        raise ValueError(
            f"{name} is on {device}, must be on a CUDA device{hint if device.type == 'cpu' else ''}"
        )


def warmup(
    requests: Iterable[Request] | str | os.PathLike[str],
    *,
    arch: str | None = None,
    jobs: int | None = None,
    progress: bool | None = None,
) -> WarmupReport:
    """Compile or load the kernels that a server needs, so that no request waits for the compiler.

    Args:
        requests: (kernel, Spec) pairs, as the `plan_*` functions of `cute_attn.ops` return them, or
            the path of a TOML spec file, such as the files in `cute_attn/models`.
        arch: "sm_90a", "sm_100a" ...; None means the current device's.
        jobs: number of compilers that run at once; None means one per core, at most 16.
        progress: show a progress bar; None shows one on a terminal.

    Raises:
        cute_attn.cache.CompileError: kernels failed, or tables of the file have no kernel for
            `arch` or were recorded by another version. The message names each failure; all other
            kernels are ready.
        cute_attn.cache.FrozenCacheMiss: a kernel is missing after `cute_attn.cache.freeze`.
        cute_attn.cache.CacheError: the file cannot be read, a plan in the file fails, or the file
            lists nothing for `arch`; or neither a device nor `arch` is given.
        ValueError: `arch` is not of the form "sm_90a", or `jobs` is less than 1.
    """
    return cache.warmup(requests, arch=arch, jobs=jobs, progress=progress)
