"""The only place that chooses the ladder's tiles; docs/ladder.md has the measurements."""

from __future__ import annotations

from typing import NamedTuple

from ..common.spec import smem_bytes
from .spec import ELEMENT_BYTES, FmhaLadderSpec

RESERVED_BYTES = 1024  # shared memory that the system takes per CTA
K_STAGES, V_STAGES = 2, 4  # at most, from step 3 on
PIPELINED, OCCUPANCY, SWIZZLED = 3, 4, 5  # the first steps with these ideas


class Config(NamedTuple):
    """Tiles by name; the published ladder's tiles for sm_100 and sm_120 are among them."""

    tile_m: int
    tile_n: int
    num_warps: int
    occupancy: int


CONFIGS = {
    "sm_80": Config(128, 64, 4, 2),
    "sm_90": Config(128, 64, 4, 2),
    "sm_100": Config(256, 128, 8, 1),
    "sm_100-2": Config(128, 128, 4, 2),
    "sm_120": Config(64, 64, 4, 2),
}

# Steps from 6 on, which need Hopper: by step, with the number of stages of K, and of V.
HOPPER_CONFIGS = {
    6: (Config(128, 64, 8, 1), 2),
    7: (Config(64, 128, 4, 2), 1),
    8: (Config(128, 128, 8, 1), 2),
    9: (Config(128, 128, 8, 1), 2),
    10: (Config(128, 128, 8, 1), 2),
}


def config_of(arch: str) -> str:
    """The name of the configuration for a target such as "sm_90a"."""
    name = arch.rstrip("af")
    return {"sm_103": "sm_100", "sm_90": "sm_90", "sm_100": "sm_100", "sm_80": "sm_80"}.get(
        name, "sm_120"
    )


def stages(tile_m: int, tile_n: int, head_dim: int, occupancy: int, arch: str) -> tuple[int, int]:
    """Stages of K and of V: as many of 2 and 4 as fit with `occupancy` CTAs on an SM. Only powers
    of two: otherwise the place of a tile in its ring would take a division."""
    tile = tile_n * head_dim * ELEMENT_BYTES
    limit = (smem_bytes(arch) + RESERVED_BYTES) // occupancy - RESERVED_BYTES
    room = (limit - tile_m * head_dim * ELEMENT_BYTES) // tile
    k_stages = K_STAGES if room >= 2 * K_STAGES else 1
    fitting = (n for n in (V_STAGES, V_STAGES // 2) if n <= room - k_stages)
    return k_stages, next(fitting, 1)


def spec_of(
    step: int,
    arch: str,
    *,
    dtype: str = "float16",
    head_dim: int = 128,
    causal: bool = True,
    config: str | None = None,
    tile_m: int | None = None,
    tile_n: int | None = None,
    num_warps: int | None = None,
    occupancy: int | None = None,
    k_stages: int | None = None,
    v_stages: int | None = None,
    swizzled: bool | None = None,
) -> FmhaLadderSpec:
    """The spec of a step on `arch`; None leaves a value to the configuration. Named configurations
    are for the portable steps; each later step has a configuration of its own.

    Raises:
        ValueError: an unknown configuration, or values that no kernel supports.
    """
    name = config_of(arch) if config is None else config
    if name not in CONFIGS:
        raise ValueError(f"config is {name!r}, must be one of {tuple(CONFIGS)}")
    chosen, hopper_stages = HOPPER_CONFIGS.get(step, (CONFIGS[name], 0))
    tile_m = chosen.tile_m if tile_m is None else tile_m
    tile_n = chosen.tile_n if tile_n is None else tile_n
    if occupancy is None:
        occupancy = chosen.occupancy if step >= OCCUPANCY else 1
    fit = (1, 1)
    if hopper_stages:
        fit = (hopper_stages, hopper_stages)
    elif step >= PIPELINED:
        fit = stages(tile_m, tile_n, head_dim, occupancy, arch)
    return FmhaLadderSpec(
        step=step,
        dtype=dtype,
        head_dim=head_dim,
        causal=causal,
        tile_m=tile_m,
        tile_n=tile_n,
        num_warps=chosen.num_warps if num_warps is None else num_warps,
        k_stages=fit[0] if k_stages is None else k_stages,
        v_stages=fit[1] if v_stages is None else v_stages,
        occupancy=occupancy,
        swizzled=step >= SWIZZLED if swizzled is None else swizzled,
    )
