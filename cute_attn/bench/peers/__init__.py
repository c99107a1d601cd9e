"""Kernels of other packages, compiled without a GPU, with the calls that their front ends make.

    request = flash_attention_4.backward(arch="sm_100a", head_dim=64, causal=True)
    captured = request.capture(directory)  # from disk, else compiled in a process of its own
    memory = captured.materialise(captured.random_inputs())
    for call in captured.calls:
        function = ...  # of call.function.object_file, whose entry is `__tvm_ffi_k`
        function(*memory.arguments(call))
    memory.tensors["dq"]

A request is plain data: which function of a front end, for which architecture, shapes and options.
Capturing a request runs the front end on fake tensors and records all launches, in order: each
compiled function (object file and PTX), and the arguments of each call. Tensors that share memory
share a buffer, so that a kernel reads the previous kernel's results.

Only the processes that capture import the peers. `missing(request.peer)` says why a peer cannot be
used here.
"""

from __future__ import annotations

from . import flash_attention_4, quack_kernels
from .common import (
    Buffer,
    Call,
    Captured,
    CaptureError,
    CompiledFunction,
    Memory,
    PointerArgument,
    Request,
    TensorArgument,
    capture_all,
    missing,
)

__all__ = [
    "Buffer",
    "Call",
    "CaptureError",
    "Captured",
    "CompiledFunction",
    "Memory",
    "PointerArgument",
    "Request",
    "TensorArgument",
    "capture_all",
    "flash_attention_4",
    "missing",
    "quack_kernels",
]
