"""The host side of a compiled function, run without a GPU.

A compiled function is host code (argument checks, TMA descriptors, grid, launch) around device
code. Its object file is linked with a stand-in for the CUDA runtime, `runtime/cuda.c`, so that the
real host code runs and this module receives each launch as a `Launch`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import build

STAND_IN = Path(__file__).parent / "runtime" / "cuda.c"
LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure
HOOK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_void_p),
)


@dataclass(frozen=True)
class Launch:
    """A kernel launch that the host code requested.

    Attributes:
        kernel: the symbol.
        grid, block, cluster: sizes in x, y and z.
        dynamic_shared: bytes.
        cooperative: whether all CTAs have to be resident together.
        arguments: addresses of the kernel's arguments, in order.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared: int
    cooperative: bool
    arguments: Any

    @classmethod
    def requested(cls, kernel: bytes, dims: Any, arguments: Any) -> Launch:
        """The launch that the stand-in for the CUDA runtime hands to its hook."""
        sizes = dims[:11]
        return cls(
            kernel.decode(),
            tuple(sizes[0:3]),
            tuple(sizes[3:6]),
            tuple(sizes[6:9]),
            sizes[9],
            bool(sizes[10]),
            arguments,
        )


class HostFunction:
    """A compiled function whose launches go to `on_launch`.

    Args:
        image: the function's object file, as `export_to_c` writes it.
        name: the function's exported name.
        on_launch: called for each launch; the call raises the function's exceptions.
        num_sms, capability: properties of the device that the host code sees.
    """

    def __init__(
        self,
        image: bytes,
        name: str,
        on_launch: Callable[[Launch], None],
        *,
        num_sms: int,
        capability: tuple[int, int],
    ) -> None:
        import tvm_ffi  # loads the libtvm_ffi.so that the object needs

        self._on_launch = on_launch
        self._errors: list[BaseException] = []  # raised by the current call's launches
        self._hook = HOOK(self._launched)
        self._library = _link(image)
        self._library.emulator_set_hook(self._hook, num_sms, *capability)
        address = ctypes.cast(getattr(self._library, f"__tvm_ffi_{name}"), ctypes.c_void_p).value
        assert address is not None
        self._function = tvm_ffi.Function.__from_extern_c__(
            address, keep_alive_object=self._library
        )

    def _launched(self, _image: int, kernel: bytes, dims: Any, arguments: Any) -> int:
        try:
            self._on_launch(Launch.requested(kernel, dims, arguments))
        except BaseException as error:  # exceptions cannot pass through the host code
            self._errors.append(error)
            return LAUNCH_FAILURE
        return 0

    def __call__(self, *arguments: Any) -> None:
        self._errors.clear()
        keep: list[_AsCuda] = []  # alive until the call ends: the host code has bare pointers
        given = [_as_device(argument, keep) for argument in arguments]
        try:
            self._function(*given)
        except Exception:
            if not self._errors:
                raise
        if self._errors:
            raise self._errors.pop()


_serial = itertools.count()


def _link(image: bytes) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="cute_attn-") as scratch:
        object_file = Path(scratch) / "function.o"
        object_file.write_bytes(image)
        # The dynamic loader identifies a library by its file, so each library gets a new name.
        library = Path(scratch) / f"function-{os.getpid()}-{next(_serial)}.so"
        build.link(library, [object_file, build.object_file(STAND_IN)])
        return build.load(library)


