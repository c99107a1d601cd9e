"""The products of attention by `wgmma`, for a warpgroup with 64 query rows and a K/V tile.

Q, K and V are in shared memory in boxes of 64 columns, as `common.tma` loads them. S, P and O are
in registers, see `fragments`. A product that has been started may be used only after `wgmma.wait`;
until then neither its accumulators nor P may be touched.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Numeric

from ...common.ptx import wgmma
from ...common.ptx.matrices import load_matrices
from ...common.spec import WARP_SIZE
from ...common.tma import BOX

ROWS = 64  # rows of a warpgroup
WARPGROUP = 128  # threads of a warpgroup
WARPGROUP_WARPS = WARPGROUP // WARP_SIZE
STEP = 16  # contracted columns of one instruction
LINE_BYTES = 128
SUMS = 8  # columns of sums, the fewest columns that a product may have
ONES_BYTES = STEP * LINE_BYTES  # a box of ones with as many rows as a step
STEP_BYTES = STEP * 2
STEPS_OF_LINE = LINE_BYTES // STEP_BYTES


def start_scores(
    dtype: type[Numeric],
    q: Any,
    k: Any,
    *,
    tile_m: int,
    tile_n: int,
    head_dim: int,
    columns: range | None = None,
    acc: list[Any] | None = None,
    held: list[Any] | None = None,
) -> list[Any]:
    """Start S = Q K^T, 64 by tile_n. `q` is the shared address of the warpgroup's first row, in
    boxes of `tile_m` rows, and `k` the K tile's shared address. `columns` are the columns of Q and
    K to multiply, by default all. With `acc`, the product is added to these accumulators; an
    unfinished product may be adding to the same accumulators. `held` has these columns of Q in
    registers, loaded by `held_rows`."""
    columns = range(head_dim) if columns is None else columns
    steps = range(columns.start // STEP, columns.stop // STEP)
    if held is not None:
        keys = _along_rows(k, tile_n, steps)
        return wgmma.product(dtype, acc, held, keys, tile_n, columns=False)
    return wgmma.shared_product(
        dtype, acc, _along_rows(q, tile_m, steps), _along_rows(k, tile_n, steps), tile_n,
        columns=False,
    )  # fmt: skip


def start_scores_of_held(
    dtype: type[Numeric],
    held: list[Any],
    q: Any,
    k: Any,
    *,
    tile_m: int,
    tile_n: int,
    head_dim: int,
) -> list[Any]:
    """Start the product of `start_scores`, with the first columns of the warpgroup's rows in
    registers, loaded by `held_rows`."""
    steps = range(head_dim // STEP)
    left = _along_rows(q, tile_m, steps[len(held) // 4 :])
    right = _along_rows(k, tile_n, steps)
    return wgmma.mixed_product(dtype, None, held, left, right, tile_n, columns=False)


def held_rows(q: Any, warp: Int32, tile_m: int, columns: int) -> list[Any]:
    """Load the first columns of the warpgroup's rows, 4 registers for each 16 columns. The rows are
    at shared address `q` in boxes of `tile_m` rows; `warp` is the warp's number in the
    warpgroup."""
    lane = cute.arch.lane_idx()
    row, half = lane % 16, lane // 16
    at = q + (warp * 16 + row) * LINE_BYTES
    words: list[Any] = []
    for step in range(columns // STEP):
        box = step // STEPS_OF_LINE * (tile_m * LINE_BYTES)
        unit = (step % STEPS_OF_LINE * 2 + half) ^ row % 8  # unit of 16 bytes, with TMA's swizzle
        words += load_matrices(at + box + unit * 16)
    return words


def start_output(
    dtype: type[Numeric],
    o: list[Any],
    p: list[Any],
    v: Any,
    *,
    tile_n: int,
    head_dim: int,
    steps: range | None = None,
    adds: Any = None,
) -> list[Any]:
    """Start O + P V, 64 by head_dim, or where `adds` is 0, P V; `v` is the shared address of the V
    tile. `steps` are the steps of 16 keys to multiply, by default all steps."""
    first = wgmma.columns_descriptor(v, tile_n * LINE_BYTES)
    steps = range(tile_n // STEP) if steps is None else steps
    descriptors = [first + (s * STEP * LINE_BYTES >> 4) for s in steps]
    p = p[4 * steps.start : 4 * steps.stop]
    return wgmma.product(dtype, o, p, descriptors, head_dim, columns=True, adds=adds)


def start_output_of_stored(
    dtype: type[Numeric],
    o: list[Any],
    p: Any,
    v: Any,
    *,
    tile_n: int,
    columns: int,
    steps: range | None = None,
    widest: int = 128,
) -> list[Any]:
    """Start O + P V, 64 by `columns`, in parts of at most `widest` columns. P is at shared address
    `p`, in a box of 64 rows and tile_n = 64 keys. `v` is the shared address of the first column of
    V. `steps` are as in `start_output`."""
    box, parts = tile_n * LINE_BYTES, []
    steps = range(tile_n // STEP) if steps is None else steps
    for column in range(0, columns, widest):
        first = wgmma.columns_descriptor(v + column // BOX * box, box)
        descriptors = [first + (s * STEP * LINE_BYTES >> 4) for s in steps]
        parts.append((min(widest, columns - column), descriptors))
    return wgmma.shared_product_of_parts(
        dtype, o, _along_rows(p, ROWS, steps), parts, columns=True
    )  # fmt: skip


def start_output_with_sums(
    dtype: type[Numeric],
    o: list[Any],
    p: list[Any],
    v: Any,
    ones: Any,
    *,
    tile_n: int,
    head_dim: int,
) -> list[Any]:
    """Start the product of `start_output`, with the sums of P's rows in 8 more columns of O. `ones`
    is the shared address of ONES_BYTES of ones, above V."""
    box = tile_n * LINE_BYTES
    steps = [s * STEP * LINE_BYTES >> 4 for s in range(tile_n // STEP)]
    first = wgmma.columns_descriptor(v, box)
    parts = []
    if head_dim > BOX:
        parts.append((head_dim - BOX, [first + s for s in steps]))
    last = v + (head_dim // BOX - 1) * box
    # The step to the ones' box shrinks as the address grows.
    beside_ones = wgmma.columns_descriptor(last, ones - last)
    parts.append((BOX + SUMS, [beside_ones + (s - (s << 16)) for s in steps]))
    return wgmma.product_of_parts(dtype, o, p, parts, columns=True)


def start_query_gradients(
    dtype: type[Numeric],
    ds: Any,
    k: Any,
    *,
    tile_n: int,
    columns: int,
    acc: list[Any] | None = None,
) -> list[Any]:
    """Start dS K, 64 by `columns`. A box of dS^T at shared address `ds` has the tile_n keys as rows
    and the queries as columns. `k` is the address of the first column of K. With `acc`, the product
    is added to these accumulators; an unfinished product may be adding to the same accumulators."""
    left, right = (wgmma.columns_descriptor(x, tile_n * LINE_BYTES) for x in (ds, k))
    steps = [s * STEP * LINE_BYTES >> 4 for s in range(tile_n // STEP)]
    return wgmma.shared_product(
        dtype, acc, [left + s for s in steps], [right + s for s in steps], columns,
        columns=True, transposed=True,
    )  # fmt: skip


def _along_rows(base: Int32, rows: int, steps: range) -> list[Any]:
    """Descriptors for each 16 columns of the rows at `base`, in boxes of `rows` rows."""
    first = wgmma.rows_descriptor(base)
    offsets = [
        s // STEPS_OF_LINE * (rows * LINE_BYTES) + s % STEPS_OF_LINE * STEP_BYTES for s in steps
    ]
    return [first + (offset >> 4) for offset in offsets]
