"""The specialisations of the SM90 dQ and dK/dV kernels compile, spill no register, and keep their
products asynchronous."""

from __future__ import annotations

import importlib
import itertools
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from cute_attn import cache
from cute_attn.kernels.attention import table
from cute_attn.kernels.attention.configs import SM90, shapes
from cute_attn.kernels.attention.heuristics import backward_spec, has_fused_dq
from cute_attn.kernels.attention.spec import DTYPES, Sm90BackwardSpec
from tests.kernels.machine_code import assert_sound, machine_code

ARCH = "sm_90a"
HEAD_DIM_V = dict(shapes("backward_dkdv", SM90))  # by head_dim
BOOLS = (False, True)
PARTIAL = {
    "dq": (False,), "dkdv": BOOLS, "fused": BOOLS, "fused in order": BOOLS, "ds_dq": BOOLS,
    "dkdv with ds": BOOLS,
}  # fmt: skip
FLAGS = (
    "window_left", "window_right", "softcap", "varlen_q", "varlen_k", "seqused_q", "seqused_k",
)  # fmt: skip


def definition(kernel: str, head_dim: int) -> cache.KernelDef:
    return table.find(
        f"backward_{kernel.partition(' ')[0]}", ARCH, head_dim, HEAD_DIM_V[head_dim]
    ).kernel


def exists(kernel: str, head_dim: int, *, softcap: bool) -> bool:
    if kernel in ("ds_dq", "dkdv with ds"):
        return table.has("backward_ds_dq", ARCH, head_dim, HEAD_DIM_V[head_dim])
    return "fused" not in kernel or has_fused_dq(
        ARCH, head_dim, HEAD_DIM_V[head_dim], softcap=softcap
    )


def made(kernel: str, spec: Sm90BackwardSpec) -> Any:
    module, _, name = definition(kernel, spec.head_dim).target.partition(":")
    return getattr(importlib.import_module(module), name)(spec)


def compiled(kernel: str, spec: Sm90BackwardSpec) -> cache.Entry:
    return cache.compile(definition(kernel, spec.head_dim), spec, arch=ARCH)


def spec(kernel: str, head_dim: int, **fields: Any) -> Sm90BackwardSpec:
    plain = dict.fromkeys((*FLAGS, "partial"), False) | {"dtype": "bfloat16"}
    chosen: dict[str, Any] = {
        "of_keys": not kernel.endswith("dq"),
        "fused": "fused" in kernel,
        "ds": kernel in ("ds_dq", "dkdv with ds"),
    }
    if kernel == "fused in order":
        alternates = fields.get("window_right") and not fields.get("window_left")
        chosen["order"] = "alternating" if alternates else "rising"
    return backward_spec(  # type: ignore[return-value]
        ARCH, head_dim, HEAD_DIM_V[head_dim], **chosen, **{**plain, "scheduler": "static", **fields}
    )


def everything(kernel: str, head_dim: int) -> list[Sm90BackwardSpec]:
    names = ("dtype", *FLAGS, "partial")
    values = (DTYPES, *[BOOLS] * len(FLAGS), PARTIAL[kernel])
    drawn = (dict(zip(names, some, strict=True)) for some in itertools.product(*values))
    return [
        spec(kernel, head_dim, **fields)
        for fields in drawn
        if exists(kernel, head_dim, softcap=fields["softcap"])
    ]


FULL = dict.fromkeys(FLAGS, True) | {"dtype": "float16"}
UNCAPPED = FULL | {"softcap": False}
# The quick suite compiles what a quick test of gradients launches.
PACKED = {"window_right": True, "varlen_q": True, "varlen_k": True}
EXTREMES = [
    pytest.param(
        kernel, spec(kernel, head_dim, **fields), id=f"{kernel}-{head_dim}-{name}",
        marks=[]
        if "fused" not in kernel and (head_dim, name) == (128, "packed")
        else pytest.mark.slow,
    )
    for kernel in PARTIAL
    for head_dim in HEAD_DIM_V
    for name, fields in (
        ("plain", {}), ("packed", PACKED), ("full", FULL),
        *([("full, partial", {**FULL, "partial": True})] if True in PARTIAL[kernel] else []),
        *([("uncapped", {**UNCAPPED, "partial": True})] if "fused" in kernel else []),
    )
    if exists(kernel, head_dim, softcap=fields.get("softcap", False))
]  # fmt: skip
extremes = pytest.mark.parametrize(("kernel", "spec"), EXTREMES)


def problems(kernel: str, spec: Sm90BackwardSpec) -> list[str]:
    entry = compiled(kernel, spec)
    found = []
    if spilled := sum(use.spills for use in entry.kernels):
        found.append(f"{spilled} bytes spilled")
    code = machine_code(entry)
    products, waits = (len(re.findall(name, code)) for name in ("HGMMA", "WARPGROUP.DEPBAR"))
    # Short of registers, the assembler waits for every product before it starts the next.
    if not products or waits > products // 2:
        found.append(f"{waits} waits for {products} products")
    return found


@extremes
def test_no_spills_and_asynchronous_products(kernel: str, spec: Sm90BackwardSpec) -> None:
    assert problems(kernel, spec) == []


@extremes
def test_the_machine_code_is_sound(kernel: str, spec: Sm90BackwardSpec) -> None:
    assert_sound(compiled(kernel, spec))


@extremes
def test_the_budget_of_shared_memory_is_what_is_launched(
    kernel: str, spec: Sm90BackwardSpec
) -> None:
    (use,) = compiled(kernel, spec).kernels
    assert use.dynamic_shared == made(kernel, spec).smem.nbytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "head_dim"),
    [
        (kernel, head_dim)
        for kernel in PARTIAL
        for head_dim in HEAD_DIM_V
        if exists(kernel, head_dim, softcap=False)
    ],
)
def test_no_problem_in_a_random_sample(kernel: str, head_dim: int) -> None:
    """Others in every run."""
    drawn = random.sample(everything(kernel, head_dim), 8)
    assert [(one, found) for one in drawn if (found := problems(kernel, one))] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "float32"), ("scheduler", "static"), ("head_dim", 96), ("softcap", None)],
)
def test_a_spec_without_a_kernel_names_the_field(field: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=field):
        replace(spec("dq", 128), **{field: value})


@pytest.mark.parametrize(
    ("kernel", "head_dim", "field", "value"),
    [
        ("dq", 128, "partial", True),
        ("dq", 128, "tile_m", 64),
        ("dkdv", 128, "tile_n", 64),
        ("dkdv", 128, "tile_m", 96),
        ("dkdv", 256, "tile_n", 64),
        ("dkdv", 256, "tile_m", 128),
        ("ds_dq", 256, "tile_m", 128),
        ("ds_dq", 256, "tile_n", 128),
        ("fused", 128, "tile_m", 32),
    ],
)
def test_a_kernel_refuses_what_it_cannot_do(
    kernel: str, head_dim: int, field: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=field):
        made(kernel, replace(spec(kernel, head_dim), **{field: value}))
