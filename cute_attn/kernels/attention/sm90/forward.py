"""Softmax attention forward for SM90, at head_dim 64 to 576: wgmma, TMA, warp-specialised.

A CTA computes a tile of query rows, 64 for each of its one to three consumer warpgroups. The CTA
goes over the tile's visible K/V tiles from the last to the first.

    S = Q K^T        64 x tile_n a warpgroup    Q and K in shared memory, S in registers
    P = 2^(c S - m)                             c = softmax_scale * log2(e), m the reference
    O = O a + P V    64 x head_dim_v            P and O in registers, V in shared memory

The reference m of a row is the row's maximum at the time when m last moved, plus a headroom. m
moves when a score is above m, so O is rarely rescaled (by a); see `fragment_softmax`. If no
log-sum-exp is asked for, columns of ones beside V make the sums of P columns of O. At head_dim 256
a part of Q is in registers.

Two things overlap softmax with products. A warpgroup starts the scores of the next K/V tile before
this tile's P V, and computes the next tile's softmax while P V runs. The warpgroups also take turns
to start products (named barriers), so that one warpgroup's softmax runs during another warpgroup's
products.

    warps             role        work on a tile
    first             consumers   S, softmax, O; at the end O / sum through shared memory, by TMA
    the one after     load        finds the next tile; Q, then each K/V tile, by TMA

The load warp's warpgroup gives its registers to the consumers; its three other warps idle. Where
pages are too small for TMA, all four gather the rows of K and V, see `gather`. Q's
buffer is free after the last product of Q, so the next tile's Q is loaded beside the end of this
tile. O is staged in shared memory where there is room (not at head_dim 256), and otherwise stored
from registers.

With fp8 K and V, the three other warps of the load warp's warpgroup convert each K/V tile from
the fp8 that TMA brings to the products' operand type, see `dequantise`. P and V are then float16.

With splits, a tile's K/V tiles are shared out among CTAs. Each CTA stores its O, from registers,
and its log-sum-exp in float32. `combine` adds up the results.

With pieces (few query rows, as in decode), only the K/V tiles of long sequences are shared out,
see `pieces`. Each piece's CTA stores float32 results, and counts its arrival. When all of a
segment's pieces have arrived, the CTA that arrived last adds them up, in the order of the keys. If
there are many rows, CTAs add up a part of the rows each.

At head_dim 512 and 576, a cluster of two CTAs, a pair, has a tile of query rows. Each CTA runs this
kernel on a half of the columns of q, k, v and o. The CTAs exchange only parts of S: each CTA
multiplies its columns, and adds the other CTA's part (`score_sums`). So both CTAs compute the same
softmax. At head_dim 576, half of the columns is no whole number of TMA boxes. Both CTAs then load
the middle box of columns, and CTA 1's Q has zeros in that box.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...common.carried import Carried
from ...common.cluster import prepare
from ...common.dtypes import DTYPE
from ...common.entry import entry, gathered, placeholders
from ...common.overlap import overlaps
from ...common.pair_scheduler import PairCounterScheduler, PairNumbers
from ...common.pipeline import CTAS, Barriers, Edge, Kind, Pipeline, Reach, Role, report_names
from ...common.ptx import wgmma
from ...common.ptx.cluster import cta_rank
from ...common.ptx.convert import pack
from ...common.ptx.grids import start_dependents
from ...common.ptx.memory import (
    LINE_WORDS,
    NEVER,
    count_arrival,
    increment_global,
    load_acquire,
    load_shared,
    prefetch_global,
    shared_address,
    sleep,
    store_shared,
)
from ...common.scheduler import (
    CounterScheduler,
    SingleTileScheduler,
    TileQueue,
    restore_counter,
)
from ...common.sequences import Sequences
from ...common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers, SharedMemory
from ...common.spec import MAX_SMEM_BYTES, VECTOR_BYTES
from ...common.tma import BOX, BoxedRows, boxes, load_boxes, load_use
from .. import configs
from ..parts import fragments
from ..parts.arguments import FakeArguments
from ..parts.fragment_softmax import HEADROOM, FragmentSoftmax
from ..parts.gather import Gather
from ..parts.merge import VECTOR, Parts, add_up, finish, store_rounded
from ..parts.pages import Pages
from ..parts.pieces import PieceMap, PieceWork, parts_of_sum
from ..parts.softmax import Scaling, cap_row, finish_row
from ..parts.visibility import Visibility
from ..parts.work import SplitTileMap, SplitWork, TileMap, Work
from ..spec import GATHERED, Sm90ForwardSpec
from .dequantise import Dequantiser
from .mma import (
    ONES_BYTES,
    ROWS,
    SUMS,
    WARPGROUP,
    WARPGROUP_WARPS,
    held_rows,
    start_output,
    start_output_with_sums,
    start_scores,
    start_scores_of_held,
)
from .score_sums import ScoreSums
from .store import group_barrier, row_parts, store_parts, store_staged
from .turns import Turns

WARP_ROWS = ROWS // WARPGROUP_WARPS

# Registers of a thread in the (load warp's, consumers') warpgroups, by the number of consumer
# warpgroups.
REGISTERS = {1: (56, 240), 2: (24, 240), 3: (32, 160)}
REGISTERS_WITH_FP8 = {1: (56, 248), 2: (56, 224)}
GATHER_REGISTERS = {**REGISTERS, 2: (40, 232)}  # where the load warp's warpgroup gathers rows
# The load warp of a kernel with pieces computes where pieces begin.
PIECES_REGISTERS = {1: (56, 240), 2: (56, 224)}

# The number of heads whose tiles are computed at a time. With fewer heads, more CTAs read the same
# K and V together. With more heads, tiles of different lengths end with short tiles.
HEADS_AT_ONCE, WINDOWED_HEADS_AT_ONCE = 1, 4

SCHEDULERS: dict[str, type[SingleTileScheduler]] = {
    "single": SingleTileScheduler,
    "counter": CounterScheduler,
    "pieces": CounterScheduler,
}

PAIR_SCHEDULERS: dict[str, type[SingleTileScheduler]] = {
    "single": SingleTileScheduler,
    "counter": PairCounterScheduler,
    "pieces": PairCounterScheduler,
}

# Rows that a thread adds up at a time: their loads are in flight together. With eight rows, the
# code took longer to come from memory than the rows.
AT_ONCE = 2
POLL = 32  # nanoseconds between looks at the number of arrivals


class Arguments(NamedTuple):
    """What the kernel is called with; FakeArguments has the shapes.

    Attributes:
        num_ctas: how many CTAs, or pairs, are resident at once.
        counter: the next tile of a CounterScheduler, `[1]`; with pieces, `[2 + 2 * num_ctas]`:
            the next number of `pieces`, the number of CTAs that are done, and for each segment's
            first piece the arrivals of warpgroups, with pieces and then with sums. Each CTA of a
            pair has its own arrivals, so pairs have `[2 + 4 * num_ctas]`. All are 0 before and
            after the launch.
        parts: with pieces, their results: `[2 * num_ctas, tile_m, head_dim_v +
            configs.PART_COLUMNS]`.
        k_descale, v_descale: factors of fp8 k and v, float32 `[batch, heads_k]`.
        tree_mask: int64 `[batch, seqlen_q]`, or `[tokens]` of packed sequences: which of the
            sequence's last seqlen_q keys each query sees. Bit j is key seqlen_k - seqlen_q + j.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor | None
    sink: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    page_table: cute.Tensor | None
    softmax_scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    num_ctas: Int32
    counter: cute.Tensor | None
    parts: cute.Tensor | None
    k_descale: cute.Tensor | None
    v_descale: cute.Tensor | None
    tree_mask: cute.Tensor | None


@dataclass(frozen=True)
class Descales(Carried):
    """The factors of fp8 K and V, and what the factors of K change.

    Attributes:
        k, v: `[batch, heads_k]`, or None for 1.
        softmax_scale, softcap: arguments of Scaling; None without `k`, or without a softcap.
    """

    k: cute.Tensor | None
    v: cute.Tensor | None
    softmax_scale: Float32 | None
    softcap: Float32 | None


