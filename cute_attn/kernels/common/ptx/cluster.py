"""A CTA's place in its cluster, and stores to other CTAs' shared memory (sm_90 and newer)."""

from __future__ import annotations

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Int32

from .asm import asm, operands


def cta_rank() -> Int32:
    """Read the CTA's rank in its cluster. Each use reads the rank again, since a rank kept in a
    register would spill.
    """
    return cute.arch.make_warp_uniform(
        asm("mov.u32 $0, %cluster_ctarank;", [Int32], [], volatile=True)
    )


def remote_address(address: Int32, rank: Int32) -> Int32:
    """Map a shared address of this CTA to the corresponding address in the CTA of `rank`."""
    text = "mapa.shared::cluster.u32 $0, $1, $2;"
    return asm(text, [Int32], [Int32(address), Int32(rank)])


def store_async(address: Int32, values: Sequence[Int32], barrier: Int32) -> None:
    """`st.async`: store four Int32 to a remote address, 16-byte aligned. An mbarrier of the target
    CTA, also given by its remote address, counts the bytes."""
    text = (
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
        f"[$0], {{{operands(2, 4)}}}, [$1];"
    )
    asm(text, [], [Int32(address), Int32(barrier), *map(Int32, values)], memory=True)
