"""CPU tensors that stand for CUDA tensors.

A tensor is on the device if its memory is marked (`memory.py`). `CudaTensors` intercepts every
function of torch: it takes devices from arguments, marks results, and answers questions about a
tensor's device.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_devices

from . import memory, products

CUDA = torch.device("cuda", 0)
_EMPTY = "_emulated_on_device"  # marks tensors without memory


def _base(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a tensor without storage, such as a fake one
        return 0


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the emulated device."""
    base = _base(tensor)
    return memory.on_device(base) if base else getattr(tensor, _EMPTY, False)


def placed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the device: the tensor itself if its memory can be marked, else a copy."""
    base = _base(tensor)
    if not base:
        if tensor.device.type == "cpu":
            setattr(tensor, _EMPTY, True)
        return tensor
    description = f"tensor {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if memory.on_device(base) or memory.mark(base, description):
        return tensor
    return placed(tensor.clone())


def is_cuda(device: Any) -> bool | None:
    """Whether a device given to a function of torch is the emulated GPU; None: none is given.

    Raises:
        RuntimeError: another GPU than the first is meant.
    """
    if device is None or isinstance(device, bool):
        return None
    if isinstance(device, int):
        device = torch.device("cuda", device)
    if isinstance(device, str):
        device = torch.device(device)
    if not isinstance(device, torch.device):
        return None
    if device.type == "cuda" and device.index:
        raise RuntimeError(f"the emulated machine has one GPU, so that {device} does not exist")
    return bool(device.type == "cuda")


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(element, change) for element in value)
    if isinstance(value, tuple):  # a named tuple of results
        for element in value:
            _mapped(element, change)
    return value


class CudaTensors(TorchFunctionMode):
    """While active, torch has a CUDA device whose tensors lie in marked CPU memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else dict(kwargs)
        answer = _ANSWERS.get(getattr(func, "__self__", None)) or _ANSWERS.get(func)
        if answer is not None and args:
            return answer(func, *args, **kwargs)
        asked, args = _asked(func, args, kwargs)
        before = list(_tensors((*args, *kwargs.values())))
        there = [on_device(tensor) for tensor in before]
        result = products.call(func, args, kwargs) if any(there) else func(*args, **kwargs)
        if asked is None and not any(there):
            return result
        host = {_base(t) for t, device in zip(before, there, strict=True) if not device}
        device = {_base(t) for t, device in zip(before, there, strict=True) if device}
        if asked is False:
            return _mapped(result, lambda t: t.clone() if _base(t) in device - {0} else t)
        if asked:
            return _mapped(result, lambda t: placed(t.clone() if _base(t) in host - {0} else t))
        return _mapped(result, lambda t: t if _base(t) in host - {0} else placed(t))


