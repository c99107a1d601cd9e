"""Stand-ins for `cuda.bindings`: the calls of the driver and of the runtime that programs make.

Every other call raises NotImplementedError with the call's name.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable
from typing import Any

from . import memory
from .device import Device

_VERSION = 13000
_CONTEXT = 1


def _copy(to: Any, source: Any, size: int) -> None:
    ctypes.memmove(_address(to), _address(source), size)


def _address(value: Any) -> int:
    if isinstance(value, (bytes, bytearray)):
        return ctypes.addressof(ctypes.c_char.from_buffer_copy(value))
    if hasattr(value, "ctypes"):  # an array of numpy
        return int(value.ctypes.data)
    return int(value)


def attribute_of(device: Device) -> Callable[[Any], int]:
    """The device's attributes, by the member of either enumeration of attributes."""
    major, minor = device.capability
    values = {
        "multiprocessorcount": device.num_sms,
        "computecapabilitymajor": major,
        "computecapabilityminor": minor,
        "maxsharedmemoryperblockoptin": device.shared_per_block,
        "maxsharedmemorypermultiprocessor": device.shared_per_sm,
        "maxsharedmemoryperblock": 49152,
        "l2cachesize": device.l2,
        "warpsize": 32,
        "maxthreadsperblock": 1024,
        "maxthreadspermultiprocessor": 2048,
        "maxregistersperblock": 65536,
        "clockrate": 1_700_000,
        "memoryclockrate": 2_600_000,
        "globalmemorybuswidth": 5120,
    }
    others = ("cudevattr", "cudeviceattribute")

    def attribute(which: Any) -> int:
        name = str(getattr(which, "name", which)).replace("_", "").lower()
        for prefix in others:
            name = name.removeprefix(prefix)
        return values.get(name, 1)

    return attribute


class _Events:
    """Events, by number, with the time of their record."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._times: dict[int, float] = {}

    def create(self) -> int:
        number = next(self._numbers)
        self._times[number] = 0.0
        return number

    def record(self, event: Any) -> None:
        self._times[int(event)] = time.perf_counter()

    def milliseconds(self, start: Any, end: Any) -> float:
        return max(1e3 * (self._times[int(end)] - self._times[int(start)]), 1e-3)


def _memory_calls(success: Any, pointer: Callable[[int], Any]) -> dict[str, Callable[..., Any]]:
    """Calls that differ between driver and runtime only in their names, by the runtime's name."""

    def allocate(size: Any, *_: Any) -> Any:
        return success, pointer(memory.allocate(int(size)))

    def release(address: Any, *_: Any) -> Any:
        memory.release(int(address))
        return (success,)

    def copy(to: Any, source: Any, size: Any, *_: Any) -> Any:
        _copy(to, source, int(size))
        return (success,)

    def fill(address: Any, value: Any, size: Any, *_: Any) -> Any:
        ctypes.memset(int(address), int(value), int(size))
        return (success,)

    return {"allocate": allocate, "release": release, "copy": copy, "fill": fill}


