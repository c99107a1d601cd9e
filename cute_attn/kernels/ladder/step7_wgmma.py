"""Step 7 of the ladder, wgmma: a warpgroup's products run asynchronously, out of shared memory.

`mma.sync` multiplies what a warp has loaded to registers; four warps load the same K and V. One
`wgmma` multiplies 64 rows of a warpgroup by a whole K/V tile, which the tensor cores read from
shared memory themselves. S and O are accumulators, and P the left operand, in registers: P never
goes through shared memory.

    warps          role       work
    0-3            consumers  S = Q K^T, softmax, O += P V; then O to shared memory, and TMA
    4              load       Q, then each K/V tile, by TMA

K/V tiles come from the last to the first, because only the first tiles to come can need a mask. The
pipeline's edges and the shared memory are declared in `__init__`. `fragments` has the arithmetic on
rows in registers, and `sm90.mma` the products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..attention.parts import fragments
from ..attention.parts.visibility import Visibility
from ..attention.sm90.mma import ROWS, WARPGROUP_WARPS, start_output, start_scores
from ..attention.sm90.store import group_barrier, store_staged
from ..common.carried import Carried
from ..common.cluster import prepare
from ..common.dtypes import DTYPE
from ..common.entry import entry, gathered, placeholders
from ..common.numbers import LOG2_E
from ..common.pipeline import Barriers, Edge, Kind, Pipeline, Role, report_names
from ..common.ptx import wgmma
from ..common.ptx.memory import shared_address
from ..common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ..common.spec import WARP_SIZE
from ..common.tma import BOX, BoxedRows, boxes, load_use
from .arguments import Arguments, fake_arguments
from .spec import FmhaLadderSpec


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors that the device code reads and writes.

    Attributes:
        q_tma, k_tma, v_tma, o_tma: TMA's copies.
        q, k, v, o: the tensors' coordinates for TMA.
        log2: turns scores into exponents of 2.
        counter: the counter of step 10's scheduler.
    """

    q_tma: cute.CopyAtom
    q: cute.Tensor
    k_tma: cute.CopyAtom
    k: cute.Tensor
    v_tma: cute.CopyAtom
    v: cute.Tensor
    o_tma: cute.CopyAtom
    o: cute.Tensor
    log2: Float32
    counter: cute.Tensor | None


@dataclass(frozen=True)
class Tile(Carried):
    """Tile number `block` of a head's queries.

    Attributes:
        seqlen: queries and keys of the sequence.
        end: the K/V tiles are 0 to end - 1.
        whole: the K/V tiles that need no mask are 0 to whole - 1.
    """

    block: Int32
    head: Int32
    sequence: Int32
    seqlen: Int32
    end: Int32
    whole: Int32


@dataclass(frozen=True)
class Consumer(Carried):
    """The values that a consumer warp keeps.

    Attributes:
        warp: the warp's number in the CTA.
        group: the number of the warp's warpgroup.
        q, o: shared addresses of the warpgroup's rows of Q and O.
        k, v: shared addresses of the rings.
        s, p, acc: registers of S, of P as an operand, and of O.
    """

    warp: Int32
    group: Int32
    barriers: Barriers
    q: Int32
    k: Int32
    v: Int32
    o: Int32
    s: cute.Tensor
    p: cute.Tensor
    acc: cute.Tensor
    softmax: fragments.OnlineSoftmax


