"""Whole sm_90a kernels, run on an H100 and in the emulator on the same inputs.

    python -m tests.emulator.whole_kernels prepare build/whole_kernels     # compiles; needs no GPU
    python -m tests.emulator.whole_kernels record build/whole_kernels OUT  # on the GPU machine

`record` needs torch, apache-tvm-ffi and the DSL's runtime library (CUTE_ATTN_RUNTIME_LIBRARY), but
no compiler: the host objects are linked beforehand. What it writes is kept as `RESULTS`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cute_attn.bench.peers import capture_all, flash_attention_4, quack_kernels
from cute_attn.bench.peers.common import Captured, Memory, Request, read

from . import attention_reference

RESULTS = Path(__file__).parents[1] / "data" / "silicon" / "whole_kernels.npz"
ARCH = "sm_90a"


@dataclass(frozen=True)
class Case:
    """A kernel and how closely emulator and GPU have to agree.

    Attributes:
        loose: outputs that may differ in the last bit. The assembler fuses mul.f32 and add.f32,
            which have no rounding modifier, as it likes; all others are equal bit for bit.
        quick: whether `make test` has it.
    """

    name: str
    request: Request
    loose: tuple[str, ...] = ()
    quick: bool = False


def _cases() -> list[Case]:
    gemm, forward = quack_kernels.gemm, flash_attention_4.forward
    backward = flash_attention_4.backward
    shape: dict[str, Any] = {"arch": ARCH, "m": 192, "n": 128, "k": 256}
    small: dict[str, Any] = {"arch": ARCH, "seqlen_q": 160, "heads": 1}
    gqa: dict[str, Any] = small | {"heads": 2, "qhead_per_kvhead": 2, "seqlen_q": 96}
    rows: dict[str, Any] = {"arch": ARCH, "m": 3, "n": 1024}
    return [
        Case("gemm bf16", gemm(**shape)),
        Case("gemm f16 to f32", gemm(**shape, dtype="float16", out_dtype="float32")),
        Case("gemm fp8", gemm(**shape, dtype="float8_e4m3fn")),
        Case("gemm bf16, m and n major", gemm(**shape, a_major="m", b_major="n")),
        Case(
            "gemm bf16, pingpong, cluster", gemm(**shape, pingpong=True, cluster=(1, 2)), quick=True
        ),
        Case("gemm alpha beta c", gemm(**shape, alpha=0.5, beta=2.0, c=True)),
        Case("attention hd64", forward(head_dim=64, **small), ("lse",)),
        Case("attention hd128 causal", forward(head_dim=128, causal=True, **gqa), ("lse",)),
        Case("attention hd256 causal", forward(head_dim=256, causal=True, **small), ("lse",)),
        Case("attention backward hd64 causal", backward(head_dim=64, causal=True, **small)),
        Case("attention backward hd128", backward(head_dim=128, **gqa), ("dv",)),
        Case("rmsnorm", quack_kernels.norm_forward(**rows), quick=True),
        Case("softmax", quack_kernels.softmax_forward(**rows)),
    ]


CASES = {case.name: case for case in _cases()}


def inputs(case: Case, captured: Captured) -> dict[str, torch.Tensor]:
    """Random inputs; for a backward pass, they include results of its forward pass."""
    given = captured.random_inputs(zlib.crc32(case.name.encode()))
    if case.request.function == "backward":
        q, k, v = (given[name] for name in ("q", "k", "v"))
        causal = dict(case.request.options)["causal"]
        out, lse = attention_reference.forward(q, k, v, causal=causal)
        given["out"].copy_(out)
        given["lse"].copy_(lse)
    return given


def digest(given: dict[str, torch.Tensor]) -> int:
    """A checksum of the inputs, to detect a change of torch's random numbers."""
    value = 0
    for name in sorted(given):
        value = zlib.crc32(given[name].contiguous().view(torch.uint8).numpy().tobytes(), value)
    return value


def outputs(captured: Captured, memory: Memory) -> dict[str, np.ndarray]:
    """The bytes of the output buffers."""
    return {
        buffer.name: memory.tensors[buffer.name].cpu().contiguous().view(torch.uint8).numpy()
        for buffer in captured.outputs
    }


def prepare(directory: Path) -> None:
    """Compile and link everything."""
    captures = capture_all(directory, [case.request for case in CASES.values()])
    # The GPU machine lacks the peers, of which a request's digest holds the versions.
    index = {name: case.request.digest for name, case in CASES.items()}
    (directory / "index.json").write_text(json.dumps(index))
    for captured in captures:
        for call in captured.calls:
            library = call.function.object_file.with_suffix(".so")
            command = ["cc", "-shared", "-o", str(library), str(call.function.object_file)]
            subprocess.run(command, check=True)


def record(directory: Path, target: Path) -> None:
    """Run everything on the GPU."""
    import tvm_ffi

    ctypes.CDLL(os.environ["CUTE_ATTN_RUNTIME_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
    stored: dict[str, np.ndarray] = {}
    for name, key in json.loads((directory / "index.json").read_text()).items():
        case = CASES[name]
        captured = read(directory, directory / "captures" / f"{key}.json", case.request)
        given = inputs(case, captured)
        memory = captured.materialise(given)
        memory.move("cuda")
        for call in captured.calls:
            library = ctypes.CDLL(str(call.function.object_file.with_suffix(".so").resolve()))
            address = ctypes.cast(library.__tvm_ffi_k, ctypes.c_void_p).value
            function = tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=library)
            function(*memory.arguments(call, tvm_ffi.from_dlpack))
        torch.cuda.synchronize()
        stored[f"{case.name}|digest"] = np.array(digest(given), np.uint64)
        for buffer, data in outputs(captured, memory).items():
            stored[f"{name}|{buffer}"] = data
        print(case.name, "guards overwritten:", memory.overwritten_guards(), flush=True)
    stored["device"] = np.array(torch.cuda.get_device_name())
    np.savez_compressed(target, **stored)


if __name__ == "__main__":
    action, where = sys.argv[1], Path(sys.argv[2])
    if action == "prepare":
        prepare(where)
    else:
        record(where, Path(sys.argv[3]))
