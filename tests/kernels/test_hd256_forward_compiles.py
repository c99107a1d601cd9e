"""The specialisations of the hd256 forward compile for sm_100a, and spill no register."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from cute_attn import cache
from cute_attn.kernels.attention.spec import (
    DTYPES,
    KERNEL_SCHEDULERS,
    SINK_DTYPES,
    Hd256ForwardSpec,
)
from cute_attn.kernels.attention.table import HD256_FORWARD
from tests.kernels.machine_code import assert_sound

ARCH = "sm_100a"
BOOLS = (False, True)

EVERYTHING = [
    {
        "dtype": dtype,
        "scheduler": scheduler,
        "packed_heads": packed_heads,
        "window_left": window_left,
        "window_right": window_right,
        "softcap": softcap,
        "sink_dtype": sink_dtype,
        "varlen_q": varlen_q,
        "varlen_k": varlen_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "lse": lse,
    }
    for (
        dtype, scheduler, packed_heads, window_left, window_right, softcap, sink_dtype,
        varlen_q, varlen_k, seqused_q, seqused_k, lse,
    ) in itertools.product(
        DTYPES, KERNEL_SCHEDULERS, (1, 2, 4, 8, 16, 32, 64), BOOLS, BOOLS, BOOLS, SINK_DTYPES,
        BOOLS, BOOLS, BOOLS, BOOLS, BOOLS,
    )
    if varlen_q or not seqused_q
]  # fmt: skip


def spills(fields: dict[str, Any]) -> int:
    entry = cache.compile(HD256_FORWARD, Hd256ForwardSpec(**fields), arch=ARCH)
    return sum(use.spills for use in entry.kernels)


# With little and with everything there is to compile in: a dense call, which other tests have too.
PLAIN = next(
    fields
    for fields in EVERYTHING
    if fields["lse"] and (fields["dtype"], fields["scheduler"]) == ("bfloat16", "static")
)
FULL = {
    "dtype": "float16",
    "scheduler": "clc",
    "packed_heads": 8,
    "window_left": True,
    "window_right": True,
    "softcap": True,
    "sink_dtype": "float32",
    "varlen_q": True,
    "varlen_k": True,
    "seqused_q": True,
    "seqused_k": True,
    "lse": True,
}


SPLIT = {"split": True, "lse": True, "sink_dtype": "none"}


@pytest.mark.parametrize("fields", [PLAIN, FULL], ids=["plain", "full"])
def test_no_spills(fields: dict[str, Any]) -> None:
    assert spills(fields) == 0


@pytest.mark.parametrize("fields", [PLAIN, FULL], ids=["plain", "full"])
def test_the_machine_code_is_sound(fields: dict[str, Any]) -> None:
    assert_sound(cache.compile(HD256_FORWARD, Hd256ForwardSpec(**fields), arch=ARCH))


@pytest.mark.parametrize("fields", [PLAIN, FULL], ids=["plain", "full"])
def test_the_budget_of_shared_memory_is_what_is_launched(fields: dict[str, Any]) -> None:
    from cute_attn.kernels.attention.sm100.forward_hd256 import Sm100Hd256Forward

    spec = Hd256ForwardSpec(**fields)
    (use,) = cache.compile(HD256_FORWARD, spec, arch=ARCH).kernels
    assert use.dynamic_shared == Sm100Hd256Forward(spec).smem.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("fields", [PLAIN, FULL], ids=["plain", "full"])
def test_splits_do_not_spill(fields: dict[str, Any]) -> None:
    fields = fields | SPLIT
    assert spills(fields) == 0
    assert_sound(cache.compile(HD256_FORWARD, Hd256ForwardSpec(**fields), arch=ARCH))
    with pytest.raises(ValueError, match="split is True, it needs lse, and the sink is the comb"):
        Hd256ForwardSpec(**fields | {"lse": False})


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_no_spills_in_a_random_sample(part: int) -> None:
    """Forty of all the specialisations, others in every run; half of them with splits."""
    drawn = random.sample(EVERYTHING, 10)
    drawn[::2] = [fields | SPLIT for fields in drawn[::2]]
    assert [fields for fields in drawn if spills(fields)] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float32"),
        ("scheduler", "dynamic"),
        ("packed_heads", 3),
        ("packed_heads", 128),
        ("sink_dtype", None),
    ],
)
def test_a_spec_without_a_kernel_names_the_field(field: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=field):
        Hd256ForwardSpec(**{**PLAIN, field: value})
