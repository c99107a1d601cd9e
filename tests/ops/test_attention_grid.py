"""The grids of FlashAttention-4's tests: their smallest points; tests/gpu runs them all."""

from __future__ import annotations

from typing import Any

import pytest

import cute_attn

from . import attention_grid as grid
from .attention_cases import Target, on_target, run
from .attention_stand_ins import stand_ins


def call(args: dict[str, Any], **options: Any) -> Any:
    varlen = any(name.startswith(("cu_", "seqused_")) for name in args)
    function = cute_attn.flash_attn_varlen_func if varlen else cute_attn.flash_attn_func
    return function(**args | options)


def smallest() -> list[grid.Point]:
    """One of each mask, of each grid, with splits and without."""
    points = [
        *grid.dense_points((3, 3)),
        *grid.dense_points((64, 32)),
        *grid.varlen_points((64, 1)),
        *grid.cache_points((1, 128)),
    ]
    kinds = {
        (x.mask, x.lengths, x.splits, x.packed_q, x.packed_k, bool(x.page_size), x.sink): x
        for x in points
    }
    return list(kinds.values())


def test_the_grids_are_whole():
    counts = [
        len(points(shape))
        for points, shapes in (
            (grid.dense_points, grid.DENSE_SHAPES),
            (grid.varlen_points, grid.VARLEN_SHAPES),
            (grid.cache_points, grid.CACHE_SHAPES),
        )
        for shape in shapes
    ]
    assert sum(counts) == 26 * 120 + 21 * 2880 + (4 * 4 + 2 * 3 + 2 * 2) * 96
    for mask in grid.MASKS:
        assert any(p.mask == mask for p in grid.drawn(grid.varlen_points((64, 128))))


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 8))]
)
def test_small_points_with_exact_kernels(part: int):
    """The kernels are float64 references here: PyTorch must say the same of the masks."""
    with stand_ins() as found, cute_attn.emulated("sm_90a"):
        for point in smallest()[part::8]:
            grid.check(point, 64, "cpu", call)
    assert found.names


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "head_dim"), [("sm_90a", 64), ("sm_100a", 256)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (64, 32)], ids=str)
def test_small_points_in_the_emulator(arch: str, head_dim: int, shape: tuple[int, int]):
    points = [x for x in grid.drawn(grid.dense_points(shape)) if not x.softcap][:4]
    with on_target(Target(arch, head_dim)):
        for point in points:
            grid.check(point, head_dim, "cpu", run)
