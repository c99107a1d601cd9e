"""Which of the process's memory is the emulated device's.

`runtime/memory.c` lists the process's aligned allocations. Device memory is the allocations that
are marked: tensors that were put on the device, and memory that the program took from CUDA.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from .process import library


@functools.cache
def stand_in() -> ctypes.CDLL:
    """The library of stand-ins in C, with the types of its functions."""
    found = ctypes.CDLL(str(library()))
    address = ctypes.c_uint64
    for name, result, arguments in (
        ("emulated_mark", ctypes.c_int, (address, ctypes.c_int)),
        ("emulated_on_device", ctypes.c_int, (address,)),
        ("emulated_holds", ctypes.c_int, (address,)),
        ("emulated_allocations", ctypes.c_size_t, (ctypes.c_void_p, ctypes.c_size_t)),
        (
            "emulated_allocate",
            ctypes.c_int,
            (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t),
        ),
        ("emulated_exchange", ctypes.c_void_p, (ctypes.c_void_p,)),
        ("emulated_present", None, (ctypes.c_void_p, ctypes.c_int)),
        ("emulated_to_host", None, (ctypes.c_void_p, ctypes.c_int)),
        ("_cudaFree", ctypes.c_int, (ctypes.c_void_p,)),
        ("emulator_set_hook", None, (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


_descriptions: dict[int, str] = {}  # of the device's allocations, by address; some are gone


def mark(base: int, description: str) -> bool:
    """Make the allocation that begins at `base` memory of the device.

    Returns:
        Whether an aligned allocation begins there.
    """
    if not stand_in().emulated_mark(base, 1):
        return False
    _descriptions[base] = description
    return True


def on_device(base: int) -> bool:
    """Whether an allocation of the device begins at `base`."""
    return bool(stand_in().emulated_on_device(base))


def allocate(size: int) -> int:
    """Allocate device memory; return its address.

    Raises:
        MemoryError: there is not so much memory.
    """
    made = ctypes.c_void_p()
    if not stand_in().emulated_allocate(ctypes.byref(made), size) or made.value is None:
        raise MemoryError(f"{size} bytes of emulated device memory")
    _descriptions[made.value] = "cudaMalloc"
    return made.value


def release(address: int) -> None:
    """Free memory that `allocate` has made."""
    stand_in()._cudaFree(address)


def allocations() -> list[tuple[int, int, str]]:
    """Address, bytes and description of all device memory."""
    room = 1024
    while True:
        pairs = (ctypes.c_uint64 * (2 * room))()
        count = stand_in().emulated_allocations(pairs, room)
        if count <= room:
            break
        room = 2 * count
    found = []
    for i in range(count):
        base, size = pairs[2 * i], pairs[2 * i + 1]
        found.append((base, size, _descriptions.get(base, "allocation")))
    for base in _descriptions.keys() - {base for base, _, _ in found}:
        del _descriptions[base]
    return found


# -- DLPack

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_valid = ctypes.pythonapi.PyCapsule_IsValid
_valid.restype, _valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_EXCHANGE = b"dlpack_exchange_api"


def _for_managed(capsule: Any, function: Any) -> Any:
    for versioned, name in enumerate((b"dltensor", b"dltensor_versioned")):
        if _valid(capsule, name):
            function(_pointer(capsule, name), versioned)
    return capsule


def present(capsule: Any) -> Any:
    """A DLPack capsule whose tensor is of a CUDA device if its memory is the device's."""
    return _for_managed(capsule, stand_in().emulated_present)


def to_host(capsule: Any) -> Any:
    """A DLPack capsule whose tensor torch takes as a CPU tensor."""
    return _for_managed(capsule, stand_in().emulated_to_host)


def exchange(capsule: Any) -> Any:
    """The capsule of torch's C functions for DLPack, with device memory presented as such."""
    return _new(stand_in().emulated_exchange(_pointer(capsule, _EXCHANGE)), _EXCHANGE, None)
