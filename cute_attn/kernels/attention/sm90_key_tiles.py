"""What the SM90 kernels of dK and dV share: tiles whose rows are keys and whose columns are
queries."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..common.pipeline import Barriers
from ..common.ptx.async_copy import copy_bulk
from ..common.ptx.compiler import opaque
from ..common.ptx.memory import load_shared, shared_address, store_global
from . import fragments
from .spec import Sm90BackwardSpec
from .visibility import Visibility
from .work import Work


def load_stats(
    name: str, buffer: cute.Pointer, kind: int, stats: cute.Tensor, head: Int32, row: Int32,
    queries: int, barriers: Barriers, n: Int32,
) -> None:  # fmt: skip
    """Copy the statistics of so many queries, from padded row `row` on, to use n of the ring
    `name`, one of whose buffers is `buffer`."""
    heads, padded_rows = stats.shape[1], stats.shape[2]
    at = Int64(kind * heads + head) * padded_rows + row
    nbytes = 4 * queries
    stage = barriers.stage(f"{name}_full", n)
    with cute.arch.elect_one():
        copy_bulk(
            shared_address(buffer) + stage * nbytes,
            stats.iterator.toint() + at * 4,
            nbytes,
            shared_address(barriers.pointer(f"{name}_full", n)),
        )


def of_columns(stats: Int32, columns: range) -> list[dict[int, Float32]]:
    """Statistics of a lane row's columns by column, which both lane rows share, from the shared
    address of a tile's."""
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
    `tile` of the queries; `bounded`: no query sees a key past the end of the sequence."""
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
    """Where a lane's columns of a key begin, in elements of a split's partial sums `out`."""
    if spec.varlen_k:
        first = Int64(split) * out.shape[1] + work.k_start
    else:
        first = (Int64(split) * batch + work.sequence) * out.shape[2]
    offset = ((first + key) * out.shape[-2] + head) * spec.head_dim
    return offset + cute.arch.lane_idx() % fragments.LANES * 2


@cute.jit
def store_partial_row(
    acc: cute.Tensor, lane_row: cutlass.Constexpr[int], out: cute.Tensor, offset: Int64
) -> None:
    """Store a lane row from `offset` on: a lane has two neighbouring columns of each 8."""
    at = out.iterator.toint() + offset * 4
    values = acc[None, lane_row, None]
    for j in cutlass.range_constexpr(0, cute.size(values), 2):
        store_global(Float32, at + 16 * j, [values[j], values[j + 1]])
