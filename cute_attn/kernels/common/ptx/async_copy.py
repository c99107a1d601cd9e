"""Asynchronous copies to shared memory: `cp.async`, and `cp.async.bulk` (sm_90 and newer)."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64

from .asm import asm


def copy_async(shared: Any, source: Any, present: Any) -> None:
    """Start a `cp.async` of 16 bytes from a 64-bit global address; where `present` is false, write
    zeros and read nothing. Commit and wait with `cute.arch.cp_async_commit_group`,
    `_wait_group`."""
    nbytes = Int32(16) if present is True else cutlass.select_(present, Int32(16), Int32(0))
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    asm(text, [], [Int32(shared), Int64(source), Int32(nbytes)], memory=True)


def copy_bulk(shared: Any, source: Any, nbytes: int, barrier: Any) -> None:
    """`cp.async.bulk` (sm_90 and newer) of contiguous bytes from a 64-bit global address, counted
    by the mbarrier at a shared address. By one thread; everything aligned to 16 bytes."""
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[$0], [$1], {nbytes}, [$2];"
    )
    asm(text, [], [Int32(shared), Int64(source), Int32(barrier)], memory=True)


def copies_arrive(barrier: Any) -> None:
    """Arrive once at the mbarrier at a shared address, as soon as this thread's `copy_async` so far
    are done."""
    asm("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", [], [Int32(barrier)], memory=True)
