"""Cache policies: how soon L2 evicts the lines of an access."""

from __future__ import annotations

from cutlass import Int64

from .asm import asm


def cache_policy(priority: str) -> Int64:
    """Return the `cache_policy` of `cute.copy` for lines that L2 evicts with this priority:
    "evict_first", "evict_normal", "evict_last" or "evict_unchanged"."""
    return asm(f"createpolicy.fractional.L2::{priority}.b64 $0, 1.0;", [Int64], [])