def _asked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Whether the call asks for the GPU (None: it does not say), and arguments that name the CPU.

    `kwargs` is changed in place.
    """
    asked = is_cuda(kwargs.get("device"))
    if asked is None and "device" not in kwargs and func in default_devices._device_constructors():
        asked = is_cuda(default_devices.CURRENT_DEVICE)
        if asked:
            kwargs["device"] = "cpu"
    elif asked:
        kwargs["device"] = "cpu"
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    if func is torch.Tensor.to and len(args) > 1:
        if isinstance(args[1], torch.Tensor):
            asked = on_device(args[1])
        else:
            positional = is_cuda(args[1])
            if positional is not None:
                asked = positional
                args = (args[0], "cpu", *args[2:])
    return asked, args


# -- functions with an answer of their own


def _device(func: Any, tensor: torch.Tensor, *_: Any) -> torch.device:
    return CUDA if on_device(tensor) else tensor.device


def _is_cuda(func: Any, tensor: torch.Tensor, *_: Any) -> bool:
    return on_device(tensor)


def _is_cpu(func: Any, tensor: torch.Tensor, *_: Any) -> bool:
    return not on_device(tensor) and tensor.is_cpu


def _get_device(func: Any, tensor: torch.Tensor) -> int:
    return 0 if on_device(tensor) else -1


def _cuda(func: Any, tensor: torch.Tensor, device: Any = None, **_: Any) -> torch.Tensor:
    is_cuda(device)
    return tensor if on_device(tensor) else placed(tensor.clone())


def _cpu(func: Any, tensor: torch.Tensor, **_: Any) -> torch.Tensor:
    return tensor.clone() if on_device(tensor) else tensor


def _pinned(func: Any, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor  # every page of the process is as good as pinned


def _type(func: Any, tensor: torch.Tensor, dtype: Any = None, *rest: Any, **kwargs: Any) -> Any:
    there = on_device(tensor)
    if dtype is None:
        name = tensor.type()
        return name.replace("torch.", "torch.cuda.") if there else name
    if isinstance(dtype, str):
        there = ".cuda." in dtype
        dtype = dtype.replace("torch.cuda.", "torch.")
    result = tensor.type(dtype, *rest, **kwargs)
    return placed(result.clone() if result is tensor else result) if there else result


def _to_numpy(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if on_device(tensor):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )
    return func(tensor, *args, **kwargs)


def _dlpack(func: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
    kwargs.pop("stream", None)
    kwargs.pop("dl_device", None)
    return memory.present(tensor.__dlpack__(**kwargs))


def _dlpack_device(func: Any, tensor: torch.Tensor) -> Any:
    from torch.utils.dlpack import DLDeviceType

    return (DLDeviceType.kDLCUDA, 0) if on_device(tensor) else tensor.__dlpack_device__()


def _grad(func: Any, tensor: torch.Tensor, *rest: Any) -> Any:
    result = func(tensor, *rest)
    if isinstance(result, torch.Tensor) and on_device(tensor):
        return placed(result)
    return result


_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.device: _device,
    torch.Tensor.is_cuda: _is_cuda,
    torch.Tensor.is_cpu: _is_cpu,
    torch.Tensor.get_device: _get_device,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.pin_memory: _pinned,
    torch.Tensor.type: _type,
    torch.Tensor.numpy: _to_numpy,
    torch.Tensor.__array__: _to_numpy,
    torch.Tensor.__dlpack__: _dlpack,
    torch.Tensor.__dlpack_device__: _dlpack_device,
    torch.Tensor.grad: _grad,
}


# -- where no function of torch is called


def _is_active() -> bool:
    return any(isinstance(x, CudaTensors) for x in overrides._get_current_function_mode_stack())


def _in_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        if _is_active():
            return function(*args, **kwargs)
        with CudaTensors():
            return function(*args, **kwargs)

    return inside


def _backward(apply: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of a custom function, whose gradients come from C++, unmarked."""

    def inside(self: Any, *gradients: Any) -> Any:
        with CudaTensors():
            if any(map(on_device, _tensors([self.saved_tensors]))):
                gradients = _mapped(gradients, placed)
            return apply(self, *gradients)

    return inside


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        is_cuda(device)
        return super().__new__(cls)


def _from_dlpack(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_dlpack(external: Any, **_: Any) -> Any:
        if isinstance(external, torch.Tensor):
            return external
        if hasattr(external, "__dlpack__"):
            external = external.__dlpack__()
        return original(memory.to_host(external))

    return from_dlpack


_COMPUTES = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def _register_for_cpu() -> None:
    """Operators that a program registers for CUDA are registered for the CPU.

    torch calls an operator's Python code from C++, where no mode is active. All ways to register an
    operator lead to `Library.impl`. torch's own operators have code for the CPU.
    """
    register = torch.library.Library.impl
    redirected: set[str] = set()

    def impl(self: Any, name: Any, fn: Any, key: Any = "", **kwargs: Any) -> Any:
        operator = str(name) if "::" in str(name) else f"{self.ns}::{name}"
        module = getattr(fn, "__module__", None) or ""
        of_torch = module.startswith("torch.") and not module.startswith("torch._library.")
        if key == "CPU" and operator in redirected:
            return None
        if key in _COMPUTES and inspect.isfunction(fn) and not of_torch:
            fn = _in_mode(fn)
            has_cpu = torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU")
            if key == "CUDA" and not has_cpu:
                key = "CPU"
                redirected.add(operator)
        return register(self, name, fn, key, **kwargs)

    replace(torch.library.Library, "impl", impl)


def replace(owner: Any, name: str, value: Any) -> None:
    """Put a stand-in in place."""
    setattr(owner, name, value)


def install(arch: int) -> None:
    """Let threads, backward passes, DLPack and registrations of operators know the device.

    The caller enters `CudaTensors()` for its own thread.

    Args:
        arch: the device's architecture as a number, such as 90.
    """
    products.arch = arch
    replace(threading.Thread, "run", _in_mode(threading.Thread.run))
    backward = torch.autograd.function.BackwardCFunction
    replace(backward, "apply", _backward(backward.apply))
    # The parser of arguments refuses a stand-in for a stream before any mode is asked.
    replace(torch.Tensor, "record_stream", lambda self, stream: None)
    replace(torch, "Generator", _Generator)
    from_dlpack = _from_dlpack(torch.utils.dlpack.from_dlpack)
    replace(torch, "from_dlpack", from_dlpack)
    replace(torch.utils.dlpack, "from_dlpack", from_dlpack)
    import tvm_ffi  # noqa: F401 - gives an older torch its C functions for DLPack

    given = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if given is not None:
        replace(torch.Tensor, "__dlpack_c_exchange_api__", memory.exchange(given))
    _register_for_cpu()
