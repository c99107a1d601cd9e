"""The sequences of one side of attention, queries or keys: where each starts, how long it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass

from ..common.carried import Carried


@dataclass(frozen=True)
class Sequences(Carried):
    """Sequences of one length, or packed ones, of which all tokens count or only some.

    Attributes:
        tokens: of each sequence; of packed ones, of all together.
        cu_seqlens: where each packed sequence starts, and the last one ends.
        seqused: how many tokens of each sequence count.
    """

    tokens: Any
    cu_seqlens: Any = None
    seqused: Any = None

    def start(self, sequence: Any) -> Any:
        """Row of a sequence's first token among the rows of its tensor."""
        return 0 if self.cu_seqlens is None else self.cu_seqlens[sequence]

    def length(self, sequence: Any) -> Any:
        """Tokens of a sequence, at most as many as it has rows. Not positive: there are none."""
        length = self.tokens
        if self.cu_seqlens is not None:
            length = self.cu_seqlens[sequence + 1] - self.cu_seqlens[sequence]
        if self.seqused is not None:
            length = cutlass.min(length, self.seqused[sequence])
        return length
