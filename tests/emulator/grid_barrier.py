"""A kernel whose CTAs wait for each other, in a cooperative launch."""

from __future__ import annotations

from cutlass import Int32, cute

CTAS = 6


@cute.kernel
def kernel(counter: cute.Tensor, seen: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    if thread == 0:
        cute.arch.atomic_add(counter.iterator, Int32(1), sem="acq_rel", scope="gpu")
        arrived = Int32(0)
        while arrived < CTAS:
            arrived = cute.arch.atomic_add(counter.iterator, Int32(0), sem="acq_rel", scope="gpu")
        seen[cta] = arrived


@cute.jit
def run(counter: cute.Tensor, seen: cute.Tensor):
    kernel(counter, seen).launch(grid=[CTAS, 1, 1], block=[32, 1, 1], cooperative=True)
