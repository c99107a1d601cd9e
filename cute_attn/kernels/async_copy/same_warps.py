"""A stream of tiles that the same warps copy and use, as in FlashAttention-2.

    CTA, `consumer_warps` warps; for each of its tiles
      wait     for the tile; a CTA barrier: every warp has the tile, and has used the previous one
      start    the copy of the tile `num_stages - 1` ahead, into the previous tile's stage
      use      checksum or MMAs (`work`)

With one stage, each copy starts only after the previous tile has been used: the experiment with
published numbers for an RTX 5090. A CTA's tiles are sums.shape[0] / sharing apart in memory, and
start again at the source's end. Runs on sm_80 and newer; copies by one thread on sm_90.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ..common.entry import entry, gathered, placeholders
from ..common.pipeline import Barriers, Edge, Kind, Pipeline, Role
from ..common.ptx.asm import asm
from ..common.ptx.memory import shared_address
from ..common.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemory
from ..common.spec import WARP_SIZE
from .arguments import Arguments, fake_arguments, first_and_step, next_place, store_result
from .copies import CLASSES, Operands, Source
from .spec import ELEMENT_BYTES, AsyncCopySpec
from .work import work


class SameWarps:
    """The kernel for one AsyncCopySpec without producer warps; see the module's docstring."""

    def __init__(self, spec: AsyncCopySpec):
        self.spec = spec
        self.copy: Any = CLASSES[spec.copy](spec)
        self.work: Any = work(spec)
        warps = Role("all", range(spec.consumer_warps))
        self.pipeline = Pipeline(
            Edge("full", warps, warps, spec.num_stages, Kind.BYTES, payload="a tile")
        )
        self.smem = SharedMemory(
            Buffer(
                "tiles", cutlass.Float16, spec.tile_bytes // ELEMENT_BYTES, spec.num_stages,
                SWIZZLE_ALIGNMENT,
            ),
            Buffer("barriers", Int64, self.pipeline.count),
        )  # fmt: skip

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
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Operands) -> None:
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        smem = self.smem.allocate()
        barriers = self.pipeline.at(smem.barriers)
        if cutlass.const_expr(self.copy.one_warp):
            if thread == 0:
                barriers.init()
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()

        place, step = first_and_step(x.sums, x.sharing)
        for n in cutlass.range_constexpr(spec.num_stages - (spec.copy != "none")):
            self.start(x.source, place, smem.tiles, Int32(n), n < x.count, barriers, thread)
            place = next_place(place, step, x.tiles)

        result = self.work.start(x.count)
        waited = Int64(0)
        for n in cutlass.range(x.count, unroll=1):
            tile = shared_address(smem.tiles) + barriers.stage("full", n) * spec.tile_bytes
            if cutlass.const_expr(spec.copy == "none"):
                cute.arch.sync_threads()
            else:
                ahead = n + (spec.num_stages - 1)
                if cutlass.const_expr(spec.num_stages == 1):
                    cute.arch.sync_threads()  # the previous tile has been used
                    before = clock() if cutlass.const_expr(spec.latency) else None
                    self.start(x.source, place, smem.tiles, n, True, barriers, thread)
                    place = next_place(place, step, x.tiles)
                    self.wait(barriers, n)
                    if cutlass.const_expr(not self.copy.one_warp):
                        cute.arch.sync_threads()
                    if cutlass.const_expr(spec.latency):
                        waited += clock() - before
                else:
                    self.wait(barriers, n)
                    cute.arch.sync_threads()
                    some = ahead < x.count
                    self.start(x.source, place, smem.tiles, ahead, some, barriers, thread)
                    place = next_place(place, step, x.tiles)
            self.work.use(result, tile, thread, n)
        store_result(x.sums, self.work.result(result), thread)
        if cutlass.const_expr(spec.latency):
            if thread == 0:
                cta, _, _ = cute.arch.block_idx()
                x.clocks[cta] = waited

    @cute.jit
    def start(
        self,
        source: Source,
        place: Int32,
        tiles: cute.Pointer,
        n: Int32,
        some: Boolean,
        barriers: Barriers,
        thread: Int32,
    ) -> None:
        """Start the copy of the CTA's n-th tile, if there is one."""
        stage = barriers.stage("full", n)
        if some:
            if cutlass.const_expr(self.copy.one_warp):
                if cute.arch.make_warp_uniform(thread // WARP_SIZE) == 0:
                    with cute.arch.elect_one():
                        barriers.expect("full", n, self.spec.tile_bytes)
                    self.copy.start(source, place, tiles, stage, barriers.pointer("full", n))
            else:
                to = tiles + stage * (self.spec.tile_bytes // ELEMENT_BYTES)
                if cutlass.const_expr(self.spec.copy in ("vector", "none")):
                    self.copy.store(to, thread, self.copy.load(source, place, thread))
                else:
                    self.copy.start(source, place, to, thread)
        if cutlass.const_expr(not self.copy.one_warp):
            cute.arch.cp_async_commit_group()  # every tile has a group, which may be empty

    @cute.jit
    def wait(self, barriers: Barriers, n: Int32) -> None:
        if cutlass.const_expr(self.copy.one_warp):
            barriers.wait("full", n)
        elif cutlass.const_expr(self.spec.copy != "vector"):
            cute.arch.cp_async_wait_group(max(self.spec.num_stages - 2, 0))


def clock() -> Int64:
    return asm("mov.u64 $0, %clock64;", [Int64], [], volatile=True, memory=True)
