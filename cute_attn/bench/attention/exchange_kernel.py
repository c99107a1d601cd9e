"""The exchange between the dK/dV kernel's pairs, and nothing else: P' of tile after tile, by
st.async.

A cluster has four CTAs. Each warp of CTAs 0 and 1 sends 4 KB for each tile to the same warp of CTA
2 or 3. The receiving warp reads the data and grants the buffer again. Mbarriers and addresses are
as in `kernels/attention/sm100/backward_hd256_dkdv.py`. Every CTA takes all of an SM's shared
memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from ...kernels.common.arguments import fake_contiguous
from ...kernels.common.pipeline import CTAS, Edge, Kind, Pipeline, Reach, Role
from ...kernels.common.ptx.asm import asm
from ...kernels.common.ptx.cluster import cta_rank, remote_address, store_async
from ...kernels.common.ptx.memory import load_shared, shared_address
from ...kernels.common.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemory
from ...kernels.common.spec import MAX_SMEM_BYTES, WARP_SIZE, Spec

CLUSTER = 2 * CTAS
WARPS = Role("elementwise", range(8))
ROWS = 128
CHUNKS = 8  # chunks of 16 bytes that a thread sends
EXCHANGE_BYTES = len(WARPS) * WARP_SIZE * CHUNKS * 16


@dataclass(frozen=True)
class ExchangeSpec(Spec):
    """The compile-time parameters of the exchange.

    Attributes:
        stages: tiles that may be on their way.
    """

    stages: int


class Exchange:
    """The kernel for one ExchangeSpec; see the module's docstring."""

    def __init__(self, spec: ExchangeSpec):
        self.spec = spec
        self.pipeline = Pipeline(
            Edge("free", WARPS, WARPS, spec.stages, Kind.WARPS, Reach.PARTNER, by_warp=True),
            Edge("full", WARPS, WARPS, spec.stages, Kind.BYTES, Reach.PARTNER, by_warp=True),
            cluster=CLUSTER,
        )
        used = spec.stages * EXCHANGE_BYTES + self.pipeline.nbytes
        self.smem = SharedMemory(
            Buffer("exchange", Int32, EXCHANGE_BYTES // 4, spec.stages, SWIZZLE_ALIGNMENT),
            Buffer("barriers", Int64, self.pipeline.count),
            Buffer("unused", Int32, (MAX_SMEM_BYTES - used - 64) // 4),
        )

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        return (
            fake_contiguous(Int64, (cute.sym_int(), CLUSTER)),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(self, clocks: cute.Tensor, tiles: Int32, stream: Any) -> None:
        """Exchange `tiles` tiles in each cluster. Write each CTA's clocks to `clocks`, `[clusters,
        4]`."""
        self.kernel(clocks, tiles).launch(
            grid=[CLUSTER * clocks.shape[0], 1, 1],
            block=[len(WARPS) * WARP_SIZE, 1, 1],
            cluster=[CLUSTER, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, clocks: cute.Tensor, tiles: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        storage = self.smem.allocate()
        barriers = self.pipeline.at(storage.barriers)
        if thread == 0:
            barriers.init()
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        start = clock()
        rank = cta_rank()
        own = shared_address(storage.exchange)
        own += (thread // ROWS * CHUNKS * ROWS + thread % ROWS) * 16
        if rank < CTAS:
            self.send(barriers, own, thread, tiles)
        else:
            self.receive(barriers, own, tiles)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if thread == 0:
            clocks[block // CLUSTER, rank] = clock() - start

    @cute.jit
    def send(self, barriers: Any, own: Int32, thread: Int32, tiles: Int32) -> None:
        partner = cta_rank() ^ CTAS
        for n in cutlass.range(tiles, unroll=1):
            stage = barriers.stage("free", n)
            barriers.wait("free", n)
            with cute.arch.elect_one():
                barriers.expect("full", n, EXCHANGE_BYTES // len(WARPS))
            to = remote_address(own + stage * EXCHANGE_BYTES, partner)
            full = remote_address(shared_address(barriers.pointer("full", n)), partner)
            for chunk in cutlass.range_constexpr(CHUNKS):
                store_async(to + chunk * ROWS * 16, [thread, n, Int32(chunk), thread ^ n], full)

    @cute.jit
    def receive(self, barriers: Any, own: Int32, tiles: Int32) -> None:
        for stage in cutlass.range_constexpr(self.spec.stages):
            if stage < tiles:
                barriers.warp_arrives("free", stage)
        wrong = Int32(0)
        thread, _, _ = cute.arch.thread_idx()
        for n in cutlass.range(tiles, unroll=1):
            stage = barriers.stage("full", n)
            barriers.wait("full", n)
            for chunk in cutlass.range_constexpr(CHUNKS):
                x = load_shared(Int32, own + stage * EXCHANGE_BYTES + chunk * ROWS * 16, 4)
                wrong |= (x[0] ^ thread) | (x[1] ^ n) | (x[2] ^ chunk) | (x[3] ^ thread ^ n)
            if n + self.spec.stages < tiles:
                barriers.warp_arrives("free", n + self.spec.stages)
        if wrong != 0:
            asm("trap;", [], [], volatile=True)


def clock() -> Int64:
    return asm("mov.u64 $0, %clock64;", [Int64], [], volatile=True)
