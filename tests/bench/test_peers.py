"""The harness of peers' kernels: memory, and captures of installed peers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cute_attn.bench.peers import capture_all, flash_attention_4, missing, quack_kernels
from cute_attn.bench.peers.common import (
    Buffer,
    Call,
    Captured,
    CaptureError,
    CompiledFunction,
    PointerArgument,
    Request,
    TensorArgument,
    decode,
    encode,
)

needs_flash_attention_4 = pytest.mark.skipif(
    missing("flash_attention_4") is not None, reason=str(missing("flash_attention_4"))
)
needs_quack = pytest.mark.skipif(
    missing("quack_kernels") is not None, reason=str(missing("quack_kernels"))
)


# -- memory ---------------------------------------------------------------------------------------


def small_capture() -> Captured:
    x = TensorArgument("x", (2, 3), (1, 2), 0, "bfloat16")
    lengths = TensorArgument("lengths", (2,), (1,), 0, "int32")
    y = TensorArgument("y", (4,), (1,), 0, "float8_e4m3fn")
    accum = TensorArgument("accum", (2, 2), (2, 1), 0, "float32")
    buffers = (
        Buffer("x", "input", x, 12),
        Buffer("lengths", "input", lengths, 8, values=(3, 4)),
        Buffer("y", "output", y, 4),
        Buffer("accum", "scratch", accum, 16, fill=0.0),
    )
    row = TensorArgument("accum", (2,), (1,), 2, "float32")
    arguments = (x, (row, None, 0.5), PointerArgument("accum", 4), 7)
    function = CompiledFunction(Path("k.o"), Path("kernel.ptx"), ())
    calls = (Call(function, ("mX", "tuple", "pointer", "n"), arguments),)
    request = Request("quack_kernels", "gemm", "sm_90a", 132, ())
    return Captured(request, calls, {b.name: b for b in buffers}, ())


def test_memory_is_poisoned_filled_or_overridden() -> None:
    captured = small_capture()
    memory = captured.materialise(captured.random_inputs(seed=1))
    assert memory.tensors["x"].stride() == (1, 2) and memory.tensors["x"].isfinite().all()
    assert memory.tensors["lengths"].tolist() == [3, 4]
    assert memory.tensors["y"].float().isnan().all()
    assert (memory.tensors["accum"] == 0).all()
    assert all(memory.address(name)[0] % 256 == 0 for name in captured.buffers)


def test_arguments_are_views_of_the_buffers() -> None:
    captured = small_capture()
    memory = captured.materialise({"x": 1.0})
    x, (row, nothing, half), pointer, n = memory.arguments(captured.calls[0])
    row.copy_(torch.tensor([1.0, 2.0]))
    assert memory.tensors["accum"].tolist() == [[0.0, 0.0], [1.0, 2.0]]
    assert (nothing, half, n, x.tolist()) == (None, 0.5, 7, [[1.0] * 3] * 2)
    assert pointer == memory.address("accum")[0] + 4
    assert memory.overwritten_guards() == []


def test_a_write_beyond_a_buffer_is_found() -> None:
    memory = small_capture().materialise({"x": 1.0})
    memory.tensors["accum"].as_strided((1,), (1,), memory.tensors["accum"].storage_offset() + 4)[
        0
    ] = 0
    assert memory.overwritten_guards() == ["accum"]


def test_what_cannot_be_put_into_memory() -> None:
    captured = small_capture()
    with pytest.raises(KeyError, match="input x"):
        captured.materialise()
    with pytest.raises(KeyError, match="no buffers \\['z'\\]"):
        captured.materialise({"z": 1.0})
    with pytest.raises(ValueError, match=r"x is \(2, 3\) of torch\.bfloat16"):
        captured.materialise({"x": torch.zeros(3, 2, dtype=torch.bfloat16)})


def test_arguments_survive_json() -> None:
    for argument in small_capture().calls[0].arguments:
        assert decode(encode(argument)) == argument


def test_scale_factors() -> None:
    codes = torch.tensor([[[0x21, 0xF8] + [0] * 14]], dtype=torch.uint8)  # 0.5, 1, -0, -6, 0 ...
    scales = torch.full((1, *quack_kernels.scale_shape("nvfp4", 1, 32)), 0.0)
    scales[0, 0, 0, 0, 0, 0] = 2.0
    values = quack_kernels.dequantise(
        "nvfp4", codes.view(torch.float4_e2m1fn_x2), scales.to(torch.float8_e4m3fn)
    )
    assert values.shape == (1, 1, 32)
    assert values[0, 0, :5].tolist() == [1.0, 2.0, 0.0, -12.0, 0.0]


# -- captures -------------------------------------------------------------------------------------


def test_names_tell_the_options_that_are_not_the_defaults() -> None:
    request = flash_attention_4.forward(arch="sm_100a", head_dim=256, causal=True, batch=1)
    assert request.name == "forward-sm100a-causal-head_dim=256"


@pytest.mark.slow  # the emulator's tests of peers run what such a capture has
@needs_flash_attention_4
def test_the_backward_of_flash_attention_4(tmp_path: Path) -> None:
    requests = [
        flash_attention_4.backward(
            arch="sm_90a", head_dim=64, qhead_per_kvhead=2, causal=True, seqlens_q=lengths
        )
        for lengths in ((100, 60), (200, 40, 7))
    ]
    captured, other = capture_all(tmp_path, requests)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("k.o")}

    assert captured.host_operations == ()
    pre, main, dq, dk, dv = (
        dict(zip(c.parameters, c.arguments, strict=True)) for c in captured.calls
    )
    for written, read in (
        (pre["mLSElog2"], main["mLSE"]),
        (pre["mPdPsum"], main["mdPsum"]),
        (main["mdQaccum"], dq["mdQaccum"]),
        (main["mdK"], dk["mdQaccum"]),
        (main["mdV"], dv["mdQaccum"]),
    ):
        assert written == read
    assert [captured.buffers[n].fill for n in ("dk_accum", "dv_accum", "dq_accum")] == [0, 0, None]
    assert {b.name for b in captured.outputs} == {"dq", "dk", "dv"}
    for call in captured.calls:
        assert len(call.function.entries) == 1 and ".target sm_90a" in call.function.ptx
        assert b"__tvm_ffi_k\0" in call.function.object_file.read_bytes()

    # Another batch uses the same functions; a second capture compiles nothing.
    assert [c.function for c in other.calls] == [c.function for c in captured.calls]
    assert requests[0].capture(tmp_path) == captured
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("k.o")} == before


@pytest.mark.slow  # make test runs GEMMs of quack in tests/emulator/test_peers.py
@needs_quack
def test_a_gemm_of_quack_and_what_it_refuses(tmp_path: Path) -> None:
    good = quack_kernels.gemm(arch="sm_90a", scheduler="dynamic", num_sms=2)
    with pytest.raises(CaptureError, match=r"dtype=float32:\n(.*\n)*TypeError"):
        capture_all(tmp_path, [quack_kernels.gemm(arch="sm_90a", dtype="float32"), good])
    captured = good.capture(tmp_path)
    arguments = dict(zip(captured.calls[0].parameters, captured.calls[0].arguments, strict=True))
    scheduler = arguments["scheduler_args"]
    assert isinstance(scheduler, tuple) and scheduler[0] == 2
    assert PointerArgument("tile_count_semaphore", 0) in scheduler
    assert captured.buffers["tile_count_semaphore"].fill == 0