class FmhaStep7:
    """The kernel for one FmhaLadderSpec; see the module's docstring."""

    def __init__(self, spec: FmhaLadderSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.warpgroups = spec.num_warps // WARPGROUP_WARPS
        if spec.tile_m != self.warpgroups * ROWS:
            raise ValueError(
                f"tile_m is {spec.tile_m}, must be {ROWS} for each of {spec.num_warps} / "
                f"{WARPGROUP_WARPS} warpgroups"
            )
        self.consumers = Role("consumers", range(spec.num_warps))
        self.load = Role("load", range(spec.num_warps, spec.num_warps + 1))
        self.pipeline = Pipeline(*self.edges())
        self.smem = SharedMemory(*self.buffers(), Buffer("barriers", Int64, self.pipeline.count))
        self.q_rows, self.kv_rows, self.o_rows = (
            BoxedRows(rows, spec.head_dim, ragged=False, batched=True)
            for rows in (spec.tile_m, spec.tile_n, ROWS)
        )
        self.visible = Visibility(spec.tile_m, spec.tile_n, 1, right=0 if spec.causal else None)

    def edges(self) -> tuple[Edge, ...]:
        load, consumers = self.load, self.consumers
        k_stages, v_stages = self.spec.k_stages, self.spec.v_stages
        return (
            Edge("q_full", load, consumers, 1, Kind.BYTES, payload="Q"),
            Edge("q_empty", consumers, load, 1, Kind.WARPS, payload="its buffer"),
            Edge("k_full", load, consumers, k_stages, Kind.BYTES, payload="K"),
            Edge("k_empty", consumers, load, k_stages, Kind.WARPS, payload="its stage"),
            Edge("v_full", load, consumers, v_stages, Kind.BYTES, payload="V"),
            Edge("v_empty", consumers, load, v_stages, Kind.WARPS, payload="its stage"),
        )

    def buffers(self) -> tuple[Buffer, ...]:
        spec, at = self.spec, SWIZZLE_ALIGNMENT
        rows, tile = ROWS * spec.head_dim, spec.tile_n * spec.head_dim
        return (
            Buffer("q", self.dtype, self.warpgroups * rows, 1, at, "Q"),
            Buffer("k", self.dtype, tile, spec.k_stages, at, "K"),
            Buffer("v", self.dtype, tile, spec.v_stages, at, "V"),
            Buffer("o", self.dtype, rows, self.warpgroups, at, "O of a warpgroup"),
        )

    @property
    def num_threads(self) -> int:
        return self.spec.num_threads + WARP_SIZE

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return report_names(self.smem, self.pipeline, (self.consumers, self.load), shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        return placeholders(fake_arguments(self.spec))

    # -- host ---------------------------------------------------------------------------------

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        batch, seqlen, heads, _ = a.q.shape
        tiles = (seqlen + (self.spec.tile_m - 1)) // self.spec.tile_m
        self.launch([tiles, heads, batch], a, None, stream)

    def launch(
        self, grid: list[Int32], a: Arguments, counter: cute.Tensor | None, stream: Any
    ) -> None:
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        x = Operands(
            *self.q_rows.atom(load, a.q), *self.kv_rows.atom(load, a.k),
            *self.kv_rows.atom(load, a.v), *self.o_rows.atom(store, a.o),
            a.softmax_scale * LOG2_E, counter,
        )  # fmt: skip
        self.kernel(x).launch(
            grid=grid,
            block=[self.num_threads, 1, 1],
            min_blocks_per_mp=self.spec.occupancy,
            preferred_smem_carveout=100,
            stream=stream,
        )

    # -- device: set-up -----------------------------------------------------------------------

    @cute.kernel
    def kernel(self, x: Operands) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = self.smem.allocate()
        barriers = self.pipeline.at(storage.barriers)
        if warp == self.load.warps[0]:
            prepare((x.q_tma, x.k_tma, x.v_tma, x.o_tma), barriers)
        cute.arch.sync_threads()
        self.roles(x, storage, barriers, warp)

    @cute.jit
    def roles(self, x: Operands, storage: Pointers, barriers: Barriers, warp: Int32) -> None:
        if warp >= self.load.warps[0]:
            self.load_warp(x, storage, barriers)
        else:
            self.consumer_warps(x, self.consumer(x, storage, barriers, warp), storage)

    def consumer(self, x: Operands, storage: Pointers, barriers: Barriers, warp: Int32) -> Consumer:
        spec = self.spec
        group = warp // WARPGROUP_WARPS
        return Consumer(
            warp=warp,
            group=group,
            barriers=barriers,
            q=shared_address(storage.q) + group * (ROWS * BOX * 2),
            k=shared_address(storage.k),
            v=shared_address(storage.v),
            o=shared_address(storage.o) + group * (ROWS * spec.row_bytes),
            s=fragments.accumulators(spec.tile_n),
            p=cute.make_rmem_tensor((spec.tile_n // 4,), Int32),
            acc=fragments.accumulators(spec.head_dim),
            softmax=fragments.OnlineSoftmax(x.log2),
        )

    def tile(self, x: Operands, block: Int32, head: Int32, sequence: Int32) -> Tile:
        seqlen = x.q.shape[0][1]
        _, end = self.visible.key_tiles(block, seqlen, seqlen)
        _, whole = self.visible.whole_key_tiles(
            block * self.spec.tile_m, self.spec.tile_m, seqlen, seqlen
        )
        return Tile(block, head, sequence, seqlen, end, whole)

    def tile_of_cta(self, x: Operands) -> Tile:
        """The tile of a CTA. The last tile of a head has the most keys, and starts first."""
        block, head, sequence = cute.arch.block_idx()
        if self.spec.causal:
            block = cute.arch.grid_dim()[0] - 1 - block
        return self.tile(x, block, head, sequence)

    # -- device: load -------------------------------------------------------------------------

    @cute.jit
    def load_warp(self, x: Operands, storage: Pointers, barriers: Barriers) -> None:
        self.load_tile(x, storage, barriers, self.tile_of_cta(x), Int32(0), Int32(0))

    @cute.jit
    def load_tile(
        self,
        x: Operands,
        storage: Pointers,
        barriers: Barriers,
        tile: Tile,
        index: Int32,
        n: Int32,
    ) -> Int32:
        """Load Q of the CTA's tile `index`, and its K/V tiles. The CTA has loaded n K/V tiles
        before; return the new count."""
        spec = self.spec
        across = (spec.head_dim // BOX, spec.tile_n * BOX)
        k_smem = boxes(storage.k, spec.tile_n, across, (spec.k_stages, spec.tile_n * spec.head_dim))
        v_smem = boxes(storage.v, spec.tile_n, across, (spec.v_stages, spec.tile_n * spec.head_dim))
        q_smem = boxes(storage.q, spec.tile_m, (spec.head_dim // BOX, spec.tile_m * BOX), (1, 0))
        place = (tile.head, tile.sequence, 0, tile.seqlen)

        queries = self.q_rows.box(x.q, tile.block, *place)
        load_use("q", x.q_tma, queries, q_smem, barriers, index)
        for i in cutlass.range(tile.end, unroll=1):
            keys = self.kv_rows.box(x.k, tile.end - 1 - i, *place)
            load_use("k", x.k_tma, keys, k_smem, barriers, n)
            values = self.kv_rows.box(x.v, tile.end - 1 - i, *place)
            load_use("v", x.v_tma, values, v_smem, barriers, n)
            n += 1
        return n

    # -- device: products and softmax ---------------------------------------------------------

    @cute.jit
    def consumer_warps(self, x: Operands, own: Consumer, storage: Pointers) -> None:
        tile = self.tile_of_cta(x)
        self.compute_tile(own, tile, Int32(0), Int32(0))
        self.store_tile(x, own, storage, tile)
        self.stores_done(own)

    @cute.jit
    def compute_tile(self, own: Consumer, tile: Tile, index: Int32, n: Int32) -> Int32:
        """Compute O of the CTA's tile `index`. The CTA has used n K/V tiles before; return the new
        count."""
        own.softmax.start()
        own.acc.fill(0.0)
        own.barriers.wait("q_full", index)
        for i in cutlass.range(tile.end, unroll=1):
            self.key_tile(own, tile, tile.end - 1 - i, n)
            n += 1
        own.barriers.warp_arrives("q_empty", index)
        fragments.scale_rows(own.acc, own.softmax.inverse_totals())
        return n

    @cute.jit
    def key_tile(self, own: Consumer, tile: Tile, key_tile: Int32, n: Int32) -> None:
        own.barriers.wait("k_full", n)
        scores = self.start_scores(own, n)
        fragments.assign(own.s, wgmma.wait(scores))
        own.barriers.warp_arrives("k_empty", n)
        if key_tile >= tile.whole:
            self.mask(own, tile, key_tile)
        factors = own.softmax.update(own.s)
        fragments.assign(own.p, fragments.operand(own.s, self.dtype))
        self.rescale(own, factors)
        own.barriers.wait("v_full", n)
        out = self.start_output(own, n)
        fragments.assign(own.acc, wgmma.wait(out))
        own.barriers.warp_arrives("v_empty", n)

    @cute.jit
    def rescale(self, own: Consumer, factors: list[Float32]) -> None:
        """Multiply each row of O by its factor, which is mostly 1: see `OnlineSoftmax`."""
        if cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0)):
            fragments.scale_rows(own.acc, factors)

    def start_scores(self, own: Consumer, n: Int32) -> list[Float32]:
        """Start S = Q K^T, with use n of K."""
        spec = self.spec
        stage = own.barriers.stage("k_full", n) * (spec.tile_n * spec.row_bytes)
        return start_scores(
            self.dtype, own.q, own.k + stage,
            tile_m=spec.tile_m, tile_n=spec.tile_n, head_dim=spec.head_dim,
        )  # fmt: skip

    def start_output(self, own: Consumer, n: Int32) -> list[Float32]:
        """Start O + P V, with use n of V."""
        spec = self.spec
        stage = own.barriers.stage("v_full", n) * (spec.tile_n * spec.row_bytes)
        o, p = fragments.values(own.acc), fragments.values(own.p)
        return start_output(
            self.dtype, o, p, own.v + stage, tile_n=spec.tile_n, head_dim=spec.head_dim
        )

    def mask(self, own: Consumer, tile: Tile, key_tile: Int32) -> None:
        """Set the columns of keys that a row does not see to -inf."""
        row = tile.block * self.spec.tile_m + fragments.first_row(own.warp)
        highs = []
        for lane_row in range(fragments.LANE_ROWS):
            token = row + lane_row * fragments.LANE_ROW_STEP
            _, high = self.visible.keys(token, tile.seqlen, tile.seqlen)
            highs.append(high - key_tile * self.spec.tile_n)
        fragments.mask_rows(own.s, highs)

    # -- device: store ------------------------------------------------------------------------

    @cute.jit
    def store_tile(self, x: Operands, own: Consumer, storage: Pointers, tile: Tile) -> None:
        """Store the warpgroup's rows through shared memory, by TMA."""
        spec = self.spec
        self.stores_done(own)  # the previous tile's stores, from the same buffer
        group_barrier(own.group)
        words = fragments.operand(own.acc, self.dtype)
        fragments.stage_rows(words, own.o, own.warp % WARPGROUP_WARPS, ROWS)
        cute.arch.fence_view_async_shared()
        group_barrier(own.group)
        if own.warp % WARPGROUP_WARPS == 0:
            block = tile.block * self.warpgroups + own.group
            rows = self.o_rows.box(x.o, block, tile.head, tile.sequence, 0, tile.seqlen)
            with cute.arch.elect_one():
                store_staged(
                    x.o_tma, rows, storage.o, own.group, self.warpgroups, ROWS, spec.head_dim
                )
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def stores_done(self, own: Consumer) -> None:
        """Wait, in the thread that starts the stores, until the stores have read shared memory."""
        if own.warp % WARPGROUP_WARPS == 0:
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0, read=True)
