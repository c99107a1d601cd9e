"""Code of a capturing process: fake tensors, and functions that record calls instead of running.

Only `worker` may import this module, which patches torch and the compiler.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cutlass.cute
import cutlass.utils
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .common import (
    FUNCTION_NAME,
    Argument,
    Buffer,
    Plain,
    PointerArgument,
    TensorArgument,
    encode,
)

MEMORY = 80 << 30
L2_CACHE = 50 << 20
ADDRESS = 1 << 20  # any aligned address: nothing is read there

# Every other operation that is no view reads or writes data.
NO_DATA = ("aten::empty", "aten::new_empty", "prim::device")
FILLING = {
    "aten::zeros": 0.0,
    "aten::zeros_like": 0.0,
    "aten::new_zeros": 0.0,
    "aten::zero_": 0.0,
    "aten::ones": 1.0,
    "aten::ones_like": 1.0,
}
FILLING_WITH = {"aten::full": 1, "aten::full_like": 1, "aten::fill_": 1}  # position of the value


class _Address(int):
    """The value of `data_ptr()` of a fake tensor: an integer that knows the tensor."""

    tensor: torch.Tensor


class Recorder:
    """Notes the calls of one front end's run.

    A front end's tensors are told apart by storage. A tensor that the front end allocates is named
    after the front end's variable.
    """

    current: Recorder | None = None

    def __init__(self, package: str, arch: str):
        self.arch = arch
        self._package = package
        # Tensors kept alive, because another storage may get the address of a freed one, and with
        # it the same `_storage` number.
        self._kept: list[torch.Tensor] = []
        self._names: dict[int, str] = {}
        self._fills: dict[int, float] = {}
        self.buffers: dict[str, Buffer] = {}
        self.calls: list[tuple[Compiled, tuple[str, ...], tuple[Argument, ...]]] = []
        self.host_operations: list[str] = []

    # -- what the caller of a front end allocates

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "bfloat16",
        *,
        transposed: bool = False,
        values: Plain = None,
        bounds: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """`transposed`: the last dimension but one is contiguous."""
        if not transposed:
            tensor = _allocate(shape, dtype)
        else:
            tensor = _allocate((*shape[:-2], shape[-1], shape[-2]), dtype).mT
        self._add(name, tensor, "input", values=values, bounds=bounds)
        return tensor

    def output(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "bfloat16",
        *,
        fill: float | None = None,
    ) -> torch.Tensor:
        tensor = _allocate(shape, dtype)
        self._add(name, tensor, "output", fill=fill)
        return tensor

    def scratch(
        self, name: str, shape: Sequence[int], dtype: str, *, fill: float | None = None
    ) -> torch.Tensor:
        tensor = _allocate(shape, dtype)
        self._add(name, tensor, "scratch", fill=fill)
        return tensor

    def _add(self, name: str, tensor: torch.Tensor, role: str, **kwargs: Any) -> None:
        self._kept.append(tensor)
        self._names[_storage(tensor)] = name
        size = tensor.untyped_storage().nbytes()
        self.buffers[name] = Buffer(name, role, self._view(tensor), size, **kwargs)

    # -- what a front end does

    def call(self, compiled: Compiled, args: Sequence[Any], frame: Any) -> None:
        arguments = tuple(self._argument(a, frame) for a in args)
        self.calls.append((compiled, compiled.parameters(len(args)), arguments))

    def _argument(self, value: Any, frame: Any) -> Argument:
        if isinstance(value, torch.Tensor):
            self._know(value, frame)
            return self._view(value)
        if isinstance(value, _Address):
            self._know(value.tensor, frame)
            name = self._names[_storage(value.tensor)]
            return PointerArgument(name, int(value.tensor.storage_offset()) * value.tensor.itemsize)
        if isinstance(value, tuple | list):
            return tuple(self._argument(v, frame) for v in value)
        if isinstance(value, bool | str) or value is None:
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        number = getattr(value, "value", None)  # a scalar of the DSL, or an enum member
        if isinstance(number, bool | int | float):
            return number
        raise TypeError(f"an argument of type {type(value).__name__}: {value!r}")

    def _know(self, tensor: torch.Tensor, frame: Any) -> None:
        storage = _storage(tensor)
        if storage in self._names:
            return
        name = self._variable(storage, frame)
        unique, number = name, 1
        while unique in self.buffers:
            number += 1
            unique = f"{name}_{number}"
        self._add(unique, tensor, "scratch", fill=self._fills.get(storage))

    def _variable(self, storage: int, frame: Any) -> str:
        while frame is not None:
            if str(frame.f_globals.get("__name__", "")).startswith(self._package):
                for name, value in frame.f_locals.items():
                    if isinstance(value, torch.Tensor) and _storage(value) == storage:
                        return str(name)
            frame = frame.f_back
        return "buffer"

    def _view(self, tensor: torch.Tensor) -> TensorArgument:
        return TensorArgument(
            self._names[_storage(tensor)],
            tuple(map(int, tensor.shape)),
            tuple(map(int, tensor.stride())),
            int(tensor.storage_offset()),
            str(tensor.dtype).removeprefix("torch."),
        )

    def operation(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Record an operation that torch ran on fake tensors."""
        fill = FILLING.get(name)
        if name in FILLING_WITH and isinstance(args[FILLING_WITH[name]], int | float):
            fill = float(args[FILLING_WITH[name]])
        if fill is not None and isinstance(result, torch.Tensor):
            storage = _storage(result)
            if storage not in self._names:
                self._kept.append(result)
                self._fills[storage] = fill
                return
        self.host_operations.append(name)

    def stored(self, save: Callable[[Compiled], str]) -> dict[str, Any]:
        """The recording as JSON; `save` keeps a compiled function and returns its digest."""
        return {
            "calls": [
                {
                    "function": save(compiled),
                    "parameters": parameters,
                    "arguments": [encode(a) for a in arguments],
                }
                for compiled, parameters, arguments in self.calls
            ],
            "buffers": [vars(b) | {"view": encode(b.view)} for b in self.buffers.values()],
            "host_operations": self.host_operations,
        }

    def run(self, front_end: Callable[[Recorder], None]) -> None:
        """Run a front end on fake tensors."""
        Recorder.current = self
        try:
            with FakeTensorMode(), _Watch(self):
                front_end(self)
        finally:
            Recorder.current = None


