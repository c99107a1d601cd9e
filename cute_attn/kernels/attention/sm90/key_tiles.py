"""Code that the SM90 kernels of dK and dV share, for tiles whose rows are keys and whose columns
are queries."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ...common.carried import Carried
from ...common.dtypes import DTYPE
from ...common.pipeline import Barriers
from ...common.ptx.compiler import opaque
from ...common.ptx.memory import load_shared, shared_address, store_global
from ...common.scheduler import TileQueue
from ...common.smem import Pointers
from ...common.spec import WARP_SIZE
from ..parts import fragments
from ..parts.visibility import Visibility
from ..parts.work import TileMap, Work
from ..spec import Sm90BackwardSpec
from .mma import ROWS, WARPGROUP_WARPS, start_output, start_scores
from .score_tile import Statistics


def lane_anew() -> Int32:
    """The lane, computed anew so that no register holds the lane across the loops."""
    return opaque(cute.arch.lane_idx()) & (WARP_SIZE - 1)


def group_anew(warp: Int32) -> Int32:
    """The warpgroup's number, computed anew. Otherwise registers would hold addresses that depend
    on the number across the loops."""
    return Int32(Uint32(opaque(warp)) // WARPGROUP_WARPS)  # a signed division takes 8 instructions


@dataclass(frozen=True)
class KeyTiles(Carried):
    """The tiles of keys of a consumer warp, whose warpgroup has 64 keys of each tile.

    Attributes:
        warp: the warp's number in the CTA.
        group: the number of the warp's warpgroup.
        queue: the tiles that the CTA takes.
        bounded: no query sees a key past the end of the sequence. Such a key would add to dQ; see
            `mask_queries`.
    """

    warp: Int32
    group: Int32
    queue: TileQueue
    tiles: TileMap
    visible: Visibility
    bounded: bool

    def query_tiles(self, work: Work) -> tuple[Int32, Int32]:
        """Return [first, end), the tiles of queries that see some of the CTA's keys."""
        return self.visible.query_tiles(work.block, work.seqlen_q, work.seqlen_k)

    def whole_query_tiles(self, work: Work) -> tuple[Int32, Int32]:
        """Return [first, end), the tiles of queries that need no mask, because every query sees
        every key of the warpgroup."""
        first_key = work.block * self.visible.tile_n + self.group * ROWS
        first, end = self.visible.whole_query_tiles(first_key, ROWS, work.seqlen_q, work.seqlen_k)
        if self.bounded:
            end = cutlass.select_(first_key + ROWS <= work.seqlen_k, end, Int32(0))
        return first, end

    def key(self, work: Work, lane_row: int) -> Int32:
        """A lane row's key."""
        first = work.block * self.visible.tile_n + fragments.first_row(self.warp)
        return first + lane_row * fragments.LANE_ROW_STEP

    def mask(self, words: cute.Tensor, taken: Int32, tile: Int32) -> None:
        """Set the columns of queries that do not see a row's key to 0, in an operand of tile `tile`
        of the queries and work `taken`."""
        work = self.queue.read(taken)
        keys = [self.key(work, lane_row) for lane_row in range(fragments.LANE_ROWS)]
        mask_queries(words, keys, tile, self.visible, work, bounded=self.bounded)