# -- tensors ------------------------------------------------------------------------------------


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_CUDA = 2  # kDLCUDA
# The codes of the DLPack specification.
_CODES = {
    "bool": (6, 8), "uint8": (1, 8), "uint16": (1, 16), "uint32": (1, 32), "uint64": (1, 64),
    "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64),
    "float16": (2, 16), "float32": (2, 32), "float64": (2, 64), "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8), "float8_e8m0fnu": (14, 8),
    "float4_e2m1fn_x2": (17, 4),
}  # fmt: skip
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _AsCuda:
    """A CPU tensor that presents its memory, by DLPack, as memory of a CUDA device."""

    def __init__(self, tensor: Any) -> None:
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _CODES:
            raise TypeError(f"a tensor of {tensor.dtype} cannot be handed to an emulated kernel")
        if tensor.is_meta:  # its address is 0
            raise ValueError("a tensor on meta has no memory, give an emulated kernel CPU tensors")
        code, bits = _CODES[name]
        shape, strides, lanes = list(tensor.shape), list(tensor.stride()), 1
        if name == "float4_e2m1fn_x2":
            lanes = 2
        ndim = len(shape)
        self._tensor = tensor
        self._shape = (ctypes.c_int64 * max(ndim, 1))(*shape)
        self._strides = (ctypes.c_int64 * max(ndim, 1))(*strides)
        self._managed = _DLManagedTensor(
            _DLTensor(
                tensor.data_ptr(),
                _DLDevice(_CUDA, 0),
                ndim,
                code,
                bits,
                lanes,
                self._shape,
                self._strides,
                0,
            )
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, **_: Any) -> object:
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)


def _as_device(argument: Any, keep: list[_AsCuda]) -> Any:
    """An argument as the compiled function expects it: CPU torch tensors become CUDA tensors."""
    import torch
    import tvm_ffi

    if isinstance(argument, torch.Tensor):
        keep.append(_AsCuda(argument))
        return tvm_ffi.from_dlpack(keep[-1])
    if isinstance(argument, tuple | list):
        return tuple(_as_device(element, keep) for element in argument)
    return argument


def tensors_in(arguments: Sequence[Any]) -> list[tuple[str, Any]]:
    """The torch tensors among arguments, including nested tuples, each with its position."""
    import torch

    found: list[tuple[str, Any]] = []
    for i, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor):
            found.append((str(i), argument))
        elif isinstance(argument, tuple | list):
            found += [(f"{i}.{where}", tensor) for where, tensor in tensors_in(argument)]
    return found


_ALIGNMENT = 512  # alignment of PyTorch's allocations on a CUDA device


@contextlib.contextmanager
def aligned_copies(arguments: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """The arguments, with tensors copied and aligned as on a CUDA device: each storage begins at a
    multiple of 512 bytes.

    At the end only changed bytes are copied back, since bytes between the elements may belong to
    other tensors. Tensors that overlap also overlap in the copies.
    """
    import torch

    spans: dict[int, tuple[Any, int, int]] = {}  # address -> storage, first byte, end byte
    for _, tensor in tensors_in(arguments):
        if tensor.numel():
            storage, first, end = tensor.untyped_storage(), *_span(tensor)
            at = storage.data_ptr()
            _, start, stop = spans.get(at, (storage, first, end))
            spans[at] = storage, min(start, first), max(stop, end)
    copies = {at: _Copy(*span) for at, span in spans.items()}

    def moved(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor) and argument.numel():
            return copies[argument.untyped_storage().data_ptr()].tensor(argument)
        if isinstance(argument, tuple | list):
            return tuple(map(moved, argument))
        return argument

    try:
        yield tuple(map(moved, arguments))
    finally:
        for copy in copies.values():
            copy.write_back()


def _span(tensor: Any) -> tuple[int, int]:
    """A tensor's first byte in its storage, and the byte past its last byte."""
    first = tensor.storage_offset() * tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


class _Copy:
    """A copy of some bytes of a storage."""

    def __init__(self, storage: Any, first: int, end: int) -> None:
        import torch

        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage, first, (end - first,), (1,))
        self._room = torch.empty(end - first + 2 * _ALIGNMENT, dtype=torch.uint8)
        # Offset in the room of the storage's byte 0, which may lie before the room.
        self._shift = -self._room.data_ptr() % _ALIGNMENT - first // _ALIGNMENT * _ALIGNMENT
        self._copy = self._room[self._shift + first : self._shift + end]
        self._copy.copy_(self._bytes)
        self._before = self._copy.clone()

    def tensor(self, like: Any) -> Any:
        import torch

        offset = self._shift + _span(like)[0]
        return torch.empty(0, dtype=like.dtype).set_(
            self._room.untyped_storage(), offset // like.element_size(), like.shape, like.stride()
        )

    def write_back(self) -> None:
        changed = self._copy != self._before
        self._bytes[changed] = self._copy[changed]
