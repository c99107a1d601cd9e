"""The specialisations of the SM90 forward compile, keep their products asynchronous, and spill no
register in the loop without a mask."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cute_attn import cache
from cute_attn.bench.ladder.machine_code import key_tile
from cute_attn.kernels.attention.configs import SM90, has_fp8, shapes
from cute_attn.kernels.attention.heuristics import forward_spec
from cute_attn.kernels.attention.sm90.forward import Sm90Forward
from cute_attn.kernels.attention.spec import GATHERED, Sm90ForwardSpec
from cute_attn.kernels.attention.table import SM90_FORWARD
from tests.kernels.machine_code import assert_sound

ARCH = "sm_90a"
FLAGS = (
    "window_left", "window_right", "softcap", "varlen_q", "varlen_k", "seqused_q", "seqused_k",
    "lse", "split", "few",
)  # fmt: skip
PLAIN: dict[str, Any] = dict.fromkeys(FLAGS, False) | {
    "dtype": "bfloat16", "scheduler": "static", "packed_heads": 1, "sink_dtype": "none",
    "page_size": None,
}  # fmt: skip
WINDOW = {"window_left": True, "window_right": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"window_right": True, "lse": True},
    "window": WINDOW | {"sink_dtype": "bfloat16"},
    "capped": {"softcap": True, "window_right": True},
    "training": WINDOW | {"varlen_q": True, "varlen_k": True, "lse": True},
    "everything": PLAIN | dict.fromkeys(FLAGS[:-2], True) | {
        "dtype": "float16", "sink_dtype": "float32"
    },
    "prefill in pages": {
        "window_right": True, "varlen_q": True, "seqused_k": True, "page_size": 32,
    },
    "prefill in pages of one row": {
        "window_right": True, "varlen_q": True, "seqused_k": True, "page_size": 1,
    },
    "decode in pages of one row": {
        "window_right": True, "varlen_q": True, "seqused_k": True, "page_size": 1, "few": True,
        "packed_heads": 8,
    },
    "decode": {
        "window_right": True, "varlen_q": True, "seqused_k": True, "page_size": 32, "few": True,
        "packed_heads": 8,
    },
    "decode, split": {
        "window_right": True, "varlen_q": True, "seqused_k": True, "page_size": 64, "few": True,
        "packed_heads": 8, "split": True,
    },
    "fp8 decode": {
        "seqused_k": True, "page_size": 64, "few": True, "packed_heads": 8, "pieces": True,
        "fp8": "float8_e4m3fn", "k_descale": True, "v_descale": True,
    },
    "fp8 prefill": {
        "window_right": True, "varlen_q": True, "seqused_k": True, "page_size": 64,
        "fp8": "float8_e5m2", "k_descale": True, "v_descale": True,
    },
}  # fmt: skip
# The quick suite compiles what another quick test launches.
SPECS = [
    pytest.param(
        forward_spec(ARCH, head_dim, head_dim_v, **PLAIN | fields),
        id=f"{head_dim}-{name}",
        marks=[] if (head_dim, name) == (128, "causal") else pytest.mark.slow,
    )
    for head_dim, head_dim_v in shapes("forward", SM90)
    for name, fields in KINDS.items()
    if "fp8" not in fields or has_fp8(ARCH, head_dim, head_dim_v)
]  # fmt: skip
specialisations = pytest.mark.parametrize("spec", SPECS)


@specialisations
def test_the_loop_without_a_mask(spec: Sm90ForwardSpec) -> None:
    found = key_tile(cache.compile(SM90_FORWARD, spec, arch=ARCH))
    counts = Counter(i.base for i in found)
    assert counts["STL"] == counts["LDL"] == 0
    # Short of registers, the assembler waits for every instruction of a product.
    waits = sum(i.opcode.startswith("WARPGROUP.DEPBAR") for i in found)
    assert counts["HGMMA"] >= 12 and waits == 2


@specialisations
def test_spills_elsewhere(spec: Sm90ForwardSpec) -> None:
    (use,) = cache.compile(SM90_FORWARD, spec, arch=ARCH).kernels
    masked = spec.window_right or spec.window_left
    most = {64: 256, 256: 16, 320: 160, 576: 32}.get(spec.head_dim, 0)
    allowed = most if masked and spec.tile_m > 64 else 0
    if spec.page_rows == GATHERED and spec.head_dim == 256:  # 8 registers less for the consumers
        allowed += 32
    assert use.spills <= allowed


@specialisations
def test_warpgroups_trade_the_registers_that_the_cta_has(spec: Sm90ForwardSpec) -> None:
    """Otherwise the consumers wait for registers for ever."""
    kernel = Sm90Forward(spec)
    (use,) = cache.compile(SM90_FORWARD, spec, arch=ARCH).kernels
    load, consumers = kernel.registers
    assert load + kernel.warpgroups * consumers <= (kernel.warpgroups + 1) * use.registers


@specialisations
def test_the_machine_code_is_sound(spec: Sm90ForwardSpec) -> None:
    assert_sound(cache.compile(SM90_FORWARD, spec, arch=ARCH))


@specialisations
def test_the_budget_of_shared_memory_is_what_is_launched(spec: Sm90ForwardSpec) -> None:
    (use,) = cache.compile(SM90_FORWARD, spec, arch=ARCH).kernels
    assert use.dynamic_shared == Sm90Forward(spec).smem.nbytes
