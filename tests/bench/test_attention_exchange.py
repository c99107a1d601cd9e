"""The exchange between CTAs that `bench attention-exchange` times hands over every tile."""

from __future__ import annotations

import pytest
import torch

from cute_attn import launch
from cute_attn.bench.attention.exchange import KERNEL
from cute_attn.emulation import emulated


@pytest.mark.parametrize("stages", [1, 2])
def test_every_cta_finishes(stages: int) -> None:
    from cute_attn.bench.attention.exchange_kernel import CLUSTER, ExchangeSpec

    clocks = torch.full((2, CLUSTER), -1, dtype=torch.int64)
    with emulated("sm_90a"):  # it finds races, and the kernel traps on a wrong tile
        launch.get_for(clocks.device, KERNEL, ExchangeSpec(stages))(clocks, 5)
    assert bool((clocks > 0).all())
