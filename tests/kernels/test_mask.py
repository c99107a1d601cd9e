"""Masks of packed words, in the emulator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cute_attn import cache
from cute_attn.cache import KernelDef
from cute_attn.emulator import Emulator

sys.path.insert(0, str(Path(__file__).parent))
from mask_kernel import THREADS, WORDS, MaskSpec

MASK = KernelDef(name="mask_words", target="mask_kernel:MaskWords")
COLUMNS = 2 * WORDS


@pytest.mark.parametrize("bounded_below", [False, True])
def test_columns_outside_of_the_bounds_become_0(bounded_below: bool) -> None:
    """Every pair of bounds in and around the row, and the largest."""
    places = [-(2**31) + 32, -COLUMNS, *range(-2, COLUMNS + 3), 3 * COLUMNS, 2**31 - 65]
    low, high = torch.cartesian_prod(torch.tensor(places), torch.tensor(places)).T
    count = -(-low.numel() // THREADS) * THREADS
    low, high = (torch.cat([x, x.new_zeros(count - x.numel())]) for x in (low, high))
    values = torch.randint(1, 2**15, (count, COLUMNS), dtype=torch.int16)
    words = values.clone().view(torch.int32)

    entry = cache.compile(MASK, MaskSpec(bounded_below), arch="sm_100a")
    Emulator().load(entry)(low.int(), high.int(), words)

    columns = torch.arange(COLUMNS)
    visible = columns < high[:, None]
    if bounded_below:
        visible &= columns >= low[:, None]
    assert torch.equal(words.view(torch.int16), torch.where(visible, values, 0))
