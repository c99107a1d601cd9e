"""The kernels that copy tiles: every way to copy, emulated for each architecture that has it.

The emulator finds races and reads of bytes that have not arrived; the sums show wrong tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cute_attn import cache
from cute_attn.bench.async_copy.cases import PARTS, Run, make_spec, supported
from cute_attn.bench.async_copy.machines import Emulator
from cute_attn.kernels.async_copy.spec import COPIES, AsyncCopySpec
from cute_attn.kernels.async_copy.table import kernel_of
from tests.kernels.machine_code import assert_sound

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")

# Small tiles, a few stages. The first ones are in the quick suite, each on one architecture.
SMALL: list[dict[str, Any]] = [
    {"copy": "vector", "rows": 16, "stages": 2, "producers": 2},
    {"copy": "bulk", "rows": 16, "stages": 2, "producers": 2},
    {"copy": "multicast", "rows": 16, "stages": 2, "producers": 2},
    {"copy": "cp_async", "rows": 16, "stages": 3, "products": 1},
    {"copy": "tensor_swizzled", "rows": 16, "stages": 2, "products": 2, "box": (8, 64)},
    {"copy": "tensor", "rows": 16, "stages": 2, "producers": 1, "box": (4, 32), "heads": 2},
    *({"copy": c, "rows": 32, "stages": 5, "producers": 4} for c in COPIES),
    *({"copy": c, "rows": 16} for c in COPIES if c != "multicast"),
    {"copy": "bulk", "rows": 16, "whole_tile": False, "box": (1, 128), "heads": 2},
    {"copy": "cp_async_l1", "rows": 16, "columns": 256, "producers": 1, "heads": 3},
    {"copy": "tensor_swizzled", "rows": 16, "columns": 64, "latency": True},
]
QUICK = 6


def cases() -> list[Any]:
    found = []
    for n, fields in enumerate(SMALL):
        archs = [arch for arch in ARCHS if supported(fields["copy"], arch)]
        for arch in archs:
            quick = n < QUICK and arch == archs[n % len(archs)]
            name = "-".join(map(str, (arch, *fields.values())))
            found.append(
                pytest.param(arch, fields, id=name, marks=() if quick else pytest.mark.slow)
            )
    return found


def run_of(arch: str, fields: dict[str, Any]) -> Run:
    return Run(make_spec(arch=arch, **fields), (), 2 if fields["copy"] == "multicast" else 1)


def run_and_compile(run: Run, arch: str) -> None:
    Emulator(arch).check(run)
    entry = cache.compile(kernel_of(run.spec), run.spec, arch)
    (use,) = entry.kernels
    assert use.spill_stores == use.spill_loads == 0
    assert_sound(entry)


@pytest.mark.parametrize(("arch", "fields"), cases())
def test_every_tile_lands(arch: str, fields: dict[str, Any]) -> None:
    run_and_compile(run_of(arch, fields), arch)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_run_of_the_study(arch: str, part: str) -> None:
    for run in PARTS[part](arch, False):
        run_and_compile(run, arch)


@pytest.mark.parametrize("copy", ["bulk", "tensor", "tensor_swizzled", "multicast"])
def test_an_architecture_without_tma_is_refused(copy: str) -> None:
    spec = make_spec(copy, "sm_80", rows=16, producers=1)
    with pytest.raises(cache.CompileError):
        cache.compile(kernel_of(spec), spec, "sm_80")


def fields(**changes: Any) -> dict[str, Any]:
    spec = make_spec("cp_async", "sm_90a", rows=64, stages=2, producers=2)
    return dataclasses.asdict(spec) | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"copy": "memcpy"}, ValueError, "copy is 'memcpy'"),
        ({"tile_columns": 96}, ValueError, "tile_columns is 96"),
        ({"num_stages": 0}, ValueError, "num_stages 0, must be at least 1"),
        ({"num_stages": 15}, ValueError, "246120 bytes of shared memory, at most 232448"),
        ({"box_columns": 64}, ValueError, r"box_columns is 64, must be one of \(128,\)"),
        ({"box_rows": 48}, ValueError, "box_rows is 48, must divide the 64 rows"),
        ({"copy": "tensor_swizzled", "box_columns": 128}, ValueError, "box_columns is 128"),
        (
            {"copy": "tensor_swizzled", "box_columns": 64, "box_rows": 4},
            ValueError,
            "box_rows is 4, must be whole periods of 8",
        ),
        ({"copy": "bulk", "heads": 2}, ValueError, "rows of several heads are not adjacent"),
        ({"tile_rows": 4, "box_rows": 4}, ValueError, "consumer_warps is 4: 128 threads"),
        (
            {"copy": "bulk", "producer_warps": 4},
            ValueError,
            "producer_warps is 4, that take turns: must be at most num_stages=2",
        ),
        ({"latency": True}, ValueError, "latency needs one stage"),
        ({"copy": "vector", "producer_warps": 0}, ValueError, "vector loads fill 1"),
        ({"products": 4, "whole_tile": False}, ValueError, "whole_tile is False"),
        ({"num_stages": 2.0}, TypeError, "AsyncCopySpec.num_stages must be an int"),
    ],
)
def test_a_spec_without_a_kernel_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AsyncCopySpec(**fields(**changes))
