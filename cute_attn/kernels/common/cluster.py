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
    """Prefetch TMA descriptors and initialise mbarriers. One warp calls this; a barrier of the CTA
    or the cluster must follow."""
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
    """Set up a cluster. The load warp prefetches TMA descriptors and initialises mbarriers; the MMA
    warp allocates tensor memory. On return, every CTA may use descriptors, mbarriers and tensor
    memory.

    Args:
        address: word in shared memory to which the hardware writes the tensor memory's address.
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
    """Free tensor memory after a cluster barrier, since by then no CTA signals another CTA's
    mbarriers or reads another CTA's shared memory."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if warp == mma.warps[0]:
        memory.free()
