"""Step 6 of the ladder, TMA: a warp of its own loads the tiles, with one instruction a box.

In steps 1 to 5 all threads compute addresses and bounds, and issue a `cp.async` for each 16 bytes.
TMA needs one thread, because a descriptor has the tensor's address and shape, and rows out of
bounds become
0. So a load warp runs ahead of the consumers, as far as its rings have stages. mbarriers replace
`sync_threads`: a consumer warp waits for a tile's bytes and signals when the warp has read the
tile. Warps drift apart, so that one warp's MMAs run beside another warp's softmax.

    warps            role       work
    0 to n - 1       consumers  as before: S = Q K^T, softmax, O += P V, store O
    n                load       Q, then K and V of each tile

TMA writes boxes of 64 columns, swizzled as step 5 swizzles rows; `BoxedTiles` describes this
layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..common.carried import Carried
from ..common.entry import entry, gathered
from ..common.numbers import INF
from ..common.pipeline import Barriers, Edge, Kind, Pipeline, Role, report_names
from ..common.ptx.memory import shared_address
from ..common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers
from ..common.spec import WARP_SIZE
from ..common.tma import BOX, BoxedRows, boxes, load_boxes, load_use
from .arguments import Arguments
from .spec import FmhaLadderSpec
from .step1_basic import Work
from .step5_swizzle import FmhaStep5
from .tiles import UNIT_BYTES, Rows, TileLayout

LINE_BYTES = 128  # bytes of a box's row
LINE_UNITS = LINE_BYTES // UNIT_BYTES


@dataclass(frozen=True)
class BoxedTiles(TileLayout):
    """Tiles of `rows` rows as TMA writes them: box after box of 64 columns."""

    rows: int = 0

    @property
    def pitch(self) -> int:
        return LINE_BYTES

    def offset(self, row: Int32, unit: Int32) -> Int32:
        within = (unit % LINE_UNITS) ^ (row % LINE_UNITS)
        first = row + unit // LINE_UNITS * self.rows
        return first * LINE_BYTES + within * UNIT_BYTES

    def moved(self, offset: Int32, rows: int, units: int) -> Int32:
        box, within = divmod(units, LINE_UNITS)
        return (offset ^ (within * UNIT_BYTES)) + (rows + box * self.rows) * LINE_BYTES


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors that the device code reads and writes.

    Attributes:
        q_tma, k_tma, v_tma: TMA's copies into shared memory.
        q, k, v: the tensors' coordinates for TMA.
    """

    q_tma: cute.CopyAtom
    q: cute.Tensor
    k_tma: cute.CopyAtom
    k: cute.Tensor
    v_tma: cute.CopyAtom
    v: cute.Tensor
    o: cute.Tensor
    softmax_scale: Float32


@dataclass(frozen=True)
class ConsumingWork(Work):
    """The work of a consumer warp; `Work` explains the inherited attributes."""

    barriers: Barriers


