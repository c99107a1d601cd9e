"""A CTA's place in its cluster (sm_90 and newer)."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from .asm import asm


def cta_rank() -> Any:
    """Read the CTA's rank in its cluster, anew at each use: kept in a register it would spill."""
    return cute.arch.make_warp_uniform(
        asm("mov.u32 $0, %cluster_ctarank;", [Int32], [], volatile=True)
    )
