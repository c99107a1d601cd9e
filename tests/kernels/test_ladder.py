"""The steps of the FMHA ladder that run everywhere, in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import cache
from cute_attn.emulator import Emulator
from cute_attn.emulator.report import Report
from cute_attn.kernels.ladder.heuristics import CONFIGS, spec_of
from cute_attn.kernels.ladder.spec import FmhaLadderSpec
from cute_attn.kernels.ladder.table import STEPS, find
from tests.conftest import assert_no_race
from tests.kernels.machine_code import assert_sound
from tests.ops.attention_cases import assert_agrees

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
PORTABLE = [step.number for step in STEPS if step.kernel is not None and not step.archs]
SMALL = {"tile_m": 32, "tile_n": 16, "num_warps": 2}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def check(spec: FmhaLadderSpec, arch: str, seqlens: tuple[int, ...]) -> Report:
    """Compile and run a step for some lengths, and compare each result with float64."""
    entry = cache.compile(find(spec.step).kernel, spec, arch=arch)
    assert_sound(entry)
    emulator = Emulator(schedule="random", seed=0)
    function = emulator.load(entry)
    for seqlen in seqlens:
        generator = torch.Generator().manual_seed(seqlen)
        shape = (2, seqlen, 3, spec.head_dim)
        q, k, v = (torch.randn(shape, generator=generator).to(DTYPES[spec.dtype]) for _ in range(3))
        o = torch.full_like(q, float("nan"))
        scale = 0.1
        function(q, k, v, o, scale)
        args: dict[str, Any] = {"q": q, "k": k, "v": v, "causal": spec.causal}
        assert_agrees(args | {"softmax_scale": scale}, o, None)
    assert_no_race(emulator)
    return emulator.report


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("step", PORTABLE)
def test_steps_agree_with_float64(step: int, arch: str):
    """Lengths below, at and past a tile, with rings of stages that go round. At head_dim 128 the
    two warps of a CTA copy 4 rows at a time, between which the swizzle flips."""
    dtype = ("float16", "bfloat16")[step % 2]
    head_dim = 128 if step == 5 else 64
    spec = spec_of(step, arch, dtype=dtype, head_dim=head_dim, causal=step != 2, **SMALL)
    report = check(spec, arch, (1, 32, 135))
    if step < 5:
        assert report.bank_conflicts > 4
    else:
        assert report.bank_conflicts == 1


@pytest.mark.slow
def test_a_nan_in_k_reaches_only_the_rows_that_see_it():
    spec = spec_of(5, "sm_90a", head_dim=64, dtype="bfloat16", **SMALL)
    function = Emulator().load(cache.compile(find(5).kernel, spec, arch="sm_90a"))
    q, k, v = torch.randn(3, 1, 70, 1, 64).to(torch.bfloat16)
    k[0, 50] = float("nan")
    o = torch.full_like(q, float("nan"))
    function(q, k, v, o, 0.125)
    assert torch.equal(o[0, :, 0].isnan().any(1), torch.arange(70) >= 50)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("step", PORTABLE)
def test_configurations_agree_with_float64(step: int, config: str, head_dim: int, causal: bool):
    arch = {"sm_90": "sm_90a"}.get(config, config.partition("-")[0] + "a" * (config != "sm_80"))
    dtype = ("float16", "bfloat16")[(step + causal) % 2]
    spec = spec_of(step, arch, config=config, dtype=dtype, head_dim=head_dim, causal=causal)
    check(spec, arch, (300,))


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_swizzled_steps_agree_with_float64(step: int):
    report = check(spec_of(step, "sm_90a", swizzled=True), "sm_90a", (200,))
    assert report.bank_conflicts == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiles", [(64, 64, 2, 1, 1), (64, 32, 4, 2, 3), (128, 32, 4, 4, 4), (256, 64, 8, 1, 2)]
)
@pytest.mark.parametrize("step", [3, 4, 5])
def test_tiles_and_stages_agree_with_float64(step: int, tiles: tuple[int, ...]):
    names = ("tile_m", "tile_n", "num_warps", "k_stages", "v_stages")
    spec = spec_of(step, "sm_90a", **dict(zip(names, tiles, strict=True)))
    check(spec, "sm_90a", (31, 257))