@dataclass(frozen=True)
class Operands(Carried):
    """The tensors that the device code reads and writes.

    Attributes:
        q_tma, k_tma, v_tma, o_tma: TMA's copies; o_tma only where o is staged, k_tma and v_tma only
            where TMA loads K and V.
        q, k, v: coordinates for TMA; k and v may be the tensors, whose rows are gathered.
        o: coordinates for TMA where o is staged, otherwise the tensor.
        num_tiles, counter: for the scheduler; with pieces, num_tiles is num_ctas.
        parts: results of pieces, see `Arguments`.
        descales: with fp8, the factors of K and V.
        tree_mask: see `Arguments`.
    """

    q_tma: cute.CopyAtom
    q: cute.Tensor
    k_tma: cute.CopyAtom | None
    k: cute.Tensor
    v_tma: cute.CopyAtom | None
    v: cute.Tensor
    o_tma: cute.CopyAtom | None
    o: cute.Tensor
    lse: cute.Tensor | None
    sink: cute.Tensor | None
    pages: Pages | None
    num_tiles: Int32
    counter: cute.Tensor | None
    parts: cute.Tensor | None
    descales: Descales | None
    tree_mask: cute.Tensor | None


@dataclass(frozen=True)
class Consumer(Carried):
    """What a warp of the consumers keeps.

    Attributes:
        warp: the warp's number in the CTA.
        group: the number of the warp's warpgroup.
        turns: the warpgroup's turns to start products.
        q, o: shared addresses of the warpgroup's rows of Q, and of staged O.
        k, v: shared addresses of the rings.
        ones: the shared address of the ones beside V.
        arrived: the shared address of the number of earlier arrivals at a query tile.
        held: registers of the first columns of Q.
        s, p, acc: registers of S, of P as an operand, and of O.
        score_sums: in a pair, sums of both CTAs' parts of S.
        tree_mask: see `Arguments`.
    """

    warp: Int32
    group: Int32
    turns: Turns
    barriers: Barriers
    q: Int32
    k: Int32
    v: Int32
    ones: Int32 | None
    arrived: Int32 | None
    o: Int32 | None
    held: cute.Tensor | None
    s: cute.Tensor
    p: cute.Tensor
    acc: cute.Tensor
    softmax: FragmentSoftmax
    visible: Visibility
    score_sums: ScoreSums | None
    tree_mask: cute.Tensor | None


