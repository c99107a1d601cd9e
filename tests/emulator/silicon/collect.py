"""Run every case on the GPU at hand and write results.npz.

    python -m tests.emulator.silicon.collect OUTPUT.npz

It needs torch and the driver's libcuda, not the compiler: the driver assembles the PTX.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import torch

from .cases import BITS, THREADS, Case, kernel_name, load, module, operands

_BATCH = 200


class Driver:
    """The few calls of libcuda that loading and launching PTX takes."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes the context
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def _check(self, code: int, log: ctypes.Array[ctypes.c_char] | None = None) -> None:
        if code:
            text = log.value.decode(errors="replace") if log is not None else ""
            raise RuntimeError(f"CUDA driver error {code} {text}")

    def load(self, ptx: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        log = ctypes.create_string_buffer(8192)
        keys = (ctypes.c_int * 2)(5, 6)  # error log buffer, its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 8192)
        code = self._cuda.cuModuleLoadDataEx(
            ctypes.byref(handle), ptx.encode() + b"\0", 2, keys, values
        )
        self._check(code, log)
        return handle

    def run(
        self, library: ctypes.c_void_p, name: str, *pointers: int, threads: int = THREADS,
        shared: int = 0,
    ) -> None:  # fmt: skip
        function = ctypes.c_void_p()
        self._check(self._cuda.cuModuleGetFunction(ctypes.byref(function), library, name.encode()))
        values = [ctypes.c_uint64(p) for p in pointers]
        arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = self._cuda.cuLaunchKernel(
            function, 1, 1, 1, threads, 1, 1, shared, stream, arguments, None
        )
        self._check(code)


def run_cases(driver: Driver, cases: list[Case], first: int) -> list[np.ndarray]:
    library = driver.load(module(cases, first))
    results = []
    for i, case in enumerate(cases):
        given = operands(case).view(np.int64)
        inputs = torch.from_numpy(np.ascontiguousarray(given)).cuda()
        outputs = torch.full((len(case.outputs), THREADS), -1, dtype=torch.int64, device="cuda")
        driver.run(library, kernel_name(first + i), inputs.data_ptr(), outputs.data_ptr())
        torch.cuda.synchronize()
        results.append(outputs.cpu().numpy().view(np.uint64))
    return results


def compact(case: Case, outputs: np.ndarray) -> np.ndarray:
    """The results in as many bytes as they need."""
    width = max(BITS[kind] for kind in case.outputs)
    return outputs.astype({1: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[width])


def main(target: str) -> None:
    driver = Driver()
    cases = load()
    stored = {}
    for first in range(0, len(cases), _BATCH):
        batch = cases[first : first + _BATCH]
        for case, outputs in zip(batch, run_cases(driver, batch, first), strict=True):
            stored[case.name] = compact(case, outputs)
        print(f"{first + len(batch)} of {len(cases)}", flush=True)
    stored["device"] = np.array(torch.cuda.get_device_name())
    np.savez_compressed(Path(target), **stored)


if __name__ == "__main__":
    main(sys.argv[1])
