"""Kernels that require the alignment of CUDA tensors, with CPU tensors, which lack it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cutlass import cute

from cute_attn.emulator import Emulator

COUNT = 32
UNIT = 128 // 4  # elements to a boundary


class Add:
    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor):
        self.kernel(x, out).launch(grid=(1, 1, 1), block=(COUNT, 1, 1))

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        out[thread] += x[thread]


@functools.cache
def compiled() -> Any:
    tensor = cute.runtime.make_fake_compact_tensor(cute.Int32, (COUNT,), assumed_align=128)
    options = "--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx"
    return cute.compile(Add(), tensor, tensor, options=options)


def storage(misaligned: bool = True) -> torch.Tensor:
    """A tensor that begins where the CPU's allocator may put it, 64 bytes behind a boundary."""
    data = bytearray(4 * 1024 + 256)
    room = torch.frombuffer(data, dtype=torch.int32)
    start = (-room.data_ptr() % 128) // 4 + 16 * misaligned
    # frombuffer makes a storage of its own, which begins here.
    made = torch.frombuffer(data, dtype=torch.int32, count=1024, offset=4 * start)
    assert made.untyped_storage().data_ptr() == made.data_ptr()
    assert made.data_ptr() % 128 == 64 * misaligned
    return made.copy_(torch.arange(1024))


@pytest.mark.parametrize("misaligned", [True, False])
def test_what_a_cuda_tensor_would_do_is_taken(misaligned: bool) -> None:
    x, out = storage(misaligned), storage(not misaligned)
    emulator = Emulator()
    function = emulator.load(compiled())
    function(x[:COUNT], out[2 * UNIT : 2 * UNIT + COUNT])
    expected = torch.arange(1024)
    assert torch.equal(x.long(), expected)
    expected[2 * UNIT : 2 * UNIT + COUNT] += torch.arange(COUNT)
    assert torch.equal(out.long(), expected)
    assert emulator.report.findings == []
    assert len(emulator.report.launches) == 1


def test_tensors_that_are_the_same_memory_stay_so() -> None:
    both = storage()
    Emulator().load(compiled())(both[UNIT : UNIT + COUNT], both[UNIT : UNIT + COUNT])
    expected = torch.arange(1024)
    expected[UNIT : UNIT + COUNT] *= 2
    assert torch.equal(both.long(), expected)


def test_memory_between_the_tensors_may_change_meanwhile() -> None:
    both = storage()

    def progress(_: int, __: int) -> None:
        both[UNIT + COUNT : 3 * UNIT] = -1  # another thread's

    Emulator(progress=progress).load(compiled())(both[:COUNT], both[4 * UNIT : 4 * UNIT + COUNT])
    expected = torch.arange(1024)
    expected[4 * UNIT : 4 * UNIT + COUNT] += torch.arange(COUNT)
    expected[UNIT + COUNT : 3 * UNIT] = -1
    assert torch.equal(both.long(), expected)


@pytest.mark.parametrize("misaligned", [True, False])
def test_what_would_be_refused_of_a_cuda_tensor_is_refused(misaligned: bool) -> None:
    both = storage(misaligned)
    for start in (4, 16):
        with pytest.raises(ValueError, match=r"Misaligned .* argument #1 .*=128"):
            Emulator().load(compiled())(both[:COUNT], both[start : start + COUNT])
    assert torch.equal(both.long(), torch.arange(1024))


def test_memory_that_is_known_by_its_address_is_not_copied() -> None:
    both = storage()
    emulator = Emulator()
    emulator.expose(both, "both")
    with pytest.raises(ValueError, match="Misaligned"):
        emulator.load(compiled())(both[:COUNT], both[UNIT : UNIT + COUNT])


def test_what_has_been_written_is_there_after_an_error() -> None:
    x, out = storage(), storage()
    emulator = Emulator(checks="none", progress=lambda *_: None)
    function = emulator.load(compiled())
    whole = emulator._launch

    def failing(*arguments: Any) -> None:
        whole(*arguments)
        raise RuntimeError("found something")

    emulator._launch = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="found something"):
        function(x[:COUNT], out[:COUNT])
    assert out[:COUNT].tolist() == [2 * i for i in range(COUNT)]
