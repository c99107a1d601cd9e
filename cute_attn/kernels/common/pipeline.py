"""The mbarriers of a kernel, declared as edges from a producer to a consumer.

A kernel lists its warp `Role`s and its `Edge`s once. This list determines the arrival counts, the
addresses in shared memory, the initialisation, the names in the emulator's reports and the table in
the kernel's documentation.

Producers and consumers count the uses of an edge from 0. Use `n` is stage `n % stages`, and `n`
also implies the phase to wait for, so no thread keeps a phase bit. With a number of stages that is
no power of two, stage and phase take a division. A kernel that cannot afford the division counts
stages and phases itself, with `stage_pointer` or `address`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, Flag, auto
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute.nvgpu import tcgen05

from .carried import Carried
from .smem import SharedMemory
from .spec import MBARRIER_BYTES, WARP_SIZE

CTAS = 2  # number of CTAs of a pair
BOTH_CTAS = 0b11  # multicast mask of a pair whose leader has rank 0


@dataclass(frozen=True)
class Role:
    """A role in a kernel, and the warps of a CTA that play it."""

    name: str
    warps: range

    def __len__(self) -> int:
        return len(self.warps)


HARDWARE = Role("hardware", range(0))


class Kind(Flag):
    """The event that completes a phase of an edge. An edge with several kinds needs the events of
    all its kinds."""

    BYTES = auto()  # one thread arrives with expect_tx, and copies count the bytes
    COMMIT = auto()  # tcgen05.commit arrives once the MMAs before it are done
    WARPS = auto()  # each producer warp arrives once, after __syncwarp
    THREADS = auto()  # each thread of the producer warps arrives


class Reach(Enum):
    """Which CTA's mbarrier a producer completes.

    CTAs 0 and 1 of a cluster are one pair, CTAs 2 and 3 another. The CTA of even rank leads."""

    CTA = "its own"
    LEADER = "that of a pair's leader, by the producers of both CTAs"
    PAIR = "those of both CTAs of a pair, by the producer of the leader"
    EACH = "those of both CTAs of a pair, by the producers of both"
    PEER = "that of the other CTA of a cluster of two"
    PARTNER = "that of the CTA with the same place in the other pair of a cluster of four"
    FIRST = "that of CTA 0 of the cluster, by the producers of all CTAs"
    CLUSTER = "those of all CTAs of the cluster, by the producer of CTA 0"


@dataclass(frozen=True)
class Edge:
    """A ring of mbarriers through which one role signals another.

    Attributes:
        name: the condition that a completed phase signals, such as "s_full".
        stages: mbarriers of the ring.
        payload: what the consumer may use after a completed phase, for the documentation.
        by_warp: producer warp i has a ring of its own, which only consumer warp i waits on.
        cluster: CTAs of the cluster; set by the Pipeline.
    """

    name: str
    producer: Role
    consumer: Role
    stages: int
    kind: Kind
    reach: Reach = Reach.CTA
    payload: str = ""
    by_warp: bool = False
    cluster: int = CTAS

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"edge {self.name} has {self.stages} stages, must have at least 1")
        if not self.kind:
            raise ValueError(f"edge {self.name} has no kind, nothing would complete it")
        if self.kind & (Kind.WARPS | Kind.THREADS) and not len(self.producer):
            raise ValueError(f"edge {self.name}: its producer {self.producer.name} has no warps")
        if self.by_warp and self.producer.warps != self.consumer.warps:
            raise ValueError(f"edge {self.name}: its producer and consumer have different warps")

    @property
    def mbarriers(self) -> int:
        """How many mbarriers the edge has in each CTA."""
        return self.stages * (len(self.producer) if self.by_warp else 1)

    @property
    def producer_ctas(self) -> int:
        """How many CTAs have producers that arrive at one mbarrier."""
        return {Reach.LEADER: CTAS, Reach.EACH: CTAS, Reach.FIRST: self.cluster}.get(self.reach, 1)

    @property
    def arrivals(self) -> int:
        """How many arrivals complete a phase."""
        warps = self.producer_ctas * (1 if self.by_warp else len(self.producer))
        return (
            (1 if Kind.BYTES in self.kind else 0)
            + (1 if Kind.COMMIT in self.kind else 0)
            + (warps if Kind.WARPS in self.kind else 0)
            + (warps * WARP_SIZE if Kind.THREADS in self.kind else 0)
        )

    def __str__(self) -> str:
        """The edge's ends in words, such as "softmax of both CTAs -> mma of the leader"."""
        of_producer, of_consumer = {
            Reach.CTA: ("", ""),
            Reach.LEADER: (" of both CTAs", " of the leader"),
            Reach.PAIR: (" of the leader", " of both CTAs"),
            Reach.EACH: (" of both CTAs", " of both CTAs"),
            Reach.PEER: ("", " of the other CTA"),
            Reach.PARTNER: ("", " of the partner"),
            Reach.FIRST: (" of all CTAs", " of CTA 0"),
            Reach.CLUSTER: (" of CTA 0", " of all CTAs"),
        }[self.reach]
        if not len(self.producer):
            of_producer = ""
        return f"{self.producer.name}{of_producer} -> {self.consumer.name}{of_consumer}"