def _runtime(runtime: Any, device: Device) -> dict[str, Callable[..., Any]]:
    success = runtime.cudaError_t.cudaSuccess
    calls = _memory_calls(success, int)
    events, attribute = _Events(), attribute_of(device)

    def nothing(*_: Any) -> Any:
        return (success,)

    def record(event: Any, *_: Any) -> Any:
        events.record(event)
        return (success,)

    def gives(value: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (success, value(*arguments))

    table: dict[str, Callable[..., Any]] = {
        "cudaGetDeviceCount": gives(lambda: 1),
        "cudaGetDevice": gives(lambda: 0),
        "cudaDeviceGetAttribute": gives(lambda which, _: attribute(which)),
        "cudaDriverGetVersion": gives(lambda: _VERSION),
        "cudaRuntimeGetVersion": gives(lambda: _VERSION),
        "cudaGetErrorName": gives(lambda error: str(error).encode()),
        "cudaGetErrorString": gives(lambda error: str(error).encode()),
        "cudaStreamCreate": gives(lambda: runtime.cudaStream_t(0)),
        "cudaStreamCreateWithFlags": gives(lambda _: runtime.cudaStream_t(0)),
        "cudaStreamCreateWithPriority": gives(lambda *_: runtime.cudaStream_t(0)),
        "cudaEventCreate": gives(lambda: runtime.cudaEvent_t(events.create())),
        "cudaEventCreateWithFlags": gives(lambda _: runtime.cudaEvent_t(events.create())),
        "cudaEventRecord": record,
        "cudaEventElapsedTime": gives(events.milliseconds),
        "cudaMemset": calls["fill"],
        "cudaMemsetAsync": calls["fill"],
        "cudaMemcpy": calls["copy"],
        "cudaMemcpyAsync": calls["copy"],
    }
    for name in ("cudaMalloc", "cudaMallocAsync", "cudaMallocManaged", "cudaMallocHost"):
        table[name] = calls["allocate"]
    for name in ("cudaFree", "cudaFreeAsync", "cudaFreeHost"):
        table[name] = calls["release"]
    for name in (
        "cudaSetDevice", "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaStreamDestroy",
        "cudaStreamWaitEvent", "cudaEventSynchronize", "cudaEventDestroy", "cudaLibraryUnload",
        "cudaGetLastError", "cudaFuncSetAttribute", "cudaProfilerStart", "cudaProfilerStop",
    ):  # fmt: skip
        table[name] = nothing
    return table


def _driver(driver: Any, device: Device) -> dict[str, Callable[..., Any]]:
    success = driver.CUresult.CUDA_SUCCESS
    calls = _memory_calls(success, driver.CUdeviceptr)
    events, attribute = _Events(), attribute_of(device)

    def nothing(*_: Any) -> Any:
        return (success,)

    def record(event: Any, *_: Any) -> Any:
        events.record(event)
        return (success,)

    def fill_words(address: Any, value: Any, count: Any, *_: Any) -> Any:
        words = int(value).to_bytes(4, "little") * int(count)
        ctypes.memmove(int(address), words, len(words))
        return (success,)

    def gives(value: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (success, value(*arguments))

    def context(*_: Any) -> Any:
        return driver.CUcontext(_CONTEXT)

    table: dict[str, Callable[..., Any]] = {
        "cuDeviceGet": gives(lambda _: driver.CUdevice(0)),
        "cuDeviceGetCount": gives(lambda: 1),
        "cuDeviceGetName": gives(lambda *_: device.name.encode()),
        "cuDeviceTotalMem": gives(lambda _: device.memory),
        "cuDeviceGetAttribute": gives(lambda which, _: attribute(which)),
        "cuDriverGetVersion": gives(lambda: _VERSION),
        "cuCtxGetCurrent": gives(context),
        "cuCtxCreate": gives(context),
        "cuDevicePrimaryCtxRetain": gives(context),
        "cuStreamGetCtx": gives(context),
        "cuCtxGetDevice": gives(lambda: driver.CUdevice(0)),
        "cuGetErrorName": gives(lambda error: str(error).encode()),
        "cuGetErrorString": gives(lambda error: str(error).encode()),
        "cuPointerGetAttribute": gives(lambda *_: 0),
        "cuStreamCreate": gives(lambda *_: driver.CUstream(0)),
        "cuStreamCreateWithPriority": gives(lambda *_: driver.CUstream(0)),
        "cuEventCreate": gives(lambda *_: driver.CUevent(events.create())),
        "cuEventRecord": record,
        "cuEventElapsedTime": gives(events.milliseconds),
        "cuMemsetD8": calls["fill"],
        "cuMemsetD8Async": calls["fill"],
        "cuMemsetD32": fill_words,
        "cuMemsetD32Async": fill_words,
    }
    for name in ("cuMemAlloc", "cuMemAllocAsync"):
        table[name] = calls["allocate"]
    for name in ("cuMemFree", "cuMemFreeAsync"):
        table[name] = calls["release"]
    for direction in ("HtoD", "DtoH", "DtoD"):
        table[f"cuMemcpy{direction}"] = table[f"cuMemcpy{direction}Async"] = calls["copy"]
    table["cuMemcpy"] = table["cuMemcpyAsync"] = calls["copy"]
    for name in (
        "cuInit", "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxSynchronize", "cuCtxDestroy",
        "cuDevicePrimaryCtxRelease", "cuStreamSynchronize", "cuStreamDestroy", "cuStreamWaitEvent",
        "cuEventSynchronize", "cuEventDestroy", "cuLibraryUnload", "cuProfilerStart",
        "cuProfilerStop",
    ):  # fmt: skip
        table[name] = nothing
    return table


def _missing(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the emulator has no stand-in for {name}")

    return call


def _is_call(name: str, prefix: str, value: Any) -> bool:
    rest = name.removeprefix(prefix)
    return rest != name and rest[:1].isupper() and callable(value) and not isinstance(value, type)


def install(device: Device) -> None:
    """Put the stand-ins into cuda.bindings."""
    from cuda.bindings import driver, runtime

    for module, prefix, table in (
        (driver, "cu", _driver(driver, device)),
        (runtime, "cuda", _runtime(runtime, device)),
    ):
        for name in dir(module):
            if name in table:
                setattr(module, name, table[name])
            elif _is_call(name, prefix, getattr(module, name)):
                setattr(module, name, _missing(name))
