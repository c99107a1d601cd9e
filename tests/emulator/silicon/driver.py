"""The few calls of libcuda that loading and launching PTX takes; numpy and ctypes are enough."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from .cases import BLOCK_BYTES, Case
from .tensormaps import Encoder

_NO_COMPILER = (221, 222)  # the driver has no compiler, or an older one than the PTX
_SHARED_LIMIT = 8  # attribute of a function: the most dynamic shared memory


class Driver:
    """The first GPU."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._check(self._cuda.cuInit(0))
        self._device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._cuda.cuDeviceGet(ctypes.byref(self._device), 0))
        self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device))
        self._check(self._cuda.cuCtxSetCurrent(context))
        self.encoder = Encoder(self._cuda)
        self._buffers: dict[str, tuple[int, int]] = {}

    def _check(self, code: int, log: bytes = b"") -> None:
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            name = (text.value or b"?").decode()
            raise RuntimeError(f"{name} ({code}) {log.decode(errors='replace')[:500]}".strip())

    def describe(self) -> dict[str, str]:
        """Name of the device, the CUDA version that the driver has, and its own."""
        name, version = ctypes.create_string_buffer(100), ctypes.c_int()
        self._check(self._cuda.cuDeviceGetName(name, 100, self._device))
        self._check(self._cuda.cuDriverGetVersion(ctypes.byref(version)))
        found = {"device": name.value.decode(), "cuda": str(version.value)}
        about = Path("/proc/driver/nvidia/version")
        if about.exists() and (words := re.search(r"\d{3}\.\d+\.\d+", about.read_text())):
            found["driver"] = words[0]
        return found

    def load(self, ptx: str) -> ctypes.c_void_p:
        """A module; assembled by the driver, or by a ptxas if there is one and the driver can't."""
        handle = ctypes.c_void_p()
        log = ctypes.create_string_buffer(8192)
        keys = (ctypes.c_int * 2)(5, 6)  # error log buffer, its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 8192)
        code = self._cuda.cuModuleLoadDataEx(
            ctypes.byref(handle), ptx.encode() + b"\0", 2, keys, values
        )
        if code in _NO_COMPILER and (ptxas := find_ptxas()):
            code = self._cuda.cuModuleLoadData(ctypes.byref(handle), assemble(ptx, ptxas))
        self._check(code, log.value)
        return handle

    def unload(self, library: ctypes.c_void_p) -> None:
        self._check(self._cuda.cuModuleUnload(library))

    def _buffer(self, name: str, size: int) -> int:
        """Device memory that is kept for the next case."""
        address, room = self._buffers.get(name, (0, 0))
        if room < size:
            pointer = ctypes.c_uint64()
            room = max(size, 1 << 20)
            self._check(self._cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(room)))
            address = pointer.value
            self._buffers[name] = address, room
        return address

    def run(
        self, library: ctypes.c_void_p, name: str, case: Case
    ) -> tuple[np.ndarray, list[tuple[str, int]]]:
        """The output buffer after a case, and its tensor maps with the addresses in them."""
        function = ctypes.c_void_p()
        self._check(self._cuda.cuModuleGetFunction(ctypes.byref(function), library, name.encode()))
        given = case.input()
        output = np.full(case.output_bytes, 0xFF, np.uint8)
        places = {"in": self._buffer("in", given.nbytes), "out": self._buffer("out", output.nbytes)}
        for place, data in (("in", given), ("out", output)):
            size = ctypes.c_size_t(data.nbytes)
            pointer = ctypes.c_void_p(data.ctypes.data)
            self._check(self._cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(places[place]), pointer, size))
        maps = []
        for tensor_map in case.maps:
            address = places[tensor_map.buffer] + tensor_map.offset
            maps.append((self.encoder.encode(tensor_map, address), address))
        arguments = [ctypes.c_uint64(places["in"]), ctypes.c_uint64(places["out"])]
        arguments += [ctypes.create_string_buffer(data, 128) for data, _ in maps]
        if case.block:
            block = given[:BLOCK_BYTES].tobytes()
            arguments.append(ctypes.create_string_buffer(block, BLOCK_BYTES))
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._check(self._cuda.cuFuncSetAttribute(function, _SHARED_LIMIT, case.shared))
        code = self._cuda.cuLaunchKernel(
            function, case.blocks, 1, 1, case.threads, 1, 1, case.shared, None, pointers, None
        )
        self._check(code)
        self._check(self._cuda.cuCtxSynchronize())
        self._check(
            self._cuda.cuMemcpyDtoH_v2(
                ctypes.c_void_p(output.ctypes.data), ctypes.c_uint64(places["out"]),
                ctypes.c_size_t(output.nbytes),
            )
        )  # fmt: skip
        return output, [(data.hex(), address) for data, address in maps]


def find_ptxas() -> Path | None:
    """An assembler: of the path, or of the triton package."""
    on_path = shutil.which("ptxas")
    if on_path:
        return Path(on_path)
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    inside = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return inside if inside.exists() else None


def assemble(ptx: str, ptxas: Path) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "a.ptx", Path(folder) / "a.cubin"
        source.write_text(ptx)
        done = subprocess.run(
            [str(ptxas), "-arch", "sm_90a", str(source), "-o", str(target)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return target.read_bytes()