def _allocate(shape: Sequence[int], dtype: str) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="cuda")


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Watch(TorchDispatchMode):
    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not (func.is_view or name.startswith(NO_DATA)):
            self._recorder.operation(name, args, result)
        return result


class Compiled:
    """A compiled function that notes its calls."""

    def __init__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]):
        self.function = function
        self.digest: str | None = None
        target = args[0]
        method = target if inspect.isroutine(target) else type(target).__call__
        bound = inspect.signature(method).bind(*(args[1:] if method is target else args), **kwargs)
        self._given = _without_stream(bound.arguments)
        bound.apply_defaults()
        self._all = _without_stream(bound.arguments)
        if method is not target:
            self._given, self._all = self._given[1:], self._all[1:]

    def parameters(self, count: int) -> tuple[str, ...]:
        """The function's names of its first `count` arguments."""
        for names in (self._given, self._all):
            if len(names) == count:
                return names
        raise TypeError(f"{count} arguments for the parameters {', '.join(self._all)}")

    def __call__(self, *args: Any) -> None:
        if Recorder.current is None:
            raise RuntimeError("a compiled function is called outside of a capture")
        Recorder.current.call(self, args, sys._getframe(1))

    def save(self, directory: Path) -> str:
        """Store the object file and the PTX in `directory`, once; return their digest."""
        if self.digest is None:
            ptx = self.function.artifacts.PTX
            ptx = ptx.decode() if isinstance(ptx, bytes) else str(ptx)
            ptx = ptx.rstrip("\0")
            temporary = directory / "new"
            temporary.mkdir(parents=True, exist_ok=True)
            self.function.export_to_c(str(temporary / "k.o"), function_name=FUNCTION_NAME)
            (temporary / "kernel.ptx").write_text(ptx)
            digest = hashlib.sha256((temporary / "k.o").read_bytes() + ptx.encode()).hexdigest()
            if not (directory / digest).exists():
                temporary.rename(directory / digest)
            self.digest = digest
        return self.digest


def _without_stream(arguments: dict[str, Any]) -> tuple[str, ...]:
    return tuple(n for n, v in arguments.items() if "Stream" not in type(v).__name__)


class _Compile:
    """Stands in for `cute.compile`."""

    def __init__(self, compile: Any):  # noqa: A002
        self._compile = compile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compile, name)

    def __getitem__(self, options: Any) -> _Compile:
        return _Compile(self._compile[options])

    def __call__(self, *args: Any, options: str = "", **kwargs: Any) -> Compiled:
        function = self._compile(*args, options=f"{options} --keep-ptx", **kwargs)
        return Compiled(function, args, kwargs)


def import_without_triton() -> None:
    """Import quack where triton, which quack's unused autotuner needs, is not installed.

    CPU builds of torch come without triton. No other package may mistake the stand-in for the real
    triton.
    """
    if importlib.util.find_spec("triton") is not None or importlib.util.find_spec("quack") is None:
        return
    importlib.import_module("torch._dynamo")  # torch._dynamo looks for triton as well
    triton: Any = types.ModuleType("triton")
    cache = types.SimpleNamespace(FileCacheManager=object)
    triton.runtime = types.SimpleNamespace(cache=cache)
    sys.modules["triton"] = triton
    try:
        importlib.import_module("quack")
    finally:
        del sys.modules["triton"]


def patch(arch: str, num_sms: int) -> None:
    """Make this process look like a process with a GPU of `arch`. Call this before any peer is
    imported."""
    digits = arch.removeprefix("sm_").rstrip("af")
    capability = (int(digits[:-1]), int(digits[-1]))

    class Properties:
        name = arch
        major, minor = capability
        multi_processor_count = num_sms
        total_memory = MEMORY
        L2_cache_size = L2_CACHE

    def initialise(info: Any, device_id: int = 0) -> None:
        pass

    def get_max_active_clusters(info: Any, cluster_size: int, stream: Any = None) -> int:
        return num_sms // cluster_size

    def data_ptr(tensor: torch.Tensor) -> int:
        address = _Address(ADDRESS)
        address.tensor = tensor
        return address

    cuda: Any = torch.cuda
    cuda.is_available = lambda: False
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: capability
    cuda.get_device_properties = lambda device=None: Properties
    fake: Any = FakeTensor
    fake.data_ptr = data_ptr
    dsl: Any = cutlass.cute
    dsl.compile = _Compile(dsl.compile)
    hardware: Any = cutlass.utils.HardwareInfo  # the class itself, which peers import by two names
    hardware.__init__ = initialise
    hardware.get_max_active_clusters = get_max_active_clusters
    hardware.get_device_multiprocessor_count = lambda info: num_sms
    hardware.get_l2_cache_size_in_bytes = lambda info: L2_CACHE
