"""The steps of the FMHA ladder that need Hopper, in the emulator."""

from __future__ import annotations

import importlib

import pytest
import torch

from cute_attn import cache
from cute_attn.emulator import Emulator
from cute_attn.emulator.emulator import SCHEDULES
from cute_attn.emulator.report import Report
from cute_attn.kernels.ladder.heuristics import spec_of
from cute_attn.kernels.ladder.spec import FmhaLadderSpec
from cute_attn.kernels.ladder.table import STEPS, find
from tests.conftest import assert_no_race
from tests.kernels.machine_code import assert_sound
from tests.ops.attention_cases import assert_agrees

ARCH = "sm_90a"
STEP_NUMBERS = [step.number for step in STEPS if ARCH in step.archs]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SMS = 3  # the persistent step's CTAs; none gets only one tile


def check(
    spec: FmhaLadderSpec, shapes: tuple[tuple[int, int, int], ...], schedule: str = "random"
) -> Report:
    """Compile and run a step for some (batch, seqlen, heads), and compare each with float64."""
    step = find(spec.step)
    entry = cache.compile(step.kernel, spec, arch=ARCH)
    assert_sound(entry)
    emulator = Emulator(num_sms=SMS, schedule=schedule, seed=0)
    function = emulator.load(entry)
    counter = torch.zeros(1, dtype=torch.int32)
    for batch, seqlen, heads in shapes:
        generator = torch.Generator().manual_seed(seqlen)
        q, k, v = (
            torch.randn(batch, seqlen, heads, spec.head_dim, generator=generator).to(
                DTYPES[spec.dtype]
            )
            for _ in range(3)
        )
        o = torch.full_like(q, float("nan"))
        scale = 0.1
        function(q, k, v, o, scale, *((SMS, counter) if step.persistent else ()))
        assert_agrees(
            {"q": q, "k": k, "v": v, "causal": spec.causal, "softmax_scale": scale}, o, None
        )
        assert counter.item() == 0  # ready for the next launch
    assert_no_race(emulator)
    return emulator.report


@pytest.mark.parametrize("step", STEP_NUMBERS)
def test_steps_agree_with_float64(step: int):
    """Lengths below, at and past a tile, with rings of stages that go round."""
    dtype = ("float16", "bfloat16")[step % 2]
    spec = spec_of(step, ARCH, dtype=dtype, head_dim=64, causal=step != 8, tile_n=64)
    report = check(spec, ((1, 1, 1), (1, spec.tile_m, 1), (2, 2 * spec.tile_m + 7, 2)))
    assert report.bank_conflicts == 1


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", STEP_NUMBERS)
def test_configurations_agree_with_float64(step: int, dtype: str, head_dim: int, causal: bool):
    spec = spec_of(step, ARCH, dtype=dtype, head_dim=head_dim, causal=causal)
    for schedule in SCHEDULES:
        check(spec, ((1, 300, 3),), schedule)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("tile_m", "tile_n", "stages"),
    [(128, 64, 1), (128, 64, 3), (128, 96, 2), (128, 160, 2), (192, 80, 2), (192, 64, 2)],
)
@pytest.mark.parametrize("step", [8, 9, 10])
def test_tiles_and_stages_agree_with_float64(
    step: int, tile_m: int, tile_n: int, stages: int, causal: bool
):
    spec = spec_of(
        step, ARCH, causal=causal, tile_m=tile_m, tile_n=tile_n, num_warps=tile_m // 16,
        k_stages=stages, v_stages=stages,
    )  # fmt: skip
    check(spec, ((1, 450, 2),))


@pytest.mark.slow
@pytest.mark.parametrize("step", STEP_NUMBERS)
def test_a_nan_in_k_reaches_only_the_rows_that_see_it(step: int):
    spec = spec_of(step, ARCH, head_dim=64, dtype="bfloat16", tile_n=64)
    function = Emulator().load(cache.compile(find(step).kernel, spec, arch=ARCH))
    q, k, v = torch.randn(3, 1, 70, 1, 64).to(torch.bfloat16)
    k[0, 50] = float("nan")
    o = torch.full_like(q, float("nan"))
    extra = (1, torch.zeros(1, dtype=torch.int32)) if find(step).persistent else ()
    function(q, k, v, o, 0.125, *extra)
    assert torch.equal(o[0, :, 0].isnan().any(1), torch.arange(70) >= 50)


@pytest.mark.parametrize(
    ("step", "tiles", "message"),
    [
        (6, {"tile_m": 64, "tile_n": 128, "num_warps": 4}, "tile_n is 128, must divide tile_m, 64"),
        (7, {"tile_m": 128, "num_warps": 4}, "tile_m is 128, must be 64 for each of 4 / 4 warpg"),
    ],
)
def test_tiles_that_a_step_does_not_take_are_refused(
    step: int, tiles: dict[str, int], message: str
):
    spec = spec_of(step, ARCH, **tiles)
    module, _, name = find(step).kernel.target.partition(":")
    with pytest.raises(ValueError, match=message):
        getattr(importlib.import_module(module), name)(spec)
