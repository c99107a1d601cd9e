"""Specs of the softmax attention kernels. Importing this loads no compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..common.numbers import FLOAT32_MAX, LOG2_E
from ..common.spec import Spec

DTYPES = ("bfloat16", "float16")
SCHEDULERS = ("single", "static", "clc")
SINK_DTYPES = ("none", "bfloat16", "float16", "float32")

TILE_M = 256  # rows of a cluster's tile: two CTAs of 128
TILE_N = 128  # keys of a K/V tile
# A CTA's 128 rows have to be of two tokens at least: TMA leaves rows past the end of a packed
# sequence alone by an index past the size of the dimension of tokens (see `common/tma.py`).
MAX_PACKED_HEADS = 64

# Scores are multiplied by softmax_scale times log2(e), which has to be finite in float32.
LARGEST_SCALE = FLOAT32_MAX / LOG2_E * (1 - 2.0**-23)
# Scores are divided by a softcap before the tanh, and must not vanish there.
LARGEST_SOFTCAP = 2.0**64


@dataclass(frozen=True)
class Hd256ForwardSpec(Spec):
    """All that the SM100 forward for head_dim 256 has compiled in.

    Attributes:
        dtype: of q, k, v and o.
        scheduler: "single" (a cluster for each tile), "static" (persistent, every n-th tile) or
            "clc" (persistent, tiles taken from the hardware's queue).
        packed_heads: how many query heads of one K/V head share the rows of a tile; a power of two
            that divides the number of query heads for each K/V head. 1: rows are tokens.
        window_left, window_right: an argument bounds the keys that a query sees left or right of
            the diagonal. Causal is window_right with a bound of 0.
        softcap: scores go through softcap * tanh(score / softcap).
        sink_dtype: dtype of the learnable sink, or "none".
        varlen_q, varlen_k: q (and o, lse), or k and v, are packed sequences, with cu_seqlens.
        seqused_q, seqused_k: an argument says how many tokens of each sequence count.
        lse: the kernel writes the log-sum-exp.

    Raises:
        TypeError: a field does not hold what its annotation says.
        ValueError: no kernel serves a field's value; the message names the field.
    """

    ALLOWED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "dtype": DTYPES,
        "scheduler": SCHEDULERS,
        "sink_dtype": SINK_DTYPES,
        "packed_heads": tuple(2**n for n in range(MAX_PACKED_HEADS.bit_length())),
    }

    dtype: str
    scheduler: str
    packed_heads: int
    window_left: bool
    window_right: bool
    softcap: bool
    sink_dtype: str
    varlen_q: bool
    varlen_k: bool
    seqused_q: bool
    seqused_k: bool
    lse: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seqused_q and not self.varlen_q:
            raise ValueError("seqused_q is True, it needs varlen_q")

    @property
    def ragged_q(self) -> bool:
        """A sequence's rows may be followed by memory that is not its own."""
        return self.varlen_q

    @property
    def ragged_k(self) -> bool:
        """The same of keys."""
        return self.varlen_k or self.seqused_k
