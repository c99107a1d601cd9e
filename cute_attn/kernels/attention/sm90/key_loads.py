"""The loads of the SM90 kernels of dK and dV: tiles of keys, and the tiles of queries that see the
keys.

`x` is the kernel's Operands. A use of Q or dO is a tile of queries; a use of K or V is a tile of
keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from ...common.carried import Carried
from ...common.pipeline import Barriers
from ...common.ptx.async_copy import copy_bulk
from ...common.ptx.memory import shared_address
from ...common.smem import Pointers
from ...common.tma import BOX, BoxedRows, boxes, load_use
from ..parts.work import Work, head_and_split
from ..spec import Sm90BackwardSpec
from ..statistics import DELTA, LSE


def query_rows(spec: Sm90BackwardSpec) -> tuple[BoxedRows, BoxedRows]:
    """How TMA loads Q, and dO."""
    q, do = (
        BoxedRows(spec.tile_m, columns, spec.ragged_q, not spec.varlen_q)
        for columns in (spec.head_dim, spec.head_dim_v)
    )
    return q, do


def key_rows(spec: Sm90BackwardSpec, rows: int) -> tuple[BoxedRows, BoxedRows]:
    """How TMA loads K and V, or stores dK and dV: boxes with a given number of rows."""
    k, v = (
        BoxedRows(rows, columns, spec.ragged_k, not spec.varlen_k)
        for columns in (spec.head_dim, spec.head_dim_v)
    )
    return k, v


def ring(buffer: cute.Pointer, rows: int, columns: int, stages: int) -> cute.Tensor:
    """The stages of a ring of tiles in shared memory, from a tile's rows and columns, as TMA fills
    them."""
    return boxes(buffer, rows, (columns // BOX, rows * BOX), (stages, rows * columns))


@dataclass(frozen=True)
class QueryLoads(Carried):
    """Loads Q with lse, and dO with delta, of tiles of queries.

    Attributes:
        q, do: the buffers, in boxes.
        lse, delta: the buffers of the statistics.
        multicast: each CTA of a pair loads a part of Q and dO for both CTAs.
    """

    spec: Sm90BackwardSpec
    q_rows: BoxedRows
    do_rows: BoxedRows
    barriers: Barriers
    q: cute.Tensor
    do: cute.Tensor
    lse: cute.Pointer
    delta: cute.Pointer
    multicast: bool

    @classmethod
    def of(
        cls, spec: Sm90BackwardSpec, storage: Pointers, barriers: Barriers, *,
        multicast: bool = False,
    ) -> QueryLoads:  # fmt: skip
        q, do = (
            ring(buffer, spec.tile_m, columns, barriers.pipeline[full].stages)
            for buffer, columns, full in (
                (storage.q, spec.head_dim, "q_full"),
                (storage.do, spec.head_dim_v, "do_full"),
            )
        )
        statistics = storage.lse, storage.delta
        return cls(spec, *query_rows(spec), barriers, q, do, *statistics, multicast)

    def load(
        self, name: str, x: Any, work: Work, tile: Int32, head: Int32, row: Int32, n: Int32
    ) -> None:
        """Load use n of "q" with its lse, or of "do" with its delta. `row` is the first row of the
        statistics."""
        of_q = name == "q"
        tma, source, ring = (x.q_tma, x.q, self.q) if of_q else (x.do_tma, x.do, self.do)
        buffer, kind = (self.lse, LSE) if of_q else (self.delta, DELTA)
        nbytes = 4 * self.spec.tile_m
        boxed = self.q_rows if of_q else self.do_rows
        rows = boxed.box(source, tile, head, *work.queries[1:])
        load_use(name, tma, rows, ring, self.barriers, n, nbytes, self.multicast)
        heads, padded_rows = x.stats.shape[1], x.stats.shape[2]
        at = Int64(kind * heads + head) * padded_rows + row
        stage = self.barriers.stage(f"{name}_full", n)
        with cute.arch.elect_one():
            copy_bulk(
                shared_address(buffer) + stage * nbytes,
                x.stats.iterator.toint() + at * 4,
                nbytes,
                shared_address(self.barriers.pointer(f"{name}_full", n)),
            )


@dataclass(frozen=True)
class KeyLoads(Carried):
    """Loads K and V of tiles of keys.

    Attributes:
        k, v: the buffers, in boxes.
    """

    spec: Sm90BackwardSpec
    k_rows: BoxedRows
    v_rows: BoxedRows
    barriers: Barriers
    k: cute.Tensor
    v: cute.Tensor

    @classmethod
    def of(cls, spec: Sm90BackwardSpec, storage: Pointers, barriers: Barriers) -> KeyLoads:
        k, v = (
            ring(buffer, spec.tile_n, columns, barriers.pipeline[full].stages)
            for buffer, columns, full in (
                (storage.k, spec.head_dim, "k_full"),
                (storage.v, spec.head_dim_v, "v_full"),
            )
        )
        return cls(spec, *key_rows(spec, spec.tile_n), barriers, k, v)

    def load(self, name: str, x: Any, work: Work, taken: Int32) -> None:
        """Load "k" or "v" of work `taken`."""
        of_k = name == "k"
        tma, source, ring = (x.k_tma, x.k, self.k) if of_k else (x.v_tma, x.v, self.v)
        kv_head, _ = head_and_split(work, x.num_splits, self.spec.partial)
        boxed = self.k_rows if of_k else self.v_rows
        rows = boxed.box(source, work.block, kv_head, *work.keys[1:])
        load_use(name, tma, rows, ring, self.barriers, taken)
