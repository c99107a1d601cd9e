"""Asynchronous copies to shared memory: `cp.async`, and `cp.async.bulk` (sm_90 and newer)."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, Int64

from .asm import asm


def copy_async(shared: Int32, source: Int64, present: Boolean, *, level: str = "cg") -> None:
    """Start a `cp.async` of 16 bytes from a 64-bit global address to a 32-bit shared address,
    through L2 only ("cg") or L1 too ("ca"). Where `present` is false, the instruction reads nothing
    and writes zeros. Commit and wait with `cute.arch.cp_async_commit_group` and
    `cp_async_wait_group`."""
    nbytes = Int32(16) if present is True else cutlass.select_(present, Int32(16), Int32(0))
    text = f"cp.async.{level}.shared.global [$0], [$1], 16, $2;"
    asm(text, [], [Int32(shared), Int64(source), Int32(nbytes)], memory=True)


def copy_bulk(shared: Int32, source: Int64, nbytes: int, barrier: Int32) -> None:
    """Start a `cp.async.bulk` (sm_90 and newer) of `nbytes` contiguous bytes, by one thread.

    The mbarrier at the shared address `barrier` counts the bytes. Both addresses and `nbytes` are
    multiples of 16."""
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[$0], [$1], {nbytes}, [$2];"
    )
    asm(text, [], [Int32(shared), Int64(source), Int32(barrier)], memory=True)


def prefetch_bulk(source: Int64, nbytes: int) -> None:
    """Start to bring `nbytes` contiguous bytes to L2 (sm_90 and newer), by one thread. The address
    and `nbytes` are multiples of 16."""
    asm(f"cp.async.bulk.prefetch.L2.global [$0], {nbytes};", [], [Int64(source)], volatile=True)


def copy_bulk_to_cluster(
    shared: Int32, source: Int64, nbytes: int, barrier: Int32, mask: int
) -> None:
    """Start a `copy_bulk` to the same place in each CTA of the cluster whose rank has a bit in
    `mask` (sm_90 and newer). Each of these CTAs counts the bytes at its mbarrier."""
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        f"[$0], [$1], {nbytes}, [$2], {mask};"
    )
    asm(text, [], [Int32(shared), Int64(source), Int32(barrier)], memory=True)


def copy_bulk_to_peer(target: Int32, shared: Int32, nbytes: int, barrier: Int32) -> None:
    """Start a `copy_bulk` from this CTA's shared memory to another CTA of the cluster (sm_90 and
    newer), by one thread. `target` and `barrier` are remote addresses in that CTA."""
    text = (
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        f"[$0], [$1], {nbytes}, [$2];"
    )
    asm(text, [], [Int32(target), Int32(shared), Int32(barrier)], memory=True)


def store_bulk(target: Int64, shared: Int32, nbytes: int) -> None:
    """Start to copy `nbytes` from shared memory to a 64-bit global address. One thread calls this;
    the copy joins this thread's bulk group. Addresses and `nbytes` are multiples of 16."""
    text = f"cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], {nbytes};"
    asm(text, [], [Int64(target), Int32(shared)], memory=True)


def add_bulk(target: Int64, shared: Int32, nbytes: int) -> None:
    """Start to add `nbytes` of float32 from shared memory to the float32 at a 64-bit global address
    (sm_90 and newer). One thread calls this; the copy joins this thread's bulk group. Addresses and
    `nbytes` are multiples of 16. Several threads' additions to one element come in any order.
    """
    text = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], {nbytes};"
    asm(text, [], [Int64(target), Int32(shared)], memory=True)


def copies_arrive(barrier: Int32) -> None:
    """Let the mbarrier at a shared address receive one arrival once this thread's earlier
    `copy_async` have all finished."""
    asm("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", [], [Int32(barrier)], memory=True)
