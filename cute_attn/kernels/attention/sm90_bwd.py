"""All gradients of q, k and v in one kernel for SM90, at head_dim 64: five products.

It is the dK/dV kernel (`sm90_bwd_dkdv`), whose warpgroups also write dS to shared memory, for a
third product with the tile's 128 keys:

    dQ = dS K        a warpgroup has 64 of 128 queries, or of 64 queries half of head_dim

Each thread adds its part of a tile's dQ to float32 sums in global memory, which
`backward_postprocess` scales and rounds. CTAs add in any order: the bits of dQ differ from run to
run. `sm90_bwd_hd128` has another form of it, for head_dim 128.

A warpgroup starts the products of a tile in one burst, and has only elementwise work until the
next. The two take turns, so that one's elementwise work falls into the burst of the other. A
warpgroup needs dS of the other one too, which is half a tile behind: dQ is two tiles late. What
else is done in a burst waits for nothing: a warp that waits there leaves the tensor cores idle.

    tensor cores, in order                beside them
    dQ = dS K of tile n - 2
    dV += P^T dO of tile n - 1            dS of tile n - 1 published
    dK += dS^T Q of tile n - 1            dQ of tile n - 2 to its sums, after its product, part by
    S^T of tile n                         part between the products
    dP^T of tile n
    the other warpgroup's turn            P^T of tile n, after S^T; dS^T, after dP^T, to shared
                                          memory
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from ..common.pipeline import Barriers, Edge, Kind
from ..common.ptx import wgmma
from ..common.ptx.compiler import opaque
from ..common.ptx.memory import add_global, shared_address
from ..common.smem import SWIZZLE_ALIGNMENT, Buffer, Pointers
from ..common.spec import WARP_SIZE
from ..common.tma import BOX
from . import fragments
from .arguments import FakeArguments
from .query_sums import VECTOR, VECTORS, WARPS, QuerySums
from .sm90_bwd_dkdv import CONSUMERS, WARPGROUPS, Consumer, Operands, Sm90DkDv
from .sm90_mma import ROWS, WARPGROUP, WARPGROUP_WARPS, start_query_gradients
from .sm90_store import GROUP_BARRIER
from .softmax import Scaling
from .spec import Sm90BackwardSpec
from .statistics import padded_start
from .turns import Turns
from .visibility import Visibility
from .work import Work, following

assert len(CONSUMERS) == WARPS

ALL_BARRIER = GROUP_BARRIER + WARPGROUPS  # the named barrier of both warpgroups


class Sm90Backward(Sm90DkDv):
    """The kernel for one Sm90BackwardSpec; see the module's docstring.

    A Consumer also has:
        k, v, ds_ring: shared addresses of the whole buffers.
        sums: global address of the sums of dQ.
        tiles_of_head: tiles of a head in the sums.
        turns: of the warpgroups to start products.
    """

    ds_stages = 2
    keeps_float32 = True
    bounded = True  # a key past the end of the sequence would add to dQ

    element_bytes = 2 + 2 + 4  # of Q, dO and the sums of dQ

    def __init__(self, spec: Sm90BackwardSpec):
        if spec.tile_m not in (ROWS, WARPGROUPS * ROWS):
            raise ValueError(f"tile_m is {spec.tile_m}, must be {ROWS} or {WARPGROUPS * ROWS}")
        self.sums = QuerySums.of(spec.tile_m, spec.head_dim)
        self.ds_bytes = 2 * spec.tile_m * spec.tile_n
        super().__init__(spec)

    def more_edges(self) -> tuple[Edge, ...]:
        return (
            Edge("ds_full", CONSUMERS, CONSUMERS, self.ds_stages, Kind.WARPS, payload="dS"),
            Edge("ds_empty", CONSUMERS, CONSUMERS, self.ds_stages, Kind.WARPS, payload="its stage"),
        )

    def more_buffers(self) -> tuple[Buffer, ...]:
        elements, at = self.ds_bytes // 2, SWIZZLE_ALIGNMENT
        return (Buffer("ds", self.dtype, elements, self.ds_stages, at, "dS^T"),)

    def more_fake_args(self, fake: FakeArguments) -> tuple[Any, ...]:
        return (fake.query_sums(),)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        stats: cute.Tensor,
        dq_sums: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        num_splits: Int32,
        num_ctas: Int32,
        counter: cute.Tensor,
        stream: Any,
    ) -> None:
        """As of `Sm90DkDv`; `dq_sums` are those of `query_sums`, zeros at first."""
        self.launch(
            q, k, v, do, stats, dq_sums, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
            softmax_scale, softcap, window_left, window_right, num_splits, num_ctas, counter,
            stream,
        )  # fmt: skip

    def consumer(
        self, x: Operands, storage: Pointers, barriers: Barriers, warp: Any, visible: Visibility,
        scaling: Scaling,
    ) -> Consumer:  # fmt: skip
        own = super().consumer(x, storage, barriers, warp, visible, scaling)
        own.k, own.v = shared_address(storage.k), shared_address(storage.v)
        own.ds_ring = shared_address(storage.ds)
        own.sums = x.dq_sums.iterator.toint()
        own.tiles_of_head = x.dq_sums.shape[1] // self.spec.tile_m
        own.queries = x.queries
        own.turns = Turns(own.group, WARPGROUPS)
        return own

    def own_rows(self, own: Consumer, rows: Any) -> Any:
        return rows + self.group(own) * (ROWS * BOX * 2)

    def group(self, own: Consumer) -> Any:
        """The warpgroup's number, computed anew: addresses that depend on it would be held in
        registers across the loops."""
        return Int32(Uint32(opaque(own.warp)) // WARPGROUP_WARPS)  # signed, it takes 8 instructions

    def lane(self) -> Any:
        """The lane, computed anew for the same reason."""
        return opaque(cute.arch.lane_idx()) & (WARP_SIZE - 1)

    def whole_query_tiles(self, own: Consumer, work: Work) -> tuple[Any, Any]:
        """[first, end) of the tiles of queries that need no mask. Keys past the end of the sequence
        would add to dQ: with one, every tile needs a mask."""
        first_key = self.first_key(own, work)
        first, end = own.visible.whole_query_tiles(first_key, ROWS, work.seqlen_q, work.seqlen_k)
        return first, cutlass.select_(first_key + ROWS <= work.seqlen_k, end, Int32(0))

    def first_sums(self, own: Consumer, work: Work) -> Any:
        """Tile 0 of the head, among the tiles of the sums."""
        start = padded_start(own.queries, work.sequence)
        return work.head * own.tiles_of_head + start // self.spec.tile_m

    @cute.jit
    def compute_tile(
        self,
        own: Consumer,
        work: Work,
        first: Int32,
        end: Int32,
        count: Int32,
        taken: Int32,
        n: Int32,
    ) -> Int32:
        own.turns.begin()
        whole_first, whole_end = self.whole_query_tiles(own, work)
        tile, at = first, self.first_sums(own, work)
        masked = tile < whole_first or tile >= whole_end
        self.next_query_tile(own, taken, tile, n, masked, 0, at)
        # Tiles of the sums: of the last tile, and of the one before.
        before = at + tile
        before2 = before
        n += 1
        if count > 1:
            tile, at = following(tile, at, first, end, own.tiles_of_head)
            masked = tile < whole_first or tile >= whole_end
            self.next_query_tile(own, taken, tile, n, masked, 1, at)
            before = at + tile
            n += 1
        for _ in cutlass.range(count - 2, unroll=1):
            tile, at = following(tile, at, first, end, own.tiles_of_head)
            masked = tile < whole_first or tile >= whole_end
            self.next_query_tile(own, taken, tile, n, masked, 2, before2)
            before2 = before
            before = at + tile
            n += 1
        own.turns.end()
        dv = self.start_dv(own, n - 1)
        self.publish_ds(own, n - 1)
        dk = self.start_dk(own, n - 1)
        fragments.assign(own.dv, wgmma.wait(dv, pending=1))
        fragments.assign(own.dk, wgmma.wait(dk))
        own.barriers.warp_arrives("do_empty", n - 1)
        own.barriers.warp_arrives("q_empty", n - 1)
        if count > 1:
            own.barriers.wait("ds_full", n - 2)
            self.add_dq(own, wgmma.wait(self.start_dq(own, n - 2)), n - 2, before2)
        own.barriers.wait("ds_full", n - 1)
        self.add_dq(own, wgmma.wait(self.start_dq(own, n - 1)), n - 1, before)
        return n

    @cute.jit
    def next_query_tile(
        self,
        own: Consumer,
        taken: Int32,
        tile: Int32,
        n: Int32,
        masked: Boolean,
        before: cutlass.Constexpr[int],
        before2: Int32,
    ) -> None:
        """Products up to S^T and dP^T of use n of Q and dO, then its P^T and dS^T. There are
        `before` uses before, at least, or 2; `before2` is the tile of the sums of use n - 2."""
        barriers = own.barriers
        if cutlass.const_expr(before == 2):
            barriers.wait("ds_full", n - 2)
        own.turns.wait()
        if cutlass.const_expr(before == 2):
            dq = self.start_dq(own, n - 2)
        if cutlass.const_expr(before >= 1):
            dv = self.start_dv(own, n - 1)
            self.publish_ds(own, n - 1)
        if cutlass.const_expr(before == 2):
            dq = wgmma.wait(dq, pending=1)
            barriers.warp_arrives("ds_empty", n - 2)
            self.add_quarter(own, dq, before2, 0)
        if cutlass.const_expr(before >= 1):
            dk = self.start_dk(own, n - 1)
        if cutlass.const_expr(before == 2):
            self.add_quarter(own, dq, before2, 1)
        # S^T beside dV and dK would take more registers than there are.
        if cutlass.const_expr(before >= 1):
            fragments.assign(own.dv, wgmma.wait(dv, pending=1))
            barriers.warp_arrives("do_empty", n - 1)
        if cutlass.const_expr(before == 2):
            self.add_quarter(own, dq, before2, 2)
        barriers.wait("q_full", n)
        scores = self.start_scores(own, n)
        if cutlass.const_expr(before == 2):
            self.add_quarter(own, dq, before2, 3)
        if cutlass.const_expr(before >= 1):
            fragments.assign(own.dk, wgmma.wait(dk, pending=1))
            barriers.warp_arrives("q_empty", n - 1)
        barriers.wait("do_full", n)
        dp = self.start_dp(own, n)
        own.turns.give()

        fragments.assign(own.s, wgmma.wait(scores, pending=1))
        self.probabilities(own, taken, tile, masked, self.lse(own, n))
        fragments.assign(own.dp, wgmma.wait(dp))
        self.score_gradients(own, taken, tile, masked, self.delta(own, n))
        self.stage_ds(own, n)

    def stage_ds(self, own: Consumer, n: Any) -> None:
        """Store the warp's rows of dS^T of use n to its stage."""
        barriers, spec = own.barriers, self.spec
        barriers.wait_previous("ds_empty", n)
        at = own.ds_ring + barriers.stage("ds_full", n) * self.ds_bytes
        words = [own.ds[i] for i in range(cute.size(own.ds))]
        fragments.stage_matrices(words, at, own.warp, spec.tile_n, self.lane())

    def publish_ds(self, own: Consumer, n: Any) -> None:
        """Publish what `stage_ds` has stored, so much later that the fence does not wait."""
        cute.arch.fence_view_async_shared()
        own.barriers.warp_arrives("ds_full", n)

    def start_dq(self, own: Consumer, n: Any, k_offset: Any = 0) -> list[Any]:
        """Start dQ = dS K of the warpgroup's part, with use n of dS, and K so many bytes behind the
        start of its buffer."""
        spec, group = self.spec, self.group(own)
        ds = own.ds_ring + own.barriers.stage("ds_full", n) * self.ds_bytes
        k = own.k + k_offset
        if spec.tile_m == ROWS:
            first = group * self.sums.columns
            k += first // BOX * (spec.tile_n * BOX * 2) + first % BOX * 2
        else:
            ds += group * (spec.tile_n * BOX * 2)
        return start_query_gradients(
            self.dtype, ds, opaque(k), tile_n=spec.tile_n, columns=self.sums.columns
        )

    def add_dq(self, own: Consumer, values: list[Any], n: Any, tile: Any) -> None:
        """Add the warp's part of dQ, of use n of dS, to that tile of the sums."""
        own.barriers.warp_arrives("ds_empty", n)
        for quarter in range(4):
            self.add_quarter(own, values, tile, quarter)

    def add_quarter(self, own: Consumer, values: list[Any], tile: Any, quarter: int) -> None:
        """Add a quarter of the columns of the warp's part."""
        lane = self.lane() * (4 * VECTOR)
        part = opaque(own.warp) * (4 * self.sums.part)
        at = own.sums + Int64(tile) * (4 * self.sums.tile) + Int64(part + lane)
        count = self.sums.columns // 8 // 4
        for i in range(quarter * count, (quarter + 1) * count):
            vector = values[VECTOR * i : VECTOR * (i + 1)]
            add_global(at + i * (VECTORS * 4 * VECTOR), vector)

    def wait_for_readers(self, own: Consumer) -> None:
        """Until all warps of both warpgroups are done with K and V."""
        cute.arch.barrier(barrier_id=ALL_BARRIER, number_of_threads=WARPGROUPS * WARPGROUP)
