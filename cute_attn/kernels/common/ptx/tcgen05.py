"""Fences that order tensor memory accesses around a synchronisation of threads (sm_100)."""

from __future__ import annotations

from cutlass._mlir.dialects import nvvm


def tcgen05_fence_before() -> None:
    """Order this thread's earlier accesses to tensor memory before its next arrival."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def tcgen05_fence_after() -> None:
    """Order this thread's later accesses to tensor memory after its last wait."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
