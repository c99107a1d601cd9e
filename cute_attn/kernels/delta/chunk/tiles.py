"""A chunk's rows in global memory, in swizzled shared memory and as MMA fragments.

In shared memory 64 rows of 16-bit elements are sub-tiles of 64 columns, 8,192 bytes each. The
16-byte unit u of row r lies at unit u ^ (r & 7), so that neither a row of units nor a column of
eight units has bank conflicts. Addresses in global memory are 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric, Uint32

from ...common.ptx.async_copy import copy_async
from ...common.ptx.convert import pack_all, unpack_all
from ...common.ptx.matrices import load_matrices
from ...common.ptx.memory import load_global, load_shared, store_global, store_shared
from ...common.ptx.mma import mma
from ...common.spec import WARP_SIZE
from .spec import CHUNK

UNIT_BYTES = 16  # bytes per copy, and unit of the swizzle
LINE_BYTES = 128  # bytes of a row of a sub-tile
SUB_TILE_BYTES = CHUNK * LINE_BYTES
FRAGMENT_ROWS = 16


def thread_and_warp() -> tuple[Any, Any]:
    thread, _, _ = cute.arch.thread_idx()
    return thread, cute.arch.make_warp_uniform(Int32(Uint32(thread) >> 5))


# -- elements


def tile_offset(row: Any, column: Any) -> Any:
    """Byte offset of an element of 64 rows in sub-tiles."""
    unit = ((column >> 3) & 7) ^ (row & 7)
    return (column >> 6) * SUB_TILE_BYTES + row * LINE_BYTES + (unit << 4) + ((column & 7) << 1)


def load_floats(dtype: type[Numeric], address: Any, count: int) -> list[Any]:
    """Load 4 or 8 (`count`) elements of `dtype` from global memory, as float32."""
    if dtype is Float32:
        values: list[Any] = []
        for i in range(0, count, 4):
            values += load_global(Float32, address + 4 * i, 4)
        return values
    return unpack_all(dtype, load_global(Int32, address, count // 2))


# -- rows from global to shared memory


def copy_rows(
    shared: Any,
    source: Any,
    pitch: Any,
    length: Any,
    columns: int,
    num_threads: int,
    few_registers: bool = False,
) -> None:
    """Start the cp.async of a chunk's rows of `columns` 16-bit elements, by all threads. Rows from
    `length` on become 0. `source` is the address of the first row, `pitch` the row stride in
    bytes. With `few_registers` the loop over rows is not unrolled."""
    thread, _, _ = cute.arch.thread_idx()
    units = columns * 2 // UNIT_BYTES
    if units & (units - 1):  # threads divide only over a power of two: one sub-tile at a time
        for n in range(columns * 2 // LINE_BYTES):
            of_sub_tile = shared + n * SUB_TILE_BYTES, source + Int64(n * LINE_BYTES)
            copy_rows(*of_sub_tile, pitch, length, LINE_BYTES // 2, num_threads, few_registers)
        return
    step = num_threads // units
    shift = units.bit_length() - 1
    row, unit = Int32(Uint32(thread) >> shift), thread & (units - 1)
    start = source + Int64(row) * pitch + Int64(unit * UNIT_BYTES)
    line = shared + row * LINE_BYTES + ((unit >> 3) * SUB_TILE_BYTES)
    within = ((unit & 7) ^ (row & 7)) << 4
    if few_registers:
        _copy_in_turn(line, within, start, pitch, row, length, step)
        return
    for i in range(CHUNK // step):
        flip = (i * step & 7) << 4
        copy_async(
            line + i * step * LINE_BYTES + (within ^ flip),
            start + i * step * pitch,
            row + i * step < length,
        )


@cute.jit
def _copy_in_turn(
    line: Int32,
    within: Int32,
    start: Int64,
    pitch: Int64,
    row: Int32,
    length: Int32,
    step: cutlass.Constexpr,
) -> None:
    """Copy a unit of every `step`-th row."""
    for i in cutlass.range(0, CHUNK, step, unroll=1):
        at = line + i * LINE_BYTES + (within ^ ((i & 7) << 4))
        copy_async(at, start + Int64(i) * pitch, row + i < length)


# -- fragments


def left_fragment(shared: Any, first_row: Int32, step: int) -> list[Any]:
    """Load rows first_row to first_row + 15, columns 16 step to 16 step + 15, as a left operand."""
    lane = cute.arch.lane_idx()
    matrix, r = lane >> 3, lane & 7
    row = first_row + ((matrix & 1) << 3) + r
    unit = (2 * step + (matrix >> 1)) ^ r
    return list(load_matrices(shared + row * LINE_BYTES + (unit << 4)))


def left_fragment_of_columns(shared: Any, first_column: Any, step: Any) -> list[Any]:
    """Load columns first_column to first_column + 15 of rows 16 step to 16 step + 15 as a left
    operand, with a row of the operand for each column."""
    lane = cute.arch.lane_idx()
    matrix, r = lane >> 3, lane & 7
    row = FRAGMENT_ROWS * step + ((matrix >> 1) << 3) + r
    unit = ((first_column >> 3) + (matrix & 1)) ^ r
    return list(load_matrices(shared + row * LINE_BYTES + (unit << 4), transposed=True))


def lower_triangle(shared: Any, first_row: Int32) -> list[list[Any]]:
    """Load rows first_row to first_row + 15 of a 64 by 64 matrix as left operands, with 0 above the
    diagonal whatever memory holds there."""
    lane = cute.arch.lane_idx()
    fragments = []
    for step in range(CHUNK // 16):
        fragment = left_fragment(shared, first_row, step)
        for i in range(4):
            row = first_row + (lane >> 2) + 8 * (i % 2)
            col = 16 * step + 8 * (i // 2) + ((lane & 3) << 1)
            keep = cutlass.select_(col < row, Int32(-1), Int32(0xFFFF))
            fragment[i] = fragment[i] & cutlass.select_(col > row, Int32(0), keep)
        fragments.append(fragment)
    return fragments


def upper_triangle_of_columns(shared: Any, first_column: Any) -> list[list[Any]]:
    """Load columns first_column to first_column + 15 of a lower triangular 64 by 64 matrix as left
    operands, the rows of its transpose, with 0 for the part above the diagonal."""
    lane = cute.arch.lane_idx()
    fragments = []
    for step in range(CHUNK // 16):
        fragment = left_fragment_of_columns(shared, first_column, step)
        for i in range(4):
            column = first_column + (lane >> 2) + 8 * (i % 2)
            row = 16 * step + 8 * (i // 2) + ((lane & 3) << 1)
            keep = cutlass.select_(row < column, Int32(-0x10000), Int32(-1))
            fragment[i] = fragment[i] & cutlass.select_(row + 1 < column, Int32(0), keep)
        fragments.append(fragment)
    return fragments


@cute.jit
def lower_times(
    c: cute.Tensor,
    dtype: cutlass.Constexpr,
    fragments: Any,
    shared: Int32,
    offsets: Any,
    first_column: cutlass.Constexpr,
    warp_index: Int32,
) -> None:
    """c += a m for the warp's 16 rows: `fragments` are the warp's rows of a lower triangular a; m
    is 64 rows in shared memory, from column first_column on."""
    for step in cutlass.range_constexpr(CHUNK // 16):
        if step <= warp_index:
            add_product(c, dtype, fragments[step], shared, offsets, step, first_column)


def add_product(
    c: cute.Tensor,
    dtype: type[Numeric],
    fragment: Any,
    shared: Any,
    offsets: Any,
    step: int,
    first_column: int,
) -> None:
    """c += a m, where `fragment` is 16 columns of a, and m the 16 rows from row 16 step on."""
    for j in range(cute.size(c) // 8):
        b = right_fragments(shared, offsets, step, first_column // 16 + j)
        for i in range(2):
            at = 8 * j + 4 * i
            old = [c[at + n] for n in range(4)]
            for n, x in enumerate(mma(dtype, old, fragment, b[2 * i : 2 * i + 2])):
                c[at + n] = x


def right_fragments_of_rows(
    shared: Any, first_row: int, step: int, sub_tile_bytes: int = SUB_TILE_BYTES
) -> Any:
    """Load columns 16 step to 16 step + 15 (k) of 16 rows (n) as two right operands, of rows
    first_row to first_row + 7 and of the next 8."""
    lane = cute.arch.lane_idx()
    matrix, r = lane >> 3, lane & 7
    unit = (2 * step % 8) | (matrix & 1)
    at = (((matrix >> 1) << 3) + r) * LINE_BYTES + ((unit ^ r) << 4)
    return load_matrices(shared + at + first_row * LINE_BYTES + step // 4 * sub_tile_bytes)


def transposed_accumulators(
    dtype: type[Numeric], shared: Any, first_row: int, first_column: Any
) -> list[Any]:
    """Load 16 columns of 16 rows as accumulators of the transpose: 16 by 8 for 8 rows, then for
    the next 8."""
    lane = cute.arch.lane_idx()
    matrix, r = lane >> 3, lane & 7
    unit = (first_column >> 3) + (matrix & 1)
    at = (first_row + 8 * (matrix >> 1) + r) * LINE_BYTES + (((unit & 7) ^ r) << 4)
    return unpack_all(
        dtype,
        load_matrices(shared + at + (unit >> 3) * SUB_TILE_BYTES, transposed=True),
    )


def right_offsets() -> list[Any]:
    """The lane's byte offsets for `right_fragments`, for each pair of units of a sub-tile."""
    lane = cute.arch.lane_idx()
    matrix, r = lane >> 3, lane & 7
    row = ((matrix & 1) << 3) + r
    offset = row * LINE_BYTES + (((matrix >> 1) ^ r) << 4)
    return [offset ^ (unit << 4) for unit in range(0, 8, 2)]


