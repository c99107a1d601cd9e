"""Starts and lengths of the sequences of one side of attention, queries or keys."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common.carried import Carried


@dataclass(frozen=True)
class Sequences(Carried):
    """Sequences of equal length, or packed sequences; `seqused` may limit the tokens that are used.

    Attributes:
        tokens: tokens of each sequence, or of all packed sequences together.
        cu_seqlens: the starts of packed sequences, followed by the end of the last sequence.
        seqused: number of leading tokens of each sequence that are used.
    """

    tokens: Int32
    cu_seqlens: cute.Tensor | None = None
    seqused: cute.Tensor | None = None

    def batch(self, x: cute.Tensor) -> Int32:
        """The number of sequences; `x` is a tensor whose rows are the sequences' tokens."""
        return x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def start(self, sequence: Int32) -> Int32:
        """Row of a sequence's first token among the rows of its tensor."""
        return 0 if self.cu_seqlens is None else self.cu_seqlens[sequence]

    def length(self, sequence: Int32) -> Int32:
        """Number of used tokens of a sequence, at most its rows. A value <= 0 means none."""
        length = self.tokens
        if self.cu_seqlens is not None:
            length = self.cu_seqlens[sequence + 1] - self.cu_seqlens[sequence]
        if self.seqused is not None:
            length = cutlass.min(length, self.seqused[sequence])
        return length
