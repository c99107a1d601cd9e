"""The Spec of `zero_unused`. Importing this loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from .spec import Spec


@dataclass(frozen=True)
class ZeroUnusedSpec(Spec):
    """The compile-time parameters of the kernel that zeroes rows of no sequence.

    Attributes:
        varlen: the rows are packed sequences, with cu_seqlens.
        seqused: the argument `seqused` gives the number of used tokens of each sequence.

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: no row can be unused.
    """

    varlen: bool
    seqused: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.varlen or self.seqused):
            raise ValueError("varlen and seqused are False, so that every row is used")