def right_fragments(
    shared: Any, offsets: list[Any], step: int, pair: int, sub_tile_bytes: int = SUB_TILE_BYTES
) -> Any:
    """Load rows 16 step to 16 step + 15 (k) of 16 columns (n) as two right operands, of columns
    16 pair to 16 pair + 7 and of the next 8."""
    at = offsets[pair % 4] + (pair // 4) * sub_tile_bytes + step * FRAGMENT_ROWS * LINE_BYTES
    return load_matrices(shared + at, transposed=True)


# -- fragments to global memory


def store_fragments(
    dtype: type[Numeric], values: list[Any], scratch: Any, target: Any, pitch: Any, length: Any
) -> None:
    """Store a warp's accumulators of 16 rows by 64 columns to global memory, 16 bytes at a time,
    through `scratch`, 2,048 bytes of shared memory of this warp. Rows from `length` on are not
    stored. `target` is the address of the first row."""
    lane = cute.arch.lane_idx()
    row, pair = lane >> 2, lane & 3
    registers = pack_all(dtype, values)
    cute.arch.sync_warp()
    for j in range(8):
        at = scratch + row * LINE_BYTES + ((j ^ row) << 4) + (pair << 2)
        for half in range(2):
            store_shared(Int32, at + half * 8 * LINE_BYTES, [registers[2 * j + half]])
    cute.arch.sync_warp()
    row, unit = lane >> 3, lane & 7
    start = target + Int64(row) * pitch + Int64(unit * UNIT_BYTES)
    step = WARP_SIZE // 8
    for i in range(FRAGMENT_ROWS // step):
        at = row + i * step
        x = load_shared(Int32, scratch + at * LINE_BYTES + ((unit ^ (at & 7)) << 4), 4)
        store_if(at < length, start + i * step * pitch, x)


def paired_offset() -> Any:
    """Byte offset in a row of 16 elements at which this lane stores the result of `paired`."""
    pair = cute.arch.lane_idx() & 3
    return ((pair & 2) << 2) | ((pair & 1) << 4)


def paired(left: Any, right: Any) -> list[Any]:
    """Exchange fragments of two adjacent 8 by 8 matrices so that each lane has 4 neighbouring
    elements of a row, and a warp stores whole sectors."""
    odd = (cute.arch.lane_idx() & 1) != 0
    got = cute.arch.shuffle_sync_bfly(cutlass.select_(odd, left, right), offset=1)
    return [cutlass.select_(odd, got, left), cutlass.select_(odd, right, got)]


def store_units(sub_tile: Any, first_row: Int32, pair: int, registers: Sequence[Any]) -> None:
    """Store 8 rows from first_row, a multiple of 8, of units 2 pair and 2 pair + 1 of a sub-tile in
    global memory, in whole sectors; `registers` are the fragments of the two units."""
    lane = cute.arch.lane_idx()
    row, odd = lane >> 2, lane & 1
    at = row * LINE_BYTES + (((odd ^ row) << 4) ^ (pair << 5)) + ((lane & 2) << 2)
    store_global(Int32, sub_tile + (first_row * LINE_BYTES + at), paired(*registers))


@cute.jit
def store_if(condition: cutlass.Boolean, address: Int64, values: Any) -> None:
    """Store 16 bytes to global memory if `condition` holds."""
    if condition:
        store_global(Int32, address, values)