class Sm90Forward:
    """The kernel for one Sm90ForwardSpec; see the module's docstring."""

    def __init__(self, spec: Sm90ForwardSpec):
        self.spec = spec
        self.dtype = DTYPE[spec.dtype]
        self.fp8 = DTYPE[spec.fp8] if spec.fp8 != "none" else None
        # The type of P and V. Every fp8 number is a float16.
        self.p_dtype_name = "float16" if self.fp8 else spec.dtype
        self.p_dtype = DTYPE[self.p_dtype_name]
        # The rings of K and V that TMA fills: the ends of their names, and bytes of an element.
        self.loaded, self.loaded_bytes = ("_fp8", 1) if self.fp8 else ("", 2)
        # A single stage is loaded in halves: TMA loads one half while warps convert the other.
        self.halves = 2 if spec.loaded == 1 else 1
        self.pieces = spec.scheduler == "pieces"
        self.warpgroups = spec.tile_m // ROWS
        self.few_rows = self.warpgroups == 1  # few query rows of a K/V head
        # Whether warpgroups pass over K/V tiles that their rows do not see. In tiles of many rows,
        # a warpgroup without existing rows passes over all K/V tiles but one.
        self.passes = spec.window_right or spec.window_left or self.warpgroups > 2
        row = configs.forward("sm_90a", spec.head_dim, spec.head_dim_v)
        self.held = 0 if self.few_rows or self.pieces else row.held
        if row.fp8 is not None and self.fp8:
            self.held = row.fp8.held
        self.turns = row.turns or spec.tile_m != row.tile.m
        # A pair of CTAs has a tile, each CTA with a half of the columns.
        self.pair = row.cluster == CTAS
        # Or a pair has two tiles, and each CTA loads half of the columns of K and V for both.
        self.shares = spec.shared_keys
        self.clustered = self.pair or self.shares
        self.scheduler = (PAIR_SCHEDULERS if self.clustered else SCHEDULERS)[spec.scheduler]
        self.columns, self.columns_v = row.columns, row.columns_v
        # The number of first columns of CTA 1's Q that are zeros: CTA 0 has these columns too.
        self.zeros = row.cluster * self.columns - spec.head_dim
        self.v_stages = row.v_stages or spec.stages
        self.row_bytes, self.v_row_bytes = 2 * self.columns, 2 * self.columns_v
        step = row.fma_step or spec.tile_n
        self.on_fma = range(step - 1, spec.tile_n // 4, step)
        # Rows that a warpgroup adds up at once.
        self.rows_once = AT_ONCE * (WARPGROUP * VECTOR // self.columns_v)
        # The tensor cores add up rounded P, which is not good enough for the log-sum-exp.
        by_product = row.sums_by_product and not (spec.lse or spec.batch_invariant)
        self.sums = SUMS if by_product else 0
        consumer_warps = self.warpgroups * WARPGROUP_WARPS
        self.consumers = Role("consumers", range(consumer_warps))
        self.load = Role("load", range(consumer_warps, consumer_warps + 1))
        # The warps that load K and V, and the warps that take tiles from the load warp.
        self.loaders, self.takers = self.load, self.consumers
        self.gathers = spec.page_rows == GATHERED
        registers = GATHER_REGISTERS if self.gathers else REGISTERS
        registers = PIECES_REGISTERS if self.pieces else registers
        self.registers = (REGISTERS_WITH_FP8 if self.fp8 else registers)[self.warpgroups]
        if self.gathers:
            warps = range(consumer_warps, consumer_warps + WARPGROUP_WARPS)
            self.load = Role("load", warps[-1:])
            self.loaders = Role("gather", warps)
            self.takers = Role("consumers and gather", range(warps[-1]))
        if self.fp8:
            # bfloat16 K takes four times as many instructions as float16 V.
            first_v = consumer_warps + spec.k_warps
            end = first_v + spec.k_warps // 2
            self.k_warps = Role("K's conversion", range(consumer_warps, first_v))
            self.v_warps = Role("V's conversion", range(first_v, end))
            self.takers = Role("consumers and conversion", range(end))
            self.load = self.loaders = Role("load", range(end, end + 1))
        # Rounded up to whole warpgroups; the other warps idle.
        self.num_threads = -(-(self.load.warps.stop) // WARPGROUP_WARPS) * WARPGROUP
        self.work = SplitWork if spec.split else PieceWork if self.pieces else Work
        self.stored = Float32 if spec.split else self.dtype
        # The first layout that fits. Partial results are not staged.
        choices = [(2, True), (1, True), (2, False), (1, False)]
        if spec.split or self.pieces or self.pair:
            choices = [(2, False), (1, False)]
        self.q_stages, self.o_staged = next(
            (choice for choice in choices if self.buffers(*choice).nbytes <= MAX_SMEM_BYTES),
            choices[-1],
        )
        self.pipeline = Pipeline(*self.edges(self.q_stages))
        self.smem = self.buffers(self.q_stages, self.o_staged, limit=MAX_SMEM_BYTES)
        self.q_rows, self.o_rows = (
            BoxedRows(rows, columns, spec.ragged_q, not spec.varlen_q, packed=spec.packed_heads)
            for rows, columns in ((spec.tile_m, self.columns), (ROWS, self.columns_v))
        )
        self.k_rows, self.v_rows = (
            BoxedRows(
                spec.page_rows or spec.tile_n,
                columns,
                spec.ragged_k,
                not spec.varlen_k,
                swizzle=not self.fp8,
            )
            for columns in (self.columns, self.columns_v)
        )

    def edges(self, q_stages: int) -> tuple[Edge, ...]:
        load, consumers, spec = self.load, self.consumers, self.spec
        stages = spec.stages
        loaders, by = self.loaders, Kind.THREADS if self.gathers else Kind.BYTES
        queue = TileQueue.edges(load, self.takers)
        if self.fp8:
            return (*queue, *self.edges_with_fp8(q_stages))
        if self.clustered and spec.scheduler != "single":
            queue = (*queue, *PairNumbers.edges(load))
        if self.pair:
            queue = (*queue, *ScoreSums.edges(consumers))
        reach = Reach.EACH if self.shares else Reach.CTA
        return (
            *queue,
            Edge("q_full", load, consumers, q_stages, Kind.BYTES, payload="Q"),
            Edge("q_empty", consumers, load, q_stages, Kind.WARPS, payload="its stage"),
            Edge("k_full", loaders, consumers, stages, by, payload="K"),
            Edge("k_empty", consumers, loaders, stages, Kind.WARPS, reach, "its stage"),
            Edge("v_full", loaders, consumers, self.v_stages, by, payload="V"),
            Edge("v_empty", consumers, loaders, self.v_stages, Kind.WARPS, reach, "its stage"),
        )

    def edges_with_fp8(self, q_stages: int) -> tuple[Edge, ...]:
        load, consumers, spec = self.load, self.consumers, self.spec
        edges = [
            Edge("q_full", load, consumers, q_stages, Kind.BYTES, payload="Q"),
            Edge("q_empty", consumers, load, q_stages, Kind.WARPS, payload="its stage"),
        ]
        for x, warps in (("k", self.k_warps), ("v", self.v_warps)):
            name, loaded, stages = x.upper(), spec.loaded * self.halves, spec.stages
            edges += [
                Edge(f"{x}_fp8_full", load, warps, loaded, Kind.BYTES, payload=f"fp8 {name}"),
                Edge(f"{x}_fp8_empty", warps, load, loaded, Kind.WARPS, payload="its stage"),
                Edge(f"{x}_full", warps, consumers, stages, Kind.WARPS, payload=name),
                Edge(f"{x}_empty", consumers, warps, stages, Kind.WARPS, payload="its stage"),
            ]
        return tuple(edges)

    def buffers(
        self, q_stages: int, o_staged: bool, limit: int = 2 * MAX_SMEM_BYTES
    ) -> SharedMemory:
        spec, at = self.spec, SWIZZLE_ALIGNMENT
        o_elements, v_elements = (n * self.columns_v for n in (spec.tile_m, spec.tile_n))
        o = (Buffer("o", self.dtype, o_elements, 1, at, "O"),) if o_staged else ()
        if self.sums:
            o = (Buffer("ones", Int32, ONES_BYTES // 4, 1, at, "ones"), *o)
        if self.pieces:
            o = (Buffer("arrived", Int32, self.warpgroups, holds="earlier arrivals"), *o)
        if self.clustered:
            o = (PairNumbers.buffer(), *o)
        if self.pair:
            o = (ScoreSums.buffer(spec.tile_m, spec.tile_n), *o)
        if self.fp8:
            k_elements, loaded = spec.tile_n * self.columns, spec.loaded * self.halves
            o = (
                Buffer("k_fp8", self.fp8, k_elements // self.halves, loaded, at, "fp8 K"),
                Buffer("v_fp8", self.fp8, v_elements // self.halves, loaded, at, "fp8 V"),
                *o,
            )
        return SharedMemory(
            Buffer("q", self.dtype, spec.tile_m * self.columns, q_stages, at, "Q"),
            Buffer("k", self.dtype, spec.tile_n * self.columns, spec.stages, at, "K"),
            Buffer("v", self.p_dtype, v_elements, self.v_stages, at, "V"),
            *o,
            TileQueue.buffer(self.work),
            Buffer("barriers", Int64, Pipeline(*self.edges(q_stages)).count),
            limit=limit,
        )

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        roles: tuple[Role, ...] = (self.consumers, self.loaders)
        if self.fp8:
            roles = (*roles, self.k_warps, self.v_warps)
        return report_names(self.smem, self.pipeline, roles, shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        spec, fake = self.spec, FakeArguments(self.spec, self.spec.head_dim, self.spec.head_dim_v)
        lse = fake.lse() if spec.lse else None
        given = {"counter": fake.counter() if spec.scheduler == "counter" else None, "lse": lse}
        given["parts"] = None
        given |= {"k_descale": fake.descale(spec.k_descale)}
        given |= {"v_descale": fake.descale(spec.v_descale)}
        given |= {"tree_mask": fake.tree_mask(spec.tree_mask)}
        if self.pieces:
            given |= fake.pieces(spec.tile_m, spec.head_dim_v + configs.PART_COLUMNS)
        if spec.split:
            given |= {"o": fake.o_splits(), "lse": fake.lse_splits()}
        return placeholders(fake.arguments(Arguments, **given))

    # -- host ---------------------------------------------------------------------------------

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        spec = self.spec
        queries = Sequences(a.q.shape[-3], a.cu_seqlens_q, a.seqused_q)
        keys = Sequences(a.k.shape[-3], a.cu_seqlens_k, a.seqused_k)
        batch, pages = queries.batch(a.q), None
        if cutlass.const_expr(a.page_table is not None):
            pages = Pages.of(a.page_table, a.k, spec, spec.tile_n)
            keys = Sequences(pages.most_keys, a.cu_seqlens_k, a.seqused_k)
        tiles = self.tile_map(a, queries, keys, batch)
        if cutlass.const_expr(not (spec.split or self.few_rows or self.pieces)):
            tiles = tiles.balanced(spec, a.num_ctas)
        softcap = a.softcap if spec.softcap else None
        scaling = Scaling.of(a.softmax_scale, softcap, HEADROOM[self.p_dtype_name])
        descales = None
        if cutlass.const_expr(self.fp8 is not None):
            scale = a.softmax_scale if spec.k_descale else None
            descales = Descales(
                a.k_descale, a.v_descale, scale, softcap if spec.k_descale else None
            )
        visible = Visibility.of(
            spec, spec.tile_m, spec.tile_n, spec.packed_heads, a.window_left, a.window_right
        )
        num_tiles = num_ctas = a.num_ctas
        if cutlass.const_expr(not self.pieces):
            num_tiles = tiles.count()
            num_ctas = self.scheduler.clusters(num_tiles, a.num_ctas)
        if cutlass.const_expr(not spec.split):  # partial results have their own memory
            lengths = (a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_q, a.seqused_k)
            others = (*lengths, a.page_table, a.k_descale, a.v_descale, a.tree_mask)
            if overlaps((a.o, a.lse), (a.q, a.k, a.v, a.sink, *others)):
                num_ctas = Int32(0)  # the driver rejects an empty grid; the operator says why
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_tma, q = self.q_rows.atom(load, a.q)
        if cutlass.const_expr(self.shares):
            load = cpasync.CopyBulkTensorTileG2SMulticastOp()
        k_tma, k, v_tma, v = None, a.k, None, a.v
        if cutlass.const_expr(not self.gathers):
            k_tma, k = self.k_rows.atom(load, a.k)
            v_tma, v = self.v_rows.atom(load, a.v)
        o_tma, o = None, a.o
        if cutlass.const_expr(self.o_staged):
            o_tma, o = self.o_rows.atom(store, a.o)
        x = Operands(
            q_tma, q, k_tma, k, v_tma, v, o_tma, o, a.lse, a.sink, pages, num_tiles, a.counter,
            a.parts, descales, a.tree_mask,
        )  # fmt: skip
        grid = [CTAS * num_ctas if self.clustered else num_ctas, 1, 1]
        self.kernel(x, tiles, visible, scaling).launch(
            grid=grid,
            block=[self.num_threads, 1, 1],
            cluster=[CTAS, 1, 1] if self.clustered else None,
            min_blocks_per_mp=1,
            stream=stream,
        )

    def tile_map(self, a: Arguments, queries: Sequences, keys: Sequences, batch: Int32) -> TileMap:
        """The tiles, in an order in which CTAs that run at once read the same K and V."""
        spec = self.spec
        heads, group = a.q.shape[-2] // spec.packed_heads, a.q.shape[-2] // a.k.shape[-2]
        windowed = spec.window_left or spec.window_right
        at_once = WINDOWED_HEADS_AT_ONCE if windowed else HEADS_AT_ONCE
        rows = CTAS * spec.tile_m if self.shares else spec.tile_m
        given = (
            rows, spec.packed_heads, spec.window_right, queries, keys, heads, group, batch,
            cutlass.min(heads * batch, at_once),
        )  # fmt: skip
        return SplitTileMap(*given, splits=a.o.shape[0]) if spec.split else TileMap(*given)

    # -- device: set-up -----------------------------------------------------------------------

    @cute.kernel
    def kernel(self, x: Operands, tiles: TileMap, visible: Visibility, scaling: Scaling) -> None:
        spec, tiles = self.spec, tiles.on_device(x.o)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = self.smem.allocate()
        barriers = self.pipeline.at(storage.barriers)
        if warp == self.load.warps[0]:
            if cutlass.const_expr(spec.seqused_k and (self.few_rows or self.pieces)):
                prefetch_global(tiles.keys.seqused, cute.arch.lane_idx() * LINE_WORDS)
            if cutlass.const_expr(self.pieces):
                self.prefetch(x.pages, tiles)
            copies = (x.q_tma, x.k_tma, x.v_tma, x.o_tma)
            prepare(tuple(tma for tma in copies if tma is not None), barriers)
        if cutlass.const_expr(self.sums > 0):
            one = Float32(1.0)
            at = shared_address(storage.ones)
            for i in cutlass.range(cute.arch.thread_idx()[0], ONES_BYTES // 4, self.num_threads):
                store_shared(Int32, at + 4 * i, [pack(self.p_dtype, one, one)])
            cute.arch.fence_view_async_shared()
        if cutlass.const_expr(self.zeros > 0):
            self.clear_queries(storage)
        if cutlass.const_expr(self.clustered):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        load_registers, consumer_registers = self.registers
        if warp >= self.consumers.warps.stop:
            cute.arch.setmaxregister_decrease(load_registers)
            if warp == self.load.warps[0]:
                self.load_warp(x, storage, barriers, tiles, visible)
            elif cutlass.const_expr(self.gathers):
                self.gather_warps(x, storage, barriers, visible)
            elif cutlass.const_expr(self.fp8 is not None):
                if warp < self.k_warps.warps.stop:
                    of_k = self.dequantiser("k", storage, barriers, warp)
                    self.conversion_warps(of_k, storage, visible)
                elif warp < self.v_warps.warps.stop:
                    of_v = self.dequantiser("v", storage, barriers, warp)
                    self.conversion_warps(of_v, storage, visible)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            own = self.consumer(storage, barriers, warp, visible, scaling, x.tree_mask)
            self.consumer_warps(x, own, storage)
        if cutlass.const_expr(self.clustered):
            # Neither CTA may end while the other CTA signals it, stores to it or loads for it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def clear_queries(self, storage: Pointers) -> None:
        """Set the first `zeros` columns of CTA 1's Q to 0."""
        rows = self.spec.tile_m
        stage, vectors = rows * self.row_bytes, rows * self.zeros * 2 // VECTOR_BYTES
        if cta_rank() == 1:
            at = shared_address(storage.q)
            for i in cutlass.range(cute.arch.thread_idx()[0], vectors, self.num_threads):
                for q in cutlass.range_constexpr(self.q_stages):
                    zeros = [Int32(0)] * (VECTOR_BYTES // 4)
                    store_shared(Int32, at + q * stage + i * VECTOR_BYTES, zeros)
            cute.arch.fence_view_async_shared()

    def prefetch(self, pages: Pages | None, tiles: TileMap) -> None:
        """Bring starts of sequences, and the first sequences' pages, to L2."""
        lane = cute.arch.lane_idx()
        for offsets in (tiles.queries.cu_seqlens, tiles.keys.cu_seqlens):
            if offsets is not None:
                prefetch_global(offsets, lane * LINE_WORDS)
        if pages is not None:
            pages.prefetch_first()

    def consumer(
        self, storage: Pointers, barriers: Barriers, warp: Int32, visible: Visibility,
        scaling: Scaling, tree_mask: cute.Tensor | None,
    ) -> Consumer:  # fmt: skip
        spec = self.spec
        group = warp // WARPGROUP_WARPS
        o, score_sums = None, None
        if self.pair:
            score_sums = ScoreSums.of_warp(
                barriers, shared_address(storage.scores), warp, spec.tile_n
            )
        if self.o_staged:
            o = shared_address(storage.o) + group * (ROWS * self.v_row_bytes)
        return Consumer(
            warp=warp,
            group=group,
            turns=Turns(group, self.warpgroups if self.turns else 1),
            barriers=barriers,
            q=shared_address(storage.q) + group * (ROWS * BOX * 2),
            k=shared_address(storage.k),
            v=shared_address(storage.v),
            ones=shared_address(storage.ones) if self.sums else None,
            arrived=shared_address(storage.arrived) + group * 4 if self.pieces else None,
            o=o,
            held=cute.make_rmem_tensor((self.held // 4,), Int32) if self.held else None,
            s=fragments.accumulators(spec.tile_n),
            p=cute.make_rmem_tensor((spec.tile_n // 4,), Int32),
            acc=fragments.accumulators(self.columns_v + self.sums),
            softmax=FragmentSoftmax(scaling, not self.sums, self.on_fma, spec.batch_invariant),
            visible=visible,
            score_sums=score_sums,
            tree_mask=tree_mask,
        )

    # -- device: load -------------------------------------------------------------------------

    @cute.jit
    def load_warp(
        self,
        x: Operands,
        storage: Pointers,
        barriers: Barriers,
        tiles: TileMap,
        visible: Visibility,
    ) -> None:
        """Publish the CTA's tiles one after the other, and load the tiles' operands."""
        spec, pages = self.spec, x.pages
        k_ring, v_ring = storage.k, storage.v
        if cutlass.const_expr(self.fp8 is not None):
            k_ring, v_ring = storage.k_fp8, storage.v_fp8
        k_smem = self.ring(k_ring, self.columns, pages, spec.stages)
        v_smem = self.ring(v_ring, self.columns_v, pages, self.v_stages)
        q_across, q_size = spec.tile_m * BOX, spec.tile_m * self.columns
        q_smem = boxes(
            storage.q + spec.tile_m * self.zeros, spec.tile_m,
            ((self.columns - self.zeros) // BOX, q_across), (self.q_stages, q_size),
        )  # fmt: skip
        if cutlass.const_expr(self.zeros > 0):
            of_first = boxes(
                storage.q, spec.tile_m, (self.zeros // BOX, q_across), (self.q_stages, q_size)
            )
            q_smem = q_smem, of_first
        queue = TileQueue(self.work, storage.work, barriers)
        smem = q_smem, k_smem, v_smem
        if cutlass.const_expr(self.pieces):
            numbers = None
            if cutlass.const_expr(self.pair):
                numbers = self.numbers(x, storage, barriers)
            self.load_pieces(x, smem, queue, tiles, visible, numbers)
        else:
            scheduler: Any = None
            if cutlass.const_expr(self.clustered and x.counter is not None):
                scheduler = PairCounterScheduler(x.num_tiles, self.numbers(x, storage, barriers))
            else:
                counter = None
                if cutlass.const_expr(x.counter is not None):
                    counter = x.counter.iterator
                scheduler = self.scheduler(x.num_tiles, barriers, counter)
            queue.fill(
                scheduler,
                tiles,
                lambda *tile: self.load_tile(x, smem, queue, tiles, visible, *tile),
            )
        if cutlass.const_expr(spec.split):
            start_dependents()  # the combination waits for this grid's end

    @cute.jit
    def gather_warps(
        self, x: Operands, storage: Pointers, barriers: Barriers, visible: Visibility
    ) -> None:
        """Gather K and V of the load warp's tiles, beside the load warp."""
        spec = self.spec
        k_smem = self.ring(storage.k, self.columns, x.pages, spec.stages)
        v_smem = self.ring(storage.v, self.columns_v, x.pages, self.v_stages)
        queue = TileQueue(self.work, storage.work, barriers)
        taken, n = Int32(0), Int32(0)
        work = queue.take(taken)
        while work.exists:
            smem = None, k_smem, v_smem
            taken, n = self.load_work(x, smem, queue, visible, work, taken, n)
            work = queue.take(taken)

    def numbers(self, x: Operands, storage: Pointers, barriers: Barriers) -> PairNumbers:
        """The source of a pair's numbers of tiles or pieces."""
        assert x.counter is not None
        return PairNumbers.of(barriers, storage, x.counter)

    def first_column(self, columns: int, own: int) -> Any:
        """The first column of a CTA that has `own` of `columns` columns; None without pairs."""
        return cta_rank() * (columns - own) if self.pair else None

    @cute.jit
    def load_pieces(
        self, x: Operands, smem: tuple[cute.Tensor, ...], queue: TileQueue, tiles: TileMap,
        visible: Visibility, numbers: PairNumbers | None,
    ) -> None:  # fmt: skip
        """Publish and load pieces and whole segments, one after the other."""
        number, barriers = self.take_number(x, numbers, Int32(0)), queue.barriers
        pieces = PieceMap.of(
            tiles, visible, x.num_tiles, self.spec.least_key_tiles,
            rows_at_once=self.warpgroups * self.rows_once,
        )  # fmt: skip
        window = pieces.start()
        taken, n = Int32(0), Int32(0)
        # The code is cold, and comes from memory: each part of it stands once.
        exists = Boolean(True)
        while exists:
            number = cute.arch.shuffle_sync(number, 0)
            window = pieces.window_of(number, window)
            exists = window.order < pieces.end
            if exists:
                work = pieces.work(number, window)
                taken, n = self.load_work(x, smem, queue, visible, work, taken, n)
                if work.is_sum:
                    # A CTA that took sums ahead would keep them from idle CTAs.
                    barriers.wait_previous("q_empty", taken - 1 + self.q_stages)
                number = self.take_number(x, numbers, taken)
        queue.publish_end(taken)
        if cute.arch.lane_idx() == 0:
            restore_counter(x.counter.iterator.toint())

    @cute.jit
    def take_number(self, x: Operands, numbers: PairNumbers | None, n: Int32) -> Int32:
        """The next number, in lane 0. The load warp has taken `n` numbers before."""
        number = Int32(0)
        if cutlass.const_expr(numbers is not None):
            number = numbers.take(NEVER, n)
        elif cute.arch.lane_idx() == 0:
            number = increment_global(x.counter.iterator.toint(), NEVER)
        return number

    def ring(self, buffer: Any, columns: int, pages: Pages | None, stages: int) -> Any:
        """The stages of K or V tiles of `columns` columns in shared memory, as TMA fills them, or
        the shared address of the stages, where rows are gathered."""
        spec, swizzle = self.spec, not self.fp8
        columns, stages = columns // self.halves, (spec.loaded or stages) * self.halves
        if self.gathers:
            return shared_address(buffer)
        if pages is not None:
            return pages.view(buffer, columns, stages, swizzle)
        across = (columns // BOX, spec.tile_n * BOX)
        return boxes(buffer, spec.tile_n, across, (stages, spec.tile_n * columns), swizzle=swizzle)

    @cute.jit
    def load_tile(
        self, x: Operands, smem: tuple[cute.Tensor, ...], queue: TileQueue, tiles: TileMap,
        visible: Visibility, where: list[Int32], taken: Int32, n: Int32,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """As `load_work`, for a tile that `locate` has found."""
        if cutlass.const_expr(x.pages is not None and self.few_rows):
            x.pages.prefetch(where[2])  # the sequence's entries
        if cutlass.const_expr(self.shares):
            block, *rest = where
            where = [block * CTAS + cta_rank(), *rest]
        return self.load_work(x, smem, queue, visible, tiles.work(*where), taken, n)

    @cute.jit
    def load_work(
        self, x: Operands, smem: tuple[Any, ...], queue: TileQueue, visible: Visibility,
        work: Any, taken: Int32, n: Int32,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """Publish a tile as work `taken`, and load its K/V tiles, which are uses n and up. Return
        the next values of `taken` and n. K/V tiles come from the last to the first. Loads follow
        the order in which stages become free: Q comes after the first K. Each V comes after the
        next tile's K, whose scores come before this tile's P V. A warp without memory for Q, in
        `smem`, only gathers its rows of K and V."""
        pages: Any = x.pages
        barriers = queue.barriers
        q_smem, k_smem, v_smem = smem
        if cutlass.const_expr(self.gathers):
            pages = Gather.of_warp(pages)
        if cutlass.const_expr(q_smem is not None):
            queue.publish_work(taken, work)
        column = self.first_column(self.spec.head_dim, self.columns)
        queries = self.q_rows.box(x.q, work.block, *work.queries, column=column)
        first, end = self.key_tiles(visible, work)
        if first >= end:
            self.load_queries(x, queries, q_smem, barriers, taken)
        else:
            found = self.found(pages, end - 1, work)
            use = (barriers, n, pages, found)
            self.load_keys("k", x.k_tma, x.k, end - 1, work, k_smem, *use)
            self.load_queries(x, queries, q_smem, barriers, taken)
            for i in cutlass.range(end - 1 - first, unroll=1):
                key_tile = end - 2 - i
                before, found = found, self.found(pages, key_tile, work)
                use = (barriers, n + 1, pages, found)
                self.load_keys("k", x.k_tma, x.k, key_tile, work, k_smem, *use)
                use = (barriers, n, pages, before)
                self.load_keys("v", x.v_tma, x.v, key_tile + 1, work, v_smem, *use)
                n += 1
            use = (barriers, n, pages, found)
            self.load_keys("v", x.v_tma, x.v, first, work, v_smem, *use)
            n += 1
        return taken + 1, n

    def load_queries(
        self, x: Operands, rows: cute.Tensor, smem: Any, barriers: Barriers, taken: Int32
    ) -> None:
        """Load Q of work `taken`, unless the warp has no memory for Q."""
        if self.zeros and smem is not None:
            self.load_queries_beside_zeros(x, rows, *smem, barriers, taken)
        elif smem is not None:
            load_use("q", x.q_tma, rows, smem, barriers, taken)

    @cute.jit
    def load_queries_beside_zeros(
        self, x: Operands, rows: cute.Tensor, smem: cute.Tensor, of_first: cute.Tensor,
        barriers: Barriers, taken: Int32,
    ) -> None:  # fmt: skip
        """Load Q. CTA 1 leaves out the first `zeros` columns, which stay 0."""
        barriers.wait_previous("q_empty", taken)
        leads = cta_rank() == 0
        nbytes = cutlass.select_(leads, self.columns, self.columns - self.zeros)
        with cute.arch.elect_one():
            barriers.expect("q_full", taken, nbytes * (2 * self.spec.tile_m))
        rest = cute.domain_offset((0, self.zeros), rows)
        load_boxes(x.q_tma, rest, smem, barriers, "q_full", taken)
        if leads:
            load_boxes(x.q_tma, rows, of_first, barriers, "q_full", taken)

    def found(self, pages: Pages | Gather | None, key_tile: Any, work: Any) -> Any:
        """The pages of a K/V tile's boxes, or of the gathered rows."""
        if pages is None:
            return None
        if isinstance(pages, Gather):
            return pages.of_tile(key_tile, work.sequence, work.seqlen_k)
        return pages.of_tile(key_tile, work.sequence, work.seqlen_k, self.k_rows)

    @cute.jit
    def load_keys(
        self,
        name: cutlass.Constexpr[str],
        tma: cute.CopyAtom | None,
        x: cute.Tensor,
        key_tile: Int32,
        work: Any,
        smem: Any,
        barriers: Barriers,
        n: Int32,
        pages: Pages | Gather | None,
        found: Any,
    ) -> None:
        """Load a tile of k or v, `name`, as use n; `found` are the pages of the tile's boxes or
        rows. A wide fp8 tile has two uses, of half of the columns each."""
        rows = self.k_rows if name == "k" else self.v_rows
        ring, columns = name + self.loaded, rows.columns // self.halves
        spec, nbytes = self.spec, self.loaded_bytes
        of_row = spec.head_dim if cutlass.const_expr(name == "k") else spec.head_dim_v
        column = self.first_column(of_row, rows.columns)
        if cutlass.const_expr(self.gathers):
            barriers.wait_previous(f"{name}_empty", n)
            stage = barriers.stage(f"{name}_full", n)
            tile = smem + stage * (2 * spec.tile_n * rows.columns)
            full = barriers.address(f"{name}_full", stage)
            if cutlass.const_expr(column is not None):
                x = cute.domain_offset((0, 0, 0, column), x)
            pages.load(x, found, work.kv_head, rows.columns, tile, full)
        else:
            for half in cutlass.range_constexpr(self.halves):
                use = n * self.halves + half
                if cutlass.const_expr(pages is None):
                    box = rows.box(x, key_tile, *work.keys, column=column)
                    if cutlass.const_expr(self.halves > 1):
                        box = cute.local_tile(box, (rows.rows, columns), (0, half))
                    load_use(
                        ring, tma, box, smem, barriers, use, multicast=self.shares,
                        element_bytes=nbytes,
                    )  # fmt: skip
                else:
                    full = f"{ring}_full"
                    barriers.wait_previous(f"{ring}_empty", use)
                    with cute.arch.elect_one():
                        barriers.expect(full, use, nbytes * spec.tile_n * columns)
                    if cutlass.const_expr(self.halves > 1):
                        column = Int32(half * columns)
                    pages.load(tma, x, rows, found, work.kv_head, smem, barriers, full, use, column)

    # -- device: conversion of fp8 ------------------------------------------------------------

    def dequantiser(
        self, name: str, storage: Pointers, barriers: Barriers, warp: Int32
    ) -> Dequantiser:
        """What a warp that converts k or v, `name`, keeps."""
        role, dtype, columns, source, to = {
            "k": lambda: (
                self.k_warps, self.dtype, self.columns, storage.k_fp8, storage.k,
            ),
            "v": lambda: (
                self.v_warps, self.p_dtype, self.columns_v, storage.v_fp8, storage.v,
            ),
        }[name]()  # fmt: skip
        assert self.fp8 is not None
        return Dequantiser(
            name, self.fp8, dtype, self.spec.tile_n * columns // self.halves, self.halves,
            len(role), warp - role.warps[0], shared_address(source), shared_address(to), barriers,
        )  # fmt: skip

    @cute.jit
    def conversion_warps(
        self, dequantiser: Dequantiser, storage: Pointers, visible: Visibility
    ) -> None:
        """Convert the K/V tiles of the CTA's tiles."""
        queue = TileQueue(self.work, storage.work, dequantiser.barriers)
        taken, n = Int32(0), Int32(0)
        work = queue.take(taken)
        while work.exists:
            first, end = self.key_tiles(visible, work)
            for _ in cutlass.range(end - first, unroll=1):
                dequantiser.convert(n)
                n += 1
            taken += 1
            work = queue.take(taken)

    # -- device: products and softmax ---------------------------------------------------------

    @cute.jit
    def consumer_warps(self, x: Operands, own: Consumer, storage: Pointers) -> None:
        queue = TileQueue(self.work, storage.work, own.barriers)
        own.turns.begin()
        taken = Int32(0)  # tiles
        n = Int32(0)  # K/V tiles
        work: Any = queue.take(taken)
        while work.exists:
            of_tile = self.descaled(x, own, work)
            own.softmax.start()
            own.acc.fill(0.0)
            own.barriers.wait("q_full", taken)
            first, end = self.key_tiles(own.visible, work)
            if first < end:
                n = self.compute_tile(of_tile, work, first, end, taken, n)
            if cutlass.const_expr(self.pieces):
                self.release_empty(own, work, first >= end, taken)
                self.finish_piece(x, of_tile, work)
                if work.is_sum:
                    own.barriers.warp_arrives("q_empty", taken)
            else:
                if first >= end or self.q_stages > 1:
                    own.barriers.warp_arrives("q_empty", taken)
                self.finish_rows(x, of_tile, work)
                if cutlass.const_expr(self.o_staged):
                    self.store_tile(x, own, storage, work)
                else:
                    self.store_rows(x, own, work)
            taken += 1
            work = queue.take(taken)
        if cutlass.const_expr(self.o_staged):
            self.stores_done(own)
        own.turns.end()

    def descaled(self, x: Operands, own: Consumer, work: Any) -> Consumer:
        """`own` with K's factor in a tile."""
        given = x.descales
        if given is None or given.k is None:
            return own
        scale = given.softmax_scale * given.k[work.sequence, work.kv_head]
        scaling = Scaling.of(scale, given.softcap, HEADROOM[self.p_dtype_name])
        return replace(own, softmax=own.softmax.scaled(scaling))

    @cute.jit
    def release_empty(self, own: Consumer, work: Any, empty: Any, taken: Int32) -> None:
        """Release Q of a piece, if `compute_tile` has not: Q of a sum is released after the sum."""
        if not work.is_sum:
            if empty or self.q_stages > 1:
                own.barriers.warp_arrives("q_empty", taken)

    def key_tiles(self, visible: Visibility, work: Any) -> tuple[Any, Any]:
        """[first, end) of the K/V tiles of a tile, or of a part of it."""
        first, end = visible.key_tiles(work.block, work.seqlen_q, work.seqlen_k)
        if self.spec.split:
            return work.part(first, end, self.spec.split_key_tiles)
        return work.part(first, end) if self.pieces else (first, end)

    @cute.jit
    def compute_tile(
        self, own: Consumer, work: Work, first: Int32, end: Int32, taken: Int32, n: Int32
    ) -> Int32:
        """Compute P V of work `taken` over its K/V tiles. n K/V tiles came before; return the
        number after this work."""
        spec = self.spec
        q = own.q + own.barriers.stage("q_full", taken) * (spec.tile_m * self.row_bytes)
        row = work.block * spec.tile_m + own.group * ROWS
        whole_first, whole_end = own.visible.whole_key_tiles(
            row, ROWS, work.seqlen_q, work.seqlen_k
        )
        tile_first = first
        if cutlass.const_expr(self.passes):
            # The K/V tiles that the warpgroup's rows see, but at least one tile.
            seen = own.visible.key_tiles_of_rows(row, ROWS, work.seqlen_q, work.seqlen_k)
            exists = row < work.seqlen_q * spec.packed_heads
            own_end = cutlass.select_(exists, cutlass.max(seen[1], first + 1), first + 1)
            own_end = cutlass.min(own_end, end)
            n = cute.arch.make_warp_uniform(self.pass_key_tiles(own, end - own_end, n))
            first, end = cutlass.min(cutlass.max(seen[0], first), own_end - 1), own_end
        if cutlass.const_expr(self.held):
            held = held_rows(q, own.warp % WARPGROUP_WARPS, spec.tile_m, self.held)
            fragments.assign(own.held, held)
        key_tile = end - 1
        # The last K/V tile: there is no P yet for a second product.
        self.wait_keys(own, "k_full", n)
        scores = self.start_scores(own, q, n)
        fragments.assign(own.s, wgmma.wait(scores))
        own.barriers.warp_arrives("k_empty", n)
        self.add_scores(own, work)
        if cutlass.const_expr(spec.softcap):
            self.cap(own)
        if key_tile >= whole_end or key_tile < whole_first:
            self.mask(own, work, key_tile)
        self.exponentiate(own, work, True)
        fragments.assign(own.p, fragments.operand(own.s, self.p_dtype))
        n += 1
        # The K/V tiles on the right bound, those in between, and those on the left bound.
        if cutlass.const_expr(spec.window_right):
            while key_tile > cutlass.max(whole_end, first):
                key_tile -= 1
                self.next_key_tile(own, q, work, key_tile, n, True)
                n += 1
        while key_tile > cutlass.max(whole_first, first):
            key_tile -= 1
            self.next_key_tile(own, q, work, key_tile, n, False)
            n += 1
        if cutlass.const_expr(spec.window_left):
            while key_tile > first:
                key_tile -= 1
                self.next_key_tile(own, q, work, key_tile, n, True)
                n += 1
        if cutlass.const_expr(self.q_stages == 1):
            own.barriers.warp_arrives("q_empty", taken)
        self.wait_keys(own, "v_full", n - 1)
        out = self.start_output(own, n - 1)
        fragments.assign(own.acc, wgmma.wait(out))
        own.barriers.warp_arrives("v_empty", n - 1)
        if cutlass.const_expr(spec.window_left):
            n = self.pass_key_tiles(own, first - tile_first, n)
        return n

    @cute.jit
    def pass_key_tiles(self, own: Consumer, count: Int32, n: Int32) -> Int32:
        """Release K/V tiles that no row of the warpgroup sees, from use n on, and take the turns of
        these tiles. Return the use after these tiles."""
        for _ in cutlass.range(count, unroll=1):
            own.barriers.wait("k_full", n)
            own.barriers.warp_arrives("k_empty", n)
            own.barriers.wait("v_full", n)
            own.barriers.warp_arrives("v_empty", n)
            own.turns.wait()
            own.turns.give()
            n += 1
        return n

    @cute.jit
    def next_key_tile(
        self,
        own: Consumer,
        q: Int32,
        work: Work,
        key_tile: Int32,
        n: Int32,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """Compute P from Q at `q` and use n of K, beside the product P V of the previous use."""
        self.wait_keys(own, "k_full", n)
        own.turns.wait()
        scores = self.start_scores(own, q, n)
        self.wait_keys(own, "v_full", n - 1)
        out = self.start_output(own, n - 1)
        own.turns.give()
        fragments.assign(own.s, wgmma.wait(scores, pending=1))
        own.barriers.warp_arrives("k_empty", n)
        self.add_scores(own, work)
        if cutlass.const_expr(self.spec.softcap):
            self.cap(own)
        if cutlass.const_expr(masked):
            self.mask(own, work, key_tile)
        moved = self.exponentiate(own, work, False)
        fragments.assign(own.acc, wgmma.wait(out))
        own.barriers.warp_arrives("v_empty", n - 1)
        fragments.assign(own.p, fragments.operand(own.s, self.p_dtype))
        if moved:
            fragments.scale_rows(
                own.acc, [own.softmax.factor[r] for r in range(fragments.LANE_ROWS)]
            )

    def wait_keys(self, own: Consumer, edge: str, n: Any) -> None:
        """Wait for a K/V tile, use n of `edge`, so that products may read it."""
        own.barriers.wait(edge, n)
        if self.gathers:
            cute.arch.fence_view_async_shared()

    def start_scores(self, own: Consumer, q: Any, n: Any) -> list[Any]:
        """Start S = Q K^T, with Q at `q` and use n of K."""
        spec = self.spec
        stage = own.barriers.stage("k_full", n) * (spec.tile_n * self.row_bytes)
        if self.held:
            return start_scores_of_held(
                self.dtype, fragments.values(own.held), q, own.k + stage,
                tile_m=spec.tile_m, tile_n=spec.tile_n, head_dim=self.columns,
            )  # fmt: skip
        return start_scores(
            self.dtype, q, own.k + stage,
            tile_m=spec.tile_m, tile_n=spec.tile_n, head_dim=self.columns,
        )  # fmt: skip

    def start_output(self, own: Consumer, n: Any) -> list[Any]:
        """Start O + P V, with use n of V."""
        spec = self.spec
        stage = own.barriers.stage("v_full", n) * (spec.tile_n * self.v_row_bytes)
        o, p = fragments.values(own.acc), fragments.values(own.p)
        if self.sums:
            return start_output_with_sums(
                self.p_dtype, o, p, own.v + stage, own.ones,
                tile_n=spec.tile_n, head_dim=self.columns_v,
            )  # fmt: skip
        return start_output(
            self.p_dtype, o, p, own.v + stage, tile_n=spec.tile_n, head_dim=self.columns_v
        )

    @cute.jit
    def add_scores(self, own: Consumer, work: Work) -> None:
        """In a pair, add the other CTA's part of S."""
        if cutlass.const_expr(own.score_sums is not None):
            if cutlass.const_expr(not self.few_rows):
                own.score_sums.add(own.s)
            elif self.used_rows(own, work) > 0:
                own.score_sums.add(own.s)

    def used_rows(self, own: Consumer, work: Work) -> Any:
        """An upper bound of the warp's existing rows, at most 0 if no row exists. The bound may
        exceed the warp's 16 rows."""
        rows = work.seqlen_q * self.spec.packed_heads - work.block * self.spec.tile_m
        return rows - own.warp * WARP_ROWS

    def exponentiate(self, own: Consumer, work: Work, first: bool) -> Any:
        """Replace S by P, and return whether rows of O are to be rescaled."""
        if not self.few_rows:
            return own.softmax.update(own.s, first)
        return own.softmax.update_used(own.s, self.used_rows(own, work), first)

    def cap(self, own: Consumer) -> None:
        for lane_row in range(fragments.LANE_ROWS):
            cap_row(own.s[None, lane_row, None], own.softmax.scaling)

    def row(self, own: Consumer, work: Work, lane_row: int) -> Any:
        """The row, in the sequence of the pack of heads, that a lane row holds."""
        first = work.block * self.spec.tile_m + fragments.first_row(own.warp)
        return first + lane_row * fragments.LANE_ROW_STEP

    def head(self, work: Work, row: Any) -> Any:
        """The query head of a row."""
        packed = self.spec.packed_heads
        return work.head * packed + (row & (packed - 1))

    def mask(self, own: Consumer, work: Work, key_tile: Any) -> None:
        """Set the columns of keys that a row does not see to -inf."""
        lows, highs = [], []
        for lane_row in range(fragments.LANE_ROWS):
            token = own.visible.token(self.row(own, work, lane_row))
            low, high = own.visible.keys(token, work.seqlen_q, work.seqlen_k)
            lows.append(low - key_tile * self.spec.tile_n)
            highs.append(high - key_tile * self.spec.tile_n)
        fragments.mask_rows(own.s, highs, lows if self.spec.window_left else None)
        if self.spec.tree_mask:
            first = work.seqlen_k - work.seqlen_q - key_tile * self.spec.tile_n
            bits = [self.tree_bits(own, work, r) for r in range(fragments.LANE_ROWS)]
            fragments.mask_rows_by_bits(own.s, first, bits)

    @cute.jit
    def tree_bits(self, own: Consumer, work: Work, lane_row: cutlass.Constexpr[int]) -> Int64:
        """The tree_mask bits of a lane row's query. A row without a query has all bits set."""
        token = own.visible.token(self.row(own, work, lane_row))
        bits = Int64(-1)
        if token < work.seqlen_q:
            if cutlass.const_expr(self.spec.varlen_q):
                bits = Int64(own.tree_mask[work.q_start + token])
            else:
                bits = Int64(own.tree_mask[work.sequence, token])
        return bits

    # -- device: epilogue ---------------------------------------------------------------------

    @cute.jit
    def finish_rows(
        self, x: Operands, own: Consumer, work: Any, piece: cutlass.Constexpr[bool] = False
    ) -> None:
        """Divide the rows of O by their sums, and store the log-sum-exp. The sink of a `piece`
        counts later, once for all pieces."""
        spec = self.spec
        if cutlass.const_expr(self.sums > 0):
            totals = [own.acc[0, r, self.columns_v // 8] for r in range(fragments.LANE_ROWS)]
        else:
            totals = own.softmax.totals()
        v_descale = None
        if cutlass.const_expr(x.descales is not None and spec.v_descale):
            v_descale = x.descales.v[work.sequence, work.kv_head]
        for lane_row in cutlass.range_constexpr(fragments.LANE_ROWS):
            row = self.row(own, work, lane_row)
            token = own.visible.token(row)
            head = self.head(work, row)
            sink = None
            if cutlass.const_expr(x.sink is not None and not piece):
                sink = Float32(0.0)
                if token < work.seqlen_q:
                    sink = Float32(x.sink[head])
            inverse, log_sum = finish_row(
                totals[lane_row], own.softmax.maximum[lane_row], own.softmax.scaling, sink
            )
            if cutlass.const_expr(v_descale is not None):
                inverse = inverse * v_descale
            values = own.acc[None, lane_row, None]
            for j in cutlass.range_constexpr(self.columns_v // 4):
                # A row without a visible key is 0, whatever P V holds.
                scaled = values[j] * inverse
                values[j] = cutlass.select_(inverse == 0.0, Float32(0.0), scaled)
            if cutlass.const_expr(piece):
                to = self.part_row(x, work, row)
                column = self.lse_column()
                if token < work.seqlen_q and cute.arch.lane_idx() % fragments.LANES == 0:
                    to[column] = log_sum
            elif cutlass.const_expr(x.lse is not None):
                stores = cute.arch.lane_idx() % fragments.LANES == 0
                if cutlass.const_expr(self.pair):
                    stores &= cta_rank() == 0
                if token < work.seqlen_q and stores:
                    x.lse[work.lse_at(head, token, spec.varlen_q)] = log_sum

    @cute.jit
    def finish_piece(self, x: Operands, own: Consumer, work: PieceWork) -> None:
        """Store the result of a whole query tile or of a piece, and add up pieces: all rows after
        the last piece, or a part of the rows as work of its own."""
        parts = self.parts(work)
        adds, begin, stride = Boolean(False), Int32(0), Int32(self.rows_once)
        if work.is_sum:
            self.wait_for_pieces(x, own, work)
            adds = Boolean(True)
            begin = ((-1 - work.slot) * self.warpgroups + own.group) * self.rows_once
            stride = parts * (self.warpgroups * self.rows_once)
        elif work.pieces == 1:
            self.finish_rows(x, own, work)
            self.store_rows(x, own, work)
        else:
            self.finish_rows(x, own, work, True)
            self.store_rows(x, own, work, True)
            last = cutlass.select_(parts == 1, work.pieces * self.warpgroups - 1, NEVER)
            adds = Boolean(self.arrive(x, own, work, parts) == last)
        if adds:
            self.add_pieces(x, own, work, begin, stride)
        if work.is_sum:
            self.arrive(x, own, work, parts)

    @cute.jit
    def arrive(self, x: Operands, own: Consumer, work: PieceWork, parts: Int32) -> Int32:
        """Count the warpgroup's arrival at the query tile, after the warpgroup's accesses, and
        return the number of earlier arrivals. After the last arrival the count is 0."""
        group_barrier(own.group)
        # Sums arrive too, if they are work of their own.
        arrivals = work.pieces + cutlass.select_(parts > 1, parts, 0)
        arrivals *= self.warpgroups
        if cute.arch.thread_idx()[0] % WARPGROUP == 0:
            earlier = count_arrival(self.arrivals(x, work), arrivals)
            store_shared(Int32, own.arrived, [earlier])
        group_barrier(own.group)
        return load_shared(Int32, own.arrived)[0]

    @cute.jit
    def wait_for_pieces(self, x: Operands, own: Consumer, work: PieceWork) -> None:
        """Wait until all pieces of the query tile have arrived."""
        if cute.arch.thread_idx()[0] % WARPGROUP == 0:
            while load_acquire(self.arrivals(x, work)) < work.pieces * self.warpgroups:
                sleep(POLL)
        group_barrier(own.group)

    def arrivals(self, x: Operands, work: PieceWork) -> Int64:
        """The address of the number of arrivals at a query tile. Each CTA of a pair has its own
        number."""
        number = 2 + work.first_slot
        if self.pair:
            number += cute.arch.block_idx_in_cluster() * x.parts.shape[0]
        return x.counter.iterator.toint() + number * 4

    def lse_column(self) -> Any:
        """The column of a part's log-sum-exp. Each CTA of a pair has its own column."""
        return self.spec.head_dim_v + (cta_rank() if self.pair else 0)

    def parts(self, work: PieceWork) -> Int32:
        """The number of parts in which the rows of a query tile's pieces are added up."""
        rows = work.seqlen_q * self.spec.packed_heads
        return parts_of_sum(work.pieces, rows, self.spec.tile_m, self.warpgroups * self.rows_once)

    @cute.jit
    def add_pieces(
        self, x: Operands, own: Consumer, work: PieceWork, begin: Int32, stride: Int32
    ) -> None:
        """Add up rows of the pieces of a query tile: `rows_once` from `begin` on, and after every
        `stride` rows. A thread has four columns of AT_ONCE rows at a time."""
        spec = self.spec
        across = self.columns_v // VECTOR
        abreast = WARPGROUP // across  # rows that the warpgroup's threads have side by side
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        in_row, vector = thread // across, thread % across
        if cutlass.const_expr(self.pair):
            vector += cta_rank() * across
        rows = work.seqlen_q * spec.packed_heads - work.block * spec.tile_m
        rows = cutlass.min(rows, spec.tile_m)
        step = Int64(work.apart) * (x.parts.stride[0] * 4)
        for first in cutlass.range(begin, rows, stride, unroll=1):
            of_thread = [first + i * abreast + in_row for i in range(AT_ONCE)]
            starts = [
                x.parts[work.first_slot, cutlass.min(row, rows - 1), None].iterator.toint()
                for row in of_thread
            ]
            parts = [
                Parts.of_row(at, vector, self.lse_column(), step, work.pieces) for at in starts
            ]
            sums = cute.make_rmem_tensor((VECTOR, AT_ONCE), Float32)
            maxima, totals = add_up(parts, Int32(0), 1, sums)
            for i in cutlass.range_constexpr(AT_ONCE):
                row = work.block * spec.tile_m + of_thread[i]
                token = own.visible.token(row)
                head = self.head(work, row)
                if of_thread[i] < rows:
                    self.store_sum(
                        x, work, head, token, vector, sums[None, i], maxima[i], totals[i]
                    )

    @cute.jit
    def store_sum(
        self, x: Operands, work: PieceWork, head: Int32, token: Int32, vector: Int32,
        sums: cute.Tensor, maximum: Float32, total: Float32,
    ) -> None:  # fmt: skip
        """Store four columns of a row of o, and the row's log-sum-exp, from results of `add_up`."""
        sink = None
        if cutlass.const_expr(x.sink is not None):
            sink = Float32(x.sink[head])
        whole = cute.make_rmem_tensor((VECTOR,), Float32)
        log_sum = finish([sums], [maximum], [total], sink, whole)
        if cutlass.const_expr(x.lse is not None):
            if vector == 0:
                x.lse[work.lse_at(head, token, self.spec.varlen_q)] = log_sum
        store_rounded(x.o[work.o_at(head, token, self.spec.varlen_q)], vector, whole)

    def part_row(self, x: Operands, work: PieceWork, row: Any) -> cute.Tensor:
        """A row of a piece's result."""
        return x.parts[work.slot, row - work.block * self.spec.tile_m, None]

    @cute.jit
    def store_tile(self, x: Operands, own: Consumer, storage: Pointers, work: Work) -> None:
        """Store the warpgroup's rows through shared memory, by TMA."""
        self.stores_done(own)  # stores of the previous tile from this buffer
        group_barrier(own.group)
        words = fragments.operand(own.acc, self.dtype)[: self.columns_v // 4]
        fragments.stage_rows(words, own.o, own.warp % WARPGROUP_WARPS, ROWS)
        cute.arch.fence_view_async_shared()
        group_barrier(own.group)
        if own.warp % WARPGROUP_WARPS == 0:
            block = work.block * self.warpgroups + own.group
            rows = self.o_rows.box(x.o, block, *work.queries, stored=True)
            with cute.arch.elect_one():
                store_staged(
                    x.o_tma, rows, storage.o, own.group, self.warpgroups, ROWS, self.columns_v
                )
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_rows(
        self, x: Operands, own: Consumer, work: Any, piece: cutlass.Constexpr[bool] = False
    ) -> None:
        """Store the warpgroup's rows from registers: to o, or as the result of a `piece`."""
        spec, stored = self.spec, Float32 if piece else self.stored
        for lane_row in cutlass.range_constexpr(fragments.LANE_ROWS):
            row = self.row(own, work, lane_row)
            token = own.visible.token(row)
            head = self.head(work, row)
            o = own.acc[None, lane_row, None]
            pairs = [[o[j], o[j + 1]] for j in range(0, self.columns_v // 4, 2)]
            parts = row_parts(pairs, stored)
            column = self.first_column(spec.head_dim_v, self.columns_v)
            if token < work.seqlen_q:
                if cutlass.const_expr(piece):
                    to = self.part_row(x, work, row)
                else:
                    to = x.o[work.o_at(head, token, spec.varlen_q)]
                if cutlass.const_expr(column is not None):
                    to = cute.domain_offset((column,), to)
                store_parts(to, parts, stored)

    @cute.jit
    def stores_done(self, own: Consumer) -> None:
        """Wait, in the thread that starts the stores, until the stores have read shared memory."""
        if own.warp % WARPGROUP_WARPS == 0:
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0, read=True)
