"""Instructions that prevent compiler optimisations that cost more than they save."""

from __future__ import annotations

from typing import TypeVar

from cutlass import Numeric

from .asm import asm

Value = TypeVar("Value", bound=Numeric)


def keep_branch() -> None:
    """Keep the enclosing branch a branch. The compiler would turn a short branch into selects or
    predicated instructions, which every warp executes. The compiler cannot predicate `pmevent`, a
    trigger for profilers; event 7 is unused.
    """
    asm("pmevent 7;", [], [], volatile=True)


def opaque(x: Value) -> Value:
    """Return x as a value that the compiler cannot fold or reason about."""
    return asm("mov.b32 $0, $1;", [type(x)], [x], memory=True)
