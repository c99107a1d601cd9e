"""Shared memory as it is declared: offsets, alignment, limits, and the emulator's names."""

from __future__ import annotations

import cutlass
import pytest

from cute_attn.kernels.common.smem import Buffer, SharedMemory


def test_buffers_lie_one_after_the_other():
    memory = SharedMemory(
        Buffer("scale", cutlass.Float32, 3),
        Buffer("tiles", cutlass.BFloat16, 64 * 64, stages=2, alignment=1024),
        Buffer("barriers", cutlass.Int64, 3, alignment=8),
    )
    assert (memory["scale"], memory["tiles"], memory["barriers"]) == (0, 1024, 1024 + 2 * 8192)
    assert memory.nbytes == 1024 + 2 * 8192 + 24
    assert memory.alignment == 1024
    assert memory.names(1024)["tiles"] == (2048, 2 * 8192, 8192)


def test_what_does_not_fit_is_an_error():
    tile, x = Buffer("tile", cutlass.Int8, 8192), Buffer("x", cutlass.Int64, 1, alignment=8)
    assert SharedMemory(tile, x, limit=8200).nbytes == 8200
    with pytest.raises(ValueError, match="8200 bytes of shared memory, at most 8192: tile 8192, x"):
        SharedMemory(tile, x, limit=8192)


def test_a_name_is_declared_once():
    with pytest.raises(ValueError, match="two buffers have one name"):
        SharedMemory(Buffer("x", cutlass.Int8, 1), Buffer("x", cutlass.Int8, 1))