@dataclass(frozen=True)
class KeyProducts(Carried):
    """The products of a warpgroup's 64 keys and tiles of queries. The queries' rows are in shared
    memory.

    Attributes:
        q, do, lse, delta: shared addresses of the rings.
    """

    spec: Sm90BackwardSpec
    barriers: Barriers
    q: Int32
    do: Int32
    lse: Int32
    delta: Int32

    @classmethod
    def of(cls, spec: Sm90BackwardSpec, storage: Pointers, barriers: Barriers) -> KeyProducts:
        return cls(
            spec,
            barriers,
            shared_address(storage.q),
            shared_address(storage.do),
            shared_address(storage.lse),
            shared_address(storage.delta),
        )

    def offset(self, name: str, n: Int32) -> Int32:
        """The offset of use n of "q" or "do" in its ring, in bytes."""
        columns = self.spec.head_dim if name == "q" else self.spec.head_dim_v
        nbytes = 2 * self.spec.tile_m * columns
        return self.barriers.stage(f"{name}_full", n) * nbytes

    def q_of(self, n: Int32) -> Int32:
        """The shared address of use n of Q."""
        return self.q + self.offset("q", n)

    def do_of(self, n: Int32) -> Int32:
        """The shared address of use n of dO."""
        return self.do + self.offset("do", n)

    def start_scores(self, keys: Int32, queries: Int32) -> list[Float32]:
        """Start S^T = K Q^T, from the shared addresses of the warpgroup's rows of K, and of a use
        of Q."""
        return self._start(keys, queries, self.spec.head_dim)

    def start_dp(self, values: Int32, gradients: Int32) -> list[Float32]:
        """Start dP^T = V dO^T, from the shared addresses of the warpgroup's rows of V, and of a use
        of dO."""
        return self._start(values, gradients, self.spec.head_dim_v)

    def _start(self, left: Int32, right: Int32, columns: int) -> list[Float32]:
        spec = self.spec
        return start_scores(
            DTYPE[spec.dtype], opaque(left), right,
            tile_m=spec.tile_n, tile_n=spec.tile_m, head_dim=columns,
        )  # fmt: skip

    def start_sum(
        self, acc: cute.Tensor, left: cute.Tensor, queries: Int32, adds: Int32 | None = None
    ) -> list[Float32]:
        """Start dV + P^T dO or dK + dS^T Q, with a use of dO or Q. If `adds` is 0, start only the
        product."""
        spec = self.spec
        return start_output(
            DTYPE[spec.dtype], fragments.values(acc), fragments.values(left), queries,
            tile_n=spec.tile_m, head_dim=fragments.columns(acc), adds=adds,
        )  # fmt: skip

    def lse_of(self, n: Int32) -> Statistics:
        """Loads lse of the queries of use n."""
        at = self.lse + self.barriers.stage("q_full", n) * (4 * self.spec.tile_m)
        return lambda columns: of_columns(at, columns)

    def delta_of(self, n: Int32) -> Statistics:
        """Loads delta of the queries of use n."""
        at = self.delta + self.barriers.stage("do_full", n) * (4 * self.spec.tile_m)
        return lambda columns: of_columns(at, columns)


def of_columns(stats: Int32, columns: range) -> list[dict[int, Float32]]:
    """Statistics of a lane row's columns, indexed by column, from the shared address of a tile's
    statistics. Both lane rows share the columns."""
    at = stats + (opaque(cute.arch.lane_idx()) & (fragments.LANES - 1)) * 8
    found: dict[int, Float32] = {}
    for j in columns[::2]:
        found[j], found[j + 1] = load_shared(Float32, at + 16 * j, 2)
    return [found] * fragments.LANE_ROWS


def mask_queries(
    words: cute.Tensor,
    keys: list[Int32],
    tile: Int32,
    visible: Visibility,
    work: Work,
    *,
    bounded: bool = False,
) -> None:
    """Set the columns of queries that do not see the key of a lane row to 0, in an operand of tile
    `tile` of the queries. `bounded` says that no query sees a key past the end of the sequence."""
    lows, highs = [], []
    for key in keys:
        low, high = visible.tokens(key, work.seqlen_q, work.seqlen_k)
        if bounded:
            high = cutlass.select_(key < work.seqlen_k, high, Int32(0))
        lows.append(low - tile * visible.tile_m)
        highs.append(high - tile * visible.tile_m)
    fragments.mask_operand(words, highs, None if visible.right is None else lows)


def partial_offset(
    out: cute.Tensor,
    split: Int32,
    work: Work,
    key: Int32,
    head: Int32,
    batch: Int32,
    spec: Sm90BackwardSpec,
) -> Int64:
    """The offset of a lane's columns of a key, in elements of a split's partial sums `out`."""
    if spec.varlen_k:
        first = Int64(split) * out.shape[1] + work.k_start
    else:
        first = (Int64(split) * batch + work.sequence) * out.shape[2]
    offset = ((first + key) * out.shape[-2] + head) * out.shape[-1]
    return offset + cute.arch.lane_idx() % fragments.LANES * 2


@cute.jit
def store_partial_row(
    acc: cute.Tensor, lane_row: cutlass.Constexpr[int], out: cute.Tensor, offset: Int64
) -> None:
    """Store a lane row from `offset` on. A lane has two neighbouring columns of each 8 columns."""
    at = out.iterator.toint() + offset * 4
    values = acc[None, lane_row, None]
    for j in cutlass.range_constexpr(0, cute.size(values), 2):
        store_global(Float32, at + 16 * j, [values[j], values[j + 1]])
