"""Every specialisation of the Lightning decode kernels compiles, for every architecture, without
spilling a register."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_attn import cache
from cute_attn.cache import KernelDef
from cute_attn.kernels.lightning import heuristics, table
from cute_attn.kernels.lightning.spec import (
    DTYPES,
    HEAD_DIMS,
    STATE_DTYPES,
    STATE_LAYOUTS,
    DecodeSpec,
    PipelinedDecodeSpec,
)
from cute_attn.ops.lightning import plan_decode
from tests.kernels.machine_code import assert_sound

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
SMS = (78, 132)

# (multi_token, replay), and which of them takes state_indices is free
MODES = ((False, False), (True, False), (True, True))

EVERYTHING = [
    {
        "dtype": dtype,
        "state_dtype": state_dtype,
        "head_dim_k": k,
        "head_dim_v": v,
        "state_layout": layout,
        "multi_token": multi_token,
        "replay": replay,
        "indexed": indexed,
        "aligned": aligned,
        "num_sms": num_sms,
    }
    for dtype, state_dtype, k, v, layout, (multi_token, replay), indexed, aligned, num_sms in (
        itertools.product(
            DTYPES,
            STATE_DTYPES,
            HEAD_DIMS,
            HEAD_DIMS,
            STATE_LAYOUTS,
            MODES,
            (False, True),
            (False, True),
            SMS,
        )
    )
]


def pairs_of(request: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(sorted(request.items()), 2))


def covering(requests: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """A few of the requests that together have every pair of values of all of them."""
    shuffled = random.Random(seed).sample(requests, len(requests))
    missing = set().union(*map(pairs_of, requests))
    chosen = []
    while missing:
        best = max(shuffled[:400], key=lambda r: len(pairs_of(r) & missing))
        if not pairs_of(best) & missing:
            shuffled = shuffled[400:]
            continue
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def assert_compiles(kernel: KernelDef, spec: Any, arch: str) -> None:
    entry = cache.compile(kernel, spec, arch)
    (use,) = entry.kernels
    assert use.spill_stores == use.spill_loads == 0, (spec, arch, use)
    assert use.registers <= 65536 // spec.num_threads, (spec, arch, use)
    assert_sound(entry)


REDUCED = covering(EVERYTHING, seed=5)


def test_the_reduced_sweep_covers_every_pair_of_values():
    assert set().union(*map(pairs_of, REDUCED)) == set().union(*map(pairs_of, EVERYTHING))
    assert len(REDUCED) < 60


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "request_",
    [pytest.param(r, marks=pytest.mark.slow if n % 2 else ()) for n, r in enumerate(REDUCED)],
    ids=lambda r: "-".join(map(str, r.values())),
)
def test_compiles_without_spills(request_: dict[str, Any], arch: str):
    ((kernel, spec),) = plan_decode(arch, **request_)
    assert_compiles(kernel, spec, arch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim_k", HEAD_DIMS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_specialisation_compiles_without_spills(arch: str, head_dim_k: int, dtype: str):
    part = {"head_dim_k": head_dim_k, "dtype": dtype}
    chosen = [request for request in EVERYTHING if request.items() >= part.items()]
    requests = [plan_decode(arch, **request)[0] for request in chosen]
    report = cache.warmup(requests, arch=arch)
    assert report.kernels == len({spec for _, spec in requests})
    for kernel, spec in requests:
        assert_compiles(kernel, spec, arch)


PIPELINED = [
    config
    for config in heuristics.candidate_configs()
    if "num_stages" in config and config["tile_v"] in (8, 16)
]


@pytest.mark.in_turn("turn")
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, marks=pytest.mark.slow if n % 3 else ())
        for n, config in enumerate(PIPELINED)
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_the_pipelined_kernel_compiles_without_spills(config: dict[str, Any], turn: int):
    archs = ("sm_80", "sm_90a") if config["load"] == "cp_async" else ("sm_90a", "sm_100a")
    spec = PipelinedDecodeSpec(
        dtype="bfloat16",
        state_dtype="float32",
        head_dim_k=128,
        head_dim_v=128,
        state_layout="vk",
        multi_token=False,
        replay=False,
        indexed=True,
        aligned=True,
        **config,
    )
    assert_compiles(table.DECODE_PIPELINED, spec, archs[turn])


@given(st.sampled_from(EVERYTHING))
def test_the_heuristics_fill_the_tile(request_: dict[str, Any]):
    """The threads' elements together are the tile, and tiles cover V."""
    ((_, spec),) = plan_decode("sm_90a", **request_)
    vector, rows, vectors = spec.thread_shape
    tile_rows, tile_columns = spec.tile_shape
    assert vector * rows * vectors * spec.num_threads == tile_rows * tile_columns
    assert spec.head_dim_v % spec.tile_v == 0
    assert spec.num_threads <= 1024


def fields(**changes: Any) -> dict[str, Any]:
    ((_, spec),) = plan_decode("sm_90a")
    return dataclasses.asdict(spec) | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": "float64"}, ValueError, "dtype is 'float64'"),
        ({"head_dim_k": 96}, ValueError, "head_dim_k is 96, must be one of"),
        ({"state_layout": "vv"}, ValueError, "state_layout is 'vv'"),
        ({"tile_v": 48}, ValueError, "tile_v is 48, must divide head_dim_v=128"),
        ({"lanes_per_row": 12}, ValueError, "lanes_per_row is 12, must divide 32"),
        ({"num_warps": 5}, ValueError, "do not divide over 5 warps"),
        ({"replay": True}, ValueError, "replay needs multi_token"),
        ({"tile_v": 32.0}, TypeError, "DecodeSpec.tile_v must be an int"),
        ({"hints": None}, TypeError, "DecodeSpec.hints must be"),
    ],
)
def test_a_spec_without_a_kernel_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        DecodeSpec(**fields(**changes))


def test_a_tensor_in_a_spec_is_a_type_error_that_names_the_field():
    import torch

    with pytest.raises(TypeError, match=r"DecodeSpec\.num_warps .* torch.Tensor"):
        DecodeSpec(**fields(num_warps=torch.tensor(4)))


def test_a_pipeline_that_does_not_fit_shared_memory_is_refused():
    config = PIPELINED[0] | {"tile_v": 32, "num_warps": 16, "num_stages": 4}
    with pytest.raises(ValueError, match="bytes of shared memory, at most 232448"):
        PipelinedDecodeSpec(**(fields() | config))
