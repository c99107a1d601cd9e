"""The loads of the SM90 kernels of dK and dV: tiles of keys, and tiles of queries that see them.

`x` is the kernel's Operands. Uses of Q and dO count tiles of queries, those of K and V count tiles
of keys.
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


def query_rows(spec: Sm90BackwardSpec) -> BoxedRows:
    """How TMA loads Q and dO."""
    return BoxedRows(spec.tile_m, spec.head_dim, spec.ragged_q, not spec.varlen_q)


def key_rows(spec: Sm90BackwardSpec, rows: int) -> BoxedRows:
    """How TMA loads K and V, or stores dK and dV, so many rows at once."""
    return BoxedRows(rows, spec.head_dim, spec.ragged_k, not spec.varlen_k)


@dataclass(frozen=True)
class QueryLoads(Carried):
    """Q with lse, and dO with delta, of tiles of queries.

    Attributes:
        q, do: the buffers, in boxes.
        lse, delta: the buffers of the statistics.
        multicast: each CTA of a pair loads half of Q and dO, for both.
    """

    spec: Sm90BackwardSpec
    rows: BoxedRows
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
        across = (spec.head_dim // BOX, spec.tile_m * BOX)
        q, do = (
            boxes(buffer, spec.tile_m, across, (stages, spec.tile_m * spec.head_dim))
            for buffer, stages in (
                (storage.q, barriers.pipeline["q_full"].stages),
                (storage.do, barriers.pipeline["do_full"].stages),
            )
        )
        return cls(spec, query_rows(spec), barriers, q, do, storage.lse, storage.delta, multicast)

    def load(
        self, name: str, x: Any, work: Work, tile: Int32, head: Int32, row: Int32, n: Int32
    ) -> None:
        """Load use n of "q" with its lse, or of "do" with its delta, whose first row of the
        statistics is `row`."""
        of_q = name == "q"
        tma, source, ring = (x.q_tma, x.q, self.q) if of_q else (x.do_tma, x.do, self.do)
        buffer, kind = (self.lse, LSE) if of_q else (self.delta, DELTA)
        nbytes = 4 * self.spec.tile_m
        rows = self.rows.box(source, tile, head, *work.queries[1:])
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
    """K and V of tiles of keys.

    Attributes:
        k, v: the buffers, in boxes.
    """

    spec: Sm90BackwardSpec
    rows: BoxedRows
    barriers: Barriers
    k: cute.Tensor
    v: cute.Tensor

    @classmethod
    def of(cls, spec: Sm90BackwardSpec, storage: Pointers, barriers: Barriers) -> KeyLoads:
        across = (spec.head_dim // BOX, spec.tile_n * BOX)
        k, v = (
            boxes(buffer, spec.tile_n, across, (stages, spec.tile_n * spec.head_dim))
            for buffer, stages in (
                (storage.k, barriers.pipeline["k_full"].stages),
                (storage.v, barriers.pipeline["v_full"].stages),
            )
        )
        return cls(spec, key_rows(spec, spec.tile_n), barriers, k, v)

    def load(self, name: str, x: Any, work: Work, taken: Int32) -> None:
        """Load "k" or "v" of work `taken`."""
        of_k = name == "k"
        tma, source, ring = (x.k_tma, x.k, self.k) if of_k else (x.v_tma, x.v, self.v)
        kv_head, _ = head_and_split(work, x.num_splits, self.spec.partial)
        rows = self.rows.box(source, work.block, kv_head, *work.keys[1:])
        load_use(name, tma, rows, ring, self.barriers, taken)
