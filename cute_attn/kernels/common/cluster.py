"""The first and the last steps of a warp-specialised kernel: descriptors, mbarriers and, on SM100,
tensor memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from .pipeline import Barriers, Role
from .ptx.tcgen05 import tcgen05_fence_after, tcgen05_fence_before
from .tmem import TensorMemory


def prepare(descriptors: tuple[cute.CopyAtom, ...], barriers: Barriers) -> None:
    """Prefetch TMA descriptors and initialise mbarriers, by one warp; a barrier of the CTA, or of
    its cluster, has to follow."""
    for descriptor in descriptors:
        cpasync.prefetch_descriptor(descriptor)
    with cute.arch.elect_one():
        barriers.init()
    cute.arch.mbarrier_init_fence()


@cute.jit
def start_cluster(
    warp: Int32,
    load: cutlass.Constexpr[Role],
    mma: cutlass.Constexpr[Role],
    descriptors: tuple[cute.CopyAtom, ...],
    barriers: Barriers,
    memory: cutlass.Constexpr[TensorMemory],
    address: cute.Pointer,
) -> None:
    """Prefetch TMA descriptors and initialise mbarriers, by the load warp; allocate tensor memory,
    by the MMA warp; all are ready in every CTA on return.

    Args:
        address: in shared memory, for the hardware to write the address of tensor memory to.
    """
    if warp == load.warps[0]:
        prepare(descriptors, barriers)
    if warp == mma.warps[0]:
        memory.allocate(address)
        tcgen05_fence_before()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    tcgen05_fence_after()


@cute.jit
def finish_cluster(
    warp: Int32, mma: cutlass.Constexpr[Role], memory: cutlass.Constexpr[TensorMemory]
) -> None:
    """Free tensor memory, once no CTA may still signal another's mbarriers or read its shared
    memory."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if warp == mma.warps[0]:
        memory.free()
