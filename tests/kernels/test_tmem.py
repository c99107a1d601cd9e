"""Tensor memory as it is declared: offsets, and the limit."""

from __future__ import annotations

import pytest

from cute_attn.kernels.common.tmem import Region, TensorMemory


def test_regions_of_tensor_memory() -> None:
    tmem = TensorMemory(Region("s", 128, stages=2), Region("o", 256), pair=True)
    assert (tmem.offsets, tmem.columns) == ({"s": 0, "o": 256}, 512)


def test_tensor_memory_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="513 columns of tensor memory, at most 512: s 128 x 4"):
        TensorMemory(Region("s", 128, stages=4), Region("flag", 1), pair=False)
