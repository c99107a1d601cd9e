"""Stand-ins for torch.cuda. Work on the device is done at once, so that streams order nothing."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any

import torch

from .device import Device
from .launches import Launches, Recorded
from .tensors import CUDA, is_cuda, replace

if TYPE_CHECKING:
    from typing_extensions import Self


class Stream:
    """The default stream, whatever stream a program makes."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device_type = 1
    device = CUDA
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        recorded = event or Event()
        recorded.record()
        return recorded

    def query(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0


class Event:
    """An event with the time on the host."""

    _numbers = itertools.count(1)

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0
        self.cuda_event = next(self._numbers)  # a handle is not null

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of emulation, which say nothing about a GPU."""
        return max((end._time - self._time) * 1e3, 1e-3)


class _Context:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Averages(list[Any]):
    def table(self, *_: Any, **__: Any) -> str:
        return "no times: the device is emulated"


class _Profile(_Context):
    """A profiler without events."""

    def step(self) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def key_averages(self, *_: Any, **__: Any) -> _Averages:
        return _Averages()

    def events(self) -> list[Any]:
        return []


def _properties(device: Device) -> Any:
    major, minor = device.capability
    values = {
        "name": device.name,
        "major": major,
        "minor": minor,
        "multi_processor_count": device.num_sms,
        "total_memory": device.memory,
        "L2_cache_size": device.l2,
        "warp_size": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_block_optin": device.shared_per_block,
        "shared_memory_per_multiprocessor": device.shared_per_sm,
        "max_threads_per_multi_processor": 2048,
        "regs_per_multiprocessor": 65536,
        "is_integrated": 0,
        "is_multi_gpu_board": 0,
    }
    return type("_CudaDeviceProperties", (), values)()


def _graphs(launches: Launches) -> tuple[type, type]:
    class CUDAGraph:
        """The launches of a capture. Functions of torch run when they are captured, and only
        then."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self._launches: list[Recorded] = []

        def capture_begin(self, *_: Any, **__: Any) -> None:
            launches.recording = self._launches

        def capture_end(self) -> None:
            launches.recording = None

        def replay(self) -> None:
            for one in self._launches:
                launches.run(one.program, one.launch, one.code)

        def reset(self) -> None:
            self._launches = []

        def pool(self) -> tuple[int, int]:
            return 0, 0

    class graph:
        def __init__(self, cuda_graph: Any, *_: Any, **__: Any) -> None:
            self._graph = cuda_graph

        def __enter__(self) -> None:
            self._graph.capture_begin()

        def __exit__(self, *_: object) -> None:
            self._graph.capture_end()

    return CUDAGraph, graph


def install(launches: Launches) -> None:
    """Put the stand-ins into torch.cuda."""
    device = launches.options.device
    graph_class, graph_context = _graphs(launches)
    values = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": device.capability,
        "get_device_properties": _properties(device),
        "get_device_name": device.name,
        "get_arch_list": [device.arch],
        "mem_get_info": (device.memory, device.memory),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "can_device_access_peer": False,
        "current_stream": Stream(),
        "default_stream": Stream(),
        "stream": Stream(),
        **dict.fromkeys(
            (
                "_lazy_init",
                "init",
                "synchronize",
                "empty_cache",
                "manual_seed",
                "manual_seed_all",
                "reset_peak_memory_stats",
                "set_stream",
                "ipc_collect",
            )
        ),
    }
    for name, value in values.items():
        replace(torch.cuda, name, _gives(value))
    classes = {
        "Stream": Stream,
        "ExternalStream": type("ExternalStream", (Stream,), {}),
        "Event": Event,
        "device": _Context,
        "device_of": type("device_of", (_Context,), {}),
        "CUDAGraph": graph_class,
        "graph": graph_context,
    }
    for name, value in classes.items():
        replace(torch.cuda, name, value)
    replace(torch.cuda, "set_device", _set_device)
    replace(torch.cuda, "is_current_stream_capturing", lambda: launches.recording is not None)
    replace(torch._C, "_cuda_isCurrentStreamCapturing", lambda: launches.recording is not None)
    replace(torch._C, "_cuda_getCurrentRawStream", _gives(0))
    replace(torch.version, "cuda", "13.0")
    replace(torch, "compile", _uncompiled)
    for name in ("range_push", "range_pop", "mark"):
        replace(torch.cuda.nvtx, name, _gives(None))
    replace(torch.cuda.nvtx, "range", lambda *_, **__: contextlib.nullcontext())
    for module in (torch.profiler, torch.autograd.profiler):
        replace(module, "profile", _Profile)


def _uncompiled(model: Any = None, **_: Any) -> Any:
    """What torch.compile gives: the function itself, as its code would be Triton's."""
    return _uncompiled if model is None else model


def _set_device(device: Any) -> None:
    is_cuda(device)  # refuses a second GPU


def _gives(value: Any) -> Any:
    """A function of its own for each name: torch.compile has a table of torch's functions."""
    return lambda *_, **__: value
