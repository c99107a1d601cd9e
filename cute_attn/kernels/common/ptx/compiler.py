"""What keeps the compiler from an optimisation that costs more than it saves."""

from __future__ import annotations

from typing import Any

from .asm import asm


def keep_branch() -> None:
    """Keep the branch that this stands in a branch. The compiler would turn short ones into selects
    or predicated instructions, which every warp pays for; a performance-monitor trigger (number 7,
    which nobody counts) cannot be predicated."""
    asm("pmevent 7;", [], [], volatile=True)


def opaque(x: Any) -> Any:
    """Return the same number, about which the compiler knows nothing."""
    return asm("mov.b32 $0, $1;", [type(x)], [x], memory=True)
