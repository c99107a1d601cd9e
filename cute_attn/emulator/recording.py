"""What a launch did, step by step, for models of time."""

from __future__ import annotations

from dataclasses import dataclass

from .program import Program

# The kinds of steps, in the order of STEP_RUN and its likes in engine.h.
KINDS = (
    "run", "arrive", "wait", "poll", "issue", "copy", "order", "await", "shared", "global",
    "atomic", "signal", "tensor",
    "deliver",
)  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """The steps of some CTAs of a launch.

    Attributes:
        kernel: the kernel's symbol.
        program: the kernel's PTX.
        image: the object file with the kernel's machine code.
        grid, block, cluster: as the kernel was launched.
        shared_bytes: shared memory of a CTA.
        registers: registers of a thread at launch.
        every: of so many clusters, one was recorded.
        steps: `Step` of engine/stream.c, one after the other.
    """

    kernel: str
    program: Program
    image: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    registers: int
    every: int
    steps: bytes
