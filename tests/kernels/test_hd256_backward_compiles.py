"""The specialisations of the hd256 dQ and dK/dV kernels compile for sm_100a, and spill no
register."""

from __future__ import annotations

import importlib
import itertools
import random
from typing import Any

import pytest

from cute_attn import cache
from cute_attn.kernels.attention.spec import DTYPES, KERNEL_SCHEDULERS, Hd256BackwardSpec
from cute_attn.kernels.attention.table import HD256_BACKWARD_DKDV, HD256_BACKWARD_DQ
from tests.kernels.machine_code import assert_sound, machine_code

ARCH = "sm_100a"
BOOLS = (False, True)
KERNELS = {"dq": HD256_BACKWARD_DQ, "dkdv": HD256_BACKWARD_DKDV}
PARTIAL = {"dq": (False,), "dkdv": BOOLS}

FIELDS = (
    "dtype", "scheduler", "window_left", "window_right", "softcap", "varlen_q", "varlen_k",
    "seqused_q", "seqused_k", "partial",
)  # fmt: skip


def everything(kernel: str) -> list[dict[str, Any]]:
    values = (DTYPES, KERNEL_SCHEDULERS, *[BOOLS] * 7, PARTIAL[kernel])
    found = [dict(zip(FIELDS, drawn, strict=True)) for drawn in itertools.product(*values)]
    return [fields for fields in found if fields["varlen_q"] or not fields["seqused_q"]]


# With little and with everything there is to compile in: a causal call, which other tests have too.
PLAIN: dict[str, Any] = dict.fromkeys(FIELDS, False) | {
    "dtype": "bfloat16",
    "scheduler": "static",
    "window_right": True,
}
FULL: dict[str, Any] = dict.fromkeys(FIELDS, True) | {"dtype": "float16", "scheduler": "clc"}
EXTREMES = {
    "dq-plain": ("dq", PLAIN),
    "dq-full": ("dq", {**FULL, "partial": False}),
    "dkdv-plain": ("dkdv", PLAIN),
    "dkdv-full": ("dkdv", FULL),
}
extremes = pytest.mark.parametrize(("kernel", "fields"), EXTREMES.values(), ids=EXTREMES)


def compiled(kernel: str, fields: dict[str, Any]) -> cache.Entry:
    return cache.compile(KERNELS[kernel], Hd256BackwardSpec(**fields), arch=ARCH)


def spills(kernel: str, fields: dict[str, Any]) -> int:
    return sum(use.spills for use in compiled(kernel, fields).kernels)


@extremes
def test_no_spills(kernel: str, fields: dict[str, Any]) -> None:
    assert spills(kernel, fields) == 0


@extremes
def test_the_machine_code_is_sound(kernel: str, fields: dict[str, Any]) -> None:
    assert_sound(compiled(kernel, fields))


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_are_rounded_before_lse_is_subtracted(kernel: str) -> None:
    """A score and the log-sum-exp that it determines must cancel. Packed FMAs would be products
    that the assembler fused with the subtraction: without a softcap the kernels have none."""
    assert "FFMA2" not in machine_code(compiled(kernel, PLAIN))


@extremes
def test_the_budget_of_shared_memory_is_what_is_launched(
    kernel: str, fields: dict[str, Any]
) -> None:
    module, _, name = KERNELS[kernel].target.partition(":")
    made = getattr(importlib.import_module(module), name)(Hd256BackwardSpec(**fields))
    (use,) = compiled(kernel, fields).kernels
    assert use.dynamic_shared == made.smem.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("part", range(4))
def test_no_spills_in_a_random_sample(kernel: str, part: int) -> None:
    """Forty of all the specialisations of each kernel, others in every run."""
    drawn = random.sample(everything(kernel), 10)
    assert [fields for fields in drawn if spills(kernel, fields)] == []


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "float32"), ("scheduler", "dynamic"), ("softcap", None)]
)
def test_a_spec_without_a_kernel_names_the_field(field: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=field):
        Hd256BackwardSpec(**{**PLAIN, field: value})


def test_dq_has_no_partial_sums() -> None:
    from cute_attn.kernels.attention.sm100.backward_hd256_dq import Sm100Hd256Dq

    with pytest.raises(ValueError, match="partial"):
        Sm100Hd256Dq(Hd256BackwardSpec(**{**PLAIN, "partial": True}))