class Pipeline:
    """All edges of a kernel whose clusters have `cluster` CTAs, with their mbarriers contiguous in
    shared memory."""

    def __init__(self, *edges: Edge, cluster: int = CTAS):
        self.cluster = cluster
        self.edges = {edge.name: replace(edge, cluster=cluster) for edge in edges}
        if len(self.edges) < len(edges):
            names = [edge.name for edge in edges]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"edge {twice} is declared twice")
        self.offsets: dict[str, int] = {}  # offsets of edges, in mbarriers
        self.count = 0
        for edge in edges:
            self.offsets[edge.name] = self.count
            self.count += edge.mbarriers

    @property
    def nbytes(self) -> int:
        return self.count * MBARRIER_BYTES

    def names(self, address: int) -> dict[str, tuple[int, int, int]]:
        """For the emulator: name -> (address, bytes, bytes of an mbarrier)."""
        return {
            name: (address + MBARRIER_BYTES * self.offsets[name], n, MBARRIER_BYTES)
            for name, n in ((e.name, MBARRIER_BYTES * e.mbarriers) for e in self)
        }

    def table(self) -> str:
        """The edges as a table in Markdown."""
        rows = [
            "| edge | from -> to | stages | arrivals | completed by | hands over |",
            "| --- | --- | ---: | ---: | --- | --- |",
        ]
        for e in self:
            kinds = " and ".join(kind.name.lower() for kind in Kind if kind in e.kind)
            stages = f"{e.stages} a warp" if e.by_warp else e.stages
            rows.append(f"| `{e.name}` | {e} | {stages} | {e.arrivals} | {kinds} | {e.payload} |")
        return "\n".join(rows)

    def at(self, base: cute.Pointer) -> Barriers:
        """For device code: the mbarriers from `base` on, a pointer to Int64 in shared memory."""
        return Barriers(self, base)

    def __iter__(self) -> Iterator[Edge]:
        return iter(self.edges.values())

    def __getitem__(self, name: str) -> Edge:
        return self.edges[name]


def report_names(
    memory: SharedMemory, pipeline: Pipeline, roles: Iterable[Role], shared_base: int
) -> dict[str, dict[str, Any]]:
    """Arguments of the emulator's `Names`: mbarriers, buffers and warps as reports and traces name
    them. Shared memory begins at address `shared_base`; its buffer "barriers" holds the
    mbarriers."""
    shared = memory.names(shared_base)
    barriers, _, _ = shared.pop("barriers")
    return {
        "shared": shared | pipeline.names(barriers),
        "warps": {role.name: (role.warps[0], role.warps[-1]) for role in roles},
    }


