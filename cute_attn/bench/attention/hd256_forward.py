"""Machine code of the forward at head_dim 256, ours and FlashAttention-4's, by specialisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels.attention.spec import Hd256ForwardSpec
from ...kernels.attention.table import HD256_FORWARD
from . import programs
from .programs import ARCH, Program

# FlashAttention-4 pull request 2454, B200 at 1965 MHz, head_dim 256, bf16, 8 heads, non-causal,
# half of the exponentials on the FMA units: TFLOP/s by sequence length.
PUBLISHED_TFLOPS = {4096: 1488, 8192: 1608, 16384: 1680, 32768: 1726}


@dataclass(frozen=True)
class Specialisation:
    """A specialisation of our kernel, and FlashAttention-4's specialisation to compare with.

    Attributes:
        ours: fields of our spec that differ from the plain spec.
        theirs: options of FlashAttention-4's forward; None if FlashAttention-4 has no such
            specialisation.
        beside: if `theirs` is None, another specialisation; its `theirs` is compared with `ours`.
    """

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any] | None = None
    beside: str = ""


_VARLEN = {"varlen_q": True, "varlen_k": True}
_LENGTHS = {"seqlens_q": (256, 512)}
_LOCAL = {"window_left": True, "window_right": True}

FORWARD = (
    Specialisation("non-causal", {}, {}),
    Specialisation("causal", {"window_right": True}, {"causal": True}),
    Specialisation("local", _LOCAL, {"window": (256, 0)}),
    Specialisation("varlen", _VARLEN, _LENGTHS),
    Specialisation(
        "varlen causal", {**_VARLEN, "window_right": True}, {**_LENGTHS, "causal": True}
    ),
    Specialisation("softcap", {"softcap": True}, {"softcap": 30.0}),
    Specialisation("sink", {"sink_dtype": "bfloat16"}, {"learnable_sink": True}),
    Specialisation("fp16", {"dtype": "float16"}, {"dtype": "float16"}),
    Specialisation("packed heads", {"packed_heads": 8}, beside="non-causal"),
    Specialisation("without lse", {"lse": False}, {"lse": False}),
    Specialisation("one tile a cluster", {"scheduler": "single"}, beside="non-causal"),
    Specialisation("clc", {"scheduler": "clc"}, beside="non-causal"),
    Specialisation("clc causal", {"scheduler": "clc", "window_right": True}, beside="causal"),
    Specialisation(
        "clc varlen causal",
        {**_VARLEN, "scheduler": "clc", "window_right": True},
        beside="varlen causal",
    ),
)
SHORT = ("non-causal", "causal")

PLAIN = {
    "dtype": "bfloat16",
    "scheduler": "static",
    "packed_heads": 1,
    "window_left": False,
    "window_right": False,
    "softcap": False,
    "sink_dtype": "none",
    "varlen_q": False,
    "varlen_k": False,
    "seqused_q": False,
    "seqused_k": False,
    "lse": True,
}


# -- compiling ------------------------------------------------------------------------------------


def our_program(specialisation: Specialisation) -> Program:
    """Compile our kernel, or take it from the cache: see `programs.our_program`."""
    spec = Hd256ForwardSpec(**{**PLAIN, **specialisation.ours})
    return programs.our_program(HD256_FORWARD, spec, specialisation.name)


def their_programs(
    specialisations: Sequence[Specialisation], directory: Path
) -> tuple[list[Program], list[str]]:
    """FlashAttention-4's programs: see `programs.their_programs`."""
    from ..peers.flash_attention_4 import forward  # imports torch

    requests = [
        (s.name, forward(arch=ARCH, head_dim=256, seqlen_q=512, **s.theirs))
        for s in specialisations
        if s.theirs is not None
    ]
    return programs.their_programs(requests, directory)
