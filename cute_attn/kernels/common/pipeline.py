"""Barriers declared as data: what each hands over, from whom to whom, and in how many stages.

A kernel lists its `Handover`s once. Their places in shared memory, their initialisation, the names
that reports show, and the table in its documentation all follow from the list.

A user of a handover counts its uses from 0; use `n` goes through stage `n % stages`, and waits for
the phase that the count implies. Nobody keeps a phase.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import nvvm

from .carried import Carried

MBARRIER_BYTES = 8


@dataclass(frozen=True)
class Handover:
    """Something that some warps give to others.

    Attributes:
        name: what it says when it completes, such as "s_full".
        stages: how many there are, in a ring; a power of two.
        arrivals: to complete a phase, those of copies (which count bytes) aside.
        meaning: from whom to whom.
    """

    name: str
    stages: int
    arrivals: int
    meaning: str

    def __post_init__(self) -> None:
        if self.stages < 1 or self.stages & (self.stages - 1):
            raise ValueError(f"{self.name} has {self.stages} stages, must be a power of two")


class Handovers:
    """The barriers of a kernel, one after the other from an address in shared memory."""

    def __init__(self, *declared: Handover):
        self.declared = declared
        self.offsets: dict[str, int] = {}
        self.count = 0
        for handover in declared:
            if handover.name in self.offsets:
                raise ValueError(f"{handover.name} is declared twice")
            self.offsets[handover.name] = self.count
            self.count += handover.stages

    @property
    def nbytes(self) -> int:
        return self.count * MBARRIER_BYTES

    def names(self, address: int) -> dict[str, tuple[int, int, int]]:
        """For the emulator: name -> (address, bytes, bytes of an element)."""
        return {
            h.name: (
                address + MBARRIER_BYTES * self.offsets[h.name],
                MBARRIER_BYTES * h.stages,
                MBARRIER_BYTES,
            )
            for h in self.declared
        }

    def at(self, base: cute.Pointer) -> Barriers:
        return Barriers(self, base)

    def __iter__(self) -> Iterator[Handover]:
        return iter(self.declared)

    def __getitem__(self, name: str) -> Handover:
        return next(h for h in self.declared if h.name == name)


class Barriers(Carried):
    """Handovers in shared memory, for device code."""

    def __init__(self, handovers: Handovers, base: cute.Pointer):
        self.handovers = handovers
        self.base = base

    def init(self) -> None:
        """By one thread of the block, before a barrier of the cluster."""
        for handover in self.handovers:
            for stage in range(handover.stages):
                pointer = self.base + self.handovers.offsets[handover.name] + stage
                cute.arch.mbarrier_init(pointer, handover.arrivals)

    def pointer(self, name: str, n: Any) -> cute.Pointer:
        """The barrier of use n."""
        stages = self.handovers[name].stages
        return self.base + self.handovers.offsets[name] + (n & (stages - 1))

    def phase(self, name: str, n: Any) -> Any:
        return (Int32(n) >> (self.handovers[name].stages.bit_length() - 1)) & 1

    def wait(self, name: str, n: Any) -> None:
        """Until use n has been handed over."""
        cute.arch.mbarrier_wait(self.pointer(name, n), self.phase(name, n))

    def wait_previous(self, name: str, n: Any) -> None:
        """Until use n - stages has been, if there was one: for what gives a stage back."""
        cute.arch.mbarrier_wait(self.pointer(name, n), self.phase(name, n) ^ 1)

    def arrive(self, name: str, n: Any) -> None:
        """By every thread that calls it, in its own block."""
        cute.arch.mbarrier_arrive(self.pointer(name, n))

    def warp_arrives(self, name: str, n: Any, *, cta: Any = None) -> None:
        """Once for a whole warp, behind what all of its threads did; in block `cta` of the cluster,
        or its own."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.pointer(name, n), cta)

    def expect(self, name: str, n: Any, nbytes: int) -> None:
        """Arrive, and wait for so many bytes of copies."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.pointer(name, n), nbytes)


def tcgen05_fence_before() -> None:
    """What this thread did to tensor memory comes before what follows its next arrival."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def tcgen05_fence_after() -> None:
    """What this thread does to tensor memory comes after what preceded its last wait."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