class FmhaStep6(FmhaStep5):
    def __init__(self, spec: FmhaLadderSpec):
        if spec.tile_m % spec.tile_n or spec.tile_n % (spec.tile_m // spec.num_warps):
            raise ValueError(
                f"tile_n is {spec.tile_n}, must divide tile_m, {spec.tile_m}, and hold the rows of "
                f"a warp, {spec.tile_m // spec.num_warps}"
            )
        load = Role("load", range(spec.num_warps, spec.num_warps + 1))
        consumers = Role("consumers", range(spec.num_warps))
        self.roles = (consumers, load)
        self.pipeline = Pipeline(
            Edge("q_full", load, consumers, 1, Kind.BYTES, payload="Q"),
            Edge("k_full", load, consumers, spec.k_stages, Kind.BYTES, payload="K"),
            Edge("k_empty", consumers, load, spec.k_stages, Kind.WARPS, payload="its stage"),
            Edge("v_full", load, consumers, spec.v_stages, Kind.BYTES, payload="V"),
            Edge("v_empty", consumers, load, spec.v_stages, Kind.WARPS, payload="its stage"),
        )
        super().__init__(spec)
        self.layout = BoxedTiles(spec.row_bytes, True, spec.tile_n)
        self.tile_rows = BoxedRows(spec.tile_n, spec.head_dim, ragged=False, batched=True)

    def buffers(self) -> list[Buffer]:
        spec = self.spec
        tile = spec.tile_n * spec.head_dim
        return [
            # Q is loaded as tiles of tile_n rows too, so that one layout fits Q, K and V.
            Buffer("q", self.dtype, tile, spec.tile_m // spec.tile_n, SWIZZLE_ALIGNMENT, "Q"),
            Buffer("k", self.dtype, tile, spec.k_stages, SWIZZLE_ALIGNMENT, "K"),
            Buffer("v", self.dtype, tile, spec.v_stages, SWIZZLE_ALIGNMENT, "V"),
            Buffer("barriers", Int64, self.pipeline.count),
        ]

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.memory, self.pipeline, self.roles, shared_base)

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        batch, seqlen, heads, _ = a.q.shape
        tiles = (seqlen + (self.spec.tile_m - 1)) // self.spec.tile_m
        load, rows = cpasync.CopyBulkTensorTileG2SOp(), self.tile_rows
        x = Operands(
            *rows.atom(load, a.q), *rows.atom(load, a.k), *rows.atom(load, a.v), a.o,
            a.softmax_scale,
        )  # fmt: skip
        self.kernel(x).launch(
            grid=[tiles, heads, batch],
            block=[self.spec.num_threads + WARP_SIZE, 1, 1],
            min_blocks_per_mp=self.spec.occupancy,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Operands) -> None:
        spec = self.spec
        block, head, batch = cute.arch.block_idx()
        block = self.query_tile(block)
        seqlen = x.o.shape[1]
        _, end = self.visibility.key_tiles(block, seqlen, seqlen)
        first_row = block * spec.tile_m
        _, whole = self.visibility.whole_key_tiles(first_row, spec.tile_m, seqlen, seqlen)
        smem = self.memory.allocate()
        barriers = self.pipeline.at(smem.barriers)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == spec.num_warps:
            with cute.arch.elect_one():
                barriers.init()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp == spec.num_warps:
            self.load_warp(x, smem, barriers, block, head, batch, end)
        else:
            row = warp * self.warp_rows
            within = row // spec.tile_n * (spec.tile_n * spec.row_bytes)
            work = ConsumingWork(
                barriers=barriers,
                first_row=first_row + row,
                seqlen=seqlen,
                end=end,
                whole=whole,
                scale=self.scale(x.softmax_scale),
                smem_q=shared_address(smem.q) + within + row % spec.tile_n * LINE_BYTES,
                smem_k=shared_address(smem.k),
                smem_v=shared_address(smem.v),
            )
            acc = cute.make_rmem_tensor((self.m_blocks * spec.head_dim // 2,), Float32)
            maximum = cute.make_rmem_tensor((self.rows,), Float32)
            total = cute.make_rmem_tensor((self.rows,), Float32)
            acc.fill(0.0)
            maximum.fill(-INF)
            total.fill(0.0)
            barriers.wait("q_full", 0)
            self.key_tiles(work, acc, maximum, total)
            self.finish(work, acc, total, Rows.of(x.o, batch, head))

    @cute.jit
    def load_warp(
        self,
        x: Operands,
        smem: Pointers,
        barriers: Barriers,
        block: Int32,
        head: Int32,
        batch: Int32,
        end: Int32,
    ) -> None:
        spec = self.spec
        tile = spec.tile_n * spec.head_dim
        across = (spec.head_dim // BOX, spec.tile_n * BOX)
        k_smem = boxes(smem.k, spec.tile_n, across, (spec.k_stages, tile))
        v_smem = boxes(smem.v, spec.tile_n, across, (spec.v_stages, tile))
        place = (head, batch, 0, x.o.shape[1])

        with cute.arch.elect_one():
            barriers.expect("q_full", 0, spec.tile_m * spec.row_bytes)
        parts = spec.tile_m // spec.tile_n
        for i in cutlass.range_constexpr(parts):
            queries = self.tile_rows.box(x.q, block * parts + i, *place)
            q_smem = boxes(smem.q + i * tile, spec.tile_n, across, (1, tile))
            load_boxes(x.q_tma, queries, q_smem, barriers, "q_full", 0)
        for n in cutlass.range(end, unroll=1):
            keys = self.tile_rows.box(x.k, n, *place)
            load_use("k", x.k_tma, keys, k_smem, barriers, n)
            values = self.tile_rows.box(x.v, n, *place)
            load_use("v", x.v_tma, values, v_smem, barriers, n)

    @cute.jit
    def key_tiles(
        self, work: ConsumingWork, acc: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor
    ) -> None:
        for n in cutlass.range(work.end, unroll=1):
            work.barriers.wait("k_full", n)
            scores = self.scores(work, self.stage(work.smem_k, n, self.spec.k_stages))
            work.barriers.warp_arrives("k_empty", n)
            p = self.softmax(work, scores, n, acc, maximum, total)
            work.barriers.wait("v_full", n)
            self.add_values(self.stage(work.smem_v, n, self.spec.v_stages), p, acc)
            work.barriers.warp_arrives("v_empty", n)