class Barriers(Carried):
    """The mbarriers of a Pipeline in shared memory, for device code."""

    def __init__(self, pipeline: Pipeline, base: cute.Pointer):
        self.pipeline = pipeline
        self.base = base

    def init(self) -> None:
        """Initialise all mbarriers, by one thread. A fence and a CTA or cluster barrier must
        follow."""
        for edge in self.pipeline:
            for i in range(edge.mbarriers):
                cute.arch.mbarrier_init(self.stage_pointer(edge.name, i), edge.arrivals)

    def stage_pointer(self, name: str, stage: Int32) -> cute.Pointer:
        return self.base + self.pipeline.offsets[name] + stage

    def address(self, name: str, stage: Int32) -> Int32:
        """The 32-bit address of a stage's mbarrier in shared memory."""
        return Int32(self.stage_pointer(name, stage).toint())

    def pointer(self, name: str, n: Int32) -> cute.Pointer:
        """The mbarrier of use n. With `by_warp`, the mbarrier belongs to the calling warp's
        ring."""
        pointer = self.stage_pointer(name, self.stage(name, n))
        edge = self.pipeline[name]
        if edge.by_warp:
            # warp_idx() is a shuffle, which fails here: perhaps only one lane executes this.
            warp = cute.arch.thread_idx()[0] // WARP_SIZE
            pointer += edge.stages * (warp - edge.producer.warps[0])
        return pointer

    def stage(self, name: str, n: Int32) -> Int32:
        """The stage of use n."""
        stages = self.pipeline[name].stages
        if stages & (stages - 1):
            return Int32(Uint32(n) % stages)
        return n & (stages - 1)

    def phase(self, name: str, n: Int32) -> Int32:
        stages = self.pipeline[name].stages
        if stages & (stages - 1):
            return Int32(Uint32(n) // stages) & 1
        return (Int32(n) >> (stages.bit_length() - 1)) & 1

    def wait(self, name: str, n: Int32) -> None:
        """Wait, as a consumer, until use n is full."""
        cute.arch.mbarrier_wait(self.pointer(name, n), self.phase(name, n))

    def wait_previous(self, name: str, n: Int32) -> None:
        """Wait, as a producer, until the stage of use n is free: until use n - stages, if there was
        one, has been released."""
        cute.arch.mbarrier_wait(self.pointer(name, n), self.phase(name, n) ^ 1)

    def arrive(self, name: str, n: Int32) -> None:
        """Arrive at the own CTA's mbarrier, once for every thread that calls this."""
        cute.arch.mbarrier_arrive(self.pointer(name, n))

    def warp_arrives(self, name: str, n: Int32) -> None:
        """Arrive once for the whole warp, after all earlier work of its threads."""
        each = self.pipeline[name].reach is Reach.EACH
        owners = range(CTAS) if each else (self.owner(name),)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for owner in owners:
                cute.arch.mbarrier_arrive(self.pointer(name, n), owner)

    def owner(self, name: str) -> Int32 | None:
        """The rank of the CTA whose mbarrier this CTA's producers complete; None for this CTA
        itself."""
        reach = self.pipeline[name].reach
        if reach is Reach.PEER:
            return cute.arch.block_idx_in_cluster() ^ 1
        if reach is Reach.PARTNER:
            return cute.arch.block_idx_in_cluster() ^ CTAS
        if reach is Reach.LEADER:
            return 0 if self.pipeline.cluster == CTAS else cute.arch.block_idx_in_cluster() & -CTAS
        return 0 if reach is Reach.FIRST else None

    def expect(self, name: str, n: Int32, nbytes: int) -> None:
        """Arrive with expect_tx of `nbytes` from each producer CTA. One thread calls this: in the
        CTA that owns the mbarrier, or, where the edge reaches the partner's mbarrier, in the
        producer CTA."""
        edge = self.pipeline[name]
        owner = self.owner(name) if edge.reach is Reach.PARTNER else None
        cute.arch.mbarrier_arrive_and_expect_tx(
            self.pointer(name, n), edge.producer_ctas * nbytes, owner
        )

    @cute.jit
    def leader_expects(
        self, name: cutlass.Constexpr, n: Int32, nbytes: cutlass.Constexpr, cta: Int32
    ) -> None:
        """Call `expect` from one thread of a pair's leader (`cta` = 0); do nothing in CTA 1. The
        whole warp calls this."""
        if cta == 0:
            with cute.arch.elect_one():
                self.expect(name, n, nbytes)

    def commit(self, name: str, n: Int32) -> None:
        """Let the mbarrier complete once the MMAs that this warp has issued so far have
        finished."""
        pair = self.pipeline[name].reach is Reach.PAIR
        both = BOTH_CTAS
        if pair and self.pipeline.cluster > CTAS:
            both = BOTH_CTAS << (cute.arch.block_idx_in_cluster() & -CTAS)
        with cute.arch.elect_one():
            if pair:
                tcgen05.commit(self.pointer(name, n), both, tcgen05.CtaGroup.TWO)
            else:
                tcgen05.commit(self.pointer(name, n))
