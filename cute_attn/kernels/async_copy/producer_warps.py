"""A stream of tiles with dedicated producer warps, as in FlashAttention-3 and later.

    CTA
      warps 0 to consumer_warps - 1     use   checksum or MMAs of tile after tile (`work`)
      the next `producer_warps`         load  tile after tile, `num_stages` ahead

Where all threads of a warp copy (vector loads, cp.async), the producer warps copy each tile
together. Where one thread copies, the producer warps take turns.

With multicast, each CTA of a cluster of two loads half of each tile into both CTAs. So a stage is
free once the consumers of both CTAs have used it. Runs on sm_90 and newer; vector loads and
cp.async on sm_80 too.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..common.entry import entry, gathered, placeholders
from ..common.pipeline import Barriers, Edge, Kind, Pipeline, Role, report_names
from ..common.ptx import mbarrier
from ..common.ptx.async_copy import copies_arrive
from ..common.ptx.memory import shared_address
from ..common.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemory
from ..common.spec import WARP_SIZE
from .arguments import Arguments, fake_arguments, first_and_step, next_place, store_result
from .copies import CLASSES, Operands
from .spec import ELEMENT_BYTES, AsyncCopySpec
from .work import work


class ProducerWarps:
    """The kernel for one AsyncCopySpec with producer warps; see the module's docstring."""

    def __init__(self, spec: AsyncCopySpec):
        self.spec = spec
        self.copy: Any = CLASSES[spec.copy](spec)
        self.work: Any = work(spec)
        use = Role("use", range(spec.consumer_warps))
        load = Role("load", range(spec.consumer_warps, spec.consumer_warps + spec.producer_warps))
        self.roles = (use, load)
        stages = spec.num_stages
        by = Kind.BYTES if self.copy.one_warp else Kind.THREADS
        if spec.copy == "none":
            by = Kind.WARPS
        edges = [
            Edge("full", load, use, stages, by, payload="a tile"),
            Edge("empty", use, load, stages, Kind.WARPS, payload="its stage"),
        ]
        if spec.cluster > 1:
            # Completed by the consumers of the other CTA.
            edges.append(Edge("peer_empty", use, load, stages, Kind.WARPS, payload="its stage"))
        self.pipeline = Pipeline(*edges)
        self.smem = SharedMemory(
            Buffer(
                "tiles", cutlass.Float16, spec.tile_bytes // ELEMENT_BYTES, stages,
                SWIZZLE_ALIGNMENT,
            ),
            Buffer("barriers", Int64, self.pipeline.count),
        )  # fmt: skip

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.smem, self.pipeline, self.roles, shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        return placeholders(fake_arguments(self.spec))

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch a CTA for each row of `sums`."""
        a, stream = gathered(Arguments, args)
        self.kernel(self.copy.operands(a)).launch(
            grid=[a.sums.shape[0], 1, 1],
            block=[self.spec.num_threads, 1, 1],
            cluster=[self.spec.cluster, 1, 1] if self.spec.cluster > 1 else None,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Operands) -> None:
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        smem = self.smem.allocate()
        barriers = self.pipeline.at(smem.barriers)
        if thread == 0:
            barriers.init()
        if cutlass.const_expr(spec.try_wait):
            cute.arch.mbarrier_init_fence()
        self.join()

        place, step = first_and_step(x.sums, x.sharing)
        if warp >= spec.consumer_warps:
            first_thread, first_warp = spec.consumer_threads, spec.consumer_warps
            of_load = (thread - first_thread, warp - first_warp)
            self.load(x, place, step, smem.tiles, barriers, *of_load)
        else:
            self.use(x, smem.tiles, barriers, thread)
        if cutlass.const_expr(spec.cluster > 1):
            self.join()  # neither CTA may exit while the other signals it or copies to it

    def join(self) -> None:
        """The barrier of all threads of a cluster."""
        if self.spec.cluster > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def load(
        self,
        x: Operands,
        place: Int32,
        step: Int32,
        buffer: cute.Pointer,
        barriers: Barriers,
        thread: Int32,
        warp: Int32,
    ) -> None:
        """The work of a producer warp; `thread` and `warp` count from the first producer warp."""
        spec, source, count = self.spec, x.source, x.count
        if cutlass.const_expr(self.copy.one_warp):
            place += warp * step
            for n in cutlass.range(warp, count, spec.producer_warps, unroll=1):
                self.wait_free(barriers, n)
                stage = barriers.stage("full", n)
                with cute.arch.elect_one():
                    barriers.expect("full", n, spec.tile_bytes)
                self.copy.start(source, place, buffer, stage, barriers.pointer("full", n))
                place = next_place(place, spec.producer_warps * step, x.tiles)
        else:
            for n in cutlass.range(count, unroll=1):
                to = buffer + barriers.stage("full", n) * (spec.tile_bytes // ELEMENT_BYTES)
                full = barriers.address("full", barriers.stage("full", n))
                if cutlass.const_expr(spec.copy == "none"):
                    self.wait_free(barriers, n)
                    if n < spec.num_stages:
                        self.copy.store(to, thread, self.copy.load(source, place, thread))
                    cute.arch.sync_warp()
                    if thread % WARP_SIZE == 0:
                        mbarrier.arrive(full)
                elif cutlass.const_expr(spec.copy == "vector"):
                    values = self.copy.load(source, place, thread)
                    self.wait_free(barriers, n)
                    self.copy.store(to, thread, values)
                    mbarrier.arrive(full)
                else:
                    self.wait_free(barriers, n)
                    self.copy.start(source, place, to, thread)
                    copies_arrive(full)
                place = next_place(place, step, x.tiles)

    def wait_free(self, barriers: Barriers, n: Int32) -> None:
        """Wait until the stage of tile n is free in all CTAs that its copy writes to."""
        self.wait(barriers, "empty", n, 1)
        if self.spec.cluster > 1:
            self.wait(barriers, "peer_empty", n, 1)

    def wait(self, barriers: Barriers, edge: str, n: Int32, previous: int) -> None:
        phase = barriers.phase(edge, n) ^ previous
        if self.spec.try_wait:
            cute.arch.mbarrier_wait(barriers.pointer(edge, n), phase)
        else:
            mbarrier.wait(barriers.address(edge, barriers.stage(edge, n)), phase)

    @cute.jit
    def use(self, x: Operands, buffer: cute.Pointer, barriers: Barriers, thread: Int32) -> None:
        """The work of a consumer warp."""
        result = self.work.start(x.count)
        for n in cutlass.range(x.count, unroll=1):
            stage = barriers.stage("full", n)
            self.wait(barriers, "full", n, 0)
            self.work.use(result, shared_address(buffer) + stage * self.spec.tile_bytes, thread, n)
            cute.arch.sync_warp()
            if thread % WARP_SIZE == 0:  # sm_80 has no elect_one
                mbarrier.arrive(barriers.address("empty", stage))
                if cutlass.const_expr(self.spec.cluster > 1):
                    peer = cute.arch.block_idx_in_cluster() ^ 1
                    cute.arch.mbarrier_arrive(barriers.pointer("peer_empty", n), peer)
        store_result(x.sums, self.work.result(result), thread)
