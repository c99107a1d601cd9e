"""Named barriers of a CTA."""

from __future__ import annotations

from cutlass import Int32

from .asm import asm


def meet(barrier: Int32, threads: int) -> None:
    """Wait at a named barrier for `threads` threads, whose warps may come from several places in
    the code. `cute.arch.barrier` is `.aligned`, so synccheck would report such warps as
    divergent."""
    asm(f"barrier.sync $0, {threads};", [], [Int32(barrier)], memory=True)
